"""What commands print: tables for people, one JSON object for programs, one sentence for errors.

Answers go to standard output; progress, logs and errors go to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import Annotated, Any, NoReturn

import orjson
import typer
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from metrics.redaction import CONTROL, clean, printable, redact, text_of

FAILED, WRONG_USE, HELD = 1, 2, 3
All = Annotated[bool, typer.Option("--all", help="Every one of them.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

IN_JSON = {code: f"\\u{code:04x}" for code in CONTROL if code > ord(" ")}
"""What JSON lets stand as it is, and a terminal may obey."""


class Terminal(Console):
    """A console that obeys nobody but us: control characters in what it is given are escaped."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render *renderable*, whatever it is made of."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(printable(text), style)


# A pipe has no width; tables in it must not lose their ends.
# No markup and no emoji: what comes from the database or an operator may contain brackets, and `:key:`.
out = Terminal(highlight=False, markup=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
err = Terminal(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Problem(Exception):
    """A sentence that says what is wrong and what to do, and the exit status it leads to."""

    def __init__(self, sentence: str, status: int = FAILED) -> None:
        super().__init__(sentence)
        self.status = status


def wrong_use(sentence: str) -> NoReturn:
    """Refuse what was asked for."""
    raise Problem(sentence, WRONG_USE)


def emit(value: Any) -> None:
    """Print *value* as JSON."""
    write(_json(value))


def emit_long(facts: Mapping[str, Any], **lists: Iterable[Any]) -> None:
    """Print *facts* and *lists* as one JSON object, item by item: the lists may be too long to be kept."""
    sys.stdout.write(_json(facts).removesuffix("\n}"))
    for name, items in lists.items():
        sys.stdout.write(f',\n  "{name}": [')
        for place, item in enumerate(items):
            sys.stdout.write(f"{',' if place else ''}\n{_json(item)}")
        sys.stdout.write("]")
    write("\n}")


def write(line: str) -> None:
    """Print a line as it is: what a program reads, or a person copies, passes no formatter."""
    sys.stdout.write(line + "\n")


def _json(value: Any) -> str:
    try:
        text = orjson.dumps(value, default=str, option=orjson.OPT_INDENT_2).decode()
    except TypeError:  # halves of characters, from names that are not UTF-8
        try:
            text = json.dumps(value, default=str, indent=2)
        except (TypeError, ValueError, RecursionError):  # what has no bottom, numbers without end
            text = json.dumps(redact(value), indent=2)
    return text if text.isascii() else text.translate(IN_JSON)


def answer(value: Any, text: str, *, json: bool) -> None:
    """Say what a command has done: *value* as JSON if that is asked for, else the sentence *text*."""
    if json:
        emit(value)
    else:
        out.print(text)


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print a table; None is shown as nothing."""
    drawn = Table(*columns, title=title or None, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for row in rows:
        drawn.add_row(*(Text("" if cell is None else clean(visible(text_of(cell)))) for cell in row))
    out.print(drawn)


def visible(text: str) -> str:
    """Write a name for people so that no two look the same: escape what is not printed, and the backslash."""
    return text if text.isprintable() and "\\" not in text else "".join(map(_visible, text))


def shell(words: Iterable[str]) -> str:
    """Write a command that a person can copy: what is not printed is in escapes of bash's."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.isprintable():
        return quote(word)
    return "$'" + "".join(map(_octal, word)) + "'"


def _octal(character: str) -> str:
    if character.isprintable() and character not in "\\'":
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))


def _visible(character: str) -> str:
    if character.isprintable() and character != "\\":
        return character
    return character.encode("unicode_escape").decode()


def grid(*columns: str, folded: Collection[str] = (), right: Collection[str] = ()) -> Table:
    """Begin a table that fits into its terminal: where it is narrow, cells of the columns *folded* go on below."""
    drawn = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    for column in columns:
        justify: JustifyMethod = "right" if column in right else "left"
        drawn.add_column(column, no_wrap=column not in folded, overflow="fold", justify=justify)
    return drawn


def fill(table: Table, *cells: str | Text) -> None:
    """Add a row; what comes from elsewhere may contain control characters."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(clean(cell)) for cell in cells))


def warning(sentence: str) -> Text:
    """Write what is wrong."""
    return Text(f"warning: {clean(sentence)}", "red")


def moment(instant: datetime | None) -> str:
    """Write an instant for people: to the second, in UTC."""
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if instant else "never"


def facts(result: dict[str, Any] | None) -> str:
    """Write a result as ``name=value`` pairs."""
    return " ".join(f"{clean(name)}={clean(plain(value))}" for name, value in (result or {}).items())


def plain(value: Any) -> str:
    """Write a value for people: what is no text as JSON has it, never as Python does."""
    if value is None:
        return "none"
    if isinstance(value, bool | list | tuple | dict):
        try:
            return orjson.dumps(value, default=text_of).decode()
        except TypeError:  # halves of characters, numbers without end
            return text_of(value)
    return text_of(value)


def lasting(duration: timedelta) -> str:
    """Write a duration for people: tenths of a second below a minute, two units above."""
    seconds = max(0.0, duration.total_seconds())
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = round(seconds) // 60, round(seconds) // 3600
    if hours == 0:
        return f"{minutes} min {round(seconds) % 60} s"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def rough(duration: timedelta) -> str:
    """Write a duration in its largest unit, for columns."""
    seconds = int(abs(duration.total_seconds()))
    for unit, length, longest in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48)):
        if seconds < length * longest:
            return f"{seconds // length} {unit}"
    return f"{seconds // 86400} days"


def relative(instant: datetime, now: datetime) -> str:
    """Write an instant as seen from *now*."""
    return f"in {rough(instant - now)}" if instant > now else f"{rough(now - instant)} ago"
