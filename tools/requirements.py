"""Write requirements/*.txt: every package of an installation with its version and the hashes of its files.

    uv run tools/requirements.py               # resolve pyproject.toml and write the files
    uv run tools/requirements.py --check       # exit status 1 and the names of files that a fresh resolution changes

Install one with `uv pip sync --require-hashes requirements/cpu.txt`: the same files on every machine, from whatever
index that machine uses. The files name no index. `uv.lock` would, which is why it is not in the repository.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
# File -> extras and groups. The image is made from `vllm`, `cpu` or `sglang-gpu`.
SETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cpu": (("cpu", "dashboard"), ()),
    "vllm": (("vllm", "dashboard"), ()),
    "mcore": (("vllm", "dashboard", "mcore"), ()),
    "sglang-gpu": (("sglang-gpu", "dashboard"), ()),
    "test": (("cpu",), ("test",)),
}


def header(name: str) -> str:
    extras, groups = SETS[name]
    parts = [f"--extra {extra}" for extra in extras] + [f"--group {group}" for group in groups]
    return f"# {' '.join(parts)}. Written by tools/requirements.py.\n"


def resolve() -> dict[str, str]:
    """File name -> text, from a resolution of `pyproject.toml` that no earlier one influences."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("pyproject.toml", ".python-version", "README.md", "LICENSE"):
            (Path(folder) / name).write_bytes((ROOT / name).read_bytes())
        subprocess.run(["uv", "lock", "--quiet"], cwd=folder, check=True)
        return {name: header(name) + _export(name, folder) for name in SETS}


def _export(name: str, folder: str) -> str:
    extras, groups = SETS[name]
    command = ["uv", "export", "--quiet", "--frozen", "--no-default-groups"]
    command += ["--no-emit-project", "--no-annotate", "--no-header"]
    command += [word for extra in extras for word in ("--extra", extra)]
    command += [word for group in groups for word in ("--group", group)]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def pinned(name: str) -> dict[str, list[Version]]:
    """Package -> versions of a file; several where Python or machine decide."""
    found: dict[str, list[Version]] = {}
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    for package, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.M):
        found.setdefault(canonicalize_name(package), []).append(Version(version))
    return found


def unmet(name: str, pyproject: dict[str, Any]) -> list[str]:
    """Requirements of `pyproject` that a file does not meet. Needs no network."""
    versions = pinned(name)
    problems = []
    for requirement in map(Requirement, _direct(name, pyproject)):
        found = versions.get(canonicalize_name(requirement.name), [])
        if not found or not all(requirement.specifier.contains(version) for version in found):
            problems.append(f"requirements/{name}.txt does not meet {requirement}; run `uv run tools/requirements.py`")
    return problems


def _direct(name: str, pyproject: dict[str, Any]) -> Iterator[str]:
    extras, groups = SETS[name]
    yield from pyproject["project"]["dependencies"]
    for extra in extras:
        yield from pyproject["project"]["optional-dependencies"][extra]
    for group in groups:
        yield from (entry for entry in pyproject["dependency-groups"][group] if isinstance(entry, str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file would change")
    check = parser.parse_args().check
    changed = []
    for name, text in resolve().items():
        path = FOLDER / f"{name}.txt"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            changed.append(str(path.relative_to(ROOT)))
            if not check:
                FOLDER.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    print("changed:" if changed else "nothing changed", *changed)
    raise SystemExit(1 if check and changed else 0)


if __name__ == "__main__":
    main()
