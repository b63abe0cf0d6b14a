"""All that a run needs to sample: model, prompts and environments, checked; then policy, engines and rollout worker."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from nemo_rl.algorithms.config.rollout import RolloutMasterConfig
from nemo_rl.algorithms.parts.devices import RolloutDevices
from nemo_rl.algorithms.parts.engines import PolicyAndEngines
from nemo_rl.algorithms.parts.environments import Environments
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.algorithms.parts.prompts import Prompts
from nemo_rl.algorithms.parts.saves import Saves, check_writable
from nemo_rl.algorithms.parts.worker_settings import sampling_params, worker_settings
from nemo_rl.algorithms.run import Run
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts
from nemo_rl.environments.registry import wait_for_envs
from nemo_rl.models.generation.replicas import engines_of
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.vision.families import image_token_id
from nemo_rl.rollouts.collector import RolloutCollector
from nemo_rl.rollouts.episode import EpisodeLimits
from nemo_rl.rollouts.rollout_worker import RolloutWorkerSettings
from nemo_rl.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The checked parts of a run that samples. Nothing of them has a worker before `start`."""

    model: Model
    prompts: Prompts
    environments: Environments
    sampling: SamplingParams  # in training
    saves: Saves

    @classmethod
    def prepare(
        cls,
        config: RolloutMasterConfig,
        *,
        trained: Mapping[str, tuple[PolicyConfig, Model]] = MappingProxyType({}),
        untrained: Iterable[Model] = (),
    ) -> Self:
        """Load and check the parts.

        A run that continues a checkpoint must have the same models: the policy's, `trained` and `untrained`.

        Args:
            trained: further models that are trained, by their folder in a checkpoint.

        Raises:
            ValueError, FileNotFoundError, CheckpointError: with the key to change.
        """
        rollout, engine = config.rollout, config.policy.generation.engine
        model = Model.prepare(config.policy, config.checkpointing)
        starts = rollout.replay_from is None
        if starts and not config.policy.generation.is_by_policy:
            engine_class = engines_of(config.policy.generation.backend)
            engine_class.check(config.policy.generation, model.config, on_gpus=config.cluster.use_gpus)
        prompts = Prompts.prepare(config, model)
        environments = Environments.prepare(config.env, prompts.data.task_to_env.values(), starts=starts)
        environments.check_metadata(prompts.process, prompts.datasets())
        identity = model.identity | prompts.identity(config)
        for other in (*(found for _, found in trained.values()), *untrained):
            identity |= other.identity
        identity |= check_records(config, identity)
        saved = {"policy": (config.policy, model), **trained}
        configs = {folder: (policy, found.config) for folder, (policy, found) in saved.items()}
        saves = Saves.prepare(config, configs, identity)
        if engine.expose_http_server:
            from nemo_rl.algorithms.parts.server import http_server_token

            http_server_token(engine)
        sampling = sampling_params(config.policy.generation, model.tokenizer)
        return cls(model=model, prompts=prompts, environments=environments, sampling=sampling, saves=saves)

    def start[ConfigT: RolloutMasterConfig](self, run: Run[ConfigT], devices: RolloutDevices) -> RolloutParts:
        """Start environments, engines, policy and rollout worker. All end with the run."""
        config, sampled = run.config, run.config.policy.generation
        timeout_s = config.cluster.worker_timeout_s
        if config.rollout.replay_from is not None:
            from nemo_rl.rollouts.replay import RecordedRollouts

            parts = PolicyAndEngines.start(run, self.model, devices, self.sampling)
            collector: RolloutCollector = RecordedRollouts(
                devices.training.cluster,
                self.worker_settings(config, {}),
                devices.training.accelerator,
                root=Path(config.rollout.replay_from),
                timeout_s=timeout_s,
            )
        else:
            # Created first, so that they start while the models load.
            actors = self.environments.start(run, devices.training.cluster)
            devices.training.cluster.bundles()  # booked once, before worker groups start in parallel
            with ThreadPoolExecutor(max_workers=1) as threads:
                starting = threads.submit(
                    RolloutCollector,
                    devices.generation.cluster,
                    self.worker_settings(config, actors),
                    [],
                    devices.generation.accelerator,
                    timeout_s=timeout_s,
                )
                parts = PolicyAndEngines.start(run, self.model, devices, self.sampling)
            wait_for_envs(actors, timeout_s)
            collector = starting.result()
            assert parts.generation is not None
            collector.use_generation(parts.generation.workers)
        run.stack.callback(collector.shutdown)
        server = None
        if sampled.engine.expose_http_server:
            from nemo_rl.algorithms.parts.server import EngineServer

            assert parts.generation is not None, "the configuration was checked"
            server = EngineServer.start(run, self.model, self.sampling, parts.generation, devices.generation.cluster)
        validation, most = self.prompts.validation, config.rollout.max_val_samples
        return RolloutParts(
            policy=parts.policy,
            generation=parts.generation,
            refit=parts.refit,
            rollouts=collector,
            server=server,
            prompts=self.prompts.loader,
            validation_prompts=validation.first(most) if validation is not None else [],
            train_sampling=self.sampling,
            val_sampling=replace(
                self.sampling, temperature=sampled.val_temperature, top_p=sampled.val_top_p, top_k=sampled.val_top_k
            ),
            flops=self.model.flops,
        )

    def worker_settings(
        self, config: RolloutMasterConfig, environments: Mapping[str, Sequence[Any]]
    ) -> RolloutWorkerSettings:
        """The settings of the rollout worker. `environments`: section of `env` -> actor handles."""
        rollout, generation, model = config.rollout, config.policy.generation, self.model.config
        return worker_settings(
            self.prompts.process,
            environments=environments,
            env=config.env,
            limits=EpisodeLimits(
                max_turns=rollout.max_rollout_turns,
                max_total_tokens=generation.engine.longest_sequence,
                timeout_s=rollout.episode_timeout_s,
                image_token_id=image_token_id(model),
            ),
            env_step_timeout_s=rollout.env_step_timeout_s,
            worker_timeout_s=config.cluster.worker_timeout_s,
            seed=rollout.seed,
            model_name=config.policy.model_name,
            vocab_size=model.get_text_config().vocab_size,
            engine=generation.engine,
        )


def check_records(config: RolloutMasterConfig, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Check the record that the run trains from, and the folder into which it records. Returns what the first adds to
    the identity of the run.
    """
    rollout, section = config.rollout, config.section
    if rollout.replay_from is None and not rollout.rollout_record.enabled:
        return {}
    from nemo_rl.algorithms.trainers.rollout_recorder import check_record, check_record_folder

    added = {}
    if rollout.replay_from is not None:
        check_record(config, identity)
        added[f"{section}.replay_from"] = str(Path(rollout.replay_from).absolute())
    if rollout.rollout_record.enabled:
        check_record_folder(config, identity)
        check_writable(Path(rollout.rollout_record.save_dir), f"{section}.rollout_record.save_dir")
    return added
