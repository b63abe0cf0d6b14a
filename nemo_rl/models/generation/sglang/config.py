"""The section of the SGLang engine, and the arguments that it takes."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from nemo_rl.config.rules import Derived, divisors
from nemo_rl.models.generation.engine_config import DecoderShape, DType, EngineConfig, declared_fields
from nemo_rl.utils.venvs import package_folder

EXTRA_ON_CPUS, EXTRA_ON_GPUS = "sglang", "sglang-gpu"
"""The extras of the project whose environments have SGLang."""

# Conditions, each with (why not, what switches it off if anything does). `@` stands for the key of generation.
_MISSING = "not supported yet: {} with engines of SGLang".format
_UNSUPPORTED = {
    "@.bad_words": (_MISSING("texts that are never sampled"), "@.bad_words=null"),
    "@.sglang_cfg.pp_size > 1": (_MISSING("pipeline stages"), "@.sglang_cfg.pp_size=1"),
    "@.sglang_cfg.dp_size > 1": (
        "an engine of SGLang is one replica here, and further GPUs make further engines",
        "@.sglang_cfg.dp_size=1",
    ),
}
_ON_CPUS = {
    "@.sglang_cfg.dtype != float32": ("engines of SGLang on CPUs compute in float32", "@.sglang_cfg.dtype=float32"),
    "@.sglang_cfg.tp_size > 1": (
        "not supported yet: engines of SGLang on several devices that are no GPUs",
        "@.sglang_cfg.tp_size=1",
    ),
}
_UNSUPPORTED_IN_TRAINING = {
    "policy.router_replay.enabled": (_MISSING("the experts of tokens"), "policy.router_replay.enabled=false"),
}


def _refusals(unsupported: Mapping[str, tuple[str, str | None]], requires: str = "") -> dict[str, str]:
    """Rules by which SGLang's engines refuse what they cannot do."""
    return {
        f"{condition} and @.backend=sglang{requires}": (
            f"{why} -> " + " | ".join([*([] if off is None else [off]), "@.backend=vllm"])
        )
        for condition, (why, off) in unsupported.items()
    }


_SIZES = ("tp_size", "dp_size", "pp_size", "ep_size")
_DECIDED_BY = {
    **{key: f"sglang_cfg.{key}" for key in (*_SIZES, "context_length", "dtype", "mem_fraction_static")},
    "json_model_override_args": "policy.hf_config_overrides",
    "enable_memory_saver": "colocated.enabled",
}
_OF_RUN = (
    *("model_path", "tokenizer_path", "random_seed", "load_format", "custom_weight_loader", "device"),
    *("nnodes", "node_rank", "dist_init_addr", "base_gpu_id", "gpu_id_step", "enable_weights_cpu_backup"),
)
# On a CPU a sample must not depend on other requests, and SGLang's operators for CPUs are in no package.
_OF_EXACTNESS = (
    *("attention_backend", "sampling_backend", "grammar_backend", "disable_overlap_schedule", "disable_cuda_graph"),
    *("disable_radix_cache", "chunked_prefill_size", "enable_deterministic_inference"),
)
_DECIDED = {
    **{key: f"{name} decides it; set that instead" for key, name in _DECIDED_BY.items()},
    **dict.fromkeys(_OF_RUN, "the run sets it; remove the key"),
}
"""Keys of `sglang_kwargs` that something else decides."""
_DECIDED_ON_CPUS = {
    **dict.fromkeys(_OF_EXACTNESS, "the library decides it on CPUs; remove the key"),
    "max_total_tokens": "sglang_cfg.cpu_kv_cache_space_gb decides it on CPUs; set that instead",
}
_NOT_BUILT = {
    "speculative_algorithm": "speculative decoding",
    "quantization": "weights that it quantises",
    "enable_lora": "adapters beside the weights",
    "enable_dp_attention": "attention apart for parts of the requests",
    "enable_multimodal": "images",
}
"""Keys of `sglang_kwargs` that ask for what is not built, unless their value is null or false."""
_REPACKING = "flashinfer_trtllm"  # the experts' kernels that need their weights in another order

# Logprobs of these modes are taken before tokens are left out.
_BITWISE = ("enable_deterministic_inference", "rl_on_policy_target")


def source_folder() -> Path | None:
    """SGLang's source in this process's environment, or in one that workers have; None before any is made."""
    spec = find_spec("sglang")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    return package_folder(EXTRA_ON_CPUS, "sglang") or package_folder(EXTRA_ON_GPUS, "sglang")


def files_of_models() -> list[Path]:
    """SGLang's modules of models. Empty before its environment is made."""
    source = source_folder()
    return [] if source is None else list(source.glob("srt/models/*.py"))


def models_of(architectures: Sequence[str], files: Sequence[Path]) -> list[Path]:
    """The files that define a model that config.json names."""
    classes = [f"class {name}(" for name in architectures]
    return [path for path in files if any(text in path.read_text() for text in classes)]


class SglangConfig(EngineConfig):
    """The SGLang engine."""

    _path: str = "policy.generation.sglang_cfg"
    title: ClassVar = "SGLang"
    kwargs_key: ClassVar = "sglang_kwargs"
    length_key: ClassVar = "context_length"
    dtype_key: ClassVar = "dtype"
    tensor_key: ClassVar = "tp_size"
    memory_key: ClassVar = "mem_fraction_static"
    library_bytes: ClassVar = 1_900_000_000.0  # of three processes

    generation_rules: ClassVar = {
        **{f"sglang_kwargs.{key}: sglang_kwargs has {key}": text for key, text in _DECIDED.items()},
        **{
            f"sglang_kwargs.{key}: sglang_kwargs has {key} and {filters}": (
                f"its logprobs are those before {name} leaves out tokens; remove the key"
            )
            for key in _BITWISE
            for filters, name in (("top_p < 1", "top_p"), ("top_k", "top_k"))
        },
    }
    run_rules: ClassVar = {
        **_refusals(_UNSUPPORTED),
        **_refusals(_ON_CPUS, requires=" requires cluster.use_gpus"),
        **{
            f"@.sglang_kwargs.{key}: @.sglang_kwargs has {key} requires cluster.use_gpus": text
            for key, text in _DECIDED_ON_CPUS.items()
        },
    }
    training_rules: ClassVar = _refusals(_UNSUPPORTED_IN_TRAINING)

    dtype: Annotated[DType, Derived("${...precision}")]
    """Data type of weights, activations and cache; on CPUs `float32`."""

    context_length: Annotated[int, Derived("${...max_total_sequence_length}"), Field(ge=1)]
    """Tokens of the longest sequence, prompt included; longer completions are cut."""

    tp_size: int = Field(default=1, ge=1)
    """GPUs that share every layer of one engine."""

    ep_size: int = Field(default=1, ge=1)
    """Parts into which the experts are divided among these GPUs; 1: each GPU has a slice of every expert."""

    dp_size: int = Field(default=1, ge=1)
    """Engines in one: 1, as further GPUs make further engines."""

    pp_size: int = Field(default=1, ge=1)
    """Pipeline stages: 1."""

    mem_fraction_static: float = Field(default=0.6, gt=0, lt=1)
    """Fraction of the GPU's memory for weights and KV cache."""

    @property
    def wire_dtype(self) -> DType:
        return self.dtype

    @property
    def tensor_size(self) -> int:
        return self.tp_size

    @property
    def memory_share(self) -> float:
        return self.mem_fraction_static

    @property
    def shares_prompts(self) -> bool:
        return True

    def copies_on_cpu(self, model: DecoderShape) -> Iterator[tuple[str, float, str]]:
        """Linear layers, experts and head have their weights once as loaded and once packed for MKL."""
        layers = model.num_layers * (model.layer_parameters + model.expert_parameters)
        yield "packed weights", 4 * (layers + model.vocab_size * model.hidden), "nothing lowers it"

    def unfit_places(self, num_workers: int, per_node: int, kind: str, which: str) -> Iterator[tuple[str, str]]:
        if self.tp_size % self.ep_size:
            works = divisors(self.tp_size, near=self.ep_size)
            yield self.key("ep_size"), f"{self.ep_size} does not divide tp_size={self.tp_size}; these would: {works}"
        if self.tp_size > per_node:
            text = f"not supported yet: an engine of SGLang on several nodes; make it {per_node} at most"
            yield self.key("tp_size"), text
        else:
            yield from super().unfit_places(num_workers, per_node, kind, which)

    def argument_problems(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        yield from super().argument_problems(arguments)
        for key, what in _NOT_BUILT.items():
            if arguments.get(key):
                yield key, f"{_MISSING(what)}; remove the key, or set backend=vllm"
        if str(arguments.get("moe_runner_backend")).startswith(_REPACKING):
            yield "moe_runner_backend", "not supported yet: experts whose weights are repacked; triton would work"

    @classmethod
    def argument_names(cls) -> set[str]:
        source = source_folder()
        return set() if source is None else declared_fields(source.glob("srt/arg_groups/fields/*.py"))


class LoneSglangConfig(SglangConfig):
    """The SGLang engine."""

    dtype: DType = "bfloat16"
    """Data type of weights, activations and cache; on CPUs `float32`."""

    mem_fraction_static: float = Field(default=0.85, gt=0, lt=1)
    """Fraction of the GPU's memory for weights and KV cache."""

    context_length: Annotated[int, Derived("${..vllm_cfg.max_model_len}"), Field(ge=1)]
    """Tokens of the longest sequence, prompt included: where a completion is cut."""
