"""Message logs: conversations whose messages own their tokens.

The token ids of all messages, one after another, are exactly what the chat template and the tokenizer make of the whole
conversation: it is rendered and tokenised once, and each token goes to the message in whose text it starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat.template import ChatTemplate, format_chat, plain_message
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.types import LLMMessageLogType


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as text, by the tokenizer's chat template, which sees all keys of a message."""
    template = ChatTemplate(tokenizer, tools, chat_template_kwargs or {})
    return template.render([plain_message(message) for message in messages], prompt=add_generation_prompt)[0]


def get_formatted_message_log(
    message_log: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    task_data_spec: TaskDataSpec,
    add_bos_token: bool = True,
    add_eos_token: bool = True,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> LLMMessageLogType:
    """The messages with the rendered text of each as its `content`, its `token_ids` int64 [n], and its `loss_spans`.

    A system prompt of the task goes first unless the log begins with one; its prompt template is filled with the first
    user message. `add_bos_token` and `add_eos_token` add the token where the template itself does not. Where a template
    renders an early message differently once more follow, the text that the whole conversation has counts.

    With `add_generation_prompt` the header of an assistant's turn is given and belongs to the message before it, and a
    log that does not end with the assistant ends with such a header. Without it, the header is part of the assistant's
    message. `loss_spans`, [begin, end) of the message's tokens, are what its author wrote: no header that is given and
    no white space behind the mark that ends the turn; for the assistant, what `{% generation %}` blocks of the template
    hold, where it has them and headers are given.

    Raises:
        ValueError: when there is no message, or the template refuses the conversation or leaves out a role.
    """
    if not message_log:
        raise ValueError("a conversation without a single message")
    messages = _with_task_prompts(message_log, task_data_spec)
    chat = format_chat(
        messages,
        ChatTemplate(tokenizer, tools, chat_template_kwargs or {}),
        add_bos=add_bos_token,
        add_eos=add_eos_token,
        add_generation_prompt=add_generation_prompt,
    )
    encoded = tokenizer(chat.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in encoded["offset_mapping"]]
    all_ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    formatted: LLMMessageLogType = []
    first = 0
    for message, answers, begin, end in zip(
        messages, chat.answers, chat.begins, [*chat.begins[1:], len(chat.text)], strict=True
    ):
        last = len(starts) if end == len(chat.text) else bisect_left(starts, end, lo=first)
        spans = [
            (bisect_left(starts, a, first, last) - first, bisect_left(starts, b, first, last) - first)
            for a, b in answers
        ]
        formatted.append(
            {**message, "content": chat.text[begin:end], "token_ids": all_ids[first:last], "loss_spans": spans}
        )
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


@dataclass(frozen=True)
class ObservationRenderer:
    """Token ids that lead from the end of a sampled turn to the start of the next, with an observation in between.

    They are what the chat template puts after the content of an assistant's turn: the mark that ends the turn, the
    observation, the header of the next answer. What of the mark the model has sampled itself is left away. A role that
    the template refuses or leaves out (many know nothing of "environment") is rendered as a user message. Picklable.
    """

    tokenizer: PreTrainedTokenizerBase
    _roles: dict[str, str] = field(default_factory=dict, compare=False)  # as the environment says -> as rendered

    def __call__(self, observation: Mapping[str, str], *, sampled: Sequence[int]) -> list[int]:
        """`sampled` are the tokens of the turn, with its end where the model sampled one.

        Raises:
            ValueError: when the template allows no message of a user after an answer.
        """
        token_ids = self._tokens(self._text(observation))
        special = set(self.tokenizer.all_special_ids)
        end = next((i for i, token in enumerate(token_ids) if token in special), None)
        if end is not None and len(sampled) > 0 and int(sampled[-1]) == token_ids[end]:
            return token_ids[end + 1 :]
        return token_ids

    def seen_and_rendered(
        self, prompt: Sequence[Mapping[str, Any]], answers: Sequence[str], observation: Mapping[str, str]
    ) -> tuple[str, str]:
        """A conversation up to the header of its next answer: as the model sees it, and as the template writes it.

        Each answer is followed by the observation. Where the two differ, the template writes earlier turns differently
        once more follow: an episode does not, it goes on from the tokens it has.
        """
        template = ChatTemplate(self.tokenizer)
        role = self.role(observation["role"])
        seen, conversation = template.render(prompt, prompt=True)[0], list(prompt)
        for answer in answers:
            seen += answer + self._text(observation)
            conversation += [{"role": "assistant", "content": answer}, {**observation, "role": role}]
        return seen, template.try_render(conversation, prompt=True) or ""

    def _text(self, observation: Mapping[str, str]) -> str:
        tail = self._tail(self.role(observation["role"]), observation["content"])
        if tail is None:
            raise ValueError(
                "the chat template refuses a message of a user after an answer: take one that allows further turns "
                "with policy.tokenizer.chat_template, or have one turn with max_rollout_turns=1"
            )
        return tail

    def role(self, role: str) -> str:
        """The role that a message of this role is rendered as: itself, or user."""
        if role not in self._roles:
            mark = "OBSERVATIONCONTENT"
            self._roles[role] = role if mark in (self._tail(role, mark) or "") else "user"
        return self._roles[role]

    def _tail(self, role: str, content: str) -> str | None:
        """What the template writes behind the content of an answer that a message follows; None if it refuses."""
        mark = "ANSWERCONTENT"
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": mark},
            {"role": role, "content": content},
        ]
        before, _, tail = (ChatTemplate(self.tokenizer).try_render(messages, prompt=True) or "").partition(mark)
        return tail if before else None

    def _tokens(self, tail: str) -> list[int]:
        """Behind a special token, as in the conversation: some tokenizers begin a text of its own with a space."""
        first = str(self.tokenizer.eos_token)
        token_ids = self.tokenizer(first + tail, add_special_tokens=False)["input_ids"]
        assert token_ids[0] == self.tokenizer.eos_token_id
        return token_ids[1:]


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
    """Put `token_loss_mask` (1 on tokens to train on, like `token_ids`) into every message, in place.

    Of a message to train on these are the tokens in its `loss_spans`, or all of them where it has none.
    """
    for message_log in message_logs:
        for i, message in enumerate(message_log):
            trained = message["role"] in roles_to_train_on and (not only_unmask_final or i == len(message_log) - 1)
            mask = torch.zeros_like(message["token_ids"])
            for begin, end in message.get("loss_spans", [(0, len(mask))]) if trained else ():
                mask[begin:end] = 1
            message["token_loss_mask"] = mask
