"""Checkpoints that are either whole or recognised as incomplete.

    checkpoint_dir/step_N/{training_info.json, config.yaml, train_dataloader.pt, rng/, policy/..., manifest.json}

A checkpoint is written as `tmp_step_N`, put on stable storage with its manifest (`manifest.py`), and renamed. The
newest finished checkpoint survives the death of the process at any moment. The caller decides what a checkpoint holds.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.utils import files as strict_json
from nemo_rl.utils.checkpoint.foreign import find_foreign
from nemo_rl.utils.checkpoint.lock import FolderLock, FolderTaken
from nemo_rl.utils.checkpoint.manifest import find_damage, seal, sealed_sizes, sync_directory
from nemo_rl.utils.checkpoint.save import AllWritten, StateWrite
from nemo_rl.utils.config import CheckpointingConfig, chosen_metric, logged_metric
from nemo_rl.utils.files import is_disk_full, remove_tree, size_text

logger = logging.getLogger(__name__)

TRAINING_INFO_NAME = "training_info.json"
CONFIG_NAME = "config.yaml"

_STEP_PATTERN = re.compile(r"step_(\d+)")
_START_ANEW = "to start over, set checkpointing.checkpoint_dir to another directory"


class CheckpointError(RuntimeError):
    """No checkpoint that exists can be used."""


class CheckpointIdentityError(CheckpointError):
    """The checkpoint belongs to another run: other model, tokenizer, dataset or settings."""


class DiskFullError(CheckpointError):
    """A checkpoint could not be saved for lack of space. Every earlier one is untouched."""


class CheckpointManager:
    """Saves, finds and removes the checkpoints of one run under `cfg.checkpoint_dir`.

    A run holds the folder (`held`) while it writes there. `free_bytes` returns the space left on the disk of a path.
    `chosen_metric` says what `known_metrics` are.
    """

    def __init__(
        self,
        cfg: CheckpointingConfig | Mapping[str, Any],
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
        known_metrics: Collection[str] = frozenset(),
    ) -> None:
        self.metric_name = cfg.metric_name if isinstance(cfg, CheckpointingConfig) else cfg.get("metric_name")
        if not isinstance(cfg, CheckpointingConfig):
            from nemo_rl.config.loader import build_section  # Hydra, which workers do not need

            # A name without "val:" or "train:" is a key of the training_info.json that the script writes.
            is_key = self.metric_name is not None and ":" not in self.metric_name
            cfg = build_section(
                "checkpointing", CheckpointingConfig, {**cfg, **({"metric_name": None} if is_key else {})}
            )
        self.checkpoint_dir = Path(cfg.checkpoint_dir).absolute()  # workers may run in another folder
        self._logged_metric = self.metric_name if cfg.metric_name is None else logged_metric(cfg.metric_name)
        self.higher_is_better = cfg.higher_is_better
        self.keep_top_k = cfg.keep_top_k
        self._cfg = cfg
        self._free_bytes = free_bytes
        self._known_metrics = known_metrics
        self._damaged_steps: set[int] = set()  # kept on disk for inspection, otherwise ignored
        self._lock: FolderLock | None = None
        self._unfinished: set[Path] = set()

    @contextmanager
    def held(self, log_dir: Path | str) -> Generator[CheckpointManager]:
        """Hold the folder for the run that logs to `log_dir`, and repair what a dead run left unfinished.

        Its `tmp_step_*` are removed, and a checkpoint that was being replaced comes back. FolderTaken if another run
        holds the folder.
        """
        self._lock = FolderLock(self.checkpoint_dir, str(log_dir))
        self._lock.take()
        try:
            self._recover_from_dead_runs()
            yield self
        finally:
            self._lock.release()
            self._lock = None

    # -- saving

    def start_save(
        self,
        step: int,
        start_write: Callable[[Path], StateWrite | None],
        training_info: Mapping[str, Any],
        resolved_config_yaml: str,
        metrics: Mapping[str, float],
    ) -> PendingSave:
        """Begin to save step `step`. One save at a time.

        `start_write(directory)` begins to write every state file under `directory`. It returns the writes that other
        processes have not finished, or None. Until the returned `PendingSave` has finished, the checkpoint is
        `tmp_step_N`, from which no run resumes. `metrics` are by logged name ("train/reward", "validation/accuracy");
        training_info.json keeps them.

        Raises:
            DiskFullError: less space is free than the newest checkpoint takes, or the disk became full.
            FolderLost: another run has taken the folder.
        """
        self._check_lock()
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with self.discarded_on_failure(step):
            latest = self.get_latest_checkpoint_path()
            needed = sum(sealed_sizes(latest).values()) if latest else 0
            if (free := self._free_bytes(self.checkpoint_dir)) < needed:
                what = f"{size_text(needed)} are needed and {size_text(free)} are free"
                raise DiskFullError(self._disk_full_text(step, what))
            tmp_path = self.init_tmp_checkpoint(step, {**training_info, "metrics": metrics}, resolved_config_yaml)
            return PendingSave(self, step, tmp_path, start_write(tmp_path) or AllWritten(), metrics, started)

    def init_tmp_checkpoint(
        self, step: int, training_info: Mapping[str, Any], run_config: Mapping[str, Any] | str | None = None
    ) -> Path:
        """Create `tmp_step_N` with training_info.json, in place of one that a dead process left.

        `run_config`, as YAML or as a mapping, becomes config.yaml.
        """
        tmp_path = self._tmp_path(step)
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        remove_tree(tmp_path)
        tmp_path.mkdir()
        self._unfinished.add(tmp_path)
        (tmp_path / TRAINING_INFO_NAME).write_text(strict_json.dumps(training_info, indent=1) + "\n", encoding="utf-8")
        if run_config is not None:
            is_yaml = isinstance(run_config, str)
            text = run_config if is_yaml else yaml.safe_dump(strict_json.to_plain(run_config), sort_keys=False)
            (tmp_path / CONFIG_NAME).write_text(text, encoding="utf-8")
        return tmp_path

    def finalize_checkpoint(self, tmp_path: Path | str) -> Path:
        """Put `tmp_step_N` on stable storage, rename it to `step_N`, and remove checkpoints beyond `keep_top_k`."""
        path = self.rename_finished(Path(tmp_path), seal(Path(tmp_path)))
        self.remove_old_checkpoints()
        return path

    def rename_finished(self, tmp_path: Path, num_bytes: int) -> Path:
        """Rename `tmp_step_N`, which is sealed, to `step_N`.

        An existing `step_N` becomes `old_step_N` until the rename is done; construction restores it if the process dies
        in between.
        """
        self._check_lock()
        path = self.checkpoint_dir / tmp_path.name.removeprefix("tmp_")
        old_path = self.checkpoint_dir / f"old_{path.name}"
        if path.exists():
            remove_tree(old_path)
            path.rename(old_path)
            sync_directory(self.checkpoint_dir)
        tmp_path.rename(path)
        sync_directory(self.checkpoint_dir)
        self._unfinished.discard(tmp_path)
        self._damaged_steps.discard(int(path.name.removeprefix("step_")))
        remove_tree(old_path)
        logger.info("saved %s (%s)", path, size_text(num_bytes))
        return path

    def remove_old_checkpoints(self, exclude_latest: bool = True) -> None:
        """Keep the best `keep_top_k` by `metric_name`, and the latest one or `ft_keep_latest_k`.

        All are kept if both are None. With `ft_*` keys, `keep_top_k` counts only multiples of `save_period` (None: all
        of these). On ties, and without a metric, newer is better. Damaged checkpoints are neither counted nor removed.
        """
        num_latest = self._cfg.ft_keep_latest_k
        if self.keep_top_k is None and num_latest is None:
            return
        ranked = self._best_first()
        kept = set([step for step in ranked if self._cfg.is_ranked(step)][: self.keep_top_k])
        if exclude_latest:
            kept |= set(sorted(ranked)[-(num_latest or 1) :])
        for step in ranked:
            if step not in kept:
                # A process that dies while deleting leaves no half checkpoint called step_N.
                remove_tree(self._path(step).rename(self._tmp_path(step)))
                logger.info("removed %s", self._path(step))

    # -- finding

    def get_latest_checkpoint_path(self) -> Path | None:
        """The highest N, not checked for damage; None when there is none."""
        steps = self._steps()
        return self._path(steps[-1]) if steps else None

    def get_best_checkpoint_path(self) -> Path | None:
        """The best by `metric_name` (the latest without a metric), not checked for damage; None when there is none.

        A warning names the checkpoints without the metric. The latest is the best if all are.
        """
        ranked = self._best_first()
        if ignored := [f"step_{step}" for step in sorted(ranked) if self._value(step) == -math.inf]:
            rest = "; the latest is taken" if len(ignored) == len(ranked) else ""
            warnings.warn(f"{', '.join(ignored)}: ignored for want of {self.metric_name}{rest}", stacklevel=2)
        return self._path(ranked[0]) if ranked else None

    def latest_finished(self) -> Path | None:
        """The newest checkpoint with an intact manifest and training_info.json; its other files are not checked."""
        newest_first = map(self._path, reversed(self._steps()))
        return next((path for path in newest_first if find_damage(path, [TRAINING_INFO_NAME]) is None), None)

    def latest_sound(self) -> Path | None:
        """The newest checkpoint with every file as it was saved; None if there is no checkpoint.

        Damaged ones are logged with the file. Raises CheckpointError if checkpoints exist and all are damaged.
        """
        reasons = []
        for step in reversed(self._steps()):
            path = self._path(step)
            if (damage := find_damage(path)) is None:
                if reasons:
                    logger.warning("falling back to %s, the newest sound checkpoint", path)
                return path
            logger.warning("%s is refused: %s", path, damage)
            reasons.append(f"  step_{step}: {damage}")
            self._damaged_steps.add(step)
        if not reasons:
            return None
        newest = self.checkpoint_dir / f"step_{max(self._damaged_steps)}"
        if (foreign := find_foreign(newest)) is not None:
            raise CheckpointError(
                f"{newest} is {foreign}, and a run continues only from checkpoints of this library. To start from its "
                f"weights, {foreign.remedy(newest)}; name the new folder as policy.model_name, and set "
                "checkpointing.checkpoint_dir to another directory"
            )
        text = "\n".join([f"{self.checkpoint_dir} holds {len(reasons)} checkpoints and none is sound:", *reasons])
        raise CheckpointError(f"{text}\nRestore one from a copy; {_START_ANEW}.")

    @staticmethod
    def load_training_info(path: Path | str | None) -> dict[str, Any] | None:
        """training_info.json of a checkpoint; None for None. Metrics stand under "metrics"."""
        if path is None:
            return None
        return json.loads((Path(path) / TRAINING_INFO_NAME).read_text(encoding="utf-8"))

    @staticmethod
    def load_config(path: Path) -> dict[str, Any]:
        """The configuration of the run that saved a checkpoint."""
        return yaml.safe_load((path / CONFIG_NAME).read_text(encoding="utf-8"))

    @staticmethod
    def get_resume_paths(path: Path | str | None) -> tuple[Path | None, Path | None]:
        """Directories of the policy's weights and optimizer; the second is None when no optimizer was saved."""
        if path is None:
            return None, None
        weights, optimizer = Path(path) / "policy" / "weights", Path(path) / "policy" / "optimizer"
        if not weights.is_dir():
            raise CheckpointError(f"{path} holds no policy/weights")
        return weights, optimizer if optimizer.is_dir() else None

    # -- details

    def _path(self, step: int) -> Path:
        return self.checkpoint_dir / f"step_{step}"

    def _tmp_path(self, step: int) -> Path:
        return self.checkpoint_dir / f"tmp_step_{step}"

    def _steps(self) -> list[int]:
        """Ascending, without those found damaged."""
        if not self.checkpoint_dir.is_dir():
            return []
        matches = (_STEP_PATTERN.fullmatch(path.name) for path in self.checkpoint_dir.iterdir() if path.is_dir())
        return sorted({int(match[1]) for match in matches if match} - self._damaged_steps)

    def _best_first(self) -> list[int]:
        steps = self._steps()
        values = {step: self._value(step) for step in steps}
        # A checkpoint whose training_info.json cannot be read has been found damaged meanwhile.
        return sorted(set(steps) - self._damaged_steps, key=lambda step: (-values[step], -step))

    def _value(self, step: int) -> float:
        """Higher is better for every metric. A checkpoint without it is worst; without a metric all are equal."""
        if self._logged_metric is None:
            return 0.0
        try:
            info = self.load_training_info(self._path(step))
        except (OSError, ValueError) as error:
            logger.warning("%s is refused: %s cannot be read: %s", self._path(step), TRAINING_INFO_NAME, error)
            self._damaged_steps.add(step)
            return -math.inf
        assert info is not None
        # A training_info.json that the caller of `init_tmp_checkpoint` made, or NeMo RL, has no "metrics".
        found = info.get("metrics", {}).get(self._logged_metric, info.get(str(self.metric_name)))
        value = math.nan if found is None else float(found)
        if math.isnan(value):
            return -math.inf
        return value if self.higher_is_better else -value

    def check_metric_is_there(self, step: int, metrics: Mapping[str, float]) -> None:
        """ValueError if nothing reports `metric_name`; a warning if this step does not (see `chosen_metric`)."""
        name = self.metric_name
        if name is None or not self._cfg.is_ranked(step):
            return
        if chosen_metric("checkpointing.metric_name", name, metrics, self._known_metrics) is None:
            logger.warning("this step has no %s: its checkpoint counts as the worst", name)

    def _disk_full_text(self, step: int, what: str) -> str:
        latest = self.get_latest_checkpoint_path()
        return (
            f"no space to save step {step} under {self.checkpoint_dir}: {what}. "
            + (f"{latest} is untouched. " if latest else "There is no earlier checkpoint. ")
            + "Free some space, lower checkpointing.keep_top_k, or set checkpointing.checkpoint_dir to another disk."
        )

    @contextmanager
    def discarded_on_failure(self, step: int) -> Generator[None]:
        """Remove `tmp_step_N` if the body raises; DiskFullError if the disk is full."""
        tmp_path = self._tmp_path(step)
        try:
            yield
        except BaseException as error:
            written = 0
            free = self._free_bytes(self.checkpoint_dir)
            if tmp_path in self._unfinished:  # else it was not begun, or is another run's
                written = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
                self.remove_tmp_checkpoint(tmp_path)
            if not isinstance(error, CheckpointError | FolderTaken) and is_disk_full(error, free):
                what = f"the disk was full after {size_text(written)}, with {size_text(free)} free"
                raise DiskFullError(self._disk_full_text(step, what)) from error
            raise

    def remove_tmp_checkpoint(self, tmp_path: Path) -> None:
        """Remove an unfinished checkpoint of this process."""
        remove_tree(tmp_path)
        self._unfinished.discard(tmp_path)

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _recover_from_dead_runs(self) -> None:
        for tmp_path in sorted(self.checkpoint_dir.glob("tmp_step_*")):
            logger.warning("removing %s, which a process left behind when it died", tmp_path)
            remove_tree(tmp_path)
        for old_path in sorted(self.checkpoint_dir.glob("old_step_*")):
            path = self.checkpoint_dir / old_path.name.removeprefix("old_")
            if path.exists():
                remove_tree(old_path)
            elif not path.with_name(f"tmp_{path.name}").exists():
                logger.warning("%s comes back: the process that was replacing it died", path)
                old_path.rename(path)
        sync_directory(self.checkpoint_dir)


@dataclass(eq=False)
class PendingSave:
    """A checkpoint between `start_save` and its rename: its files are written, then sealed with a manifest.

    When `advance` or `finish` raises, the half-written checkpoint has been removed and the save is over. Both raise
    DiskFullError when the disk is full, and ValueError when `metric_name` is no metric of this run; in that case the
    checkpoint has been saved.
    """

    manager: CheckpointManager
    step: int
    tmp_path: Path
    write: StateWrite
    metrics: Mapping[str, float]
    started: float  # by time.monotonic()
    seconds: float = 0.0  # from the start to the rename, once it has finished
    sealing: Future[int] | None = None

    @property
    def is_written(self) -> bool:
        """Whether `finish` waits for no other process: the files are complete, or their writers have failed."""
        return self.sealing is not None or self.write.is_done()

    def advance(self) -> Path | None:
        """Continue as far as possible without waiting. Returns `.../step_N` once it has finished."""
        if self.sealing is None:
            with self.manager.discarded_on_failure(self.step):
                if not self.write.is_done():
                    return None
                self.write.finish()
            # In a thread, because sealing reads every byte again.
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="seal")
            self.sealing = thread.submit(seal, self.tmp_path)
            thread.shutdown(wait=False)
        return self.finish() if self.sealing.done() else None

    def finish(self) -> Path:
        """Wait until it has finished. Returns `.../step_N`."""
        with self.manager.discarded_on_failure(self.step):
            if self.sealing is None:
                self.write.finish()
            num_bytes = seal(self.tmp_path) if self.sealing is None else self.sealing.result()
            path = self.manager.rename_finished(self.tmp_path, num_bytes)
        self.seconds = time.monotonic() - self.started
        self.manager.check_metric_is_there(self.step, self.metrics)
        self.manager.remove_old_checkpoints()
        return path

    def discard(self) -> None:
        """Give up: remove the files. Processes that are still writing must have ended, or fail."""
        self.manager.remove_tmp_checkpoint(self.tmp_path)


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise CheckpointIdentityError with every difference between two (nested) identities.

    An identity is what a run must share with its checkpoint: hashes of model config and tokenizer, the fingerprint of
    the dataset, the settings that define a sample and a step.
    """
    if differences := flat_differences(saved, current, owner="the checkpoint"):
        text = "\n".join(["the checkpoint belongs to another run:", *differences])
        raise CheckpointIdentityError(f"{text}\nTo continue it, put these back; {_START_ANEW}.")


def flat_differences(saved: Mapping[str, Any], current: Mapping[str, Any], *, owner: str) -> list[str]:
    """A line for each leaf in which two nested identities differ; `owner` names the owner of the saved one."""
    # Converted as JSON does, so that a saved identity equals a fresh one.
    saved, current = (strict_json.flatten_dict(strict_json.to_plain(tree)) for tree in (saved, current))
    absent = "(absent)"
    return [
        f"  {key}: {owner} has {saved.get(key, absent)!r}, this run {current.get(key, absent)!r}"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key, absent) != current.get(key, absent)
    ]


def require_optimizer(path: Path) -> None:
    """Raise CheckpointError if checkpoint `path` was saved without the optimizer."""
    if not (path / "policy" / "optimizer").is_dir():
        raise CheckpointError(
            f"{path} was saved without the optimizer (checkpointing.save_optimizer=false), so the run cannot be "
            f"continued from it; {_START_ANEW}"
        )
