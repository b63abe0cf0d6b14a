"""The environment as episodes use it: through the checks and the cutting of its real EnvironmentReturn."""

import pytest

from nemo_rl.environments.client import split_return
from nemo_rl.environments.sliding_puzzle import SlidingPuzzleEnv
from tests.conversations import answered
from tests.tables import named

OPTIONS = {"cfg": {"game_config": {"size": 2, "shuffle_moves": 3}, "max_moves": 3}}


def steps(turns, metadata):
    returned = SlidingPuzzleEnv(OPTIONS).step(list(map(answered, turns)), metadata)
    return split_return(returned, len(turns), "sliding_puzzle_game")


def begin(grid, **more):
    return {"game_state": {"grid": grid}, **more}


def test_a_batch_of_games_each_gets_its_own_answer():
    turns = [*(f"<action>{move}</action>" for move in ("left", "slide 1", "up")), "I give up"]
    games = solved, moved, stuck, silent = steps(turns, [begin([[1, 2], [0, 3]])] * 4)
    assert [(step.reward, step.terminated) for step in games] == [(1.0, True)] + [(0.0, False)] * 3
    assert solved.observation == {"role": "environment", "content": "1 2\n3 _\nSolved in 1 moves."}
    assert moved.observation["content"] == "_ 2\n1 3"
    assert moved.metadata == {"game_state": {"grid": [[0, 2], [1, 3]]}, "num_moves": 1, "max_moves": 3}
    for step, said in ((stuck, "No tile can move up."), (silent, "No action found.")):
        assert step.observation["content"].startswith(said) and step.observation["content"].endswith("\n1 2\n_ 3")
        assert step.metadata["game_state"] == {"grid": [[1, 2], [0, 3]]} and step.metadata["num_moves"] == 1
    assert all(step.next_stop_strings == ["</action>"] for step in games)


def test_a_game_is_lost_after_the_most_moves_whether_they_could_be_done_or_not():
    metadata = begin([[0, 2], [1, 3]])
    for turn, ends in (("<action>up</action>", False), ("nothing", False), ("<action>down</action>", True)):
        [step] = steps([turn], [metadata])
        metadata = step.metadata
        assert (step.reward, step.terminated) == (0.0, ends)
    assert step.observation["content"].endswith("_ 2\n1 3\nNot solved in 3 moves.")
    [step] = steps(["<action>up</action>"], [begin([[0, 2], [1, 3]], max_moves=1)])
    assert step.terminated and step.metadata["max_moves"] == 1


@named(
    "metadata, message",
    {
        "none": ({}, "rows with a board"),
        "unsolvable": (begin([[2, 1], [3, 0]]), "exchange two"),
        "of another size": (begin([[1, 2, 3], [4, 0, 5]]), r"2x3 squares, and .*size says 2x2"),
    },
)
def test_a_row_without_a_board_that_can_be_played_is_refused(metadata, message):
    with pytest.raises(ValueError, match=message):
        steps(["<action>up</action>"], [metadata])
