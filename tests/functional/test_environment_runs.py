"""The CPU example of every environment by its real command line: no sample fails, and something is learned."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.functional.cli import ROOT, Finished, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = ROOT / "examples" / "run_grpo.py"
SERVER = ROOT / "examples" / "environment_server.py"
NUM_STEPS = 10

# The batches of the example, whose mean reward says something, and nothing on the side.
SHORT = (
    f"grpo.max_num_steps={NUM_STEPS}",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.enabled=false",
    "logger.num_val_samples_to_print=0",
    "logger.tensorboard_enabled=false",
)
EXAMPLES: dict[str, tuple[str, ...]] = {
    "code": (),
    "tools": (),
    "judge": (f"env.judge.prompt_file={ROOT / 'examples' / 'prompts' / 'judge_tiny.txt'}",),  # runs elsewhere
    "composite": (),
    "multi_env": (),  # with retrieval
}


def config_of(name: str) -> Path:
    return ROOT / "examples" / "configs" / f"grpo_{name}_cpu.yaml"


def assert_learned(finished: Finished) -> None:
    assert finished.status == 0, finished.output[-4000:]
    steps = [row for row in finished.metrics if "train/reward" in row]
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


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    assert_learned(run(tmp_path, *SHORT, *EXAMPLES[name], script=SCRIPT, config=config_of(name)))


def test_the_example_behind_http_learns(tmp_path: Path) -> None:
    with environment_server(tmp_path) as url:
        assert_learned(
            run(tmp_path, *SHORT, f"env.elsewhere.base_url={url}", script=SCRIPT, config=config_of("remote"))
        )
