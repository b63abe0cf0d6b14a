"""Environments under the names of NeMo RL: several rewards of mathematics, overlap of programs, refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.loader import load_config
from nemo_rl.data.rows.processors import find_processor
from nemo_rl.environments.config import MathEnvironmentConfig
from nemo_rl.environments.registry import find_env_class, new_environment


def log(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]


def test_mathematics_with_three_rewards() -> None:
    environment: Any = new_environment("math_multi_reward", {"num_workers": 1})
    texts = [
        "<think>x</think> <answer>42</answer>",
        "<answer>42.0</answer>",
        "<think>x</think> <answer>41</answer>",
        "\\boxed{42}",
    ]
    result = environment.step([log(text) for text in texts], [{"ground_truth": "42"}] * 4)
    environment.shutdown()
    assert result.rewards.tolist() == [[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]]
    assert result.metrics[1] == {"correct": 1.0, "integer": 0.0, "format": 0.0}
    assert result.terminateds.all() and result.answers[0] == "42"


def test_programs_are_compared_by_their_words() -> None:
    environment: Any = new_environment("code_jaccard", {})
    logs = [log("```python\nx = 1\n```"), log("```python\nx = 1\nprint(x, y)\n```"), log("")]
    result = environment.step(logs, [{"ground_truth": "x = 1"}] * 3)
    assert result.rewards.tolist() == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("name", ["math_default", "math_multi_reward"])
def test_a_section_has_the_keys_of_mathematics(name: str) -> None:
    overrides = [f"+env.{name}.num_workers=3", f"data.default.env_name={name}"]
    config = load_config(GRPOMasterConfig, "examples/configs/grpo_math_1B.yaml", overrides)
    section = config.env[name]
    assert isinstance(section, MathEnvironmentConfig) and (section.type, section.num_workers) == (name, 3)


def test_what_needs_images_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="environment 'vlm' is not supported yet: use type: composite"):
        find_env_class("vlm")
    with pytest.raises(ValueError, match="processor 'nemo_gym_data_processor' is not supported yet"):
        find_processor("nemo_gym_data_processor")
    for name in ("sft_processor", "helpsteer3_data_processor"):
        assert find_processor(name, of_examples=True).__module__.endswith("example_processors")
