"""Advantages that differ by token: the KL to the reference policy in the reward, and whitening over a whole batch.

Both run on the policy's workers, which have the log-probabilities. Tensors are [..., S] float32 unless said.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.losses.divergence import reference_kl
from nemo_rl.algorithms.plan.advantages import NO_BOUNDS


@dataclass(frozen=True)
class KLInReward:
    """A `nemo_rl.types.TokenAdvantages`: the KL to the reference policy charged to each token's reward, then whitening.

    The input is the advantage of `reinforce_plus_plus(..., kl_in_reward=True)`, repeated over the tokens of a sample.
    """

    loss_cfg: ClippedPGLossConfig
    eps: float
    bounds: tuple[float, float] = NO_BOUNDS

    def adjust(self, columns: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
        """A_t - penalty * (sum of the KL over tokens t, t+1, ...); 0 where masked.

        The KL is a negative reward of each token, and a token is responsible for its own and all later rewards
        (arXiv 2501.03262, section 3, undiscounted).
        """
        # Of the policy before the step, without gradient: this KL is part of the reward, and the reward is given.
        kl = reference_kl(columns["prev_logprobs"], columns["reference_policy_logprobs"], self.loss_cfg)
        # Summed from the end: flipping twice turns a sum over earlier tokens into one over later tokens.
        kl_to_go = torch.where(mask > 0, kl, 0.0).flip(-1).cumsum(-1).flip(-1)
        advantages = columns["advantages"] - self.loss_cfg.reference_policy_kl_penalty * kl_to_go
        return {"advantages": torch.where(mask > 0, advantages, 0.0)}

    def sums(self, advantages: Tensor, mask: Tensor) -> Tensor:
        return whitening_sums(advantages, mask)

    def finish(self, advantages: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
        return whiten(advantages, mask, sums, self.eps).clamp(*self.bounds)


def whitening_sums(advantages: Tensor, mask: Tensor) -> Tensor:
    """float64 [3]: count, sum and sum of squares over the tokens of `mask`; they add up over samples and ranks."""
    valid = mask > 0
    # float64: the variance is a small difference of two sums over millions of tokens.
    values = torch.where(valid, advantages, 0.0).double()
    return torch.stack([valid.sum().double(), values.sum(), values.square().sum()])


def whiten(advantages: Tensor, mask: Tensor, sums: Tensor, eps: float) -> Tensor:
    """(A - mean) / (std + eps) with the statistics of the whole batch, `sums` from `whitening_sums`. [..., S].

    0 where masked. All zeros when fewer than two tokens were counted or they have no variance.
    """
    count, total, squares = sums.double().unbind()
    mean = total / count.clamp(min=1.0)
    variance = (squares - total * mean) / (count - 1.0).clamp(min=1.0)
    # One pass leaves a rounding error of about 1e-16 of the mean square; a variance that small is noise, not signal.
    noise = 1e-14 * squares / count.clamp(min=1.0)
    std = variance.clamp(min=0.0).sqrt()
    # eps bounds the scale but would still blow noise up, so no variance means no advantage.
    scale = torch.where((count >= 2) & (variance > noise), 1.0 / (std + eps), 0.0)
    whitened = ((advantages.double() - mean) * scale).to(advantages.dtype)
    return torch.where(mask > 0, whitened, 0.0)
