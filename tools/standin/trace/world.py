"""A run of one rank in this process: the algorithm's own function, trainer, policies and workers, and nothing of Ray.

`install` puts small parts in place of those that have processes: the run's frame, worker groups, rollouts, rows and
engines. The order of phases, the accelerator's moves and the refit are those of the product.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import ray

from nemo_rl.algorithms import distillation, dpo, grpo, ppo, supervised
from nemo_rl.algorithms.loop import RunTools, Trainer
from nemo_rl.algorithms.parts import devices as devices_part
from nemo_rl.algorithms.parts import model as model_part
from nemo_rl.algorithms.parts.devices import Devices, RolloutDevices
from nemo_rl.algorithms.parts.engines import make_refit
from nemo_rl.algorithms.parts.model import Model
from nemo_rl.algorithms.parts.worker_settings import sampling_params
from nemo_rl.algorithms.supervised import SupervisedParts
from nemo_rl.algorithms.trainers.group_sources import GroupSource
from nemo_rl.algorithms.trainers.rollout_trainer import RolloutParts, RolloutTrainer
from nemo_rl.data.rows.dataloader import NamedRows, PromptDataLoader, PromptDataset
from nemo_rl.distributed.worker_groups import RayWorkerBuilder
from nemo_rl.models.generation.interfaces import GENERATION
from nemo_rl.models.policy import lm_policy
from nemo_rl.models.policy.pretrained import load_config as load_shape
from nemo_rl.refit.layout import PackLayout
from nemo_rl.refit.sync import Refit
from nemo_rl.rollouts.replay import NoWeightSync
from nemo_rl.utils.config import LoggerConfig
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.registry import import_object
from nemo_rl.utils.timer import TimeoutChecker
from tools.standin.trace.images import SampleImage
from tools.standin.trace.phases import Phases
from tools.standin.trace.samples import FullLengthExamples, FullLengthRollouts, Stored

RUNS = {
    "grpo": grpo.run_grpo,
    "ppo": ppo.run_ppo,
    "distillation": distillation.run_distillation,
    "sft": supervised.run_sft,
    "rm": supervised.run_rm,
    "dpo": dpo.run_dpo,
}
"""By the section of the configuration."""


def install(phases: Phases, folder: Path) -> None:
    """Make the run functions of all algorithms run in this process. Files go to `folder`."""
    LocalGroup.phases, LocalRun.folder = phases, folder
    ray.put = Stored
    lm_policy.RayWorkerGroup = LocalGroup
    devices_part.RayVirtualCluster = LocalCluster
    model_part.blank_image = lambda path: SampleImage.of(load_shape(path, {})).pixels
    for module in (grpo, ppo, distillation):
        module.Run, module.Rollouts = LocalRun, LocalRollouts
    supervised.Run = dpo.Run = LocalRun
    supervised.prepare_rows = dpo.prepare_rows = prepare_rows
    supervised.start_rows = dpo.start_rows = start_rows


class LocalCluster:
    """In place of a `RayVirtualCluster`."""

    def __init__(self, bundles_per_node: Sequence[int], **how: Any) -> None:
        self.size = sum(bundles_per_node)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *error: object) -> None:
        """No process was started."""

    def world_size(self) -> int:
        return self.size

    def bundles(self) -> list[Any]:
        return [SimpleNamespace(node_ip="127.0.0.1")]


class LocalGroup:
    """In place of a `RayWorkerGroup`: one of its workers, in this process. Every call of a method is a phase."""

    phases: ClassVar[Phases]
    controller_tensor_bytes = 0
    members: ClassVar = [SimpleNamespace(identity=SimpleNamespace(node_ip="127.0.0.1"))]

    def __init__(self, cluster: LocalCluster, builder: RayWorkerBuilder, *, name_prefix: str, **how: Any) -> None:
        self.name = name_prefix
        if cluster.world_size() != int(os.environ["WORLD_SIZE"]):
            raise ValueError(
                f"{name_prefix} has {cluster.world_size()} ranks, another world than this run's: trace it alone"
            )
        self.rank = int(os.environ["RANK"])
        if (state := sys.modules.get("megatron.core.parallel_state")) is not None and state.is_initialized():
            state.destroy_model_parallel()  # of another model, which has a process of its own in a run
        with self.phases.measure(f"{name_prefix} build"):
            self.worker = import_object(builder.worker_class_fqn, "worker class")(*builder.args, **builder.kwargs)

    def _call(self, method: Any, args: Sequence[Any], kwargs: Any) -> Any:
        values = [arg.value if isinstance(arg, Stored) else arg for arg in args]
        column = f" {args[1]}" if method.__name__ == "compute" else ""
        is_refit = method.__name__ in ("prepare_refit", "pack")
        with self.phases.measure(f"{self.name} {method.__name__}{column}", is_sync=is_refit):
            return getattr(self.worker, method.__name__)(*values, **kwargs)

    def call_all(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        result = self._call(method, args, kwargs)
        if method.__name__ == "prepare_refit":  # the first rank tells the layout, and what it packed
            result |= {"layout": self.worker.sender.layout.to_dict()}
        if method.__name__ == "pack":
            result |= {"rank": 0, "fingerprints": b""}
        if method.__name__ not in ("share", "sum_column"):
            return [result]
        # Rows of other ranks have the same values as one of this rank: all samples are as long.
        value = next(iter(self.worker.rows.values())).columns[args[-1]]
        shared = Stored(value.numpy()) if method.__name__ == "share" else value.item()
        return [dict.fromkeys(self.keys, shared)]

    def call_one(self, index: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker, method.__name__)(*args, **kwargs)

    def call_each(self, method: Any, args_by_worker: Sequence[tuple[Any, ...]], **common: Any) -> list[Any]:
        if method.__name__ == "load":
            plans = [plan for plan, *_ in args_by_worker]
            self.keys = [key for plan in plans for batch in plan.logprobs for row in batch for key in row.keys]
        return [self._call(method, args_by_worker[self.rank], common)]

    def shutdown(self, *how: Any) -> None:
        """The process ends soon."""


class LocalRun:
    """In place of a `Run`: no logs, no checkpoints, no Ray."""

    folder: ClassVar[Path]
    syncs: ClassVar[bool]  # weights are packed for engines
    only_starts: ClassVar[bool]  # and takes no training step
    most_buckets: ClassVar[int | None]  # of the weight sync; None: all

    def __init__(self, config: Any) -> None:
        self.config, self.stack, self.status = config, ExitStack(), 0
        console = RunConsole(num_steps=1, file=io.StringIO(), force_terminal=False)
        self.tools = RunTools(
            logger=Logger(LoggerConfig(), self.folder),
            console=console,
            checkpointing=config.checkpointing,
            checkpointer=None,
            deadline=TimeoutChecker(None, fit_last_save_time=True),
            resolved_config_yaml="",
            identity={},
        )

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def start(self, saves: Any) -> None:
        """Nothing to open."""

    def train(self, trainer: Trainer) -> None:
        if isinstance(trainer, RolloutTrainer):  # an asynchronous run has the same phases, between others' phases
            trainer.source = GroupSource(trainer.requests, trainer.rollouts)
        step = trainer.step

        def counted() -> None:
            LocalGroup.phases.step += 1
            step()

        trainer.step = counted
        trainer.start()
        if not self.only_starts:
            trainer.train()


class LocalRollouts:
    """In place of the parts of a run that sample. Only the policy starts."""

    saves = None

    def __init__(self, config: Any) -> None:
        self.model = Model.prepare(config.policy, config.checkpointing)
        self.sampling = sampling_params(config.policy.generation, self.model.tokenizer)
        tasks = list(config.distillation.task_to_teacher or ["task"]) if config.section == "distillation" else ["task"]
        rows = [{"problem": str(number)} for number in range(config.rollout.num_prompts_per_step * 3)]
        dataset = PromptDataset([NamedRows(name=task, task_name=task, rows=rows) for task in tasks])
        train = SimpleNamespace(parts=dataset.parts)
        loader = PromptDataLoader(dataset, config.rollout.num_prompts_per_step, seed=0)
        self.prompts = SimpleNamespace(loader=loader, data=SimpleNamespace(train=train))

    @classmethod
    def prepare(cls, config: Any, **others: Any) -> LocalRollouts:
        return cls(config)

    def start(self, run: Any, devices: RolloutDevices) -> RolloutParts:
        config, training = run.config, devices.training
        engine = LocalEngine()
        if devices.generation is training:  # it is built first, as in the product, and makes room
            training.accelerator.register(GENERATION, engine.onload, engine.offload, is_awake=True)
        else:
            devices.generation.accelerator.register(GENERATION, engine.onload, engine.offload)
        policy = self.model.start(
            run,
            config.policy,
            training,
            sampling=self.sampling,
            init_reference_model=config.rollout.uses_reference,
        )
        refit = make_refit(config, policy, engine, training, devices.generation)
        parts: Any = {"rollouts": FullLengthRollouts(config, self.model.config)}
        return RolloutParts(
            **parts,
            policy=policy,
            generation=None,
            refit=only_at_the_end(refit, config) if run.syncs else NoWeightSync(),
            prompts=self.prompts.loader,
            validation_prompts=[],
            train_sampling=self.sampling,
            val_sampling=self.sampling,
            flops=self.model.flops,
        )


def only_at_the_end(refit: Refit, config: Any) -> Refit:
    """The first and the middle syncs of a trace take buffers and devices and send no bucket: the last one does."""
    transfer = refit._transfer

    def transfer_at_the_end(layout: PackLayout, buckets: range, version: int) -> list[list[dict[str, Any]]]:
        is_last = LocalGroup.phases.step == config.rollout.max_num_steps
        return transfer(layout, buckets[: LocalRun.most_buckets], version) if is_last else []

    refit._transfer = transfer_at_the_end
    return refit


class LocalEngine:
    """In place of the engines: takes every bucket and keeps none. It has no memory of its own.

    Buckets lie in buffers for the same GPU, where a run whose engines have GPUs of their own sends them over NCCL.
    """

    transport = "packed_ipc"
    num_engine_ranks = 0
    weights_follow = False
    workers: ClassVar = ["engine"]

    def onload(self, tags: Sequence[str] = ()) -> None:
        """Nothing to move."""

    def offload(self) -> None:
        """Nothing to move."""

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Nothing to attach."""

    def start_weight_update(self, *, clear_cache: bool) -> list[Any]:
        return []

    def receive_bucket_async(self, info: dict[str, Any], *, turn: int) -> list[Any]:
        return []

    def wait(self, futures: Sequence[Any]) -> None:
        """A bucket is taken at once."""

    def finish_weight_update(self, version: int) -> bool:
        return True


def prepare_rows(config: Any) -> tuple[Model, Any, None]:
    model = Model.prepare(config.policy, config.checkpointing)
    loader = FullLengthExamples(config, model.config)
    rows = SimpleNamespace(
        loader=loader,
        start_tokenizers=lambda run: None,
        batches_of_all=lambda pool, size: [loader.next()],
        data=SimpleNamespace(validation={}),
        make=SimpleNamespace(fingerprint=lambda: ""),
    )
    return model, rows, None


def start_rows(run: Any, model: Model, rows: Any, pool: Any, *, init_reference_model: bool = False) -> SupervisedParts:
    config = run.config
    devices = Devices.start(run, config.training_cluster, 1, config.section, take_turns=False)
    return SupervisedParts(
        policy=model.start(run, config.policy, devices, init_reference_model=init_reference_model),
        loader=rows.loader,
        num_batches=None,
        validation={},
        flops=model.flops,
    )
