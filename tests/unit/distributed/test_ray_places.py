"""Which cluster a run joins, and who can read its token."""

import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.config.errors import ConfigError
from nemo_rl.distributed.ray_places import find_cluster, folder_of_ray, own_token, protect_token


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address that `ray start` wrote into `tmp_path`: something listens there."""
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        yield address


def test_the_cluster_is_the_one_of_the_variable_or_of_this_users_ray_start(tmp_path: Path, cluster: str):
    here, elsewhere = {"RAY_TMPDIR": str(tmp_path)}, {"TMPDIR": str(tmp_path / "empty")}
    file = tmp_path / "ray" / "ray_current_cluster"
    assert find_cluster(here) == find_cluster({"TMPDIR": str(tmp_path)}) == cluster
    assert find_cluster({**here, "RAY_ADDRESS": "auto"}) == cluster
    assert find_cluster({**here, "RAY_ADDRESS": "local"}) is None
    assert find_cluster({**here, "RAY_ADDRESS": "head:6379"}) == "head:6379"
    assert find_cluster(elsewhere) is None
    file.write_text("127.0.0.1:1")  # the cluster has ended
    assert find_cluster(here) is None


def test_the_cluster_of_another_user_is_joined_only_if_the_variable_says_so(tmp_path: Path, cluster: str):
    file = tmp_path / "ray" / "ray_current_cluster"
    try:
        file.chmod(0o644)
        os.chown(file, 12345, -1)
    except PermissionError:
        pytest.skip("only root can give a file away")
    here = {"RAY_TMPDIR": str(tmp_path)}
    assert find_cluster(here) is None
    assert find_cluster({**here, "RAY_ADDRESS": "auto"}) == find_cluster({"RAY_ADDRESS": cluster}) == cluster


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("auto", "auto finds no cluster that `ray start` has started on this machine"),
        ("junk", "junk is no address"),
        ("junk:port", "junk:port is no address"),
        (":6379", ":6379 is no address"),
        ("head:0", "head:0 is no address"),
        ("head:65536", "head:65536 is no address"),
        ("ray://head:10001", "address of Ray Client"),
    ],
)
def test_an_address_that_names_no_cluster_is_refused_in_one_line_with_the_way_in(
    address: str, told: str, tmp_path: Path
):
    with pytest.raises(ConfigError) as caught:
        find_cluster({"RAY_ADDRESS": address, "RAY_TMPDIR": str(tmp_path)})
    assert re.fullmatch(rf"RAY_ADDRESS: .*{re.escape(told)}.*<address of the first node>:6379.*", str(caught.value))


def test_only_this_user_can_read_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    token = own_token()
    assert token == tmp_path / ".ray" / "auth_token" and len(token.read_text()) == 64
    assert [stat.S_IMODE(path.stat().st_mode) for path in (token, token.parent)] == [0o600, 0o700]
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
    written = token.read_text()
    token.chmod(0o644)  # as Ray makes it
    protect_token()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert own_token().read_text() == written


def test_the_folder_of_ray_is_closed_to_others_or_the_one_that_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert stat.S_IMODE(Path(folder_of_ray()).parent.stat().st_mode) == 0o700
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert folder_of_ray() == str(tmp_path / "ray")
    monkeypatch.setenv("RAY_TMPDIR", "/proc/here")
    with pytest.raises(ValueError, match="RAY_TMPDIR=/proc/here cannot be written to"):
        folder_of_ray()
