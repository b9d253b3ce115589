"""Check a claim for all rows of a table in one test, and name every row for which the claim fails."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SHOWN = 600


def every(names: str, rows: Iterable[Any], name: Callable[..., str] = str) -> Callable[[Callable[..., None]], Any]:
    """Call a test for each row, with the row's values as the arguments *names*, separated by commas.

    The fixtures are created once for all rows.  *name* returns the name of a row for the message of a failure.
    """
    given = names.split(", ")

    def declare(claim: Callable[..., None]) -> Callable[..., None]:
        def test(**fixtures: Any) -> None:
            failed = []
            for row in table:
                values = row if len(given) > 1 else (row,)
                try:
                    claim(**dict(zip(given, values, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001, raised together below
                    failed.append((name(row), error))
            if failed:
                said = "\n".join(f"{row}: {type(error).__name__}: {str(error)[:SHOWN]}" for row, error in failed)
                raise AssertionError(f"{len(failed)} of {len(table)}\n{said}") from failed[0][1]

        table = list(rows)
        assert table, "a table without rows proves nothing"
        wanted = inspect.signature(claim)
        rest = [one for one in wanted.parameters.values() if one.name not in given]
        test.__signature__ = wanted.replace(parameters=rest)  # type: ignore[attr-defined]
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "pytestmark"):
            if hasattr(claim, attribute):
                setattr(test, attribute, getattr(claim, attribute))
        return test

    return declare
