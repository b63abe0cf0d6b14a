"""Every family of docs/models.md on a tiny random model, and the page itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nemo_rl.models.policy.attention import ATTENTION, unpackable_reason
from nemo_rl.models.policy.batch.row_layout import RowLayout
from nemo_rl.models.policy.config import RolloutPolicyConfig
from nemo_rl.models.policy.dtensor.checks import check_policy
from nemo_rl.models.policy.pretrained import read_model_config
from nemo_rl.models.policy.token_mixers import isolate_sequences
from tests.unit.generation.configs import generation_config
from tests.unit.policy import family_cells
from tests.unit.policy import test_attention as attention
from tests.unit.policy.families import FAMILIES, family_config, random_model
from tests.unit.policy.megatron.parity import Layout
from tests.unit.policy.models import edit_json
from tests.unit.policy.steps import make_worker, policy_config, whole_weights
from tests.unit.policy.test_vision import smolvlm
from tests.worlds import run_world
from tools import models_page

NEW = ["gpt_oss", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h", "llama4_text"]


@cache
def models(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """transformers' own, with its masks, and the same weights with our attention.

    In float64, in which rounding hides no leak: in float32 some tokens amplify it to 1e-5.
    """
    alone, ours = random_model(family), random_model(family, attn_implementation=ATTENTION)
    isolate_sequences(ours)
    for model in (alone, ours):
        model.double().set_experts_implementation("eager")  # torch multiplies groups of matrices in float32 at most
    return alone, ours


@pytest.mark.parametrize("family", NEW)
@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 3, 7, 8, 9, 16, 31, 70]), min_size=1, max_size=6),
    padding_free=st.booleans(),
)
def test_states_are_those_of_each_sequence_alone(family: str, lengths: list[int], padding_free: bool):
    alone, ours = models(family)
    lengths = [2, *lengths]  # the first has a token to predict
    with torch.no_grad():
        expected = attention.states_alone(alone, lengths)
        actual = attention.states_together(
            ours, RowLayout(padding_free=padding_free, divisible_by=16).build(attention.sequences(lengths))
        )
    assert (actual - expected).abs().max() < 1e-6 * expected.abs().max()  # norms and delta nets are float32


@pytest.mark.parametrize("family", NEW)
def test_gradients_are_those_of_each_sequence_alone_and_would_show_a_leak(family: str):
    lengths = [19, 1, 2, 70, 7, 7, 30]
    alone, ours = models(family)
    assert unpackable_reason(family_config(family)) is None
    expected = attention.states_alone(alone, lengths)
    actual = attention.states_together(ours, attention.packed(lengths, divisible_by=16))
    attention.assert_same_gradients(attention.gradients(ours, actual), attention.gradients(alone, expected))
    leaked = attention.states_together(ours, attention.packed(lengths), drop_segments=True)
    assert (leaked - expected)[lengths[0] :].abs().max() > 0.01


def test_mxfp4_experts_are_read_slice_by_slice_as_transformers_reads_them(tmp_path: Path):
    model = random_model("gpt_oss")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    want, packed = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = state.pop(name).shape
        groups = (experts, columns, rows // 32)
        blocks = torch.randint(256, (*groups, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 130, groups, dtype=torch.uint8, generator=generator)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        want[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert want[name].shape == (experts, rows, columns)
    model.config.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    save_file(state | packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = policy_config(model_name=str(tmp_path))
    assert not hasattr(read_model_config(config, str(tmp_path)), "quantization_config")

    megatron = Layout(world=1, policy={"model_name": str(tmp_path)}).config()
    for world, policy in ((2, config), (1, megatron)):
        for found in run_world(lambda *_, policy=policy: whole_weights(make_worker(tmp_path, policy)), world):
            torch.testing.assert_close(found, want | state, rtol=0, atol=0)


def test_other_quantised_models_and_decoding_of_layers_with_a_state_or_of_images_are_refused(tmp_path: Path):
    config = family_config("llama")
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"policy.model_name: .* is quantised \(fp8\)"):
        read_model_config(policy_config(model_name=str(tmp_path)), str(tmp_path))
    generation = generation_config().model_copy(update={"backend": "hf"})
    config = RolloutPolicyConfig(**dict(policy_config()), generation=generation)
    with pytest.raises(ValueError, match="backend=hf: prompts are padded on the left"):
        check_policy(config, family_config("qwen3_next"), "unused")
    with pytest.raises(ValueError, match="backend=hf: a 'smolvlm' model would not see the images"):
        check_policy(config, smolvlm().config, "unused")


# -- the page


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_says_what_the_code_refuses(family: str):
    cells = family_cells.recorded()[family]
    assert list(cells) == family_cells.COLUMNS
    for column in family_cells.COLUMNS[:-1]:
        assert cells[column] == (family_cells.refusal(family, column) or "yes"), column


def test_the_page_is_written_from_what_was_tried():
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page(family_cells.recorded())


@pytest.mark.families
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_of_the_page_is_true(family: str):
    with family_cells.alone(family) as base:
        found = family_cells.outcomes(base, family)
    assert {column: why for (_, column), why in found.items()} == {
        column: why for column, why in family_cells.recorded()[family].items() if column != family_cells.ENGINE
    }
