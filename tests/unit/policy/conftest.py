"""Small models on disk, for tests that only read them."""

from typing import Any

import pytest

from tests.unit.policy.models import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def saved(family: str) -> Any:
    return pytest.fixture(scope="session")(lambda models: models[family])


llama, qwen, deep, qwen_moe = map(saved, ("llama", "qwen2-tied", "deep", "qwen3-moe"))
