"""Watch a run that somebody started, on a terminal: step, curves, phases, alarms, samples, age of the last line.

uv run examples/watch.py logs                # the newest run below it
uv run examples/watch.py logs/exp_003
uv run examples/watch.py logs/exp_003 --once # print it once

`q` or Ctrl-C ends the view; the run goes on. It only reads files, so it works over ssh and for runs that have ended.
"""

from __future__ import annotations

import argparse
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nemo_rl.config.cli import Parser
from nemo_rl.config.terminal import visible
from nemo_rl.report.run_files import find_run
from nemo_rl.report.watch import Watch


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="LOG_DIR", help="the log folder of a run, or of runs")
    parser.add_argument("--once", action="store_true", help="print the present state and end")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks [1]")
    return parser.parse_args(argv)


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key, and returns it or ""."""
    if not sys.stdin.isatty():
        yield lambda seconds: (select.select([], [], [], seconds), "")[1]
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield lambda seconds: sys.stdin.read(1) if select.select([sys.stdin], [], [], seconds)[0] else ""
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def main(argv: list[str] | None = None, console: Console | None = None) -> int:
    arguments, console = parse(argv), console or Console(highlight=False)
    try:
        watch = Watch(find_run(arguments.folder))
    except FileNotFoundError as error:
        Console(stderr=True).print(Text(visible(f"error: {error}")))
        return 2
    watch.update()
    if arguments.once or not console.is_terminal:
        console.print(watch.view(width=console.width))
        return 0
    try:
        with keys() as key, Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(watch.view(width=console.width), refresh=True)
                if key(arguments.every) == "q":
                    break
                watch.update()
    except KeyboardInterrupt:
        pass
    console.print(watch.view(width=console.width))  # what was last seen stays on the screen
    return 0


if __name__ == "__main__":
    sys.exit(main())
