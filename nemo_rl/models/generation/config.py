"""Configuration of generation: sampling, the vLLM engine, and which devices it runs on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nemo_rl.config.base import Derived, StrictModel
from nemo_rl.config.rules import NotYet, anything, one_of

# -- What of vLLM's speculative decoding may be asked for in `vllm_kwargs.speculative_config`. Free of vLLM.

SPECULATION = "speculative_config"
METHODS = ("ngram", "draft_model")


def speculation_problems(vllm_kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key relative to `vllm_kwargs`, what would work) for settings under which samples would not be what they seem.

    What is left follows the distribution without drafts, reports its logprobs, and depends on a request's seed alone.
    """
    if SPECULATION not in vllm_kwargs:
        return
    settings = vllm_kwargs[SPECULATION]
    if not isinstance(settings, Mapping):
        yield SPECULATION, "must be a section, such as {method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4}"
        return
    method = settings.get("method")
    if method not in METHODS:
        yield f"{SPECULATION}.method", f"not supported yet: {method}; set {' or '.join(METHODS)}"
    number = settings.get("num_speculative_tokens")
    if type(number) is not int or number < 1:
        yield (
            f"{SPECULATION}.num_speculative_tokens",
            f"must be the number of tokens of a draft, 1 or more (got {number!r})",
        )
    if method == "draft_model" and not isinstance(settings.get("model"), str):
        yield (
            f"{SPECULATION}.model",
            "a draft model needs the name or folder of its weights, with the policy's vocabulary",
        )
    if settings.get("rejection_sample_method", "standard") != "standard":
        yield f"{SPECULATION}.rejection_sample_method", "must be standard, which keeps the distribution; remove the key"
    if settings.get("draft_sample_method", "greedy") != "greedy":
        yield (
            f"{SPECULATION}.draft_sample_method",
            "must be greedy: drawn drafts follow no request's seed; remove the key",
        )
    if "draft_load_config" in settings:
        yield (
            f"{SPECULATION}.draft_load_config",
            "the library decides it: a draft model is read from disk; remove the key",
        )


def engine_settings(vllm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`vllm_kwargs` as the engine is to get them: a draft model has its own weights, the target's come later."""
    settings = dict(vllm_kwargs)
    if SPECULATION in settings and settings[SPECULATION]["method"] == "draft_model":
        settings[SPECULATION] = {**settings[SPECULATION], "draft_load_config": {"load_format": "auto"}}
    return settings


def _minus_one_is_off(value: Any) -> Any:
    return None if type(value) is int and value == -1 else value


TopK = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_minus_one_is_off)]


class GenerationResourcesConfig(StrictModel):
    """Which part of the run's machines generates; the rest trains."""

    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs of the one node that generate."""

    num_nodes: int | None = Field(default=None, ge=1)
    """Whole nodes of several that generate."""

    cpu_workers_per_node: int | None = Field(default=None, ge=1)
    """CPU workers of the one node that generate, where `cluster.gpus_per_node` is 0."""


class ColocatedConfig(StrictModel):
    """Whether generation shares the policy's devices."""

    enabled: bool = True
    """Generation and policy take turns on the same devices; false: each has devices of its own."""

    resources: GenerationResourcesConfig = GenerationResourcesConfig()
    """Which part of the run's machines generates where `enabled` is false."""


class HttpServerConfig(StrictModel):
    """Where the OpenAI-compatible server listens, and who may use it."""

    host: str = "127.0.0.1"
    """Address to listen on. With another than this machine's own, whoever reaches it and has the token may use the
    engines, and nothing on the way is encrypted."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: any that is free."""

    token_env: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the token which every request must carry; null: a random one is made."""


class ServingChatConfig(StrictModel):
    """How the server turns conversations into prompts, and answers into messages."""

    enable_auto_tools: bool = True
    """Give calls of tools as `tool_calls` of the message; false: they stay text."""

    tool_parser: Literal["hermes"] = "hermes"
    """How the model writes calls: `hermes` is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    default_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, e.g. `{enable_thinking: false}`."""


def _null_is_auto(value: Any) -> Any:
    return "auto" if value is None else value


def _null_is_off(value: Any) -> Any:
    return False if value is None else value


def _null_is_empty(value: Any) -> Any:
    return {} if value is None else value


class VllmConfig(StrictModel):
    """The vLLM engine."""

    precision: Annotated[Literal["float32", "bfloat16", "float16", "fp8"], Derived("${...precision}")]
    """Data type of weights and activations. `fp8` (GPUs): weights come in bfloat16 at every sync, and those of linear
    layers and experts are kept in FP8, with a scale for each 128 x 128 of them."""

    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e4m3", "fp8_per_token_head"], BeforeValidator(_null_is_auto)
    ] = "auto"
    """Data type of keys and values in the cache; `auto`: that of activations. `fp8` and `fp8_e4m3` (GPUs) are stored as
    they are; `fp8_per_token_head` with a scale of each token and head, computed when it is written."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share every layer of one engine."""

    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Groups of `tensor_parallel_size` devices among which the layers of one engine are divided."""

    max_model_len: Annotated[int, Derived("${...max_total_sequence_length}"), Field(ge=1)]
    """Tokens of the longest sequence, prompt included: where a completion is cut."""

    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    """Fraction of the GPU's memory for weights and KV cache."""

    cpu_kv_cache_space_gb: int = Field(default=1, ge=1)
    """GiB of KV cache of each engine on CPU."""

    enforce_eager: bool = False
    """Do not compile or capture graphs. Always so on CPU."""

    enable_prefix_caching: bool = True
    """Share the KV cache of equal beginnings. Never on CPU."""

    expose_http_server: Annotated[bool, BeforeValidator(_null_is_off)] = False
    """Offer the engines to programs outside, during training, in the form of OpenAI's interface."""

    http_server: HttpServerConfig = HttpServerConfig()
    """Where the OpenAI-compatible server listens, and who may use it."""

    http_server_serving_chat_kwargs: Annotated[ServingChatConfig, BeforeValidator(_null_is_empty)] = ServingChatConfig()
    """How the server turns conversations into prompts, and answers into messages."""

    not_yet: ClassVar = (
        # Rollouts always use the asynchronous engine, which is what either value asks for here.
        NotYet("async_engine", one_of(True, False)),
        NotYet("expert_parallel_size", one_of(1), fill=1),
        NotYet("use_deep_gemm", one_of(False, None)),
        NotYet("num_first_layers_in_bf16", one_of(0, None)),
        NotYet("num_last_layers_in_bf16", one_of(0, None)),
        # Weights are born from the policy and the tokenizer stays outside, whatever these say.
        NotYet("load_format", one_of("dummy", "auto", None)),
        NotYet("skip_tokenizer_init", one_of(True, False, None)),
        NotYet("logprobs_mode", one_of("processed_logprobs", None)),
        NotYet("tool_parser_plugin", one_of(None)),
        NotYet("use_tqdm", one_of(False, None), harmless=True),
        NotYet("enable_vllm_metrics_logger", one_of(False, None), harmless=True),
        NotYet("vllm_metrics_logger_interval", anything),
    )

    @property
    def dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Data type of activations, and in which weights are sent."""
        return "bfloat16" if self.precision == "fp8" else self.precision

    @property
    def gpu_only(self) -> list[str]:
        """`key=value` of what no engine on a CPU can do."""
        wanted = {"precision": self.precision, "kv_cache_dtype": self.kv_cache_dtype}
        return [f"{key}={value}" for key, value in wanted.items() if value.startswith("fp8")]

    def data_types(self, device: str) -> dict[str, str | None]:
        """The engine's arguments of data types. ValueError for what `device` ("cpu" or "cuda") cannot do."""
        if device == "cpu" and self.gpu_only:
            raise ValueError(f"policy.generation.vllm_cfg.{self.gpu_only[0]} needs GPUs")
        quantization = "fp8_per_block" if self.precision == "fp8" else None
        return {"dtype": self.dtype, "kv_cache_dtype": self.kv_cache_dtype, "quantization": quantization}

    @property
    def engine_size(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class HfConfig(StrictModel):
    """Generation by the policy's own workers (`backend: hf`)."""

    max_batch_size: int = Field(default=64, ge=1)
    """Completions that each data-parallel rank draws at a time."""


class MegatronGenerationConfig(StrictModel):
    """Generation by the policy's own Megatron workers (`backend: megatron`)."""

    max_batch_size: int = Field(default=64, ge=1)
    """Completions that each data-parallel rank draws at a time."""

    not_yet: ClassVar = (
        NotYet("buffer_size_gb", anything),
        NotYet("num_cuda_graphs", anything),
        NotYet("block_size_tokens", anything),
        NotYet("use_cuda_graphs_for_non_decode_steps", anything),
        NotYet("enable_chunked_prefill", anything),
        NotYet("unified_memory_level", anything),
        NotYet("max_tokens", anything),
        NotYet("max_model_len", one_of(None)),
        NotYet("cuda_graph_impl", one_of(None, "none")),
        NotYet("kv_cache_management_mode", one_of(None)),
        NotYet("enable_prefix_caching", one_of(False, None)),
        NotYet("refit_backend", one_of(None)),
        NotYet("expose_http_server", one_of(False, None)),
        NotYet("parsers", one_of([], {}, None)),
        NotYet("num_speculative_tokens", one_of(0, None)),
    )


class GenerationConfig(StrictModel):
    """Generation: sampling parameters and the engine."""

    backend: Literal["vllm", "hf", "megatron"] = "vllm"
    """`vllm`: engines of vLLM. The policy's own workers: `hf` with the model of transformers that they train,
    `megatron` with that of Megatron Core."""

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
    """Tokens that end a completion; null: the end-of-sequence token."""

    stop_strings: list[str] | None = None
    """Strings that end a completion; null: none."""

    colocated: ColocatedConfig = ColocatedConfig()
    """Whether generation shares the policy's devices."""

    vllm_cfg: VllmConfig
    """The vLLM engine."""

    hf_cfg: HfConfig = HfConfig()
    """Generation by the policy's own workers."""

    mcore_generation_config: Annotated[MegatronGenerationConfig, BeforeValidator(_null_is_empty)] = (
        MegatronGenerationConfig()
    )
    """Generation by the policy's own Megatron workers."""

    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments, passed to vLLM as they are."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        for key, message in speculation_problems(self.vllm_kwargs):
            yield f"vllm_kwargs.{key}", message

    @property
    def is_by_policy(self) -> bool:
        """Whether the policy's own workers generate."""
        return self.backend != "vllm"

    @property
    def is_filtered(self) -> bool:
        """Whether `top_p` or `top_k` leaves out tokens."""
        return self.top_p < 1 or self.top_k is not None

    @property
    def speculates(self) -> bool:
        """Whether the engine drafts tokens ahead and then judges them."""
        return SPECULATION in self.vllm_kwargs

    not_yet: ClassVar = (
        NotYet("backend", lambda value: value not in ("sglang", "trtllm", "dynamo")),
        NotYet("sglang_cfg", anything),
        NotYet("sglang_kwargs", anything),
        NotYet("port_range_low", anything),
        NotYet("port_range_high", anything),
        NotYet("refit_transport", one_of(None)),
        NotYet("refit_cfg", one_of({}, None)),
    )
