"""Make the report of one or several runs: curves, times, samples, groups, faults, configuration.

uv run examples/report.py logs/exp_000                       # writes logs/exp_000/report.html
uv run examples/report.py logs                               # the newest run below it
uv run examples/report.py logs/exp_000 logs/exp_001 --out compare/report.html

The file needs no network. Samples are in files beside it, so move the whole folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nemo_rl.config.cli import Parser
from nemo_rl.config.terminal import visible
from nemo_rl.report.page import REPORT, write_report
from nemo_rl.report.run_files import find_run


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="LOG_DIR", help="the log folder of a run, or of runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the page [{REPORT} in the first folder]")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, console: Console | None = None) -> int:
    arguments, console = parse(argv), console or Console(highlight=False)
    try:
        path = write_report([find_run(folder) for folder in arguments.folders], arguments.out)
    except OSError as error:
        Console(stderr=True).print(Text(visible(f"error: {error}")))
        return 2
    console.print(Text(visible(str(path))), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
