import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl.algorithms.config.grpo import ClippedPGLossConfig
from nemo_rl.algorithms.config.ppo import GAEConfig
from nemo_rl.algorithms.ppo import GAEAdvantages, generalized_advantages

NO_KL = ClippedPGLossConfig(reference_policy_kl_penalty=0.0)
KL = ClippedPGLossConfig(reference_policy_kl_penalty=0.1, reference_policy_kl_type="k1", use_kl_in_reward=True)


def estimator(cfg: ClippedPGLossConfig = NO_KL, **changes: Any) -> GAEAdvantages:
    return GAEAdvantages(cfg, GAEConfig(**({"normalize_advantages": False, "eps": 1e-8} | changes)))


def row(reward: float, mask: list[int], values: list[float]) -> tuple[dict[str, Tensor], Tensor]:
    columns = {"advantages": torch.full((len(mask),), reward), "values": torch.tensor(values)}
    return columns, torch.tensor(mask).float()


def naive_advantage(rewards: list[float], values: list[float], gamma: float, gae_lambda: float, step: int) -> float:
    """The sum over all later steps of (gamma lambda)^l times the temporal difference l steps ahead."""
    total = 0.0
    for later in range(step, len(rewards)):
        after = values[later + 1] if later + 1 < len(values) else 0.0
        total += (gamma * gae_lambda) ** (later - step) * (rewards[later] + gamma * after - values[later])
    return total


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=12),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
)
def test_it_is_the_discounted_sum_of_temporal_differences(steps, gamma, gae_lambda):
    rewards, values = ([step[number] for step in steps] for number in (0, 1))
    expected = [naive_advantage(rewards, values, gamma, gae_lambda, step) for step in range(len(steps))]
    result = generalized_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    assert result.tolist() == pytest.approx(expected, abs=1e-12)


def test_only_loss_tokens_are_steps():
    """Reward 1 with the last of three tokens after a prompt token; an environment spoke in between and at the end."""
    mask, values = [0, 1, 1, 0, 1, 0], [9.0, 0.2, 0.4, math.nan, 0.5, 7.0]
    columns = estimator(gae_gamma=0.9, gae_lambda=0.5).adjust(*row(1.0, mask, values))
    last = 1 - 0.5
    middle = 0.9 * 0.5 - 0.4 + 0.45 * last
    first = 0.9 * 0.4 - 0.2 + 0.45 * middle
    assert columns["advantages"].tolist() == pytest.approx([0.0, first, middle, 0.0, last, 0.0])
    assert columns["returns"].tolist() == pytest.approx([0.0, first + 0.2, middle + 0.4, 0.0, last + 0.5, 0.0])


def test_advantages_and_returns_have_lambdas_of_their_own():
    batch = row(1.0, [0, 1, 1, 1], [0.0, 0.2, 0.4, 0.5])
    found = estimator(gae_lambda_policy=0.0, gae_lambda_value=1.0).adjust(*batch)
    assert found["returns"].tolist() == pytest.approx([0.0, 1.0, 1.0, 1.0])
    assert found["advantages"].tolist() == pytest.approx([0.0, 0.4 - 0.2, 0.5 - 0.4, 1.0 - 0.5])


def test_the_longer_the_sample_the_longer_the_memory():
    settings = GAEConfig(length_adaptive_alpha=0.05, gae_lambda_policy=0.5)
    assert settings.lambda_of_policy(100) == pytest.approx(0.8)
    assert settings.lambda_of_policy(10) == 0.0 and settings.lambda_of_value == 0.95
    batch = row(1.0, [0, 1, 1, 1], [0.0, 0.2, 0.4, 0.5])
    found, wanted = estimator(length_adaptive_alpha=2 / 3).adjust(*batch), estimator(gae_lambda=0.5).adjust(*batch)
    assert found["advantages"].tolist() == pytest.approx(wanted["advantages"].tolist())


def test_every_step_is_charged_its_kl():
    columns, mask = row(1.0, [0, 1, 1], [0.0, 0.0, 0.0])
    columns |= {
        "prev_logprobs": torch.tensor([0.0, -1.0, -2.0]),
        "reference_policy_logprobs": torch.tensor([math.nan, -1.5, -1.0]),
    }
    result = estimator(KL, gae_lambda=1.0).adjust(columns, mask)
    assert result["returns"].tolist() == pytest.approx([0.0, -0.05 + 1 + 0.1, 1 + 0.1])


def test_advantages_are_whitened_and_returns_are_not():
    """test_advantages.py has the whitening of a batch."""
    columns, mask = row(1.0, [0, 1, 1, 1], [0.0, 0.2, 0.4, 0.5])
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
