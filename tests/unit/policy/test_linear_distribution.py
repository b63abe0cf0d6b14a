"""Logprobs of chosen numbers, entropies and KL by tiles and over ranks, against whole logits in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.models.policy.head.linear import linear_kl, linear_topk_logprobs, topk_logits
from nemo_rl.models.policy.head.logit_tiles import LogitTransform, OutputHead
from tests.unit.policy.test_logprobs import LargestTensor, assert_close
from tests.worlds import run_world

PLAIN = LogitTransform()

Result = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Values, and gradients of states, weight and, where there is one, bias."""


def whole(weight: torch.Tensor, **options: float) -> OutputHead:
    return OutputHead(weight=weight, vocab_size=len(weight), **options)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, random numbers included."""

    n: int = 13
    vocab: int = 97
    padding: tuple[int, int] = (0, 0)  # rows beyond `vocab` of the student's and the teacher's head
    k: int = 5
    seed: int = 0
    dtype: torch.dtype = torch.float32
    with_bias: bool = False
    transform: LogitTransform = PLAIN
    temperature: float = 0.7
    chunk_tokens: int | None = None
    tile_bytes: int = 1 << 20
    size: float = 1.0  # of logits

    def side(self, number: int, dtype: torch.dtype) -> tuple[torch.Tensor, OutputHead]:
        """States and head of the student (0), which has gradients, or the teacher (1)."""
        random = torch.Generator().manual_seed(2 * self.seed + number)
        rows, hidden = self.vocab + self.padding[number], (16, 24)[number]
        states, weight, bias = (
            (self.size * torch.randn(shape, generator=random, dtype=torch.float64))
            .to(self.dtype)
            .to(dtype)
            .requires_grad_(number == 0)
            for shape in [(self.n, hidden), (rows, hidden), (rows,)]
        )
        head = OutputHead(
            weight=weight,
            bias=bias if self.with_bias else None,
            transform=self.transform if number == 0 else LogitTransform(scale=0.5),
            temperature=self.temperature,
            vocab_size=len(weight),
        )
        return states, head

    def indices(self) -> torch.Tensor:
        random = torch.Generator().manual_seed(self.seed)
        return torch.rand(self.n, self.vocab, generator=random).argsort(dim=1)[:, : self.k]

    def grads(self, values: list[torch.Tensor], leaves: list[torch.Tensor | None]) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(self.seed + 1)
        weights = [torch.randn(value.shape, generator=random, dtype=torch.float64) for value in values]
        total = torch.stack([(w.to(v) * v).sum() for w, v in zip(weights, values, strict=True)]).sum()
        return list(torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None], retain_graph=True))

    def tolerance(self) -> float:
        return 1e-5 if self.dtype == torch.float32 else 1e-10


def shard(head: OutputHead, group: dist.ProcessGroup | None) -> OutputHead:
    """This rank's rows, as DTensor cuts them."""
    assert group is not None
    share = -(-len(head.weight) // group.size())
    rows = slice(group.rank() * share, min(len(head.weight), (group.rank() + 1) * share))
    weight = head.weight.detach()[rows].requires_grad_()
    bias = None if head.bias is None else head.bias.detach()[rows].requires_grad_()
    return replace(head, weight=weight, bias=bias, group=group, start=rows.start)


def whole_logits(states: torch.Tensor, head: OutputHead) -> torch.Tensor:
    logits = states @ head.weight.t() + (0.0 if head.bias is None else head.bias)
    logits = logits * head.transform.scale
    if head.transform.softcap is not None:
        logits = head.transform.softcap * torch.tanh(logits / head.transform.softcap)
    return logits / head.temperature


def topk_by_tiles(case: Case, group: dist.ProcessGroup | None = None) -> Result:
    states, head = case.side(0, case.dtype)
    head = head if group is None else shard(head, group)
    options = {"chunk_tokens": case.chunk_tokens, "tile_bytes": case.tile_bytes}
    values = list(linear_topk_logprobs(states, head, case.indices(), **options))
    return [value.detach() for value in values], case.grads(values, [states, head.weight, head.bias])


def topk_by_log_softmax(case: Case) -> Result:
    states, head = case.side(0, torch.float64)
    logprobs = whole_logits(states, head).log_softmax(-1)
    values = [logprobs.gather(1, case.indices()), -(logprobs.exp() * logprobs).sum(-1)]
    return [value.detach() for value in values], case.grads(values, [states, head.weight, head.bias])


def kl_by_tiles(case: Case, group: dist.ProcessGroup | None = None) -> Result:
    (states, head), (teacher_states, teacher_head) = case.side(0, case.dtype), case.side(1, case.dtype)
    if group is not None:
        head = shard(head, group)
        rows = slice(head.start, min(head.start + len(head.weight), case.vocab))
        bias = None if teacher_head.bias is None else teacher_head.bias[rows]
        teacher_head = replace(teacher_head, weight=teacher_head.weight[rows], bias=bias, start=rows.start)
    options = {"chunk_tokens": case.chunk_tokens, "tile_bytes": case.tile_bytes}
    values = list(linear_kl(states, head, teacher_states, teacher_head, vocab_size=case.vocab, **options))
    return [value.detach() for value in values], case.grads(values, [states, head.weight, head.bias])


def kl_by_log_softmax(case: Case) -> Result:
    (states, head), other = case.side(0, torch.float64), case.side(1, torch.float64)
    student = whole_logits(states, head)[:, : case.vocab].log_softmax(-1)
    teacher = whole_logits(*other)[:, : case.vocab].log_softmax(-1)
    values = [(teacher.exp() * (teacher - student)).sum(-1), (student.exp() * (student - teacher)).sum(-1)]
    return [value.detach() for value in values], case.grads(values, [states, head.weight, head.bias])


def assert_same(got: Result, want: Result, case: Case) -> None:
    for got_tensors, want_tensors in zip(got, want, strict=True):
        for a, b in zip(got_tensors, want_tensors, strict=True):
            assert a.dtype == case.dtype
            assert_close(a, b, case.tolerance(), str(case))


cases = st.builds(
    Case,
    n=st.integers(0, 20),
    vocab=st.integers(6, 300),
    padding=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    k=st.sampled_from([1, 2, 6]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    with_bias=st.booleans(),
    transform=st.builds(
        LogitTransform, scale=st.sampled_from([1.0, 0.25]), softcap=st.sampled_from([None, None, 3.0, 30.0])
    ),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    chunk_tokens=st.sampled_from([None, 1, 3, 1000]),
    tile_bytes=st.sampled_from([1, 1 << 11, 1 << 20]),
    size=st.sampled_from([0.1, 1.0]),
)


@settings(max_examples=50, deadline=None)
@given(case=cases)
def test_chosen_logprobs_entropy_and_their_gradients_equal_log_softmax_for_every_tiling(case):
    assert_same(topk_by_tiles(case), topk_by_log_softmax(case), case)


@settings(max_examples=50, deadline=None)
@given(case=cases)
def test_both_kl_and_their_gradients_equal_log_softmax_over_the_common_tokens_for_every_tiling(case):
    assert_same(kl_by_tiles(case), kl_by_log_softmax(case), case)


def test_the_whole_vocabulary_may_be_chosen():
    case = Case(k=97, tile_bytes=1 << 11, chunk_tokens=4)
    assert_same(topk_by_tiles(case), topk_by_log_softmax(case), case)


def test_each_of_the_two_values_has_its_own_gradient():
    case = Case(dtype=torch.float64, tile_bytes=1 << 11)
    states, head = case.side(0, torch.float64)
    reference = whole_logits(states, head).log_softmax(-1)
    values = linear_topk_logprobs(states, head, case.indices(), tile_bytes=1 << 11)
    wanted = [reference.gather(1, case.indices()), -(reference.exp() * reference).sum(-1)]
    teacher_states, teacher_head = case.side(1, torch.float64)
    teacher = whole_logits(teacher_states, teacher_head).log_softmax(-1)
    values += linear_kl(states, head, teacher_states, teacher_head, vocab_size=97, tile_bytes=1 << 11)
    wanted += [(teacher.exp() * (teacher - reference)).sum(-1), (reference.exp() * (reference - teacher)).sum(-1)]
    for value, want in zip(values, wanted, strict=True):
        for got, exact in zip(
            case.grads([value], [states, head.weight]), case.grads([want], [states, head.weight]), strict=True
        ):
            assert_close(got, exact, 1e-10)


def test_kl_of_equal_distributions_is_zero_and_large_logits_keep_their_digits():
    case = Case(temperature=1.0)
    states, head = case.side(1, torch.float32)
    states, weight = 10 * states, (10 * head.weight).requires_grad_()
    head = replace(head, weight=weight)
    for kl in linear_kl(states, head, states, head, vocab_size=97, tile_bytes=1 << 11):
        assert kl.abs().max() < 1e-6
        (grad,) = torch.autograd.grad(kl.sum(), [weight], retain_graph=True)
        assert grad.abs().max() < 1e-5


PARALLEL_CASES = [
    Case(),
    Case(with_bias=True, transform=LogitTransform(scale=0.5, softcap=4.0), tile_bytes=1 << 11, chunk_tokens=4),
    Case(padding=(3, 40), dtype=torch.float64, tile_bytes=1 << 11),
    Case(vocab=20, padding=(60, 0), dtype=torch.float64),  # the last ranks have padding alone
    Case(n=0),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_vocabulary_over_ranks_gives_what_one_process_gives(world_size):
    ways: list[tuple[Callable[..., Result], Callable[..., Result]]] = [
        (topk_by_tiles, topk_by_log_softmax),
        (kl_by_tiles, kl_by_log_softmax),
    ]

    def rank_main(rank: int, world: int) -> list[Any]:
        return [way(case, dist.group.WORLD) for way, _ in ways for case in PARALLEL_CASES]

    results = run_world(rank_main, world_size)
    wanted = [(case, reference(case)) for _, reference in ways for case in PARALLEL_CASES]
    for number, (case, want) in enumerate(wanted):
        for rank in range(world_size):
            values, (grad_states, *_) = results[rank][number]
            assert_same((values, [grad_states]), (want[0], want[1][:1]), case)
        shards = zip(*(result[number][1][1:] for result in results), strict=True)
        assert_same(([], [torch.cat(parts) for parts in shards]), ([], want[1][1:]), case)


def test_bfloat16_heads_have_float32_distributions_and_gradients_rounded_once():
    case = Case(n=200, vocab=300, padding=(20, 0), dtype=torch.bfloat16, tile_bytes=1 << 12, chunk_tokens=7, size=0.5)
    for way, reference in [(topk_by_tiles, topk_by_log_softmax), (kl_by_tiles, kl_by_log_softmax)]:
        (values, grads), (want_values, want_grads) = way(case), reference(case)
        for got, want in zip(values, want_values, strict=True):
            assert got.dtype == torch.float32
            assert_close(got, want, 1e-5)
        for got, want in zip(grads, want_grads, strict=True):
            assert got.dtype == torch.bfloat16
            # half of the last of 8 bits, and a little for sums that nearly cancel
            assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-5 * want.abs().max()).all()


def test_no_tensor_of_tokens_by_vocabulary_is_made():
    n, vocab, tile_bytes = 512, 20_000, 1 << 20
    states, weight = torch.randn(n, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    teacher_states, teacher_weight = torch.randn(n, 12), torch.randn(vocab, 12)
    bound = max(teacher_weight.numel(), tile_bytes // 4)
    assert bound < n * vocab // 8
    with LargestTensor() as largest:
        values = linear_topk_logprobs(
            states,
            whole(weight),
            torch.arange(n * 4).view(n, 4),
            tile_bytes=tile_bytes,
        )
        (values[0].sum() + values[1].sum()).backward()
    assert largest.numel <= bound
    with LargestTensor() as largest:
        heads = (
            whole(weight),
            whole(teacher_weight),
        )
        kls = linear_kl(states, heads[0], teacher_states, heads[1], vocab_size=vocab - 5, tile_bytes=tile_bytes)
        (kls[0].sum() + kls[1].sum()).backward()
    assert largest.numel <= bound


@pytest.mark.parametrize("k", [1, 40, 60])
def test_top_k_logits_are_looked_for_among_the_first_tokens_alone(k):
    case = Case(vocab=60, padding=(37, 0))
    states, head = case.side(0, torch.float32)
    want = whole_logits(states, head).detach()[:, :60].topk(k, dim=1)

    def rank_main(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        return topk_logits(states, shard(head, dist.group.WORLD), k, vocab_size=60, tile_bytes=1 << 11)

    whole = topk_logits(states, head, k, vocab_size=60, chunk_tokens=5, tile_bytes=1 << 11)
    for values, indices in [whole, *run_world(rank_main, 2)]:
        assert_close(values, want.values, 2e-6)
        assert torch.equal(indices, want.indices)
    with pytest.raises(ValueError, match="k=61: the vocabulary has 60 logits"):
        topk_logits(states, head, 61, vocab_size=60)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_values_and_gradients_are_those_of_the_cpu(dtype):
    case = Case(n=300, vocab=500, padding=(0, 12), tile_bytes=1 << 17)
    indices = case.indices()
    results = []
    for device in ("cuda", "cpu"):
        (states, head), (teacher_states, teacher_head) = (case.side(number, dtype) for number in (0, 1))
        states, weight = (tensor.detach().to(device).requires_grad_() for tensor in (states, head.weight))
        teacher_head = replace(teacher_head, weight=teacher_head.weight.to(device))
        head = replace(head, weight=weight)
        values = linear_topk_logprobs(states, head, indices.to(device), tile_bytes=case.tile_bytes)
        values += linear_kl(
            states, head, teacher_states.to(device), teacher_head, vocab_size=500, tile_bytes=case.tile_bytes
        )
        grads = torch.autograd.grad(torch.stack([value.sum() for value in values]).sum(), [states, weight])
        results.append([tensor.detach().cpu() for tensor in (*values, *grads)])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 1e-5 if dtype == torch.float32 else 2e-2)
