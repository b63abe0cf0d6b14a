"""The same step, whatever direction the model and the batch are cut in, for every family; and what cannot be cut."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_rl.models.policy.config import DTensorConfig, LoRAConfig, PipelineConfig, PolicyConfig, SequencePackingConfig
from nemo_rl.models.policy.dtensor.tensor_parallel import check_tensor_parallel, user_plan
from nemo_rl.models.policy.pretrained import build_on_meta
from tests.unit.policy import steps
from tests.unit.policy.models import SHAPE, Models, save_model
from tests.unit.policy.test_exactness import assert_same_result
from tests.worlds import run_world

TOLERANCE = 1e-6

# DTensor takes seconds to plan the operators of a model for shapes that it has not seen: with TP, lengths are alike.
ALIKE = {
    "sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=64, logprob_mb_tokens=64),
    "make_sequence_length_divisible_by": 64,
}
TP, SP, CP, PP = "tensor_parallel_size", "sequence_parallel", "context_parallel_size", "pipeline_parallel_size"
EP, COPIES, RECOMPUTED = "expert_parallel_size", "dp_replicate_size", "activation_checkpointing"
ADAPTERS = LoRAConfig(enabled=True, dim=4, alpha=8.0)
INTERLEAVED = PipelineConfig(schedule="interleaved_1f1b", stages_per_rank=2)


def cut(**settings: Any) -> dict[str, Any]:
    return {"dtensor_cfg": DTensorConfig(**settings)}


_ATTENTION, _MLP = "model.layers.*.self_attn.", "model.layers.*.mlp."
MATRICES = {
    **dict.fromkeys([_ATTENTION + "q_proj", _ATTENTION + "k_proj", _ATTENTION + "v_proj"], "colwise"),
    **dict.fromkeys([_MLP + "gate_proj", _MLP + "up_proj"], "colwise"),
    **dict.fromkeys([_ATTENTION + "o_proj", _MLP + "down_proj"], "rowwise"),
}
GATHERED = MATRICES | dict.fromkeys([_MLP + "gate_proj", _MLP + "up_proj"], "colwise_gather_output")
GATHERED[_MLP + "down_proj"] = "rowwise_split_input"
STYLES = {name: ColwiseParallel() if word == "colwise" else RowwiseParallel() for name, word in MATRICES.items()}


def plan_of(model: PreTrainedModel) -> dict[str, str]:
    return MATRICES | dict.fromkeys([_ATTENTION + "q_norm", _ATTENTION + "k_norm"], "replicated_with_grad_allreduce")


def planned(name: str, **more: Any) -> dict[str, Any]:
    return ALIKE | cut(**{TP: 2}, custom_parallel_plan=f"{__name__}:{name}", **more)


# (family, ranks, changes). test_exactness.py has more of Llama, with other losses.
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fsdp-in-one-group": ("llama", 2, steps.PACKED | cut(fsdp_per_block=False)),
    "hsdp-reduced-every-time": ("llama", 4, steps.PACKED | cut(**{COPIES: 2}, defer_fsdp_grad_sync=False)),
    "pp-gpipe-dp2": ("llama", 4, cut(**{PP: 2}, pipeline=PipelineConfig(schedule="gpipe"))),
    "pp-one-micro-batch": ("llama", 2, cut(**{PP: 2}) | {"train_micro_batch_size": 8}),
    "offloaded": ("llama", 2, steps.PACKED | cut(cpu_offload=True)),
    "plan in words, tp-cp": ("qwen3", 4, planned("plan_of", **{SP: True, CP: 2})),
    "plan that gathers": ("llama", 2, planned("GATHERED", **{SP: True})),
    "plan in styles": ("llama", 2, planned("STYLES")),
    # What other families have: experts, tied embeddings, windows, fused matrices, norms of heads, biases.
    "gemma3-tp": ("gemma3", 2, ALIKE | cut(**{TP: 2, SP: True})),
    "phi-tp": ("phi", 2, steps.PADDED | cut(**{TP: 2, SP: True})),
    "phi3-tp": ("phi3", 2, ALIKE | cut(**{TP: 2})),
    "qwen2-tied-dp2": ("qwen2-tied", 2, steps.PACKED),
    "qwen2-tied-tp-cp": ("qwen2-tied", 4, ALIKE | cut(**{TP: 2, SP: True, CP: 2})),
    "mistral-pp-cp": ("mistral", 4, steps.PACKED | cut(**{PP: 2, CP: 2})),
    "deep-interleaved-padded-dp2": ("deep", 4, steps.PADDED | cut(**{PP: 2}, pipeline=INTERLEAVED)),
    "moe-ep-tp": ("qwen3-moe", 4, ALIKE | cut(**{EP: 2, TP: 2, SP: True})),
    "moe-ep-tp-cp": ("qwen3-moe", 4, ALIKE | cut(**{EP: 2, TP: 2, CP: 2})),
    "moe-pp-ep": ("qwen3-moe", 4, steps.PACKED | cut(**{PP: 2, EP: 2})),
    "moe-ep-hsdp-recompute": ("mixtral", 4, steps.PADDED | cut(**{EP: 2, COPIES: 2, RECOMPUTED: True})),
    "moe-ep-products-kept": ("qwen3-moe", 2, steps.PACKED | cut(**{EP: 2, RECOMPUTED: "selective"})),
    "latent-ep": ("deepseek_v3", 2, steps.PACKED | cut(**{EP: 2})),
    "latent-tp": ("deepseek_v3", 2, ALIKE | cut(**{TP: 2, SP: True})),
    # Adapters are cut with their layers.
    "moe-lora-ep": ("qwen3-moe+lora", 2, steps.PACKED | cut(**{EP: 2}, lora_cfg=ADAPTERS)),
    "deep-lora-interleaved": ("deep+lora", 2, steps.PACKED | cut(**{PP: 2}, pipeline=INTERLEAVED, lora_cfg=ADAPTERS)),
    "lora-cp-recompute": ("llama+lora", 2, steps.PACKED | cut(**{CP: 2, RECOMPUTED: True}, lora_cfg=ADAPTERS)),
    "lora-pp-tp": ("llama+lora", 4, ALIKE | cut(**{PP: 2, TP: 2}, lora_cfg=ADAPTERS)),
    "phi3-lora-tp": ("phi3+lora", 2, ALIKE | cut(**{TP: 2, SP: True}, lora_cfg=ADAPTERS)),
}
SLOW = {
    *("moe-ep-hsdp-recompute", "qwen2-tied-tp-cp", "moe-ep-tp", "moe-ep-tp-cp", "phi-tp"),
    *("phi3-tp", "latent-tp", "plan that gathers", "plan in styles", "lora-cp-recompute", "lora-pp-tp"),
    *("deep-interleaved-padded-dp2", "moe-pp-ep"),
}


def step_with(rank: int, world: int, path: Path, config: PolicyConfig) -> steps.Step:
    """With adapters the second of two: only after the first both matrices of an adapter have gradients."""
    worker = steps.make_worker(path, config)
    if config.dtensor_cfg.lora_cfg.enabled:
        steps.train_step(worker)
    return steps.step_of(worker)


@functools.cache
def alone(path: Path, *, adapted: bool = False) -> steps.Step:
    """A step on one rank with one padded micro-batch per optimizer step: nothing was cut."""
    changes = steps.PADDED | (cut(lora_cfg=ADAPTERS) if adapted else {})
    return run_world(step_with, 1, path, steps.policy_config(train_micro_batch_size=8, **changes))[0]


def assert_same(got: steps.Step, want: steps.Step, tolerance: float = TOLERANCE) -> None:
    logprobs = [logprobs for kinds in want.logprobs.values() for logprobs in kinds]
    assert_same_result(got.result, want.result, logprobs, tolerance)
    assert got.logprobs
    of_rank = {name: want.logprobs[name] for name in got.logprobs}
    for ours, theirs in ((got.weights, want.weights), (got.logprobs, of_rank)):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def settings_of(changes: dict[str, Any]) -> PolicyConfig:
    return steps.policy_config(**{"train_micro_batch_size": 2} | changes)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS])
def test_a_step_does_not_depend_on_the_layout(models: Models, name: str) -> None:
    family, world, changes = LAYOUTS[name]
    path, adapted = models[family.removesuffix("+lora")], family.endswith("+lora")
    for step in run_world(step_with, world, path, settings_of(changes)):
        # Adapters of two steps multiply what rounding did to the first.
        assert_same(step, alone(path, adapted=adapted), 3e-6 if adapted else TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "world", "recomputes"), [("llama", 2, True), ("qwen2-tied", 1, True), ("qwen3", 1, False)]
)
def test_compiled_blocks_give_the_same_numbers(models, family, world, recomputes):
    """Of the families, and as the recipes that compile have it: sharded, with recomputed activations."""
    config = settings_of(steps.PACKED | cut(**{RECOMPUTED: recomputes}, torch_compile=True))
    for step in run_world(steps.one_step, world, models[family], config):
        assert_same(step, alone(models[family]), 1e-5)


def test_overrides_of_the_models_configuration_reach_every_stage(llama: Path, tmp_path: Path) -> None:
    overrides = {"rms_norm_eps": 0.05, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    save_model("llama", tmp_path, **overrides)  # the same weights
    want = steps.plain_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    config = settings_of(steps.PACKED | cut(**{PP: 2}) | {"hf_config_overrides": overrides})
    for step in run_world(steps.one_step, 2, llama, config):
        assert step.logprobs.keys() == want.keys()
        for name, (logprobs, _) in step.logprobs.items():
            assert (logprobs - want[name]).abs().max() < 1e-5
            assert (logprobs - alone(llama).logprobs[name][0]).abs().max() > 1e-3 or not want[name].any()


# -- the shards of tensor-parallel ranks, and what is refused before weights are read


@pytest.mark.parametrize("family", ["qwen2-tied", "deepseek_v3"])
def test_every_matrix_is_shared_out_but_those_of_experts_and_tied_ones_stay_one(models: Models, family: str) -> None:
    path, config = models[family], steps.policy_config(**cut(**{TP: 2, SP: True}))

    def rank_main(rank: int, world: int) -> tuple[bool, dict[str, float]]:
        hf, parts = steps.make_worker(path, config).stages[0].hf, {}
        for name, parameter in hf.named_parameters():
            held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            parts[name] = held.numel() / parameter.numel()
        return hf.get_output_embeddings().weight is hf.get_input_embeddings().weight, parts

    ranks = run_world(rank_main, 2)
    for is_tied, parts in ranks:
        assert is_tied == (family == "qwen2-tied")
        for name in parts:
            is_whole = any(part in name for part in ("norm", ".mlp.experts.", ".mlp.gate.", "_a_"))
            assert sum(each[name] for _, each in ranks) == pytest.approx(2.0 if is_whole else 1.0), name


NO_PLAN = {"model.layers.*.mlp.up_proj": 3}
MISSPELT = MATRICES | {"model.layers.*.mlp.gatee_proj": "colwise"}
UNKNOWN_WORD = MATRICES | {"model.layers.*.mlp.gate_proj": "colwize"}


def check(family: str, size: int = 2, *, split: bool = False, plan: str | None = None, **changes: Any) -> None:
    path = f"{__name__}{plan}" if plan is not None and plan.startswith(":") else plan
    settings = DTensorConfig(tensor_parallel_size=size, sequence_parallel=split, custom_parallel_plan=path)
    check_tensor_parallel(AutoConfig.for_model(family, **SHAPE | changes), settings)


def test_what_can_be_cut_is_let_through_and_the_plan_in_the_examples_is_that_of_transformers() -> None:
    for family in ("llama", "qwen3", "olmo2"):
        check(family, split=True)
    check("gpt2", size=1)
    for family in ("llama", "qwen3"):
        hf = build_on_meta(AutoConfig.for_model(family, **SHAPE), torch.float32)
        own = user_plan(hf, "examples.custom_parallel:plan", "custom_parallel_plan")
        assert dict(own) == {name: word for name, word in dict(hf.tp_plan).items() if ".layers." in name}


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"size=3 does not divide the 4 attention heads", {"size": 3}),
        (r"size=2 does not divide the 95 output features of model\.layers\.0\.mlp\.gate", {"intermediate_size": 95}),
        (r" 'plans' is not an import path; write package\.module:name", {"plan": "plans"}),
        (r"no module .nowhere. can be imported", {"plan": "nowhere.plans:plan"}),
        (r"has no 'nothing'", {"plan": ":nothing"}),
        (r"is no plan but \{.*: 3\}.*words \(colwise", {"plan": ":NO_PLAN"}),
        (r"is no plan but 97", {"plan": "tests.unit.policy.models:VOCAB"}),
        (r"LlamaForCausalLM has no modules model\.layers\.\*\.mlp\.gatee_proj", {"plan": ":MISSPELT"}),
        (r"mlp\.gate_proj \(Linear\).*is not known: its plan says 'colwize'", {"plan": ":UNKNOWN_WORD"}),
        (r"self_attn\.q_norm .* its plan does not name it", {"family": "qwen3", "plan": ":MATRICES"}),
        (
            r"has not one final norm with weights .* but none; set .*sequence_parallel=false",
            {"family": "olmo", "split": True},
        ),
        (r"set policy\.dtensor_cfg\.sequence_parallel=false", {"plan": ":STYLES", "split": True}),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_would_work(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        check(**{"family": "llama"} | arguments)
