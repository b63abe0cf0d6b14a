"""Generated images of coloured shapes, with questions on their number, colour and place; needs no download.

An image has 3 x 3 places, some of them with a shape. Rows hold the description of an image, such as `red circle 0,blue
square 4`, from which the process that reads the row draws it. A hash of the description alone chooses the held-out
fifth, so training and validation never share an image, whatever the other options are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import xxhash
from pydantic import Field

from nemo_rl.config.rules import StrictModel
from nemo_rl.data.config import ExampleDatasetConfig, PreferenceDatasetConfig, TableConfig
from nemo_rl.data.datasets.arithmetic import DEFAULT_NUM_TRAIN_SAMPLES, boxed, generated_options, in_split

if TYPE_CHECKING:
    from PIL.Image import Image

Shape = tuple[str, str, int]
"""Colour, form, number of its place, counted by rows from the top left."""

COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
FORMS = ("circle", "square", "triangle")
PLACES = tuple(f"{row} {column}" for row in ("top", "middle", "bottom") for column in ("left", "centre", "right"))
CELL = 16  # pixels of a place along each side
SIDE = 3 * CELL
BACKGROUND = (236, 236, 236)
NUM_VALIDATION = 256


# -- images


def describe(shapes: Sequence[Shape]) -> str:
    """The description that `draw` reads."""
    return ",".join(f"{colour} {form} {place}" for colour, form, place in shapes)


def draw(description: str) -> Image:
    """The image of a description, 48 x 48 pixels. Sizes and positions within a place vary with the description.

    Raises ValueError for a text that is no description.
    """
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for text in description.split(","):
        colour, form, place = (*text.split(), "", "")[:3]
        if colour not in COLOURS or form not in FORMS or not place.isdecimal() or int(place) >= len(PLACES):
            raise ValueError(f"image 'shapes:{description[:80]}': {text!r} is no shape like 'red circle 0'")
        vary = xxhash.xxh64_intdigest(f"{description}/{place}".encode())
        size = 10 + vary % 4
        left = int(place) % 3 * CELL + 1 + (vary >> 8) % (CELL - size - 1)
        top = int(place) // 3 * CELL + 1 + (vary >> 16) % (CELL - size - 1)
        box = (left, top, left + size, top + size)
        if form == "circle":
            pen.ellipse(box, fill=COLOURS[colour])
        elif form == "square":
            pen.rectangle(box, fill=COLOURS[colour])
        else:
            pen.polygon([(left + size / 2, top), (left, top + size), (left + size, top + size)], fill=COLOURS[colour])
    return image


# -- questions

Question = tuple[str, str, list[str]]
"""Question, answer, and the wrong answers of its kind, beginning with the one after it."""


def ask_count(shapes: Sequence[Shape], rng: random.Random) -> Question:
    wanted = rng.choice([*COLOURS, *FORMS])
    count = sum(wanted in (colour, form) for colour, form, _ in shapes)
    return f"How many {wanted}{'s' if wanted in FORMS else ''}?", str(count), _others("01234", str(count))


def ask_colour(shapes: Sequence[Shape], rng: random.Random) -> Question:
    colour, form, _ = rng.choice(_unique(shapes))
    return f"What colour is the {form}?", colour, _others(list(COLOURS), colour)


def ask_place(shapes: Sequence[Shape], rng: random.Random) -> Question:
    _, form, place = rng.choice(_unique(shapes))
    return f"Where is the {form}?", PLACES[place], _others(PLACES, PLACES[place])


def _others(answers: Sequence[str], right: str) -> list[str]:
    """The other answers in a circle, beginning after the right one."""
    after = answers.index(right) + 1
    return [*answers[after:], *answers[: after - 1]]


ASK: dict[str, Callable[[Sequence[Shape], random.Random], Question]] = {
    "count": ask_count,
    "colour": ask_colour,
    "place": ask_place,
}


def _unique(shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes that no other shares its form with; the first shape is always one of them."""
    return [shape for shape in shapes if sum(form == shape[1] for _, form, _ in shapes) == 1]


def draw_shapes(rng: random.Random, most: int) -> list[Shape]:
    """One to `most` shapes at different places, in the order of the places. One of them has a form of its own."""
    places = rng.sample(range(len(PLACES)), rng.randint(1, most))
    own = rng.choice(FORMS)
    others = [form for form in FORMS if form != own]
    forms = [own, *(rng.choice(others) for _ in places[1:])]
    shapes = [(rng.choice(list(COLOURS)), form, place) for form, place in zip(forms, places, strict=True)]
    return sorted(shapes, key=lambda shape: shape[2])


# -- rows


class _Options(StrictModel):
    num_samples: int | None = Field(default=None, ge=1)
    max_shapes: int = Field(default=3, ge=1, le=9)
    questions: list[Literal["count", "colour", "place"]] = Field(default_factory=lambda: ["count", "colour", "place"])


def load_shapes(cfg: TableConfig) -> list[dict[str, Any]]:
    """Rows {"problem": an image and a question, "expected_answer"}, with `messages` for SFT, and pairs for preferences.

    `kwargs` are {num_samples, max_shapes, questions: [count, colour, place]}; `split` and `seed` come from the
    section. `num_samples` defaults to 10,000 for training and otherwise to 256.
    """
    options = generated_options(cfg, _Options)
    split = cfg.split or "train"
    num_samples = options.num_samples or (DEFAULT_NUM_TRAIN_SAMPLES if split == "train" else NUM_VALIDATION)
    rng = random.Random(cfg.seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < num_samples:
        shapes = draw_shapes(rng, options.max_shapes)
        if not in_split(describe(shapes), split):
            continue
        question, answer, wrong = ASK[rng.choice(options.questions)](shapes, rng)
        user = _user(shapes, question)
        if isinstance(cfg, PreferenceDatasetConfig):
            rows.append({"prompt": [user], "chosen": boxed(answer), "rejected": boxed(rng.choice(wrong))})
        elif isinstance(cfg, ExampleDatasetConfig):
            rows.append({"messages": [user, {"role": "assistant", "content": boxed(answer)}]})
        else:
            rows.append({"problem": user["content"], "expected_answer": answer})
    return rows


def _user(shapes: Sequence[Shape], question: str) -> dict[str, Any]:
    image = {"type": "image", "image": f"shapes:{describe(shapes)}"}
    return {"role": "user", "content": [image, {"type": "text", "text": question}]}


def demonstrate_shapes(rng: random.Random, mistake_probability: float) -> list[dict[str, Any]]:
    """An image, a question on number or colour and its answer, with `mistake_probability` the one after the right one.

    For the warm-up of tiny models, which learn no places: their long answers would take most of the short training.
    """
    shapes = draw_shapes(rng, _Options().max_shapes)
    question, answer, wrong = rng.choice((ask_count, ask_colour))(shapes, rng)
    said = wrong[0] if rng.random() < mistake_probability else answer
    return [_user(shapes, question), {"role": "assistant", "content": boxed(said)}]
