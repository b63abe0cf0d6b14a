"""What breaks in the middle of a run, by real signals to real processes: healed where it can be, else named.

Each run plays many faults: starting one takes half a minute.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.functional.cli import SMALL, Finished, run, start
from tests.functional.faulty import processes_below

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 60
LONG = (*SMALL, f"grpo.max_num_steps={STEPS}", "grpo.val_period=10", "checkpointing.save_period=10")

UNSTEADY = """
import time
from pathlib import Path
import torch
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

class Unsteady(EnvironmentInterface):
    def __init__(self, cfg):
        pass

    def step(self, message_log_batch, metadata):
        if not Path("hung").exists() and Path("logs").exists():
            Path("hung").touch()
            time.sleep(1000)
        size = len(message_log_batch)
        if any("7" in str(message["content"]) for log in message_log_batch for message in log):
            raise KeyError("seven")
        return EnvironmentReturn([{"role": "environment", "content": ""}] * size, metadata, [None] * size,
                                 torch.rand(size), torch.ones(size), None)

    def global_post_process_and_metrics(self, batch):
        return batch, {}

class Unmade(Unsteady):
    def __init__(self, cfg):
        raise KeyError("oven_temperature")
"""


def actor(pid: int, role: str) -> int:
    """The process of `engine`, `generation`, `policy`, `rollout` or `environment`; actors start in this order."""
    below = processes_below(pid)
    if role == "environment":
        return next(child for child, (_, command) in below.items() if command.startswith("ray::MathEnvironment"))
    engine, generation = next((child, parent) for child, (parent, args) in below.items() if "EngineCore" in args)
    if role in ("engine", "generation"):
        return engine if role == "engine" else generation
    hosts = sorted(child for child, (_, args) in below.items() if args.startswith("ray::ActorHost"))
    others = [host for host in hosts if host != generation]
    return max(others) if role == "rollout" else min(others)


class Watched:
    """A run whose output is waited on."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.process = start(folder, *overrides)

    @property
    def output(self) -> str:
        return (self.folder / "out.log").read_text()

    def wait_for(self, text: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output[-4000:]
            time.sleep(0.02)

    def signal(self, role: str, number: signal.Signals) -> None:
        os.kill(actor(self.process.pid, role), number)

    def end(self, timeout_s: float = 150) -> Finished:
        """Wait, and see that no process of the run is left."""
        below = processes_below(self.process.pid)
        try:
            status = self.process.wait(timeout_s)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while left := [pid for pid in below if alive(pid)]:
            assert time.monotonic() < deadline, {pid: below[pid] for pid in left}
            time.sleep(0.1)
        return Finished(status=status, output=self.output, folder=self.folder)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_dies_is_replaced_and_what_hangs_is_named(tmp_path):
    """kill -9 of environment, engine, rollout worker and policy, then SIGSTOP of the policy, in one run."""
    watched = Watched(tmp_path, *LONG, "cluster.worker_timeout_s=20")
    watched.wait_for("step 1/")
    watched.signal("environment", signal.SIGKILL)
    watched.wait_for("step 3/")
    watched.signal("engine", signal.SIGKILL)
    watched.wait_for("step 6/")
    watched.signal("rollout", signal.SIGKILL)
    watched.wait_for(f"step 10/{STEPS}")
    watched.signal("policy", signal.SIGKILL)
    watched.wait_for("results/grpo_cpu/step_10 after step 10")
    watched.wait_for(f"step 11/{STEPS}")
    hosts = processes_below(watched.process.pid)
    newest = max(pid for pid, (_, args) in hosts.items() if args.startswith("ray::ActorHost"))
    os.kill(newest, signal.SIGSTOP)
    finished = watched.end()
    assert finished.status == 1, finished.output[-4000:]
    assert "no answer from policy-0 (rank 0" in finished.output and "(stopped)" in finished.output
    assert (tmp_path / "results" / "grpo_cpu" / "step_10" / "manifest.json").is_file()
    assert not list((tmp_path / "results" / "grpo_cpu").glob("tmp_*"))


def test_failing_episodes_are_left_out_and_nan_ends_the_run(tmp_path):
    """An environment that raises on some conversations and once never returns; then a learning rate beyond reason."""
    (tmp_path / "unsteady.py").write_text(UNSTEADY)
    finished = run(
        tmp_path,
        *SMALL,
        "+env.mine={type: unsteady:Unsteady}",
        "data.default.env_name=mine",
        "grpo.env_step_timeout_s=3",
        "grpo.max_failed_sample_fraction=1.0",
        "policy.optimizer.kwargs.lr=1e30",
    )
    assert finished.status == 1, finished.output[-4000:]
    assert "environment 'mine' did not answer" in finished.output
    assert "policy.nonfinite_action=skip" in finished.output and "loss nan" in finished.output
    assert list(tmp_path.glob("logs/exp_000/nonfinite_step_*.jsonl"))


def test_an_environment_that_cannot_be_made_is_the_users_to_change(tmp_path):
    (tmp_path / "unsteady.py").write_text(UNSTEADY)
    finished = run(tmp_path, *SMALL, "+env.mine={type: unsteady:Unmade}", "data.default.env_name=mine")
    assert finished.status == 2
    assert "environment 'mine' (env.mine) cannot be started: KeyError: 'oven_temperature'" in finished.output


def test_control_c_leaves_nothing_behind(tmp_path):
    watched = Watched(tmp_path, *LONG)
    watched.wait_for("step 2/")
    os.killpg(watched.process.pid, signal.SIGINT)
    finished = watched.end(60)
    assert finished.status == 130 and "Traceback" not in finished.output
    assert "interrupted; the same command resumes" in finished.output


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        finished = run(
            tmp_path,
            *SMALL,
            f"checkpointing.checkpoint_dir={disk}/c",
            "checkpointing.keep_top_k=null",
            "checkpointing.metric_name=null",
            "checkpointing.save_period=1",
        )
        assert finished.status == 1, finished.output[-4000:]
        assert f"{disk}/c/step_2 is untouched" in finished.output
        assert sorted(path.name for path in (disk / "c").iterdir()) == ["step_1", "step_2"]
    finally:
        subprocess.run(["umount", disk], check=True)
