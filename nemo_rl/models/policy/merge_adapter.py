"""An adapter in PEFT's format and its base model -> one Hugging Face model directory.

The files of the base model are rewritten one by one, with their names, dtypes and everything an adapter does not touch.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nemo_rl.models.policy.lora import merge
from nemo_rl.models.policy.peft_format import PeftAdapter, last_part, read_peft_adapter, tensor_names
from nemo_rl.models.policy.scalar_head import HEAD_WEIGHT
from nemo_rl.models.policy.weight_loading import checkpoint_files

KEPT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json",
)  # fmt: skip


def merge_adapter(adapter_directory: Path, base_name: str, base_path: str, output: Path) -> None:
    """Write into `output`, an empty directory, the base model with the adapter merged into its weights.

    `base_name` is what the base model is called, and `base_path` its directory or hub name. The tokenizer is the
    adapter's where it has one, else that of the base model.

    Raises:
        ValueError: for an adapter that cannot be merged into this model.
    """
    adapter = read_peft_adapter(adapter_directory)
    trained_on = adapter.base_model_name
    if trained_on is not None and last_part(trained_on) != last_part(base_name):
        raise ValueError(
            f"the adapter in {adapter_directory} was trained on {trained_on!r}, not on {base_name!r}; if these are the "
            "same model, change base_model_name_or_path in its adapter_config.json"
        )
    base = _base_directory(base_name, base_path)
    files = _weight_files(base)
    layers = _layers(adapter, files)
    for file in sorted(set(files.values())):
        _merge_file(Path(file), layers, adapter, output)
    _copy_rest(base, adapter_directory, output)


def _base_directory(name: str, path: str) -> Path:
    directory = Path(path)
    if not directory.is_dir():
        try:
            patterns = ["*.safetensors", *(f"*{suffix}" for suffix in KEPT_SUFFIXES)]
            directory = Path(snapshot_download(path, allow_patterns=patterns))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the base model {name!r} is neither a directory nor a model of the hub that can be had: {error}"
            ) from error
    if not (directory / "config.json").is_file():
        raise ValueError(f"the base model {name!r} is no model directory: it has no config.json")
    if "quantization_config" in json.loads((directory / "config.json").read_text(encoding="utf-8")):
        raise ValueError(f"the base model {name!r} is quantised; merge into the model it was made from")
    return directory


def _weight_files(base: Path) -> dict[str, str]:
    try:
        files = checkpoint_files(str(base))
    except SafetensorError as error:
        raise ValueError(f"{base} holds a damaged file: {error}; copy it anew") from error
    if files is None:
        raise ValueError(f"{base} has no *.safetensors; load the model with transformers and save_pretrained it first")
    return files


def _layers(adapter: PeftAdapter, files: dict[str, str]) -> set[str]:
    """Names of the adapted layers, once both matrices of each and the weight they go with are seen to fit."""
    if f"base_model.model.{HEAD_WEIGHT}" in adapter.shapes:
        raise ValueError(
            f"the adapter in {adapter.directory} is that of a reward model, whose head is no part of the base model; "
            "train with checkpointing.save_consolidated=true, which writes the merged model, or merge it with PEFT "
            "(AutoModelForSequenceClassification, PeftModel.from_pretrained, merge_and_unload, save_pretrained)"
        )
    layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in adapter.shapes}
    expected = {name for layer in layers for name in tensor_names(layer)}
    problems = [f"{name} is missing in the adapter" for name in sorted(expected - adapter.shapes.keys())]
    problems += [f"{name} is no matrix of a linear layer" for name in sorted(adapter.shapes.keys() - expected)]
    problems += [
        f"{layer}.weight is not in the base model" for layer in sorted(layers) if f"{layer}.weight" not in files
    ]
    for layer in sorted(layers) if not problems else ():
        with safe_open(files[f"{layer}.weight"], framework="pt") as file:
            shape = list(file.get_slice(f"{layer}.weight").get_shape())
        lora_a, lora_b = (list(adapter.shapes[name]) for name in tensor_names(layer))
        if lora_a != [adapter.rank, shape[-1]] or lora_b != [shape[0], adapter.rank]:
            problems.append(f"{layer}: the adapter's {lora_b} x {lora_a} does not go with the weight's {shape}")
    if problems:
        listed = "\n  ".join(problems[:8])
        raise ValueError(f"the adapter in {adapter.directory} cannot be merged into this base model:\n  {listed}")
    return layers


def _merge_file(source: Path, layers: set[str], adapter: PeftAdapter, output: Path) -> None:
    tensors = {}
    with safe_open(source, framework="pt") as weights, safe_open(adapter.weights, framework="pt") as matrices:
        for name in weights.keys():  # noqa: SIM118 (no iterator)
            tensors[name] = weights.get_tensor(name)
            layer = name.removesuffix(".weight")
            if layer in layers and layer != name:
                lora_a, lora_b = (matrices.get_tensor(matrix) for matrix in tensor_names(layer))
                tensors[name] = merge(tensors[name], lora_a, lora_b, adapter.alpha / adapter.rank)
        save_file(tensors, output / source.name, metadata=weights.metadata())


def _copy_rest(base: Path, adapter: Path, output: Path) -> None:
    for file in base.iterdir():
        if file.suffix in KEPT_SUFFIXES and not file.name.startswith("pytorch_model"):
            shutil.copy(file, output / file.name)
    if (adapter / "tokenizer_config.json").is_file():
        for name in TOKENIZER_FILES:
            (output / name).unlink(missing_ok=True)
            if (adapter / name).is_file():
                shutil.copy(adapter / name, output / name)
