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

from nemo_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_rl.models.policy.config import DTensorConfig, PolicyConfig
from nemo_rl.models.policy.dtensor.lora import draw_first_matrix
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.megatron.adapter_map import adapted_layers, check_adapters
from nemo_rl.models.policy.megatron.config import MegatronConfig, MegatronOptimizerConfig, MegatronPeftConfig
from nemo_rl.models.policy.megatron.mapping import weight_map
from nemo_rl.types import SamplingParams
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy.steps import LOSS, load_step, policy_config, save_model, worker_settings
from tests.worlds import run_world

pytest.importorskip("megatron.core")

TEMPERATURE = 0.8  # of `worker_settings`
LLAMA = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=97)
MOE = Qwen3MoeConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_experts=4, vocab_size=97)


def policy(optimizer: str = "sgd", peft: dict[str, Any] | None = None, **layout: Any) -> PolicyConfig:
    megatron = MegatronConfig(
        enabled=True,
        peft=MegatronPeftConfig(enabled=True, dim=4, alpha=8.0, **(peft or {})),
        optimizer=MegatronOptimizerConfig.model_validate(
            {
                "optimizer": optimizer,
                "sgd_momentum": 0.0,
                "lr": 0.3 if optimizer == "sgd" else 0.01,
                "weight_decay": 0.0,
                "use_distributed_optimizer": False,
            }
        ),
        **layout,
    )
    off = DTensorConfig(enabled=False)
    return policy_config(dtensor_cfg=off, megatron_cfg=megatron, optimizer=None, padding_free=None)


def make_worker(path: Path, config: PolicyConfig) -> Any:
    from nemo_rl.models.policy.megatron.worker import MegatronPolicyWorker

    settings = worker_settings(
        path, sampling=SamplingParams(max_new_tokens=16, temperature=TEMPERATURE), init_reference_model=True
    )
    return MegatronPolicyWorker(config, settings)


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
    next_losses: list[float] = field(default_factory=list)  # of a third call, after the save
    next_merged: dict[str, torch.Tensor] = field(default_factory=dict)


def column(worker: Any, name: str) -> dict[str, torch.Tensor]:
    return {row.sample_id: row.columns[name].clone() for row in worker.rows.values()}


def train(worker: Any, config: PolicyConfig) -> Any:
    load_step(worker, config)
    worker.compute(Logprobs(), "prev_logprobs")
    worker.compute_reference_logprobs()
    return worker.train(ClippedPGLoss(LOSS), Logprobs())


def merged_of(worker: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {tensor.name: tensor.gather(None).clone() for tensor in worker._export()}


def two_calls(rank: int, world: int, path: Path, config: PolicyConfig, directory: Path | None = None) -> Outcome:
    worker, outcome = make_worker(path, config), Outcome()
    before = {name: parameter.detach().clone() for name, parameter in worker.parameters.items()}
    for _ in range(2):
        result = train(worker, config)
        outcome.losses += result.losses
        outcome.grad_norms += result.grad_norms
        outcome.references.append(column(worker, "reference_policy_logprobs"))
    worker.compute(Logprobs(), "prev_logprobs")
    worker.compute_reference_logprobs()
    outcome.logprobs = column(worker, "prev_logprobs")
    outcome.references.append(column(worker, "reference_policy_logprobs"))
    for row in worker.rows.values():
        outcome.tokens[row.sample_id] = (torch.as_tensor(row.token_ids), torch.as_tensor(row.token_mask))
    outcome.merged = merged_of(worker)
    for shard in worker._shards():
        whole = outcome.merged[shard.name].narrow(shard.dim, shard.start, shard.stop - shard.start)
        assert torch.equal(shard.local(), whole), shard.name
    outcome.trained = [name for name, tensor in worker.parameters.items() if tensor.requires_grad]
    frozen = worker.parameters.keys() - set(outcome.trained)
    outcome.is_base_unchanged = all(torch.equal(worker.parameters[name], before[name]) for name in frozen)
    if directory is not None:
        directory.mkdir(exist_ok=True)
        worker.save_checkpoint(directory, SaveRequest(save_consolidated=True))
        outcome.next_losses = train(worker, config).losses
        outcome.next_merged = merged_of(worker)
    return outcome


def resumed(rank: int, world: int, path: Path, config: PolicyConfig, directory: Path) -> Any:
    worker = make_worker(path, config)
    worker.load_checkpoint(directory, load_optimizer=True)
    loaded = merged_of(worker)
    result = train(worker, config)
    return loaded, result.losses, merged_of(worker)


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


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_of_adapters(deep, alone):
    outcome, directory = alone
    loaded, losses, merged = run_world(resumed, 1, deep, policy("adam"), directory)[0]
    assert_close(loaded, outcome.merged, 0)
    assert losses == outcome.next_losses
    assert_close(merged, outcome.next_merged, 0)
    assert any(not torch.equal(merged[name], loaded[name]) for name in merged)


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
def test_a_checkpoint_of_one_rank_goes_on_over_two(deep, alone):
    outcome, directory = alone
    config = policy("adam", **{TP: 2, SP: True})
    loaded, losses, merged = run_world(resumed, 2, deep, config, directory)[0]
    assert_close(loaded, outcome.merged, 1e-6)
    assert losses == pytest.approx(outcome.next_losses, abs=1e-5)
    assert_close(merged, outcome.next_merged, 1e-5)


@pytest.mark.slow
def test_layers_both_backends_know_begin_with_the_same_values(deep):
    def first_values(rank: int, world: int) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in make_worker(deep, policy()).parameters.items() if p.requires_grad}

    drawn = run_world(first_values, 1)[0]
    prefix = "decoder.layers.2.self_attention.linear_proj.adapter."
    expected = draw_first_matrix("model.layers.2.self_attn.o_proj", (4, 64), "xavier", 0)
    assert torch.equal(drawn[prefix + "lora_A"], expected)
    assert not drawn[prefix + "lora_B"].any()


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
        ({"exclude_modules": ["linear_fc*"]}, None),
        ({"exclude_modules": ["*.linear_fc*"]}, {"linear_qkv", "linear_proj"}),
    ],
)
def test_layers_are_named_by_their_last_parts_or_a_pattern(peft, names):
    settings = MegatronPeftConfig(enabled=True, **peft)
    weights = weight_map(LLAMA, implementation="local")
    if names is None:
        with pytest.raises(ValueError, match="matches no linear layer; there are linear_fc1, linear_fc2"):
            adapted_layers(weights, settings)
    else:
        layers = adapted_layers(weights, settings)
        assert {layer.name.rpartition(".")[2] for layer in layers} == names
        assert len(layers) == 4 * len(names)


def test_experts_stay_frozen_unless_they_are_asked_for_which_is_refused():
    weights = weight_map(MOE, implementation="local")
    layers = adapted_layers(weights, MegatronPeftConfig(enabled=True))
    assert {layer.name.rpartition(".")[2] for layer in layers} == {"linear_qkv", "linear_proj"}
    with pytest.raises(ValueError, match=r"peft.target_modules takes in .*local_experts.0.linear_fc1, a layer of an"):
        adapted_layers(weights, MegatronPeftConfig(enabled=True, target_modules=["linear_fc1"]))


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (LLAMA, policy(peft={"target_modules": ["q_proj"]}), "target_modules: 'q_proj' matches no linear layer"),
        (LLAMA, policy(peft={"exclude_modules": ["*"]}), "exclude_modules leaves no layer"),
        (
            LLAMA,
            policy(peft={"target_modules": ["decoder.layers.0.*"]}, pipeline_model_parallel_size=2),
            "adapts none of the layers 2 to 3, which pipeline rank 1 trains",
        ),
        (MOE, policy(freeze_moe_router=False), "freeze_moe_router=false: .* set it to true"),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused_on_the_driver(model, config, message):
    with pytest.raises(ValueError, match=message):
        check_adapters(config, model)


def test_a_rank_above_the_full_one_is_refused():
    peft = MegatronPeftConfig(enabled=True, dim=65)
    with pytest.raises(ValueError, match=r"peft.dim=65 is more than the full rank 64 of .*linear_qkv"):
        adapted_layers(weight_map(LLAMA, implementation="local"), peft)
