"""Questions answered after searching a corpus: the model asks for passages, reads them, and answers.

The environment, the comparison of answers, and the corpus with its BM25 index.
"""

import json
import logging
import re
import shutil
import string
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import bm25s
import numpy as np
import torch
import xxhash

from nemo_rl.environments.config import RetrievalEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples
from nemo_rl.types import LLMMessageLogType
from nemo_rl.utils.files import file_lock
from nemo_rl.utils.folders import cache_root
from nemo_rl.utils.registry import import_object
from nemo_rl.utils.tables import load_table
from nemo_rl.utils.task_formats import STOP_STRINGS, find_action, one_text, passages

logger = logging.getLogger(__name__)

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
WORD = r"(?u)\b\w+\b"
BATCH = 1000  # rows that are read at a time
NOTHING_FOUND = "Nothing was found."
NO_SEARCHES_LEFT = "No searches are left: give the answer in <answer> </answer>."
NEITHER = "Search with <retrieve> </retrieve>, or give the answer in <answer> </answer>."


class RetrievalMetadata(TypedDict):
    """A row has `ground_truth`; the rest is the state of an episode."""

    ground_truth: str | list[str]  # the right answer, or all right answers
    searches: NotRequired[int]
    hits: NotRequired[int]  # searches that showed the answer


class RetrievalEnvironment(EnvironmentInterface[RetrievalMetadata]):
    """`<retrieve>words</retrieve>` is answered with numbered passages; `<answer>text</answer>` ends the episode.

    The reward compares the answer with `metadata["ground_truth"]`. Metrics of a conversation: `searches_per_sample`,
    and after a search `hit_rate`, the share of its searches that showed the answer.
    """

    def __init__(self, cfg: RetrievalEnvironmentConfig | Mapping[str, Any]) -> None:
        """ValueError or FileNotFoundError for a corpus that cannot be read."""
        self.cfg = RetrievalEnvironmentConfig.model_validate(cfg)
        self.index = PassageIndex(load_corpus(self.cfg), self.cfg, cache_root() / "retrieval")

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[RetrievalMetadata]
    ) -> EnvironmentReturn[RetrievalMetadata]:
        """Search, or judge the answer, as the last turn of each conversation asks."""
        texts, after, answers, rewards, metrics = [], [], [], [], []
        for log, known in zip(message_log_batch, metadata, strict=True):
            text, state, answer, reward = self._turn(str(log[-1]["content"]), known)
            texts.append({"role": "environment", "content": text})
            after.append(state)
            answers.append(answer)
            rewards.append(reward)
            searches = state.get("searches", 0)
            hit_rate = {"hit_rate": state.get("hits", 0) / searches} if searches else {}
            metrics.append({"searches_per_sample": float(searches), **hit_rate})
        return EnvironmentReturn(
            observations=texts,
            metadata=after,
            next_stop_strings=[STOP_STRINGS for _ in after],
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor([answer is not None for answer in answers]),
            answers=answers,
            metrics=metrics,
        )

    def _turn(self, turn: str, state: RetrievalMetadata) -> tuple[str, RetrievalMetadata, str | None, float]:
        """(observation, new state, answer, reward)."""
        truths = accepted_answers(state["ground_truth"])
        action = find_action(turn)
        if action.answer is not None:
            reward = max(score(action.answer, truth, self.cfg.reward) for truth in truths)
            return ("right" if reward == 1 else "not right"), state, action.answer, reward
        if action.query is None:
            return NEITHER, state, None, 0.0
        searches = state.get("searches", 0)
        if searches >= self.cfg.max_searches:
            return NO_SEARCHES_LEFT, state, None, 0.0
        shown = self._passages(action.query)
        hit = any(mentions(text, truth) for text in shown for truth in truths)
        state = {**state, "searches": searches + 1, "hits": state.get("hits", 0) + hit}
        return passages(shown) or NOTHING_FOUND, state, None, 0.0

    def _passages(self, query: str) -> list[str]:
        """The passages that a search shows, within the limits."""
        room = self.cfg.max_observation_characters
        shown: list[str] = []
        for number in self.index.search(query, self.cfg.num_results):
            text = str(self.index.corpus[number])[: min(room, self.cfg.max_passage_characters)]
            if not text:
                break
            shown.append(text)
            room -= len(text)
        return shown

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """Metrics of a batch with `rewards` [B] and `is_end` [B] (an answer was given)."""
        return batch, {
            "correct_rate": (batch["rewards"] >= 1).float().mean().item(),
            "fraction_of_samples_properly_ended": batch["is_end"].float().mean().item(),
        }


def accepted_answers(truth: str | Sequence[str]) -> list[str]:
    """The right answers, at least one."""
    answers = [one_text(one, "as ground_truth") for one in (truth if isinstance(truth, list | tuple) else [truth])]
    if not answers:
        raise ValueError("the row has no right answer: its ground_truth is an empty list")
    return answers


def normalised(text: str) -> str:
    """Without case, punctuation, articles and extra spaces, as SQuAD compares answers (Rajpurkar et al. 2016)."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def score(answer: str, truth: str, kind: str) -> float:
    """1.0 for the same words in the same order, else 0.0; with `kind` "f1" how well the words agree, from 0 to 1."""
    given, expected = normalised(answer), normalised(truth)
    if kind == "exact_match" or not given or not expected:
        return float(given == expected)
    words, wanted = given.split(), expected.split()
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))


def mentions(text: str, truth: str) -> bool:
    """Whether a passage has the words of the answer in order."""
    return f" {normalised(truth)} " in f" {normalised(text)} "


def load_corpus(cfg: RetrievalEnvironmentConfig) -> Sequence[Any]:
    """The passages of a file, a Hugging Face path or a function. A column of a table stays on disk.

    ValueError or FileNotFoundError for a corpus that is missing, unreadable or empty, or lacks the split or the column.
    """
    name, column = cfg.dataset_name, cfg.text_column
    if ":" in name:
        rows = import_object(name, "corpus")(**cfg.dataset_kwargs)
    else:
        split = None if Path(name).suffix in FORMATS else cfg.dataset_split  # a file has none
        rows = load_table(name, split=split)
    if len(rows) == 0:
        raise ValueError(f"the corpus {name!r} is empty: it has no row")
    if column not in rows[0]:
        raise ValueError(
            f"the corpus {name!r} has no column {column!r} (text_column); its columns are: {', '.join(rows[0])}"
        )
    return [row[column] for row in rows] if ":" in name else rows[column]


def check_corpus(name: str) -> None:
    """Check that the file or the function of a corpus exists, without reading it or asking Hugging Face.

    ValueError for a function that cannot be imported, FileNotFoundError for a file that does not exist.
    """
    if ":" in name:
        import_object(name, "corpus")
    elif Path(name).suffix in FORMATS and not Path(name).is_file():
        raise FileNotFoundError(f"the corpus {name!r} does not exist (looked in {Path.cwd()})")


class PassageIndex:
    """BM25 over a corpus (Robertson and Zaragoza 2009, in the form of Lucene), from the package bm25s.

    The index is in a folder below `cache`, named by a digest of passages and settings. The first process makes it; all
    map it into memory, so that several actors share one copy.
    """

    def __init__(self, corpus: Sequence[Any], cfg: RetrievalEnvironmentConfig, cache: Path) -> None:
        self.corpus = corpus
        self.stopwords: str | list[str] = cfg.stopwords or []
        settings = cfg.model_dump(include={"k1", "b", "stopwords"}) | {"words": WORD, "bm25s": bm25s.__version__}
        digest = xxhash.xxh128(json.dumps(settings, sort_keys=True).encode())
        for text in self._passages():
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
        self.folder = cache / digest.hexdigest()
        if not self.folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with file_lock(self.folder.with_name(self.folder.name + ".lock")):
                if not self.folder.is_dir():
                    self._make(cfg)
        self._index: Any = bm25s.BM25.load(self.folder, mmap=True, load_corpus=False, show_progress=False)

    def _make(self, cfg: RetrievalEnvironmentConfig) -> None:
        logger.info("making the index of %d passages in %s", len(self.corpus), self.folder)
        work = Path(tempfile.mkdtemp(prefix=self.folder.name + ".tmp-", dir=self.folder.parent))
        try:
            words = self._words(list(self._passages()))
            index = bm25s.BM25(k1=cfg.k1, b=cfg.b, method="lucene", backend="numpy")
            index.index(words, show_progress=False)
            index.save(work, show_progress=False)
            work.rename(self.folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _passages(self) -> Iterator[str]:
        # A table on disk takes twenty times as long for single rows.
        for start in range(0, len(self.corpus), BATCH):
            yield from map(str, self.corpus[start : start + BATCH])

    def _words(self, texts: Any, **options: Any) -> Any:
        return bm25s.tokenize(texts, token_pattern=WORD, stopwords=self.stopwords, show_progress=False, **options)

    def search(self, query: str, num_results: int) -> list[int]:
        """The indices of the best passages that have a word of the query, best first, equal ones in corpus order.

        A repeated word of the query counts each time.
        """
        known = sorted(self._index.get_tokens_ids(self._words(query, return_ids=False)[0]))
        if not known:
            return []
        scores = self._index.get_scores_from_ids(known)
        found = np.flatnonzero(scores > 0)
        if len(found) > num_results:
            threshold = np.partition(scores[found], -num_results)[-num_results]
            found = found[scores[found] >= threshold]
        order = np.lexsort((found, -scores[found]))[:num_results]
        return found[order].tolist()
