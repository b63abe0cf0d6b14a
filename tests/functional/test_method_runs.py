"""The twins of recipes of methods run two steps, and their loss is a number."""

import math

import pytest
import yaml

from tests.functional.cli import ROOT, SMALL, run
from tests.unit.config.test_methods import CONFIGS, GRPO, twin

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

METHODS = (
    "dapo",
    "prorlv2",
    "deepscaler-1.5b-8k",
    "fp8",
    "long-context",
    "reward-model",
    "gspo",
    "dr-grpo",
    "reinforce",
)
TWO_STEPS = (*SMALL, "grpo.max_num_steps=2", "grpo.num_prompts_per_step=8", "grpo.val_period=0")


@pytest.mark.parametrize("method", METHODS)
def test_a_twin_runs_two_steps(method, tmp_path):
    (recipe,) = [path for path in GRPO if path.stem.startswith(method)]
    config = tmp_path / "twin.yaml"
    config.write_text(yaml.safe_dump(twin(recipe)))
    finished = run(tmp_path, *TWO_STEPS, "checkpointing.enabled=false", config=config)
    assert finished.status == 0, finished.output[-4000:]
    rows = [row for row in finished.metrics if row["step"] > 0]
    assert len(rows) == 2
    assert all(math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in rows), rows
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in rows)


def test_a_student_and_a_teacher_of_megatron_run_two_steps(tmp_path):
    overrides = [word.replace("grpo.", "distillation.") for word in TWO_STEPS]
    script, config = ROOT / "examples" / "run_distillation.py", CONFIGS / "distillation_math_megatron_cpu.yaml"
    finished = run(tmp_path, *overrides, "checkpointing.enabled=false", script=script, config=config)
    assert finished.status == 0, finished.output[-4000:]
    rows = [row for row in finished.metrics if row["step"] > 0]
    assert len(rows) == 2 and all(row["train/loss"] > 0 for row in rows), rows
