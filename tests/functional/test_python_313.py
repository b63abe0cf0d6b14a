"""The newest Python that is supported: the documented commands, and the tests in which other packages meet it."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.functional.cli import CPU_CONFIG, ROOT, SCRIPT

MEETINGS = ("tests/unit/generation/test_vllm_generation.py", "tests/unit/distributed", "tests/unit/environments")
INSTALLED_AGAIN = ("Uninstalled", "Installed")


def python_313() -> str | None:
    """One that uv finds, or one of pyenv's, whose command works only where it is chosen."""
    command = ["uv", "python", "find", "--no-python-downloads", "3.13"]
    found = subprocess.run(command, capture_output=True, text=True, cwd="/")
    if found.returncode == 0:
        return found.stdout.strip()
    versions = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    return next(map(str, versions.glob("3.13*/bin/python")), None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quick_start_learns_and_engines_ray_and_environments_work(tmp_path: Path) -> None:
    """As docs/testing.md says: one sync, then commands with --no-sync."""
    python = python_313()
    if python is None:
        pytest.skip("there is no Python 3.13 here")
    own = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "OMP_NUM_THREADS")}
    environment = {**own, "UV_PROJECT_ENVIRONMENT": str(tmp_path / "environment")}

    def uv(*arguments: str) -> str:
        command = ["uv", "--project", str(ROOT), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    uv("sync", "--python", python, "--extra", "cpu", "--group", "test")
    run = ("run", "--no-sync")
    version = uv(*run, "python", "-c", "import sys; print(*sys.version_info[:2])")  # behind a warning of uv
    assert version.split()[-2:] == ["3", "13"], version
    learned = uv(*run, str(SCRIPT), "--config", str(CPU_CONFIG))
    assert "accuracy 1.0000" in learned and not any(word in learned for word in INSTALLED_AGAIN)
    assert " failed" not in uv("--directory", str(ROOT), *run, "pytest", "-n0", *MEETINGS)
