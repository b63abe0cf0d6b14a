"""What can be wrong with a model directory, found before any worker loads it."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from nemo_rl.models.policy.config import PolicyConfig

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def read_model_config(config: PolicyConfig, model_path: str) -> PretrainedConfig:
    """config.json of the model at `model_path` (a directory or a hub name) with `policy.hf_config_overrides` applied.

    Raises:
        ValueError: for a directory or hub model that is not there, cannot be read, holds no weights, or is no causal
            language model.
    """
    name, directory = config.model_name, Path(model_path)
    is_path = model_path.startswith((".", "/", "~")) or model_path.count("/") > 1
    if is_path and not directory.is_dir():
        raise ValueError(f"policy.model_name: directory {name!r} does not exist (looked in {Path.cwd()})")
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise ValueError(
            f"policy.model_name: {name!r} is no model directory: it has no config.json. Expected are config.json, "
            "*.safetensors and the tokenizer's files, as save_pretrained writes them"
        )
    try:
        model = AutoConfig.from_pretrained(model_path, **config.hf_config_overrides)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"policy.model_name: {name!r} cannot be loaded: {error}\nGive a Hugging Face name, the directory of a "
            "model, or tiny:arithmetic; without a network the model must be in the Hugging Face cache already"
        ) from error
    if type(model) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"policy.model_name: {name!r} is a {model.model_type!r} model, not a causal language model")
    if directory.is_dir() and not any((directory / file).is_file() for file in WEIGHT_FILES):
        raise ValueError(f"policy.model_name: {name!r} has no weights: none of {', '.join(WEIGHT_FILES)} is there")
    for file in sorted(directory.glob("*.safetensors")) if directory.is_dir() else ():
        try:
            with safe_open(file, framework="pt"):  # reads the header, which knows the size of the file
                pass
        except SafetensorError as error:
            raise ValueError(f"policy.model_name: {name!r}: {file.name} is damaged ({error}); copy it anew") from error
    return model


def check_fit(config: PolicyConfig, model: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Whether lengths, tensor parallelism and tokenizer go with the model.

    Raises:
        ValueError: naming the key to change and what would work.
    """
    sizes, engine = model.to_dict(), config.generation.vllm_cfg
    positions, heads = sizes.get("max_position_embeddings"), sizes.get("num_attention_heads")
    asked = {
        "policy.max_total_sequence_length": config.max_total_sequence_length,
        "policy.generation.vllm_cfg.max_model_len": engine.max_model_len,
    }
    is_stretched = "factor" in (sizes.get("rope_parameters") or {})  # long-context RoPE: more than is written there
    too_long = [f"{key}={value}" for key, value in asked.items() if positions is not None and value > positions]
    if too_long and not is_stretched:
        raise ValueError(
            f"{' and '.join(too_long)}: more than the {positions} positions of {config.model_name!r} "
            f"(max_position_embeddings in its config.json); set policy.max_total_sequence_length={positions} or less"
        )
    if heads is not None and heads % engine.tensor_parallel_size:
        works = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ValueError(
            f"policy.generation.vllm_cfg.tensor_parallel_size={engine.tensor_parallel_size} does not divide the "
            f"{heads} attention heads of {config.model_name!r}; these would: {works}"
        )
    vocab_size = model.get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        beyond = tokenizer.convert_ids_to_tokens(list(range(vocab_size, len(tokenizer)))[:3])
        raise ValueError(
            f"policy.tokenizer.name: {config.tokenizer.name!r} has {len(tokenizer)} tokens, more than the {vocab_size} "
            f"of {config.model_name!r}, which does not know {', '.join(map(repr, beyond))}: the two do not belong "
            "together, or tokenizer_config.json does not name the special tokens (pad_token, eos_token) that there are"
        )
