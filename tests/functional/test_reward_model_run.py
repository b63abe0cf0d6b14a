"""GRPO whose rewards are the scores of a reward model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_rl.data.tiny_model import resolve_model
from tests.functional.cli import ends, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def save_reward_model(directory: Path) -> None:
    """The tiny model with a head that likes even numbers: a linear fit of +1 and -1 to the states that end answers."""
    base = resolve_model("tiny:arithmetic")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    said = [(a, b, a + b + off) for a in range(10) for b in range(10) for off in (0, 1)]
    texts = [f"<|user|>{a}+{b}<eos><|assistant|>\\boxed{{{number}}}<eos>" for a, b, number in said]
    liked = torch.tensor([1.0 - 2.0 * (number % 2) for _, _, number in said])
    with torch.no_grad():
        states = torch.stack(
            [model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in texts]
        )
        ridge = states.T @ states + 0.1 * torch.eye(states.shape[1])
        model.score.weight.copy_(torch.linalg.solve(ridge, states.T @ liked)[None])
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def test_the_policy_learns_what_the_reward_model_likes(tmp_path):
    save_reward_model(tmp_path / "rm")
    finished = run(
        tmp_path,
        f"+env.reward_model={{model_name: {tmp_path / 'rm'}, precision: float32}}",
        "+data.default={env_name: reward_model, processor: conversation_processor}",
        "grpo.max_num_steps=20",
        "grpo.val_period=10",
        "checkpointing.enabled=false",
        "logger.tensorboard_enabled=false",
    )
    first, last = ends(finished.steps, "train/reward")
    assert last > first + 0.2, (first, last)
    for row in finished.steps:
        assert row["train/num_failed_samples"] == 0
        assert row["train/reward_model/reward_mean"] == pytest.approx(row["train/reward"], abs=1e-5)
