"""One test for all rows of a table: it holds its claim against every row, and names every row that it does not hold for."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SHOWN = 600


def every(names: str, rows: Iterable[Any], name: Callable[..., str] = str) -> Callable[[Callable[..., None]], Any]:
    """Take a test's arguments *names*, separated by commas, from each row in turn.  Its fixtures are made once for all."""
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
