"""Small models on disk, for tests that only read them."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.policy.models import save_model


def saved(family: str) -> Any:
    @pytest.fixture(scope="module")
    def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp(family)
        save_model(family, directory)
        return directory

    return path


llama, qwen, deep, qwen_moe = map(saved, ("llama", "qwen2-tied", "deep", "qwen3-moe"))
