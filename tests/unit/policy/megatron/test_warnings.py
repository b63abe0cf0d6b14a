"""Megatron's irrelevant warnings are silenced before Megatron is imported."""

from __future__ import annotations

from pathlib import Path

import nemo_rl.models.policy.megatron as package

SILENCED = "from nemo_rl.models.policy.megatron import cpu_shim"


def test_warnings_are_silenced_before_any_module_of_megatron_is_imported() -> None:
    text = (Path(package.__path__[0]) / "worker.py").read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    silenced = next(index for index, line in enumerate(imports) if line.startswith(SILENCED))
    assert not [line for line in imports[:silenced] if "megatron" in line]
