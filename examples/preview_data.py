"""Show a dataset as the model will see it: rows token by token, loss tokens in colour, and a summary.

uv run --extra cpu examples/preview_data.py --config examples/configs/sft_cpu.yaml
uv run --extra cpu examples/preview_data.py --config examples/configs/dpo.yaml --num 5 data.max_input_seq_length=512
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_rl.config.cli import Parser, look_in_working_folder
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.terminal import visible


def main() -> int:
    look_in_working_folder()
    parser = Parser(
        description="Show what the model will see of a dataset: tokens, loss mask, lengths, rows that are left out.",
        usage="%(prog)s --config FILE [--num N] [--dataset train|validation] [--rows N] [section.key=value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file of a run, of any algorithm")
    parser.add_argument("--num", metavar="N", type=int, default=3, help="rows to show token by token (default 3)")
    parser.add_argument("--dataset", choices=("train", "validation"), default="train", help="default train")
    parser.add_argument("--rows", metavar="N", type=int, default=1000, help="rows in the summary (default 1000)")
    arguments, overrides = parser.parse_known_args()
    options = [text for text in overrides if text.startswith("-")]
    if options:
        parser.error(f"unknown option {options[0]}")
    if not Path(arguments.config).is_file():
        parser.error(f"--config {arguments.config}: no such file")
    if min(arguments.num, arguments.rows - 1) < 0:
        parser.error("--num is 0 or more, --rows 1 or more")

    from rich.console import Console

    from nemo_rl.algorithms.data_preview import load_run_config, preview_inputs, show_rows

    try:
        config = load_run_config(arguments.config, overrides)
        inputs = preview_inputs(config, arguments.dataset, max(arguments.rows, arguments.num))
        show_rows(Console(highlight=False), inputs, arguments.num)
    except (ConfigError, ValueError, FileNotFoundError) as error:
        sys.stderr.write(visible(f"error: {error}\n"))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
