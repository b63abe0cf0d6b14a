"""ray.sub on Slurm itself: one machine that plays two nodes (docs/guides/cluster.md says what to install).

By name only: `pytest -m slurm`. Without Slurm the tests are skipped.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.functional.cli import CPU_CONFIG, ROOT, SMALL, free_port

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="Slurm is not installed: apt-get install slurm-wlm"),
]

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_0} CPUs=8
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# One node trains and the other generates, with one CPU worker each.
SPLIT = f"""
defaults: {CPU_CONFIG}
policy:
  generation:
    colocated: {{enabled: false, resources: {{num_nodes: 1}}}}
cluster: {{num_nodes: 2, cpu_workers_per_node: 1}}
"""


def wait_until(condition: Callable[[], bool], what: Callable[[], str], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what()}"
        time.sleep(0.3)


class Slurm:
    """Two nodes on this machine, and jobs of ray.sub on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", "spool-n0", "spool-n1", "home/.ray"):
            (folder / name).mkdir(parents=True)
        # A local run leaves such a file. Ray then asks for tokens where it finds one, unless told what to do.
        (folder / "home/.ray/auth_token").write_text("0" * 64)
        config = folder / "slurm.conf"
        ports = {"port": free_port(), "port_0": free_port(), "port_1": free_port()}
        config.write_text(SLURM_CONF.format(host=socket.gethostname().split(".")[0], folder=folder, **ports))
        self.env = {
            **os.environ,
            "SLURM_CONF": str(config),
            "HOME": str(folder / "home"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SETUP_COMMAND": "",
            "RUN": "",
            "GPUS_PER_NODE": "0",
            "CPUS_PER_WORKER": "16",
            "POLL_S": "0.5",
        }
        commands = [["slurmctld"], ["slurmd", "-N", "n0"], ["slurmd", "-N", "n1"]]
        with (folder / "daemons.log").open("w") as log:
            self.daemons = [
                subprocess.Popen([*command, "-D", "-f", str(config)], stdout=log, stderr=log, start_new_session=True)
                for command in commands
            ]
        wait_until(lambda: self.call("sinfo", "-h", "-o", "%D %T") == "2 idle", lambda: self.call("sinfo"), 60)

    def call(self, *command: str, **variables: str) -> str:
        return subprocess.run(command, env={**self.env, **variables}, text=True, capture_output=True).stdout.strip()

    def submit(self, command: str, *options: str) -> str:
        """The number of a new job of two nodes."""
        output = f"--output={self.folder}/%j.out"
        variables = {"COMMAND": command, "PORT": str(free_port()), "BASE_LOG_DIR": str(self.folder)}
        sbatch = ("sbatch", "--parsable", "--nodes=2", "--open-mode=append", output, *options, str(ROOT / "ray.sub"))
        return self.call(*sbatch, **variables)

    def output(self, job: str) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def state(self, job: str) -> dict[str, str]:
        fields = self.call("scontrol", "-o", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def end(self, job: str) -> tuple[str, str]:
        """(state and exit status, output) of a job at its end."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        wait_until(
            lambda: self.state(job)["JobState"] not in running,
            lambda: f"the end of {self.state(job)}:\n{self.output(job)}",
        )
        state = self.state(job)
        return f"{state['JobState']} {state['ExitCode']}", self.output(job)

    def close(self) -> None:
        self.call("scancel", "--user=root")
        wait_until(lambda: self.call("squeue", "-h") == "", lambda: self.call("squeue"), 60)
        for daemon in self.daemons:
            daemon.terminate()
            daemon.wait(30)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


def grpo(folder: Path, config: Path, *overrides: str) -> str:
    folder.mkdir()
    logs = f"logger.log_dir={folder}/logs checkpointing.checkpoint_dir={folder}/results"
    return f"python examples/run_grpo_math.py --config {config} {' '.join((*SMALL, *overrides))} {logs}"


def metrics(folder: Path) -> list[dict[str, float]]:
    """Rows of all runs that logged into `folder`, oldest first."""
    files = sorted((folder / "logs").glob("exp_*/metrics.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_split_run_trains_on_one_node_and_generates_on_the_other(slurm, tmp_path):
    (tmp_path / "split.yaml").write_text(SPLIT)
    command = grpo(tmp_path / "run", tmp_path / "split.yaml", "grpo.max_num_steps=2", "checkpointing.enabled=false")
    end, output = slurm.end(slurm.submit(command))
    assert end == "COMPLETED 0:0", output
    assert "the Ray cluster is up: 2 nodes" in output
    steps = [row for row in metrics(tmp_path / "run") if "train/token_mult_prob_error" in row]
    assert len(steps) == 2
    assert all(row["train/token_mult_prob_error"] <= 1.00001 for row in steps)


def test_a_requeued_job_goes_on_after_its_checkpoint(slurm, tmp_path):
    job = slurm.submit(grpo(tmp_path / "run", CPU_CONFIG, "cluster.cpu_workers_per_node=1"), "--requeue")
    wait_until(lambda: (tmp_path / "run/results/step_2").exists(), lambda: f"step 2:\n{slurm.output(job)}")
    slurm.call("scontrol", "requeue", job)
    wait_until(lambda: slurm.state(job)["Restarts"] == "1", lambda: str(slurm.state(job)), 60)
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would wait two minutes
    end, output = slurm.end(job)
    assert end == "COMPLETED 0:0", output
    assert "step_2 after step 2" in output
    assert sorted({row["step"] for row in metrics(tmp_path / "run")}) == [1, 2, 3, 4]


def test_a_head_that_dies_ends_the_job_and_is_named(slurm):
    job = slurm.submit("sleep 300")
    wait_until(lambda: "the Ray cluster is up" in slurm.output(job), lambda: slurm.output(job))
    port = slurm.output(job).split("GPUs each, at ")[1].split()[0].split(":")[1]
    servers = subprocess.run(["pgrep", "-f", f"gcs_server.*gcs_server_port={port}"], capture_output=True, text=True)
    for pid in servers.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    end, output = slurm.end(job)
    assert end.startswith("FAILED 1"), (end, output)
    assert "Ray on n0 ended" in output or "Ray on n1 ended" in output
