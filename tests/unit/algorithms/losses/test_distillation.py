import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from nemo_rl.algorithms.config.distillation import DistillationLossConfig
from nemo_rl.algorithms.losses.distillation import LOG_OUTSIDE, DistillationInputs, DistillationLoss
from tests.loss_invariance import global_counts, with_fields
from tests.unit.algorithms.losses.batches import random_rows

VOCAB, K = 11, 4
Mode = Literal["renormalised", "zero_outside", "whole"]
MODES: list[Mode] = ["renormalised", "zero_outside", "whole"]


def make_loss(mode: Mode, **changes: object) -> DistillationLoss:
    return DistillationLoss(
        DistillationLossConfig.model_validate({"zero_outside_topk": mode == "zero_outside"} | changes)
    )


def random_logits(num_rows: int, seed: int) -> tuple[Tensor, Tensor, DistillationInputs]:
    """Logits of student and teacher [B, S, VOCAB], and inputs without the teacher's."""
    generator = torch.Generator().manual_seed(seed)
    _, rows = random_rows(num_rows, seed)
    student, teacher = (
        2 * torch.randn(*rows.token_mask.shape, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    inputs = DistillationInputs(**vars(rows), teacher_topk=torch.zeros(rows.token_mask.shape))
    return student.requires_grad_(), teacher, inputs


def head_outputs(
    student: Tensor, teacher: Tensor, inputs: DistillationInputs, mode: Mode, k: int = K
) -> tuple[Tensor, DistillationInputs]:
    """What the heads of student and teacher say, in the student's dtype."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    if mode == "whole":
        kls = (log_q.exp() * (log_q - log_p)).sum(-1), (log_p.exp() * (log_p - log_q)).sum(-1)
        return torch.stack(kls, dim=-1), inputs
    values, indices = teacher.topk(k, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    topk = torch.cat([values, indices.to(values.dtype)], dim=-1)
    return torch.cat([log_p.gather(-1, indices), entropy], dim=-1), with_fields(inputs, teacher_topk=topk)


def random_batch(num_rows: int, seed: int, mode: Mode) -> tuple[Tensor, DistillationInputs]:
    student, teacher, inputs = random_logits(num_rows, seed)
    outputs, inputs = head_outputs(student.detach(), teacher, inputs, mode)
    inputs = with_fields(inputs, teacher_topk=inputs.teacher_topk.float())
    return outputs.float().requires_grad_(), inputs


def assert_equal(loss: Tensor, expected: Tensor, student: Tensor) -> None:
    """As value and as gradient."""
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    (got,), (want,) = torch.autograd.grad(loss, student), torch.autograd.grad(expected, student)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kl_type", "weight"), [("forward", 1.0), ("reverse", 0.0), ("mixed", 0.3)])
def test_with_the_whole_vocabulary_it_is_the_kl_of_two_softmaxes(mode: Mode, kl_type: str, weight: float):
    student, teacher, inputs = random_logits(3, 1)
    outputs, inputs = head_outputs(student, teacher, inputs, mode, k=VOCAB)
    counts = global_counts(inputs)
    loss, metrics = make_loss(mode, kl_type=kl_type, mixed_kl_weight=0.3)(outputs, inputs, *counts)
    valid = inputs.token_mask * inputs.sample_mask[:, None] > 0
    log_p, log_q = student[valid].log_softmax(-1), teacher[valid].log_softmax(-1)
    forward = torch.nn.functional.kl_div(log_p, log_q, reduction="sum", log_target=True) / counts[1]
    reverse = torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True) / counts[1]
    expected = weight * forward + (1 - weight) * reverse
    assert_equal(loss, expected, student)
    assert metrics["forward_kl"].item() == pytest.approx(forward.item())
    assert metrics["reverse_kl"].item() == pytest.approx(reverse.item())
    assert metrics["num_valid_samples"].item() == 2.0


def test_both_are_renormalised_over_the_teachers_largest_logits():
    student, teacher, inputs = random_logits(3, 2)
    outputs, topk_inputs = head_outputs(student, teacher, inputs, "renormalised")
    loss, _ = make_loss("renormalised")(outputs, topk_inputs, *global_counts(inputs))
    values, indices = teacher.topk(K, dim=-1)
    # The same as if there were no other tokens at all.
    small_outputs, small_inputs = head_outputs(student.gather(-1, indices), values, inputs, "whole")
    small, _ = make_loss("whole")(small_outputs, small_inputs, *global_counts(inputs))
    assert_equal(loss, small, student)


def test_a_teacher_of_nothing_outside_is_compared_with_the_whole_student():
    student, teacher, inputs = random_logits(3, 3)
    outputs, topk_inputs = head_outputs(student, teacher, inputs, "zero_outside")
    counts = global_counts(inputs)
    loss, _ = make_loss("zero_outside", mixed_kl_weight=0.25)(outputs, topk_inputs, *counts)
    values, indices = teacher.topk(K, dim=-1)
    log_p = student.log_softmax(-1)
    log_q = torch.full_like(log_p, LOG_OUTSIDE).scatter(-1, indices, values.log_softmax(-1))
    q = torch.where(log_q == LOG_OUTSIDE, 0.0, log_q.exp())
    per_token = 0.25 * (q * (log_q - log_p)).sum(-1) + 0.75 * (log_p.exp() * (log_p - log_q)).sum(-1)
    expected = (per_token * inputs.token_mask * inputs.sample_mask[:, None]).sum() / counts[1]
    assert_equal(loss, expected, student)


def test_metrics_by_hand():
    """One row, one loss token of two in the step: teacher 1/2, 1/2 of tokens 3 and 0; student 1/4, 1/8 of them."""
    log_p = torch.tensor([0.25, 0.125]).log()
    outputs = torch.zeros(1, 2, 3)
    outputs[0, 1] = torch.tensor([*log_p, 1.7])
    inputs = DistillationInputs(
        input_ids=torch.zeros(1, 2, dtype=torch.int64),
        token_mask=torch.tensor([[0.0, 1.0]]),
        sample_mask=torch.ones(1),
        teacher_topk=torch.tensor([[[0.0] * 4, [5.0, 5.0, 3.0, 0.0]]]),
    )
    _, metrics = make_loss("renormalised")(outputs, inputs, torch.tensor(2.0), torch.tensor(2.0))
    forward = 0.5 * math.log(0.5 / (2 / 3)) + 0.5 * math.log(0.5 / (1 / 3))
    reverse = 2 / 3 * math.log(2 / 3 / 0.5) + 1 / 3 * math.log(1 / 3 / 0.5)
    assert {name: value.item() for name, value in metrics.items()} == {
        "forward_kl": pytest.approx(forward / 2, rel=1e-5),
        "reverse_kl": pytest.approx(reverse / 2, rel=1e-5),
        "loss": pytest.approx((forward + reverse) / 4, rel=1e-5),
        "teacher_entropy": pytest.approx(math.log(2) / 2),
        "student_entropy": pytest.approx(0.85),
        "student_topk_mass": pytest.approx(0.375 / 2),
        "top1_agreement": 0.5,
        "num_valid_samples": 1.0,
    }
