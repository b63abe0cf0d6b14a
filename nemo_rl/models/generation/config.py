"""Configuration of generation: sampling, the engines that there are, and which devices they run on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.rules import Derived, Rules, StrictModel, accepted_by, remedy
from nemo_rl.models.generation.engine_config import DType, EngineConfig, read_as
from nemo_rl.models.generation.sglang.config import LoneSglangConfig, SglangConfig
from nemo_rl.models.generation.vllm.config import SPECULATION, LoneVllmConfig, VllmConfig

ENGINES = {
    "vllm": "nemo_rl.models.generation.vllm.generation:VllmGeneration",
    "sglang": "nemo_rl.models.generation.sglang.generation:SglangGeneration",
}
"""`generation.backend` -> a subclass of `EngineGeneration`. The section of an engine `name` is `name_cfg`.

A backend that is not here is an import path of such a class, with the sections `engine_cfg` and `engine_kwargs`.
"""
DEFAULT_ENGINE = "vllm"
BY_POLICY = ("hf", "megatron")


def check_backend(name: str) -> None:
    """Raise ValueError unless `name` is a backend, or has the form of an import path."""
    if name not in (*ENGINES, *BY_POLICY) and ":" not in name:
        text = did_you_mean(name, [*ENGINES, *BY_POLICY])
        raise ValueError(f"unknown generation backend {name!r}; {text} An import path (package.module:name) works too")


TopK = Annotated[Annotated[int, Field(ge=1)] | None, read_as(-1, None)]


class GenerationResourcesConfig(StrictModel):
    """The part of the run's machines that generates; the rest trains."""

    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs of the one node that generate."""

    num_nodes: int | None = Field(default=None, ge=1)
    """Whole nodes of several that generate."""

    cpu_workers_per_node: int | None = Field(default=None, ge=1)
    """CPU workers of the one node that generate, if `cluster.gpus_per_node` is 0."""


class ColocatedConfig(StrictModel):
    """Whether generation shares the policy's devices."""

    enabled: bool = True
    """Generation and policy take turns on the same devices; false: each has devices of its own."""

    resources: GenerationResourcesConfig = GenerationResourcesConfig()
    """The machines that generate if `enabled` is false."""


class OwnEngineConfig(EngineConfig):
    """An engine of your own; its own settings are `engine_kwargs`."""

    _path: str = "policy.generation.engine_cfg"
    title: ClassVar = "your own"
    kwargs_key: ClassVar = "engine_kwargs"
    length_key: ClassVar = "max_model_len"
    dtype_key: ClassVar = "precision"
    tensor_key: ClassVar = "tensor_parallel_size"
    memory_key: ClassVar = "gpu_memory_utilization"
    library_bytes: ClassVar = 1_000_000_000.0  # as of vLLM, for want of a better figure

    precision: Annotated[DType, Derived("${...precision}")]
    """Data type of weights and activations."""

    max_model_len: Annotated[int, Derived("${...max_total_sequence_length}"), Field(ge=1)]
    """Tokens of the longest sequence, prompt included; longer completions are cut."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share every layer of one engine."""

    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    """Fraction of the GPU's memory for weights and KV cache."""

    @property
    def wire_dtype(self) -> DType:
        return self.precision

    @property
    def tensor_size(self) -> int:
        return self.tensor_parallel_size

    @property
    def memory_share(self) -> float:
        return self.gpu_memory_utilization


class LoneOwnEngineConfig(OwnEngineConfig):
    """An engine of your own; its own settings are `engine_kwargs`."""

    precision: DType = "bfloat16"
    """Data type of weights and activations."""

    max_model_len: Annotated[int, Derived("${..vllm_cfg.max_model_len}"), Field(ge=1)]
    """Tokens of the longest sequence, prompt included: where a completion is cut."""


_SECTIONS: dict[str, type[EngineConfig]] = {
    "vllm_cfg": VllmConfig,
    "sglang_cfg": SglangConfig,
    "engine_cfg": OwnEngineConfig,
}


class HfConfig(StrictModel):
    """Generation by the policy's own workers (`backend: hf` or `megatron`)."""

    max_batch_size: int = Field(default=64, ge=1)
    """Completions that each data-parallel rank samples at a time."""


class GenerationConfig(StrictModel):
    """Generation: sampling parameters and the engine."""

    _path: str = "policy.generation"

    backend: Annotated[str, accepted_by(check_backend)] = DEFAULT_ENGINE
    """`vllm` and `sglang`: engines of vLLM or SGLang. `hf` and `megatron`: the policy's own workers, with the
    transformers or Megatron Core model that they train. `package.module:name`: engines of your own."""

    max_new_tokens: Annotated[int, Derived("${..max_total_sequence_length}"), Field(ge=1)]
    """Tokens of the longest completion of one turn."""

    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; also applied when logprobs are recomputed in training."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability mass; 1: all."""

    top_k: TopK = None
    """Sample from the k likeliest tokens; null: all."""

    val_temperature: Annotated[float, Derived("${.temperature}"), Field(ge=0)]
    """Temperature in validation; 0 is greedy."""

    val_top_p: Annotated[float, Derived("${.top_p}"), Field(gt=0, le=1)]
    """`top_p` in validation."""

    val_top_k: Annotated[TopK, Derived("${.top_k}")]
    """`top_k` in validation."""

    stop_token_ids: list[int] | None = None
    """Tokens that end a completion, beside the end-of-sequence tokens of the tokenizer and the model."""

    stop_strings: list[str] | None = None
    """Strings that end a completion; null: none."""

    bad_words: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts that are never sampled, in validation neither; null: none. Engines then leave their logprobs out of the
    distribution: with `vllm_cfg.logprobs_mode: raw_logprobs` they report those that training computes."""

    colocated: ColocatedConfig = ColocatedConfig()
    """Whether generation shares the policy's devices."""

    vllm_cfg: VllmConfig
    """The vLLM engine."""

    sglang_cfg: SglangConfig
    """The SGLang engine."""

    engine_cfg: OwnEngineConfig
    """An engine of your own."""

    hf_cfg: HfConfig = HfConfig()
    """Generation by the policy's own workers."""

    mcore_generation_config: Annotated[HfConfig, read_as(None, {})] = HfConfig()
    """Generation by the policy's own Megatron workers."""

    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments, passed to vLLM as they are."""

    sglang_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments, passed to SGLang as they are."""

    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of an engine of your own."""

    rules: ClassVar = {rule: text for engine in _SECTIONS.values() for rule, text in engine.generation_rules.items()}

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        for key in _SECTIONS:
            engine: EngineConfig = vars(self)[key]
            arguments: dict[str, Any] = vars(self)[engine.kwargs_key]
            is_unused = engine is not self.engine
            if arguments and is_unused and not self.is_by_policy:
                yield engine.kwargs_key, f"backend={self.backend} takes none of {engine.title}; remove them"
            if engine.expose_http_server and is_unused:
                ways = remedy(f"{{section}}.{key}.expose_http_server=false")
                yield f"{key}.expose_http_server", f"backend={self.backend} reads {self.engine_key}; {ways}"
            for name, message in engine.argument_problems(arguments):
                yield f"{engine.kwargs_key}.{name}", message

    @property
    def default_engine(self) -> str:
        """The backend that can do most, for messages."""
        return DEFAULT_ENGINE

    @property
    def is_by_policy(self) -> bool:
        """Whether the policy's own workers generate."""
        return self.backend in BY_POLICY

    @property
    def engine_key(self) -> str:
        """Key of the section of the engine that generates, or of the default one where the policy's workers do."""
        if self.is_by_policy:
            return f"{DEFAULT_ENGINE}_cfg"
        return f"{self.backend}_cfg" if self.backend in ENGINES else "engine_cfg"

    @property
    def engine(self) -> EngineConfig:
        """The section `engine_key`."""
        return vars(self)[self.engine_key]

    @property
    def arguments(self) -> dict[str, Any]:
        """Further arguments of the engine."""
        return vars(self)[self.engine.kwargs_key]

    @property
    def length_path(self) -> str:
        """Key of the longest sequence."""
        return f"{self.engine_key}.{self.engine.length_key}"

    @property
    def dtype_path(self) -> str:
        """Key of the engine's data type."""
        return f"{self.engine_key}.{self.engine.dtype_key}"

    @property
    def tensor_path(self) -> str:
        """Key of the devices that share every layer."""
        return f"{self.engine_key}.{self.engine.tensor_key}"

    @property
    def takes_drafts(self) -> bool:
        """Whether engines generate that take a draft whose weights the policy sends."""
        return self.engine.takes_drafts and not self.is_by_policy

    @property
    def own_batch_size(self) -> int:
        """Completions that each data-parallel rank of the policy samples at a time."""
        return (self.mcore_generation_config if self.backend == "megatron" else self.hf_cfg).max_batch_size

    @property
    def is_filtered(self) -> bool:
        """Whether `top_p` or `top_k` leaves out tokens."""
        return self.top_p < 1 or self.top_k is not None

    @property
    def shares_prompts_on_cpu(self) -> bool:
        """Whether an engine on a CPU computes the prompt of several requests once, if the model lets it."""
        return self.engine.shares_prompts and not self.speculation

    @property
    def speculation(self) -> Mapping[str, Any]:
        """The settings of speculative decoding; empty without it."""
        settings = self.arguments.get(SPECULATION) if self.engine.takes_drafts else None
        return settings if isinstance(settings, dict) else {}

    @property
    def speculation_path(self) -> str:
        """Key of speculative decoding."""
        return f"{self.engine.kwargs_key}.{SPECULATION}"

    def draft_problems(self, is_trained: bool, begins_with: str | None = None) -> Iterator[tuple[str, str]]:
        """(key, what would work) if an EAGLE-3 draft is missing, or one that trains with the policy is not used.

        `begins_with`: the name of the draft that trains.
        """
        key, model = self.speculation_path, self.speculation.get("model")
        uses_draft = self.speculation.get("method") == "eagle3"
        if is_trained and self.speculation.get("method") not in ("eagle3", "mtp"):
            yield key, "policy.draft.enabled=true needs {method: eagle3, num_speculative_tokens: 3}, or method mtp"
        elif is_trained and model not in (None, begins_with):
            yield f"{key}.model", "policy.draft.model_name decides it; remove the key"
        elif uses_draft and not is_trained and model is None:
            yield (
                f"{key}.model",
                "eagle3 needs a draft of this model; name one (policy.draft of a training run trains it)",
            )


class LoneGenerationConfig(GenerationConfig):
    """Generation without a policy, from a model's own weights."""

    max_new_tokens: Annotated[int, Derived("${.vllm_cfg.max_model_len}"), Field(ge=1)]
    """Tokens of the longest completion of one turn."""

    vllm_cfg: LoneVllmConfig

    sglang_cfg: LoneSglangConfig

    engine_cfg: LoneOwnEngineConfig


LONGEST_ALONE = "vllm_cfg.max_model_len"
"""Key of `LoneGenerationConfig` from which the lengths of all engines follow by default."""


def policy_rules(generation: str) -> Rules:
    """The engines' rules of a policy whose section `generation` has this key."""
    return _rules_at(generation, [section.policy_rules for section in _SECTIONS.values()])


def run_rules(generation: str) -> Rules:
    """The engines' rules of a whole run or evaluation whose section `generation` has this key."""
    return _rules_at(generation, [section.run_rules for section in _SECTIONS.values()])


def training_rules(generation: str) -> Rules:
    """As `run_rules`, of a run that trains."""
    return _rules_at(generation, [section.training_rules for section in _SECTIONS.values()])


def _rules_at(generation: str, tables: Sequence[Rules]) -> Rules:
    place = f"{generation}."
    return {rule.replace("@.", place): text.replace("@.", place) for table in tables for rule, text in table.items()}
