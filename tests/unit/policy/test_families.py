"""Every family of docs/models.md on a tiny random model."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from nemo_rl.models.policy.attention import ATTENTION, unpackable_reason
from nemo_rl.models.policy.batch.row_layout import RowLayout
from nemo_rl.models.policy.token_mixers import isolate_sequences
from tests.unit.policy.families import family_config, random_model
from tests.unit.policy.test_attention import gradients, states_alone, states_together

NEW = ["gpt_oss", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h", "llama4_text"]


@cache
def models(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """transformers' own, with its masks, and the same weights with our attention."""
    ours = random_model(family, attn_implementation=ATTENTION)
    isolate_sequences(ours)
    return random_model(family), ours


@pytest.mark.parametrize("family", NEW)
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 3, 7, 8, 9, 16, 31, 70]), min_size=1, max_size=6).filter(
        lambda x: max(x) > 1
    ),
    padding_free=st.booleans(),
)
def test_states_are_those_of_each_sequence_alone(family: str, lengths: list[int], padding_free: bool):
    alone, ours = models(family)
    lengths = [2, *lengths]  # the first has a token to predict
    with torch.no_grad():
        expected = states_alone(alone, lengths)
        actual = states_together(ours, lengths, RowLayout(padding_free=padding_free, divisible_by=16))
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", NEW)
def test_gradients_are_those_of_each_sequence_alone_and_would_show_a_leak(family: str):
    lengths = [19, 1, 2, 70, 7, 7, 30]
    alone, ours = models(family)
    assert unpackable_reason(family_config(family)) is None
    expected = states_alone(alone, lengths)
    actual = states_together(ours, lengths, RowLayout(padding_free=True, divisible_by=16))
    expected_grads, grads = gradients(alone, expected), gradients(ours, actual)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert (grad - expected_grads[name]).norm() <= 2e-5 * expected_grads[name].norm() + 1e-7, name
    leaked = states_together(ours, lengths, RowLayout(padding_free=True), drop_segments=True)
    assert (leaked - expected)[lengths[0] :].abs().max() > 0.01
