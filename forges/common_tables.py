"""Views of an adoption as common table expressions, which read a forge and create nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

from forges.adoption import Adoption

VIEW_STATEMENT = re.compile(r"create or replace view VIEWS\.(\w+) as\n(.*?);\n", re.DOTALL)
TABLE_STATEMENT = re.compile(r"create table if not exists VIEWS\.(\w+) \((.*?)\);\n", re.DOTALL)
FUNCTION_STATEMENT = re.compile(
    r"create or replace function VIEWS\.(\w+)\(([^)]*)\) returns \w+\n    language sql [^\n]*\n    return (.*?);\n",
    re.DOTALL,
)
FUNCTION_CALL = re.compile(r"VIEWS\.(\w+)\(")
COLUMN_DEFINITION = re.compile(r"\s*(\w+) (\w+)")


def write_common_tables(found: Adoption) -> dict[str, str]:
    """Return the queries of the views of *found*, by name, without references to the adoption.

    Functions are replaced by their expressions, and tables that the adoption would create are empty.
    """
    # The placeholder VIEWS stays in the text, so that the schema of the views can be removed.
    parts = [*found.templates_before, *(part.name for part in found.adopted_parts)]
    text = "\n".join(found.write_part(part, VIEWS="VIEWS") for part in parts)
    functions = {
        name: (_list_argument_names(arguments), body) for name, arguments, body in FUNCTION_STATEMENT.findall(text)
    }
    tables = {name: _write_empty(columns) for name, columns in TABLE_STATEMENT.findall(text)}
    views = {name: _write_inline(query, functions) for name, query in VIEW_STATEMENT.findall(text)}
    return {name: query.replace("VIEWS.", "") for name, query in (tables | views).items()}


def prefix_statement(statement: str, common_tables: Mapping[str, str]) -> str:
    """Prefix *statement* with the common tables that it needs, directly or indirectly."""
    used: dict[str, str] = {}
    texts = [statement]
    while texts:
        text = texts.pop()
        for name, query in common_tables.items():
            if name not in used and re.search(rf"(?<![\w.]){name}\b(?!\.)", text.replace('"', "")):
                used[name] = query
                texts.append(query)
    # In the order of the parts: a common table reads only earlier ones.
    written = [f"{name} as not materialized (\n{query}\n)" for name, query in common_tables.items() if name in used]
    return f"with {', '.join(written)}\n{statement}" if written else statement


def _write_empty(columns: str) -> str:
    typed = (COLUMN_DEFINITION.match(column) for column in columns.split(","))
    return f"select {', '.join(f'null::{one[2]} as {one[1]}' for one in typed if one)} where false"


def _list_argument_names(arguments: str) -> list[str]:
    return [argument.split()[0] for argument in arguments.split(",")]


def _write_inline(text: str, functions: Mapping[str, tuple[list[str], str]]) -> str:
    """Replace calls of functions by their expressions, also inside these expressions."""
    while call := FUNCTION_CALL.search(text):
        names, body = functions[call[1]]
        arguments, end = _read_arguments(text, call.end())
        expression = _replace_words(body, dict(zip(names, arguments, strict=True)))
        text = f"{text[: call.start()]}({expression}){text[end:]}"
    return text


def _replace_words(text: str, words: Mapping[str, str]) -> str:
    return re.sub(rf"\b({'|'.join(words)})\b", lambda word: f"({words[word[0]]})", text)


def _read_arguments(text: str, begin: int) -> tuple[list[str], int]:
    """Return the arguments of the call whose list starts at *begin*, and the end of the call."""
    depth, last, arguments = 0, begin, []
    for place in range(begin, len(text)):
        character = text[place]
        if depth == 0 and character in ",)":
            arguments.append(text[last:place].strip())
            last = place + 1
            if character == ")":
                return arguments, last
        depth += {"(": 1, ")": -1}.get(character, 0)
    raise ValueError(f"a call has no end: {text[begin:]}")
