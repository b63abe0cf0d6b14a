"""Rows made up as they are asked for: sums, pairs of a right and a wrong answer, boards of the sliding puzzle."""

import numpy as np
import pytest

from nemo_rl.data.config import DatasetConfig, PreferenceDatasetConfig
from nemo_rl.data.datasets.arithmetic import arithmetic_space, in_split
from nemo_rl.data.datasets.registry import load_rows
from nemo_rl.utils.sliding_puzzle import parse_grid, render
from tests.tables import named
from tests.unit.utils.test_sliding_puzzle import solution

SPLITS = ("train", "validation", "all")


def rows_of(name, *, seed=42, split="train", **kwargs):
    section = {"dataset_name": name, "processor": "default", "env_name": "math", "seed": seed, "split": split}
    return load_rows(DatasetConfig(**section, kwargs=kwargs))[0]


def test_answers_are_right_and_the_split_is_whole_whatever_the_options():
    train, validation, whole = (arithmetic_space(max_operand=9, operators="+-*", split=split) for split in SPLITS)
    assert sorted(train + validation) == sorted(whole) and len(whole) == 300
    assert all(eval(problem) == answer for problem, answer in whole)
    others = arithmetic_space(max_operand=20, operators="-", split="train")
    assert dict(others).keys().isdisjoint(dict(validation))


@named(
    "name, keys, message",
    {
        "unknown operator": ("arithmetic", {"operators": "+/"}, "operators"),
        "no operator": ("arithmetic", {"operators": ""}, "operators"),
        "negative operand": ("arithmetic", {"max_operand": -1}, "max_operand"),
        "no sample": ("arithmetic", {"num_samples": 0}, "num_samples"),
        "split": ("sliding_puzzle", {"split": "test"}, "split must be one of train, validation, all"),
        "moves": ("sliding_puzzle", {"shuffle_moves": [3, 2]}, "shuffle_moves is a number"),
        "a split of one board": (
            "sliding_puzzle",
            {"size": 2, "shuffle_moves": 1, "split": "validation"},
            "set split=all",
        ),
    },
)
def test_wrong_options_are_named(name, keys, message):
    with pytest.raises(ValueError, match=message):
        rows_of(name, **keys)


def test_the_validation_split_is_set_aside_whole_or_in_part_and_never_trained_on():
    section = {"dataset_name": "lookup", "processor": "default", "env_name": "math"}
    whole, some = (load_rows(DatasetConfig(**section, split_validation_size=size))[1] for size in (0.1, 3))
    assert len(whole) > 3 and list(some) == list(whole)[:3]
    with pytest.raises(ValueError, match="which split=all trains on; set split=train"):
        load_rows(DatasetConfig(**section, split_validation_size=0.1, split="all"))


def test_pairs_have_the_right_answer_and_a_mistake():
    section = {"dataset_name": "arithmetic_preference", "processor": "preference_processor"}
    options = {"num_samples": 400, "margins": True}
    cfg = PreferenceDatasetConfig(**section, kwargs=options, split_validation_size=0.1)
    (train, held_out), again = load_rows(cfg), load_rows(cfg)[0]
    assert list(train) == list(again)
    mistakes = []
    for row in train:
        right, wrong = (int(row[key].removeprefix("\\boxed{").removesuffix("}")) for key in ("chosen", "rejected"))
        assert right == eval(row["prompt"]) and row["margin"] == abs(wrong - right)
        mistakes.append(wrong - right)
    assert set(mistakes) == {-3, -2, -1, 1, 2, 3} and 0.45 < np.mean(np.array(mistakes) == 1) < 0.7
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    plain, _ = load_rows(PreferenceDatasetConfig(**section, kwargs={"num_samples": 2}))
    assert "margin" not in plain[0]


def boards_of(rows):
    return [parse_grid(row["extra_env_info"]["game_state"]["grid"]) for row in rows]


@pytest.mark.parametrize("size", [2, [2, 3], 5])
def test_training_and_validation_never_begin_with_the_same_board(size):
    options = {"size": size, "shuffle_moves": [1, 11], "num_samples": 200}
    train, validation, both = (boards_of(rows_of("sliding_puzzle", **options, split=split)) for split in SPLITS)
    held_out = [[in_split(render(board), "validation") for board in boards] for boards in (train, validation, both)]
    assert not any(held_out[0]) and all(held_out[1]) and 0.1 < np.mean(held_out[2]) < 0.35


def test_a_row_is_what_it_shows_and_the_seed_decides():
    options = {"size": [2, 3], "shuffle_moves": 5, "num_samples": 20, "max_moves": 9}
    rows = rows_of("sliding_puzzle", **options)
    assert rows == rows_of("sliding_puzzle", **options) != rows_of("sliding_puzzle", **options, seed=1)
    for row, board in zip(rows, boards_of(rows), strict=True):
        assert row["problem"] == render(board) and 1 <= len(solution(board)) <= 5
        assert row["stop_strings"] == ["</action>"] and row["extra_env_info"]["max_moves"] == 9
