"""Whole runs of the real command line with a model that sees images."""

import json

import pytest

from nemo_rl.report.run_files import read_block
from tests.functional.cli import ROOT, SMALL, continues_bit_for_bit, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = ROOT / "examples" / "run_vlm_grpo.py"
CONFIG = ROOT / "examples" / "configs" / "grpo_vlm_cpu.yaml"
EVAL = ROOT / "examples" / "configs" / "evals" / "eval_vlm_cpu.yaml"


def test_grpo_learns_to_count_shapes_and_to_name_colours(tmp_path):
    """The example, on its own configuration."""
    finished = run(tmp_path, script=SCRIPT, config=CONFIG, timeout_s=600)
    assert finished.status == 0, finished.output[-4000:]
    accuracy = [row["validation/accuracy"] for row in finished.metrics if "validation/accuracy" in row]
    assert accuracy[0] < 0.5 and accuracy[-1] - accuracy[0] >= 0.3, accuracy
    steps = [row for row in finished.metrics if row["step"] > 0]
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in steps)
    assert all(row["performance/controller_token_bytes"] == 0 for row in steps)
    assert sum(row["timing/train/total_step_time"] for row in steps) < 300


def test_a_killed_run_goes_on_to_the_bit_and_two_engines_draw_the_same_samples(tmp_path):
    """Two engines of one rank get the weights of a language model that is cut over two, and draw with them."""
    steps = (*SMALL, "grpo.max_num_steps=6")
    before, finished = continues_bit_for_bit(tmp_path / "one", *steps, script=SCRIPT, config=CONFIG)
    rows = [row for row in before + finished.metrics if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in rows)
    assert any(row["train/grad_norm"] > 0 for row in rows)
    cut = "policy.dtensor_cfg.tensor_parallel_size=2"
    many = ("cluster.cpu_workers_per_node=2", cut, "checkpointing.enabled=false", "grpo.max_num_steps=2")
    two = run(tmp_path / "two", *SMALL, *many, script=SCRIPT, config=CONFIG)
    assert two.status == 0, two.output[-4000:]
    first = two.metrics[0]
    for name in ("train/reward", "train/mean_gen_tokens_per_sample", "train/global_valid_toks"):
        assert first[name] == rows[0][name], name
    assert first["train/loss"] == pytest.approx(rows[0]["train/loss"], abs=1e-6)
    assert first["train/grad_norm"] == pytest.approx(rows[0]["train/grad_norm"], rel=1e-5)
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in two.metrics if row["step"] > 0)


def test_an_evaluation_asks_about_images(tmp_path):
    asked = (f"eval.save_path={tmp_path}", "data.kwargs.num_samples=60")
    finished = run(tmp_path, *asked, script=ROOT / "examples" / "run_eval.py", config=EVAL)
    assert finished.status == 0, finished.output[-4000:]
    overall = json.loads((tmp_path / "results.json").read_text())["overall"]
    assert 0.1 < overall["mean"] < 0.6 and overall["num_failed"] == 0, overall


def test_pictures_of_a_game_and_prompts_without_an_image_in_one_batch(tmp_path):
    """The tower is frozen and packed rows cross the borders of images; the report shows what the model has seen."""
    games = ROOT / "examples" / "configs" / "grpo_vlm_games_cpu.yaml"
    batch = ("grpo.num_prompts_per_step=6", "policy.train_global_batch_size=24")
    finished = run(tmp_path, *SMALL, *batch, script=SCRIPT, config=games)
    assert finished.status == 0, finished.output[-4000:]
    steps = [row for row in finished.metrics if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in steps)
    assert all(row["train/failed_sample_rate"] == 0 for row in steps)
    assert all(row["performance/controller_token_bytes"] == 0 for row in steps)
    assert max(row["train/max_turns_per_sample"] for row in steps) >= 2
    assert "only what training changes" in finished.output
    [samples] = tmp_path.glob("logs/exp_*/samples")
    num_pictures = {len(sample.get("pictures", ())) for block in samples.glob("*.js") for sample in read_block(block)}
    assert {0, 1} < num_pictures <= {0, 1, 2, 3}, num_pictures


@pytest.mark.parametrize("refit", ["adapter", "merged"])
def test_adapters_on_one_part_alone(tmp_path, refit):
    """Of the language model, sent apart; of the tower, merged."""
    chosen = {
        "adapter": "exclude_modules: ['*visual*']",
        "merged": "match_all_linear: false, target_modules: ['*visual*']",
    }
    lora = f"policy.dtensor_cfg.lora_cfg={{enabled: true, dim: 8, refit: {refit}, {chosen[refit]}}}"
    finished = run(tmp_path, *SMALL, lora, "policy.optimizer.kwargs.lr=2e-3", script=SCRIPT, config=CONFIG)
    assert finished.status == 0, finished.output[-4000:]
    steps = [row for row in finished.metrics if row["step"] > 0]
    assert len(steps) == 4 and all(row["train/token_mult_prob_error"] <= 1.00001 for row in steps)
    assert any(row["train/grad_norm"] > 0 for row in steps)


def test_a_reward_model_prefers_right_answers_on_images(tmp_path):
    config = ROOT / "examples" / "configs" / "rm_vlm_cpu.yaml"
    short = ("rm.max_num_steps=30", "checkpointing.enabled=false")
    finished = run(tmp_path, *short, script=ROOT / "examples" / "run_rm.py", config=config)
    assert finished.status == 0, finished.output[-4000:]
    name = "validation/validation-default_accuracy"
    accuracies = [row[name] for row in finished.metrics if name in row]
    assert accuracies[0] < 0.7 and accuracies[-1] > 0.8, accuracies


def test_dpo_prefers_right_answers_on_images(tmp_path):
    config = ROOT / "examples" / "configs" / "dpo_vlm_cpu.yaml"
    short = ("dpo.max_num_steps=20", "checkpointing.enabled=false")
    finished = run(tmp_path, *short, script=ROOT / "examples" / "run_dpo.py", config=config)
    assert finished.status == 0, finished.output[-4000:]
    losses = [row["validation/val_loss"] for row in finished.metrics if "validation/val_loss" in row]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < 0.55, losses
