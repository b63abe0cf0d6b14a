"""The sliding puzzle: boards, moves, the text of a player, and shortest solutions of small boards.

A board of R rows and C columns holds the tiles 1 to R*C-1 and one empty square, written 0 here and `_` for players. It
is solved when the tiles are in reading order with the empty square last. A direction is where the *tile* moves: on the
board of rows `1 2` and `_ 3`, `left` moves tile 3 into the empty square, `down` moves tile 1, `up` and `right` move
nothing. `slide 3` is `left`.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

Board = tuple[tuple[int, ...], ...]

TILE_MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""Direction -> (rows, columns) by which the tile moves."""
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
ACTION_END = "</action>"
ACTION = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)
SLIDE = re.compile(r"slide\s+(\d{1,9})")
SQUARE = 32  # pixels along each side of a square in a picture
MAX_SIDE = 20  # a board of 20x20 takes about 1,600 characters in every turn
MAX_SHUFFLE_MOVES = 10_000  # for each board that the dataset makes


def rows_and_columns(size: int | Sequence[int]) -> tuple[int, int]:
    """`5` is a square board, `[2, 3]` one of two rows and three columns. ValueError for other sizes."""
    sides = [size, size] if isinstance(size, int) else list(size)
    if len(sides) != 2 or min(sides) < 2 or max(sides) > MAX_SIDE:
        raise ValueError(
            f"the size of a sliding puzzle is a number from 2 to {MAX_SIDE}, or [rows, columns]; got {size!r}"
        )
    return sides[0], sides[1]


def shuffle_range(shuffle_moves: int | Sequence[int]) -> tuple[int, int]:
    """(fewest, most) random moves: `10` is `[10, 10]`. ValueError for other numbers."""
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
    """A board from lists of rows. ValueError when it is no board, or no moves solve it."""
    board: Board = tuple(tuple(row) for row in grid)
    squares = [tile for row in board for tile in row]
    is_rectangle = len(board) >= 2 and len(board[0]) >= 2 and len({len(row) for row in board}) == 1
    if not is_rectangle or sorted(squares) != list(range(len(squares))):
        raise ValueError(
            f"no board of a sliding puzzle: {[list(row) for row in board]}. It has at least two rows and two columns, "
            "rows of one length, the tiles from 1 on each once, and 0 for the empty square"
        )
    # A move exchanges the empty square with a neighbour: one transposition, and one step of the empty square. So on
    # every reachable board the parity of the permutation equals the parity of the empty square's distance to its
    # corner. The converse holds as well (Johnson and Story, 1879).
    order = [tile - 1 if tile else len(squares) - 1 for tile in squares]
    inversions = sum(first > second for first, second in itertools.combinations(order, 2))
    row, column = _empty(board)
    if (inversions - (len(board) - 1 - row) - (len(squares) // len(board) - 1 - column)) % 2:
        raise ValueError(f"no moves solve the sliding puzzle {[list(row) for row in board]}: exchange two of its tiles")
    return board


def moves(board: Board) -> dict[str, Board]:
    """Every direction in which a tile can move into the empty square -> the board it makes."""
    made = {}
    row, column = _empty(board)
    for direction, (by_rows, by_columns) in TILE_MOVES.items():
        from_row, from_column = row - by_rows, column - by_columns
        if 0 <= from_row < len(board) and 0 <= from_column < len(board[0]):
            squares = [list(line) for line in board]
            squares[row][column], squares[from_row][from_column] = squares[from_row][from_column], 0
            made[direction] = tuple(tuple(line) for line in squares)
    return made


def shuffled(rows: int, columns: int, num_moves: int, rng: random.Random) -> Board:
    """The solved board after `num_moves` random moves, none of which reverses the previous one.

    If they end at the solved board again, further moves follow until it is not solved.
    """
    board, last = solved_board(rows, columns), ""
    while num_moves > 0 or is_solved(board):
        options = moves(board)
        options.pop(OPPOSITE.get(last, ""), None)
        last = rng.choice(sorted(options))
        board = options[last]
        num_moves -= 1
    return board


def render(board: Board) -> str:
    """One line of text per row, columns aligned, `_` for the empty square."""
    width = len(str(len(board) * len(board[0]) - 1))
    return "\n".join(" ".join((str(tile) if tile else "_").rjust(width) for tile in row) for row in board)


def draw(text: str) -> Image:
    """The picture of a board that `render` has written: a white tile with its number on each square but the empty one.

    Raises:
        ValueError: for a text that is no board.
    """
    from PIL import Image, ImageDraw, ImageFont

    rows = [line.split() for line in text.splitlines()]
    if not rows or any(len(row) != len(rows[0]) or not all(t == "_" or t.isdecimal() for t in row) for row in rows):
        raise ValueError(f"image 'sliding_puzzle:{text[:80]}': rows of tiles, such as '1 2' and '_ 3', make a board")
    picture = Image.new("RGB", (SQUARE * len(rows[0]), SQUARE * len(rows)), (70, 70, 70))
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(SQUARE // 2)
    for r, row in enumerate(rows):
        for c, tile in enumerate(row):
            if tile != "_":
                left, top = c * SQUARE, r * SQUARE
                pen.rectangle((left + 1, top + 1, left + SQUARE - 2, top + SQUARE - 2), fill=(250, 250, 250))
                pen.text((left + SQUARE // 2, top + SQUARE // 2), tile, fill=(0, 0, 0), font=font, anchor="mm")
    return picture


def picture_of(board: Board) -> dict[str, str]:
    """The board as part of a message, which the process that reads the message draws."""
    return {"type": "image", "image": f"sliding_puzzle:{render(board)}"}


def play(board: Board, text: str) -> tuple[Board, str | None]:
    """The board after the first action in a player's text, and the problem of the action, or None.

    An action is written `<action>...</action>`: `up`, `down`, `left`, `right` (the direction of the tile) or `slide N`
    (tile N moves into the empty square), in letters of any case. An invalid action leaves the board as it is.
    """
    found, options = ACTION.search(text), moves(board)
    known = f"Possible now: {', '.join(options)}."
    if found is None:
        return board, f"No action found. Write one like <action>{next(iter(options))}</action>. {known}"
    action = " ".join(found[1].lower().split())
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


def describe(board: Board, problem: str | None) -> str:
    """The observation after an action: its problem, if any, and the board."""
    return render(board) if problem is None else f"{problem}\n{render(board)}"


@functools.cache
def first_moves(rows: int, columns: int) -> dict[Board, str]:
    """Every reachable board -> the first move of a shortest solution; the solved board comes first and has "".

    The others come by the length of their solution. For small boards: 3x3 has 181,440, the next size has too many.
    """
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
