"""Ray under `uv run`: workers run in the driver's own environment and folder, not in a copy of the project."""

import subprocess
import sys
from pathlib import Path

PROBE = """
import ray, os, sys
from nemo_rl.distributed.virtual_cluster import init_ray
init_ray()
@ray.remote(num_cpus=1)
def where():
    return os.getcwd(), sys.executable
folder, python = ray.get(where.remote())
ray.shutdown()
assert folder == os.getcwd(), folder
assert python == sys.executable, python
print("same place")
"""


def test_workers_are_not_started_by_a_second_uv_run(tmp_path):
    # The driver's ancestor need only look like `uv run` to Ray: the hook reads the command line.
    (tmp_path / "probe.py").write_text(PROBE)
    launcher = tmp_path / "uv"
    launcher.symlink_to("/bin/sh")
    script = f'"{sys.executable}" probe.py; exit $?'
    (tmp_path / "run").write_text(script)
    done = subprocess.run(
        [str(launcher), "run"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same place" in done.stdout
