"""An OpenAI-compatible server over the engines of a run, for agents that are separate programs.

    GET  /v1/models
    POST /v1/completions         `prompt`: text, or token ids
    POST /v1/chat/completions    `messages`, `tools`
    POST /v1/responses           `input`, `tools`

https://platform.openai.com/docs/api-reference/chat/create. In addition, an answer has `prompt_token_ids` and
`weight_version` (the weights with which it was begun), and each choice `token_ids` and `token_logprobs` with the end of
the turn included, which training needs. With `stream`, text comes as it is sampled. Every request must carry
`Authorization: Bearer <token>`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from nemo_rl.rollouts.engine_client import Engines, RequestFailed
from nemo_rl.rollouts.openai_forms import (
    CALL_MARKS,
    LOGPROBS,
    Answer,
    ChatForm,
    ChatRequest,
    Choice,
    CompletionForm,
    CompletionRequest,
    Conversations,
    Event,
    Form,
    RequestError,
    ResponseForm,
    ResponsesRequest,
    SamplingRequest,
    TextStream,
    TokenText,
    as_server_sent,
    parse_request,
)
from nemo_rl.types import Completion, GenerateFn, GenerationRequest, OnTokens, SampledTokens, SamplingParams, StopReason

CLIENT_ID = "openai-server"
MAX_BODY_BYTES = 16 << 20
_SHUTDOWN_TIMEOUT_S = 3.0  # for answers that are being sent when the server stops

Messages = Sequence[Mapping[str, Any]]


class Chat(Protocol):
    """Converts messages to token ids. Sampled turns keep their sampled tokens; see `data/chat/served.py`."""

    def prompt(self, messages: Messages, tools: Any) -> Any: ...  # `token_ids`, `retokenized`
    def remember(
        self, messages: Messages, tools: Any, answer: Mapping[str, Any], token_ids: Sequence[int], retokenized: int
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


# -- answers


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OnAnswer = Callable[[str, Completion, list[dict[str, Any]]], None]
"""(id of the answer, a completion in it, the conversation with the answer's message): called for each choice."""


@dataclass(eq=False, kw_only=True)
class Answers:
    """Answers the requests for completions that one client, or all clients of a server, send.

    `generate` samples, `sampling` has the defaults. After `ended` is set, requests in flight and later ones raise
    RequestError(*why_ended). `shows_tokens`: answers have token ids, which training needs.
    """

    settings: AnswerSettings
    generate: GenerateFn
    sampling: SamplingParams
    ended: asyncio.Event
    why_ended: tuple[str, int] = ("the run has ended", 503)  # text and HTTP status
    shows_tokens: bool
    on_answer: OnAnswer | None = None
    conversations: Conversations = field(default_factory=Conversations, init=False)

    def __post_init__(self) -> None:
        self.chat = self.settings.make_chat()  # has the tokens of earlier turns

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "nemo_rl"}
        model["max_model_len"] = self.settings.max_model_len
        return web.json_response({"object": "list", "data": [model]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        wanted = parse_request(CompletionRequest, await request.read())
        token_ids = self._prompt(wanted.prompt)
        form = CompletionForm(
            model=self.settings.model, shows_tokens=self.shows_tokens, streams_usage=wanted.streams_usage
        )
        asked = {"role": "user", "content": self.settings.decode(token_ids)}
        question = _Question(token_ids=token_ids, messages=[asked], logprobs=wanted.logprobs is not False)
        return await self._respond(request, wanted, question, form)

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
        question = self._chat(wanted.messages, wanted.tools, wanted.tool_choice, logprobs=wanted.logprobs)
        form = ChatForm(model=self.settings.model, shows_tokens=self.shows_tokens, streams_usage=wanted.streams_usage)
        return await self._respond(request, wanted, question, form)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        wanted = parse_request(ResponsesRequest, await request.read())
        before, messages = self.conversations.messages(wanted)
        question = self._chat(messages, wanted.chat_tools(), wanted.tool_choice, logprobs=LOGPROBS in wanted.include)
        form = ResponseForm(model=self.settings.model, wanted=wanted)

        def remember(message: dict[str, Any]) -> None:
            self.conversations.remember(form.answer_id, [*before, message])

        return await self._respond(request, wanted, question, form, remember)

    def _chat(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]], tool_choice: str, *, logprobs: bool
    ) -> _Question:
        try:
            prompt = self.chat.prompt(messages, tools or None)
        except ValueError as error:
            raise RequestError(str(error)) from error
        return _Question(
            token_ids=prompt.token_ids,
            messages=messages,
            tools=tools or None,
            retokenized=prompt.retokenized,
            calls_of=self.settings.calls_of if tools and tool_choice != "none" else None,
            logprobs=logprobs,
        )

    async def _respond(
        self,
        request: web.Request,
        wanted: SamplingRequest,
        question: _Question,
        form: Form,
        remember: Callable[[dict[str, Any]], None] | None = None,
    ) -> web.StreamResponse:
        """Sample and answer. `remember` gets the message of each choice."""
        room = self.settings.max_model_len - len(question.token_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(question.token_ids)} tokens and leaves no room for an answer: max_model_len is "
                f"{self.settings.max_model_len}"
            )
        sampling = wanted.sampling(self.sampling, room)
        holds = (*sampling.stop_strings, *(CALL_MARKS if question.calls_of is not None else ()))
        streams = [TextStream(self.settings.decode, holds) for _ in range(wanted.n)]

        def answer(completions: Sequence[Completion]) -> Answer:
            choices = [
                self._choice(question, completion, sampling, stream)
                for completion, stream in zip(completions, streams, strict=True)
            ]
            for choice in choices:
                if question.retokenized is not None:
                    token_ids = [*question.token_ids, *choice.completion.token_ids]
                    self.chat.remember(
                        question.messages, question.tools, choice.message, token_ids, question.retokenized
                    )
                if remember is not None:
                    remember(choice.message)
                if self.on_answer is not None:
                    self.on_answer(form.answer_id, choice.completion, [*question.messages, choice.message])
            more: dict[str, Any] = {"weight_version": min(c.weight_version for c in completions)}
            if question.retokenized is not None:
                more["retokenized_turns"] = question.retokenized
            if self.shows_tokens:
                more["prompt_token_ids"] = question.token_ids
            return Answer(choices=choices, num_prompt_tokens=len(question.token_ids), more=more)

        sample = partial(self._sample, question.token_ids, sampling, wanted.seed, wanted.n)
        if wanted.stream:
            return await self._stream(request, question, form, streams, sample, answer)
        return web.json_response(form.whole(answer(await sample())))

    def _choice(
        self, question: _Question, completion: Completion, sampling: SamplingParams, stream: TextStream
    ) -> Choice:
        text = self._text(completion, sampling)
        calls = question.calls_of(text) if question.calls_of is not None else []
        message = answer_message(text, calls)
        if stream.num_tokens and "tool_calls" in message:
            message["content"] = stream.sent or None  # as the client has read it, white space included
        unsent = stream.rest(message["content"] or "")
        if stream.num_tokens:
            message["content"] = stream.sent or message["content"]
        sent = stream.num_tokens - len(stream.waiting)
        rest = zip(completion.token_ids[sent:], completion.logprobs[sent:], strict=True)
        tokens = self._token_texts(rest) if question.logprobs else None
        return Choice(completion=completion, message=message, unsent=unsent, tokens=tokens)

    def _token_texts(self, tokens: Iterable[tuple[int, float]]) -> list[TokenText]:
        return [TokenText(text=self.settings.decode([token_id]), logprob=logprob) for token_id, logprob in tokens]

    def _text(self, completion: Completion, sampling: SamplingParams) -> str:
        """The text before the stop string. The tokens keep it."""
        text = self.settings.decode(completion.token_ids)
        if completion.stop_reason is not StopReason.STOP:
            return text
        return text[: min((at for stop in sampling.stop_strings if (at := text.find(stop)) >= 0), default=len(text))]

    async def _sample(
        self,
        token_ids: list[int],
        sampling: SamplingParams,
        seed: int,
        num: int,
        on_tokens: Sequence[OnTokens] | None = None,
    ) -> list[Completion]:
        """Complete a prompt `num` times; `on_tokens` has a function for each."""
        requests = [GenerationRequest(prompt_token_ids=token_ids, sampling=sampling, seed=seed + i) for i in range(num)]
        tasks = [
            asyncio.ensure_future(self.generate(request, send))
            for request, send in zip(requests, on_tokens or [None] * num, strict=True)
        ]
        sampled = asyncio.gather(*tasks)
        closed = asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait([sampled, closed], return_when=asyncio.FIRST_COMPLETED)
            if not sampled.done():
                raise RequestError(*self.why_ended)
            return sampled.result()
        finally:  # also if the client disconnected: the engine stops sampling
            closed.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(sampled, *tasks, return_exceptions=True)

    async def _stream(
        self,
        request: web.Request,
        question: _Question,
        form: Form,
        streams: Sequence[TextStream],
        sample: Callable[..., Awaitable[list[Completion]]],
        answer: Callable[[Sequence[Completion]], Answer],
    ) -> web.StreamResponse:
        """Send tokens as server-sent events while they are sampled. An error before the first has its HTTP status."""
        come: asyncio.Queue[tuple[int, SampledTokens] | None] = asyncio.Queue()
        on_tokens = [lambda tokens, index=index: come.put_nowait((index, tokens)) for index in range(len(streams))]
        sampling = asyncio.ensure_future(sample(on_tokens))
        sampling.add_done_callback(lambda _: come.put_nowait(None))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def send(events: Iterable[Event]) -> None:
            if not response.prepared:
                await response.prepare(request)
                events = itertools.chain(form.begin(), events)
            for event in events:
                await response.write(as_server_sent(event, named=form.names_events))

        try:
            while (part := await come.get()) is not None:
                index, (token_ids, logprobs) = part
                stream = streams[index]
                stream.waiting += zip(token_ids, logprobs, strict=True)
                if text := stream.add(token_ids):
                    tokens = self._token_texts(stream.waiting) if question.logprobs else None
                    stream.waiting = []
                    await send(form.delta(index, text, tokens))
            await send(form.end(answer(await sampling)))
        except (RequestError, RequestFailed) as error:
            if not response.prepared:
                raise
            failure = {"error": {"message": str(error), "type": "server_error", "code": 503}}
            await response.write(as_server_sent(failure, named=False))
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        if not form.names_events:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


@dataclass(frozen=True, kw_only=True)
class _Question:
    """The question of a request."""

    token_ids: list[int]
    messages: Sequence[dict[str, Any]]
    logprobs: bool  # are wanted
    tools: list[dict[str, Any]] | None = None
    retokenized: int | None = None  # earlier answers of the chat that were tokenised again; None: it is no chat
    calls_of: Callable[[str], Sequence[Any]] | None = None


class WebServer(ABC):
    """An HTTP server in the event loop of its process. Errors have the form that OpenAI's clients know."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port  # 0: any free port
        self.app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        # With handler_cancellation, sampling stops when the client disconnects.
        self._runner = web.AppRunner(
            self.app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_TIMEOUT_S
        )

    @abstractmethod
    async def admit(self, request: web.Request) -> None:
        """RequestError if the request is not to be answered."""

    async def _start(self) -> tuple[str, int]:
        """Start to answer. Returns address and port. Raises OSError if the address is not available."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        return self._runner.addresses[0][:2]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            await self.admit(request)
            return await handler(request)
        except RequestError as error:
            text, status = str(error), error.status
        except RequestFailed as error:
            text, status = str(error), 503
        except web.HTTPException as error:  # unknown path, body too large
            text, status = f"{error.reason}: {request.method} {request.path}", error.status
        kind = "invalid_request_error" if status < 500 else "server_error"
        return web.json_response({"error": {"message": text, "type": kind, "code": status}}, status=status)


class OpenAIServer(WebServer):
    """The server's process: answers external requests with the engines that also play the run's episodes.

    Requests wait during a weight update, and for new engines after the death of an engine. `stop` answers those in
    flight with status 503.
    """

    def __init__(self, settings: OpenAIServerSettings, generation_workers: Sequence[Any]) -> None:
        super().__init__(settings.host, settings.port)
        self._token = settings.token
        self.engines = Engines(settings.engine_timeout_s, client_id=CLIENT_ID)
        self.engines.replace(generation_workers)
        self.answers = Answers(
            settings=settings.answers,
            generate=self.engines.generate,
            sampling=settings.sampling,
            ended=asyncio.Event(),
            shows_tokens=True,
        )
        add_routes(self.app.router, "", lambda request: self.answers)

    async def listen(self) -> int:
        """Start to answer. Returns the port. Raises OSError if the address is not available."""
        return (await self._start())[1]

    async def set_generation_workers(self, workers: Sequence[Any]) -> None:
        """Set the actor handles of the engine replicas, after a replica was restarted."""
        self.engines.replace(workers)

    async def stop(self) -> None:
        """Tell waiting clients that the run has ended, and stop listening."""
        self.answers.ended.set()
        await self._runner.cleanup()

    async def admit(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(errors="surrogateescape"), self._token.encode()):
            raise RequestError("a token is needed: Authorization: Bearer <token>", 401)


def add_routes(router: web.UrlDispatcher, prefix: str, answers: Callable[[web.Request], Answers]) -> None:
    """Answer the requests below `<prefix>/v1`, each by the `answers` of its request."""
    router.add_get(f"{prefix}/v1/models", lambda request: answers(request).models(request))
    router.add_post(f"{prefix}/v1/completions", lambda request: answers(request).completions(request))
    router.add_post(f"{prefix}/v1/chat/completions", lambda request: answers(request).chat_completions(request))
    router.add_post(f"{prefix}/v1/responses", lambda request: answers(request).responses(request))


def answer_message(text: str, calls: Sequence[Any]) -> dict[str, Any]:
    """The assistant's message, with `tool_calls` for the calls. If one of them cannot be made, all stay text."""
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}
    before, mark, _ = text.partition(CALL_MARKS[0])
    functions = [{"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)} for call in calls]
    return {
        "role": "assistant",
        "content": (mark and before.strip()) or None,
        "tool_calls": [
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function} for function in functions
        ],
    }
