"""The metrics of a run, on disk and in the enabled services.

    <log_dir>/exp_NNN/{config.yaml, metrics.jsonl, tensorboard/, wandb/, ...}

`log_metrics` collects the metrics of a step as `<prefix>/<name>`. `finish_step` writes them as one line of
metrics.jsonl: `{"step": 3, "train/reward": 0.5, "validation/accuracy": 0.8, "timing/train/generation": 1.25}`. Every
line is strict JSON: a value that is not finite is the string "NaN", "Infinity" or "-Infinity".
"""

import errno
import numbers
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.utils import files
from nemo_rl.utils.config import LoggerConfig, WandbConfig

METRICS_NAME = "metrics.jsonl"

_EXPERIMENT_PATTERN = re.compile(r"exp_(\d+)")


class LogError(RuntimeError):
    """Metrics could not be written."""


class Logger:
    """Writes the metrics of one run to `run_dir` (from `get_next_experiment_dir`) and to the backends of `cfg`."""

    def __init__(self, cfg: LoggerConfig, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._step: int | None = None  # of the metrics collected so far
        self._metrics: dict[str, float] = {}
        self._file = (self.run_dir / METRICS_NAME).open("ab", buffering=0)
        self._backends: list[_TensorBoard | _Wandb] = []
        if cfg.tensorboard_enabled:
            self._backends.append(_TensorBoard(self.run_dir))
        if cfg.wandb_enabled:
            self._backends.append(_Wandb(cfg.wandb, self.run_dir))

    def log_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str = "") -> None:
        """Add numbers, also in nested mappings, to step `step` as `<prefix>/<name>`.

        Raises TypeError for a value that is not a number, and ValueError for a repeated name.
        """
        assert self._step in (None, step), f"step {self._step} is not finished; finish_step() comes before step {step}"
        self._step = step
        for name, value in flatten_dict(metrics, "/").items():
            full_name = f"{prefix}/{name}" if prefix else name
            if not isinstance(value, numbers.Real):
                raise TypeError(f"metric {full_name} is {type(value).__name__} {value!r}, not a number")
            if full_name in self._metrics:
                raise ValueError(f"metric {full_name} is logged twice in step {step}")
            self._metrics[full_name] = int(value) if isinstance(value, numbers.Integral) else float(value)

    def finish_step(self, step: int) -> dict[str, float]:
        """Write the metrics of `step` as one line, send them to the backends, and return them.

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
        for backend in self._backends:
            backend.log(metrics, step)
        return metrics

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the resolved configuration to `config.yaml` in the run folder and to the backends."""
        plain = files.to_plain(params)
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        (self.run_dir / "config.yaml").write_text(text, encoding="utf-8")
        for backend in self._backends:
            backend.log_hyperparams(plain, text)

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:
        """Send a distribution to the backends that draw one; metrics.jsonl holds numbers only."""
        for backend in self._backends:
            backend.log_histogram(values, step, name)

    def log_records(self, records: Iterable[Mapping[str, Any]], file_name: str) -> Path:
        """Write one JSON object per line to `file_name` in the run folder."""
        path = self.run_dir / file_name
        with path.open("w", encoding="utf-8") as file:
            file.writelines(files.dumps(record) + "\n" for record in records)
        return path

    def close(self) -> None:
        """Close the backends. Metrics of an unfinished step are dropped."""
        self._file.close()
        for backend in self._backends:
            backend.close()


class _TensorBoard:
    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        self._writer.add_text("config", "    " + text.replace("\n", "\n    "), 0)

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:
        import numpy as np

        self._writer.add_histogram(name, np.asarray(values), step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, cfg: WandbConfig, run_dir: Path) -> None:
        import wandb

        self._histogram = wandb.Histogram
        self._run = wandb.init(
            project=cfg.project, name=cfg.name, entity=cfg.entity, mode=cfg.mode, dir=str(run_dir), reinit="create_new"
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_hyperparams(self, params: Mapping[str, Any], text: str) -> None:
        self._run.config.update(dict(params), allow_val_change=True)

    def log_histogram(self, values: Sequence[float], step: int, name: str) -> None:
        self._run.log({name: self._histogram(list(values))}, step=step)

    def close(self) -> None:
        self._run.finish()


def flatten_dict(tree: Mapping[str, Any], sep: str = ".") -> dict[str, Any]:
    """The leaves of nested mappings, by their keys joined with `sep`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}{sep}{inner}": leaf for inner, leaf in flatten_dict(value, sep).items()}
        else:
            flat[key] = value
    return flat


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
