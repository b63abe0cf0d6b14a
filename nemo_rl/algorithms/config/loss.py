"""Configuration of the losses beside the clipped policy gradient. Their algorithms' sections hold or inherit them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nemo_rl.config.base import Derived, StrictModel


class DPOLossConfig(StrictModel):
    """The loss of DPO. The section `dpo` inherits it."""

    reference_policy_kl_penalty: float = Field(default=0.05, gt=0)
    """Beta: how strongly the policy is held to the reference policy (IPO calls it tau)."""

    preference_loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """`sigmoid`: DPO (with `label_smoothing`: cDPO); `ipo`: squared distance to a fixed margin, always with average
    log-probabilities; `hinge`: SLiC; `robust`: unbiased under labels that are flipped with probability
    `label_smoothing`."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that the labels of a pair are the wrong way round, for `sigmoid` and `robust`."""

    preference_average_log_probs: bool = False
    """Compare log-probabilities per token in place of their sums (length-normalised DPO). Log-ratios are then smaller
    by the length of the answers, so that a larger beta is usual. `ipo` does so in any case."""

    sft_average_log_probs: Annotated[bool, Derived("${.preference_average_log_probs}")]
    """The same for the SFT term."""

    preference_loss_weight: float = Field(default=1.0, ge=0)
    """Weight of the preference loss."""

    sft_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of the chosen sequences; 0: none."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.preference_loss == "robust" and self.label_smoothing == 0:
            yield "label_smoothing", "preference_loss=robust needs the probability of a flipped label, e.g. 0.1"
        if self.label_smoothing > 0 and self.preference_loss in ("ipo", "hinge"):
            yield (
                "label_smoothing",
                f"has no meaning with preference_loss={self.preference_loss}; set it to 0, or preference_loss=sigmoid",
            )
        if self.preference_loss_weight == 0 and self.sft_loss_weight == 0:
            yield "preference_loss_weight", "and sft_loss_weight are both 0, so nothing would be learned; set one"


class RewardModelLossConfig(StrictModel):
    """The Bradley-Terry loss. The section `rm` inherits it."""

    use_margin: bool = False
    """Ask the chosen sequence to score higher than the rejected one by the margin that the row states."""


class ValueLossConfig(StrictModel):
    """The loss of PPO's value model."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """Bound on how far a value moves from the one its sample was scored with before its error is taken; null: none."""

    scale: float = Field(default=0.5, gt=0)
    """Factor on the mean squared error."""


class DistillationLossConfig(StrictModel):
    """The loss of on-policy distillation."""

    kl_type: Literal["forward", "reverse", "mixed"] = "mixed"
    """`forward`: KL(teacher || student); `reverse`: KL(student || teacher); `mixed`: both, see `mixed_kl_weight`."""

    mixed_kl_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of the forward KL in `mixed`; the reverse KL has the rest."""

    zero_outside_topk: bool = False
    """false: teacher and student are compared as distributions over the teacher's largest logits alone. true: the
    student is taken whole, and the teacher as having nothing elsewhere, so that the student's mass there costs."""
