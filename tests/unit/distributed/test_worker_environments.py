"""Two workers with conflicting versions of one package, side by side."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.utils.venvs import VenvBuildError, python_executable_for

PYPROJECT = """\
[project]
name = "conflicting"
version = "0"
requires-python = ">=3.11"
dependencies = []
[project.optional-dependencies]
old = ["six==1.16.0"]
new = ["six==1.17.0"]
[tool.uv]
package = false
conflicts = [[{ extra = "old" }, { extra = "new" }]]
"""


def python_with_ray(extra: str, project: Path) -> str:
    """The Python of `extra`; Ray and this library come from the environment of the tests."""
    python = python_executable_for(extra, project)
    if Path(python).is_relative_to(project):
        show = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        packages = Path(subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip())
        driver_packages = sysconfig.get_path("purelib")
        # Processed in order: the extra's own packages come first on sys.path.
        (packages / "driver.pth").write_text(f"import site; site.addsitedir({driver_packages!r})\n")
    return python


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH")
def test_conflicting_versions_side_by_side(ray_local: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEMO_RL_VENV_DIR", raising=False)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    try:
        pythons = {extra: python_with_ray(extra, tmp_path) for extra in ("old", "new")}
    except VenvBuildError as error:
        if "could not reach the package index" not in str(error):
            raise
        pytest.skip(f"no package index: {error}")
    assert pythons["old"] != pythons["new"]
    builder = RayWorkerBuilder("tests.unit.distributed.workers.EchoWorker")
    with (
        RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=2) as cluster,
        RayWorkerGroup(cluster, builder, name_prefix="old", py_executable=pythons["old"]) as old,
        RayWorkerGroup(cluster, builder, name_prefix="new", py_executable=pythons["new"]) as new,
    ):
        assert old.call_all("six_version") + new.call_all("six_version") == ["1.16.0", "1.17.0"]
