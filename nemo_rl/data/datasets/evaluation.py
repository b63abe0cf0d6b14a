"""Well-known evaluation sets: where they are on the Hugging Face hub, and how their rows become problem and answer.

A converted row has `problem` and `expected_answer`; multiple choice has `options` too, {"A": text, ...}, and the letter
of the right one for an answer. `data_path` of the configuration names a local copy with the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_uppercase
from typing import Any, Literal

import numpy as np
import xxhash

from nemo_rl.data.config import DatasetConfig
from nemo_rl.data.datasets.files import FORMATS, is_file, load_table, require_columns
from nemo_rl.data.datasets.hub import FACTORIES
from nemo_rl.data.interfaces import Row, Rows

AnswerKind = Literal["math", "english_multichoice", "multilingual_multichoice"]
"""What an answer is; these are the `verifier_type`s of the math environment."""

Convert = Callable[[Row, int], Row]
"""A row of the table and the seed of the dataset -> a row with `problem` and `expected_answer`."""


class _WrongRow(ValueError):
    """What is wrong with a row, without its number; `EvalRows` knows that."""


class EvalRows(Sequence[Row]):
    """Rows converted when they are asked for.

    Raises:
        ValueError: naming dataset, row and column, for a row without an answer or with one that cannot be right.
    """

    def __init__(self, table: Any, convert: Convert, *, label: str, seed: int) -> None:
        self.table = table
        self.convert = convert
        self.label = label
        self.seed = seed

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.convert(self.table[int(index)], self.seed)
        except _WrongRow as problem:
            raise ValueError(f"dataset {self.label!r}: row {int(index)} {problem}") from None

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))


# -- conversions


def _text(row: Row, column: str, what: str) -> str:
    value = row[column]
    if value is None or not str(value).strip():
        raise _WrongRow(f"has no {what}: column {column!r} is empty; fill it in or remove the row")
    return str(value)


def problem_row(
    row: Row, seed: int, *, problem: str, answer: str, extract: Callable[[str], str | None] | None = None
) -> Row:
    """A problem and its answer from two columns; `extract` finds the answer in the text of its column."""
    text = _text(row, answer, "answer")
    found = extract(text) if extract is not None else text
    if found is None or not found.strip():
        raise _WrongRow(f"has no answer: none is found in column {answer!r}, which ends in {text[-60:]!r}")
    return {"problem": _text(row, problem, "problem"), "expected_answer": found}


def last_boxed(solution: str) -> str | None:
    r"""What stands in the last `\boxed{...}` of a solution; None when there is none.

    Braces inside are matched: `\boxed{\frac{1}{2}}` -> `\frac{1}{2}`.
    """
    start = solution.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for position in range(begin, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[position], 0)
        if depth == 0:
            return solution[begin:position]
    return None


def _choices(problem: str, options: Mapping[str, str], letter: str, column: str) -> Row:
    if letter not in options:
        raise _WrongRow(f"has the answer {letter!r} in column {column!r}; its options are {', '.join(options)}")
    return {"problem": problem, "options": dict(options), "expected_answer": letter}


def gpqa_row(row: Row, seed: int) -> Row:
    """GPQA names one right and three wrong answers; their order is drawn from the seed and the question."""
    columns = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    question = _text(row, "Question", "problem")
    texts = [_text(row, column, "answer" if column == columns[0] else "option").strip() for column in columns]
    generator = np.random.default_rng(xxhash.xxh3_64_intdigest(f"{seed}/{question}".encode()))
    order = generator.permutation(len(texts)).tolist()
    options = {letter: texts[index] for letter, index in zip(ascii_uppercase, order, strict=False)}
    return _choices(question, options, ascii_uppercase[order.index(0)], columns[0])


def mmlu_row(row: Row, seed: int) -> Row:
    """MMLU has a list of choices and the number of the right one, from 0."""
    number = _text(row, "answer", "answer")
    options = dict(zip(ascii_uppercase, map(str, row["choices"]), strict=False))
    letter = ascii_uppercase[int(number)] if number.isdigit() and int(number) < len(ascii_uppercase) else number
    return _choices(_text(row, "question", "problem"), options, letter, "answer")


def mmmlu_row(row: Row, seed: int) -> Row:
    """The translations of MMLU have a column for each option and the letter of the right one."""
    options = {letter: _text(row, letter, "option") for letter in "ABCD"}
    return _choices(_text(row, "Question", "problem"), options, _text(row, "Answer", "answer").strip(), "Answer")


def mmlu_pro_row(row: Row, seed: int) -> Row:
    """MMLU-Pro has a list of up to ten options and the letter of the right one."""
    options = dict(zip(ascii_uppercase, map(str, row["options"]), strict=False))
    return _choices(_text(row, "question", "problem"), options, _text(row, "answer", "answer").strip(), "answer")


# -- the sets


@dataclass(frozen=True, kw_only=True)
class EvalDataset:
    """One evaluation set of the hub."""

    path: str
    columns: tuple[str, ...]
    convert: Convert
    split: str = "test"
    subsets: tuple[str | None, ...] = (None,)
    kind: AnswerKind = "math"

    def __call__(self, cfg: DatasetConfig) -> Rows:
        import datasets

        path = cfg.data_path or self.path
        # A local copy has one table; the subsets are those of the hub.
        subsets = (cfg.subset,) if cfg.subset or cfg.data_path else self.subsets
        split = cfg.split or (None if cfg.data_path else self.split)
        table = datasets.concatenate_datasets(
            [load_table(path, subset=subset, split=split, cache_dir=cfg.download_dir) for subset in subsets]
        )
        for column in self.columns:
            require_columns(table, {f"of {cfg.dataset_name}": column}, path)
        return EvalRows(table, self.convert, label=str(cfg.dataset_name), seed=cfg.seed)


def _of_hub(name: str, split: str | None = None) -> EvalDataset:
    """A dataset that training knows too."""
    known = FACTORIES[name]
    return EvalDataset(
        path=known.path,
        columns=(known.input_key, known.output_key),
        convert=partial(problem_row, problem=known.input_key, answer=known.output_key, extract=known.extract),
        split=split or known.split,
        subsets=known.subsets,
    )


_GPQA_COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_MATH_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
MMLU_LANGUAGES = (
    "AR-XY", "BN-BD", "DE-DE", "ES-LA", "FR-FR", "HI-IN", "ID-ID", "IT-IT", "JA-JP", "KO-KR", "PT-BR", "SW-KE",
    "YO-NG", "ZH-CN",
)  # fmt: skip


def _gpqa(subset: str) -> EvalDataset:
    return EvalDataset(
        path="Idavidrein/gpqa",
        columns=_GPQA_COLUMNS,
        convert=gpqa_row,
        split="train",
        subsets=(subset,),
        kind="english_multichoice",
    )


EVAL_DATASETS: dict[str, EvalDataset] = {
    "aime2024": _of_hub("AIME2024"),
    "aime2025": _of_hub("AIME2025"),
    "math500": _of_hub("MATH-500"),
    "math": EvalDataset(
        path="EleutherAI/hendrycks_math",
        columns=("problem", "solution"),
        convert=partial(problem_row, problem="problem", answer="solution", extract=last_boxed),
        subsets=_MATH_SUBJECTS,
    ),
    "gsm8k": _of_hub("gsm8k", split="test"),
    "gpqa": _gpqa("gpqa_main"),
    "gpqa_diamond": _gpqa("gpqa_diamond"),
    "mmlu": EvalDataset(
        path="cais/mmlu",
        columns=("question", "choices", "answer"),
        convert=mmlu_row,
        subsets=("all",),
        kind="english_multichoice",
    ),
    "mmlu_pro": EvalDataset(
        path="TIGER-Lab/MMLU-Pro",
        columns=("question", "options", "answer"),
        convert=mmlu_pro_row,
        kind="english_multichoice",
    ),
    **{
        f"mmlu_{language}": EvalDataset(
            path="openai/MMMLU",
            columns=("Question", "A", "B", "C", "D", "Answer"),
            convert=mmmlu_row,
            subsets=(language.replace("-", "_"),),
            kind="multilingual_multichoice",
        )
        for language in MMLU_LANGUAGES
    },
}
"""By name; `gsm8k` is the test split here, and the training split where it is trained on."""


def answer_kind(dataset_name: str | None) -> AnswerKind:
    """What the answers of a dataset are; of one that is not known here, mathematics."""
    return EVAL_DATASETS[dataset_name].kind if dataset_name in EVAL_DATASETS else "math"


def load_problem_table(
    path: str,
    *,
    problem_key: str,
    solution_key: str,
    file_format: str | None = None,
    subset: str | None = None,
    split: str | None = None,
    cache_dir: str | None = None,
) -> Rows:
    """Problems and answers of a local file or a Hugging Face path, from two columns; the other columns stay.

    `file_format` (csv, json, jsonl or parquet) is that of a file whose name does not end in it.

    Raises:
        ValueError, FileNotFoundError: as `load_table`; for a missing column; for an unknown format.
    """
    if file_format is not None and not (is_file(path) and FORMATS.get(f".{file_format}")):
        raise ValueError(
            f"data.file_format={file_format!r} with dataset {path!r}: it is for local files and one of "
            f"{', '.join(suffix.removeprefix('.') for suffix in FORMATS)}"
        )
    if file_format is None or path.endswith(f".{file_format}"):
        if is_file(path):  # what another dataset of the configuration has; a file is read whole
            subset = split = None
        table = load_table(path, subset=subset, split=split, cache_dir=cache_dir)
    else:
        table = _load_as(path, FORMATS[f".{file_format}"], cache_dir)
    require_columns(table, {"data.problem_key": problem_key, "data.solution_key": solution_key}, path)

    def convert(row: Row, seed: int) -> Row:
        return {**row, **problem_row(row, seed, problem=problem_key, answer=solution_key)}

    return EvalRows(table, convert, label=path, seed=0)


def _load_as(path: str, builder: str, cache_dir: str | None) -> Any:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    try:
        table = datasets.load_dataset(builder, data_files=path, cache_dir=cache_dir)["train"]
    except FileNotFoundError as error:
        raise FileNotFoundError(f"dataset file {path!r} does not exist") from error
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(f"dataset file {path!r} cannot be read as {builder}: {error.__cause__ or error}") from error
    if len(table) == 0:
        raise ValueError(f"dataset {path!r} is empty: it has no rows")
    return table
