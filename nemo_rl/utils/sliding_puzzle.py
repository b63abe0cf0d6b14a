"""The sliding puzzle: boards, moves, what a player writes and reads, and shortest solutions of small boards.

A board of R rows and C columns holds the tiles 1 to R*C-1 and one empty square, written 0 here and `_` for players. It
is solved when the tiles stand in reading order with the empty square last. Pure functions: the data set that makes
boards and the environment that plays on them share them.

A direction is the one in which the *tile* moves. On the board

    1 2
    _ 3

`left` moves tile 3 into the empty square, `down` moves tile 1, `up` and `right` move nothing. `slide 3` is `left`.
"""

from __future__ import annotations

import functools
import random
import re
from collections import deque
from collections.abc import Sequence

Board = tuple[tuple[int, ...], ...]

TILE_MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""Direction -> (rows, columns) by which the tile moves."""
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
ACTION_END = "</action>"
ACTION = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)
SLIDE = re.compile(r"slide\s+(\d{1,9})")
MAX_SIDE = 20  # a board of 20x20 is written in some 1,600 characters, every turn
MAX_SHUFFLE_MOVES = 10_000  # for each board that the dataset makes
MAX_SOLVED_SQUARES = 9  # 181,440 boards of 3x3; the next size has more than are ever enumerated


def rows_and_columns(size: int | Sequence[int]) -> tuple[int, int]:
    """`5` is a square board, `[2, 3]` one of two rows and three columns.

    Raises:
        ValueError: for anything else, and for a side below 2 or above MAX_SIDE.
    """
    sides = [size, size] if isinstance(size, int) else list(size)
    if len(sides) != 2 or min(sides) < 2 or max(sides) > MAX_SIDE:
        raise ValueError(
            f"the size of a sliding puzzle is a number from 2 to {MAX_SIDE}, or [rows, columns]; got {size!r}"
        )
    return sides[0], sides[1]


def shuffle_range(shuffle_moves: int | Sequence[int]) -> tuple[int, int]:
    """(fewest, most) random moves: `10` is `[10, 10]`.

    Raises:
        ValueError: for anything but a number from 1 to MAX_SHUFFLE_MOVES, or two in order.
    """
    ends = [shuffle_moves, shuffle_moves] if isinstance(shuffle_moves, int) else list(shuffle_moves)
    if len(ends) != 2 or not 1 <= ends[0] <= ends[1] <= MAX_SHUFFLE_MOVES:
        raise ValueError(
            f"shuffle_moves is a number from 1 to {MAX_SHUFFLE_MOVES}, or [fewest, most]; got {shuffle_moves!r}"
        )
    return ends[0], ends[1]


def solved_board(rows: int, columns: int) -> Board:
    """Tiles in reading order, the empty square last."""
    tiles = [*range(1, rows * columns), 0]
    return tuple(tuple(tiles[r * columns : (r + 1) * columns]) for r in range(rows))


def is_solved(board: Board) -> bool:
    return board == solved_board(len(board), len(board[0]))


def parse_grid(grid: Sequence[Sequence[int]]) -> Board:
    """A board from lists of rows.

    Raises:
        ValueError: when it is no board, or one that no moves solve.
    """
    board = tuple(tuple(row) for row in grid)
    squares = [tile for row in board for tile in row]
    is_rectangle = len(board) >= 2 and len(board[0]) >= 2 and len({len(row) for row in board}) == 1
    if not is_rectangle or sorted(squares) != list(range(len(squares))):
        raise ValueError(
            f"no board of a sliding puzzle: {[list(row) for row in board]}. It has at least two rows and two columns, "
            "rows of one length, the tiles from 1 on each once, and 0 for the empty square"
        )
    if not is_solvable(board):
        raise ValueError(f"no moves solve the sliding puzzle {[list(row) for row in board]}: exchange two of its tiles")
    return board


def is_solvable(board: Board) -> bool:
    """Whether some moves lead to the solved board.

    A move exchanges the empty square with a neighbour: one transposition, and one step of the empty square. So the
    parity of the permutation and that of the empty square's way to its corner agree on all boards that can be reached,
    and these are all such boards (Johnson and Story, 1879).
    """
    squares = [tile for row in board for tile in row]
    order = [tile - 1 if tile else len(squares) - 1 for tile in squares]
    inversions = sum(order[i] > order[j] for i in range(len(order)) for j in range(i + 1, len(order)))
    row, column = _empty(board)
    steps = len(board) - 1 - row + len(board[0]) - 1 - column
    return inversions % 2 == steps % 2


def move(board: Board, direction: str) -> Board | None:
    """The board after a tile moved `up`, `down`, `left` or `right` into the empty square; None when none can."""
    by_rows, by_columns = TILE_MOVES[direction]
    row, column = _empty(board)
    from_row, from_column = row - by_rows, column - by_columns
    if not (0 <= from_row < len(board) and 0 <= from_column < len(board[0])):
        return None
    squares = [list(line) for line in board]
    squares[row][column], squares[from_row][from_column] = squares[from_row][from_column], 0
    return tuple(tuple(line) for line in squares)


def moves(board: Board) -> dict[str, Board]:
    """Every direction in which a tile can move -> the board it makes."""
    after = {direction: move(board, direction) for direction in TILE_MOVES}
    return {direction: made for direction, made in after.items() if made is not None}


def shuffled(rows: int, columns: int, num_moves: int, rng: random.Random) -> Board:
    """The solved board after `num_moves` random moves, none of which takes the one before back; never solved.

    Where these moves come round to the solved board, one more is made.
    """
    board, last = solved_board(rows, columns), ""
    made = 0
    while made < num_moves or is_solved(board):
        options = moves(board)
        options.pop(OPPOSITE.get(last, ""), None)
        last = rng.choice(sorted(options))
        board = options[last]
        made += 1
    return board


def render(board: Board) -> str:
    """One line of text for each row, the columns below each other, `_` for the empty square."""
    width = len(str(len(board) * len(board[0]) - 1))
    return "\n".join(" ".join((str(tile) if tile else "_").rjust(width) for tile in row) for row in board)


def read_action(text: str) -> str | None:
    """What stands between `<action>` and the first `</action>` behind it, lower case; None when there is no such."""
    found = ACTION.search(text)
    return None if found is None else " ".join(found[1].lower().split())


def play(board: Board, text: str) -> tuple[Board, str | None]:
    """The board after the action in a player's text, and None, or what was wrong with the action, to tell the player.

    Actions are `up`, `down`, `left`, `right` (the way the tile moves) and `slide N` (tile N moves into the empty
    square). The board stays as it is where the action is none or cannot be done.
    """
    action = read_action(text)
    options = moves(board)
    known = f"Possible now: {', '.join(options)}."
    if action is None:
        return board, f"No action found. Write one like <action>{next(iter(options))}</action>. {known}"
    if action in TILE_MOVES:
        return (options[action], None) if action in options else (board, f"No tile can move {action}. {known}")
    slide = SLIDE.fullmatch(action)
    if slide is None:
        return board, f"Unknown action. Write up, down, left, right or slide N. {known}"
    tile, (row, column) = int(slide[1]), _empty(board)
    for made in options.values():
        if made[row][column] == tile:
            return made, None
    return board, f"Tile {tile} is not beside the empty square. {known}"


def describe(board: Board, wrong: str | None) -> str:
    """What a player reads after an action: what was wrong with it, if anything was, and the board."""
    return render(board) if wrong is None else f"{wrong}\n{render(board)}"


def solve(board: Board) -> list[str]:
    """A shortest way to the solved board, as directions; always the same one. Empty when it is solved.

    Raises:
        ValueError: for a board of more than nine squares, or one that no moves solve.
    """
    rows, columns = len(board), len(board[0])
    if rows * columns > MAX_SOLVED_SQUARES:
        raise ValueError(f"boards of up to {MAX_SOLVED_SQUARES} squares are solved, this one has {rows * columns}")
    first_moves = _first_moves(rows, columns)
    if board not in first_moves:
        raise ValueError(f"no moves solve {board}")
    way: list[str] = []
    while not is_solved(board):
        way.append(first_moves[board])
        board = moves(board)[way[-1]]
    return way


def reachable(rows: int, columns: int) -> list[Board]:
    """Every board that moves lead to, the solved one first, then by the length of a shortest solution.

    Raises:
        ValueError: for more than nine squares.
    """
    if rows * columns > MAX_SOLVED_SQUARES:
        raise ValueError(f"boards of up to {MAX_SOLVED_SQUARES} squares are listed, not {rows}x{columns}")
    return list(_first_moves(rows, columns))


@functools.cache
def _first_moves(rows: int, columns: int) -> dict[Board, str]:
    """Every reachable board -> the first move of a shortest solution ("" for the solved board), breadth first."""
    goal = solved_board(rows, columns)
    found = {goal: ""}
    queue = deque([goal])
    while queue:
        board = queue.popleft()
        for direction, neighbour in moves(board).items():
            if neighbour not in found:
                found[neighbour] = OPPOSITE[direction]
                queue.append(neighbour)
    return found


def _empty(board: Board) -> tuple[int, int]:
    return next((r, c) for r, row in enumerate(board) for c, tile in enumerate(row) if tile == 0)
