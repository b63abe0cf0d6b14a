"""The number of CPU workers of a run to which nobody gives one: by cores, rules, memory, and the checkpoint."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from nemo_rl.algorithms.config import workers
from nemo_rl.algorithms.config.supervised import DPOMasterConfig
from nemo_rl.algorithms.parts.placement import describe_evaluation, describe_placement, memory_of_cpu_run
from nemo_rl.algorithms.parts.workers import fit_workers
from nemo_rl.config.loader import dump_config, load_config
from nemo_rl.config.sources import load_tree
from nemo_rl.evals.config import EvalMasterConfig
from tests.unit.config.run_configs import CONFIGS, build, problems_of

CPU = ("cluster.gpus_per_node=0", "policy.precision=float32")
TINY = "model_name=tiny:arithmetic"


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Gives this machine another number of cores."""
    return lambda number: monkeypatch.setattr(workers, "physical_cores", lambda: number)


def test_there_are_as_many_as_cores_and_the_dump_has_the_number(cores: Callable[[int], None]) -> None:
    for number, told in ((4, "one for each of 4 physical cores"), (1, "this machine has one physical core")):
        cores(number)
        config = build(*CPU)
        assert config.cluster.workers_per_node == number
        assert config.workers_line == f"cluster.cpu_workers_per_node={number}: {told}"
        assert yaml.safe_load(dump_config(config))["cluster"]["cpu_workers_per_node"] == number


@pytest.mark.parametrize(
    ("overrides", "number", "limit"),
    [
        (("policy.train_global_batch_size=8", "policy.train_micro_batch_size=2"), 4, "with 5, policy.train_global_ba"),
        (("policy.dtensor_cfg.tensor_parallel_size=3", "policy.generation.vllm_cfg.tensor_parallel_size=3",
          "policy.train_global_batch_size=32"), 3, "with 4, policy.dtensor_cfg.tensor"),
    ],
)  # fmt: skip
def test_no_more_than_share_the_batches_and_fit_the_layout(
    cores: Callable[[int], None], overrides: tuple[str, ...], number: int, limit: str
) -> None:
    cores(5)
    config = build(*CPU, *overrides)
    assert config.cluster.workers_per_node == number
    line = config.workers_line
    assert line is not None and line.startswith(f"cluster.cpu_workers_per_node={number}: {limit}") and ";" not in line


def test_a_given_number_and_gpus_leave_nothing_to_choose(cores: Callable[[int], None]) -> None:
    cores(5)
    given, gpus = build(*CPU, "cluster.cpu_workers_per_node=2"), build()
    assert given.cluster.workers_per_node == 2 and gpus.cluster.workers_per_node == 1
    assert given.workers_line is None and gpus.workers_line is None


def test_a_mistake_is_told_as_of_one_worker(cores: Callable[[int], None]) -> None:
    mistake = (*CPU, "policy.train_global_batch_size=500")
    apart = (*CPU, "policy.generation.colocated={enabled: false, resources: {cpu_workers_per_node: 1}}")
    cores(4)
    assert problems_of(*mistake) == problems_of(*mistake, "cluster.cpu_workers_per_node=1")
    assert build(*apart).training_cluster.workers_per_node == 2  # and 1 generates: 3 ranks cannot share the batch
    cores(1)
    assert "cluster.cpu_workers_per_node=2" in problems_of(*apart)


def test_a_run_that_resumes_keeps_the_number_of_its_checkpoint(cores: Callable[[int], None]) -> None:
    cores(4)
    saved = build(*CPU).model_dump()
    cores(8)
    now = build(*CPU)
    kept, told = now.continuing(saved)
    assert kept.cluster.workers_per_node == 4 and kept.workers_line is not None and not told
    assert kept.workers_line.endswith("=4: as many as in the checkpoint") and kept == build(
        *CPU, "cluster.cpu_workers_per_node=4"
    )
    given = build(*CPU, "cluster.cpu_workers_per_node=2").continuing(saved)[0]
    assert given.cluster.workers_per_node == 2 and given.workers_line is None
    assert now.continuing(build().model_dump())[0].cluster.workers_per_node == 8, "of GPUs there is none to keep"
    cores(2)
    assert build(*CPU).continuing(saved)[0].cluster.workers_per_node == 2, "this machine has not as many cores"


def test_memory_limits_them_and_an_unknown_model_does_not(cores: Callable[[int], None]) -> None:
    cores(4)
    for config in (
        build(*CPU, f"policy.{TINY}"),
        load_config(DPOMasterConfig, CONFIGS / "dpo_pretrained.yaml", [f"policy.{TINY}"]),
        load_config(EvalMasterConfig, CONFIGS / "evals" / "eval_pretrained.yaml", [f"generation.{TINY}"]),
    ):
        assert config.cluster.workers_per_node == 4
        needs: list[float] = []
        for number in (1, 2, 4):
            need = memory_of_cpu_run(config.with_workers(number, ""))
            assert need is not None
            needs.append(need)
        assert needs == sorted(needs)
        fitted: dict[int, Any] = {
            index: fit_workers(config, available=math.ceil(need)) for index, need in enumerate(needs)
        }
        assert fitted[2].cluster == fit_workers(config, available=2**60).cluster == config.cluster
        assert fitted[1].cluster.workers_per_node == 2 and fitted[0].cluster.workers_per_node == 1
        assert fitted[0].workers_line.startswith("cluster.cpu_workers_per_node=1: with 2, the run needs ")
        given = config.with_workers(4, "")
        given.cluster._reason = None
        assert fit_workers(given, available=1) is given
    unknown = build(*CPU)
    assert fit_workers(unknown, available=1) is unknown


def test_a_dry_run_tells_the_number(cores: Callable[[int], None]) -> None:
    cores(3)
    training = build(*CPU, f"policy.{TINY}")
    evaluation = load_config(
        EvalMasterConfig,
        CONFIGS / "evals" / "eval_pretrained.yaml",
        [f"generation.{TINY}", "data.dataset_name=arithmetic"],
    )
    assert evaluation.cluster.workers_per_node == 3
    for text, config in ((describe_placement(training), training), (describe_evaluation(evaluation), evaluation)):
        assert text.splitlines()[0] == config.workers_line


def test_shipped_configurations_of_toys_name_their_number_and_those_of_a_pretrained_model_none() -> None:
    two = {"grpo_math_cpu_split.yaml", "grpo_math_async_cpu.yaml"}
    for path in CONFIGS.rglob("*.yaml"):
        given = load_tree(path).values.get("cluster", {}).get("cpu_workers_per_node")
        if "_cpu" in path.name:
            assert given == 1 + (path.name in two), path.name
        elif path.name.endswith("_pretrained.yaml"):
            assert given is None, path.name
