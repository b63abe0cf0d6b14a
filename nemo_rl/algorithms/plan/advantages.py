"""Rewards by group -> one advantage per sample.

A group is the samples of one prompt in one step, by explicit id. Statistics are two-pass in float64 with the unbiased
(n - 1) standard deviation. Samples without a reward stay out of them and get advantage 0. With the KL penalty in the
reward, advantages differ by token: `token_advantages.py` finishes them on the workers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nemo_rl.algorithms.config.grpo import AdvEstimatorConfig

NO_BOUNDS = (-math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class GroupRewards:
    """The rewards of one group; one entry per sample in each sequence."""

    rewards: Sequence[float]
    valid: Sequence[bool]  # False for samples without a reward, such as failed ones
    num_loss_tokens: Sequence[int]  # 0 for a sample that is masked out of the loss
    parts: Sequence[Sequence[float]] = ()  # of each sample, where an environment gives several rewards

    def __post_init__(self) -> None:
        assert len(self.rewards) == len(self.valid) == len(self.num_loss_tokens), self
        bad = [r for r, valid in zip(self.rewards, self.valid, strict=True) if valid and not math.isfinite(r)]
        if bad:
            raise ValueError(f"Rewards {bad} are not finite. Fix the environment: a reward must be a finite number.")

    @property
    def has_variance(self) -> bool:
        """At least two rewards that are not all equal; without, every advantage is 0."""
        return len({reward for reward, valid in zip(self.rewards, self.valid, strict=True) if valid}) > 1


@dataclass(frozen=True, kw_only=True)
class AdvantageResult:
    """Advantages per group and sample, with statistics."""

    advantages: list[list[float]]
    metrics: dict[str, float]
    """`advantages/*` over samples with a reward, and `num_zero_variance_groups` of two or more rewards that are all
    equal. `baseline_reward/pct_0`, `pct_1` and `pct_mixed` are the shares of groups whose rewards are all 0, all 1, and
    different. `pct_mixed` is left out where groups of equal rewards teach as much as others, and `advantages/*` where
    the workers finish the advantages."""


Estimates = list[np.ndarray]  # float64 [n] of each group


def grpo(groups: Sequence[GroupRewards], cfg: AdvEstimatorConfig, kl_in_reward: bool) -> Estimates:
    """(r - baseline) / (std + eps) inside each group (GRPO, arXiv 2402.03300, section 4.1.2).

    With `std: leave_one_out` the deviation, too, is of the *other* samples, and there is no division where it is 0.
    `normalize_rewards: false` omits the division (Dr.GRPO, arXiv 2503.20783): it would give groups with little variance
    larger gradients. `use_leave_one_out_baseline` takes the mean of the *other* samples as baseline, which makes it
    independent of the sample (RLOO, arXiv 2402.14740). A group with equal rewards, or fewer than two, gives zeros.
    """
    assert not kl_in_reward, "advantages inside a group do not know token rewards"
    advantages = []
    for group in groups:
        rewards, valid = _arrays(group)
        result = np.zeros_like(rewards)
        # Without variance the deviation is 0, and rounding over eps would be a large advantage.
        if group.has_variance:
            result[valid] = centred(rewards[valid], leave_one_out=cfg.use_leave_one_out_baseline)
            if cfg.normalize_rewards:
                std = deviation(rewards[valid], leave_one_out=cfg.std == "leave_one_out")
                result[valid] /= np.where(std > 0, std + cfg.eps, 1.0)
        advantages.append(result)
    return advantages


def gdpo(groups: Sequence[GroupRewards], cfg: AdvEstimatorConfig, kl_in_reward: bool) -> Estimates:
    """The advantages that `grpo` gives each of several rewards, added up, then whitened over the samples of the batch
    (GDPO, arXiv 2601.05242, section 3). `reward_weights` are factors of the summands.

    The sum of the rewards would hide those with little variance: [0, 1] and [1, 0] would be equal.

    Raises:
        ValueError: a sample has fewer than two rewards, or there are not as many weights as rewards.
    """
    num_parts = {len(parts) for group in groups for parts, valid in zip(group.parts, group.valid, strict=True) if valid}
    if num_parts and (len(num_parts) > 1 or min(num_parts) < 2):
        raise ValueError(
            "grpo.adv_estimator.name=gdpo needs environments that give every sample the same number of rewards, two or "
            f"more (found {', '.join(map(str, sorted(num_parts)))}); return rewards [B, n], as math_multi_reward does, "
            "or set grpo.adv_estimator.name=grpo"
        )
    weights = [1.0] * max(num_parts, default=0) if cfg.reward_weights is None else cfg.reward_weights
    if num_parts and len(weights) != max(num_parts):
        raise ValueError(
            f"grpo.adv_estimator.reward_weights has {len(weights)} weights, and a sample has {max(num_parts)} rewards; "
            "give one for each, or null"
        )
    total = [np.zeros(len(group.rewards)) for group in groups]
    for k, weight in enumerate(weights if num_parts else ()):
        of_part = [
            replace(group, rewards=[parts[k] if parts else 0.0 for parts in group.parts], parts=()) for group in groups
        ]
        total = [sums + weight * a for sums, a in zip(total, grpo(of_part, cfg, kl_in_reward), strict=True)]
    return _whitened(total, [_arrays(group)[1].astype(np.float64) for group in groups], cfg.eps)


def reinforce_plus_plus(groups: Sequence[GroupRewards], cfg: AdvEstimatorConfig, kl_in_reward: bool) -> Estimates:
    """Rewards whitened over all loss tokens of the batch (REINFORCE++, arXiv 2501.03262).

    With `minus_baseline`, the group's mean is subtracted first (REINFORCE++-baseline); groups with fewer than two
    rewards then give zeros and stay out of the statistics. As in the paper, whitening shifts a zero-variance group by
    the batch mean like all others. With `kl_in_reward`, `KLInReward` does the whitening.
    """
    raw, weights = [], []
    for group in groups:
        rewards, valid = _arrays(group)
        if cfg.minus_baseline:
            valid &= valid.sum() >= 2  # a reward minus itself says nothing
        result = np.zeros_like(rewards)
        if valid.any():
            result[valid] = centred(rewards[valid], leave_one_out=False) if cfg.minus_baseline else rewards[valid]
        raw.append(result)
        # The loss sums over tokens, so a sample counts once for each of its loss tokens.
        weights.append(np.where(valid, np.asarray(group.num_loss_tokens, dtype=np.float64), 0.0))
    return raw if kl_in_reward else _whitened(raw, weights, cfg.eps)


def compute_advantages(
    groups: Sequence[GroupRewards],
    cfg: AdvEstimatorConfig,
    *,
    kl_in_reward: bool = False,
    bounds: tuple[float, float] = NO_BOUNDS,
) -> AdvantageResult:
    """Run the estimator `cfg.name`, and bound its advantages; with `kl_in_reward`, `KLInReward` bounds them."""
    estimate = {"grpo": grpo, "gdpo": gdpo, "reinforce_plus_plus": reinforce_plus_plus}[cfg.name]
    advantages = estimate(groups, cfg, kl_in_reward)
    if not kl_in_reward:
        advantages = [np.clip(group, *bounds) for group in advantages]
    assert groups
    arrays = [_arrays(group) for group in groups]
    equal = sum(valid.sum() >= 2 and not group.has_variance for group, (_, valid) in zip(groups, arrays, strict=True))
    found = [(group, rewards[valid]) for group, (rewards, valid) in zip(groups, arrays, strict=True) if valid.any()]
    levels = [None if group.has_variance else rewards[0] for group, rewards in found]
    flat = np.concatenate([a[valid] for a, (_, valid) in zip(advantages, arrays, strict=True)])
    metrics: dict[str, float] = {}
    if levels and not kl_in_reward:
        metrics |= {f"advantages/{name}": float(getattr(flat, name)()) for name in ("mean", "sum", "max", "min")}
    if levels:
        metrics |= {f"baseline_reward/pct_{level}": levels.count(level) / len(levels) for level in (0, 1)}
        if cfg.name != "reinforce_plus_plus" or cfg.minus_baseline:
            metrics["baseline_reward/pct_mixed"] = levels.count(None) / len(levels)
    return AdvantageResult(
        advantages=[a.tolist() for a in advantages],
        metrics=metrics | {"num_zero_variance_groups": float(equal)},
    )


def centred(rewards: np.ndarray, *, leave_one_out: bool) -> np.ndarray:
    """float64 [n], n >= 2: rewards minus their mean, or minus the mean of the others; exact 0 when all are equal."""
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    num = len(rewards)
    # r_i - mean of the others = (r_i - mean) * n / (n - 1)
    return (rewards - rewards.mean()) * (num / (num - 1) if leave_one_out else 1.0)


def deviation(rewards: np.ndarray, *, leave_one_out: bool) -> np.ndarray:
    """float64 [n], n >= 2: the standard deviation, or the deviation of the others; exact 0 where they are equal."""
    samples = [np.delete(rewards, i) for i in range(len(rewards))] if leave_one_out else [rewards]
    # n - 1: a group is a small sample, and division by n would underestimate its spread.
    found = [float(s.std(ddof=1)) if len(s) > 1 and s.max() != s.min() else 0.0 for s in samples]
    return np.broadcast_to(np.array(found), rewards.shape)


def _whitened(estimates: Estimates, weights: Estimates, eps: float) -> Estimates:
    """(A - mean) / (std + eps) over the batch, each counted `weights` times (integer counts), with the unbiased `std`.

    0 where the weight is 0; all zeros when fewer than two are counted or all that are counted are equal.
    """
    values, counts = np.concatenate(estimates), np.concatenate(weights)
    counted, total = values[counts > 0], float(counts.sum())
    mean = scale = 0.0
    if total >= 2:
        mean = float((counts * values).sum() / total)
        if counted.max() != counted.min():  # if all are equal, the rounded mean may still differ from them
            # Two passes: squares of deviations keep the digits that a difference of large squares would lose.
            scale = 1.0 / (math.sqrt(float((counts * (values - mean) ** 2).sum()) / (total - 1)) + eps)
    return [np.where(w > 0, (a - mean) * scale, 0.0) for a, w in zip(estimates, weights, strict=True)]


def _arrays(group: GroupRewards) -> tuple[np.ndarray, np.ndarray]:
    """Copies: rewards float64 [n], valid bool [n]."""
    return np.array(group.rewards, dtype=np.float64), np.array(group.valid, dtype=bool)
