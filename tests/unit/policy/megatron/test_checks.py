"""The driver refuses what Megatron cannot train: each message names the key, the value and what would work."""

import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from nemo_rl.models.policy.layout import stage_layers
from nemo_rl.models.policy.megatron import checks
from nemo_rl.models.policy.megatron.config import MegatronConfig, device_problems
from nemo_rl.models.policy.megatron.mapping import weight_map
from nemo_rl.models.policy.megatron.transformer_config import transformer_config
from nemo_rl.models.policy.megatron.worker import uses_transformer_engine
from tests.tables import lines, named, pattern
from tests.unit.policy.megatron.hf_models import FAMILIES, config_of
from tests.unit.policy.steps import megatron_policy

KEY = "policy.megatron_cfg"


def keys(text: str) -> dict[str, Any]:
    return yaml.safe_load(f"{{{text}}}")


def refusal(model: PretrainedConfig, model_path: str = "a/hub-model", **settings: Any) -> str:
    replay = {"router_replay": {"enabled": settings.pop("replay", False)}}
    with pytest.raises(ValueError) as error:
        checks.check_megatron(megatron_policy({"model_name": "mine"} | replay, **settings), model, model_path)
    return str(error.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_models_with_a_mapping_pass(name: str) -> None:
    for settings in ("", "tensor_model_parallel_size: 2, sequence_parallel: true, pipeline_model_parallel_size: 2"):
        checks.check_megatron(megatron_policy(**keys(settings)), config_of(name), "a/hub-model")


REFUSED = """
llama | | tensor_model_parallel_size: 8
    -> policy.megatron_cfg.tensor_model_parallel_size=8 does not divide the 4 attention heads of this 'llama'
    ... would: 1, 2, 4
llama | num_attention_heads: 12, hidden_size: 48, num_key_value_heads: 4, intermediate_size: 50
    | tensor_model_parallel_size: 4
    -> policy.megatron_cfg.tensor_model_parallel_size=4 does not divide the 50 rows of its feed-forward layers
    ... (intermediate_size) of this 'llama' model; these would: 1, 2
llama | num_attention_heads: 12, hidden_size: 48, num_key_value_heads: 4 | tensor_model_parallel_size: 6
    -> neither divides the 4 key-value heads ... these would: 1, 2
llama | | pipeline_model_parallel_size: 4
    -> pipeline_model_parallel_size=4: the model has 2 layers; set policy.megatron_cfg.pipeline_model_parallel_size=2
llama | | expert_model_parallel_size: 2
    -> policy.megatron_cfg.expert_model_parallel_size=2: 'llama' is a dense model and has no experts; set ... =1
llama | | replay: true -> policy.router_replay.enabled=true: 'llama' is a dense model ... set ... =false
llama | | activation_checkpointing: true, recompute_granularity: selective, recompute_modules: [core_attn, mla_up_proj]
    -> policy.megatron_cfg.recompute_modules: this 'llama' model has no mla_up_proj; set ... =[core_attn]
llama | rope_parameters: {rope_theta: 1.0, rope_type: dynamic, factor: 2.0} |
    -> policy.hf_config_overrides.rope_parameters.rope_type=dynamic of this 'llama' model
llama | rope_parameters: {rope_theta: 1.0, rope_type: default, partial_rotary_factor: 0.5} |
    -> policy.hf_config_overrides.rope_parameters.partial_rotary_factor=0.5 of
qwen3_moe | | expert_model_parallel_size: 8
    -> expert_model_parallel_size=8 does not divide the 4 experts of this 'qwen3_moe' model ... : 1, 2, 4
qwen3_moe | | expert_tensor_parallel_size: 16
    -> expert_tensor_parallel_size=16 does not divide the 24 rows of an expert ... would: 1, 2, 4, 8
qwen3_moe | | tensor_model_parallel_size: 2
    -> sequence_parallel=false: with tensor_model_parallel_size=2 every ... set ... =true, or
qwen3_moe | | moe_router_bias_update_rate: 0.001, freeze_moe_router: false
    -> moe_router_bias_update_rate=0.001: the routers ... those of deepseek_v3 do ... set ... =0, or
qwen3_next | | context_parallel_size: 2 -> =2: the layers of type Qwen3NextGatedDeltaNet
qwen3_next | | tensor_model_parallel_size: 4, sequence_parallel: true -> =4 is more than the 2 key-value heads
gemma3_text | full_attention: {rope_type: yarn, factor: 4.0, rope_theta: 1.0, original_max_position_embeddings: 8} |
    -> policy.hf_config_overrides.rope_parameters.full_attention.rope_type=yarn of this 'gemma3_text'
gemma3_text | | bias_activation_fusion: true -> policy.megatron_cfg.bias_activation_fusion=true is not for the layers
glm4_moe | rope_parameters: {rope_type: yarn, factor: 4.0, rope_theta: 1.0, partial_rotary_factor: 0.5} |
    -> policy.hf_config_overrides.rope_parameters.rope_type=yarn of this 'glm4_moe' model
gpt_oss | | expert_tensor_parallel_size: 2 -> the experts of this 'gpt_oss' model stay whole
deepseek_v2 | topk_method: noaux_tc | -> topk_method: noaux_tc ... needs greedy or group_limited_greedy;
deepseek_v3 | norm_topk_prob: false | -> norm_topk_prob: False ... needs True;
"""


@pytest.mark.parametrize(("left", "said"), lines(REFUSED.replace("\n    |", " |")))
def test_settings_that_do_not_fit_the_model(left: str, said: str) -> None:
    name, changes, settings = (part.strip() for part in left.split("|"))
    model = config_of(name)
    if "full_attention" in changes:
        model.rope_parameters |= keys(changes)
    else:
        model.update(keys(changes))
    message = refusal(model, **keys(settings))
    assert message.startswith("policy.") and re.search(pattern(said), message), message


POLICY, WINDOWS = megatron_policy(), {"use_sliding_window": True, "sliding_window": 4}


@named(
    "name, changes, message",
    {
        "chunked attention": (
            "qwen2",
            {"layer_types": ["full_attention", "chunked_attention"]} | WINDOWS,
            "layer_types: chunked_attention",
        ),
        "one expert per token": ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok: 1 .* needs 2 or more"),
        "a small epsilon": ("deepseek_v3", {"rms_norm_eps": 1e-5}, r"rms_norm_eps=1e-05 .*transformer_impl to local"),
    },
)
def test_settings_of_models_without_an_equal_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    model, by_engine = config_of(name, **changes), "rms_norm_eps" in changes
    with pytest.raises(ValueError, match=message):
        transformer_config(model, POLICY, use_transformer_engine=by_engine)

    if by_engine:
        transformer_config(model, POLICY, use_transformer_engine=False)


STAGES = "pipeline_model_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def stages_of(num_layers: int, **settings: Any) -> list[list[range]]:
    return stage_layers(MegatronConfig(enabled=True, **settings), num_layers)


@pytest.mark.parametrize(
    ("num_layers", "settings", "message"),
    [
        (61, {STAGES: 16}, f"{STAGES}=16 does not divide the 61 .*; set {KEY}.{FIRST}=2 and {KEY}.{LAST}=3, or"),
        (61, {STAGES: 4, FIRST: 20}, f"{FIRST}=20 leaves 41 of the model's 61 layers to 3 .*{FIRST}=14 and"),
        (8, {STAGES: 2, FIRST: 3, LAST: 4}, f"{LAST}=4 holds 7 of the 8 layers .*{FIRST}=null and .*{STAGES}=2"),
        (8, {STAGES: 2, "virtual_pipeline_model_parallel_size": 3}, "the 4 layers of a .* would: 1, 2, 4$"),
    ],
)
def test_layers_that_do_not_split(num_layers: int, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stages_of(num_layers, **settings)


def test_layers_of_stages_and_what_is_proposed_works() -> None:
    assert stages_of(3) == [[range(3)]]
    interleaved = stages_of(8, **{STAGES: 2}, virtual_pipeline_model_parallel_size=2)
    assert interleaved == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
    uneven = stages_of(61, **{STAGES: 16, FIRST: 2, LAST: 3})
    assert [len(piece) for (piece,) in uneven] == [2] + [4] * 14 + [3]
    for num_layers in range(2, 33):
        for size in (size for size in range(2, num_layers + 1) if num_layers % size):
            with pytest.raises(ValueError, match=f"set {KEY}.{FIRST}") as error:
                stages_of(num_layers, **{STAGES: size})
            proposed = dict(re.findall(rf"{KEY}\.({FIRST}|{LAST})=(\d+)", str(error.value)))
            proposed = {name: int(count) for name, count in proposed.items()}
            stages = stages_of(num_layers, **{STAGES: size}, **proposed)
            assert [layer for (piece,) in stages for layer in piece] == list(range(num_layers))


def saved(folder: Path, names: list[str]) -> str:
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    return str(folder)


def test_names_that_do_not_match_are_listed_and_a_model_without_a_mapping_says_how_to_add_one(tmp_path: Path) -> None:
    model = config_of("llama")
    names = list(weight_map(model).shapes)
    checks.check_megatron(megatron_policy(), model, saved(tmp_path, names))
    renamed = [name.replace("layers.1.mlp.up_proj", "layers.1.mlp.w3") for name in names]
    message = refusal(model, saved(tmp_path, renamed))
    assert message.startswith("policy.model_name='mine': ")
    assert "missing are model.layers.1.mlp.up_proj.weight; unknown are model.layers.1.mlp.w3.weight" in message
    names = ["wte.weight", "h.0.attn.c_attn.weight", "h.1.attn.c_attn.weight", "model.norm.weight"]
    model = AutoConfig.for_model("gpt2")
    message = refusal(model, saved(tmp_path, names))
    assert message.startswith("policy.model_name='mine': model_type 'gpt2' has no mapping to Megatron Core; known")
    assert "qwen3_moe" in message and "docs/adding-a-model.md" in message and "policy.dtensor_cfg" in message
    assert message.endswith("; no mapping knows its tensors h.*.attn.c_attn.weight, wte.weight")


def test_megatron_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    other = module_from_spec(ModuleSpec("megatron", None, is_package=True))  # of the same name
    monkeypatch.setitem(sys.modules, "megatron", other)
    message = refusal(config_of("llama"))
    assert (
        message.startswith(f"{KEY}.enabled=true: ") and "uv run --extra mcore" in message and "dtensor_cfg" in message
    )


FP8 = "fp8_cfg: {enabled: true, fp8_recipe: RECIPE} -> policy.megatron_cfg.fp8_cfg.fp8_recipe=RECIPE needs GPUs of ... "
LACKING = f"""
apply_rope_fusion: true -> policy.megatron_cfg.apply_rope_fusion=true needs ... set ... apply_rope_fusion=false
transformer_impl: transformer_engine -> policy.megatron_cfg.transformer_impl=transformer_engine ... set ... =local
fp8_cfg: {{enabled: true}}
    -> policy.megatron_cfg.fp8_cfg.enabled=true needs Transformer Engine, which is not installed; start the run with
    ... `uv run --extra mcore --extra te ...`, or set policy.megatron_cfg.fp8_cfg.enabled=false
{FP8.replace("RECIPE", "blockwise")}these have 8.9; set FP8.fp8_recipe=tensorwise, ... FP8.enabled=false
{FP8.replace("RECIPE", "mxfp8")}these have 9.0; set FP8.fp8_recipe=tensorwise, ... =blockwise, or FP8.enabled=false
{FP8.replace("RECIPE", "tensorwise")}these have 8.0; set FP8.enabled=false
""".replace("FP8.", "policy.megatron_cfg.fp8_cfg.")


@pytest.mark.parametrize(("settings", "said"), lines(LACKING))
def test_packages_that_are_not_installed_and_fp8_that_the_gpus_cannot_do(settings: str, said: str) -> None:
    config, has = MegatronConfig(enabled=True, **keys(settings)), re.search(r"have (\d)\.(\d);", said)
    installed = {"megatron", "transformer_engine"} if has else {"megatron"}
    capability = (int(has[1]), int(has[2])) if has else None
    with pytest.raises(ValueError, match=f"{pattern(said)}$"):
        checks.check_packages(config, installed=installed, capability=capability)
    for able in ((10, 0), None) if has else ():
        checks.check_packages(config, installed=installed, capability=able)


GPUS_ONLY = """transformer_impl: transformer_engine, moe_grouped_gemm: true, bias_activation_fusion: true,
    fp8_cfg: {enabled: true}, optimizer: {use_precision_aware_optimizer: true}"""


def test_what_runs_on_gpus_only_is_refused_without() -> None:
    settings = MegatronConfig(enabled=True, **keys(GPUS_ONLY))
    off = ("fp8_cfg.enabled", "optimizer.use_precision_aware_optimizer", "moe_grouped_gemm", "bias_activation_fusion")
    fixes = dict.fromkeys(off, "false") | {"transformer_impl": "local"}
    found = {key.removeprefix(f"{KEY}."): text for key, text in device_problems(settings, use_gpus=False)}
    assert found.keys() == fixes.keys()
    for key, fix in fixes.items():
        assert found[key].endswith(f"gpus_per_node is 0; set {KEY}.{key}={fix}")
    assert not dict(device_problems(settings, use_gpus=True))
    local = MegatronConfig(enabled=True, transformer_impl="local", apply_rope_fusion=True)
    [(key, text)] = device_problems(local, use_gpus=True)
    assert key == f"{KEY}.apply_rope_fusion" and "needs Transformer Engine, and transformer_impl is local" in text
    assert not uses_transformer_engine(MegatronConfig(), "llama", use_gpu=False)
    assert not uses_transformer_engine(MegatronConfig(), "gemma3_text", use_gpu=True), "it has layers of this library"
    assert not uses_transformer_engine(local, "llama", use_gpu=True)
    with pytest.raises(ValueError, match=r"transformer_impl=transformer_engine: .* runs on GPUs only; set .*=local"):
        uses_transformer_engine(settings, "llama", use_gpu=False)
