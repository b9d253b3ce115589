"""Find the places of a source file that can be changed, and their replacements.

Python is parsed as a tree, so docstrings, annotations and assertions are not changed.  SQL in strings of Python, and Lua,
are read word by word.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple


class Spoilt(NamedTuple):
    """A change: *text* replaces the bytes from *start* to *end*; *kind* is the kind of the place."""

    kind: str
    start: int
    end: int
    text: str


def _swapped(*pairs: str) -> dict[str, tuple[str, ...]]:
    both = [tuple(pair.split("/")) for pair in pairs]
    return {one: (other,) for pair in both for one, other in (pair, pair[::-1])}


BOUNDS = {"<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<")}
IN_PYTHON = BOUNDS | _swapped("==/!=", "is/is not", "in/not in", "and/or", "&/|", "min/max", "True/False")
IN_SQL = BOUNDS | _swapped("and/or", "is null/is not null", "true/false", "asc/desc", "least/greatest", "min/max")
IN_SQL |= {"<>": ("=",), "exists": ("not exists",), "not": ("",), "distinct": ("",), "skip locked": ("",)}
IN_LUA = BOUNDS | _swapped("==/~=", "and/or", "true/false") | {"not": ("",)}
OPERATOR = re.compile(rb"\bis\s+not\b|\bnot\s+in\b|\b(?:is|in|and|or)\b|[<>=!]=|[<>&|]")
SQL = re.compile(
    r"\b(select\b.*\bfrom|insert\s+into|update\s+\w+\s+set|delete\s+from|(create|alter|drop)\s+(unique\s+)?(table|index))\b",
    re.IGNORECASE | re.DOTALL,
)
SQL_WORDS = re.compile(
    r"""(?P<foreign>--[^\n]*|'[^'\n]*'|\{[^{}]*\}|::\w+|->>?|=>|:=|%\(\w+\)s|%s|%%)
      | (?P<word>\b(?:is\s+not\s+null|is\s+null|skip\s+locked|and|or|not|distinct|asc|desc|least|greatest|min|max|exists
            |true|false)\b|<>|[<>]=|[<>])
      | (?P<number>\b\d+\b)""",
    re.IGNORECASE | re.VERBOSE,
)
LUA_WORDS = re.compile(
    r"""(?P<foreign>--[^\n]*|'[^'\n]*'|"[^"\n]*"|\[\d+\])
      | (?P<call>^[ ]*redis\.call\([^\n]*\)$)
      | (?P<word>\b(?:and|or|not|true|false)\b|==|~=|[<>]=|[<>])
      | (?P<number>\b\d+\b)""",
    re.MULTILINE | re.VERBOSE,
)


def spoilings(path: str, source: bytes) -> Iterator[Spoilt]:
    """Yield every known change of *source*; a few of them have no effect or cannot be parsed."""
    if path.endswith(".py"):
        yield from _Python(source).spoilings()
    else:
        yield from _words("lua", source.decode(), LUA_WORDS, IN_LUA)


class _Python:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def spoilings(self) -> Iterator[Spoilt]:
        for node in _code(ast.parse(self._source)):
            yield from self._operators(node)
            yield from self._values(node)
            if instead := _statement(node):
                yield self._instead("statement", *instead)

    def _operators(self, node: ast.AST) -> Iterator[Spoilt]:
        match node:
            case ast.Compare(left=left, comparators=others):
                yield from self._between([left, *others])
            case ast.BoolOp(values=values):
                yield from self._between(values)
            case ast.BinOp(left=left, right=right, op=ast.BitAnd() | ast.BitOr()):
                yield from self._between([left, right])
            case ast.UnaryOp(op=ast.Not()):
                yield Spoilt("not", self._start(node), self._start(node) + len("not"), "")

    def _values(self, node: ast.AST) -> Iterator[Spoilt]:
        match node:
            case ast.Call(func=ast.Name(id="min" | "max" as name) as called):
                yield self._instead("limit", called, *IN_PYTHON[name])
            case ast.Constant(value=bool(value)):
                yield self._instead("boolean", node, *IN_PYTHON[str(value)])
            case ast.Constant(value=int(value) | float(value)):
                yield self._instead("number", node, repr(value + 1))
                yield self._instead("number", node, repr(value - 1))
            case ast.Constant(value=str()) | ast.JoinedStr() if SQL.search(text := self._text(node)):
                yield from _words("sql", text, SQL_WORDS, IN_SQL, self._start(node))

    def _between(self, operands: list[ast.expr]) -> Iterator[Spoilt]:
        for left, right in pairwise(operands):
            found = OPERATOR.search(self._source, self._end(left), self._start(right))
            for text in IN_PYTHON.get(" ".join(found[0].decode().split()), ()) if found else ():
                yield Spoilt("operator", found.start(), found.end(), text)

    def _instead(self, kind: str, node: ast.AST, text: str) -> Spoilt:
        return Spoilt(kind, self._start(node), self._end(node), text)

    def _text(self, node: ast.AST) -> str:
        return self._source[self._start(node) : self._end(node)].decode()

    def _start(self, node) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset


def _statement(node: ast.AST) -> tuple[ast.AST, str] | None:
    match node:
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            return value, "None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            return node, "pass"
        case ast.Continue() | ast.Break() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return node, "pass"
    return None


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the executed nodes below *node*, without docstrings, annotations and assertions."""
    for name, value in ast.iter_fields(node):
        for part in value if isinstance(value, list) else [value]:
            if not isinstance(part, ast.AST) or name in {"annotation", "returns"} or isinstance(part, ast.Assert):
                continue
            if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                continue  # a docstring
            yield part
            if not isinstance(part, ast.JoinedStr):  # before Python 3.12 the positions of its parts are wrong
                yield from _code(part)


def _words(
    kind: str, text: str, words: re.Pattern[str], opposites: dict[str, tuple[str, ...]], offset: int = 0
) -> Iterator[Spoilt]:
    for token in words.finditer(text):
        word = " ".join(token[0].lower().split())
        others = {
            "word": opposites.get(word, ()),
            "number": (str(int(word) + 1), str(abs(int(word) - 1))) if word.isdigit() else (),
            "call": ("",),
        }
        # Positions are bytes of the file, not characters of the text.
        start, end = (offset + len(text[:place].encode()) for place in token.span())
        for other in others.get(token.lastgroup or "", ()):
            yield Spoilt(kind, start, end, other)
