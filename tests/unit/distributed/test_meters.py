"""Profiles of chosen workers, and the meters of all."""

import gzip
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.distributed.actor_host import BusyTimes, group_memory_gb
from nemo_rl.distributed.meters import UsageMonitor, profiled_step
from nemo_rl.distributed.worker_groups import RayWorkerGroup, tensor_bytes
from nemo_rl.utils.config import ProfileConfig
from tests.unit.distributed.workers import EchoWorker
from tests.worlds import run_world

pytestmark = pytest.mark.usefixtures("ray_local")


def step(group: RayWorkerGroup, number: int, cfg: ProfileConfig, folder: Path) -> None:
    with profiled_step(cfg, folder, number):
        product = group.call_one(1, EchoWorker.apply, lambda: torch.ones(64, 64) @ torch.ones(64, 64))
        assert product[0, 0] == 64.0  # the other need not load torch


@pytest.mark.over_20s("starts Ray; a worker loads torch's profiler")
def test_named_workers_are_profiled_in_named_steps_and_a_name_of_nobody_is_refused(echo_pair, tmp_path: Path) -> None:
    cfg = ProfileConfig(steps=[2, 3], workers=["*-1"])
    for number in (1, 2):
        step(echo_pair, number, cfg, tmp_path / "profile")
    [trace] = (tmp_path / "profile").iterdir()
    assert trace.name == "step_2_echo-1.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" and event["ph"] == "X" and event["dur"] > 0 for event in events)
    with pytest.raises(ZeroDivisionError), profiled_step(cfg, tmp_path / "profile", 3):
        raise ZeroDivisionError
    step(echo_pair, 3, cfg, tmp_path / "profile")  # after a step that failed, the profiler can start again
    assert trace.with_name("step_3_echo-1.json.gz").exists()
    with pytest.raises(ValueError, match=r"workers=\['policy-0'\] names none of the workers: echo-0, echo-1"):
        step(echo_pair, 1, ProfileConfig(steps=[1]), tmp_path)


def test_memory_of_workers_and_controller(echo_pair: RayWorkerGroup) -> None:
    with UsageMonitor(0.2, gpus=False) as monitor:
        deadline = time.monotonic() + 600
        while "echo/memory_gb" not in (metrics := monitor.metrics()):
            assert time.monotonic() < deadline, metrics
            time.sleep(0.1)
    assert 0.02 < metrics["echo/memory_gb"] < 20
    assert not any("gpu" in name for name in metrics)


def test_memory_counts_children() -> None:
    def on_rank(rank: int, world: int) -> float:
        os.setpgrp()
        before = group_memory_gb()
        program = "x = bytearray(300 << 20); print(1, flush=True); input()"
        child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        grown = group_memory_gb() - before
        child.kill()
        return grown

    assert 0.29 < run_world(on_rank, 1)[0] < 0.5 and group_memory_gb() > 0


def test_gpus_without_nvml_are_refused(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"install nvidia-ml-py, or set logger\.monitor_gpus=false"):
        UsageMonitor(10.0, gpus=True)


# -- counted and timed without workers


@dataclass
class Carrier:
    tokens: np.ndarray
    parts: list[torch.Tensor]
    name: str = "a"


def test_arrays_are_found_wherever_they_hide_and_nothing_else_counts() -> None:
    carrier = Carrier(np.zeros(5, np.int64), [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 2)])
    assert tensor_bytes(carrier) == 40 + 6 + 16
    assert tensor_bytes({"a": [carrier, (carrier,)], "b": {"c": np.float32([1])}}) == 2 * 62 + 4
    assert tensor_bytes([1, 2.0, "text", b"bytes", None, Carrier, {"a": range(3)}]) == 0


def test_busy_times_are_joined_told_in_parts_and_only_the_latest_are_kept() -> None:
    now = [0.0]
    busy = BusyTimes(clock=lambda: now[0])
    first, second = ExitStack(), ExitStack()
    first.enter_context(busy.track("generate"))
    now[0] = 1.0
    second.enter_context(busy.track("generate"))
    for now[0], stack in ((2.0, first), (3.0, second)):
        stack.close()
    now[0] = 3.001  # follows at once
    with busy.track("generate"):
        now[0] = 4.0
    now[0] = 5.0
    with busy.track("train"):
        now[0] = 6.0
        assert busy.take() == [("generate", 0.0, 4.0), ("train", 5.0, 6.0)]
        now[0] = 8.0
    assert busy.take() == [("train", 6.0, 8.0)] and busy.take() == []
    for number in range(2 * BusyTimes.MAX_KEPT):
        now[0] = 10.0 + number
        with busy.track("a" if number % 2 else "b"):
            now[0] += 0.5
    found = busy.take()
    assert len(found) == BusyTimes.MAX_KEPT and found[-1][2] == 10 + 2 * BusyTimes.MAX_KEPT - 0.5
