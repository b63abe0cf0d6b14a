"""A frozen model's tokens and logprobs, beside those of transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from nemo_rl.rollouts.agents.frozen import FrozenModel, draw, num_until_stop
from nemo_rl.types import SamplingParams
from tests.unit.rollouts.engines import in_loop

EOS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=13, max_position_embeddings=64, **sizes))
    path = tmp_path_factory.mktemp("frozen")
    model.save_pretrained(path)
    return path


@in_loop
async def test_a_batch_says_what_each_prompt_says_alone(folder: Path):
    frozen, model = FrozenModel(str(folder)), AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = [[3, 4, 5, 6, 7], [2], [8, 9]]
    sampling = [
        SamplingParams(max_new_tokens=n, temperature=t, stop_token_ids=(EOS,)) for n, t in ((6, 0), (3, 1), (4, 1))
    ]

    found = await asyncio.gather(*map(frozen.generate, prompts, sampling, range(3)))
    for number, (tokens, logprobs, ended) in enumerate(found):
        again = await frozen.generate(prompts[number], sampling[number], number)
        assert tokens == again[0] and logprobs == pytest.approx(again[1], abs=1e-5) and ended == (tokens[-1] == EOS)
        assert ended or len(tokens) == sampling[number].max_new_tokens
        with torch.inference_mode():
            whole = model(torch.tensor([prompts[number] + tokens])).logits[0].log_softmax(-1)
        at = len(prompts[number]) - 1
        wanted = [float(whole[at + i, token]) for i, token in enumerate(tokens)]
        assert logprobs == pytest.approx(wanted, abs=1e-5)
        if sampling[number].temperature == 0:
            assert tokens == [int(whole[at + i].argmax()) for i in range(len(tokens))]


def test_top_k_and_top_p_bound_what_is_drawn():
    logits, generator = torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.Generator().manual_seed(0)
    for sampling, kept in (
        (SamplingParams(max_new_tokens=1, top_k=2), 2),
        (SamplingParams(max_new_tokens=1, top_p=0.5), 1),
        (SamplingParams(max_new_tokens=1, top_k=2, top_p=0.7), 1),  # of the two that top-k leaves
    ):
        drawn = {draw(logits, sampling, generator) for _ in range(50)}
        assert {token for token, _ in drawn} == set(range(kept))
        assert sum(torch.tensor(logprob).exp().item() for _, logprob in drawn) == pytest.approx(1.0)


def test_a_stop_string_ends_the_tokens_that_complete_it():
    for stops, num in ((("cd",), 4), (("x", "b"), 2), (("x",), 5), ((), 5)):
        assert num_until_stop(range(5), stops, lambda tokens: "".join("abcde"[token] for token in tokens)) == num


@in_loop
async def test_an_error_of_the_model_reaches_its_requests_and_not_the_next_ones(folder: Path):
    frozen, sampling = FrozenModel(str(folder)), SamplingParams(max_new_tokens=1)
    with pytest.raises(IndexError):
        await frozen.generate([99], sampling, 0)  # the model has 13 tokens
    assert len((await frozen.generate([3], sampling, 0))[0]) == 1
