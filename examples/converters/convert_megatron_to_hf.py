"""A checkpoint of training with Megatron Core as a Hugging Face model directory, for transformers, vLLM or a hub.

uv run examples/converters/convert_megatron_to_hf.py --megatron-ckpt-path results/grpo/step_100 --hf-ckpt-path my_model

Takes a `step_N` directory or its `policy/weights`, saved on any layout. One process without GPUs reads and writes it,
some tensors at a time; Megatron Core need not be installed. Where the checkpoint has no tokenizer it is that of
`--hf-model-name`, a directory or hub name, or of the run's `--config`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nemo_rl.config.cli import Parser
from nemo_rl.config.terminal import visible


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="config.yaml of the run")
    parser.add_argument("--megatron-ckpt-path", "--checkpoint", type=Path, required=True, help="a step_N directory")
    parser.add_argument("--hf-ckpt-path", type=Path, required=True, help="directory to write")
    parser.add_argument("--hf-model-name", help="where to take a tokenizer from that the checkpoint lacks")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the parameters written; default: as saved"
    )
    given = parser.parse_args(arguments)

    from nemo_rl.data.model_folder import resolve_model
    from nemo_rl.models.policy.convert import convert_checkpoint
    from nemo_rl.utils.checkpoint.manager import CheckpointError

    try:
        convert_checkpoint(
            given.megatron_ckpt_path,
            given.hf_ckpt_path,
            given.dtype,
            tokenizer_from=given.hf_model_name,
            run_config=given.config,
            resolve=resolve_model,
        )
    except (ValueError, OSError, CheckpointError) as error:
        sys.stderr.write(visible(f"error: {error}\n"))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
