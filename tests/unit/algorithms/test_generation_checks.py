"""What generation by the policy's own workers cannot be combined with."""

from __future__ import annotations

import pytest

from nemo_rl.algorithms.setup.placement import describe_placement
from nemo_rl.config.errors import ConfigError
from tests.unit.config.run_configs import build

HF = "policy.generation.backend=hf"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["policy.dtensor_cfg.context_parallel_size=2"], "sequences cut over ranks"),
        (["policy.dtensor_cfg.pipeline_parallel_size=2"], "pipeline stages"),
        (["policy.dtensor_cfg.expert_parallel_size=2"], "experts on different ranks"),
        (
            ["policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.sequence_parallel=true"],
            "single tokens cut over ranks",
        ),
        (["policy.generation.vllm_cfg.tensor_parallel_size=2"], "cut as policy.dtensor_cfg says"),
        (["policy.generation.vllm_cfg.precision=bfloat16"], "in policy.precision=float32"),
        (["+policy.generation.vllm_kwargs.block_size=32"], "know none of {.block_size.: 32}"),
        (["grpo.async_grpo.enabled=true"], "nothing samples while the policy trains"),
    ],
)
def test_it_is_refused_by_name_before_anything_starts(changes: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(HF, "cluster.gpus_per_node=0", "cluster.cpu_workers_per_node=2", "policy.precision=float32", *changes)


def test_data_and_tensor_parallel_layouts_are_not() -> None:
    config = build(
        HF, "cluster.gpus_per_node=0", "cluster.cpu_workers_per_node=4", "policy.dtensor_cfg.tensor_parallel_size=2"
    )
    assert "by the policy's own workers" in describe_placement(config)
