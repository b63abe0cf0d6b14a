"""Every family of docs/models.md on a tiny random model, and the page itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nemo_rl.models.policy.config import RolloutPolicyConfig
from nemo_rl.models.policy.dtensor.checks import check_policy
from nemo_rl.models.policy.pretrained import read_model_config
from tests.unit.generation.configs import generation_config
from tests.unit.policy import family_cells
from tests.unit.policy.families import FAMILIES, family_config, random_model
from tests.unit.policy.megatron.parity import Layout
from tests.unit.policy.models import edit_json
from tests.unit.policy.steps import make_worker, policy_config, whole_weights
from tests.unit.policy.test_vision import smolvlm
from tests.worlds import run_world
from tools import models_page


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
    recorded = family_cells.recorded()[family].items()
    assert found == {(family, column): why for column, why in recorded if column != family_cells.ENGINE}
