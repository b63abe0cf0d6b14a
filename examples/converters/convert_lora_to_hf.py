"""An adapter in PEFT's format and its base model as one Hugging Face model directory, for transformers, vLLM or a hub.

uv run examples/converters/convert_lora_to_hf.py --adapter results/grpo/step_100 \\
    --base-model Qwen/Qwen2.5-1.5B-Instruct --out my_model

`--adapter` is a `step_N` of a run with adapters or any adapter in PEFT's format; `--adapter-only` copies it alone. The
base model is `--base-ckpt` where that is a model directory, else `--base-model`: a base that Megatron converted has the
weights of the model it was made from.

The files of the base model are rewritten one by one, with their names, dtypes and everything an adapter does not touch.
The tokenizer is the adapter's where it has one, else that of the base model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nemo_rl.config.cli import Parser
from nemo_rl.config.terminal import visible


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--adapter", "--adapter-ckpt", type=Path, required=True, help="a step_N, or a directory in PEFT's format"
    )
    parser.add_argument("--base-model", "--hf-model-name", help="directory or hub name")
    parser.add_argument("--base-ckpt", type=Path, help="directory of the base model")
    parser.add_argument("--out", "--hf-ckpt-path", type=Path, required=True, help="directory to write")
    parser.add_argument("--adapter-only", action="store_true", help="write the adapter without its base model")
    given = parser.parse_args(arguments)
    base = given.base_model
    if given.base_ckpt is not None and (base is None or (given.base_ckpt / "config.json").is_file()):
        base = str(given.base_ckpt)
    if base is None and not given.adapter_only:
        parser.error("name the base model: --base-model, or --base-ckpt")

    from nemo_rl.data.model_folder import resolve_model
    from nemo_rl.models.policy.convert import convert_adapter, copy_adapter, find_adapter

    try:
        adapter = find_adapter(given.adapter)
        if given.adapter_only:
            copy_adapter(adapter, given.out)
        else:
            convert_adapter(adapter, base, resolve_model(base), given.out)
    except (ValueError, OSError) as error:
        sys.stderr.write(visible(f"error: {error}\n"))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
