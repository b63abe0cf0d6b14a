"""GRPO with a draft that trains beside the policy: more of its tokens are accepted from step to step."""

import shutil

import pytest

from tests.functional.cli import SMALL, comparable, exact, run
from tests.unit.generation.models import make_model_with_heads

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

DRAFT = (
    *SMALL,
    "grpo.num_prompts_per_step=16",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=64",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "grpo.max_num_steps=8",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=4",
    "+policy.draft={enabled: true, lr: 3.0e-3}",
    "+policy.generation.vllm_kwargs.speculative_config={method: eagle3, num_speculative_tokens: 3}",
)
PREDICTION = (
    *DRAFT[:-1],
    "grpo.max_num_steps=6",
    "policy.draft.lr=1e-2",
    "policy.generation.temperature=0.3",
    "+policy.generation.vllm_kwargs.speculative_config={method: mtp, num_speculative_tokens: 1}",
)


def test_acceptance_rises_while_the_draft_trains_and_a_resumed_run_is_the_same(tmp_path):
    rows = run(tmp_path / "whole", *DRAFT).steps
    exact(rows, 8)
    rates = [row["train/generation/spec_acceptance_rate"] for row in rows]
    print("acceptance of all tokens", rates, "of first ones", [row["train/draft_acceptance"] for row in rows])
    assert sum(rates[-3:]) / 3 > sum(rates[:3]) / 3 + 0.1, rates
    assert rows[-1]["train/draft_loss"] < rows[0]["train/draft_loss"]
    kept = "results/grpo_cpu/step_4"
    shutil.copytree(tmp_path / "whole" / kept, tmp_path / "resumed" / kept)
    assert comparable(run(tmp_path / "resumed", *DRAFT).steps) == comparable(rows[4:])


def test_a_prediction_head_learns_and_the_engine_drafts_with_what_it_learned(tmp_path):
    """Training measures the same acceptance on the samples of a step as the engine did when it drew them."""
    finished = run(tmp_path, *PREDICTION, f"policy.model_name={make_model_with_heads(tmp_path / 'model')}")
    told = finished.curve("train/draft_acceptance")
    seen = finished.curve("train/generation/spec_acceptance_rate")
    print("acceptance told", told, "and seen", seen)
    exact(finished.steps, 6)
    assert told[-1] > told[0] + 0.05
    assert all(abs(a - b) < 0.07 for a, b in zip(told, seen, strict=True))
