"""Rows to learn from: how rows of files and of well-known datasets become conversations or preferences.

A conversation is {"messages": [...]}, and may have "tools". A preference is {"prompt", "chosen", "rejected"}, each a
text or a list of messages, and may have a "margin" (by how much the chosen answer is preferred), "tools", and a "tie":
the name of the column that prefers neither answer.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.rules import StrictModel
from nemo_rl.data.config import ExampleDatasetConfig, PreferenceDatasetConfig, TableConfig, dataset_label
from nemo_rl.data.datasets.files import (
    JsonLines,
    column_names,
    column_text,
    converted,
    load_as_written,
    load_data_path,
    load_response_rows,
    options_of,
    require_columns,
    require_used_keys,
)
from nemo_rl.data.interfaces import LazyRows, Row, Rows, StreamedTable, as_tools, call_arguments, one_turn, without_none
from nemo_rl.utils.task_formats import one_text

# -- Conversations.


def squad_row(row: Row) -> Row:
    """SQuAD {"context", "question", "answers": {"text": [...]}}: the context is the system prompt.

    A question without an answer (SQuAD 2) has an empty one.
    """
    texts = row["answers"]["text"]
    return {"messages": one_turn(row["question"], texts[0] if texts else "", row["context"])}


def columns_row(row: Row, *, input_key: str, output_key: str, system_key: str | None = None) -> Row:
    """Two columns of text as a conversation of one turn; the other columns are kept."""
    question, answer = column_text(row, input_key), column_text(row, output_key)
    return {**row, "messages": one_turn(question, answer, _system_prompt(row, system_key))}


def _system_prompt(row: Row, system_key: str | None) -> str | None:
    return column_text(row, system_key) if system_key and row.get(system_key) else None


def chat_row(
    row: Row,
    *,
    chat_key: str = "messages",
    system_key: str | None = None,
    tool_key: str = "tools",
    fill_ins: bool = True,
) -> Row:
    """A conversation in the format of OpenAI's API, converted to the form that chat templates take.

    The arguments of tool calls, a text in that format, become an object; the parts of a content become one text.
    Messages keep `name`, `tool_call_id`, `reasoning_content` and all other keys that have a value. `fill_ins`: the row
    comes from a table, which gives every object the keys of all others; keys without a value are removed at every
    depth.
    """
    if not isinstance(row[chat_key], list):
        raise ValueError(f"column {chat_key!r} must hold a list of messages, not {str(row[chat_key])[:80]!r}")
    messages = [_chat_message(message, f"column {chat_key!r}", fill_ins) for message in row[chat_key]]
    system = _system_prompt(row, system_key)
    if system and (not messages or messages[0].get("role") != "system"):
        messages.insert(0, {"role": "system", "content": system})
    others = {key: value for key, value in row.items() if key not in (chat_key, system_key, tool_key)}
    if tools := as_tools(row.get(tool_key), f"column {tool_key!r}"):
        others["tools"] = tools
    return {**others, "messages": messages}


def _chat_message(message: Any, where: str, fill_ins: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not message.get("role"):
        raise ValueError(f"{where} has a message without a role: {str(message)[:80]!r}")
    given = {key: value for key, value in message.items() if value is not None}
    if isinstance(given.get("content"), list):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in given["content"]]
        for part in parts:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                raise ValueError(f"{where} has a content that is no text: {str(part)[:80]!r}; only text can be used")
        given["content"] = "".join(one_text(part.get("text"), f"as a text in {where}") for part in parts)
    if calls := given.pop("tool_calls", None):
        given["tool_calls"] = [tool_call(call, where, fill_ins) for call in calls]
    return given


def tool_call(call: Any, where: str, fill_ins: bool) -> dict[str, Any]:
    """A call of a message with its arguments as an object, and without keys that have no value; see `chat_row`."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
        raise ValueError(f"{where} has a tool call that is no object: {str(call)[:80]!r}")
    function = dict(call.get("function") or call)
    given = function.get("arguments")
    function["arguments"] = call_arguments(without_none(given) if fill_ins else given, where)
    if "function" not in call:
        return function
    return {**{key: value for key, value in call.items() if value is not None}, "function": function}


class _TextOptions(StrictModel):
    text_key: str = "text"
    characters_per_sample: int | None = Field(default=None, ge=1)


def load_texts(cfg: TableConfig) -> Rows | StreamedTable:
    """Plain texts to learn from: each is the only message, of the assistant.

    `kwargs` are {text_key: the column, "text" by default; characters_per_sample}: with the latter, rows are joined by
    line breaks until a text has so many characters.

    Raises:
        ValueError: for a missing `data_path` or column, an empty table, or `characters_per_sample` of a streamed one.
            FileNotFoundError: for a missing file.
    """
    if not isinstance(cfg, ExampleDatasetConfig):
        raise ValueError(f"dataset {cfg.dataset_name!r} holds texts to learn from: it is for the section data of SFT")
    options = options_of(cfg, _TextOptions)
    require_used_keys(cfg, (), "kwargs.text_key names the column")
    table = load_data_path(cfg)
    require_columns(table, {"kwargs.text_key": options.text_key}, dataset_label(cfg))
    if options.characters_per_sample is None:
        return converted(table, lambda row: _said(column_text(row, options.text_key)))
    if cfg.is_streamed:
        raise ValueError(f"dataset {cfg.dataset_name!r}: characters_per_sample needs all rows: set streaming=false")
    return JoinedTexts(table[options.text_key], options.characters_per_sample)


def _said(text: str) -> Row:
    return {"messages": [{"role": "assistant", "content": text}]}


class JoinedTexts(LazyRows):
    """Texts joined by line breaks, until each sample has `least` characters; the last one may have fewer."""

    def __init__(self, texts: Sequence[str], least: int) -> None:
        self.texts = texts
        self._bounds, length = [0], 0
        for number, text in enumerate(texts, start=1):
            length += len(text)
            if length >= least or number == len(texts):
                self._bounds.append(number)
                length = 0

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: Any) -> Any:
        begin, end = self._bounds[index], self._bounds[index + 1]
        return _said("\n".join(self.texts[i] for i in range(begin, end)))


def load_conversations(cfg: TableConfig) -> Rows | StreamedTable:
    """Rows of a file or a Hugging Face path: tokens (`input_ids`), conversations (`chat_key`), or two columns of text.

    Raises:
        ValueError: for a missing `data_path` or column, or an empty table. FileNotFoundError: for a missing file.
    """
    if not isinstance(cfg, ExampleDatasetConfig):
        raise ValueError(f"dataset {cfg.dataset_name!r} holds conversations: it is for the section data of SFT")
    table, label = load_as_written(cfg), dataset_label(cfg)
    columns = column_names(table)
    if "input_ids" in columns:
        require_used_keys(cfg, (), "the rows are tokens (column 'input_ids')")
        return converted(table, dict)
    system = {"system_key": cfg.system_key} if cfg.system_key else {}
    if cfg.chat_key in columns or cfg.dataset_name == "openai_format":
        require_columns(table, {"chat_key": cfg.chat_key, **system}, label)
        what = f"the rows have conversations (column {cfg.chat_key!r})"
        require_used_keys(cfg, ("chat_key", "system_key", "tool_key"), what, table)
        keys = cfg.model_dump(include={"chat_key", "system_key", "tool_key"})
        return converted(table, partial(chat_row, **keys, fill_ins=not isinstance(table, JsonLines)))
    keys = {"input_key": cfg.input_key or "input", "output_key": cfg.output_key or "output", **system}
    if {"prompt", "completion"} <= set(columns) and not set(keys.values()) <= {*columns, cfg.system_key}:
        raise ValueError(
            f"dataset {label!r} has no columns {keys['input_key']!r} (input_key) and {keys['output_key']!r} "
            "(output_key), but it has 'prompt' and 'completion': did you mean input_key=prompt output_key=completion?"
        )
    require_columns(table, keys, label)
    what = f"the rows have no conversations, which chat_key would name, but texts; their columns: {', '.join(columns)}"
    require_used_keys(cfg, ("input_key", "output_key", "system_key"), what, table)
    return converted(table, partial(columns_row, **keys))


def load_file(cfg: TableConfig) -> Rows | StreamedTable:
    """The rows of a file or a Hugging Face path, in the form that their section needs."""
    if isinstance(cfg, PreferenceDatasetConfig):
        return load_preferences(cfg)
    return load_conversations(cfg) if isinstance(cfg, ExampleDatasetConfig) else load_response_rows(cfg)


class _OpenAssistantOptions(StrictModel):
    paths: Literal["best", "all"] = "best"
    lang: str | None = None


def load_open_assistant(cfg: TableConfig) -> list[Row]:
    """OpenAssistant's trees as conversations, from its table of messages or a file of trees.

    `kwargs`: `paths: best` (of each tree the path along the answers ranked first) or `all` (every path), and `lang`,
    e.g. `en`, for the trees of one language. Raises ValueError for other kwargs, for `streaming` (a tree is spread over
    the table), and as `load_table`.
    """
    options = options_of(cfg, _OpenAssistantOptions)
    if cfg.is_streamed:
        raise ValueError("dataset 'open_assistant' cannot be streamed: a conversation is spread over its table")
    require_used_keys(cfg, (), "the dataset has columns of its own")
    path = cfg.data_path or "OpenAssistant/oasst2"
    table = load_data_path(cfg, path)
    if "prompt" in table.column_names:
        trees: Iterator[Mapping[str, Any]] = (row["prompt"] for row in table)
    else:
        require_columns(table, {name: name for name in ("message_id", "parent_id", "text", "role")}, path)
        trees = trees_of_messages(table)
    return [
        {"messages": messages}
        for tree in trees
        if options.lang is None or tree.get("lang") == options.lang
        for messages in tree_conversations(tree, best_only=options.paths == "best")
    ]


def trees_of_messages(rows: Any) -> Iterator[Mapping[str, Any]]:
    """Trees {..., "replies": [...]} from messages that name their parent, in the order of their first messages."""
    replies: dict[str | None, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        replies[row["parent_id"]].append(dict(row))
    for messages in replies.values():
        for message in messages:
            message["replies"] = replies.get(message["message_id"], [])
    yield from replies[None]


def tree_conversations(tree: Mapping[str, Any], *, best_only: bool) -> list[list[dict[str, str]]]:
    """The paths of a tree as messages, each up to its last answer: unanswered questions at the end are left out."""
    found: list[list[dict[str, str]]] = []
    waiting: list[tuple[Mapping[str, Any], list[dict[str, str]]]] = [(tree, [])]
    while waiting:
        message, before = waiting.pop()
        role = "assistant" if message["role"] == "assistant" else "user"
        path = [*before, {"role": role, "content": message["text"]}]
        replies = [reply for reply in message.get("replies") or [] if not reply.get("deleted")]
        # Answers without a rank come last, in the order they were written.
        replies.sort(key=lambda reply: float("inf") if reply.get("rank") is None else reply["rank"])
        waiting.extend((reply, path) for reply in reversed(replies[:1] if best_only else replies))
        if replies:
            continue
        while path and path[-1]["role"] != "assistant":
            path.pop()
        if path and path not in found:
            found.append(path)
    return found


# -- Preferences.


def split_preference(row: Row) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """(prompt, chosen answer, rejected answer) of a row; see `preference_processor`."""
    chosen, rejected = (as_messages(row[column], "assistant", column) for column in ("chosen", "rejected"))
    # A KeyError names what an answer lacks.
    if "assistant" in (chosen[0]["role"], rejected[0]["role"]) and row["prompt"] is not None:
        prompt = as_messages(row["prompt"], "user", "prompt")
        return prompt, _behind(prompt, chosen), _behind(prompt, rejected)
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _behind(prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An answer without the prompt, which it may repeat."""
    size = len(prompt)
    return answer[size:] if len(answer) > size and answer[:size] == prompt else answer


def as_messages(value: Any, role: str, column: str) -> list[dict[str, Any]]:
    """A conversation: a list of messages, without keys that have no value, or one message of `role` from a text.

    Raises ValueError, naming the column, for anything else and for an empty list.
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


def helpsteer3_row(row: Row) -> Row:
    """HelpSteer3: `overall_preference` from -3 (response 1 much better) to 3 (response 2); 0 prefers neither."""
    preference = int(row["overall_preference"])
    responses = [row["response1"], row["response2"]]
    chosen, rejected = responses if preference <= 0 else reversed(responses)
    converted_row = {"prompt": row["context"], "chosen": chosen, "rejected": rejected, "margin": float(abs(preference))}
    return converted_row if preference else {**converted_row, "tie": "overall_preference"}


def conversations_row(row: Row) -> Row:
    """Tulu 3: chosen and rejected are whole conversations; `prompt` repeats their first message."""
    return {key: value for key, value in row.items() if key != "prompt"}


def ranked_row(row: Row) -> Row:
    """{"context": messages, "completions": [{"rank", "completion": messages}, ...]}: the best and the worst."""
    ranked = sorted(row["completions"], key=lambda completion: completion["rank"])
    if not ranked:
        raise ValueError("column 'completions' is empty: a preference needs two answers")
    best, worst = ranked[0], ranked[-1]
    others = {key: value for key, value in row.items() if key not in ("context", "completions")}
    pair = {**others, "prompt": row["context"], "chosen": best["completion"], "rejected": worst["completion"]}
    return pair if best["rank"] != worst["rank"] else {**pair, "tie": "completions"}


def both_preference_forms(row: Row) -> dict[str, Any]:
    """A pair with `context` and `completions`, too: the inverse of `ranked_row`, for processors that read these.

    Answers of a `tie` both have rank 0. Other rows, and pairs whose prompt is in no column, are as they were.
    """
    forms = dict(row)
    has_prompt = row.get("prompt") is not None and "completions" not in row
    if has_prompt and isinstance(row.get("chosen"), str | list) and isinstance(row.get("rejected"), str | list):
        prompt, *answers = split_preference(row)
        worse = 0 if row.get("tie") else 1
        forms["context"] = prompt
        forms["completions"] = [{"rank": n * worse, "completion": answer} for n, answer in enumerate(answers)]
    return forms


def keyed_row(row: Row, *, prompt_key: str, chosen_key: str, rejected_key: str, tool_key: str) -> Row:
    """The row with columns renamed to `prompt`, `chosen`, `rejected` and `tools`; those without a value are omitted."""
    named = {"prompt": prompt_key, "chosen": chosen_key, "rejected": rejected_key, "tools": tool_key}
    others = {key: value for key, value in row.items() if key not in named.values() and key not in named}
    return {**others, **{name: row[key] for name, key in named.items() if row.get(key) is not None}}


def load_preferences(cfg: TableConfig) -> Rows | StreamedTable:
    """Rows of a file or a Hugging Face path, ranked completions or `prompt_key`, `chosen_key` and `rejected_key`.

    Raises:
        ValueError: for a missing `data_path` or column, or an empty table. FileNotFoundError: for a missing file.
    """
    if not isinstance(cfg, PreferenceDatasetConfig):
        raise ValueError(
            f"dataset {cfg.dataset_name!r} holds preferences: it is for the section data of DPO and reward models"
        )
    table, label = load_as_written(cfg), dataset_label(cfg)
    if cfg.dataset_name != "BinaryPreferenceDataset" and "completions" in column_names(table):
        require_columns(table, {"of ranked completions": "context"}, label)
        require_used_keys(cfg, (), "the rows have ranked answers (column 'completions')")
        return converted(table, ranked_row)
    require_columns(table, {"chosen_key": cfg.chosen_key, "rejected_key": cfg.rejected_key}, label)
    keys = cfg.model_dump(include={"prompt_key", "chosen_key", "rejected_key", "tool_key"})
    require_used_keys(cfg, tuple(keys), "", table)
    return converted(table, partial(keyed_row, **keys))
