"""The process of the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from nemo_rl.rollouts.engine_client import Engines, RequestFailed
from nemo_rl.rollouts.serve.requests import (
    CHAT,
    COMPLETION,
    Asked,
    CallsOf,
    RequestError,
    answer_message,
    asked,
    chat_logprobs,
    check_keys,
    completion_logprobs,
    messages_of,
    tools_of,
    without_stop,
)
from nemo_rl.types import Completion, GenerateFn, SamplingParams

# -- The engines behind an OpenAI-compatible server, for agents that are programs of their own.
#
#     GET  /v1/models
#     POST /v1/completions         `prompt`: text, or token ids
#     POST /v1/chat/completions    `messages`, `tools`
#
# https://platform.openai.com/docs/api-reference/chat/create. Beside what that document has, an answer has
# `prompt_token_ids`, each choice `token_ids` and `token_logprobs` (end of the turn included), which are what training
# needs, and `weight_version` says which weights the answer was begun with. Every request needs the token:
# `Authorization: Bearer <token>`.

MAX_BODY_BYTES = 16 << 20


class ServedPrompt(Protocol):
    """See `data/served_chat.py`."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def retokenized(self) -> int: ...


class Conversations(Protocol):
    """Messages as token ids, with sampled turns as they were sampled."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> ServedPrompt: ...
    def remember(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        answer: Mapping[str, Any],
        token_ids: Sequence[int],
        retokenized: int,
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the server offers."""

    model: str
    sampling: SamplingParams  # where a request says nothing else
    generate: GenerateFn
    generation_failures: tuple[type[Exception], ...]  # what `generate` raises when an engine cannot answer
    chat: Conversations
    calls_of: CallsOf | None  # None: calls of tools stay text
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    max_model_len: int


class OpenAIApp:
    """`app` answers until `close`; then what is under way, and what still comes, is told that the run has ended."""

    def __init__(self, served: Served, token: str) -> None:
        self.served = served
        self._token = token.encode()
        self._closed = asyncio.Event()
        self.app = web.Application(middlewares=[self._guard()], client_max_size=MAX_BODY_BYTES)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/completions", self._completions)
        self.app.router.add_post("/v1/chat/completions", self._chat)

    def close(self) -> None:
        self._closed.set()

    def _guard(self) -> Any:
        @web.middleware
        async def guard(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not secrets.compare_digest(given.encode(errors="surrogateescape"), self._token):
                return _error("a token is needed: Authorization: Bearer <token>", 401)
            try:
                return await handler(request)
            except RequestError as error:
                return _error(str(error), error.status)
            except self.served.generation_failures as error:
                return _error(str(error), 503)
            except web.HTTPException as error:  # no such path, a body that is too large
                return _error(f"{error.reason}: {request.method} {request.path}", error.status)

        return guard

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.served.model,
            "object": "model",
            "created": 0,
            "owned_by": "nemo_rl",
            "max_model_len": self.served.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = check_keys(await _json_object(request), COMPLETION)
        token_ids = self._prompt(body.get("prompt"))
        wanted = asked(body, self.served.sampling, self._room(token_ids))
        completions = await self._sample(token_ids, wanted)
        choices = [
            {
                "index": index,
                "text": self._text(completion, wanted),
                "finish_reason": completion.stop_reason.value,
                "logprobs": completion_logprobs(completion, self.served.decode) if wanted.logprobs else None,
                **_tokens(completion),
            }
            for index, completion in enumerate(completions)
        ]
        answer = self._answer("text_completion", token_ids, completions, choices)
        return await _streamed(request, answer) if wanted.stream else web.json_response(answer)

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str) and prompt:
            return self.served.encode(prompt)
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            if not all(0 <= token < self.served.vocab_size for token in prompt):
                raise RequestError(f"token ids must be from 0 to {self.served.vocab_size - 1}")
            return list(prompt)
        raise RequestError("prompt must be a text or a list of token ids; send several prompts as several requests")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = check_keys(await _json_object(request), CHAT)
        messages, tools = messages_of(body), tools_of(body)
        try:
            prompt = self.served.chat.prompt(messages, tools)
        except ValueError as error:
            raise RequestError(str(error)) from error
        wanted = asked(body, self.served.sampling, self._room(prompt.token_ids))
        completions = await self._sample(prompt.token_ids, wanted)
        calls_of = self.served.calls_of if tools and body.get("tool_choice") != "none" else None
        choices = []
        for index, completion in enumerate(completions):
            message = answer_message(self._text(completion, wanted), calls_of)
            self.served.chat.remember(
                messages, tools, message, [*prompt.token_ids, *completion.token_ids], prompt.retokenized
            )
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "finish_reason": "tool_calls" if "tool_calls" in message else completion.stop_reason.value,
                    "logprobs": chat_logprobs(completion, self.served.decode) if wanted.logprobs else None,
                    **_tokens(completion),
                }
            )
        answer = self._answer("chat.completion", prompt.token_ids, completions, choices)
        answer["retokenized_turns"] = prompt.retokenized
        return await _streamed(request, answer) if wanted.stream else web.json_response(answer)

    def _room(self, token_ids: Sequence[int]) -> int:
        room = self.served.max_model_len - len(token_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens and leaves no room for an answer: max_model_len is "
                f"{self.served.max_model_len}"
            )
        return room

    def _text(self, completion: Completion, wanted: Asked) -> str:
        return without_stop(self.served.decode(completion.token_ids), completion, wanted.sampling.stop_strings)

    async def _sample(self, token_ids: list[int], wanted: Asked) -> list[Completion]:
        tasks = [
            asyncio.ensure_future(self.served.generate(token_ids, wanted.sampling, wanted.seed + i))
            for i in range(wanted.num_choices)
        ]
        sampled = asyncio.gather(*tasks)
        closed = asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait([sampled, closed], return_when=asyncio.FIRST_COMPLETED)
            if not sampled.done():
                raise RequestError("the run has ended", 503)
            return sampled.result()
        finally:  # also when the client is gone: the engine stops sampling
            closed.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(sampled, *tasks, return_exceptions=True)

    def _answer(
        self, kind: str, token_ids: Sequence[int], completions: Sequence[Completion], choices: list[dict[str, Any]]
    ) -> dict[str, Any]:
        num_sampled = sum(len(completion.token_ids) for completion in completions)
        return {
            "id": f"{kind}-{secrets.token_hex(8)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.served.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": len(token_ids),
                "completion_tokens": num_sampled,
                "total_tokens": len(token_ids) + num_sampled,
            },
            "prompt_token_ids": list(token_ids),
            "weight_version": min(completion.weight_version for completion in completions),
        }


def _tokens(completion: Completion) -> dict[str, Any]:
    return {"token_ids": completion.token_ids, "token_logprobs": completion.logprobs}


async def _json_object(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


async def _streamed(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    """The whole answer as one server-sent event: an engine's tokens come together."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for choice in answer["choices"]:
        if "message" in choice:
            choice["delta"] = choice.pop("message")
            for index, call in enumerate(choice["delta"].get("tool_calls", ())):
                call["index"] = index
    chunk = {**answer, "object": answer["object"].replace("chat.completion", "chat.completion.chunk")}
    await response.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
    await response.write_eof()
    return response


def _error(text: str, status: int) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": text, "type": kind, "code": status}}, status=status)


ASKER = "openai-server"
_LAST_WORDS_S = 3.0  # for answers on their way when the server ends


@dataclass(frozen=True, kw_only=True)
class OpenAIServerSettings:
    """What a server is built from; everything in it pickles."""

    host: str
    port: int  # 0: any that is free
    token: str
    model: str  # its name
    sampling: SamplingParams  # where a request says nothing else
    make_chat: Callable[[], Conversations]  # called inside the worker
    calls_of: CallsOf | None
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    max_model_len: int
    engine_timeout_s: float

    def __repr__(self) -> str:
        return f"OpenAIServerSettings(host={self.host!r}, port={self.port})"  # without the token


class OpenAIServer:
    """Answers requests from outside with the engines that also play the run's episodes. A plain class.

    While weights are updated, requests wait and go on; when an engine died, they wait for the new ones.
    """

    def __init__(self, settings: OpenAIServerSettings, generation_workers: Sequence[Any]) -> None:
        self.settings = settings
        self.engines = Engines(settings.engine_timeout_s, asker=ASKER)
        self.engines.replace(generation_workers)
        self.served = Served(
            model=settings.model,
            sampling=settings.sampling,
            generate=self.engines.generate,
            generation_failures=(RequestFailed,),
            chat=settings.make_chat(),
            calls_of=settings.calls_of,
            encode=settings.encode,
            decode=settings.decode,
            vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
        )
        self._app: OpenAIApp | None = None
        self._runner: web.AppRunner | None = None

    async def listen(self) -> int:
        """Begin to answer; returns the port. Raises OSError where the port cannot be had."""
        self._app = OpenAIApp(self.served, self.settings.token)
        # A client that went away is not sampled for.
        self._runner = web.AppRunner(
            self._app.app, access_log=None, handler_cancellation=True, shutdown_timeout=_LAST_WORDS_S
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.settings.host, self.settings.port).start()
        return int(self._runner.addresses[0][1])

    async def set_generation_workers(self, workers: Sequence[Any]) -> None:
        """Actor handles of the engine replicas; called again after one was restarted."""
        self.engines.replace(workers)

    async def stop(self) -> None:
        """Answer what is under way with 503, and listen no more."""
        if self._app is not None and self._runner is not None:
            self._app.close()
            await self._runner.cleanup()
