"""From rewards to advantages: scaling, shaping, sampling, estimators, and generalised advantages of a value model."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl.algorithms.config.grpo import AdvEstimatorConfig, ClippedPGLossConfig, GRPOConfig
from nemo_rl.algorithms.config.ppo import GAEConfig
from nemo_rl.algorithms.config.rollout import RewardScalingConfig, RewardShapingConfig
from nemo_rl.algorithms.plan.advantages import GroupRewards, compute_advantages
from nemo_rl.algorithms.plan.rewards import ScoredGroup, sample_until_full, scale_reward, score_groups, shape_reward
from nemo_rl.algorithms.plan.token_advantages import KLInReward, whiten, whitening_sums
from nemo_rl.algorithms.ppo import GAEAdvantages
from nemo_rl.types import GroupHandle, SampleStatus
from tests.fakes import handle, rewarded, sample
from tests.tables import named


def grpo(**changes: Any) -> GRPOConfig:
    sizes = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2}
    fixed = {"adv_estimator": cfg(), "reward_shaping": shaping(enabled=False)}
    return GRPOConfig.model_validate(sizes | fixed | changes)


def shaping(**changes: Any) -> RewardShapingConfig:
    return RewardShapingConfig.model_validate({"enabled": True, "max_response_length": 1000} | changes)


def test_scaling_clamps_and_maps():
    cfg = RewardScalingConfig(enabled=True, source_min=-1.0, source_max=3.0, target_min=0.0, target_max=2.0)
    assert [scale_reward(r, cfg) for r in (-5.0, -1.0, 1.0, 3.0, 9.0)] == [0.0, 0.0, 1.0, 2.0, 2.0]
    assert scale_reward(-5.0, RewardScalingConfig(enabled=False)) == -5.0


def test_the_penalty_of_dapo_grows_with_length_and_that_for_no_end_replaces_it():
    cfg = shaping(overlong_buffer_length=20, overlong_buffer_penalty=0.5, max_response_length=100)
    shaped = [shape_reward(1.0, sample(1.0, generated=number), cfg) for number in (80, 90, 150)]
    assert shaped == pytest.approx([1.0, 0.75, 0.5])
    episode = sample(1.0, generated=30)
    episode.branches = [sample(generated=60)]
    assert shape_reward(1.0, episode, cfg) == pytest.approx(0.75), "all rows of an agent's episode count"
    cfg = shaping(max_response_length=5, overlong_buffer_length=5, stop_properly_penalty_coef=0.25)
    assert shape_reward(2.0, sample(2.0, SampleStatus.TRUNCATED), cfg) == 0.5
    assert shape_reward(2.0, sample(2.0), cfg) == 2.0


def test_branches_with_rewards_of_their_own_are_compared_one_by_one():
    """They are scaled, and a failed episode's are left out. A branch without one shares the episode's."""
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
    assert own.row_advantages([[1.0, 2.0, 3.0, 4.0]]) == [1.0, 4.0, 2.0, 3.0] and own.row_masks == [1.0, 0.0, 1.0, 1.0]
    branched.branches[1].role = "black"
    (roles,) = score_groups([handle(branched, failed)], cfg)
    assert [(*of_role.num_loss_tokens,) for of_role in roles.compared_rewards()] == [(10, 3, 0), (4,)]
    assert roles.row_advantages([[1.0, 2.0, 3.0], [4.0]]) == [1.0, 3.0, 2.0, 4.0], "rows are compared within their role"


def test_scoring_scales_before_shaping_and_masks_what_must_not_train():
    kinds = [SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.FAILED, SampleStatus.PROMPT_TOO_LONG]
    group = handle(*(sample(1.0, kind) for kind in kinds), sample(1.0, generated=0))
    scaling = RewardScalingConfig(enabled=True, target_min=10.0, target_max=20.0)
    how: Any = {"reward_scaling": scaling, "reward_shaping": shaping(stop_properly_penalty_coef=0.5)}
    (scored,) = score_groups([group], grpo(**how, overlong_filtering=True))
    assert scored.rewards == [20.0, 10.0, 0.0, 0.0, 20.0] and scored.masks == [1.0, 0.0, 0.0, 0.0, 0.0]
    [rewards] = scored.compared_rewards()
    assert list(rewards.valid) == [True, True, False, False, True]
    assert list(rewards.num_loss_tokens) == [10, 0, 0, 0, 0]  # a filtered sample's reward counts, its tokens do not
    assert score_groups([group], grpo(**how))[0].masks == [1.0, 1.0, 0.0, 0.0, 0.0]


def fill(cfg: GRPOConfig, *batches: list[GroupHandle]) -> tuple[list[ScoredGroup], dict[str, float]]:
    waiting = iter(batches)
    return sample_until_full(lambda: score_groups(next(waiting), cfg), cfg)


def test_dynamic_sampling_keeps_groups_with_variance_over_batches_or_gives_up_with_advice():
    first = [rewarded(0.0, 1.0, name="a"), rewarded(1.0, 1.0, name="b")]
    cfg = grpo(reward_scaling={"enabled": True, "target_min": -1.0})
    kept, metrics = fill(cfg, first, [rewarded(1.0, 0.0, name="c"), rewarded(0.0, 1.0, name="d")])
    assert [group.handle.group_id for group in kept] == ["a", "c"]
    counts = {"num_gen_batches": 2.0, "num_zero_variance_groups": 1.0, "num_discarded_valid_samples": 2.0}
    assert metrics == {"filtered_reward": 0.5} | {f"dynamic_sampling_{name}": n for name, n in counts.items()}
    told = r"0 prompts .* 2 in 2 generation batches .* needs 2.*num_generations_per_prompt"
    with pytest.raises(ValueError, match=told):
        fill(grpo(dynamic_sampling_max_gen_batches=2), [rewarded(1.0, 1.0)], [rewarded(0.0, 0.0)])


# -- advantages


def group(rewards: list[float], valid: list[bool] | None = None, tokens: list[int] | None = None) -> GroupRewards:
    size = len(rewards)
    return GroupRewards(rewards=rewards, valid=valid or [True] * size, num_loss_tokens=tokens or [10] * size)


def cfg(name: str = "grpo", **changes: object) -> AdvEstimatorConfig:
    values = {"name": name, "normalize_rewards": True, "use_leave_one_out_baseline": False}
    return AdvEstimatorConfig.model_validate(values | changes)


def test_advantages_are_bounded_and_counted_as_bounded():
    settings = cfg(normalize_rewards=False)
    result = compute_advantages([group([0.0, 0.0, 0.0, 10.0])], settings, bounds=(-1.0, 5.0))
    assert result.advantages[0] == [-1.0, -1.0, -1.0, 5.0]
    assert result.metrics["advantages/max"] == 5.0 and result.metrics["advantages/sum"] == 2.0
    raw = compute_advantages([group([0.0, 9.0])], cfg("reinforce_plus_plus"), kl_in_reward=True, bounds=(-1.0, 1.0))
    assert raw.advantages[0] == [-4.5, 4.5]  # the workers bound them, after the KL
    assert "advantages/max" not in raw.metrics
    rows, mask = torch.tensor([-30.0, 40.0]), torch.ones(2)
    bounded = KLInReward(ClippedPGLossConfig(), eps=1e-6, bounds=(-0.5, 0.25))
    assert bounded.finish(rows, mask, bounded.sums(rows, mask)).tolist() == [-0.5, 0.25]


def test_equal_groups_stay_apart():
    result = compute_advantages([group([0.0, 0.0]), *[group([1.0, 1.0])] * 2, group([0.0, 1.0])], cfg())
    assert result.advantages[:3] == [[0.0, 0.0]] * 3 and result.metrics["num_zero_variance_groups"] == 3
    assert [result.metrics[f"baseline_reward/pct_{kind}"] for kind in ("0", "1", "mixed")] == [0.25, 0.5, 0.25]
    scaled = compute_advantages([group([-1.0, 1.0]), group([-1.0, -1.0]), group([0.5, 0.5])], cfg())
    assert [scaled.metrics[f"baseline_reward/pct_{kind}"] for kind in ("0", "mixed")] == [0.0, 1 / 3]
    alone = compute_advantages([group([0.0]), group([1.0])], cfg("reinforce_plus_plus", minus_baseline=False))
    assert "baseline_reward/pct_mixed" not in alone.metrics, "equal rewards of a group teach there"


def parted(*parts: list[float], valid: list[bool] | None = None) -> GroupRewards:
    return replace(group([sum(values) for values in parts], valid), parts=parts)


def test_gdpo_normalises_each_reward_and_then_the_batch():
    groups = [parted([0.0, 10.0], [1.0, 0.0], [0.0, 0.0]), parted([1.0, 1.0], [1.0, 0.0], [0.0, 0.0])]
    found = compute_advantages(groups, cfg("gdpo")).advantages
    flat = np.concatenate([sum((c - c.mean()) / (c.std(ddof=1) + 1e-6) for c in np.array(g.parts).T) for g in groups])
    np.testing.assert_allclose(np.concatenate(found), (flat - flat.mean()) / (flat.std(ddof=1) + 1e-6), atol=1e-12)
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-5), "10 of one reward is worth 1 of another"


def test_gdpo_weighs_its_rewards():
    groups = [parted([0.0, 10.0], [1.0, 0.0], [0.0, 0.0]), parted([1.0, 1.0], [1.0, 0.0], [0.0, 0.0])]
    weighed = compute_advantages(groups, cfg("gdpo", reward_weights=[0.0, 2.0])).advantages
    second = [group([parts[1] for parts in g.parts]) for g in groups]
    of_second = np.concatenate(compute_advantages(second, cfg()).advantages)
    np.testing.assert_allclose(
        np.concatenate(weighed), 2 * (of_second - of_second.mean()) / (2 * of_second.std(ddof=1) + 1e-6), atol=1e-12
    )
    assert weighed != compute_advantages(groups, cfg("gdpo")).advantages
    with pytest.raises(
        ValueError, match=r"reward_weights has 3 weights, and a sample has 2 rewards; give one for each"
    ):
        compute_advantages(groups, cfg("gdpo", reward_weights=[1.0, 1.0, 1.0]))


def test_gdpo_leaves_failed_samples_out():
    whole = compute_advantages([parted([0.0, 1.0], [1.0, 0.0], [1.0, 1.0])], cfg("gdpo")).advantages[0]
    failed = parted([0.0, 1.0], [], [1.0, 0.0], [1.0, 1.0], valid=[True, False, True, True])
    assert compute_advantages([failed], cfg("gdpo")).advantages[0] == [whole[0], 0.0, *whole[1:]]
    equal = [parted([1.0, 0.0], [0.0, 1.0]), parted([0.5, 0.5], [0.5, 0.5])]
    assert compute_advantages(equal, cfg("gdpo")).advantages == [[0.0, 0.0]] * 2, "no variance"


@named(
    "told, groups",
    {
        "one reward": (r"found 1\); return rewards \[B, n\], as math_multi_reward does", [parted([1.0], [0.0])]),
        "another number in a group": (
            r"found 2, 3\)",
            [parted([1.0, 0.0], [0.0, 1.0]), parted([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])],
        ),
        "none": (r"found 0\)", [parted([], [])]),
    },
)
def test_gdpo_needs_several_rewards(told, groups):
    with pytest.raises(ValueError, match=told):
        compute_advantages(groups, cfg("gdpo"))


def test_rows_of_a_role_have_one_reward_each_and_gdpo_needs_several():
    [of_agent] = score_groups([handle(*(sample(r, role="solver", own_reward=r) for r in (0.0, 1.0)))], grpo())
    with pytest.raises(ValueError, match=r"found 0\)"):
        compute_advantages(of_agent.compared_rewards(), cfg("gdpo"))


def test_failed_samples_get_zero_and_stay_out_of_the_statistics():
    groups = [group([1.0, 0.0, 3.0], [True, False, True]), *(group([1.0, 0.0], [one, False]) for one in (True, False))]
    result = compute_advantages(groups, cfg())
    std = math.sqrt(2.0) + 1e-6
    assert result.advantages == [pytest.approx([-1 / std, 0.0, 1 / std]), [0.0, 0.0], [0.0, 0.0]]
    assert result.metrics["num_zero_variance_groups"] == 0
    # A step without any reward has no statistics.
    for estimator in (cfg(), cfg("reinforce_plus_plus", minus_baseline=False)):
        result = compute_advantages([group([0.0, 0.0], [False, False])], estimator)
        assert result.advantages == [[0.0, 0.0]] and "advantages/mean" not in result.metrics


def test_a_reward_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        group([1.0, math.nan])
    group([1.0, math.nan], [True, False])  # a failed sample's reward means nothing


finite = st.floats(-1e3, 1e3).map(lambda x: round(x, 3)) | st.sampled_from([0.0, 1.0, 0.1])
equal = st.builds(lambda reward, size: [reward] * size, st.floats(-1e6, 1e6), st.integers(2, 9))
groups_of_rewards = st.lists(st.lists(finite, min_size=2, max_size=6) | equal, min_size=1, max_size=4)
SMALL_SPREAD = [[1000.00, 1000.01, 1000.02, 1000.03]]


@settings(max_examples=120, deadline=None)
@given(rewards=groups_of_rewards, leave_one_out=st.booleans(), std=st.sampled_from(["", "group", "leave_one_out"]))
@example(rewards=SMALL_SPREAD, leave_one_out=False, std="group")
def test_against_numpy_and_equal_rewards_give_exact_zeros(rewards: list[list[float]], leave_one_out: bool, std: str):
    estimator = cfg(normalize_rewards=std != "", use_leave_one_out_baseline=leave_one_out, std=std or "group")
    result = compute_advantages([group(r) for r in rewards], estimator)
    assert result.metrics["num_zero_variance_groups"] == sum(len(set(r)) == 1 for r in rewards)
    for r, got in zip(rewards, result.advantages, strict=True):
        if len(set(r)) == 1:
            assert got == [0.0] * len(r)
            continue
        for i, advantage in enumerate(got):
            others = np.delete(r, i)
            spread = others if std == "leave_one_out" else np.array(r)
            scale = np.std(spread, ddof=1) + 1e-6 if std and len(set(spread)) > 1 else 1.0
            want = (r[i] - np.mean(others if leave_one_out else r)) / scale
            assert advantage == pytest.approx(want, rel=1e-6, abs=1e-6)


def test_reinforce_plus_plus_by_hand():
    """Whitened over the tokens that carry loss, with or without a baseline; without any variance exactly 0."""
    plain = cfg("reinforce_plus_plus", minus_baseline=False)
    result = compute_advantages([group([1.0, 0.0, 0.0], tokens=[1, 3, 0]), group([1.0, 1.0], tokens=[2, 2])], plain)
    per_token = np.array([1.0] * 1 + [0.0] * 3 + [1.0] * 4)
    whitened = (per_token - per_token.mean()) / (per_token.std(ddof=1) + 1e-6)
    assert result.advantages == [pytest.approx([*whitened[:2], 0.0]), pytest.approx([whitened[4]] * 2)]
    groups = [group([1.0, 0.0], tokens=[1, 3]), group([5.0, 5.0]), group([9.0, 0.0], [True, False])]
    result = compute_advantages(groups, cfg("reinforce_plus_plus"))
    per_token = np.array([0.5] * 1 + [-0.5] * 3 + [0.0] * 20)
    mean, std = per_token.mean(), per_token.std(ddof=1) + 1e-6
    assert result.advantages[0] == pytest.approx([(0.5 - mean) / std, (-0.5 - mean) / std])
    assert result.advantages[1:] == [pytest.approx([-mean / std] * 2), [0.0, 0.0]]
    assert result.metrics["num_zero_variance_groups"] == 1
    equal = [group([0.3, 0.3, 0.3]), group([0.3, 0.3, 0.3], tokens=[7, 3, 1])]
    assert float(np.average([0.3] * 6, weights=[10, 10, 10, 7, 3, 1])) != 0.3, "rounding"
    assert compute_advantages(equal, plain).advantages == [[0.0] * 3, [0.0] * 3]


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(1, 4), seed=st.integers(0, 1000))
def test_whitening_by_added_sums_equals_whitening_the_whole(cut: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    advantages = 1000 + 0.01 * torch.randn(5, 6, generator=generator).double()
    mask = (torch.rand(5, 6, generator=generator) > 0.3).float()
    mask[0, :2] = 1.0
    sums = whitening_sums(advantages[:cut], mask[:cut]) + whitening_sums(advantages[cut:], mask[cut:])
    whitened = torch.cat([whiten(advantages[rows], mask[rows], sums, 1e-6) for rows in (slice(cut), slice(cut, None))])
    valid = advantages[mask > 0]
    torch.testing.assert_close(whitened[mask > 0], (valid - valid.mean()) / (valid.std() + 1e-6), rtol=1e-5, atol=1e-5)
    assert (whitened[mask == 0] == 0).all()


def test_kl_in_reward_by_hand():
    """A token is charged its own KL and all later ones; an environment spoke before the last token."""
    loss = ClippedPGLossConfig(reference_policy_kl_penalty=0.5, reference_policy_kl_type="k1", use_kl_in_reward=True)
    token_advantages, nan = KLInReward(loss, eps=1e-6), math.nan
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    columns = {"advantages": torch.ones(5), "prev_logprobs": torch.tensor([nan, -1.0, -2.0, nan, -1.0])}
    columns["reference_policy_logprobs"] = torch.tensor([nan, -1.5, -1.0, nan, -1.5])  # k1: 0.5, -1.0 and 0.5
    [(name, adjusted)] = token_advantages.adjust(columns, mask).items()
    assert name == "advantages" and adjusted.tolist() == pytest.approx([0.0, 1.0, 1.25, 0.0, 0.75])
    whitened = token_advantages.finish(adjusted, mask, token_advantages.sums(adjusted, mask))
    assert whitened.tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0, -1.0], abs=1e-4)


@named(
    "mask",
    {
        "no variance": torch.ones(2, 3),
        "no token": torch.zeros(2, 3),
        "one token": torch.tensor([[1.0, 0, 0], [0, 0, 0]]),
    },
)
def test_whitening_without_variance_or_tokens_is_exact_zero(mask):
    advantages = torch.full((2, 3), 0.3)
    assert torch.equal(whiten(advantages, mask, whitening_sums(advantages, mask), 1e-6), torch.zeros(2, 3))


# -- with a value model

NO_KL = ClippedPGLossConfig(reference_policy_kl_penalty=0.0)
KL = ClippedPGLossConfig(reference_policy_kl_penalty=0.1, reference_policy_kl_type="k1", use_kl_in_reward=True)


def estimator(loss: ClippedPGLossConfig = NO_KL, **changes: Any) -> GAEAdvantages:
    return GAEAdvantages(loss, GAEConfig(**({"normalize_advantages": False, "eps": 1e-8} | changes)))


def row(reward: float, mask: list[int], values: list[float]) -> tuple[dict[str, Tensor], Tensor]:
    columns = {"final_reward": torch.tensor(reward), "values": torch.tensor(values)}
    return columns, torch.tensor(mask).float()


THREE = row(1.0, [0, 1, 1, 1], [0.0, 0.2, 0.4, 0.5])


def test_only_loss_tokens_are_steps_and_each_pays_its_kl():
    """Reward 1 with the last of three tokens after a prompt token; an environment spoke in between and at the end."""
    nan = math.nan
    columns, mask = row(1.0, [0, 1, 1, 0, 1, 0], [9.0, 0.2, 0.4, nan, 0.5, 7.0])
    columns["prev_logprobs"] = torch.tensor([nan, -1.0, -2.0, nan, -1.0, nan])
    columns["reference_policy_logprobs"] = torch.tensor([nan, -1.5, -1.0, nan, -1.0, nan])
    found = estimator(KL, gae_gamma=0.9, gae_lambda=0.5).adjust(columns, mask)
    last = 1 - 0.5
    middle = 0.1 + 0.9 * 0.5 - 0.4 + 0.45 * last
    first = -0.05 + 0.9 * 0.4 - 0.2 + 0.45 * middle
    assert found["advantages"].tolist() == pytest.approx([0.0, first, middle, 0.0, last, 0.0])
    assert found["returns"].tolist() == pytest.approx([0.0, first + 0.2, middle + 0.4, 0.0, last + 0.5, 0.0])


def test_advantages_and_returns_have_lambdas_of_their_own():
    """And that of advantages may grow with the length of the sample."""
    found = estimator(gae_lambda_policy=0.0, gae_lambda_value=1.0).adjust(*THREE)
    assert found["returns"].tolist() == pytest.approx([0.0, 1.0, 1.0, 1.0])
    assert found["advantages"].tolist() == pytest.approx([0.0, 0.4 - 0.2, 0.5 - 0.4, 1.0 - 0.5])
    settings = GAEConfig(length_adaptive_alpha=0.05, gae_lambda_policy=0.5)
    assert settings.lambda_of_policy(100) == pytest.approx(0.8)
    assert settings.lambda_of_policy(10) == 0.0 and settings.lambda_of_value == 0.95
    found, wanted = estimator(length_adaptive_alpha=2 / 3).adjust(*THREE), estimator(gae_lambda=0.5).adjust(*THREE)
    assert found["advantages"].tolist() == pytest.approx(wanted["advantages"].tolist())


def test_advantages_are_whitened_and_returns_are_not():
    columns, mask = THREE
    plain, whitening = estimator(), estimator(normalize_advantages=True)
    found = whitening.adjust(columns, mask)
    sums = whitening.sums(found["advantages"], mask)
    raw = found["advantages"][1:]
    whitened = whitening.finish(found["advantages"], mask, sums)
    torch.testing.assert_close(whitened[1:], (raw - raw.mean()) / raw.std(), rtol=1e-5, atol=1e-6)
    assert torch.equal(found["returns"], plain.adjust(columns, mask)["returns"])
    assert torch.equal(plain.finish(found["advantages"], mask, sums), found["advantages"])
    nothing = whitening.adjust(*row(1.0, [0, 0], [5.0, 5.0]))
    assert not nothing["advantages"].any() and not nothing["returns"].any()
