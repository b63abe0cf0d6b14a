"""A checkpoint of this library as a Hugging Face model directory, for transformers, vLLM or a hub.

uv run examples/converters/convert_dcp_to_hf.py --checkpoint results/grpo/step_100 --hf-ckpt-path my_model

Takes a `step_N` directory, its `policy/weights` in either format, or a consolidated model directory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", "--dcp-ckpt-path", type=Path, required=True, help="a step_N directory")
    parser.add_argument("--hf-ckpt-path", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the parameters written; default: as saved"
    )
    arguments = parser.parse_args()

    from nemo_rl.models.policy.convert import convert_checkpoint
    from nemo_rl.utils.checkpoint.manager import CheckpointError

    try:
        convert_checkpoint(arguments.checkpoint, arguments.hf_ckpt_path, arguments.dtype, by_megatron=False)
    except (ValueError, OSError, CheckpointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
