"""The real command line in a process of its own, on the tiny model, with real Ray and real vLLM."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.processes import one_at_a_time

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CONFIGS = EXAMPLES / "configs"
SCRIPT = EXAMPLES / "run_grpo_math.py"
CPU_CONFIG = CONFIGS / "grpo_math_cpu.yaml"
START_S = 60.0  # in which nothing else starts, if Ray has not started before

RUNNING: list[subprocess.Popen[str]] = []
"""Processes that `begin` started and no test has ended yet."""


def keys(**sections: str) -> tuple[str, ...]:
    """Overrides: `keys(grpo="seed=1 val_period=0")`."""
    return tuple(f"{section}.{key}" for section, text in sections.items() for key in text.split())


# A run of seconds: few small steps, nothing on the side.
SMALL = keys(
    grpo="num_prompts_per_step=4 num_generations_per_prompt=4 max_num_steps=4 val_period=2 val_at_start=false"
    " max_val_samples=8",
    policy="train_global_batch_size=16 train_micro_batch_size=8",
    checkpointing="save_period=2",
    logger="num_val_samples_to_print=0 tensorboard_enabled=false",
)
# Training steps and nothing else.
BARE = keys(
    grpo="val_period=0 val_at_start=false val_at_end=false",
    checkpointing="enabled=false",
    logger="num_val_samples_to_print=0 tensorboard_enabled=false",
)
ENGINE_APART = (
    "policy.generation.colocated={enabled: false, resources: {cpu_workers_per_node: 1}}",
    "loss_fn.use_importance_sampling_correction=true",
)


@dataclass
class Finished:
    """A run that has ended: its output and its folder."""

    output: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of the newest experiment."""
        newest = sorted(self.folder.glob("logs/exp_*/metrics.jsonl"))[-1]
        return [json.loads(line) for line in newest.read_text().splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.metrics if row["step"] > 0]

    def curve(self, name: str) -> list[float]:
        """A metric of every row that has it."""
        found = [row[name] for row in self.metrics if name in row]
        assert found, f"no row has {name}"
        return found


def start(
    folder: Path, *overrides: str, script: Path = SCRIPT, config: Path = CPU_CONFIG, **environment: str
) -> subprocess.Popen[str]:
    """Begin a run in `folder`; its output goes to `folder/out.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(script), "--config", str(config), *overrides]
    return begin(command, folder / "out.log", **environment)


def begin(command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[str]:
    """A process of a session of its own, in the folder of its log."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # of the tests alone
    env = {**inherited, "PYTHONPATH": str(ROOT), **environment}
    with log.open("a") as file, one_at_a_time("start"):
        streams: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "text": True}
        links = set(log.parent.glob("logs/*/ray"))
        process = subprocess.Popen(command, cwd=log.parent, env=env, start_new_session=True, **streams)
        RUNNING.append(process)
        deadline = time.monotonic() + START_S
        while process.poll() is None and set(log.parent.glob("logs/*/ray")) == links:  # made when Ray has started
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return process


def run(folder: Path, *overrides: str, timeout_s: float = 1500, status: int = 0, **how: Any) -> Finished:
    """A run to its end, with that status; `how` is for `start`."""
    return end(start(folder, *overrides, **how), folder, timeout_s, status)


def end(process: subprocess.Popen[str], folder: Path, timeout_s: float = 1500, status: int = 0) -> Finished:
    """Wait for a run that was started in `folder`; it must end with that status."""
    try:
        found = process.wait(timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    output = (folder / "out.log").read_text()
    assert found == status, output[-4000:]
    return Finished(output, folder)


def run_until(folder: Path, text: str, *overrides: str, timeout_s: float = 1500, **how: Any) -> subprocess.Popen[str]:
    """A run that goes on when its output first holds `text`; `how` is for `start`."""
    process = start(folder, *overrides, **how)
    deadline = time.monotonic() + timeout_s
    while text not in (output := (folder / "out.log").read_text()):
        assert process.poll() is None and time.monotonic() < deadline, output[-4000:]
        time.sleep(0.05)
    return process


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def listening(session: int) -> list[str]:
    """Addresses, in hexadecimal and with ports, on which the processes of a session listen."""
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == session:
                inodes |= {os.readlink(fd) for fd in (process / "fd").iterdir()}
        except OSError:  # it has ended
            continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def assert_out_of_reach(session: int, at_least: int = 4) -> None:
    """The processes of a session listen on loopback alone, on so many ports."""
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    found = listening(session)
    assert len(found) >= at_least and {address.partition(":")[0] for address in found} <= loopback, found


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without those that tell the time."""
    clocks = ("timing/", "performance/")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]


def example(name: str, config: str = "") -> dict[str, Any]:
    """For `run`: `examples/run_<name>.py` and a configuration, by default `<name>_cpu.yaml`."""
    return {"script": EXAMPLES / f"run_{name}.py", "config": CONFIGS / f"{config or f'{name}_cpu'}.yaml"}


def exact(steps: Sequence[Mapping[str, Any]], num_steps: int, largest: float = 1.00001) -> None:
    """The policy gave every token the logprob with which it was sampled, after every one of the refits.

    The weights moved, so a refit that did nothing would show. No token passed the controller.
    """
    assert len(steps) == num_steps
    assert all(row["train/token_mult_prob_error"] <= largest for row in steps), steps
    assert any(row["train/grad_norm"] > 0 for row in steps)
    assert all(row["performance/controller_token_bytes"] == 0 for row in steps)


def learned(accuracy: Sequence[float]) -> None:
    """The accuracy of the last validation is above 0.8, and 0.3 higher than at first."""
    assert accuracy[-1] > 0.8 and accuracy[-1] - accuracy[0] >= 0.3, accuracy


def ends(steps: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float]:
    """Means of a metric in the first and the last fifth of the steps."""
    fifth = len(steps) // 5
    first, last = (sum(row[name] for row in part) / fifth for part in (steps[:fifth], steps[-fifth:]))
    return first, last


def small(section: str) -> tuple[str, ...]:
    """`SMALL` for another algorithm that samples."""
    return tuple(text.replace("grpo.", f"{section}.") for text in SMALL)


def continues_bit_for_bit(
    folder: Path,
    *overrides: str,
    killed_in: int = 5,
    save_period: int = 2,
    models: Sequence[str] = ("policy",),
    number: signal.Signals = signal.SIGKILL,
    **how: Any,
) -> tuple[list[dict[str, Any]], Finished]:
    """A signal to the driver in a step; the newest checkpoint is put aside; then the same command.

    No other machine reaches the run. It goes on from the checkpoint before. The steps that it takes again and the
    models of the newest checkpoint equal the first run's, to the bit. Returns the rows of the steps that were not
    taken again, and the second run.
    """
    overrides = (*overrides, "++checkpointing.save_consolidated=true", "checkpointing.keep_top_k=null")
    process = run_until(folder, f"step {killed_in}/", *overrides, **how)
    assert_out_of_reach(process.pid)
    os.kill(process.pid, number)
    status = process.wait()
    before = Finished("", folder).metrics
    saved = {int(path.name.removeprefix("step_")): path for path in folder.glob("results/*/step_*")}
    start, newest = sorted(saved)[-2:]
    put_aside = saved[newest]
    if number == signal.SIGKILL:
        assert (status, newest, start) == (-number, killed_in // save_period * save_period, newest - save_period)
    else:
        assert status == 128 + number and newest == before[-1]["step"] > killed_in, "the step is finished and saved"
    want = {model: weights_of(put_aside, model) for model in models}
    put_aside.rename(folder / "put_aside")
    again = run(folder, *overrides, **how)
    assert f"step_{start} after step {start}" in again.output
    repeated = [row for row in before if row["step"] > start]
    assert repeated[-1]["step"] >= newest
    first, second = comparable(repeated), comparable(again.metrics)[: len(repeated)]
    if number != signal.SIGKILL:  # it had no time for the validation of its last step
        second[-1] = {key: value for key, value in second[-1].items() if key in first[-1] or "validation/" not in key}
    assert second == first
    got = {model: weights_of(put_aside, model) for model in models}
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    return before[: len(before) - len(repeated)], again


def weights_of(step: Path, model: str) -> dict[str, torch.Tensor]:
    """The weights of one model of a checkpoint, saved as a whole."""
    files = list((step / model / "weights" / "consolidated").glob("*.safetensors"))
    assert files, f"{step} holds no {model} as a whole"
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
