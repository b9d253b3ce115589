"""How templates write things: times as they are seen from now, amounts, and text that comes from outside."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from markupsafe import Markup
from rich.filesize import decimal

from forgekeeper.cli.terminal import facts, lasting, moment, plain, relative, visible
from metrics.logs import clean, text_of

SHAPES = {
    "✓": ("succeeded", "ok", "done", "alive", "on"),
    "▶": ("started", "running"),
    "…": ("claimed", "enqueued", "draining"),
    "✗": ("failed", "failing", "unserved", "error", "silent", "critical"),
    "■": ("blocked", "stopped", "held"),
    "‖": ("paused",),
    "○": ("skipped", "off"),
    "≈": ("coalesced",),
    "!": ("missed", "late", "unusual", "warning"),
    "i": ("info",),
}
"""The shapes of states: a colour alone says nothing to many."""
SHAPE_OF = {name: shape for shape, names in SHAPES.items() for name in names}


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
        name, SHAPE_OF.get(name, "•"), name
    )


def foreign(value: Any) -> str:
    """Write what comes from outside: secrets masked, what is not printable escaped; Jinja escapes what is HTML."""
    return "" if value is None else clean(visible(text_of(value)))


def seconds(count: float | timedelta | None) -> str:
    """Write a duration."""
    if count is None:
        return ""
    return lasting(count if isinstance(count, timedelta) else timedelta(seconds=count))


FILTERS: dict[str, Callable[..., Any]] = {
    "when": when,
    "state": state,
    "figure": lambda count: "?" if count is None else f"{count:,}",
    "size": decimal,
    "foreign": foreign,
    "since": lambda instant, now: "" if instant is None else lasting(now - instant),
    "seconds": seconds,
    "moment": moment,
    "facts": facts,
    "plain": plain,
    "clean": clean,
}
