"""The metrics of a run, on disk and in the enabled trackers (TensorBoard, Weights & Biases, MLflow, SwanLab, trackio).

    <log_dir>/exp_NNN/{config.yaml, metrics.jsonl, validation_step_N.jsonl, tensorboard/, wandb/, ...}

`log_metrics` collects the metrics of a step as `<prefix>/<name>`. `finish_step` writes them as one line of
metrics.jsonl: `{"step": 3, "train/reward": 0.5, "validation/accuracy": 0.8, "timing/train/generation": 1.25}`. Every
line is strict JSON: a value that is not finite is the string "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import numbers
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.config.rules import value_of
from nemo_rl.utils import files
from nemo_rl.utils.config import LoggerConfig
from nemo_rl.utils.files import flatten_dict

METRICS_NAME = "metrics.jsonl"
RETRY_S = 300.0  # a tracker that failed rests for as long, so that its timeouts do not slow every step
SAMPLES = "validation/samples"

log = logging.getLogger(__name__)

_EXPERIMENT_PATTERN = re.compile(r"exp_(\d+)")


class LogError(RuntimeError):
    """Metrics could not be written."""


class Logger:
    """Writes the metrics of one run to `run_dir` (from `get_next_experiment_dir`; None: `cfg.log_dir` itself) and to
    the trackers of `cfg`.

    `run_ids` are the trackers' runs that this one continues, from `run_ids` of the logger that wrote them.
    """

    def __init__(
        self,
        cfg: LoggerConfig | Mapping[str, Any],
        run_dir: Path | str | None = None,
        run_ids: Mapping[str, str] | None = None,
    ) -> None:
        cfg = LoggerConfig.model_validate(cfg)
        self.run_dir = Path(cfg.log_dir if run_dir is None else run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._step: int | None = None  # of the metrics collected so far
        self._metrics: dict[str, float] = {}
        self._file = (self.run_dir / METRICS_NAME).open("ab", buffering=0)
        self._trackers = start_trackers(cfg, self.run_dir, run_ids or {})

    @property
    def run_ids(self) -> dict[str, str]:
        """The trackers' own names of this run, by tracker."""
        return {name: tracker.run_id for name, tracker in self._trackers.items() if tracker.run_id is not None}

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int,
        prefix: str = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """Add numbers and 0-d tensors, also in nested mappings, to step `step` as `<prefix>/<name>`.

        `step_metric` names a metric among them that counts their own steps; it is written like the others.
        `step_finished` calls `finish_step`. Raises TypeError for a value that is not a number, and ValueError for a
        repeated name or a `step_metric` that is not there.
        """
        if step_metric is not None and step_metric not in metrics:
            raise ValueError(f"step_metric {step_metric!r} is not among the metrics: {', '.join(metrics)}")
        assert self._step in (None, step), f"step {self._step} is not finished; finish_step() comes before step {step}"
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

        Raises LogError if they cannot be written to disk.
        """
        assert self._step in (None, step), f"step {self._step} is not finished; finish_step() comes before step {step}"
        metrics, self._metrics, self._step = self._metrics, {}, None
        line, size_before = (files.dumps({"step": step, **metrics}) + "\n").encode(), self._file.tell()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(size_before)  # leave no partial line
            raise LogError(
                f"the metrics of step {step} cannot be written to {self.run_dir / METRICS_NAME}: {error.strerror}. "
                "Free some space there, or set logger.log_dir to another disk"
            ) from error
        self._send(lambda tracker: tracker.log(metrics, step))
        return metrics

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the resolved configuration to `config.yaml` in the run folder and to the trackers."""
        plain = files.to_plain(params)
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        (self.run_dir / "config.yaml").write_text(text, encoding="utf-8")
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
        path = self.run_dir / file_name
        with path.open("w", encoding="utf-8") as file:
            file.writelines(files.dumps(record) + "\n" for record in records)
        return path

    def log_batched_dict_as_jsonl(self, to_log: Mapping[str, Any], filename: str) -> Path:
        """Write a batch by name, lists and tensors of B rows, as one JSON object per row."""
        columns = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in to_log.items()}
        rows = zip(*columns.values(), strict=True)
        return self.log_records(
            ({"idx": i, **dict(zip(columns, row, strict=True))} for i, row in enumerate(rows)), filename
        )

    def close(self) -> None:
        """Close the trackers. Metrics of an unfinished step are dropped."""
        self._file.close()
        self._send(lambda tracker: tracker.close())

    def _send(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers.values():
            tracker.send(call)


def get_next_experiment_dir(log_dir: Path | str) -> Path:
    """Create and return `<log_dir>/exp_NNN`, with the next free number. Two runs never get the same folder."""
    base = Path(log_dir)
    base.mkdir(parents=True, exist_ok=True)
    while True:
        matches = (_EXPERIMENT_PATTERN.fullmatch(path.name) for path in base.iterdir())
        number = max((int(match[1]) for match in matches if match), default=-1) + 1
        path = base / f"exp_{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue  # another run has taken the number meanwhile
        return path


# -- trackers. Each package is imported only when its key is on.


class Tracker(ABC):
    """One service. With `run_id`, of an earlier tracker of the same kind, it writes into that tracker's run."""

    run_id: str | None = None

    @abstractmethod
    def __init__(self, cfg: LoggerConfig, run_dir: Path, run_id: str | None) -> None:
        """Raises an error of `failures` if the service cannot be reached."""

    @staticmethod
    @abstractmethod
    def failures() -> tuple[type[Exception], ...]:
        """Errors of a service that is gone or refuses."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step, after its samples and histograms."""

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        """Send the configuration, which is `text` as YAML."""

    @abstractmethod
    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send a table. All rows have the same columns."""

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:  # noqa: B027
        """Send a distribution, if the service draws one."""

    @abstractmethod
    def close(self) -> None: ...


class GuardedTracker:
    """A tracker that may fail. `open_tracker` connects to the service and raises one of `failures` if it is gone."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        failures: tuple[type[Exception], ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._failures = failures
        self._clock = clock
        self._failed_at: float | None = None
        self._tracker: Tracker | None = None
        try:
            self._tracker = open_tracker()
        except failures as error:
            self._warn("cannot be reached and is off for this run", error)

    @property
    def run_id(self) -> str | None:
        return self._tracker.run_id if self._tracker is not None else None

    def send(self, call: Callable[[Tracker], None]) -> None:
        """Call the tracker, unless it failed less than `RETRY_S` ago."""
        failed_at = self._failed_at
        if self._tracker is None or (failed_at is not None and self._clock() - failed_at < RETRY_S):
            return
        try:
            call(self._tracker)
        except self._failures as error:
            self._failed_at = self._clock()
            if failed_at is None:
                self._warn("does not answer, and the run goes on without it", error)
            return
        if failed_at is not None:
            log.warning("%s answers again; what it missed is in metrics.jsonl", self._name)
            self._failed_at = None

    def _warn(self, what: str, error: Exception) -> None:
        reason = (str(error).splitlines() or [""])[0][:300]
        log.warning("%s %s; metrics.jsonl has every metric (%s: %s)", self._name, what, type(error).__name__, reason)


def start_trackers(cfg: LoggerConfig, run_dir: Path, run_ids: Mapping[str, str]) -> dict[str, GuardedTracker]:
    """The enabled trackers by name. `run_ids` are the runs to continue, by tracker."""
    return {
        name: GuardedTracker(name, partial(TRACKERS[name], cfg, run_dir, run_ids.get(name)), TRACKERS[name].failures())
        for name in enabled_trackers(cfg)
    }


def enabled_trackers(cfg: LoggerConfig) -> list[str]:
    return [name for name in TRACKERS if value_of(cfg, f"{name}_enabled")]


def check_packages(cfg: LoggerConfig, find: Callable[[str], object | None] = importlib.util.find_spec) -> None:
    """Raises ValueError if the package of an enabled tracker is not installed: `find` returns None for it."""
    for name in enabled_trackers(cfg):
        if find(name) is None:
            raise ValueError(
                f"logger.{name}_enabled=true: {name} is not installed; start the run with `uv run --extra trackers`, "
                f"or install {name}"
            )


class TensorBoard(Tracker):
    """Event files in the folder of the run."""

    def __init__(self, cfg: LoggerConfig, run_dir: Path, run_id: str | None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    @staticmethod
    def failures() -> tuple[type[Exception], ...]:
        return ()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        self._writer.add_text("config", _indented(text), 0)

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:
        import numpy as np

        self._writer.add_histogram(name, np.asarray(values), step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        texts = ["\n".join(f"{column}: {value}" for column, value in row.items()) for row in rows]
        self._writer.add_text(SAMPLES, _indented("\n\n".join(texts)), step)

    def close(self) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Weights & Biases. A step that runs again after a resume keeps its first values there."""

    def __init__(self, cfg: LoggerConfig, run_dir: Path, run_id: str | None) -> None:
        import wandb
        from wandb.errors import AuthenticationError, UsageError

        of = cfg.wandb
        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=of.project,
                name=of.name,
                entity=of.entity,
                mode=of.mode,
                dir=str(run_dir),
                id=run_id,
                resume="allow" if run_id is not None else None,
                reinit="create_new",
            )
        except (UsageError, AuthenticationError) as error:
            raise ValueError(f"logger.wandb: {error}; log in with `wandb login`, or set wandb.mode=offline") from error
        self.run_id = self._run.id

    @staticmethod
    def failures() -> tuple[type[Exception], ...]:
        from wandb.errors import CommError

        return (CommError,)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        self._run.config.update(dict(params), allow_val_change=True)

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:
        self._run.log({name: self._wandb.Histogram(list(values))}, step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        table = self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({SAMPLES: table}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """MLflow, on a server or in SQLite. A step that runs again after a resume has a second value there."""

    MAX_METRICS, MAX_PARAMS, MAX_PARAM_CHARS = 1000, 100, 6000  # of one request

    def __init__(self, cfg: LoggerConfig, run_dir: Path, run_id: str | None) -> None:
        # MLflow's own seven retries of two minutes would hold up the step.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient

        of, log_dir = cfg.mlflow, Path(cfg.log_dir).resolve()
        uri, artifacts = of.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), of.artifact_location
        if uri is None:
            uri, artifacts = f"sqlite:///{log_dir / 'mlflow.db'}", artifacts or str(log_dir / "mlflow_artifacts")
        self._client = MlflowClient(uri)
        self.run_id = of.run_id or run_id
        self._is_new = self.run_id is None
        if self.run_id is None:
            experiment = self._client.get_experiment_by_name(of.experiment_name)
            experiment_id = (
                self._client.create_experiment(of.experiment_name, artifact_location=artifacts)
                if experiment is None
                else experiment.experiment_id
            )
            self.run_id = self._client.create_run(experiment_id, run_name=of.run_name or run_dir.name).info.run_id
        else:
            self._client.update_run(self.run_id, status="RUNNING")

    @staticmethod
    def failures() -> tuple[type[Exception], ...]:
        from mlflow.exceptions import MlflowException

        return (MlflowException, OSError)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        entries = [Metric(_mlflow_name(name), value, now_ms, step) for name, value in metrics.items()]
        for chunk in _chunks(entries, self.MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=chunk)

    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        from mlflow.entities import Param

        self._client.log_text(self.run_id, text, "config.yaml")
        if not self._is_new:
            return  # a parameter never changes there
        entries = [
            Param(_mlflow_name(key), str(value)[: self.MAX_PARAM_CHARS]) for key, value in flatten_dict(params).items()
        ]
        for chunk in _chunks(entries, self.MAX_PARAMS):
            self._client.log_batch(self.run_id, params=chunk)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        self._client.log_table(self.run_id, {"step": [step] * len(rows)} | columns, f"{SAMPLES}.json")

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


class SwanLab(Tracker):
    """SwanLab: its server, or files for `swanlab sync`, which joins the parts of a resumed run."""

    def __init__(self, cfg: LoggerConfig, run_dir: Path, run_id: str | None) -> None:
        import swanlab

        of = cfg.swanlab
        self._swanlab = swanlab
        try:
            self._run = swanlab.init(
                project=of.project,
                name=of.name,
                workspace=of.workspace,
                mode=of.mode,
                log_dir=str(run_dir / "swanlab"),
                id=run_id,
                resume="allow" if run_id is not None else None,
            )
        except swanlab.exceptions.AuthenticationError as error:
            raise ValueError(f"logger.swanlab: {error}; log in with `swanlab login`, or set mode=offline") from error
        self.run_id = self._run.id

    @staticmethod
    def failures() -> tuple[type[Exception], ...]:
        return (OSError,)  # base of the errors of `requests`

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        self._run.config.update(dict(params))

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        table = self._swanlab.echarts.Table()
        table.add(list(rows[0]), [list(row.values()) for row in rows])
        self._run.log({SAMPLES: table}, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio(Tracker):
    """trackio: SQLite in TRACKIO_DIR, or the server or Space of TRACKIO_SERVER_URL or TRACKIO_SPACE_ID."""

    def __init__(self, cfg: LoggerConfig, run_dir: Path, run_id: str | None) -> None:
        import trackio

        of = cfg.trackio
        self._trackio = trackio
        self._run = trackio.init(
            project=of.project,
            name=run_id or of.name,
            resume="allow" if run_id is not None else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.run_id = self._run.name

    @staticmethod
    def failures() -> tuple[type[Exception], ...]:
        return (OSError,)  # after the start, trackio warns of errors and raises none

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        self._run.config.update(params)  # goes out with the first metrics

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:
        self._run.log({name: self._trackio.Histogram(list(values))}, step=step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._run.log({SAMPLES: self._trackio.Table(data=[dict(row) for row in rows])}, step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "swanlab": SwanLab,
    "trackio": Trackio,
}


def _indented(text: str) -> str:
    """A block of code in Markdown."""
    return "    " + text.replace("\n", "\n    ")


def _chunks(entries: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


def _mlflow_name(name: str) -> str:
    """`name` in the characters that MLflow takes: pass@4 -> pass_at_4."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
