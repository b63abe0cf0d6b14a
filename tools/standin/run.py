"""Runs a command on the stand-in for CUDA, which is built first where it is missing. No GPU computes.

python tools/standin/run.py --gpu a100 python program.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nemo_rl.utils.folders import cache_root
from tools.standin.build import GPUS, build, environment, site_packages_of_torch


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100")
    parser.add_argument("--count", type=int, default=1, help="of GPUs")
    parser.add_argument("--memory", type=float, help="bytes of a GPU, if not those of --gpu")
    parser.add_argument("--values", action="store_true", help="the CPU computes what is on the device")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(arguments)
    if not chosen.command or shutil.which(chosen.command[0]) is None:
        parser.error("name a command that is on the PATH")
    try:
        libraries = build(site_packages_of_torch(), cache_root() / "standin", values=chosen.values)
        variables = environment(libraries, gpu=chosen.gpu, values=chosen.values, count=chosen.count)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if chosen.memory is not None:
        variables["STANDIN_BYTES"] = str(int(chosen.memory))
    os.execvpe(chosen.command[0], chosen.command, variables)


if __name__ == "__main__":
    sys.exit(main())
