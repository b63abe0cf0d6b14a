"""A policy that generates with its own workers: how it is started, and what it cannot be combined with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.setup.model_inputs import ModelInputs
from nemo_rl.algorithms.setup.workers import start_machines, start_policy
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.hf import HfGeneration, SharedWeights
from nemo_rl.models.generation.interfaces import GENERATION
from nemo_rl.models.generation.vllm.generation import VllmGeneration, weight_transfer_backend
from nemo_rl.models.policy.lm_policy import Policy, SelfGeneratingPolicy
from nemo_rl.refit.layout import NUM_HALVES, Rendezvous
from nemo_rl.refit.sync import TENANT as REFIT
from nemo_rl.refit.sync import Refit
from nemo_rl.types import SamplingParams

# -- Policy, vLLM engines and the way of weights between them: on the same devices in turns, or each on its own.

_MEMBER_SHARE = 0.9  # of the limit for a worker: a member of a group tells what is missing before it counts as hanging


def num_generation_groups(config: RolloutMasterConfig) -> int:
    """On each bundle that generates: an engine and, on one of them, the rollout worker and the server for agents."""
    return 3 if config.policy.generation.vllm_cfg.expose_http_server else 2


@dataclass(frozen=True, kw_only=True)
class Place:
    """The bundles of something, and who is on their devices."""

    cluster: RayVirtualCluster
    accelerator: Accelerator


def generation_place(config: RolloutMasterConfig, stack: ExitStack, policy: Place) -> Place:
    """Where engines and the rollout worker are: with the policy, or on bundles that are booked here."""
    if config.policy.generation.colocated.enabled:
        return policy
    cluster = start_machines(config.generation_cluster, stack, num_generation_groups(config), "generation")
    cluster.bundles()
    return Place(cluster=cluster, accelerator=Accelerator(exclusive=False))  # nobody else: it is never evicted


def start_vllm_generation(
    config: RolloutMasterConfig,
    stack: ExitStack,
    model: ModelInputs,
    cluster: RayVirtualCluster,
    accelerator: Accelerator,
    *,
    place: Place,
    sampling: SamplingParams,
    init_reference_model: bool,
) -> tuple[Policy, VllmGeneration, Refit]:
    """Policy on `cluster`, engines at `place`, and the sync between them; all end with the stack."""

    def start_engines() -> VllmGeneration:
        generation = VllmGeneration(
            place.cluster,
            config.policy.generation,
            model=model.model_path,
            tokenizer=model.tokenizer_path,
            seed=config.rollout.seed,
            section=config.section,
            hf_overrides=config.policy.hf_config_overrides,
            accelerator=place.accelerator,
            timeout_s=config.cluster.worker_timeout_s,
            return_routed_experts=config.policy.router_replay.enabled,
        )
        stack.callback(generation.shutdown)
        return generation

    def start_trainers() -> Policy:
        return start_policy(
            config,
            config.policy,
            stack,
            model,
            cluster,
            accelerator,
            seed=config.rollout.seed,
            sampling=sampling,
            init_reference_model=init_reference_model,
        )

    if place.cluster is cluster:
        # The engine first: it measures the free memory of a device that nobody else uses yet.
        generation = start_engines()
        accelerator.release(GENERATION)
        policy = start_trainers()
    else:
        with ThreadPoolExecutor(max_workers=1) as threads:
            engines = threads.submit(start_engines)
            policy = start_trainers()
            generation = engines.result()
    own = Place(cluster=cluster, accelerator=accelerator)
    return policy, generation, _make_refit(config, policy, generation, own, place)


def _make_refit(
    config: RolloutMasterConfig, policy: Policy, generation: VllmGeneration, own: Place, place: Place
) -> Refit:
    """`own`: the policy's place; `place`: that of generation."""
    settings, accelerator, rendezvous = config.policy.generation, own.accelerator, None

    # During a refit both sides' weights are on the device; neither the optimizer state nor the KV cache is.
    def onload_both() -> None:
        policy.onload_weights()
        generation.onload(["weights"])

    if settings.colocated.enabled:
        accelerator.register(REFIT, onload=onload_both, offload=policy.offload)
    else:
        accelerator.register_guest(REFIT, policy.tenant, on_leave=lambda: None)
        rendezvous = Rendezvous(
            address=own.cluster.bundles()[0].node_ip,
            num_receivers=generation.num_engine_ranks,
            timeout_s=_MEMBER_SHARE * config.cluster.worker_timeout_s,
        )
    return Refit(
        policy,
        generation,
        accelerator,
        transport=weight_transfer_backend(settings, use_gpus=config.cluster.use_gpus),
        wire_dtype=settings.vllm_cfg.dtype,
        bucket_bytes=int(config.policy.refit_buffer_size_gb * 2**30) // NUM_HALVES,
        rendezvous=rendezvous,
        recompute_kv_cache=config.recomputes_kv_cache,
        generation_accelerator=place.accelerator,
    )


def start_hf_generation(
    config: RolloutMasterConfig,
    stack: ExitStack,
    model: ModelInputs,
    cluster: RayVirtualCluster,
    accelerator: Accelerator,
    *,
    sampling: SamplingParams,
    init_reference_model: bool,
) -> tuple[SelfGeneratingPolicy, HfGeneration, SharedWeights]:
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
        policy_class=SelfGeneratingPolicy,
    )
    assert isinstance(policy, SelfGeneratingPolicy)
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
