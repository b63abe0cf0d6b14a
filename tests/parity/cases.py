"""Which of our losses is which of TRL's, with the options of both, and how far apart they come out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.config.supervised import DPOLossConfig, RewardModelLossConfig
from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.algorithms.losses.preference import DPOLoss, PreferenceLoss
from nemo_rl.types import LossFunction
from tests.parity import ours
from tests.parity.ours import LONGEST_COMPLETION

Side = Callable[[], tuple[float, dict[str, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One loss. `trl` and `settings` are what a user would write, for the table."""

    trl: str
    settings: str
    ours: Side
    theirs: Side
    is_same_value: bool = True  # False: only the gradients are equal


@dataclass(frozen=True, kw_only=True)
class Parity:
    loss: float  # TRL's
    loss_error: float  # |ours - TRL's| / |TRL's|
    gradient_error: float  # the same of the whole gradient, as one vector, in the Euclidean norm


def compare(case: Case) -> Parity:
    loss, gradients = case.ours()
    trl_loss, trl_gradients = case.theirs()
    assert gradients.keys() == trl_gradients.keys(), gradients.keys() ^ trl_gradients.keys()
    mine, trl = (torch.cat([g[name].flatten().double() for name in trl_gradients]) for g in (gradients, trl_gradients))
    error = float((mine - trl).norm() / trl.norm())
    return Parity(loss=trl_loss, loss_error=abs(loss - trl_loss) / abs(trl_loss), gradient_error=error)


def _by_trl(trainer: str, *options: Any, **more: Any) -> tuple[float, dict[str, Tensor]]:
    """A function of theirs.py. Importing TRL takes seconds, which the collection of other tests need not."""
    from tests.parity import theirs

    return getattr(theirs, trainer)(*options, **more)


COLUMNS = ("loss", "TRL", "ours", "value", "error of the loss", "error of the gradient")


def named(name: str, case: Case) -> str:
    """The first columns of its row."""
    return f"| {name} | {case.trl} | {case.settings} |"


def row(name: str, case: Case, parity: Parity) -> str:
    """Markdown."""
    loss_error = f"{parity.loss_error:.0e}" if case.is_same_value else "another value"
    return f"{named(name, case)} {parity.loss:.4f} | {loss_error} | {parity.gradient_error:.0e} |"


def _written(options: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={str(value).lower()}`" for name, value in options.items()) or "defaults"


def _ours(loss_fn: LossFunction, kind: str = "policy", temperature: float = 1.0) -> Side:
    return partial(ours.loss_and_gradient, loss_fn, kind, temperature)


def _grpo(options: dict[str, Any], settings: dict[str, Any], *, is_same_value: bool = True) -> Case:
    # TRL does not clamp the divergence, and its default is none at all. Left out of the table.
    unclamped = {"kl_input_clamp_value": None, "kl_output_clamp_value": None}
    kl = unclamped if "reference_policy_kl_penalty" in settings else {"reference_policy_kl_penalty": 0.0}
    loss_fn = ClippedPGLoss(ClippedPGLossConfig.model_validate(settings | kl))
    return Case(
        trl=_written(options),
        settings=_written(settings),
        ours=_ours(loss_fn, temperature=ours.TEMPERATURE),
        theirs=partial(_by_trl, "grpo", options),
        is_same_value=is_same_value,
    )


def _dpo(options: dict[str, Any], settings: dict[str, Any], *, pair_by_pair: bool = False) -> Case:
    settings = {"reference_policy_kl_penalty": options["beta"]} | settings
    cfg = DPOLossConfig.model_validate({"sft_average_log_probs": False} | settings)
    return Case(
        trl=_written(options) + (", pair by pair" if pair_by_pair else ""),
        settings=_written(settings),
        ours=_ours(DPOLoss(cfg)),
        theirs=partial(_by_trl, "dpo", options, pair_by_pair=pair_by_pair),
    )


def _reward(use_margin: bool) -> Case:
    return Case(
        trl="margin column" if use_margin else "defaults",
        settings=_written({"use_margin": use_margin}),
        ours=_ours(PreferenceLoss(RewardModelLossConfig(use_margin=use_margin)), kind="reward"),
        theirs=partial(_by_trl, "reward", {}, with_margin=use_margin),
    )


TOKENS, SEQUENCES = {"token_level_loss": True}, {"token_level_loss": False}
DR_GRPO = {"length_normalizer": LONGEST_COMPLETION}
KL, TRL_KL = {"reference_policy_kl_penalty": 0.1}, {"beta": 0.1, "use_bias_correction_kl": False}
# The gradient of ratio * k3 is ratio * log(policy / reference) * grad log policy, which is that of k2 with the ratio as
# a weight without gradient.
UNBIASED_KL = KL | {"reference_policy_kl_type": "k2", "use_on_policy_kl_approximation": True}
TRL_UNBIASED_KL = {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True}
GSPO = {"sequence_level_importance_ratios": True}
CISPO = {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.28}
BETA, SMOOTHED = {"beta": 0.5}, {"label_smoothing": 0.1}
TRL_WITH_SFT = BETA | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}
NORMALISED = {"beta": 5.0, "loss_type": ["sigmoid_norm"]}
KINDS = {"dapo": TOKENS, "grpo": SEQUENCES, "dr_grpo": DR_GRPO, "bnpo": TOKENS}

CASES: dict[str, Case] = {
    **{f"GRPO {kind}": _grpo({"loss_type": kind}, settings) for kind, settings in KINDS.items()},
    **{f"GRPO {kind}, KL": _grpo({"loss_type": kind} | TRL_KL, settings | KL) for kind, settings in KINDS.items()},
    "GRPO dapo, unbiased KL": _grpo(TRL_UNBIASED_KL, TOKENS | UNBIASED_KL, is_same_value=False),
    "GRPO clip-higher": _grpo({"loss_type": "dapo", "epsilon_high": 0.28}, TOKENS | {"ratio_clip_max": 0.28}),
    "GRPO two-sided clip": _grpo({"loss_type": "dapo", "delta": 1.3}, TOKENS | {"ratio_clip_c": 1.3}),
    "GRPO sequence ratios": _grpo({"loss_type": "grpo", "importance_sampling_level": "sequence"}, SEQUENCES | GSPO),
    "GRPO cispo": _grpo({"loss_type": "cispo", "epsilon_high": 1.28}, TOKENS | CISPO),
    "SFT": Case(trl="defaults", settings="defaults", ours=_ours(NLLLoss()), theirs=partial(_by_trl, "sft", {})),
    "DPO sigmoid": _dpo(BETA | {"loss_type": ["sigmoid"]}, {}),
    "DPO sigmoid, normalised": _dpo(NORMALISED, {"preference_average_log_probs": True}),
    "DPO ipo": _dpo(BETA | {"loss_type": ["ipo"]}, {"preference_loss": "ipo"}),
    "DPO hinge": _dpo(BETA | {"loss_type": ["hinge"]}, {"preference_loss": "hinge"}),
    "DPO robust": _dpo(BETA | {"loss_type": ["robust"]} | SMOOTHED, {"preference_loss": "robust"} | SMOOTHED),
    "cDPO": _dpo(BETA | {"loss_type": ["aot"]} | SMOOTHED, SMOOTHED, pair_by_pair=True),
    "DPO with SFT": _dpo(TRL_WITH_SFT, {"sft_loss_weight": 0.3, "sft_average_log_probs": True}, pair_by_pair=True),
    "reward model": _reward(use_margin=False),
    "reward model, margin": _reward(use_margin=True),
}
