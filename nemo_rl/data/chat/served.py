"""Conversations that come as text, turn by turn, as token ids in which sampled turns stay as they were sampled.

An outside agent sends the whole conversation with every request, as messages. Rendered and tokenised anew, what the
model said before may come out as other tokens than it sampled. So the tokens of each answer are remembered, by the
conversation they ended, and only what came after them is tokenised.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat.template import ChatTemplate, format_chat, plain_message

MAX_REMEMBERED_TOKENS = 64_000_000  # 256 MB; the conversation that was used least recently is forgotten first

# What clients send back of an answer and no template reads.
_CLIENT_KEYS = ("refusal", "annotations", "audio", "function_call")


@dataclass(frozen=True, kw_only=True)
class ServedPrompt:
    """What an engine is given. `retokenized`: the number of earlier answers that went through the tokenizer again."""

    token_ids: list[int]
    retokenized: int


@dataclass(frozen=True)
class _Known:
    """A conversation that ends with an answer, as the engine saw it."""

    token_ids: np.ndarray  # int32 [T]
    retokenized: int


class ServedChat:
    """Belongs to one server. `kwargs` are arguments of the chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any],
        max_remembered_tokens: int = MAX_REMEMBERED_TOKENS,
    ) -> None:
        self.tokenizer = tokenizer
        self.kwargs = dict(kwargs)
        self.max_remembered_tokens = max_remembered_tokens
        self._special = set(tokenizer.all_special_ids)
        self._mark = f"ANSWER{secrets.token_hex(16)}"  # stands for an answer; no conversation holds it by chance
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._num_tokens = 0

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None) -> ServedPrompt:
        """The tokens of a conversation, with the header of the answer to come.

        Raises:
            ValueError: when the conversation is not one, or the chat template refuses it or a part of it.
        """
        asked = [_message(message) for message in messages]
        if asked[-1]["role"] == "assistant":
            raise ValueError("the last message is the assistant's own; end with a message that it is to answer")
        template = ChatTemplate(self.tokenizer, tools or None, self.kwargs)
        answers = [index for index, message in enumerate(asked) if message["role"] == "assistant"]
        for index in reversed(answers):
            key = _key(asked[: index + 1], tools)
            known = self._known.get(key)
            if known is not None and (tail := self._tail(asked, index, template, int(known.token_ids[-1]))) is not None:
                self._known.move_to_end(key)
                after = sum(answer > index for answer in answers)
                return ServedPrompt(token_ids=[*known.token_ids.tolist(), *tail], retokenized=known.retokenized + after)
        chat = format_chat(asked, template, add_bos=False, add_eos=False, add_generation_prompt=True)
        return ServedPrompt(token_ids=self._tokens(chat.text), retokenized=len(answers))

    def remember(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        answer: Mapping[str, Any],
        token_ids: Sequence[int],
        retokenized: int,
    ) -> None:
        """`token_ids`, prompt and completion, are those of `messages` with `answer` behind them.

        Of several answers that read the same, the newest is remembered; ids of tool calls tell answers apart.
        """
        key = _key([_message(message) for message in (*messages, answer)], tools)
        if key in self._known:
            self._num_tokens -= len(self._known.pop(key).token_ids)
        self._known[key] = _Known(np.asarray(token_ids, dtype=np.int32), retokenized)
        self._num_tokens += len(token_ids)
        while self._num_tokens > self.max_remembered_tokens:
            _, forgotten = self._known.popitem(last=False)
            self._num_tokens -= len(forgotten.token_ids)

    def _tail(self, asked: list[dict[str, Any]], index: int, template: ChatTemplate, last: int) -> list[int] | None:
        """Tokens from the end of answer `index` on; None where the template does not show the answer as it is.

        Of the mark that ends the answer, what the model has sampled as its `last` token is left away.
        """
        marked = [*asked[:index], {"role": "assistant", "content": self._mark}, *asked[index + 1 :]]
        before, _, tail = (template.try_render(marked, prompt=True) or "").rpartition(self._mark)
        if not before:
            return None
        token_ids = self._behind_an_end(tail)
        end = next((i for i, token in enumerate(token_ids) if token in self._special), None)
        return token_ids[end + 1 :] if end is not None and token_ids[end] == last else token_ids

    def _behind_an_end(self, tail: str) -> list[int]:
        """Tokens of `tail` behind a special token: some tokenizers begin a text of its own with a space."""
        token_ids = self._tokens(f"{self.tokenizer.eos_token}{tail}")
        assert token_ids[0] == self.tokenizer.eos_token_id
        return token_ids[1:]

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's format as templates take it: one text, and arguments of calls as objects."""
    plain = {key: value for key, value in plain_message(message).items() if key not in _CLIENT_KEYS}
    role = "system" if plain["role"] == "developer" else plain["role"]
    plain |= {"role": role, "content": _text(plain["content"])}
    if "tool_calls" in plain:
        plain["tool_calls"] = [_call(call) for call in plain["tool_calls"]]
        if not plain["tool_calls"]:
            del plain["tool_calls"]
    return plain


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError(f"the content of a message must be a text or a list of texts, got {str(content)[:200]}")
    return "".join(part["text"] for part in parts)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call needs a function with a name, got {str(call)[:200]}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"the arguments of a call of {function['name']} are no JSON: {error}") from error
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}


def _key(messages: Sequence[Mapping[str, Any]], tools: Any) -> bytes:
    return xxhash.xxh3_128_digest(json.dumps([messages, tools or None], sort_keys=True).encode())
