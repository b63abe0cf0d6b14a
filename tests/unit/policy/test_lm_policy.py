"""Two groups of policy workers on one cluster: what one computes of a row, the other gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from transformers import AutoTokenizer

from nemo_rl.algorithms.plan.batch import Batching, plan_samples
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.policy.config import DTensorConfig
from nemo_rl.models.policy.head.tasks import Logprobs
from nemo_rl.models.policy.interfaces import PolicyWorkerSettings
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.types import BatchPlan, SamplingParams
from tests.unit.policy.models import save_model
from tests.unit.policy.steps import policy_config
from tests.unit.policy.test_rows import NUM_PAIRS, make_pairs

CONFIG: dict[str, Any] = {"train_global_batch_size": NUM_PAIRS, "train_micro_batch_size": 2}


@contextmanager
def two_policies(student: Path, teacher: Path, tokenizer: Path) -> Iterator[tuple[Policy, Policy]]:
    """A student on two data-parallel ranks and a teacher cut over two."""
    accelerator = Accelerator(exclusive=False)
    with ExitStack() as stack:
        cluster = stack.enter_context(
            RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2, name="policies")
        )
        made = []
        for name, path, cut in (
            ("policy", student, DTensorConfig()),
            ("teacher", teacher, DTensorConfig(tensor_parallel_size=2)),
        ):
            policy = Policy(
                cluster,
                policy_config(**CONFIG, dtensor_cfg=cut),
                AutoTokenizer.from_pretrained(tokenizer),
                accelerator,
                PolicyWorkerSettings(
                    model_path=str(path),
                    sampling=SamplingParams(max_new_tokens=1),
                    seed=0,
                    use_gpu=False,
                    workers_per_node=2,
                    folder=name,
                    init_optimizer=name == "policy",
                    init_reference_model=False,
                ),
                timeout_s=120,
            )
            stack.callback(policy.shutdown)
            made.append(policy)
        yield made[0], made[1]


def plan_for(policy: Policy, refs: list[ray.ObjectRef]) -> BatchPlan:
    return plan_samples(
        make_pairs()[0],
        refs,
        num_ranks=policy.data_parallel_size,
        global_batch_size=NUM_PAIRS,
        batching=Batching.of(policy.config, quadratic_weight=0.001, sequences_per_sample=2),
    )


@pytest.mark.slow
def test_a_column_goes_from_one_policy_to_another_whatever_their_layouts(
    ray_local: None, tmp_path: Path, tiny_model_dir: Path
) -> None:
    for seed, name in enumerate(("student", "teacher")):
        save_model("llama", tmp_path / name, seed=seed)
    refs = [ray.put(group) for group in make_pairs()[1]]
    with two_policies(tmp_path / "student", tmp_path / "teacher", tiny_model_dir) as (student, teacher):
        assert (student.data_parallel_size, teacher.data_parallel_size) == (2, 1)
        for policy in (student, teacher):
            policy.load(plan_for(policy, refs))
            policy.compute(Logprobs(), "prev_logprobs")
        sums = teacher.sum_column("prev_logprobs", "sum")
        own = student.sum_column("prev_logprobs", "sum")
        assert len(sums) == len(own) == 2 * NUM_PAIRS
        assert all(abs(sums[key] - own[key]) > 1e-3 for key in sums), "two models"

        before = student.controller_tensor_bytes + teacher.controller_tensor_bytes
        student.attach("teacher_logprobs", teacher.share("prev_logprobs"))
        assert student.sum_column("teacher_logprobs", "sum") == sums
        assert student.sum_column("prev_logprobs", "sum") == own
        assert student.controller_tensor_bytes + teacher.controller_tensor_bytes == before == 0
