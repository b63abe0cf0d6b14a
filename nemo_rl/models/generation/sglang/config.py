"""The section of the SGLang engine, and the arguments that it takes."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from nemo_rl.config.rules import Derived
from nemo_rl.models.generation.engine_config import DecoderShape, DType, EngineConfig, declared_fields
from nemo_rl.utils.venvs import package_folder

_UNSUPPORTED = {
    "cluster.use_gpus": ("GPUs", None),
    "@.bad_words": ("texts that are never sampled", "@.bad_words=null"),
    "@.sglang_cfg.dtype != float32": ("another data type than float32", "@.sglang_cfg.dtype=float32"),
}
_UNSUPPORTED_IN_TRAINING = {
    "policy.router_replay.enabled": ("the experts of tokens", "policy.router_replay.enabled=false"),
}
"""What engines of SGLang cannot do -> (its name, what switches it off if anything does)."""


def _refusals(unsupported: Mapping[str, tuple[str, str | None]]) -> dict[str, str]:
    return {
        f"{condition} and @.backend=sglang": (
            f"not supported yet: {what} with engines of SGLang -> "
            + " | ".join([*([] if off is None else [off]), "@.backend=vllm"])
        )
        for condition, (what, off) in unsupported.items()
    }


_DECIDED_BY = {
    "context_length": "sglang_cfg.context_length",
    "dtype": "sglang_cfg.dtype",
    "max_total_tokens": "sglang_cfg.cpu_kv_cache_space_gb",
    "json_model_override_args": "policy.hf_config_overrides",
}
_OF_RUN = ("model_path", "tokenizer_path", "random_seed", "load_format", "custom_weight_loader", "device")
# A sample must not depend on other requests, and SGLang's operators for CPUs are in no package.
_OF_EXACTNESS = (
    *("attention_backend", "sampling_backend", "grammar_backend", "disable_overlap_schedule", "disable_cuda_graph"),
    *("disable_radix_cache", "chunked_prefill_size", "mem_fraction_static", "enable_deterministic_inference"),
)
_ONE_DEVICE = ("tp_size", "dp_size", "pp_size", "ep_size")
_DECIDED = {
    **{key: f"{name} decides it; set that instead" for key, name in _DECIDED_BY.items()},
    **dict.fromkeys(_OF_RUN, "the run sets it; remove the key"),
    **dict.fromkeys(_OF_EXACTNESS, "the library decides it on CPUs; remove the key"),
    **dict.fromkeys(_ONE_DEVICE, "not supported yet: engines of SGLang on several devices; remove the key"),
}
"""Keys of `sglang_kwargs` that something else decides."""


def source_folder() -> Path | None:
    """SGLang's source in this process's environment, or in the one that its workers have; None before that is made."""
    spec = find_spec("sglang")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    return package_folder("sglang", "sglang")


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
        f"sglang_kwargs.{key}: sglang_kwargs has {key}": text for key, text in _DECIDED.items()
    }
    run_rules: ClassVar = _refusals(_UNSUPPORTED)
    training_rules: ClassVar = _refusals(_UNSUPPORTED_IN_TRAINING)

    dtype: Annotated[DType, Derived("${...precision}")]
    """Data type of weights, activations and cache."""

    context_length: Annotated[int, Derived("${...max_total_sequence_length}"), Field(ge=1)]
    """Tokens of the longest sequence, prompt included; longer completions are cut."""

    @property
    def wire_dtype(self) -> DType:
        return self.dtype

    @property
    def memory_share(self) -> float:
        return 0.0  # on a CPU

    @property
    def shares_prompts(self) -> bool:
        return True

    def copies_on_cpu(self, model: DecoderShape) -> Iterator[tuple[str, float, str]]:
        """Linear layers, experts and head have their weights once as loaded and once packed for MKL."""
        layers = model.num_layers * (model.layer_parameters + model.expert_parameters)
        yield "packed weights", 4 * (layers + model.vocab_size * model.hidden), "nothing lowers it"

    @classmethod
    def argument_names(cls) -> set[str]:
        source = source_folder()
        return set() if source is None else declared_fields(source.glob("srt/arg_groups/fields/*.py"))


class LoneSglangConfig(SglangConfig):
    """The SGLang engine."""

    dtype: DType = "bfloat16"
    """Data type of weights, activations and cache."""

    context_length: Annotated[int, Derived("${..vllm_cfg.max_model_len}"), Field(ge=1)]
    """Tokens of the longest sequence, prompt included: where a completion is cut."""
