"""Well-known datasets of questions about images on the Hugging Face hub, and folders of images with a JSON-Lines file.

A row has the images and the question in `problem`, and `expected_answer`; with `messages` as well, for SFT. Images stay
as the table has them, the bytes of a file or its path: the process that tokenises the row reads and processes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.data.config import ExampleDatasetConfig, TableConfig
from nemo_rl.data.datasets.files import converted, load_table, require_columns, require_used_keys
from nemo_rl.data.interfaces import Row, Rows, StreamedTable

IMAGE_MARK = "<image>"  # where an image stands in a text
METADATA_FILE = "metadata.jsonl"


@dataclass(frozen=True, kw_only=True)
class PictureSet:
    """A table of the hub with images."""

    path: str
    split: str
    columns: tuple[str, ...]  # the first holds the image or the images
    convert: Callable[[Row], Row]  # -> {"problem", "expected_answer", ...}

    def load(self, cfg: TableConfig) -> Rows | StreamedTable:
        """Its rows.

        Raises:
            ValueError, FileNotFoundError: a column is missing; or as `load_table`.
        """
        require_used_keys(cfg, (), "the dataset has columns of its own")
        split = cfg.split or (None if cfg.data_path else self.split)
        path = cfg.data_path or self.path
        table = load_table(path, subset=cfg.subset, split=split, cache_dir=cfg.download_dir, streaming=cfg.is_streamed)
        for column in self.columns:
            require_columns(table, {f"of {cfg.dataset_name}": column}, path)
        return converted(undecoded(table, self.columns[0]), _for(cfg, self.convert))


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


def _for(cfg: TableConfig, convert: Callable[[Row], Row]) -> Callable[[Row], Row]:
    """Rows to learn from (SFT) have `messages`."""

    def with_messages(row: Row) -> Row:
        made = convert(row)
        answer = {"role": "assistant", "content": str(made["expected_answer"])}
        return {**made, "messages": [{"role": "user", "content": made["problem"]}, answer]}

    return with_messages if isinstance(cfg, ExampleDatasetConfig) else convert


def with_images(text: str, images: Sequence[Any]) -> list[dict[str, Any]]:
    """The parts of a content: images where the text has `<image>`, or before a text without it.

    Raises:
        ValueError: the text has another number of marks than there are images.
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


# -- the datasets


def clevr_row(row: Row) -> Row:
    """CLEVR-CoGenT writes its answers as `<answer> 5 </answer>`."""
    found = re.findall(r"<answer>(.*?)</answer>", row["solution"], re.DOTALL)
    if not found:
        raise ValueError("has no answer: column 'solution' has no <answer>...</answer>")
    return {"problem": with_images(row["problem"], [row["image"]]), "expected_answer": found[-1].strip()}


def geometry_row(row: Row) -> Row:
    """Geometry3K marks the places of its images with `<image>`."""
    return {"problem": with_images(row["problem"], row["images"]), "expected_answer": str(row["answer"])}


def refcoco_row(row: Row) -> Row:
    """RefCOCO has descriptions of an object and its box [left, top, width, height] in pixels.

    The expected answer is [left, top, right, bottom], for the reward `box_overlap`.
    """
    left, top, width, height = (float(number) for number in row["bbox"])
    described = row["answer"][0] if isinstance(row["answer"], Sequence) and row["answer"] else row["answer"]
    question = f"Where is this in the image: {described}? Answer with its box in pixels: [left, top, right, bottom]"
    box = [left, top, left + width, top + height]
    return {"problem": with_images(question, [row["image"]]), "expected_answer": json.dumps(box)}


def okvqa_row(row: Row) -> Row:
    """OK-VQA has ten answers of people; the expected answer lists all of them, for the reward `vqa_agreement`."""
    answers = [str(answer) for answer in row["answers"]]
    if not answers:
        raise ValueError("has no answer: column 'answers' is empty")
    return {"problem": with_images(row["question"], [row["image"]]), "expected_answer": json.dumps(answers)}


PICTURE_SETS = {
    "clevr-cogent": PictureSet(
        path="MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        split="train",
        columns=("image", "problem", "solution"),
        convert=clevr_row,
    ),
    "geometry3k": PictureSet(
        path="hiyouga/geometry3k", split="train", columns=("images", "problem", "answer"), convert=geometry_row
    ),
    "refcoco": PictureSet(
        path="lmms-lab/RefCOCO", split="val", columns=("image", "answer", "bbox"), convert=refcoco_row
    ),
    "okvqa": PictureSet(
        path="lmms-lab/OK-VQA", split="val2014", columns=("image", "question", "answers"), convert=okvqa_row
    ),
}
load_clevr_cogent, load_geometry3k, load_refcoco, load_okvqa = (known.load for known in PICTURE_SETS.values())


# -- a folder


def load_image_folder(cfg: TableConfig) -> Rows | StreamedTable:
    """A folder `data_path` of images with `metadata.jsonl`, whose lines are {"file_name" or "images", "problem",
    "answer"} or {"messages"}; names of files are relative to the folder.

    Raises:
        ValueError, FileNotFoundError: there is no such file; or as `load_table`.
    """
    require_used_keys(cfg, (), "the file has columns of its own")
    folder = Path(cfg.data_path or "")
    if cfg.data_path is None or not (folder / METADATA_FILE).is_file():
        raise FileNotFoundError(
            f"dataset {cfg.dataset_name!r}: data_path {cfg.data_path!r} is no folder with a {METADATA_FILE} (looked in "
            f"{Path.cwd()})"
        )
    path, cache = str(folder / METADATA_FILE), cfg.download_dir
    table = load_table(path, subset=cfg.subset, split=cfg.split, cache_dir=cache, streaming=cfg.is_streamed)

    def convert(row: Row) -> Row:
        if row.get("messages") is not None:
            said = row["messages"]
            return {"messages": [{**message, "content": _inside(folder, message["content"])} for message in said]}
        names = row["images"] if row.get("images") is not None else [row["file_name"]]
        images = [str(folder / name) for name in names]
        return {"problem": with_images(row["problem"], images), "expected_answer": str(row["answer"])}

    def convert_messages(row: Row) -> Row:
        return convert(row) if row.get("messages") is not None else _for(cfg, convert)(row)

    return converted(table, convert_messages)


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
