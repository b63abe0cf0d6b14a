"""A random model of every family on disk, for tests that only read them."""

from pathlib import Path

import pytest

from tests.unit.policy.megatron.hf_models import FAMILIES, random_model


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, directory in directories.items():
        random_model(name).save_pretrained(directory)
    return directories
