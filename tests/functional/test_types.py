"""The types of the package, by pyright."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.functional.cli import ROOT


@pytest.mark.timeout(900)
@pytest.mark.over_20s("pyright reads the whole package, and torch with it")
def test_pyright_finds_no_mistake():
    pyright = shutil.which("pyright")
    if pyright is None or subprocess.run([pyright, "--version"], capture_output=True, timeout=120).returncode != 0:
        pytest.skip("pyright is not installed, or cannot fetch its program")
    command = [pyright, "--pythonpath", sys.executable]
    roomy = {**os.environ, "NODE_OPTIONS": "--max-semi-space-size=128"}  # it collects garbage a tenth of the time
    done = subprocess.run(command, cwd=ROOT, env=roomy, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout
