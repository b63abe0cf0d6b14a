"""The fault matrix: who x what x when x loop, drawn so that every pair that can occur does.

A `Cell` is one fault of one process in one phase of one loop. `draw` chooses cells until every pair of values that some
possible cell has is in a chosen one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

SAMPLING = ("grpo", "async", "ppo", "distillation")
LOOPS = (*SAMPLING, "sft")
SGLANG = "sglang"  # GRPO with engines of SGLang, whose processes alone are hurt

WHO = {  # the loops that have the process
    "environment": ("grpo", "async", "ppo"),
    "verifier": ("grpo", "async", "ppo"),
    "engine": (*SAMPLING, SGLANG),  # the worker that hosts it
    "core": (*SAMPLING, SGLANG),  # the engine's own process, which has the model
    "detokenizer": (SGLANG,),
    "rollout": SAMPLING,
    "keeper": SAMPLING,
    "tokenizer": ("sft",),
    "policy-0": LOOPS,
    "policy-1": ("grpo", "sft"),
    "critic": ("ppo",),
    "teacher": ("distillation",),
    "driver": LOOPS,
    "node": LOOPS,  # Ray's own processes
}
WHAT = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, for good",
    "pause": "SIGSTOP for 20 s",
    "exception": "the next call of one of its methods raises, or the next step of the core",
    "nonsense": "its weights, or its rewards, become NaN",
    "shape": "it returns a reward too few",
    "disk": "the disk becomes full",
    "memory": "it can allocate no more memory (RLIMIT_AS)",
    "cut": "its network connections are shut down",
    "truncated": "the newest file that it will read loses its end",
}
WHEN = {  # the loops that have the phase
    "start-up": (*LOOPS, SGLANG),
    "generation": (*SAMPLING, SGLANG),
    "logprobs": ("grpo", "async", "ppo", "distillation"),
    "train": LOOPS,
    "refit": (*SAMPLING, SGLANG),
    "validation": LOOPS,
    "checkpoint": LOOPS,
    "resume": LOOPS,
}
WRITERS = ("policy-0", "policy-1", "critic", "driver")  # who keeps files of a checkpoint
WITHOUT_METHODS = ("verifier", "driver", "node")  # what is reached only from outside
WITH_NUMBERS = ("environment", "core", "policy-0", "policy-1", "critic", "teacher")  # weights or rewards


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """A fault of the matrix."""

    loop: str
    who: str
    what: str
    when: str

    def __str__(self) -> str:
        return f"{self.loop}: {self.who}, {self.what}, {self.when}"

    @property
    def moves_versions(self) -> bool:
        """Whether groups that play beside training may be played again with newer weights, which the new engine has."""
        return self.loop == "async" and self.who in ("engine", "core")

    @property
    def pairs(self) -> frozenset[tuple[tuple[str, str], ...]]:
        return frozenset(itertools.combinations(asdict(self).items(), 2))


def is_possible(cell: Cell) -> bool:
    """Whether the process exists in the loop and phase, and whether the fault can happen to it there."""
    who, what, when = cell.who, cell.what, cell.when
    if cell.loop not in WHO[who] or cell.loop not in WHEN[when]:
        return False
    if cell.loop == SGLANG:
        return what in ("kill", "stop", "pause") or (what == "exception" and who == "engine" and when != "start-up")
    if what == "truncated":  # checkpoints; other files that a start reads: test_bad_input.py
        return who in WRITERS and when == "resume"
    if what == "disk":
        return who in WRITERS and when in ("train", "validation", "checkpoint")
    if what == "nonsense":
        return who in WITH_NUMBERS and when not in ("start-up", "resume")
    if what == "shape":
        return who == "environment" and when not in ("start-up", "resume")
    if what == "exception":
        return who not in WITHOUT_METHODS and when not in ("start-up", "resume")
    if who == "driver":
        # Nothing outside it watches a driver that is stopped for good (Ctrl-Z); it has no time to allocate in a phase.
        return what in ("kill", "pause", "cut")
    if who == "node":
        return what in ("kill", "stop", "pause")
    if who == "verifier":
        return what in ("kill", "stop", "pause", "memory") and when not in ("start-up", "resume")
    if who in ("environment", "keeper") and when == "start-up":
        return what in ("kill", "pause")
    return True


def possible() -> list[Cell]:
    values = itertools.product((*LOOPS, SGLANG), WHO, WHAT, WHEN)
    cells = (Cell(loop=loop, who=who, what=what, when=when) for loop, who, what, when in values)
    return [cell for cell in cells if is_possible(cell)]


def draw(seed: int) -> list[Cell]:
    """Cells with every possible pair: always one with the most pairs that are still missing, ties by `seed`."""
    left = possible()
    random.Random(seed).shuffle(left)
    pairs = [cell.pairs for cell in left]
    missing = frozenset().union(*pairs)
    drawn = []
    while missing:
        brings = [len(own & missing) for own in pairs]
        number = brings.index(max(brings))
        drawn.append(left[number])
        missing -= pairs[number]
    return drawn


def chains(cells: Sequence[Cell], size: int) -> list[list[Cell]]:
    """Cells of one loop each, at most `size` of them, in an order that starts a run as seldom as possible.

    Those that move versions are apart, so that the others can be compared with a run without faults.
    """
    order = {when: number for number, when in enumerate(WHEN)}
    found = []
    for loop, moves in itertools.product((*LOOPS, SGLANG), (False, True)):
        of_loop = (cell for cell in cells if cell.loop == loop and cell.moves_versions == moves)
        mine = sorted(of_loop, key=lambda c: (order[c.when], astuple(c)))
        parts = -(-len(mine) // size)
        found += [mine[part::parts] for part in range(parts)]
    return found
