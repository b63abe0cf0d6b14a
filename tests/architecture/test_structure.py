"""The limits on size and tangle that `tools/structure.py` measures, and the walks of `docs/reading.md`."""

import re

import pytest

from tools import structure

LIMITS = {
    "lines of nemo_rl": 57_640,
    "files of nemo_rl": 268,
    "modules that run_grpo_math.py reaches": 150,
    "lines that run_grpo_math.py reaches": 24_370,
    "files of the GRPO walk": 32,
    "lines of the GRPO walk": 7_210,
    "files in the largest folder": 20,
    "import circles": 0,
    "lines of check functions": 1_940,
    "classes from a trainer to its base": 3,
    "broad excepts in 1,000 lines": 0.25,
    "lines of tests": 31_010,
}
MIN_FILE_LINES = 60
# Files below it, each with its reason.
SHORT_FILES = {
    "environments/agents/interfaces.py": "an interface: what an agent is given and hands back",
    "algorithms/losses/aggregate.py": "the sums that every loss divides by global counts",
    "algorithms/losses/nll.py": "one loss",
    "algorithms/setup/grpo.py": "the way in to GRPO",
    "algorithms/setup/ppo.py": "the way in to PPO",
    "models/policy/settings.py": "what driver and workers of a policy both know",
    "utils/checkpoint/save.py": "an interface: what a save is asked for and hands back",
}


@pytest.fixture(scope="module")
def numbers() -> dict[str, float]:
    return structure.structure()


@pytest.mark.parametrize("name", LIMITS)
def test_the_package_stays_within_its_limits(numbers, name):
    assert numbers[name] <= LIMITS[name], f"{name}: `python tools/structure.py` shows where they are"


def test_every_number_has_a_limit(numbers):
    assert numbers.keys() == LIMITS.keys()


def test_nothing_imports_in_a_circle():
    assert structure.circles() == [], "move what both need below them, or pass it in"


def test_a_short_file_has_a_reason():
    short = {
        str(path.relative_to(structure.PACKAGE))
        for path in structure.modules().values()
        if path.name != "__init__.py" and structure.num_lines(path) < MIN_FILE_LINES
    }
    assert short - SHORT_FILES.keys() == set(), "merge them into the file that uses them, or give a reason here"
    assert SHORT_FILES.keys() - short == set(), "these are no longer short, or gone"


def test_the_walks_name_their_sizes():
    """Each heading of docs/reading.md is followed by the counts that the script prints."""
    text = structure.READING.read_text(encoding="utf-8")
    for heading, files in structure.walks().items():
        lines = sum(structure.num_lines(structure.ROOT / file) for file in files)
        section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
        match = re.search(r"(\d+) files, ([\d,]+) lines", section)
        assert match is not None, f"{heading}: say 'N files, M lines'"
        assert (int(match[1]), int(match[2].replace(",", ""))) == (len(files), lines), f"{heading}: run --reading"
