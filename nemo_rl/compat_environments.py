"""What environments and losses of NeMo RL import beside the calls of `compat_calls.py`, on ours.

`compat.py` says under which module of NeMo RL each of these stands.
"""

import random
import re
import sys
from collections.abc import MutableMapping, Sequence
from enum import Enum
from typing import Any, ClassVar, TypedDict

import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor

from nemo_rl.environments.config import ENV_REGISTRY
from nemo_rl.environments.math.published import (
    NUM_TAIL_CHARACTERS,
    WORDS,
    dapo,
    minerva_normalize,
    multilingual_pattern,
)
from nemo_rl.utils.sliding_puzzle import (
    TILE_MOVES,
    Board,
    is_solved,
    moves,
    render,
    rows_and_columns,
    shuffle_range,
    shuffled,
    solved_board,
)

# Losses


class LossType(Enum):
    """What a loss is divided by."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(Enum):
    """What a loss reads of the model. Losses here read the outputs of a head task (docs/adding-a-loss.md)."""

    LOGIT = "logit"
    LOGPROB = "logprob"
    DISTILLATION = "distillation"
    DRAFT = "draft"


# Metrics and answers


def calculate_pass_rate_per_prompt(prompts: Tensor, is_correct: Tensor) -> float:
    """The share of distinct prompts, the rows of [B, S], of which one of the samples [B] is above 0."""
    _, group = torch.unique(prompts, dim=0, return_inverse=True)
    return len(torch.unique(group[is_correct > 0])) / len(torch.unique(group))


MULTILINGUAL_ANSWER_REGEXES = WORDS.split()
MULTILINGUAL_ANSWER_PATTERN_TEMPLATE = multilingual_pattern("{}", "")


def last_boxed_only_string(string: str) -> str | None:
    """The last `\\boxed{...}` with all its braces; None without one that is closed."""
    start, depth = string.rfind("\\boxed{"), 0
    for end in range(start + len("\\boxed"), len(string)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(string[end], 0)
        if depth == 0:
            return string[start : end + 1]
    return None


def remove_boxed(s: str) -> str:
    """The content of `\\boxed{...}`. ValueError for another text."""
    if not (s.startswith("\\boxed{") and s.endswith("}")):
        raise ValueError(f"no \\boxed{{...}}: {s[:80]!r}")
    return s[len("\\boxed{") : -1]


def is_correct_minerva(solution_str: str, gt: str, gt_need_extract: bool = False) -> tuple[bool, str | None]:
    """Whether the last "Answer:" is `gt` (`gt_need_extract`: its box) after Minerva's normalisation, and the answer."""
    boxed = last_boxed_only_string(gt) if gt_need_extract else None
    truth = minerva_normalize(gt if boxed is None else remove_boxed(boxed))
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", solution_str)
    answer = minerva_normalize(found[-1]) if found else None
    return answer == truth, answer


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: None = None
) -> tuple[bool, str | None]:
    """Whether the end of a solution gives `answer`, and what it gives: by the rule of the DAPO paper, or in a box."""
    if not strict_box_verify:
        return dapo(solution_str, answer)
    boxed = last_boxed_only_string(solution_str[-NUM_TAIL_CHARACTERS:])
    found = None if boxed is None else remove_boxed(boxed)
    return found == answer, found


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: None = None
) -> dict[str, Any]:
    """`score` 1 or -1 (DAPO, arXiv 2503.14476, eq. 7), `acc` whether it is right, and the answer `pred`."""
    is_right, found = verify(solution_str, ground_truth, strict_box_verify)
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": found}


# The sliding puzzle without an environment


class SlidingPuzzleConfig(TypedDict):
    size: int
    shuffle_moves: int


class SlidingPuzzleGameLogic:
    """The game on states {size, grid, solution, empty_pos, commands}. An action is `up`, `down`, `left`, `right` (the
    way the tile moves), `slide ROW COLUMN` from 1 on, or `view`."""

    COMMANDS: ClassVar = {
        **{name: f"Move a tile {name} into the empty square" for name in TILE_MOVES},
        "slide": "Move the tile at ROW COLUMN into the empty square",
        "view": "Show the board",
    }

    @staticmethod
    def generate(config: SlidingPuzzleConfig) -> dict[str, Any]:
        """A state that can be solved, by Python's random numbers."""
        (rows, columns), (fewest, most) = rows_and_columns(config["size"]), shuffle_range(config["shuffle_moves"])
        board = shuffled(rows, columns, random.randint(fewest, most), random.Random(random.random()))
        solution = [list(row) for row in solved_board(rows, columns)]
        state = {"size": config["size"], "solution": solution, "commands": SlidingPuzzleGameLogic.COMMANDS}
        return state | SlidingPuzzleGameLogic._places(board)

    @staticmethod
    def _places(board: Board) -> dict[str, Any]:
        empty = next((r, c) for r, row in enumerate(board) for c, tile in enumerate(row) if tile == 0)
        return {"grid": [list(row) for row in board], "empty_pos": empty}

    @staticmethod
    def init(game_state: dict[str, Any]) -> str:
        """The rules for a player."""
        size = game_state["size"]
        return (
            f"Bring the tiles of a board of {size}x{size} squares into reading order, the empty square last. Actions: "
            "up, down, left, right (the way a tile moves into the empty square), slide ROW COLUMN, view."
        )

    @staticmethod
    def step(action: str, game_state: dict[str, Any]) -> tuple[str, float, bool, dict[str, Any]]:
        """(text, reward, whether it is solved, the state afterwards), which an impossible action leaves as it was."""
        board = tuple(tuple(row) for row in game_state["grid"])
        options, words = moves(board), action.lower().split()
        made = board if words == ["view"] else options.get(" ".join(words))
        if made is None and words[:1] == ["slide"] and len(words) == 3 and all(map(str.isdecimal, words[1:])):
            row, column = (int(word) - 1 for word in words[1:])
            vacated = [other for other in options.values() if _is_empty(other, row, column)]
            made = vacated[0] if vacated else None
        if made is None:
            return f"{action!r} is not possible. Possible now: {', '.join(options)}.", 0.0, False, game_state
        done = is_solved(made)
        text = "Solved." if done else render(made)
        return text, float(done), done, game_state | SlidingPuzzleGameLogic._places(made)

    @staticmethod
    def render(game_state: dict[str, Any]) -> str:
        return render(tuple(tuple(row) for row in game_state["grid"]))


def _is_empty(board: Board, row: int, column: int) -> bool:
    return row < len(board) and column < len(board[0]) and board[row][column] == 0


# Actors


ACTOR_ENVIRONMENT_REGISTRY: dict[str, str] = dict.fromkeys(ENV_REGISTRY.values(), sys.executable)
"""Import path of an actor's class -> its Python. Scripts add to it; a run reads only `env.<name>.py_executable`."""


def get_actor_python_env(actor_class_fqn: str) -> str:
    """The Python of an actor. ValueError for a class that nobody has registered."""
    if actor_class_fqn not in ACTOR_ENVIRONMENT_REGISTRY:
        raise ValueError(f"no Python is registered for {actor_class_fqn!r}: add it to ACTOR_ENVIRONMENT_REGISTRY")
    return ACTOR_ENVIRONMENT_REGISTRY[actor_class_fqn]


# Data


def update_single_dataset_config(
    data_config: MutableMapping[str, Any], default_data_config: MutableMapping[str, Any]
) -> None:
    """Fill the keys that a section lacks, in place."""
    for key, value in default_data_config.items():
        data_config.setdefault(key, value)


def merge_datasets(datasets: Sequence[Dataset]) -> Dataset:
    """All rows, one table after the other."""
    return concatenate_datasets(list(datasets))
