"""A checkpoint of this library as a Hugging Face model directory, for transformers, vLLM or a hub.

uv run examples/converters/convert_dcp_to_hf.py --checkpoint results/grpo/step_100 --hf-ckpt-path my_model

Takes a `step_N` directory, its `policy/weights` in either format, or a consolidated model directory.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Source:
    """Where the parts of a model lie."""

    weights: Path
    policy: Path  # config.json, generation_config.json and tokenizer/
    is_model_directory: bool  # weights is a Hugging Face model directory of its own


def convert(checkpoint: Path, output: Path, dtype: str | None = None) -> None:
    """Write `output` from `checkpoint`. `dtype` of the parameters, such as "bfloat16"; None: as they were saved.

    The whole model is held in memory once, in `dtype`.

    Raises:
        ValueError, CheckpointError, OSError: with what to change.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--hf-ckpt-path {output} exists already; name a directory that is new or empty")
    source = find_source(checkpoint)
    partial = output.with_name(f"{output.name}.partial")
    partial.mkdir(parents=True)
    try:
        if source.is_model_directory:
            _convert_model_directory(source.weights, partial, dtype)
        else:
            _convert_shards(source, partial, dtype)
        _copy_tokenizer(source, partial)
        if output.exists():
            output.rmdir()
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def find_source(checkpoint: Path) -> Source:
    """The weights that `checkpoint` means. ValueError when there are none, or adapters alone."""
    from nemo_rl.models.policy.checkpoint_metadata import holds_tensors
    from nemo_rl.utils.checkpoint_manifest import find_damage, sealed_names

    if not checkpoint.is_dir():
        raise ValueError(f"--checkpoint {checkpoint} is no directory; give a step_N directory")
    if checkpoint.name.startswith("tmp_step_"):
        raise ValueError(f"--checkpoint {checkpoint} was never finished; give a step_N directory")
    if (checkpoint / "adapter_config.json").is_file():
        raise _only_adapters(checkpoint)
    names = [name for name in sealed_names(checkpoint) if name.startswith("policy/")]
    damage = find_damage(checkpoint, names) if names else None
    if damage is not None:
        raise ValueError(f"--checkpoint {checkpoint} is damaged: {damage}")
    for weights in (checkpoint / "policy" / "weights", checkpoint / "weights", checkpoint):
        if holds_tensors(weights):
            is_model = (weights / "config.json").is_file()
            return Source(weights, weights.parent.parent if is_model else weights.parent, is_model)
    raise ValueError(
        f"--checkpoint {checkpoint} is no checkpoint: it holds no policy/weights; give a step_N directory, its "
        "policy/weights, or a directory that checkpointing.save_consolidated wrote"
    )


def _only_adapters(directory: Path) -> ValueError:
    return ValueError(
        f"--checkpoint {directory} holds adapters alone (policy.dtensor_cfg.lora_cfg); "
        "examples/converters/convert_lora_to_hf.py merges them into their base model"
    )


def _convert_model_directory(directory: Path, output: Path, dtype: str | None) -> None:
    from nemo_rl.models.policy.checkpoint_metadata import saved_tensors
    from nemo_rl.models.policy.scalar_head import auto_class

    chosen = _torch_dtype(dtype) or _main_dtype(saved_tensors(directory))
    auto_class(_read_config(directory)).from_pretrained(directory, dtype=chosen).save_pretrained(output)


def _convert_shards(source: Source, output: Path, dtype: str | None) -> None:
    import torch
    from transformers import GenerationConfig

    from nemo_rl.models.policy.checkpoint import load_tensors, names_and_shapes, policy_tensors
    from nemo_rl.models.policy.checkpoint_metadata import check_checkpoint_fits, saved_tensors
    from nemo_rl.models.policy.scalar_head import auto_class

    saved = saved_tensors(source.weights)
    if all(name.rpartition(".")[2] in ("lora_A", "lora_B") for name in saved):
        raise _only_adapters(source.weights)
    chosen = _torch_dtype(dtype)
    config = _read_config(source.policy)
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=chosen or _main_dtype(saved))
    wanted = policy_tensors([model])
    check_checkpoint_fits(source.weights, names_and_shapes(wanted))
    state = {}
    for name, tensor in wanted.items():
        is_cast = chosen is not None and isinstance(tensor, torch.nn.Parameter)  # buffers keep what they need
        state[name] = torch.empty(tensor.shape, dtype=chosen if is_cast else saved[name].properties.dtype)
    load_tensors(state, source.weights)
    if (source.policy / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.policy)
    # Under the names and in the shapes that models have on disk: experts, for one, are taken apart.
    model.save_pretrained(output, state_dict=state)


def _read_config(policy: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    if not (policy / "config.json").is_file():
        raise ValueError(f"{policy / 'config.json'} is missing: it says what model the weights are of")
    return AutoConfig.from_pretrained(policy)


def _torch_dtype(name: str | None) -> torch.dtype | None:
    import torch

    return (
        None if name is None else {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    )


def _main_dtype(saved: dict[str, TensorStorageMetadata]) -> torch.dtype:
    """That of most tensors."""
    dtypes = [tensor.properties.dtype for tensor in saved.values() if tensor.properties.dtype.is_floating_point]
    return max(dtypes, key=dtypes.count)


def _copy_tokenizer(source: Source, output: Path) -> None:
    own = source.weights if (source.weights / "tokenizer_config.json").is_file() else source.policy / "tokenizer"
    if not own.is_dir():
        logging.warning("%s holds no tokenizer; put one into the new directory yourself", source.policy)
        return
    for file in own.iterdir():
        is_of_model = file.suffix == ".safetensors" or (output / file.name).exists()
        if file.is_file() and not is_of_model and file.name != "model.safetensors.index.json":
            shutil.copy(file, output / file.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", "--dcp-ckpt-path", type=Path, required=True, help="a step_N directory")
    parser.add_argument("--hf-ckpt-path", type=Path, required=True, help="directory to write")
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters written; default: as they were saved")
    arguments = parser.parse_args()

    from nemo_rl.utils.checkpoint import CheckpointError

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
    try:
        convert(arguments.checkpoint, arguments.hf_ckpt_path, arguments.dtype)
    except (ValueError, OSError, CheckpointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
