"""Examine the machines before a run: drivers, versions, memory, disks, clocks, and the network between the nodes.

uv run examples/doctor.py                                              # this machine, on CPU
uv run examples/doctor.py --num-nodes 2 --gpus-per-node 8              # the Ray cluster of RAY_ADDRESS or `ray start`
uv run examples/doctor.py --folder /shared/results --folder /shared/logs

The exit status is 1 if something is bad. `DOCTOR=1 sbatch ... ray.sub` runs it before the job.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from nemo_rl.config.cli import Parser
from nemo_rl.config.terminal import visible

if TYPE_CHECKING:
    from nemo_rl.distributed.doctor import Finding

STYLES = {"good": "green", "bad": "bold red", "remark": "yellow"}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-nodes", type=int, default=1, help="nodes of the run [1]")
    parser.add_argument("--gpus-per-node", type=int, default=0, help="GPUs of each; 0: CPU only [0]")
    parser.add_argument(
        "--folder",
        action="append",
        help="a folder that runs write to; may be repeated [logs, results, /tmp]",
    )
    arguments = parser.parse_args(argv)
    if arguments.num_nodes < 1 or arguments.gpus_per_node < 0:
        parser.error("--num-nodes is 1 or more, --gpus-per-node 0 or more")
    return arguments


def main(argv: list[str] | None = None, console: Console | None = None) -> int:
    arguments, console = parse(argv), console or Console(highlight=False)

    from nemo_rl.distributed.doctor import examine  # loads Ray, which --help does not wait for

    folders = [os.path.abspath(folder) for folder in arguments.folder or ("logs", "results", tempfile.gettempdir())]

    def show(finding: Finding) -> None:
        console.print(Text(visible(str(finding)), style=STYLES[finding.level]), soft_wrap=True)

    try:
        is_well = examine(arguments.num_nodes, arguments.gpus_per_node, folders, show)
    except ValueError as error:  # the cluster of RAY_ADDRESS, or its token
        console.print(Text(visible(str(error)), style=STYLES["bad"]), soft_wrap=True)
        return 2
    console.print(Text("nothing is bad" if is_well else "what is bad stops a run or makes it crawl", style="bold"))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
