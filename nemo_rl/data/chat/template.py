"""Conversations as text, by a tokenizer's chat template, and which part of the text is whose.

A content is where the text changes when the content is replaced. What stands between two contents is divided by two
further renderings of the conversation up to there: what follows its last content ends that turn, and what a generation
prompt adds is the header of an answer.

That is three renderings for every message. Templates mostly put fixed text around what the messages say, so it is done
once for conversations of one shape (the roles in order), with marks for contents; the next conversation of that shape
is rendered once and compared with the fixed text. Where that does not fit (tool calls, contents shown elsewhere), the
messages are replaced one by one.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from nemo_rl.utils.tokenizer import strftime_now

Spans = list[tuple[int, int]]

OWN_KEYS = ("token_ids", "token_loss_mask", "generation_logprobs", "loss_spans")  # of messages; no template sees them
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
MAX_SHAPES = 512
MARK = "MESSAGE0CONTENT"


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A rendered conversation. All numbers are characters of `text`."""

    text: str
    begins: list[int]  # where the text of each message begins; it ends where the next begins
    answers: list[Spans]  # of each message: what its author wrote, without a given header and what follows the end mark


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer, with what it needs besides the messages."""

    tokenizer: PreTrainedTokenizerBase
    tools: list[dict[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of the template

    @property
    def source(self) -> str:
        return self.tokenizer.get_chat_template(None, cast(Any, self.tools))

    def render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> tuple[str, Spans]:
        """The text, and the spans of its `{% generation %}` blocks; `prompt` adds the header of an answer.

        A template that writes the date of today writes one that never changes (`TEMPLATE_TIME`).
        """
        source = self.source
        rendered, blocks = render_jinja_template(
            conversations=[list(messages)],  # pyright: ignore[reportArgumentType]  (messages are plain dicts)
            tools=cast(Any, self.tools),
            chat_template=source,
            return_assistant_tokens_mask=GENERATION_BLOCK.search(source) is not None,
            add_generation_prompt=prompt,
            **{"strftime_now": strftime_now, **self.tokenizer.special_tokens_map, **self.kwargs},
        )
        return str(rendered[0]), cast(Spans, blocks[0] if blocks else [])

    def try_render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str | None:
        """The text, or None where the template refuses: some want a user, or turns that alternate."""
        try:
            return self.render(messages, prompt=prompt)[0]
        except TemplateError:
            return None


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a template is given of a message: every key that has a value, except ours; a content in any case."""
    given = {key: value for key, value in message.items() if value is not None and key not in OWN_KEYS}
    return {**given, "content": given.get("content", "")}


def format_chat(
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    *,
    add_bos: bool,
    add_eos: bool,
    add_generation_prompt: bool,
) -> Chat:
    """The conversation as text, divided among its messages.

    With `add_generation_prompt` the header of an assistant's turn belongs to the message before it, and a conversation
    that does not end with the assistant ends with such a header. `{% generation %}` blocks of a template then decide
    what the assistant wrote.

    Raises:
        ValueError: when the template refuses the conversation, or leaves out all messages of a role, calls or tools.
    """
    plain = [plain_message(message) for message in messages]
    prompt = add_generation_prompt and plain[-1]["role"] != "assistant"
    plain, text, blocks = _rendered(plain, template, prompt=prompt)
    _require_calls_and_tools(plain, text, template, prompt=prompt)
    shape = _shape(plain, template, prompt=prompt)
    if shape.left_out:
        raise ValueError(
            f"the chat template leaves out messages of the role {' and '.join(map(repr, shape.left_out))}: use roles "
            "it knows, or another policy.tokenizer.chat_template"
        )
    borders = shape.borders(plain, text) or _borders_one_by_one(plain, text, template, prompt=prompt)
    bos, eos = str(template.tokenizer.bos_token or ""), str(template.tokenizer.eos_token or "")
    added = len(bos) if add_bos and not text.startswith(bos) else 0
    full = bos[:added] + text
    if add_eos and not prompt and not full.rstrip().endswith(eos):
        full += eos
    heads, ends = [head + added for head in borders.heads], [end + added for end in borders.ends]
    if not prompt:
        ends[-1] = len(full)
    given = heads if add_generation_prompt else [0, *ends[:-1]]
    begins = [0, *given[1:], len(full)]
    marks = _facts_of(template.tokenizer).marks
    answers: list[Spans] = [[(head, _trimmed(full, head, end, marks))] for head, end in zip(given, ends, strict=True)]
    if blocks and add_generation_prompt:
        for i, message in enumerate(plain):
            if message["role"] == "assistant":
                inside = [(max(a + added, begins[i]), min(b + added, begins[i + 1])) for a, b in blocks]
                answers[i] = [(a, b) for a, b in inside if a < b]
    return Chat(text=full, begins=begins[:-1], answers=answers)


def _rendered(
    plain: list[dict[str, Any]], template: ChatTemplate, *, prompt: bool
) -> tuple[list[dict[str, Any]], str, Spans]:
    """The messages as the template takes them, with what it makes of them."""
    for messages in (plain, [_with_arguments_as_text(message) for message in plain]):
        try:
            return messages, *template.render(messages, prompt=prompt)
        except (TemplateError, TypeError) as error:  # a TypeError is a template that takes values of another kind
            failure = error
            if isinstance(error, TemplateError) or messages == [_with_arguments_as_text(m) for m in messages]:
                break
    roles = ", ".join(str(message["role"]) for message in plain)
    raise ValueError(f"the chat template refuses a conversation of the roles {roles}: {failure}") from failure


def _require_calls_and_tools(plain: list[dict[str, Any]], text: str, template: ChatTemplate, *, prompt: bool) -> None:
    """Raises ValueError where the text is the same without the calls of a message, or without the tools.

    Where calls are not shown, what is left of the message teaches the model to say nothing.
    """
    advice = "take one that does with policy.tokenizer.chat_template"
    for i, message in enumerate(plain):
        if message.get("tool_calls"):
            silent = {key: value for key, value in message.items() if key != "tool_calls"}
            if template.try_render([*plain[:i], silent, *plain[i + 1 :]], prompt=prompt) == text:
                raise ValueError(f"the chat template does not show the tool calls of message {i} (from 0): {advice}")
    if template.tools and replace(template, tools=None).try_render(plain, prompt=prompt) == text:
        raise ValueError(f"the chat template does not show the tools: {advice}, or remove the tools")


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """As templates want calls that write them out without turning them into JSON (DeepSeek V3)."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(
            {**call, "function": {**function, "arguments": text}} if "function" in call else {**call, "arguments": text}
        )
    return {**message, "tool_calls": calls}


def _trimmed(text: str, begin: int, end: int, marks: re.Pattern[str]) -> int:
    """`end` without the white space behind the mark that ends a turn: the model stops at the mark."""
    written = len(text[begin:end].rstrip())
    if written == end - begin:
        return end
    last = next((mark.end() for mark in reversed(list(marks.finditer(text, begin, end)))), -1)
    return last if last == begin + written else end


@dataclass(frozen=True, kw_only=True)
class _Borders:
    """Characters: message i begins at `heads[i]` when its header is given, and ends at `ends[i]`."""

    heads: list[int]
    ends: list[int]


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """The text around the contents: `texts[i]` before content i, and one more after the last.

    Message i begins `heads[i]` characters into `texts[i]`, and from the end of that as far into the content as it
    agrees with `beyond[i]` (a header may begin the answer). It ends `ends[i]` characters into `texts[i + 1]`.
    """

    texts: list[str]
    heads: list[int]
    beyond: list[str]
    ends: list[int]

    def borders(self, starts: Sequence[int], text: str) -> _Borders:
        """Borders in a text in which the pieces start at `starts`."""
        heads = [start + head for start, head in zip(starts[:-1], self.heads, strict=True)]
        for i, beyond in enumerate(self.beyond):
            heads[i] += _agreement(beyond, text[heads[i] : heads[i] + len(beyond) + 1])
        return _Borders(heads=heads, ends=[start + end for start, end in zip(starts[1:], self.ends, strict=True)])


def _cut_pieces(
    messages: Sequence[Mapping[str, Any]],
    texts: list[str],
    template: ChatTemplate,
    *,
    prompt: bool,
    ended: Sequence[bool] | None = None,
) -> _Pieces:
    """Divide the text between two contents into the end of one turn and the header of the next.

    The end is what follows the content when the conversation ends there, the header what a generation prompt adds.
    `ended`: contents that hold the mark that ends their turn.
    """
    marks = _facts_of(template.tokenizer).marks
    first = template.try_render([], prompt=True) if messages[0]["role"] == "assistant" else None
    heads, beyond, ends = [_common_length(first, texts[0]) if first else 0], [""], []
    for i, text in enumerate(texts[1:]):
        if i == len(messages) - 1 and not prompt:
            ends.append(len(text))
            break
        tail = _after_content(messages[: i + 1], template)
        ends.append(_turn_end(marks, text, tail, ended=ended is not None and ended[i]))
        if i == len(messages) - 1:
            break
        head, more = ends[-1], ""
        if messages[i + 1]["role"] == "assistant":
            head, more = _header_end(
                marks, text, ends[-1], tail, _after_content(messages[: i + 1], template, prompt=True)
            )
        heads.append(head)
        beyond.append(more)
    return _Pieces(texts=texts, heads=heads, beyond=beyond, ends=ends)


def _after_content(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate, *, prompt: bool = False
) -> str | None:
    """The text after the content of the last of these messages; None where it is not shown there."""
    for last in _replacements(messages[-1]):
        rendered = template.try_render([*messages[:-1], last], prompt=prompt)
        if rendered is not None and MARK in rendered:
            return rendered.rpartition(MARK)[2]
    return None


def _replacements(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The message with a mark for what it says. What it says may be calls; some calls must not be taken away."""
    marked = {**message, "content": MARK}
    if not message.get("tool_calls"):
        return [marked]
    return [{key: value for key, value in marked.items() if key != "tool_calls"}, marked]


def _turn_end(marks: re.Pattern[str], text: str, tail: str | None, *, ended: bool) -> int:
    """How much of `text` ends the turn before, when `tail` is what a conversation ends with there."""
    found = None if ended else re.compile(f"({marks.pattern})\\s*").match(text)
    # Where no conversation ends there, or another mark ends the last turn, it is a mark all the same.
    if tail is None or (found and marks.match(tail) and _common_length(tail, found.group(1)) < len(found.group(1))):
        return found.end() if found else 0
    return _not_inside(marks, text, _agreement(tail, text))


def _header_end(marks: re.Pattern[str], text: str, end: int, tail: str | None, headed: str | None) -> tuple[int, str]:
    """(how much of `text` is before the answer, what of the header may still come in the answer).

    `tail` and `headed` are what follows the content before, without and with a generation prompt.
    """
    if headed is None:
        return end, ""
    if tail is not None and headed.startswith(tail):
        header = headed[len(tail) :]
        length = _agreement(header, text[end:])
        if end + length == len(text):
            return len(text), header[length:]
        if length:
            return max(end, _not_inside(marks, text, end + length)), ""
    length = _agreement(headed, text)
    return max(end, _not_inside(marks, text, length)), headed[length:] if length == len(text) else ""


def _not_inside(marks: re.Pattern[str], text: str, at: int) -> int:
    """`at`, or the beginning of the special token of `text` that `at` would cut in two."""
    return next((mark.start() for mark in marks.finditer(text) if mark.start() < at < mark.end()), at)


def _borders_one_by_one(
    plain: Sequence[Mapping[str, Any]], text: str, template: ChatTemplate, *, prompt: bool
) -> _Borders:
    """Borders of any conversation: a content is where the text changes when it is replaced."""
    bodies = [_body(plain, i, text, template, prompt=prompt) for i in range(len(plain))]
    texts, starts, ended = [], [0], []
    marks = _facts_of(template.tokenizer).marks
    for i, body in enumerate(bodies):
        later = [other[0] for other in bodies[i + 1 :] if other is not None]
        if body is None or body[0] < starts[-1] or any(begin < body[0] for begin in later):
            body = starts[-1], starts[-1]  # shown elsewhere, or not at all
        body = body[0], min([body[1], *later])  # answers of tools may be shown within the call
        texts.append(text[starts[-1] : body[0]])
        starts.append(body[1])
        shown = text[body[0] : body[1]].rstrip()
        ended.append(any(mark.end() == len(shown) for mark in marks.finditer(shown)))
    texts.append(text[starts[-1] :])
    return _cut_pieces(plain, texts, template, prompt=prompt, ended=ended).borders(starts, text)


def _body(
    plain: Sequence[Mapping[str, Any]], index: int, text: str, template: ChatTemplate, *, prompt: bool
) -> tuple[int, int] | None:
    """Begin and end of what a message says."""
    for replaced in _replacements(plain[index]):
        other = template.try_render([*plain[:index], replaced, *plain[index + 1 :]], prompt=prompt)
        if other is not None and MARK in other:
            begin = min(_common_length(other, text), other.index(MARK))
            behind = min(_common_length(other[::-1], text[::-1]), len(other) - other.rindex(MARK) - len(MARK))
            return begin, max(begin, len(text) - behind)
    # It can neither be taken away nor is there a content beside it: as far as the conversations up to it agree.
    before = template.try_render(plain[:index], prompt=plain[index]["role"] == "assistant") if index else ""
    until = template.try_render(plain[: index + 1])
    if before is None or until is None:
        return None
    begin, end = _common_length(before, text), _common_length(until, text)
    return (begin, end) if begin < end else None


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What the template makes of conversations with these roles, whatever their messages say."""

    left_out: tuple[str, ...] = ()  # roles whose messages do not appear
    pieces: _Pieces | None = None  # None: the contents do not come in order, or there is more than contents

    def borders(self, plain: Sequence[Mapping[str, Any]], text: str) -> _Borders | None:
        """The borders in a text of this shape; None when it may be of another."""
        if self.pieces is None or not all(isinstance(message["content"], str) for message in plain):
            return None
        contents = [message["content"] for message in plain]
        starts = _starts_verbatim(self.pieces, contents, text) or _starts_between(self.pieces, contents, text)
        return None if starts is None else self.pieces.borders(starts, text)


def _starts_verbatim(pieces: _Pieces, contents: Sequence[str], text: str) -> list[int] | None:
    """Where the pieces start in a text of pieces and contents in turn, stripped or not."""
    starts, cursor = [0], len(pieces.texts[0])
    if not text.startswith(pieces.texts[0]):
        return None
    for content, following in zip(contents, pieces.texts[1:], strict=True):
        for shown in (content, content.strip(), content.rstrip(), content.lstrip()):
            end = cursor + len(shown)
            if text.startswith(shown, cursor) and text.startswith(following, end):
                starts.append(end)
                cursor = end + len(following)
                break
        else:
            return None
    return starts if cursor == len(text) else None


def _starts_between(pieces: _Pieces, contents: Sequence[str], text: str) -> list[int] | None:
    """As `_starts_verbatim`, where the template changes contents (leaves thoughts out): between ends and headers."""
    ends = [piece[:head] for piece, head in zip(pieces.texts[1:-1], pieces.heads[1:], strict=True)]
    wanted = {*ends, pieces.texts[-1]}
    if "" in wanted or any(end in content for end in wanted for content in contents):
        return None
    if not text.startswith(pieces.texts[0]) or not text.endswith(pieces.texts[-1]):
        return None
    starts, cursor = [0], len(pieces.texts[0])
    for end in ends:
        starts.append(text.find(end, cursor))
        if starts[-1] < 0:
            return None
        cursor = starts[-1] + len(end)
    starts.append(len(text) - len(pieces.texts[-1]))
    return starts if starts[-1] >= cursor else None


@dataclass
class _Facts:
    """What is remembered of a tokenizer."""

    marks: re.Pattern[str]  # its special tokens
    shapes: OrderedDict[Any, _Shape] = field(default_factory=OrderedDict)


_facts: WeakKeyDictionary[PreTrainedTokenizerBase, _Facts] = WeakKeyDictionary()


def _facts_of(tokenizer: PreTrainedTokenizerBase) -> _Facts:
    if tokenizer not in _facts:
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted({*special, *map(str, tokenizer.all_special_tokens)}, key=len, reverse=True)
        _facts[tokenizer] = _Facts(marks=re.compile("|".join(map(re.escape, longest_first)) or r"(?!)"))
    return _facts[tokenizer]


def _shape(plain: Sequence[Mapping[str, Any]], template: ChatTemplate, *, prompt: bool) -> _Shape:
    shapes = _facts_of(template.tokenizer).shapes
    key = (
        template.source,
        tuple((message["role"], *sorted(message)) for message in plain),
        json.dumps(template.tools, sort_keys=True) if template.tools else "",
        json.dumps(dict(template.kwargs), sort_keys=True, default=str) if template.kwargs else "",
        prompt,
    )
    if key not in shapes:
        shapes[key] = _find_shape(plain, template, prompt=prompt)
        if len(shapes) > MAX_SHAPES:
            shapes.popitem(last=False)
    shapes.move_to_end(key)
    return shapes[key]


def _find_shape(plain: Sequence[Mapping[str, Any]], template: ChatTemplate, *, prompt: bool) -> _Shape:
    marks = [f"MESSAGE{i}CONTENT" for i in range(len(plain))]
    marked = [{**message, "content": mark} for message, mark in zip(plain, marks, strict=True)]
    text = template.try_render(marked, prompt=prompt)
    if text is None:
        return _Shape()
    missing = {
        str(message["role"]): None
        for message, mark in zip(plain, marks, strict=True)
        if mark not in text and not message.get("tool_calls")  # of a call, many templates show nothing else
    }
    parts = re.split(r"(MESSAGE\d+CONTENT)", text)
    if missing or parts[1::2] != marks or any(message.keys() > {"role", "content"} for message in plain):
        return _Shape(left_out=tuple(missing))
    return _Shape(pieces=_cut_pieces(marked, parts[0::2], template, prompt=prompt))


def _agreement(expected: str, text: str) -> int:
    """Characters in which `text` begins as expected, in whole words and tags: `<think>` is not `<tool_call>`."""
    length = _common_length(expected, text)
    if length in (len(expected), len(text)):
        return length
    return max((at.end() for at in re.finditer(r"[\s>\]]", expected[:length])), default=0)


def _common_length(a: str, b: str) -> int:
    """Characters at the beginning that two texts have in common."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
