"""The sliding puzzle as a game of several turns: one action per turn, reward 1 for the solved board."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import torch

from nemo_rl.environments.client import EnvironmentStep, as_return
from nemo_rl.environments.config import SlidingPuzzleEnvironmentConfig
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, FinishedSamples
from nemo_rl.types import LLMMessageLogType
from nemo_rl.utils.sliding_puzzle import (
    ACTION_END,
    Board,
    describe,
    is_solved,
    parse_grid,
    picture_of,
    play,
    rows_and_columns,
)


class SlidingPuzzleMetadata(TypedDict):
    """The state of an episode. A row gives `game_state`, and `max_moves` if it has its own."""

    game_state: dict[str, list[list[int]]]  # {"grid": rows of tiles, 0 for the empty square}
    num_moves: NotRequired[int]
    max_moves: NotRequired[int]


class SlidingPuzzleEnv(EnvironmentInterface[SlidingPuzzleMetadata]):
    """Reads `<action>...</action>` in the last turn: `up`, `down`, `left`, `right` (the way the tile moves), `slide N`.

    The observation is the board after the move. An invalid action leaves the board as it is and counts as a move; the
    observation names the problem. The game ends when the board is solved, with reward 1, or after `max_moves`, with
    reward 0.
    """

    def __init__(self, cfg: SlidingPuzzleEnvironmentConfig | Mapping[str, Any]) -> None:
        config = SlidingPuzzleEnvironmentConfig.model_validate(cfg)
        self.size = rows_and_columns(config.cfg.game_config.size)
        self.max_moves = config.cfg.max_moves
        self.picture = config.cfg.game_config.picture

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[SlidingPuzzleMetadata]
    ) -> EnvironmentReturn[SlidingPuzzleMetadata]:
        """One move of each game. ValueError for a row without a board, of another size, or that cannot be solved."""
        return as_return([self._move(log, known) for log, known in zip(message_log_batch, metadata, strict=True)])

    def _move(self, log: LLMMessageLogType, known: SlidingPuzzleMetadata) -> EnvironmentStep:
        board, problem = play(self._board(known), str(log[-1]["content"]))
        num_moves, max_moves = known.get("num_moves", 0) + 1, known.get("max_moves", self.max_moves)
        solved = is_solved(board)
        ended = solved or num_moves >= max_moves
        end = [f"{'Solved' if solved else 'Not solved'} in {num_moves} moves."] if ended else []
        content: Any = "\n".join([describe(board, problem), *end])
        if self.picture:
            text = "\n".join([problem, *end] if problem else end)
            content = [picture_of(board), {"type": "text", "text": text}]
        grid = [[*row] for row in board]
        return EnvironmentStep(
            observation={"role": "environment", "content": content},
            reward=float(solved),
            terminated=ended,
            metadata={"game_state": {"grid": grid}, "num_moves": num_moves, "max_moves": max_moves},
            next_stop_strings=[ACTION_END],
        )

    def _board(self, known: SlidingPuzzleMetadata) -> Board:
        if not known or "game_state" not in known:
            raise ValueError(
                "the sliding puzzle needs rows with a board: set dataset_name: sliding_puzzle and processor: "
                "episode_processor, or give rows extra_env_info: {game_state: {grid: [[1, 2], [0, 3]]}}"
            )
        board = parse_grid(known["game_state"]["grid"])
        size = len(board), len(board[0])
        if size != self.size:
            raise ValueError(
                f"a board has {size[0]}x{size[1]} squares, and env.sliding_puzzle_game.cfg.game_config.size says "
                f"{self.size[0]}x{self.size[1]}: let the dataset's kwargs.size interpolate that key"
            )
        return board

    def global_post_process_and_metrics(self, batch: FinishedSamples) -> tuple[FinishedSamples, dict[str, float]]:
        """Metrics of a batch with `rewards` [B], `is_end` [B] (not cut off) and `message_log`, a list of games."""
        counts = [sum(message.get("sampled", False) for message in log) for log in batch["message_log"]]
        moves = torch.tensor(counts, dtype=torch.float32)
        solved = batch["rewards"] >= 1
        return batch, {
            "success_rate": solved.float().mean().item(),
            "moves": moves.mean().item(),
            "moves_of_solved_games": moves[solved].mean().item() if solved.any() else 0.0,
            "fraction_of_samples_properly_ended": batch["is_end"].float().mean().item(),
        }
