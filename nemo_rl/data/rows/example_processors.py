"""Processors of rows that are learned from: a row made into the tokens of a conversation, or of two.

`(datum_dict, task_data_spec, tokenizer, max_seq_length, idx, *, add_bos, add_eos, add_generation_prompt)` returns an
`ExampleDatum` or a `PreferenceDatum`. `data.default.processor` names one by its registry name or as an import path
(`my_package.module:function`). A row has the form its dataset gave it: `messages` (and `tools`), `input_ids` (and
`labels`), or `prompt`, `chosen` and `rejected`.

Which tokens carry loss is decided afterwards, by the role of their message; a message with a `token_loss_mask` has
decided for itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat.messages import get_formatted_message_log
from nemo_rl.data.interfaces import TaskDataSpec, row_tools
from nemo_rl.data.rows.processors import register
from nemo_rl.types import DatumSpec, LLMMessageLogType
from nemo_rl.utils.registry import find

IGNORED_LABEL = -100
FLAGS = ("add_bos", "add_eos", "add_generation_prompt")


class Problem(NamedTuple):
    """Why a row cannot be trained on."""

    kind: str  # the metric that counts it
    column: str
    text: str


class ExampleDatum(DatumSpec):
    """A conversation; messages as `get_formatted_message_log` makes them."""

    problem: NotRequired[Problem | None]


class PreferenceDatum(TypedDict):
    """Two conversations with the same beginning."""

    message_log_chosen: LLMMessageLogType
    message_log_rejected: LLMMessageLogType
    length_chosen: int
    length_rejected: int
    loss_multiplier: float
    idx: int
    task_name: NotRequired[str]
    margin: NotRequired[float]  # by how much chosen is preferred
    problem: NotRequired[Problem | None]


ExampleProcessor = Callable[..., ExampleDatum | PreferenceDatum]


def sft_processor(
    datum_dict: Mapping[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
    *,
    add_bos: bool = True,
    add_eos: bool = True,
    add_generation_prompt: bool = True,
) -> ExampleDatum:
    """The conversation of a row: `messages`, or `problem` and `expected_answer`; tokens, where it has `input_ids`.

    `tools` are descriptions for the chat template, `chat_template_kwargs` further arguments of it.

    Raises:
        ValueError: for messages that are none, a role the chat template refuses or leaves out. KeyError: for a row
            without a conversation.
    """
    if "input_ids" in datum_dict:
        return pretokenized(datum_dict, task_data_spec, tokenizer, max_seq_length, idx)
    messages = as_messages(_conversation(datum_dict), "user", "messages")
    log = get_formatted_message_log(
        messages,
        tokenizer,
        task_data_spec,
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        add_generation_prompt=add_generation_prompt,
        tools=row_tools(datum_dict, task_data_spec),
        chat_template_kwargs=datum_dict.get("chat_template_kwargs"),
    )
    problem = None
    if messages[-1]["role"] == "assistant" and _is_empty(messages[-1]):
        problem = Problem("empty_answer", "messages", "the assistant's last message is empty")
    return ExampleDatum(
        message_log=log,
        length=_length(log),
        extra_env_info=None,
        loss_multiplier=1.0,
        idx=idx,
        task_name=str(task_data_spec.task_name),
        problem=problem,
    )


def pretokenized(
    datum_dict: Mapping[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
    *,
    add_bos: bool = True,
    add_eos: bool = True,
    add_generation_prompt: bool = True,
) -> ExampleDatum:
    """The tokens of a row as they are: `input_ids`, learned where `labels` is not -100, or everywhere without labels.

    Raises:
        ValueError: for a token the tokenizer does not have, and for labels that are not those of the tokens.
    """
    ids = _integers(datum_dict["input_ids"], "input_ids")
    known = len(tokenizer)
    _require_known(ids, (ids >= 0) & (ids < known), known, "input_ids")
    mask = np.ones(len(ids), dtype=bool)
    if datum_dict.get("labels") is not None:
        labels = _integers(datum_dict["labels"], "labels")
        if len(labels) != len(ids):
            raise ValueError(f"column 'labels' has {len(labels)} entries and column 'input_ids' {len(ids)}")
        mask = labels != IGNORED_LABEL
        _require_known(labels, ((labels >= 0) & (labels < known)) | ~mask, known, "labels")
        if np.any(labels[mask] != ids[mask]):
            at = int(np.flatnonzero(mask & (labels != ids))[0])
            raise ValueError(
                f"column 'labels' has {labels[at]} at position {at} where column 'input_ids' has {ids[at]}: labels "
                f"repeat the token at their own place, or are {IGNORED_LABEL}"
            )
    message = {
        "role": "assistant",
        "content": "",
        "token_ids": torch.from_numpy(ids),
        "token_loss_mask": torch.from_numpy(mask),
    }
    return ExampleDatum(
        message_log=[message],
        length=len(ids),
        extra_env_info=None,
        loss_multiplier=1.0,
        idx=idx,
        task_name=str(task_data_spec.task_name),
        problem=None if len(ids) else Problem("empty_answer", "input_ids", "there is no token"),
    )


def preference_processor(
    datum_dict: Mapping[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
    *,
    add_bos: bool = True,
    add_eos: bool = True,
    add_generation_prompt: bool = True,
) -> PreferenceDatum:
    """Two answers to one prompt: `prompt`, `chosen` and `rejected`, each a text or a list of messages.

    Without a prompt, or where chosen does not begin with the assistant, chosen and rejected are whole conversations,
    and the messages they begin with alike are the prompt. Only answers carry loss. `margin` says by how much the
    chosen one is preferred; a row with a `tie` (the name of a column) prefers none.

    Raises:
        ValueError, KeyError: as `sft_processor`.
    """
    prompt, chosen, rejected = split_preference(datum_dict)
    problem = None
    if datum_dict.get("tie"):
        problem = Problem("tie", str(datum_dict["tie"]), "neither answer is preferred")
    elif chosen == rejected:
        problem = Problem("identical_answers", "rejected", "the same answer as in column 'chosen'")
    else:
        empty = [name for name, answer in (("chosen", chosen), ("rejected", rejected)) if _is_empty(answer[-1])]
        if empty:
            problem = Problem("empty_answer", empty[0], "the answer is empty")

    def formatted(answer: list[dict[str, Any]]) -> LLMMessageLogType:
        log = get_formatted_message_log(
            [*prompt, *answer],
            tokenizer,
            task_data_spec,
            add_bos_token=add_bos,
            add_eos_token=add_eos,
            add_generation_prompt=add_generation_prompt,
            tools=row_tools(datum_dict, task_data_spec),
            chat_template_kwargs=datum_dict.get("chat_template_kwargs"),
        )
        for message in log[: len(log) - len(answer)]:
            message["token_loss_mask"] = torch.zeros_like(message["token_ids"])
        return log

    log_chosen, log_rejected = formatted(chosen), formatted(rejected)
    return PreferenceDatum(
        message_log_chosen=log_chosen,
        message_log_rejected=log_rejected,
        length_chosen=_length(log_chosen),
        length_rejected=_length(log_rejected),
        loss_multiplier=1.0,
        idx=idx,
        task_name=str(task_data_spec.task_name),
        margin=float(datum_dict.get("margin") or 0.0),
        problem=problem,
    )


def split_preference(
    row: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """(prompt, chosen answer, rejected answer) of a row, as messages; see `preference_processor`."""
    chosen = as_messages(row["chosen"], "assistant", "chosen")
    rejected = as_messages(row["rejected"], "assistant", "rejected")
    if chosen[0]["role"] == "assistant" and row.get("prompt") is not None:
        return as_messages(row["prompt"], "user", "prompt"), chosen, rejected
    if chosen[0]["role"] == "assistant":
        row["prompt"]  # a text is an answer, and an answer needs a prompt: KeyError names the column
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def as_messages(value: Any, role: str, column: str) -> list[dict[str, Any]]:
    """A conversation: the messages of a list without the keys that have no value, or one message of `role` from a text.

    Raises:
        ValueError: naming the column, when it is neither, or has no message.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or not all(isinstance(m, Mapping) and m.get("role") for m in value):
        raise ValueError(
            f"column {column!r} must hold a text or a list of messages {{role, content}}, not {str(value)[:80]!r}"
        )
    if not value:
        raise ValueError(f"column {column!r} is an empty list: a conversation has at least one message")
    return [{key: entry for key, entry in message.items() if entry is not None} for message in value]


def _conversation(row: Mapping[str, Any]) -> Any:
    if "messages" not in row and "problem" in row and "expected_answer" in row:
        return [
            {"role": "user", "content": str(row["problem"])},
            {"role": "assistant", "content": str(row["expected_answer"])},
        ]
    return row["messages"]


def _is_empty(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return not (content.strip() if isinstance(content, str) else content) and not message.get("tool_calls")


def _length(log: LLMMessageLogType) -> int:
    return sum(len(message["token_ids"]) for message in log)


def _integers(values: Any, column: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"column {column!r} must be a list of integers, not {str(values)[:80]!r}")
    return array.astype(np.int64)


def _require_known(ids: np.ndarray, fine: np.ndarray, known: int, column: str) -> None:
    if not fine.all():
        at = int(np.flatnonzero(~fine)[0])
        raise ValueError(
            f"column {column!r} has {ids[at]} at position {at}, which is no token of this tokenizer (0 to {known - 1})"
            ": tokenise with the tokenizer of policy.tokenizer.name"
        )


EXAMPLE_PROCESSOR_REGISTRY: dict[str, ExampleProcessor] = {
    "sft_processor": sft_processor,
    "pretokenized": pretokenized,
    "preference_processor": preference_processor,
}


def register_example_processor(name: str, processor: ExampleProcessor) -> None:
    """Make a function available as `processor: <name>`.

    Raises:
        ValueError: when the name is taken.
    """
    register(EXAMPLE_PROCESSOR_REGISTRY, name, processor)


def find_example_processor(name: str) -> ExampleProcessor:
    """The processor of a registry name or an import path.

    Raises:
        ValueError: when there is none, or it does not take the flags.
    """
    processor = find(EXAMPLE_PROCESSOR_REGISTRY, name, "processor")
    parameters = inspect.signature(processor).parameters
    missing = [flag for flag in FLAGS if flag not in parameters]
    if missing and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(
            f"processor {name!r} does not take {', '.join(missing)}: it is called as (datum_dict, task_data_spec, "
            f"tokenizer, max_seq_length, idx, {', '.join(f'{flag}=...' for flag in FLAGS)}); **kwargs will do"
        )
    return processor
