"""The bundles of a run and the workers of its policies, as the configuration wants them."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from nemo_rl.algorithms.config.loop import RunConfig
from nemo_rl.algorithms.setup.model_inputs import ModelInputs
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.types import SamplingParams

logger = logging.getLogger(__name__)


def start_cluster(config: RunConfig, stack: ExitStack, groups_per_bundle: int) -> RayVirtualCluster:
    """The bundles that train: one per GPU, or per CPU worker."""
    return start_machines(config.training_cluster, stack, groups_per_bundle, config.section)


def start_machines(cluster: ClusterConfig, stack: ExitStack, groups_per_bundle: int, name: str) -> RayVirtualCluster:
    """Bundles of the run or, under a name of their own, of a part of it."""
    return stack.enter_context(
        RayVirtualCluster(
            [cluster.workers_per_node] * cluster.num_nodes,
            use_gpus=cluster.use_gpus,
            max_colocated_worker_groups=groups_per_bundle,
            num_gpus_per_node=cluster.gpus_per_node,
            name=name,
        )
    )


def start_policy(
    run: RunConfig,
    config: PolicyConfig,
    stack: ExitStack,
    model: ModelInputs,
    cluster: RayVirtualCluster,
    accelerator: Accelerator,
    *,
    seed: int,
    sampling: SamplingParams | None = None,
    name: str = "policy",
    init_optimizer: bool = True,
    init_reference_model: bool = False,
    machines: ClusterConfig | None = None,
    policy_class: type[Policy] = Policy,
) -> Policy:
    """The workers of a policy, of a critic (`value`) or of a teacher, ended with the stack.

    Whoever is on the devices leaves them first. Without `sampling`, logprobs are those of temperature 1. `machines` are
    what `cluster` was made of where it is not that which trains. `policy_class` may be one that can do more.
    """
    machines = machines or run.training_cluster
    if accelerator.present is not None:
        accelerator.release(accelerator.present)
    policy = policy_class(
        cluster,
        config,
        model.tokenizer,
        accelerator,
        model_path=model.model_path,
        sampling=sampling or SamplingParams(max_new_tokens=1),
        seed=seed,
        use_gpu=machines.use_gpus,
        workers_per_node=machines.workers_per_node,
        timeout_s=machines.worker_timeout_s,
        name_prefix=name,
        checkpoint_folder=name,
        init_optimizer=init_optimizer,
        init_reference_model=init_reference_model,
    )
    stack.callback(policy.shutdown)
    if config.megatron_cfg.enabled and not machines.use_gpus:
        logger.info("%s: Megatron Core on the CPU, with host stand-ins for torch.cuda", name)
    return policy
