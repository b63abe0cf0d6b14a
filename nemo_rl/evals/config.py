"""Configuration of an evaluation: metric, sampling, datasets and environments."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from nemo_rl.algorithms.config.workers import ChoosesWorkers
from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.rules import Derived, StrictModel, remedy
from nemo_rl.data.datasets.hub import EVAL_DATASETS, answer_kind
from nemo_rl.environments.config import (
    CodeEnvironmentConfig,
    EnvSection,
    MathEnvironmentConfig,
    check_sections,
    environment_gpus,
    judges_of,
    sections_of,
)
from nemo_rl.models.generation.config import DEFAULT_ENGINE, LONGEST_ALONE, LoneGenerationConfig, run_rules
from nemo_rl.models.policy.config import TokenizerConfig
from nemo_rl.utils.config import ClusterConfig

WITHOUT_ANSWERS = ("reward_model", "llm_judge")  # environments that score and extract nothing


class EvalConfig(StrictModel):
    """The metric, how many samples it takes, and where results go."""

    metric: Literal["pass@k", "cons@k"] = "pass@k"
    """`pass@k`: is one of k samples right (unbiased estimate); `cons@k`: is the answer that most of k samples give."""

    num_tests_per_prompt: int = Field(default=1, ge=1)
    """Samples of each prompt."""

    k_value: int = Field(default=1, ge=1)
    """The k of the metric."""

    seed: int = Field(default=42, ge=0)
    """Seed of everything random."""

    save_path: str | None = None
    """Folder of samples and results; the same command continues an evaluation. null: results/eval/ and a name
    made of model, datasets and settings."""

    max_rollout_turns: int = Field(default=1, ge=1)
    """Turns of a sample with its environment."""

    max_failed_sample_fraction: float = Field(default=0.1, ge=0, le=1)
    """The evaluation stops when more than this fraction of its samples failed in the environment or the engine."""

    env_step_timeout_s: float = Field(default=300.0, gt=0)
    """Time limit for one step of an environment; past it the sample counts as failed."""


class EvalGenerationConfig(LoneGenerationConfig):
    """The model, sampling parameters and the engine."""

    model_name: str
    """Hugging Face name or folder, `tiny:arithmetic`, a checkpoint (`results/grpo/step_100`), or a folder of
    checkpoints, of which the newest sound one is taken."""

    num_prompts_per_step: int = Field(default=-1, ge=-1)
    """Prompts under way at a time; -1: as many as keep the engines busy."""

    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""

    rules: ClassVar = {
        "num_prompts_per_step=0": "must be 1 or more, or -1 to keep the engines busy -> num_prompts_per_step=-1",
        "{engine_key}.expose_http_server: engine.expose_http_server": (
            "an evaluation ends before anybody could ask -> {engine_key}.expose_http_server=false"
        ),
        "backend: is_by_policy": f"{{backend}} is for training, whose policy generates -> backend={DEFAULT_ENGINE}",
        "colocated.enabled=false": "nothing trains here, so engines have all machines -> colocated.enabled=true",
        **{
            f"val_{name} != {{{name}}}": (
                f"is for validation during training -> {name}={{val_{name}}} | val_{name}={{{name}}}"
            )
            for name in ("temperature", "top_p", "top_k")
        },
    }

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from super().cross_checks()
        yield from self.draft_problems(False)


class EvalTokenizerConfig(TokenizerConfig):
    """The tokenizer."""

    name: Annotated[str, Derived("${generation.model_name}")]
    """Hugging Face name or folder; by default the model's, or the tokenizer saved in a checkpoint."""


class EvalDatasetConfig(StrictModel):
    """One dataset to evaluate on."""

    dataset_name: str | None = None
    """Registry name (`aime2024`, `math500`, `gpqa_diamond`, `mmlu`, `arithmetic`, ...), import path
    (`pkg.module:function`), Hugging Face path, or a local CSV, JSON, JSONL or Parquet file."""

    data_path: str | None = None
    """Local copy of a dataset of the registry."""

    problem_key: str | None = None
    """Column of the problem in a file or a Hugging Face path; null: `problem`."""

    solution_key: str | None = None
    """Column of the expected answer there; null: `answer`."""

    file_format: str | None = None
    """`csv`, `json`, `jsonl` or `parquet`, for a file whose name does not say so."""

    subset: str | None = None
    """Configuration name of a Hugging Face dataset."""

    split: str | None = None
    """Split to read; null: the dataset's own default."""

    repeat: int = Field(default=1, ge=1)
    """How many times every problem is asked, as a prompt of its own, each with `eval.num_tests_per_prompt` samples."""

    seed: int = 42
    """Seed of the draws of the dataset: the order of GPQA's options, generated problems."""

    download_dir: str | None = None
    """Cache folder of downloads; null: Hugging Face's."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the dataset, e.g. `{num_samples: 1000}` of the generated `arithmetic` dataset."""

    prompt_file: Annotated[str | None, Derived("${data.prompt_file}")] = None
    """Text file with the prompt template, `{}` standing for the problem; null: only the problem."""

    system_prompt_file: Annotated[str | None, Derived("${data.system_prompt_file}")] = None
    """Text file with the system prompt; null: none."""

    processor: str | None = None
    """Registry name or import path of the function that turns a row into a prompt; null: the dataset's own."""

    env_name: str | None = None
    """Section of `env` that judges the answers; null: the first math environment whose `verifier_type` is right, or
    for programs the first code environment."""

    rules: ClassVar = {
        f"{key} and has_own_columns": (
            "{dataset_name} has columns of its own; remove it, or name the file: dataset_name"
        )
        for key in ("problem_key", "solution_key", "file_format")
    }

    @property
    def has_own_columns(self) -> bool:
        return self.dataset_name in EVAL_DATASETS


class EvalDataConfig(EvalDatasetConfig):
    """The problems: one dataset, or several under `datasets`, and the texts around each problem."""

    prompt_file: str | None = None
    """Text file with the prompt template, `{}` standing for the problem; null: only the problem."""

    system_prompt_file: str | None = None
    """Text file with the system prompt; null: none."""

    datasets: list[EvalDatasetConfig] = Field(default_factory=list)
    """Several datasets, in place of `dataset_name`."""

    max_images: int = Field(default=8, ge=1)
    """The most images of a problem; for vision-language models."""

    max_input_seq_length: Annotated[int, Derived(f"${{generation.{LONGEST_ALONE}}}"), Field(ge=1)]
    """Tokens of the longest prompt; longer ones are left out and counted."""

    @property
    def chosen(self) -> list[EvalDatasetConfig]:
        """The datasets to evaluate on."""
        return self.datasets or [self]

    rules: ClassVar = {
        "datasets excludes dataset_name": ("and dataset_name={dataset_name} are both set -> dataset_name=null"),
        "dataset_name=null requires datasets": (
            "name a dataset, e.g. dataset_name: math500, or a file: dataset_name: my_rows.jsonl; or several datasets"
        ),
        **{
            f"{key} and datasets": "counts only for dataset_name; set it in each of the datasets that need it"
            for key in ("processor", "env_name", "download_dir")
        },
        "repeat > 1 and datasets": "counts only for dataset_name; set it in each of the datasets that need it",
    }

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        for index, dataset in enumerate(self.datasets):
            if dataset.dataset_name is None:
                yield f"datasets.{index}.dataset_name", "name a dataset, e.g. math500, or a file"


class EvalMasterConfig(ChoosesWorkers):
    """A whole evaluation."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # for --help

    cpu_config: ClassVar[str] = "examples/configs/evals/eval_cpu.yaml"  # what a machine without a GPU can run

    eval: EvalConfig = EvalConfig()
    generation: EvalGenerationConfig
    tokenizer: EvalTokenizerConfig

    data: EvalDataConfig
    """The problems: one dataset, or several, and the texts around each problem."""

    env: EnvSection
    """Environments that judge the answers, by name."""

    cluster: ClusterConfig = ClusterConfig()
    """Machines: how many nodes, and how many GPUs or CPU workers of each."""

    rules: ClassVar = {
        **run_rules("generation"),
        "eval.k_value > {eval.num_tests_per_prompt}": (
            "{eval.k_value} is more than eval.num_tests_per_prompt={eval.num_tests_per_prompt}, and four times as many "
            "make a good estimate -> eval.num_tests_per_prompt={eval.k_value} and generation.temperature="
            "{sampling_temperature} | eval.k_value={eval.num_tests_per_prompt}"
        ),
        "generation.temperature=0 and eval.num_tests_per_prompt > 1": (
            "0 gives {eval.num_tests_per_prompt} equal samples of each prompt (eval.num_tests_per_prompt="
            "{eval.num_tests_per_prompt}) -> generation.temperature={sampling_temperature} | "
            "eval.num_tests_per_prompt=1"
        ),
        "data.max_input_seq_length > {generation.engine.longest_sequence}": (
            "{data.max_input_seq_length} is more than generation.{generation.length_path}="
            "{generation.engine.longest_sequence}: such prompts could never be answered -> "
            "data.max_input_seq_length={generation.engine.longest_sequence}"
        ),
    }

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        yield from check_sections(self.env, self.eval.env_step_timeout_s)
        engine, cluster = self.generation.engine, self.cluster
        yield from engine.unfit_places(cluster.num_workers, cluster.workers_per_node, cluster.kind, "of the cluster")
        for index, dataset in enumerate(self.data.chosen):
            yield from self._check_environment(dataset, f"data.datasets.{index}" if self.data.datasets else "data")

    def _check_environment(self, dataset: EvalDatasetConfig, key: str) -> Iterator[tuple[str, str]]:
        name = self.environment_of(dataset)
        if dataset.env_name is not None and dataset.env_name not in self.env:
            yield f"{key}.env_name", f"no section env.{dataset.env_name}; {did_you_mean(dataset.env_name, self.env)}"
        elif name is None:
            kind = answer_kind(dataset.dataset_name)
            section = "code={type: code}" if kind == "code" else f"{kind}={{type: math, verifier_type: {kind}}}"
            yield (
                f"{key}.env_name",
                f"no environment judges the answers of {dataset.dataset_name}: add a section to env, for instance "
                f"'+env.{section}', or name one with {key}.env_name",
            )
        elif self.eval.metric == "cons@k" and self.env[name].type in WITHOUT_ANSWERS:
            yield (
                "eval.metric",
                f"cons@k takes a vote on answers, and env.{name} ({self.env[name].type}) finds none; "
                + remedy("eval.metric=pass@k"),
            )

    @property
    def sampling_temperature(self) -> float:
        """A temperature at which samples of a prompt differ, for a remedy."""
        return self.generation.temperature or 0.6

    @property
    def gpus_beside_cluster(self) -> int:
        """GPUs of a node that environments need beside the GPUs of `cluster`."""
        used = [name for dataset in self.data.chosen if (name := self.environment_of(dataset)) is not None]
        return sum(environment_gpus(sections_of(self.env, judges_of(self.env, used))).values())

    @property
    def processes_per_worker(self) -> int:
        """Processes and threads of an engine and its rollout worker, as measured."""
        return 100

    def environment_of(self, dataset: EvalDatasetConfig) -> str | None:
        """The section of `env` that judges a dataset; None when there is none."""
        if dataset.env_name is not None:
            return dataset.env_name if dataset.env_name in self.env else None
        kind = answer_kind(dataset.dataset_name)
        if kind == "code":
            return next((name for name, env in self.env.items() if isinstance(env, CodeEnvironmentConfig)), None)
        math = MathEnvironmentConfig
        return next((n for n, env in self.env.items() if isinstance(env, math) and env.verifier_type == kind), None)

    def processor_of(self, dataset: EvalDatasetConfig) -> str:
        """The processor of a dataset: `processor`, or else the dataset's own."""
        of_kind = {"math": "math_hf_data_processor", "code": "code_data_processor"}
        return dataset.processor or of_kind.get(answer_kind(dataset.dataset_name), "multichoice_qa_processor")
