"""A model whose weights stay as they are, as an opponent of the policy: requests in, completions out.

`FrozenModel` is an actor, `frozen_generate` its caller. Generation is plain: transformers, batches of the requests that
wait, on the CPU. For opponents of a size that needs a GPU, serve one and let the agent call it.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ray.exceptions import RayError
from transformers import AutoModelForCausalLM

from nemo_rl.rollouts.engine_client import RequestFailed
from nemo_rl.types import Completion, GenerateFn, ImageSpan, OnTokens, SamplingParams, StopReason

_GATHER_S = 0.005  # a batch begins when so long a time has passed since its first request
MAX_BATCH = 64

Request = tuple[list[int], SamplingParams, int]  # prompt, sampling, seed


class FrozenModel:
    """Answers requests of several episodes, in batches."""

    def __init__(self, model: str) -> None:
        """`model`: directory or hub name."""
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        self._waiting: list[tuple[Request, asyncio.Future[tuple[list[int], list[float], bool]]]] = []
        self._working: asyncio.Task[None] | None = None

    async def generate(
        self, prompt: list[int], sampling: SamplingParams, seed: int
    ) -> tuple[list[int], list[float], bool]:
        """Sampled tokens with their logprobs, and whether a stop token ended them."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(((prompt, sampling, seed), answer))
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
    def _complete(self, requests: Sequence[Request]) -> list[tuple[list[int], list[float], bool]]:
        """Each request draws from a generator of its own, so its tokens do not depend on the others, up to rounding."""
        longest = max(len(prompt) for prompt, _, _ in requests)
        tokens = torch.zeros((len(requests), longest), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, (prompt, _, _) in enumerate(requests):
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        draws = [torch.Generator().manual_seed(seed % 2**63) for _, _, seed in requests]
        found: list[tuple[list[int], list[float], bool]] = [([], [], False) for _ in requests]
        cache: Any = None
        position = mask.cumsum(1) - 1
        for _ in range(max(sampling.max_new_tokens for _, sampling, _ in requests)):
            output = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=position.clamp(min=0),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, logits = output.past_key_values, output.logits[:, -1].float()
            following = torch.zeros(len(requests), dtype=torch.long)
            for row, (_, sampling, _) in enumerate(requests):
                said, logprobs, ended = found[row]
                if ended or len(said) == sampling.max_new_tokens:
                    continue
                token, logprob = draw(logits[row], sampling, draws[row])
                said.append(token)
                logprobs.append(logprob)
                found[row] = (said, logprobs, token in sampling.stop_token_ids)
                following[row] = token
            if all(e or len(t) == s.max_new_tokens for (t, _, e), (_, s, _) in zip(found, requests, strict=True)):
                break
            tokens = following[:, None]
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
            position = position[:, -1:] + 1
        return found


def draw(logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """A token of logits [V] and its logprob, under temperature, top-k and top-p; temperature 0 takes the largest."""
    if sampling.temperature == 0:
        logprobs = logits.log_softmax(-1)
        token = int(logprobs.argmax())
        return token, float(logprobs[token])
    logits = logits / sampling.temperature
    ordered, ids = logits.sort(descending=True)
    if sampling.top_k is not None:
        ordered[sampling.top_k :] = float("-inf")
    if sampling.top_p < 1:
        probabilities = ordered.softmax(-1)
        ordered[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = float("-inf")
    logprobs = ordered.log_softmax(-1)
    place = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return int(ids[place]), float(logprobs[place])


def frozen_generate(actor: Any, decode: Callable[[Sequence[int]], str]) -> GenerateFn:
    """Generation by a `FrozenModel` actor, whose weights have version -1. `decode` finds stop strings."""

    async def generate(
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        images: Sequence[ImageSpan] = (),
        *,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        try:
            token_ids, logprobs, ended = await actor.generate.remote(list(prompt_token_ids), sampling, seed)
        except RayError as error:
            raise RequestFailed(f"the frozen model gave no answer: {error}") from error
        num = num_until_stop(token_ids, sampling.stop_strings, decode)
        return Completion(
            token_ids=token_ids[:num],
            logprobs=logprobs[:num],
            stop_reason=StopReason.STOP if ended or num < len(token_ids) else StopReason.LENGTH,
            weight_version=-1,
        )

    return generate


def num_until_stop(token_ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int:
    """Tokens up to the one that completes a stop string; all of them if there is none."""

    def has_stop(num: int) -> bool:
        text = decode(token_ids[:num])
        return any(stop in text for stop in stops)

    return bisect_left(range(len(token_ids)), True, key=has_stop) if stops else len(token_ids)
