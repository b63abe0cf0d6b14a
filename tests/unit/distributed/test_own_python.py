"""An actor has packages that the run lacks or has in another version."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import ray
import six
import torch

from nemo_rl.distributed.own_python import python_of
from nemo_rl.environments.config import EnvironmentConfig
from nemo_rl.environments.registry import create_env, end_envs, wait_for_envs
from nemo_rl.utils.venvs import VenvBuildError
from tests.conversations import user

KEY = "env.mine.py_executable"

pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH")

ENVIRONMENT = """
from pathlib import Path
import nowhere_else
import six
import torch
from nemo_rl.environments.interfaces import EnvironmentInterface, one_turn

class Mine(EnvironmentInterface[dict]):
    may_repeat_step = False
    def __init__(self, cfg):
        self.scale, self.file = cfg["scale"], cfg["file"]
    def step(self, logs, metadata):
        return one_turn([f"{nowhere_else.WORD} {six.__version__}"], metadata, torch.tensor([self.scale]))
    def global_post_process_and_metrics(self, batch):
        return batch, {"scale": self.scale}
    def shutdown(self):
        Path(self.file).touch()
"""


def wheel(folder: Path, name: str, version: str, source: str, *requires: str) -> Path:
    """A package of one module."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", source)
        file.writestr(f"{info}/METADATA", metadata + "".join(f"Requires-Dist: {one}\n" for one in requires))
        file.writestr(f"{info}/WHEEL", tags)
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path / "venvs"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.delenv("NRL_FORCE_REBUILD_VENVS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def packages_of(python: str) -> set[str]:
    return {path.name.partition("-")[0] for path in Path(python).parents[1].glob("lib/*/site-packages/*.dist-info")}


def test_an_actor_imports_what_the_run_cannot(ray_local: None, folder: Path) -> None:
    (folder / "mine_of_test.py").write_text(ENVIRONMENT)
    made = [("six", "99.1", "__version__ = '99.1'\n"), ("nowhere_else", "1.0", "WORD = 'found'\n")]
    wheels = [f"./{wheel(folder, *of_package).name}" for of_package in made]
    section = {"type": "mine_of_test:Mine", "scale": 0.5, "file": str(folder / "ended"), "py_executable": wheels}
    actor = create_env("mine", EnvironmentConfig.model_validate(section))
    wait_for_envs({"mine": [actor]}, 240)
    asked = [actor.step.remote([[user("1")]], [{}]), actor.global_post_process_and_metrics.remote({})]
    returned, (_, metrics) = ray.get(asked, timeout=800)
    assert returned.observations[0]["content"] == "Environment: found 99.1"
    assert returned.rewards.tolist() == [0.5] and metrics == {"scale": 0.5}
    assert ray.get(actor.__ray_call__.remote(lambda hosted: hosted.may_repeat_step)) is False
    end_envs({"mine": [actor]}, 60)
    assert (folder / "ended").exists()


def test_an_overlay_has_only_what_the_run_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have = importlib.metadata.version("six")
    for version in (have, "99.1"):
        wheel(folder, "six", version, "")
    wheel(folder, "lone", "1.0", "", f"six>={have}", "torch", "ray")
    wheel(folder, "newer", "1.0", "", "six>99")
    (folder / "judge").mkdir()
    (folder / "judge" / "requirements.txt").write_text("# of the judge\n-r more.txt\n")
    (folder / "judge" / "more.txt").write_text(f"lone\n--no-index\n--find-links {folder}\n")
    python = python_of("judge/requirements.txt", KEY)
    assert packages_of(python) == {"lone"}
    code = "import lone, six, importlib.util as util; print(six.__file__, util.find_spec('torch').origin, sep='\\n')"
    shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == [six.__file__, torch.__file__]
    made = Path(python).lstat().st_ctime_ns
    vendored = Path(six.__file__).parent / "setuptools" / "_vendor"  # on the path once somebody imports setuptools
    monkeypatch.syspath_prepend(vendored)
    assert list(importlib.metadata.distributions(path=[str(vendored)]))
    assert python_of("judge/requirements.txt", KEY) == python
    assert Path(python).lstat().st_ctime_ns == made, "it was made again"
    python = python_of(["lone", "newer", "--no-index", f"--find-links {folder}"], KEY)
    assert packages_of(python) == {"lone", "newer", "six"}


def test_mistakes_name_the_key(folder: Path) -> None:
    old = wheel(folder, "old", "1.0", "", "ray<1").name
    for given, message in (
        ("judge.txt", rf"^{KEY}: there is no file .*judge.txt$"),
        ([], rf"^{KEY}: there are no requirements"),
        ("/no/python", rf"^{KEY}: /no/python does not exist"),
        ("jugde", rf"^{KEY}: .* has no extra 'jugde'"),
        (["torch<2"], rf"^{KEY}: torch<2, and the run has torch .*, which actors share"),
        ([f"./{old}"], rf"{KEY}: old 1.0 asks for ray<1, and the run has ray "),
        (["nowhere-to-be-found==7"], rf"(?s)environment of {KEY} .*What to do: .*uv pip compile"),
    ):
        with pytest.raises((ValueError, VenvBuildError), match=message):
            python_of(given, KEY)
    assert python_of(sys.executable, KEY) == sys.executable
