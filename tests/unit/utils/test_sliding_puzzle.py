import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.utils.sliding_puzzle import (
    Board,
    is_solved,
    moves,
    parse_grid,
    play,
    reachable,
    read_action,
    shuffled,
    solve,
)

SIZES = st.tuples(st.integers(2, 5), st.integers(2, 5))


@st.composite
def boards(draw: st.DrawFn) -> Board:
    rows, columns = draw(SIZES)
    return shuffled(rows, columns, draw(st.integers(1, 40)), random.Random(draw(st.integers(0, 2**32))))


@settings(max_examples=60, deadline=None)
@given(boards())
def test_shuffled_boards_can_be_solved_and_are_not_and_exchanging_two_tiles_makes_them_impossible(board):
    assert not is_solved(board)
    assert parse_grid([list(row) for row in board]) == board
    swapped = tuple(tuple({1: 2, 2: 1}.get(tile, tile) for tile in row) for row in board)
    with pytest.raises(ValueError, match="exchange two"):
        parse_grid(swapped)


@pytest.mark.parametrize(("rows", "columns", "boards_there", "longest"), [(2, 2, 12, 6), (2, 3, 360, 21)])
def test_the_solver_knows_every_board_and_no_way_is_longer_than_needed(rows, columns, boards_there, longest):
    everything = reachable(rows, columns)
    lengths = {board: len(solve(board)) for board in everything}
    assert len(everything) == boards_there and max(lengths.values()) == longest
    for board, length in lengths.items():
        neighbours = [lengths[after] for after in moves(board).values()]
        assert length == (0 if is_solved(board) else 1 + min(neighbours))
        after = board
        for direction in solve(board):
            after = moves(after)[direction]
        assert is_solved(after)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<action>up</action>", "up"),
        ("I think.\n<action>\n Slide   3 \n</action>", "slide 3"),
        ("<action> I mean <action>left</action>", "left"),
        ("<action>left</action> or <action>up</action>", "left"),
        ("<action></action>", ""),
        ("</action><action>up</action>", "up"),
        ("<action>up", None),
        ("up</action>", None),
        ("", None),
    ],
)
def test_an_action_is_what_stands_before_the_first_end(text, action):
    assert read_action(text) == action


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.sampled_from("<>/action up1\n"), max_size=60))
def test_no_text_breaks_the_game(text):
    board, _ = play(((1, 2), (0, 3)), text)
    assert board in reachable(2, 2)


@pytest.mark.parametrize("grid", [[[1, 0]], [[1, 2], [3]], [[1, 2], [3, 3]], [[1, 2], [3, 4]], []])
def test_grids_that_are_no_boards(grid):
    with pytest.raises(ValueError, match="no board"):
        parse_grid(grid)
