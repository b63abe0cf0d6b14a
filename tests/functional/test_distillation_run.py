"""Whole runs of on-policy distillation: learning, several teachers on machines of their own."""

import json
import time

import pytest

from tests.functional.cli import ROOT, run, small

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

SCRIPT = ROOT / "examples" / "run_distillation.py"
CPU_CONFIG = ROOT / "examples" / "configs" / "distillation_math_cpu.yaml"


def test_the_student_learns_what_the_teacher_knows(tmp_path):
    """The guide's first command, on its own configuration."""
    started = time.monotonic()
    finished = run(tmp_path, script=SCRIPT, config=CPU_CONFIG)
    assert finished.status == 0, finished.output[-4000:]
    assert time.monotonic() - started < 300
    rows = finished.metrics
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    assert accuracy[-1] > 0.8 and accuracy[-1] - accuracy[0] >= 0.3, accuracy
    steps = [row for row in rows if row["step"] > 0]
    fifth = len(steps) // 5
    for name in ("train/loss", "train/forward_kl", "train/reverse_kl"):
        first, last = (sum(row[name] for row in part) / fifth for part in (steps[:fifth], steps[-fifth:]))
        assert last < first / 4, (name, first, last)
    assert all(row["performance/controller_token_bytes"] == 0 for row in steps)


def test_two_teachers_apart_from_the_student(tmp_path):
    """A better model teaches sums, a second student differences, on two ranks of machines of their own."""
    for name, sign in (("sums", 1), ("differences", -1)):
        text = "+" if sign == 1 else "-"
        rows = [{"input": f"{a}{text}{b}", "output": str(a + sign * b)} for a in range(5) for b in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = (
        *small("distillation"),
        "teacher=null",
        "+teachers={good: {model_name: tiny:arithmetic-teacher}, same: {model_name: tiny:arithmetic}}",
        "distillation.task_to_teacher={sums: good, differences: same}",
        "data.train=[{data_path: sums.jsonl}, {data_path: differences.jsonl}]",
        "distillation.teacher_resources={gpus_per_node: 0, cpu_workers_per_node: 2}",
        "distillation.max_num_steps=2",
        "distillation.val_period=0",
        "checkpointing.enabled=false",
    )
    finished = run(tmp_path, *overrides, script=SCRIPT, config=CPU_CONFIG)
    assert finished.status == 0, finished.output[-4000:]
    assert all(row["train/global_valid_seqs"] == 16 for row in finished.metrics)
    assert len(finished.metrics) == 2
