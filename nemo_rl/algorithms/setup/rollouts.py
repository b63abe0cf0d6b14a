"""From a configuration to the running parts of an algorithm that samples."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.setup import preflight
from nemo_rl.algorithms.setup.launch import Devices, RunInputs, launch, start_devices, start_policy
from nemo_rl.algorithms.setup.rollout_parts import sampling_params, worker_settings
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts, RolloutTrainer
from nemo_rl.algorithms.trainers.trainer import RunTools
from nemo_rl.data.rows.dataloader import PromptDataLoader, prompt_loader
from nemo_rl.data.rows.setup import DataSetup, PromptProcessor, setup_data
from nemo_rl.environments.registry import create_envs, end_envs, wait_for_envs
from nemo_rl.models.generation.interfaces import GENERATION, EngineSettings
from nemo_rl.models.generation.vllm.generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.vision.families import image_token_id
from nemo_rl.refit.layout import NUM_HALVES, Rendezvous
from nemo_rl.refit.sync import REFIT, Refit
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.episode import EpisodeLimits
from nemo_rl.rollouts.rollout_worker import RolloutWorkerSettings
from nemo_rl.types import SamplingParams
from nemo_rl.utils.registry import import_object
from nemo_rl.utils.seeds import seed_everything

# Imported in runs whose policy generates.
SELF_GENERATION = "nemo_rl.models.generation.hf:HfGeneration"
SELF_GENERATING = "nemo_rl.models.policy.generate:SelfGeneratingPolicy"
# Imported in runs that record, or train from a record.
RECORDER, REPLAY = "nemo_rl.algorithms.trainers.rollout_recorder", "nemo_rl.rollouts.replay"
OPENAI_SERVER = "nemo_rl.algorithms.setup.serve:start_openai_server"  # imported in runs that have the server
# Of the timeout of a worker: the rendezvous reports its missing member before the group counts as hanging.
_RENDEZVOUS_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class RolloutInputs(RunInputs):
    """The checked parts of a run that samples."""

    data: DataSetup
    process: PromptProcessor
    prompts: PromptDataLoader
    sampling: SamplingParams  # in training


@dataclass(frozen=True, kw_only=True)
class RolloutSetup[InputsT: RolloutInputs]:
    """Running parts, which end with the stack, and the devices on which further worker groups can start."""

    stack: ExitStack
    inputs: InputsT
    parts: RolloutParts
    training: Devices
    generation: Devices


def prepare_rollouts(config: RolloutMasterConfig, own_identity: Mapping[str, Any] | None = None) -> RolloutInputs:
    """Load and check the parts that need no worker.

    Args:
        own_identity: further values that a run of this algorithm must share with a checkpoint that it continues.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: with the key to change.
    """
    rollout, section = config.rollout, config.section
    seed_everything(rollout.seed)
    model = preflight.prepare_model(config.policy, config.checkpointing)
    data = setup_data(config.data)
    preflight.check_environments(config.env, data.task_to_env.values(), starts=rollout.replay_from is None)
    prompts = prompt_loader(
        config.data.custom_dataloader,
        data.train,
        rollout.num_prompts_per_batch,
        shuffle=config.data.shuffle,
        seed=rollout.seed,
        size_key=f"{section}.num_prompts_per_step",
    )
    images = preflight.image_reader(model.processor_path, config.data.max_images)
    process = PromptProcessor(data.tasks, model.tokenizer, config.data.max_input_seq_length, images)
    preflight.check_turns(config, model.tokenizer)
    preflight.check_prompts(process, data.train, "training", config.policy.key("max_total_sequence_length"))
    preflight.check_metadata(config, data, process)
    if data.validation is not None and rollout.validates:
        preflight.check_prompts(process, data.validation, "validation", config.policy.key("max_total_sequence_length"))
    shape = {
        "seed": rollout.seed,
        "num_prompts_per_step": rollout.num_prompts_per_step,
        "num_generations_per_prompt": rollout.num_generations_per_prompt,
    }
    identity = {**model.identity, "data.train": data.train.fingerprint(), section: shape, **(own_identity or {})}
    if rollout.replay_from is not None:
        import_object(f"{RECORDER}:check_record", "replay_from")(config, identity)
        identity[f"{section}.replay_from"] = str(Path(rollout.replay_from).absolute())
    if rollout.rollout_record.enabled:
        import_object(f"{RECORDER}:check_record_folder", "rollout_record")(config, identity)
        preflight.check_writable(Path(rollout.rollout_record.save_dir), f"{section}.rollout_record.save_dir")
    preflight.check_outputs(config, config.policy, model.config, identity)
    if config.policy.generation.vllm_cfg.expose_http_server:
        preflight.http_server_token(config.policy.generation.vllm_cfg.http_server)
    sampling = sampling_params(config.policy.generation, model.tokenizer)
    return RolloutInputs(model=model, data=data, process=process, prompts=prompts, sampling=sampling, identity=identity)


def run_rollouts[ConfigT: RolloutMasterConfig, InputsT: RolloutInputs](
    config: ConfigT,
    make_trainer: Callable[[RunTools, RolloutSetup[InputsT]], RolloutTrainer],
    prepare: Callable[[ConfigT], InputsT],
) -> int:
    """Train with this trainer, resumed if there is a checkpoint; returns the exit status (see `run_command`)."""

    def build(config: ConfigT, stack: ExitStack, tools: RunTools, inputs: InputsT) -> RolloutTrainer:
        setup = build_rollouts(config, stack, inputs)
        trainer = make_trainer(tools, setup)
        trainer.start()
        if config.policy.generation.vllm_cfg.expose_http_server:
            import_object(OPENAI_SERVER, "server")(config, tools, setup)
        return trainer

    return launch(config, prepare=prepare, build=build)


def build_rollouts[InputsT: RolloutInputs](
    config: RolloutMasterConfig, stack: ExitStack, inputs: InputsT
) -> RolloutSetup[InputsT]:
    """Start cluster, environments, engines, policy and rollout worker. All end with the stack."""
    rollout, model, sampled = config.rollout, inputs.model, config.policy.generation
    # On each bundle that generates: engine, rollout worker and, if it is enabled, the HTTP server.
    num_generating = 3 if sampled.vllm_cfg.expose_http_server else 2
    # The worker that reads a record runs beside the policy, as colocated generation does.
    is_colocated = sampled.colocated.enabled or rollout.replay_from is not None
    num_groups = 1 + num_generating * is_colocated + sum(not further.is_apart for further in config.further_models)
    training = generation_on = start_devices(
        config.training_cluster, stack, num_groups, config.section, take_turns=True
    )
    start_own_policy = partial(
        start_policy,
        config,
        config.policy,
        stack,
        model,
        training,
        sampling=inputs.sampling,
        init_reference_model=rollout.uses_reference,
    )
    settings = _settings_of_worker(config, inputs)
    timeout_s = config.cluster.worker_timeout_s
    if rollout.replay_from is not None:
        policy, generation = start_own_policy(), None
        refit = import_object(f"{REPLAY}:NoWeightSync", "grpo.replay_from")()
        rollouts: RolloutCollector = import_object(f"{REPLAY}:RecordedRollouts", "grpo.replay_from")(
            training.cluster,
            settings(environments={}),
            training.accelerator,
            root=Path(rollout.replay_from),
            timeout_s=timeout_s,
        )
    else:
        if not sampled.colocated.enabled:
            generation_on = start_devices(
                config.generation_cluster, stack, num_generating, "generation", take_turns=False
            )
            generation_on.cluster.bundles()
        # Created first, so that they start while the models load.
        sections = preflight.sections_to_start(config.env, inputs.data.task_to_env.values())
        environments = create_envs(sections, training.cluster)
        stack.callback(end_envs, environments)
        training.cluster.bundles()  # booked once, before worker groups start in parallel
        with ThreadPoolExecutor(max_workers=1) as threads:
            starting = threads.submit(
                RolloutCollector,
                generation_on.cluster,
                settings(environments=environments),
                [],
                generation_on.accelerator,
                timeout_s=timeout_s,
            )
            start = start_self_generation if sampled.is_by_policy else start_vllm_generation
            policy, generation, refit = start(config, stack, model, start_own_policy, training, generation_on)
        wait_for_envs(environments, timeout_s)
        rollouts = starting.result()
        rollouts.use_generation(generation.workers)
    stack.callback(rollouts.shutdown)
    validation = inputs.data.validation if rollout.validates else None
    parts = RolloutParts(
        policy=policy,
        generation=generation,
        refit=refit,
        rollouts=rollouts,
        prompts=inputs.prompts,
        validation_prompts=validation.first(rollout.max_val_samples) if validation is not None else [],
        train_sampling=inputs.sampling,
        val_sampling=replace(
            inputs.sampling, temperature=sampled.val_temperature, top_p=sampled.val_top_p, top_k=sampled.val_top_k
        ),
        flops=model.flops,
    )
    return RolloutSetup(stack=stack, inputs=inputs, parts=parts, training=training, generation=generation_on)


def _settings_of_worker(config: RolloutMasterConfig, inputs: RolloutInputs) -> Callable[..., RolloutWorkerSettings]:
    """The settings of a rollout worker, but for its `environments`."""
    rollout, vllm, model = config.rollout, config.policy.generation.vllm_cfg, inputs.model.config
    return partial(
        worker_settings,
        inputs.process,
        env=config.env,
        limits=EpisodeLimits(
            max_turns=rollout.max_rollout_turns,
            max_total_tokens=vllm.max_model_len,
            timeout_s=rollout.episode_timeout_s,
            image_token_id=image_token_id(model),
        ),
        env_step_timeout_s=rollout.env_step_timeout_s,
        worker_timeout_s=config.cluster.worker_timeout_s,
        seed=rollout.seed,
        model_name=config.policy.model_name,
        vocab_size=model.get_text_config().vocab_size,
        vllm=vllm,
    )


def start_vllm_generation(
    config: RolloutMasterConfig,
    stack: ExitStack,
    model: preflight.ModelInputs,
    start_own_policy: Callable[[], Policy],
    training: Devices,
    devices: Devices,
) -> tuple[Policy, VllmGeneration, Refit]:
    """Start the policy, engines on `devices`, and the sync between them. All end with the stack."""
    draft = None
    if config.policy.draft.enabled:
        draft = import_object(preflight.DRAFT_CONFIG, "policy.draft")(config.policy, model.config)

    def start_engines() -> VllmGeneration:
        generation = VllmGeneration(
            devices.cluster,
            EngineSettings(
                model=model.model_path,
                tokenizer=model.tokenizer_path,
                cfg=config.policy.generation,
                seed=config.rollout.seed,
                hf_overrides=config.policy.hf_config_overrides,
                return_routed_experts=config.policy.router_replay.enabled,
                max_images=config.data.max_images if model.processor_path is not None else None,
                draft=draft,
            ),
            accelerator=devices.accelerator,
            timeout_s=config.cluster.worker_timeout_s,
        )
        stack.callback(generation.shutdown)
        return generation

    if training.accelerator.exclusive and devices is training:
        # The engine first: it measures the free memory of a device that is not in use yet.
        generation = start_engines()
        training.accelerator.release(GENERATION)
        policy = start_own_policy()
    else:
        with ThreadPoolExecutor(max_workers=1) as threads:
            engines = threads.submit(start_engines)
            policy = start_own_policy()
            generation = engines.result()
    return policy, generation, _make_refit(config, policy, generation, training, devices)


def _make_refit(
    config: RolloutMasterConfig, policy: Policy, generation: VllmGeneration, training: Devices, devices: Devices
) -> Refit:
    settings, accelerator, rendezvous = config.policy.generation, training.accelerator, None

    # During a refit the weights of both are on the device; the optimizer state and the KV cache are not.
    def wake_both() -> None:
        policy.onload(with_optimizer=False)
        generation.onload(["weights"])

    def keep_weights() -> None:  # after training they are where the refit reads them
        policy.offload(with_weights=False)
        generation.onload(["weights"])

    if settings.colocated.enabled:
        accelerator.register(REFIT, wake_both, policy.offload, wake_after={policy.name_prefix: keep_weights})
    else:
        accelerator.register_alias(REFIT, policy.name_prefix)
        rendezvous = Rendezvous(
            address=training.cluster.bundles()[0].node_ip,
            num_receivers=generation.num_engine_ranks,
            timeout_s=_RENDEZVOUS_SHARE * config.cluster.worker_timeout_s,
        )
    return Refit(
        policy,
        generation,
        accelerator,
        transport=generation.transport,
        wire_dtype=settings.vllm_cfg.dtype,
        bucket_bytes=int(config.policy.refit_buffer_size_gb * 2**30) // NUM_HALVES,
        rendezvous=rendezvous,
        recompute_kv_cache=config.recomputes_kv_cache,
        generation_accelerator=devices.accelerator,
    )


def start_self_generation(
    config: RolloutMasterConfig,
    stack: ExitStack,
    model: preflight.ModelInputs,
    start_own_policy: Callable[..., Policy],
    training: Devices,
    devices: Devices,
) -> tuple[Policy, Any, Any]:
    """Start a policy that generates with its own workers. Its weights need no transfer: generation is its own sync."""
    policy = start_own_policy(policy_class=import_object(SELF_GENERATING, "policy"))
    assert devices is training
    generation = import_object(SELF_GENERATION, "generation")(
        training.cluster,
        policy,
        max_model_len=config.policy.generation.vllm_cfg.max_model_len,
        max_batch_size=config.policy.generation.own_batch_size,
        timeout_s=config.cluster.worker_timeout_s,
    )
    stack.callback(generation.shutdown)
    training.accelerator.register_alias(GENERATION, policy.name_prefix, on_release=generation.rest)
    generation.prepare()
    return policy, generation, generation
