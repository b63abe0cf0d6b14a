"""Processors of prompts, and the registry of all processors.

A processor of prompts is `(datum_dict, task_data_spec, tokenizer, max_seq_length, idx) -> DatumSpec`. A processor of
examples to learn from may also take three flags; see `example_processors.py`. `data.default.processor` names one by its
registry name or import path (`my_package.module:function`).

Every row has `task_name`, the name of its task. A row of a prompt has `problem` and `expected_answer` as well as
`messages`, whichever of them the dataset gave (`both_forms`). The chat template shows the row's `tools`, else the tools
of `data.default.tools_file`; the environment gets them, too.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat.images import image_parts, text_of, text_or_parts
from nemo_rl.data.chat.messages import get_formatted_message_log
from nemo_rl.data.datasets.examples import tool_call
from nemo_rl.data.interfaces import Row, TaskDataSpec, one_turn, row_tools
from nemo_rl.types import DatumSpec, ProcessorFn
from nemo_rl.utils.registry import find, import_object
from nemo_rl.utils.task_formats import STOP_STRINGS, one_text

TAGS_PROMPT = (
    "Think first, between <think> and </think>. Then write only the final answer between <answer> and </answer>."
)
NUM_STUB_TOKENS = 4  # tokens kept of each message of a prompt that is too long, and of an example that is left out


@dataclass(frozen=True)
class PromptParts:
    """The parts of a row that a processor takes."""

    messages: list[dict[str, Any]]
    metadata: dict[str, Any]  # for the environment
    stop_strings: list[str] | None = None  # end the first turn
    system_prompt: str | None = None  # follows the row's own system message, or else the system prompt of the task


def prompt_processor(parts_of: Callable[[Row, int], PromptParts]) -> ProcessorFn:
    """A processor from a function `(row, idx) -> PromptParts`.

    The messages go through prompt file and chat template. A prompt longer than `max_seq_length` tokens becomes a stub:
    its `loss_multiplier` is 0, and its messages keep a few tokens. `length` stays the real length, for the metrics.
    """

    @wraps(parts_of)
    def process(
        datum_dict: Row,
        task_data_spec: TaskDataSpec,
        tokenizer: PreTrainedTokenizerBase,
        max_seq_length: int | None,
        idx: int,
    ) -> DatumSpec:
        parts = parts_of(both_forms(datum_dict), idx)
        tools = row_tools(datum_dict, task_data_spec)
        messages = parts.messages
        if parts.system_prompt is not None:
            has_own = messages[0]["role"] == "system"
            first = text_of(messages[0]["content"]) if has_own else task_data_spec.system_prompt
            text = "\n\n".join(filter(None, (first, parts.system_prompt)))
            messages = [{"role": "system", "content": text}, *messages[has_own:]]
        log = get_formatted_message_log(
            messages,
            tokenizer,
            task_data_spec,
            add_bos_token=False,
            add_eos_token=False,
            add_generation_prompt=True,
            tools=tools,
        )
        datum = DatumSpec(
            message_log=log,
            length=sum(len(message["token_ids"]) for message in log),
            extra_env_info={**parts.metadata, "tools": tools} if tools else parts.metadata,
            loss_multiplier=1.0,
            idx=idx,
            task_name=str(task_data_spec.task_name),
        )
        if parts.stop_strings is not None:
            datum["stop_strings"] = parts.stop_strings
        if max_seq_length is not None and datum["length"] > max_seq_length:
            kept = max(1, min(NUM_STUB_TOKENS, max_seq_length // len(log)))
            datum["message_log"] = [
                {**message, "token_ids": message["token_ids"][:kept], "images": []} for message in log
            ]
            datum["loss_multiplier"] = 0.0
        return datum

    return process


@prompt_processor
def math_hf_data_processor(row: Row, idx: int) -> PromptParts:
    """The problem, after the messages before it; metadata {"ground_truth": answer}."""
    return PromptParts(_asked(row), {"ground_truth": _text(row, "expected_answer")})


@prompt_processor
def math_gdpo_data_processor(row: Row, idx: int) -> PromptParts:
    """As `math_hf_data_processor`; the system prompt asks for `<think>...</think> <answer>...</answer>` as well."""
    parts = PromptParts(_asked(row), {"ground_truth": _text(row, "expected_answer")})
    return replace(parts, system_prompt=TAGS_PROMPT)


@prompt_processor
def math_data_processor(row: Row, idx: int) -> PromptParts:
    """As `math_hf_data_processor`; columns other than the conversation are metadata, too."""
    others = {k: v for k, v in row.items() if k not in (*FORMS, "task_name")}
    return PromptParts(_asked(row), {**others, "ground_truth": _text(row, "expected_answer")})


@prompt_processor
def multichoice_qa_processor(row: Row, idx: int) -> PromptParts:
    """Row {"question" or problem, "options": {"A": text, ...}, "answer" or expected_answer: letter}, options listed.

    Metadata {"ground_truth": letter, "options": options}. Raises ValueError if the row has no options.
    """
    if "options" not in row:
        raise ValueError(
            f"multichoice_qa_processor: row {idx} has no 'options' ({{letter: text}}); it has {', '.join(row)}"
        )
    if "question" in row:
        _require_one_question(row, "question")
    question = _text(row, "question" if "question" in row else "problem")
    answer = _text(row, "answer" if "answer" in row else "expected_answer")
    if not isinstance(row["options"], Mapping):
        raise ValueError(f"multichoice_qa_processor: 'options' must be {{letter: text}}, not {row['options']!r:.80}")
    texts = {
        letter: one_text(text, f"as option {letter} in column 'options'")
        for letter, text in row["options"].items()
        if text is not None
    }
    options = "\n".join(f"{letter}) {text}" for letter, text in texts.items())
    return PromptParts(
        _asked({**row, "problem": f"{question}\n\n{options}"}), {"ground_truth": answer, "options": texts}
    )


@prompt_processor
def conversation_processor(row: Row, idx: int) -> PromptParts:
    """The row's conversation without the answer at its end, for environments that read the conversation.

    Metadata {"messages": the texts of that conversation as they stand in the row, without template, prompt file or
    system prompt}, {"num_images"} if it has any, and, if the row has an answer, {"ground_truth": answer}. Raises
    ValueError if there is no user message, or if several messages of the assistant end the conversation.
    """
    given = row["messages"] if "messages" in row else [{"role": "user", "content": row["problem"]}]
    asked, answers = _split(given, lambda role: role != "assistant")
    messages = [_for_template(message) for message in asked]
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"conversation_processor: row {idx} has no message of a user that could be answered")
    if len(answers) > 1:
        raise ValueError(f"'messages' end with {len(answers)} messages of the assistant, and only one is the answer")
    metadata: dict[str, Any] = {"messages": [{**m, "content": text_of(m["content"])} for m in messages]}
    if num_images := sum(len(image_parts(m["content"])) for m in messages):
        metadata["num_images"] = num_images
    if row.get("expected_answer") is not None:
        metadata["ground_truth"] = _text(row, "expected_answer")
    return PromptParts(messages, metadata)


@prompt_processor
def episode_processor(row: Row, idx: int) -> PromptParts:
    """The problem, for environments of several turns.

    Metadata is the row's `extra_env_info`; its `stop_strings`, if it has any, end the first turn. Raises ValueError if
    the row has no `extra_env_info`.
    """
    if "extra_env_info" not in row:
        raise ValueError(
            f"episode_processor: row {idx} has no 'extra_env_info', the metadata that its environment begins with; it "
            f"has {', '.join(row)}"
        )
    return PromptParts(_asked(row), dict(row["extra_env_info"]), row.get("stop_strings"))


@prompt_processor
def retrieval_data_processor(row: Row, idx: int) -> PromptParts:
    """A question for the retrieval environment, whose turns end with a search or an answer.

    Metadata {"ground_truth"}: the row's column `answers` or else its expected answer; one text, or a list of all right
    answers.
    """
    column = "answers" if row.get("answers") else "expected_answer"
    given = _given(row, column)
    if isinstance(given, list) and given:
        truth = [one_text(one, f"in the list of column {_source(row, column)!r}") for one in given]
    else:
        truth = _text(row, column)
    return PromptParts(_asked(row), {"ground_truth": truth}, STOP_STRINGS)


@prompt_processor
def code_data_processor(row: Row, idx: int) -> PromptParts:
    """The problem; metadata {"tests"} of the row or, without tests, {"ground_truth": the expected output}.

    A row with `completes`, {"head": source, "function": its name}, asks for that function; this is metadata, too.
    Raises ValueError if the row has neither tests nor an expected answer.
    """
    has_tests = row.get("tests") is not None
    if not has_tests and "expected_answer" not in row:
        raise ValueError(
            f"code_data_processor: row {idx} has neither 'tests' nor 'expected_answer'; it has {', '.join(row)}"
        )
    metadata = {"tests": row["tests"]} if has_tests else {"ground_truth": _text(row, "expected_answer")}
    if row.get("completes") is not None:
        metadata["completes"] = row["completes"]
    return PromptParts(_asked(row), metadata, row.get("stop_strings"))


def _asked(row: Row) -> list[dict[str, Any]]:
    """The conversation of the row up to its problem."""
    problem = {"role": "user", "content": _problem(row)}
    return [*map(_for_template, row.get("earlier_messages", ())), problem]


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a row without keys that have no value, with calls as `tool_call` gives them."""
    given = {key: value for key, value in message.items() if value is not None}
    if calls := given.pop("tool_calls", None):
        given["tool_calls"] = [tool_call(call, "column 'messages'", fill_ins=True) for call in calls]
    return {**given, "content": text_or_parts(message.get("content"))}


def _problem(row: Row) -> Any:
    # A list stays one, even without images: some templates read nothing else.
    problem = _given(row, "problem")
    is_parts = isinstance(problem, list) and all(isinstance(part, Mapping) and "type" in part for part in problem)
    return problem if is_parts else _text(row, "problem")


def _text(row: Row, column: str) -> str:
    """The text of a column. ValueError, naming it as its table does, for a list or an object."""
    return one_text(_given(row, column), f"in column {_source(row, column)!r}")


def _given(row: Row, column: str) -> Any:
    """The value of a column. ValueError if the row is a conversation that has no such part, by `both_forms`."""
    if column in row or "messages" not in row:
        return row[column]
    asked, after = _split(row["messages"], lambda role: role == "user")
    roles = ", ".join(message["role"] for message in after)
    if len(after) == 1 and asked and not text_of(after[0].get("content")):
        raise ValueError(f"the answer at the end of 'messages' has no text: write it, or add a column {column!r}")
    if not asked:
        raise ValueError(f"'messages' have no message of the user that could be answered, but {roles or 'nothing'}")
    if after:
        raise ValueError(
            f"the last message of the user in 'messages' is followed by {roles}; one message of the assistant may "
            "follow, its answer. Longer conversations are for processor: conversation_processor"
        )
    raise ValueError(
        f"'messages' end with the user, and there is no column {column!r}: add it, or the assistant's answer as the "
        "last message"
    )


def _source(row: Row, column: str) -> str:
    """The column of the table that a list or an object of a converted row comes from."""
    value = row[column]
    return next((key for key in row if row[key] is value and isinstance(value, list | dict)), column)


FORMS = ("messages", "problem", "earlier_messages", "expected_answer")


def both_forms(row: Row) -> dict[str, Any]:
    """The row with `messages` as well as `problem` and `expected_answer`, whichever of them it has.

    The last user message is the problem, unless more than an answer follows it; `earlier_messages` are the messages
    before it, if there are any. One assistant message at the end is the expected answer. Raises ValueError if
    `messages` is no list of messages with role and content.
    """
    if "messages" in row:
        said = row["messages"]
        if not isinstance(said, Sequence) or not all(map(_is_message, said)):
            raise ValueError(f"'messages' must be a list of {{role: a text, content}}, not {str(said)[:80]!r}")
        forms = dict(row)
        _, answers = _split(said, lambda role: role != "assistant")
        if len(answers) == 1 and "expected_answer" not in row and (text := text_of(answers[0].get("content"))):
            forms["expected_answer"] = text
        asked, after = _split(said, lambda role: role == "user")
        if asked and len(after) == len(answers) <= 1 and "problem" not in row:
            forms["problem"] = text_or_parts(asked[-1].get("content"))
        return forms | ({"earlier_messages": asked[:-1]} if "problem" in forms and asked[:-1] else {})
    if "problem" in row and "expected_answer" in row:
        return {"messages": one_turn(row["problem"], row["expected_answer"]), **row}
    return dict(row)


def forms_of_table(row: Row) -> dict[str, Any]:
    """As `both_forms`, for a row as its dataset gives it; one with `options` has `question` and `answer`, too.

    Raises ValueError if its `problem` is another question.
    """
    forms = both_forms(row)
    if "problem" in row:
        _require_one_question(row, "problem")
    if "options" in forms:
        named = {"question": "problem", "answer": "expected_answer"}
        forms = {**{name: forms[column] for name, column in named.items() if column in forms}, **forms}
    return forms


def _require_one_question(row: Row, column: str) -> None:
    """Raises ValueError if the row has messages, and another question in `column` than they end with."""
    if "messages" not in row:
        return
    asked, _ = _split(row["messages"], lambda role: role == "user")
    given = text_of(row[column]) if isinstance(row[column], list) else _text(row, column)
    if not asked or text_of(asked[-1].get("content")).strip() != given.strip():
        raise ValueError(
            f"column {column!r} is not the last question of the user in 'messages': remove one of the two columns, or "
            f"choose {column!r} with input_key"
        )


def _split(
    messages: Sequence[Mapping[str, Any]], is_last: Callable[[str], bool]
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """The messages up to the last one with such a role, and those after it."""
    end = max((number for number, message in enumerate(messages, 1) if is_last(message["role"])), default=0)
    return messages[:end], messages[end:]


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and bool(value.keys() & {"content", "tool_calls"})
    )


# -- The registry.

FLAGS = ("add_bos", "add_eos", "add_generation_prompt")
_EXAMPLE_PROCESSORS = "nemo_rl.data.rows.example_processors"
_OF_PROMPTS = (
    *(math_hf_data_processor, math_data_processor, math_gdpo_data_processor, multichoice_qa_processor),
    *(conversation_processor, episode_processor, retrieval_data_processor, code_data_processor),
)
PROCESSOR_REGISTRY: dict[str, str | Callable[..., Any]] = {
    **{processor.__name__: processor for processor in _OF_PROMPTS},
    **dict.fromkeys(("default", "vlm_hf_data_processor"), math_hf_data_processor),
    **{name: f"{_EXAMPLE_PROCESSORS}:{name}" for name in ("sft_processor", "pretokenized", "preference_processor")},
    "helpsteer3_data_processor": conversation_processor,  # of prompts; of pairs: `find_processor`
}


def register_processor(name: str, processor: Callable[..., Any]) -> None:
    """Make a function available as `processor: <name>`. ValueError if the name is taken."""
    if name in PROCESSOR_REGISTRY:
        raise ValueError(f"a processor named {name!r} is registered already")
    PROCESSOR_REGISTRY[name] = processor


def find_processor(name: str, *, of_examples: bool = False) -> Callable[..., Any]:
    """The processor of a registry name or an import path.

    Raises ValueError if there is none, or it makes the other kind of rows.
    """
    if of_examples and name == "helpsteer3_data_processor":
        name = "preference_processor"
    processor = find(PROCESSOR_REGISTRY, name, "processor")
    if isinstance(processor, str):
        if not of_examples:
            raise ValueError(f"processor {name!r} makes no prompts: it is for SFT, DPO and reward models")
        processor = import_object(processor, "processor")
    if of_examples and processor in _OF_PROMPTS:
        raise ValueError(f"processor {name!r} makes prompts, for training with rewards; set sft_processor, for example")
    return processor


@cache
def flags_of(processor: Callable[..., Any]) -> frozenset[str]:
    """The flags that a processor of examples takes; one written for NeMo RL may take none."""
    parameters = inspect.signature(processor).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return frozenset(FLAGS if takes_all else parameters.keys() & set(FLAGS))
