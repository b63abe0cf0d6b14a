"""The types of the package, by pyrefly."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.functional.cli import ROOT


def test_pyrefly_finds_no_mistake():
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    pyrefly = shutil.which("pyrefly", path=os.pathsep.join(folders))
    assert pyrefly is not None, "pyrefly is not installed: `uv sync` installs it, with the group `dev`"
    command = [pyrefly, "check", "--python-interpreter-path", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
