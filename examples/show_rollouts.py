"""Show recorded rollouts.

uv run examples/show_rollouts.py results/rollouts --list                      # a table of all groups
uv run examples/show_rollouts.py results/rollouts --worst                     # the group with the smallest mean reward
uv run examples/show_rollouts.py results/rollouts --group 0/3/gsm8k:17 --sample 2
uv run examples/show_rollouts.py results/rollouts --list --filter status=failed
uv run examples/show_rollouts.py results/rollouts --worst --sample 0 --tokens --tokenizer Qwen/Qwen2.5-1.5B-Instruct
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nemo_rl.config.cli import Parser
from nemo_rl.config.terminal import visible
from nemo_rl.data.model_folder import resolve_model
from nemo_rl.rollouts.show_records import (
    FILTER_FIELDS,
    Decode,
    find_group,
    groups_table,
    parse_filter,
    recorded_groups,
    show_group,
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="rollout_record.save_dir of a run")
    parser.add_argument("--list", action="store_true", help="a table of the groups instead of one of them")
    parser.add_argument("--group", metavar="ID", help="the group to show; default: the first")
    parser.add_argument("--worst", action="store_true", help="the group with the smallest mean reward")
    parser.add_argument("--step", type=int, help="groups of this step alone")
    parser.add_argument("--sample", type=int, metavar="N", help="one sample of the group, counted from 0")
    parser.add_argument("--filter", action="append", default=[], metavar="FIELD=VALUE", help=", ".join(FILTER_FIELDS))
    parser.add_argument("--tokens", action="store_true", help="token ids and log-probabilities; needs --tokenizer")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder or name of the model's tokenizer")
    arguments = parser.parse_args(argv)
    if arguments.tokens and arguments.tokenizer is None:
        parser.error("--tokens needs --tokenizer DIR, the folder of the model")
    return arguments


def main(argv: list[str] | None = None, console: Console | None = None) -> int:
    arguments, console = parse(argv), console or Console()
    try:
        filters = [parse_filter(text) for text in arguments.filter]
        if arguments.step is not None:
            filters.append(("step", str(arguments.step)))
        groups = list(recorded_groups(arguments.folder, filters))
        if arguments.list:
            console.width = max(console.width, 120)  # on a narrow terminal lines fold, and ids stay whole
            console.print(groups_table(groups))
            return 0
        found = find_group(groups, arguments.group, worst=arguments.worst)
        console.print(show_group(found, arguments.sample, decoder(arguments.tokenizer) if arguments.tokens else None))
    except (OSError, ValueError) as error:
        Console(stderr=True).print(Text(visible(f"error: {error}")))
        return 2
    return 0


def decoder(tokenizer: str) -> Decode:
    from transformers import AutoTokenizer  # takes seconds to load

    return AutoTokenizer.from_pretrained(resolve_model(tokenizer)).decode


if __name__ == "__main__":
    sys.exit(main())
