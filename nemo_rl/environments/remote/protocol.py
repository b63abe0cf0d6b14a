"""The JSON that a run and an environment server exchange, version 1.

All three are answered with status 200 and an object; every request but the first has `Content-Type: application/json`.

    GET /health    -> {"protocol": 1, "environment": text}
    POST /step     {"protocol": 1, "request_id": text, "batch": [{"messages": [{"role", "content"}], "metadata": any}]}
                   -> {"protocol": 1, "observations": [{"role", "content"}], "metadata": [any], "rewards": [number],
                       "terminateds": [bool], "next_stop_strings": [[text] or null], "answers": [text or null],
                       "failures": [text or null]}
    POST /metrics  {"protocol": 1, "request_id": text, "batch": {"message_log": [messages], "rewards": [number],
                       "is_end": [bool], "group_id": [text], "text": [text], "prompt_lengths": [number],
                       "generation_lengths": [number]}}
                   -> {"protocol": 1, "metrics": {name: number}}

Every list of an answer to /step has one entry per conversation of the request, in its order. `metadata` comes back with
the conversation's next step. Where `failures` has a text, the conversation has no outcome and its other entries are
placeholders. A request may arrive twice under one `request_id`; the second is answered as the first was, and the
environment does not see it. With a token, every request carries `Authorization: Bearer <token>`; 401 says that it is
wrong. Any other answer than 200 is {"error": text}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.client import EnvironmentFailure, EnvironmentStep
from nemo_rl.environments.interfaces import EnvironmentReturn

VERSION = 1
STEP_LISTS = (
    "observations",
    "metadata",
    "rewards",
    "terminateds",
    "next_stop_strings",
    "answers",
    "failures",
)
FAILED = {"role": "environment", "content": ""}  # observation of a conversation that has no outcome


class ProtocolError(ValueError):
    """A request or an answer is not as the protocol says."""


def not_json(value: Any, where: str) -> str | None:
    """What keeps a value from being JSON, and where in it; None when nothing does."""
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


def check_version(message: Any) -> dict[str, Any]:
    """The message, an object of this version of the protocol. ProtocolError when it is none."""
    if not isinstance(message, dict) or "protocol" not in message:
        raise ProtocolError(f"wanted is an object with 'protocol': {VERSION}, got {message!r:.200}")
    if message["protocol"] != VERSION:
        raise ProtocolError(f"protocol {message['protocol']!r} is spoken there, and {VERSION} here")
    return message


# -- steps


def read_conversations(message: Mapping[str, Any]) -> tuple[list[list[dict[str, str]]], list[Any]]:
    """Messages and metadata of a request to /step. ProtocolError naming what is wrong."""
    batch = message.get("batch")
    if not isinstance(batch, list) or not batch:
        raise ProtocolError(f"'batch' must be a list of conversations, got {batch!r:.200}")
    logs, metadata = [], []
    for number, entry in enumerate(batch):
        messages = entry.get("messages") if isinstance(entry, dict) else None
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise ProtocolError(f"batch[{number}].messages must be a list of {{role, content}}, got {messages!r:.200}")
        if "metadata" not in entry:
            raise ProtocolError(f"batch[{number}] has no metadata; null says that there is none")
        logs.append([{"role": message["role"], "content": message["content"]} for message in messages])
        metadata.append(entry["metadata"])
    return logs, metadata


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def write_steps(steps: Sequence[EnvironmentStep | EnvironmentFailure]) -> dict[str, Any]:
    """The answer to /step. A step whose metadata are no JSON becomes a failure that says so."""
    answer: dict[str, Any] = {"protocol": VERSION, **{name: [] for name in STEP_LISTS}}
    for step in steps:
        failure = str(step) if isinstance(step, EnvironmentFailure) else _unsendable(step)
        if isinstance(step, EnvironmentFailure) or failure is not None:
            row: tuple[Any, ...] = (FAILED, None, 0.0, True, None, None, failure)
        else:
            stops = None if step.next_stop_strings is None else list(step.next_stop_strings)
            row = (step.observation, step.metadata, step.reward, step.terminated, stops, step.answer, None)
        for name, value in zip(STEP_LISTS, row, strict=True):
            answer[name].append(value)
    return answer


def _unsendable(step: EnvironmentStep) -> str | None:
    problem = not_json(step.metadata, "metadata") or not_json(step.next_stop_strings, "next_stop_strings")
    problem = problem or not_json(step.answer, "answer")
    return f"the environment returned what is no JSON: {problem}" if problem else None


def read_steps(message: Any, size: int) -> EnvironmentReturn[Any]:
    """An answer to /step for `size` conversations. ProtocolError naming what is wrong."""
    found = check_version(message)
    for name in STEP_LISTS:
        values = found.get(name)
        if not isinstance(values, list) or len(values) != size:
            kind = f"a list of {len(values)}" if isinstance(values, list) else repr(values)[:100]
            raise ProtocolError(f"{name!r} must be a list of {size}, got {kind}")
    rows = zip(*(found[name] for name in STEP_LISTS), strict=True)
    failures = [_problem_of_row(*row) for row in rows]
    failed = [failure is not None for failure in failures]
    rewards = [0.0 if bad else float(value) for value, bad in zip(found["rewards"], failed, strict=True)]
    terminateds = [bad or value for value, bad in zip(found["terminateds"], failed, strict=True)]
    return EnvironmentReturn(
        observations=[FAILED if bad else said for said, bad in zip(found["observations"], failed, strict=True)],
        metadata=found["metadata"],
        next_stop_strings=[None if bad else s for s, bad in zip(found["next_stop_strings"], failed, strict=True)],
        rewards=torch.tensor(rewards, dtype=torch.float64),
        terminateds=torch.tensor(terminateds),
        answers=[None if bad else answer for answer, bad in zip(found["answers"], failed, strict=True)],
        failures=failures,
    )


def _problem_of_row(
    observation: Any, metadata: Any, reward: Any, terminated: Any, stops: Any, answer: Any, failure: Any
) -> str | None:
    """The failure that the server reports, or what is wrong with one entry of its answer."""
    if failure is not None:
        return str(failure)
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    checks = {
        f"observation {observation!r:.100}, wanted is {{role, content}}": _is_message(observation),
        f"reward {reward!r:.100}, wanted is a finite number": is_number and math.isfinite(reward),
        f"terminated {terminated!r:.100}, wanted is true or false": isinstance(terminated, bool),
        f"next_stop_strings {stops!r:.100}, wanted is a list of texts or null": stops is None
        or (isinstance(stops, list) and all(isinstance(stop, str) for stop in stops)),
        f"answer {answer!r:.100}, wanted is a text or null": isinstance(answer, str | None),
    }
    wrong = [text for text, is_right in checks.items() if not is_right]
    return f"the server sent {'; '.join(wrong)}" if wrong else None


# -- metrics


def write_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Finished samples as JSON: tensors as lists. ValueError naming what is none."""
    plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    if problem := not_json(plain, "batch"):
        raise ValueError(f"the batch cannot be sent as JSON: {problem}")
    return plain


def read_batch(message: Mapping[str, Any]) -> BatchedDataDict[Any]:
    """Finished samples as an environment gets them: lists of numbers or of true and false are tensors."""
    batch = message.get("batch")
    if not isinstance(batch, dict) or not all(isinstance(values, list) for values in batch.values()):
        raise ProtocolError(f"'batch' must be an object of lists, got {batch!r:.200}")
    return BatchedDataDict(
        {
            name: torch.tensor(values) if all(isinstance(value, bool | int | float) for value in values) else values
            for name, values in batch.items()
        }
    )


def read_metrics(message: Any) -> dict[str, float]:
    """An answer to /metrics. ProtocolError naming what is wrong."""
    metrics = check_version(message).get("metrics")
    if not isinstance(metrics, dict):
        raise ProtocolError(f"'metrics' must be an object, got {metrics!r:.200}")
    for name, value in metrics.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ProtocolError(f"metric {name!r} must be a number, got {value!r:.100}")
    return {name: float(value) for name, value in metrics.items()}
