"""KL between teacher and student at the tokens that the student sampled (on-policy distillation).

    forward  KL(teacher || student): the student covers everything the teacher may say
    reverse  KL(student || teacher): the student keeps to what the teacher is likely to say
    mixed    w forward + (1 - w) reverse

Agarwal et al. 2023, "On-Policy Distillation of Language Models" (GKD), arXiv 2306.13649; its generalised
Jensen-Shannon divergence interpolates in another way.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nemo_rl.algorithms.config.distillation import DistillationLossConfig
from nemo_rl.algorithms.losses.aggregate import nan_unless_finite, token_mean
from nemo_rl.types import LossInputs, LossMetrics

LOG_OUTSIDE = -100.0
"""The teacher's log-probability outside its top k; with -inf the reverse KL would be infinite."""


@dataclass(kw_only=True)
class DistillationInputs(LossInputs):
    """The teacher's outputs for each token."""

    optional: ClassVar[frozenset[str]] = frozenset({"teacher_topk"})

    # [B, S, 2K]: its K largest logits, then their token ids. Zeros [B, S] if the student's head compares whole
    # distributions, and no row has the column.
    teacher_topk: Tensor


class DistillationLoss:
    """A `nemo_rl.types.LossFunction`: the mean KL of the loss tokens of the optimizer step.

    Over the teacher's k largest logits, `outputs` [B, S, k + 1] are the student's log-probabilities of these tokens and
    its entropy; `inputs.teacher_topk` [B, S, 2k] are the teacher's logits and the token ids. The teacher's distribution
    is softmax(logits) over these k. The student's is

    - its softmax over these k (`zero_outside_topk: false`), or
    - its whole distribution (`true`); the teacher's log-probability elsewhere is then `LOG_OUTSIDE`.

    Over the whole vocabulary, `outputs` [B, S, 2] are forward and reverse KL, and rows have no `teacher_topk`.

    Values at masked positions are ignored; a non-finite value of a loss token makes the loss NaN; a micro-batch
    without a loss token gives 0 with a graph.
    """

    inputs_type = DistillationInputs

    def __init__(self, cfg: DistillationLossConfig) -> None:
        self.cfg = cfg

    def __call__(
        self, outputs: Tensor, inputs: DistillationInputs, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, LossMetrics]:
        """Metrics: loss, both KLs, number of sequences; over a top k also the entropies in nats, of the teacher over
        the k tokens and of the student over all, the student's mass on the k tokens, and whether the teacher's first
        token is also, among these, the student's."""
        assert outputs.shape[:2] == inputs.token_mask.shape, (outputs.shape, inputs.token_mask.shape)
        mask = inputs.token_mask * inputs.sample_mask[:, None]
        valid = mask[..., None] > 0
        outputs = torch.where(valid, outputs, 0.0)
        used = [outputs]
        extra: dict[str, Tensor] = {}
        if inputs.teacher_topk.ndim == 2:
            forward, reverse = outputs.unbind(-1)
        else:
            k = outputs.shape[-1] - 1
            assert inputs.teacher_topk.shape[-1] == 2 * k, (inputs.teacher_topk.shape, outputs.shape)
            used.append(torch.where(valid, inputs.teacher_topk, 0.0))
            # Softmax over these k: the teacher's mass elsewhere does not reach the student's workers.
            teacher, student, entropy = used[-1][..., :k].log_softmax(-1), outputs[..., :k], outputs[..., k]
            if self.cfg.zero_outside_topk:
                # KL(p || q) = -H(p) - sum p log q, where log q is the constant LOG_OUTSIDE outside of the top k.
                probabilities = student.exp()
                within = (probabilities * teacher).sum(-1)
                outside = (1.0 - probabilities.sum(-1)) * LOG_OUTSIDE
                forward, reverse = _kl(teacher, student), -entropy - within - outside
            else:
                renormalised = student.log_softmax(-1)
                forward, reverse = _kl(teacher, renormalised), _kl(renormalised, teacher)
            with torch.no_grad():
                extra = {
                    "teacher_entropy": torch.special.entr(teacher.exp()).sum(-1),
                    "student_entropy": entropy,
                    "student_topk_mass": student.exp().sum(-1),
                    "top1_agreement": (student.argmax(-1) == 0).to(student.dtype),  # the teacher's first token is at 0
                }
        # Divided by the tokens of the whole optimizer step, so that micro-batches and ranks add up to one mean.
        weight = {"forward": 1.0, "reverse": 0.0, "mixed": self.cfg.mixed_kl_weight}[self.cfg.kl_type]
        loss = token_mean(weight * forward + (1.0 - weight) * reverse, mask, global_valid_toks)
        loss = nan_unless_finite(loss, used)
        per_token = {"forward_kl": forward, "reverse_kl": reverse, **extra}
        metrics = {name: token_mean(values, mask, global_valid_toks) for name, values in per_token.items()}
        metrics |= {"loss": loss, "num_valid_samples": inputs.sample_mask.sum()}
        return loss, {name: value.detach() for name, value in metrics.items()}


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over the last dimension."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
