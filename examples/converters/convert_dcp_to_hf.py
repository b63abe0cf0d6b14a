"""A checkpoint of this library as a Hugging Face model directory, for transformers, vLLM or a hub.

uv run examples/converters/convert_dcp_to_hf.py --checkpoint results/grpo/step_100 --hf-ckpt-path my_model
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path


def convert(checkpoint: Path, output: Path) -> None:
    """Write `output` from `checkpoint` (a `step_N` directory), whatever format its weights have."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_rl.models.policy.checkpoint import load_tensors, write_safetensors

    policy = checkpoint / "policy"
    if not (policy / "weights").is_dir():
        raise ValueError(f"{checkpoint} is no checkpoint: it has no policy/weights; give a step_N directory")
    config = AutoConfig.from_pretrained(policy)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = {name: torch.empty_like(parameter, device="cpu") for name, parameter in model.named_parameters()}
    load_tensors(state, policy / "weights")
    output.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(output)
    write_safetensors(state.items(), output)
    for file in (policy / "tokenizer").iterdir():
        shutil.copy(file, output / file.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", "--dcp-ckpt-path", type=Path, required=True, help="a step_N directory")
    parser.add_argument("--hf-ckpt-path", type=Path, required=True, help="directory to write")
    arguments = parser.parse_args()
    try:
        convert(arguments.checkpoint, arguments.hf_ckpt_path)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
