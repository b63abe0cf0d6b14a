"""An OpenAI-compatible server over the engines of a run, for agents that are separate programs.

    GET  /v1/models
    POST /v1/completions         `prompt`: text, or token ids
    POST /v1/chat/completions    `messages`, `tools`

https://platform.openai.com/docs/api-reference/chat/create. In addition, an answer has `prompt_token_ids` and
`weight_version` (the weights with which it was begun), and each choice `token_ids` and `token_logprobs` with the end of
the turn included, which training needs. Every request must carry `Authorization: Bearer <token>`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar

from aiohttp import web
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from nemo_rl.rollouts.engine_client import Engines, RequestFailed
from nemo_rl.types import Completion, SamplingParams, StopReason

CLIENT_ID = "openai-server"
MAX_BODY_BYTES = 16 << 20
_SHUTDOWN_TIMEOUT_S = 3.0  # for answers that are being sent when the server stops


class Chat(Protocol):
    """Converts messages to token ids. Sampled turns keep their sampled tokens; see `data/chat/served.py`."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> Any: ...  # `token_ids`, `retokenized`
    def remember(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        answer: Mapping[str, Any],
        token_ids: Sequence[int],
        retokenized: int,
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """The model and tokenizer behind the answers. All of them can be pickled."""

    model: str  # its name
    make_chat: Callable[[], Chat]  # called inside the worker
    calls_of: Callable[[str], Sequence[Any]] | None  # the calls (`code/tools.py`) in a text; None: they stay text
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class OpenAIServerSettings:
    """Settings of a server. All of them can be pickled."""

    host: str
    port: int  # 0: any free port
    token: str
    sampling: SamplingParams  # defaults of requests
    answers: AnswerSettings
    engine_timeout_s: float

    def __repr__(self) -> str:
        return f"OpenAIServerSettings(host={self.host!r}, port={self.port})"  # without the token


# -- requests


class RequestError(ValueError):
    """A request that cannot be answered; `status` is the HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def _checked_message(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ValueError("a message needs a role and a content")
    return message


def _checked_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('a tool must be {"type": "function", "function": {"name": ...}}')
    return tool


# Parameters without effect here: they describe the client, or ask for what every answer has.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options"}

NonEmpty = Annotated[str, Field(min_length=1)]
Zero = Annotated[float, Field(ge=0, le=0)]


class SamplingRequest(BaseModel):
    """Parameters of both kinds of requests. A parameter that is null counts as not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: Any = None
    logprobs: Any = False
    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=1e-6, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31)
    stop: NonEmpty | Annotated[list[NonEmpty], Field(max_length=16)] | None = None
    seed: int = Field(default_factory=lambda: secrets.randbits(62), ge=0, le=2**62)  # of the first choice
    stream: bool = False

    # Parameters that are supported only with the value that changes nothing.
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    logit_bias: dict[str, Any] = Field(default_factory=dict, max_length=0)
    response_format: dict[Literal["type"], Literal["text"]] = Field(default_factory=dict)
    parallel_tool_calls: Literal[True] = True
    top_logprobs: Zero = 0
    echo: Literal[False] = False
    best_of: int = Field(default=1, ge=1, le=1)
    suffix: str = Field(default="", max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {key: value for key, value in body.items() if value is not None and key not in _IGNORED}

    def sampling(self, default: SamplingParams, room: int) -> SamplingParams:
        """Sampling parameters; `room` is the number of tokens that fit after the prompt."""
        floats = {"temperature": self.temperature, "top_p": self.top_p}
        given: dict[str, Any] = {name: float(value) for name, value in floats.items() if value is not None}
        if self.top_k is not None:
            given["top_k"] = self.top_k if self.top_k > 0 else None
        if self.stop is not None:
            given["stop_strings"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        max_tokens = self.max_tokens if self.max_tokens is not None else default.max_new_tokens
        return replace(default, max_new_tokens=min(max_tokens, room), **given)


class CompletionRequest(SamplingRequest):
    """The body of `/v1/completions`."""

    prompt: Any = None
    logprobs: Annotated[int, Field(ge=0, le=0)] | Literal[False] = False  # of the sampled tokens only


class ChatRequest(SamplingRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[Annotated[dict[str, Any], AfterValidator(_checked_message)]] = Field(min_length=1)
    tools: list[Annotated[dict[str, Any], AfterValidator(_checked_tool)]] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"  # nothing can force the model to call a tool
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31)
    logprobs: bool = False  # of the sampled tokens only

    def sampling(self, default: SamplingParams, room: int) -> SamplingParams:
        sampling = super().sampling(default, room)
        if self.max_completion_tokens is None:
            return sampling
        return replace(sampling, max_new_tokens=min(self.max_completion_tokens, room))


R = TypeVar("R", bound=SamplingRequest)


def parse_request(kind: type[R], body: bytes) -> R:
    """Parse a JSON body. Raises RequestError, which names every wrong parameter."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    unknown = sorted(str(item["loc"][0]) for item in errors if item["type"] == "extra_forbidden")
    if unknown:
        supported = ", ".join(sorted(kind.model_fields))
        raise RequestError(f"not supported: {', '.join(unknown)}; supported: {supported}")
    raise RequestError(
        "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'body'}={item['input']!r:.200}: {item['msg']}" for item in errors
        )
    )


# -- answers


OnAnswer = Callable[[str, Completion, list[dict[str, Any]]], None]
"""(id of the answer, a completion in it, the conversation with the answer's message): called for each choice."""


class Answers:
    """Answers the requests for completions that one client, or all clients of a server, send.

    `chat` has the tokens of earlier turns, `generate` samples, `sampling` are defaults. After `ended` is set, requests
    in flight and later ones raise RequestError. `shows_tokens`: answers have token ids, which training needs.
    """

    def __init__(
        self,
        settings: AnswerSettings,
        *,
        chat: Chat,
        generate: Callable[[Sequence[int], SamplingParams, int], Awaitable[Completion]],
        sampling: SamplingParams,
        ended: asyncio.Event,
        shows_tokens: bool,
        on_answer: OnAnswer | None = None,
    ) -> None:
        self.settings = settings
        self.chat = chat
        self.generate = generate
        self.sampling = sampling
        self.shows_tokens = shows_tokens
        self._on_answer = on_answer
        self._ended = ended

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "nemo_rl"}
        model["max_model_len"] = self.settings.max_model_len
        return web.json_response({"object": "list", "data": [model]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        wanted = parse_request(CompletionRequest, await request.read())

        def choice(completion: Completion, text: str) -> dict[str, Any]:
            tokens = [self.settings.decode([token_id]) for token_id in completion.token_ids]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": completion.logprobs,
                "text_offset": [0, *itertools.accumulate(map(len, tokens))][:-1],
                "top_logprobs": None,
            }
            return {"text": text, "finish_reason": completion.stop_reason.value, "logprobs": logprobs}

        token_ids = self._prompt(wanted.prompt)
        asked = {"role": "user", "content": self.settings.decode(token_ids)}
        return await self._respond(request, wanted, "text_completion", token_ids, choice, [asked])

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str) and prompt:
            return self.settings.encode(prompt)
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            if not all(0 <= token < self.settings.vocab_size for token in prompt):
                raise RequestError(f"token ids must be from 0 to {self.settings.vocab_size - 1}")
            return list(prompt)
        raise RequestError("prompt must be a text or a list of token ids; send several prompts as several requests")

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        wanted = parse_request(ChatRequest, await request.read())
        tools = wanted.tools or None
        try:
            prompt = self.chat.prompt(wanted.messages, tools)
        except ValueError as error:
            raise RequestError(str(error)) from error
        calls_of = self.settings.calls_of if tools and wanted.tool_choice != "none" else None

        def choice(completion: Completion, text: str) -> dict[str, Any]:
            message = answer_message(text, calls_of(text) if calls_of is not None else [])
            token_ids = [*prompt.token_ids, *completion.token_ids]
            self.chat.remember(wanted.messages, tools, message, token_ids, prompt.retokenized)
            logprobs = []
            for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
                token = self.settings.decode([token_id])
                as_bytes = None if "\ufffd" in token else list(token.encode())  # None for a part of a character
                logprobs.append({"token": token, "logprob": logprob, "bytes": as_bytes, "top_logprobs": []})
            return {
                "message": message,
                "finish_reason": "tool_calls" if "tool_calls" in message else completion.stop_reason.value,
                "logprobs": {"content": logprobs, "refusal": None},
            }

        more = {"retokenized_turns": prompt.retokenized}
        return await self._respond(request, wanted, "chat.completion", prompt.token_ids, choice, wanted.messages, more)

    async def _respond(
        self,
        request: web.Request,
        wanted: SamplingRequest,
        kind: str,
        token_ids: list[int],
        choice: Callable[[Completion, str], dict[str, Any]],
        messages: Sequence[dict[str, Any]],
        more: Mapping[str, Any] | None = None,
    ) -> web.StreamResponse:
        """Sample and answer. `choice` makes a choice from a completion and its text; `more` extends the answer."""
        room = self.settings.max_model_len - len(token_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens and leaves no room for an answer: max_model_len is "
                f"{self.settings.max_model_len}"
            )
        sampling = wanted.sampling(self.sampling, room)
        completions = await self._sample(token_ids, sampling, wanted.seed, wanted.n)
        choices, answer_id = [], f"{kind}-{secrets.token_hex(8)}"
        for index, completion in enumerate(completions):
            own = {"index": index, **choice(completion, self._text(completion, sampling))}
            if wanted.logprobs is False:
                own["logprobs"] = None
            if self._on_answer is not None:
                said = own["message"] if "message" in own else {"role": "assistant", "content": own["text"]}
                self._on_answer(answer_id, completion, [*messages, said])
            if self.shows_tokens:
                own |= {"token_ids": completion.token_ids, "token_logprobs": completion.logprobs}
            choices.append(own)
        num_sampled = sum(len(completion.token_ids) for completion in completions)
        usage = {"prompt_tokens": len(token_ids), "completion_tokens": num_sampled}
        answer = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.settings.model,
            "choices": choices,
            "usage": usage | {"total_tokens": len(token_ids) + num_sampled},
            "weight_version": min(completion.weight_version for completion in completions),
            **(more or {}),
        }
        if self.shows_tokens:
            answer["prompt_token_ids"] = token_ids
        return await _streamed(request, answer) if wanted.stream else web.json_response(answer)

    def _text(self, completion: Completion, sampling: SamplingParams) -> str:
        """The text before the stop string. The tokens keep it."""
        text = self.settings.decode(completion.token_ids)
        if completion.stop_reason is not StopReason.STOP:
            return text
        return text[: min((at for stop in sampling.stop_strings if (at := text.find(stop)) >= 0), default=len(text))]

    async def _sample(self, token_ids: list[int], sampling: SamplingParams, seed: int, num: int) -> list[Completion]:
        tasks = [asyncio.ensure_future(self.generate(token_ids, sampling, seed + i)) for i in range(num)]
        sampled = asyncio.gather(*tasks)
        closed = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait([sampled, closed], return_when=asyncio.FIRST_COMPLETED)
            if not sampled.done():
                raise RequestError("the run has ended", 503)
            return sampled.result()
        finally:  # also if the client disconnected: the engine stops sampling
            closed.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(sampled, *tasks, return_exceptions=True)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's answer; its errors in the form that OpenAI's clients know."""
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(str(error), error.status)
    except RequestFailed as error:
        return error_response(str(error), 503)
    except web.HTTPException as error:  # unknown path, body too large
        return error_response(f"{error.reason}: {request.method} {request.path}", error.status)


def has_token(request: web.Request, token: str) -> bool:
    """Whether a request carries `Authorization: Bearer <token>`."""
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return secrets.compare_digest(given.encode(errors="surrogateescape"), token.encode())


class OpenAIServer:
    """The server's process: answers external requests with the engines that also play the run's episodes.

    Requests wait during a weight update, and for new engines after the death of an engine. After `close`, requests in
    flight and later ones are answered with status 503.
    """

    def __init__(self, settings: OpenAIServerSettings, generation_workers: Sequence[Any]) -> None:
        self.settings = settings
        self.engines = Engines(settings.engine_timeout_s, client_id=CLIENT_ID)
        self.engines.replace(generation_workers)
        self._closed = asyncio.Event()
        self.answers = Answers(
            settings.answers,
            chat=settings.answers.make_chat(),
            generate=self.engines.generate,
            sampling=settings.sampling,
            ended=self._closed,
            shows_tokens=True,
        )
        self.app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        self.app.router.add_get("/v1/models", self.answers.models)
        self.app.router.add_post("/v1/completions", self.answers.completions)
        self.app.router.add_post("/v1/chat/completions", self.answers.chat_completions)
        # With handler_cancellation, sampling stops when the client disconnects.
        self._runner = web.AppRunner(
            self.app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_TIMEOUT_S
        )

    async def listen(self) -> int:
        """Start to answer. Returns the port. Raises OSError if the address is not available."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self.settings.host, self.settings.port).start()
        return int(self._runner.addresses[0][1])

    async def set_generation_workers(self, workers: Sequence[Any]) -> None:
        """Set the actor handles of the engine replicas, after a replica was restarted."""
        self.engines.replace(workers)

    async def stop(self) -> None:
        """Close and stop listening."""
        self.close()
        await self._runner.cleanup()

    def close(self) -> None:
        self._closed.set()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not has_token(request, self.settings.token):
            return error_response("a token is needed: Authorization: Bearer <token>", 401)
        return await guarded(request, handler)


def answer_message(text: str, calls: Sequence[Any]) -> dict[str, Any]:
    """The assistant's message, with `tool_calls` for the calls. If one of them cannot be made, all stay text."""
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}
    before, mark, _ = text.partition("<tool_call>")
    functions = [{"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)} for call in calls]
    return {
        "role": "assistant",
        "content": (mark and before.strip()) or None,
        "tool_calls": [
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function} for function in functions
        ],
    }


async def _streamed(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    """The whole answer as one server-sent event, because an engine returns all tokens at once."""
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


def error_response(text: str, status: int) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": text, "type": kind, "code": status}}, status=status)
