"""ray.sub against a Slurm of shell scripts: what runs where, and how the job ends."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

RAY_SUB = Path(__file__).parents[2] / "ray.sub"

SRUN = """#!/bin/bash
# Records its arguments and runs the command here.
echo "srun $*" >> "$FAKE_LOG"
while [[ $1 == -* ]]; do
    if [[ $1 == -w ]]; then export FAKE_NODE=$2; shift; fi
    shift
done
exec "$@"
"""
RAY = """#!/bin/bash
echo "ray@$FAKE_NODE $*" >> "$FAKE_LOG"
echo "secret $RAY_AUTH_MODE $RAY_AUTH_TOKEN" >> "$FAKE_LOG"
touch "$FAKE_DIR/up-$FAKE_NODE"
[[ $FAKE_NODE == "$FAKE_DIES" ]] && exit 1
exec sleep 60
"""
PYTHON = """#!/bin/bash
if [[ $1 == examples/doctor.py ]]; then echo "examined $*"; exit "$FAKE_DOCTOR"; fi
echo "noise"
echo "RAY_HAS $(ls "$FAKE_DIR" | grep -c up-) $(( $(ls "$FAKE_DIR" | grep -c up-) * 4 ))"
"""
COMMANDS = {
    "srun": SRUN,
    "ray": RAY,
    "python": PYTHON,
    "scontrol": "#!/bin/bash\nprintf 'n0\\nn1\\nn2\\n'\n",
    "hostname": "#!/bin/bash\necho 10.0.0.7 fe80::1\n",
}


@pytest.fixture
def submit(tmp_path):
    bin_dir, state = tmp_path / "bin", tmp_path / "state"
    bin_dir.mkdir()
    state.mkdir()
    for name, text in COMMANDS.items():
        (bin_dir / name).write_text(text)
        (bin_dir / name).chmod(stat.S_IRWXU)

    def run(**variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        env = {"PATH": f"{bin_dir}:/usr/bin:/bin", "FAKE_LOG": str(tmp_path / "calls"), "FAKE_DIR": str(state)}
        env |= {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[0-2]", "SLURM_SUBMIT_DIR": str(tmp_path)}
        env |= {"SLURM_CPUS_ON_NODE": "32", "GPUS_PER_NODE": "4", "SETUP_COMMAND": "", "RUN": "", "POLL_S": "0.1"}
        env |= {"HOME": os.environ["HOME"], **variables}
        done = subprocess.run(
            ["bash", str(RAY_SUB)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False
        )
        return done, (tmp_path / "calls").read_text().splitlines()

    return run


def test_the_command_runs_on_the_head_when_all_nodes_are_there_also_in_a_container(submit, tmp_path):
    done, calls = submit(COMMAND='echo "hello from $FAKE_NODE at $RAY_ADDRESS"; exit 3', SETUP_COMMAND="touch made")
    assert done.returncode == 3, done.stderr
    assert "hello from n0 at 10.0.0.7:6379" in done.stdout
    assert "COMMAND ended with status 3" in done.stdout
    assert (tmp_path / "made").exists()
    assert "hello from n0" in (tmp_path / "17-logs" / "driver.log").read_text()
    starts = sorted(call for call in calls if call.startswith("ray@"))
    common = "--num-cpus=32 --num-gpus=4 --disable-usage-stats --block"
    assert starts == [
        f"ray@n0 start --head --port=6379 --node-ip-address=10.0.0.7 --include-dashboard=false {common}",
        f"ray@n1 start --address=10.0.0.7:6379 {common}",
        f"ray@n2 start --address=10.0.0.7:6379 {common}",
    ]
    assert not any("container" in call for call in calls)
    (secret,) = {call for call in calls if call.startswith("secret token ")}
    assert len(secret.split()[2]) == 64, "all nodes share one"
    done, calls = submit(COMMAND="true", CONTAINER="image.sqsh", MOUNTS="/data:/data")
    assert done.returncode == 0, done.stderr
    started = [call for call in calls if call.startswith("srun") and "ray start --head" in call][-1]
    assert "--container-image=image.sqsh" in started
    assert f"--container-mounts={tmp_path}:{tmp_path},/data:/data" in started
    assert len({call for call in calls if call.startswith("secret token ")}) == 2, "the next job has another secret"


BROKEN = {
    "Ray on n1 ended": {"COMMAND": "sleep 50", "FAKE_DIES": "n1"},
    'instead of "3 15"': {"COMMAND": "true", "GPUS_PER_NODE": "5", "START_TIMEOUT_S": "1"},
    "SETUP_COMMAND failed": {"COMMAND": "true", "SETUP_COMMAND": "echo no network; exit 1"},
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_node_or_a_setup_that_fails_ends_the_job_and_is_named(submit, said):
    done, calls = submit(**BROKEN[said])
    assert done.returncode == 1 and said in done.stderr
    assert any(call.startswith("ray@") for call in calls) == ("SETUP_COMMAND" not in BROKEN[said])


@pytest.mark.parametrize("is_bad", [False, True])
def test_the_doctor_comes_first_and_may_end_the_job(submit, tmp_path, is_bad):
    done, _ = submit(COMMAND="echo trained", DOCTOR="1", FAKE_DOCTOR=str(int(is_bad)))
    assert done.returncode == is_bad
    assert "examined examples/doctor.py --num-nodes 3 --gpus-per-node 4" in done.stdout
    assert ("trained" in done.stdout) != is_bad and ("the doctor found something bad" in done.stderr) == is_bad
    assert "examined" in (tmp_path / "17-logs" / "doctor.log").read_text()
