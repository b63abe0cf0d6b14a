"""An adapter in PEFT's format and its base model as one Hugging Face model directory, for transformers, vLLM or a hub.

uv run examples/converters/convert_lora_to_hf.py --adapter results/grpo/step_100/policy/adapter \\
    --base-model Qwen/Qwen2.5-1.5B-Instruct --out my_model

The files of the base model are rewritten one by one, with their names, dtypes and everything an adapter does not touch.
The tokenizer is the adapter's where it has one, else that of the base model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", "--adapter-ckpt", type=Path, required=True, help="directory in PEFT's format")
    parser.add_argument("--base-model", "--hf-model-name", required=True, help="directory or hub name")
    parser.add_argument("--out", "--hf-ckpt-path", type=Path, required=True, help="directory to write")
    given = parser.parse_args(arguments)

    from nemo_rl.data.tiny_model import resolve_model
    from nemo_rl.models.policy.convert import convert_adapter

    try:
        convert_adapter(given.adapter, given.base_model, resolve_model(given.base_model), given.out)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
