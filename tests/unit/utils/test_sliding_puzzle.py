import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.utils.sliding_puzzle import Board, first_moves, is_solved, moves, parse_grid, play, shuffled
from tests.tables import named


def solution(board: Board) -> list[str]:
    """The directions of a shortest one."""
    directions = []
    while not is_solved(board):
        directions.append(first_moves(len(board), len(board[0]))[board])
        board = moves(board)[directions[-1]]
    return directions


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(2, 5), st.integers(1, 40), st.randoms(use_true_random=False))
def test_shuffled_boards_can_be_solved_and_with_two_tiles_exchanged_they_cannot(rows, columns, number, rng):
    board = shuffled(rows, columns, number, rng)
    assert not is_solved(board)
    assert parse_grid([list(row) for row in board]) == board
    swapped = tuple(tuple({1: 2, 2: 1}.get(tile, tile) for tile in row) for row in board)
    with pytest.raises(ValueError, match="exchange two"):
        parse_grid(swapped)


@pytest.mark.parametrize(("rows", "columns", "boards_there", "longest"), [(2, 2, 12, 6), (2, 3, 360, 21)])
def test_the_solver_knows_every_board_and_no_way_is_longer_than_needed(rows, columns, boards_there, longest):
    lengths = {board: len(solution(board)) for board in first_moves(rows, columns)}
    assert len(lengths) == boards_there and max(lengths.values()) == longest
    for board, length in lengths.items():
        neighbours = [lengths[after] for after in moves(board).values()]
        assert length == (0 if is_solved(board) else 1 + min(neighbours))


BOARD, UP, RIGHT = ((1, 0), (3, 2)), ((1, 2), (3, 0)), ((0, 1), (3, 2))


@named(
    "text, after",
    {
        "alone": ("<action>up</action>", UP),
        "with spaces and thoughts": ("I think.\n<action>\n Slide   2 \n</action>", UP),
        "a second action": ("<action> I mean <action>right</action> or <action>up</action>", RIGHT),
        "an end before it": ("</action><action>up</action>", UP),
    },
)
def test_an_action_is_what_stands_before_the_first_end(text, after):
    assert play(BOARD, text) == (after, None)


def test_no_action_is_said():
    for text, said in (("<action></action>", "Unknown action"), ("<action>up", "No action found")):
        board, problem = play(BOARD, text)
        assert board == BOARD and problem.startswith(said)


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.sampled_from("<>/action up1\n"), max_size=60))
def test_no_text_breaks_the_game(text):
    assert play(((1, 2), (0, 3)), text)[0] in first_moves(2, 2)


@pytest.mark.parametrize("grid", [[[1, 0]], [[1, 2], [3]], [[1, 2], [3, 3]], [[1, 2], [3, 4]], []])
def test_grids_that_are_no_boards(grid):
    with pytest.raises(ValueError, match="no board"):
        parse_grid(grid)
