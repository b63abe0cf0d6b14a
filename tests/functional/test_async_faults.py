"""What breaks in the middle of an asynchronous run, by real signals to real processes in every phase.

Each run plays many faults: starting one takes half a minute.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.functional import faulty
from tests.functional.cli import ROOT, SMALL, Finished, comparable, end, run_until, start
from tests.functional.faulty import Fault, write_faults

pytestmark = pytest.mark.timeout(900)

ASYNC_CONFIG = ROOT / "examples" / "configs" / "grpo_math_async_cpu.yaml"
SCRIPT = Path(faulty.__file__)
NUM_PROMPTS = 12  # an epoch is three steps
COMMON = (
    *SMALL,
    "data.train.kwargs={num_samples: 12}",
    "grpo.max_num_epochs=1000",
    "grpo.rollout_record={enabled: true, save_dir: record}",
)
VERIFIED = (  # nothing is decided but in verifier processes
    "env.math.math_verify_impl=dapo_math_verify",
    "env.math.verify_timeout_s=1",
)
EXACT = ("grpo.async_grpo.in_flight_weight_updates=false", "grpo.async_grpo.max_trajectory_age_steps=1")
TIMEOUT_S = 20
LIMITS = (f"cluster.worker_timeout_s={TIMEOUT_S}", "grpo.env_step_timeout_s=5")
PHASES = ("exposed_generation", "policy_training", "validation", "weight_sync")


def play(folder: Path, faults: list[Fault], *overrides: str, timeout_s: float = 600) -> Finished:
    """A run with these faults, to its end."""
    write_faults(folder, faults)
    process = start(folder, *COMMON, *overrides, script=SCRIPT, config=ASYNC_CONFIG)
    return end(process, folder, timeout_s)


def trained(folder: Path) -> list[list[str]]:
    """Ids of the groups that each step trained on, as the record of the run has them."""
    steps = sorted(folder.glob("record/step_*"))
    assert [int(step.name[5:]) for step in steps] == list(range(1, len(steps) + 1))
    return [list(json.loads((step / "index.json").read_text())["trained"]) for step in steps]


def check_prompts(steps: list[list[str]], num_steps: int) -> None:
    """Every prompt once in each epoch, none twice and none missing."""
    groups = [group for step in steps for group in step]
    assert len(steps) == num_steps and len(set(groups)) == len(groups)
    per_epoch = NUM_PROMPTS // len(steps[0])
    epochs: dict[int, Counter[str]] = {}
    for group in groups:
        batch, _, prompt = group.split("/", 2)
        epochs.setdefault((int(batch) - 1) // per_epoch, Counter())[prompt] += 1
    assert sorted(epochs) == list(range(num_steps // per_epoch))
    assert all(len(prompts) == NUM_PROMPTS and set(prompts.values()) == {1} for prompts in epochs.values())


def check_healed(finished: Finished, faults: list[Fault], num_steps: int, max_lag: int) -> None:
    assert finished.status == 0, finished.output[-6000:]
    assert finished.output.count("FAULT at ") == len(faults), finished.output[-6000:]
    check_prompts(trained(finished.folder), num_steps)
    rows = [row for row in finished.metrics if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert all(row["train/failed_sample_rate"] == 0 for row in rows)
    assert max(row["train/weight_version_lag/max"] for row in rows) <= max_lag


def killings(*roles: str) -> list[Fault]:
    """The roles killed in turn, in every phase once; every other step has a validation."""
    faults, step = [], 2
    for number, phase in enumerate(PHASES):
        step += 1
        if phase == "validation" and step % 2:
            step += 1
        faults.append(Fault(step=step, phase=phase, role=roles[number % len(roles)], after_s=0.02))
    return faults


@pytest.mark.over_20s("a run whose engine is replaced, which takes what a start takes")
def test_an_engine_that_is_killed_in_an_asynchronous_run_is_replaced(tmp_path: Path):
    """Weights arrive in flight."""
    faults = [Fault(step=2, phase="exposed_generation", role="engine", after_s=0.02)]
    finished = play(tmp_path, faults, "grpo.max_num_steps=3")
    check_healed(finished, faults, 3, 2)
    assert max(row["train/weight_version_lag/max"] for row in finished.metrics if row["step"] > 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "roles"),
    [
        ("exact", ("engine", "generation")),
        ("in_flight", ("rollout", "environment", "verifier", "generation", "engine")),
    ],
)
def test_what_is_killed_in_any_phase_is_replaced(tmp_path: Path, mode: str, roles: tuple[str, ...]):
    faults = killings(*roles)
    num_steps = -(-(faults[-1].step + 2) // 3) * 3
    overrides = [*(EXACT if mode == "exact" else ()), f"grpo.max_num_steps={num_steps}"]
    overrides += VERIFIED if "verifier" in roles else ()
    finished = play(tmp_path, faults, *overrides)
    check_healed(finished, faults, num_steps, 1 if mode == "exact" else 2)
    assert "counted as wrong" not in finished.output


@pytest.mark.slow
def test_what_is_stopped_beside_the_engines_heals_or_is_named(tmp_path: Path):
    """Verifier, environment, keeper of finished groups; then the rollout worker, which ends the run."""
    faults = [
        Fault(step=2, phase="exposed_generation", role="verifier", number=signal.SIGSTOP),
        Fault(step=4, phase="policy_training", role="environment", number=signal.SIGSTOP),
        Fault(step=7, phase="exposed_generation", role="keeper", number=signal.SIGSTOP),
        Fault(step=9, phase="policy_training", role="keeper", number=signal.SIGKILL),
        Fault(step=12, phase="weight_sync", role="rollout", number=signal.SIGSTOP),
    ]
    finished = play(
        tmp_path, faults, *LIMITS, *VERIFIED, "grpo.max_num_steps=30", "grpo.max_failed_sample_fraction=1.0"
    )
    assert finished.status == 1 and finished.output.count("FAULT at ") == len(faults), finished.output[-6000:]
    assert "counted as wrong" not in finished.output
    assert "environment 'math' did not answer" in finished.output
    assert finished.output.count("group_keeper-0, the process that holds finished groups, is lost") >= 2
    assert "no answer from rollout-0 (rank 0" in finished.output and "(stopped)" in finished.output
    groups = [group for step in trained(tmp_path) for group in step]
    assert len(set(groups)) == len(groups)


@pytest.mark.slow
def test_a_run_killed_again_and_again_trains_every_prompt_once_to_the_bit(tmp_path: Path):
    rng, num_steps = random.Random(5), 18
    overrides = [*COMMON, *EXACT, f"grpo.max_num_steps={num_steps}"]
    killed = tmp_path / "killed"
    for kill in range(2):
        log = killed / "out.log"
        if log.exists():
            log.rename(killed / f"out_{kill}.log")
        process = run_until(killed, f"/{num_steps}  ", *overrides, config=ASYNC_CONFIG)
        time.sleep(rng.uniform(0.0, 1.2))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    finished = end(start(killed, *overrides, config=ASYNC_CONFIG), killed)
    assert finished.status == 0, finished.output[-4000:]
    check_prompts(trained(killed), num_steps)
    whole = end(start(tmp_path / "whole", *overrides, config=ASYNC_CONFIG), tmp_path / "whole")
    rows = {row["step"]: row for row in comparable(whole.metrics)}
    assert sorted(rows) == list(range(1, num_steps + 1))
    runs = sorted(killed.glob("logs/exp_*/metrics.jsonl"))
    found = [json.loads(line) for file in runs for line in file.read_text().splitlines() if line.endswith("}")]
    assert len(found) > num_steps and {row["step"] for row in found} == set(rows)
    assert all(row == rows[row["step"]] for row in comparable(found))
