"""Output of commands: tables, JSON, one sentence per error; and times for people."""

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

from metrics.logs import clean_text, escape_controls, redact, text_of

FAILED_STATUS, WRONG_USE_STATUS, HELD_STATUS = 1, 2, 3
All = Annotated[bool, typer.Option("--all", help="All of them.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

VALID_YEARS = range(2000, 9000)
DURATION_UNITS = ("weeks", "days", "hours", "minutes", "seconds")
DURATION_PATTERN = re.compile(
    r"\+?(?:(\d{1,4})w)?(?:(\d{1,5})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?", re.ASCII
)
"""Format of a duration, with few enough digits that PostgreSQL can represent the time."""
CLOCK_PATTERN = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?", re.ASCII)
TIME_EXAMPLES = "08:30, 2h or 2026-11-20T08:30"
ONE_DAY = timedelta(days=1)
PIPE_WIDTH_COLUMNS = 10_000
"""Width of output to a pipe, in columns: each row of a table fits on one line."""


class EscapingConsole(Console):
    """A console that escapes control characters in its input."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render *renderable* with control characters escaped."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(escape_controls(text), style)


# Markup and emoji are off: text of the database or an operator may contain brackets and `:key:`.
out = EscapingConsole(
    highlight=False,
    markup=False,
    emoji=False,
    soft_wrap=True,
    width=None if sys.stdout.isatty() else PIPE_WIDTH_COLUMNS,
)
err = EscapingConsole(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Problem(Exception):
    """An error for people, with its cause, its remedy and the exit status of the command."""

    def __init__(self, sentence: str, status: int = FAILED_STATUS) -> None:
        super().__init__(sentence)
        self.sentence, self.status = sentence, status


class ActResult(Protocol):
    """Result of an act, in sentences."""

    def describe_changes(self) -> list[str]:
        """Return sentences about changes."""

    def describe_refusals(self) -> list[str]:
        """Return sentences about changes that were refused, with reasons."""


class CompletedAct(NamedTuple):
    """Result of an act that either succeeds completely or raises."""

    sentence: str

    def describe_changes(self) -> list[str]:
        """Return the sentence."""
        return [self.sentence]

    def describe_refusals(self) -> list[str]:
        """Return nothing."""
        return []


def wrong_use(sentence: str) -> NoReturn:
    """Raise a `Problem` with the exit status for wrong use."""
    raise Problem(sentence, WRONG_USE_STATUS)


def print_json(value: Any) -> None:
    """Print *value* as JSON."""
    write_line(encode_json(value))


def encode_json(value: Any) -> str:
    """Encode *value* as the JSON of commands and of the console's API; times are ISO 8601."""
    # ASCII only, because terminals may interpret other characters. JSON does not escape DEL.
    try:
        text = json.dumps(value, default=_encode_for_json, indent=2)
    except RecursionError:
        text = json.dumps(redact(value), indent=2)
    return text.replace("\x7f", "\\u007f")


def write_line(line: str) -> None:
    """Print a line without formatting, for programs and for copying."""
    sys.stdout.write(line + "\n")


def _encode_for_json(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else text_of(value)


def print_answer(value: Any, text: str, *, json: bool) -> None:
    """Print the result of a command: *value* if *json* is set, else *text*."""
    if json:
        print_json(value)
    else:
        out.print(text)


def create_group(name: str, help_text: str, listing: Callable[..., None], list_name: str = "list") -> typer.Typer:
    """Create a command group whose default command is *listing*."""
    made = typer.Typer(name=name, help=help_text)

    @made.callback(invoke_without_command=True)
    def without_command(context: typer.Context, json: Json = False) -> None:
        if context.invoked_subcommand is None:
            listing(json=json)

    made.command(list_name)(listing)
    return made


def print_sentences(sentences: Iterable[str], console: Console = out) -> None:
    """Print each sentence on its own line, with secrets masked."""
    for sentence in sentences:
        console.print(clean_text(sentence))


def print_table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print a table; None is an empty cell. On a narrow terminal cells wrap, except the first."""
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        drawn.add_column(column, overflow="fold", no_wrap=place == 0)
    for row in rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else Text(_format_cell(cell)) for cell in row))
    out.print(drawn, soft_wrap=False, crop=False)


def _format_cell(cell: Any) -> str:
    if isinstance(cell, datetime):
        return format_time(cell)
    return "" if cell is None else clean_text(escape_unprintable(text_of(cell)))


def escape_unprintable(text: str) -> str:
    """Escape unprintable characters and backslashes, so that different names look different."""
    return "".join(one if one.isprintable() and one != "\\" else one.encode("unicode_escape").decode() for one in text)


def format_warning(sentence: str) -> Text:
    """Format a warning in red."""
    return Text(f"warning: {clean_text(sentence)}", "red")


def show_progress_line(text: str) -> None:
    """Show progress on one line of a terminal; an empty *text* clears the line."""
    if err.is_terminal:
        sys.stderr.write(f"\r\x1b[K{escape_controls(text)}")
        sys.stderr.flush()


def format_time(instant: datetime | None) -> str:
    """Format an instant in UTC, with seconds."""
    return instant.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if instant else "never"


def split_duration(duration: timedelta) -> dict[str, str]:
    """Return the numbers of a duration by their units: tenths of a second below a minute, two units above."""
    seconds = max(0.0, duration.total_seconds())
    if seconds < 60:
        return {"s": f"{seconds:.1f}"}
    minutes, hours = round(seconds) // 60, round(seconds) // 3600
    if hours == 0:
        return {"min": str(minutes), "s": str(round(seconds) % 60)}
    if hours < 48:
        return {"h": str(hours), "min": str(minutes % 60)}
    return {"days": str(hours // 24), "h": str(hours % 24)}


def format_duration(duration: timedelta) -> str:
    """Format a duration with its units."""
    return " ".join(f"{number} {unit}" for unit, number in split_duration(duration).items())


def format_relative_time(instant: datetime, now: datetime) -> str:
    """Format an instant relative to *now*."""
    return f"in {format_duration(instant - now)}" if instant > now else f"{format_duration(now - instant)} ago"


def format_facts(result: Mapping[str, Any] | None) -> str:
    """Format a result as ``name=value`` pairs."""
    return " ".join(f"{clean_text(name)}={clean_text(format_value(value))}" for name, value in (result or {}).items())


def format_value(value: Any) -> str:
    """Format a value for people; lists, mappings and booleans become JSON."""
    if isinstance(value, bool | list | tuple | dict):
        # JSON fails on a value that is nested too deeply, and so does str.
        with suppress(RecursionError):
            return json.dumps(value, default=text_of, ensure_ascii=False, separators=(",", ":"))
    return "none" if value is None else text_of(value)


def read_time(text: str, now: datetime, *, ahead: bool) -> datetime:
    """Parse a time: if *ahead*, one to come, such as the next 08:30, else a past one.

    Raises `Problem` if the text is not a time.
    """
    text = text.strip()
    if (match := DURATION_PATTERN.fullmatch(text.lower())) and any(match.groups()):
        duration = timedelta(
            **{unit: int(count or 0) for unit, count in zip(DURATION_UNITS, match.groups(), strict=True)}
        )
        return now + (duration if ahead else -duration)
    try:
        if CLOCK_PATTERN.fullmatch(text):
            clock = time.fromisoformat(f"0{text}" if text[1] == ":" else text)
            today = datetime.combine(now.astimezone(UTC).date(), clock, UTC)
            if ahead:
                return today if today > now else today + ONE_DAY
            return today if today <= now else today - ONE_DAY
        found = datetime.fromisoformat(text)
    except ValueError:
        wrong_use(f"{text!r} is not a time: write it as {TIME_EXAMPLES}, in UTC")
    if found.year not in VALID_YEARS:
        wrong_use(f"that time is out of range: give a year from {VALID_YEARS.start} to {VALID_YEARS.stop - 1}")
    return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


def read_number(text: str, what: str, *, least: int = 1) -> int:
    """Parse a number of *what*, or raise `Problem`.

    The number is at least *least* and fits PostgreSQL's bigint.
    """
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) >= least):
        wrong_use(f"{text!r} is not a number: write the number of {what}, such as 12")
    return int(text)
