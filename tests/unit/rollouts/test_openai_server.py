"""The OpenAI-compatible server over a made-up engine, as OpenAI's own client sees it, and over replicas."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp.test_utils import TestServer

from nemo_rl.data.chat.served import ServedChat
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.environments.code.tools import find_calls
from nemo_rl.rollouts.engine_client import RequestFailed
from nemo_rl.rollouts.openai_server import MAX_BODY_BYTES, AnswerSettings, OpenAIServer, OpenAIServerSettings
from nemo_rl.types import Completion, OnTokens, SamplingParams, StopReason
from tests.unit.rollouts.engines import FakeReplica

TOKENIZER = build_tiny_tokenizer()
# The tokenizer's own template, with tools and calls.
TOKENIZER.chat_template = TEMPLATE = (
    "{%- if tools -%}{{- '<|system|>' + tools | tojson + '<eos>' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content -}}"
    "{%- for call in m.tool_calls or [] -%}{{- 'CALL' + call.function | tojson -}}{%- endfor -%}"
    "{{- '<eos>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
EOS: Any = TOKENIZER.eos_token_id
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name":   "add", "arguments": {"a": 1}}\n</tool_call>'
HELLO: Any = [{"role": "user", "content": "1+2"}]


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def decode(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=True))


class Engine:
    """Says `text` and ends; notes what it was asked. `wait`: for ever."""

    def __init__(self, text: str = "3") -> None:
        self.text = text
        self.asked: list[tuple[list[int], SamplingParams, int]] = []
        self.version = 0
        self.failure: Exception | None = None
        self.failure_at_end: Exception | None = None
        self.wait = False
        self.num_cancelled = 0

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, seed: int, on_tokens: OnTokens | None = None
    ) -> Completion:
        self.asked.append((list(prompt_token_ids), sampling, seed))
        if self.failure is not None:
            raise self.failure
        if self.wait:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        # Characters one by one: the tokenizer would choose other tokens for the same text.
        said = [token for character in self.text for token in tokens(character)] + [EOS]
        said = said[: sampling.max_new_tokens]
        for token in said if on_tokens is not None else ():
            on_tokens(([token], [-0.5]))
            await asyncio.sleep(0)
        if self.failure_at_end is not None:
            raise self.failure_at_end
        return Completion(
            token_ids=said,
            logprobs=[-0.5] * len(said),
            stop_reason=StopReason.STOP if said[-1] == EOS else StopReason.LENGTH,
            weight_version=self.version,
        )


def settings() -> OpenAIServerSettings:
    return OpenAIServerSettings(
        host="127.0.0.1",
        port=0,
        token="secret",
        sampling=SamplingParams(max_new_tokens=100, stop_token_ids=(EOS,)),
        answers=AnswerSettings(
            model="tiny",
            make_chat=lambda: ServedChat(TOKENIZER, {}),
            calls_of=find_calls,
            encode=tokens,
            decode=decode,
            vocab_size=len(TOKENIZER),
            max_model_len=400,
        ),
        engine_timeout_s=60.0,
    )


def with_server(
    engine: Engine, use: Callable[[openai.AsyncOpenAI, OpenAIServer], Awaitable[None]], token: str = "secret"
) -> None:
    """Run `use` with a client of a server on loopback."""

    async def main() -> None:
        app = OpenAIServer(settings(), [])
        app.answers.generate = engine
        async with TestServer(app.app) as server:
            client = openai.AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key=token, max_retries=0)
            async with client:
                await use(client, app)

    asyncio.run(main())


def test_a_second_turn_begins_with_the_tokens_of_the_first():
    engine = Engine("12+34")
    assert len(tokens("12+34")) <= 5

    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        first: Any = await client.chat.completions.create(model="any", messages=HELLO, seed=7, temperature=0.5)
        assert first.prompt_token_ids == tokens("<|user|>1+2<eos><|assistant|>")
        choice = first.choices[0]
        assert choice.message.content == "12+34" and choice.finish_reason == "stop" and first.weight_version == 0
        assert first.usage.total_tokens == len(first.prompt_token_ids) + len(choice.token_ids)
        engine.version = 3
        messages: Any = [*HELLO, choice.message.model_dump(), {"role": "user", "content": "and?"}]
        second: Any = await client.chat.completions.create(model="any", messages=messages)
        before = first.prompt_token_ids + choice.token_ids
        assert second.prompt_token_ids == before + tokens("<|user|>and?<eos><|assistant|>")
        assert second.retokenized_turns == 0 and second.weight_version == 3
        foreign: Any = [*HELLO, {"role": "assistant", "content": "not mine"}, {"role": "user", "content": "and?"}]
        third: Any = await client.chat.completions.create(model="any", messages=foreign)
        assert third.retokenized_turns == 1

    with_server(engine, use)
    assert engine.asked[0][1].temperature == 0.5 and engine.asked[0][2] == 7
    assert engine.asked[1][0][: len(engine.asked[0][0])] == engine.asked[0][0]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_come_as_such_and_are_known_again(stream: bool):
    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        more: dict[str, Any] = {"model": "any", "tools": TOOLS, "stream": stream}
        first: Any = await client.chat.completions.create(messages=HELLO, **more)
        if stream:
            [first] = [chunk async for chunk in first]  # no text comes before a call
            choice = first.choices[0]
            message = choice.delta
        else:
            choice = first.choices[0]
            message = choice.message
        assert choice.finish_reason == "tool_calls" and message.content is None
        [call] = message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1}
        sent = {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"index"})]}
        messages = [*HELLO, sent, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        more["stream"] = False
        second: Any = await client.chat.completions.create(messages=messages, **more)
        before = first.prompt_token_ids + choice.token_ids
        assert second.prompt_token_ids == before + tokens("<|tool|>3<eos><|assistant|>")
        assert second.retokenized_turns == 0
        sent["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'  # is not what was said
        third: Any = await client.chat.completions.create(messages=messages, **more)
        assert third.retokenized_turns == 1

    with_server(Engine(CALL), use)


def test_text_behind_a_stop_string_is_left_out_and_its_tokens_are_not():
    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        answer: Any = await client.chat.completions.create(model="any", messages=HELLO, stop="=", logprobs=True)
        choice = answer.choices[0]
        assert choice.message.content == "1" and decode(choice.token_ids) == "1=2"
        assert "".join(token.token for token in choice.logprobs.content) == "1=2"
        assert choice.logprobs.content[0].bytes == [49] and choice.token_logprobs == [-0.5] * 4
        cut: Any = await client.chat.completions.create(model="any", messages=HELLO, max_tokens=2)
        assert cut.choices[0].finish_reason == "length" and cut.choices[0].logprobs is None

    with_server(Engine("1=2"), use)


def test_a_stream_sends_tokens_as_they_are_sampled():
    """The client sees no part of a stop string or of a call; what it has seen is known again."""

    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        more: dict[str, Any] = {"model": "any", "logprobs": True, "stream": True, "stop": "==x"}
        more["stream_options"] = {"include_usage": True}
        chunks: list[Any] = [c async for c in await client.chat.completions.create(messages=HELLO, **more)]
        *parts, last, usage = chunks
        texts = [part.choices[0].delta.content for part in parts]
        assert texts == ["1", " ", "+", "=2", "é"], "an end that may become the stop string is kept back"
        assert last.choices[0].delta.content is None and last.choices[0].finish_reason == "stop"
        seen = [token for chunk in chunks[:-1] for token in chunk.choices[0].logprobs.content]
        assert [token.logprob for token in seen] == [-0.5] * len(last.choices[0].token_ids)
        assert usage.choices == [] and usage.usage.completion_tokens == len(seen)
        messages: Any = [*HELLO, {"role": "assistant", "content": "".join(texts)}, {"role": "user", "content": "?"}]
        second: Any = await client.chat.completions.create(model="any", messages=messages)
        assert second.retokenized_turns == 0
        assert second.prompt_token_ids[: len(last.prompt_token_ids)] == last.prompt_token_ids

    with_server(Engine("1 +=2é==x"), use)


def test_text_before_a_call_is_streamed():
    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        stream: Any = await client.chat.completions.create(model="any", messages=HELLO, tools=TOOLS, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        text, calls = "".join(delta.content or "" for delta in deltas), deltas[-1].tool_calls
        assert text == "ok <b>\n" and calls[0].function.name == "add"
        sent = {"role": "assistant", "content": text, "tool_calls": [calls[0].model_dump(exclude={"index"})]}
        messages: Any = [*HELLO, sent, {"role": "tool", "tool_call_id": calls[0].id, "content": "3"}]
        second: Any = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        assert second.retokenized_turns == 0

    with_server(Engine("ok <b>\n" + CALL), use)


def test_a_stream_that_fails_says_so():
    engine = Engine("12")

    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        engine.failure = RequestFailed("no engine")
        with pytest.raises(openai.InternalServerError, match="no engine"):  # nothing was sent: a status of its own
            await client.chat.completions.create(model="any", messages=HELLO, stream=True)
        engine.failure, engine.failure_at_end = None, RequestFailed("was lost")
        stream: Any = await client.chat.completions.create(model="any", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="was lost"):
            assert [chunk.choices[0].delta.content async for chunk in stream] == []

    with_server(engine, use)


FUNCTION: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_the_same_conversation_as_chats(stream: bool):
    engine = Engine("12")

    async def respond(client: openai.AsyncOpenAI, **more: Any) -> Any:
        if not stream:
            return await client.responses.create(model="any", **more)
        async with client.responses.stream(model="any", **more) as events:
            deltas = [event.delta async for event in events if event.type == "response.output_text.delta"]
            response = await events.get_final_response()
        assert "".join(deltas) == response.output_text
        return response

    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        first = await respond(client, input="1+2", instructions="be brief", include=["message.output_text.logprobs"])
        assert first.output_text == "12" and first.status == "completed" and first.usage.output_tokens == 3
        assert [token.logprob for token in first.output[0].content[0].logprobs] == [-0.5] * 3
        asked = [{"role": "system", "content": "be brief"}, *HELLO]
        chat: Any = await client.chat.completions.create(model="any", messages=asked)
        assert chat.prompt_token_ids == engine.asked[0][0]
        engine.text = CALL
        again = await respond(
            client, input="go", instructions="be brief", previous_response_id=first.id, tools=[FUNCTION]
        )
        [call] = again.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
        engine.text = "3"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        items = [*HELLO, *first.output, {"role": "user", "content": "go"}, call, result]
        done = await respond(client, input=items, instructions="be brief", tools=[FUNCTION])
        assert done.output_text == "3"
        before, said = engine.asked[2][0], [token for character in CALL for token in tokens(character)]
        assert engine.asked[3][0] == [*before, *said, EOS, *tokens("<|tool|>3<eos><|assistant|>")]
        with pytest.raises(openai.NotFoundError, match="no response"):
            await client.responses.create(model="any", input="x", previous_response_id="resp_other")
        with pytest.raises(openai.BadRequestError, match="web_search"):
            await client.responses.create(model="any", input="x", tools=[{"type": "web_search"}])
        engine.text = "1234"
        cut = await client.responses.create(model="any", input="x", max_output_tokens=2)
        assert cut.status == "incomplete" and cut.output_text == "12"

    with_server(engine, use)


def test_completions_of_text_and_of_tokens():
    engine = Engine("ab")

    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        of_text: Any = await client.completions.create(model="any", prompt="1+2", n=2, seed=5, logprobs=0)
        of_tokens: Any = await client.completions.create(model="any", prompt=tokens("1+2"), seed=5)
        assert of_text.choices[1].text == of_tokens.choices[0].text == "ab"
        assert of_text.choices[0].logprobs.tokens[:2] == ["a", "b"]
        assert of_text.choices[0].logprobs.token_logprobs == [-0.5] * 3
        stream = await client.completions.create(model="any", prompt="1+2", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["a", "b", ""]
        assert [model.id async for model in client.models.list()] == ["tiny"]

    with_server(engine, use)
    assert [seed for _, _, seed in engine.asked[:3]] == [5, 6, 5] and engine.asked[0][0] == engine.asked[2][0]


@pytest.mark.parametrize(
    ("request_body", "named"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
        ({"top_logprobs": 4}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"n": 10_000}, "n=10000"),
        ({"n": True}, "n=True"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "at most 16"),
        ({"logprobs": 1}, "logprobs=1"),
        ({"messages": []}, "messages="),
        ({"messages": [{"content": "x"}]}, "a message needs a role"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "last message"),
        ({"messages": [{"role": "user", "content": "1" * 500}]}, "max_model_len"),
        ({"tools": [{"name": "add"}]}, "a tool must be"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(request_body: dict[str, Any], named: str):
    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        with pytest.raises(openai.BadRequestError, match=named):
            await client.chat.completions.create(**{"model": "any", "messages": HELLO, **request_body})

    with_server(Engine(), use)


def test_who_has_no_token_gets_nothing():
    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="any", messages=HELLO)
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()

    engine = Engine()
    with_server(engine, use, token="secreT")
    assert not engine.asked


def test_failures_have_the_form_that_clients_know():
    engine = Engine()

    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        engine.failure = RequestFailed("the engine said no")
        with pytest.raises(openai.InternalServerError, match="the engine said no") as caught:
            await client.chat.completions.create(model="any", messages=HELLO)
        assert caught.value.status_code == 503
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="any", input="x")
        with pytest.raises(openai.APIStatusError) as too_large:
            await client.completions.create(model="any", prompt="1" * (MAX_BODY_BYTES + 1))
        assert too_large.value.status_code == 413
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
            for body in (b"{", b"[]", b"\xff", b"[" * 100_000):
                async with session.post(f"{client.base_url}chat/completions", data=body) as answer:
                    assert answer.status == 400 and (await answer.json())["error"]["message"]

    with_server(engine, use)


def test_a_thousand_connections_keep_no_one_waiting():
    """500 clients never finish their request, and 500 ask at once: all of these are answered."""

    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        host, port = client.base_url.host, client.base_url.port
        slow = [await asyncio.open_connection(host, port) for _ in range(500)]
        for _, writer in slow:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\n")
        async with aiohttp.ClientSession(
            headers={"Authorization": "Bearer secret"}, connector=aiohttp.TCPConnector(limit=0)
        ) as session:

            async def ask(seed: int) -> int:
                body = {"prompt": "1+2", "model": "any", "seed": seed}
                async with session.post(f"{client.base_url}completions", json=body) as answer:
                    await answer.read()
                    return answer.status

            assert await asyncio.gather(*map(ask, range(500))) == [200] * 500
        for _, writer in slow:
            writer.close()

    engine = Engine()
    with_server(engine, use)
    assert len(engine.asked) == 500


def test_requests_under_way_are_told_that_the_run_has_ended():
    engine = Engine()

    async def use(client: openai.AsyncOpenAI, app: OpenAIServer) -> None:
        engine.wait = True
        waiting = asyncio.create_task(client.chat.completions.create(model="any", messages=HELLO, n=3))
        while len(engine.asked) < 3:
            await asyncio.sleep(0.01)
        app.close()
        for request in (waiting, client.chat.completions.create(model="any", messages=HELLO)):
            with pytest.raises(openai.InternalServerError, match="the run has ended"):
                await request

    with_server(engine, use)
    assert engine.num_cancelled >= 3


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
            assert second.asked[0].prompt_token_ids == tokens("1+2") and second.asked[0].seed == 1

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
