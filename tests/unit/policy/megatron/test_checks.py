"""What Megatron cannot train is refused on the driver: each message names the key, the value and what would work."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from nemo_rl.models.policy.config import DTensorConfig, PolicyConfig, RouterReplayConfig, TokenizerConfig
from nemo_rl.models.policy.layout import stage_layers
from nemo_rl.models.policy.megatron import checks
from nemo_rl.models.policy.megatron.config import Fp8Config, MegatronConfig, MegatronOptimizerConfig, device_problems
from nemo_rl.models.policy.megatron.files import DIRECTORY
from nemo_rl.models.policy.megatron.mapping import weight_map
from tests.unit.policy.megatron.hf_models import CONFIGS

KEY = "policy.megatron_cfg"


def policy_of(replay: bool = False, **settings: Any) -> PolicyConfig:
    return PolicyConfig(
        model_name="mine",
        tokenizer=TokenizerConfig(name="mine"),
        logprob_batch_size=1,
        optimizer=None,
        dtensor_cfg=DTensorConfig(enabled=False),
        megatron_cfg=MegatronConfig(enabled=True, **settings),
        router_replay=RouterReplayConfig(enabled=replay),
    )


def refusal(model: PretrainedConfig, model_path: str = "a/hub-model", replay: bool = False, **settings: Any) -> str:
    with pytest.raises(ValueError) as error:
        checks.check_megatron(policy_of(replay, **settings), model, model_path)
    return str(error.value)


def test_another_package_of_the_name_is_not_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    other = module_from_spec(ModuleSpec("megatron", None, is_package=True))
    monkeypatch.setitem(sys.modules, "megatron", other)
    assert "megatron_cfg.enabled=true: Megatron Core is not installed" in refusal(CONFIGS["llama"]())


@pytest.mark.parametrize("name", CONFIGS)
def test_models_with_a_mapping_pass(name: str) -> None:
    checks.check_megatron(policy_of(), CONFIGS[name](), "a/hub-model")
    both = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
    checks.check_megatron(policy_of(**both), CONFIGS[name](), "a/hub-model")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "llama",
            {"tensor_model_parallel_size": 3},
            f"{KEY}.tensor_model_parallel_size=3 does not divide the 4 attention heads of this 'llama' model; these "
            "would: 1, 2, 4",
        ),
        (
            "qwen3_moe",
            {"expert_model_parallel_size": 3},
            f"{KEY}.expert_model_parallel_size=3 does not divide the 4 experts of this 'qwen3_moe' model; these would: "
            "1, 2, 4",
        ),
        (
            "qwen3_moe",
            {"expert_tensor_parallel_size": 5},
            f"{KEY}.expert_tensor_parallel_size=5 does not divide the 24 rows of an expert of this 'qwen3_moe' model; "
            "these would: 1, 2, 3, 4, 6, 8, 12, 24",
        ),
        (
            "qwen3_moe",
            {"tensor_model_parallel_size": 2},
            f"{KEY}.sequence_parallel=false: with tensor_model_parallel_size=2 every rank would send every token of "
            "this 'qwen3_moe' model to the experts; set it to true",
        ),
        (
            "llama",
            {"expert_model_parallel_size": 2},
            f"{KEY}.expert_model_parallel_size=2: 'llama' is a dense model and has no experts; set it to 1",
        ),
        (
            "llama",
            {"expert_tensor_parallel_size": 2},
            f"{KEY}.expert_tensor_parallel_size=2: 'llama' is a dense model and has no experts; set it to 1",
        ),
        (
            "llama",
            {"moe_per_layer_logging": True},
            f"{KEY}.moe_per_layer_logging=true: 'llama' is a dense model and has no experts; set it to false",
        ),
        (
            "llama",
            {"replay": True},
            "policy.router_replay.enabled=true: 'llama' is a dense model and has no experts; set it to false",
        ),
        (
            "qwen3_moe",
            {"moe_router_bias_update_rate": 0.001, "freeze_moe_router": False},
            f"{KEY}.moe_router_bias_update_rate=0.001: the routers of this 'qwen3_moe' model have no "
            "bias (those of deepseek_v3 do); set it to 0, or use moe_router_load_balancing_type=aux_loss",
        ),
        (
            "llama",
            {"pipeline_model_parallel_size": 4},
            f"{KEY}.pipeline_model_parallel_size=4: the model has 2 layers; use at most that",
        ),
        (
            "llama",
            {
                "activation_checkpointing": True,
                "recompute_granularity": "selective",
                "recompute_modules": ["core_attn", "mla_up_proj", "moe"],
            },
            f"{KEY}.recompute_modules: this 'llama' model has no mla_up_proj; use [core_attn]",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model(name: str, settings: dict[str, Any], message: str) -> None:
    assert refusal(CONFIGS[name](), **settings) == message


def test_sizes_that_would_work_go_with_every_matrix() -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 12, "hidden_size": 48, "vocab_size": 61}
    model = LlamaConfig(**shape, num_key_value_heads=4, intermediate_size=50)
    assert refusal(model, tensor_model_parallel_size=4) == (
        f"{KEY}.tensor_model_parallel_size=4 does not divide the 50 rows of its feed-forward layers "
        "(intermediate_size) of this 'llama' model; these would: 1, 2"
    )
    model = LlamaConfig(**shape, num_key_value_heads=4, intermediate_size=48)
    assert refusal(model, tensor_model_parallel_size=6) == (
        f"{KEY}.tensor_model_parallel_size=6 neither divides the 4 key-value heads (query groups) of this 'llama' "
        "model nor is a multiple of them; these would: 1, 2, 4, 12"
    )


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type=dynamic"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_rotary_embeddings_that_megatron_does_not_know(rope: dict[str, Any], message: str) -> None:
    model = CONFIGS["llama"]()
    model.rope_parameters = {"rope_theta": 10000.0, **rope}
    assert f"policy.hf_config_overrides.rope_parameters.{message} of this 'llama' model" in refusal(model)


class TestStages:
    def of(self, num_layers: int, **settings: Any) -> list[list[range]]:
        return stage_layers(MegatronConfig(enabled=True, **settings), num_layers)

    def test_layers_of_stages(self) -> None:
        assert self.of(3) == [[range(3)]]
        assert self.of(4, pipeline_model_parallel_size=2) == [[range(2)], [range(2, 4)]]
        interleaved = self.of(8, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
        assert interleaved == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
        uneven = self.of(
            61,
            pipeline_model_parallel_size=16,
            num_layers_in_first_pipeline_stage=2,
            num_layers_in_last_pipeline_stage=3,
        )
        assert [len(piece) for (piece,) in uneven] == [2] + [4] * 14 + [3]

    @pytest.mark.parametrize(
        ("num_layers", "settings", "message"),
        [
            (
                61,
                {"pipeline_model_parallel_size": 16},
                f"{KEY}.pipeline_model_parallel_size=16 does not divide the 61 layers of the model; even stages: "
                "pipeline_model_parallel_size of 1, 61; uneven ones: num_layers_in_first_pipeline_stage=2 and "
                "num_layers_in_last_pipeline_stage=3",
            ),
            (
                61,
                {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 20},
                f"{KEY}.pipeline_model_parallel_size=4 with num_layers_in_first_pipeline_stage=20 leaves 41 of the "
                "model's 61 layers to 3 other stage(s), which share them evenly; even stages: "
                "pipeline_model_parallel_size of 1, 61; uneven ones: num_layers_in_first_pipeline_stage=14 and "
                "num_layers_in_last_pipeline_stage=15",
            ),
            (
                8,
                {
                    "pipeline_model_parallel_size": 2,
                    "num_layers_in_first_pipeline_stage": 3,
                    "num_layers_in_last_pipeline_stage": 4,
                },
                f"{KEY}.pipeline_model_parallel_size=2 with num_layers_in_first_pipeline_stage=3 and "
                "num_layers_in_last_pipeline_stage=4 holds 7 of the 8 layers of the model; even stages: "
                "pipeline_model_parallel_size of 1, 2, 4, 8, with both stage sizes null",
            ),
            (
                8,
                {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
                f"{KEY}.virtual_pipeline_model_parallel_size=3 does not divide the 4 layers of a pipeline rank; these "
                "would: 1, 2, 4",
            ),
        ],
    )
    def test_layers_that_do_not_split(self, num_layers: int, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError) as error:
            self.of(num_layers, **settings)
        assert str(error.value) == message

    def test_what_is_proposed_works(self) -> None:
        for num_layers in range(2, 33):
            for size in range(2, num_layers + 1):
                if num_layers % size == 0:
                    continue
                with pytest.raises(ValueError, match="uneven ones") as error:
                    self.of(num_layers, pipeline_model_parallel_size=size)
                proposed = str(error.value).rpartition("uneven ones: ")[2].split(" and ")
                ends = {key: int(count) for key, _, count in (text.partition("=") for text in proposed)}
                stages = self.of(num_layers, pipeline_model_parallel_size=size, **ends)
                assert [layer for (piece,) in stages for layer in piece] == list(range(num_layers))


class TestCheckpointNames:
    def saved(self, folder: Path, model: PretrainedConfig, names: list[str]) -> str:
        save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(model.to_dict()), encoding="utf-8")
        return str(folder)

    def test_names_that_match_pass(self, tmp_path: Path) -> None:
        model = CONFIGS["llama"]()
        names = [tensor.name for tensor in weight_map(model, implementation="local").hf_tensors]
        checks.check_megatron(policy_of(), model, self.saved(tmp_path, model, names))

    def test_names_that_do_not_match_are_listed(self, tmp_path: Path) -> None:
        model = CONFIGS["llama"]()
        names = [tensor.name for tensor in weight_map(model, implementation="local").hf_tensors]
        renamed = [name.replace("layers.1.mlp.up_proj", "layers.1.mlp.w3") for name in names]
        assert refusal(model, self.saved(tmp_path, model, renamed)) == (
            "policy.model_name='mine': the checkpoint's tensors are not those of a llama model of this config.json: "
            "missing are model.layers.1.mlp.up_proj.weight; unknown are model.layers.1.mlp.w3.weight"
        )

    def test_a_model_without_a_mapping_says_how_to_add_one(self, tmp_path: Path) -> None:
        names = ["wte.weight", "h.0.attn.c_attn.weight", "h.1.attn.c_attn.weight", "model.norm.weight"]
        message = refusal(GPT2Config(), self.saved(tmp_path, GPT2Config(), names))
        assert message.startswith("policy.model_name='mine': model_type 'gpt2' has no mapping to Megatron Core; known")
        assert "qwen3_moe" in message and "docs/adding-a-model.md" in message and "policy.dtensor_cfg" in message
        assert message.endswith("; no mapping knows its tensors h.*.attn.c_attn.weight, wte.weight")


def test_megatron_that_is_not_installed() -> None:
    with pytest.raises(ValueError) as error:
        checks.check_packages(MegatronConfig(enabled=True), installed=(), capability=None)
    assert str(error.value) == (
        f"{KEY}.enabled=true: Megatron Core is not installed; start the run with `uv run --extra mcore ...`, or set it "
        "to false and dtensor_cfg.enabled to true"
    )


@pytest.mark.parametrize(
    ("settings", "asked", "neutral"),
    [
        ({"apply_rope_fusion": True}, "apply_rope_fusion=true", "false"),
        ({"transformer_impl": "transformer_engine"}, "transformer_impl=transformer_engine", "local"),
        ({"fp8_cfg": Fp8Config(enabled=True)}, "fp8_cfg.enabled=true", "false"),
    ],
)
def test_transformer_engine_that_is_not_installed(settings: dict[str, Any], asked: str, neutral: str) -> None:
    with pytest.raises(ValueError) as error:
        checks.check_packages(MegatronConfig(enabled=True, **settings), installed=("megatron",), capability=None)
    assert str(error.value) == (
        f"{KEY}.{asked} needs Transformer Engine, which is not installed; start the run with "
        f"`uv run --extra mcore --extra te ...`, or set it to {neutral}"
    )


@pytest.mark.parametrize(
    ("recipe", "capability", "works"),
    [
        ("blockwise", (8, 9), "set fp8_recipe to tensorwise or delayed"),
        ("mxfp8", (9, 0), "set fp8_recipe to tensorwise or delayed or blockwise"),
        ("tensorwise", (8, 0), "set enabled=false"),
    ],
)
def test_fp8_that_the_gpus_cannot_do(recipe: Any, capability: tuple[int, int], works: str) -> None:
    settings = MegatronConfig(enabled=True, fp8_cfg=Fp8Config(enabled=True, fp8_recipe=recipe))
    with pytest.raises(ValueError) as error:
        checks.check_packages(settings, installed=("megatron", "transformer_engine"), capability=capability)
    assert f"{KEY}.fp8_cfg.fp8_recipe={recipe} needs GPUs of compute capability" in str(error.value)
    assert str(error.value).endswith(f"have {capability[0]}.{capability[1]}; {works}")
    checks.check_packages(settings, installed=("megatron", "transformer_engine"), capability=(10, 0))
    checks.check_packages(settings, installed=("megatron", "transformer_engine"), capability=None)


def test_what_runs_on_gpus_only_is_refused_without() -> None:
    settings = MegatronConfig(
        enabled=True,
        transformer_impl="transformer_engine",
        apply_rope_fusion=True,
        bias_activation_fusion=True,
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
        optimizer=MegatronOptimizerConfig(use_precision_aware_optimizer=True),
        fp8_cfg=Fp8Config(enabled=True),
    )
    found = {k.removeprefix(f"{KEY}."): text for k, text in device_problems(settings, use_gpus=False)}
    fixes = {
        "transformer_impl": "local",
        "fp8_cfg.enabled": "false",
        "optimizer.use_precision_aware_optimizer": "false",
        "apply_rope_fusion": "false",
        "moe_grouped_gemm": "false",
        "moe_permute_fusion": "false",
        "bias_activation_fusion": "false",
    }
    assert set(found) == set(fixes)
    for key, fix in fixes.items():
        assert found[key].endswith(
            f"runs on GPUs only, and cluster.gpus_per_node is 0; set it to {fix}, or cluster.gpus_per_node above 0"
        )
    assert not dict(device_problems(settings, use_gpus=True))


def test_torch_layers_have_no_kernels_of_transformer_engine() -> None:
    settings = MegatronConfig(enabled=True, transformer_impl="local", apply_rope_fusion=True)
    assert dict(device_problems(settings, use_gpus=True)) == {
        f"{KEY}.apply_rope_fusion": "true needs Transformer Engine, and transformer_impl is local; set it to false, or "
        "that to transformer_engine"
    }


def test_a_stale_conversion_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept, folder = CONFIGS["llama"](), tmp_path / "kept", tmp_path / "model"
    monkeypatch.setenv(DIRECTORY, str(kept))
    folder.mkdir()
    torch.save({}, folder / "pytorch_model.bin")
    checks.check_megatron(policy_of(), model, str(folder))  # nothing is kept yet
    (kept / "mine").mkdir(parents=True)
    (kept / "mine" / "conversion.json").write_text("{}", encoding="utf-8")
    message = refusal(model, str(folder))
    assert message.startswith(f"policy.model_name='mine': the conversion kept in {kept / 'mine'} is stale")
    assert "set policy.megatron_cfg.force_reconvert_from_hf=true to make it anew" in message
    checks.check_megatron(policy_of(force_reconvert_from_hf=True), model, str(folder))
