"""Generalised advantage estimation: advantages of tokens, from rewards of samples and values of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_rl.algorithms.advantages import whiten, whitening_sums
from nemo_rl.algorithms.config import ClippedPGLossConfig
from nemo_rl.algorithms.losses.kl import calculate_kl


def generalized_advantages(rewards: Tensor, values: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Advantages of the steps of one episode (arXiv 1506.02438, eq. 16), float64 [N].

        A_t = delta_t + gamma * lambda * A_{t+1}        delta_t = r_t + gamma * V_{t+1} - V_t

    `rewards` [N] of each step, `values` [N] of the state before it. Nothing follows the last step: an answer that was
    cut off by a limit ends there too, as nobody has judged how it would have gone on.
    """
    assert rewards.shape == values.shape and rewards.dim() == 1, (rewards.shape, values.shape)
    # A recurrence: plain floats are faster than tensors of one number.
    advantages = [0.0] * len(rewards)
    advantage = next_value = 0.0
    steps = zip(rewards.tolist(), values.tolist(), strict=True)
    for step, (reward, value) in reversed(list(enumerate(steps))):
        advantage = reward + gamma * next_value - value + gamma * gae_lambda * advantage
        next_value = value
        advantages[step] = advantage
    return torch.tensor(advantages, dtype=torch.float64)


class GAEAdvantages:
    """A `nemo_rl.types.TokenAdvantages`: generalised advantages and the returns that train the value model.

    The tokens that carry loss are the steps of the episode. What an environment said between them is part of the state:
    the value after the last token of a turn is that before the first token of the next. The sample's reward comes with
    the last step; with `loss_cfg.use_kl_in_reward`, every step is charged the KL to the reference policy.

    `normalize` whitens the advantages over all tokens of the batch; returns are left as they are.
    """

    def __init__(
        self, loss_cfg: ClippedPGLossConfig, *, gamma: float, gae_lambda: float, normalize: bool, eps: float
    ) -> None:
        self.loss_cfg = loss_cfg
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.normalize = normalize
        self.eps = eps

    def adjust(self, columns: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
        """`advantages` and `returns` (advantage + value), 0 where masked.

        Takes `advantages` (the sample's reward at every token) and `values`; with the KL in the reward also
        `prev_logprobs` and `reference_policy_logprobs`.
        """
        steps = mask.nonzero()[:, 0]
        advantages, returns = torch.zeros_like(columns["advantages"]), torch.zeros_like(columns["values"])
        if len(steps) > 0:
            values = columns["values"][steps].double()
            estimate = generalized_advantages(
                self._rewards(columns, steps), values, gamma=self.gamma, gae_lambda=self.gae_lambda
            )
            advantages[steps] = estimate.to(advantages.dtype)
            returns[steps] = (estimate + values).to(returns.dtype)
        return {"advantages": advantages, "returns": returns}

    def sums(self, advantages: Tensor, mask: Tensor) -> Tensor:
        return whitening_sums(advantages, mask)

    def finish(self, advantages: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
        return whiten(advantages, mask, sums, self.eps) if self.normalize else advantages

    def _rewards(self, columns: Mapping[str, Tensor], steps: Tensor) -> Tensor:
        """float64 [N]"""
        rewards = torch.zeros(len(steps), dtype=torch.float64)
        rewards[-1] = columns["advantages"][steps[-1]]
        cfg = self.loss_cfg
        if cfg.use_kl_in_reward:
            rewards -= cfg.reference_policy_kl_penalty * calculate_kl(
                columns["prev_logprobs"][steps].double(),
                columns["reference_policy_logprobs"][steps].double(),
                cfg.reference_policy_kl_type,
                cfg.kl_input_clamp_value,
                cfg.kl_output_clamp_value,
            )
        return rewards
