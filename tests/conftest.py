"""Fixtures of the whole suite. The model hub is switched off before anything imports it: tests need no network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import pytest


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """One local Ray cluster for the session, started by the first test that asks. Logical CPUs are worker slots."""
    import ray

    from nemo_rl.distributed.virtual_cluster import start_local_ray

    start_local_ray(num_cpus=8, object_store_gb=1.0)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of tiny:arithmetic, in Hugging Face format, as every test finds it that names the model so."""
    from nemo_rl.data.tiny_model import resolve_model

    path = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(resolve_model("tiny:arithmetic"), path)
    return path
