import random

import pytest

from nemo_rl.data.config import DatasetConfig
from nemo_rl.data.datasets import sliding_puzzle
from nemo_rl.data.datasets.arithmetic import in_split
from nemo_rl.data.datasets.registry import load_rows
from nemo_rl.data.datasets.sliding_puzzle import demonstrate_sliding_puzzle, load_sliding_puzzle
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.rows.processors import find_processor
from nemo_rl.data.tiny_model import build_tiny_tokenizer
from nemo_rl.utils.sliding_puzzle import (
    TILE_MOVES,
    describe,
    is_solved,
    parse_grid,
    play,
    read_action,
    render,
    solve,
)


def dataset(**kwargs):
    return DatasetConfig(
        dataset_name="sliding_puzzle", processor="episode_processor", env_name="sliding_puzzle_game", **kwargs
    )


def sliding_puzzle_rows(seed=42, split="train", **kwargs):
    return load_sliding_puzzle(dataset(seed=seed, split=split, kwargs=kwargs))


def grids(rows):
    return {str(row["extra_env_info"]["game_state"]["grid"]) for row in rows}


def is_held_out(board):
    return in_split(render(board), "validation")


def boards_of(rows):
    return [parse_grid(row["extra_env_info"]["game_state"]["grid"]) for row in rows]


@pytest.mark.parametrize("size", [2, [2, 3], 3, 5])
def test_training_and_validation_never_begin_with_the_same_board(size):
    options = {"size": size, "shuffle_moves": [1, 11], "num_samples": 200}
    splits = {split: sliding_puzzle_rows(**options, split=split) for split in ("train", "validation", "all")}
    assert not grids(splits["train"]) & grids(splits["validation"])
    assert grids(sliding_puzzle_rows(**options, seed=7)).isdisjoint(grids(splits["validation"]))
    assert not any(map(is_held_out, boards_of(splits["train"]))) and all(
        map(is_held_out, boards_of(splits["validation"]))
    )
    shares = [is_held_out(board) for board in boards_of(splits["all"])]
    assert 0.1 < sum(shares) / len(shares) < 0.35


def test_a_row_is_what_it_shows_and_the_seed_decides():
    rows = sliding_puzzle_rows(size=[2, 3], shuffle_moves=5, num_samples=20, max_moves=9)
    assert rows == sliding_puzzle_rows(size=[2, 3], shuffle_moves=5, num_samples=20, max_moves=9)
    assert rows != sliding_puzzle_rows(size=[2, 3], shuffle_moves=5, num_samples=20, max_moves=9, seed=1)
    for row, board in zip(rows, boards_of(rows), strict=True):
        assert row["problem"] == render(board)
        assert row["stop_strings"] == ["</action>"] and row["extra_env_info"]["max_moves"] == 9
        assert 1 <= len(solve(board)) <= 5


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="split must be one of train, validation, all"):
        sliding_puzzle_rows(split="test")
    with pytest.raises(ValueError, match="shuffle_moves is a number"):
        sliding_puzzle_rows(shuffle_moves=[3, 2])
    with pytest.raises(ValueError, match="num_samples: Input should be greater than or equal to 1"):
        load_rows(dataset(kwargs={"num_samples": 0}))
    with pytest.raises(ValueError, match="set split=all"):
        sliding_puzzle_rows(size=2, shuffle_moves=1, split="validation")
    with pytest.raises(ValueError, match="kwargs takes size, shuffle_moves, num_samples, max_moves"):
        load_rows(dataset(kwargs={"sizes": 3}))


def test_the_processor_hands_on_metadata_and_the_stop_strings_of_the_first_turn():
    (row,) = sliding_puzzle_rows(size=2, shuffle_moves=1, num_samples=1, split="all")
    process = find_processor("episode_processor")
    tokenizer = build_tiny_tokenizer()
    datum = process(row, TaskDataSpec(task_name="sliding_puzzle"), tokenizer, 64, 3)
    assert datum["stop_strings"] == ["</action>"] and datum["extra_env_info"] == row["extra_env_info"]
    assert (datum["idx"], datum["loss_multiplier"]) == (3, 1.0)
    (message,) = datum["message_log"]
    assert tokenizer.decode(message["token_ids"]) == f"<|user|>{row['problem']}<eos><|assistant|>"
    del row["stop_strings"]
    assert "stop_strings" not in process(row, TaskDataSpec(task_name="sliding_puzzle"), tokenizer, 64, 3)
    del row["extra_env_info"]
    with pytest.raises(ValueError, match="row 3 has no 'extra_env_info'"):
        process(row, TaskDataSpec(task_name="sliding_puzzle"), tokenizer, 64, 3)


@pytest.mark.parametrize("mistakes", [0.0, 0.5, 1.0])
def test_demonstrations_are_games_that_can_be_played_with_as_many_mistakes_as_asked(mistakes):
    rng = random.Random(0)
    wrong_ways = []
    for _ in range(300):
        first, *rest = demonstrate_sliding_puzzle(rng, mistakes)
        assert first["role"] == "user"
        board = parse_grid([[int(t) if t != "_" else 0 for t in line.split()] for line in first["content"].split("\n")])
        for said, seen in zip(rest[::2], [*rest[1::2], None], strict=False):
            assert said["role"] == "assistant" and read_action(said["content"]) in TILE_MOVES
            wrong_ways.append(read_action(said["content"]) != solve(board)[0])
            board, problem = play(board, said["content"])
            text = describe(board, problem)
            assert is_solved(board) if seen is None else seen == {"role": "environment", "content": text}
        assert len(rest) <= 2 * sliding_puzzle.DEMONSTRATED_MOVES
    assert sum(wrong_ways) / len(wrong_ways) == pytest.approx(
        0.75 * mistakes, abs=0.05
    )  # a quarter of the random ones is right
