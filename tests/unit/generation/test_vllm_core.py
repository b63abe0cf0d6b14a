"""Parts of an engine without the engine: products that are the same in every batch, records of experts."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_rl.models.generation.row_invariant import RowInvariantLinear, padded_rows, split_rows
from nemo_rl.models.generation.vllm.expert_recorder import ExpertRecorder
from nemo_rl.models.generation.vllm.plugins import with_own_logprobs, without_ranks
from nemo_rl.models.generation.vllm.startup import engine_args
from nemo_rl.models.generation.vllm.worker import VllmWorker
from tests.unit.generation.configs import engine_settings, generation_config

# -- products that are the same in every batch; the engine as a whole is in test_vllm_generation.py

SHAPES = [(256, 128), (87, 128), (200, 72), (448, 1600), (1, 64), (640, 512)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    RowInvariantLinear._proven.clear()
    yield
    torch.set_num_threads(num_threads)
    RowInvariantLinear._proven.clear()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, 64) | st.integers(1, 700), st.integers(0, 2**31), st.booleans())
@example((1, 64), 9, 0, False)  # with AVX-512 the product of one column has another order for 9 rows than for 8
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int], num_rows: int, seed: int, with_bias: bool):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator) if with_bias else None
    x = torch.randn(num_rows, shape[1], generator=generator)
    linear = RowInvariantLinear(weight)
    together = linear(x, weight, bias)
    position = seed % num_rows
    assert torch.equal(linear(x[position : position + 1], weight, bias)[0], together[position])
    order = torch.randperm(num_rows, generator=generator)
    assert torch.equal(linear(x[order], weight, bias), together[order])
    assert linear(x[:0], weight, bias).shape == (0, shape[0])


@pytest.mark.parametrize("top_k", [None, 5])
def test_the_engines_logprobs_have_no_bias_and_its_tokens_stay(top_k: int | None) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()

    def draw(forward: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = 3 * torch.randn(6, 2000, generator=torch.Generator().manual_seed(0))
        generators = {row: torch.Generator().manual_seed(row) for row in range(len(logits))}
        kept = None if top_k is None else torch.full((len(logits),), top_k)
        return forward(TopKTopPSampler("processed_logprobs"), logits, generators, kept, None)

    tokens, logprobs = draw(with_own_logprobs(TopKTopPSampler.forward_cpu))
    same, before = draw(TopKTopPSampler.forward_cpu)
    assert torch.equal(tokens, same)
    assert torch.allclose(logprobs, before, atol=1e-5) and not torch.equal(logprobs, before)
    assert int(logprobs.isfinite().sum()) == len(logprobs) * (top_k or 2000)


@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_the_engine_counts_no_ranks_unless_other_logprobs_are_asked_for(num_logprobs: int) -> None:
    from vllm.v1.sample.sampler import Sampler

    logprobs = torch.randn(6, 200, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    tokens = torch.arange(6) * 7
    found = without_ranks(Sampler.gather_logprobs)(logprobs, num_logprobs, tokens)
    same = Sampler.gather_logprobs(logprobs, num_logprobs, tokens)
    assert torch.equal(found.logprob_token_ids, same.logprob_token_ids) and torch.equal(found.logprobs, same.logprobs)
    ranks = same.selected_token_ranks if num_logprobs else torch.zeros(6)
    assert torch.equal(found.selected_token_ranks, ranks.long())


def test_rows_are_added_or_split_until_sizes_agree() -> None:
    assert [padded_rows(rows, lambda size: True) for rows in (0, 1, 3, 9, 64, 65)] == [1, 1, 3, 9, 64, 72]
    assert [padded_rows(rows, lambda size: size % 4 == 0) for rows in (1, 4, 9, 12, 13)] == [4, 4, 12, 12, 16]
    assert [padded_rows(rows, lambda size: False) for rows in (1, 9, 16)] == [8, 16, 16]
    assert split_rows(40, lambda size: True) == [40] and split_rows(40, lambda size: size != 40) == [32, 8]
    assert split_rows(48, lambda size: size in (8, 16)) == [16, 16, 16]
    assert split_rows(1032, lambda size: True) == [512, 512, 8]
    assert split_rows(0, lambda size: True) == []
    with pytest.raises(RuntimeError, match="cannot be made reproducible"):
        split_rows(24, lambda size: size == 16)


def test_a_weight_of_zeros_proves_nothing() -> None:
    RowInvariantLinear._proven.clear()
    linear, x = RowInvariantLinear(torch.zeros(32, 16)), torch.ones(24, 16)
    assert linear(x, torch.zeros(32, 16)).sum() == 0 and RowInvariantLinear._proven == {}
    linear.pack(torch.ones(32, 16))
    assert torch.equal(linear(x, torch.ones(32, 16)), torch.full((24, 32), 16.0))
    assert RowInvariantLinear._proven == {(24, 32, 16): True}


# -- the recorder of experts on a scripted model runner


def test_every_request_gets_the_experts_of_its_own_tokens():
    """Token number t of request r goes through expert 10 r + t, in layer 1 alone."""
    sizes = {"get_total_num_hidden_layers": 2, "get_num_experts_per_tok": 1, "get_num_experts": 300}
    config = SimpleNamespace(max_model_len=8, **{name: partial(int, size) for name, size in sizes.items()})
    captures: list[Any] = []

    def execute(scheduled: Any) -> str:
        captures[0](torch.tensor(scheduled.experts))
        return "done"

    runner: Any = SimpleNamespace(max_num_tokens=16, model_config=config, execute_model=execute)
    router = SimpleNamespace(set_capture_fn=captures.append)
    recorder = ExpertRecorder(runner, [SimpleNamespace(layer_id=1, router=router)])

    def step(tokens: dict[str, range], ended: tuple[str, ...] = ()) -> None:
        """`tokens`: those of each request that are computed."""
        starts = [own.start for own in tokens.values()]
        runner.input_batch = SimpleNamespace(req_ids=[*tokens], num_reqs=len(tokens), num_computed_tokens_cpu=starts)
        experts = [[10 * int(name[0]) + n] for name, own in tokens.items() for n in own]
        scheduled = SimpleNamespace(experts=experts, total_num_scheduled_tokens=len(experts), finished_req_ids=ended)
        scheduled.num_scheduled_tokens = {name: len(own) for name, own in tokens.items()}
        assert runner.execute_model(scheduled) == "done"

    step({"1-ab": range(3)})
    step({"1-ab": range(3, 4), "2-cd": range(2)})
    step({"2-cd": range(4)}, ended=("1-ab",))  # computed anew, as after an update of the weights
    for request in (1, 2):
        shape, dtype, data = recorder.take(f"{request}", 4)
        assert (shape, dtype) == ([4, 2, 1], "int16")
        experts = np.frombuffer(data, dtype).reshape(shape)
        assert experts[:, 1, 0].tolist() == [10 * request + n for n in range(4)] and not experts[:, 0].any()


def test_an_engine_on_gpus_returns_them_itself_signed_where_there_are_many(tiny_model_dir):
    settings = engine_settings(tiny_model_dir, generation_config(), device="cpu", return_routed_experts=True)
    assert not engine_args(settings, {}).enable_return_routed_experts
    assert engine_args(replace(settings, device="cuda"), {}).enable_return_routed_experts
    worker = VllmWorker.__new__(VllmWorker)
    worker._records = False
    for dtype, signed in ((np.uint16, np.int16), (np.uint8, np.uint8)):
        output = SimpleNamespace(routed_experts=np.full((2, 1, 1), 200, dtype=dtype))
        experts = asyncio.run(worker._experts("1", output, 2))
        assert (experts.dtype, experts[0, 0, 0]) == (signed, 200)
