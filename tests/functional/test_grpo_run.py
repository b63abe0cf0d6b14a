"""Whole runs of the real command line: learning, resuming, and with the model cut."""

import re
import sys
import time

import pytest

from nemo_rl.report.run_files import Run, read_index, read_lines, status_of
from nemo_rl.utils.config import AlarmsConfig
from tests.functional.cli import EXAMPLES, SMALL, begin, continues_bit_for_bit, end, ends, exact, learned, run
from tests.functional.test_leftovers import processes_of

pytestmark = pytest.mark.timeout(1800)

TWO_RANKS = "cluster.cpu_workers_per_node=2"
PACKED = "policy.sequence_packing={enabled: true, train_mb_tokens: 128, logprob_mb_tokens: 256}"
TENSOR = ("policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.sequence_parallel=true")
EXPERTS = "policy.dtensor_cfg.expert_parallel_size=2"
LORA = "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 16, alpha: 32}"


@pytest.mark.over_20s("half the quick start, killed on its way: two starts of an engine")
def test_the_quick_start_learns_arithmetic_and_survives_kill_9_to_the_bit(tmp_path):
    """The README's first command, on its own configuration with half of the steps and nearer checkpoints."""
    steps = ("grpo.max_num_steps=20", "grpo.val_period=4", "checkpointing.save_period=4")
    before, finished = continues_bit_for_bit(tmp_path, *steps, killed_in=9, save_period=4)
    rows = before + finished.metrics
    assert [row["step"] for row in rows] == list(range(21))
    learned([row["validation/accuracy"] for row in rows if "validation/accuracy" in row])
    first, last = ends(rows[1:], "train/reward")
    assert last > first + 0.1, (first, last)
    exact(rows[1:], 20)
    seen = Run(tmp_path / "logs" / "exp_001")
    assert status_of(seen).kind == "finished" and (seen.folder / "report.html").is_file()
    assert len(read_index(seen.folder)) == 16 * 16
    times = [line["workers"].get("generation-0-0", ()) for line, *_ in read_lines(seen.folder / "timeline.jsonl")]
    assert {"prefill", "decode", "finish_weight_update"} <= {name for spans in times for name, _, _ in spans}
    assert not [event for event in seen.events if event["text"].partition(":")[0] in AlarmsConfig.model_fields]
    assert list(seen.folder.glob("ray/worker-*")), "a link to the logs of the workers"


@pytest.mark.over_20s("a start of a run, by hand")
def test_the_loop_by_hand_learns_and_leaves_no_process(tmp_path):
    command = [sys.executable, str(EXAMPLES / "grpo_by_hand.py"), "--steps", "5"]
    process = begin(command, tmp_path / "out.log", LEFTOVERS=str(tmp_path))
    while "step 1 " not in (tmp_path / "out.log").read_text():
        assert process.poll() is None
        time.sleep(0.2)
    assert len(processes_of(tmp_path)) > 5
    output = end(process, tmp_path).output
    deadline = time.monotonic() + 600  # `test_leftovers` has the 10 s
    steps = re.findall(r"^step (\d+)  reward (\S+)  loss \S+  agreement (\S+)$", output, re.M)
    assert [int(number) for number, *_ in steps] == [1, 2, 3, 4, 5]
    rewards, agreement = ([float(step[column]) for step in steps] for column in (1, 2))
    assert rewards[-1] > rewards[0] + 0.2, rewards
    assert max(agreement) <= 1.00001
    assert re.search(r"^user: .+\nassistant: .+$", output, re.M), output
    while left := processes_of(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(tmp_path):
    """A mixture of experts, packed: tensor and sequence parallel at first, then with its experts spread over ranks."""
    common = (*SMALL, TWO_RANKS, PACKED, "policy.model_name=tiny:arithmetic-moe")
    rows = run(tmp_path, *common, *TENSOR, "grpo.max_num_steps=2").steps
    exact(rows, 2, largest=1.0001)
    spread = run(tmp_path, *common, EXPERTS, "grpo.max_num_steps=3")
    assert "step_2 after step 2" in spread.output
    rows += spread.steps
    exact(rows, 3, largest=1.0001)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 < row["train/packing/fill"] <= 1 <= row["train/packing/num_micro_batches"]
        assert row["train/moe/load_max_over_mean"] >= 1 >= row["train/moe/load_min_over_mean"]
        assert 0 < row["train/moe/router_entropy"] < 1.39  # log 4
        assert row["performance/train_flops_per_gpu"] > 0


@pytest.mark.slow
def test_adapters_learn(tmp_path):
    """Merged into the weights that generation receives. A killed run with adapters is one of DPO."""
    finished = run(tmp_path, LORA, "policy.optimizer.kwargs.lr=2e-3", "grpo.max_num_steps=20")
    learned(finished.curve("validation/accuracy"))
    first, last = ends(finished.steps, "train/reward")
    assert last > first + 0.1, (first, last)
    exact(finished.steps, 20)
