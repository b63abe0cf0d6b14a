"""Configuration that all sampling algorithms share: rollouts, rewards, machines, and the sections of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from nemo_rl.algorithms.config import metric_names
from nemo_rl.algorithms.config.loop import (
    LoopConfig,
    Problems,
    RunConfig,
    check_layout,
    data_parallel_size,
    saving_rules,
)
from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.rules import Derived, StrictModel, divisors, remedy, value_of
from nemo_rl.data.config import DataConfig, prompt_tasks
from nemo_rl.environments.config import (
    AgentEnvironmentConfig,
    EnvSection,
    PythonToolsEnvironmentConfig,
    RetrievalEnvironmentConfig,
    SlidingPuzzleEnvironmentConfig,
    check_sections,
    environment_gpus,
    judges_of,
    named_sections,
    sections_of,
    unknown_type,
)
from nemo_rl.models.generation.config import DEFAULT_ENGINE, ColocatedConfig, run_rules, training_rules
from nemo_rl.models.policy.config import PolicyConfig, RolloutPolicyConfig, check_batching
from nemo_rl.utils.config import ClusterConfig


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

    rules: ClassVar = {
        "overlong_buffer_length > {max_response_length} and enabled and stop_properly_penalty_coef=null": (
            "{overlong_buffer_length} is more than max_response_length={max_response_length} -> "
            "overlong_buffer_length={max_response_length}"
        ),
    }


class RewardScalingConfig(StrictModel):
    """Linear map of rewards: clamped to the source range, then mapped to the target range."""

    enabled: bool = False
    """Scale rewards."""

    source_min: float = 0.0
    """Smallest reward expected; smaller ones count as this."""

    source_max: float = 1.0
    """Largest reward expected; larger ones count as this."""

    target_min: float = 0.0
    """The value that `source_min` becomes."""

    target_max: float = 1.0
    """The value that `source_max` becomes."""

    rules: ClassVar = {
        "source_max <= {source_min}": "must be above source_min={source_min} (got {source_max}); raise it",
        "target_max <= {target_min}": "must be above target_min={target_min} (got {target_max}); raise it",
    }


class RolloutRecordConfig(StrictModel):
    """Record the rollouts, to inspect them or to train from them again (`replay_from`)."""

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

    replay_from: str | None = None
    """Folder of recorded rollouts to train from: no engine and no environment is started; null: sample."""

    @property
    def uses_reference(self) -> bool:
        """Whether a step asks a reference policy for logprobs."""
        return False

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

    skip_reference_policy_logprobs_calculation: bool = False
    """Do without the reference policy; needs `loss_fn.reference_policy_kl_penalty: 0`."""

    reward_shaping: RewardShapingConfig
    """Penalties for long answers."""

    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    """Linear map of rewards."""

    seq_logprob_error_threshold: float | None = Field(default=None, gt=1)
    """Samples whose mean of exp(|training - generation logprob|) exceeds this get no gradient; null: off."""

    use_dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and sample until the step is full (DAPO)."""

    dynamic_sampling_max_gen_batches: int = Field(default=10, ge=1)
    """Generation batches of a step at most; the run stops if they do not fill the step."""

    batch_multiplier: float = Field(default=1.0, ge=1)
    """Prompts of a generation batch, in units of `num_prompts_per_step`; for dynamic sampling only."""

    rules: ClassVar = {
        "use_dynamic_sampling excludes num_generations_per_prompt < 2": (
            "every group of 1 would be dropped -> num_generations_per_prompt=2"
        ),
        "batch_multiplier != 1 requires use_dynamic_sampling": (
            "only for dynamic sampling -> use_dynamic_sampling=true | batch_multiplier=1"
        ),
    }

    @property
    def uses_reference(self) -> bool:
        return not self.skip_reference_policy_logprobs_calculation

    @property
    def num_prompts_per_batch(self) -> int:
        """Prompts of a generation batch: as many as a step has, or more with dynamic sampling."""
        return round(self.num_prompts_per_step * self.batch_multiplier)

    def cross_checks(self) -> Problems:
        if (self.num_prompts_per_step * self.batch_multiplier) % 1:
            yield (
                "batch_multiplier",
                f"{self.batch_multiplier} x num_prompts_per_step={self.num_prompts_per_step} is not a whole number",
            )


@dataclass(frozen=True, kw_only=True)
class FurtherModel:
    """A model of a run beside its policy: a critic, a teacher."""

    key: str  # its section, dotted
    config: PolicyConfig
    cluster: ClusterConfig
    is_apart: bool = False  # on machines of its own; else it takes turns with the policy on the same ones
    is_trained: bool = True


# Which machines of a run train and which generate.

COLOCATED = "policy.generation.colocated"


def divide(cluster: ClusterConfig, colocated: ColocatedConfig) -> tuple[ClusterConfig, ClusterConfig]:
    """The machines that train and the machines that generate; all of them for both if they take turns.

    Both have all machines as long as `division_problems` has something to say.
    """
    if colocated.enabled or any(division_problems(cluster, colocated)):
        return cluster, cluster
    key = cluster.unit if cluster.num_nodes == 1 else "num_nodes"
    total, taken = value_of(cluster, key), value_of(colocated.resources, key)
    return cluster.model_copy(update={key: total - taken}), cluster.model_copy(update={key: taken})


def apart(cluster: ClusterConfig) -> str:
    """The way to engines on half of the machines, for a remedy."""
    unit = cluster.unit if cluster.num_nodes == 1 else "num_nodes"
    number = value_of(cluster, unit)
    more = f" and cluster.{unit}=2" if number < 2 else ""
    return f"{COLOCATED}.enabled=false and {COLOCATED}.resources.{unit}={max(number // 2, 1)}{more}"


def division_problems(cluster: ClusterConfig, colocated: ColocatedConfig) -> Problems:
    """(dotted key, what would work) if `colocated` does not say how to divide `cluster`.

    GPUs or CPU workers of one node are divided; of several nodes, whole ones generate.
    """
    section, unit, kind, per_node = f"{COLOCATED}.resources", cluster.unit, cluster.kind, cluster.workers_per_node
    resources = {key: value for key, value in colocated.resources.model_dump().items() if value is not None}
    if colocated.enabled:
        if resources:
            yield (
                section,
                f"{', '.join(resources)} only count for generation on its own resources; leave them out",
            )
        return
    other = ({"gpus_per_node", "cpu_workers_per_node"} - {unit}).pop()
    if other in resources:
        has = "uses GPUs" if cluster.use_gpus else "has no GPUs"
        yield f"{section}.{other}", f"the cluster {has}; set {section}.{unit} instead"
        return
    if cluster.num_nodes > 1:
        yield from _part_problems("num_nodes", cluster.num_nodes, f"{cluster.num_nodes} nodes", resources)
        if resources.get(unit, per_node) != per_node:
            yield (
                f"{section}.{unit}",
                f"of several nodes whole ones generate, with all their {per_node} {kind}; leave it out",
            )
    elif resources.get("num_nodes", 1) != 1:
        yield (
            f"{section}.num_nodes",
            f"{resources['num_nodes']} of one node (cluster.num_nodes=1) leaves none to train; leave it out, and say "
            f"with {section}.{unit} how many of its {kind} generate",
        )
    elif per_node < 2:
        yield (
            f"{COLOCATED}.enabled",
            f"one of the {kind} cannot both train and generate on its own; "
            + remedy(f"{COLOCATED}.enabled=true", apart(cluster)),
        )
    else:
        yield from _part_problems(unit, per_node, f"node's {per_node} {kind}", resources)


def _part_problems(key: str, number: int, what: str, resources: Mapping[str, int]) -> Problems:
    """Check that `resources` gives a part of `number` to generation and leaves some to train."""
    works = "1" if number == 2 else f"1 to {number - 1}"
    if key not in resources:
        yield f"{COLOCATED}.resources.{key}", f"is required: how many of the {what} generate, {works}"
    elif resources[key] >= number:
        yield (
            f"{COLOCATED}.resources.{key}",
            f"{resources[key]} of the {what} leaves none to train; raise cluster.{key}, or "
            + remedy(f"{COLOCATED}.resources.{key}={number // 2}"),
        )


_ENGINE = f"policy.generation.backend={DEFAULT_ENGINE}"
_BY_POLICY = "the policy's own workers generate (policy.generation.backend={policy.generation.backend})"
_HF, _MEGATRON = "policy.generation.backend=hf", "policy.generation.backend=megatron and policy.megatron_cfg.enabled"
_UNSUPPORTED = {
    "policy.dtensor_cfg.pipeline_parallel_size > 1": (_HF, "pipeline stages"),
    "policy.dtensor_cfg.context_parallel_size > 1": (_HF, "sequences cut over ranks"),
    "policy.dtensor_cfg.expert_parallel_size > 1": (_HF, "experts on different ranks"),
    "policy.megatron_cfg.pipeline_model_parallel_size > 1": (_MEGATRON, "pipeline stages"),
    "policy.megatron_cfg.context_parallel_size > 1": (_MEGATRON, "sequences cut over ranks"),
    "policy.megatron_cfg.expert_model_parallel_size > 1": (_MEGATRON, "experts on different ranks"),
    "policy.megatron_cfg.expert_tensor_parallel_size > 1": (_MEGATRON, "experts cut over ranks"),
    "policy.megatron_cfg.fp8_cfg.enabled": (_MEGATRON, "products in FP8"),
    "policy.dtensor_cfg.sequence_parallel": (_HF, "single tokens cut over ranks"),
    "policy.megatron_cfg.sequence_parallel": (_MEGATRON, "single tokens cut over ranks"),
}
"""Layouts of training in which a data-parallel rank cannot sample tokens by itself -> (backend, what is missing)."""

_GENERATION_BY_POLICY = {
    "policy.generation.backend=megatron requires policy.megatron_cfg.enabled": (
        f"megatron is for a policy that trains with policy.megatron_cfg -> policy.generation.backend=hf | {_ENGINE}"
    ),
    "policy.generation.backend=hf excludes policy.megatron_cfg.enabled": (
        f"hf is for a policy that trains with policy.dtensor_cfg -> policy.generation.backend=megatron | {_ENGINE}"
    ),
    **{
        f"{layout} and {backend}": f"not supported yet: {what} where {_BY_POLICY} -> {off} | {_ENGINE}"
        for layout, (backend, what) in _UNSUPPORTED.items()
        for off in [layout.replace(" > 1", "=1") if layout.endswith("1") else f"{layout}=false"]
    },
    "policy.generation.{policy.generation.dtype_path}: policy.generation.engine.written_dtype != {policy.precision} "
    "and policy.generation.is_by_policy": (
        f"{_BY_POLICY}, in policy.precision={{policy.precision}} -> "
        f"policy.generation.{{policy.generation.dtype_path}}={{policy.precision}} | {_ENGINE}"
    ),
    "policy.generation.{policy.generation.tensor_path}: policy.generation.engine.tensor_size != 1 and "
    "policy.generation.is_by_policy": (
        f"{_BY_POLICY}, cut as policy.{{policy.backend_key}} says -> "
        "policy.generation.{policy.generation.tensor_path}=1"
    ),
    "policy.generation.{policy.generation.engine.kwargs_key}: policy.generation.arguments and "
    "policy.generation.is_by_policy": f"{_BY_POLICY} and know none of {{policy.generation.arguments}}; remove them",
    "policy.generation.bad_words and policy.generation.is_by_policy": (
        f"not supported yet: texts that are never sampled where {_BY_POLICY} -> policy.generation.bad_words=null | "
        f"{_ENGINE}"
    ),
    "policy.generation.colocated.enabled=false and policy.generation.is_by_policy": (
        f"{_BY_POLICY}: they have no resources of their own -> policy.generation.colocated.enabled=true | {_ENGINE}"
    ),
}

_SERVER = "policy.generation.{policy.generation.engine_key}.expose_http_server"

_ENGINES = {
    **run_rules("policy.generation"),
    **training_rules("policy.generation"),
    # The OpenAI-compatible server needs engines that answer at any time.
    f"{_SERVER}: policy.generation.engine.expose_http_server excludes rollout.replay_from": (
        f"no engine is started with {{algorithm}}.replay_from -> {_SERVER}=false"
    ),
    f"{_SERVER}: policy.generation.engine.expose_http_server excludes policy.generation.is_by_policy": (
        f"workers that train cannot answer -> {_SERVER}=false | {_ENGINE} and {{devices_apart}}"
    ),
    f"{_SERVER}: policy.generation.engine.expose_http_server and policy.generation.is_by_policy=false and "
    "cluster.use_gpus excludes policy.generation.colocated.enabled": (
        f"colocated engines sleep while the policy trains -> {{devices_apart}} | {_SERVER}=false"
    ),
    # Routing replay needs the experts that every token went through.
    "policy.router_replay.enabled and policy.generation.is_by_policy requires rollout.replay_from": (
        "policy.generation.backend={policy.generation.backend} does not say which experts a token went through -> "
        f"policy.router_replay.enabled=false | {_ENGINE}"
    ),
}

_SAMPLING = {
    "policy.generation.temperature=0": (
        "training needs a temperature above 0 (only val_temperature may be 0) -> policy.generation.temperature=1"
    ),
    "policy.deterministic and cluster.use_gpus and policy.generation.top_p < 1": (
        "cumulative sums on GPUs come in any order, and policy.generation.top_p needs them -> "
        "policy.generation.top_p=1 | policy.deterministic=false"
    ),
    "data.max_input_seq_length > {policy.generation.engine.longest_sequence}": (
        "{data.max_input_seq_length} is more than policy.generation.{policy.generation.length_path}="
        "{policy.generation.engine.longest_sequence}: such prompts could never be answered -> "
        "data.max_input_seq_length={policy.generation.engine.longest_sequence}"
    ),
    "{algorithm}.replay_from: rollout.replay_from excludes rollout.validates": (
        "no engine is started that could answer validation prompts -> {no_validation}"
    ),
    "{algorithm}.rollout_record.enabled: rollout.replay_from excludes rollout.rollout_record.enabled": (
        "nothing is sampled with replay_from -> {algorithm}.rollout_record.enabled=false"
    ),
}


def reference_kl_rules(section: str) -> dict[str, str]:
    """Rules of the algorithm `section` with a KL penalty to the reference policy, in the loss or in the reward."""
    return {
        "loss_fn.use_kl_in_reward excludes policy.generation.is_filtered": (
            "not supported yet: the KL in the reward with policy.generation.top_p or top_k, which filter the policy "
            "and not the reference -> loss_fn.use_kl_in_reward=false | policy.generation.top_p=1 and "
            "policy.generation.top_k=null"
        ),
        f"{section}.skip_reference_policy_logprobs_calculation excludes loss_fn.reference_policy_kl_penalty > 0": (
            "the KL penalty needs them (it is {loss_fn.reference_policy_kl_penalty}) -> "
            f"loss_fn.reference_policy_kl_penalty=0 | {section}.skip_reference_policy_logprobs_calculation=false"
        ),
        "loss_fn.use_kl_in_reward requires loss_fn.reference_policy_kl_penalty > 0": (
            "has no effect without a KL penalty"
        ),
    }


class RolloutMasterConfig(RunConfig):
    """A whole run of an algorithm that samples."""

    policy: RolloutPolicyConfig
    data: DataConfig

    env: EnvSection
    """Environments that answer and reward samples, by name."""

    rules: ClassVar = {**_GENERATION_BY_POLICY, **_ENGINES, **_SAMPLING, **saving_rules("policy")}

    @property
    def training_cluster(self) -> ClusterConfig:
        return divide(self.cluster, self.policy.generation.colocated)[0]

    @property
    def generation_cluster(self) -> ClusterConfig:
        """The machines that generate."""
        return divide(self.cluster, self.policy.generation.colocated)[1]

    @property
    def devices_apart(self) -> str:
        return apart(self.cluster)

    @property
    def gpus_beside_cluster(self) -> int:
        used = {dataset.env_name for dataset in (*self.data.train, *(self.data.validation or []))}
        return sum(environment_gpus(sections_of(self.env, judges_of(self.env, used))).values())

    @property
    def processes_per_worker(self) -> int:
        return super().processes_per_worker + 100  # an engine and its rollout worker

    @property
    def recomputes_kv_cache(self) -> bool:
        """Whether samples under way at a sync compute their KV cache again with the new weights."""
        return True

    @property
    def rollout(self) -> RolloutConfig:
        """The algorithm's own section."""
        return value_of(self, self.section)

    @property
    def has_agents(self) -> bool:
        """Whether agents, which are separate programs, play some of the episodes."""
        datasets = [*self.data.train, *(self.data.validation or [])]
        return any(isinstance(self.env.get(dataset.env_name), AgentEnvironmentConfig) for dataset in datasets)

    @property
    def further_models(self) -> list[FurtherModel]:
        """Models beside the policy; none, unless the algorithm has a critic or a teacher."""
        return []

    @property
    def val_metrics(self) -> frozenset[str]:
        names = metric_names.rollout_validation(self.rollout.val_k_values)
        return names | metric_names.of_tasks(prompt_tasks(self.data)[1], names)

    @property
    def rollout_metrics(self) -> frozenset[str]:
        """Names that every step reports under `train/`, without those of the algorithm."""
        names = metric_names.TRAINING | metric_names.ROLLOUT | metric_names.turns(self.rollout.max_rollout_turns)
        names |= metric_names.of_tasks(prompt_tasks(self.data)[0], metric_names.TASK)
        optional = {
            metric_names.SPECULATION: bool(self.policy.generation.speculation),
            metric_names.DRAFT: self.policy.draft.enabled,
            metric_names.AGENTS: self.has_agents,
            metric_names.REPLAY: self.policy.router_replay.enabled,
        }
        return names.union(*(group for group, is_on in optional.items() if is_on))

    def cross_checks(self) -> Problems:
        yield from division_problems(self.cluster, self.policy.generation.colocated)
        yield from self.check_batches(self.policy)
        yield from check_layout(self.policy, self.training_cluster)
        for model in self.further_models:
            yield from check_layout(model.config, model.cluster)
            if model.config.router_replay.enabled:
                key = f"{model.key}.router_replay.enabled"
                yield key, f"its experts are not those that generated; {remedy(f'{key}=false')}"
            if (length := model.config.max_total_sequence_length) < self.policy.max_total_sequence_length:
                yield (
                    f"{model.key}.max_total_sequence_length",
                    f"{length} is less than policy.max_total_sequence_length={self.policy.max_total_sequence_length}, "
                    "and this model reads the same samples; leave it out",
                )
        yield from self._check_engines()
        yield from self._check_environments()
        yield from self.check_validation(has_data=self.data.has_validation)
        replayed = self.rollout.replay_from
        if replayed is not None and not Path(replayed).is_dir():
            yield (
                f"{self.section}.replay_from",
                f"there is no folder {replayed!r} (looked in {Path.cwd()}); name the {self.section}.rollout_record."
                "save_dir of the run that recorded",
            )

    def check_batches(self, policy: PolicyConfig) -> Problems:
        """Check that optimizer steps and ranks of a model can share the samples of a step evenly."""
        rollout, section, global_batch = self.rollout, self.section, policy.train_global_batch_size
        samples = rollout.num_samples_per_step
        if samples % global_batch:
            yield (
                policy.key("train_global_batch_size"),
                f"{global_batch} does not divide the {samples} samples of a step ({section}.num_prompts_per_step="
                f"{rollout.num_prompts_per_step} x num_generations_per_prompt={rollout.num_generations_per_prompt}); "
                f"these would: {divisors(samples, near=global_batch)}",
            )
        num_ranks = data_parallel_size(policy, self.training_cluster)
        works = divisors(samples, near=global_batch, multiple_of=num_ranks or 1)
        fix = f"these would: {works}"
        if not works:
            prompts = rollout.num_prompts_per_step
            fix = f"make it and {section}.num_prompts_per_step (now {prompts}) multiples of {num_ranks}"
        yield from check_batching(policy, num_ranks, fix=fix)

    def _check_engines(self) -> Problems:
        """Check that engines fill the machines."""
        cluster, generation = self.generation_cluster, self.policy.generation
        which = "of the cluster" if generation.colocated.enabled else "that generate"
        yield from generation.engine.unfit_places(cluster.num_workers, cluster.workers_per_node, cluster.kind, which)

    def _check_environments(self) -> Problems:
        """Check that datasets name existing environments, and that these have enough turns and time."""
        datasets = {"train": self.data.train, "validation": self.data.validation or []}
        unknown = [
            (f"data.{name}.{index}.env_name", dataset.env_name)
            for name, rows in datasets.items()
            for index, dataset in enumerate(rows)
            if dataset.env_name not in self.env
        ]
        for key, name in unknown:
            yield key, f"no section env.{name}; {did_you_mean(name, self.env)}"
        named = dict.fromkeys(dataset.env_name for rows in datasets.values() for dataset in rows)
        answering = [name for name in named if name in self.env]
        for name in named_sections(self.env, answering):
            if name in self.env and (problem := unknown_type(self.env[name].type)):
                yield f"env.{name}.type", problem
        for name in answering:
            yield from self._check_turns(name)
        yield from check_sections(self.env, self.rollout.env_step_timeout_s)
        if not unknown:  # names of tasks, and with them of metrics, follow from the environments
            # What an environment reports of itself is not known before it runs.
            yield from self.check_metric_names(free_prefixes=self.env)

    def _check_turns(self, name: str) -> Problems:
        """Check that an episode in the environment `name` can end within its turns."""
        section, turns, key = self.env[name], self.rollout.max_rollout_turns, f"{self.section}.max_rollout_turns"
        if isinstance(section, AgentEnvironmentConfig) and self.section != "grpo":
            yield f"env.{name}.type", f"agents train with GRPO; {self.section} takes environments"
        if isinstance(section, RetrievalEnvironmentConfig) and turns <= section.max_searches:
            yield (
                key,
                f"{turns} leaves no turn to answer after the {section.max_searches} searches of env.{name}; "
                + remedy(
                    f"{key}={section.max_searches + 1}", *([f"env.{name}.max_searches={turns - 1}"] * (turns > 1))
                ),
            )
        elif isinstance(section, PythonToolsEnvironmentConfig) and turns < 2:
            yield (
                key,
                f"1 leaves no turn to read the result of a tool of env.{name}, and an answer needs one more than its "
                f"calls; {remedy(f'{key}=2')}",
            )
        elif isinstance(section, SlidingPuzzleEnvironmentConfig):
            rows = [row for row in [*self.data.train, *(self.data.validation or [])] if row.env_name == name]
            own = [row.kwargs["max_moves"] for row in rows if row.kwargs.get("max_moves")]
            limits = [*own, *([section.cfg.max_moves] * (len(own) < len(rows)))]
            longest = max((limit for limit in limits if isinstance(limit, int)), default=0)
            ways = [f"{key}={longest}", *([] if own else [f"env.{name}.cfg.max_moves={turns}"])]
            if turns < longest:
                yield (
                    key,
                    f"{turns} cuts games of env.{name} off before their {longest} moves are made; {remedy(*ways)}",
                )
