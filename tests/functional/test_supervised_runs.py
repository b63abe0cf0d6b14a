"""Whole runs of SFT, DPO and reward models on the real command line: learning, resuming, more ranks, streams."""

import math
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_rl.data.config import PreferenceDatasetConfig
from nemo_rl.data.datasets.arithmetic import load_arithmetic_preference
from tests.conversations import assistant, user
from tests.functional.cli import continues_bit_for_bit, ends, example, keys, run

pytestmark = pytest.mark.timeout(1800)

LN2 = math.log(2)


def small(kind: str) -> tuple[str, ...]:
    """A run of seconds: four steps, nothing on the side."""
    steps = {kind: "max_num_steps=4 val_period=2 val_at_start=false", "checkpointing": "save_period=2"}
    batch = "train_global_batch_size=16 train_micro_batch_size=8"
    return keys(policy=batch, logger="tensorboard_enabled=false", **steps)


@pytest.mark.over_20s("a start of a run")
def test_dpo_begins_with_ln_2_in_validation_and_in_training(tmp_path):
    """In packed sequences whose lengths differ, with the SFT term, whose weight changes the loss and not its part."""
    start = ("dpo.val_at_start=true", "++dpo.sft_loss_weight=0.1", "dpo.max_num_steps=2", "checkpointing.enabled=false")
    done = run(tmp_path, *small("dpo"), *start, **example("dpo"))
    before, first, second = done.metrics
    for loss in (before["validation/validation-default_preference_loss"], first["train/preference_loss"]):
        assert loss == pytest.approx(LN2, abs=1e-6)
    assert first["train/loss"] == pytest.approx(LN2 + 0.1 * first["train/sft_loss"], abs=1e-6)
    assert first["train/num_valid_samples"] == 16 and first["train/global_valid_seqs"] == 32
    assert second["train/preference_loss"] < LN2 - 0.01
    assert done.output.count("step 2/2") == 1 and "Traceback" not in done.output


# -- learning


LEARNS: dict[str, tuple[str, float, float]] = {
    # metric of the validations, at most or at least this in the end, and the smallest change
    "sft": ("validation/val_loss", 0.6, -2.0),
    "dpo": ("validation/validation-default_accuracy", 0.8, 0.3),
    "rm": ("validation/validation-default_accuracy", 0.85, 0.25),
}


def assert_learned(rows: Sequence[Mapping[str, float]], kind: str) -> None:
    """The first command of each guide learns; test_faults.py runs that of SFT, on two ranks."""
    name, reached, change = LEARNS[kind]
    curve = [row[name] for row in rows if name in row]
    sign = math.copysign(1.0, change)
    assert sign * curve[-1] >= sign * reached and sign * (curve[-1] - curve[0]) >= abs(change), curve
    steps = [row for row in rows if row["step"] > 0]
    first, last = ends(steps, "train/loss")
    assert last < 0.8 * first, (first, last)
    assert not any(row["train/num_left_out"] for row in steps)


@pytest.mark.slow
def test_dpo_learns(tmp_path):
    assert_learned(run(tmp_path, **example("dpo")).metrics, "dpo")


@pytest.mark.slow
def test_a_reward_model_learns_and_scores_alike_in_transformers(tmp_path):
    done = run(tmp_path, **example("rm"))
    assert_learned(done.metrics, "rm")
    (directory,) = tmp_path.glob("results/*/step_150/policy/weights/consolidated")
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory.parents[1] / "tokenizer")

    @torch.no_grad()
    def score(prompt: str, answer: str) -> float:
        turns = [user(prompt), assistant(answer)]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        return float(model(**ids).logits[0, 0])

    section = {"dataset_name": "arithmetic_preference", "split": "validation", "processor": "unused"}
    sums = {"max_operand": 30, "operators": "+", "max_mistake": 60, "num_samples": 256}
    rows = load_arithmetic_preference(PreferenceDatasetConfig(**section, kwargs=sums))
    right = [score(row["prompt"], row["chosen"]) > score(row["prompt"], row["rejected"]) for row in rows]
    accuracy = done.curve("validation/validation-default_accuracy")[-1]
    assert sum(right) / len(rows) == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.slow
def test_a_run_of_adapters_that_is_told_to_end_continues_bit_for_bit(tmp_path):
    """With reference log-probabilities from before the first step."""
    ahead = ("dpo.precompute_reference_logprobs=true", "+policy.dtensor_cfg.lora_cfg.enabled=true")
    how = {"number": signal.SIGTERM, "killed_in": 3} | example("dpo")
    continues_bit_for_bit(tmp_path, *small("dpo"), "dpo.max_num_steps=6", *ahead, **how)
