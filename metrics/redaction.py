"""What must not reach a log line as it is: secrets, control characters, endless text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MASK = "********"
LONGEST = 4_000
"""Characters of one fact: an error's trace fits, a dumped payload does not."""

KEYS = ("access", "account", "api", "private", "sas")
WORDS = (
    *("password", "passwd", "secret", "signature", "token", "authorization"),
    *(f"{kind}{between}key" for kind in KEYS for between in ("", "_")),
)
"""What secrets have in their names."""

# Each begins where a word does: from every letter of a long word anew, it would take seconds.
NAME = rf"(?<!\w)(?:sig(?!\w)|\w*?(?:{'|'.join(WORDS)})\w*)"
URL_PASSWORD = re.compile(r"((?<!\w)\w+://[^\s:/@]*):\S*@")
VALUE = r"\"[^\"]*\"|'[^']*'|(?:(?:Basic|Bearer)\s+)?[^\s&,;]+"
NAMED_SECRET = re.compile(rf"(?i)({NAME})([\"']?\s*[=:]\s*)({VALUE})")
SIGNATURE = re.compile(r"(?<!\w)sig(?!\w)")
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {
    # They break a line, or turn the direction in which it is read.
    code: f"\\u{code:04x}"
    for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}


def escaped(text: str) -> str:
    """Mask secrets, escape control characters."""
    # Most texts are words: a secret stands behind one of two characters, and what can be printed needs no escape.
    if ":" in text or "=" in text:
        text = URL_PASSWORD.sub(rf"\1:{MASK}@", text)
        text = NAMED_SECRET.sub(rf"\1\2{MASK}", text)
    if text.isprintable():
        return text
    return text.translate(CONTROL).encode("utf-8", "backslashreplace").decode()


def clean(text: str) -> str:
    """Mask secrets, escape control characters, cut the middle out of what is too long."""
    text = escaped(text)
    if len(text) <= LONGEST:
        return text
    half = (LONGEST - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def harmless(line: str) -> bool:
    """Say whether `redact` would change nothing of *line*, a line of JSON.

    It is quick, and says no where it would have to look closer.
    """
    if len(line) > LONGEST or not line.isascii() or not line.isprintable() or "\\" in line or "://" in line:
        return False
    lower = line.lower()
    return not any(map(lower.__contains__, WORDS)) and not ("sig" in lower and SIGNATURE.search(lower))


def redact(value: Any, name: str = "") -> Any:
    """Return *value* fit for a log line, at any depth; what is *name*d as a secret is masked whole."""
    if name and _names_a_secret(name):
        return MASK
    if isinstance(value, Mapping):
        return {str(key): redact(part, str(key)) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(part) for part in value]
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        # JSON has numbers of any size; most of what reads it does not.
        return value if value.bit_length() < 64 else str(value)
    return clean(value if isinstance(value, str) else _text(value))


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001, to say something must not fail
        return object.__repr__(value)


@lru_cache(maxsize=1_000)
def _names_a_secret(name: str) -> bool:
    return re.fullmatch(f"(?i){NAME}", name) is not None
