"""Configuration of the environment that looks things up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.base import NotYet, one_of
from nemo_rl.environments.actors_config import ActorsConfig

LANGUAGES = {
    "da": "danish",
    "de": "german",
    "en": "english",
    "es": "spanish",
    "fr": "french",
    "it": "italian",
    "ko": "korean",
    "nl": "dutch",
    "no": "norwegian",
    "pt": "portuguese",
    "ru": "russian",
    "sv": "swedish",
    "tr": "turkish",
    "zh": "chinese",
}
"""Languages whose commonest words the package bm25s has, under either name."""


class RetrievalEnvironmentConfig(ActorsConfig):
    """Questions that the model answers after searching a corpus of passages, ranked by BM25."""

    type: Literal["retrieval"] = "retrieval"
    """Registry name of the environment."""

    dataset_name: str = Field(min_length=1)
    """The corpus: a local JSONL, CSV or Parquet file, a Hugging Face path, or the import path (`pkg.module:function`)
    of a function that returns its rows."""

    dataset_split: str = "train"
    """Split of a corpus on Hugging Face."""

    dataset_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function that returns the rows."""

    text_column: str = "text"
    """Column of the passages."""

    num_results: int = Field(default=3, ge=1)
    """Passages that a search shows at most."""

    k1: float = Field(default=1.5, ge=0)
    """Of BM25: how soon further occurrences of a word count less."""

    b: float = Field(default=0.75, ge=0, le=1)
    """Of BM25: how much long passages are held back, between 0 and 1."""

    stopwords: str | None = None
    """Language (`en` or `english`, `de` or `german`, ...) whose commonest words are not searched for; null: all are."""

    max_searches: int = Field(default=4, ge=1)
    """Searches of an episode; past them the model is told to answer."""

    max_passage_characters: int = Field(default=500, ge=1)
    """Characters of a passage that are shown."""

    max_observation_characters: int = Field(default=2000, ge=1)
    """Characters of all passages of a search; those that do not fit are cut or left out, the worst ones first."""

    reward: Literal["exact_match", "f1"] = "exact_match"
    """1 for the right answer, or how well its words agree with it (F1). Case, punctuation and articles do not count."""

    not_yet: ClassVar = (NotYet("device", one_of("cpu", None)),)

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.stopwords is not None and self.stopwords not in (*LANGUAGES, *LANGUAGES.values()):
            yield (
                "stopwords",
                f"no words are known of the language {self.stopwords!r}; write one of {', '.join(LANGUAGES.values())}, "
                "or null for none",
            )
        if self.dataset_kwargs and ":" not in self.dataset_name:
            yield "dataset_kwargs", "are for a function: dataset_name is none (pkg.module:function); remove them"
