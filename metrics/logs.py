"""Log lines: one JSON object each, or a coloured line on a terminal.

A line is a fixed sentence under ``message`` and its facts beside it; what is bound to
the context (batch, tick, run, message id, worker) is on every line of a run.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from traceback import TracebackException
from typing import Literal, TextIO

import orjson
import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from metrics.redaction import LONGEST, clean, redact


class Output(logging.Handler):
    """Writes lines, each with one call: ours, and those that the libraries' records become."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write a library's record."""
        try:
            self.line(self.format(record))
        except Exception as error:  # noqa: BLE001, no library expects its lines to fail
            facts = {"library": record.name, "error": type(error).__name__}
            structlog.get_logger(__name__).warning("line of a library could not be written", **facts)

    def line(self, text: str) -> None:
        """Write a line; a stream that takes none is no failure of whoever had something to say."""
        assert self.lock is not None
        with suppress(OSError, ValueError), self.lock:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    debug = info = warning = error = critical = line


def configure(
    style: Literal["json", "console"] | None = None,
    level: str = "INFO",
    stream: TextIO | None = None,
    *,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Send all log lines of this process, the libraries' too, to *stream* (standard error).

    *on_line* is called with the level of each.
    """
    stream = stream or sys.stderr
    as_json = style == "json" or (style is None and not stream.isatty())
    gathering = _gathering(on_line)
    formatting: list[Processor] = [_json] if as_json else _console(colors=stream.isatty())
    rendering: list[Processor] = [structlog.processors.ExceptionRenderer(trace), *formatting]
    output = Output(stream)
    output.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
            foreign_pre_chain=[
                structlog.stdlib.ExtraAdder(),
                *gathering,
                structlog.processors.StackInfoRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[output], level=level, force=True)
    _quiet_libraries()
    # Ours are not made records first, which would take longer than all the rest.
    structlog.configure(
        processors=[*gathering, *rendering],
        logger_factory=lambda *_name: output,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )


def _gathering(on_line: Callable[[str], None] | None) -> list[Processor]:
    def count(_logger: WrappedLogger, method: str, facts: EventDict) -> EventDict:
        if on_line:
            on_line(method)
        return facts

    return [
        count,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]


def _json(_logger: WrappedLogger, _method: str, facts: EventDict) -> str:
    line = {"at": facts.pop("at"), "level": facts.pop("level"), "message": facts.pop("event"), **facts}
    return orjson.dumps(redact(line)).decode()


def _console(*, colors: bool) -> list[Processor]:
    return [_redact, structlog.dev.ConsoleRenderer(timestamp_key="at", colors=colors)]


def _redact(_logger: WrappedLogger, _method: str, facts: EventDict) -> EventDict:
    redacted: EventDict = redact(facts)
    return redacted


def trace(exc_info: ExcInfo) -> str:
    """Write the trace of an exception: where it began and where it ended, however long what is said between.

    Frames and messages are masked and cut each for itself: what begins in one is no secret in the next.
    """
    first, last, room = list[str](), deque[str](), LONGEST
    try:
        for part in TracebackException(*exc_info, compact=True).format():
            said = clean(part).removesuffix("\n") + "\n"
            if room > 0:
                first.append(said)
                room -= len(said)
            else:
                last.append(said)
                while sum(map(len, last)) > 2 * LONGEST and len(last) > 1:
                    last.popleft()
    except Exception as error:  # noqa: BLE001, to say something must not fail
        last.append(f"{exc_info[0].__name__}; its trace cannot be written: {type(error).__name__}")
    return "".join((*first, *last)).removesuffix("\n")


def _quiet_libraries() -> None:
    # A line of ours says each of these things already, with the run's facts.
    logging.getLogger("dramatiq.worker.WorkerThread").setLevel(logging.CRITICAL)
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    logging.getLogger("peewee.migrations").setLevel(logging.WARNING)
