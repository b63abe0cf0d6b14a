"""What a vLLM replica keeps of weight updates, without vLLM."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemo_rl.models.generation.interfaces import AnswerQueue
from nemo_rl.models.generation.vllm.worker import VllmWorker
from nemo_rl.types import GenerationAnswer, GenerationRequest, SamplingParams


class Engine:
    """Notes the cache salt of each request."""

    errored = False

    def __init__(self) -> None:
        self.salts: list[str] = []

    async def finish_weight_update(self, version: str) -> None: ...

    async def resume_generation(self) -> None: ...

    async def generate(self, prompt: dict[str, Any], params: Any, request_id: str) -> AsyncIterator[Any]:
        self.salts.append(prompt["cache_salt"])
        answer = SimpleNamespace(token_ids=[1], finish_reason="stop", logprobs=SimpleNamespace(logprobs=[-0.5]))
        yield SimpleNamespace(outputs=[answer])


class Worker(VllmWorker):
    """The engine and what needs vLLM's types are replaced."""

    def __init__(self, engine: Engine) -> None:
        self.weight_version = -1
        self._num_updates = 0
        self._engine: Any = engine
        self._request_ids = iter(range(100))
        self._admitted = asyncio.Semaphore(8)
        self._sampling_allowed = asyncio.Event()
        self._records = self._returns_experts = False

    def _sampling_params(self, num_prompt_tokens: int, sampling: SamplingParams, seed: int) -> Any:
        return None


def test_kv_of_a_version_that_comes_again_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = ModuleType("vllm.v1.engine.exceptions")
    vars(exceptions)["EngineDeadError"] = RuntimeError
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, exceptions.__name__, exceptions)

    async def run() -> None:
        engine = Engine()
        worker = Worker(engine)
        for version in (3, 4, 3):  # back to a checkpoint, whose next steps are others
            await worker.finish_weight_update(version)
            for _ in range(2):
                completion = await worker.generate([1, 2], SamplingParams(max_new_tokens=1), 0)
                assert completion.weight_version == version
        first, second, again = engine.salts[0::2]
        assert engine.salts == [first, first, second, second, again, again]
        assert len({first, second, again}) == 3

    asyncio.run(run())


def test_an_unexpected_failure_reaches_the_client():
    class Broken(Worker):
        async def generate(self, prompt_token_ids: Any, sampling: SamplingParams, seed: int) -> Any:
            raise KeyError("logprobs")

    async def ask() -> list[GenerationAnswer]:
        worker = Broken(Engine())
        worker._name = "generation replica 0"
        worker._serving, worker._answers = {}, AnswerQueue()
        request = GenerationRequest(
            request_id="r", prompt_token_ids=[1], sampling=SamplingParams(max_new_tokens=1), seed=0
        )
        await worker.submit([request])
        return await asyncio.wait_for(worker.drain(), 5)

    [answer] = asyncio.run(ask())
    assert (answer.request_id, answer.failure_type, answer.failure) == ("r", "KeyError", "KeyError('logprobs')")
