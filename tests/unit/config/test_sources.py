"""YAML files: inheritance, and the file and line of every key."""

from pathlib import Path

import pytest

from nemo_rl.config.errors import ConfigError, Location
from nemo_rl.config.sources import load_tree


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_children_are_laid_over_parents_and_each_key_keeps_its_place(tmp_path: Path) -> None:
    """Parents are relative to the file that names them, and the later one wins; `_override_` replaces a section."""
    root = write(tmp_path, "base/root.yaml", "a:\n  x: 1\n  y: 2\nb: 1\nc: {x: 1}\nd: {x: 1}\n")
    write(tmp_path, "base/first.yaml", "defaults: root.yaml\nb: 2\n")
    write(tmp_path, "second.yaml", "b: 3\n")
    text = "defaults: [base/first.yaml, second.yaml]\na:\n  y: 20\n  z: [1, 2]\n"
    child = write(tmp_path, "child.yaml", text + "c: {_override_: true, z: 3}\nd: {_override_: false}\n")
    tree = load_tree(child)
    assert tree.values == {"a": {"x": 1, "y": 20, "z": [1, 2]}, "b": 3, "c": {"z": 3}, "d": {"x": 1}}
    assert tree.location(("a", "x")) == Location(str(root), 2)
    assert tree.location(("a", "y")) == Location(str(child), 3)
    assert ("c", "x") not in tree.locations


SCALARS = {
    **{"1e-6": 1e-6, "5.0e-6": 5e-6, "1.5": 1.5, "-3": -3, "1_000": 1000, "0": 0, "-.inf": float("-inf")},
    **{text: text for text in ("01:00:00:00", "10:00:00:00", "2024-01-01", "val:accuracy")},
    **{"true": True, "null": None, '"1"': "1"},
}


def test_scalars(tmp_path: Path) -> None:
    text = "a:\n" + "".join(f"  - {scalar}\n" for scalar in SCALARS)
    found = load_tree(write(tmp_path, "a.yaml", text)).values["a"]
    assert [(type(value), value) for value in found] == [(type(value), value) for value in SCALARS.values()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  x: 1\n  x: 2\n", "a.yaml:3: a.x: written twice in this section, first in line 2"),
        ("a: [1\nb: 2\n", "a.yaml:2: not valid YAML"),
        ("- 1\n", "a.yaml:1: the file must hold sections"),
        ("a: 1\ndefaults: nowhere.yaml\n", "a.yaml:2: defaults: no such file"),
        (f"defaults: {'x' * 300}\n", "a.yaml:1: defaults: no such file"),
        ("defaults: true\n", "a.yaml:1: defaults: must be a path or a list of paths (got True)"),
        ("defaults: a.yaml\n", "inherit from one another"),
        ("a: &x {b: *x}\n", "a.yaml: cannot be read: an anchor contains itself"),
        ("a: !!python/object:os.system x\n", "a.yaml:1: not valid YAML"),
        ("defaults: [{a: 1}]\n", "a.yaml:1: defaults: must be a path"),
    ],
)
def test_broken_files_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_tree(write(tmp_path, "a.yaml", text))
    assert message in str(error.value)
