"""The CPU example of every environment by its real command line: no sample fails, and something is learned."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.functional.cli import BARE, EXAMPLES, example, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
        deadline = time.monotonic() + 60
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
