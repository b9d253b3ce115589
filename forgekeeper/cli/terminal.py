"""What commands print: tables, one JSON object, one sentence for errors; and times as people write them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, time, timedelta
from typing import Annotated, Any, NamedTuple, NoReturn, Protocol

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from metrics.logs import clean, printable, redact, text_of

FAILED, WRONG_USE, HELD = 1, 2, 3
All = Annotated[bool, typer.Option("--all", help="Every one of them.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

YEARS = range(2000, 9000)
UNITS = ("weeks", "days", "hours", "minutes", "seconds")
DURATION = re.compile(r"\+?(?:(\d{1,4})w)?(?:(\d{1,5})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?", re.ASCII)
"""So few digits that a time from now is always one that PostgreSQL knows."""
CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?", re.ASCII)
FORMS = "08:30, 2h or 2026-11-20T08:30"
DAY = timedelta(days=1)
WIDE = 10_000
"""Columns of a pipe: each row of a table is one line of it."""


class Terminal(Console):
    """A console that escapes control characters in what it is given."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render *renderable*, whatever it is made of."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(printable(text), style)


# No markup and no emoji: what comes from the database or an operator may contain brackets, and `:key:`.
out = Terminal(highlight=False, markup=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)
err = Terminal(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Problem(Exception):
    """A sentence that says what is wrong and what to do, and the exit status it leads to."""

    def __init__(self, sentence: str, status: int = FAILED) -> None:
        super().__init__(sentence)
        self.status = status


class Outcome(Protocol):
    """What an act has come to, in sentences."""

    def said(self) -> list[str]:
        """Say what was done."""

    def not_done(self) -> list[str]:
        """Say what was not, and why."""


class Done(NamedTuple):
    """What an act has come to that is done whole, or raises."""

    sentence: str

    def said(self) -> list[str]:
        """Say it."""
        return [self.sentence]

    def not_done(self) -> list[str]:
        """Say nothing."""
        return []


def wrong_use(sentence: str) -> NoReturn:
    """Refuse what was asked for."""
    raise Problem(sentence, WRONG_USE)


def emit(value: Any) -> None:
    """Print *value* as JSON."""
    # In ASCII alone, as a terminal may obey what is not; JSON leaves but one such character as it is.
    try:
        text = json.dumps(value, default=_simple, indent=2)
    except RecursionError:
        text = json.dumps(redact(value), indent=2)
    write(text.replace("\x7f", "\\u007f"))


def write(line: str) -> None:
    """Print a line without any formatting, for a program or to be copied."""
    sys.stdout.write(line + "\n")


def _simple(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else text_of(value)


def answer(value: Any, text: str, *, json: bool) -> None:
    """Print what a command has done: *value* as JSON if that is asked for, else the sentence *text*."""
    if json:
        emit(value)
    else:
        out.print(text)


def group(name: str, help_text: str, listing: Callable[..., None], called: str = "list") -> typer.Typer:
    """Make a group of commands with the command *listing*, which is also called when no command is given."""
    made = typer.Typer(name=name, help=help_text)

    @made.callback(invoke_without_command=True)
    def without_command(context: typer.Context, json: Json = False) -> None:
        if context.invoked_subcommand is None:
            listing(json=json)

    made.command(called)(listing)
    return made


def say(sentences: Iterable[str], console: Console = out) -> None:
    """Print each sentence on a line, secrets masked."""
    for sentence in sentences:
        console.print(clean(sentence))


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print a table; None is shown as nothing.  Where a terminal is narrow, cells wrap, but not the first."""
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        drawn.add_column(column, overflow="fold", no_wrap=place == 0)
    for row in rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else Text(_cell(cell)) for cell in row))
    out.print(drawn, soft_wrap=False, crop=False)


def _cell(cell: Any) -> str:
    if isinstance(cell, datetime):
        return moment(cell)
    return "" if cell is None else clean(visible(text_of(cell)))


def visible(text: str) -> str:
    """Escape what is not printable, and the backslash, so that no two names look the same."""
    return "".join(one if one.isprintable() and one != "\\" else one.encode("unicode_escape").decode() for one in text)


def warning(sentence: str) -> Text:
    """Write what is wrong."""
    return Text(f"warning: {clean(sentence)}", "red")


def progress(text: str) -> None:
    """Show on a terminal how far the work has got, on one line; an empty *text* clears it."""
    if err.is_terminal:
        sys.stderr.write(f"\r\x1b[K{printable(text)}")
        sys.stderr.flush()


def moment(instant: datetime | None) -> str:
    """Write an instant for people: to the second, in UTC."""
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if instant else "never"


def lasting(duration: timedelta) -> str:
    """Write a duration for people: tenths of a second below a minute, two units above."""
    seconds = max(0.0, duration.total_seconds())
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = round(seconds) // 60, round(seconds) // 3600
    if hours == 0:
        return f"{minutes} min {round(seconds) % 60} s"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def relative(instant: datetime, now: datetime) -> str:
    """Write an instant as seen from *now*."""
    return f"in {lasting(instant - now)}" if instant > now else f"{lasting(now - instant)} ago"


def facts(result: Mapping[str, Any] | None) -> str:
    """Write a result as ``name=value`` pairs."""
    return " ".join(f"{clean(name)}={clean(plain(value))}" for name, value in (result or {}).items())


def plain(value: Any) -> str:
    """Write a value for people: lists, mappings and booleans as JSON."""
    if isinstance(value, bool | list | tuple | dict):
        # What is nested too deeply for JSON has no text either.
        with suppress(RecursionError):
            return json.dumps(value, default=text_of, ensure_ascii=False, separators=(",", ":"))
    return "none" if value is None else text_of(value)


def read_time(text: str, now: datetime, *, ahead: bool) -> datetime:
    """Read a time to come, such as the next 08:30, or one that has passed if not *ahead*.  Raises `Problem`."""
    text = text.strip()
    if (match := DURATION.fullmatch(text.lower())) and any(match.groups()):
        duration = timedelta(**{unit: int(count or 0) for unit, count in zip(UNITS, match.groups(), strict=True)})
        return now + (duration if ahead else -duration)
    try:
        if CLOCK.fullmatch(text):
            clock = time.fromisoformat(f"0{text}" if text[1] == ":" else text)
            today = datetime.combine(now.astimezone(UTC).date(), clock, UTC)
            if ahead:
                return today if today > now else today + DAY
            return today if today <= now else today - DAY
        found = datetime.fromisoformat(text)
    except ValueError:
        wrong_use(f"{text!r} is not a time: write it as {FORMS}, in UTC")
    if found.year not in YEARS:
        wrong_use(f"that time is out of range: give a year from {YEARS.start} to {YEARS.stop - 1}")
    return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


def read_number(text: str, what: str, *, least: int = 1) -> int:
    """Read the number of *what*, at least that and one that PostgreSQL knows.  Raises `Problem`."""
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) >= least):
        wrong_use(f"{text!r} is no number of {what}: give one such as 12")
    return int(text)
