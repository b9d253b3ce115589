"""Whether a table fits into its terminal: rich cuts what does not, without a word."""

from __future__ import annotations

from rich.cells import cell_len
from rich.table import Table

FOLDED = 16
"""Columns that a folded cell needs to be readable, however long its words are."""
GAP = 2


def fits(table: Table, width: int) -> bool:
    """Say whether every cell of *table* can be read in so many columns."""
    needed = 0
    for column in table.columns:
        cells = [str(column.header), *map(str, column.cells)]
        if column.no_wrap:
            needed += max(map(cell_len, cells))
        else:
            words = [word for cell in cells for word in cell.split()]
            needed += min(FOLDED, max(map(cell_len, words), default=0))
    return needed + GAP * (len(table.columns) - 1) <= width
