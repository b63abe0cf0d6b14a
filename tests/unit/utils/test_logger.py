"""Metrics in the folder of a run, and in trackers: real packages and local stores.

Tests with the marker `mlflow` run in an environment of their own: every process that imports transformers would import
scikit-learn too, which mlflow brings.
"""

import json
import logging
import shutil
import socket
import subprocess
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from nemo_rl.distributed.own_python import python_of
from nemo_rl.utils.config import LoggerConfig, MLflowConfig, SwanLabConfig, WandbConfig
from nemo_rl.utils.logger import LogError, Logger, check_packages, get_next_experiment_dir
from nemo_rl.utils.trackers import RETRY_S, GuardedTracker
from nemo_rl.utils.venvs import find_project_root

ROWS = [{"prompt_id": "p1", "reward": 0.5, "conversation": "user: 1+1?\nassistant: 2"}]


def lines_of(run: Path) -> list[dict]:
    """NaN, for one, is no JSON."""
    return [json.loads(line, parse_constant=pytest.fail) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_one_line_per_step_with_everything_and_mistakes_are_named(tmp_path):
    logger = Logger(LoggerConfig(), tmp_path)
    logger.log_metrics({"reward": 0.1 + 0.2, "advantages": {"mean": np.float32(0.5)}}, 3, "train")
    with pytest.raises(ValueError, match="train/reward is logged twice in step 3"):
        logger.log_metrics({"reward": 2.0}, 3, "train")
    with pytest.raises(TypeError, match=r"metric train/name is str"):
        logger.log_metrics({"name": "x"}, 3, "train")
    logger.log_metrics({"accuracy": 1}, 3, "validation")
    returned = logger.finish_step(3)
    assert lines_of(tmp_path) == [{"step": 3, **returned}], "a line is on disk as soon as its step is finished"
    numbers = {"train/reward": 0.30000000000000004, "train/advantages/mean": 0.5}
    assert returned == {**numbers, "validation/accuracy": 1}
    logger.log_metrics({"a": float("nan"), "b": float("inf"), "c": -np.float64("inf")}, 4, "timing/train")
    logger.log_metrics({"loss": 2.0}, 5, "train")
    values = {"timing/train/a": "NaN", "timing/train/b": "Infinity", "timing/train/c": "-Infinity"}
    assert lines_of(tmp_path)[1:] == [{"step": 4, **values}], "a later step finishes the one before"
    with pytest.raises(ValueError, match="step 4 come after step 5"):
        logger.log_metrics({"accuracy": 2.0}, 4, "train")
    logger.close()


def test_tensorboard_gets_every_number_and_the_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = Logger(LoggerConfig(tensorboard_enabled=True), tmp_path)
    logger.log_hyperparams({"seed": 1})
    for step in (1, 2):
        logger.log_histogram([1.0, 2.0], step, "train/lengths")
        logger.log_metrics({"reward": step / 4}, step, "train", step_finished=True)
    logger.log_samples(ROWS, 4)
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.5)]
    assert events.Tags()["histograms"] == ["train/lengths"]
    (text,) = events.Tensors("validation/samples/text_summary")
    assert text.step == 4 and b"assistant: 2" in text.tensor_proto.string_val[0]
    assert json.loads((tmp_path / "validation_step_4.jsonl").read_text()) == ROWS[0], "and so has the folder"


def test_two_runs_never_share_a_directory(tmp_path):
    start = threading.Barrier(8)

    def take(_: int) -> list[Path]:
        start.wait()
        return [get_next_experiment_dir(tmp_path) for _ in range(10)]

    with ThreadPoolExecutor(8) as threads:
        directories = [directory for taken in threads.map(take, range(8)) for directory in taken]
    assert len(directories) == len(set(directories)) == 80


def test_a_script_logs_with_a_dictionary_as_configuration(tmp_path):
    of_nemo_rl = {"tensorboard": {"log_dir": "tb"}, "gpu_monitoring": {"collection_interval": 10, "flush_interval": 10}}
    logger = Logger({"log_dir": str(tmp_path / "logs"), "wandb_enabled": False, "monitor_gpus": False, **of_nemo_rl})
    logger.log_metrics({"loss": torch.tensor(0.5), "n": torch.tensor(3)}, 1, prefix="train")
    logger.log_metrics({"util": 1.0, "ray_step": 7}, 1, prefix="ray", step_metric="ray_step", step_finished=True)
    of_step = {"step": 1, "train/loss": 0.5, "train/n": 3, "ray/util": 1.0, "ray/ray_step": 7}
    assert lines_of(tmp_path / "logs") == [of_step]
    with pytest.raises(ValueError, match="step_metric 'at' is not among the metrics: loss"):
        logger.log_metrics({"loss": 1.0}, 2, step_metric="at")
    with pytest.raises(TypeError, match="not a number"):
        logger.log_metrics({"loss": torch.ones(2)}, 2)
    batch = {"reward": torch.tensor([0.0, 1.0]), "text": ["a", "b"], "ids": torch.tensor([[1, 2], [3, 4]])}
    first, second = logger.log_batched_dict_as_jsonl(batch, "train_data_step1.jsonl").read_text().splitlines()
    assert json.loads(first) == {"idx": 0, "reward": 0.0, "text": "a", "ids": [1, 2]}
    assert json.loads(second) == {"idx": 1, "reward": 1.0, "text": "b", "ids": [3, 4]}
    logger.close()


@pytest.mark.parametrize(
    ("lose", "left"),
    [
        (shutil.rmtree, "has the metrics from step 2 on"),
        (lambda run: run.rename(run.with_name("moved")), "has the metrics from step 2 on"),
        (lambda run: (run / "metrics.jsonl").unlink(), "has the metrics from step 2 on"),
        (lambda run: None, None),
    ],
    ids=["folder deleted", "folder moved", "file deleted", "whole"],
)
def test_a_folder_that_is_deleted_under_the_run_is_made_again_and_the_summary_says_what_it_lacks(
    lose, left, tmp_path, caplog
):
    run = tmp_path / "logs" / "exp_000"
    logger = Logger(LoggerConfig(), run)
    logger.log_hyperparams({"seed": 1})
    logger.log_metrics({"loss": 1.0}, 1, "train", step_finished=True)
    lose(run)
    logger.log_samples(ROWS, 2)
    logger.log_metrics({"loss": 2.0}, 2, "train", step_finished=True)
    assert [line["step"] for line in lines_of(run)][-1] == 2 and (run / "config.yaml").read_text() == "seed: 1\n"
    assert (run / "validation_step_2.jsonl").exists()
    if left is None:
        assert logger.summary() == f"metrics and configuration are in {run}" and not caplog.records
    else:
        assert logger.summary().startswith(f"{run} was deleted") and logger.summary().endswith(left)
        assert [record.getMessage().startswith(f"{run} was deleted") for record in caplog.records] == [True]
    shutil.rmtree(tmp_path / "logs")
    assert logger.summary().startswith(f"{run} was deleted") and logger.summary().endswith("has no metrics")
    logger.close()


def test_a_full_disk_is_named_with_the_file_whichever_it_is(tmp_path):
    logger = Logger(LoggerConfig(), tmp_path)
    told = r"{}: No space left on device\. Free some space there, or set logger\.log_dir"
    (tmp_path / "config.yaml").symlink_to("/dev/full")
    with pytest.raises(LogError, match=told.format(r"config\.yaml")):
        logger.log_hyperparams({"seed": 1})
    logger.close()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "no" / "folder")
    with pytest.raises(LogError, match=r"metrics cannot be written to .*metrics\.jsonl: No such file"):
        Logger(LoggerConfig(), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(LogError, match="the folder of the run cannot be written to"):
        get_next_experiment_dir(tmp_path / "file")


# -- trackers

DEATH = "RuntimeError: it died"
PARAMS = {"grpo": {"seed": 1, "names": ["a", "b"], "none": None}}


def log_two_runs(cfg: LoggerConfig, folder: Path) -> Logger:
    """A run that ends after step 2, and one that resumes it and dies: it continues the first one's tracker runs."""
    first = Logger(cfg, folder / "exp_000")
    first.log_hyperparams(PARAMS)
    for step in (1, 2):
        first.log_samples(ROWS, step)
        first.log_metrics({"pass@4": step / 4, "nan": float("nan")}, step, "validation", step_finished=True)
    first.close()
    second = Logger(cfg, folder / "exp_001", json.loads(json.dumps(first.run_ids)))
    second.log_hyperparams(PARAMS)
    second.log_metrics({"pass@4": 0.75}, 3, "validation", step_finished=True)
    second.close(DEATH)
    assert second.run_ids == first.run_ids and len(first.run_ids) == 1
    return second


@pytest.mark.slow  # compiles 7,600 files of packages
def test_mlflow_beside_the_other_packages():
    """The tests below that have the marker `mlflow`."""
    project = tomllib.loads((find_project_root() / "pyproject.toml").read_text())["project"]
    python = python_of(project["optional-dependencies"]["trackers"], "the extra `trackers`")
    command = [python, "-m", "pytest", "-n0", "-q", "-m", "mlflow", __file__]
    done = subprocess.run(command, cwd=find_project_root(), capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.mlflow
def test_mlflow_in_sqlite(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    cfg = LoggerConfig(log_dir=str(tmp_path), mlflow_enabled=True, mlflow=MLflowConfig(experiment_name="sums"))
    run_id = log_two_runs(cfg, tmp_path).run_ids["mlflow"]

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert run.info.run_id == run_id and run.info.status == "FAILED" and run.info.run_name == "exp_000"
    values = client.get_metric_history(run_id, "validation/pass_at_4")
    assert [(metric.step, metric.value) for metric in values] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.data.params == {"grpo.seed": "1", "grpo.names": "['a', 'b']", "grpo.none": "None"}
    (table,) = (tmp_path / "mlflow_artifacts").rglob("samples.json")
    assert json.loads(table.read_text())["data"] == [[1, *ROWS[0].values()], [2, *ROWS[0].values()]]


def test_swanlab_offline(tmp_path):
    cfg = LoggerConfig(swanlab_enabled=True, swanlab=SwanLabConfig(mode="offline", project="sums"))
    run_id = log_two_runs(cfg, tmp_path).run_ids["swanlab"]
    first, second = sorted(tmp_path.glob("exp_00?/swanlab/run-*"))
    assert first.name.endswith(run_id) and second.name.endswith(run_id), "`swanlab sync` joins parts of equal names"
    for part, died in ((first, False), (second, True)):
        content = (part / f"run-{run_id}.swanlab").read_bytes()
        assert b"validation/pass@4" in content and (DEATH.encode() in content) == died
    assert "seed" in (first / "files/config.yaml").read_text()
    tables = [path.read_text() for path in (first / "media").rglob("*.json")]
    assert len(tables) == 2 and all("assistant: 2" in table for table in tables)


def test_trackio_in_sqlite(tmp_path, monkeypatch):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage as storage

    project = f"sums-{tmp_path.name.replace('_', '-')}"
    cfg = LoggerConfig(trackio_enabled=True, trackio={"project": project})
    run_id = log_two_runs(cfg, tmp_path).run_ids["trackio"]
    assert storage.get_runs(project) == [run_id]
    lines = storage.get_logs(project, run_id)
    values = [(line["step"], line["validation/pass@4"]) for line in lines if "validation/pass@4" in line]
    assert values == [(1, 0.25), (2, 0.5), (3, 0.75)]
    tables = [line["validation/samples"] for line in lines if "validation/samples" in line]
    assert [table["_value"] for table in tables] == [ROWS, ROWS]
    assert storage.get_run_config(project, run_id)["grpo"] == PARAMS["grpo"]
    trackio.delete_project(project, force=True)


def exit_status(file: Path) -> int:
    """Of a run of wandb, from its last record, written a moment after the end: seven bytes precede file and records."""
    for _ in range(300):
        content, at, record = file.read_bytes(), 7, b""
        while at < len(content):
            size = int.from_bytes(content[at + 4 : at + 6], "little")
            record, at = content[at + 7 : at + 7 + size], at + 7 + size
        if at == len(content) and Record.FromString(record).HasField("exit"):
            return Record.FromString(record).exit.exit_code
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


def test_wandb_offline_resumes_by_its_id(tmp_path):
    cfg = LoggerConfig(wandb_enabled=True, wandb=WandbConfig(mode="offline"))
    run_id = log_two_runs(cfg, tmp_path).run_ids["wandb"]
    files = sorted(tmp_path.glob(f"exp_00?/wandb/offline-run-*/run-{run_id}.wandb"))
    assert [exit_status(file) for file in files] == [0, 1]
    assert list(tmp_path.glob("exp_000/wandb/offline-run-*/files/media/table/**/*.json"))


def test_a_process_of_wandb_that_dies_stops_no_run(tmp_path, caplog):
    logger = Logger(LoggerConfig(wandb_enabled=True, wandb=WandbConfig(mode="offline")), tmp_path)
    [core] = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    core.kill()
    core.wait()
    logger.log_metrics({"loss": 1.0}, 1, "train", step_finished=True)
    logger.close()
    with suppress(OSError):
        wandb.teardown()  # a later test starts another
    [message] = [record.getMessage() for record in caplog.records if record.name.startswith("nemo_rl")]
    assert message.startswith("wandb does not answer, and the run goes on without it; metrics.jsonl has every metric")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_full_disk_costs_the_run_its_tensorboard_alone_and_samples_name_the_remedy(tmp_path, caplog):
    logger = Logger(LoggerConfig(tensorboard_enabled=True), tmp_path)
    [events] = (tmp_path / "tensorboard").iterdir()
    for path in (events, tmp_path / "validation_step_2.jsonl"):
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/full")
    for step in (1, 2):
        logger.log_metrics({"loss": 1.0}, step, "train", step_finished=True)
    with pytest.raises(LogError, match=r"validation_step_2\.jsonl: No space left on device\. Free some space there"):
        logger.log_samples(ROWS, 2)
    logger.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]
    [message] = [record.getMessage() for record in caplog.records if record.name.startswith("nemo_rl")]
    assert message.startswith("tensorboard does not answer, and the run goes on without it; metrics.jsonl has every")


@pytest.mark.parametrize(
    "name",
    [
        "wandb",
        pytest.param("mlflow", marks=pytest.mark.mlflow),
        pytest.param("swanlab", marks=pytest.mark.slow),  # it tries 20 s
    ],
)
def test_a_server_that_is_gone_stops_no_run(name, tmp_path, caplog, monkeypatch):
    with socket.socket() as taken:  # a port where nothing answers
        taken.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        keys = {"WANDB_BASE_URL": uri, "WANDB_API_KEY": 40 * "0", "SWANLAB_API_HOST": uri, "SWANLAB_API_KEY": 21 * "a"}
        for variable, value in keys.items():
            monkeypatch.setenv(variable, value)
        if name == "wandb":
            monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")  # instead of 90
            wandb.teardown()  # it reads the limit once
        cfg = LoggerConfig.model_validate({f"{name}_enabled": True, "mlflow": {"tracking_uri": uri}})
        with caplog.at_level(logging.WARNING, "nemo_rl"):
            logger = Logger(cfg, tmp_path, known := {name: 21 * "a", "trackio": "is off"})
            assert logger.run_ids == known, "a later run goes on there"
            for step in (1, 2):
                logger.log_metrics({"loss": 1.0}, step, "train", step_finished=True)
            logger.close()
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("nemo_rl")]
    assert message.startswith(f"{name} cannot be reached and is off for this run; metrics.jsonl has every metric")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_swanlab_without_a_key_says_how_to_log_in(tmp_path, monkeypatch):
    monkeypatch.setenv("SWANLAB_API_KEY", "")
    with pytest.raises(ValueError, match=r"logger\.swanlab: .* log in with `swanlab login`, or set mode=offline"):
        Logger(LoggerConfig(swanlab_enabled=True), tmp_path)


def test_a_tracker_that_fails_is_said_once_and_tried_again_later(caplog):
    now, steps = 0.0, []
    guarded = GuardedTracker("fake", lambda: cast(Any, steps), (ConnectionError,), clock=lambda: now)

    def refuse(_: object) -> None:
        raise ConnectionRefusedError("nobody there")

    guarded.send(lambda _: steps.append(1))
    guarded.send(refuse)
    now = RETRY_S + 1
    guarded.send(refuse)
    guarded.send(lambda _: steps.append(4))  # it rests after a failure
    now = 2 * RETRY_S + 2
    guarded.send(lambda _: steps.append(5))
    assert steps == [1, 5]
    gone, back = (record.getMessage() for record in caplog.records if record.name.startswith("nemo_rl"))
    assert gone.startswith("fake ") and "ConnectionRefusedError: nobody there" in gone
    assert back.startswith("fake answers again") and all("metrics.jsonl" in text for text in (gone, back))


def test_a_missing_package_is_refused_by_key():
    with pytest.raises(ValueError, match=r"logger\.mlflow_enabled=true: mlflow is not installed.*--extra trackers"):
        check_packages(LoggerConfig(mlflow_enabled=True), find=lambda name: None)
    check_packages(LoggerConfig(), find=lambda name: None)
