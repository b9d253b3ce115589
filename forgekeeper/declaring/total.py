"""A sum that another table keeps of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import peewee as pw


class Total(NamedTuple):
    """A sum of the rows' sizes that another table keeps in the column *kept*, in a row for each value of *of*.

    The deletion takes its bytes off in the same statement.  A row of the other table that somebody else has locked is
    not waited for: the rows that count towards it stay for a later run, all others go.  Children lock these rows in
    one order, so that none waits for another for ever.  Rows without such a row go, too.
    """

    kept: pw.Field[Any]
    of: pw.Field[Any]
