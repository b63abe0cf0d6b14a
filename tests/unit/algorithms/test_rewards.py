from typing import Any

import pytest

from nemo_rl.algorithms.config.grpo import GRPOConfig
from nemo_rl.algorithms.config.rollout import RewardScalingConfig, RewardShapingConfig
from nemo_rl.algorithms.plan.rewards import DynamicSampler, loss_mask, scale_reward, score_groups, shape_reward
from nemo_rl.types import GroupHandle, SampleStatus
from tests.fakes import handle, rewarded, sample


def grpo(**changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "adv_estimator": {"normalize_rewards": True, "use_leave_one_out_baseline": False},
        "reward_shaping": shaping(enabled=False),
    }
    return GRPOConfig.model_validate(values | changes)


def shaping(**changes: Any) -> RewardShapingConfig:
    return RewardShapingConfig.model_validate({"enabled": True, "max_response_length": 1000} | changes)


def test_scaling_clamps_and_maps():
    cfg = RewardScalingConfig(enabled=True, source_min=-1.0, source_max=3.0, target_min=0.0, target_max=2.0)
    assert [scale_reward(r, cfg) for r in (-5.0, -1.0, 1.0, 3.0, 9.0)] == [0.0, 0.0, 1.0, 2.0, 2.0]
    assert scale_reward(-5.0, RewardScalingConfig(enabled=False)) == -5.0


@pytest.mark.parametrize(("generated", "expected"), [(80, 1.0), (90, 0.75), (150, 0.5)])
def test_dapo_overlong_penalty(generated: int, expected: float):
    cfg = shaping(overlong_buffer_length=20, overlong_buffer_penalty=0.5, max_response_length=100)
    assert shape_reward(1.0, sample(1.0, generated=generated), cfg) == pytest.approx(expected)


def test_stop_properly_penalty_replaces_the_overlong_one():
    cfg = shaping(enabled=True, max_response_length=5, overlong_buffer_length=5, stop_properly_penalty_coef=0.25)
    assert shape_reward(2.0, sample(2.0, SampleStatus.TRUNCATED), cfg) == 0.5
    assert shape_reward(2.0, sample(2.0), cfg) == 2.0


def test_branches_with_rewards_of_their_own_are_compared_one_by_one():
    """They are scaled, not shaped, and a failed episode's are left out. A branch without one shares the episode's."""
    scaling = {"enabled": True, "source_min": 0.0, "source_max": 1.0, "target_min": 0.0, "target_max": 10.0}
    cfg = grpo(reward_scaling=scaling)
    branched, failed = sample(1.0, generated=10), sample(0.0, SampleStatus.FAILED)
    branched.branches = [sample(generated=3), sample(generated=4)]
    (shared,) = score_groups([handle(branched, failed)], cfg)
    [compared] = shared.compared_rewards()
    assert compared.rewards == [10.0, 0.0] and compared.num_loss_tokens == [17, 0]
    branched.branches[1].credit = 0.5
    assert shared.row_advantages([[2.0, 0.0]]) == [2.0, 0.0, 2.0, 1.0], "samples first, then branches"
    branched.branches[0].own_reward, failed.own_reward = 0.5, 0.7
    (own,) = score_groups([handle(branched, failed)], cfg)
    [compared] = own.compared_rewards()
    assert (*compared.rewards,) == (0.0, 5.0, 0.0, 0.0) and (*compared.valid,) == (True, True, True, False)
    assert (*compared.num_loss_tokens,) == (10, 3, 4, 0)
    assert own.row_advantages([[1.0, 2.0, 3.0, 4.0]]) == [1.0, 4.0, 2.0, 3.0]
    assert own.row_masks == [1.0, 0.0, 1.0, 1.0]
    branched.branches[1].role = "black"
    (roles,) = score_groups([handle(branched, failed)], cfg)
    assert [(*of_role.num_loss_tokens,) for of_role in roles.compared_rewards()] == [(10, 3, 0), (4,)]
    assert roles.row_advantages([[1.0, 2.0, 3.0], [4.0]]) == [1.0, 3.0, 2.0, 4.0], "rows are compared within their role"


def test_masks():
    kinds = [SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.FAILED, SampleStatus.PROMPT_TOO_LONG]
    assert [loss_mask(sample(1.0, kind), overlong_filtering=False) for kind in kinds] == [1.0, 1.0, 0.0, 0.0]
    assert [loss_mask(sample(1.0, kind), overlong_filtering=True) for kind in kinds] == [1.0, 0.0, 0.0, 0.0]
    assert loss_mask(sample(1.0, generated=0), overlong_filtering=False) == 0.0


def test_scoring_scales_before_shaping_and_leaves_failures_alone():
    cfg = grpo(
        reward_scaling=RewardScalingConfig(enabled=True, target_min=10.0, target_max=20.0),
        reward_shaping=shaping(stop_properly_penalty_coef=0.5),
        overlong_filtering=True,
    )
    (scored,) = score_groups(
        [handle(sample(1.0), sample(1.0, SampleStatus.TRUNCATED), sample(0.0, SampleStatus.FAILED))], cfg
    )
    assert scored.rewards == [20.0, 10.0, 0.0]
    assert scored.masks == [1.0, 0.0, 0.0]
    [rewards] = scored.compared_rewards()
    assert list(rewards.valid) == [True, True, False]
    assert list(rewards.num_loss_tokens) == [10, 0, 0]  # the filtered sample's reward counts, its tokens do not


def collect(cfg: GRPOConfig, batches: list[list[GroupHandle]]) -> DynamicSampler:
    sampler = DynamicSampler(cfg)
    for batch in batches:
        sampler.add(score_groups(batch, cfg))
    return sampler


def test_dynamic_sampling_keeps_groups_with_variance_over_batches():
    cfg = grpo()
    batches = [
        [rewarded(0.0, 1.0, name="a"), rewarded(1.0, 1.0, name="b")],
        [rewarded(1.0, 0.0, name="c"), rewarded(0.0, 1.0, name="d")],
    ]
    sampler = collect(cfg, batches)
    assert sampler.is_complete
    kept, metrics = sampler.take()
    assert [group.handle.group_id for group in kept] == ["a", "c"]
    assert metrics == {
        "filtered_reward": 0.5,
        "dynamic_sampling_num_gen_batches": 2.0,
        "dynamic_sampling_num_zero_variance_groups": 1.0,
        "dynamic_sampling_num_discarded_valid_samples": 2.0,
    }


def test_dynamic_sampling_gives_up_with_advice():
    cfg = grpo(dynamic_sampling_max_gen_batches=2)
    with pytest.raises(
        ValueError, match=r"0 prompts .* 2 in 2 generation batches .* needs 2.*num_generations_per_prompt"
    ):
        collect(cfg, [[rewarded(1.0, 1.0)], [rewarded(0.0, 0.0)]])
