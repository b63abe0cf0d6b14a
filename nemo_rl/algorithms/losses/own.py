"""A loss of the user's, by `loss_fn.type` or as an argument of a run: made, and checked before anything starts."""

import inspect
from typing import Any

from nemo_rl.algorithms.config.loop import LossConfig
from nemo_rl.types import LossByName, LossFunction, LossInputs
from nemo_rl.utils.registry import import_object

_OF_NEMO_RL = "next_token_logprobs"  # a loss with this argument has NeMo RL's form


def chosen_loss(given: LossFunction | None, cfg: LossConfig, section: Any = None) -> LossFunction | None:
    """The argument of a run, or the loss that `cfg` names; None: the loss of the algorithm.

    `section`: the settings of that loss, where they are not in `cfg`.

    Raises ValueError, with the key, for a loss that cannot be made or called.
    """
    if given is None:
        return None if cfg.type is None else make_loss(cfg, cfg if section is None else section)
    if cfg.type is not None:
        raise ValueError(f"loss_fn.type={cfg.type}: the run has a loss as its argument, too; leave one of them out")
    return _checked(given, "the argument loss_fn", cfg.inputs_type)


def make_loss(cfg: LossConfig, section: Any) -> LossFunction:
    """The loss that `cfg.type` names, made with `cfg.kwargs`; `section` goes to a parameter `cfg`.

    Raises ValueError as `chosen_loss`.
    """
    assert cfg.type is not None
    kind, what = import_object(cfg.type, "loss"), f"loss_fn.type: {cfg.type!r}"
    if not isinstance(kind, type):
        raise ValueError(f"{what} is no class (docs/adding-a-loss.md)")
    takes_section = "cfg" in inspect.signature(kind).parameters and "cfg" not in cfg.kwargs
    try:
        loss = kind(**({"cfg": section} if takes_section else {}), **cfg.kwargs)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"{what} cannot be made with loss_fn.kwargs={cfg.kwargs}: {error!r}") from error
    return _checked(loss, what, cfg.inputs_type)


def _checked(loss: Any, what: str, usual_inputs: type[LossInputs]) -> LossFunction:
    call: Any = loss  # what a class of the user's has is seen only here
    if not callable(loss):
        raise ValueError(f"{what} has no __call__(outputs, inputs, global_valid_seqs, global_valid_toks)")
    parameters = inspect.signature(loss).parameters
    has_own = hasattr(loss, "inputs_type")
    if _OF_NEMO_RL in parameters:
        return LossByName(call, call.inputs_type if has_own else usual_inputs)
    if "next_token_logits" in parameters or "logits" in parameters:
        raise ValueError(f"{what} reads logits; take {_OF_NEMO_RL}, or see docs/adding-a-loss.md")
    if not has_own or not isinstance(call.inputs_type, type) or not issubclass(call.inputs_type, LossInputs):
        raise ValueError(f"{what} has no inputs_type; set it to nemo_rl.types.LossInputs or a class derived from it")
    try:
        inspect.signature(loss).bind(*range(4))
    except TypeError as error:
        raise ValueError(
            f"{what} is called as (outputs, inputs, global_valid_seqs, global_valid_toks): {error}"
        ) from error
    return call
