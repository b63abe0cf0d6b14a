"""Configuration of generation: sampling, the vLLM engine, and which devices it runs on."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nemo_rl.config.errors import nearest_key
from nemo_rl.config.rules import Derived, StrictModel, violations

SPECULATION = "speculative_config"
# What the bits of a sample on a CPU depend on; see `vllm.plugins`.
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # a second thread of n-gram drafts would only spin
}
_SET_ON_CPUS = (
    *ENGINE_ENVIRONMENT,
    "TORCHDYNAMO_DISABLE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)

_SPECULATION_DEFAULTS = {
    "method": None,
    "num_speculative_tokens": None,
    "model": None,
    "rejection_sample_method": "standard",
    "draft_sample_method": "greedy",
    "draft_load_config": None,
}
_SPECULATION_RULES = {
    "method != [ngram, draft_model, eagle3, mtp]": "not supported yet: {method}; set ngram, draft_model, eagle3 or mtp",
    "model: method=mtp excludes model": "its weights are in the policy's checkpoint; remove the key",
    "model: method=draft_model requires model": (
        "a draft model needs the name or folder of its weights; name one with the policy's vocabulary"
    ),
    "rejection_sample_method != standard": "must be standard, which keeps the distribution; remove the key",
    "draft_sample_method != greedy": "must be greedy: drawn drafts follow no request's seed; remove the key",
    "draft_load_config != null": "the library decides it: a draft model is read from disk; remove the key",
}


def engine_arguments() -> set[str]:
    """The names of vLLM's arguments, read from its source: an import takes seconds. Empty where vLLM is missing."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return set()
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("EngineArgs")]
    fields = [field.target for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    return {target.id for target in fields if isinstance(target, ast.Name)}


def argument_problems(vllm_kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key relative to `vllm_kwargs`, what would work) for names that vLLM does not know."""
    known = engine_arguments() if vllm_kwargs else set[str]()
    for key in vllm_kwargs if known else ():
        if key not in known:
            nearest = nearest_key(key, sorted(known))
            yield key, f"vLLM has no such argument; {f'the nearest is {nearest}' if nearest else 'remove the key'}"


def speculation_problems(vllm_kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key relative to `vllm_kwargs`, what would work) for speculative decoding that would bias samples or cannot run.

    Accepted settings keep the distribution without drafts, report its logprobs, and depend on a request's seed alone.
    """
    settings = vllm_kwargs.get(SPECULATION)  # null is vLLM's own default: none
    if settings is None:
        return
    if not isinstance(settings, dict):
        yield SPECULATION, "must be a section, such as {method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4}"
        return
    given = {**_SPECULATION_DEFAULTS, **settings}
    for key, message in violations(_SPECULATION_RULES, given):
        yield f"{SPECULATION}.{key}", message
    number = given["num_speculative_tokens"]
    if type(number) is not int or number < 1:
        text = f"must be the number of tokens of a draft, 1 or more (got {number!r})"
        yield f"{SPECULATION}.num_speculative_tokens", text


def _read(written: Any, meant: Any) -> BeforeValidator:
    """Reads the value `written` as `meant`."""
    return BeforeValidator(lambda value: meant if type(value) is type(written) and value == written else value)


TopK = Annotated[Annotated[int, Field(ge=1)] | None, _read(-1, None)]


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


class HttpServerConfig(StrictModel):
    """Address and token of the OpenAI-compatible server."""

    host: str = "127.0.0.1"
    """Address to listen on. At a public one, everybody with the token can use the engines; nothing is encrypted."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: any that is free."""

    token_env: str | None = Field(default=None, min_length=1)
    """Environment variable with the token that every request must carry; null: a random token."""


class ServingChatConfig(StrictModel):
    """How the server turns conversations into prompts, and answers into messages."""

    enable_auto_tools: bool = True
    """Return tool calls as `tool_calls` of the message; false: they stay text."""

    tool_parser: Literal["hermes"] = "hermes"
    """Format of tool calls: `hermes` is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    default_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, e.g. `{enable_thinking: false}`."""


class VllmConfig(StrictModel):
    """The vLLM engine."""

    _path: str = "policy.generation.vllm_cfg"
    name: ClassVar = "vLLM"
    length_key: ClassVar = "max_model_len"

    precision: Annotated[Literal["float32", "bfloat16", "float16", "fp8"], Derived("${...precision}")]
    """Data type of weights and activations. `fp8` (GPUs): weights come in bfloat16 at every sync, and weights of linear
    layers and experts are kept in FP8, with a scale for each 128 x 128 of them."""

    kv_cache_dtype: Annotated[Literal["auto", "fp8", "fp8_e4m3", "fp8_per_token_head"], _read(None, "auto")] = "auto"
    """Data type of keys and values in the cache; `auto`: the data type of activations. On GPUs, `fp8` and `fp8_e4m3`
    store values without a scale, `fp8_per_token_head` with one for each token and head."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share every layer of one engine."""

    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Groups of `tensor_parallel_size` devices among which the layers of one engine are divided."""

    max_model_len: Annotated[int, Derived("${...max_total_sequence_length}"), Field(ge=1)]
    """Tokens of the longest sequence, prompt included; longer completions are cut."""

    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    """Fraction of the GPU's memory for weights and KV cache."""

    cpu_kv_cache_space_gb: int = Field(default=1, ge=1)
    """GiB of KV cache of each engine on CPU."""

    enforce_eager: bool = False
    """Do not compile or capture graphs. Always so on CPU."""

    enable_prefix_caching: bool = True
    """Share the KV cache of equal beginnings. On CPU: of equal prompts, as the samples of a group have."""

    logprobs_mode: Annotated[Literal["processed_logprobs", "raw_logprobs"], _read(None, "processed_logprobs")] = (
        "processed_logprobs"
    )
    """Logprobs of samples: after temperature, top-p, top-k and bad words, or those of the model before all of them."""

    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engines' processes."""

    expose_http_server: Annotated[bool, _read(None, False)] = False
    """Serve the engines to other programs during training, with OpenAI's interface."""

    http_server: HttpServerConfig = HttpServerConfig()
    """Address and token of the OpenAI-compatible server."""

    http_server_serving_chat_kwargs: Annotated[ServingChatConfig, _read(None, {})] = ServingChatConfig()
    """How the server turns conversations into prompts, and answers into messages."""

    rules: ClassVar = {"env_vars.TMPDIR: env_vars has TMPDIR": "the library decides it; set TMPDIR for the whole run"}

    @property
    def batched_tokens_on_cpu(self) -> int:
        """Prompt tokens of an engine step on a CPU."""
        return max(self.max_model_len, 8192)

    @property
    def dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Data type of activations, and in which weights are sent."""
        return "bfloat16" if self.precision == "fp8" else self.precision

    @property
    def engine_size(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def variable_rules(section: str) -> dict[str, str]:
    """Rules of a whole configuration, whose engines' section is `section`: variables that engines on CPUs need."""
    return {
        f"{section}.env_vars.{name}: {section}.env_vars has {name} requires cluster.use_gpus": (
            "the library decides it on CPUs; remove the key"
        )
        for name in _SET_ON_CPUS
    }


class SglangConfig(StrictModel):
    """The SGLang engine."""

    _path: str = "policy.generation.sglang_cfg"
    name: ClassVar = "SGLang"
    length_key: ClassVar = "context_length"
    kv_cache_dtype: ClassVar = "auto"
    engine_size: ClassVar = 1
    tensor_parallel_size: ClassVar = 1

    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Derived("${...precision}")]
    """Data type of weights, activations and cache."""

    context_length: Annotated[int, Derived("${...max_total_sequence_length}"), Field(ge=1)]
    """Tokens of the longest sequence, prompt included; longer completions are cut."""

    cpu_kv_cache_space_gb: int = Field(default=1, ge=1)
    """GiB of KV cache of each engine on CPU."""

    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engines' processes."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.context_length


class HfConfig(StrictModel):
    """Generation by the policy's own workers (`backend: hf` or `megatron`)."""

    max_batch_size: int = Field(default=64, ge=1)
    """Completions that each data-parallel rank samples at a time."""


_SAME = ("kv_cache_dtype", "max_model_len", "tensor_parallel_size", "pipeline_parallel_size")
_SAME = (*_SAME, "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")
_DECIDED_BY = {key: f"vllm_cfg.{key}" for key in (*_SAME, "logprobs_mode")} | {
    "dtype": "vllm_cfg.precision",
    "quantization": "vllm_cfg.precision",
    "kv_cache_memory_bytes": "vllm_cfg.gpu_memory_utilization (on CPUs vllm_cfg.cpu_kv_cache_space_gb)",
    "enable_sleep_mode": "colocated.enabled",
}
_OURS = (
    "distributed_executor_backend",
    "load_format",
    "worker_extension_cls",
    "weight_transfer_config",
)
_DECIDED = {
    **{key: f"{{section}}.{name} decides it; set that instead" for key, name in _DECIDED_BY.items()},
    **dict.fromkeys(("model", "tokenizer", "seed"), "the run sets it; remove the key"),
    "limit_mm_per_prompt": "data.max_images decides it; set that instead, and remove this",
    **dict.fromkeys(_OURS, "the library decides it; remove the key"),
}
"""Keys of `vllm_kwargs` that something else decides."""


class GenerationConfig(StrictModel):
    """Generation: sampling parameters and the engine."""

    _path: str = "policy.generation"

    backend: Literal["vllm", "sglang", "hf", "megatron"] = "vllm"
    """`vllm` and `sglang`: engines of vLLM or SGLang. `hf` and `megatron`: the policy's own workers, with the
    transformers or Megatron Core model that they train."""

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

    hf_cfg: HfConfig = HfConfig()
    """Generation by the policy's own workers."""

    mcore_generation_config: Annotated[HfConfig, _read(None, {})] = HfConfig()
    """Generation by the policy's own Megatron workers."""

    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments, passed to vLLM as they are."""

    rules: ClassVar = {
        **{f"vllm_kwargs.{key}: vllm_kwargs has {key}": text for key, text in _DECIDED.items()},
        **{
            f"vllm_cfg.logprobs_mode: vllm_cfg.logprobs_mode=raw_logprobs and {setting}": (
                f"raw_logprobs are before {name}, which training applies to its own -> "
                f"vllm_cfg.logprobs_mode=processed_logprobs | {fix}"
            )
            for setting, name, fix in (
                ("temperature != 1", "the temperature", "temperature=1"),
                ("top_p < 1", "top_p", "top_p=1"),
                ("top_k", "top_k", "top_k=null"),
            )
        },
    }

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        for key, message in (*argument_problems(self.vllm_kwargs), *speculation_problems(self.vllm_kwargs)):
            yield f"vllm_kwargs.{key}", message

    @property
    def is_by_policy(self) -> bool:
        """Whether the policy's own workers generate."""
        return self.backend in ("hf", "megatron")

    @property
    def engine(self) -> VllmConfig | SglangConfig:
        """The section of the engine that generates; of vLLM's also where the policy's own workers do."""
        return self.sglang_cfg if self.backend == "sglang" else self.vllm_cfg

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
        return self.vllm_cfg.enable_prefix_caching and not self.speculation

    @property
    def speculation(self) -> Mapping[str, Any]:
        """The settings of speculative decoding; empty without it."""
        settings = self.vllm_kwargs.get(SPECULATION)
        return settings if isinstance(settings, dict) else {}

    def draft_problems(self, is_trained: bool, begins_with: str | None = None) -> Iterator[tuple[str, str]]:
        """(key, what would work) if an EAGLE-3 draft is missing, or one that trains with the policy is not used.

        `begins_with`: the name of the draft that trains.
        """
        key, model = f"vllm_kwargs.{SPECULATION}", self.speculation.get("model")
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
