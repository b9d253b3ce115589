"""Texts of the console: English where Python uses them, and in the language of the reader on a page.

A page's facts are shared by everybody who asks for its address, so texts are translated while a page is rendered.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from gettext import NullTranslations
from typing import Any, Self

from forgekeeper.cli.terminal import split_duration


class TranslatableText(str):
    """An English text that pages translate: its *pattern* is a message of the catalogs.

    *facts* fill the pattern's ``%(name)s``, and may be texts of this type, too.
    """

    __slots__ = ("facts", "pattern")

    facts: dict[str, Any]
    pattern: str

    def __new__(cls, pattern: str, /, **facts: Any) -> Self:
        """Create the text; without facts, the pattern is the text."""
        made = super().__new__(cls, pattern % facts if facts else pattern)
        made.pattern, made.facts = pattern, facts
        return made


DURATION_TEXTS = {
    ("s",): TranslatableText("%(s)s s"),
    ("min", "s"): TranslatableText("%(min)s min %(s)s s"),
    ("h", "min"): TranslatableText("%(h)s h %(min)s min"),
    ("days", "h"): TranslatableText("%(days)s days %(h)s h"),
}
"""Texts of durations by their units, as `split_duration` returns them."""


def translate_text(translations: NullTranslations, value: Any) -> Any:
    """Translate a `TranslatableText`, also among its facts; return any other value unchanged."""
    if not isinstance(value, TranslatableText):
        return value
    found = translations.gettext(value.pattern)
    facts = {name: translate_text(translations, fact) for name, fact in value.facts.items()}
    return found % facts if facts else found


def describe_duration(duration: timedelta) -> TranslatableText:
    """Describe a duration with the units and the precision of the commands."""
    numbers = split_duration(duration)
    return TranslatableText(DURATION_TEXTS[tuple(numbers)].pattern, **numbers)


def describe_time(instant: datetime, now: datetime) -> TranslatableText:
    """Describe an instant relative to *now*."""
    if instant > now:
        return TranslatableText("in %(duration)s", duration=describe_duration(instant - now))
    return TranslatableText("%(duration)s ago", duration=describe_duration(now - instant))
