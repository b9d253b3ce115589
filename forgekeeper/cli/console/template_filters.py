"""Filters of templates: relative times, amounts, states, and text from outside."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from gettext import NullTranslations
from itertools import count
from typing import Any

from markupsafe import Markup, escape
from rich.filesize import decimal

from forgekeeper.cli.console.drawing import draw_line
from forgekeeper.cli.console.texts import TranslatableText, describe_duration, describe_time, translate_text
from forgekeeper.cli.terminal import escape_unprintable, format_facts, format_time, format_value
from forgekeeper.ledger.job_runs import JobRun
from metrics.logs import clean_text, text_of

STATES_BY_SHAPE = {
    "✓": ("succeeded", "ok", "done", "alive", "on"),
    "▶": ("started", "running"),
    "…": ("claimed", "enqueued", "draining"),
    "✗": ("failed", "failing", "unserved", "error", "silent", "critical"),
    "■": ("blocked", "stopped", "held"),
    "‖": ("paused",),
    "○": ("skipped", "off", "to-do"),
    "≈": ("coalesced",),
    "!": ("missed", "late", "unusual", "warning"),
    "i": ("info",),
}
"""Shapes of states, because many people cannot tell states by colour alone."""
SHAPES_BY_STATE = {name: shape for shape, names in STATES_BY_SHAPE.items() for name in names}

TABLE_ROW, TABLE_CELL = re.compile(r"<tr\b.*?</tr>", re.DOTALL), re.compile(r"<(t[dh])\b([^>]*)>")
COMMAND_IN_BACKTICKS = re.compile("`([^`]*)`")
PAGES_BY_COMMAND = (
    (r"forgekeeper run (\w+) --dry-run", r"/batches/\1/preview", r"preview of \1"),
    (r"forgekeeper (?:why|ticks|run|stop|resume|release|pause) ([a-z_]+)", r"/batches/\1", r"\1"),
    (r"forgekeeper (?:objects|refs) (?:keep|hold|restore) --run (\d+)", r"/undo", "undo"),
    (r"forgekeeper audit --run (\d+)", r"/audit?run=\1", r"audit of run \1"),
    (r"forgekeeper flags", "/flags", "flags"),
    (r"forgekeeper (processes|quarantine|leases|audit|settings|check)(?: list)?(?! --)\b", r"/\1", r"\1"),
)
"""Pages that replace a command: pattern of the command, address and words."""


def render_time(translations: NullTranslations, instant: datetime | None, now: datetime) -> Markup | str:
    """Format an instant relative to *now*; its title is the exact time."""
    if instant is None:
        return translations.gettext("never")
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        instant.isoformat(), format_time(instant), translate_text(translations, describe_time(instant, now))
    )


def render_state(translations: NullTranslations, name: str) -> Markup:
    """Format a state with its shape, its word, and its name as the CSS class for a colour."""
    return Markup('<span class="state {}"><span aria-hidden="true">{}</span> {}</span>').format(
        name, SHAPES_BY_STATE.get(name, "•"), name_state(translations, name)
    )


def name_state(translations: NullTranslations, name: str) -> str:
    """Return the word for a state; a name that is not in `SHAPES_BY_STATE` stays as it is."""
    return translations.pgettext("state", name)


def describe_bar(translations: NullTranslations, run: JobRun, words: str) -> str:
    """Describe a run in a chart. A page has hundreds, for which gettext in a template is too slow."""
    facts = {"run": run.id, "state": name_state(translations, run.state), "words": words}
    if run.tick is None:
        text = TranslatableText("run %(run)s, by hand, %(state)s: %(words)s", **facts)
    else:
        tick = format_time(run.tick)
        text = TranslatableText("run %(run)s, tick of %(time)s, %(state)s: %(words)s", time=tick, **facts)
    return str(translate_text(translations, text))


def escape_foreign_text(value: Any) -> str:
    """Format foreign text: secrets masked, unprintable characters escaped; Jinja escapes HTML."""
    return "" if value is None else clean_text(escape_unprintable(text_of(value)))


def describe_seconds(count: float | timedelta | None) -> str:
    """Describe a duration, or nothing."""
    if count is None:
        return ""
    return describe_duration(count if isinstance(count, timedelta) else timedelta(seconds=count))


def label_cells(rows: str, columns: Sequence[str]) -> Markup:
    """Add the column's name and an ARIA role to each cell of these table rows.

    On a narrow screen a row is a card: each cell shows that name before its content.
    """

    def label_row(row: re.Match[str]) -> str:
        places = count()
        return TABLE_CELL.sub(lambda cell: label_cell(cell, next(places)), row[0])

    def label_cell(cell: re.Match[str], place: int) -> str:
        role = "rowheader" if cell[1] == "th" else "cell"
        name = "" if "colspan" in cell[2] else f' data-column="{escape(columns[place].removeprefix("#"))}"'
        return f'<{cell[1]} role="{role}"{name}{cell[2]}>'

    return Markup(TABLE_ROW.sub(label_row, rows).replace("<tr", '<tr role="row"'))  # noqa: S704, our own template wrote it


def link_commands(sentence: Any) -> Markup:
    """Format a sentence of ours; commands in backticks become links to their pages."""
    parts = COMMAND_IN_BACKTICKS.split(escape_foreign_text(sentence))
    return Markup("").join(_write_command(part) if place % 2 else escape(part) for place, part in enumerate(parts))


def _write_command(command: str) -> Markup:
    for pattern, address, words in PAGES_BY_COMMAND:
        if match := re.match(pattern, command):
            target, shown = match.expand(address), match.expand(words)
            return Markup('<a href="{}" title="{}">{}</a>').format(target, command, shown)
    return Markup("<code>{}</code>").format(command)


def create_filters(translations: NullTranslations) -> dict[str, Callable[..., Any]]:
    """Return the filters for the templates of a language."""
    translate = partial(translate_text, translations)
    return {
        "when": partial(render_time, translations),
        "state": partial(render_state, translations),
        "state_name": partial(name_state, translations),
        "bar": partial(describe_bar, translations),
        "figure": lambda count: "?" if count is None else f"{count:,}",
        "size": decimal,
        "foreign": lambda value: escape_foreign_text(translate(value)),
        "since": lambda instant, now: translate(describe_seconds(instant and now - instant)),
        "seconds": lambda count: translate(describe_seconds(count)),
        "sentence": lambda value: translate(TranslatableText("%(sentence)s.", sentence=value)),
        "moment": format_time,
        "facts": format_facts,
        "plain": format_value,
        "clean": clean_text,
        "label_cells": label_cells,
        "link_commands": lambda value: link_commands(translate(value)),
        "line": draw_line,
    }
