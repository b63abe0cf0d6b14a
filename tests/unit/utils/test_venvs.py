"""Worker environments: made once, made again when they must be, and a remedy in each error."""

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nemo_rl.utils import venvs
from nemo_rl.utils.venvs import VenvBuildError, ensure_venv, find_project_root, python_executable_for

PYPROJECT = """\
[project]
name = "tiny"
version = "0"
requires-python = ">=3.12"
dependencies = []
[project.optional-dependencies]
old = ["six==1.16.0"]
new = ["six==1.17.0"]
broken = ["pytest>=1", "six==0.0.0.1"]
[tool.uv]
package = false
conflicts = [[{ extra = "old" }, { extra = "new" }]]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NEMO_RL_VENV_DIR", raising=False)
    monkeypatch.delenv("NRL_FORCE_REBUILD_VENVS", raising=False)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    return tmp_path


@pytest.fixture
def fake_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A uv that makes an empty environment and counts its calls in `calls`; with `fail` beside it, it prints that."""
    folder = tmp_path / "fake_bin"
    folder.mkdir()
    (folder / "uv").write_text(
        f"""#!/bin/sh
echo "$@" >> {folder}/calls
if [ -f {folder}/fail ]; then mkdir -p "$UV_PROJECT_ENVIRONMENT"; cat {folder}/fail >&2; exit 2; fi
sleep 0.2
echo "Resolved 1 package in 1ms" >&2
mkdir -p "$UV_PROJECT_ENVIRONMENT/bin" && ln -s {sys.executable} "$UV_PROJECT_ENVIRONMENT/bin/python"
"""
    )
    (folder / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def num_calls(fake_uv: Path) -> int:
    return len((fake_uv / "calls").read_text().splitlines())


def test_the_projects_own_extras_are_found_and_uv_is_missed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project))
    with pytest.raises(VenvBuildError, match="made by uv, which is not on PATH"):
        ensure_venv("old", project)
    assert (find_project_root() / "pyproject.toml").is_file()
    with pytest.raises(ValueError, match=r"no extra 'vlm': it has \[.*'vllm'"):
        venvs.unmet_requirements("vlm", find_project_root())


def test_made_once_by_three_drivers_and_again_when_the_project_changes_or_once_by_force(project, fake_uv, monkeypatch):
    with ThreadPoolExecutor(3) as threads:
        [python] = set(threads.map(ensure_venv, ["broken"] * 3, [project] * 3))
    assert python == str(project / "venvs" / "broken" / "bin" / "python") and num_calls(fake_uv) == 1
    (project / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    ensure_venv("broken", project)
    (project / ".python-version").write_text("3.12\n")
    ensure_venv("broken", project)
    assert num_calls(fake_uv) == 3
    (project / "venvs" / "broken" / ".nemo_rl_stamp.json").write_text("")  # the disk was full
    ensure_venv("broken", project)
    assert num_calls(fake_uv) == 4
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "true")
    assert python_executable_for("broken", project) == python_executable_for("broken", project) == python
    assert num_calls(fake_uv) == 5
    monkeypatch.setenv("NRL_FORCE_REBUILD_VENVS", "yes please")
    with pytest.raises(ValueError, match="NRL_FORCE_REBUILD_VENVS"):
        python_executable_for("broken", project)


FAILURES = {
    "error: Failed to fetch: `https://index/simple/six/`\n  Caused by: dns error": "check the network",
    "error: `six==1` can't be installed because it doesn't have a wheel for the current platform": "no wheel for this",
    "error: Failed to download `six==1`\n  Caused by: No space left on device (os error 28)": "disk is full",
}


@pytest.mark.parametrize(("words", "advice"), FAILURES.items())
def test_failed_build_says_what_to_do(project: Path, fake_uv: Path, words: str, advice: str) -> None:
    (fake_uv / "fail").write_text("Resolved 3 packages in 2ms\n" + words + "\n")
    with pytest.raises(VenvBuildError, match=r"(?s)extra 'old'.*six.*What to do.*uv sync --extra old") as caught:
        ensure_venv("old", project)
    assert advice in str(caught.value) and "Resolved 3 packages" not in str(caught.value)


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH")
def test_failing_package_is_named_by_the_real_uv(project: Path) -> None:
    text = PYPROJECT.replace("six==0.0.0.1", f"unbuildable @ file://{project}/unbuildable")
    (project / "pyproject.toml").write_text(text)
    package = project / "unbuildable"
    package.mkdir()
    (package / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "nowhere"\n')
    with pytest.raises(VenvBuildError, match=r"(?s)extra 'broken'.*unbuildable"):
        ensure_venv("broken", project)
