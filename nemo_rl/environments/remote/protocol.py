"""The JSON that a run and an environment server exchange, version 1.

    GET /health    -> {"protocol": 1, "environment": text}
    POST /step     StepRequest -> {"protocol": 1} and the lists of STEP_LISTS, one entry (Row) per conversation
    POST /metrics  MetricsRequest -> {"protocol": 1, "metrics": {name: number}}

A POST has `Content-Type: application/json`. A request may arrive twice under one `request_id`; the second is answered
as the first was, and the environment does not see it. With a token, every request carries `Authorization: Bearer
<token>`. An answer has status 200, or is {"error": text}: 400 for a wrong request, 401 for a wrong token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.client import EnvironmentFailure, EnvironmentStep, Outcome

VERSION = 1
STEP_LISTS = {
    "observations": "observation",
    "metadata": "metadata",
    "rewards": "reward",
    "terminateds": "terminated",
    "next_stop_strings": "next_stop_strings",
    "answers": "answer",
    "failures": "failure",
    "metrics": "metrics",
}
"""List in an answer to /step -> field of `Row`. Servers may leave out `metrics`."""

Number = Annotated[float, Field(allow_inf_nan=False)]
Rewards = Annotated[
    list[Number], Field(min_length=1), BeforeValidator(lambda sent: sent if isinstance(sent, list) else [sent])
]
"""A number, or a list of them: several rewards, as many in every entry."""

ModelT = TypeVar("ModelT", bound=BaseModel)


class ProtocolError(ValueError):
    """A request or an answer does not follow the protocol."""


class _Model(BaseModel):
    model_config = ConfigDict(strict=True)


class Message(_Model):
    role: str
    content: str


class Observation(_Model):
    role: str
    content: str | list[dict[str, Any]]  # parts: texts, and images as a path, a URL or `data:image/png;base64,...`


class Conversation(_Model):
    messages: list[Message] = Field(min_length=1)
    metadata: Any  # as the last step of the conversation returned it, or from the row; null for none


class StepRequest(_Model):
    """Conversations whose last turn the environment answers."""

    request_id: str = Field(min_length=1)
    batch: list[Conversation] = Field(min_length=1)


class MetricsRequest(_Model):
    """Finished samples: message_log, metrics, rewards, is_end, group_id, text, prompt_lengths, generation_lengths."""

    request_id: str = Field(min_length=1)
    batch: dict[str, list[Any]]


class MetricsAnswer(_Model):
    metrics: dict[str, Number]


class Row(_Model):
    """The answer for one conversation. With a `failure` it has no outcome, and the other entries are ignored."""

    observation: Observation
    metadata: Any
    reward: Rewards
    terminated: bool
    next_stop_strings: list[str] | None
    answer: str | None
    metrics: dict[str, Number] | None


def read(model: type[ModelT], message: Any) -> ModelT:
    """A message as a model of this module. ProtocolError with the first problem."""
    try:
        return model.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        raise ProtocolError(f"{where} {first['input']!r:.200}: {first['msg']}") from error


def check_version(message: Any) -> dict[str, Any]:
    """The message, an object of this version of the protocol. ProtocolError for anything else."""
    if not isinstance(message, dict) or "protocol" not in message:
        raise ProtocolError(f"wanted is an object with 'protocol': {VERSION}, got {message!r:.200}")
    if message["protocol"] != VERSION:
        raise ProtocolError(f"protocol {message['protocol']!r} is spoken there, and {VERSION} here")
    return message


def not_json(value: Any, where: str) -> str | None:
    """Why a value is not JSON, and where; None if it is.

    pydantic's JsonValue is not used: it accepts NaN and infinity, and refuses tuples.
    """
    if value is None or isinstance(value, str | bool | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{where} is {value}"
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{where} has the key {key!r}, which is no text"
            if problem := not_json(item, f"{where}[{key!r}]"):
                return problem
        return None
    if isinstance(value, list | tuple):
        found = (not_json(item, f"{where}[{index}]") for index, item in enumerate(value))
        return next(filter(None, found), None)
    return f"{where} is a {type(value).__name__}"


def write_steps(steps: Sequence[Outcome]) -> dict[str, Any]:
    """The answer to /step. A step that is not JSON becomes a failure that says so."""
    answer: dict[str, Any] = {"protocol": VERSION, **{name: [] for name in STEP_LISTS}}
    for step in steps:
        row: dict[str, Any] = {"observation": {"role": "environment", "content": ""}, "reward": 0.0, "terminated": True}
        if isinstance(step, EnvironmentFailure):
            row["failure"] = str(step)
        else:
            own = {field: vars(step)[field] for field in Row.model_fields} | {
                "reward": step.reward_parts or step.reward
            }
            problem = next(filter(None, (not_json(own[field], field) for field in Row.model_fields)), None)
            row |= {"failure": f"the environment returned a value that is no JSON: {problem}"} if problem else own
        for name, field in STEP_LISTS.items():
            answer[name].append(row.get(field))
    return answer


def read_steps(message: Any, size: int) -> list[Outcome]:
    """An answer to /step for `size` conversations. ProtocolError naming the problem."""
    found = {"metrics": [None] * size, **check_version(message)}
    for name in STEP_LISTS:
        values = found.get(name)
        if not isinstance(values, list) or len(values) != size:
            kind = f"a list of {len(values)}" if isinstance(values, list) else repr(values)[:100]
            raise ProtocolError(f"{name!r} must be a list of {size}, got {kind}")
    outcomes: list[Outcome] = []
    for values in zip(*(found[name] for name in STEP_LISTS), strict=True):
        fields = dict(zip(STEP_LISTS.values(), values, strict=True))
        failure = fields.pop("failure")
        if failure is not None:
            outcomes.append(EnvironmentFailure(str(failure)))
            continue
        try:
            row = read(Row, fields)
        except ProtocolError as error:
            outcomes.append(EnvironmentFailure(f"the server sent {error}"))
            continue
        several = row.reward if len(row.reward) > 1 else []
        own = {"reward": sum(row.reward), "reward_parts": several, "metrics": row.metrics or {}}
        outcomes.append(EnvironmentStep(**{**row.model_dump(), **own}))
    return outcomes


def write_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Finished samples as JSON: tensors as lists. ValueError naming a value that is not JSON."""
    plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    if problem := not_json(plain, "batch"):
        raise ValueError(f"the batch cannot be sent as JSON: {problem}")
    return plain


def read_batch(batch: Mapping[str, list[Any]]) -> BatchedDataDict[Any]:
    """Finished samples as an environment gets them: lists of numbers or booleans become tensors."""
    return BatchedDataDict(
        {
            name: torch.tensor(values) if all(isinstance(value, bool | int | float) for value in values) else values
            for name, values in batch.items()
        }
    )
