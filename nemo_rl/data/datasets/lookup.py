"""Generated questions that only a corpus can answer, and that corpus, for the retrieval environment.

A fact gives the code of a place, three digits drawn from a seed: no model can know or guess it. A hash of the place's
name chooses the held-out fifth; the corpus contains the facts of all places.
"""

import random
from typing import Any

import xxhash
from pydantic import Field

from nemo_rl.config.rules import StrictModel
from nemo_rl.data.config import TableConfig
from nemo_rl.data.datasets.arithmetic import demonstrate_arithmetic, generated_options, in_split, sampled
from nemo_rl.utils.task_formats import answer, passages, search

_NAMES = """
Accra Amman Ankara Athens Baku Beirut Berlin Bern Bogota Cairo Caracas Dakar Delhi Dhaka Doha Dublin Hanoi Harare
Havana Jakarta Kabul Kigali Kyiv Lima Lisbon London Luanda Lusaka Madrid Male Manila Maputo Minsk Monaco Nairobi
Nassau Oslo Ottawa Paris Prague Quito Rabat Riga Rome Sofia Suva Tallinn Tehran Tirana Tokyo Tunis Vienna Vilnius
Warsaw Zagreb
"""
PLACES = _NAMES.split()
DEFAULT_SEED = 42


def code_of(place: str, seed: int) -> str:
    """The code of a place, three digits."""
    return f"{xxhash.xxh64_intdigest(place.encode(), seed=seed) % 1000:03d}"


def fact(place: str, code: str) -> str:
    return f"The code of {place} is {code}."


def question(place: str) -> str:
    return f"What is the code of {place}?"


def corpus(seed: int = DEFAULT_SEED) -> list[dict[str, str]]:
    """Rows {"text": a fact}, one for each place, in the order of their names."""
    return [{"text": fact(place, code_of(place, seed))} for place in PLACES]


class _Options(StrictModel):
    num_samples: int | None = Field(default=None, ge=1)
    corpus_seed: int = DEFAULT_SEED


def load_lookup(cfg: TableConfig) -> list[dict[str, Any]]:
    """Rows {"problem", "expected_answer"}; `kwargs` {num_samples, corpus_seed}, `split` and `seed` of the section.

    `num_samples` defaults to 10,000 for training and otherwise to each place once. `corpus_seed` is the corpus's
    `seed`.
    """
    options = generated_options(cfg, _Options)
    of_split = [place for place in PLACES if in_split(place, cfg.split or "train")]
    places = sampled(cfg, of_split, options.num_samples)
    return [{"problem": question(place), "expected_answer": code_of(place, options.corpus_seed)} for place in places]


def demonstrate_lookup(rng: random.Random, mistake_probability: float) -> list[dict[str, str]]:
    """A question, a search, the passage it finds, and the answer, for the warm-up of tiny models.

    Codes are drawn for each demonstration, so that the model has to read the passage. With `mistake_probability` the
    search is for another place, and the answer repeats the code of that place.
    """
    place = rng.sample(PLACES, 2)[0]
    searched = rng.choice(PLACES) if rng.random() < mistake_probability else place
    code = f"{rng.randrange(1000):03d}"
    rng.randrange(1000)  # the warm-up of the existing tiny models has drawn a second code
    return [
        {"role": "user", "content": question(place)},
        {"role": "assistant", "content": search(searched)},
        {"role": "environment", "content": passages([fact(searched, code)])},
        {"role": "assistant", "content": answer(code)},
    ]


def demonstrate_sum_or_lookup(rng: random.Random, mistake_probability: float) -> list[dict[str, str]]:
    """A problem of the dataset `arithmetic` or, as often, a question of `lookup`, with the answer."""
    if rng.random() < 0.5:
        return demonstrate_lookup(rng, mistake_probability)
    return demonstrate_arithmetic(rng, mistake_probability, 1)[0]
