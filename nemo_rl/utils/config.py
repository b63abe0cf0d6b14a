"""Configuration that every run has: its machines, logs and checkpoints."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr

from nemo_rl.config.rules import StrictModel, accepted_by
from nemo_rl.utils.timer import parse_duration_s


class MachinesConfig(StrictModel):
    """Machines: how many nodes, and how many GPUs of each."""

    gpus_per_node: int = Field(default=1, ge=0)
    """GPUs used on each node; 0: everything runs on CPU."""

    num_nodes: int = Field(default=1, ge=1)
    """Number of nodes."""


class ClusterConfig(MachinesConfig):
    """Machines of the run."""

    cpu_workers_per_node: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Workers on each node when `gpus_per_node` is 0. `auto`: one for each physical core of the machine that starts the
    run, or as many as can share the batches and fit into its memory; a run that resumes keeps its checkpoint's."""

    worker_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for a worker; past it the run ends and shows which worker hangs, where, with its Python stack."""

    grace_s: float = Field(8.0, ge=0)
    """Seconds from SIGTERM or Ctrl-C to the end: the step is finished and saved if that fits. `docker stop` waits 10
    seconds."""

    _reason: str | None = PrivateAttr(None)

    @property
    def reason(self) -> str | None:
        """Why there are so many CPU workers, if the number was chosen (`auto`); None: it was given, or GPUs count."""
        return self._reason

    def with_workers(self, number: int, reason: str) -> Self:
        """These machines with `number` CPU workers on each node, chosen for `reason`."""
        cluster = self.model_copy(update={"cpu_workers_per_node": number})
        cluster._reason = reason
        return cluster

    @property
    def use_gpus(self) -> bool:
        return self.gpus_per_node > 0

    @property
    def unit(self) -> str:
        """The key that counts the workers of a node."""
        return "gpus_per_node" if self.use_gpus else "cpu_workers_per_node"

    @property
    def kind(self) -> str:
        """`GPUs` or `CPU workers`, for messages."""
        return "GPUs" if self.use_gpus else "CPU workers"

    @property
    def workers_per_node(self) -> int:
        """Workers of one group on each node: one per GPU, or `cpu_workers_per_node`."""
        if self.use_gpus:
            return self.gpus_per_node
        assert self.cpu_workers_per_node != "auto", "a whole configuration has a number"
        return self.cpu_workers_per_node

    @property
    def num_workers(self) -> int:
        return self.workers_per_node * self.num_nodes


class ProjectConfig(StrictModel):
    """A tracker that groups runs by project, such as trackio."""

    project: str = "nemo-rl"
    """Project of the run."""

    name: str | None = None
    """Name of the run; null: chosen by the tracker."""


class WandbConfig(ProjectConfig):
    """Weights & Biases."""

    entity: str | None = None
    """Team or user; null: the default of the account."""

    mode: Literal["online", "offline"] = "online"
    """`offline` writes under the run's log folder, for `wandb sync` later."""


class MLflowConfig(StrictModel):
    """MLflow."""

    experiment_name: str = "nemo-rl"
    """Experiment of the run; created if there is none."""

    run_name: str | None = None
    """Name of the run; null: the name of its log folder."""

    run_id: str | None = None
    """An existing run to write into; null: a new run, or the run of the checkpoint that this one resumes."""

    tracking_uri: str | None = None
    """Server (http://...) or database (sqlite:///...); null: `MLFLOW_TRACKING_URI`, or `mlflow.db` in `log_dir`."""

    artifact_location: str | None = None
    """The place of a new experiment's files; null: chosen by the server, or `mlflow_artifacts` beside `mlflow.db`."""


class SwanLabConfig(ProjectConfig):
    """SwanLab."""

    workspace: str | None = None
    """User or organization; null: the default of the account."""

    mode: Literal["online", "offline"] = "online"
    """`offline` writes under the run's log folder, for `swanlab sync` later."""


class MonitoringConfig(StrictModel):
    """Meters of memory and load."""

    collection_interval: float = Field(default=10.0, gt=0)
    """Seconds between two readings."""


class AlarmsConfig(StrictModel):
    """Alarms on learning: warnings on the console. null switches one off."""

    enabled: bool = True
    """Watch the curves of the run."""

    window: int = Field(default=5, ge=1)
    """Steps whose median counts, at the start of the run and now."""

    solved_reward: float = 0.9
    """Mean training reward from which low entropy, short answers and equal groups are no fault."""

    entropy_collapse: float | None = 0.05
    """Share of the first entropy below which the policy has collapsed."""

    length_explosion: float | None = 4.0
    """Factor on the first length of answers."""

    length_collapse: float | None = 0.2
    """Share of the first length of answers."""

    mixed_groups: float | None = 0.1
    """Share of groups with different rewards below which there is hardly anything to learn from."""

    kl_blowup: float | None = 1.0
    """KL from the reference policy, per token."""

    gradient_spike: float | None = 10.0
    """Factor on the median of the 20 steps before, of the gradient norm over the root of the share of mixed groups."""

    clip_fraction: float | None = 0.5
    """Share of clipped tokens."""

    truncation: float | None = 0.5
    """Share of answers that end at the length limit."""

    repetition_loops: float | None = 0.1
    """Share of answers that repeat the same tokens up to their end."""

    disagreement: float | None = 1.05
    """`token_mult_prob_error` above which the run looks for the cause and names it."""

    sample_disagreement: float | None = 2.0
    """The same for the worst sample, `sample_mult_prob_error_max`."""

    reward_hacking: float | None = 0.1
    """Fall of validation accuracy from its best while the training reward rises."""


class ReportConfig(StrictModel):
    """The report of a run: `report.html` in its log folder, and the files it is made of."""

    enabled: bool = True
    """Make the report. Rewards of all groups, times of all workers and some samples are kept beside `metrics.jsonl`."""

    every_s: float = Field(default=60.0, gt=0)
    """Seconds from one version of the page to the next, from the first step on. A process of low priority makes it."""

    samples_per_step: int = Field(default=16, ge=0)
    """Samples of each step that are kept with their tokens: of as many groups as possible the best and the worst, then
    the next ones of each."""

    tokens_per_sample: int = Field(default=2048, ge=2)
    """Tokens that are kept of a sample; of a longer one its beginning and its end."""


class LoggerConfig(StrictModel):
    """Logs: console, metrics.jsonl, and the trackers TensorBoard, Weights & Biases, MLflow, SwanLab and trackio."""

    log_dir: str = "logs"
    """Folder of all runs; each run writes into its own `exp_NNN` below it."""

    num_val_samples_to_print: int = Field(default=0, ge=0)
    """Rollouts of each validation on the console, in `validation_step_N.jsonl`, and as a table in the trackers."""

    tensorboard_enabled: bool = False
    """Write TensorBoard event files into the run's folder."""

    wandb_enabled: bool = False
    """Report to Weights & Biases."""

    wandb: WandbConfig = WandbConfig()
    """Used when `wandb_enabled`."""

    mlflow_enabled: bool = False
    """Report to MLflow: a server, or a SQLite file."""

    mlflow: MLflowConfig = MLflowConfig()
    """Used when `mlflow_enabled`."""

    swanlab_enabled: bool = False
    """Report to SwanLab."""

    swanlab: SwanLabConfig = SwanLabConfig()
    """Used when `swanlab_enabled`."""

    trackio_enabled: bool = False
    """Report to trackio, by default a SQLite file of this user."""

    trackio: ProjectConfig = ProjectConfig()
    """Used when `trackio_enabled`."""

    monitor_gpus: bool = False
    """Log the memory of every kind of worker and the load of its GPUs, as `system/<workers>/...`."""

    gpu_monitoring: MonitoringConfig = MonitoringConfig()
    """Used when `monitor_gpus`."""

    alarms: AlarmsConfig = AlarmsConfig()
    """Warnings about the curves of the run."""

    report: ReportConfig = ReportConfig()
    """The page `report.html` of the run."""

    @property
    def enabled_trackers(self) -> list[str]:
        """Names of the packages that get the metrics too."""
        names = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
        return [name for name in names if vars(self)[f"{name}_enabled"]]


class ProfileConfig(StrictModel):
    """Traces of torch's profiler, in `profile/` of the run's log folder."""

    steps: list[int] = Field(default_factory=list)
    """Steps to profile, counted from 1; empty: none."""

    workers: list[str] = Field(default_factory=lambda: ["policy-0"])
    """Names of the workers to profile; `*` and `?` stand for any characters, as in `policy-*`."""


class PerformanceConfig(StrictModel):
    """Measurements that a run makes of its own speed."""

    profile: ProfileConfig = ProfileConfig()
    """Profiles of workers."""


def logged_metric(name: str) -> str:
    """The name in the logs of `val:<metric>` or `train:<metric>`. ValueError for another name."""
    prefix, _, metric = name.partition(":")
    if prefix not in ("val", "train") or not metric:
        raise ValueError(f'must be "val:<metric>", "train:<metric>" or null, e.g. "val:accuracy" (got {name!r})')
    return f"{'validation' if prefix == 'val' else 'train'}/{metric}"


def chosen_metric(key: str, name: str, metrics: Mapping[str, float], known: Collection[str]) -> float | None:
    """The metric `name` that the setting `key` chooses; None if `metrics` lack it this time.

    `metrics` and `known` are by logged name. `known` metrics follow from the configuration, and not every step has
    them. Others come from environments: if its environment reports others, ValueError names them.
    """
    logged = logged_metric(name)
    if logged in metrics:
        return metrics[logged]
    owner = "/".join(logged.split("/")[:-1][:2]) + "/"  # train/<environment>/
    others = sorted(other for other in metrics.keys() - known if other.startswith(owner))
    if logged not in known and others:
        raise ValueError(f'{key} is "{name}" and no metric is called {logged}; there are: {", ".join(others)}')
    return None


class CheckpointingConfig(StrictModel):
    """Checkpoints: where, when, which are kept."""

    enabled: bool = True
    """Save checkpoints, and resume from the newest sound one."""

    checkpoint_dir: str = "results/grpo"
    """Folder of `step_N`."""

    metric_name: Annotated[str, accepted_by(logged_metric)] | None = "val:accuracy"
    """Metric that ranks checkpoints: `val:<metric>`, `train:<metric>`, or null to rank by age."""

    higher_is_better: bool = True
    """Whether a larger `metric_name` is the better one."""

    keep_top_k: int | None = Field(default=3, ge=1)
    """Number of checkpoints kept in addition to the latest; null: all."""

    save_period: int = Field(default=10, ge=1)
    """Steps from one checkpoint to the next. The last step is always saved."""

    ft_save_period: int | None = Field(default=None, ge=1)
    """Save also after every so many steps, to lose little when machines fail; null: no such checkpoints."""

    ft_keep_latest_k: int | None = Field(default=None, ge=1)
    """Latest checkpoints kept, whatever their metric; null: the latest one. With this or `ft_save_period`, `keep_top_k`
    counts only checkpoints at multiples of `save_period`."""

    checkpoint_must_save_by: Annotated[str, accepted_by(parse_duration_s)] | None = None
    """Time after the start, as DD:HH:MM:SS, by which the run saves and ends; null: no limit."""

    save_optimizer: bool = True
    """Save the optimizer and the scheduler; without them a run cannot be resumed."""

    model_save_format: Literal["torch_save", "safetensors"] | None = "torch_save"
    """Format of the sharded policy weights: torch.distributed.checkpoint with its own files or with safetensors;
    null: `torch_save`."""

    save_consolidated: bool = False
    """Also write the weights as one Hugging Face model directory."""

    async_save: bool = False
    """Train while a checkpoint is written. Needs host memory for one more copy of the saved state."""

    def saves_after(self, step: int) -> bool:
        """Whether one of the periods asks for a checkpoint after this step."""
        return step % self.save_period == 0 or (self.ft_save_period is not None and step % self.ft_save_period == 0)

    def is_ranked(self, step: int) -> bool:
        """Whether the checkpoint of this step is one of those of which `keep_top_k` keeps the best."""
        return (self.ft_save_period is None and self.ft_keep_latest_k is None) or step % self.save_period == 0
