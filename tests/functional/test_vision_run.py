"""Whole runs of the real command line with a model that sees images."""

import pytest

from nemo_rl.report.run_files import read_block
from tests.functional.cli import SMALL, continues_bit_for_bit, exact, example, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COUNTING = example("vlm_grpo", "grpo_vlm_cpu")


def test_grpo_learns_to_count_shapes_and_to_name_colours(tmp_path):
    """Two thirds of the example."""
    finished = run(tmp_path, "grpo.max_num_steps=20", **COUNTING, timeout_s=600)
    accuracy = finished.curve("validation/accuracy")
    assert accuracy[0] < 0.5 and accuracy[-1] - accuracy[0] >= 0.3, accuracy
    exact(finished.steps, 20)
    assert sum(finished.curve("timing/train/total_step_time")) < 300


def test_a_killed_run_goes_on_to_the_bit_and_two_engines_draw_the_same_samples(tmp_path):
    """Two engines of one rank get the weights of a language model that is cut over two, and draw with them."""
    before, finished = continues_bit_for_bit(tmp_path / "one", *SMALL, "grpo.max_num_steps=6", **COUNTING)
    rows = [row for row in before + finished.metrics if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    exact(rows, 6)
    cut = "policy.dtensor_cfg.tensor_parallel_size=2"
    many = ("cluster.cpu_workers_per_node=2", cut, "checkpointing.enabled=false", "grpo.max_num_steps=2")
    two = run(tmp_path / "two", *SMALL, *many, **COUNTING).steps
    exact(two, 2)
    for name in ("train/reward", "train/mean_gen_tokens_per_sample", "train/global_valid_toks"):
        assert two[0][name] == rows[0][name], name
    assert two[0]["train/loss"] == pytest.approx(rows[0]["train/loss"], abs=1e-6)
    assert two[0]["train/grad_norm"] == pytest.approx(rows[0]["train/grad_norm"], rel=1e-5)


def test_pictures_of_a_game_and_prompts_without_an_image_in_one_batch(tmp_path):
    """The tower is frozen and packed rows cross the borders of images; the report shows what the model has seen."""
    batch = ("grpo.num_prompts_per_step=6", "policy.train_global_batch_size=24")
    finished = run(tmp_path, *SMALL, *batch, **example("vlm_grpo", "grpo_vlm_games_cpu"))
    exact(finished.steps, 4)
    assert not any(finished.curve("train/failed_sample_rate"))
    assert max(finished.curve("train/max_turns_per_sample")) >= 2
    assert "only what training changes" in finished.output
    [samples] = tmp_path.glob("logs/exp_*/samples")
    num_pictures = {len(sample.get("pictures", ())) for block in samples.glob("*.js") for sample in read_block(block)}
    assert {0, 1} < num_pictures <= {0, 1, 2, 3}, num_pictures


def test_adapters_of_the_language_model_are_sent_apart(tmp_path):
    lora = "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 8, refit: adapter, exclude_modules: ['*visual*']}"
    exact(run(tmp_path, *SMALL, lora, "policy.optimizer.kwargs.lr=2e-3", **COUNTING).steps, 4)


def test_a_reward_model_prefers_right_answers_on_images(tmp_path):
    finished = run(tmp_path, "rm.max_num_steps=30", "checkpointing.enabled=false", **example("rm", "rm_vlm_cpu"))
    accuracies = finished.curve("validation/validation-default_accuracy")
    assert accuracies[0] < 0.7 and accuracies[-1] > 0.8, accuracies


def test_dpo_prefers_right_answers_on_images(tmp_path):
    finished = run(tmp_path, "dpo.max_num_steps=20", "checkpointing.enabled=false", **example("dpo", "dpo_vlm_cpu"))
    losses = finished.curve("validation/val_loss")
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < 0.55, losses
