"""What must not reach a log line as it is: secrets, control characters, endless text.

What comes from elsewhere may be of any shape and size, and whoever looks at it holds up all
threads of the process: each step takes a time that grows with the text's length and no
faster, and no step but the first looks at more than `SEEN` characters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

MASK = "********"
LONGEST = 4_000
"""Characters of one fact: an error's trace fits, a dumped payload does not."""
SEEN = 32_000
"""Characters of a text that are looked at: of a longer one only the beginning is shown."""
MOST, DEEPEST, WIDEST = 1_000, 20, 4 * SEEN
"""Parts, levels, and characters that are looked at, of all facts of a line together."""
BITS = 4_000
"""Those of an integer that is written out; Python refuses to write one of more than 4,300 digits."""
MORE = "…"

KEYS = ("access", "account", "api", "private", "sas")
WORDS = (
    *("password", "passwd", "secret", "signature", "token", "authorization"),
    *(f"{kind}{between}key" for kind in KEYS for between in ("", "_")),
)
"""What secrets have in their names."""

# Each begins where a word does and takes it whole: nothing is looked at again for the sake of a shorter one.
NAME = rf"(?<!\w)(?:sig(?!\w)|(?=\w*?(?:{'|'.join(WORDS)}))\w++)"
NAMED = re.compile(rf"(?i){NAME}\\{{0,7}}+[\"']?+\s*+[=:]\s*+")
QUOTE = re.compile(r"\\{0,7}+[\"']")
SCHEME = re.compile(r"(?i)(?:Basic|Bearer|Token)\s++")
WORD = re.compile(r"[^\s&,;]*+")
URL = re.compile(r"(?<!\w)\w++://[^\s:/@]*+:")
SPACE = re.compile(r"\s")
SIGNATURE = re.compile(r"(?<!\w)sig(?!\w)")
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {
    # They break a line, or turn the direction in which it is read.
    code: f"\\u{code:04x}"
    for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}


def printable(text: str) -> str:
    """Escape control characters."""
    if text.isprintable():
        return text
    return text.translate(CONTROL).encode("utf-8", "backslashreplace").decode()


def escaped(text: str, *, torn: bool = False) -> str:
    """Mask secrets, escape control characters; of a text that is *torn* off what ends it may go on behind the tear."""
    return printable(_masked(text, torn=torn))


def clean(text: str) -> str:
    """Mask secrets, escape control characters, cut the middle out of what is too long.

    Of what is much too long the end is cut off: nobody has looked whether it is that of a secret.
    """
    return _cleaned(text, SEEN)


def one_line(text: str) -> str:
    """Clean what a person has typed, for a row: PostgreSQL refuses a NUL, and bytes that are no text."""
    return clean(text).replace("\n", "\\n").replace("\t", "\\t")


def describe(error: BaseException) -> str:
    """Put an exception into one line that every server can keep: for the ledger and the dead letters.

    PostgreSQL refuses a NUL, and both refuse the half characters by which Python writes bytes that are no text: with
    one of them the run or the message could not be ended.
    """
    # Masked before it is cut: of half a secret nobody knows that it is one.
    return clean(f"{type(error).__name__}: {text_of(error)}".splitlines()[0])[:500]


def harmless(line: str) -> bool:
    """Say whether `redact` would change nothing of *line*, a line of JSON.

    It is quick, and says no where it would have to look closer.
    """
    if len(line) > LONGEST or not line.isascii() or not line.isprintable() or "\\" in line or "://" in line:
        return False
    lower = line.lower()
    return not any(map(lower.__contains__, WORDS)) and not ("sig" in lower and SIGNATURE.search(lower))


def redact(value: Any, name: str = "") -> Any:
    """Return *value* fit for a log line, at any depth; what is *name*d as a secret is masked whole.

    It never fails: what has no text, no end or no bottom is shown as far as it can be.
    """
    return _Line().redact(value, name)


def text_of(value: object) -> str:
    """Write *value* as text, whatever it is: to say something must not fail.

    What can be cut beforehand is: of bytes no more is written than would be looked at.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        # JSON has numbers of any size; most of what reads it does not.
        bits = value.bit_length()
        return str(value) if bits <= BITS else f"an integer of {bits:,} bits"
    if isinstance(value, bytes | bytearray):
        value = value[: SEEN + 1]
    try:
        return str(value)
    except Exception:  # noqa: BLE001
        return object.__repr__(value)


class _Line:
    """How much room there is left on a line."""

    def __init__(self) -> None:
        self._parts, self._characters = MOST, WIDEST

    def redact(self, value: Any, name: str, depth: int = 0) -> Any:
        if name and _names_a_secret(name):
            return MASK
        if value is None or isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 64):
            return value
        try:
            if isinstance(value, Mapping):
                return self._mapping(value, depth)
            if isinstance(value, list | tuple | set | frozenset):
                return self._list(value, depth)
        except Exception:  # noqa: BLE001, such as one that another thread is changing
            return self._said(object.__repr__(value))
        return self._said(text_of(value))

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, part in value.items():
            if self._is_full(depth):
                found[MORE] = f"{len(value):,} in all"
                break
            name = text_of(key)
            found[self._said(name)] = self.redact(part, name, depth + 1)
        return found

    def _list(self, value: Collection[Any], depth: int) -> list[Any]:
        found: list[Any] = []
        for part in value:
            if self._is_full(depth):
                found.append(f"{MORE} {len(value):,} in all")
                break
            found.append(self.redact(part, "", depth + 1))
        return found

    def _is_full(self, depth: int) -> bool:
        self._parts -= 1
        return self._parts < 0 or self._characters <= 0 or depth >= DEEPEST

    def _said(self, text: str) -> str:
        room = min(SEEN, self._characters)
        self._characters -= min(len(text), room)
        return _cleaned(text, room)


def _cleaned(text: str, room: int) -> str:
    """Make *text* clean, looking at no more than *room* of its characters."""
    if len(text) > room:
        rest = f"{MORE} ({len(text):,} characters)"
        return escaped(text[:room], torn=True)[: LONGEST - len(rest)] + rest
    text = escaped(text)
    if len(text) <= LONGEST:
        return text
    half = (LONGEST - 1) // 2
    return f"{text[:half]}{MORE}{text[-half:]}"


def _names_a_secret(name: str) -> bool:
    # One that long is no name: what it stands for is not shown.
    return len(name) > LONGEST or _is_secret(name)


@lru_cache(maxsize=1_000)
def _is_secret(name: str) -> bool:
    return re.search(f"(?i){NAME}", name) is not None


def _masked(text: str, *, torn: bool) -> str:
    # Most texts are words: a secret stands behind one of two characters.
    if ":" not in text and "=" not in text:
        return text
    spans = sorted((*_passwords(text, torn=torn), *_named(text)))
    parts, shown = [], 0
    for begin, end in spans:
        if end <= shown:
            continue
        if begin >= shown:
            parts += [text[shown:begin], MASK]
        shown = end
    return "".join((*parts, text[shown:])) if spans else text


def _passwords(text: str, *, torn: bool) -> Iterator[tuple[int, int]]:
    """Yield where the passwords in URLs begin and end: at the last @ before a space, as they may have one."""
    end = at = -1
    for match in URL.finditer(text):
        begin = match.end()
        if begin >= end:
            space = SPACE.search(text, begin)
            end = space.start() if space else len(text)
            at = end if torn and end == len(text) else text.rfind("@", begin, end)
        if at >= begin:
            yield begin, at


def _named(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the values begin and end that have the name of a secret.

    Such names are looked for in such values, too: where a value ends is a matter of opinion, and
    what is the rest of one to this reader is another secret to the next.
    """
    end = -1
    for match in NAMED.finditer(text):
        begin = match.end()
        if quote := QUOTE.match(text, begin):
            yield begin, _closed(text, quote)
            continue
        scheme = SCHEME.match(text, begin)
        # One that is in another ends where that one does, and that has been found out.
        if scheme or begin >= end:
            word = WORD.match(text, scheme.end() if scheme else begin)
            assert word is not None
            end = word.end()
            if end > begin:
                yield begin, end


def _closed(text: str, quote: re.Match[str]) -> int:
    """Return where a quoted value ends: behind its second quote, or at the end of the text if there is none.

    A quote may itself be escaped, in JSON that is a string of JSON; in its value quotes are escaped once more.
    """
    sign, at = quote[0], quote.end()
    while (at := text.find(sign, at)) >= 0:
        backslashes = 0
        while text[at - 1 - backslashes] == "\\":
            backslashes += 1
        at += len(sign)
        if backslashes % (2 * len(sign)) == 0:
            return at
    return len(text)
