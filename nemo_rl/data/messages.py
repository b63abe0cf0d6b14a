"""Message logs: conversations whose messages own their tokens.

The token ids of all messages, one after another, are exactly what the chat template and the tokenizer make of the whole
conversation: it is rendered and tokenised once, and each token goes to the message in whose text it starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.types import LLMMessageLogType


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The conversation as text, by the tokenizer's chat template."""
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    rendered = tokenizer.apply_chat_template(
        plain, tokenize=False, add_generation_prompt=add_generation_prompt, tools=cast(Any, tools)
    )
    return str(rendered)


def get_formatted_message_log(
    message_log: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    task_data_spec: TaskDataSpec,
    add_bos_token: bool = True,
    add_eos_token: bool = True,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> LLMMessageLogType:
    """New messages {"role", "content", "token_ids" int64 [n]} with the rendered text of each as its content.

    A system prompt of the task goes first unless the log begins with one; its prompt template is filled with the first
    user message. `add_bos_token` and `add_eos_token` add the token where the template itself does not. The generation
    prompt belongs to the last message. Where a template renders an early message differently once more follow, the text
    that the whole conversation has counts.
    """
    messages = _with_task_prompts(message_log, task_data_spec)
    full = render_chat(messages, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools)
    bos = str(tokenizer.bos_token or "")
    if add_bos_token and not full.startswith(bos):
        full = bos + full
    if add_eos_token and not add_generation_prompt and not full.rstrip().endswith(str(tokenizer.eos_token)):
        full += str(tokenizer.eos_token)
    cuts = _cuts(messages, full, tokenizer, tools)
    encoded = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    formatted: LLMMessageLogType = []
    first = 0
    for message, begin, end in zip(messages, [0, *cuts[:-1]], cuts, strict=True):
        last = len(starts) if end == len(full) else bisect_left(starts, end, lo=first)
        ids = torch.tensor(encoded["input_ids"][first:last], dtype=torch.int64)
        formatted.append({**message, "content": full[begin:end], "token_ids": ids})
        first = last
    return formatted


def _with_task_prompts(message_log: Sequence[Mapping[str, Any]], spec: TaskDataSpec) -> list[dict[str, Any]]:
    messages = [dict(message) for message in message_log]
    if spec.prompt is not None:
        user = next((message for message in messages if message["role"] == "user"), None)
        if user is not None:
            user["content"] = spec.fill(user["content"])
    if spec.system_prompt is not None and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": spec.system_prompt})
    return messages


def _cuts(
    messages: Sequence[Mapping[str, Any]],
    full: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None,
) -> list[int]:
    """Where each message's text ends in `full`: as far as the conversation up to it is a prefix of the whole."""
    cuts: list[int] = []
    shift = None  # characters of a beginning-of-sequence token added in front of the template's own text
    for end in range(1, len(messages)):
        try:
            partial = render_chat(messages[:end], tokenizer, tools=tools)
        except TemplateError:  # some templates refuse a conversation without a user: its text goes to the next message
            cuts.append(cuts[-1] if cuts else 0)
            continue
        if shift is None:
            bos = str(tokenizer.bos_token or "")
            shift = len(bos) if bos and full.startswith(bos) and not partial.startswith(bos) else 0
        reached = shift + _common_length(partial, full[shift:])
        cuts.append(max(reached, cuts[-1] if cuts else 0))
    return [*cuts, len(full)]


def _common_length(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class ObservationRenderer:
    """Token ids that lead from the end of a sampled turn to the start of the next, with an observation in between.

    The sampled turn ends with the end-of-sequence token, so the template's text begins right after it. A role that the
    template leaves out (many know nothing of "environment") is rendered as a user message. Picklable.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, observation: Mapping[str, str]) -> list[int]:
        role = observation["role"] if observation["content"] in self._tail(observation["role"], observation) else "user"
        return self.tokenizer(self._tail(role, observation), add_special_tokens=False)["input_ids"]

    def _tail(self, role: str, observation: Mapping[str, str]) -> str:
        mark = "\x00turn\x00"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        try:
            text = render_chat(
                [*turns, {"role": role, "content": observation["content"]}], self.tokenizer, add_generation_prompt=True
            )
        except TemplateError:  # the template refuses the role
            return ""
        return text.rpartition(mark)[2].removeprefix(str(self.tokenizer.eos_token))


def message_log_to_flat_messages(message_log: LLMMessageLogType) -> dict[str, Any]:
    """One conversation with the values of each key joined: tensors concatenated on dim 0, everything else listed."""
    flat: dict[str, Any] = {}
    for key in get_keys_from_message_log(message_log):
        values = [message[key] for message in message_log if key in message]
        if all(isinstance(value, torch.Tensor) for value in values):
            flat[key] = torch.cat(values)
        else:
            flat[key] = values
    return flat


def get_keys_from_message_log(message_log: LLMMessageLogType) -> list[str]:
    """Every key of any message, in order of first appearance."""
    return list(dict.fromkeys(key for message in message_log for key in message))


def batched_message_log_to_flat_message(
    message_logs: Sequence[LLMMessageLogType],
    pad_value_dict: Mapping[str, int | float] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict[Any], torch.Tensor]:
    """Conversations as one right-padded batch: (tensors [B, S] and lists by key, lengths int32 [B])."""
    flats = [
        BatchedDataDict({k: _batch_of_one(v) for k, v in message_log_to_flat_messages(log).items()})
        for log in message_logs
    ]
    lengths = torch.tensor([flat["token_ids"].shape[1] for flat in flats], dtype=torch.int32)
    batch = BatchedDataDict.from_batches(flats, pad_value_dict=pad_value_dict)
    missing = -batch["token_ids"].shape[1] % make_sequence_length_divisible_by
    for key, value in batch.items():
        if missing and isinstance(value, torch.Tensor) and value.ndim == 2:
            pad = (pad_value_dict or {}).get(key, 0)
            batch[key] = torch.nn.functional.pad(value, (0, missing), value=pad)
    return batch, lengths


def _batch_of_one(value: Any) -> Any:
    return value[None] if isinstance(value, torch.Tensor) else [value]


def add_loss_mask_to_message_log(
    message_logs: Sequence[LLMMessageLogType],
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> None:
    """Put `token_loss_mask` (1 on tokens to train on, like `token_ids`) into every message, in place."""
    for message_log in message_logs:
        for i, message in enumerate(message_log):
            trained = message["role"] in roles_to_train_on and (not only_unmask_final or i == len(message_log) - 1)
            make = torch.ones_like if trained else torch.zeros_like
            message["token_loss_mask"] = make(message["token_ids"])
