"""Mixture-of-experts models against plain transformers in one process: logprobs, gradients, names, metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.dtensor import moe
from nemo_rl.models.policy.dtensor.mesh import ParallelMesh
from nemo_rl.models.policy.dtensor.model import export_weights, materialize, recompute_activations
from nemo_rl.models.policy.dtensor.moe import apply_expert_parallel
from nemo_rl.models.policy.experts import ExpertNames
from nemo_rl.models.policy.layout import ParallelSizes
from nemo_rl.models.policy.pretrained import decoder_layers, parameters_on_meta
from nemo_rl.models.policy.weight_loading import StoredModel, hf_name, load_weights, named_tensors
from tests.worlds import run_world

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3"]
VOCAB, NUM_EXPERTS = 61, 4


def moe_config(family: str, num_experts: int) -> PretrainedConfig:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    if family == "mixtral":
        return MixtralConfig(**shape, intermediate_size=24, num_local_experts=num_experts)
    shape |= {"intermediate_size": 48, "moe_intermediate_size": 24}
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**shape, head_dim=16, num_experts=num_experts, norm_topk_prob=True)
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    shape |= latent | {"num_key_value_heads": 4, "n_routed_experts": num_experts, "n_shared_experts": 1}
    return DeepseekV3Config(**shape, n_group=2, topk_group=1, first_k_dense_replace=1)


def random_model(family: str, num_experts: int = NUM_EXPERTS) -> PreTrainedModel:
    torch.manual_seed(0)
    config = moe_config(family, num_experts)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter.ndim == 1))
        for bias in correction_biases(model):
            bias.copy_(torch.rand_like(bias) * 0.2)
    return model


def correction_biases(model: PreTrainedModel) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def token_ids(rows: int = 4) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, 13), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")


Step = tuple[float, dict[str, torch.Tensor]]  # summed loss, whole gradients by name


def reference(model: PreTrainedModel, ids: torch.Tensor) -> Step:
    model.set_experts_implementation("eager")
    loss = loss_of(model, ids)
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return loss.item(), grads


def sharded_model(
    path: Path, mesh: ParallelMesh, *, dtype: torch.dtype = torch.float32, recompute: bool | str = False
) -> PreTrainedModel:
    """The model on `path`, cut as the policy does it."""
    config = AutoConfig.from_pretrained(path)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    apply_expert_parallel(model, mesh)
    layers = decoder_layers(model)
    recompute_activations(model, recompute)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    moe.shard_experts(model, mesh, mp_policy=policy)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh.fsdp, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    materialize(model, torch.device("cpu"))
    load_weights(dict(named_tensors(model)), str(path), ExpertNames(config.model_type).read)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run_step(
    path: Path,
    sizes: ParallelSizes,
    ids: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: bool | str = False,
    divide_expert_gradients: float = 1.0,
) -> Step:
    """One step in which each data rank takes its rows of `ids`."""
    mesh = ParallelMesh("cpu", sizes)
    model = sharded_model(path, mesh, dtype=dtype, recompute=recompute)
    for _, module in moe.expert_modules(model):
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(divide_expert_gradients)
    loss = loss_of(model, ids.chunk(sizes.data_parallel)[mesh.data_rank])
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.data_group)
    grads: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grads[hf_name(name)] = full(parameter.grad)
    return total.item(), grads


def assert_same(got: Step, want: Step) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert (got[1][name] - grad).norm() <= 3e-6 * grad.norm() + 1e-7, name


# -- computing


def test_two_backward_passes_give_the_same_bits(tmp_path):
    random_model("qwen3_moe").save_pretrained(tmp_path)

    def rank_main(rank: int, world: int) -> list[dict[str, torch.Tensor]]:
        return [run_step(tmp_path, ParallelSizes(), token_ids())[1] for _ in range(2)]

    first, second = run_world(rank_main, 1)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("family", "num_experts", "sizes"),
    [
        *((family, 4, ParallelSizes(dp_shard=2, expert_parallel=2)) for family in FAMILIES),
        ("mixtral", 4, ParallelSizes(dp_shard=2)),
        ("mixtral", 4, ParallelSizes(dp_replicate=2, dp_shard=2, expert_parallel=2)),
        ("deepseek_v3", 4, ParallelSizes(dp_shard=2, tensor_parallel=2, expert_parallel=2)),
        pytest.param("qwen3_moe", 3, ParallelSizes(dp_shard=2), id="3 experts on 2 ranks"),
        pytest.param("qwen3_moe", 2, ParallelSizes(dp_shard=4, expert_parallel=2), id="2 experts on 2 x 2 ranks"),
    ],
)
def test_spread_experts_give_the_loss_and_gradients_of_one_process(tmp_path, family, num_experts, sizes):
    model = random_model(family, num_experts)
    model.save_pretrained(tmp_path)
    ids = token_ids()
    want = reference(model, ids)
    for result in run_world(lambda rank, world: run_step(tmp_path, sizes, ids), sizes.world_size):
        assert_same(result, want)


def test_spread_experts_are_recomputed_but_for_products(tmp_path):
    model = random_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    ids, sizes = token_ids(), ParallelSizes(dp_shard=2, expert_parallel=2)
    for result in run_world(lambda rank, world: run_step(tmp_path, sizes, ids, recompute="selective"), 2):
        assert_same(result, reference(model, ids))
        model.zero_grad()


def test_a_rank_whose_experts_get_no_token_has_zero_gradients_for_them(tmp_path):
    model = random_model("deepseek_v3")
    with torch.no_grad():
        for bias in correction_biases(model):
            bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    model.save_pretrained(tmp_path)
    ids, sizes = token_ids(), ParallelSizes(dp_shard=2, expert_parallel=2)
    want = reference(model, ids)
    for result in run_world(lambda rank, world: run_step(tmp_path, sizes, ids), 2):
        assert_same(result, want)
        unused = result[1]["model.layers.1.mlp.experts.gate_up_proj"][2:]
        assert torch.count_nonzero(unused) == 0


def test_gradients_of_experts_that_were_averaged_are_noticed(tmp_path):
    """The comparison of the tests above can fail, and by the experts' gradients alone."""
    model = random_model("qwen3_moe", 8)
    model.save_pretrained(tmp_path)
    ids, sizes = token_ids(), ParallelSizes(dp_shard=4, expert_parallel=2)
    want = reference(model, ids)
    wrong = run_world(lambda rank, world: run_step(tmp_path, sizes, ids, divide_expert_gradients=2.0), 4)[0]
    with pytest.raises(AssertionError, match=r"mlp\.experts"):
        assert_same(wrong, want)
    assert_same((wrong[0], {n: g * (2 if ".experts." in n else 1) for n, g in wrong[1].items()}), want)


def test_routing_weights_stay_in_float32_when_the_model_computes_in_bfloat16(tmp_path):
    model = random_model("mixtral")
    model.save_pretrained(tmp_path)
    ids = token_ids()

    def rank_main(rank: int, world: int) -> tuple[Step, list[torch.dtype]]:
        mesh = ParallelMesh("cpu", ParallelSizes(dp_shard=2, expert_parallel=2))
        sharded = sharded_model(tmp_path, mesh, dtype=torch.bfloat16)
        seen: list[torch.dtype] = []
        for _, module in moe.expert_modules(sharded):
            module.register_forward_pre_hook(lambda module, args: seen.extend(a.dtype for a in (args[0], args[2])))
        loss_of(sharded, ids)
        return run_step(tmp_path, mesh.sizes, ids, dtype=torch.bfloat16), seen

    want = reference(model, ids)
    for (loss, grads), seen in run_world(rank_main, 2):
        assert seen == [torch.bfloat16, torch.float32] * 2
        assert loss == pytest.approx(want[0], rel=1e-2)
        name = "model.layers.0.mlp.experts.down_proj"
        assert grads[name].dtype == torch.float32
        assert F.cosine_similarity(grads[name].flatten(), want[1][name].flatten(), dim=0) > 0.99


def test_the_bias_that_chooses_experts_stays_in_float32_when_weights_are_kept_in_bfloat16():
    def rank_main(rank: int, world: int) -> tuple[list[torch.dtype], set[str]]:
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(moe_config("deepseek_v3", 4), dtype=torch.bfloat16)
        mesh = ParallelMesh("cpu", ParallelSizes())
        apply_expert_parallel(model, mesh)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        kept = {weight.name for weight in export_weights([model], mesh, torch.device("cpu")) if weight.keeps_dtype}
        return [bias.dtype for bias in correction_biases(model)], kept

    dtypes, kept = run_world(rank_main, 1)[0]
    assert dtypes == [torch.float32]
    assert kept == {"model.layers.1.mlp.gate.e_score_correction_bias"}, "on its way to generation too"


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[3, 0, 9, 4], [0, 0, 0, 0]])
def test_grouped_matmul_on_the_device_equals_one_matmul_per_expert(counts):
    torch.manual_seed(0)
    layer = next(module for _, module in moe.expert_modules(random_model("qwen3_moe"))).bfloat16()
    rows, sizes = torch.randn(sum(counts), 32, dtype=torch.bfloat16), torch.tensor(counts)

    def run(device: str) -> list[torch.Tensor]:
        gate_up, down = (getattr(layer, n).detach().to(device).requires_grad_() for n in ("gate_up_proj", "down_proj"))
        inputs = rows.detach().to(device).requires_grad_()
        out = moe.run_experts(layer, gate_up, down, inputs, sizes.to(device))
        out.float().square().sum().backward()
        grads = [inputs.grad, gate_up.grad, down.grad]
        return [out.detach().float().cpu(), *(grad.float().cpu() for grad in grads if grad is not None)]

    got, want = run("cuda"), run("cpu")
    assert len(got) == len(want) == 4
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()


# -- names and files


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_pass_through_spread_experts_to_a_model_that_transformers_loads(tmp_path, family):
    model = random_model(family)
    model.save_pretrained(tmp_path / "model")
    names = ExpertNames(model.config.model_type)

    def rank_main(rank: int, world: int) -> dict[str, torch.Tensor]:
        mesh = ParallelMesh("cpu", ParallelSizes(dp_shard=4, expert_parallel=2))
        whole = {name: full(t.detach()) for name, t in named_tensors(sharded_model(tmp_path / "model", mesh))}
        exported: dict[str, torch.Tensor] = {}
        for name, tensor in whole.items():
            parts = names.split(name, tensor)
            assert names.split_meta(name, tensor.shape) == [(part, tuple(view.shape)) for part, view in parts]
            assert all(view.is_contiguous() for _, view in parts)
            exported |= {part: view.clone() for part, view in parts}
        return exported

    exported = run_world(rank_main, 4)[0]
    with StoredModel(str(tmp_path / "model")) as stored:
        assert stored.names == set(exported), "the names that transformers itself saves"
    save_file(exported, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    again.set_experts_implementation("eager")
    for (name, tensor), (_, loaded) in zip(named_tensors(model), named_tensors(again), strict=True):
        assert torch.equal(tensor, loaded), name
    assert torch.equal(model(input_ids=token_ids()).logits, again(input_ids=token_ids()).logits)


def test_a_dense_model_keeps_its_names():
    names = ExpertNames("qwen3")
    assert not names.has_fused
    assert names.split_meta("model.layers.0.mlp.up_proj.weight", (4, 2)) == [
        ("model.layers.0.mlp.up_proj.weight", (4, 2))
    ]


def test_weights_of_another_number_of_experts_are_refused(tmp_path):
    random_model("qwen3_moe", 4).save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    for count, wrong in (("4", "3"), ("3", "5")):
        config = re.sub(rf'"(num_experts|num_local_experts)": {count}', rf'"\1": {wrong}', config)
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ValueError, match=rf"gate_proj.weight, \.\.\. are not those of {wrong} experts"):
            run_world(lambda rank, world: sharded_model(tmp_path, ParallelMesh("cpu", ParallelSizes())) and None, 1)


# -- what is refused


def test_experts_that_cannot_be_spread_are_refused_before_anything_is_loaded():
    moe.check_experts(moe_config("qwen3_moe", 8), DTensorConfig(expert_parallel_size=4))
    moe.check_experts(Qwen3Config(), DTensorConfig())
    with pytest.raises(ValueError, match=r"expert_parallel_size=2: 'qwen3' is a dense model"):
        moe.check_experts(Qwen3Config(), DTensorConfig(expert_parallel_size=2))
    for family in FAMILIES:
        with pytest.raises(ValueError, match=r"expert_parallel_size=3 does not divide the 4 experts.*: 1, 2, 4$"):
            moe.check_experts(moe_config(family, 4), DTensorConfig(expert_parallel_size=3))
    with pytest.raises(ValueError, match=r"experts of 'gpt_oss' are not laid out as"):
        moe.check_experts(GptOssConfig(), DTensorConfig(expert_parallel_size=2))


# -- router load


def test_router_load_counts_each_real_token_once_over_micro_batches_and_ranks(tmp_path):
    model = random_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    ids = token_ids(8)
    mask = torch.ones(8, 12, dtype=torch.bool)
    mask[:, 9:] = False

    def rank_main(rank: int, world: int) -> list[dict[str, float]]:
        mesh = ParallelMesh("cpu", ParallelSizes(dp_shard=2, expert_parallel=2))
        sharded = sharded_model(tmp_path, mesh, recompute=True)
        load = moe.RouterLoad(sharded)
        steps = []
        for _ in range(2):
            for part in range(2):
                rows = slice(4 * rank + 2 * part, 4 * rank + 2 * part + 2)
                load.token_mask = mask[rows]
                with torch.no_grad():
                    loss_of(sharded, ids[rows])
                loss_of(sharded, ids[rows]).backward()
            steps.append(load.read(mesh))
        return steps

    routed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(2):
        router = model.get_submodule(f"model.layers.{layer}.mlp.gate")
        router.register_forward_hook(lambda module, args, output: routed.append((output[0], output[2])))
    loss_of(model, ids)
    want = dict.fromkeys(("load_max_over_mean", "load_min_over_mean", "dead_expert_fraction", "router_entropy"), 0.0)
    for logits, chosen in routed:
        load = torch.bincount(chosen[mask.flatten()].flatten(), minlength=NUM_EXPERTS).double()
        probabilities = logits[mask.flatten()].softmax(-1)
        want["load_max_over_mean"] += (load.max() / load.mean()).item() / 2
        want["load_min_over_mean"] += (load.min() / load.mean()).item() / 2
        want["dead_expert_fraction"] += (load == 0).double().mean().item() / 2
        want["router_entropy"] += -(probabilities * probabilities.log()).sum(-1).mean().item() / 2
    for steps in run_world(rank_main, 2):
        for step in steps:
            assert step == pytest.approx({f"moe/{name}": value for name, value in want.items()}, rel=1e-5)
