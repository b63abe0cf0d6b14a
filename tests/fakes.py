"""Hand-written stand-ins for the parts of a run. Each notes what it was asked in `calls`, in order."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.loop import RunTools
from nemo_rl.distributed.errors import WorkerError
from nemo_rl.models.policy.flops import Gpu
from nemo_rl.models.policy.head.tasks import HeadTask
from nemo_rl.rollouts.rollout_worker import GroupRequest
from nemo_rl.types import BatchPlan, GroupHandle, LossFunction, RowKey, SampleMeta, SampleStatus, TrainResult
from nemo_rl.utils.checkpoint.manager import CheckpointManager
from nemo_rl.utils.checkpoint.save import AllWritten, SaveRequest
from nemo_rl.utils.config import CheckpointingConfig, LoggerConfig
from nemo_rl.utils.console import RunConsole
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.timer import GenerationUse, TimeoutChecker


def sample(
    reward: float = 0.0,
    status: SampleStatus = SampleStatus.COMPLETED,
    *,
    prompt: int = 4,
    generated: int = 10,
    env: int = 0,
    turns: int = 1,
    version: int = 0,
    **more: Any,
) -> SampleMeta:
    """A sample with these numbers of tokens from the prompt, the policy and the environment."""
    return SampleMeta(
        **{"sample_id": "g/0"} | more,
        status=status,
        length=prompt + generated + env,
        num_prompt_tokens=prompt,
        num_generated_tokens=generated,
        num_turns=turns,
        reward=reward,
        weight_version=version,
    )


def sample_meta(sample_id: str, reward: float, *, status: SampleStatus = SampleStatus.COMPLETED) -> SampleMeta:
    """A sample of 4 prompt and 6 generated tokens, or one that failed before it had any."""
    if status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED):
        return sample(reward, status, generated=6, sample_id=sample_id)
    return sample(reward, status, generated=0, turns=0, sample_id=sample_id, failure="the environment was out")


def handle(
    *samples: SampleMeta, name: str = "g", prompt: str = "p:1", task: str = "math", ref: Any = None
) -> GroupHandle:
    return GroupHandle(group_id=name, prompt_id=prompt, task_name=task, ref=ref, samples=list(samples))


def rewarded(*rewards: float, name: str = "g") -> GroupHandle:
    return handle(*(sample(reward) for reward in rewards), name=name)


def result(loss: float = 0.5, norm: float = 1.0, skipped: int = 0, samples: Sequence[str] = ()) -> TrainResult:
    """One optimizer step on 24 tokens; `samples` made it not finite."""
    metrics = {"loss": loss, "global_valid_toks": 24.0}
    made = TrainResult(losses=[loss], grad_norms=[norm], learning_rates=[0.1], metrics=metrics)
    made.num_skipped_steps, made.nonfinite_samples = skipped, list(samples)
    return made


@dataclass
class FakePolicy:
    """Trains nothing. `results` are given out one per `train` call, the last again and again."""

    results: list[TrainResult] = field(default_factory=lambda: [result()])
    calls: list[str] = field(default_factory=list)
    plans: list[BatchPlan] = field(default_factory=list)
    attached: dict[str, dict[RowKey, Any]] = field(default_factory=dict)
    data_parallel_size: int = 1
    name_prefix: str = "policy"
    controller_tensor_bytes: int = 0
    gpu: Gpu | None = None
    on_wait: Callable[[], None] | None = None
    bad_weights: WorkerError | None = None
    config: Any = None  # the section `policy` of the run

    def note(self, call: str) -> None:
        """Calls of others than the policy carry their name."""
        self.calls.append(call if self.name_prefix == "policy" else f"{self.name_prefix}.{call}")

    def while_waiting(self, callback: Callable[[], None]) -> None:
        self.on_wait = callback

    def load(self, plan: BatchPlan) -> None:
        self.note("load")
        self.plans.append(plan)

    def compute(self, task: HeadTask, column: str) -> None:
        self.note({"prev_logprobs": "logprobs"}.get(column, column))

    def compute_reference_logprobs(self) -> None:
        self.note("reference")

    def share(self, column: str) -> dict[RowKey, Any]:
        """In place of a reference, who shares what."""
        return dict.fromkeys(keys_of_plan(self.plans[-1]), f"{column} of {self.name_prefix}")

    def attach(self, column: str, shared: Mapping[RowKey, Any]) -> None:
        self.note(f"attach {column}")
        self.attached[column] = {key: shared[key] for key in keys_of_plan(self.plans[-1])}

    def inspect_weights(self) -> None:
        if self.bad_weights is not None:
            raise self.bad_weights

    def mask_sequences_by_importance(self, threshold: float) -> dict[str, float]:
        self.note("mask")
        return {"max_seq_mult_prob_error": 1.0, "num_masked_seqs_by_logprob_error": 0.0}

    def set_token_advantages(self, advantages: Any) -> None:
        self.note("token_advantages")

    def train(self, loss_fn: LossFunction, task: HeadTask, is_last_pass: bool = True) -> TrainResult:
        self.note("train" if is_last_pass else "pass")
        if self.on_wait is not None:
            self.on_wait()
        return self.results.pop(0) if len(self.results) > 1 else self.results[0]

    def restart(self) -> None:
        self.note("restart")

    def save_checkpoint(self, directory: Path, request: SaveRequest) -> AllWritten:
        self.note("save")
        folder = directory / self.name_prefix
        folder.mkdir()
        (folder / "optimizer").mkdir()
        (folder / "weights").write_text("weights")
        return AllWritten()

    def load_checkpoint(self, directory: Path, *, load_optimizer: bool) -> None:
        assert (directory / self.name_prefix / "weights").is_file()
        self.note("load_checkpoint")


def keys_of_plan(plan: BatchPlan) -> list[RowKey]:
    """The rows that a plan gives to ranks."""
    return [key for rank in plan.ranks for batch in rank.logprobs for planned in batch for key in planned.keys]


def run_tools(
    folder: Path, checkpointing: CheckpointingConfig, num_steps: int = 3, config: str = "", **identity: Any
) -> tuple[RunTools, io.StringIO]:
    """The logger, console and checkpoints of a run in a folder, and what the console says."""
    text = io.StringIO()
    console = RunConsole(num_steps=num_steps, file=text, force_terminal=False)
    logger = Logger(LoggerConfig(), folder / "run")
    return RunTools(
        logger=logger,
        console=console,
        checkpointing=checkpointing,
        checkpointer=CheckpointManager(checkpointing) if checkpointing.enabled else None,
        deadline=TimeoutChecker(checkpointing.checkpoint_must_save_by, fit_last_save_time=True),
        resolved_config_yaml=config,
        identity=identity,
    ), text


def checkpoints_in(folder: Path, **keys: Any) -> CheckpointingConfig:
    return CheckpointingConfig.model_validate({"checkpoint_dir": str(folder / "c"), "metric_name": None} | keys)


@dataclass
class FakeRefit:
    """Notes the versions it was asked to sync, and tells them to the rollouts."""

    calls: list[str]
    rollouts: Any
    versions: list[int] = field(default_factory=list)
    announced: int = 0

    def announce(self) -> None:
        self.announced += 1

    def sync(self, version: int) -> dict[str, float]:
        self.calls.append("sync")
        self.versions.append(version)
        self.rollouts.version = version
        return {}


@dataclass
class FakeRollouts:
    """Rewards sample i of a group by `reward(request, i)`; fails the samples for which it returns None."""

    reward: Any
    calls: list[str]
    requests: list[GroupRequest] = field(default_factory=list)
    controller_tensor_bytes: int = 0
    version: int = 0

    def next_groups(
        self, step: int, next_requests: Callable[[], Sequence[GroupRequest]], *, is_first: bool
    ) -> list[GroupHandle]:
        return self.collect(next_requests())

    def collect(self, requests: Sequence[GroupRequest]) -> list[GroupHandle]:
        self.calls.append("collect")
        self.requests += requests
        return [self._group(request) for request in requests]

    def _group(self, request: GroupRequest) -> GroupHandle:
        samples = []
        for index in range(request.num_generations):
            reward = self.reward(request, index)
            status = SampleStatus.FAILED if reward is None else SampleStatus.COMPLETED
            samples.append(sample_meta(f"{request.group_id}/{index}", reward or 0.0, status=status))
        prompt = request.prompt
        return handle(*samples, name=request.group_id, prompt=prompt.prompt_id, task=prompt.task_name)

    def generation_use(self) -> GenerationUse:
        return GenerationUse(busy_s=1.0, window_s=4.0, num_tokens=12)

    def abandon(self) -> None:
        """Nothing is played beside training."""

    def replace_keeper(self) -> None:
        self.calls.append("replace keeper")

    def environment_metrics(self, groups: Sequence[GroupHandle]) -> Callable[[], dict[str, float]]:
        return lambda: {"math/num_groups": float(len(groups))}

    def conversations(self, groups: Sequence[GroupHandle]) -> list[list[list[dict[str, str]]]]:
        return [[[{"role": "user", "content": group.prompt_id}]] for group in groups]
