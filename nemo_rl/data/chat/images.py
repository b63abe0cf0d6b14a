"""Images in messages: parts of a content -> pixels, as the model's own processor makes them, and the tokens for them.

A content is a text or a list of parts in OpenAI's form: `{"type": "text", "text": ...}`, `{"type": "image", "image":
SOURCE}` or `{"type": "image_url", "image_url": {"url": ...}}`. A source is a path, a URL (http, https, file, data), the
bytes of a file, a PIL image, a value of the `Image` feature of datasets, or an image drawn on this machine (`shapes:`).

    row with sources -> `ImageReader.read` -> row with `{"type": "image", "digest", "placeholder", ...}`, and
    pixels by digest -> chat template -> `expand` -> tokens, with the span of each image
"""

from __future__ import annotations

import asyncio
import base64
import io
import re
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from http.client import HTTPException
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from nemo_rl.data.chat.template import Chat
from nemo_rl.data.interfaces import Row
from nemo_rl.types import PREVIEW, ImageSpan, Pixels
from nemo_rl.utils.task_formats import one_text

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_TYPES = ("image", "image_url")
CONVERSATIONS = ("messages", "prompt", "chosen", "rejected")  # columns that may hold messages
FETCH_TIMEOUT_S = 30.0
MAX_FETCHED_BYTES = 64 << 20
PREVIEW_SIDE = 192  # pixels
_NOT_PIXELS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")


def image_parts(content: Any) -> list[Mapping[str, Any]]:
    """The parts of a content that are images, in order."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return []
    return [part for part in content if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES]


def text_of(content: Any) -> str:
    """The text of a content, which may be absent, without its images. ValueError for other parts, such as videos."""
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return one_text(content, "as a content")
    if any(not isinstance(part, Mapping) or not part.keys() & {"type", "text"} for part in content):
        raise ValueError(f"a content is a text, or a list of {{type, text}}, not {str(content)[:80]!r}")
    texts = [part for part in content if part.get("type") not in IMAGE_TYPES]
    if other := next((part for part in texts if part.get("text") is None and part.get("type", "text") != "text"), None):
        raise ValueError(f"a content has a part of type {other['type']!r}: only texts and images can be used")
    return "".join(one_text(part["text"], "as the text of a part") for part in texts if part.get("text") is not None)


def text_or_parts(content: Any) -> Any:
    """The content itself if it has images, else its text. ValueError as `text_of`."""
    return content if image_parts(content) else text_of(content)


def as_text(content: Any) -> str:
    """A content that `ImageReader` has read as people see it: the model's mark in the place of each image."""
    if isinstance(content, str):
        return content
    return "".join(part.get("placeholder") or part["text"] for part in content)


def has_images(row: Row) -> bool:
    """Whether any content of the row has an image."""
    said = [message.get("content") for _, messages in _conversations(row) for message in messages]
    return any(map(image_parts, [row.get("problem"), *said]))


def map_contents(row: Row, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The row with each content changed."""
    changed = dict(row)
    if isinstance(row.get("problem"), list):
        changed["problem"] = change(row["problem"])
    for column, messages in _conversations(row):
        changed[column] = [{**message, "content": change(message.get("content"))} for message in messages]
    return changed


def _conversations(row: Row) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    for column in CONVERSATIONS:
        messages = row.get(column)
        if isinstance(messages, Sequence) and messages and all(isinstance(message, Mapping) for message in messages):
            yield column, messages


# -- reading


async def open_images(row: Row) -> Row:
    """The row with PIL images in the place of their sources, read in a thread: URLs are slow. ValueError as `read`."""

    def opened(content: Any) -> Any:
        if not image_parts(content):
            return content
        return [
            {"type": "image", "image": read_image(_source(part))} if image_parts([part]) else part for part in content
        ]

    return await asyncio.to_thread(map_contents, row, opened) if has_images(row) else row


def _source(part: Mapping[str, Any]) -> Any:
    source = part.get(part["type"])
    if part["type"] == "image_url" and isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        raise ValueError("an image part without an image")
    return source


def read_image(source: Any) -> Image:
    """The image as RGB. Raises ValueError, naming the source, if it cannot be read or decoded."""
    from PIL import Image, UnidentifiedImageError

    scheme = source.partition(":")[0] if isinstance(source, str) else ""
    if scheme == "shapes":
        from nemo_rl.data.datasets import shapes

        return shapes.draw(source.partition(":")[2])
    if scheme == "sliding_puzzle":
        from nemo_rl.utils import sliding_puzzle

        return sliding_puzzle.draw(source.partition(":")[2])
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    try:
        data = _bytes_of(source, scheme)
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB")
    # Pillow has SyntaxError for damage behind the beginning of a file.
    except (Image.DecompressionBombError, HTTPException, OSError, SyntaxError, ValueError) as error:
        reason = "it is no image that Pillow can decode" if isinstance(error, UnidentifiedImageError) else error
        raise ValueError(f"image {_name_of(source)} cannot be read: {reason}") from error


def _bytes_of(source: Any, scheme: str) -> bytes:
    if isinstance(source, Mapping):  # the Image feature of datasets, not decoded
        if source.get("bytes") is not None:
            return source["bytes"]
        source = source.get("path")
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str | Path):
        known = "a path, a URL, bytes, a PIL image or a value of datasets' Image feature"
        raise ValueError(f"a source is {known}, not a {type(source).__name__}")
    if scheme == "data":
        return base64.b64decode(str(source).partition(",")[2], validate=True)
    if scheme in ("http", "https", "file"):
        with urllib.request.urlopen(str(source), timeout=FETCH_TIMEOUT_S) as answer:
            data = answer.read(MAX_FETCHED_BYTES + 1)
        if len(data) > MAX_FETCHED_BYTES:
            raise ValueError(f"it has more than {MAX_FETCHED_BYTES >> 20} MiB")
        return data
    return Path(source).read_bytes()


def _name_of(source: Any) -> str:
    if isinstance(source, Mapping):
        source = source.get("path") or "in the row"
    return repr(str(source)[:80]) if isinstance(source, str | Path) else f"of {type(source).__name__}"


def image_digest(image: Image) -> str:
    """32 hexadecimal digits that equal images share."""
    return xxhash.xxh3_128_hexdigest(repr(image.size).encode() + image.tobytes())


def small_jpeg(image: Image) -> np.ndarray:
    """A JPEG file of the image, uint8 [bytes], `PREVIEW_SIDE` pixels at most along each side."""
    small, file = image.copy(), io.BytesIO()
    small.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
    small.save(file, format="JPEG", quality=85)
    return np.frombuffer(file.getvalue(), dtype=np.uint8)


# -- processing


@lru_cache(maxsize=4)
def load_processor(path: str) -> Any:
    """The processor of a model directory or hub model, once in each process."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(path)


@lru_cache(maxsize=4)
def image_marks(path: str) -> set[str]:
    """The texts that stand for an image: the one that the processor replaces, and the token that it repeats for it."""
    from PIL import Image

    processor = load_processor(path)
    _, text = process_image(processor, Image.new("RGB", (64, 64)))
    return {processor.image_token, max(processor.tokenizer.get_added_vocab(), key=text.count)}


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of rows with the processor of a model. Picklable: each process loads the processor once.

    `max_images`: the most images of a row; None: any number.
    """

    processor_path: str
    max_images: int | None = None

    def read(self, row: Row) -> tuple[Row, dict[str, Pixels]]:
        """The row with the tokens for each image in place of its source, and the pixels of each image by digest.

        Raises ValueError for an image that cannot be read, too many of them, or a text with the model's mark of an
        image.
        """
        pixels: dict[str, Pixels] = {}
        self._refuse_marks("\n".join(value for value in row.values() if isinstance(value, str)))
        changed = map_contents(row, lambda content: self.read_content(content, pixels))
        conversations = [[{"content": row.get("problem")}], *(messages for _, messages in _conversations(row))]
        count = max(sum(len(image_parts(message.get("content"))) for message in said) for said in conversations)
        if self.max_images is not None and count > self.max_images:
            raise ValueError(f"{count} images, more than data.max_images={self.max_images}")
        return changed, pixels

    def read_content(self, content: Any, pixels: dict[str, Pixels]) -> Any:
        """A content with tokens for its images; their pixels go into `pixels`. ValueError as `read`."""
        self._refuse_marks(text_of(content))
        if not image_parts(content):
            return content
        shown = [part for part in content if part.get("type") in IMAGE_TYPES or part.get("text") is not None]
        return [self._read_part(part, pixels) if part.get("type") in IMAGE_TYPES else part for part in shown]

    def _refuse_marks(self, text: str) -> None:
        if found := next((mark for mark in image_marks(self.processor_path) if mark in text), None):
            raise ValueError(
                f"a text contains {found}, with which the model marks an image, and no image belongs to it: give "
                'images as parts {"type": "image", "image": ...}'
            )

    def _read_part(self, part: Mapping[str, Any], pixels: dict[str, Pixels]) -> dict[str, Any]:
        image = read_image(_source(part))
        digest, processor = image_digest(image), load_processor(self.processor_path)
        made, expansion = process_image(processor, image)
        pixels[digest] = {**made, PREVIEW: small_jpeg(image)}
        # Qwen-VL repeats a still image to as many frames as a patch has.
        frames = processor.image_processor.temporal_patch_size if "image_grid_thw" in made else 1
        known = {"digest": digest, "placeholder": processor.image_token, "expansion": expansion}
        return {"type": "image", **known, "num_pixels": made["pixel_values"].size // 3 // frames}


def blank_image(processor_path: str) -> Pixels:
    """The pixels of a small image. Raises ValueError if the model has no image processor."""
    from PIL import Image

    try:
        processor = load_processor(processor_path)
        return process_image(processor, Image.new("RGB", (64, 64)))[0]
    except ImportError as error:
        raise ValueError(f"policy.model_name: the processor of {processor_path!r} cannot be loaded: {error}") from error
    except (OSError, AttributeError) as error:
        raise ValueError(
            f"policy.tokenizer.name: {processor_path!r} has no image processor ({error}); name the vision-language "
            "model itself, whose preprocessor_config.json or processor_config.json describes it"
        ) from error


def process_image(processor: Any, image: Image) -> tuple[Pixels, str]:
    """The pixels of one image, and the text whose tokens stand for it.

    Raises ValueError if the processor refuses the image, for example for its proportions.
    """
    try:
        made = processor(
            images=[image],
            text=[processor.image_token],
            return_tensors="pt",
            return_text_replacement_offsets=True,
            add_special_tokens=False,
        )
    except ValueError as error:
        width, height = image.size
        raise ValueError(f"an image of {width}x{height} pixels does not suit the model: {error}") from error
    [[offset]] = made["text_replacement_offsets"]
    return {name: value.numpy() for name, value in made.items() if name not in _NOT_PIXELS}, offset["replacement"]


# -- tokens


def expand(chat: Chat, images: Sequence[Mapping[str, Any]]) -> tuple[Chat, list[tuple[int, int]]]:
    """The conversation with the tokens for each image, and the characters [begin, end) of each.

    `images`: the read parts of all messages, in order. Raises ValueError if the chat template does not show all images.
    """
    placeholder = images[0]["placeholder"]
    places = [found.start() for found in re.finditer(re.escape(placeholder), chat.text)]
    if len(places) != len(images):
        raise ValueError(
            f"the chat template shows {len(places)} of {len(images)} images: take one that shows {placeholder} for "
            "each, with policy.tokenizer.chat_template"
        )
    expansions = [image["expansion"] for image in images]
    growth = [0, *accumulate(len(expansion) - len(placeholder) for expansion in expansions)]

    def moved(position: int) -> int:
        return position + growth[bisect_left(places, position)]

    in_order = iter(expansions)
    expanded = replace(
        chat,
        text=re.sub(re.escape(placeholder), lambda _: next(in_order), chat.text),
        begins=[moved(begin) for begin in chat.begins],
        answers=[[(moved(a), moved(b)) for a, b in spans] for spans in chat.answers],
    )
    starts = [moved(place) for place in places]
    return expanded, [(a, a + len(expansion)) for a, expansion in zip(starts, expansions, strict=True)]


def spans_of_images(
    images: Sequence[Mapping[str, Any]], characters: Sequence[tuple[int, int]], starts: Sequence[int]
) -> list[ImageSpan]:
    """The tokens of each image, from its characters and the first character of each token."""
    spans = []
    for image, (begin, end) in zip(images, characters, strict=True):
        first, last = bisect_left(starts, begin), bisect_left(starts, end)
        known = {"digest": image["digest"], "num_pixels": image["num_pixels"]}
        spans.append(ImageSpan(start=first, length=last - first, **known))
    return spans


def images_of_log(log: Sequence[Mapping[str, Any]]) -> list[ImageSpan]:
    """The spans of all images of a message log, counted from its first token."""
    spans, first = [], 0
    for message in log:
        spans += [replace(span, start=first + span.start) for span in message.get("images", ())]
        first += len(message["token_ids"])
    return spans
