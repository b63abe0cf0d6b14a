import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.utils.config import LoggerConfig
from nemo_rl.utils.logger import Logger, get_next_experiment_dir


def lines_of(run_dir: Path) -> list[dict]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_one_line_per_step_with_everything(tmp_path):
    logger = Logger(LoggerConfig(), tmp_path)
    logger.log_metrics({"reward": 0.1 + 0.2, "advantages": {"mean": np.float32(0.5)}}, 3, "train")
    logger.log_metrics({"accuracy": 1}, 3, "validation")
    logger.log_metrics({"generation": 1.25}, 3, "timing/train")
    returned = logger.finish_step(3)
    assert lines_of(tmp_path) == [{"step": 3, **returned}], "a line is on disk as soon as its step is finished"
    numbers = {"train/reward": 0.30000000000000004, "train/advantages/mean": 0.5}
    assert returned == {**numbers, "validation/accuracy": 1, "timing/train/generation": 1.25}
    logger.log_metrics({"a": float("nan"), "b": float("inf"), "c": -np.float64("inf")}, 4, "train")
    logger.finish_step(4)
    assert lines_of(tmp_path)[1:] == [{"step": 4, "train/a": "NaN", "train/b": "Infinity", "train/c": "-Infinity"}]
    logger.close()


def test_mistakes_are_named(tmp_path):
    logger = Logger(LoggerConfig(), tmp_path)
    logger.log_metrics({"loss": 1.0}, 1, "train")
    with pytest.raises(ValueError, match="train/loss is logged twice in step 1"):
        logger.log_metrics({"loss": 2.0}, 1, "train")
    with pytest.raises(TypeError, match=r"metric train/name is str"):
        logger.log_metrics({"name": "x"}, 1, "train")
    logger.log_metrics({"loss": 2.0}, 2, "train")
    assert lines_of(tmp_path) == [{"step": 1, "train/loss": 1.0}], "a later step finishes the one before"
    with pytest.raises(ValueError, match="step 1 come after those of step 2"):
        logger.log_metrics({"accuracy": 2.0}, 1, "train")


def test_tensorboard_gets_every_number_and_the_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = [{"prompt_id": "p1", "reward": 0.5, "conversation": "user: 1+1?\nassistant: 2"}]
    logger = Logger(LoggerConfig(tensorboard_enabled=True), tmp_path)
    logger.log_hyperparams({"seed": 1})
    for step in (1, 2):
        logger.log_metrics({"reward": step / 4}, step, "train")
        logger.log_histogram([1.0, 2.0], step, "train/lengths")
        logger.finish_step(step)
    logger.log_samples(rows, 4)
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.5)]
    assert events.Tags()["histograms"] == ["train/lengths"]
    (text,) = events.Tensors("validation/samples/text_summary")
    assert text.step == 4 and b"assistant: 2" in text.tensor_proto.string_val[0]
    assert json.loads((tmp_path / "validation_step_4.jsonl").read_text()) == rows[0], "and so has the folder"


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
    assert lines_of(tmp_path / "logs") == [
        {"step": 1, "train/loss": 0.5, "train/n": 3, "ray/util": 1.0, "ray/ray_step": 7}
    ]
    with pytest.raises(ValueError, match="step_metric 'at' is not among the metrics: loss"):
        logger.log_metrics({"loss": 1.0}, 2, step_metric="at")
    with pytest.raises(TypeError, match="not a number"):
        logger.log_metrics({"loss": torch.ones(2)}, 2)
    batch = {"reward": torch.tensor([0.0, 1.0]), "text": ["a", "b"], "ids": torch.tensor([[1, 2], [3, 4]])}
    path = logger.log_batched_dict_as_jsonl(batch, "train_data_step1.jsonl")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"idx": 0, "reward": 0.0, "text": "a", "ids": [1, 2]},
        {"idx": 1, "reward": 1.0, "text": "b", "ids": [3, 4]},
    ]
    logger.close()
