"""A corpus of passages and its BM25 index, made once and read from disk by every process after that."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import xxhash

from nemo_rl.utils.checkpoint_files import file_lock

logger = logging.getLogger(__name__)

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
WORD = r"(?u)\b\w+\b"
BATCH = 1000  # rows that are read at a time


class TableColumn(Sequence[str]):
    """A column of a table of the package datasets, which stays on disk."""

    def __init__(self, table: Any, column: str) -> None:
        self.table = table
        self.column = column

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        return str(self.table[int(index)][self.column])

    def __iter__(self) -> Iterator[str]:
        for batch in self.table.iter(batch_size=BATCH):
            yield from map(str, batch[self.column])


def load_corpus(name: str, *, split: str, text_column: str, kwargs: Mapping[str, Any]) -> Sequence[str]:
    """The passages of a file, a Hugging Face path or a function (`package.module:function`).

    Raises:
        ValueError: for a corpus that cannot be found or read, without passages, or without the column.
        FileNotFoundError: for a file that is not there.
    """
    rows = _function(name)(**kwargs) if ":" in name else _table(name, split)
    if len(rows) == 0:
        raise ValueError(f"the corpus {name!r} is empty: it has no row")
    if text_column not in rows[0]:
        raise ValueError(
            f"the corpus {name!r} has no column {text_column!r} (text_column); its columns are: {', '.join(rows[0])}"
        )
    return [str(row[text_column]) for row in rows] if ":" in name else TableColumn(rows, text_column)


def check_corpus(name: str) -> None:
    """Whether the file or the function of a corpus is there, without reading it; nothing is asked of Hugging Face.

    Raises:
        ValueError: for a function that cannot be imported.
        FileNotFoundError: for a file that is not there.
    """
    if ":" in name:
        _function(name)
    elif Path(name).suffix in FORMATS:
        _check_file(name)


def _check_file(name: str) -> None:
    if not Path(name).is_file():
        raise FileNotFoundError(f"the corpus {name!r} does not exist (looked in {Path.cwd()})")


def _function(path: str) -> Any:
    module_name, _, name = path.partition(":")
    try:
        return vars(importlib.import_module(module_name))[name]
    except ModuleNotFoundError as error:
        raise ValueError(f"corpus {path!r}: no module {error.name!r} can be imported from here") from error
    except KeyError as error:
        raise ValueError(f"corpus {path!r}: module {module_name!r} has no {name!r}") from error


def _table(name: str, split: str) -> Any:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    suffix = Path(name).suffix
    if suffix in FORMATS:
        _check_file(name)
        return datasets.load_dataset(FORMATS[suffix], data_files=name)["train"]
    try:
        loaded = datasets.load_dataset(name)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"the corpus {name!r} is no file ({', '.join(FORMATS)}), and on Hugging Face it cannot be had: {error}"
        ) from error
    if split not in loaded:
        raise ValueError(f"the corpus {name!r} has no split {split!r}; it has {', '.join(map(str, loaded))}")
    return loaded[split]


class PassageIndex:
    """BM25 over a corpus (Robertson and Zaragoza 2009, in the form of Lucene), from the package bm25s.

    The index lies in a folder below `cache` that is named by the passages and settings; it is made by the first process
    that needs it and mapped into memory by all, so that several actors share one copy.
    """

    def __init__(self, corpus: Sequence[str], *, k1: float, b: float, stopwords: str | None, cache: Path) -> None:
        self.corpus = corpus
        self.stopwords: str | list[str] = stopwords or []
        settings = {"k1": k1, "b": b, "stopwords": stopwords, "words": WORD, "bm25s": bm25s.__version__}
        self.folder = cache / _digest(corpus, settings)
        if not self.folder.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with file_lock(self.folder.with_name(self.folder.name + ".lock")):
                if not self.folder.is_dir():
                    self._make(k1, b)
        self._index: Any = bm25s.BM25.load(self.folder, mmap=True, load_corpus=False, show_progress=False)

    def _make(self, k1: float, b: float) -> None:
        logger.info("making the index of %d passages in %s, once", len(self.corpus), self.folder)
        work = Path(tempfile.mkdtemp(prefix=self.folder.name + ".tmp-", dir=self.folder.parent))
        try:
            words = bm25s.tokenize(list(self.corpus), token_pattern=WORD, stopwords=self.stopwords, show_progress=False)
            index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
            index.index(words, show_progress=False)
            index.save(work, show_progress=False)
            work.rename(self.folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def search(self, query: str, num_results: int) -> list[int]:
        """Numbers of the best passages that have a word of the query, best first; of equal ones, lower numbers first.

        Repeated words of the query count once for each time.
        """
        words = bm25s.tokenize(
            query, token_pattern=WORD, stopwords=self.stopwords, return_ids=False, show_progress=False
        )
        assert isinstance(words, list)
        known = sorted(self._index.get_tokens_ids(words[0]))
        if not known:
            return []
        scores = self._index.get_scores_from_ids(known)
        found = np.flatnonzero(scores > 0)
        if len(found) > num_results:
            threshold = np.partition(scores[found], -num_results)[-num_results]
            found = found[scores[found] >= threshold]
        order = np.lexsort((found, -scores[found]))[:num_results]
        return found[order].tolist()


def _digest(corpus: Sequence[str], settings: Mapping[str, Any]) -> str:
    digest = xxhash.xxh128(json.dumps(settings, sort_keys=True).encode())
    for text in corpus:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()
