"""Folders of a user whose home folder or temporary folder is not as usual."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nemo_rl.data.model_folder import resolve_model
from nemo_rl.utils.folders import cache_root, move_caches, own_folder
from nemo_rl.utils.tables import load_table
from tests.unit.distributed.test_worker_groups import eventually

ROOT = Path(__file__).parents[3]
SCRATCH = """
import socket, sys
from nemo_rl.utils.guards import scratch_folder
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(scratch_folder() + "/" + 47 * "s")
print(scratch_folder())
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # where Python keeps what it has found
    return folder


@pytest.mark.parametrize(
    ("home", "cache", "found"),
    [
        ("home", "", "home/.cache/nemo_rl"),
        ("home", "cache", "cache"),
        ("missing", "", "temporary/nemo_rl_{user}"),
        ("/proc", "", "temporary/nemo_rl_{user}"),  # nobody can make a folder there
        ("~", "", "temporary/nemo_rl_{user}"),  # no variable HOME, and no entry in /etc/passwd
    ],
)
def test_the_cache_is_in_the_home_folder_or_in_a_temporary_folder_of_this_user_alone(
    home: str, cache: str, found: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", home if home == "~" else str(tmp_path / home))
    monkeypatch.setenv("NEMO_RL_CACHE", cache and str(tmp_path / cache))
    assert cache_root() == tmp_path / found.format(user=os.geteuid())
    assert not (tmp_path / "missing").exists()
    if "temporary" in found:
        assert stat.S_IMODE(cache_root().stat().st_mode) == 0o700


MOVED = {"VLLM_CACHE_ROOT": "vllm", "HF_DATASETS_CACHE": "huggingface/datasets", "HF_HUB_CACHE": "huggingface/hub"}


def test_libraries_keep_their_caches_where_they_can_write(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("NEMO_RL_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_MODULES_CACHE", "TRITON_HOME", *MOVED):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    for home, moved in (("home", {}), ("missing", MOVED)):
        monkeypatch.setenv("HOME", str(tmp_path / home))
        move_caches()
        for name in MOVED:
            found = os.environ.get(name)
            assert found == (str(own_folder() / moved[name]) if moved else None), name
    for name in MOVED:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", "/of/this/user")
    move_caches()
    assert "HF_HUB_CACHE" not in os.environ and "VLLM_CACHE_ROOT" in os.environ


def test_a_folder_that_somebody_else_made_and_variables_that_name_none_to_write_to_are_refused(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    own = own_folder()
    own.rmdir()
    own.symlink_to(tmp_path)  # somebody else has taken the name
    with pytest.raises(ValueError, match=f"{own} is no folder of this user: .*TMPDIR"):
        own_folder()
    monkeypatch.setenv("NEMO_RL_CACHE", "/proc/cache")
    with pytest.raises(ValueError, match="NEMO_RL_CACHE=/proc/cache is no folder that this user can write"):
        cache_root()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(ValueError, match=r"TMPDIR=.*missing is no folder that this user can write"):
        own_folder()


@pytest.mark.parametrize("name", [100 * "l", "of a job: 1"], ids=["long", "spaces"])
def test_sockets_and_lists_of_paths_work_in_the_scratch_folder_of_any_tmpdir(name: str, tmp_path: Path):
    folder = tmp_path / name
    folder.mkdir()
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", SCRATCH], env=variables, stdout=subprocess.PIPE, text=True, check=True)
    scratch = Path(done.stdout.removesuffix("\n"))
    assert not set(str(scratch)) & set(" :")
    assert eventually(lambda: not scratch.parent.exists() and not any(folder.iterdir()))


def test_a_name_of_a_hub_that_cannot_be_reached_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        for look_up in (resolve_model, load_table):
            with pytest.raises(ValueError, match=r"'owner/name' is no folder here, and 127.0.0.1 cannot be reached"):
                look_up("owner/name")
        assert resolve_model(str(tmp_path)) == str(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert resolve_model("owner/name") == "owner/name"
        monkeypatch.delenv("HF_HUB_OFFLINE")
        taken.listen()
        assert resolve_model("owner/name") == "owner/name"
