"""Questions that only a corpus can answer, and that corpus: generated, for the environment of retrieval.

A fact gives the code of a place, three digits drawn from a seed: nothing that a model could know or guess. Places are
held out for validation by a hash of their name; their facts are in the corpus as all others are.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import xxhash

from nemo_rl.config.base import StrictModel
from nemo_rl.data.config import TableConfig
from nemo_rl.data.datasets.files import generated_options
from nemo_rl.utils import task_formats as retrieval_tags

_PLACES = """
Accra Amman Ankara Athens Baku Beirut Berlin Bern Bogota Cairo Caracas Dakar Delhi Dhaka Doha Dublin Hanoi Harare
Havana Jakarta Kabul Kigali Kyiv Lima Lisbon London Luanda Lusaka Madrid Male Manila Maputo Minsk Monaco Nairobi
Nassau Oslo Ottawa Paris Prague Quito Rabat Riga Rome Sofia Suva Tallinn Tehran Tirana Tokyo Tunis Vienna Vilnius
Warsaw Zagreb
"""
PLACES = _PLACES.split()
HELD_OUT_ONE_IN = 5
SPLITS = ("train", "validation", "all")
DEFAULT_NUM_TRAIN_SAMPLES = 10_000
DEFAULT_SEED = 42


def code_of(place: str, seed: int) -> str:
    """Three digits."""
    return f"{xxhash.xxh64_intdigest(place.encode(), seed=seed) % 1000:03d}"


def fact(place: str, code: str) -> str:
    return f"The code of {place} is {code}."


def question(place: str) -> str:
    return f"What is the code of {place}?"


def corpus(seed: int = DEFAULT_SEED) -> list[dict[str, str]]:
    """Rows {"text": a fact}, one for each place, in the order of their names."""
    return [{"text": fact(place, code_of(place, seed))} for place in PLACES]


def places_of(split: str) -> list[str]:
    """The places that a split asks for: "train", "validation" or "all".

    Raises:
        ValueError: for another split.
    """
    if split not in SPLITS:
        raise ValueError(f"lookup: split must be one of {', '.join(SPLITS)}, got {split!r}")

    def is_held_out(place: str) -> bool:
        return xxhash.xxh64_intdigest(place.encode()) % HELD_OUT_ONE_IN == 0

    return [place for place in PLACES if split == "all" or is_held_out(place) == (split == "validation")]


class _Options(StrictModel):
    num_samples: int | None = None
    corpus_seed: int = DEFAULT_SEED


def load_lookup(cfg: TableConfig) -> list[dict[str, Any]]:
    """Rows {"problem", "expected_answer"}; `kwargs` {num_samples, corpus_seed}, `split` and `seed` of the section.

    `num_samples` defaults to 10,000 for training and to each place once else. `corpus_seed` is the corpus's `seed`.

    Raises:
        ValueError: for an unknown or wrong option.
    """
    options = generated_options(cfg, _Options)
    split = cfg.split or "train"
    places = places_of(split)
    num_samples = options.num_samples
    if num_samples is None:
        num_samples = DEFAULT_NUM_TRAIN_SAMPLES if split == "train" else len(places)
    if num_samples < 1:
        raise ValueError(f"lookup: num_samples must be 1 or more, got {num_samples}")
    generator = np.random.default_rng(cfg.seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < num_samples:
        for i in generator.permutation(len(places))[: num_samples - len(rows)]:
            place = places[int(i)]
            rows.append({"problem": question(place), "expected_answer": code_of(place, options.corpus_seed)})
    return rows


def load_held_out(cfg: TableConfig) -> list[dict[str, Any]]:
    """Each held-out place once: what `split_validation_size` of a training section means here."""
    kwargs = {key: value for key, value in cfg.kwargs.items() if key != "num_samples"}
    return load_lookup(cfg.model_copy(update={"split": "validation", "kwargs": kwargs}))


def demonstrate(rng: random.Random, mistake_probability: float) -> list[dict[str, str]]:
    """A question, a search, two facts of which the first is found for its place, and the answer.

    Codes are drawn anew each time, so that only what was found can tell them. With `mistake_probability` the search is
    for another place, and the answer believes what is found.
    """
    place, other = rng.sample(PLACES, 2)
    asked = rng.choice(PLACES) if rng.random() < mistake_probability else place
    code, other_code = (f"{rng.randrange(1000):03d}" for _ in range(2))
    found = [fact(asked, code), fact(other, other_code)]
    return [
        {"role": "user", "content": question(place)},
        {"role": "assistant", "content": retrieval_tags.search(asked)},
        {"role": "environment", "content": retrieval_tags.passages(found[:1])},
        {"role": "assistant", "content": retrieval_tags.answer(code)},
    ]
