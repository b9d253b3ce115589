"""What must not be seen as it is, in log lines, tables and rows: secrets, control characters, endless text.

Foreign text may be of any shape and size: each step takes a time that grows with the text's length and no faster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

MASK = "********"
LONGEST = 4_000
"""Characters of one fact: an error's trace fits, a dumped payload does not."""
SEEN = 32_000
"""Characters of a text that are looked at: of a longer one only the beginning is shown."""
MOST, DEEPEST = 50, 4
"""Parts that are shown of what has parts, and levels of them."""
MORE = "…"

WORDS = (
    *("password", "passwd", "secret", "signature", "token", "authorization"),
    *(f"{kind}{between}key" for kind in ("access", "account", "api", "private", "sas") for between in ("", "_")),
)
"""What secrets have in their names."""
NAME = rf"(?<!\w)(?:sig(?!\w)|(?=\w*?(?:{'|'.join(WORDS)}))\w++)"
SECRET = re.compile(f"(?i){NAME}")
URL = re.compile(r"(?<!\w)\w++://[^\s:/@]*+:(?P<value>\S*+)")
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {
    # They break a line, or turn the direction in which it is read.
    code: f"\\u{code:04x}"
    for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}


def _named(unless: str) -> re.Pattern[str]:
    """Find what has the name of a secret; a quote closes a value *unless* that comes before it."""

    def word(quote: str) -> str:
        # A quote may itself be escaped, in JSON that is a string of JSON; one that nothing closes goes on to the end.
        quoted = rf"(?P<{quote}>\\{{0,7}}+[\"'])(?:.*?{unless}(?P={quote})|.*+)"
        return rf"(?:[^\s&,;\"'\\]++|\\++(?![\"'])|\\{{8,}}+[\"']|{quoted})*+"

    # Where what looks like the value is only another name, its value comes behind that.
    scheme = r"(?:(?<=basic)|(?<=bearer)|(?<=token)|(?<=[=:]))\s++"
    return re.compile(
        rf"(?is){NAME}\\{{0,7}}+[\"']?+\s*+[=:]\s*+(?P<value>{word('first')}(?:{scheme}{word('second')})*+)"
    )


NAMED = _named(r"(?<!\\)"), _named("")
"""Whether a backslash escapes a quote is a matter of opinion: what is a secret to either reader is masked."""


def printable(text: str) -> str:
    """Escape control characters, and the halves of characters by which Python writes bytes that are no text."""
    return text.translate(CONTROL).encode("utf-8", "backslashreplace").decode()


def escaped(text: str) -> str:
    """Mask secrets, escape control characters."""
    return printable(_masked(text))


def clean(text: str) -> str:
    """Mask secrets, escape control characters, cut the middle out of what is too long.

    Of what is longer than `SEEN` the end is cut off, and the word before it: it may be half of a secret.
    """
    if len(text) > SEEN:
        rest = f"{MORE} ({len(text):,} characters)"
        words = text[: text.rfind(" ", 0, SEEN) + 1]
        return escaped(words)[: LONGEST - len(rest)] + rest
    text = escaped(text)
    half = (LONGEST - 1) // 2
    return text if len(text) <= LONGEST else f"{text[:half]}{MORE}{text[-half:]}"


def one_line(text: str) -> str:
    """Clean what a person has typed, for a row: PostgreSQL refuses a NUL, and bytes that are no text."""
    return clean(text).replace("\n", "\\n").replace("\t", "\\t")


def describe(error: BaseException) -> str:
    """Put an exception into one line that every server can keep."""
    # Masked before it is cut: half a secret is not recognized.
    return clean(f"{type(error).__name__}: {text_of(error)}".splitlines()[0])[:500]


def text_of(value: object) -> str:
    """Write *value* as text, whatever it is: to log something must not fail."""
    if isinstance(value, bytes | bytearray):
        value = value[: SEEN + 1]
    try:
        return str(value)
    except Exception:  # noqa: BLE001, such as a number of more digits than Python writes
        return f"<{type(value).__name__}>"


def redact(value: Any, name: str = "", depth: int = 0) -> Any:
    """Return *value* fit for a log line, at any depth; what is *name*d as a secret is masked whole.

    It never fails: what has no text, no end or no bottom is shown as far as it can be.
    """
    # A name that long is none: what it stands for is not shown.
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
    """Yield where the passwords in URLs begin and end: at the last @ before a space, as they may have one."""
    for match in URL.finditer(text):
        begin, end = match.span("value")
        yield begin, text.rfind("@", begin, end)
