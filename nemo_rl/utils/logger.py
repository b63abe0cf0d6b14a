"""The metrics of a run, on disk and in the enabled trackers (TensorBoard, Weights & Biases, MLflow, SwanLab, trackio).

    <log_dir>/exp_NNN/{config.yaml, metrics.jsonl, validation_step_N.jsonl, tensorboard/, wandb/, ...}

`log_metrics` collects the metrics of a step as `<prefix>/<name>`. `finish_step` writes them as one line of
metrics.jsonl: `{"step": 3, "train/reward": 0.5, "validation/accuracy": 0.8, "timing/train/generation": 1.25}`. Every
line is strict JSON: a value that is not finite is the string "NaN", "Infinity" or "-Infinity".
"""

import errno
import importlib.util
import logging
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nemo_rl.config.loader import build_section
from nemo_rl.utils import files
from nemo_rl.utils.config import LoggerConfig
from nemo_rl.utils.files import flatten_dict

if TYPE_CHECKING:
    from nemo_rl.utils.trackers import GuardedTracker

log = logging.getLogger(__name__)

METRICS_NAME, CONFIG_NAME = "metrics.jsonl", "config.yaml"


class LogError(RuntimeError):
    """Metrics or other files of the log could not be written."""


def _log_error(what: str, path: Path, error: OSError) -> LogError:
    remedy = "Free some space there, or set logger.log_dir to another disk"
    return LogError(f"{what} cannot be written to {path}: {error.strerror}. {remedy}")


class Logger:
    """Writes the metrics of one run to `run_dir` (from `get_next_experiment_dir`; None: `cfg.log_dir` itself) and to
    the trackers of `cfg`.

    `run_ids` are the trackers' runs that this one continues, from `run_ids` of the logger that wrote them.

    A folder that is deleted or moved under the run is made again, with a warning; `summary` then says what it lacks.
    LogError where a file cannot be written.
    """

    def __init__(
        self,
        cfg: LoggerConfig | Mapping[str, Any],
        run_dir: Path | str | None = None,
        run_ids: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(cfg, LoggerConfig):
            cfg = build_section("logger", LoggerConfig, cfg)
        self.run_dir = Path(cfg.log_dir if run_dir is None else run_dir)
        self._step: int | None = None  # of the metrics collected so far
        self._metrics: dict[str, float] = {}
        self._config: str | None = None  # as YAML
        self._file = self._open()
        self._is_whole = True  # no file was lost
        self._first_step: int | None = None  # in the file, since the last loss
        self._known_runs = dict(run_ids or {})
        self._trackers: dict[str, GuardedTracker] = {}  # by name
        if cfg.enabled_trackers:
            from nemo_rl.utils.trackers import start_trackers

            self._trackers = start_trackers(cfg, self.run_dir, self._known_runs)

    @property
    def run_ids(self) -> dict[str, str]:
        """The trackers' own names of this run, by tracker: also of those that are off or cannot be reached now."""
        live = {name: tracker.run_id for name, tracker in self._trackers.items() if tracker.run_id is not None}
        return self._known_runs | live

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int,
        prefix: str = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Add numbers and 0-d tensors, also in nested mappings, to step `step` as `<prefix>/<name>`.

        Metrics of a later step finish the one before. ValueError for an earlier step, of which the line is written.
        `step_metric` names a metric among them that counts their own steps; it is written like the others.
        `step_finished` calls `finish_step`. Raises TypeError for a value that is not a number, and ValueError for a
        repeated name or a `step_metric` that is not there.
        """
        if step_metric is not None and step_metric not in metrics:
            raise ValueError(f"step_metric {step_metric!r} is not among the metrics: {', '.join(metrics)}")
        if self._step is not None and self._step != step:
            if step < self._step:
                raise ValueError(f"metrics of step {step} come after step {self._step}, whose line has begun")
            self.finish_step(self._step)
        self._step = step
        for name, value in flatten_dict(metrics, "/").items():
            full_name = f"{prefix}/{name}" if prefix else name
            if not isinstance(value, numbers.Real) and hasattr(value, "item") and value.ndim == 0:
                value = value.item()
            if not isinstance(value, numbers.Real):
                raise TypeError(f"metric {full_name} is {type(value).__name__} {value!r}, not a number")
            if full_name in self._metrics:
                raise ValueError(f"metric {full_name} is logged twice in step {step}")
            self._metrics[full_name] = int(value) if isinstance(value, numbers.Integral) else float(value)
        if step_finished:
            self.finish_step(step)

    def finish_step(self, step: int) -> dict[str, float]:
        """Write the metrics of `step` as one line, send them to the trackers, and return them.

        LogError if they cannot be written.
        """
        assert self._step in (None, step), f"step {self._step} is not finished; finish_step() comes before step {step}"
        metrics, self._metrics, self._step = self._metrics, {}, None
        self._keep_folder()
        line, size_before = (files.dumps({"step": step, **metrics}) + "\n").encode(), self._file.tell()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(size_before)  # leave no partial line
            raise _log_error(f"the metrics of step {step}", self.run_dir / METRICS_NAME, error) from error
        if self._first_step is None:
            self._first_step = step
        self._send(lambda tracker: tracker.log(metrics, step))
        return metrics

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the resolved configuration to `config.yaml` in the run folder and to the trackers."""
        plain = files.to_plain(params)
        text = self._config = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        self.log_text(text, CONFIG_NAME)
        self._send(lambda tracker: tracker.log_hyperparams(plain, text))

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:
        """Send a distribution to the trackers that draw one; metrics.jsonl holds numbers only."""
        self._send(lambda tracker: tracker.log_histogram(values, step, name))

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write sampled conversations to `validation_step_N.jsonl` and, as a table, to the trackers."""
        self.log_records(rows, f"validation_step_{step}.jsonl")
        self._send(lambda tracker: tracker.log_samples(rows, step))

    def log_records(self, records: Iterable[Mapping[str, Any]], file_name: str) -> Path:
        """Write one JSON object per line to `file_name` in the run folder."""
        return self.log_text("".join(files.dumps(record) + "\n" for record in records), file_name)

    def log_text(self, text: str, file_name: str) -> Path:
        """Write a file of the run folder."""
        self._keep_folder()
        path = self.run_dir / file_name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _log_error("the log", path, error) from error
        return path

    def log_batched_dict_as_jsonl(self, to_log: Mapping[str, Any], filename: str) -> Path:
        """Write a batch by name, lists and tensors of B rows, as one JSON object per row."""
        columns = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in to_log.items()}
        rows = zip(*columns.values(), strict=True)
        return self.log_records(
            ({"idx": i, **dict(zip(columns, row, strict=True))} for i, row in enumerate(rows)), filename
        )

    def summary(self) -> str:
        """The places of a run's files, for its last lines."""
        self._keep_folder()
        if self._is_whole:
            return f"metrics and configuration are in {self.run_dir}"
        left = "no metrics" if self._first_step is None else f"the metrics from step {self._first_step} on"
        return f"{self.run_dir} was deleted or moved during the run, and has {left}"

    def _keep_folder(self) -> None:
        """Make the folder again if it, or metrics.jsonl in it, is gone."""
        if (self.run_dir / METRICS_NAME).exists():
            return
        log.warning("%s was deleted or moved: its files so far are lost; it is made again for the rest", self.run_dir)
        self._file.close()
        self._file, self._is_whole, self._first_step = self._open(), False, None
        if self._config is not None:
            self.log_text(self._config, CONFIG_NAME)

    def _open(self) -> FileIO:
        path = self.run_dir / METRICS_NAME
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            return path.open("ab", buffering=0)
        except OSError as error:
            raise _log_error("metrics", path, error) from error

    def close(self, error: str | None = None) -> None:
        """Close the trackers, which show a run that an `error` ended as failed. Drops an unfinished step's metrics."""
        self._file.close()
        self._send(lambda tracker: tracker.close(error))

    def _send(self, call: Callable[[Any], None]) -> None:
        for tracker in self._trackers.values():
            tracker.send(call)


def get_next_experiment_dir(log_dir: Path | str) -> Path:
    """Create and return `<log_dir>/exp_NNN`, with the next free number. Two runs never get the same folder.

    LogError if it cannot be created.
    """
    try:
        return files.new_folder(Path(log_dir), "exp_")
    except OSError as error:
        raise _log_error("the folder of the run", Path(log_dir), error) from error


def check_packages(cfg: LoggerConfig, find: Callable[[str], object | None] = importlib.util.find_spec) -> None:
    """Raises ValueError if the package of an enabled tracker is not installed: `find` returns None for it."""
    for name in cfg.enabled_trackers:
        if find(name) is None:
            raise ValueError(
                f"logger.{name}_enabled=true: {name} is not installed; start the run with `uv run --extra trackers`, "
                f"or install {name}"
            )
