"""Logprobs by tiles and over ranks, against log_softmax of whole logits in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_rl.models.policy import attention
from nemo_rl.models.policy.batch.row_layout import ModelBatch, RowLayout
from nemo_rl.models.policy.head.linear import linear_logprobs, topk_logits
from nemo_rl.models.policy.head.logit_tiles import LogitTransform, OutputHead
from nemo_rl.models.policy.head.logprobs import LogprobModel, logit_transform
from nemo_rl.models.policy.head.tasks import Logprobs
from tests.unit.policy.filter_reference import filter_logits
from tests.worlds import run_world

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


PLAIN = LogitTransform()


def whole(weight: torch.Tensor, **options: float) -> OutputHead:
    return OutputHead(weight=weight, vocab_size=len(weight), **options)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, random numbers included."""

    n: int = 13
    vocab: int = 97
    seed: int = 0
    dtype: torch.dtype = torch.float32
    with_bias: bool = False
    transform: LogitTransform = PLAIN
    temperature: float = 0.7
    top_k: int | None = None
    top_p: float = 1.0
    chunk_tokens: int | None = None
    tile_bytes: int = 1 << 20

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """States, weight, bias, targets, and the gradient of the logprobs."""
        random = torch.Generator().manual_seed(self.seed)
        states, weight, bias, grad = (
            torch.randn(shape, generator=random, dtype=torch.float64).to(self.dtype)
            for shape in [(self.n, 16), (self.vocab, 16), (self.vocab,), (self.n,)]
        )
        targets = torch.randint(0, self.vocab, (self.n,), generator=random)
        leaves = [tensor.requires_grad_() for tensor in (states, weight, bias)]
        return leaves[0], leaves[1], leaves[2] if self.with_bias else None, targets, grad

    def reference(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logprobs and gradients, from whole logits in float64."""
        states, weight, bias, targets, grad = (
            None if tensor is None else tensor if tensor.dtype == torch.int64 else tensor.double()
            for tensor in self.tensors()
        )
        assert states is not None and weight is not None and targets is not None and grad is not None
        logits = states @ weight.t() if bias is None else states @ weight.t() + bias
        logits = logits * self.transform.scale
        if self.transform.softcap is not None:
            logits = self.transform.softcap * torch.tanh(logits / self.transform.softcap)
        logits = filter_logits(logits / self.temperature, targets, self.top_k, self.top_p)
        logprobs = logits.log_softmax(-1)
        scored = logprobs.gather(1, targets[:, None])[:, 0]
        leaves = [tensor for tensor in (states, weight, bias) if tensor is not None]
        return scored.detach(), list(torch.autograd.grad((scored * grad).sum(), leaves))

    def run(self, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The same by `linear_logprobs`; over a group with this rank's rows, as DTensor cuts them."""
        states, weight, bias, targets, grad = self.tensors()
        rows = slice(0, self.vocab)
        if group is not None:
            share = -(-self.vocab // group.size())
            rows = slice(group.rank() * share, min(self.vocab, (group.rank() + 1) * share))
        weight = weight.detach()[rows].requires_grad_()
        bias = None if bias is None else bias.detach()[rows].requires_grad_()
        head = OutputHead(
            weight=weight,
            bias=bias,
            transform=self.transform,
            temperature=self.temperature,
            group=group,
            start=rows.start,
            vocab_size=self.vocab,
        )
        scored = linear_logprobs(
            states,
            head,
            targets,
            top_k=self.top_k,
            top_p=self.top_p,
            chunk_tokens=self.chunk_tokens,
            tile_bytes=self.tile_bytes,
        )
        leaves = [tensor for tensor in (states, weight, bias) if tensor is not None]
        return scored.detach(), list(torch.autograd.grad((scored * grad).sum(), leaves))

    def tolerance(self) -> float:
        return 2e-6 if self.dtype == torch.float32 else 1e-12


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str = "") -> None:
    assert got.shape == want.shape
    # What comes of numbers near 1 that cancel is as exact as those.
    assert (got.double() - want.double()).norm() <= tolerance * max(1.0, want.double().norm()), what


cases = st.builds(
    Case,
    n=st.integers(0, 20),
    vocab=st.integers(2, 300),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    with_bias=st.booleans(),
    transform=st.builds(
        LogitTransform, scale=st.sampled_from([1.0, 0.25]), softcap=st.sampled_from([None, None, 3.0, 30.0])
    ),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    top_k=st.sampled_from([None, None, 1, 5, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
    chunk_tokens=st.sampled_from([None, 1, 3, 1000]),
    tile_bytes=st.sampled_from([1, 1 << 11, 1 << 20]),
)


@settings(max_examples=80, deadline=None)
@given(case=cases)
def test_values_and_gradients_equal_log_softmax_for_every_tiling(case):
    logprobs, grads = case.run()
    want_logprobs, want_grads = case.reference()
    assert logprobs.dtype == case.dtype
    assert_close(logprobs, want_logprobs, case.tolerance())
    for got, want in zip(grads, want_grads, strict=True):
        assert got.dtype == case.dtype
        assert_close(got, want, case.tolerance())


def test_numbers_that_are_tied_at_the_border_of_a_filter_stay_together():
    # Small whole numbers: logits are exact, and many are equal.
    random = torch.Generator().manual_seed(0)
    weight = torch.randint(-2, 3, (60, 4), generator=random).double()
    states = torch.randint(-2, 3, (40, 4), generator=random).double()
    targets = torch.randint(0, 60, (40,), generator=random)
    for top_k, top_p in [(7, 1.0), (None, 0.6), (7, 0.6), (30, 0.9)]:
        logits = filter_logits(states @ weight.t(), targets, top_k, top_p)
        want = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        got = linear_logprobs(states, whole(weight), targets, top_k=top_k, top_p=top_p)
        assert_close(got, want, 1e-12, f"top_k={top_k} top_p={top_p}")


def test_logits_outside_top_k_and_the_nucleus_have_no_mass_unless_they_were_sampled():
    def outside(target: int, top_k: int | None, top_p: float) -> list[bool]:
        logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
        return filter_logits(logits, torch.tensor([target]), top_k, top_p).isinf()[0].tolist()

    assert outside(3, 2, 1.0) == [True, True, False, False]
    # probabilities 0.03 0.09 0.24 0.64: 0.64 + 0.24 reach 0.8
    assert outside(3, None, 0.8) == [True, True, False, False]
    assert outside(3, None, 0.1) == [True, True, True, False]
    assert outside(0, 2, 1.0) == [False, True, False, False]


PARALLEL_CASES = [
    Case(),
    Case(with_bias=True, transform=LogitTransform(scale=0.5, softcap=4.0), tile_bytes=1 << 11, chunk_tokens=4),
    Case(top_k=5, tile_bytes=1 << 11),
    Case(top_k=60, dtype=torch.float64),  # more than a rank has
    Case(top_p=0.8, tile_bytes=1 << 11),
    Case(top_k=30, top_p=0.6, dtype=torch.float64),
    Case(n=0),
    Case(n=0, top_p=0.5),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_vocabulary_over_ranks_gives_what_one_process_gives(world_size):
    def rank_main(rank: int, world: int) -> list[Any]:
        return [case.run(dist.group.WORLD) for case in PARALLEL_CASES]

    results = run_world(rank_main, world_size)
    for number, case in enumerate(PARALLEL_CASES):
        logprobs, (grad_states, *grads) = case.reference()
        for got in (result[number] for result in results):
            assert_close(got[0], logprobs, case.tolerance(), str(case))
            assert_close(got[1][0], grad_states, case.tolerance(), str(case))
        for index, want in enumerate(grads, start=1):
            assert_close(torch.cat([result[number][1][index] for result in results]), want, case.tolerance(), str(case))


@pytest.mark.parametrize("k", [1, 5, 60, 97])
def test_top_k_logits_are_those_of_whole_logits_on_every_rank(k):
    case = Case()
    states, weight, _, _, _ = (None if tensor is None else tensor.detach() for tensor in case.tensors())
    assert states is not None and weight is not None
    want = (states.double() @ weight.double().t() / 0.7).topk(k, dim=1)

    def rank_main(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [slice(0, 49), slice(49, 97)][rank]
        head = OutputHead(weight=weight[rows], temperature=0.7, group=dist.group.WORLD, start=rows.start, vocab_size=97)
        return topk_logits(states, head, k, tile_bytes=1 << 11)

    unsharded = topk_logits(states, whole(weight, temperature=0.7), k, chunk_tokens=5, tile_bytes=1 << 11)
    for values, indices in [unsharded, *run_world(rank_main, 2)]:
        assert_close(values, want.values, 2e-6)
        assert torch.equal(indices, want.indices)


def test_more_logits_than_the_vocabulary_has_are_refused():
    with pytest.raises(ValueError, match="k=98: the vocabulary has 97 logits"):
        topk_logits(torch.zeros(1, 4), OutputHead(weight=torch.zeros(97, 4), vocab_size=97), 98)


def test_bfloat16_heads_have_float32_logits_and_gradients_rounded_once():
    case = Case(n=200, vocab=300, dtype=torch.bfloat16, tile_bytes=1 << 12, chunk_tokens=7)
    logprobs, grads = case.run()
    want_logprobs, want_grads = case.reference()
    assert logprobs.dtype == torch.float32
    assert_close(logprobs, want_logprobs, 2e-6)
    for got, want in zip(grads, want_grads, strict=True):
        assert got.dtype == torch.bfloat16
        # half of the last of 8 bits, and a little for sums that nearly cancel
        assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-5 * want.abs().max()).all()


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out


@pytest.mark.parametrize(("top_k", "factor"), [(None, 1), (20, 4)])
def test_no_tensor_of_tokens_by_vocabulary_is_made(top_k, factor):
    n, vocab, tile_bytes = 512, 20_000, 1 << 20
    states, weight = torch.randn(n, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    targets = torch.arange(n)
    with LargestTensor() as largest:
        logprobs = linear_logprobs(states, whole(weight), targets, top_k=top_k, tile_bytes=tile_bytes)
        logprobs.sum().backward()
    assert largest.numel <= max(weight.numel(), factor * tile_bytes // 4) < n * vocab // 8
    with LargestTensor() as largest:  # the measuring sees what it must
        (states @ weight.t()).log_softmax(-1)
    assert largest.numel == n * vocab


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_values_and_gradients_are_those_of_the_cpu(dtype):
    for case in [Case(n=300, vocab=500, tile_bytes=1 << 17), Case(n=300, vocab=500, top_k=20, top_p=0.9)]:
        states, weight, _, targets, grad = (
            None if tensor is None else tensor.detach().cuda() for tensor in case.tensors()
        )
        assert states is not None and weight is not None and targets is not None and grad is not None
        leaves = [states.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        on_cpu = [leaf.detach().cpu().requires_grad_() for leaf in leaves]
        results = []
        for (h, w), t, g in [(leaves, targets, grad), (on_cpu, targets.cpu(), grad.cpu())]:
            head = whole(w, temperature=0.7)
            scored = linear_logprobs(h, head, t, top_k=case.top_k, top_p=case.top_p, tile_bytes=case.tile_bytes)
            results.append([scored.detach().cpu(), *(x.cpu() for x in torch.autograd.grad((scored * g).sum(), [h, w]))])
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for got, want in zip(*results, strict=True):
            assert_close(got, want, tolerance)


# -- the model


def small_model(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.ATTENTION).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch_of(*lengths: int, mask: float = 0.6, padding_free: bool = True) -> ModelBatch:
    random = torch.Generator().manual_seed(1)
    sequences = [
        (torch.randint(2, 97, (length,), generator=random), torch.rand(length, generator=random) < mask)
        for length in lengths
    ]
    return RowLayout(padding_free=padding_free).build(sequences)


def plain_logprobs(model: PreTrainedModel, batch: ModelBatch, temperature: float) -> torch.Tensor:
    """From the model's own logits; `batch` is padded."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits / temperature
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    scored = torch.zeros(batch.shape).index_put((batch.rows, batch.positions), torch.ones(len(batch.rows)))
    return torch.cat([torch.zeros(batch.shape[0], 1), logprobs], dim=1) * scored


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_models_logprobs_and_gradients_are_those_of_its_own_logits(tied, padding_free):
    hf = small_model("qwen2", tie_word_embeddings=tied)
    plain = copy.deepcopy(hf)
    want = plain_logprobs(plain, batch_of(11, 17, 5, padding_free=False), 0.7)
    (want * want.detach()).sum().backward()
    model = LogprobModel(hf, temperature=0.7, chunk_tokens=4)
    got = model(batch_of(11, 17, 5, padding_free=padding_free), Logprobs())
    (got * got.detach()).sum().backward()
    assert got.shape == (3, 17) and got.dtype == torch.float32
    assert (got - want).abs().max() < 2e-6
    for (name, parameter), reference in zip(hf.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and reference.grad is not None
        assert_close(parameter.grad, reference.grad, 3e-6, name)


def test_a_batch_without_scored_tokens_gives_zeros_and_gradients_of_zero():
    hf = small_model("qwen2")
    logprobs = LogprobModel(hf)(batch_of(4, 6, mask=0.0), Logprobs())
    assert torch.equal(logprobs, torch.zeros(2, 6))
    logprobs.sum().backward()
    for name, parameter in hf.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_unfiltered_logprobs_leave_out_top_k_and_top_p_but_not_the_temperature():
    hf, batch = small_model("qwen2"), batch_of(11, 17)
    with torch.no_grad():
        filtered = LogprobModel(hf, temperature=0.7, top_k=3, top_p=0.5)
        plain = LogprobModel(hf, temperature=0.7)
        assert torch.equal(filtered(batch, Logprobs(filtered=False)), plain(batch, Logprobs()))
        got, want = filtered(batch, Logprobs()), plain(batch, Logprobs())
        assert (got >= want).all() and (got > want).any()


HEADS = {
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "hyperclovax": {"logits_scaling": 0.25},
    "phi": {},  # its head has a bias
}


@pytest.mark.parametrize("family", HEADS)
def test_what_a_family_does_to_its_logits_is_done_to_tiles(family):
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **HEADS[family]})).eval()
    batch = batch_of(7, 9, padding_free=False)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        states = hf.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        got = LogprobModel(hf, temperature=0.7).score(states, batch, Logprobs())
        assert (got - plain_logprobs(hf, batch, 0.7)).abs().max() < 2e-6


def test_an_architecture_with_another_head_is_refused_by_name():
    config = AutoConfig.for_model("minicpm3", **SMALL)
    with pytest.raises(ValueError, match=r"'minicpm3' models change their logits by dim_model_base \(here 256\)"):
        logit_transform(config)
    with pytest.raises(ValueError, match=r"'qwen2' models change their logits by final_logit_softcapping"):
        logit_transform(AutoConfig.for_model("qwen2", **SMALL, final_logit_softcapping=5.0))
    changes = {"bos_token_id": 0, "eos_token_id": 1, "cls_token_id": 0, "sep_token_id": 1}
    modern = AutoModelForCausalLM.from_config(AutoConfig.for_model("modernbert-decoder", **{**SMALL, **changes}))
    with pytest.raises(ValueError, match=r"ModernBertDecoderForCausalLM: .* more than one linear layer \(lm_head\)"):
        LogprobModel(modern)


def test_adapters_on_the_head_are_refused():
    hf = small_model("qwen2", tie_word_embeddings=False)
    hf.lm_head.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(2, 32)))
    with pytest.raises(ValueError, match=r"output head has adapters.*lora_cfg\.target_modules"):
        LogprobModel(hf)


def test_a_head_sharded_over_tensor_parallel_ranks_gives_whole_gradients():
    def rank_main(rank: int, world: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor_parallel",))
        hf = small_model("qwen2", tie_word_embeddings=False)
        hf.lm_head.weight = torch.nn.Parameter(distribute_tensor(hf.lm_head.weight.detach(), mesh, [Shard(0)]))
        model = LogprobModel(hf, temperature=0.7, tensor=mesh)
        logprobs = model(batch_of(11, 17), Logprobs())
        logprobs.sum().backward()
        grads = {name: parameter.grad for name, parameter in hf.named_parameters()}
        return logprobs.detach(), {
            name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()
        }

    whole = small_model("qwen2", tie_word_embeddings=False)
    want = LogprobModel(whole, temperature=0.7)(batch_of(11, 17), Logprobs())
    want.sum().backward()
    for logprobs, grads in run_world(rank_main, 2):
        assert (logprobs - want).abs().max() < 2e-6
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            assert_close(grads[name], parameter.grad, 3e-6, name)


def test_context_parallel_ranks_add_up_their_parts():
    batch = batch_of(11, 17)
    model = LogprobModel(small_model("qwen2"))
    states = torch.randn(1, batch.input_ids.shape[1], 32, generator=torch.Generator().manual_seed(0))

    def score(part: ModelBatch, model: LogprobModel) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = states.clone().requires_grad_()
        logprobs = model.score(leaf, part, Logprobs())
        logprobs.square().sum().backward()
        assert leaf.grad is not None
        return logprobs.detach(), leaf.grad

    def rank_main(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("context_parallel",))
        here = [slice(0, 5), slice(5, None)][rank]
        part = replace(
            batch,
            states=batch.states[here],
            targets=batch.targets[here],
            rows=batch.rows[here],
            positions=batch.positions[here],
        )
        return score(part, LogprobModel(model.hf, context=mesh))

    want, want_grad = score(batch, model)
    results = run_world(rank_main, 2)
    for logprobs, _ in results:
        assert (logprobs - want).abs().max() < 1e-6
    assert_close(results[0][1] + results[1][1], want_grad, 2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 8e-2)])
def test_fsdp_keeps_the_tied_head_gathered_until_it_is_used_again(dtype, tolerance):
    halves = [batch_of(11, 17), batch_of(7, 5, 9)]

    def rank_main(rank: int, world: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mesh = init_device_mesh("cpu", (world,))
        model = LogprobModel(small_model("qwen2", tie_word_embeddings=True), temperature=0.7)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in model.hf.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module in (*model.hf.model.layers, model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        logprobs = model(halves[rank], Logprobs())
        logprobs.sum().backward()
        return logprobs.detach(), {name: p.grad.full_tensor() for name, p in model.hf.named_parameters()}

    whole = small_model("qwen2", tie_word_embeddings=True)
    want = [LogprobModel(whole, temperature=0.7)(half, Logprobs()) for half in halves]
    torch.cat([logprobs.flatten() for logprobs in want]).sum().backward()
    for (logprobs, grads), reference in zip(run_world(rank_main, 2), want, strict=True):
        assert_close(logprobs, reference.detach(), tolerance)
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            assert grads[name].dtype == torch.float32
            assert_close(grads[name], parameter.grad, tolerance, name)
