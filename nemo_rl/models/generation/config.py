"""Configuration of generation: sampling, the vLLM engine, and which devices it runs on."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from nemo_rl.config.base import Derived, NotYet, StrictModel, anything, one_of


def _minus_one_is_off(value: Any) -> Any:
    return None if type(value) is int and value == -1 else value


TopK = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_minus_one_is_off)]


class ColocatedConfig(StrictModel):
    """Whether generation shares the policy's devices."""

    enabled: bool = True
    """Generation and policy take turns on the same devices."""

    not_yet: ClassVar = (
        NotYet("enabled", one_of(True)),
        NotYet("resources", anything),  # only asked for when `enabled` is false
    )


class VllmConfig(StrictModel):
    """The vLLM engine."""

    precision: Annotated[Literal["float32", "bfloat16", "float16"], Derived("${...precision}")]
    """Data type of weights and activations."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share one engine."""

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

    not_yet: ClassVar = (
        # Rollouts always use the asynchronous engine, which is what either value asks for here.
        NotYet("async_engine", one_of(True, False)),
        NotYet("pipeline_parallel_size", one_of(1), fill=1),
        NotYet("expert_parallel_size", one_of(1), fill=1),
        NotYet("kv_cache_dtype", one_of("auto", None)),
        NotYet("use_deep_gemm", one_of(False, None)),
        NotYet("num_first_layers_in_bf16", one_of(0, None)),
        NotYet("num_last_layers_in_bf16", one_of(0, None)),
        NotYet("precision", lambda value: value != "fp8"),
        # Weights are born from the policy and the tokenizer stays outside, whatever these say.
        NotYet("load_format", one_of("dummy", "auto", None)),
        NotYet("skip_tokenizer_init", one_of(True, False, None)),
        NotYet("logprobs_mode", one_of("processed_logprobs", None)),
        NotYet("expose_http_server", one_of(False, None)),
        NotYet("http_server_serving_chat_kwargs", one_of({}, None)),
        NotYet("tool_parser_plugin", one_of(None)),
        NotYet("use_tqdm", one_of(False, None), harmless=True),
        NotYet("enable_vllm_metrics_logger", one_of(False, None), harmless=True),
        NotYet("vllm_metrics_logger_interval", anything),
    )


class GenerationConfig(StrictModel):
    """Generation: sampling parameters and the vLLM engine."""

    backend: Literal["vllm"] = "vllm"
    """The engine."""

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

    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments, passed to vLLM as they are."""

    not_yet: ClassVar = (
        NotYet("backend", lambda value: value not in ("megatron", "sglang", "trtllm", "dynamo")),
        NotYet("mcore_generation_config", anything),
        NotYet("sglang_cfg", anything),
        NotYet("sglang_kwargs", anything),
        NotYet("port_range_low", anything),
        NotYet("port_range_high", anything),
        NotYet("refit_transport", one_of(None)),
        NotYet("refit_cfg", one_of({}, None)),
    )
