"""Requests of the OpenAI-compatible server, and answers as clients get them: whole, or as events of a stream.

https://platform.openai.com/docs/api-reference/chat/create. What is not supported is refused by its name. A form makes
the JSON of one kind of answer. Items of `/v1/responses` become messages of a chat, so a conversation is the same tokens
there as at `/v1/chat/completions`.

Answers are plain dictionaries: with the types of the `openai` package an event of a stream costs 1.7 times as much, and
their import 1.2 s in each process. The tests read answers with a client that refuses what is not of these types, and
compare the parameters of requests with those of the package.
"""

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from nemo_rl.types import Completion, SamplingParams


class RequestError(ValueError):
    """A request that cannot be answered; `status` is the HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def _checked_message(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise RequestError("a message needs a role and a content")
    return message


def _checked_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('a tool must be {"type": "function", "function": {"name": ...}}')
    return tool


MAX_PROBLEMS_TOLD = 8
# Parameters without effect here: they describe the client, or ask for parts of every answer.
IGNORED = {
    *("user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
}

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
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = Field(default_factory=dict)

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
        return {key: value for key, value in body.items() if value is not None and key not in IGNORED}

    @property
    def streams_usage(self) -> bool:
        return self.stream_options.get("include_usage", False)

    def sampling(self, default: SamplingParams, room: int) -> SamplingParams:
        """Sampling parameters; `room` is the number of tokens that fit after the prompt."""
        floats = {"temperature": self.temperature, "top_p": self.top_p}
        given: dict[str, Any] = {name: float(value) for name, value in floats.items() if value is not None}
        if self.top_k is not None:
            given["top_k"] = self.top_k if self.top_k > 0 else None
        if self.stop is not None:
            given["stop_strings"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        limit = self.token_limit if self.token_limit is not None else default.max_new_tokens
        return replace(default, max_new_tokens=min(limit, room), **given)

    @property
    def token_limit(self) -> int | None:
        """Tokens of the longest answer."""
        return self.max_tokens


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

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def parse_request[R: SamplingRequest](kind: type[R], body: bytes) -> R:
    """Parse a JSON body. Raises RequestError, which names every wrong parameter."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    unknown = sorted(str(item["loc"][0]) for item in errors if item["type"] == "extra_forbidden")
    if unknown:
        supported = ", ".join(sorted(kind.model_fields))
        raise RequestError(f"not supported: {', '.join(unknown):.300}; supported: {supported}")
    raise RequestError(
        "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'body':.100}={item['input']!r:.200}: {item['msg']:.300}"
            for item in errors[:MAX_PROBLEMS_TOLD]
        )
    )


Event = dict[str, Any]
CALL_MARKS = ("<tool_call>", "```tool_code")  # where a call of a tool may begin in the model's text


@dataclass(frozen=True, kw_only=True)
class TokenText:
    """A sampled token as clients see it."""

    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One completion of an answer."""

    completion: Completion
    message: dict[str, Any]  # of the assistant: content, and tool_calls if it has some
    unsent: str  # the end of the content, which was not streamed
    tokens: Sequence[TokenText] | None  # None: no logprobs are wanted; in a stream, those that were not sent

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if "tool_calls" in self.message else self.completion.stop_reason.value


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The content of an answer, independent of its form."""

    choices: Sequence[Choice]
    num_prompt_tokens: int
    more: Mapping[str, Any]  # keys of ours at the top of the answer: weight version, tokens of the prompt

    @property
    def num_sampled(self) -> int:
        return sum(len(choice.completion.token_ids) for choice in self.choices)


@dataclass(kw_only=True)
class _Head:
    """The beginning of every answer."""

    prefix: ClassVar[str]  # of the id
    names_events: ClassVar[bool]  # server-sent events carry their type as a name too
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    answer_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.answer_id = f"{self.prefix}{secrets.token_hex(12)}"


@dataclass(kw_only=True)
class ChatForm(_Head):
    """`/v1/chat/completions`."""

    prefix, names_events = "chatcmpl-", False
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    shows_tokens: bool  # choices have `token_ids` and `token_logprobs`
    streams_usage: bool

    def whole(self, answer: Answer) -> dict[str, Any]:
        choices = [
            self._choice(i, self._said(choice), choice.tokens, choice) for i, choice in enumerate(answer.choices)
        ]
        return self._around(self.kind, choices) | {"usage": _usage(answer), **answer.more}

    def begin(self) -> Iterator[Event]:
        return iter(())

    def delta(self, index: int, text: str, tokens: Sequence[TokenText] | None) -> Iterator[Event]:
        yield self._around(self.chunk_kind, [self._choice(index, self._part(text), tokens)])

    def end(self, answer: Answer) -> Iterator[Event]:
        for index, choice in enumerate(answer.choices):
            part = self._part(choice.unsent, choice.message.get("tool_calls", ()))
            last = self._choice(index, part, choice.tokens, choice)
            yield {**self._around(self.chunk_kind, [last]), **answer.more}
        if self.streams_usage:
            yield self._around(self.chunk_kind, []) | {"usage": _usage(answer)}

    def _said(self, choice: Choice) -> dict[str, Any]:
        return {"message": choice.message}

    def _part(self, text: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        return {"delta": delta}

    def _choice(
        self, index: int, said: dict[str, Any], tokens: Sequence[TokenText] | None, ended: Choice | None = None
    ) -> dict[str, Any]:
        own: dict[str, Any] = {"index": index, **said, "logprobs": self._logprobs(tokens), "finish_reason": None}
        if ended is not None:
            own["finish_reason"] = ended.finish_reason
            if self.shows_tokens:
                own["token_ids"] = ended.completion.token_ids
                own["token_logprobs"] = ended.completion.logprobs
        return own

    def _logprobs(self, tokens: Sequence[TokenText] | None) -> dict[str, Any] | None:
        return None if tokens is None else {"content": chat_logprobs(tokens), "refusal": None}

    def _around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}


class CompletionForm(ChatForm):
    """`/v1/completions`: choices have a text."""

    prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def _said(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.message["content"]}

    def _part(self, text: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[TokenText] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "text_offset": [0, *accumulate(len(token.text) for token in tokens)][:-1],
            "top_logprobs": None,
        }


def chat_logprobs(tokens: Sequence[TokenText]) -> list[dict[str, Any]]:
    """Logprobs as chats and responses have them. `bytes` is null for a token that is a part of a character."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": None if "\ufffd" in token.text else list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in tokens
    ]


def _usage(answer: Answer) -> dict[str, int]:
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def as_server_sent(event: Event, *, named: bool) -> bytes:
    """One event of a stream. `named`: with its `type` as the name."""
    name = f"event: {event['type']}\n" if named and "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


class TextStream:
    """The text of a completion while its tokens come.

    It keeps back a part of a character, text that may become a stop string, and the text after a mark in `holds`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], holds: Sequence[str]) -> None:
        self._decode = decode
        self._holds = holds
        self._token_ids: list[int] = []
        self._begin = self._end = 0  # of the tokens whose text was decoded last: context for the next ones
        self._text = ""
        self.sent = ""
        self.waiting: list[tuple[int, float]] = []  # token ids and logprobs that came and were not sent

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return len(self._token_ids)

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that may be sent after these tokens."""
        self._token_ids += token_ids
        known = self._decode(self._token_ids[self._begin : self._end])
        now = self._decode(self._token_ids[self._begin :])
        if now.endswith("\ufffd"):
            return ""
        self._begin, self._end = self._end, len(self._token_ids)
        self._text += now[len(known) :]
        text = self._text[len(self.sent) : self._num_safe()]
        self.sent += text
        return text

    def rest(self, text: str) -> str:
        """The end of the whole text, which is sent at last."""
        rest = text[len(self.sent) :] if text.startswith(self.sent) else ""
        self.sent += rest
        return rest

    def _num_safe(self) -> int:
        """Characters before a mark, or before an end that may become one."""
        safe = len(self._text)
        for mark in self._holds:
            found = self._text.find(mark)
            if found < 0:
                ends = (n for n in range(min(len(mark) - 1, safe), 0, -1) if self._text.endswith(mark[:n]))
                found = len(self._text) - next(ends, 0)
            safe = min(safe, found)
        return max(safe, len(self.sent))


MAX_REMEMBERED = 4096  # responses of one server that `previous_response_id` can name; the oldest is forgotten first
LOGPROBS = "message.output_text.logprobs"
# Items of earlier answers without a text: the chat template renders none of them.
_SKIPPED_ITEMS = ("reasoning", "item_reference")


class ResponsesRequest(SamplingRequest):
    """The body of `/v1/responses`."""

    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"  # nothing can force the model to call a tool
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31)
    previous_response_id: str | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(default_factory=list)
    text: dict[Literal["format"], dict[Literal["type"], Literal["text"]]] = Field(default_factory=dict)
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    n: int = Field(default=1, ge=1, le=1)

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens or self.max_tokens

    def chat_tools(self) -> list[dict[str, Any]]:
        """The tools as a chat has them. RequestError for one that is no function."""
        for tool in self.tools:
            if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
                raise RequestError(f'a tool must be {{"type": "function", "name": ...}}, got {str(tool)[:200]}')
        keys = ("name", "description", "parameters", "strict")
        return [
            {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}
            for tool in self.tools
        ]


class Conversations:
    """Messages of earlier responses, by their ids."""

    def __init__(self) -> None:
        self._messages: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()

    def messages(self, wanted: ResponsesRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The conversation of a request without its instructions, and with them. RequestError if it cannot be read."""
        before = [] if wanted.previous_response_id is None else self._messages.get(wanted.previous_response_id)
        if before is None:
            raise RequestError(f"there is no response {wanted.previous_response_id!r}", 404)
        items = [{"role": "user", "content": wanted.input}] if isinstance(wanted.input, str) else wanted.input
        messages = as_messages(items, before)
        first = [] if wanted.instructions is None else [{"role": "system", "content": wanted.instructions}]
        return messages, [*first, *messages]

    def remember(self, response_id: str, messages: list[dict[str, Any]]) -> None:
        self._messages[response_id] = messages
        while len(self._messages) > MAX_REMEMBERED:
            self._messages.popitem(last=False)


def as_messages(items: Sequence[Mapping[str, Any]], before: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Items of a response's input as messages after `before`. Calls belong to the answer that they follow."""
    messages = [dict(message) for message in before]
    for item in items:
        kind = item.get("type", "message")
        if kind in _SKIPPED_ITEMS:
            continue
        if kind == "message":
            messages.append(_checked_message({"role": item.get("role"), "content": _text(item.get("content"))}))
        elif kind == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            said = {"id": item.get("call_id"), "type": "function", "function": call}
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), said]}
        elif kind == "function_call_output":
            content = _text(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise RequestError(
                f"items of type {kind!r:.200} are not supported: message, function_call, function_call_output"
            )
    return messages


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) and "text" in part for part in content):
        raise RequestError(f"the content of an item must be a text or a list of texts, got {str(content)[:200]}")
    return "".join(str(part["text"]) for part in content)


@dataclass(kw_only=True)
class ResponseForm(_Head):
    """`/v1/responses`."""

    prefix, names_events = "resp_", True
    wanted: ResponsesRequest
    _sequence: int = 0
    _tokens: list[TokenText] = field(default_factory=list)  # that were streamed
    _streamed: str = ""

    def whole(self, answer: Answer) -> dict[str, Any]:
        return self._response(answer)

    def begin(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response(None))

    def delta(self, index: int, text: str, tokens: Sequence[TokenText] | None) -> Iterator[Event]:
        if not self._streamed:
            item = {"id": self._message_id, "type": "message", "role": "assistant", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=0, item=item | {"content": []})
            yield self._part("response.content_part.added", part=_output_text("", None))
        self._streamed += text
        self._tokens += tokens or ()
        yield self._part("response.output_text.delta", delta=text, logprobs=chat_logprobs(tokens or ()))

    def end(self, answer: Answer) -> Iterator[Event]:
        [choice] = answer.choices
        if choice.unsent or not (self._streamed or "tool_calls" in choice.message):
            yield from self.delta(0, choice.unsent, choice.tokens)
        elif choice.tokens:  # without a text, as the end of the turn
            self._tokens += choice.tokens
        response = self._response(answer)
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                [part] = item["content"]
                yield self._part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
                yield self._part("response.content_part.done", part=part)
            else:
                begun = item | {"arguments": "", "status": "in_progress"}
                yield self._event("response.output_item.added", output_index=index, item=begun)
                for kind, key in (("delta", "delta"), ("done", "arguments")):
                    place = {"output_index": index, "item_id": item["id"]}
                    name = f"response.function_call_arguments.{kind}"
                    yield self._event(name, **place, **{key: item["arguments"], "name": item["name"]})
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    @property
    def _message_id(self) -> str:
        return self.answer_id.replace("resp_", "msg_")

    def _event(self, kind: str, **rest: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **rest}

    def _part(self, kind: str, **rest: Any) -> Event:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **rest)

    def _response(self, answer: Answer | None) -> dict[str, Any]:
        """The response, in progress or with its answer."""
        wanted = self.wanted
        keys = ("instructions", "parallel_tool_calls", "previous_response_id", "tool_choice", "tools")
        response: dict[str, Any] = {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": "in_progress",
            **dict.fromkeys(("error", "incomplete_details", "usage")),
            "output": [],
            **wanted.model_dump(include=set(keys)),
        }
        if answer is None:
            return response
        [choice] = answer.choices
        is_cut = choice.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        prompt, sampled = answer.num_prompt_tokens, answer.num_sampled
        return response | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items(choice, status),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
            **answer.more,
        }

    def _items(self, choice: Choice, status: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        text, calls = choice.message["content"], choice.message.get("tool_calls", ())
        if text or not calls:
            tokens = None if choice.tokens is None else (self._tokens or choice.tokens)
            content = [_output_text(text or "", tokens)]
            items.append({"id": self._message_id, "type": "message", "role": "assistant", "content": content})
        for call in calls:
            own = {"id": call["id"].replace("call_", "fc_"), "type": "function_call", "call_id": call["id"]}
            items.append(own | call["function"])
        return [item | {"status": status} for item in items]


Form = ChatForm | ResponseForm
"""The JSON of one kind of answer. Streams are `begin`, any number of `delta`, and `end`."""


def _output_text(text: str, tokens: Sequence[TokenText] | None) -> dict[str, Any]:
    logprobs = [] if tokens is None else chat_logprobs(tokens)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
