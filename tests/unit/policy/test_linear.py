"""Logprobs, entropies and KL by tiles and over ranks, against log_softmax of whole logits; heads of every family."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl.models.policy.batch.row_layout import RowLayout
from nemo_rl.models.policy.head.linear import linear_kl, linear_logprobs, linear_topk_logprobs, topk_logits
from nemo_rl.models.policy.head.logit_tiles import LogitTransform, OutputHead, tile_bytes_on
from nemo_rl.models.policy.head.logprobs import LogprobModel, logit_transform
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.types import SamplingParams
from tests.unit.policy.filter_reference import filter_logits
from tests.unit.policy.models import SHAPE, VOCAB, perturb
from tests.worlds import run_world

PLAIN = LogitTransform()

Result = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Values, and gradients of states, weight and, where there is one, bias."""


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
    top_k: int | None = None
    top_p: float = 1.0
    chunk_tokens: int | None = None
    tile_bytes: int = 1 << 20
    size: float = 1.0  # of weights

    def side(self, number: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, OutputHead]:
        """States and head of the student (0), which has gradients, or the teacher (1)."""
        random = torch.Generator().manual_seed(2 * self.seed + number)
        rows, hidden = self.vocab + self.padding[number], (16, 24)[number]

        def draw(*shape: int) -> torch.Tensor:
            drawn = self.size * torch.randn(shape, generator=random, dtype=torch.float64)
            return drawn.to(self.dtype).to(device, dtype).requires_grad_(number == 0)

        states, weight, bias = draw(self.n, hidden), draw(rows, hidden), draw(rows)
        how = {"temperature": self.temperature, "chunk_tokens": self.chunk_tokens, "tile_bytes": self.tile_bytes}
        how |= {"bias": bias if self.with_bias else None, "vocab_size": rows}
        transform = self.transform if number == 0 else LogitTransform(scale=0.5)
        return states, OutputHead(weight=weight, transform=transform, **how)

    def indices(self) -> torch.Tensor:
        first = torch.randint(0, self.vocab, (self.n, 1), generator=torch.Generator().manual_seed(self.seed))
        return (first + torch.arange(self.k) * (self.vocab // self.k)) % self.vocab

    def targets(self) -> torch.Tensor:
        return torch.randint(0, self.vocab, (self.n,), generator=torch.Generator().manual_seed(self.seed))

    def result(self, values: list[torch.Tensor], states: torch.Tensor, head: OutputHead) -> Result:
        """With the gradients of a sum of `values` under weights of their own."""
        random = torch.Generator().manual_seed(self.seed + 1)
        weights = [torch.randn(value.shape, generator=random, dtype=torch.float64) for value in values]
        total = torch.stack([(w.to(v) * v).sum() for w, v in zip(weights, values, strict=True)]).sum()
        leaves = [leaf for leaf in (states, head.weight, head.bias) if leaf is not None]
        return [value.detach() for value in values], list(torch.autograd.grad(total, leaves))


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


def tiled(way: str, case: Case, group: dist.ProcessGroup | None = None, device: str = "cpu") -> Result:
    """Values and gradients of the function that is called `way` here."""
    (states, head), (others, teacher) = (case.side(number, case.dtype, device) for number in (0, 1))
    if group is not None:
        head = shard(head, group)
        rows = slice(head.start, min(head.start + len(head.weight), case.vocab))
        bias = None if teacher.bias is None else teacher.bias[rows]
        teacher = replace(teacher, weight=teacher.weight[rows], bias=bias, start=rows.start)
    if way == "sampled":
        filters = {"top_k": case.top_k, "top_p": case.top_p}
        values = [linear_logprobs(states, head, case.targets().to(device), **filters)]
    elif way == "chosen":
        values = list(linear_topk_logprobs(states, head, case.indices().to(device)))
    else:
        values = list(linear_kl(states, head, others, teacher, vocab_size=case.vocab))
    return case.result(values, states, head)


def plain(way: str, case: Case) -> Result:
    """The same from whole logits in float64."""
    (states, head), teacher = case.side(0, torch.float64), case.side(1, torch.float64)
    logits = whole_logits(states, head)
    if way == "sampled":
        logprobs = filter_logits(logits, case.targets(), case.top_k, case.top_p).log_softmax(-1)
        values = [logprobs.gather(1, case.targets()[:, None])[:, 0]]
    elif way == "chosen":
        logprobs = logits.log_softmax(-1)
        values = [logprobs.gather(1, case.indices()), -(logprobs.exp() * logprobs).sum(-1)]
    else:
        p, q = (x[:, : case.vocab].log_softmax(-1) for x in (logits, whole_logits(*teacher)))
        values = [(q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)]
    return case.result(values, states, head)


WAYS = {"sampled": (2e-6, 1e-12), "chosen": (1e-5, 1e-10), "kl": (1e-5, 1e-10)}  # exact to, in float32 and float64


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str = "") -> None:
    assert got.shape == want.shape
    # What comes of numbers near 1 that cancel is as exact as those.
    assert (got.double() - want.double()).norm() <= tolerance * max(1.0, want.double().norm()), what


def assert_same(way: str, got: Result, want: Result, case: Case) -> None:
    tolerance = WAYS[way][case.dtype == torch.float64]
    for got_tensors, want_tensors in zip(got, want, strict=True):
        for a, b in zip(got_tensors, want_tensors, strict=True):
            assert a.dtype == case.dtype
            assert_close(a, b, tolerance, str(case))


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
    top_k=st.sampled_from([None, None, 1, 5, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
    chunk_tokens=st.sampled_from([None, 1, 3, 1000]),
    tile_bytes=st.sampled_from([1, 1 << 11, 1 << 20]),
    size=st.sampled_from([0.1, 1.0]),
)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=50, deadline=None)
@given(case=cases)
@example(case=Case(vocab=64, with_bias=True))  # one tile, at most four times as wide as the states, is kept
def test_values_and_gradients_equal_log_softmax_for_every_tiling(way: str, case: Case) -> None:
    assert_same(way, tiled(way, case), plain(way, case), case)


SOFT = {"with_bias": True, "transform": LogitTransform(scale=0.5, softcap=4.0), "chunk_tokens": 4}
SMALL = {"tile_bytes": 1 << 11}
PARALLEL_CASES = {
    "sampled": [
        Case(),
        Case(**SOFT, **SMALL),
        Case(top_k=60, dtype=torch.float64),  # more than a rank has
        Case(top_p=0.8, **SMALL),
        Case(top_k=30, top_p=0.6, dtype=torch.float64),
        Case(n=0, top_p=0.5),
    ],
    "chosen": [Case(**SOFT, **SMALL), Case(k=97, chunk_tokens=4, **SMALL), Case(n=0)],
    "kl": [
        Case(**SOFT, **SMALL),
        Case(padding=(3, 40), dtype=torch.float64, **SMALL),
        Case(vocab=20, padding=(60, 0), dtype=torch.float64),  # the last ranks have padding alone
    ],
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_vocabulary_over_ranks_gives_what_one_process_gives(world_size: int) -> None:
    drawn = [(way, case) for way, cases in PARALLEL_CASES.items() for case in cases]

    def rank_main(rank: int, world: int) -> list[Result]:
        return [tiled(way, case, dist.group.WORLD) for way, case in drawn]

    for (way, case), *ranks in zip(drawn, *run_world(rank_main, world_size), strict=True):
        values, (of_states, *of_head) = plain(way, case)
        for found, (grad, *_) in ranks:
            assert_same(way, (found, [grad]), (values, [of_states]), case)
        joined = [torch.cat(parts) for parts in zip(*(grads[1:] for _, grads in ranks), strict=True)]
        assert_same(way, ([], joined), ([], of_head), case)


def test_top_k_logits_are_those_of_whole_logits_among_the_first_tokens_on_every_rank() -> None:
    case = Case(vocab=60, padding=(37, 0), tile_bytes=1 << 11)
    states, head = case.side(0, torch.float32)

    def found(head: OutputHead) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [topk_logits(states, head, k, vocab_size=60) for k in (1, 40, 60)]

    ranks = run_world(lambda rank, world: found(shard(head, dist.group.WORLD)), 2)
    for each in [found(replace(head, chunk_tokens=5)), *ranks]:
        for values, indices in each:
            want = whole_logits(states, head).detach()[:, :60].topk(values.shape[1], dim=1)
            assert_close(values, want.values, 2e-6)
            assert torch.equal(indices, want.indices)


def test_numbers_that_are_tied_at_the_border_of_a_filter_stay_together() -> None:
    # Small whole numbers: logits are exact, and many are equal.
    random = torch.Generator().manual_seed(0)
    weight = torch.randint(-2, 3, (60, 4), generator=random).double()
    states = torch.randint(-2, 3, (40, 4), generator=random).double()
    targets = torch.randint(0, 60, (40,), generator=random)
    for top_k, top_p in [(7, 1.0), (None, 0.6), (7, 0.6), (30, 0.9)]:
        logits = filter_logits(states @ weight.t(), targets, top_k, top_p)
        want = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        got = linear_logprobs(states, OutputHead(weight=weight, vocab_size=60), targets, top_k=top_k, top_p=top_p)
        assert_close(got, want, 1e-12, f"top_k={top_k} top_p={top_p}")


def test_kl_of_equal_distributions_is_zero_and_large_logits_keep_their_digits() -> None:
    states, head = Case(temperature=1.0).side(1, torch.float32)
    states, weight = 10 * states, (10 * head.weight).requires_grad_()
    head = replace(head, weight=weight, tile_bytes=1 << 11)
    for value in linear_kl(states, head, states, head, vocab_size=97):
        assert value.abs().max() < 1e-6
        (grad,) = torch.autograd.grad(value.sum(), [weight], retain_graph=True)
        assert grad.abs().max() < 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_heads_have_float32_distributions_and_gradients_rounded_once(way: str) -> None:
    case = Case(n=200, vocab=300, padding=(20, 0), dtype=torch.bfloat16, tile_bytes=1 << 12, chunk_tokens=7, size=0.5)
    (values, grads), (want_values, want_grads) = tiled(way, case), plain(way, case)
    for got, want in zip(values, want_values, strict=True):
        assert got.dtype == torch.float32
        assert_close(got, want, 1e-5)
    for got, want in zip(grads, want_grads, strict=True):
        assert got.dtype == torch.bfloat16
        # half of the last of 8 bits, and a little for sums that nearly cancel
        assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-5 * want.abs().max()).all()


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out


def test_no_tensor_of_tokens_by_vocabulary_is_made() -> None:
    case = Case(n=256, vocab=10_000, k=4, tile_bytes=1 << 18)
    states, head = case.side(0, torch.float32)
    for way, filters in (("sampled", {}), ("chosen", {}), ("kl", {}), ("sampled", {"top_k": 20})):
        with LargestTensor() as largest:
            tiled(way, replace(case, padding=(0, 5), **filters))
        bound = max(24 * (case.vocab + 5), (4 if filters else 1) * case.tile_bytes // 4)
        assert largest.numel <= bound < case.n * case.vocab // 8, way
    with LargestTensor() as largest:  # the measuring sees what it must
        (states @ head.weight.t()).log_softmax(-1)
    assert largest.numel == case.n * case.vocab


def test_tiles_are_sized_by_the_free_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch holds 2 GiB of it. Where ranks must choose alike, the least."""
    cuda, gib = torch.device("cuda"), 1 << 30
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * gib)
    for free_gib, mib in ((1, 128), (14, 256), (100, 512)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free_gib: (free * gib, 140 * gib))
        assert [tile_bytes_on(cuda, is_equal=equal) >> 20 for equal in (False, True)] == [mib, 128]
    assert tile_bytes_on(torch.device("cpu"), is_equal=False) == 32 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu_values_and_gradients_are_those_of_the_cpu(way: str, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for filters in ({}, {"top_k": 20, "top_p": 0.9}) if way == "sampled" else ({},):
        case = Case(n=300, vocab=500, padding=(0, 12), dtype=dtype, tile_bytes=1 << 17, **filters)
        for on_device, on_host in zip(tiled(way, case, device="cuda"), tiled(way, case), strict=True):
            for got, want in zip(on_device, on_host, strict=True):
                assert_close(got.cpu(), want, tolerance)


# -- heads of every family, against the model's own logits, and what is refused; test_exactness.py has more


SIZES = SHAPE | {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
WARM = SamplingParams(max_new_tokens=0, temperature=0.7)
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
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | HEADS[family])).eval()
    perturb(hf, 0.1)
    ids = torch.randint(2, VOCAB, (2, 9))
    batch = RowLayout(padding_free=False).build([(row, torch.ones(9, dtype=torch.bool)) for row in ids])
    with torch.no_grad():
        states = hf.base_model(input_ids=ids, use_cache=False).last_hidden_state
        got = LogprobModel(hf, WARM).score(states, batch, Logprobs())
        logprobs = (hf(input_ids=ids, use_cache=False).logits / WARM.temperature).log_softmax(-1)
    assert (got[:, 1:] - logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]).abs().max() < 2e-6


def test_an_architecture_with_another_head_is_refused_by_name():
    config = AutoConfig.for_model("minicpm3", **SIZES)
    with pytest.raises(ValueError, match=r"'minicpm3' models change their logits by dim_model_base \(here 256\)"):
        logit_transform(config)
    with pytest.raises(ValueError, match=r"'qwen2' models change their logits by final_logit_softcapping"):
        logit_transform(AutoConfig.for_model("qwen2", **SIZES, final_logit_softcapping=5.0))
    changes = {"bos_token_id": 0, "eos_token_id": 1, "cls_token_id": 0, "sep_token_id": 1}
    modern = AutoModelForCausalLM.from_config(AutoConfig.for_model("modernbert-decoder", **SIZES | changes))
    with pytest.raises(ValueError, match=r"ModernBertDecoderForCausalLM: .* more than one linear layer \(lm_head\)"):
        LogprobModel(modern, WARM)
