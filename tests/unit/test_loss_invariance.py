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
from tests.unit.algorithms.losses.batches import random_rows

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


class Loss:
    """-logprob, put together as `formula(logprobs, mask, global_valid_toks)` says."""

    inputs_type = LossInputs

    def __init__(self, formula: Formula) -> None:
        self.formula = formula

    def __call__(
        self, logprobs: Tensor, inputs: LossInputs, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        loss = self.formula(logprobs, inputs.token_mask * inputs.sample_mask[:, None], global_valid_toks)
        return loss, {"metric": loss.detach()}


def right(logprobs: Tensor, mask: Tensor, toks: Tensor) -> Tensor:
    return -torch.where(mask > 0, logprobs, 0.0).sum() / toks.clamp(min=1.0)


SPLIT = Partition(order=[2, 0, 1], cuts=frozenset({1, 2}), padding=1)
BATCH = random_rows(3, seed=0)
CHECKS: dict[str, Callable[[Loss], None]] = {
    "partition": lambda loss: check_partition(loss, *BATCH, SPLIT),
    "empty": lambda loss: check_empty(loss, *BATCH),
    "masks": lambda loss: check_masks(loss, *BATCH),
    "bad values": lambda loss: check_bad_values(loss, *BATCH, columns=[]),
}
WRONG: list[tuple[str, str, Formula]] = [
    ("partition", "mean of the micro-batch", lambda logprobs, mask, toks: right(logprobs, mask, mask.sum())),
    ("partition", "centred on it", lambda logprobs, mask, toks: right(logprobs - logprobs.mean(), mask, toks)),
    ("partition", "plus a constant", lambda logprobs, mask, toks: right(logprobs, mask, toks) + 1.0),
    ("empty", "plus a constant", lambda logprobs, mask, toks: right(logprobs, mask, toks) + 1.0),
    ("masks", "multiplied by the mask", lambda logprobs, mask, toks: -(logprobs * mask).sum() / toks.clamp(min=1.0)),
    ("bad values", "clamped", lambda logprobs, mask, toks: right(logprobs.clamp(-100, 100), mask, toks)),
]


@pytest.mark.parametrize(("check", "mistake", "formula"), WRONG)
def test_a_wrong_loss_is_caught(check: str, mistake: str, formula: Formula):
    CHECKS[check](Loss(right))
    with pytest.raises(AssertionError):
        CHECKS[check](Loss(formula))


def test_the_loss_and_the_test_of_the_documentation_work():
    guide = (Path(__file__).parents[2] / "docs" / "adding-a-loss.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "adding_a_loss"}
    for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(code.replace("from my_package.focal import FocalLoss\n", ""), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
