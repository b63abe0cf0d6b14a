"""What Megatron says to nobody's use is silenced before Megatron is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

import nemo_rl.models.policy as package

WORKERS = sorted(Path(package.__path__[0]).glob("megatron_*worker.py"))


@pytest.mark.parametrize("path", WORKERS, ids=lambda path: path.stem)
def test_remarks_are_silenced_before_any_module_of_megatron_is_imported(path: Path) -> None:
    imports = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(("import ", "from "))]
    silenced = imports.index(
        next(line for line in imports if line.startswith("from nemo_rl.models.policy import megatron_remarks"))
    )
    assert not [line for line in imports[:silenced] if "megatron" in line or "nemo_rl.models.policy." in line]


def test_there_are_such_workers() -> None:
    assert len(WORKERS) == 2
