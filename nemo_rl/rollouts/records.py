"""Finished groups on disk: in the checkpoint of an asynchronous run, and as the record of a run.

    <folder>/groups.jsonl         a line per group: ids, task, and for each sample its metadata and messages
    <folder>/tokens.safetensors   the samples of all groups concatenated: token_ids int64 [N], token_mask bool [N],
                                  generation_logprobs float32 [N]; if engines returned them, routed_experts uint8 or
                                  int16 [M, layers, K], for the first tokens of each sample
    <folder>/images.safetensors   if samples have images: the pixels of each, `<digest>/<input of the model>`

The record of a run has such a folder per step, with `index.json` (`StepIndex`) and a manifest of digests. Reading
executes nothing.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from nemo_rl.types import ImageSpan, Pixels, RolloutGroup, Sample, SampleMeta, SampleStatus, StopReason, TurnMeta
from nemo_rl.utils import files
from nemo_rl.utils.checkpoint.manifest import find_damage, seal, sync_directory

GROUPS = "groups.jsonl"
TOKENS = "tokens.safetensors"
INDEX = "index.json"
STEP_FOLDER = re.compile(r"step_(\d{6,})")
IMAGES = "images.safetensors"  # only if samples have images
EXPERTS = "routed_experts"
COLUMNS = {"token_ids": np.int64, "token_mask": np.bool_, "generation_logprobs": np.float32}


def write_groups(folder: Path, groups: Sequence[RolloutGroup], task_names: Sequence[str]) -> None:
    """Write groups, with one task name each, into an existing folder."""
    with (folder / GROUPS).open("w", encoding="ascii") as lines:
        for group, task_name in zip(groups, task_names, strict=True):
            record = {
                "group_id": group.group_id,
                "prompt_id": group.prompt_id,
                "task_name": task_name,
                "samples": [_stored(sample) for sample in group.samples],
            }
            lines.write(json.dumps(record, allow_nan=False) + "\n")
    samples = [row for group in groups for sample in group.samples for row in sample.rows]
    # The empty array gives the column its type if there are no samples.
    columns = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(sample, name) for sample in samples)])
        for name, dtype in COLUMNS.items()
    }
    if experts := [sample.routed_experts for sample in samples if sample.routed_experts is not None]:
        columns[EXPERTS] = np.concatenate(experts)
    save_file(columns, folder / TOKENS)
    pixels = [made for group in groups for made in group.pixels.items()]
    if pixels:
        arrays = {f"{digest}/{name}": own for digest, made in pixels for name, own in made.items()}
        save_file(arrays, folder / IMAGES)


def _stored(sample: Sample) -> dict[str, Any]:
    """A sample without its arrays. The metadata of branches are in `meta`."""
    stored: dict[str, Any] = {"meta": asdict(sample.meta), "messages": sample.messages}
    if sample.metrics:
        stored["metrics"] = sample.metrics
    if sample.images:
        stored["images"] = [asdict(span) for span in sample.images]
    if sample.branches:
        stored["branches"] = [{"messages": branch.messages} for branch in sample.branches]
    return stored


def read_groups(folder: Path) -> tuple[list[RolloutGroup], list[str]]:
    """The groups of a folder, and the task name of each.

    FileNotFoundError or ValueError if it holds no groups, or its two files do not match.
    """
    with (folder / GROUPS).open(encoding="ascii") as lines:
        records = [json.loads(line) for line in lines]
    columns, pixels = load_file(folder / TOKENS), defaultdict[str, Pixels](dict)
    for key, own in load_file(folder / IMAGES).items() if (folder / IMAGES).exists() else ():
        digest, _, name = key.partition("/")
        pixels[digest][name] = own
    experts = columns.get(EXPERTS, np.zeros((0, 1, 1), np.uint8))
    bytes_per_token = experts.itemsize * math.prod(experts.shape[1:])
    groups: list[RolloutGroup] = []
    start = experts_start = 0

    def read(stored: dict[str, Any], meta: SampleMeta) -> Sample:
        """The next token sequence, then the sequences of its branches."""
        nonlocal start, experts_start
        tokens: dict[str, Any] = {name: columns[name][start : start + meta.length] for name in COLUMNS}
        start += meta.length
        count = meta.routed_experts_bytes // bytes_per_token
        own = experts[experts_start : experts_start + count] if count else None
        experts_start += count
        told = {key: stored[key] for key in ("messages", "metrics") if key in stored}
        images = [ImageSpan(**span) for span in stored.get("images", ())]
        sample = Sample(**told, **tokens, meta=meta, routed_experts=own, images=images)
        sample.branches = [read(*pair) for pair in zip(stored.get("branches", []), meta.branches, strict=True)]
        return sample

    for record in records:
        samples = [read(stored, meta_from(stored["meta"])) for stored in record["samples"]]
        seen = {span.digest: pixels[span.digest] for sample in samples for row in sample.rows for span in row.images}
        groups.append(
            RolloutGroup(group_id=record["group_id"], prompt_id=record["prompt_id"], samples=samples, pixels=seen)
        )
    for what, expected, found in (
        ("tokens", start, len(columns["token_ids"])),
        ("experts of tokens", experts_start, len(experts)),
    ):
        if expected != found:
            raise ValueError(f"{folder}: {GROUPS} describes {expected} {what}, {TOKENS} holds {found}")
    return groups, [record["task_name"] for record in records]


def meta_from(record: dict[str, Any]) -> SampleMeta:
    """Inverse of `dataclasses.asdict` after JSON."""
    turns = [TurnMeta(**turn | {"stop_reason": StopReason(turn["stop_reason"])}) for turn in record["turns"]]
    branches = [meta_from(branch) for branch in record.get("branches", ())]
    return SampleMeta(**record | {"status": SampleStatus(record["status"]), "turns": turns, "branches": branches})


@dataclass(frozen=True, kw_only=True)
class StepIndex:
    """Description of a recorded training step. `seed` and the first number of a sample's id determine its tokens."""

    step: int  # counted from 1
    weight_version: int  # of the weights before the step
    seed: int  # of the run
    config_digest: str  # of the whole configuration
    identity: dict[str, Any]  # a replaying run must share it: model, tokenizer, sampling, sizes
    groups_per_batch: int
    group_ids: list[str]  # in the order in which the step received them, `groups_per_batch` at a time
    trained: dict[str, list[float]]  # group id -> planned advantage of each sample; in the order of training
    environment_metrics: dict[str, float]  # over all groups


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def write_step(
    root: Path, index: StepIndex, groups: Sequence[RolloutGroup], task_names: Sequence[str], keep: int | None = None
) -> int:
    """Write the groups of a step, in the order of `index.group_ids`, below `root`. Returns the bytes written.

    The step's folder appears complete or not at all: after an OSError (the disk is full) nothing of the step is left.
    With `keep`, only the newest `keep` steps stay.
    """
    assert [group.group_id for group in groups] == index.group_ids
    folder = step_folder(root, index.step)
    unfinished = root / f"tmp_{folder.name}"
    files.remove_tree(unfinished)
    unfinished.mkdir(parents=True)
    try:
        write_groups(unfinished, groups, task_names)
        (unfinished / INDEX).write_text(files.dumps(asdict(index), indent=1) + "\n", encoding="utf-8")
        num_bytes = seal(unfinished)
        if folder.exists():  # the step is repeated after a checkpoint was loaded
            files.remove_tree(folder)
        unfinished.rename(folder)
    except BaseException:
        files.remove_tree(unfinished)
        raise
    sync_directory(root)
    if keep is not None:
        for step in recorded_steps(root)[:-keep]:
            files.remove_tree(step_folder(root, step))
    return num_bytes


def recorded_steps(root: Path) -> list[int]:
    """The complete steps of a record, in order."""
    names = (STEP_FOLDER.fullmatch(path.name) for path in root.glob("step_*"))
    return sorted(int(name[1]) for name in names if name is not None)


def read_index(root: Path, step: int) -> StepIndex:
    """The index of a recorded step. FileNotFoundError if there is none, ValueError if a file of it has changed."""
    folder = step_folder(root, step)
    if not folder.is_dir():
        raise FileNotFoundError(f"{root} holds no step {step}; it holds: {steps_text(recorded_steps(root))}")
    if damage := find_damage(folder):
        raise ValueError(f"{folder} cannot be used: {damage}")
    found = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    found["environment_metrics"] = {name: float(value) for name, value in found["environment_metrics"].items()}
    return StepIndex(**found)


def steps_text(steps: Sequence[int]) -> str:
    """Steps as text: "1 to 7", "1, 3 to 7", "no step"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], step]
        else:
            parts.append([step])
    return ", ".join(" to ".join(map(str, part)) for part in parts) or "no step"


def put_aside(root: Path, after_step: int) -> Path | None:
    """Move the steps after `after_step`, which the starting run repeats, into a new folder `superseded_NNN`.

    Returns that folder, or None if there are no such steps.
    """
    later = [step for step in recorded_steps(root) if step > after_step]
    if not later:
        return None
    aside = files.new_folder(root, "superseded_", first=1)
    for step in later:
        step_folder(root, step).rename(step_folder(aside, step))
    return aside
