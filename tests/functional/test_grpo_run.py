"""Whole runs of the real command line: learning, resuming, and on several ranks."""

import pytest

from nemo_rl.report.run_files import read_index, read_lines, read_run, status_of
from nemo_rl.utils.config import AlarmsConfig
from tests.functional.cli import SMALL, continues_bit_for_bit, ends, run

pytestmark = pytest.mark.timeout(600)


@pytest.mark.over_20s("half the quick start, killed on its way: two starts of an engine")
def test_the_quick_start_learns_arithmetic_and_survives_kill_9_to_the_bit(tmp_path):
    """The README's first command, on its own configuration with half of the steps and nearer checkpoints."""
    steps = ("grpo.max_num_steps=20", "grpo.val_period=4", "checkpointing.save_period=4")
    before, finished = continues_bit_for_bit(tmp_path, *steps, killed_in=9, save_period=4)
    rows = before + finished.metrics
    assert [row["step"] for row in rows] == list(range(21))
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    assert accuracy[-1] > 0.8 and accuracy[-1] - accuracy[0] >= 0.3, accuracy
    first, last = ends(rows[1:], "train/reward")
    assert last > first + 0.1, (first, last)
    steps = [row for row in rows if row["step"] > 0]
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in steps)
    assert all(row["performance/controller_token_bytes"] == 0 for row in steps)
    seen = read_run(tmp_path / "logs" / "exp_001")
    assert status_of(seen).kind == "finished" and (seen.folder / "report.html").is_file()
    assert len(read_index(seen.folder)) == 16 * 16
    times = [line["workers"].get("generation-0-0", ()) for line, _ in read_lines(seen.folder / "timeline.jsonl")]
    assert {"prefill", "decode", "finish_weight_update"} <= {name for spans in times for name, _, _ in spans}
    assert not [event for event in seen.events if event["text"].partition(":")[0] in AlarmsConfig.model_fields]
    assert list(seen.folder.glob("ray/worker-*")), "a link to the logs of the workers"


@pytest.mark.slow
def test_two_ranks_and_two_engines_draw_the_same_samples_and_resume(tmp_path):
    """The first step's samples do not depend on how many workers made them; later ones follow the weights."""
    one = run(tmp_path / "one", *SMALL, "grpo.max_num_steps=1", "grpo.val_period=0", "checkpointing.enabled=false")
    many = ("cluster.cpu_workers_per_node=2", "policy.train_micro_batch_size=4")
    two = run(tmp_path / "two", *SMALL, *many, "grpo.max_num_steps=2")
    assert (one.status, two.status) == (0, 0), one.output[-3000:] + two.output[-3000:]
    for name in ("train/reward", "train/total_turns", "train/mean_gen_tokens_per_sample", "train/global_valid_toks"):
        assert one.metrics[0][name] == two.metrics[0][name], name
    assert two.metrics[0]["train/loss"] == pytest.approx(one.metrics[0]["train/loss"], abs=1e-6)
    assert two.metrics[0]["train/grad_norm"] == pytest.approx(one.metrics[0]["train/grad_norm"], rel=1e-5)
    resumed = run(tmp_path / "two", *SMALL, *many)
    assert resumed.status == 0, resumed.output[-4000:]
    assert [row["step"] for row in resumed.metrics] == [3, 4]
