"""Rewards of the environments -> rewards of the advantage estimator, on the controller, from metadata.

The order is: scale, shape, then drop groups without variance (`sample_until_full`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_rl.algorithms.config.rollout import RewardScalingConfig, RewardShapingConfig, ScoredRolloutConfig
from nemo_rl.algorithms.plan.advantages import GroupRewards
from nemo_rl.config.rules import remedy
from nemo_rl.types import GroupHandle, SampleMeta, SampleStatus


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """A group with the final reward and the mask of each sample, in the group's order."""

    handle: GroupHandle
    rewards: list[float]  # scaled and shaped; 0.0 if the sample has none
    masks: list[float]  # 0.0: no gradient from this sample
    parts: list[list[float]]  # each of several rewards, scaled; empty for a sample with one reward or none
    own_rewards: list[list[float]] | None = None  # of each row of each sample, if branches are rewarded one by one

    @property
    def roles(self) -> list[str]:
        """The roles whose rows are compared with each other; one, unless agents have rewarded roles."""
        return [""] if self.own_rewards is None else sorted({row.role for row in self.handle.rows})

    def compared_rewards(self) -> list[GroupRewards]:
        """The rewards that are compared with each other: of the samples, or of all rows of each of `roles`."""
        samples = self.handle.samples
        if self.own_rewards is not None:
            return [self._of_role(role, self.own_rewards) for role in self.roles]
        return [
            GroupRewards(
                rewards=self.rewards,
                parts=self.parts,
                # A failed sample has no reward, which is not the same as a reward of 0: it must not move the baseline.
                valid=[sample.has_reward for sample in samples],
                num_loss_tokens=[
                    sum(row.num_generated_tokens for row in sample.rows) if mask > 0 else 0
                    for sample, mask in zip(samples, self.masks, strict=True)
                ],
            )
        ]

    def _of_role(self, role: str, own_rewards: list[list[float]]) -> GroupRewards:
        rows = [
            (reward, sample.has_reward, row.num_generated_tokens if mask > 0 else 0)
            for sample, mask, rewards in zip(self.handle.samples, self.masks, own_rewards, strict=True)
            for row, reward in zip(sample.rows, rewards, strict=True)
            if row.role == role
        ]
        rewards, valid, num_loss_tokens = zip(*rows, strict=True)
        return GroupRewards(rewards=rewards, valid=valid, num_loss_tokens=num_loss_tokens, parts=[()] * len(rows))

    def row_advantages(self, advantages: Sequence[Sequence[float]]) -> list[float]:
        """The advantage of each row, in the order of `handle.rows`; `advantages`: of each of `compared_rewards`."""
        samples = self.handle.samples
        if self.own_rewards is not None:
            found = dict(zip(self.roles, map(iter, advantages), strict=True))
            return self.handle.row_values([[next(found[row.role]) for row in sample.rows] for sample in samples])
        [of_samples] = advantages
        pairs = zip(samples, of_samples, strict=True)
        return self.handle.row_values([[advantage * row.credit for row in sample.rows] for sample, advantage in pairs])

    @property
    def good_rows(self) -> list[bool]:
        """Whether the sample of each row, in the order of `handle.rows`, has a reward above 0."""
        pairs = zip(self.handle.samples, self.rewards, strict=True)
        return self.handle.row_values([[reward > 0] * len(sample.rows) for sample, reward in pairs])

    @property
    def row_masks(self) -> list[float]:
        """The mask of each row, in the order of `handle.rows`."""
        pairs = zip(self.handle.samples, self.masks, strict=True)
        return self.handle.row_values([[mask] * len(sample.rows) for sample, mask in pairs])


def score_groups(handles: Sequence[GroupHandle], cfg: ScoredRolloutConfig) -> list[ScoredGroup]:
    """Scale and shape every reward and mask samples out of the loss."""
    return [
        ScoredGroup(
            handle=handle,
            rewards=[
                shape_reward(scale_reward(sample.reward, cfg.reward_scaling), sample, cfg.reward_shaping)
                if sample.has_reward
                else 0.0
                for sample in handle.samples
            ],
            masks=[loss_mask(sample, overlong_filtering=cfg.overlong_filtering) for sample in handle.samples],
            parts=[[scale_reward(part, cfg.reward_scaling) for part in s.reward_parts] for s in handle.samples],
            own_rewards=_own_rewards(handle, cfg),
        )
        for handle in handles
    ]


def _own_rewards(handle: GroupHandle, cfg: ScoredRolloutConfig) -> list[list[float]] | None:
    """Scaled; the configuration refuses to shape them. None if the rows of each sample share its reward."""
    if not any(row.own_reward is not None for row in handle.rows):
        return None
    return [
        [scale_reward(row.own_reward or 0.0, cfg.reward_scaling) if sample.has_reward else 0.0 for row in sample.rows]
        for sample in handle.samples
    ]


def scale_reward(reward: float, cfg: RewardScalingConfig) -> float:
    """Clamp to [source_min, source_max] and map linearly onto [target_min, target_max]."""
    if not cfg.enabled:
        return reward
    clamped = min(max(reward, cfg.source_min), cfg.source_max)
    # source_max is above source_min: the configuration refuses anything else.
    fraction = (clamped - cfg.source_min) / (cfg.source_max - cfg.source_min)
    return cfg.target_min + fraction * (cfg.target_max - cfg.target_min)


def shape_reward(reward: float, sample: SampleMeta, cfg: RewardShapingConfig) -> float:
    """Reduce the reward of long answers.

    With `stop_properly_penalty_coef`, only the reward of a truncated sample is multiplied by it.
    Otherwise DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) is added: 0 up to `max_response_length -
    overlong_buffer_length` generated tokens, then linear down to `-overlong_buffer_penalty` at `max_response_length`.
    """
    if not cfg.enabled:
        return reward
    if cfg.stop_properly_penalty_coef is not None:
        # A factor keeps the order of truncated samples, and leaves a reward of 0 as it is.
        return reward * cfg.stop_properly_penalty_coef if sample.status is SampleStatus.TRUNCATED else reward
    num_tokens = sum(row.num_generated_tokens for row in sample.rows)
    excess = num_tokens - (cfg.max_response_length - cfg.overlong_buffer_length)
    fraction = min(max(excess / cfg.overlong_buffer_length, 0.0), 1.0)
    return reward - fraction * cfg.overlong_buffer_penalty


def loss_mask(sample: SampleMeta, *, overlong_filtering: bool) -> float:
    """1.0 if the sample is in the loss. The reward of a filtered (truncated) sample still counts in the baseline."""
    # A sample without tokens of its own would count as a sequence and add nothing.
    if not sample.has_reward or sample.num_generated_tokens == 0:
        return 0.0
    return 0.0 if overlong_filtering and sample.status is SampleStatus.TRUNCATED else 1.0


def sample_until_full(
    next_batch: Callable[[], Sequence[ScoredGroup]], cfg: ScoredRolloutConfig
) -> tuple[list[ScoredGroup], dict[str, float]]:
    """Dynamic sampling: take generation batches until enough groups for a step have reward variance.

    DAPO, arXiv 2503.14476, section 3.2. Groups without variance have advantage 0 and would only dilute the batch.
    Surplus groups are dropped: the next step samples from newer weights. Returns the groups of the step, and metrics.

    Raises:
        ValueError: `dynamic_sampling_max_gen_batches` batches have too few such groups.
    """
    num_prompts, num_batches = cfg.num_prompts_per_step, 0
    kept: list[ScoredGroup] = []
    sampled: list[ScoredGroup] = []
    while len(kept) < num_prompts:
        if num_batches == cfg.dynamic_sampling_max_gen_batches:
            rewards = _rewards(sampled)
            mean = sum(rewards) / len(rewards) if rewards else float("nan")
            raise ValueError(
                f"Dynamic sampling found {len(kept)} prompts with differing rewards among {len(sampled)} in "
                f"{num_batches} generation batches (mean reward {mean:.3g}); a step needs {num_prompts}. "
                "Rewards near the minimum: the task is too hard or answers are cut (raise max_new_tokens); near the "
                f"maximum: it is too easy. Use other data, raise {cfg.key('num_generations_per_prompt')}, "
                f"{cfg.key('batch_multiplier')} or {cfg.key('dynamic_sampling_max_gen_batches')}, or "
                f"{remedy(cfg.key('use_dynamic_sampling') + '=false')}."
            )
        groups = next_batch()
        num_batches += 1
        sampled += groups
        kept += [group for group in groups if any(c.has_variance for c in group.compared_rewards())]
    rewards = _rewards(kept[:num_prompts])  # two different ones in each group, so there are some
    return kept[:num_prompts], {
        "filtered_reward": sum(rewards) / len(rewards),
        "dynamic_sampling_num_gen_batches": float(num_batches),
        "dynamic_sampling_num_zero_variance_groups": float(len(sampled) - len(kept)),
        "dynamic_sampling_num_discarded_valid_samples": float(sum(len(g.handle.samples) for g in kept[num_prompts:])),
    }


def _rewards(groups: Sequence[ScoredGroup]) -> list[float]:
    """Before scaling and shaping, as in the metric `reward`."""
    return [sample.reward for group in groups for sample in group.handle.samples if sample.has_reward]
