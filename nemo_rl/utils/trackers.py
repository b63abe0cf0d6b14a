"""The trackers of a run: TensorBoard, Weights & Biases, MLflow, SwanLab and trackio.

Each package is imported only when its key is on. A tracker that fails costs the run nothing but its own copy of the
metrics: `GuardedTracker`.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import re
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl.utils.config import LoggerConfig
from nemo_rl.utils.files import flatten_dict

RETRY_S = 300.0  # a tracker that failed rests for as long, so that its timeouts do not slow every step
FINISH_S = 300.0  # the end of a run waits for a service as long; what is not sent by then stays in the run's folder
SAMPLES = "validation/samples"
_CODE = "    "  # begins the lines of a block of code in Markdown

log = logging.getLogger(__name__)


def start_trackers(cfg: LoggerConfig, run_dir: Path, run_ids: Mapping[str, str]) -> dict[str, GuardedTracker]:
    """The enabled trackers by name. `run_ids` are the runs to continue, by tracker."""
    return {
        name: GuardedTracker(
            name,
            partial(TRACKERS[name], cfg, run_dir, run_ids.get(name)),
            tuple(map(pkgutil.resolve_name, TRACKERS[name].failures)),
        )
        for name in cfg.enabled_trackers
    }


class Tracker:
    """One service. With `run_id`, of an earlier tracker of the same kind, it writes into that tracker's run.

    These methods fit a package that has an object for the run, `_run`.
    """

    run_id: str | None = None
    failures: tuple[str, ...] = ("builtins:OSError",)  # base of the errors of `requests`
    """Errors of a service that is gone or refuses, by import path."""
    _run: Any

    def __init__(self, cfg: LoggerConfig, run_dir: Path, run_id: str | None) -> None:
        """Raises an error of `failures` if the service cannot be reached."""
        raise NotImplementedError

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step, after its samples and histograms."""
        self._run.log(dict(metrics), step=step)

    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        """Send the configuration, which is `text` as YAML."""
        self._run.config.update(dict(params))

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send a table. All rows have the same columns."""
        self._run.log({SAMPLES: self.table(rows)}, step=step)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """The rows as a table of the service."""
        raise NotImplementedError

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:
        """Send a distribution, if the service draws one."""

    def close(self, error: str | None = None) -> None:
        """End the run, as failed if an `error` ended it."""
        self._run.finish()


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


class TensorBoard(Tracker):
    """Event files in the folder of the run."""

    def __init__(self, cfg: LoggerConfig, run_dir: Path, run_id: str | None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        self._writer.add_text("config", textwrap.indent(text, _CODE), 0)

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:
        import numpy as np

        self._writer.add_histogram(name, np.asarray(values), step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        texts = ["\n".join(f"{column}: {value}" for column, value in row.items()) for row in rows]
        self._writer.add_text(SAMPLES, textwrap.indent("\n\n".join(texts), _CODE), step)

    def close(self, error: str | None = None) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Weights & Biases. A step that runs again after a resume keeps its first values there."""

    # CommError is of the server; with the others the package's own process on this machine has died.
    failures = (
        "wandb.errors:CommError",
        "builtins:OSError",
        "wandb.sdk.mailbox:MailboxClosedError",
        "wandb.sdk.mailbox:HandleAbandonedError",
    )

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
                # By default the end of the run waits for a server that is gone, for ever.
                settings=wandb.Settings(finish_timeout=FINISH_S),
            )
        except (UsageError, AuthenticationError) as error:
            raise ValueError(f"logger.wandb: {error}; log in with `wandb login`, or set wandb.mode=offline") from error
        self.run_id = self._run.id

    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        self._run.config.update(dict(params), allow_val_change=True)

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:
        self._run.log({name: self._wandb.Histogram(list(values))}, step=step)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        return self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])

    def close(self, error: str | None = None) -> None:
        """TimeoutError if not everything was sent: while a run works, the package says nothing of a lost server."""
        began, folder = time.monotonic(), Path(self._run.dir).parent
        self._run.finish(0 if error is None else 1)
        if time.monotonic() - began >= FINISH_S:
            raise TimeoutError(f"not everything has been sent; `wandb sync {folder}` sends it")


class MLflow(Tracker):
    """MLflow, on a server or in SQLite. A step that runs again after a resume has a second value there."""

    failures = ("mlflow.exceptions:MlflowException", "builtins:OSError")
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

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        entries = [Metric(_mlflow_name(name), value, now_ms, step) for name, value in metrics.items()]
        for start in range(0, len(entries), self.MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=entries[start : start + self.MAX_METRICS])

    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        from mlflow.entities import Param

        self._client.log_text(self.run_id, text, "config.yaml")
        if not self._is_new:
            return  # a parameter never changes there
        entries = [
            Param(_mlflow_name(key), str(value)[: self.MAX_PARAM_CHARS]) for key, value in flatten_dict(params).items()
        ]
        for start in range(0, len(entries), self.MAX_PARAMS):
            self._client.log_batch(self.run_id, params=entries[start : start + self.MAX_PARAMS])

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        self._client.log_table(self.run_id, {"step": [step] * len(rows)} | columns, f"{SAMPLES}.json")

    def close(self, error: str | None = None) -> None:
        self._client.set_terminated(self.run_id, "FINISHED" if error is None else "FAILED")


class SwanLab(Tracker):
    """SwanLab: its server, or files for `swanlab sync`, which joins the parts of a resumed run."""

    def __init__(self, cfg: LoggerConfig, run_dir: Path, run_id: str | None) -> None:
        import requests
        import swanlab
        import swanlab.exceptions

        of = cfg.swanlab
        self._swanlab = swanlab
        log_in = "log in with `swanlab login`, or set mode=offline"
        if of.mode == "online" and not swanlab.Settings().api_key:  # the package would ask on the terminal
            raise ValueError(f"logger.swanlab: this machine has no key of an account; {log_in}")
        try:
            with ThreadPoolExecutor(1) as thread:  # in the main thread the package would take Ctrl-C for itself
                settings: dict[str, Any] = {"project": of.project, "name": of.name, "workspace": of.workspace}
                settings |= {"mode": of.mode, "id": run_id, "resume": "allow" if run_id is not None else None}
                self._run = thread.submit(swanlab.init, log_dir=str(run_dir / "swanlab"), **settings).result()
        except swanlab.exceptions.AuthenticationError as error:
            # The package says so of a server that is gone, too: this raises the OSError of one.
            requests.head(swanlab.Settings().api_host, timeout=10)
            raise ValueError(f"logger.swanlab: {error}; {log_in}") from error
        except RuntimeError as error:  # the server let us in and then failed
            raise ConnectionError(str(error)) from error
        self._folder = run_dir / "swanlab"
        self.run_id = self._run.id

    def table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        table = self._swanlab.echarts.Table()
        table.add(list(rows[0]), [list(row.values()) for row in rows])
        return table

    def close(self, error: str | None = None) -> None:
        """TimeoutError if not everything was sent: the package would wait for a lost server for ever."""
        state = "success" if error is None else "crashed"
        end = threading.Thread(target=self._run.finish, args=(state, error), daemon=True)
        end.start()
        end.join(FINISH_S)
        if end.is_alive():
            raise TimeoutError(f"not everything has been sent; `swanlab sync` sends what is in {self._folder}")


class Trackio(Tracker):
    """trackio: SQLite in TRACKIO_DIR, or the server or Space of TRACKIO_SERVER_URL or TRACKIO_SPACE_ID.

    After the start, the package warns of errors and raises none.
    """

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

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:
        self._run.log({name: self._trackio.Histogram(list(values))}, step=step)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        table: Any = self._trackio.Table  # it takes rows as mappings too, which its annotation does not say
        return table(data=[dict(row) for row in rows])


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "swanlab": SwanLab,
    "trackio": Trackio,
}


def _mlflow_name(name: str) -> str:
    """`name` in the characters that MLflow takes: pass@4 -> pass_at_4."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
