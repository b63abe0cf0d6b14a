"""The CPU example of every environment by its real command line: no sample fails, and something is learned."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_rl.data.model_folder import resolve_model
from tests.functional.cli import BARE, EXAMPLES, ends, example, keys, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SERVER = EXAMPLES / "environment_server.py"
NUM_STEPS = 10
OVERRIDES: dict[str, tuple[str, ...]] = {
    "code": (),
    "tools": (),
    "judge": (f"env.judge.prompt_file={EXAMPLES / 'prompts' / 'judge_tiny.txt'}",),  # runs elsewhere
    "composite": (),
    "multi_env": (),  # with retrieval
}


def assert_learns(folder: Path, name: str, *overrides: str) -> None:
    """On the batches of the example, whose mean reward says something."""
    short = (*BARE, f"grpo.max_num_steps={NUM_STEPS}")
    steps = run(folder, *short, *overrides, **example("grpo", f"grpo_{name}_cpu")).steps
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert [row["train/failed_sample_rate"] for row in steps] == [0.0] * NUM_STEPS
    rewards = [row["train/reward"] for row in steps]
    assert sum(rewards[-3:]) / 3 > rewards[0], rewards


@contextmanager
def environment_server(folder: Path) -> Iterator[str]:
    """The address of a server of the math environment, which ends with the block."""
    log = folder / "server.log"
    command = [sys.executable, str(SERVER), "--environment", "math", "--options", "{num_workers: 1}", "--port", "0"]
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 600
        while (found := re.search(r"math at (http://\S+)\n", log.read_text())) is None:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found[1]
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    assert_learns(tmp_path, name, *OVERRIDES[name])


def test_the_example_behind_http_learns(tmp_path: Path) -> None:
    with environment_server(tmp_path) as url:
        assert_learns(tmp_path, "remote", f"env.elsewhere.base_url={url}")


def save_reward_model(directory: Path) -> None:
    """The tiny model with a head that likes even numbers: a linear fit of +1 and -1 to the states that end answers."""
    base = resolve_model("tiny:arithmetic")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    said = [(a, b, a + b + off) for a in range(10) for b in range(10) for off in (0, 1)]
    texts = [f"<|user|>{a}+{b}<eos><|assistant|>\\boxed{{{number}}}<eos>" for a, b, number in said]
    liked = torch.tensor([1.0 - 2.0 * (number % 2) for _, _, number in said])
    with torch.no_grad():
        ends_of = (model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in texts)
        states = torch.stack(list(ends_of))
        ridge = states.T @ states + 0.1 * torch.eye(states.shape[1])
        model.score.weight.copy_(torch.linalg.solve(ridge, states.T @ liked)[None])
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def test_the_policy_learns_what_the_reward_model_likes(tmp_path):
    save_reward_model(tmp_path / "rm")
    section = f"+env.reward_model={{model_name: {tmp_path / 'rm'}, precision: float32}}"
    data = "+data.default={env_name: reward_model, processor: conversation_processor}"
    short = keys(grpo="max_num_steps=20 val_period=10", checkpointing="enabled=false")
    finished = run(tmp_path, section, data, *short, "logger.tensorboard_enabled=false")
    first, last = ends(finished.steps, "train/reward")
    assert last > first + 0.2, (first, last)
    for row in finished.steps:
        assert row["train/num_failed_samples"] == 0
        assert row["train/reward_model/reward_mean"] == pytest.approx(row["train/reward"], abs=1e-5)
