"""A model whose weights stay as they are, as an opponent of the policy: requests in, completions out.

`FrozenModel` is an actor, `frozen_generate` its caller. Generation is plain: transformers, batches of the requests that
wait, on the CPU. For opponents of a size that needs a GPU, serve one and let the agent call it.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ray.exceptions import RayError
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from nemo_rl.rollouts.engine_client import RequestFailed
from nemo_rl.types import Completion, GenerateFn, GenerationRequest, OnTokens, SamplingParams, StopReason
from nemo_rl.utils.logprobs import log_softmax

_GATHER_S = 0.005  # a batch begins when so long a time has passed since its first request
MAX_BATCH = 64


class FrozenModel:
    """Answers requests of several episodes, in batches."""

    def __init__(self, model: str) -> None:
        """`model`: directory or hub name."""
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._working: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> Completion:
        """Complete a prompt, without regard to stop strings. The weights have version -1."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        try:
            await asyncio.sleep(_GATHER_S)
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                completing = asyncio.to_thread(self._complete, [request for request, _ in batch])
                [found] = await asyncio.gather(completing, return_exceptions=True)
                for number, (_, answer) in enumerate(batch):
                    if answer.done():
                        continue
                    if isinstance(found, BaseException):  # no memory, a token that the model does not have
                        answer.set_exception(found)
                    else:
                        answer.set_result(found[number])
        finally:
            self._working = None

    @torch.inference_mode()
    def _complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Each request draws from a generator of its own, so its tokens do not depend on the others, up to rounding."""
        prompts = [torch.tensor(request.prompt_token_ids) for request in requests]
        left = partial(pad_sequence, batch_first=True, padding_side="left")
        tokens, mask = left(prompts), left([torch.ones_like(prompt) for prompt in prompts])
        generators = [torch.Generator().manual_seed(request.seed % 2**63) for request in requests]
        drawn: list[list[tuple[int, float]]] = [[] for _ in requests]
        cache: Any = None
        position = mask.cumsum(1) - 1
        going = list(range(len(requests)))
        while going:
            output = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=position.clamp(min=0),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, logits = output.past_key_values, output.logits[:, -1].float()
            tokens = torch.zeros((len(requests), 1), dtype=torch.long)
            for row in going:
                drawn[row].append(draw(logits[row], requests[row].sampling, generators[row]))
                tokens[row] = drawn[row][-1][0]
            going = [row for row in going if not _has_ended(drawn[row], requests[row].sampling)]
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
            position = position[:, -1:] + 1
        return [
            Completion(
                token_ids=[token for token, _ in own],
                logprobs=[logprob for _, logprob in own],
                stop_reason=StopReason.STOP if own[-1][0] in request.sampling.stop_token_ids else StopReason.LENGTH,
                weight_version=-1,
            )
            for own, request in zip(drawn, requests, strict=True)
        ]


def _has_ended(drawn: Sequence[tuple[int, float]], sampling: SamplingParams) -> bool:
    return drawn[-1][0] in sampling.stop_token_ids or len(drawn) == sampling.max_new_tokens


def draw(logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """A token of logits [V] and its logprob, under temperature, top-k and top-p; temperature 0 takes the largest."""
    if sampling.temperature == 0:
        logprobs = log_softmax(logits)
        token = int(logprobs.argmax())
        return token, float(logprobs[token])
    logits = logits / sampling.temperature
    ordered, ids = logits.sort(descending=True)
    if sampling.top_k is not None:
        ordered[sampling.top_k :] = float("-inf")
    if sampling.top_p < 1:
        probabilities = ordered.softmax(-1)
        ordered[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = float("-inf")
    logprobs = log_softmax(ordered)
    place = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return int(ids[place]), float(logprobs[place])


def frozen_generate(actor: Any, decode: Callable[[Sequence[int]], str]) -> GenerateFn:
    """Generation by a `FrozenModel` actor. `decode` serves to find stop strings."""

    async def generate(request: GenerationRequest, on_tokens: OnTokens | None = None) -> Completion:
        try:
            completion: Completion = await actor.generate.remote(request)
        except RayError as error:
            raise RequestFailed(f"the frozen model gave no answer: {error}") from error
        token_ids, logprobs = completion.token_ids, completion.logprobs
        num = num_until_stop(token_ids, request.sampling.stop_strings, decode)
        if num == len(token_ids):
            return completion
        return replace(completion, token_ids=token_ids[:num], logprobs=logprobs[:num], stop_reason=StopReason.STOP)

    return generate


def num_until_stop(token_ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int:
    """Tokens up to the one that completes a stop string; all of them if there is none."""

    def has_stop(num: int) -> bool:
        text = decode(token_ids[:num])
        return any(stop in text for stop in stops)

    return bisect_left(range(len(token_ids)), True, key=has_stop) if stops else len(token_ids)
