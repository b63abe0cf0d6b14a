"""Overrides in Hydra's grammar."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.algorithms.config.grpo import GRPOMasterConfig
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from tests.tables import lines
from tests.unit.config.run_configs import MINIMAL, build, problems_of


def value_of(key: str, *overrides: str) -> Any:
    value: Any = build(*overrides).model_dump()
    for part in key.split("."):
        value = value[int(part) if part.isdigit() else part]
    return value


MERGED = {"lr": 1.0, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}  # as in Hydra


@pytest.mark.parametrize(
    ("key", "override", "value"),
    [
        ("grpo.seed", "++grpo.seed=7", 7),
        ("grpo.seed", "+grpo.seed=7", 7),  # the file does not mention it
        ("policy.max_grad_norm", "policy.max_grad_norm=null", None),
        ("policy.model_name", "policy.model_name='a, b=c'", "a, b=c"),
        ("policy.generation.stop_strings", "policy.generation.stop_strings=['</a>',b]", ["</a>", "b"]),
        ("policy.optimizer.kwargs", "policy.optimizer.kwargs.lr=1e-4", {**MERGED, "lr": 1e-4}),
        ("policy.optimizer.kwargs.amsgrad", "+policy.optimizer.kwargs.amsgrad=true", True),
        ("policy.optimizer.kwargs", "policy.optimizer.kwargs={lr: 1.0}", MERGED),
        ("policy.dtensor_cfg.env_vars", "+policy.dtensor_cfg.env_vars.OMP_NUM_THREADS='1'", {"OMP_NUM_THREADS": "1"}),
        ("data.train.0.split", "data.train.split=test", "test"),
        ("env.math.num_workers", "env.math.num_workers=2", 2),
        ("env.maze.type", "+env.maze.size=3", "maze"),
    ],
)
def test_values(key: str, override: str, value: Any) -> None:
    assert value_of(key, override) == value


def test_the_last_override_wins_lists_can_be_indexed_and_deleting_goes_back_or_removes_an_entry() -> None:
    datasets = "data.train=[{dataset_name: a, split_validation_size: 0.1},{dataset_name: b}]"
    assert value_of("data.train.1.dataset_name", datasets, "data.train.1.dataset_name=c") == "c"
    assert value_of("grpo.seed", "grpo.seed=1", "grpo.seed=2") == 2
    assert value_of("grpo.seed", "grpo.seed=1", "~grpo.seed") == 42
    assert "eps" not in value_of("policy.optimizer.kwargs", "~policy.optimizer.kwargs.eps")


# The last ones are like no other key; `policy.generation.rank` has the letters of data.train, not its meaning.
MISTAKES = """
grpo.ratio_clip_min=0.1 -> unknown key; the nearest valid key is loss_fn.ratio_clip_min
loss_fn.ratio_clip_mim=1 -> unknown key; the nearest valid key is loss_fn.ratio_clip_min
cluster.num_of_nodes=1 -> unknown key; the nearest valid key is cluster.num_nodes
policy.temperature=1 -> unknown key; the nearest valid key is policy.generation.temperature
checkpoint.enabled=true -> unknown key; the nearest valid key is checkpointing.enabled
+grpo.sed=1 -> unknown key; the nearest valid key is grpo.seed
~grpo.sed -> unknown key; the nearest valid key is grpo.seed
env.mth.num_workers=1 -> no such entry, the nearest is env.math.num_workers; to add it, write +env.mth.num
grpo.seed=1,2 -> one value at a time
~grpo.seed=3 -> is 42, not 3
policy.train_micro_batch_size=x -> must be a valid integer (got x)
policy=null -> must be a section with keys (got null)
grpo.seed -> write section.key=value
grpo.seed.x=1 -> unknown key
+grpo.seed.x=1 -> goes through a value that is not a section
data.train@x=1 -> '@' has no meaning here
policy.generation.rank=1 -> unknown key; policy.generation has backend, max_new_tokens,
data.train.0.zzz=1 -> unknown key; data.train has dataset_name, data_path,
"""


@pytest.mark.parametrize(("override", "message"), lines(MISTAKES))
def test_mistakes(override: str, message: str) -> None:
    error = problems_of(override)
    assert error.startswith(f"command line: {override}: ")
    assert message in error


def test_adding_what_a_file_has_already_says_where(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(MINIMAL | {"grpo": {"seed": 1}}))
    with pytest.raises(ConfigError, match=r"already set \(.*run.yaml:\d+\); drop the '\+'"):
        load_config(GRPOMasterConfig, tmp_path / "run.yaml", ["+grpo.seed=2"])


def test_all_mistakes_are_reported_together() -> None:
    assert problems_of("grpo.sed=1", "grpo.seed=x", "grpo.val_period=[").startswith("3 problems:")
