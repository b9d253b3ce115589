"""Which mutants are made, and which tests could notice each.

The sample depends on the seed and on the lines themselves, not on the files they stand in: after a move most of what was
chosen before is chosen again.
"""

from __future__ import annotations

import ast
import difflib
import re
import sqlite3
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from .spoiling import Spoilt, spoilings

NO_PRODUCT = {"benchmarks", "deploy", "docs", "examples", "tests"}
LANGUAGES = {".py", ".lua", ".sql"}
CONTEXT = re.compile(r"(.*?)(?:\|\w+| \(\w+\))?")
"""A test's name, as pytest-cov writes it for its process and `PYTEST_CURRENT_TEST` for the processes that it starts."""
LEAST = 2
"""Mutants of each room, however small it is."""
DOCUMENTS = "docs/test_pages.py"
MOST = 10
"""More than any name of a test file counts."""
UNLISTED = 0.01
"""Seconds of a test for which pytest has listed none."""


class Named(NamedTuple):
    """Lines of a file that have a name: a function, what is assigned outside of any, or the whole file."""

    path: str
    name: str
    first: int
    last: int
    is_function: bool


class Mutant(NamedTuple):
    """A file of the product with one place spoilt, and the innermost lines with a name around it."""

    path: str
    before: str
    spoilt: Spoilt
    line: int
    around: Named

    @property
    def after(self) -> str:
        """The file as it is spoilt."""
        source = self.before.encode()
        return (source[: self.spoilt.start] + self.spoilt.text.encode() + source[self.spoilt.end :]).decode()

    @property
    def room(self) -> str:
        """The top-level folder or module; in the package `forgekeeper` the folder below."""
        first, *below = Path(self.path).with_suffix("").parts
        return f"{first}/{below[0]}" if first == "forgekeeper" and len(below) > 1 else first

    @property
    def words(self) -> tuple[str, ...]:
        """What is spoilt and how, wherever the file and the line may have gone."""
        start, end = self.spoilt.start, self.spoilt.end
        source = self.before.encode()
        within = source[source.rfind(b"\n", 0, start) + 1 : start].decode().strip()
        name = self.around.name if self.around.is_function else ""
        return name, within, source[start:end].decode(), self.spoilt.text

    def diff(self) -> str:
        """Show what is spoilt."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), n=1, lineterm="")
        return "\n".join(list(lines)[2:])

    def is_one(self) -> bool:
        """Say whether it can be read at all, and as something else than before."""
        if not self.path.endswith(".py"):
            return True
        try:
            return ast.dump(ast.parse(self.after)) != ast.dump(ast.parse(self.before))
        except SyntaxError:
            return False


class Product:
    """The files of a tree that are installed, by git's list."""

    def __init__(self, tree: Path) -> None:
        listed = subprocess.run(["git", "ls-files"], cwd=tree, capture_output=True, text=True, check=True).stdout
        paths = [Path(name) for name in listed.splitlines()]
        self._sources = {
            str(path): (tree / path).read_text()
            for path in paths
            if path.suffix in LANGUAGES and not NO_PRODUCT & set(path.parts) and not path.parts[0].startswith(".")
        }
        self._named = {path: list(_named(path, source)) for path, source in self._sources.items()}

    def mutants(self) -> Iterator[Mutant]:
        """Spoil every line in every way."""
        for path, source in self._sources.items():
            encoded = source.encode()
            for spoilt in spoilings(path, encoded):
                line = encoded.count(b"\n", 0, spoilt.start) + 1
                around = [one for one in self._named[path] if one.first <= line <= one.last]
                yield Mutant(path, source, spoilt, line, max(around, key=lambda one: one.first))

    def users(self, named: Named) -> set[Named]:
        """Find the functions that name it, or name what names it; in other files where its own has none."""
        naming = self._naming(named.name, [named.path]) - {named}
        if not naming:
            return {one for one in self._naming(named.name, self._sources) if one.is_function}
        functions = {one for one in naming if one.is_function}
        return functions.union(*(self.users(one) for one in naming - functions if one.first > named.first))

    def _naming(self, name: str, paths: Iterable[str]) -> set[Named]:
        word = re.compile(rf"\b{re.escape(name)}\b")
        found: set[Named] = set()
        for path in paths:
            lines = self._sources[path].splitlines()
            _file, *parts = self._named[path]
            found |= {one for one in parts if word.search("\n".join(lines[one.first - 1 : one.last]))}
        return found


def _named(path: str, source: str) -> Iterator[Named]:
    yield Named(path, module(path), 1, source.count("\n") + 1, is_function=False)
    if path.endswith(".py"):
        yield from _named_below(ast.parse(source), path)


def _named_below(node: ast.AST, path: str) -> Iterator[Named]:
    """Yield the functions below *node*, and what is assigned outside of any."""
    for one in ast.iter_child_nodes(node):
        inside = _named_below(one, path)
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Named(path, one.name, one.lineno, one.end_lineno or 0, is_function=True)
            yield from (named for named in inside if named.is_function)
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            target = one.targets[0] if isinstance(one, ast.Assign) else one.target
            if isinstance(target, ast.Name):
                yield Named(path, target.id, one.lineno, one.end_lineno or 0, is_function=False)
        else:
            yield from inside


def module(path: str) -> str:
    """Return the last word of a module's name."""
    stem = Path(path).stem
    return Path(path).parent.name if stem == "__init__" else stem


def sample(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Choose *count* mutants, each of another line, from every room by the number of its lines."""

    def rank(mutant: Mutant) -> str:
        return sha256(repr((seed, mutant.words)).encode()).hexdigest()

    rooms: dict[str, dict[tuple[str, int], list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for mutant in mutants:
        rooms[mutant.room][mutant.path, mutant.line].append(mutant)
    chosen: list[Mutant] = []
    for room, share in _shares({room: len(lines) for room, lines in rooms.items()}, count).items():
        # A line with many places counts no more than another: its first place is as good as any.
        lines = sorted(rooms[room].values(), key=lambda ways: rank(ways[0]))
        found = (next((one for one in sorted(ways, key=rank) if one.is_one()), None) for ways in lines)
        chosen += [mutant for mutant, _ in zip(filter(None, found), range(share), strict=False)]
    # By chance, so that a sample cut short is one of every room.
    return sorted(chosen, key=rank)


def _shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """Divide *count* by the sizes, with at least `LEAST` for each."""
    shares = {room: min(size, LEAST) for room, size in sizes.items()}
    for _ in range(min(count, sum(sizes.values())) - sum(shares.values())):
        neediest = max(sizes, key=lambda room: (sizes[room] > shares[room]) * sizes[room] / (shares[room] + 0.5))
        shares[neediest] += 1
    return shares


class Map:
    """Which tests touch which lines, as coverage.py notes it with a context for each test, and how long each takes."""

    def __init__(self, coverage: Path, durations: str) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        for seconds, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(\S.*)$", durations, re.MULTILINE):
            self._seconds[test] += float(seconds)
        query = """
            select path, context, numbits from line_bits
            join file on file.id = file_id join context on context.id = context_id where context <> ''
        """
        self._touched: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
        with closing(sqlite3.connect(f"file:{coverage}?mode=ro", uri=True)) as data:
            for path, context, bits in data.execute(query):
                self._touched[path].append((CONTEXT.fullmatch(context)[1], bits))

    def length(self, test: str) -> float:
        """Return how many seconds *test* takes, about."""
        return self._seconds.get(test, UNLISTED)

    def touching(self, path: str, first: int, last: int) -> set[str]:
        """Name the tests that touch a line from *first* to *last*."""
        # The tree may have been elsewhere when it was measured.
        measured = min((name for name in self._touched if name.endswith(f"/{path}")), key=len, default="")
        wanted = sum(1 << line for line in range(first, last + 1))
        found = self._touched.get(measured, ())
        return {test for test, bits in found if int.from_bytes(bits, "little") & wanted}


class Tests:
    """The tests of a tree, and which of them could notice a mutant."""

    def __init__(self, tree: Path, product: Product, known: Map, present: set[str]) -> None:
        self._product, self._known, self._present = product, known, present
        self._texts = {file: (tree / file).read_text() for file in {_file(test) for test in present}}

    def of(self, mutant: Mutant, *, within: float) -> list[str]:
        """List tests for *mutant* that take *within* seconds together, the quickest file first.

        Those come in first that touch its line, else its function, else its file; of what stands outside of functions,
        those that touch the functions that name it.  What runs in processes of its own may be on no map: behind the
        others come the tests whose file names the function or the module, in its own name or in its text.  What is
        declared outside of functions is read by the documents' tests.
        """
        words = {module(mutant.path), mutant.around.name}
        scores = {file: _score(file, text, words) for file, text in self._texts.items()}
        touching = self._touching(mutant) & self._present
        if not mutant.around.is_function:
            scores |= {file: MOST for file in scores if file.endswith(DOCUMENTS)}
            touching |= {test for test in self._present if _file(test).endswith(DOCUMENTS)}
        unmapped = {test for test in self._present if scores[_file(test)]} - touching
        chosen: set[str] = set()
        for tests in (touching, unmapped):
            for test in sorted(tests, key=lambda test: (-scores[_file(test)], self._known.length(test), test)):
                if within > self._known.length(test):
                    chosen.add(test)
                    within -= self._known.length(test)
        return self._in_order(chosen)

    def _touching(self, mutant: Mutant) -> set[str]:
        path, around, touching = mutant.path, mutant.around, self._known.touching
        if around.is_function:
            # Where a function is declared is touched by whoever imports it.
            inside = touching(path, mutant.line, mutant.line) or touching(path, around.first + 1, around.last)
            return inside or touching(path, 1, mutant.before.count("\n") + 1)
        users = [touching(one.path, one.first + 1, one.last) for one in self._product.users(around)]
        return set().union(*users)

    def _in_order(self, tests: set[str]) -> list[str]:
        """Keep the tests of a file together, for what they share."""
        lengths: Counter[str] = Counter()
        for test in tests:
            lengths[_file(test)] += self._known.length(test)
        return sorted(tests, key=lambda test: (lengths[_file(test)], _file(test), self._known.length(test), test))


def _file(test: str) -> str:
    return test.partition("::")[0]


def _score(file: str, text: str, words: set[str]) -> int:
    """Say how much a test file is about *words*: most where its name says so."""
    named = "_" + re.sub(r"[/.]", "_", file) + "_"
    return sum(2 * (f"_{word}_" in named) + (re.search(rf"\b{word}\b", text) is not None) for word in words)
