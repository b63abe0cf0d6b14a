"""Processors: `(datum_dict, task_data_spec, tokenizer, max_seq_length, idx) -> DatumSpec`, a row made into a prompt.

`data.default.processor` names one by its registry name or as an import path (`my_package.module:function`). A row has
`problem` and `expected_answer` as well as `messages`, whichever of them the dataset gave. Its `tools`, or those of
`data.default.tools_file`, are shown to the model by the chat template and handed to the environment as metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat.messages import get_formatted_message_log
from nemo_rl.data.interfaces import TaskDataSpec, row_tools
from nemo_rl.types import DatumSpec, LLMMessageLogType, ProcessorFn
from nemo_rl.utils.registry import find
from nemo_rl.utils.task_formats import STOP_STRINGS

NUM_STUB_TOKENS = 4  # tokens kept of each message of a prompt that is too long


def math_hf_data_processor(
    datum_dict: Mapping[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """The problem through prompt file and chat template; metadata {"ground_truth": answer}."""
    return _prompt(
        datum_dict,
        [{"role": "user", "content": problem_text(datum_dict)}],
        {"ground_truth": answer_text(datum_dict)},
        task_data_spec,
        tokenizer,
        max_seq_length,
        idx,
    )


def math_data_processor(
    datum_dict: Mapping[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """As `math_hf_data_processor`; columns other than the conversation go to the environment as metadata too."""
    datum = math_hf_data_processor(datum_dict, task_data_spec, tokenizer, max_seq_length, idx)
    others = {k: v for k, v in datum_dict.items() if k not in ("messages", "problem", "expected_answer", "task_name")}
    datum["extra_env_info"] = {**others, **(datum["extra_env_info"] or {})}
    return datum


def multichoice_qa_processor(
    datum_dict: Mapping[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """Row {"question" or problem, "options": {"A": text, ...}, "answer" or expected_answer: letter}, options listed.

    Raises:
        ValueError: when the row has no options.
    """
    if "options" not in datum_dict:
        raise ValueError(
            f"multichoice_qa_processor: row {idx} has no 'options' ({{letter: text}}); it has {', '.join(datum_dict)}"
        )
    question = str(datum_dict["question"]) if "question" in datum_dict else problem_text(datum_dict)
    answer = str(datum_dict["answer"]) if "answer" in datum_dict else answer_text(datum_dict)
    options = "\n".join(f"{letter}) {text}" for letter, text in datum_dict["options"].items() if text is not None)
    return _prompt(
        datum_dict,
        [{"role": "user", "content": f"{question}\n\n{options}"}],
        {"ground_truth": answer},
        task_data_spec,
        tokenizer,
        max_seq_length,
        idx,
    )


def conversation_processor(
    datum_dict: Mapping[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """The row's conversation up to its last user turn, for environments that read what was said.

    Metadata {"messages": that conversation as it stands in the row, without template, prompt file or system prompt},
    and, where the row has an answer, {"ground_truth": it}.

    Raises:
        ValueError: when nobody asks anything.
    """
    given = datum_dict["messages"] if "messages" in datum_dict else [{"role": "user", "content": datum_dict["problem"]}]
    messages = [{"role": str(message["role"]), "content": str(message["content"])} for message in given]
    metadata: dict[str, Any] = {"messages": messages}
    if "expected_answer" in datum_dict or (messages and messages[-1]["role"] == "assistant"):
        metadata["ground_truth"] = answer_text(datum_dict)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"conversation_processor: row {idx} has no message of a user that could be answered")
    return _prompt(datum_dict, messages, metadata, task_data_spec, tokenizer, max_seq_length, idx)


def episode_processor(
    datum_dict: Mapping[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """The problem through prompt file and chat template, for environments of several turns.

    Metadata is the row's `extra_env_info`; its `stop_strings`, where it has them, end the first turn.

    Raises:
        ValueError: when the row has no `extra_env_info`.
    """
    if "extra_env_info" not in datum_dict:
        raise ValueError(
            f"episode_processor: row {idx} has no 'extra_env_info', the metadata that its environment begins with; it "
            f"has {', '.join(datum_dict)}"
        )
    prompt = [{"role": "user", "content": problem_text(datum_dict)}]
    datum = _prompt(
        datum_dict, prompt, dict(datum_dict["extra_env_info"]), task_data_spec, tokenizer, max_seq_length, idx
    )
    if datum_dict.get("stop_strings") is not None:
        datum["stop_strings"] = list(datum_dict["stop_strings"])
    return datum


def retrieval_data_processor(
    datum_dict: Mapping[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """A question for the environment that looks things up; its turns end with a search or an answer.

    Metadata {"ground_truth"}: the row's column `answers`, a list of all that are right, or its expected answer.
    """
    answers = datum_dict.get("answers")
    metadata = {"ground_truth": list(answers) if answers else answer_text(datum_dict)}
    row = {**datum_dict, "extra_env_info": metadata, "stop_strings": STOP_STRINGS}
    return episode_processor(row, task_data_spec, tokenizer, max_seq_length, idx)


def code_data_processor(
    datum_dict: Mapping[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """As `episode_processor`; metadata {"tests"} of the row, or {"ground_truth": what a program prints} without them.

    Raises:
        ValueError: when the row has neither tests nor an expected answer.
    """
    has_tests = datum_dict.get("tests") is not None
    if not has_tests and "expected_answer" not in datum_dict and "messages" not in datum_dict:
        raise ValueError(
            f"code_data_processor: row {idx} has neither 'tests' nor 'expected_answer'; it has {', '.join(datum_dict)}"
        )
    metadata = {"tests": datum_dict["tests"]} if has_tests else {"ground_truth": answer_text(datum_dict)}
    row = {**datum_dict, "extra_env_info": metadata}
    return episode_processor(row, task_data_spec, tokenizer, max_seq_length, idx)


PROCESSOR_REGISTRY: dict[str, ProcessorFn] = {
    "default": math_hf_data_processor,
    "code_data_processor": code_data_processor,
    "conversation_processor": conversation_processor,
    "episode_processor": episode_processor,
    "math_hf_data_processor": math_hf_data_processor,
    "math_data_processor": math_data_processor,
    "multichoice_qa_processor": multichoice_qa_processor,
    "retrieval_data_processor": retrieval_data_processor,
}


def register_processor(name: str, processor: ProcessorFn) -> None:
    """Make a function available as `processor: <name>`.

    Raises:
        ValueError: when the name is taken.
    """
    register(PROCESSOR_REGISTRY, name, processor)


def find_processor(name: str) -> ProcessorFn:
    """The processor of a registry name or an import path.

    Raises:
        ValueError: when there is none.
    """
    return find(PROCESSOR_REGISTRY, name, "processor")


P = TypeVar("P")


def register(registry: dict[str, P], name: str, processor: P) -> None:
    """Add to a registry of processors. ValueError when the name is taken."""
    if name in registry:
        raise ValueError(f"a processor named {name!r} is registered already")
    registry[name] = processor


def problem_text(row: Mapping[str, Any]) -> str:
    """The problem of a row: `problem`, or the first user message. KeyError when there is none."""
    if "problem" in row:
        return str(row["problem"])
    for message in row["messages"]:
        if message["role"] == "user":
            return str(message["content"])
    raise KeyError("problem")


def answer_text(row: Mapping[str, Any]) -> str:
    """The expected answer of a row: `expected_answer`, or the last assistant message. KeyError when there is none."""
    if "expected_answer" in row:
        return str(row["expected_answer"])
    for message in reversed(row["messages"]):
        if message["role"] == "assistant":
            return str(message["content"])
    raise KeyError("expected_answer")


def _prompt(
    row: Mapping[str, Any],
    messages: list[dict[str, str]],
    metadata: dict[str, Any],
    spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int | None,
    idx: int,
) -> DatumSpec:
    """The messages through the chat template, with the tools of the row, which are metadata as well."""
    tools = row_tools(row, spec)
    log = get_formatted_message_log(
        messages,
        tokenizer,
        spec,
        add_bos_token=False,
        add_eos_token=False,
        add_generation_prompt=True,
        tools=tools,
    )
    return cut_to_length(
        DatumSpec(
            message_log=log,
            length=sum(len(message["token_ids"]) for message in log),
            extra_env_info={**metadata, "tools": tools} if tools else metadata,
            loss_multiplier=1.0,
            idx=idx,
            task_name=str(spec.task_name),
        ),
        max_seq_length,
    )


def cut_to_length(datum: DatumSpec, max_seq_length: int | None) -> DatumSpec:
    """The datum as it is, or, when longer than allowed, a stub with `loss_multiplier` 0.

    `length` of a stub stays the real length, so that it can be counted and reported; its messages keep a few tokens.
    """
    if max_seq_length is None or datum["length"] <= max_seq_length:
        return datum
    kept = max(1, min(NUM_STUB_TOKENS, max_seq_length // len(datum["message_log"])))
    stub: LLMMessageLogType = [{**m, "token_ids": _ids(m)[:kept]} for m in datum["message_log"]]
    return DatumSpec(**{**datum, "message_log": stub, "loss_multiplier": 0.0})


def _ids(message: Mapping[str, Any]) -> torch.Tensor:
    return torch.as_tensor(message["token_ids"], dtype=torch.int64)
