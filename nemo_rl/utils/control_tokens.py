"""Control tokens in the text of a message, such as `<|im_end|>`, as text.

A chat template joins what people and tools wrote with control tokens of its own, and a tokenizer cannot tell them
apart: a user's `<|im_end|>` would end the turn. So `hide` replaces the first character of each control token in a
message before it is rendered, by a character that no text has, and `tokenise` gives the tokens of the rendered text as
if the control tokens in messages were none: those that `split_special_tokens` gives. Positions stay the same.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

STAND_INS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode keeps them for use inside a program
_HIDDEN = re.compile(f"[{STAND_INS[0]}-{STAND_INS[-1]}]")
_ANCHOR = f"{STAND_INS[0]}anchor{STAND_INS[0]}"


@dataclass(eq=False)
class _ControlTokens:
    """The control tokens of a tokenizer. `backend`: the library's own tokenizer behind it."""

    ids: set[int]
    pattern: re.Pattern[str]
    stand_ins: dict[str, str]  # first character of a control token -> its stand-in
    backend: Tokenizer

    @cached_property
    def restoring(self) -> dict[int, str]:
        return {ord(stand_in): character for character, stand_in in self.stand_ins.items()}

    @cached_property
    def as_text(self) -> Tokenizer:
        """A tokenizer that knows no control tokens. A second one: other threads may use the first."""
        parts = json.loads(self.backend.to_str())
        if parts["model"]["type"] == "Unigram":  # it finds any piece of its vocabulary, also in text
            for number in self.ids - {parts["model"]["unk_id"]}:
                if number < len(vocabulary := parts["model"]["vocab"]):
                    vocabulary[number][0] = STAND_INS[0] + vocabulary[number][0]
        tokenizer = Tokenizer.from_str(json.dumps(parts))
        tokenizer.encode_special_tokens = True
        tokenizer.add_tokens([AddedToken(_ANCHOR, special=False, normalized=False)])
        return tokenizer


_known: WeakKeyDictionary[PreTrainedTokenizerBase, _ControlTokens] = WeakKeyDictionary()


def _of(tokenizer: PreTrainedTokenizerBase) -> _ControlTokens:
    if tokenizer not in _known:
        added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        longest_first = sorted({*added.values(), *map(str, tokenizer.all_special_tokens)}, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        first = sorted({token[0] for token in longest_first})
        if len(first) > len(STAND_INS):
            raise ValueError(
                f"the special tokens of the tokenizer begin with {len(first)} different characters, more than "
                f"{len(STAND_INS)}: remove special tokens that no template uses"
            )
        _known[tokenizer] = _ControlTokens(
            {*added, *tokenizer.all_special_ids},
            pattern,
            dict(zip(first, STAND_INS, strict=False)),
            cast(Tokenizer, tokenizer.backend_tokenizer),
        )
    return _known[tokenizer]


def control_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches any control token: the special tokens of the tokenizer."""
    return _of(tokenizer).pattern


def hide(value: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A text, or all texts in lists and mappings, with the control tokens hidden."""
    if isinstance(value, str):
        return _hide_text(value, _of(tokenizer))
    if isinstance(value, Mapping):
        return {key: hide(entry, tokenizer) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return _hide_in_parts([hide(entry, tokenizer) for entry in value], tokenizer)
    return value


def _hide_text(text: str, known: _ControlTokens) -> str:
    pieces, begin = [], 0
    while found := known.pattern.search(text, begin):
        pieces += [text[begin : found.start()], known.stand_ins[text[found.start()]]]
        begin = found.start() + 1
    return "".join([*pieces, text[begin:]])


def _hide_in_parts(entries: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """The parts of a content, whose texts in a row could be control tokens, too."""
    texts = [entry["text"] for entry in entries if isinstance(entry, Mapping) and isinstance(entry.get("text"), str)]
    if len(texts) < 2:
        return entries
    joined, hidden, at = hide("".join(texts), tokenizer), [], 0
    for entry in entries:
        if isinstance(entry, Mapping) and isinstance(entry.get("text"), str):
            begin, at = at, at + len(entry["text"])
            entry = {**entry, "text": joined[begin:at]}
        hidden.append(entry)
    return hidden


def restore(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text as it was written, with the control tokens that `hide` has hidden."""
    return text.translate(_of(tokenizer).restoring) if _HIDDEN.search(text) else text


def tokenise(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens of a rendered text, and the character at which each of them begins. Hidden control tokens are text."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, spans = encoded["input_ids"], encoded["offset_mapping"]
    if not _HIDDEN.search(text):
        return ids, [begin for begin, _ in spans]
    known = _of(tokenizer)
    token_ids, starts, first, begin = [], [], 0, 0
    # Between two control tokens of the template, tokens do not depend on the rest.
    for i in [*(i for i, token in enumerate(ids) if token in known.ids), len(ids)]:
        run_begin, run_end = begin, spans[i][0] if i < len(ids) else len(text)
        run = text[run_begin:run_end]
        if _HIDDEN.search(run):
            # A tokenizer may begin a text with a space, and what follows a control token without one.
            anchor = _ANCHOR if run_begin else ""
            made = known.as_text.encode(anchor + restore(run, tokenizer), add_special_tokens=False)
            dropped = 1 if anchor else 0
            token_ids += made.ids[dropped:]
            starts += [run_begin + start - len(anchor) for start, _ in made.offsets[dropped:]]
        else:
            token_ids += ids[first:i]
            starts += [start for start, _ in spans[first:i]]
        if i < len(ids):
            token_ids.append(ids[i])
            starts.append(spans[i][0])
            first, begin = i + 1, spans[i][1]
    return token_ids, starts
