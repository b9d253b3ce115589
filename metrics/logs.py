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

from metrics.line_writer import LineWriter

SECRET_MASK = "********"  # noqa: S105, it hides secrets
MAX_FACT_CHARACTERS = 4_000
"""Maximum characters of a fact: a traceback fits, a dumped payload does not."""
MAX_EXAMINED_CHARACTERS = 32_000
"""Maximum characters of a text that are examined; of a longer text the end is not shown."""
MAX_SHOWN_ITEMS, MAX_SHOWN_LEVELS = 50, 4
"""Maximum items of a collection, and maximum levels of nesting, that are shown."""
CUT_MARK = "…"
ERROR_LEVELS = {"error", "critical"}
PLAIN_TYPES = {str, int, float, bool, type(None)}
"""Types of facts without items and without text of their own."""

SECRET_WORDS = (
    *("password", "passwd", "secret", "signature", "token", "authorization"),
    *(f"{kind}{between}key" for kind in ("access", "account", "api", "private", "sas") for between in ("", "_")),
)
"""Words in the names of secrets."""
SECRET_NAME_REGEX = rf"(?<!\w)(?:sig(?!\w)|(?=\w*?(?:{'|'.join(SECRET_WORDS)}))\w++)"
SECRET_NAME = re.compile(f"(?i){SECRET_NAME_REGEX}")
URL_WITH_PASSWORD = re.compile(r"(?<!\w)\w++://[^\s:/@]*+:(?P<value>\S*+)")
CONTROL_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {
    # Characters that break a line or change its reading direction.
    code: f"\\u{code:04x}"
    for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}


class LogOutput(logging.StreamHandler[TextIO]):
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

    def write_line(self, text: str) -> None:
        """Write a line of ours, without a log record, whose creation would take most of the time."""
        assert self.lock is not None
        with self.lock:
            if self._lost and not self._try_write(self._notice(self._lost)):
                self._lost += 1
            else:
                self._lost = int(not self._try_write(text))

    def _try_write(self, text: str) -> bool:
        line = f"{text}\n"
        try:
            if self._writer:
                return self._writer.write(line.encode(errors="backslashreplace"))
            self.stream.write(line)
            self.flush()
        except (OSError, ValueError):
            return False
        return True

    debug = info = warning = error = critical = write_line

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record of a library."""
        self.write_line(self.format(record))

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
    on_error: Callable[[EventDict], None] | None = None,
) -> None:
    """Send all log lines of this process, also of libraries, to *stream* (standard error).

    *on_line* is called with the level of each line, *on_error* with the facts of each line of ours at level error or
    critical; it must not raise. Only *on_error* gets the exception of a line with *hides_trace*. A line that cannot be
    written is lost: its writer neither fails nor waits, and the next line reports the number of lost lines.
    """
    stream = stream or sys.stderr
    as_json = style == "json" or (style is None and not stream.isatty())

    def count_line(_logger: WrappedLogger, method: str, facts: EventDict) -> EventDict:
        if on_line:
            on_line(method)
        return facts

    def pass_error(_logger: WrappedLogger, method: str, facts: EventDict) -> EventDict:
        if on_error and method in ERROR_LEVELS and "_record" not in facts:
            on_error(facts)
        return facts

    gathering: list[Processor] = [
        count_line,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        *([pass_error] if on_error else []),
        _hide_trace,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]
    console = structlog.dev.ConsoleRenderer(timestamp_key="at", colors=stream.isatty())
    writing: list[Processor] = [
        structlog.processors.ExceptionRenderer(format_traceback),
        *([_render_json] if as_json else [lambda _logger, _method, facts: redact(facts), console]),
    ]

    def report_lost_lines(lost: int) -> str:
        facts: Any = {"event": "log lines lost, nobody read them", "lost": lost}
        for processor in (*gathering, *writing):
            facts = processor(None, "warning", facts)
        return str(facts)

    output = LogOutput(stream, report_lost_lines)
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


def _hide_trace(_logger: WrappedLogger, _method: str, facts: EventDict) -> EventDict:
    if facts.pop("hides_trace", False):
        facts.pop("exc_info", None)
    return facts


def _render_json(_logger: WrappedLogger, _method: str, facts: EventDict) -> str:
    line = {"at": facts.pop("at"), "level": facts.pop("level"), "message": facts.pop("event"), **facts}
    # Almost no line has anything to redact: one check of the whole line is faster than one per fact.
    if len(line) <= MAX_SHOWN_ITEMS and PLAIN_TYPES.issuperset(map(type, line.values())):
        with suppress(TypeError):
            text = orjson.dumps(line, option=orjson.OPT_STRICT_INTEGER).decode()
            if _is_harmless(text):
                return text
    return orjson.dumps(redact(line)).decode()


def _is_harmless(line: str) -> bool:
    """Check whether `redact` would leave a line of plain facts unchanged; False if in doubt."""
    # Each of `SECRET_WORDS` contains one of these.
    parts = ("\\", "://", "sig", "passw", "secret", "token", "authoriz", "key")
    plain = len(line) <= MAX_FACT_CHARACTERS and line.isascii() and line.isprintable()
    return plain and not any(map(line.lower().__contains__, parts))


def format_traceback(exc_info: ExcInfo) -> str:
    """Format an exception's traceback; only its beginning and end are kept if it is too long.

    Frames and messages are masked and cut separately, so that a secret does not extend into the next part.
    """
    try:
        parts = TracebackException(*exc_info, compact=True).format()
        text = "\n".join(clean_text(part).removesuffix("\n") for part in parts)
    except Exception as error:  # noqa: BLE001, to say something must not fail
        return f"{exc_info[0].__name__}; its trace cannot be written: {type(error).__name__}"
    return (
        text
        if len(text) <= 2 * MAX_FACT_CHARACTERS
        else f"{text[:MAX_FACT_CHARACTERS]}{CUT_MARK}{text[-MAX_FACT_CHARACTERS:]}"
    )


def _compile_secret_pattern(unless: str) -> re.Pattern[str]:
    """Return a pattern for named secrets; a quote closes a value *unless* this precedes it.

    Only single characters have possessive quantifiers: CPython before 3.11.5 reports a possessive group as matched at
    its start (https://github.com/python/cpython/issues/106052). The groups need none, as nothing after a group can
    fail.
    """

    def match_value(quote: str) -> str:
        # A quote may be escaped, in JSON inside a JSON string. An unclosed quote extends to the end.
        quoted = rf"(?P<{quote}>\\{{0,7}}+[\"'])(?:.*?{unless}(?P={quote})|.*+)"
        return rf"(?:[^\s&,;\"'\\]++|\\++(?![\"'])|\\{{8,}}+[\"']|{quoted})*"

    # If the apparent value is only another name, such as a scheme, the value follows it.
    scheme = r"(?:(?<=basic)|(?<=bearer)|(?<=token)|(?<=[=:]))\s++"
    return re.compile(
        rf"(?is){SECRET_NAME_REGEX}\\{{0,7}}+[\"']?+\s*+[=:]\s*+(?P<value>{match_value('first')}(?:{scheme}{match_value('second')})*)"
    )


NAMED_SECRETS = _compile_secret_pattern(r"(?<!\\)"), _compile_secret_pattern("")
"""Patterns for both readings of a backslash before a quote; a secret in either is masked."""


def escape_controls(text: str) -> str:
    """Escape control characters, and Python's surrogates for undecodable bytes."""
    return text.translate(CONTROL_ESCAPES).encode("utf-8", "backslashreplace").decode()


def mask_and_escape(text: str) -> str:
    """Mask secrets, escape control characters."""
    return escape_controls(_mask_secrets(text))


def clean_text(text: str) -> str:
    """Mask secrets, escape control characters, and cut the middle of a long text.

    A text longer than `MAX_EXAMINED_CHARACTERS` loses its end, and the word at the cut, which may be half of a secret.
    """
    if len(text) > MAX_EXAMINED_CHARACTERS:
        rest = f"{CUT_MARK} ({len(text):,} characters)"
        words = text[: text.rfind(" ", 0, MAX_EXAMINED_CHARACTERS) + 1]
        return mask_and_escape(words)[: MAX_FACT_CHARACTERS - len(rest)] + rest
    text = mask_and_escape(text)
    half = (MAX_FACT_CHARACTERS - 1) // 2
    return text if len(text) <= MAX_FACT_CHARACTERS else f"{text[:half]}{CUT_MARK}{text[-half:]}"


def clean_input(text: str) -> str:
    """Clean a person's input for a row: PostgreSQL refuses NUL and undecodable bytes."""
    return clean_text(text).replace("\n", "\\n").replace("\t", "\\t")


def describe_error(error: BaseException) -> str:
    """Format an exception as one line that every server can store."""
    # Masking precedes cutting, because half a secret is not recognized.
    return clean_text(f"{type(error).__name__}: {text_of(error)}".splitlines()[0])[:500]


def text_of(value: object) -> str:
    """Convert any *value* to text without raising: logging must not fail."""
    if isinstance(value, bytes | bytearray):
        value = value[: MAX_EXAMINED_CHARACTERS + 1]
    try:
        return str(value)
    except Exception:  # noqa: BLE001, such as a number of more digits than Python writes
        return f"<{type(value).__name__}>"


def redact(value: Any, name: str = "", depth: int = 0) -> Any:
    """Return *value* fit for a log line, at any depth; a value *name*d as a secret is masked.

    It never fails: values without text, and endless or deeply nested values, are shown as far as possible.
    """
    # A name of this length cannot be checked, so its value is not shown.
    if len(name) > MAX_FACT_CHARACTERS or SECRET_NAME.search(name):
        return SECRET_MASK
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 64):
        return value
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return clean_text(text_of(value))
    try:
        rest = f"{CUT_MARK} {len(value):,} in all"
        most = MAX_SHOWN_ITEMS if depth < MAX_SHOWN_LEVELS else 0
        if isinstance(value, Mapping):
            parts = ((text_of(key), part) for key, part in islice(value.items(), most))
            found = {clean_text(key): redact(part, key, depth + 1) for key, part in parts}
            return found | ({CUT_MARK: rest} if len(value) > most else {})
        return [redact(part, "", depth + 1) for part in islice(value, most)] + ([rest] if len(value) > most else [])
    except Exception:  # noqa: BLE001, such as one that another thread is changing
        return f"<{type(value).__name__}>"


def _mask_secrets(text: str) -> str:
    named = [match.span("value") for pattern in NAMED_SECRETS for match in pattern.finditer(text)]
    shown, parts = 0, list[str]()
    for begin, end in sorted((*named, *_find_passwords(text))):
        if end > max(begin, shown):
            parts += [text[shown:begin], SECRET_MASK] if begin >= shown else []
            shown = end
    return "".join((*parts, text[shown:]))


def _find_passwords(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of passwords in URLs: up to the last @ before a space.

    A password may contain @.
    """
    for match in URL_WITH_PASSWORD.finditer(text):
        begin, end = match.span("value")
        yield begin, text.rfind("@", begin, end)
