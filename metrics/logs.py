"""Log lines: one JSON object each, or a coloured line on a terminal.

A line is a fixed sentence under ``message`` and its facts beside it; what is bound to the context (batch, tick, run,
message id, worker) is on every line of a run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from traceback import TracebackException
from typing import Literal, TextIO

import orjson
import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from metrics.redaction import LONGEST, MORE, clean, redact


def configure(
    style: Literal["json", "console"] | None = None,
    level: str = "INFO",
    stream: TextIO | None = None,
    *,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Send all log lines of this process, the libraries' too, to *stream* (standard error).

    *on_line* is called with the level of each.  A line that cannot be written is lost, and fails nobody.
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
    output = logging.StreamHandler(stream)
    output.setFormatter(
        ProcessorFormatter(
            processors=[
                ProcessorFormatter.remove_processors_meta,
                structlog.processors.ExceptionRenderer(trace),
                *([_json] if as_json else [_redact, console]),
            ],
            foreign_pre_chain=[
                structlog.stdlib.ExtraAdder(),
                *gathering,
                structlog.processors.StackInfoRenderer(),
            ],
        )
    )
    logging.raiseExceptions = False
    logging.basicConfig(handlers=[output], level=level, force=True)
    # A line of ours says each of these things already, with the run's facts.
    logging.getLogger("dramatiq.worker.WorkerThread").setLevel(logging.CRITICAL)
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    logging.getLogger("peewee.migrations").setLevel(logging.WARNING)
    structlog.configure(
        processors=[*gathering, ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )


def _json(_logger: WrappedLogger, _method: str, facts: EventDict) -> str:
    line = {"at": facts.pop("at"), "level": facts.pop("level"), "message": facts.pop("event"), **facts}
    return orjson.dumps(redact(line)).decode()


def _redact(_logger: WrappedLogger, _method: str, facts: EventDict) -> EventDict:
    redacted: EventDict = redact(facts)
    return redacted


def trace(exc_info: ExcInfo) -> str:
    """Write the trace of an exception: where it began and where it ended, however long what is said between.

    Frames and messages are masked and cut each for itself: what begins in one is no secret in the next.
    """
    try:
        parts = TracebackException(*exc_info, compact=True).format()
        said = "\n".join(clean(part).removesuffix("\n") for part in parts)
    except Exception as error:  # noqa: BLE001, to say something must not fail
        return f"{exc_info[0].__name__}; its trace cannot be written: {type(error).__name__}"
    return said if len(said) <= 2 * LONGEST else f"{said[:LONGEST]}{MORE}{said[-LONGEST:]}"
