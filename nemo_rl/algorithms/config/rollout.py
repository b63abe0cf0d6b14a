"""Configuration of what algorithms that sample share: the rollouts, the rewards, and the sections of such a run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from nemo_rl.algorithms.config.loop import LoopConfig, RunConfig
from nemo_rl.algorithms.config.metric_names import REPLAY, SPECULATION, TASK, of_tasks, rollout_validation
from nemo_rl.config.base import Derived, StrictModel
from nemo_rl.config.rules import NotYet, anything, one_of, switched_off
from nemo_rl.data.config import DataConfig, prompt_tasks
from nemo_rl.distributed.config import ClusterConfig
from nemo_rl.environments.config import EnvSection
from nemo_rl.models.generation.config import ColocatedConfig
from nemo_rl.models.policy.config import PolicyConfig, RolloutPolicyConfig

# -- Which machines of a run train and which generate: the one place that divides them.

KEY = "policy.generation.colocated"


@dataclass(frozen=True, kw_only=True)
class Machines:
    """`training` and `generation` are the same machines where the two take turns on them."""

    training: ClusterConfig
    generation: ClusterConfig


def divide(cluster: ClusterConfig, colocated: ColocatedConfig) -> Machines:
    """The machines of each side. As long as `division_problems` has something to say, both sides see them all."""
    if colocated.enabled or any(division_problems(cluster, colocated)):
        return Machines(training=cluster, generation=cluster)
    unit = _unit(cluster)
    if cluster.num_nodes == 1:
        taken = colocated.resources.model_dump()[unit]
        parts = ({unit: cluster.workers_per_node - taken}, {unit: taken})
    else:
        taken = colocated.resources.num_nodes
        assert taken is not None
        parts = ({"num_nodes": cluster.num_nodes - taken}, {"num_nodes": taken})
    training, generation = (cluster.model_copy(update=part) for part in parts)
    return Machines(training=training, generation=generation)


def division_problems(cluster: ClusterConfig, colocated: ColocatedConfig) -> Iterator[tuple[str, str]]:
    """(dotted key, what would work) where `colocated` does not say how to divide `cluster`."""
    resources = {key: value for key, value in colocated.resources.model_dump().items() if value is not None}
    if colocated.enabled:
        if resources:
            yield (
                f"{KEY}.resources",
                f"{', '.join(resources)} only count for generation on its own resources; leave them out, or set "
                f"{KEY}.enabled=false",
            )
        return
    unit, kind = _unit(cluster), kind_of_devices(cluster)
    other = ({"gpus_per_node", "cpu_workers_per_node"} - {unit}).pop()
    if other in resources:
        where = "has no GPUs" if unit == "cpu_workers_per_node" else "uses GPUs"
        yield f"{KEY}.resources.{other}", f"the cluster {where}; set {KEY}.resources.{unit} instead"
        return
    per_node = cluster.workers_per_node
    if cluster.num_nodes > 1:
        yield from _node_problems(cluster, resources, unit)
    elif resources.get("num_nodes", 1) != 1:
        yield (
            f"{KEY}.resources.num_nodes",
            f"{resources['num_nodes']} of one node (cluster.num_nodes=1) leaves none to train; leave it out, and say "
            f"with {KEY}.resources.{unit} how many of its {kind} generate",
        )
    elif per_node < 2:
        yield (
            f"{KEY}.enabled",
            f"the one of the {kind} of the one node cannot both train and generate on its own; set cluster.{unit}=2 or "
            f"more, or {KEY}.enabled=true",
        )
    elif unit not in resources:
        yield (
            f"{KEY}.resources.{unit}",
            f"is required: how many of the node's {per_node} {kind} generate, {_up_to(per_node)}",
        )
    elif resources[unit] >= per_node:
        yield (
            f"{KEY}.resources.{unit}",
            f"{resources[unit]} of the node's {per_node} {kind} leaves none to train; set {_up_to(per_node)}, or raise "
            f"cluster.{unit}",
        )


def kind_of_devices(cluster: ClusterConfig) -> str:
    """`GPUs` or `CPU workers`, for people."""
    return "GPUs" if cluster.use_gpus else "CPU workers"


def _node_problems(cluster: ClusterConfig, resources: dict[str, int], unit: str) -> Iterator[tuple[str, str]]:
    """Of several nodes, whole ones generate."""
    number, kind = cluster.num_nodes, kind_of_devices(cluster)
    if "num_nodes" not in resources:
        yield f"{KEY}.resources.num_nodes", f"is required: how many of the {number} nodes generate, {_up_to(number)}"
    elif resources["num_nodes"] >= number:
        yield (
            f"{KEY}.resources.num_nodes",
            f"{resources['num_nodes']} of {number} nodes leaves none to train; set {_up_to(number)}, or raise "
            "cluster.num_nodes",
        )
    if resources.get(unit, cluster.workers_per_node) != cluster.workers_per_node:
        yield (
            f"{KEY}.resources.{unit}",
            f"of several nodes whole ones generate, with all their {cluster.workers_per_node} {kind}; leave it out",
        )


def _unit(cluster: ClusterConfig) -> str:
    return "gpus_per_node" if cluster.use_gpus else "cpu_workers_per_node"


def _up_to(number: int) -> str:
    return "1" if number == 2 else f"1 to {number - 1}"


class RewardShapingConfig(StrictModel):
    """Penalties for long answers (DAPO, ProRL)."""

    enabled: bool = False
    """Shape rewards."""

    overlong_buffer_length: int = Field(default=128, ge=1)
    """Tokens before `max_response_length` over which the penalty grows (DAPO)."""

    overlong_buffer_penalty: float = Field(default=1.0, ge=0)
    """Penalty at `max_response_length` (DAPO)."""

    max_response_length: Annotated[int, Derived("${policy.max_total_sequence_length}"), Field(ge=1)]
    """Response tokens at which the whole penalty applies (DAPO)."""

    stop_properly_penalty_coef: float | None = Field(default=None, ge=0, le=1)
    """Factor on the rewards of truncated samples (ProRL), in place of the DAPO penalty; null: off."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        if self.enabled and self.overlong_buffer_length > self.max_response_length:
            yield (
                "overlong_buffer_length",
                f"{self.overlong_buffer_length} is more than max_response_length={self.max_response_length}",
            )


class RewardScalingConfig(StrictModel):
    """Linear map of rewards: clamped to the source range, then mapped to the target range."""

    enabled: bool = False
    """Scale rewards."""

    source_min: float = 0.0
    """Smallest reward expected; smaller ones count as this."""

    source_max: float = 1.0
    """Largest reward expected; larger ones count as this."""

    target_min: float = 0.0
    """What `source_min` becomes."""

    target_max: float = 1.0
    """What `source_max` becomes."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        for side in ("source", "target"):
            low, high = (self.source_min, self.source_max) if side == "source" else (self.target_min, self.target_max)
            if low >= high:
                yield f"{side}_max", f"must be above {side}_min={low} (got {high})"


class RolloutRecordConfig(StrictModel):
    """Write down what is sampled, to look at it or to train from it again (`replay_from`)."""

    enabled: bool = False
    """Write the groups of every training step, in the background."""

    save_dir: str = "results/rollouts"
    """Folder of `step_N`."""

    keep: int | None = Field(default=None, ge=1)
    """Steps kept, the newest ones; null: all. A record without step 1 cannot be replayed."""


class RolloutConfig(LoopConfig):
    """Rollouts of a step and of a validation."""

    num_prompts_per_step: int = Field(default=32, ge=1)
    """Prompts of one step."""

    num_generations_per_prompt: int = Field(default=16, ge=1)
    """Samples of each prompt."""

    max_rollout_turns: int = Field(default=1, ge=1)
    """Turns of a sample with its environment."""

    max_failed_sample_fraction: float = Field(default=0.1, ge=0, le=1)
    """The run stops when more than this fraction of a step's samples failed in the environment or the engine."""

    env_step_timeout_s: float = Field(default=300.0, gt=0)
    """Time limit for one step of an environment; past it the sample counts as failed."""

    episode_timeout_s: float | None = Field(default=None, gt=0)
    """Time limit for one sample with all its turns, waiting for engines included; past it the sample has no reward and
    takes no part in training. null: none."""

    max_val_samples: int = Field(default=256, ge=1)
    """Prompts of a validation at most."""

    val_batch_size: int = Field(default=256, ge=1)
    """Prompts of a validation batch."""

    val_num_generations_per_prompt: int = Field(default=1, ge=1)
    """Samples of each validation prompt; with more than one, pass@k and best-of are reported."""

    rollout_record: RolloutRecordConfig = RolloutRecordConfig()
    """Write down what is sampled, to look at it or to train from it again (`replay_from`)."""

    replay_from: str | None = None
    """Folder of recorded rollouts to train from: no engine and no environment is started; null: sample."""

    @property
    def num_samples_per_step(self) -> int:
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def num_prompts_per_batch(self) -> int:
        """Prompts of a generation batch."""
        return self.num_prompts_per_step

    @property
    def val_k_values(self) -> list[int]:
        """The k of pass@k and best-of-k in validation: powers of two, and all samples; none with one sample."""
        num_samples = self.val_num_generations_per_prompt
        if num_samples == 1:
            return []
        return sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})


class ScoredRolloutConfig(RolloutConfig):
    """Rollouts whose rewards train the policy: scaling, shaping, filtering."""

    overlong_filtering: bool = False
    """Truncated samples get no gradient; their rewards still enter the baseline."""

    reward_shaping: RewardShapingConfig
    """Penalties for long answers."""

    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    """Linear map of rewards."""


@dataclass(frozen=True, kw_only=True)
class FurtherModel:
    """A model of a run beside its policy: a critic, a teacher."""

    key: str  # its section, dotted
    config: PolicyConfig
    cluster: ClusterConfig
    is_apart: bool = False  # on machines of its own; else it takes turns with the policy on the same ones


class RolloutMasterConfig(RunConfig):
    """A whole run of an algorithm that samples."""

    policy: RolloutPolicyConfig
    """Policy: model, tokenizer, batch sizes, optimizer, sharding, generation."""

    data: DataConfig
    """Prompts: training and validation datasets, and how a row becomes a prompt."""

    env: EnvSection
    """Environments that answer and reward samples, by name."""

    not_yet: ClassVar = (
        NotYet("data_plane", switched_off),
        NotYet("on_policy_distillation", switched_off),
        NotYet("reward_penalties", one_of({}, None)),
        NotYet("async_rl", one_of({}, None)),
        NotYet("env.should_use_nemo_gym", one_of(False, None)),
        NotYet("env.should_log_nemo_gym_responses", anything),
    )

    @property
    def training_cluster(self) -> ClusterConfig:
        return divide(self.cluster, self.policy.generation.colocated).training

    @property
    def generation_cluster(self) -> ClusterConfig:
        """The machines that generate: those that train where the two take turns."""
        return divide(self.cluster, self.policy.generation.colocated).generation

    @property
    def recomputes_kv_cache(self) -> bool:
        """Whether samples under way at a sync compute their KV cache anew with the new weights."""
        return True

    @property
    @abstractmethod
    def rollout(self) -> RolloutConfig:
        """The algorithm's own section."""

    @property
    @abstractmethod
    def train_metrics(self) -> frozenset[str]:
        """What its steps report under `train/`, as far as the configuration decides it."""

    @property
    def further_models(self) -> list[FurtherModel]:
        """Models beside the policy; none, unless the algorithm has a critic or a teacher."""
        return []

    @property
    def val_metrics(self) -> frozenset[str]:
        """What its validations report under `validation/`."""
        names = rollout_validation(self.rollout)
        return names | of_tasks(prompt_tasks(self.data)[1], names)

    @property
    def task_metrics(self) -> frozenset[str]:
        """What its steps report of each task under `train/`; nothing where there is one task."""
        return of_tasks(prompt_tasks(self.data)[0], TASK)

    @property
    def generation_metrics(self) -> frozenset[str]:
        """What its steps report under `train/` of tokens drafted ahead and of routing replay, where these are on."""
        drafts = SPECULATION if self.policy.generation.speculates else frozenset[str]()
        return drafts | (REPLAY if self.policy.router_replay.enabled else frozenset())
