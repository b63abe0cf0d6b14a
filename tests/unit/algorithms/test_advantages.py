import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.config.grpo import AdvEstimatorConfig, ClippedPGLossConfig
from nemo_rl.algorithms.plan.advantages import GroupRewards, compute_advantages
from nemo_rl.algorithms.plan.token_advantages import KLInReward, whiten, whitening_sums


def group(rewards: list[float], valid: list[bool] | None = None, tokens: list[int] | None = None) -> GroupRewards:
    return GroupRewards(
        rewards=rewards, valid=valid or [True] * len(rewards), num_loss_tokens=tokens or [10] * len(rewards)
    )


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
    mask = torch.ones(2)
    rows = torch.tensor([-30.0, 40.0])
    bounded = KLInReward(ClippedPGLossConfig(), eps=1e-6, bounds=(-0.5, 0.25))
    assert bounded.finish(rows, mask, bounded.sums(rows, mask)).tolist() == [-0.5, 0.25]


def test_small_spread_on_large_rewards_is_not_lost():
    result = compute_advantages([group([1000.00, 1000.01, 1000.02, 1000.03])], cfg())
    std = 0.01 * math.sqrt(5 / 3)  # 0.0129
    assert result.advantages[0] == pytest.approx([d / (std + 1e-6) for d in (-0.015, -0.005, 0.005, 0.015)], rel=1e-6)
    assert result.metrics["num_zero_variance_groups"] == 0


def test_the_same_prompt_twice_stays_two_groups():
    result = compute_advantages([group([0.0, 0.0]), group([1.0, 1.0])], cfg())
    assert result.advantages == [[0.0, 0.0], [0.0, 0.0]]
    assert result.metrics["num_zero_variance_groups"] == 2
    assert result.metrics["baseline_reward/pct_0"] == 0.5
    assert result.metrics["baseline_reward/pct_1"] == 0.5
    assert result.metrics["baseline_reward/pct_mixed"] == 0.0


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.7], [3.0, 1.0, 2.0]])
def test_the_deviation_of_the_others(rewards):
    settings = cfg(use_leave_one_out_baseline=True, std="leave_one_out")
    found = compute_advantages([group(rewards)], settings).advantages[0]
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        std = 0.0 if len(set(others)) == 1 else float(np.std(others, ddof=1))
        assert found[i] == pytest.approx((reward - np.mean(others)) / (std + 1e-6 if std else 1.0), rel=1e-9)


def parted(*parts: list[float], valid: list[bool] | None = None) -> GroupRewards:
    valid = valid or [True] * len(parts)
    rewards = [sum(values) for values in parts]
    return GroupRewards(rewards=rewards, valid=valid, num_loss_tokens=[10] * len(parts), parts=parts)


def test_gdpo_normalises_each_reward_and_then_the_batch():
    groups = [parted([0.0, 10.0], [1.0, 0.0], [0.0, 0.0]), parted([1.0, 1.0], [1.0, 0.0], [0.0, 0.0])]
    found = compute_advantages(groups, cfg("gdpo")).advantages
    want = []
    for one in groups:
        columns = np.array(one.parts).T
        want.append(sum((c - c.mean()) / (c.std(ddof=1) + 1e-6) for c in columns))
    flat = np.concatenate(want)
    np.testing.assert_allclose(np.concatenate(found), (flat - flat.mean()) / (flat.std(ddof=1) + 1e-6), atol=1e-12)
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-5), "10 of one reward is worth 1 of another"


def test_gdpo_leaves_failed_samples_out_and_needs_several_rewards():
    whole = compute_advantages([parted([0.0, 1.0], [1.0, 0.0], [1.0, 1.0])], cfg("gdpo")).advantages[0]
    failed = parted([0.0, 1.0], [], [1.0, 0.0], [1.0, 1.0], valid=[True, False, True, True])
    assert compute_advantages([failed], cfg("gdpo")).advantages[0] == [whole[0], 0.0, *whole[1:]]
    equal = [parted([1.0, 0.0], [0.0, 1.0]), parted([0.5, 0.5], [0.5, 0.5])]
    assert compute_advantages(equal, cfg("gdpo")).advantages == [[0.0, 0.0]] * 2, "no variance"
    with pytest.raises(ValueError, match=r"found 1\); return rewards \[B, n\], as math_multi_reward does"):
        compute_advantages([parted([1.0], [0.0])], cfg("gdpo"))
    with pytest.raises(ValueError, match=r"found 2, 3\)"):
        compute_advantages([parted([1.0, 0.0], [0.0, 1.0]), parted([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])], cfg("gdpo"))
    with pytest.raises(ValueError, match=r"found 0\)"):
        compute_advantages([parted([], [])], cfg("gdpo"))


def test_failed_samples_get_zero_and_stay_out_of_the_statistics():
    groups = [
        group([1.0, 0.0, 3.0], [True, False, True]),
        group([1.0, 0.0], [True, False]),
        group([1.0, 0.0], [False, False]),
    ]
    result = compute_advantages(groups, cfg())
    std = math.sqrt(2.0) + 1e-6
    assert result.advantages == [pytest.approx([-1 / std, 0.0, 1 / std]), [0.0, 0.0], [0.0, 0.0]]
    assert result.metrics["num_zero_variance_groups"] == 0


def test_a_step_without_any_reward_has_no_statistics():
    for estimator in (cfg(), cfg("reinforce_plus_plus", minus_baseline=False)):
        result = compute_advantages([group([0.0, 0.0], [False, False])], estimator)
        assert result.advantages == [[0.0, 0.0]] and "advantages/mean" not in result.metrics


def test_a_reward_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        group([1.0, math.nan])
    group([1.0, math.nan], [True, False])  # a failed sample's reward means nothing


finite = st.floats(-1e3, 1e3).map(lambda x: round(x, 3))
groups_of_rewards = st.lists(st.lists(finite, min_size=2, max_size=6), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 9), normalize=st.booleans(), leave_one_out=st.booleans())
def test_equal_rewards_give_exact_zeros(reward: float, size: int, normalize: bool, leave_one_out: bool):
    estimator = cfg(normalize_rewards=normalize, use_leave_one_out_baseline=leave_one_out)
    result = compute_advantages([group([reward] * size)], estimator)
    assert result.advantages == [[0.0] * size]
    assert result.metrics["num_zero_variance_groups"] == 1


@settings(max_examples=50, deadline=None)
@given(rewards=groups_of_rewards, leave_one_out=st.booleans(), normalize=st.booleans())
def test_against_numpy(rewards: list[list[float]], leave_one_out: bool, normalize: bool):
    estimator = cfg(normalize_rewards=normalize, use_leave_one_out_baseline=leave_one_out)
    for r, got in zip(rewards, compute_advantages([group(r) for r in rewards], estimator).advantages, strict=True):
        if len(set(r)) > 1:
            others = [np.mean(np.delete(r, i) if leave_one_out else r) for i in range(len(r))]
            expected = (np.array(r) - others) / (np.std(r, ddof=1) + 1e-6 if normalize else 1.0)
            assert got == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)


def test_reinforce_plus_plus_whitens_over_tokens_that_carry_loss():
    groups = [group([1.0, 0.0, 0.0], tokens=[1, 3, 0]), group([1.0, 1.0], tokens=[2, 2])]
    result = compute_advantages(groups, cfg("reinforce_plus_plus", minus_baseline=False))
    per_token = np.array([1.0] * 1 + [0.0] * 3 + [1.0] * 4)
    whitened = (per_token - per_token.mean()) / (per_token.std(ddof=1) + 1e-6)
    assert result.advantages == [pytest.approx([*whitened[:2], 0.0]), pytest.approx([whitened[4]] * 2)]


def test_reinforce_plus_plus_with_baseline_by_hand():
    groups = [group([1.0, 0.0], tokens=[1, 3]), group([5.0, 5.0]), group([9.0, 0.0], [True, False])]
    result = compute_advantages(groups, cfg("reinforce_plus_plus"))
    per_token = np.array([0.5] * 1 + [-0.5] * 3 + [0.0] * 20)
    mean, std = per_token.mean(), per_token.std(ddof=1) + 1e-6
    assert result.advantages[0] == pytest.approx([(0.5 - mean) / std, (-0.5 - mean) / std])
    assert result.advantages[1] == pytest.approx([-mean / std] * 2)
    assert result.advantages[2] == [0.0, 0.0]
    assert result.metrics["num_zero_variance_groups"] == 1


def test_reinforce_plus_plus_without_any_variance_is_exact_zero():
    groups = [group([0.3, 0.3, 0.3]), group([0.3, 0.3, 0.3], tokens=[7, 3, 1])]
    assert float(np.average([0.3] * 6, weights=[10, 10, 10, 7, 3, 1])) != 0.3, "rounding"
    result = compute_advantages(groups, cfg("reinforce_plus_plus", minus_baseline=False))
    assert result.advantages == [[0.0] * 3, [0.0] * 3]


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(1, 4), seed=st.integers(0, 1000))
def test_whitening_by_added_sums_equals_whitening_the_whole(cut: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    advantages = 1000 + 0.01 * torch.randn(5, 6, generator=generator).double()
    mask = (torch.rand(5, 6, generator=generator) > 0.3).float()
    mask[0, :2] = 1.0
    sums = whitening_sums(advantages[:cut], mask[:cut]) + whitening_sums(advantages[cut:], mask[cut:])
    whitened = torch.cat(
        [whiten(advantages[:cut], mask[:cut], sums, 1e-6), whiten(advantages[cut:], mask[cut:], sums, 1e-6)]
    )
    valid = advantages[mask > 0]
    torch.testing.assert_close(whitened[mask > 0], (valid - valid.mean()) / (valid.std() + 1e-6), rtol=1e-5, atol=1e-5)
    assert (whitened[mask == 0] == 0).all()


def test_kl_in_reward_by_hand():
    """A token is charged its own KL and all later ones; an environment spoke before the last token."""
    cfg = ClippedPGLossConfig(reference_policy_kl_penalty=0.5, reference_policy_kl_type="k1", use_kl_in_reward=True)
    token_advantages, nan = KLInReward(cfg, eps=1e-6), math.nan
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    columns = {
        "advantages": torch.full((5,), 1.0),
        "prev_logprobs": torch.tensor([nan, -1.0, -2.0, nan, -1.0]),
        "reference_policy_logprobs": torch.tensor([nan, -1.5, -1.0, nan, -1.5]),
    }
    changed = token_advantages.adjust(columns, mask)
    assert list(changed) == ["advantages"]
    adjusted = changed["advantages"]
    assert adjusted.tolist() == pytest.approx([0.0, 1.0, 1.25, 0.0, 0.75])  # k1: 0.5, -1.0 and 0.5
    whitened = token_advantages.finish(adjusted, mask, token_advantages.sums(adjusted, mask))
    assert whitened.tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0, -1.0], abs=1e-4)


def test_whitening_without_variance_or_tokens_is_exact_zero():
    for mask in (torch.ones(2, 3), torch.zeros(2, 3), torch.tensor([[1.0, 0, 0], [0, 0, 0]])):
        advantages = torch.full((2, 3), 0.3)
        assert torch.equal(whiten(advantages, mask, whitening_sums(advantages, mask), 1e-6), torch.zeros(2, 3))
