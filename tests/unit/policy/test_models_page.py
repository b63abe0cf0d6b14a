"""docs/models.md: the code refuses what the page says, and every cell can be tried again."""

from __future__ import annotations

import pytest

from tests.unit.policy import family_cells
from tests.unit.policy.families import FAMILIES
from tools import models_page


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_says_what_the_code_refuses(family: str):
    cells = family_cells.recorded()[family]
    assert list(cells) == family_cells.COLUMNS
    for column in family_cells.COLUMNS[:-1]:
        assert cells[column] == (family_cells.refusal(family, column) or "yes"), column


def test_the_page_is_written_from_what_was_tried():
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page(family_cells.recorded())


@pytest.mark.families
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_of_the_page_is_true(family: str):
    with family_cells.alone(family) as base:
        found = family_cells.outcomes(base, family)
    assert {column: why for (_, column), why in found.items()} == {
        column: why for column, why in family_cells.recorded()[family].items() if column != family_cells.ENGINE
    }
