"""A policy that generates with its own workers: how it is started, and what it cannot be combined with."""

from __future__ import annotations

from contextlib import ExitStack

from nemo_rl.algorithms.model_inputs import ModelInputs
from nemo_rl.algorithms.rollout_config import RolloutMasterConfig
from nemo_rl.algorithms.worker_setup import start_policy
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.hf_generation import HfGeneration, SharedWeights
from nemo_rl.models.generation.interfaces import TENANT as GENERATION
from nemo_rl.models.policy.generating_policy import GeneratingPolicy
from nemo_rl.types import SamplingParams


def start_hf_generation(
    config: RolloutMasterConfig,
    stack: ExitStack,
    model: ModelInputs,
    cluster: RayVirtualCluster,
    accelerator: Accelerator,
    *,
    sampling: SamplingParams,
    init_reference_model: bool,
) -> tuple[GeneratingPolicy, HfGeneration, SharedWeights]:
    """The policy, generation by its workers, and the sync of weights between them; all end with the stack."""
    policy = start_policy(
        config,
        config.policy,
        stack,
        model,
        cluster,
        accelerator,
        seed=config.rollout.seed,
        sampling=sampling,
        init_reference_model=init_reference_model,
        policy_class=GeneratingPolicy,
    )
    assert isinstance(policy, GeneratingPolicy)
    generation = HfGeneration(
        cluster,
        policy,
        max_model_len=config.policy.generation.vllm_cfg.max_model_len,
        timeout_s=config.cluster.worker_timeout_s,
    )
    stack.callback(generation.shutdown)
    accelerator.register_guest(GENERATION, policy.tenant, on_leave=generation.rest)
    weights = SharedWeights(generation)
    weights.prepare()
    return policy, generation, weights
