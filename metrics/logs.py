"""Log lines, and text made safe to show: no secrets or control characters, limited length.

A line is one JSON object, or coloured on a terminal: a constant sentence under ``message`` and its facts beside it.
Facts bound to the context (batch, tick, run, message id, worker) are on every line of a run. Foreign text, also in
tables and rows, may have any shape and size: each step takes time linear in its length.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from traceback import TracebackException
from typing import Any, Literal, TextIO

import orjson
import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from metrics.unread import LineWriter

MASK = "********"
LONGEST = 4_000
"""Maximum characters of a fact: a traceback fits, a dumped payload does not."""
SEEN = 32_000
"""Maximum characters of a text that are examined; of a longer text the end is not shown."""
MOST, DEEPEST = 50, 4
"""Maximum items of a collection, and maximum levels of nesting, that are shown."""
MORE = "…"
PLAIN = {str, int, float, bool, type(None)}
"""Types of facts without items and without text of their own."""

WORDS = (
    *("password", "passwd", "secret", "signature", "token", "authorization"),
    *(f"{kind}{between}key" for kind in ("access", "account", "api", "private", "sas") for between in ("", "_")),
)
"""Words in the names of secrets."""
NAME = rf"(?<!\w)(?:sig(?!\w)|(?=\w*?(?:{'|'.join(WORDS)}))\w++)"
SECRET = re.compile(f"(?i){NAME}")
URL = re.compile(r"(?<!\w)\w++://[^\s:/@]*+:(?P<value>\S*+)")
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {
    # Characters that break a line or change its reading direction.
    code: f"\\u{code:04x}"
    for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}


class Output(logging.StreamHandler[TextIO]):
    """Writes our lines and the libraries' records, each with one call.

    No line waits for a blocked reader: the line is lost, and the next line that can be written follows ``notice(number
    of lost lines)``.
    """

    def __init__(self, stream: TextIO, notice: Callable[[int], str]) -> None:
        super().__init__(stream)
        self._notice = notice
        self._lost = 0
        self._writer: LineWriter | None = None
        with suppress(OSError, ValueError):  # a stream in memory has no file
            self._writer = LineWriter(stream.fileno())

    def line(self, text: str) -> None:
        """Write a line of ours, without a log record, whose creation would take most of the time."""
        assert self.lock is not None
        with self.lock:
            if self._lost and not self._write(self._notice(self._lost)):
                self._lost += 1
            else:
                self._lost = int(not self._write(text))

    def _write(self, text: str) -> bool:
        line = f"{text}\n"
        try:
            if self._writer:
                return self._writer.write(line.encode(errors="backslashreplace"))
            self.stream.write(line)
            self.flush()
        except (OSError, ValueError):
            return False
        return True

    debug = info = warning = error = critical = line

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record of a library."""
        self.line(self.format(record))

    def close(self) -> None:
        """Stop writing."""
        if self._writer:
            self._writer.close()
        super().close()


def configure(
    style: Literal["json", "console"] | None = None,
    level: str = "INFO",
    stream: TextIO | None = None,
    *,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Send all log lines of this process, also of libraries, to *stream* (standard error).

    *on_line* is called with the level of each line. A line that cannot be written is lost: its writer neither fails nor
    waits, and the next line reports the number of lost lines.
    """
    stream = stream or sys.stderr
    as_json = style == "json" or (style is None and not stream.isatty())

    def count(_logger: WrappedLogger, method: str, facts: EventDict) -> EventDict:
        if on_line:
            on_line(method)
        return facts

    gathering: list[Processor] = [
        count,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]
    console = structlog.dev.ConsoleRenderer(timestamp_key="at", colors=stream.isatty())
    writing: list[Processor] = [
        structlog.processors.ExceptionRenderer(trace),
        *([_json] if as_json else [lambda _logger, _method, facts: redact(facts), console]),
    ]

    def notice(lost: int) -> str:
        facts: Any = {"event": "log lines were lost, as nobody read them", "lost": lost}
        for processor in (*gathering, *writing):
            facts = processor(None, "warning", facts)
        return str(facts)

    output = Output(stream, notice)
    output.setFormatter(
        ProcessorFormatter(
            processors=[ProcessorFormatter.remove_processors_meta, *writing],
            foreign_pre_chain=[
                structlog.stdlib.ExtraAdder(),
                *gathering,
                structlog.processors.StackInfoRenderer(),
            ],
        )
    )
    logging.raiseExceptions = False
    logging.basicConfig(handlers=[output], level=level, force=True)
    # Our own lines report all this with the run's facts.
    logging.getLogger("dramatiq.worker.WorkerThread").setLevel(logging.CRITICAL)
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    logging.getLogger("peewee.migrations").setLevel(logging.WARNING)
    structlog.configure(
        processors=[*gathering, *writing],
        logger_factory=lambda *_name: output,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )


def _json(_logger: WrappedLogger, _method: str, facts: EventDict) -> str:
    line = {"at": facts.pop("at"), "level": facts.pop("level"), "message": facts.pop("event"), **facts}
    # Almost no line has anything to redact: one check of the whole line is faster than one per fact.
    if len(line) <= MOST and PLAIN.issuperset(map(type, line.values())):
        with suppress(TypeError):
            text = orjson.dumps(line, option=orjson.OPT_STRICT_INTEGER).decode()
            if _is_harmless(text):
                return text
    return orjson.dumps(redact(line)).decode()


def _is_harmless(line: str) -> bool:
    """Check whether `redact` would leave a line of plain facts unchanged; False if in doubt."""
    parts = ("\\", "://", "sig", "passw", "secret", "token", "authoriz", "key")  # each of `WORDS` contains one of these
    plain = len(line) <= LONGEST and line.isascii() and line.isprintable()
    return plain and not any(map(line.lower().__contains__, parts))


def trace(exc_info: ExcInfo) -> str:
    """Format an exception's traceback; only its beginning and end are kept if it is too long.

    Frames and messages are masked and cut separately, so that a secret does not extend into the next part.
    """
    try:
        parts = TracebackException(*exc_info, compact=True).format()
        said = "\n".join(clean(part).removesuffix("\n") for part in parts)
    except Exception as error:  # noqa: BLE001, to say something must not fail
        return f"{exc_info[0].__name__}; its trace cannot be written: {type(error).__name__}"
    return said if len(said) <= 2 * LONGEST else f"{said[:LONGEST]}{MORE}{said[-LONGEST:]}"


def _named(unless: str) -> re.Pattern[str]:
    """Return a pattern for named secrets; a quote closes a value *unless* this precedes it.

    Only single characters have possessive quantifiers: CPython before 3.11.5 reports a possessive group as matched at
    its start (https://github.com/python/cpython/issues/106052). The groups need none, as nothing after a group can
    fail.
    """

    def word(quote: str) -> str:
        # A quote may be escaped, in JSON inside a JSON string. An unclosed quote extends to the end.
        quoted = rf"(?P<{quote}>\\{{0,7}}+[\"'])(?:.*?{unless}(?P={quote})|.*+)"
        return rf"(?:[^\s&,;\"'\\]++|\\++(?![\"'])|\\{{8,}}+[\"']|{quoted})*"

    # If the apparent value is only another name, such as a scheme, the value follows it.
    scheme = r"(?:(?<=basic)|(?<=bearer)|(?<=token)|(?<=[=:]))\s++"
    return re.compile(
        rf"(?is){NAME}\\{{0,7}}+[\"']?+\s*+[=:]\s*+(?P<value>{word('first')}(?:{scheme}{word('second')})*)"
    )


NAMED = _named(r"(?<!\\)"), _named("")
"""Patterns for both readings of a backslash before a quote; a secret in either is masked."""


def printable(text: str) -> str:
    """Escape control characters, and Python's surrogates for undecodable bytes."""
    return text.translate(CONTROL).encode("utf-8", "backslashreplace").decode()


def escaped(text: str) -> str:
    """Mask secrets, escape control characters."""
    return printable(_masked(text))


def clean(text: str) -> str:
    """Mask secrets, escape control characters, and cut the middle of a long text.

    A text longer than `SEEN` loses its end, and the word at the cut, which may be half of a secret.
    """
    if len(text) > SEEN:
        rest = f"{MORE} ({len(text):,} characters)"
        words = text[: text.rfind(" ", 0, SEEN) + 1]
        return escaped(words)[: LONGEST - len(rest)] + rest
    text = escaped(text)
    half = (LONGEST - 1) // 2
    return text if len(text) <= LONGEST else f"{text[:half]}{MORE}{text[-half:]}"


def one_line(text: str) -> str:
    """Clean a person's input for a row: PostgreSQL refuses NUL and undecodable bytes."""
    return clean(text).replace("\n", "\\n").replace("\t", "\\t")


def describe(error: BaseException) -> str:
    """Format an exception as one line that every server can store."""
    # Masking precedes cutting, because half a secret is not recognized.
    return clean(f"{type(error).__name__}: {text_of(error)}".splitlines()[0])[:500]


def text_of(value: object) -> str:
    """Convert any *value* to text without raising: logging must not fail."""
    if isinstance(value, bytes | bytearray):
        value = value[: SEEN + 1]
    try:
        return str(value)
    except Exception:  # noqa: BLE001, such as a number of more digits than Python writes
        return f"<{type(value).__name__}>"


def redact(value: Any, name: str = "", depth: int = 0) -> Any:
    """Return *value* fit for a log line, at any depth; a value *name*d as a secret is masked.

    It never fails: values without text, and endless or deeply nested values, are shown as far as possible.
    """
    # A name of this length cannot be checked, so its value is not shown.
    if len(name) > LONGEST or SECRET.search(name):
        return MASK
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 64):
        return value
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return clean(text_of(value))
    try:
        rest = f"{MORE} {len(value):,} in all"
        most = MOST if depth < DEEPEST else 0
        if isinstance(value, Mapping):
            parts = ((text_of(key), part) for key, part in islice(value.items(), most))
            found = {clean(key): redact(part, key, depth + 1) for key, part in parts}
            return found | ({MORE: rest} if len(value) > most else {})
        return [redact(part, "", depth + 1) for part in islice(value, most)] + ([rest] if len(value) > most else [])
    except Exception:  # noqa: BLE001, such as one that another thread is changing
        return f"<{type(value).__name__}>"


def _masked(text: str) -> str:
    named = [match.span("value") for pattern in NAMED for match in pattern.finditer(text)]
    shown, parts = 0, list[str]()
    for begin, end in sorted((*named, *_passwords(text))):
        if end > max(begin, shown):
            parts += [text[shown:begin], MASK] if begin >= shown else []
            shown = end
    return "".join((*parts, text[shown:]))


def _passwords(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of passwords in URLs: up to the last @ before a space.

    A password may contain @.
    """
    for match in URL.finditer(text):
        begin, end = match.span("value")
        yield begin, text.rfind("@", begin, end)
