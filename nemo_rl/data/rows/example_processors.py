"""Processors of rows to learn from: a row -> the tokens of one conversation (SFT) or of two (preferences).

`(datum_dict, task_data_spec, tokenizer, max_seq_length, idx, *, add_bos, add_eos, add_generation_prompt)` gets those of
the three flags that it takes, and returns an
`ExampleDatum` or a `PreferenceDatum`. A row has the form that its dataset gave it: `messages` (and `tools`),
`input_ids` (and `labels`), or `prompt`, `chosen` and `rejected`.

The loss mask is made afterwards, from the roles of the messages (`ExampleMaker`). A message with a `token_loss_mask`
keeps its own.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat.images import text_of, text_or_parts
from nemo_rl.data.chat.messages import get_formatted_message_log
from nemo_rl.data.datasets.examples import as_messages, split_preference
from nemo_rl.data.interfaces import Row, TaskDataSpec, one_turn, row_tools
from nemo_rl.types import DatumSpec, LLMMessageLogType

IGNORED_LABEL = -100
DIFFERENT_QUESTIONS = "different_questions"  # the kind of a problem that stops the run


class Problem(NamedTuple):
    """Why a row cannot be trained on."""

    kind: str  # name of the metric that counts it
    column: str
    text: str


class ExampleDatum(DatumSpec):
    """A conversation, as `get_formatted_message_log` returns it."""

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
    margin: NotRequired[float]  # by how much the chosen answer is preferred
    problem: NotRequired[Problem | None]


def sft_processor(
    datum_dict: Row,
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
    **flags: bool,
) -> ExampleDatum:
    """The conversation of a row: `messages`, or `problem` and `expected_answer`; tokens if it has `input_ids`.

    `tools` are descriptions for the chat template, `chat_template_kwargs` further arguments of it. `input_ids` are
    learned where `labels` is not -100, or everywhere if there are no labels.

    Raises:
        ValueError: for invalid messages, or a role that the chat template refuses or leaves out; for a token that the
            tokenizer does not have, and for labels that differ from the tokens. KeyError: for a row without a
            conversation.
    """
    problem = None
    if "input_ids" in datum_dict:
        log = [_tokens_message(datum_dict, len(tokenizer))]
        if not _length(log):
            problem = Problem("empty_answer", "input_ids", "there is no token")
    else:
        if "messages" not in datum_dict and "problem" in datum_dict and "expected_answer" in datum_dict:
            messages = one_turn(text_or_parts(datum_dict["problem"]), text_of(datum_dict["expected_answer"]))
        else:
            messages = as_messages(datum_dict["messages"], "user", "messages")
        log = _message_log(messages, datum_dict, task_data_spec, tokenizer, **flags)
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


def pretokenized(datum_dict: Row, *arguments: Any, **flags: bool) -> ExampleDatum:
    """As `sft_processor`, for rows that are tokens. KeyError for a row without `input_ids`."""
    datum_dict["input_ids"]  # the KeyError names the column
    return sft_processor(datum_dict, *arguments, **flags)


def _tokens_message(datum_dict: Row, known: int) -> dict[str, Any]:
    """The tokens of a row as one message with a mask; `known` is the size of the vocabulary."""
    ids = _integers(datum_dict["input_ids"], "input_ids")
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
                f"repeat the token at the same position, or are {IGNORED_LABEL}"
            )
    tensors = {"token_ids": torch.from_numpy(ids), "token_loss_mask": torch.from_numpy(mask)}
    return {"role": "assistant", "content": "", **tensors}


def preference_processor(
    datum_dict: Row,
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
    **flags: bool,
) -> PreferenceDatum:
    """Two answers to one prompt: `prompt`, `chosen` and `rejected`, each a text or a list of messages.

    Without a prompt, or if `chosen` does not begin with the assistant, `chosen` and `rejected` are whole conversations,
    and their common first messages are the prompt. Only answers carry loss. `margin` says by how much the chosen answer
    is preferred; a row with a `tie` (the name of a column) prefers none. Where the two part, the assistant or a tool
    speaks: any other message makes two questions of the prompt. Raises ValueError or KeyError as `sft_processor`.
    """
    prompt, chosen, rejected = split_preference(datum_dict)
    problem = None
    if datum_dict.get("tie"):
        problem = Problem("tie", str(datum_dict["tie"]), "neither answer is preferred")
    elif chosen[0] != rejected[0] and {"system", "developer", "user"} & {chosen[0]["role"], rejected[0]["role"]}:
        problem = Problem(DIFFERENT_QUESTIONS, "rejected", "it answers another question than column 'chosen'")
    elif chosen == rejected:
        problem = Problem("identical_answers", "rejected", "the same answer as in column 'chosen'")
    elif _is_empty(chosen[-1]) or _is_empty(rejected[-1]):
        column = "chosen" if _is_empty(chosen[-1]) else "rejected"
        problem = Problem("empty_answer", column, "the answer is empty")
    logs = []
    for answer in (chosen, rejected):
        log = _message_log([*prompt, *answer], datum_dict, task_data_spec, tokenizer, **flags)
        # The prompt's own assistant turns carry no loss, either.
        for message in log[: len(log) - len(answer)]:
            message["token_loss_mask"] = torch.zeros_like(message["token_ids"])
        logs.append(log)
    return PreferenceDatum(
        message_log_chosen=logs[0],
        message_log_rejected=logs[1],
        length_chosen=_length(logs[0]),
        length_rejected=_length(logs[1]),
        loss_multiplier=1.0,
        idx=idx,
        task_name=str(task_data_spec.task_name),
        margin=float(datum_dict.get("margin") or 0.0),
        problem=problem,
    )


def _message_log(
    messages: list[dict[str, Any]],
    row: Row,
    spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_bos: bool = True,
    add_eos: bool = True,
    add_generation_prompt: bool = True,
) -> LLMMessageLogType:
    return get_formatted_message_log(
        messages,
        tokenizer,
        spec,
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        add_generation_prompt=add_generation_prompt,
        tools=row_tools(row, spec),
        chat_template_kwargs=row.get("chat_template_kwargs"),
    )


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
