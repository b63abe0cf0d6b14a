"""Adapters on Megatron's layers: the same on every layout, merged, saved, and as PEFT computes them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.dtensor.lora import draw_first_matrix
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.megatron.adapter_map import adapted_layers, check_adapters
from nemo_rl.models.policy.megatron.config import MegatronPeftConfig
from nemo_rl.models.policy.megatron.mapping import weight_map
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.models import save_model
from tests.unit.policy.steps import make_worker, megatron_policy, train_step, whole_weights
from tests.worlds import run_world

pytest.importorskip("megatron.core")

TEMPERATURE = 0.8  # of `worker_settings`
LLAMA = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=97)
MOE = Qwen3MoeConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_experts=4, vocab_size=97)


def policy(optimizer: str = "sgd", peft: dict[str, Any] | None = None, **layout: Any) -> PolicyConfig:
    rates = {"lr": 0.3 if optimizer == "sgd" else 0.01, "sgd_momentum": 0.0, "weight_decay": 0.0}
    return megatron_policy(
        peft={"enabled": True, "dim": 4, "alpha": 8.0} | (peft or {}),
        optimizer={"optimizer": optimizer, "use_distributed_optimizer": False, **rates},
        **layout,
    )


@dataclass
class Outcome:
    """What two training calls, of two optimizer steps each, came to on a rank."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    logprobs: dict[str, torch.Tensor] = field(default_factory=dict)  # by row, of the policy that came out
    references: list[dict[str, torch.Tensor]] = field(default_factory=list)  # before, between and after
    tokens: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # ids, mask
    merged: dict[str, torch.Tensor] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    is_base_unchanged: bool = False
    drawn: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # the first matrix of a layer, at first
    next_losses: list[float] = field(default_factory=list)  # of a third call, after the save
    next_merged: dict[str, torch.Tensor] = field(default_factory=dict)


def column(worker: Any, name: str) -> dict[str, torch.Tensor]:
    return {row.sample_id: row.columns[name].clone() for row in worker.rows.values()}


def two_calls(rank: int, world: int, path: Path, config: PolicyConfig, directory: Path | None = None) -> Outcome:
    worker, outcome = make_worker(path, config), Outcome()
    before = {name: parameter.detach().clone() for name, parameter in worker.parameters.items()}
    outcome.drawn = before.get("decoder.layers.2.self_attention.linear_proj.adapter.lora_A", outcome.drawn)
    for _ in range(2):
        result = train_step(worker)
        outcome.losses += result.losses
        outcome.grad_norms += result.grad_norms
        outcome.references.append(column(worker, "reference_policy_logprobs"))
    worker.compute(Logprobs(), "prev_logprobs")
    worker.compute_reference_logprobs()
    outcome.logprobs = column(worker, "prev_logprobs")
    outcome.references.append(column(worker, "reference_policy_logprobs"))
    for row in worker.rows.values():
        outcome.tokens[row.sample_id] = (torch.as_tensor(row.token_ids), torch.as_tensor(row.token_mask))
    outcome.merged = whole_weights(worker)
    for shard in worker._shards():
        whole = outcome.merged[shard.name].narrow(shard.dim, shard.start, shard.stop - shard.start)
        assert torch.equal(shard.local(), whole), shard.name
    outcome.trained = [name for name, tensor in worker.parameters.items() if tensor.requires_grad]
    frozen = worker.parameters.keys() - set(outcome.trained)
    outcome.is_base_unchanged = all(torch.equal(worker.parameters[name], before[name]) for name in frozen)
    if directory is not None:
        directory.mkdir(exist_ok=True)
        worker.save_checkpoint(directory, SaveRequest(save_consolidated=True))
        outcome.next_losses = train_step(worker).losses
        outcome.next_merged = whole_weights(worker)
    return outcome


def resumed(rank: int, world: int, path: Path, config: PolicyConfig, directory: Path) -> Any:
    worker = make_worker(path, config)
    worker.load_checkpoint(directory, load_optimizer=True)
    loaded = whole_weights(worker)
    result = train_step(worker)
    return loaded, result.losses, whole_weights(worker)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deep")
    save_model("deep", path)
    return path


@pytest.fixture(scope="module")
def alone(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    directory = tmp_path_factory.mktemp("saved")
    return run_world(two_calls, 1, deep, policy("adam"), directory)[0], directory


def logprobs_with(model: Any, outcome: Outcome) -> dict[str, torch.Tensor]:
    found = {}
    for key, (ids, mask) in outcome.tokens.items():
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].float() / TEMPERATURE
        scored = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found[key] = torch.cat([scored.new_zeros(1), scored]) * mask
    return found


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=0, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


def test_adapters_alone_train_and_the_reference_is_the_base_model(deep, alone):
    outcome, _ = alone
    assert outcome.is_base_unchanged
    assert outcome.trained and all(name.endswith((".lora_A", ".lora_B")) for name in outcome.trained)
    want = draw_first_matrix("model.layers.2.self_attn.o_proj", (4, 64), "xavier", 0)
    assert torch.equal(outcome.drawn, want), "layers both backends know begin with the same values"
    base = AutoModelForCausalLM.from_pretrained(deep)
    for reference in outcome.references:
        assert_close(reference, logprobs_with(base, outcome), 1e-5)
    moved = {name for name, tensor in base.state_dict().items() if not torch.equal(outcome.merged[name], tensor)}
    assert moved == {name for name in outcome.merged if name.endswith("_proj.weight")}
    assert max((outcome.logprobs[key] - outcome.references[-1][key]).abs().max() for key in outcome.logprobs) > 0.1


def test_peft_and_the_merged_model_compute_what_the_adapted_one_does(deep, alone):
    outcome, directory = alone
    consolidated = AutoModelForCausalLM.from_pretrained(directory / "policy" / "weights" / "consolidated")
    assert_close(logprobs_with(consolidated, outcome), outcome.logprobs, 1e-5)
    with_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(deep), directory / "policy" / "adapter")
    assert_close(logprobs_with(with_peft, outcome), outcome.logprobs, 1e-5)
    config = json.loads((directory / "policy" / "adapter" / "adapter_config.json").read_text())
    projections = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == projections
    tensors = load_file(directory / "policy" / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 4 * len(projections) * 2


TP, SP, PP, CP = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
LAYOUTS = {
    "tp-sp-recompute": (2, {TP: 2, SP: True, "activation_checkpointing": True}),
    "tp4": (4, {TP: 4, SP: True}),  # more ranks than query groups
    "pp": (2, {PP: 2}),
    "cp-recompute": (2, {CP: 2, "activation_checkpointing": True}),
}


@pytest.fixture(scope="module")
def by_sgd(deep: Path) -> Outcome:
    return run_world(two_calls, 1, deep, policy())[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_does_not_depend_on_the_layout(deep, by_sgd, name):
    world, layout = LAYOUTS[name]
    for outcome in run_world(two_calls, world, deep, policy(**layout), timeout=200):
        assert outcome.is_base_unchanged
        assert outcome.losses == pytest.approx(by_sgd.losses, abs=1e-5)
        assert outcome.grad_norms == pytest.approx(by_sgd.grad_norms, rel=1e-5)
        assert_close(outcome.merged, by_sgd.merged, 3e-6)
        assert_close(outcome.logprobs, {key: by_sgd.logprobs[key] for key in outcome.logprobs}, 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {TP: 2, SP: True})])
def test_training_goes_on_from_a_checkpoint_of_adapters(deep, alone, world, layout):
    """To the bit on the rank that saved it."""
    outcome, directory = alone
    loaded, losses, merged = run_world(resumed, world, deep, policy("adam", **layout), directory)[0]
    assert_close(loaded, outcome.merged, 0 if world == 1 else 1e-6)
    assert losses == pytest.approx(outcome.next_losses, rel=0, abs=0 if world == 1 else 1e-5)
    assert_close(merged, outcome.next_merged, 0 if world == 1 else 1e-5)
    assert any(not torch.equal(merged[name], loaded[name]) for name in merged)


def test_dropout_acts_in_training_mode_and_a_fused_norm_comes_before_the_adapter():
    from nemo_rl.models.policy.megatron.lora import Adapter, _add_adapter

    torch.manual_seed(0)
    linear: Any = nn.Linear(8, 6, bias=False)
    linear.config = LLAMA.__class__()
    linear.config.sequence_parallel, linear.config.layernorm_epsilon = False, 1e-2
    linear.layer_norm_weight = nn.Parameter(torch.rand(8) + 0.5)
    (layer, *_) = adapted_layers(weight_map(LLAMA, implementation="local"), MegatronPeftConfig(enabled=True, dim=2))
    peft = MegatronPeftConfig(enabled=True, dim=2, alpha=4, dropout=0.5)
    group: Any = _OneRank()
    linear.adapter = Adapter(linear, layer, peft, group)
    for part in linear.adapter.parameters():
        nn.init.normal_(part)
    states, given = torch.randn(5, 1, 8), torch.randn(5, 1, 6)
    normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-2) * linear.layer_norm_weight
    expected = given + 2 * normed @ linear.adapter.lora_A.T @ linear.adapter.lora_B.T
    linear.eval()
    torch.testing.assert_close(_add_adapter(linear, (states,), (given, None))[0], expected)
    linear.train()
    assert (_add_adapter(linear, (states,), (given, None))[0] - expected).abs().max() > 0.1


class _OneRank:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("peft", "names"),
    [
        ({}, {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}),
        ({"target_modules": ["linear_qkv"]}, {"linear_qkv"}),
        ({"target_modules": ["*.mlp.*"]}, {"linear_fc1", "linear_fc2"}),
        ({"exclude_modules": ["*.linear_fc*"]}, {"linear_qkv", "linear_proj"}),
    ],
)
def test_layers_are_named_by_their_last_parts_or_a_pattern_and_experts_stay_frozen(peft, names):
    layers = adapted_layers(weight_map(LLAMA, implementation="local"), MegatronPeftConfig(enabled=True, **peft))
    assert {layer.name.rpartition(".")[2] for layer in layers} == names
    assert len(layers) == 4 * len(names)
    layers = adapted_layers(weight_map(MOE, implementation="local"), MegatronPeftConfig(enabled=True))
    assert {layer.name.rpartition(".")[2] for layer in layers} == {"linear_qkv", "linear_proj"}


@pytest.mark.parametrize(
    ("model", "peft", "more", "message"),
    [
        (LLAMA, {"target_modules": ["q_proj"]}, {}, "target_modules: 'q_proj' matches no linear layer"),
        (LLAMA, {"exclude_modules": ["linear_fc*"]}, {}, "matches no linear layer; there are linear_fc1, linear_fc2"),
        (LLAMA, {"exclude_modules": ["*"]}, {}, "exclude_modules leaves no layer"),
        (LLAMA, {"dim": 65}, {}, r"peft.dim=65 is more than the full rank 64 of .*linear_qkv"),
        (
            LLAMA,
            {"target_modules": ["decoder.layers.0.*"]},
            {PP: 2},
            "none of the layers 2 to 3, which pipeline rank 1",
        ),
        (MOE, {}, {"freeze_moe_router": False}, "freeze_moe_router=false: .* set it to true"),
        (MOE, {"target_modules": ["linear_fc1"]}, {}, r"takes in .*local_experts.0.linear_fc1, a layer of an"),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused_on_the_driver(model, peft, more, message):
    with pytest.raises(ValueError, match=message):
        check_adapters(policy(peft=peft, **more), model)
