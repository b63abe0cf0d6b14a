"""What a request in OpenAI's format asks for, and the choices of its answer. Nothing here knows of HTTP."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nemo_rl.types import Completion, SamplingParams, StopReason

MAX_CHOICES = 128
MAX_STOPS = 16

BOTH = ("model", "n", "max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "stream", "logprobs")
CHAT = frozenset({*BOTH, "messages", "tools", "tool_choice", "max_completion_tokens"})
COMPLETION = frozenset({*BOTH, "prompt"})
# Accepted and without effect: what says who asks, and what an answer has in any case.
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options"}
)
# Accepted with these values alone, with which they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}


class RequestError(ValueError):
    """A request that cannot be answered; `status` is HTTP's."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class FoundCall(Protocol):
    """A call of a tool in what the model said; `problem` is empty where it can be made."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...
    @property
    def problem(self) -> str: ...


CallsOf = Callable[[str], Sequence[FoundCall]]
"""The calls in a text, in order."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How often, and how, to sample."""

    sampling: SamplingParams
    seed: int  # of the first choice; the next ones count on
    num_choices: int
    logprobs: bool
    stream: bool


def check_keys(body: Mapping[str, Any], supported: frozenset[str]) -> dict[str, Any]:
    """The parameters that have a value and an effect.

    Raises:
        RequestError: naming those that are not supported.
    """
    given = {key: value for key, value in body.items() if value is not None and key not in IGNORED}
    unknown = []
    for key, value in list(given.items()):
        if key in NEUTRAL and value in NEUTRAL[key]:
            del given[key]
        elif key not in supported:
            unknown.append(f"{key}={json.dumps(value)[:80]}" if key in NEUTRAL else key)
    if unknown:
        raise RequestError(f"not supported: {', '.join(sorted(unknown))}; supported: {', '.join(sorted(supported))}")
    return given


def asked(body: Mapping[str, Any], default: SamplingParams, room: int) -> Asked:
    """`room`: the tokens that an answer may have beside its prompt."""
    wants_logprobs = body.get("logprobs", False)
    if wants_logprobs is not False and wants_logprobs not in ((True,) if "messages" in body else (0,)):
        raise RequestError("logprobs are those of the sampled tokens alone: true in a chat, 0 for a completion")
    return Asked(
        sampling=_sampling(body, default, room),
        seed=_number(body, "seed", int, 0, 2**62) if "seed" in body else secrets.randbits(62),
        num_choices=_number(body, "n", int, 1, MAX_CHOICES) if "n" in body else 1,
        logprobs=wants_logprobs is not False,
        stream=_flag(body, "stream"),
    )


def _sampling(body: Mapping[str, Any], default: SamplingParams, room: int) -> SamplingParams:
    given: dict[str, Any] = {"max_new_tokens": min(default.max_new_tokens, room)}
    for key in ("max_tokens", "max_completion_tokens"):
        if key in body:
            given["max_new_tokens"] = min(_number(body, key, int, 1, 2**31), room)
    if "temperature" in body:
        given["temperature"] = float(_number(body, "temperature", (int, float), 0, 100))
    if "top_p" in body:
        given["top_p"] = float(_number(body, "top_p", (int, float), 1e-6, 1))
    if "top_k" in body:
        top_k = _number(body, "top_k", int, -1, 2**31)
        given["top_k"] = top_k if top_k > 0 else None
    if "stop" in body:
        stop = body["stop"]
        stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else (None,)
        if len(stops) > MAX_STOPS or not all(isinstance(text, str) and text for text in stops):
            raise RequestError(f"stop must be a text or a list of at most {MAX_STOPS} texts, got {_short(stop)}")
        given["stop_strings"] = stops
    return replace(default, **given)


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation. Raises RequestError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"a message needs a role and a content, got {_short(message)}")
    return messages


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the model is shown. Raises RequestError."""
    tools, choice = body.get("tools"), body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RequestError(
            f"tool_choice must be auto or none: nothing makes the model call a tool, got {_short(choice)}"
        )
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise RequestError("tools must be a list")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'a tool must be {{"type": "function", "function": {{"name": ...}}}}, got {_short(tool)}'
            )
    return tools


def without_stop(text: str, completion: Completion, stops: Sequence[str]) -> str:
    """The text before the string that ended it. The tokens keep it."""
    if completion.stop_reason is not StopReason.STOP:
        return text
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def answer_message(text: str, calls_of: CallsOf | None) -> dict[str, Any]:
    """What the model said, with the calls that can be made as `tool_calls`. Where one cannot, all stays text."""
    calls = calls_of(text) if calls_of is not None else []
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": text}
    before = text.partition("<tool_call>")[0].strip() if "<tool_call>" in text else ""
    return {
        "role": "assistant",
        "content": before or None,
        "tool_calls": [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in calls
        ],
    }


def chat_logprobs(completion: Completion, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """As the answer of a chat has them."""
    content = []
    for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        text = decode([token_id])
        as_bytes = None if "\ufffd" in text else list(text.encode())  # part of a character
        content.append({"token": text, "logprob": logprob, "bytes": as_bytes, "top_logprobs": []})
    return {"content": content, "refusal": None}


def completion_logprobs(completion: Completion, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """As the answer to a prompt has them."""
    tokens = [decode([token_id]) for token_id in completion.token_ids]
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {"tokens": tokens, "token_logprobs": completion.logprobs, "text_offset": offsets[:-1], "top_logprobs": None}


def _number(body: Mapping[str, Any], key: str, kind: Any, low: float, high: float) -> Any:
    value = body[key]
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        raise RequestError(f"{key} must be a number from {low:g} to {high:g}, got {_short(value)}")
    return value


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise RequestError(f"{key} must be true or false, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    return repr(value)[:200]
