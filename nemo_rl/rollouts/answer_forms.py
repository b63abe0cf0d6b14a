"""Answers of the OpenAI-compatible server as clients get them: whole, or as server-sent events while they are sampled.

https://platform.openai.com/docs/api-reference/chat-streaming. A form makes the JSON of one kind of request; that of
`/v1/responses` is in `responses.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from nemo_rl.types import Completion

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
    """What an answer has, whatever its form."""

    choices: Sequence[Choice]
    num_prompt_tokens: int
    more: Mapping[str, Any]  # keys of ours at the top of the answer: weight version, tokens of the prompt

    @property
    def num_sampled(self) -> int:
        return sum(len(choice.completion.token_ids) for choice in self.choices)


class Form(Protocol):
    """The JSON of one kind of answer. Streams are `begin`, any number of `delta`, and `end`."""

    answer_id: str
    names_events: bool  # server-sent events carry their type as a name too

    def whole(self, answer: Answer) -> dict[str, Any]: ...
    def begin(self) -> Iterator[Event]: ...
    def delta(self, index: int, text: str, tokens: Sequence[TokenText] | None) -> Iterator[Event]: ...
    def end(self, answer: Answer) -> Iterator[Event]: ...


@dataclass(kw_only=True)
class ChatForm:
    """`/v1/chat/completions`."""

    answer_id: str
    created: int
    model: str
    shows_tokens: bool  # choices have `token_ids` and `token_logprobs`
    streams_usage: bool
    names_events: bool = False
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"

    def whole(self, answer: Answer) -> dict[str, Any]:
        choices = [
            self._choice(index, {"message": choice.message}, choice.tokens, choice)
            for index, choice in enumerate(answer.choices)
        ]
        return self._around(self.kind, choices) | {"usage": _usage(answer), **answer.more}

    def begin(self) -> Iterator[Event]:
        return iter(())

    def delta(self, index: int, text: str, tokens: Sequence[TokenText] | None) -> Iterator[Event]:
        yield self._chunk(self._choice(index, {"delta": {"role": "assistant", "content": text}}, tokens))

    def end(self, answer: Answer) -> Iterator[Event]:
        for index, choice in enumerate(answer.choices):
            delta: dict[str, Any] = {"role": "assistant", "content": choice.unsent or None}
            if "tool_calls" in choice.message:
                calls = enumerate(choice.message["tool_calls"])
                delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
            yield {**self._chunk(self._choice(index, {"delta": delta}, choice.tokens, choice)), **answer.more}
        if self.streams_usage:
            yield self._around(self.chunk_kind, []) | {"usage": _usage(answer)}

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

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._around(self.chunk_kind, [choice])

    def _around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}


@dataclass(kw_only=True)
class CompletionForm(ChatForm):
    """`/v1/completions`: choices have a text."""

    kind: str = "text_completion"
    chunk_kind: str = "text_completion"

    def whole(self, answer: Answer) -> dict[str, Any]:
        choices = [
            self._choice(index, {"text": choice.message["content"]}, choice.tokens, choice)
            for index, choice in enumerate(answer.choices)
        ]
        return self._around(self.kind, choices) | {"usage": _usage(answer), **answer.more}

    def delta(self, index: int, text: str, tokens: Sequence[TokenText] | None) -> Iterator[Event]:
        yield self._chunk(self._choice(index, {"text": text}, tokens))

    def end(self, answer: Answer) -> Iterator[Event]:
        for index, choice in enumerate(answer.choices):
            yield {**self._chunk(self._choice(index, {"text": choice.unsent}, choice.tokens, choice)), **answer.more}
        if self.streams_usage:
            yield self._around(self.chunk_kind, []) | {"usage": _usage(answer)}

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

    It keeps back a part of a character, text that may become a stop string, and what follows a mark in `holds`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], holds: Sequence[str]) -> None:
        self._decode = decode
        self._holds = holds
        self._token_ids: list[int] = []
        self._begin = self._end = 0  # of the tokens whose text was decoded last: context for the next ones
        self._text = ""
        self.sent = ""

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
