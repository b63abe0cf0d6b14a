import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from nemo_rl.algorithms.config.distillation import DistillationLossConfig
from nemo_rl.algorithms.losses.distillation import LOG_OUTSIDE, DistillationInputs, DistillationLoss
from tests.loss_invariance import global_counts, with_fields
from tests.unit.algorithms.losses.batches import all_valid, evaluated, random_rows

VOCAB, K = 11, 4
Mode = Literal["renormalised", "zero_outside", "whole"]
MODES: list[Mode] = ["renormalised", "zero_outside", "whole"]
KINDS = [*((mode, "mixed", 0.3) for mode in MODES), ("whole", "forward", 1.0), ("zero_outside", "reverse", 0.0)]


def make_loss(mode: Mode, **changes: object) -> DistillationLoss:
    cfg = DistillationLossConfig.model_validate({"zero_outside_topk": mode == "zero_outside"} | changes)
    return DistillationLoss(cfg)


def random_logits(num_rows: int, seed: int) -> tuple[Tensor, Tensor, DistillationInputs]:
    """Logits of student and teacher [B, S, VOCAB], and inputs without the teacher's."""
    generator = torch.Generator().manual_seed(seed)
    _, rows = random_rows(num_rows, seed)
    shape: Any = {"size": (*rows.token_mask.shape, VOCAB), "generator": generator, "dtype": torch.float64}
    student, teacher = (2 * torch.randn(**shape) for _ in range(2))
    inputs = DistillationInputs(**vars(rows), teacher_topk=torch.zeros(rows.token_mask.shape))
    return student.requires_grad_(), teacher, inputs


def head_outputs(
    student: Tensor, teacher: Tensor, inputs: DistillationInputs, mode: Mode
) -> tuple[Tensor, DistillationInputs]:
    """The outputs of the student's head, and inputs with the teacher's, in the student's dtype."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    if mode == "whole":
        kls = (log_q.exp() * (log_q - log_p)).sum(-1), (log_p.exp() * (log_p - log_q)).sum(-1)
        return torch.stack(kls, dim=-1), inputs
    values, indices = teacher.topk(K, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    topk = torch.cat([values, indices.to(values.dtype)], dim=-1)
    return torch.cat([log_p.gather(-1, indices), entropy], dim=-1), with_fields(inputs, teacher_topk=topk)


def random_batch(num_rows: int, seed: int, mode: Mode) -> tuple[Tensor, DistillationInputs]:
    student, teacher, inputs = random_logits(num_rows, seed)
    outputs, inputs = head_outputs(student.detach(), teacher, inputs, mode)
    inputs = with_fields(inputs, teacher_topk=inputs.teacher_topk.float())
    return outputs.float().requires_grad_(), inputs


@pytest.mark.parametrize(("mode", "kl_type", "weight"), KINDS)
def test_value_and_gradient_are_those_of_the_two_distributions(mode: Mode, kl_type: str, weight: float):
    student, teacher, inputs = random_logits(3, 1)
    outputs, topk_inputs = head_outputs(student, teacher, inputs, mode)
    counts = global_counts(inputs)
    loss, metrics = make_loss(mode, kl_type=kl_type, mixed_kl_weight=0.3)(outputs, topk_inputs, *counts)
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    values, indices = teacher.topk(K, dim=-1)
    if mode == "renormalised":  # as if there were no other tokens at all
        log_p, log_q = student.gather(-1, indices).log_softmax(-1), values.log_softmax(-1)
    elif mode == "zero_outside":
        log_q = torch.full_like(log_p, LOG_OUTSIDE).scatter(-1, indices, values.log_softmax(-1))
    q = torch.where(log_q == LOG_OUTSIDE, 0.0, log_q.exp())
    kls = {"forward_kl": q * (log_q - log_p), "reverse_kl": log_p.exp() * (log_p - log_q)}
    mask = inputs.token_mask * inputs.sample_mask[:, None]
    means = {name: (kl.sum(-1) * mask).sum() / counts[1] for name, kl in kls.items()}
    expected = weight * means["forward_kl"] + (1 - weight) * means["reverse_kl"]
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    (got,), (want,) = torch.autograd.grad(loss, student), torch.autograd.grad(expected, student)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert {name: metrics[name].item() for name in means} == pytest.approx({k: v.item() for k, v in means.items()})


def test_metrics_by_hand():
    """One row, one loss token of two in the step: teacher 1/2, 1/2 of tokens 3 and 0; student 1/4, 1/8 of them."""
    log_p = torch.tensor([0.25, 0.125]).log()
    outputs = torch.zeros(1, 2, 3)
    outputs[0, 1] = torch.tensor([*log_p, 1.7])
    inputs = all_valid(DistillationInputs, 1, 2, teacher_topk=torch.tensor([[[0.0] * 4, [5.0, 5.0, 3.0, 0.0]]]))
    inputs.token_mask[0, 0] = 0.0
    _, _, metrics = evaluated(make_loss("renormalised"), outputs.requires_grad_(), inputs, 2.0, 2.0)
    forward = 0.5 * math.log(0.5 / (2 / 3)) + 0.5 * math.log(0.5 / (1 / 3))
    reverse = 2 / 3 * math.log(2 / 3 / 0.5) + 1 / 3 * math.log(1 / 3 / 0.5)
    want = {"forward_kl": forward / 2, "reverse_kl": reverse / 2, "loss": (forward + reverse) / 4}
    assert {name: metrics[name] for name in want} == pytest.approx(want, rel=1e-5)
    rest = {"teacher_entropy": math.log(2) / 2, "student_entropy": 0.85, "student_topk_mass": 0.375 / 2}
    rest |= {"top1_agreement": 0.5, "num_valid_samples": 1.0}
    assert {name: metrics[name] for name in metrics.keys() - want.keys()} == pytest.approx(rest)
