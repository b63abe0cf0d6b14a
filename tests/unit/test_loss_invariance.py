"""The checks of `tests.loss_invariance` find what they are for."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl.types import LossInputs, LossMetrics
from tests.loss_invariance import Partition, check_bad_values, check_empty, check_masks, check_partition

Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Loss:
    """-logprob, put together as `formula(logprobs, mask, global_valid_seqs, global_valid_toks)` says."""

    inputs_type = LossInputs

    def __init__(self, formula: Formula) -> None:
        self.formula = formula

    def __call__(
        self, logprobs: Tensor, inputs: LossInputs, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        mask = inputs.token_mask * inputs.sample_mask[:, None]
        loss = self.formula(logprobs, mask, global_valid_seqs, global_valid_toks)
        return loss, {"metric": loss.detach()}


def right(logprobs: Tensor, mask: Tensor, seqs: Tensor, toks: Tensor) -> Tensor:
    return -torch.where(mask > 0, logprobs, 0.0).sum() / toks.clamp(min=1.0)


def mean_of_the_micro_batch(logprobs: Tensor, mask: Tensor, seqs: Tensor, toks: Tensor) -> Tensor:
    return -torch.where(mask > 0, logprobs, 0.0).sum() / mask.sum().clamp(min=1.0)


def centred_on_the_micro_batch(logprobs: Tensor, mask: Tensor, seqs: Tensor, toks: Tensor) -> Tensor:
    return right(logprobs - logprobs.mean(), mask, seqs, toks)


def multiplied_by_the_mask(logprobs: Tensor, mask: Tensor, seqs: Tensor, toks: Tensor) -> Tensor:
    return -(logprobs * mask).sum() / toks.clamp(min=1.0)


def clamped(logprobs: Tensor, mask: Tensor, seqs: Tensor, toks: Tensor) -> Tensor:
    return right(logprobs.clamp(-100, 100), mask, seqs, toks)


def plus_a_constant(logprobs: Tensor, mask: Tensor, seqs: Tensor, toks: Tensor) -> Tensor:
    return right(logprobs, mask, seqs, toks) + 1.0


def batch() -> tuple[Tensor, LossInputs]:
    logprobs = torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, 0.0], [0.0, -4.0, -0.5]], requires_grad=True)
    inputs = LossInputs(
        input_ids=torch.zeros(3, 3, dtype=torch.int64),
        token_mask=torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 1.0]]),
        sample_mask=torch.tensor([1.0, 1.0, 0.0]),
    )
    return logprobs, inputs


SPLIT = Partition(order=[2, 0, 1], cuts=frozenset({1, 2}), padding=1)


@pytest.mark.parametrize(
    ("formula", "caught_by"),
    [
        (mean_of_the_micro_batch, "check_partition"),
        (centred_on_the_micro_batch, "check_partition"),
        (plus_a_constant, "check_partition"),
        (plus_a_constant, "check_empty"),
        (multiplied_by_the_mask, "check_masks"),
        (clamped, "check_bad_values"),
    ],
)
def test_a_wrong_loss_is_caught(formula: Formula, caught_by: str):
    def check(loss_fn: Loss) -> None:
        {
            "check_partition": lambda: check_partition(loss_fn, *batch(), SPLIT),
            "check_empty": lambda: check_empty(loss_fn, *batch()),
            "check_masks": lambda: check_masks(loss_fn, *batch()),
            "check_bad_values": lambda: check_bad_values(loss_fn, *batch(), columns=[]),
        }[caught_by]()

    check(Loss(right))
    with pytest.raises(AssertionError):
        check(Loss(formula))


def test_the_loss_and_the_test_of_the_documentation_work():
    guide = (Path(__file__).parents[2] / "docs" / "adding-a-loss.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "adding_a_loss"}
    for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(code, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
