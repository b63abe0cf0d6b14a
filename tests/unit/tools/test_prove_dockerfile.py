"""The Dockerfile as the script that proves it reads it. The proof itself needs root and a bare Debian (docker.md)."""

from __future__ import annotations

from pathlib import Path

from tools.prove_dockerfile import ROOT, Build, instructions
from tools.requirements import SETS

STEPS = instructions((ROOT / "Dockerfile").read_text())


def test_continued_lines_are_one_instruction_and_comments_none():
    assert instructions("# a\nRUN a \\\n    && b\n\nUSER 1000\n") == [("RUN", "a && b"), ("USER", "1000")]


def test_the_container_does_not_run_as_root():
    users = [text for name, text in STEPS if name == "USER"]
    assert users == ["1000"]
    after = STEPS[STEPS.index(("USER", "1000")) :]
    assert not any(name == "RUN" and "apt-get" in text for name, text in after)
    assert all(text.startswith("--chown=1000:1000 ") for name, text in after if name == "COPY")


def test_the_packages_are_those_of_a_requirements_file():
    arguments = dict(text.split("=", 1) for name, text in STEPS if name == "ARG")
    assert arguments["EXTRA"] in SETS
    (install,) = [text for name, text in STEPS if name == "RUN" and "uv pip" in text]
    assert "--require-hashes" in install
    build = Build(Path("/"), arguments, Path("/cache"))
    assert build.filled("requirements/${EXTRA}.txt") == "requirements/vllm.txt"
