"""Breaches of the promises of docs/promises.md: changes of lines that the promise's test must detect.

`promises.toml` has a table for each change, with the name of the test as on the page:

    [["ledger/test_ledger.py::test_the_failure_after_the_last_retry_is_final"]]
    file = "forgekeeper/ledger/retry_delays.py"
    line = "MAX_RETRIES = 25"
    spoilt = "MAX_RETRIES = 26"

*line* is text that occurs once in the file, of a line, a part of a line or several lines; *spoilt* replaces it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .choosing import Mutant
from .spoiling import Spoilt

PAGE, LISTED = Path("docs", "promises.md"), Path("tests", "mutation", "promises.toml")
PROMISE = re.compile(r"^\| .+ \| `(\S+::\w+)` \|$", re.MULTILINE)


class Breach(NamedTuple):
    """A change of the product, and the test that must detect it."""

    test: str
    mutant: Mutant


def read_breaches(tree: Path) -> Iterator[Breach]:
    """Yield the breaches of every promise of a tree, in the order of the page.

    Raises `ValueError` for a promise without a breach, a breach without a promise, and a line that the file does not
    have exactly once.
    """
    promised = dict.fromkeys(PROMISE.findall((tree / PAGE).read_text()))
    listed = tomllib.loads((tree / LISTED).read_text())
    if unlike := promised.keys() ^ listed.keys():
        raise ValueError(f"promises without a breach, or breaches without a promise: {', '.join(sorted(unlike))}")
    for test in promised:
        for breach in listed[test]:
            yield Breach(f"tests/{test}", _spoil_line(tree, breach["file"], breach["line"], breach["spoilt"]))


def _spoil_line(tree: Path, path: str, line: str, spoilt: str) -> Mutant:
    before, line_bytes = (tree / path).read_bytes(), line.encode()
    if (count := before.count(line_bytes)) != 1:
        raise ValueError(f"{path} has the line {count} times, should have it once: {line}")
    start = before.index(line_bytes)
    place = Spoilt("promise", start, start + len(line_bytes), spoilt)
    return Mutant(path, before.decode(), place, before.count(b"\n", 0, start) + 1)
