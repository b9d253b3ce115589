"""Log lines: one JSON object each, or a coloured line on a terminal.

A line is a fixed sentence under ``message`` and its facts beside it; what is bound to
the context (batch, tick, run, message id, worker) is on every line of a run.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from metrics.redaction import redact


def configure(
    style: Literal["json", "console"] | None = None, level: str = "INFO", stream: TextIO | None = None
) -> None:
    """Send all log lines of this process, the libraries' too, to *stream* (standard error)."""
    stream = stream or sys.stderr
    as_json = style == "json" or (style is None and not stream.isatty())
    formatter = structlog.stdlib.ProcessorFormatter(
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *(_json() if as_json else _console(colors=stream.isatty())),
        ],
        foreign_pre_chain=_shared(),
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level, force=True)
    _quiet_libraries()
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        structlog.processors.StackInfoRenderer(),
    ]


def _json() -> list[Processor]:
    return [
        structlog.processors.format_exc_info,
        structlog.processors.EventRenamer("message"),
        _redact,
        structlog.processors.JSONRenderer(serializer=_dump),
    ]


def _console(*, colors: bool) -> list[Processor]:
    return [
        structlog.processors.format_exc_info,
        _redact,
        structlog.dev.ConsoleRenderer(timestamp_key="at", colors=colors),
    ]


def _redact(_logger: WrappedLogger, _method: str, facts: EventDict) -> EventDict:
    return {name: redact(value, name) for name, value in facts.items()}


def _dump(facts: EventDict, **_options: Any) -> str:
    first = {key: facts.pop(key) for key in ("at", "level", "message") if key in facts}
    return orjson.dumps({**first, **facts}).decode()


def _quiet_libraries() -> None:
    # A line of ours says each of these things already, with the run's facts.
    logging.getLogger("dramatiq.worker.WorkerThread").setLevel(logging.CRITICAL)
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    logging.getLogger("peewee.migrations").setLevel(logging.WARNING)
