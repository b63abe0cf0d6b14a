"""Generated boards of the sliding puzzle, made by shuffling the solved board.

A hash of the board's text alone chooses the held-out fifth, so training and validation never begin with the same board,
whatever the other options are. A board of 2x2 has 12 states. Two of the 11 unsolved ones are held out, and every game
passes through most of the others, so use `split: all` for boards of that size.
"""

import random
from typing import Any

from pydantic import Field

from nemo_rl.config.rules import StrictModel
from nemo_rl.data.config import TableConfig
from nemo_rl.data.datasets.arithmetic import DEFAULT_NUM_TRAIN_SAMPLES, HELD_OUT_ONE_IN, generated_options, in_split
from nemo_rl.utils.sliding_puzzle import (
    ACTION_END,
    TILE_MOVES,
    describe,
    first_moves,
    is_solved,
    picture_of,
    play,
    render,
    rows_and_columns,
    shuffle_range,
    shuffled,
)

MAX_TRIES = 1_000  # shuffled boards in a row that belong to the other split
DEMONSTRATED_MOVES = 6  # no 2x2 board needs more


class _Options(StrictModel):
    size: int | list[int] = 5
    shuffle_moves: int | list[int] = 10
    num_samples: int | None = Field(default=None, ge=1)
    max_moves: int | None = None
    picture: bool = False


def load_sliding_puzzle(cfg: TableConfig) -> list[dict[str, Any]]:
    """Rows {"problem": the board, "extra_env_info": {"game_state": ...}, "stop_strings": ["</action>"]}.

    `kwargs` are {size, shuffle_moves, num_samples, max_moves, picture}; `split` and `seed` come from the section.
    `shuffle_moves` is a number or [fewest, most], from which each board draws a number. `num_samples` defaults to
    10,000 for training and otherwise to 256; boards may repeat. `max_moves` overrides the limit of the environment.
    Raises ValueError if shuffling gives no board of the split.
    """
    options = generated_options(cfg, _Options)
    rows, columns = rows_and_columns(options.size)
    fewest, most = shuffle_range(options.shuffle_moves)
    split = cfg.split or "train"
    num_samples = options.num_samples or (DEFAULT_NUM_TRAIN_SAMPLES if split == "train" else 256)
    rng = random.Random(cfg.seed)
    limit = {} if options.max_moves is None else {"max_moves": options.max_moves}
    made: list[dict[str, Any]] = []
    num_tries = 0
    while len(made) < num_samples:
        board = shuffled(rows, columns, rng.randint(fewest, most), rng)
        num_tries += 1
        if in_split(render(board), split):
            state = {"game_state": {"grid": [list(row) for row in board]}, **limit}
            problem = [picture_of(board)] if options.picture else render(board)
            made.append({"problem": problem, "extra_env_info": state, "stop_strings": [ACTION_END]})
            num_tries = 0
        elif num_tries == MAX_TRIES:
            raise ValueError(
                f"sliding_puzzle: {MAX_TRIES} boards of {rows}x{columns} after {fewest} to {most} moves and none of "
                f"split {split!r} (one in {HELD_OUT_ONE_IN} is held out): set split=all, or raise shuffle_moves"
            )
    return made


def demonstrate_sliding_puzzle(rng: random.Random, mistake_probability: float) -> list[dict[str, str]]:
    """A game on 2x2, for the warm-up of tiny models: any of the 11 unsolved boards, and up to six moves.

    Each move is the first of a shortest solution, or, with `mistake_probability`, any of the four directions, of which
    two are impossible there. Not every game ends with the solved board. Held-out boards are among them, as a real model
    has seen such boards before.
    """
    board = rng.choice(list(first_moves(2, 2))[1:])
    conversation = [{"role": "user", "content": render(board)}]
    for _ in range(DEMONSTRATED_MOVES):
        direction = rng.choice(list(TILE_MOVES)) if rng.random() < mistake_probability else first_moves(2, 2)[board]
        action = f"<action>{direction}</action>"
        board, wrong = play(board, action)
        conversation.append({"role": "assistant", "content": action})
        if is_solved(board):
            break
        conversation.append({"role": "environment", "content": describe(board, wrong)})
    return conversation
