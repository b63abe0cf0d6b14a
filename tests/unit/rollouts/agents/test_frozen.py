"""A frozen model gives the tokens and logprobs of transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.rollouts.agents.frozen import FrozenModel, draw, num_until_stop
from nemo_rl.types import SamplingParams, StopReason
from tests.tables import named
from tests.unit.policy.models import save_model
from tests.unit.rollouts.engines import in_loop, request_of

EOS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frozen")
    save_model("llama", path, vocab_size=13)
    return path


@in_loop
async def test_a_batch_says_what_each_prompt_says_alone(folder: Path):
    frozen, model = FrozenModel(str(folder)), AutoModelForCausalLM.from_pretrained(folder).eval()
    requests = [
        request_of(prompt, seed, max_new_tokens=n, temperature=t, stop_token_ids=(EOS,))
        for seed, (prompt, n, t) in enumerate((([3, 4, 5, 6, 7], 6, 0), ([2], 3, 1), ([8, 9], 4, 1)))
    ]
    for request, found in zip(requests, await asyncio.gather(*map(frozen.generate, requests)), strict=True):
        again, prompt, tokens = await frozen.generate(request), request.prompt_token_ids, found.token_ids
        assert tokens == again.token_ids and found.logprobs == pytest.approx(again.logprobs, abs=1e-5)
        assert (found.stop_reason is StopReason.STOP) == (tokens[-1] == EOS)
        assert tokens[-1] == EOS or len(tokens) == request.sampling.max_new_tokens
        with torch.inference_mode():
            whole = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert found.logprobs == pytest.approx(whole.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(), abs=1e-5)
        if request.sampling.temperature == 0:
            assert tokens == whole.argmax(-1).tolist()


@named(
    "kept, how",
    {
        "top_k": (2, {"top_k": 2}),
        "top_p": (1, {"top_p": 0.5}),
        "both": (1, {"top_k": 2, "top_p": 0.7}),  # of the two that top-k leaves
    },
)
def test_top_k_and_top_p_bound_what_is_drawn(kept, how):
    logits, generator = torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.Generator().manual_seed(0)
    drawn = {draw(logits, SamplingParams(max_new_tokens=1, **how), generator) for _ in range(50)}
    assert {token for token, _ in drawn} == set(range(kept))
    assert sum(torch.tensor(logprob).exp().item() for _, logprob in drawn) == pytest.approx(1.0)


@named(
    "stops, num",
    {
        "of two tokens": (("cd",), 4),
        "the first of two": (("x", "b"), 2),
        "absent": (("x",), 5),
        "none": ((), 5),
    },
)
def test_a_stop_string_ends_the_tokens_that_complete_it(stops, num):
    assert num_until_stop(range(5), stops, lambda tokens: "".join("abcde"[token] for token in tokens)) == num


@in_loop
async def test_an_error_of_the_model_reaches_its_requests_and_not_the_next_ones(folder: Path):
    frozen = FrozenModel(str(folder))
    with pytest.raises(IndexError):
        await frozen.generate(request_of([99], max_new_tokens=1))  # the model has 13 tokens
    assert len((await frozen.generate(request_of([3], max_new_tokens=1))).token_ids) == 1
