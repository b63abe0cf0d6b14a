import pytest

from nemo_rl.data.config import DatasetConfig
from nemo_rl.data.datasets.arithmetic import in_split
from nemo_rl.data.datasets.sliding_puzzle import load_sliding_puzzle
from nemo_rl.utils.sliding_puzzle import parse_grid, render
from tests.unit.utils.test_sliding_puzzle import solution


def sliding_puzzle_rows(seed=42, split="train", **kwargs):
    section = {"dataset_name": "sliding_puzzle", "processor": "episode_processor", "env_name": "sliding_puzzle_game"}
    return load_sliding_puzzle(DatasetConfig(**section, seed=seed, split=split, kwargs=kwargs))


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
    assert not any(map(is_held_out, boards_of(splits["train"])))
    assert all(map(is_held_out, boards_of(splits["validation"])))
    shares = [is_held_out(board) for board in boards_of(splits["all"])]
    assert 0.1 < sum(shares) / len(shares) < 0.35


def test_a_row_is_what_it_shows_and_the_seed_decides():
    options = {"size": [2, 3], "shuffle_moves": 5, "num_samples": 20, "max_moves": 9}
    rows = sliding_puzzle_rows(**options)
    assert rows == sliding_puzzle_rows(**options) != sliding_puzzle_rows(**options, seed=1)
    for row, board in zip(rows, boards_of(rows), strict=True):
        assert row["problem"] == render(board)
        assert row["stop_strings"] == ["</action>"] and row["extra_env_info"]["max_moves"] == 9
        assert 1 <= len(solution(board)) <= 5


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="split must be one of train, validation, all"):
        sliding_puzzle_rows(split="test")
    with pytest.raises(ValueError, match="shuffle_moves is a number"):
        sliding_puzzle_rows(shuffle_moves=[3, 2])
    with pytest.raises(ValueError, match="set split=all"):
        sliding_puzzle_rows(size=2, shuffle_moves=1, split="validation")
