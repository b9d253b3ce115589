"""How templates write things: times as they are seen from now, amounts, and text that comes from outside."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from markupsafe import Markup
from rich.filesize import decimal

from forgekeeper.cli.terminal import facts, lasting, moment, plain, relative, visible
from metrics.logs import clean, text_of

SIGNS = {
    "succeeded": "✓",
    "started": "▶",
    "claimed": "…",
    "enqueued": "…",
    "failed": "✗",
    "failing": "✗",
    "blocked": "■",
    "skipped": "○",
    "coalesced": "≈",
    "missed": "!",
    "stopped": "■",
    "held": "■",
    "paused": "‖",
    "ok": "✓",
    "done": "✓",
    "alive": "✓",
    "running": "▶",
    "off": "○",
    "unserved": "✗",
    "late": "!",
    "unusual": "!",
    "warning": "!",
    "error": "✗",
    "silent": "✗",
    "critical": "✗",
    "info": "i",
    "on": "✓",
    "draining": "…",
}
"""A shape for each state: a colour alone says nothing to many."""


def when(instant: datetime | None, now: datetime) -> Markup | str:
    """Write an instant as seen from *now*; hovering shows it exactly."""
    if instant is None:
        return "never"
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        instant.isoformat(), moment(instant), relative(instant, now)
    )


def state(name: str) -> Markup:
    """Write a state: its shape, its word, and a colour by the class of its name."""
    return Markup('<span class="state {}"><span aria-hidden="true">{}</span> {}</span>').format(
        name, SIGNS.get(name, "•"), name
    )


def figure(count: int | None) -> str:
    """Write a count; what is not known is a question mark."""
    return "?" if count is None else f"{count:,}"


def size(count: int | None) -> str:
    """Write a number of bytes."""
    return "?" if count is None else decimal(count)


def foreign(value: Any) -> str:
    """Write what comes from outside: secrets masked, what is not printable escaped; Jinja escapes what is HTML."""
    return "" if value is None else clean(visible(text_of(value)))


def since(instant: datetime | None, now: datetime) -> str:
    """Say how long ago that was."""
    return "" if instant is None else lasting(now - instant)


def seconds(count: float | timedelta | None) -> str:
    """Write a duration."""
    if count is None:
        return ""
    return lasting(count if isinstance(count, timedelta) else timedelta(seconds=count))


FILTERS: dict[str, Callable[..., Any]] = {
    "when": when,
    "state": state,
    "figure": figure,
    "size": size,
    "foreign": foreign,
    "since": since,
    "seconds": seconds,
    "moment": moment,
    "facts": facts,
    "plain": plain,
    "clean": clean,
}
