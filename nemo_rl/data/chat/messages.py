"""Message logs: conversations whose messages own their tokens.

A conversation is rendered and tokenised once, as a whole, and each token belongs to the message in whose text it
starts. So the tokens of all messages, concatenated, are exactly the tokens of the rendered conversation.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat.images import ImageReader, as_text, expand, image_parts, spans_of_images, text_of, text_or_parts
from nemo_rl.data.chat.template import Chat, ChatTemplate, format_chat
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict, join
from nemo_rl.types import LLMMessageLogType, Pixels, RenderedObservation
from nemo_rl.utils.control_tokens import restore, tokenise
from nemo_rl.utils.task_formats import one_text


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
    """The messages, each with its rendered text as `content`, its `token_ids` int64 [n], and its `loss_spans`.

    `unrendered` is the content before the chat template, in the prompt template of the task; `plain` is its text.

    The system prompt of the task goes first unless the log begins with one; the prompt template of the task is filled
    with the first user message. `add_bos_token` and `add_eos_token` add the token if the template does not. Some
    templates render an early message differently when others follow; the text in the whole conversation counts.

    With `add_generation_prompt` the header of an assistant's turn belongs to the message before it, and a log that does
    not end with the assistant ends with such a header. Without it, the header is part of the assistant's message.
    `images` are the spans of images that `ImageReader.read` has read, counted from the message's first token.
    `loss_spans`, [begin, end) of the message's tokens, are what its author wrote: without the header, and without white
    space after the end-of-turn token. If the template has `{% generation %}` blocks, and with `add_generation_prompt`,
    the spans of the assistant are the contents of the blocks.

    Raises:
        ValueError: if there is no message, or the template refuses the conversation or omits a role; see `tokenised`.
    """
    if not message_log:
        raise ValueError("a conversation without a single message")
    messages = [_readable(message, number) for number, message in enumerate(message_log)]
    user = next((message for message in messages if message["role"] == "user"), None)
    if user is not None and task_data_spec.prompt is not None:
        user["content"] = _filled(task_data_spec, user["content"])
    if task_data_spec.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": task_data_spec.system_prompt})
    chat = format_chat(
        messages,
        ChatTemplate(tokenizer, tools, chat_template_kwargs or {}),
        add_bos=add_bos_token,
        add_eos=add_eos_token,
        add_generation_prompt=add_generation_prompt,
    )
    images = [part for message in messages for part in image_parts(message.get("content"))]
    shown, characters = chat, []
    if images:
        chat, characters = expand(chat, images)
    token_ids, starts = tokenised(chat.text, tokenizer)
    all_ids = torch.tensor(token_ids, dtype=torch.int64)
    placed = spans_of_images(images, characters, starts)
    formatted: LLMMessageLogType = []
    first = 0
    for number, (message, answers, end) in enumerate(
        zip(messages, chat.answers, [*chat.begins[1:], len(chat.text)], strict=True)
    ):
        last = len(starts) if end == len(chat.text) else bisect_left(starts, end, lo=first)
        spans = [
            (bisect_left(starts, a, first, last) - first, bisect_left(starts, b, first, last) - first)
            for a, b in answers
        ]
        text = shown.text[shown.begins[number] : [*shown.begins, None][number + 1]]
        given = message.get("content")
        plain = "" if given is None else as_text(given)
        texts = {"content": restore(text, tokenizer), "unrendered": given, "plain": plain}
        formatted.append({**message, **texts, "token_ids": all_ids[first:last], "loss_spans": spans})
        if own := [replace(span, start=span.start - first) for span in placed if first <= span.start < last]:
            formatted[-1]["images"] = own
        first = last
    return formatted


def _readable(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The message, whose content is absent, a text or a list of parts. ValueError for another content."""
    content = message.get("content")
    if content is None or (isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)):
        return dict(message)
    return {**message, "content": one_text(content, f"as the content of message {number} (from 0)")}


def _filled(spec: TaskDataSpec, content: Any) -> Any:
    """The content of the user's message in the prompt template; images stay before the text."""
    filled = spec.fill(text_of(content))
    images = image_parts(content)
    return [*images, {"type": "text", "text": filled}] if images else filled


def tokenised(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens of a rendered text, and the character at which each of them begins. Hidden control tokens are text.

    Raises ValueError for half of a surrogate pair: JSON may hold one, and no tokenizer takes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"a text has {half!r}, half of a character such as an emoji; remove or replace it") from error
    return tokenise(text, tokenizer)


def tokens_after_turn(tail: str, tokenizer: PreTrainedTokenizerBase, last: int | None) -> tuple[list[int], list[int]]:
    """The tokens of `tail`, the text that follows a sampled turn, and where in `tail` each of them begins.

    If `last`, the last token that the model sampled, is the end-of-turn token at the beginning of `tail`, the rest
    begins after it.
    """
    # Tokenised after a special token, as in the conversation: some tokenizers begin a separate text with a space.
    eos = str(tokenizer.eos_token)
    token_ids, starts = tokenised(eos + tail, tokenizer)
    assert token_ids[0] == tokenizer.eos_token_id
    token_ids, starts = token_ids[1:], [start - len(eos) for start in starts[1:]]
    special = set(tokenizer.all_special_ids)
    end = next((i for i, token in enumerate(token_ids) if token in special), None)
    first = end + 1 if end is not None and token_ids[end] == last else 0
    return token_ids[first:], starts[first:]


@dataclass(frozen=True)
class ObservationRenderer:
    """Renders the observation between two sampled turns as token ids. Picklable.

    These are what the chat template writes from the end of the assistant's content to the next answer: the end-of-turn
    token (unless the model has sampled it), the observation, and the header of the answer. A role that the template
    refuses or omits (many do not know "environment") is rendered as a user message. With `raw_text` these are the
    only the tokens of the observation.
    """

    tokenizer: PreTrainedTokenizerBase
    images: ImageReader | None = None  # None: the model sees no images
    _roles: dict[str, str] = field(default_factory=dict, compare=False)  # of an observation -> as rendered

    def __call__(
        self,
        observation: Mapping[str, Any],
        *,
        sampled: Sequence[int],
        num_images: int = 0,
        raw_text: bool = False,
        pixels: dict[str, Pixels] | None = None,
    ) -> RenderedObservation:
        """`sampled`: the tokens of the turn, including its end-of-turn token if the model sampled one.

        `num_images`: of the conversation so far. The pixels of new images go into `pixels`, by digest. Raises
        ValueError if the template allows no user message after an answer, or does not show all images; for an image
        that cannot be read, one image too many, or an image for a model of text.
        """
        content = self._read(observation["content"], num_images, {} if pixels is None else pixels)
        tail = as_text(content) if raw_text else self._text({**observation, "content": content})
        images, places = image_parts(content), []
        if images:
            chat, places = expand(Chat(text=tail, begins=[], answers=[]), images)
            tail = chat.text
        last = int(sampled[-1]) if len(sampled) and not raw_text else None
        token_ids, starts = tokens_after_turn(tail, self.tokenizer, last)
        return RenderedObservation(token_ids, spans_of_images(images, places, starts), as_text(content))

    def _read(self, content: Any, num_before: int, pixels: dict[str, Pixels]) -> Any:
        content, num_images = text_or_parts(content), len(image_parts(content))
        if self.images is None:
            if num_images:
                raise ValueError("an observation has images, and the model reads only text")
            return content
        most = self.images.max_images
        if num_images and most is not None and num_before + num_images > most:
            raise ValueError(f"{num_before + num_images} images in one episode, more than data.max_images={most}")
        return self.images.read_content(content, pixels)

    def seen_and_rendered(
        self, prompt: Sequence[Mapping[str, Any]], answers: Sequence[str], observation: Mapping[str, str]
    ) -> tuple[str, str]:
        """A conversation up to the header of its next answer: as the model sees it, and as the template renders it.

        The observation follows each answer. If the two texts differ, the template renders earlier turns differently
        when others follow. An episode does not: it continues from the tokens it has.
        """
        template = ChatTemplate(self.tokenizer)
        role = self.role(observation["role"])
        seen, conversation = template.render(prompt, prompt=True)[0], list(prompt)
        for answer in answers:
            seen += answer + self._text(observation)
            conversation += [{"role": "assistant", "content": answer}, {**observation, "role": role}]
        return seen, template.try_render(conversation, prompt=True) or ""

    def role(self, role: str) -> str:
        """The role that observations of this role are rendered with: itself, or user."""
        if role not in self._roles:
            placeholder = "OBSERVATIONCONTENT"
            self._roles[role] = role if placeholder in (self._tail(role, placeholder) or "") else "user"
        return self._roles[role]

    def _text(self, observation: Mapping[str, Any]) -> str:
        tail = self._tail(self.role(observation["role"]), observation["content"])
        if tail is None:
            raise ValueError(
                "the chat template refuses a message of a user after an answer: name one that allows further turns "
                "as the tokenizer's chat_template, or have one turn with max_rollout_turns=1"
            )
        return tail

    def _tail(self, role: str, content: Any) -> str | None:
        """The text after the content of an answer that a message follows; None if the template refuses it."""
        placeholder = "ANSWERCONTENT"
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": placeholder},
            {"role": role, "content": content},
        ]
        before, _, tail = (ChatTemplate(self.tokenizer).try_render(messages, prompt=True) or "").partition(placeholder)
        return tail if before else None


def message_log_to_flat_messages(message_log: LLMMessageLogType) -> dict[str, Any]:
    """The values of each key of a conversation: tensors concatenated along dimension 0, other values as a list."""
    flat: dict[str, Any] = {}
    for key in dict.fromkeys(key for message in message_log for key in message):
        values = [message[key] for message in message_log if key in message]
        flat[key] = join(key, values) if all(isinstance(value, torch.Tensor) for value in values) else values
    return flat


def batched_message_log_to_flat_message(
    message_logs: Sequence[LLMMessageLogType],
    pad_value_dict: Mapping[str, int | float] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict[Any], torch.Tensor]:
    """One right-padded batch of conversations: tensors [B, S] and lists by key, and lengths int32 [B].

    A key that only some conversations have is only padding, or None in a list, for the others. The batch is empty if
    no message has `token_ids`. ValueError for a key whose tensors have several dtypes.
    """
    if not any("token_ids" in message for log in message_logs for message in log):
        return BatchedDataDict(), torch.zeros(0, dtype=torch.int32)
    flats = [
        BatchedDataDict({k: v[None] if isinstance(v, torch.Tensor) else [v] for k, v in flat.items()})
        for flat in map(message_log_to_flat_messages, message_logs)
    ]
    examples = {key: value for flat in flats for key, value in flat.items()}
    for flat in flats:
        flat |= {k: v[:, :0] if isinstance(v, torch.Tensor) else [None] for k, v in examples.items() if k not in flat}
    lengths = torch.tensor([flat["token_ids"].shape[1] for flat in flats], dtype=torch.int32)
    batch = BatchedDataDict.from_batches(flats, pad_value_dict=pad_value_dict)
    missing = -batch["token_ids"].shape[1] % make_sequence_length_divisible_by
    for key, value in batch.items():
        if missing and isinstance(value, torch.Tensor) and value.ndim == 2:
            pad = (pad_value_dict or {}).get(key, 0)
            batch[key] = torch.nn.functional.pad(value, (0, missing), value=pad)
    return batch, lengths


def add_loss_mask_to_message_log(
    message_logs: Sequence[LLMMessageLogType],
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> None:
    """Add `token_loss_mask` to every message in place: like `token_ids`, 1 on tokens to train on, 0 elsewhere.

    In a message to train on, these are the tokens in its `loss_spans`, or all tokens if it has none.
    """
    for message_log in message_logs:
        for i, message in enumerate(message_log):
            trained = message["role"] in roles_to_train_on and (not only_unmask_final or i == len(message_log) - 1)
            mask = torch.zeros_like(message["token_ids"])
            for begin, end in message.get("loss_spans", [(0, len(mask))]) if trained else ():
                mask[begin:end] = 1
            message["token_loss_mask"] = mask
