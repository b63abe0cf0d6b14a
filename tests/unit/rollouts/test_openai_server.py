"""The OpenAI-compatible server over a made-up engine, as OpenAI's own client sees it, and over replicas."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp.test_utils import TestServer
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OfChats
from openai.types.completion_create_params import CompletionCreateParamsBase as OfTexts
from openai.types.responses.response_create_params import ResponseCreateParamsBase as OfResponses

from nemo_rl.data.chat.served import ServedChat
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.environments.code.tools import find_calls
from nemo_rl.rollouts.engine_client import RequestFailed
from nemo_rl.rollouts.openai_forms import IGNORED, ChatRequest, CompletionRequest, ResponsesRequest
from nemo_rl.rollouts.openai_server import MAX_BODY_BYTES, AnswerSettings, OpenAIServer, OpenAIServerSettings
from nemo_rl.types import Completion, GenerationRequest, OnTokens, SamplingParams, StopReason
from tests.conversations import assistant, user
from tests.unit.data.templates import chat as chat_template
from tests.unit.rollouts.engines import FakeReplica, in_loop

TOKENIZER = build_tiny_tokenizer()
# The tokenizer's own template, with tools and calls.
TOKENIZER.chat_template = TEMPLATE = chat_template(
    "{{- '<|' + m.role + '|>' + m.content -}}"
    "{%- for call in m.tool_calls or [] -%}{{- 'CALL' + call.function | tojson -}}{%- endfor -%}{{- '<eos>' -}}",
    "<|assistant|>",
    "{%- if tools -%}{{- '<|system|>' + tools | tojson + '<eos>' -}}{%- endif -%}",
)
EOS: Any = TOKENIZER.eos_token_id
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name":   "add", "arguments": {"a": 1}}\n</tool_call>'
HELLO: Any = [user("1+2")]


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def spelled(text: str) -> list[int]:
    """One token for each character, and the end. The tokenizer would choose other tokens for the same text."""
    return [*(token for character in text for token in tokens(character)), EOS]


def decode(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids), skip_special_tokens=True))


@dataclass
class Engine:
    """Says `text`, or what it makes of the request, and ends; notes the requests."""

    text: str | Callable[[GenerationRequest], str] = "3"
    asked: list[GenerationRequest] = field(default_factory=list)
    version: int = 0
    failure: Exception | None = None
    failure_at_end: Exception | None = None

    async def __call__(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> Completion:
        self.asked.append(request)
        if self.failure is not None:
            raise self.failure
        text = self.text if isinstance(self.text, str) else self.text(request)
        said = spelled(text)[: request.sampling.max_new_tokens]
        for token in said if on_tokens is not None else ():
            on_tokens(([token], [-0.5]))
            await asyncio.sleep(0)
        if self.failure_at_end is not None:
            raise self.failure_at_end
        reason = StopReason.STOP if said[-1] == EOS else StopReason.LENGTH
        return Completion(token_ids=said, logprobs=[-0.5] * len(said), stop_reason=reason, weight_version=self.version)


def settings() -> OpenAIServerSettings:
    sampling = SamplingParams(max_new_tokens=100, stop_token_ids=(EOS,))
    answers = AnswerSettings(
        model="tiny", make_chat=lambda: ServedChat(TOKENIZER, {}), calls_of=find_calls, encode=tokens, decode=decode,
        vocab_size=len(TOKENIZER), max_model_len=400,
    )  # fmt: skip
    own = {"host": "127.0.0.1", "port": 0, "token": "secret", "engine_timeout_s": 60.0}
    return OpenAIServerSettings(**own, sampling=sampling, answers=answers)


def client_at(url: str, key: str, *, strict: bool = True) -> openai.AsyncOpenAI:
    """`strict`: it refuses what is not of OpenAI's types. Without certificates, which take 80 ms to read."""
    own: Any = {"http_client": openai.DefaultAsyncHttpxClient(verify=False), "_strict_response_validation": strict}
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, **own)


@asynccontextmanager
async def served(engine: Engine, token: str = "secret", *, strict: bool = True) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a server on loopback."""
    app = OpenAIServer(settings(), [])
    app.answers.generate = engine
    async with TestServer(app.app) as server, client_at(str(server.make_url("/v1")), token, strict=strict) as client:
        yield client


async def chat(client: openai.AsyncOpenAI, messages: Any = HELLO, **more: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=messages, **more)


AND: Any = user("and?")


@in_loop
async def test_a_second_turn_begins_with_the_tokens_of_the_first():
    async with served(engine := Engine("12+34")) as client:
        first = await chat(client, seed=7, temperature=0.5)
        assert engine.asked[0].sampling.temperature == 0.5 and engine.asked[0].seed == 7
        assert first.prompt_token_ids == tokens("<|user|>1+2<eos><|assistant|>")
        [choice] = first.choices
        assert choice.message.content == "12+34" and choice.finish_reason == "stop" and first.weight_version == 0
        assert first.usage.total_tokens == len(first.prompt_token_ids) + len(choice.token_ids)
        engine.version = 3
        second = await chat(client, [*HELLO, choice.message.model_dump(), AND])
        before = first.prompt_token_ids + choice.token_ids
        assert second.prompt_token_ids == before + tokens("<|user|>and?<eos><|assistant|>")
        assert second.retokenized_turns == 0 and second.weight_version == 3
        assert (await chat(client, [*HELLO, assistant("not mine"), AND])).retokenized_turns == 1


@pytest.mark.parametrize(("stream", "text"), [(False, ""), (True, ""), (True, "ok <b>\n")])
@in_loop
async def test_calls_of_tools_come_as_such_behind_their_text_and_are_known_again(stream: bool, text: str):
    async with served(Engine(text + CALL)) as client:
        answer = await chat(client, tools=TOOLS, stream=stream)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        deltas = [chunk.choices[0].delta if stream else chunk.choices[0].message for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == text and (text or len(chunks) == 1)
        [choice], [call] = chunks[-1].choices, deltas[-1].tool_calls
        assert choice.finish_reason == "tool_calls" and deltas[-1].content is None
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1}
        sent = assistant(text or None, tool_calls=[call.model_dump(exclude={"index"})])
        messages = [*HELLO, sent, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        second = await chat(client, messages, tools=TOOLS)
        before = chunks[-1].prompt_token_ids + choice.token_ids
        assert second.prompt_token_ids == before + tokens("<|tool|>3<eos><|assistant|>")
        assert second.retokenized_turns == 0
        sent["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'  # not as it was said
        assert (await chat(client, messages, tools=TOOLS)).retokenized_turns == 1


@in_loop
async def test_text_behind_a_stop_string_is_left_out_and_its_tokens_are_not():
    async with served(Engine("1=2")) as client:
        [choice] = (await chat(client, stop="=", logprobs=True)).choices
        assert choice.message.content == "1" and decode(choice.token_ids) == "1=2"
        assert "".join(token.token for token in choice.logprobs.content) == "1=2"
        assert choice.logprobs.content[0].bytes == [49] and choice.token_logprobs == [-0.5] * 4
        [cut] = (await chat(client, max_tokens=2)).choices
        assert cut.finish_reason == "length" and cut.logprobs is None


@in_loop
async def test_a_stream_sends_tokens_as_they_are_sampled():
    """The client sees no part of a stop string or of a call; the server knows again the text that it has seen."""
    async with served(Engine("1 +=2é==x")) as client:
        usage_too = {"include_usage": True}
        events = await chat(client, logprobs=True, stream=True, stop="==x", stream_options=usage_too)
        *parts, last, usage = [event async for event in events]
        texts = [part.choices[0].delta.content for part in parts]
        assert texts == ["1", " ", "+", "=2", "é"], "an end that may become the stop string is kept back"
        assert last.choices[0].delta.content is None and last.choices[0].finish_reason == "stop"
        seen = [token for part in (*parts, last) for token in part.choices[0].logprobs.content]
        assert [token.logprob for token in seen] == [-0.5] * len(last.choices[0].token_ids)
        assert usage.choices == [] and usage.usage.completion_tokens == len(seen)
        second = await chat(client, [*HELLO, assistant("".join(texts)), AND])
        assert second.retokenized_turns == 0
        assert second.prompt_token_ids[: len(last.prompt_token_ids)] == last.prompt_token_ids


FUNCTION: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_responses_are_the_same_conversation_as_chats(stream: bool):
    engine = Engine("12")

    async def respond(**more: Any) -> Any:
        if not stream:
            return await client.responses.create(model="any", **more)
        async with client.responses.stream(model="any", **more) as events:
            deltas = [event.delta async for event in events if event.type == "response.output_text.delta"]
            response = await events.get_final_response()
        assert "".join(deltas) == response.output_text
        return response

    async with served(engine) as client:
        brief: Any = {"instructions": "be brief"}
        first = await respond(input="1+2", include=["message.output_text.logprobs"], **brief)
        assert first.output_text == "12" and first.status == "completed" and first.usage.output_tokens == 3
        assert [token.logprob for token in first.output[0].content[0].logprobs] == [-0.5] * 3
        same = await chat(client, [{"role": "system", "content": "be brief"}, *HELLO])
        assert same.prompt_token_ids == engine.asked[0].prompt_token_ids
        engine.text = CALL
        again = await respond(input="go", previous_response_id=first.id, tools=[FUNCTION], **brief)
        [call] = again.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
        engine.text = "3"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        items = [*HELLO, *first.output, user("go"), call, result]
        assert (await respond(input=items, tools=[FUNCTION], **brief)).output_text == "3"
        *_, before, after = (request.prompt_token_ids for request in engine.asked)
        assert after == [*before, *spelled(CALL), *tokens("<|tool|>3<eos><|assistant|>")]
        with pytest.raises(openai.NotFoundError, match="no response"):
            await client.responses.create(model="any", input="x", previous_response_id="resp_other")
        with pytest.raises(openai.BadRequestError, match="web_search"):
            await client.responses.create(model="any", input="x", tools=[{"type": "web_search"}])
        engine.text = "1234"
        cut = await client.responses.create(model="any", input="x", max_output_tokens=2)
        assert cut.status == "incomplete" and cut.output_text == "12"


@in_loop
async def test_completions_of_text_and_of_tokens():
    async with served(engine := Engine("ab")) as client:
        of_text: Any = await client.completions.create(model="any", prompt="1+2", n=2, seed=5, logprobs=0)
        of_tokens: Any = await client.completions.create(model="any", prompt=tokens("1+2"), seed=5)
        assert [request.seed for request in engine.asked] == [5, 6, 5]
        assert engine.asked[0].prompt_token_ids == engine.asked[2].prompt_token_ids
        assert of_text.choices[1].text == of_tokens.choices[0].text == "ab"
        assert of_text.choices[0].logprobs.tokens[:2] == ["a", "b"]
        assert of_text.choices[0].logprobs.token_logprobs == [-0.5] * 3
        assert [model.id async for model in client.models.list()] == ["tiny"]
    # OpenAI's service says null for the reason of a text that goes on, and the client's type does not know it.
    async with served(engine, strict=False) as client:
        stream = await client.completions.create(model="any", prompt="1+2", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["a", "b", ""]


AUDIO_AND_IMAGES = {"audio", "modalities", "image"}
OF_THE_SERVICE = {"moderation", "prompt_cache_options", "web_search_options", "access_programs", "context_management"}
STORED = {"conversation", "prompt"}  # elsewhere than in `previous_response_id`
OF_THE_MODEL = {"reasoning_effort", "reasoning", "verbosity", "prediction", "max_tool_calls"}
OLD = {"function_call", "functions"}
KINDS = ((ChatRequest, OfChats), (CompletionRequest, OfTexts), (ResponsesRequest, OfResponses))


@pytest.mark.parametrize(("ours", "theirs"), KINDS)
def test_each_parameter_of_openai_is_known_ignored_or_refused_on_purpose(ours: Any, theirs: Any):
    refused = AUDIO_AND_IMAGES | OF_THE_SERVICE | STORED | OF_THE_MODEL | OLD
    assert set(theirs.__annotations__) - set(ours.model_fields) - IGNORED <= refused


REFUSED: list[tuple[dict[str, Any], str]] = [
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
    ({"messages": [assistant("I")]}, "last message"),
    ({"messages": [user("1" * 500)]}, "max_model_len"),
    ({"tools": [{"name": "add"}]}, "a tool must be"),
]


@pytest.mark.parametrize(("body", "told"), REFUSED)
@in_loop
async def test_what_it_cannot_do_is_refused_by_name(body, told):
    async with served(Engine()) as client:
        with pytest.raises(openai.BadRequestError, match=told):
            await chat(client, **body)


@in_loop
async def test_who_has_no_token_gets_nothing():
    async with served(engine := Engine(), token="secreT") as client:
        for asks in (chat(client), client.models.list()):
            with pytest.raises(openai.AuthenticationError):
                await asks
    assert not engine.asked


@in_loop
async def test_failures_have_the_form_that_clients_know():
    async with served(engine := Engine()) as client:
        engine.failure = RequestFailed("the engine said no")
        for stream in (False, True):  # before anything was sent
            with pytest.raises(openai.InternalServerError, match="the engine said no") as caught:
                await chat(client, stream=stream)
            assert caught.value.status_code == 503
        engine.failure, engine.failure_at_end = None, RequestFailed("was lost")
        with pytest.raises(openai.APIError, match="was lost"):
            assert [chunk.choices[0].delta.content async for chunk in await chat(client, stream=True)] == []
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="any", input="x")
        with pytest.raises(openai.APIStatusError) as too_large:
            await client.completions.create(model="any", prompt="1" * (MAX_BODY_BYTES + 1))
        assert too_large.value.status_code == 413


@in_loop
async def test_a_thousand_connections_keep_no_one_waiting():
    """500 clients never finish their request, and 500 ask at once: all of these are answered."""
    async with served(Engine()) as client:
        slow = [await asyncio.open_connection(client.base_url.host, client.base_url.port) for _ in range(500)]
        for _, writer in slow:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\n")
        headers, connector = {"Authorization": "Bearer secret"}, aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
            ask = partial(session.post, f"{client.base_url}completions", json={"prompt": "1+2", "model": "any"})
            assert [answer.status for answer in await asyncio.gather(*(ask() for _ in range(500)))] == [200] * 500
        for _, writer in slow:
            writer.close()


@in_loop
async def test_requests_outlive_an_engine_and_end_with_the_server():
    first, second, third = FakeReplica(lambda request: None), FakeReplica(), FakeReplica(lambda request: None)
    server = OpenAIServer(settings(), [first])
    async with client_at(f"http://127.0.0.1:{await server.listen()}/v1", "secret") as client:

        def ask(**more: Any) -> asyncio.Task[Any]:
            return asyncio.create_task(client.completions.create(model="tiny", prompt="1+2", **more))

        waiting = ask(seed=1)
        while not first.asked:
            await asyncio.sleep(0.01)
        first.die()
        await server.set_generation_workers([second])
        assert (await waiting).choices[0].finish_reason == "stop"
        assert second.asked[0].prompt_token_ids == tokens("1+2") and second.asked[0].seed == 1

        await server.set_generation_workers([third])
        late = ask(n=3)
        while len(third.under_way) < 3:
            await asyncio.sleep(0.01)
        server.answers.ended.set()
        for request in (late, ask()):
            with pytest.raises(openai.InternalServerError, match="the run has ended"):
                await request
        await server.stop()
        assert not third.under_way, "the engine samples for nobody"
        with pytest.raises(openai.APIConnectionError):
            await client.models.list()
