"""Directories that somebody else has filled."""

import os
from pathlib import Path

from nemo_rl.environments.code.sandbox.process import disk_use, remove_tree


def test_depth_links_and_modes_are_no_obstacle(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    target = tmp_path / "target"
    target.mkdir()
    here = os.getcwd()
    try:
        os.chdir(target)
        for _ in range(300):
            os.mkdir("d" * 200)
            os.chdir("d" * 200)
    finally:
        os.chdir(here)
    (target / "link").symlink_to(outside)
    (target / "loop").symlink_to(target)
    (target / "closed").mkdir()
    (target / "closed" / "inner").mkdir(mode=0)
    (target / "closed").chmod(0)
    remove_tree(str(target))
    assert not target.exists()
    assert (outside / "kept").read_text() == "x"


def test_disk_use_counts_blocks_and_stops_counting_entries(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(bytes(1 << 20))
    for i in range(50):
        (tmp_path / str(i)).touch()
    size, entries = disk_use(str(tmp_path), 1000)
    assert size >= 1 << 20 and entries == 52
    assert disk_use(str(tmp_path), 10)[1] == 11
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 30)
    assert disk_use(str(tmp_path), 1000)[0] < 1 << 22
