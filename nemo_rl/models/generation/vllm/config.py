"""The section of the vLLM engine, and the arguments that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.rules import Derived, violations
from nemo_rl.models.generation.engine_config import DecoderShape, DType, EngineConfig, declared_fields, read_as

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


NO_DRAFT = "draft.enabled=false and @.vllm_kwargs.speculative_config=null"

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


class VllmConfig(EngineConfig):
    """The vLLM engine."""

    _path: str = "policy.generation.vllm_cfg"
    title: ClassVar = "vLLM"
    kwargs_key: ClassVar = "vllm_kwargs"
    length_key: ClassVar = "max_model_len"
    dtype_key: ClassVar = "precision"
    tensor_key: ClassVar = "tensor_parallel_size"
    pipeline_key: ClassVar = "pipeline_parallel_size"
    memory_key: ClassVar = "gpu_memory_utilization"
    library_bytes: ClassVar = 1_000_000_000.0  # of two processes
    takes_drafts: ClassVar = True

    generation_rules: ClassVar = {
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

    policy_rules: ClassVar = {
        "draft.enabled excludes @.vllm_cfg.precision=fp8": (
            f"quantising engines take no draft -> @.vllm_cfg.precision={{precision}} | {NO_DRAFT}"
        ),
        "draft.enabled excludes @.vllm_cfg.pipeline_parallel_size > 1": (
            f"the stages of an engine take no draft -> @.vllm_cfg.pipeline_parallel_size=1 | {NO_DRAFT}"
        ),
    }

    run_rules: ClassVar = {
        "@.vllm_cfg.kv_cache_dtype != auto and @.backend=vllm requires cluster.use_gpus": (
            "{@.vllm_cfg.kv_cache_dtype} runs on GPUs only -> @.vllm_cfg.kv_cache_dtype=auto"
        ),
        **{
            f"@.vllm_cfg.env_vars.{name}: @.vllm_cfg.env_vars has {name} requires cluster.use_gpus": (
                "the library decides it on CPUs; remove the key"
            )
            for name in _SET_ON_CPUS
        },
    }

    training_rules: ClassVar = {
        "@.vllm_cfg.precision=fp8 and @.backend=vllm requires cluster.use_gpus": (
            "fp8 runs on GPUs only -> @.vllm_cfg.precision={policy.precision}"
        ),
        "@.vllm_cfg.pipeline_parallel_size > 1 and policy.router_replay.enabled requires rollout.replay_from": (
            "only engines of one stage return the experts of tokens, which policy.router_replay.enabled=true needs -> "
            "@.vllm_cfg.pipeline_parallel_size=1 | policy.router_replay.enabled=false"
        ),
        "@.vllm_cfg.enable_prefix_caching=false and policy.router_replay.enabled and cluster.use_gpus requires "
        "rollout.replay_from": (
            "vLLM returns the experts of tokens, which policy.router_replay.enabled=true needs, only with a prefix "
            "cache -> @.vllm_cfg.enable_prefix_caching=true | policy.router_replay.enabled=false"
        ),
    }

    precision: Annotated[Literal["float32", "bfloat16", "float16", "fp8"], Derived("${...precision}")]
    """Data type of weights and activations. `fp8` (GPUs): weights come in bfloat16 at every sync, and weights of linear
    layers and experts are kept in FP8, with a scale for each 128 x 128 of them."""

    kv_cache_dtype: Annotated[Literal["auto", "fp8", "fp8_e4m3", "fp8_per_token_head"], read_as(None, "auto")] = "auto"
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

    enforce_eager: bool = False
    """Do not compile or capture graphs. Always so on CPU."""

    enable_prefix_caching: bool = True
    """Share the KV cache of equal beginnings. On CPU: of equal prompts, as the samples of a group have."""

    logprobs_mode: Annotated[Literal["processed_logprobs", "raw_logprobs"], read_as(None, "processed_logprobs")] = (
        "processed_logprobs"
    )
    """Logprobs of samples: after temperature, top-p, top-k and bad words, or those of the model before all of them."""

    @property
    def batched_tokens_on_cpu(self) -> int:
        """Prompt tokens of an engine step on a CPU."""
        return max(self.max_model_len, 8192)

    @property
    def wire_dtype(self) -> DType:
        return "bfloat16" if self.precision == "fp8" else self.precision

    @property
    def tensor_size(self) -> int:
        return self.tensor_parallel_size

    @property
    def pipeline_size(self) -> int:
        return self.pipeline_parallel_size

    @property
    def memory_share(self) -> float:
        return self.gpu_memory_utilization

    @property
    def has_small_weights(self) -> bool:
        return self.precision == "fp8"

    @property
    def has_small_cache(self) -> bool:
        return self.kv_cache_dtype != "auto"

    @property
    def shares_prompts(self) -> bool:
        return self.enable_prefix_caching

    @classmethod
    def argument_names(cls) -> set[str]:
        spec = find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return set()
        return declared_fields([Path(spec.submodule_search_locations[0], "engine", "arg_utils.py")], "EngineArgs")

    def argument_problems(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        yield from super().argument_problems(arguments)
        yield from speculation_problems(arguments)

    def copies_on_cpu(self, model: DecoderShape) -> Iterator[tuple[str, float, str]]:
        """Linear layers have their weights once as loaded and once packed for MKL, as has a head that is tied to the
        embedding. A weight sync packs again, and the memory of the packed layers before stays in the heap; so does that
        of vLLM's first step, of as many tokens as there can be.
        """
        one = (4 if self.wire_dtype == "float32" else 2) / self.engine_size
        key = f"raise {self.key(self.tensor_key)}"
        layers = model.num_layers * model.layer_parameters * one if self.wire_dtype == "float32" else 0.0
        yield "packed weights", layers + model.vocab_size * model.hidden * one, key
        yield "packed weights before", layers, key
        a_token = (4 * model.hidden + model.queries + model.key_values + 3 * model.intermediate) * one
        yield "first step", self.batched_tokens_on_cpu * a_token, f"lower {self.key(self.length_key)}"

    def of_samples(self) -> dict[str, Any]:
        return self.model_dump(include={"kv_cache_dtype"}, exclude_defaults=True)


class LoneVllmConfig(VllmConfig):
    """The vLLM engine."""

    precision: DType = "bfloat16"
    """Data type of weights and activations."""

    max_model_len: int = Field(default=2048, ge=1)
    """Tokens of the longest sequence, prompt included: where a completion is cut."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Fraction of the GPU's memory for weights and KV cache."""
