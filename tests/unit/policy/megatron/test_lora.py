"""Adapters on Megatron's layers: the same on every layout, merged, saved, and as PEFT computes them."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.dtensor.lora import draw_first_matrix
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.megatron.adapter_map import adapted_layers, check_adapters
from nemo_rl.models.policy.megatron.config import MegatronPeftConfig
from nemo_rl.models.policy.megatron.mapping import weight_map
from nemo_rl.utils.checkpoint.save import SaveRequest
from tests.unit.policy import steps
from tests.unit.policy.megatron.parity import cut, distances
from tests.worlds import run_world

LLAMA = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=97)
MOE = Qwen3MoeConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_experts=4, vocab_size=97)


def policy(optimizer: str = "sgd", peft: dict[str, Any] | None = None, **layout: Any) -> PolicyConfig:
    rates = {"lr": 0.3 if optimizer == "sgd" else 0.01, "sgd_momentum": 0.0, "weight_decay": 0.0}
    return steps.megatron_policy(
        peft={"enabled": True, "dim": 4, "alpha": 8.0} | (peft or {}),
        optimizer={"optimizer": optimizer, "use_distributed_optimizer": False, **rates},
        **layout,
    )


def two_calls(rank: int, world: int, path: Path, config: PolicyConfig, folder: Path | None = None) -> list[steps.Step]:
    """The second of two calls, with the logprobs after it; and, if that is saved, a third one."""
    worker = steps.make_worker(path, config)
    before = {name: parameter.detach().clone() for name, parameter in worker.parameters.items()}
    steps.train_step(worker)
    found = [steps.step_of(worker)]
    worker.compute(Logprobs(), "prev_logprobs")
    worker.compute_reference_logprobs()
    found[0].logprobs = steps.logprobs_of(worker)
    for shard in worker._shards():
        whole = found[0].weights[shard.name].narrow(shard.dim, shard.start, shard.stop - shard.start)
        assert torch.equal(shard.local(), whole), shard.name
    for name, tensor in worker.parameters.items():
        assert tensor.requires_grad == name.endswith((".lora_A", ".lora_B"))
        assert tensor.requires_grad or torch.equal(tensor, before[name]), "the base is unchanged"
    if folder is not None:
        drawn = before["decoder.layers.2.self_attention.linear_proj.adapter.lora_A"]
        want = draw_first_matrix("model.layers.2.self_attn.o_proj", (4, 64), "xavier", 0)
        assert torch.equal(drawn, want), "layers both backends know begin with the same values"
        worker.save_checkpoint(folder, SaveRequest(save_consolidated=True))
        found.append(steps.step_of(worker))
    return found


@pytest.fixture(scope="module")
def alone(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[steps.Step], Path]:
    directory = tmp_path_factory.mktemp("saved")
    return run_world(two_calls, 1, deep, policy("adam"), directory)[0], directory


assert_close = functools.partial(torch.testing.assert_close, rtol=0)


def test_adapted_layers_move_the_reference_is_the_base_model_and_peft_computes_the_same(deep, alone):
    [step, _], directory = alone
    own, reference = ({key: kinds[n] for key, kinds in step.logprobs.items()} for n in (0, 1))
    base = AutoModelForCausalLM.from_pretrained(deep)
    assert_close(reference, steps.plain_logprobs(base), atol=1e-5)
    moved = {name for name, tensor in base.state_dict().items() if not torch.equal(step.weights[name], tensor)}
    assert moved == {name for name in step.weights if name.endswith("_proj.weight")}
    assert max((own[key] - reference[key]).abs().max() for key in own) > 0.1
    saved = directory / "policy"
    whole = AutoModelForCausalLM.from_pretrained(saved / "weights" / "consolidated")
    assert_close(steps.plain_logprobs(whole), own, atol=1e-5)
    assert_close(steps.plain_logprobs(PeftModel.from_pretrained(base, saved / "adapter")), own, atol=1e-5)
    config = json.loads((saved / "adapter" / "adapter_config.json").read_text())
    projections = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == projections
    assert len(load_file(saved / "adapter" / "adapter_model.safetensors")) == 4 * len(projections) * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, cut("tp2") | {"activation_checkpointing": True}),
        (4, cut("tp4")),  # more ranks than query groups
        (2, cut("pp2")),
        (2, cut("cp2") | {"activation_checkpointing": True}),
    ],
)
def test_training_does_not_depend_on_the_layout(deep, world, layout):
    [[want]] = run_world(two_calls, 1, deep, policy())
    ranks = [step for [step] in run_world(two_calls, world, deep, policy(**layout))]
    off = distances(ranks, want)
    assert max(off.loss, off.grad_norm) <= 1e-5 and off.weights <= 3e-6 and off.logprobs <= 3e-5, off


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, cut("tp2"))])
def test_training_goes_on_from_a_checkpoint_of_adapters(deep, alone, world, layout):
    """To the bit on the rank that saved it."""
    [saved, following], directory = alone

    def resumed(rank: int, world: int) -> tuple[dict[str, torch.Tensor], steps.Step]:
        worker = steps.make_worker(deep, policy("adam", **layout))
        worker.load_checkpoint(directory, load_optimizer=True)
        return steps.whole_weights(worker), steps.step_of(worker)

    loaded, step = run_world(resumed, world)[0]
    assert_close(loaded, saved.weights, atol=0 if world == 1 else 1e-6)
    assert step.result.losses == pytest.approx(following.result.losses, rel=0, abs=0 if world == 1 else 1e-5)
    assert_close(step.weights, following.weights, atol=0 if world == 1 else 1e-5)
    assert any(not torch.equal(step.weights[name], loaded[name]) for name in loaded)


def test_dropout_acts_in_training_mode_and_a_fused_norm_comes_before_the_adapter():
    from nemo_rl.models.policy.megatron.lora import Adapter, _add_adapter

    torch.manual_seed(0)
    linear: Any = nn.Linear(8, 6, bias=False)
    linear.config = SimpleNamespace(sequence_parallel=False, layernorm_epsilon=1e-2)
    linear.layer_norm_weight = nn.Parameter(torch.rand(8) + 0.5)
    peft = MegatronPeftConfig(enabled=True, dim=2, alpha=4, dropout=0.5)
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    linear.adapter = Adapter(linear, adapted_layers(weight_map(LLAMA), peft)[0], peft, group)
    for part in linear.adapter.parameters():
        nn.init.normal_(part)
    states, given = torch.randn(5, 1, 8), torch.randn(5, 1, 6)
    normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-2) * linear.layer_norm_weight
    expected = given + 2 * normed @ linear.adapter.lora_A.T @ linear.adapter.lora_B.T
    linear.eval()
    torch.testing.assert_close(_add_adapter(linear, (states,), (given, None))[0], expected)
    linear.train()
    assert (_add_adapter(linear, (states,), (given, None))[0] - expected).abs().max() > 0.1


def test_linear_layers_are_adapted_but_those_left_out_and_experts() -> None:
    def adapted(model: PretrainedConfig, **peft: Any) -> list[str]:
        layers = adapted_layers(weight_map(model), MegatronPeftConfig(enabled=True, dim=4, **peft))
        return [layer.name.rpartition(".")[2] for layer in layers]

    attention = ["linear_proj", "linear_qkv"]
    assert sorted(adapted(LLAMA)) == sorted([*attention, "linear_fc1", "linear_fc2"] * 4)
    assert adapted(LLAMA, target_modules=["linear_qkv"]) == ["linear_qkv"] * 4
    assert sorted(adapted(LLAMA, exclude_modules=["*.linear_fc*"])) == sorted(attention * 4)
    assert set(adapted(MOE)) == set(attention)


@pytest.mark.parametrize(
    ("model", "peft", "more", "message"),
    [
        (LLAMA, {"target_modules": ["q_proj"]}, {}, "target_modules: 'q_proj' matches no linear layer"),
        (LLAMA, {"exclude_modules": ["linear_fc*"]}, {}, "matches no linear layer; there are linear_fc1, linear_fc2"),
        (LLAMA, {"exclude_modules": ["*"]}, {}, "exclude_modules leaves no layer"),
        (LLAMA, {"dim": 65}, {}, r"peft.dim=65 is more than the full rank 64 of .*linear_qkv"),
        (LLAMA, {"target_modules": ["decoder.layers.0.*"]}, cut("pp2"), "none of the layers 2 to 3, which pipeline r"),
        (MOE, {}, {"freeze_moe_router": False}, "freeze_moe_router=false: .* set .*freeze_moe_router=true"),
        (MOE, {"target_modules": ["linear_fc1"]}, {}, r"takes in .*local_experts.0.linear_fc1, a layer of an"),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused_on_the_driver(model, peft, more, message):
    with pytest.raises(ValueError, match=message):
        check_adapters(policy(peft=peft, **more), model)
