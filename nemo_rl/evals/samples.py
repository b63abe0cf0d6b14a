"""The folder of an evaluation, from which the same command continues.

identity.json    what decides the samples: model, tokenizer, data, prompts, environments, sampling, seed
config.yaml      the resolved configuration
samples.jsonl    one line per sample; the samples of a prompt follow one another, in order
results.json     numbers, once all samples are there
"""

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_rl.evals.metrics import SCORED, Outcome
from nemo_rl.types import SampleStatus
from nemo_rl.utils import files as strict_json
from nemo_rl.utils.checkpoint.manager import CheckpointError, flat_differences
from nemo_rl.utils.checkpoint.manifest import sync_directory, write_synced
from nemo_rl.utils.files import try_lock
from nemo_rl.utils.logger import LogError

SAMPLES = "samples.jsonl"
IDENTITY = "identity.json"
RESULTS = "results.json"
CONFIG = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One line of samples.jsonl."""

    dataset: str
    prompt_id: str
    sample_index: int
    prompt: str  # the messages before the model's first turn
    response: str  # what the model said; each turn begins on a line of its own
    answer: str | None  # what the environment extracted
    expected_answer: str | None
    reward: float | None  # None when the sample has no outcome
    status: str  # completed, truncated, failed, prompt_too_long
    num_prompt_tokens: int
    num_tokens: int  # generated
    num_turns: int
    seed: int  # of its first turn
    failure: str | None = None

    @property
    def outcome(self) -> Outcome:
        return Outcome(SampleStatus(self.status), self.reward or 0.0, self.answer, self.num_tokens)


class SampleFolder:
    """An evaluation on disk, held by one process; made by `open_folder`."""

    def __init__(self, folder: Path, num_samples: int) -> None:
        self.folder = folder
        self.num_samples = num_samples
        self.outcomes: dict[str, list[Outcome]] = {}  # by prompt id
        self.num_bytes_dropped = self._read()

    @property
    def path(self) -> Path:
        return self.folder / SAMPLES

    def append(self, groups: Sequence[Sequence[SampleRecord]]) -> None:
        """Write all samples of some prompts to stable storage. LogError if they cannot be written, or earlier ones are
        gone."""
        self._check_kept()
        lines = [strict_json.dumps(asdict(record)) + "\n" for group in groups for record in group]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise LogError(f"{self.path} cannot be written: {error.strerror}; free some space") from error
        for group in groups:
            assert len(group) == self.num_samples, "whole groups are written"
            self.outcomes[group[0].prompt_id] = [record.outcome for record in group]

    def write_results(self, results: Mapping[str, Any]) -> Path:
        """Replace results.json. LogError if it cannot be written, or samples are gone."""
        self._check_kept()
        path = self.folder / RESULTS
        try:
            _replace(path, strict_json.dumps(results, indent=1) + "\n")
        except OSError as error:
            raise LogError(f"{path} cannot be written: {error.strerror}; free some space") from error
        return path

    def _check_kept(self) -> None:
        if self.outcomes and not self.path.exists():
            raise LogError(f"{self.path} was deleted or moved during the evaluation, with the samples so far")

    def _read(self) -> int:
        """Read the samples of an earlier process, and cut off the groups that it left unfinished. Returns their bytes.

        Raises ValueError for a damaged line before the last one.
        """
        if not self.path.is_file():
            return 0
        end_of_groups = position = 0
        group: list[SampleRecord] = []
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                position += len(line)
                record = _parse(line)
                is_last = position == self.path.stat().st_size
                if record is None and is_last:
                    break
                is_next = record is not None and record.sample_index == len(group)
                if record is None or not is_next or (group and group[0].prompt_id != record.prompt_id):
                    raise ValueError(
                        f"{self.path}: line {number} is damaged or not where it belongs; restore the file from a copy, "
                        "or set eval.save_path to another folder"
                    )
                group.append(record)
                if len(group) == self.num_samples:
                    self.outcomes[record.prompt_id] = [sample.outcome for sample in group]
                    end_of_groups, group = position, []
        if position > end_of_groups:
            with self.path.open("r+b") as file:
                file.truncate(end_of_groups)
                os.fsync(file.fileno())
        return position - end_of_groups


def _parse(line: bytes) -> SampleRecord | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = SampleRecord(**json.loads(line))
        SampleStatus(record.status)
    except (ValueError, TypeError):
        return None
    return record if record.reward is not None or SampleStatus(record.status) not in SCORED else None


@contextmanager
def open_folder(
    folder: Path, identity: Mapping[str, Any], config_yaml: str, num_samples: int
) -> Generator[SampleFolder]:
    """The evaluation in `folder`, new or continued.

    Raises:
        CheckpointError: if the folder holds another evaluation, listing every difference, or another process uses it.
        ValueError: if the folder cannot be written to, or its samples are damaged.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _not_writable(folder, error) from error
    try:
        if not try_lock(descriptor):
            raise CheckpointError(f"another process writes to {folder}; wait for it, or set eval.save_path to another")
        _check_identity(folder, identity)
        try:
            _replace(folder / IDENTITY, strict_json.dumps(identity, indent=1) + "\n")
            _replace(folder / CONFIG, config_yaml)
        except OSError as error:
            raise _not_writable(folder, error) from error
        yield SampleFolder(folder, num_samples)
    finally:
        os.close(descriptor)


def _check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    path = folder / IDENTITY
    if not path.is_file():
        if (folder / SAMPLES).exists():
            raise CheckpointError(f"{folder} holds {SAMPLES} and no {IDENTITY}: set eval.save_path to another folder")
        return
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); set eval.save_path to another folder") from error
    if differences := flat_differences(saved, identity, owner="the folder"):
        text = "\n".join([f"{folder} holds another evaluation:", *differences])
        raise CheckpointError(
            f"{text}\nTo continue it, put these back; to begin a new one, set eval.save_path to another folder"
        )


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    partial = path.with_name(f"{path.name}.partial")
    write_synced(partial, text)
    partial.replace(path)
    sync_directory(path.parent)


def _not_writable(folder: Path, error: OSError) -> ValueError:
    return ValueError(f"eval.save_path: cannot write to {str(folder)!r}: {error.strerror}; name another folder")
