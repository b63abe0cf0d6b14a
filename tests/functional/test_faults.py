"""The fault matrix (`pytest -m faults`), a sample of it by default, and faults of environments.

FAULTS_SEED=3 pytest -m faults                                              other cells
FAULTS_CELLS='sft: driver, kill, train; ...' pytest -m faults -k named      cells of one loop, in this order
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.functional.cli import SMALL, keys, run
from tests.functional.fault_runs import EXACT, Chain, rows_in
from tests.functional.fault_table import Cell, chains, draw, possible
from tests.functional.test_supervised_runs import assert_learned
from tests.gpu.scenarios import LARGEST_ERROR

SEED = int(os.environ.get("FAULTS_SEED", "0"))
CHAIN_SIZE = 9
CHAINS = chains(draw(SEED), CHAIN_SIZE)
SFT_SAMPLE = """
    sft: tokenizer, kill, train
    sft: policy-0, kill, checkpoint
    sft: policy-1, exception, train
    sft: policy-0, truncated, resume
"""
ASYNC_SAMPLE = """
    async: environment, kill, generation
    async: rollout, kill, train
    async: keeper, kill, refit
    async: environment, kill, validation
    async: core, exception, validation
    async: driver, kill, train
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a small file system of its own, which a cell can fill; one like others without root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", folder], capture_output=True)
    yield folder
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", folder], check=True)


def cells_of(text: str) -> list[Cell]:
    """Lines "loop: who, what, when", as `str(cell)`."""
    named = {str(cell): cell for cell in possible()}
    return [named[line.strip()] for line in text.strip().splitlines()]


def play(folder: Path, cells: Sequence[Cell], *, overrides: tuple[str, ...] = (), compares: bool) -> Chain:
    """`compares`: with a run without faults, to the bit."""
    chain = Chain(loop=cells[0].loop, folder=folder / "run", overrides=overrides)
    if not os.path.ismount(folder):
        cells = [cell for cell in cells if cell.what != "disk"]
    print(f"\nseed {SEED}, {len(cells)} cells", file=sys.stderr)
    chain.play(cells)
    if chain.loop == "async":
        chain.check_prompts()
    if compares:
        chain.check_metrics()
    return chain


@pytest.mark.faults
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("number", range(len(CHAINS)), ids=lambda i: f"{CHAINS[i][0].loop}-{i}")
def test_the_matrix(disk: Path, number: int) -> None:
    """Engines of asynchronous chains die with weights in flight; the others have a schedule that repeats to the bit."""
    cells = CHAINS[number]
    is_exact = not any(cell.moves_versions for cell in cells)
    play(disk, cells, overrides=EXACT if is_exact and cells[0].loop == "async" else (), compares=is_exact)


@pytest.mark.skipif("FAULTS_CELLS" not in os.environ, reason="plays the cells in FAULTS_CELLS")
@pytest.mark.faults
@pytest.mark.timeout(2400)
def test_named_cells(disk: Path) -> None:
    cells = cells_of(os.environ["FAULTS_CELLS"].replace(";", "\n"))
    play(disk, cells, compares=cells[0].loop != "async")


@pytest.mark.timeout(1800)
@pytest.mark.over_20s("four cells of the matrix in two starts of a run")
def test_a_supervised_run_ends_resumes_repeats_its_steps_to_the_bit_and_learns(disk: Path) -> None:
    """On the configuration of the guide's first command, on two ranks.

    The first fault comes after two checkpoints, of which the later one is cut: every step with a fault is taken again
    without.
    """
    steps = ("sft.max_num_steps=100", "sft.val_period=10", "checkpointing.save_period=5")
    chain = Chain(loop="sft", folder=disk / "run", overrides=steps, after=10, goes_on=True)
    endings = chain.play(cells_of(SFT_SAMPLE))
    assert [ending.how for ending in endings] == ["healed", "healed", "ended", "healed"]
    rows = chain.check_repeated()
    assert [row["step"] for row in rows] == list(range(101))
    assert_learned(rows, "sft")


@pytest.mark.timeout(1800)
@pytest.mark.over_20s("an asynchronous run that loses an environment, an engine and its driver")
def test_an_asynchronous_run_heals_and_trains_every_prompt_once(tmp_path: Path) -> None:
    """In bfloat16, at a learning rate at which weights that are two steps old are nearly the same."""
    how = ("policy.precision=bfloat16", "policy.optimizer.kwargs.lr=1e-5")
    chain = play(tmp_path, cells_of(ASYNC_SAMPLE), overrides=how, compares=False)
    assert [ending.how for ending in chain.endings] == [*["healed"] * 5, "ended"]
    steps = [row for step, several in rows_in(chain.folder).items() if step > 0 for row in several]
    assert max(row["train/token_mult_prob_error"] for row in steps) <= LARGEST_ERROR["bfloat16"]
    assert max(row["train/grad_norm"] for row in steps) > 0


def test_every_pair_is_drawn() -> None:
    cells = draw(SEED)
    assert {pair for cell in cells for pair in cell.pairs} == {pair for cell in possible() for pair in cell.pairs}
    assert draw(SEED) == cells and len(cells) < 120


# -- environments of the user

UNSTEADY = """
import os
import time
from pathlib import Path
import torch
from nemo_rl.environments.interfaces import EnvironmentInterface, one_turn

class Unsteady(EnvironmentInterface):
    def __init__(self, cfg):
        pass

    def step(self, message_log_batch, metadata):
        if not Path("hung").exists() and Path("logs").exists():
            Path("hung").touch()
            time.sleep(1000)
        if any("7" in str(message["content"]) for log in message_log_batch for message in log):
            raise KeyError("seven")
        return one_turn([""] * len(metadata), metadata, torch.rand(len(metadata)))

    def global_post_process_and_metrics(self, batch):
        return batch, {}

    def shutdown(self):
        with Path("ended").open("a") as file:
            file.write(f"{os.getpid()}\\n")

class Unmade(Unsteady):
    def __init__(self, cfg):
        raise KeyError("oven_temperature")
"""


def run_with(folder: Path, name: str, *overrides: str, status: int) -> str:
    """The output of a run whose environment is that class of UNSTEADY."""
    (folder / "unsteady.py").write_text(UNSTEADY)
    mine = (f"+env.mine={{type: unsteady:{name}}}", "data.default.env_name=mine")
    return run(folder, *SMALL, *mine, *overrides, status=status).output


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_failing_episodes_are_left_out_and_nan_ends_the_run(tmp_path: Path) -> None:
    """An environment that raises on some conversations and once never returns; then a learning rate beyond reason."""
    bad = keys(grpo="env_step_timeout_s=3 max_failed_sample_fraction=1.0", policy="optimizer.kwargs.lr=1e30")
    output = run_with(tmp_path, "Unsteady", *bad, status=1)
    assert "environment 'mine' did not answer" in output
    assert "sampled a token with the logprob nan or inf" in output, "after the first update"
    assert "gradient norm nan" in output and "policy.nonfinite_action=skip" in output
    assert list(tmp_path.glob("logs/exp_000/nonfinite_step_*.jsonl"))
    assert len((tmp_path / "ended").read_text().split()) == 1, "the environment is shut down after an error, too"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_environment_that_cannot_be_made_is_the_users_to_change(tmp_path: Path) -> None:
    output = run_with(tmp_path, "Unmade", status=2)
    assert "environment 'mine' (env.mine) cannot be started: KeyError: 'oven_temperature'" in output
