"""Which configuration files of NeMo RL load: `python tools/nemo_rl_coverage.py FOLDER`.

Every YAML file below the folder is loaded as a run would load it. It loads, with so many remarks; or it is refused for
features that this library lacks, which the error names; or it is unclear: any other error. Of files that load, what
would stop their runs is listed too, as `--dry-run` says it: files, datasets and import paths that do not exist. With
`--convert` each of them is also written in today's form, as `tools/config_cli.py convert` does, and the result is
loaded again.

Exits with 0 if there are configurations of runs and nothing is unclear, else with 1. A file without a section of an
algorithm is a part of others.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from config_cli import MODELS, convert

from nemo_rl.algorithms.parts.inputs import Inputs
from nemo_rl.config.cli import look_in_working_folder
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config
from nemo_rl.config.sources import load_tree
from nemo_rl.utils.registry import import_object

LACKING = re.compile(r"not supported yet: (?:.* \(([^()]+)\)$|([^;]+))")
"""A message about a missing feature, which stands in parentheses at its end, or is all up to the way out."""


@dataclass
class Outcome:
    """The result of one file: it loads, it is refused for features, or it is unclear: it has other problems too."""

    refused: list[str] = field(default_factory=list)  # features
    unclear: list[str] = field(default_factory=list)  # messages
    stops: list[str] = field(default_factory=list)  # what a run would not find
    has_remarks: bool = False


class Remarks(logging.Handler):
    """Knows whether the file that was loaded last has remarks."""

    said = False

    def emit(self, record: logging.LogRecord) -> None:
        self.said = self.said or "it loads, with" in record.getMessage()


def outcome_of(path: Path, remarks: Remarks, *, converts: bool) -> Outcome | None:
    """The result of a file; None if it is no configuration of a run."""
    remarks.said = False
    try:
        sections = load_tree(path).values
        name = next((name for name in MODELS if name in sections), None)
        if name is None:
            return None
        config = load_config(import_object(MODELS[name], "the algorithm"), path)
        has_remarks = remarks.said
        if converts:
            convert(path)
    except ConfigError as error:
        found = [(LACKING.search(problem.message), problem) for problem in error.problems]
        return Outcome(
            refused=[feature[1] or feature[2] for feature, _ in found if feature is not None],
            unclear=[str(problem) if problem.location else f"{path}: {problem}" for f, problem in found if f is None],
        )
    except AssertionError as error:  # of `convert`
        return Outcome(unclear=[f"{path}: {error}"])
    return Outcome(stops=[f"{path}: {problem}" for problem in Inputs.of(config).problems], has_remarks=has_remarks)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--convert", action="store_true", help="also write each file that loads in today's form")
    arguments = parser.parse_args(argv)
    if not arguments.folder.is_dir():
        parser.error(f"{arguments.folder} is no folder")
    look_in_working_folder()  # as a run does
    remarks, logger = Remarks(), logging.getLogger("nemo_rl.config")
    logger.addHandler(remarks)
    logger.propagate = False
    files = sorted(path for suffix in ("yaml", "yml") for path in arguments.folder.rglob(f"*.{suffix}"))
    outcomes = [outcome_of(path, remarks, converts=arguments.convert) for path in files]
    logger.removeHandler(remarks)
    logger.propagate = True
    runs = [outcome for outcome in outcomes if outcome is not None]
    parts = [str(path) for path, outcome in zip(files, outcomes, strict=True) if outcome is None]
    unclear = [text for run in runs for text in run.unclear]
    loading = [run for run in runs if not run.refused and not run.unclear]
    refused = [run for run in runs if run.refused and not run.unclear]
    features = Counter(feature for run in refused for feature in dict.fromkeys(run.refused))
    stops = [text for run in loading for text in run.stops]
    lines = [
        f"{len(runs)} configurations of runs; {len(parts)} files are parts of others",
        *(f"  {path}" for path in parts),
        f"{len(loading)} load, {sum(run.has_remarks for run in loading)} of them with remarks",
        f"{len(refused)} are refused for features that are missing here",
        *(f"  {number:4} {feature}" for feature, number in features.most_common()),
        f"{sum(bool(run.stops) for run in loading)} load, and their runs would stop",
        *(f"  {text}" for text in stops),
        f"{sum(bool(run.unclear) for run in runs)} are unclear",
        *(f"  {text}" for text in unclear),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if unclear or not runs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
