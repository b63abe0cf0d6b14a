"""Configuration of the sliding puzzle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from nemo_rl.config.base import StrictModel
from nemo_rl.utils.sliding_puzzle import rows_and_columns, shuffle_range


class SlidingPuzzleGameConfig(StrictModel):
    """The boards. The dataset takes both values from here, by interpolation in its `kwargs`."""

    size: int | list[int] = 5
    """Rows and columns of a square board, or `[rows, columns]`; boards of another size are refused."""

    shuffle_moves: int | list[int] = 10
    """Random moves that lead from the solved board to the one that is given, or `[fewest, most]`."""

    def cross_checks(self) -> Iterator[tuple[str, str]]:
        try:
            rows_and_columns(self.size)
        except ValueError as error:
            yield "size", str(error)
        try:
            shuffle_range(self.shuffle_moves)
        except ValueError as error:
            yield "shuffle_moves", str(error)


class SlidingPuzzleConfig(StrictModel):
    """Boards and the end of a game."""

    game_config: SlidingPuzzleGameConfig = SlidingPuzzleGameConfig()
    """The boards."""

    max_moves: int = Field(default=30, ge=1)
    """Actions until the game is lost, those that could not be done included; a row may have its own `max_moves`."""


class SlidingPuzzleEnvironmentConfig(StrictModel):
    """The sliding puzzle: an action for each turn, reward 1 for the solved board."""

    type: Literal["sliding_puzzle_game"] = "sliding_puzzle_game"
    """Registry name of the environment."""

    cfg: SlidingPuzzleConfig = SlidingPuzzleConfig()
    """Boards and the end of a game."""
