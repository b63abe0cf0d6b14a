"""Mixture-of-experts models: dtypes, names and files, load of the routers, and what is refused.

Losses and gradients are in test_layouts.py and test_exactness.py.
"""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributions import Categorical
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.dtensor import moe
from nemo_rl.models.policy.dtensor.model import export_weights
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.pretrained import build_on_meta
from tests.unit.policy.models import Models, edit_json, save_model
from tests.unit.policy.steps import load_step, make_groups, make_worker, policy_config, train_step, whole_weights
from tests.worlds import run_world

FAMILIES = ["qwen3-moe", "mixtral", "deepseek_v3"]
NUM_EXPERTS = 4
SPREAD = DTensorConfig(expert_parallel_size=2)


def test_spread_experts_are_read_and_sent_under_the_names_on_disk_and_computed_to_the_bit(models: Models) -> None:
    """On four ranks: two groups that share each expert's rows."""
    paths = [models[family] for family in FAMILIES]

    def rank_main(rank: int, world: int) -> None:
        for path in paths:
            worker = make_worker(path, policy_config(dtensor_cfg=SPREAD), init_reference_model=False)
            stored, held = load_file(path / "model.safetensors"), whole_weights(worker)
            assert held.keys() == stored.keys(), "the names that transformers itself saves"
            for name, tensor in held.items():
                assert tensor.is_contiguous() and torch.equal(tensor, stored[name]), name
        scored = []
        load_step(worker)
        for _ in range(2):
            worker.compute(Logprobs(), "prev_logprobs")
            scored.append(torch.cat([row.columns["prev_logprobs"] for row in worker.rows.values()]))
        assert torch.equal(*scored)

    run_world(rank_main, 4)


def test_routing_weights_and_the_bias_that_chooses_stay_in_float32_in_bfloat16(models: Models) -> None:
    mixtral, deepseek = models["mixtral"], models["deepseek_v3"]

    def rank_main(rank: int, world: int) -> None:
        config = policy_config(precision="bfloat16", dtensor_cfg=SPREAD, train_micro_batch_size=4)
        worker, seen = make_worker(mixtral, config), []
        for _, module in moe.expert_modules(worker.stages[0].hf):
            module.register_forward_pre_hook(lambda module, args: seen.extend(a.dtype for a in (args[0], args[2])))
        worker.stages[0].hf.train()
        train_step(worker)
        assert set(seen[::2]) == {torch.bfloat16} and set(seen[1::2]) == {torch.float32}
        pure = config.model_copy(update={"master_precision": "bfloat16"})
        worker = make_worker(deepseek, pure, init_optimizer=False, init_reference_model=False)
        hf = worker.stages[0].hf
        assert {parameter.dtype for parameter in hf.parameters()} == {torch.bfloat16}
        name = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert dict(hf.named_buffers())[name].dtype == torch.float32
        exported = export_weights([hf], worker.mesh, worker.device)
        assert {weight.name for weight in exported if weight.keeps_dtype} == {name}, "on its way to generation too"

    run_world(rank_main, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[3, 0, 9, 4], [0, 0, 0, 0]])
def test_grouped_matmul_on_the_device_equals_one_matmul_per_expert(models: Models, counts: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models["qwen3-moe"], dtype=torch.bfloat16)
    layer: Any = next(module for _, module in moe.expert_modules(model))
    rows, sizes = torch.randn(sum(counts), 64, dtype=torch.bfloat16), torch.tensor(counts)

    def run(device: str) -> list[torch.Tensor]:
        own, inputs = copy.deepcopy(layer).to(device), rows.detach().to(device).requires_grad_()
        out = moe.run_experts(own, inputs, sizes.to(device))
        out.float().square().sum().backward()
        grads = [inputs.grad, own.gate_up_proj.grad, own.down_proj.grad]
        return [out.detach().float().cpu(), *(grad.float().cpu() for grad in grads if grad is not None)]

    got, want = run("cuda"), run("cpu")
    assert len(got) == len(want) == 4
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()


def test_the_load_of_routers_counts_each_real_token_once_over_micro_batches_and_ranks(models: Models) -> None:
    changes = {"train_global_batch_size": 16, "train_micro_batch_size": 3, "make_sequence_length_divisible_by": 8}
    config = policy_config(**changes, dtensor_cfg=SPREAD.model_copy(update={"activation_checkpointing": True}))
    model = AutoModelForCausalLM.from_pretrained(models["qwen3-moe"], experts_implementation="eager")
    routed: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {0: [], 1: []}
    for layer, seen in routed.items():
        router = model.get_submodule(f"model.layers.{layer}.mlp.gate")
        router.register_forward_hook(lambda module, args, output, seen=seen: seen.append((output[0], output[2])))
    for group in make_groups()[1]:
        for sample in group.samples:
            model(input_ids=torch.from_numpy(sample.token_ids)[None])
    want: Counter[str] = Counter()
    for seen in routed.values():
        logits, chosen = (torch.cat(parts) for parts in zip(*seen, strict=True))
        load = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS).double()
        want["load_max_over_mean"] += (load.max() / load.mean()).item() / 2
        want["load_min_over_mean"] += (load.min() / load.mean()).item() / 2
        want["dead_expert_fraction"] += (load == 0).double().mean().item() / 2
        want["router_entropy"] += Categorical(logits=logits).entropy().mean().item() / 2
    for result in run_world(lambda rank, world: train_step(make_worker(models["qwen3-moe"], config)), 2):
        found = {name: value for name, value in result.metrics.items() if name.startswith("moe/")}
        assert found == pytest.approx({f"moe/{name}": value for name, value in want.items()}, rel=1e-5)


def test_weights_of_another_number_of_experts_are_refused(tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path)
    for wrong in (3, 5):
        edit_json(tmp_path / "config.json", num_experts=wrong, num_local_experts=wrong)
        with pytest.raises(ValueError, match=rf"gate_proj.weight, \.\.\. do not hold {wrong} experts"):
            run_world(lambda rank, world: make_worker(tmp_path, policy_config()) and None, 1)


def test_experts_that_cannot_be_spread_are_refused_before_anything_is_loaded(models: Models) -> None:
    """tests/functional/test_bad_input.py has a dense model."""
    for family in FAMILIES:
        with pytest.raises(ValueError, match=r"expert_parallel_size=8 does not divide the 4 experts.*: 1, 2, 4$"):
            moe.check_experts(AutoConfig.from_pretrained(models[family]), DTensorConfig(expert_parallel_size=8))
    with pytest.raises(ValueError, match=r"experts of 'gpt_oss' are not laid out as"):
        moe.check_experts(GptOssConfig(), SPREAD)


def test_experts_that_no_machine_holds_are_built_without_memory() -> None:
    experts = {"num_experts": 4096, "num_experts_per_tok": 2, "moe_intermediate_size": 8192, "num_hidden_layers": 1}
    config = Qwen3MoeConfig(hidden_size=8192, num_attention_heads=8, num_key_value_heads=8, vocab_size=64, **experts)
    model = build_on_meta(config, torch.float32)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 1e12
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
