"""Requests of the OpenAI-compatible server: the parameters of `/v1/completions` and `/v1/chat/completions`.

https://platform.openai.com/docs/api-reference/chat/create. What is not supported is refused by its name.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from nemo_rl.types import SamplingParams


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


MAX_PROBLEMS_TOLD = 8
# Parameters without effect here: they describe the client, or ask for what every answer has.
_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
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
        return {key: value for key, value in body.items() if value is not None and key not in _IGNORED}

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
        raise RequestError(f"not supported: {', '.join(unknown):.300}; supported: {supported}")
    raise RequestError(
        "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'body':.100}={item['input']!r:.200}: {item['msg']:.300}"
            for item in errors[:MAX_PROBLEMS_TOLD]
        )
    )
