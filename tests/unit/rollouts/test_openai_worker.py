"""The worker of the OpenAI-compatible server, over replicas that are no engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import openai
import pytest

from nemo_rl.data.chat.served import ServedChat
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.rollouts.openai_server import AnswerSettings, OpenAIServer, OpenAIServerSettings
from nemo_rl.types import SamplingParams
from tests.unit.rollouts.engines import FakeReplica

TOKENIZER = build_tiny_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def decode(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids)))


def settings(port: int = 0) -> OpenAIServerSettings:
    return OpenAIServerSettings(
        host="127.0.0.1",
        port=port,
        token="secret",
        sampling=SamplingParams(max_new_tokens=10),
        answers=AnswerSettings(
            model="tiny",
            make_chat=partial(ServedChat, TOKENIZER, {}),
            calls_of=None,
            encode=encode,
            decode=decode,
            vocab_size=len(TOKENIZER),
            max_model_len=100,
        ),
        engine_timeout_s=5.0,
    )


def client_of(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0)


def test_requests_outlive_an_engine_and_end_with_the_server():
    async def main() -> None:
        first, second = FakeReplica(lambda request: None), FakeReplica()
        server = OpenAIServer(settings(), [first])
        async with client_of(await server.listen()) as client:
            waiting = asyncio.create_task(client.completions.create(model="tiny", prompt="1+2", seed=1))
            while not first.asked:
                await asyncio.sleep(0.01)
            first.die()
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await server.set_generation_workers([second])
            assert (await waiting).choices[0].finish_reason == "stop"
            assert second.asked[0].prompt_token_ids == encode("1+2") and second.asked[0].seed == 1

            third = FakeReplica(lambda request: None)
            await server.set_generation_workers([third])
            late = asyncio.create_task(client.completions.create(model="tiny", prompt="1+2"))
            while not third.under_way:
                await asyncio.sleep(0.01)
            await server.stop()
            with pytest.raises(openai.InternalServerError, match="the run has ended"):
                await late
            assert not third.under_way, "the engine samples for nobody"
            with pytest.raises(openai.APIConnectionError):
                await client.models.list()

    asyncio.run(main())


def test_nobody_is_sampled_for_who_went_away():
    async def main() -> None:
        replica = FakeReplica(lambda request: None)
        server = OpenAIServer(settings(), [replica])
        async with client_of(await server.listen()) as client:
            waiting = asyncio.create_task(client.completions.create(model="tiny", prompt="1+2", n=2))
            while len(replica.under_way) < 2:
                await asyncio.sleep(0.01)
            waiting.cancel()
            while replica.under_way:
                await asyncio.sleep(0.01)
            await server.stop()

    asyncio.run(asyncio.wait_for(main(), 20))
