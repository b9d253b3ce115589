"""Choose mutants, and the tests that could detect each."""

from __future__ import annotations

import ast
import difflib
import random
import re
import sqlite3
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from .spoiling import Spoilt, spoilings

NO_PRODUCT = {"benchmarks", "deploy", "docs", "examples", "tests"}
LANGUAGES = {".py", ".lua"}
CONTEXT = re.compile(r"(.*?)(?:\|\w+| \(\w+\))?")
"""A test's name, as pytest-cov writes it for its process and `PYTEST_CURRENT_TEST` for the processes that it starts."""
UNLISTED = 0.01
"""Assumed seconds of a test that the log of durations does not list."""


class Mutant(NamedTuple):
    """A file of the product with one change."""

    path: str
    before: str
    spoilt: Spoilt
    line: int

    @property
    def after(self) -> str:
        """The changed text of the file."""
        source = self.before.encode()
        return (source[: self.spoilt.start] + self.spoilt.text.encode() + source[self.spoilt.end :]).decode()

    def diff(self) -> str:
        """Return the change as a diff."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), n=1, lineterm="")
        return "\n".join(list(lines)[2:])

    def is_one(self) -> bool:
        """Return whether the changed file can be parsed and differs from the original."""
        if not self.path.endswith(".py"):
            return True
        try:
            return ast.dump(ast.parse(self.after)) != ast.dump(ast.parse(self.before))
        except SyntaxError:
            return False


def mutants(tree: Path) -> Iterator[Mutant]:
    """Yield every possible mutant of all product files that git lists."""
    listed = subprocess.run(["git", "ls-files"], cwd=tree, capture_output=True, text=True, check=True).stdout
    for path in map(Path, listed.splitlines()):
        if path.suffix in LANGUAGES and not NO_PRODUCT & set(path.parts) and not path.parts[0].startswith("."):
            source = (tree / path).read_text()
            for spoilt in spoilings(str(path), source.encode()):
                line = source.encode().count(b"\n", 0, spoilt.start) + 1
                yield Mutant(str(path), source, spoilt, line)


def sample(found: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Choose *count* random mutants, each of another line; a prefix of the result is a random sample, too."""
    lines: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for mutant in found:
        lines[mutant.path, mutant.line].append(mutant)
    dice = random.Random(seed)
    # Each line has the same chance, however many mutants it has.
    one_each = map(dice.choice, dice.sample(list(lines.values()), len(lines)))
    return list(islice((mutant for mutant in one_each if mutant.is_one()), count))


class Tests:
    """The tests of a tree, with the lines that each executes (from coverage.py) and the seconds that each takes."""

    def __init__(self, tree: Path, coverage: Path, durations: str, present: set[str]) -> None:
        self._present = present
        self._texts = {file: (tree / file).read_text() for file in {_file(test) for test in present}}
        self._seconds: dict[str, float] = defaultdict(lambda: UNLISTED)
        for seconds, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(\S.*)$", durations, re.MULTILINE):
            self._seconds[test] += float(seconds)
        query = """
            select path, context, numbits from line_bits
            join file on file.id = file_id join context on context.id = context_id where context <> ''
        """
        self._touched: dict[str, list[tuple[str, int]]] = defaultdict(list)
        with closing(sqlite3.connect(f"file:{coverage}?mode=ro", uri=True)) as data:
            for path, context, bits in data.execute(query):
                test = (CONTEXT.fullmatch(context) or [context, context])[1]
                self._touched[path].append((test, int.from_bytes(bits, "little")))

    def of(self, mutant: Mutant, *, within: float) -> list[str]:
        """Return tests for *mutant* that take *within* seconds together, the quickest file first.

        Tests that execute the changed line have precedence, or tests that execute the file if none does; among these,
        tests whose file names the module.  Coverage of child processes may be missing, so all tests whose file names
        the module follow.
        """
        path = Path(mutant.path)
        module = path.parent.name if path.stem == "__init__" else path.stem
        scores = {file: _score(file, text, module) for file, text in self._texts.items()}
        touching = self._touching(mutant) & self._present
        naming = {test for test in self._present if scores[_file(test)]} - touching
        chosen: dict[str, list[str]] = defaultdict(list)
        for tests in (touching, naming):
            for test in sorted(tests, key=lambda test: (-scores[_file(test)], self._seconds[test], test)):
                if within > self._seconds[test]:
                    chosen[_file(test)].append(test)
                    within -= self._seconds[test]
        # Keep the tests of a file together: they share fixtures.
        files = sorted(chosen.values(), key=lambda tests: sum(self._seconds[test] for test in tests))
        return [test for tests in files for test in tests]

    def _touching(self, mutant: Mutant) -> set[str]:
        if mutant.path.endswith(".lua"):
            # Redis executes the script: coverage only knows who executes the package that runs it.
            package = f"/{Path(mutant.path).parent.parent}/"
            return {test for name, found in self._touched.items() if package in name for test, _lines in found}
        # Coverage may have been measured in another folder.
        measured = min((name for name in self._touched if name.endswith(f"/{mutant.path}")), key=len, default="")
        found = self._touched.get(measured, ())
        return {test for test, lines in found if lines >> mutant.line & 1} or {test for test, _ in found}


def _file(test: str) -> str:
    return test.partition("::")[0]


def _score(file: str, text: str, module: str) -> int:
    """Rate how likely a test file tests a module: 2 if the file's name has it, plus 1 if the text has it."""
    named = "_" + re.sub(r"[/.]", "_", file) + "_"
    return 2 * (f"_{module}_" in named) + (re.search(rf"\b{module}\b", text) is not None)
