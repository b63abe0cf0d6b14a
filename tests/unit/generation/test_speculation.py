"""Speculative decoding as far as no engine is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_rl.algorithms.trainers.metrics import draft_metrics
from nemo_rl.models.generation.config import speculation_problems
from nemo_rl.models.generation.interfaces import DraftCounts
from nemo_rl.models.generation.vllm.engine_patches import expand_batch_to_tokens
from tests.unit.config.run_configs import build

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 4, "model": "small"}


@pytest.mark.parametrize(
    ("settings", "key", "text"),
    [
        ("ngram", "", "must be a section"),
        ({**NGRAM, "method": "eagle"}, ".method", "not supported yet: eagle; set ngram or draft_model"),
        ({**NGRAM, "num_speculative_tokens": 0}, ".num_speculative_tokens", "1 or more"),
        ({**DRAFT, "model": None}, ".model", "name or folder of its weights"),
        ({**DRAFT, "rejection_sample_method": "synthetic"}, ".rejection_sample_method", "must be standard"),
        ({**DRAFT, "draft_sample_method": "probabilistic"}, ".draft_sample_method", "follow no request's seed"),
        ({**DRAFT, "draft_load_config": {}}, ".draft_load_config", "read from disk"),
    ],
)
def test_what_would_bias_samples_or_cannot_run_is_refused_by_name(settings: Any, key: str, text: str) -> None:
    [(found, message)] = speculation_problems({"speculative_config": settings})
    assert found == f"speculative_config{key}" and text in message


@pytest.mark.parametrize("settings", [NGRAM, DRAFT])
def test_what_keeps_the_distribution_is_accepted(settings: Any) -> None:
    assert not list(speculation_problems({"speculative_config": settings}))


def test_metrics_of_drafts() -> None:
    counts = DraftCounts(num_drafts=10, num_draft_tokens=40, num_accepted_tokens=12)
    counts = counts + counts - DraftCounts(num_drafts=10, num_draft_tokens=40, num_accepted_tokens=2)
    assert draft_metrics(counts) == {
        "generation/spec_num_drafts": 10.0,
        "generation/spec_acceptance_rate": pytest.approx(22 / 40),
        "generation/spec_mean_accepted_length": pytest.approx(3.2),
    }
    assert list(draft_metrics(DraftCounts()).values()) == [0.0, 0.0, 1.0]


def test_their_names_are_known_where_drafts_are_configured() -> None:
    with_drafts = build("+policy.generation.vllm_kwargs.speculative_config={method: ngram, num_speculative_tokens: 2}")
    assert with_drafts.train_metrics - build().train_metrics == set(draft_metrics(DraftCounts()))


def test_sampling_parameters_are_repeated_for_each_draft_token() -> None:
    top_k, ends = torch.tensor([5, 0, 7], dtype=torch.int32), torch.tensor([2, 2, 5], dtype=torch.int32)
    repeated = expand_batch_to_tokens(top_k, ends, 5, replace_from=0, replace_to=9)
    assert repeated.tolist() == [5, 5, 7, 7, 7] and repeated.dtype == torch.int32
    temperature = torch.tensor([0.5, 0.0], dtype=torch.float32)
    assert expand_batch_to_tokens(temperature, torch.tensor([1, 3]), 3, 0, 1).tolist() == [0.5, 1.0, 1.0]
