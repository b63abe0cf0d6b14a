"""kill -9 of whole runs of the real command line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.functional.cli import CPU_CONFIG, ROOT, SCRIPT, SMALL, Finished, comparable, run, run_until, weights_of

pytestmark = pytest.mark.timeout(600)

EXAMPLES = ROOT / "examples"
EVERY_STEP_OF = "{0}.max_num_steps=6", "checkpointing.save_period=2", "++checkpointing.save_consolidated=true"
SUPERVISED = (
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "sft.val_period=2",
    "sft.val_at_start=false",
    "logger.tensorboard_enabled=false",
)
RUNS: dict[str, tuple[Path, Path, str, tuple[str, ...]]] = {
    # script, configuration, section of the algorithm, overrides
    "grpo": (SCRIPT, CPU_CONFIG, "grpo", SMALL),
    "sft": (EXAMPLES / "run_sft.py", EXAMPLES / "configs" / "sft_cpu.yaml", "sft", SUPERVISED),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("grpo", marks=pytest.mark.over_20s("two starts of a run with an engine")),
        pytest.param("sft", marks=pytest.mark.over_20s("two starts of a run")),
    ],
)
def test_it_continues_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """kill -9 of the driver after step 5; the checkpoint of step 4 is put aside; then the same command.

    It goes on from step 2. Steps 3 to 5 and the model of step 4 are those of the first run, to the bit.
    """
    script, config, section, overrides = RUNS[kind]
    overrides = (*overrides, *(text.format(section) for text in EVERY_STEP_OF))
    process = run_until(tmp_path, "step 5/6", *overrides, script=script, config=config)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = comparable(Finished(status=process.returncode, output="", folder=tmp_path).metrics)
    (step_4,) = tmp_path.glob("results/*/step_4")
    want = weights_of(step_4, "policy")
    step_4.rename(tmp_path / "put_aside")
    again = run(tmp_path, *overrides, script=script, config=config)
    assert again.status == 0, again.output[-4000:]
    assert "step_2 after step 2" in again.output
    after = comparable(again.metrics)
    assert [row["step"] for row in after] == [3, 4, 5, 6]
    assert after[:-1] == [row for row in before if row["step"] > 2]
    got = weights_of(step_4, "policy")
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
