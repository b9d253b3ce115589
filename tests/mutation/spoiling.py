"""Spoil one place of a source file: which places there are, and what would stand there instead.

Python is read as a tree, so that prose, annotations and assertions stay whole; SQL, in Python's strings or in a file
of its own, and Lua are read word by word.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple


class Spoilt(NamedTuple):
    """The bytes from *start* to *end* give way to *text*; *kind* says what they are."""

    kind: str
    start: int
    end: int
    text: str


def _swapped(*pairs: tuple[str, str]) -> dict[str, tuple[str, ...]]:
    return {one: (other,) for pair in pairs for one, other in (pair, pair[::-1])}


BOUNDS = {"<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<")}
OPPOSITES = BOUNDS | _swapped(
    ("==", "!="), ("is", "is not"), ("in", "not in"), ("and", "or"), ("&", "|"), ("min", "max"), ("True", "False")
)
OPPOSITES_IN_SQL = {
    **BOUNDS,
    **_swapped(("=", "<>"), ("and", "or"), ("is null", "is not null"), ("true", "false")),
    **_swapped(("asc", "desc"), ("least", "greatest"), ("min", "max")),
    "exists": ("not exists",),
    "not": ("",),
    "distinct": ("",),
    "skip locked": ("",),
}
OPPOSITES_IN_LUA = BOUNDS | _swapped(("==", "~="), ("and", "or"), ("true", "false")) | {"not": ("",)}
OPERATOR = re.compile(rb"\bis\s+not\b|\bnot\s+in\b|\b(?:is|in|and|or)\b|[<>=!]=|[<>&|]")
SQL = re.compile(
    r"\b(select\b.*\bfrom|insert\s+into|update\s+\w+\s+set|delete\s+from|(create|alter|drop)\s+(unique\s+)?(table|index))\b",
    re.IGNORECASE | re.DOTALL,
)
IN_SQL = re.compile(
    r"""(?P<foreign>--[^\n]*|'[^'\n]*'|\{[^{}]*\}|::\w+|->>?|=>|:=)
      | (?P<clause>\b(?:select|from|set|values|where|on|having|when|then|else|returning|into)\b)
      | (?P<limit>\blimit\s+(?:%\(\w+\)s|%s|\d+))
      | (?P<parameter>%\(\w+\)s|%s|%%)
      | (?P<word>\b(?:is\s+not\s+null|is\s+null|skip\s+locked|and|or|not|distinct|asc|desc|least|greatest|min|max|exists|true|false)\b)
      | (?P<number>\b\d+\b)
      | (?P<operator><>|[<>]=|[<>=])""",
    re.IGNORECASE | re.VERBOSE,
)
CONDITIONS = {"where", "on", "having", "when", "select"}
"""After these `=` compares; elsewhere it assigns."""
IN_LUA = re.compile(
    r"""(?P<foreign>--[^\n]*|'[^'\n]*'|"[^"\n]*"|\[\d+\])
      | (?P<call>^[ ]*redis\.call\([^\n]*\)$)
      | (?P<word>\b(?:and|or|not|true|false)\b)
      | (?P<number>\b\d+\b)
      | (?P<operator>==|~=|[<>]=|[<>])""",
    re.MULTILINE | re.VERBOSE,
)


def spoilings(path: str, source: bytes) -> Iterator[Spoilt]:
    """Spoil *source* in every way we know, one at a time; now and then the result is none."""
    if path.endswith(".py"):
        yield from _Python(source).spoilings()
    else:
        yield from (_in_lua if path.endswith(".lua") else _in_sql)(source.decode(), 0)


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
            yield from self._statements(node)

    def _operators(self, node: ast.AST) -> Iterator[Spoilt]:
        match node:
            case ast.Compare(left=left, comparators=others):
                yield from self._between("comparison", [left, *others])
            case ast.BoolOp(values=values):
                yield from self._between("and/or", values)
            case ast.BinOp(left=left, right=right, op=ast.BitAnd() | ast.BitOr()):
                yield from self._between("and/or", [left, right])
            case ast.UnaryOp(op=ast.Not()):
                yield Spoilt("not", self._start(node), self._start(node) + len("not"), "")

    def _values(self, node: ast.AST) -> Iterator[Spoilt]:
        match node:
            case ast.Call(func=ast.Name(id="min" | "max" as name) as called):
                yield self._instead("limit", called, *OPPOSITES[name])
            case ast.Constant(value=bool(value)):
                yield self._instead("boolean", node, *OPPOSITES[str(value)])
            case ast.Constant(value=int(value) | float(value)):
                yield self._instead("number", node, repr(value + 1))
                yield self._instead("number", node, repr(value - 1))
            case ast.Constant(value=str(value)) if value.isdigit():
                yield self._instead("number", node, f'"{int(value) + 1}"')
            case ast.Constant(value=str()) | ast.JoinedStr() if SQL.search(text := self._text(node)):
                quotes = re.match(r"\w*(?:\"{3}|'{3}|['\"])", text)
                yield from _in_sql(text, self._start(node), first=quotes.end() if quotes else 0)

    def _statements(self, node: ast.AST) -> Iterator[Spoilt]:
        match node:
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                yield self._instead("return", value, "None")
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
                yield self._instead("statement", node, "pass")
            case ast.Continue() | ast.Break() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self._instead("statement", node, "pass")

    def _between(self, kind: str, operands: list[ast.expr]) -> Iterator[Spoilt]:
        for left, right in pairwise(operands):
            found = OPERATOR.search(self._source, self._end(left), self._start(right))
            if found:
                for text in OPPOSITES.get(" ".join(found[0].decode().split()), ()):
                    yield Spoilt(kind, found.start(), found.end(), text)

    def _instead(self, kind: str, node: ast.AST, text: str) -> Spoilt:
        return Spoilt(kind, self._start(node), self._end(node), text)

    def _text(self, node: ast.AST) -> str:
        return self._source[self._start(node) : self._end(node)].decode()

    def _start(self, node) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is executed below *node*, and not what is read or checked."""
    for name, value in ast.iter_fields(node):
        for part in value if isinstance(value, list) else [value]:
            if not isinstance(part, ast.AST) or name in {"annotation", "returns"} or isinstance(part, ast.Assert):
                continue
            if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                continue  # a docstring
            yield part
            if not isinstance(part, ast.JoinedStr):  # before Python 3.12 nobody knows where its parts are
                yield from _code(part)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _in_sql(text: str, offset: int, first: int = 0) -> Iterator[Spoilt]:
    clause = ""
    for token in IN_SQL.finditer(text, first):
        word = " ".join(token[0].lower().split())
        if token.lastgroup == "clause":
            clause = word
        elif token.lastgroup == "operator" and word == "=" and clause not in CONDITIONS:
            continue
        for spoilt in _spoilt_words(token, word, OPPOSITES_IN_SQL):
            yield _moved(text, "sql", spoilt, offset)


def _in_lua(text: str, offset: int) -> Iterator[Spoilt]:
    for token in IN_LUA.finditer(text):
        for spoilt in _spoilt_words(token, token[0], OPPOSITES_IN_LUA):
            yield _moved(text, "lua", spoilt, offset)


def _spoilt_words(token: re.Match[str], word: str, opposites: dict[str, tuple[str, ...]]) -> Iterator[Spoilt]:
    texts: tuple[str, ...] = ()
    match token.lastgroup:
        case "word" | "operator":
            texts = opposites[word]
        case "number":
            texts = (str(int(word) + 1), str(abs(int(word) - 1)))
        case "limit":
            texts = (f"{word} + 1",)
        case "call":
            texts = ("",)
    for text in texts:
        yield Spoilt("", token.start(), token.end(), text)


def _moved(text: str, kind: str, spoilt: Spoilt, offset: int) -> Spoilt:
    """Count in the bytes of the file what was counted in the characters of *text*."""
    start, end = (offset + len(text[:place].encode()) for place in (spoilt.start, spoilt.end))
    return Spoilt(kind, start, end, spoilt.text)
