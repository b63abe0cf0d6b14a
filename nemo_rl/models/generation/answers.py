"""For the workers of every backend: a queue of answers per client, and the check of a prompt's length."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable

from nemo_rl.types import GenerationAnswer


class AnswerQueue:
    """Answers of a generation worker, kept separately for each client until the client takes them."""

    def __init__(self) -> None:
        self._answers: defaultdict[str, list[GenerationAnswer]] = defaultdict(list)
        self._ready: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)  # of the latest `take`
        self._due: dict[str, float] = {}  # when the answers leave at the latest, in time of the event loop

    def put(self, answers: Iterable[GenerationAnswer], client_id: str = "", *, patience_s: float = 0.0) -> None:
        """Add answers, which may wait for further ones for `patience_s` seconds."""
        self._answers[client_id] += answers
        due = asyncio.get_running_loop().time() + patience_s
        self._due[client_id] = min(due, self._due.get(client_id, due))
        self._ready[client_id].set()

    async def take(self, client_id: str = "") -> list[GenerationAnswer]:
        """Wait for an answer to `client_id`, and for more as long as all have patience. Returns all of them.

        A call that still waits when the client calls again returns an empty list: its caller may be dead.
        """
        self._ready[client_id].set()
        ready = self._ready[client_id] = asyncio.Event()
        if not self._answers[client_id]:
            await ready.wait()
        loop = asyncio.get_running_loop()
        while ready is self._ready[client_id] and (left_s := self._due.get(client_id, 0.0) - loop.time()) > 0.0:
            ready.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ready.wait(), left_s)
        if ready is not self._ready[client_id]:
            return []
        self._due.pop(client_id, None)
        return self._answers.pop(client_id, [])

    def clear(self) -> None:
        """Drop all answers. A waiting `take` returns an empty list."""
        self._answers.clear()
        self._due.clear()
        for ready in self._ready.values():
            ready.set()


def prompt_problem(num_prompt_tokens: int, max_model_len: int, key: str = "vllm_cfg.max_model_len") -> str | None:
    """Why a prompt of this length cannot be completed; None if it can. `key` sets `max_model_len`."""
    if num_prompt_tokens < 1:
        return "the prompt has no tokens: check the prompt file and the chat template"
    if num_prompt_tokens >= max_model_len:
        return (
            f"the prompt has {num_prompt_tokens} tokens and leaves no room for an answer: "
            f"{key} is {max_model_len}; raise it or shorten the prompts with data.max_input_seq_length"
        )
    return None
