"""Conversations that an outside agent sends as text -> token ids in which sampled turns keep their sampled tokens.

The agent sends the whole conversation with every request, as messages. If earlier answers were rendered and tokenised
again, they could become other tokens than the model sampled. So the tokens of each conversation are remembered with its
answer, and only the text after them is tokenised.
"""

import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat.messages import tokenised, tokens_after_turn
from nemo_rl.data.chat.template import ChatTemplate, format_chat, plain_message
from nemo_rl.data.interfaces import call_arguments

MAX_REMEMBERED_TOKENS = 64_000_000  # 256 MB; the least recently used conversation is forgotten first

# Keys of an answer that clients send back and no template reads.
_CLIENT_KEYS = ("refusal", "annotations", "audio", "function_call")


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """The tokens for an engine."""

    token_ids: list[int]
    retokenized: int  # number of earlier answers that were tokenised again


@dataclass(eq=False)
class ServedChat:
    """The conversations of one server. `kwargs` are arguments of the chat template."""

    tokenizer: PreTrainedTokenizerBase
    kwargs: Mapping[str, Any]
    max_remembered_tokens: int = MAX_REMEMBERED_TOKENS
    # (token ids, number retokenised), by the hash of a conversation
    _known: OrderedDict[bytes, tuple[np.ndarray, int]] = field(init=False, default_factory=OrderedDict)
    _num_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._placeholder = f"ANSWER{secrets.token_hex(16)}"  # no conversation contains it by chance

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None) -> ChatPrompt:
        """The tokens of a conversation, with the header of the next answer.

        Raises ValueError for an invalid conversation, or if the chat template refuses it or a part of it.
        """
        asked = [_message(message) for message in messages]
        if not asked or asked[-1]["role"] == "assistant":
            raise ValueError("the last message must be one that the assistant is to answer, not its own")
        template = ChatTemplate(self.tokenizer, tools or None, self.kwargs)
        answers = [index for index, message in enumerate(asked) if message["role"] == "assistant"]
        for index in reversed(answers):
            key = _key(asked[: index + 1], tools)
            if key not in self._known:
                continue
            known, retokenized = self._known[key]
            marked = [*asked[:index], {"role": "assistant", "content": self._placeholder}, *asked[index + 1 :]]
            before, _, tail = (template.try_render(marked, prompt=True) or "").rpartition(self._placeholder)
            if before:  # otherwise the template does not show the answer as it is
                self._known.move_to_end(key)
                after = sum(answer > index for answer in answers)
                rest, _ = tokens_after_turn(tail, self.tokenizer, int(known[-1]))
                return ChatPrompt(token_ids=[*known.tolist(), *rest], retokenized=retokenized + after)
        chat = format_chat(asked, template, add_bos=False, add_eos=False, add_generation_prompt=True)
        return ChatPrompt(token_ids=tokenised(chat.text, self.tokenizer)[0], retokenized=len(answers))

    def remember(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        answer: Mapping[str, Any],
        token_ids: Sequence[int],
        retokenized: int,
    ) -> None:
        """Remember the tokens of a conversation: `token_ids` are the tokens of the prompt and the sampled `answer`.

        Of several answers with the same text, the newest is remembered; ids of tool calls tell answers apart.
        """
        key = _key([_message(message) for message in (*messages, answer)], tools)
        if key in self._known:
            self._num_tokens -= len(self._known.pop(key)[0])
        self._known[key] = np.asarray(token_ids, dtype=np.int32), retokenized
        self._num_tokens += len(token_ids)
        while self._num_tokens > self.max_remembered_tokens:
            _, (forgotten, _) = self._known.popitem(last=False)
            self._num_tokens -= len(forgotten)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's format as templates take it: content as one text, arguments of calls as objects."""
    plain = {key: value for key, value in plain_message(message).items() if key not in _CLIENT_KEYS}
    role = "system" if plain["role"] == "developer" else plain["role"]
    content = plain["content"]
    parts = content if isinstance(content, list) else [{"text": content} if isinstance(content, str) else content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError(f"the content of a message must be a text or a list of texts, got {str(content)[:200]}")
    plain |= {"role": role, "content": "".join(part["text"] for part in parts)}
    calls = [_call(call) for call in plain.pop("tool_calls", [])]
    return {**plain, "tool_calls": calls} if calls else plain


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call needs a function with a name, got {str(call)[:200]}")
    arguments = call_arguments(function.get("arguments"), f"a call of {function['name']}")
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _key(messages: Sequence[Mapping[str, Any]], tools: Any) -> bytes:
    return xxhash.xxh3_128_digest(json.dumps([messages, tools or None], sort_keys=True).encode())
