"""Conversations as text, rendered by a tokenizer's chat template, and the part of the text of each message.

A template renders the whole conversation at once and does not say where a message begins. It is found by rendering
again with a placeholder for the content of a message: the content is where the two texts differ. The text between two
contents holds the end of one turn and the header of the next. The conversation cut off after the first content shows
the end of its turn; the same with a generation prompt shows the header of an answer.

That takes three renderings for each message. Most templates put fixed text around the contents, so the fixed text is
found once for each layout (the roles in order) and cached: further conversations of that layout are rendered once.
Conversations that do not fit a cached layout (tool calls, contents shown elsewhere) go message by message.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from nemo_rl.utils.control_tokens import control_token_pattern, hide
from nemo_rl.utils.tokenizer import strftime_now, takes_control_tokens

Spans = list[tuple[int, int]]
Messages = Sequence[Mapping[str, Any]]

OWN_KEYS = ("token_ids", "token_loss_mask", "generation_logprobs", "loss_spans", "unrendered", "plain")
"""Keys of messages for this library."""
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
MAX_LAYOUTS = 512
PLACEHOLDER = "MESSAGE0CONTENT"


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A rendered conversation. Positions are characters of `text`."""

    text: str
    begins: list[int]  # where the text of each message begins; it ends where the next begins
    answers: list[Spans]  # for each message the spans its author wrote, with the end-of-turn token, without the header


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, with its arguments besides the messages."""

    tokenizer: PreTrainedTokenizerBase
    tools: list[dict[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return self.tokenizer.get_chat_template(None, cast(Any, self.tools))

    def render(self, messages: Messages, *, prompt: bool = False) -> tuple[str, Spans]:
        """The text, and the spans of its `{% generation %}` blocks; `prompt` adds the header of an answer.

        A template that writes today's date gets a constant date instead (`TEMPLATE_TIME`). Control tokens that others
        than the assistant wrote are hidden in the text, for `control_tokens.tokenise`.
        """
        source = self.source
        variables: dict[str, Any] = {"strftime_now": strftime_now, **self.tokenizer.special_tokens_map, **self.kwargs}
        rendered, blocks = render_jinja_template(
            conversations=[[self.hide(message) for message in messages]],
            tools=cast(Any, self.tools if takes_control_tokens(source) else hide(self.tools, self.tokenizer)),
            chat_template=source,
            return_assistant_tokens_mask=GENERATION_BLOCK.search(source) is not None,
            add_generation_prompt=prompt,
            **variables,
        )
        return str(rendered[0]), cast(Spans, blocks[0] if blocks else [])

    def hide(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with control tokens hidden, unless the assistant wrote it or the template takes them."""
        if message["role"] == "assistant" or takes_control_tokens(self.source):
            return dict(message)
        return hide(message, self.tokenizer)

    def try_render(self, messages: Messages, *, prompt: bool = False) -> str | None:
        """The text, or None if the template refuses: some require a user message, or alternating turns."""
        try:
            return self.render(messages, prompt=prompt)[0]
        except TemplateError:
            return None


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message that a template gets: every key with a value except `OWN_KEYS`, and always a content.

    Raises ValueError for tool calls that are not like `{function: {name, arguments}}`.
    """
    given = {key: value for key, value in message.items() if value is not None and key not in OWN_KEYS}
    calls = given.get("tool_calls") or []
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
            raise ValueError(f"a tool call must be like {{function: {{name, arguments}}}}, not {str(call)[:80]!r}")
    return {**given, "content": given.get("content", "")}


def format_chat(
    messages: Messages, template: ChatTemplate, *, add_bos: bool, add_eos: bool, add_generation_prompt: bool
) -> Chat:
    """Render a conversation and divide the text among its messages.

    With `add_generation_prompt` the header of an assistant's turn belongs to the message before it, and a conversation
    that does not end with the assistant ends with such a header. `{% generation %}` blocks of a template then determine
    what the assistant wrote.

    Raises:
        ValueError: if the template refuses the conversation, or omits all messages of a role, tool calls or tools.
    """
    prompt = add_generation_prompt and messages[-1]["role"] != "assistant"
    plain, text, blocks = _rendered(
        [template.hide(plain_message(message)) for message in messages], template, prompt=prompt
    )
    _require_calls_and_tools(plain, text, template, prompt=prompt)
    layout = _layout(plain, template, prompt=prompt)
    if isinstance(layout, list):
        raise ValueError(
            f"the chat template leaves out messages of the role {' and '.join(map(repr, layout))}: use roles it knows, "
            "or another policy.tokenizer.chat_template"
        )
    turns = _turns(layout, plain, text) or _turns_one_by_one(plain, text, template, prompt=prompt)
    bos, eos = str(template.tokenizer.bos_token or ""), str(template.tokenizer.eos_token or "")
    if add_bos and not text.startswith(bos):
        text, blocks, turns = bos + text, [(a + len(bos), b + len(bos)) for a, b in blocks], turns.moved(len(bos))
    if add_eos and not prompt and not text.rstrip().endswith(eos):
        text += eos
    if not prompt:
        turns.ends[-1] = len(text)
    begins, answers = _divided(text, turns, plain, template, headers_are_given=add_generation_prompt)
    if blocks and add_generation_prompt:
        for i, message in enumerate(plain):
            if message["role"] == "assistant":
                inside = [(max(a, begins[i]), min(b, begins[i + 1])) for a, b in blocks]
                answers[i] = [(a, b) for a, b in inside if a < b]
    return Chat(text=text, begins=begins[:-1], answers=answers)


def _rendered(
    plain: list[dict[str, Any]], template: ChatTemplate, *, prompt: bool
) -> tuple[list[dict[str, Any]], str, Spans]:
    """The messages in a form that the template takes, the text, and the spans of its generation blocks."""
    try:
        try:
            text, blocks = template.render(plain, prompt=prompt)
        except TypeError:  # the template expects values of another type
            plain = [_with_one_text(_with_arguments_as_text(message)) for message in plain]
            text, blocks = template.render(plain, prompt=prompt)
        if _shows_python(plain, text):
            plain = [_with_one_text(message) for message in plain]
            text, blocks = template.render(plain, prompt=prompt)
    except (TemplateError, TypeError) as error:
        roles = ", ".join(str(message["role"]) for message in plain)
        raise ValueError(f"the chat template refuses a conversation of the roles {roles}: {error}") from error
    if _shows_python(plain, text):
        raise ValueError("the chat template takes contents of one text, and a content has parts that are no text")
    return plain, text, blocks


def _divided(
    text: str, turns: "_Turns", plain: Messages, template: ChatTemplate, *, headers_are_given: bool
) -> tuple[list[int], list[Spans]]:
    """(where the text of each message begins, and the end of the text; what the author of each message wrote)."""
    special = control_token_pattern(template.tokenizer)
    starts = turns.begins if headers_are_given else [turns.headers[0], *turns.ends[:-1]]
    begins = [0, *starts[1:], len(text)]
    answers: list[Spans] = [[(a, _trimmed(text, a, b, special))] for a, b in zip(starts, turns.ends, strict=True)]
    for i, late in turns.late.items():
        # What stands between the calls and the content belongs to this message: the results of the calls.
        after = next((j for j in range(i + 1, len(plain)) if plain[j]["role"] != "tool"), len(plain))
        end = max(late, turns.headers[after]) if after < len(plain) else turns.ends[-1]
        answers[i].append((late, _trimmed(text, late, end, special)))
        begins[i + 1 : after] = [begins[after]] * (after - i - 1)
    return begins, answers


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that write arguments of tool calls without converting them to JSON (DeepSeek V3)."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if not isinstance(function.get("arguments"), str):
            function = {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _shows_python(plain: list[dict[str, Any]], text: str) -> bool:
    """Whether a list of parts stands in the text as Python writes it: the template takes one text for a content."""
    return any(isinstance(message["content"], list) and str(message["content"]) in text for message in plain)


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the texts of its parts, if it has no others, as one."""
    parts = message["content"]
    if not isinstance(parts, list) or not all(isinstance(part.get("text"), str) for part in parts):
        return message
    return {**message, "content": "".join(part["text"] for part in parts)}


def _require_calls_and_tools(plain: list[dict[str, Any]], text: str, template: ChatTemplate, *, prompt: bool) -> None:
    """Raises ValueError if the text does not change without the tool calls of a message, without the last of several,
    or without the tools.

    A message whose calls are not shown is empty, and would teach the model to say nothing.
    """
    advice = "take one that does with policy.tokenizer.chat_template"
    for i, calls in ((i, message["tool_calls"]) for i, message in enumerate(plain) if message.get("tool_calls")):
        if template.try_render([*plain[:i], _without_calls(plain[i]), *plain[i + 1 :]], prompt=prompt) == text:
            raise ValueError(f"the chat template does not show the tool calls of message {i} (from 0): {advice}")
        fewer = {**plain[i], "tool_calls": calls[:-1]}
        if len(calls) > 1 and template.try_render([*plain[:i], fewer, *plain[i + 1 :]], prompt=prompt) == text:
            raise ValueError(f"the chat template does not show the last tool call of message {i} (from 0): {advice}")
    if template.tools and replace(template, tools=None).try_render(plain, prompt=prompt) == text:
        raise ValueError(f"the chat template does not show the tools: {advice}, or remove the tools")


def _trimmed(text: str, begin: int, end: int, special: re.Pattern[str]) -> int:
    """`end` without white space after the end-of-turn token: the model stops at the token and never writes it."""
    written = len(text[begin:end].rstrip())
    if written == end - begin:
        return end
    last = next((token.end() for token in reversed(list(special.finditer(text, begin, end)))), -1)
    return last if last == begin + written else end


# -- Fixed text around the contents.


@dataclass(frozen=True, kw_only=True)
class _Turns:
    """Positions in a text, one of each list for each message."""

    headers: list[int]  # where the header of an assistant's message begins; of another message, where it begins
    begins: list[int]  # where each message begins after its header
    ends: list[int]
    late: dict[int, int] = field(default_factory=dict)
    """Message with tool calls -> where its content begins, if it is shown behind the results of the calls."""

    def moved(self, by: int) -> "_Turns":
        headers, begins, ends = ([at + by for at in each] for each in (self.headers, self.begins, self.ends))
        return _Turns(headers=headers, begins=begins, ends=ends, late={i: at + by for i, at in self.late.items()})

    def with_nothing_at(self, index: int) -> "_Turns":
        """The turns with one more message, which the template leaves out. As the first, it gets the text before all."""
        at = self.ends[index - 1] if index else self.headers[0]
        headers, begins, ends = ([*e[:index], at, *e[index:]] for e in (self.headers, self.begins, self.ends))
        late = {i + (i >= index): begin for i, begin in self.late.items()}
        return _Turns(headers=headers, begins=begins, ends=ends, late=late)


class _Header(NamedTuple):
    """The header of an answer agrees with `given`, the header as a generation prompt writes it, from `at` on.

    `least`: where the message begins if it does not agree.
    """

    at: int
    given: str
    least: int


class _Shown(NamedTuple):
    """The span of a message's content in the text."""

    begin: int
    end: int
    skip: int = 0  # see `_text_after`
    ended: bool = False  # whether it contains its end-of-turn token
    late: bool = False  # of a message with tool calls: whether it has a content behind the results of the calls


@dataclass(frozen=True, kw_only=True)
class _FixedText:
    """`texts[i]` is the text before content i, and one more after the last content.

    `headers[i]` are positions in `texts[i]`. A header may contain the first words of the answer, so it may reach into
    the content. Message i ends `ends[i]` characters into `texts[i + 1]`.
    """

    texts: list[str]
    headers: list[_Header]
    ends: list[int]
    special: re.Pattern[str]

    def turns(self, starts: Sequence[int], text: str) -> _Turns:
        """The turns of a text in which `texts` start at `starts`."""
        moved = [
            _Header(start + at, given, start + least)
            for start, (at, given, least) in zip(starts[:-1], self.headers, strict=True)
        ]
        return _Turns(
            headers=[header.at if header.given else header.least for header in moved],
            begins=[_header_end(self.special, text, header) for header in moved],
            ends=[start + end for start, end in zip(starts[1:], self.ends, strict=True)],
        )


def _fixed_text(
    messages: Messages, texts: list[str], template: ChatTemplate, *, prompt: bool, shown: Sequence[_Shown] | None = None
) -> _FixedText:
    """Divide the text between two contents into the end of one turn and the header of the next.

    The end of a turn is what follows its content if the conversation ends there. The header is what a generation prompt
    adds to that.
    """
    special = control_token_pattern(template.tokenizer)
    headers, ends = [_first_header(texts[0], messages, template)], []
    for i, text in enumerate(texts[1:]):
        is_last = i == len(messages) - 1
        if is_last and not prompt:
            ends.append(len(text))
            break
        skip, ended, late = (shown[i].skip, shown[i].ended, shown[i].late) if shown else (0, False, False)
        until = [*messages[:i], _with_content(messages[i], "") if late else messages[i]]
        tail = _text_after(until, template, skip)
        by_next = messages[i]["role"] == "assistant" and not (is_last or messages[i + 1]["role"] == "assistant")
        ends.append(_turn_end(special, text, tail, ended=ended, by_next=by_next))
        if is_last:
            break
        header = None
        if messages[i + 1]["role"] == "assistant":
            prompted = _text_after(until, template, skip, prompt=True)
            header = _prompted_header(text, ends[-1], tail, prompted) or _usual_header(
                text, ends[-1], messages, template
            )
        headers.append(header or _Header(ends[-1], "", ends[-1]))
    return _FixedText(texts=texts, headers=headers, ends=ends, special=special)


def _text_after(messages: Messages, template: ChatTemplate, skip: int = 0, *, prompt: bool = False) -> str | None:
    """The text after the content of the last of these messages; None if the content is not shown.

    `skip`: the number of characters that a placeholder adds behind it, such as a quotation mark.
    """
    text = _with_placeholder(messages, len(messages) - 1, template, prompt=prompt)
    return None if text is None else text.rpartition(PLACEHOLDER)[2][skip:]


_QUOTE = re.compile(r"\A(?:<\|\"\|>|\")")  # Gemma 4 has a token for it


def _with_placeholder(messages: Messages, index: int, template: ChatTemplate, *, prompt: bool) -> str | None:
    """The text with a placeholder for the content of a message; None if it is not shown.

    Of a message with tool calls, the placeholder stands for the arguments of the last call. A call without arguments
    may be written in another way; then it does not.
    """
    message = messages[index]
    with_content = _with_content(message, PLACEHOLDER)
    variants = [_without_calls(with_content), with_content]
    plain = None
    if calls := message.get("tool_calls"):
        variants.insert(0, _with_last_arguments(message))
        if calls[-1].get("function", calls[-1]).get("arguments") in (None, {}, "", "{}"):
            plain = template.try_render(messages, prompt=prompt)
    for number, replaced in enumerate(variants):
        text = template.try_render([*messages[:index], replaced, *messages[index + 1 :]], prompt=prompt)
        if text is None or PLACEHOLDER not in text:
            continue
        # Behind an argument may be a quotation mark, which a call without arguments does not have.
        if number > 0 or plain is None or plain.endswith(_QUOTE.sub("", text.rpartition(PLACEHOLDER)[2], count=1)):
            return text
    return None


def _with_content(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The message with another text, in parts if its content has parts: some templates read nothing else."""
    in_parts = isinstance(message["content"], list)
    return {**message, "content": [{"type": "text", "text": text}] if in_parts else text}


def _with_last_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    *others, last = message["tool_calls"]
    function = last.get("function", last)
    as_text = isinstance(function.get("arguments"), str)
    function = {**function, "arguments": PLACEHOLDER if as_text else {PLACEHOLDER: PLACEHOLDER}}
    return {**message, "tool_calls": [*others, {**last, "function": function} if "function" in last else function]}


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _turn_end(special: re.Pattern[str], text: str, tail: str | None, *, ended: bool, by_next: bool) -> int:
    """How many characters of `text` end the turn before it. `tail`: the text that ends a conversation at this turn.

    `by_next`: the first token of the next header ends this turn, if nothing else does: the model stops there.
    """
    token = None if ended else re.compile(f"({special.pattern})\\s*").match(text)
    # If no conversation can end here, or the last turn ends with another token, a special token still ends this turn.
    if tail is None or (token and special.match(tail) and _common_length(tail, token.group(1)) < len(token.group(1))):
        return token.end() if token else 0
    end = _not_inside(special, text, 0, _common_words(tail, text))
    following = special.match(text, end) if by_next and not ended and not special.search(tail) else None
    return following.end() if following else end


def _first_header(text: str, messages: Messages, template: ChatTemplate) -> _Header:
    """The header of the first message. An assistant did not write what the template puts before it."""
    if messages[0]["role"] != "assistant":
        return _Header(0, "", 0)
    return _usual_header(text, 0, messages, template) or _Header(len(text), "", len(text))


def _prompted_header(text: str, end: int, tail: str | None, prompted: str | None) -> _Header | None:
    """The header that follows the end of a turn in the text between two contents; None if a prompt shows none.

    `tail` and `prompted` follow the content before: at the end of a conversation, and with a generation prompt.
    """
    if tail is not None and prompted is not None and prompted.startswith(tail):
        given = prompted[len(tail) :]
        if given and (end == len(text) or _common_words(given, text[end:])):
            return _Header(end, given, end)
    if prompted is not None and _common_words(prompted, text) > end:
        return _Header(0, prompted, end)
    return None


def _usual_header(text: str, end: int, messages: Messages, template: ChatTemplate) -> _Header | None:
    """As `_prompted_header`, for templates that write a header and leave it out of the prompt at this place.

    It begins as the header that a prompt adds to the first message of a user.
    """
    asked = [_with_content({"role": "user", "content": messages[0]["content"]}, PLACEHOLDER)]
    tail, prompted = _text_after(asked, template), _text_after(asked, template, prompt=True)
    if tail is None or prompted is None:
        return None
    given = prompted[_common_length(tail, prompted) :]
    for length in (len(given), *(word.end() for word in reversed(list(re.finditer(r"[\s>\]]", given))))):
        at = text.find(given[:length], end)
        if at >= 0:
            return _Header(at, given, end)
    return None


def _header_end(special: re.Pattern[str], text: str, header: _Header) -> int:
    """The start of the message behind the header."""
    length = _common_words(header.given, text[header.at : header.at + len(header.given) + 1])
    return max(header.least, _not_inside(special, text, header.at, header.at + length))


def _not_inside(special: re.Pattern[str], text: str, begin: int, at: int) -> int:
    """`at`, or the beginning of the special token behind `begin` that `at` would cut in two."""
    for token in special.finditer(text, begin):
        if token.end() >= at:
            return token.start() if token.start() < at < token.end() else at
    return at


# -- Message by message.


def _turns_one_by_one(plain: Messages, text: str, template: ChatTemplate, *, prompt: bool) -> _Turns:
    """The turns of any conversation, with a placeholder for one content after the other."""
    for i, message in enumerate(plain):
        others = [*plain[:i], *plain[i + 1 :]]
        if _is_blank(message) and others and template.try_render(others, prompt=prompt) == text:
            return _turns_one_by_one(others, text, template, prompt=prompt).with_nothing_at(i)
    found = [_find_content(plain, i, text, template, prompt=prompt) for i in range(len(plain))]
    texts, starts, shown = [], [0], []
    special = control_token_pattern(template.tokenizer)
    for i, content in enumerate(found):
        later = [other.begin for other in found[i + 1 :] if other is not None]
        if content is None or content.begin < starts[-1] or any(begin < content.begin for begin in later):
            content = _Shown(starts[-1], starts[-1])  # not shown, or shown elsewhere
        end = min([content.end, *later])  # results of tools may be shown within the call
        texts.append(text[starts[-1] : content.begin])
        starts.append(end)
        written = text[content.begin : end].rstrip()
        ended = any(token.end() == len(written) for token in special.finditer(written))
        shown.append(content._replace(ended=ended))
    texts.append(text[starts[-1] :])
    late = _late_contents(plain, text, template, found, prompt=prompt)
    shown = [content._replace(late=i in late) for i, content in enumerate(shown)]
    turns = _fixed_text(plain, texts, template, prompt=prompt, shown=shown).turns(starts, text)
    return replace(turns, late=late)


def _is_blank(message: Mapping[str, Any]) -> bool:
    """Whether a message says nothing. Some templates leave it out."""
    content = _with_one_text(dict(message))["content"]
    return isinstance(content, str) and not content.strip() and not message.get("tool_calls")


def _find_content(plain: Messages, index: int, text: str, template: ChatTemplate, *, prompt: bool) -> _Shown | None:
    """The span of a message's content in the text; None if it is not shown.

    Of a message with tool calls, it is the arguments of the last call.
    """
    other = _with_placeholder(plain, index, template, prompt=prompt)
    if other is not None:
        return _difference(text, other)
    # The template requires the tool calls of the message and shows no content beside them. Then the message is what the
    # conversation up to it adds to the conversation before it.
    before = template.try_render(plain[:index], prompt=plain[index]["role"] == "assistant") if index else ""
    until = template.try_render(plain[: index + 1])
    if before is None or until is None:
        return None
    begin, end = _common_length(before, text), _common_length(until, text)
    return _Shown(begin, end) if begin < end else None


def _difference(text: str, other: str) -> _Shown:
    """The span in which a text differs from `other`, which has a placeholder there."""
    begin = min(_common_length(other, text), other.index(PLACEHOLDER))
    behind = len(other) - other.rindex(PLACEHOLDER) - len(PLACEHOLDER)
    same = min(_common_length(other[::-1], text[::-1]), behind)
    return _Shown(begin, max(begin, len(text) - same), skip=behind - same)


def _late_contents(
    plain: Messages, text: str, template: ChatTemplate, found: Sequence[_Shown | None], *, prompt: bool
) -> dict[int, int]:
    """Message with tool calls -> where its content begins, if the results of the calls stand before it."""
    late = {}
    for i, message in enumerate(plain[:-1]):
        result = found[i + 1]
        if not message.get("tool_calls") or not message["content"] or plain[i + 1]["role"] != "tool" or result is None:
            continue
        other = template.try_render([*plain[:i], _with_content(message, PLACEHOLDER), *plain[i + 1 :]], prompt=prompt)
        if other is not None and PLACEHOLDER in other:
            content = _difference(text, other)
            if result.end <= content.begin < content.end:
                late[i] = content.begin
    return late


# -- Cached layouts.


_Layout = _FixedText | list[str] | None
"""The form of all conversations with the same roles in a template: fixed text around the contents, or the roles whose
messages it omits. None: contents are not in order, or messages have more than a content."""


def _turns(layout: _FixedText | None, plain: Messages, text: str) -> _Turns | None:
    """The turns of a text of this layout; None if it may have another."""
    if layout is None or not all(isinstance(message["content"], str) for message in plain):
        return None
    contents = [message["content"] for message in plain]
    starts = _starts_verbatim(layout, contents, text) or _starts_between(layout, contents, text)
    return None if starts is None else layout.turns(starts, text)


def _starts_verbatim(fixed: _FixedText, contents: Sequence[str], text: str) -> list[int] | None:
    """The starts of the fixed texts if the template shows contents unchanged or stripped; None if it does not."""
    starts, cursor = [0], len(fixed.texts[0])
    if not text.startswith(fixed.texts[0]):
        return None
    for content, following in zip(contents, fixed.texts[1:], strict=True):
        for shown in (content, content.strip(), content.rstrip(), content.lstrip()):
            end = cursor + len(shown)
            if text.startswith(shown, cursor) and text.startswith(following, end):
                starts.append(end)
                cursor = end + len(following)
                break
        else:
            return None
    return starts if cursor == len(text) else None


def _starts_between(fixed: _FixedText, contents: Sequence[str], text: str) -> list[int] | None:
    """As `_starts_verbatim`, for templates that change contents (omit thoughts): by the ends of turns and headers."""
    ends = [
        piece[: _header_end(fixed.special, piece, header)]
        for piece, header in zip(fixed.texts[1:-1], fixed.headers[1:], strict=True)
    ]
    wanted = {*ends, fixed.texts[-1]}
    if "" in wanted or any(end in content for end in wanted for content in contents):
        return None
    if not text.startswith(fixed.texts[0]) or not text.endswith(fixed.texts[-1]):
        return None
    starts, cursor = [0], len(fixed.texts[0])
    for end in ends:
        starts.append(text.find(end, cursor))
        if starts[-1] < 0:
            return None
        cursor = starts[-1] + len(end)
    starts.append(len(text) - len(fixed.texts[-1]))
    return starts if starts[-1] >= cursor else None


_layouts: WeakKeyDictionary[PreTrainedTokenizerBase, OrderedDict[Any, _Layout]] = WeakKeyDictionary()


def _layout(plain: Messages, template: ChatTemplate, *, prompt: bool) -> _Layout:
    layouts = _layouts.setdefault(template.tokenizer, OrderedDict())
    key = (
        template.source,
        tuple((message["role"], isinstance(message["content"], str), *sorted(message)) for message in plain),
        json.dumps(template.tools, sort_keys=True) if template.tools else "",
        json.dumps(dict(template.kwargs), sort_keys=True, default=str) if template.kwargs else "",
        prompt,
    )
    if key not in layouts:
        layouts[key] = _find_layout(plain, template, prompt=prompt)
        if len(layouts) > MAX_LAYOUTS:
            layouts.popitem(last=False)
    layouts.move_to_end(key)
    return layouts[key]


def _find_layout(plain: Messages, template: ChatTemplate, *, prompt: bool) -> _Layout:
    names = [f"MESSAGE{i}CONTENT" for i in range(len(plain))]
    replaced = [_with_content(message, name) for message, name in zip(plain, names, strict=True)]
    text = template.try_render(replaced, prompt=prompt)
    if text is None:
        return None
    # Many templates show nothing beside a call.
    hidden = [m for m, name in zip(plain, names, strict=True) if name not in text and not m.get("tool_calls")]
    if hidden:
        return list(dict.fromkeys(str(message["role"]) for message in hidden))
    parts = re.split(r"(MESSAGE\d+CONTENT)", text)
    if parts[1::2] != names or any(message.keys() > {"role", "content"} for message in plain):
        return None
    return _fixed_text(replaced, parts[0::2], template, prompt=prompt)


def _common_words(expected: str, text: str) -> int:
    """Length of the common beginning in whole words and tags: `<think>` and `<tool_call>` have none."""
    length = _common_length(expected, text)
    if length in (len(expected), len(text)):
        return length
    return max((at.end() for at in re.finditer(r"[\s>\]]", expected[:length])), default=0)


def _common_length(a: str, b: str) -> int:
    """Length of the common beginning of two texts."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
