"""From a checked configuration to a finished run, for every command."""

import gc
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from nemo_rl.algorithms.config.loop import RunConfig
from nemo_rl.algorithms.setup.preflight import ModelInputs
from nemo_rl.algorithms.trainers.group_sources import TooManyFailures
from nemo_rl.algorithms.trainers.trainer import TRACKER_RUNS, NonFiniteLoss, RunTools, Trainer
from nemo_rl.config.loader import dump_config
from nemo_rl.distributed.accelerator import Accelerator
from nemo_rl.distributed.errors import RayLost, ResourceInsufficientError, WorkerError
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray, shutdown_ray
from nemo_rl.distributed.worker_groups import require_shared
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.settings import PolicyWorkerSettings
from nemo_rl.refit.layout import RefitError
from nemo_rl.report.recorder import RunRecorder
from nemo_rl.types import SamplingParams
from nemo_rl.utils.alarms import LearningAlarms
from nemo_rl.utils.checkpoint.lock import FolderLost, FolderTaken
from nemo_rl.utils.checkpoint.manager import CheckpointError, CheckpointManager, DiskFullError
from nemo_rl.utils.config import ClusterConfig
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.files import is_disk_full
from nemo_rl.utils.folders import cache_root
from nemo_rl.utils.interruption import LAST_WORDS_S, Interruption, command_line
from nemo_rl.utils.logger import LogError, Logger, get_next_experiment_dir
from nemo_rl.utils.registry import import_object
from nemo_rl.utils.timer import TimeoutChecker
from nemo_rl.utils.venvs import VenvBuildError

USER_ERRORS = (ValueError, FileNotFoundError, ResourceInsufficientError, VenvBuildError, CheckpointError, FolderTaken)
RUN_ERRORS = (WorkerError, RayLost, RefitError, TooManyFailures, NonFiniteLoss, DiskFullError, LogError, FolderLost)

SHUTDOWN_S = 15.0  # for the workers of a run that was told to end; what is left ends with this process

MONITOR = "nemo_rl.distributed.meters:UsageMonitor"  # imported when it is needed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The checked parts of a run that need no worker."""

    model: ModelInputs
    identity: dict[str, Any]  # a run that continues a checkpoint must have the same


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Bundles of machines, and the object that decides which worker group uses them."""

    machines: ClusterConfig
    cluster: RayVirtualCluster
    accelerator: Accelerator


def launch[ConfigT: RunConfig, RunInputsT: RunInputs](
    checked: ConfigT,
    *,
    prepare: Callable[[ConfigT], RunInputsT],
    build: Callable[[ConfigT, ExitStack, RunTools, RunInputsT], Trainer],
) -> int:
    """Train: prepare, start everything, run the loop, shut everything down. Returns the exit status.

    Args:
        checked: the configuration; a run that resumes has the hyperparameters of its checkpoint instead.
        prepare: loads the parts that need no worker; raises one of `USER_ERRORS` for a mistake of the user.
        build: returns a trainer that is ready to run, resumed if there is a checkpoint. It registers the workers that
            it starts with the stack.
    """
    deadline = TimeoutChecker(checked.checkpointing.checkpoint_must_save_by, fit_last_save_time=True)

    def train(inputs: RunInputsT, run_dir: Path, console: RunConsole) -> str:
        with ExitStack() as stack:
            config, checkpointer, info = checked, None, {}
            if config.checkpointing.enabled:
                manager = CheckpointManager(config.checkpointing, known_metrics=config.known_metrics)
                checkpointer = stack.enter_context(manager.held(run_dir))
                if (latest := manager.latest_finished()) is not None:
                    info = manager.load_training_info(latest) or {}
                    config, differences = config.continuing(manager.load_config(latest))
                    for difference in differences:
                        console.warn(difference)
            monitor = None
            if config.logger.monitor_gpus:  # ValueError if NVML is not installed
                interval = config.logger.gpu_monitoring.collection_interval
                monitor = import_object(MONITOR, "logger.monitor_gpus")(interval, gpus=config.cluster.use_gpus)
            tools = RunTools(
                logger=Logger(config.logger, run_dir, info.get(TRACKER_RUNS, {})),  # a run that resumes goes on there
                console=console,
                checkpointing=config.checkpointing,
                checkpointer=checkpointer,
                deadline=deadline,
                resolved_config_yaml=dump_config(config),
                identity=inputs.identity,
                known_metrics=config.known_metrics,
                profile=config.performance.profile,
                monitor=monitor,
                interruption=interruption,
                alarms=LearningAlarms(config.logger.alarms),
            )
            tools.logger.log_hyperparams(config.model_dump())
            stack.push(lambda kind, error, _: tools.logger.close(f"{kind.__name__}: {error}" if kind else None))
            if config.logger.report.enabled:
                tools.recorder = RunRecorder(config.logger.report, run_dir, console)
                at_last.callback(tools.recorder.close)
                tools.recorder.open(config.model_dump())
            init_ray(str(run_dir), forks_workers=not config.cluster.use_gpus)
            stack.callback(shutdown_ray)
            if monitor is not None:
                stack.enter_context(monitor)
            trainer = build(config, stack, tools, inputs)
            if tools.recorder is not None:
                tools.recorder.start(trainer.num_steps, trainer.policies[0])
            gc.freeze()  # what is there now stays: without this every collection would look at it
            end = trainer.describe_end()
            try:
                trainer.train()
            except (KeyboardInterrupt, *RUN_ERRORS) as error:
                if interruption.signal is None:
                    raise
                # Told, and with its page, before the workers end, which takes seconds.
                console.warn(f"{trainer.describe_interruption()}: {command_line()}")
                console.end(interruption.status)
                if tools.recorder is not None:
                    tools.recorder.close(max(LAST_WORDS_S, interruption.left_s()))
                at_last.enter_context(interruption.exit_after(SHUTDOWN_S))
                raise KeyboardInterrupt from error
            return f"{end}; {tools.logger.summary()}"

    interruption = Interruption(checked.cluster.grace_s)
    with ExitStack() as at_last:  # the page also says how the run ended
        return run_command(
            lambda: prepare(checked),
            train,
            folder=lambda _: get_next_experiment_dir(checked.logger.log_dir),
            num_steps=checked.loop.max_num_steps,
            files="the run's files are",
            again="resumes from the last checkpoint, if there is one",
            interruption=interruption,
        )


def run_command[InputsT](
    prepare: Callable[[], InputsT],
    run: Callable[[InputsT, Path, RunConsole], str],
    *,
    folder: Callable[[InputsT], Path],
    num_steps: int,
    files: str,
    again: str,
    interruption: Interruption,
) -> int:
    """Prepare and run, and print errors as messages. Returns the exit status.

    The status is 0 for success, 1 for a failure, 2 for a mistake that the user has to mend, 130 and 143 for SIGINT and
    SIGTERM.

    Args:
        run: gets the result of `prepare` and the `folder` of the run; returns the last message.
        files, again: parts of messages: the content of the folder, and the effect of the same command.
    """
    console = RunConsole(num_steps=num_steps)
    console.configure_logging()
    path: Path | None = None
    with interruption.listening():
        try:
            inputs = prepare()
            path = folder(inputs)
            console.keep_events(path)
            console.info(run(inputs, path, console))
        except RUN_ERRORS as error:
            text = f"{console.where(error)}: {type(error).__name__}: {error}"
            console.error(f"{text}\n{files} in {path}; the same command {again}")
            return console.end(1)
        except USER_ERRORS as error:
            console.error(str(error))
            return console.end(2)
        except KeyboardInterrupt:
            if not console.has_ended:
                console.warn(f"{interruption.name}: the command ends; the same one {again}: {command_line()}")
                console.end(interruption.status)
            return interruption.status
        except BaseException as error:
            if isinstance(error, Exception) and is_disk_full(error, free_bytes=sys.maxsize):
                folders = str(cache_root()) if path is None else f"{path} and {cache_root()}"
                text = f"{console.where(error)}: a disk is full: {error}; free some space for {folders}"
                console.error(text if path is None else f"{text}\n{files} in {path}; the same command {again}")
                return console.end(1)
            console.note("error", f"{type(error).__name__}: {error}")
            console.end(1)
            raise
    return console.end(0)


def start_devices(
    machines: ClusterConfig, stack: ExitStack, groups_per_bundle: int, name: str, *, take_turns: bool
) -> Devices:
    """The bundles of the run or of a part of it: one per GPU, or per CPU worker. They end with the stack.

    `take_turns`: the worker groups on a GPU use it one after the other.
    """
    cluster = RayVirtualCluster(
        [machines.workers_per_node] * machines.num_nodes,
        use_gpus=machines.use_gpus,
        max_colocated_worker_groups=groups_per_bundle,
        num_gpus_per_node=machines.gpus_per_node,
        name=name,
        distinct_nodes=True,
    )
    accelerator = Accelerator(exclusive=take_turns and machines.use_gpus)
    return Devices(machines=machines, cluster=stack.enter_context(cluster), accelerator=accelerator)


def start_policy(
    run: RunConfig,
    config: PolicyConfig,
    stack: ExitStack,
    model: ModelInputs,
    devices: Devices,
    *,
    sampling: SamplingParams | None = None,
    name: str = "policy",
    init_optimizer: bool = True,
    init_reference_model: bool = False,
    policy_class: type[Policy] = Policy,
) -> Policy:
    """Start the workers of a policy, of a critic (`value`) or of a teacher. They end with the stack.

    `sampling`: logprobs are computed with its temperature, top-p and top-k; None: with temperature 1.
    """
    machines, accelerator = devices.machines, devices.accelerator
    if accelerator.awake is not None:
        accelerator.release(accelerator.awake)  # the new workers need the memory
    policy = policy_class(
        devices.cluster,
        config,
        model.tokenizer,
        accelerator,
        PolicyWorkerSettings(
            model_path=model.model_path,
            sampling=sampling or SamplingParams(max_new_tokens=1),
            seed=run.loop.seed,
            use_gpu=machines.use_gpus,
            workers_per_node=machines.workers_per_node,
            folder=name,
            init_optimizer=init_optimizer,
            init_reference_model=init_reference_model,
            pad_token_id=cast(int | None, model.tokenizer.pad_token_id),
            blank_image=model.blank_image,
        ),
        timeout_s=machines.worker_timeout_s,
        processor_path=model.processor_path,
    )
    stack.callback(policy.shutdown)
    if init_optimizer and run.checkpointing.enabled:
        folder = Path(run.checkpointing.checkpoint_dir).absolute()
        require_shared(policy.group, folder, "checkpointing.checkpoint_dir")
    if config.megatron_cfg.enabled and not machines.use_gpus:
        logger.info("%s: Megatron Core on the CPU, with host stand-ins for torch.cuda", name)
    return policy
