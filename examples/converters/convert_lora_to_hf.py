"""An adapter in PEFT's format and its base model as one Hugging Face model directory, for transformers, vLLM or a hub.

uv run examples/converters/convert_lora_to_hf.py --adapter results/grpo/step_100/policy/adapter \\
    --base-model Qwen/Qwen2.5-1.5B-Instruct --out my_model

The files of the base model are rewritten one by one, with their names, dtypes and everything an adapter does not touch.
The tokenizer is the adapter's where it has one, else that of the base model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl.models.policy.peft_format import PeftAdapter

KEPT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json",
)  # fmt: skip


def convert(adapter_directory: Path, base_model: str, output: Path) -> None:
    """Write `output`: `base_model` (a directory or a hub name) with the adapter merged into its weights.

    Raises:
        ValueError: for an adapter that cannot be merged into this model, and when `output` holds files already.
    """
    from nemo_rl.models.policy.peft_format import last_part, read_peft_adapter

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--out {output} exists already; name a directory that is new or empty")
    adapter = read_peft_adapter(adapter_directory)
    trained_on = adapter.base_model_name
    if trained_on is not None and last_part(trained_on) != last_part(base_model):
        raise ValueError(
            f"the adapter in {adapter_directory} was trained on {trained_on!r}, not on --base-model {base_model!r}; if "
            "these are the same model, change base_model_name_or_path in its adapter_config.json"
        )
    base = _base_directory(base_model)
    files = _weight_files(base)
    layers = _layers(adapter, files)
    partial = output.with_name(f"{output.name}.partial")
    partial.mkdir(parents=True)
    try:
        for file in sorted(set(files.values())):
            _merge_file(Path(file), layers, adapter, partial)
        _copy_rest(base, adapter_directory, partial)
        if output.exists():
            output.rmdir()
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _base_directory(base_model: str) -> Path:
    from huggingface_hub import snapshot_download

    from nemo_rl.data.tiny_model import resolve_model

    directory = Path(resolve_model(base_model))
    if not directory.is_dir():
        try:
            patterns = ["*.safetensors", *(f"*{suffix}" for suffix in KEPT_SUFFIXES)]
            directory = Path(snapshot_download(base_model, allow_patterns=patterns))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--base-model {base_model!r} is neither a directory nor a model of the hub that can be had: {error}"
            ) from error
    if not (directory / "config.json").is_file():
        raise ValueError(f"--base-model {base_model!r} is no model directory: it has no config.json")
    if "quantization_config" in json.loads((directory / "config.json").read_text(encoding="utf-8")):
        raise ValueError(f"--base-model {base_model!r} is quantised; merge into the model it was made from")
    return directory


def _weight_files(base: Path) -> dict[str, str]:
    from safetensors import SafetensorError

    from nemo_rl.models.policy.weight_loading import checkpoint_files

    try:
        files = checkpoint_files(str(base))
    except SafetensorError as error:
        raise ValueError(f"{base} holds a damaged file: {error}; copy it anew") from error
    if files is None:
        raise ValueError(f"{base} has no *.safetensors; load the model with transformers and save_pretrained it first")
    return files


def _layers(adapter: PeftAdapter, files: dict[str, str]) -> set[str]:
    """Names of the adapted layers, once both matrices of each and the weight they go with are seen to fit."""
    from safetensors import safe_open

    from nemo_rl.models.policy.peft_format import tensor_names

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
    from safetensors import safe_open
    from safetensors.torch import save_file

    from nemo_rl.models.policy.lora import merge
    from nemo_rl.models.policy.peft_format import tensor_names

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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", "--adapter-ckpt", type=Path, required=True, help="directory in PEFT's format")
    parser.add_argument("--base-model", "--hf-model-name", required=True, help="directory or hub name")
    parser.add_argument("--out", "--hf-ckpt-path", type=Path, required=True, help="directory to write")
    given = parser.parse_args(arguments)
    try:
        convert(given.adapter, given.base_model, given.out)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
