"""kill -9 of whole runs of the real command line. Two go on side by side: one core each."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.functional.cli import CPU_CONFIG, ROOT, SCRIPT, SMALL, Finished, comparable, run, run_until, weights_of

pytestmark = pytest.mark.timeout(600)

EXAMPLES = ROOT / "examples"
EVERY_STEP_OF = "{0}.max_num_steps=6", "checkpointing.save_period=2", "++checkpointing.save_consolidated=true"
SPLIT = (
    "cluster.cpu_workers_per_node=2",
    "policy.generation.colocated={enabled: false, resources: {cpu_workers_per_node: 1}}",
    "loss_fn.use_importance_sampling_correction=true",
    "grpo.async_grpo.enabled=true",
)
SUPERVISED = (
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "sft.val_period=2",
    "sft.val_at_start=false",
    "logger.tensorboard_enabled=false",
)
RUNS: dict[str, tuple[Path, Path, str, tuple[str, ...]]] = {
    # script, configuration, section of the algorithm, overrides
    "async": (SCRIPT, CPU_CONFIG, "grpo", (*SMALL, *SPLIT)),
    "grpo": (SCRIPT, CPU_CONFIG, "grpo", SMALL),
    "sft": (EXAMPLES / "run_sft.py", EXAMPLES / "configs" / "sft_cpu.yaml", "sft", SUPERVISED),
}


def killed_and_continued(folder: Path, kind: str) -> Path:
    """kill -9 of the driver after step 5; the checkpoint of step 4 is put aside; then the same command.

    It goes on from step 2. Steps 3 to 5 and the model of step 4 are those of the first run, to the bit. Returns the
    directory of checkpoints.
    """
    script, config, section, overrides = RUNS[kind]
    overrides = (*overrides, *(text.format(section) for text in EVERY_STEP_OF))
    process = run_until(folder, "step 5/6", *overrides, script=script, config=config)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = comparable(Finished(status=process.returncode, output="", folder=folder).metrics)
    (step_4,) = folder.glob("results/*/step_4")
    want = weights_of(step_4, "policy")
    step_4.rename(folder / "put_aside")
    again = run(folder, *overrides, script=script, config=config)
    assert again.status == 0, again.output[-4000:]
    assert "step_2 after step 2" in again.output
    after = comparable(again.metrics)
    assert [row["step"] for row in after] == [3, 4, 5, 6]
    assert after[:-1] == [row for row in before if row["step"] > 2]
    got = weights_of(step_4, "policy")
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    return step_4.parent


@pytest.fixture(scope="module")
def continued(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """`killed_and_continued` of every kind whose test was selected."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    kinds = [test.callspec.params["kind"] for test in tests if test.function is test_it_continues_bit_for_bit]
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in kinds}
    with ThreadPoolExecutor(2) as lanes:
        yield {kind: lanes.submit(killed_and_continued, folder, kind) for kind, folder in folders.items()}


SLOW = ("grpo", "async")  # two minutes each; trainer and checkpoints are those of the third


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in RUNS])
def test_it_continues_bit_for_bit(continued: dict[str, Future], kind: str) -> None:
    checkpoints = continued[kind].result()
    if kind == "async":
        open_groups = json.loads((checkpoints / "step_2" / "replay_buffer" / "open_groups.json").read_text())
        assert {record["version"] for record in open_groups} == {1, 2}
