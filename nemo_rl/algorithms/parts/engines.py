"""The engines of a run that samples, the policy that fills them, and the sync between the two."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.parts.devices import Devices, RolloutDevices
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.algorithms.run import Run
from nemo_rl.models.generation.interfaces import GENERATION, EngineSettings, GenerationInterface
from nemo_rl.models.generation.replicas import EngineGeneration, engines_of
from nemo_rl.models.policy.attention import can_share_prompts
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.refit.layout import NUM_HALVES, Rendezvous
from nemo_rl.refit.sync import REFIT, Refit, WeightSync
from nemo_rl.types import SamplingParams

# Of the timeout of a worker: the rendezvous reports its missing member before the group counts as hanging.
_RENDEZVOUS_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class PolicyAndEngines:
    """The policy, the generation that samples from its weights, and what brings the weights there."""

    policy: Policy
    generation: GenerationInterface | None  # None: the rollouts are recorded ones
    refit: WeightSync

    @staticmethod
    def start[ConfigT: RolloutMasterConfig](
        run: Run[ConfigT], model: Model, devices: RolloutDevices, sampling: SamplingParams
    ) -> "PolicyAndEngines":
        """Start what the configuration asks for: engines, a policy that generates by itself, or no generation."""
        config = run.config
        start_policy = partial(
            model.start,
            run,
            config.policy,
            devices.training,
            sampling=sampling,
            init_reference_model=config.rollout.uses_reference,
        )
        if config.rollout.replay_from is not None:
            from nemo_rl.rollouts.replay import NoWeightSync

            return PolicyAndEngines(policy=start_policy(), generation=None, refit=NoWeightSync())
        if config.policy.generation.is_by_policy:
            return start_self_generation(run, start_policy, devices)
        return start_with_engines(run, model, start_policy, devices)


def start_with_engines[ConfigT: RolloutMasterConfig](
    run: Run[ConfigT], model: Model, start_policy: Callable[[], Policy], devices: RolloutDevices
) -> PolicyAndEngines:
    """Start the policy, engines, and the sync between them. All end with the run."""
    config, training = run.config, devices.training
    draft = None
    if config.policy.draft.enabled:
        from nemo_rl.models.policy.dtensor.draft import draft_config

        draft = draft_config(config.policy, model.config)

    engine_class = engines_of(config.policy.generation.backend)

    def start_engines() -> EngineGeneration:
        generation = engine_class(
            devices.generation.cluster,
            EngineSettings(
                model=model.model_path,
                tokenizer=model.tokenizer_path,
                cfg=config.policy.generation,
                seed=config.rollout.seed,
                hf_overrides=config.policy.hf_config_overrides,
                can_share_prompts=can_share_prompts(model.config),
                return_routed_experts=config.policy.router_replay.enabled,
                max_images=config.data.max_images if model.processor_path is not None else None,
                draft=draft,
            ),
            accelerator=devices.generation.accelerator,
            timeout_s=config.cluster.worker_timeout_s,
        )
        run.stack.callback(generation.shutdown)
        return generation

    if training.accelerator.exclusive and devices.generation is training:
        # The engine first: it measures the free memory of a device that is not in use yet.
        generation = start_engines()
        training.accelerator.release(GENERATION)
        policy = start_policy()
    else:
        with ThreadPoolExecutor(max_workers=1) as threads:
            engines = threads.submit(start_engines)
            policy = start_policy()
            generation = engines.result()
    refit = make_refit(config, policy, generation, training, devices.generation)
    return PolicyAndEngines(policy=policy, generation=generation, refit=refit)


def make_refit(
    config: RolloutMasterConfig, policy: Policy, generation: EngineGeneration, training: Devices, devices: Devices
) -> Refit:
    """The sync of weights from the devices of training to the `devices` of generation."""
    settings, accelerator = config.policy.generation, training.accelerator

    # During a refit the weights of both are on the device; the optimizer state and the KV cache are not.
    def wake_both() -> None:
        policy.onload(with_optimizer=False)
        generation.onload(["weights"])

    def keep_weights() -> None:  # after training they are where the refit reads them
        policy.offload(with_weights=False)
        generation.onload(["weights"])

    def meet() -> Rendezvous:
        timeout_s = _RENDEZVOUS_SHARE * config.cluster.worker_timeout_s
        return Rendezvous(address=policy.node_ip, num_receivers=generation.num_engine_ranks, timeout_s=timeout_s)

    if settings.colocated.enabled:
        accelerator.register(REFIT, wake_both, policy.offload, wake_after={policy.name_prefix: keep_weights})
    else:
        accelerator.register_alias(REFIT, policy.name_prefix)
    return Refit(
        policy,
        generation,
        accelerator,
        transport=generation.transport,
        wire_dtype=settings.engine.wire_dtype,
        bucket_bytes=int(config.policy.refit_buffer_size_gb * 2**30) // NUM_HALVES,
        rendezvous=None if settings.colocated.enabled else meet,
        recompute_kv_cache=config.recomputes_kv_cache,
        generation_accelerator=devices.accelerator,
    )


def start_self_generation[ConfigT: RolloutMasterConfig](
    run: Run[ConfigT], start_policy: Callable[..., Policy], devices: RolloutDevices
) -> PolicyAndEngines:
    """Start a policy that generates with its own workers. Its weights need no transfer: generation is its own sync."""
    from nemo_rl.models.generation.hf import HfGeneration
    from nemo_rl.models.policy.generate import SelfGeneratingPolicy

    config, training = run.config, devices.training
    policy = start_policy(policy_class=SelfGeneratingPolicy)
    assert devices.generation is training and isinstance(policy, SelfGeneratingPolicy)
    generation = HfGeneration(
        training.cluster,
        policy,
        max_model_len=config.policy.generation.engine.longest_sequence,
        length_key=config.policy.generation.key(config.policy.generation.length_path),
        max_batch_size=config.policy.generation.own_batch_size,
        timeout_s=config.cluster.worker_timeout_s,
    )
    run.stack.callback(generation.shutdown)
    training.accelerator.register_alias(GENERATION, policy.name_prefix, on_release=generation.rest)
    generation.prepare()
    return PolicyAndEngines(policy=policy, generation=generation, refit=generation)
