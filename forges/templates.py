"""The SQL that makes views of a forge's tables, and its version, which a comment on their schema keeps."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

SHARED = "forges"
"""The package of what all forges have in common."""


def read_template(forge: str, part: str) -> str:
    """Return the SQL of a part, of the *forge* or of all forges: TABLES, VIEWS and the like stand for names."""
    own = _folder(f"{SHARED}.{forge}") / f"{part}.sql"
    return (own if own.is_file() else _folder(SHARED) / f"{part}.sql").read_text(encoding="utf-8")


@cache
def comment_of_version(forge: str) -> str:
    """Return how the comment begins on a schema of views that this version makes."""
    folders = [_folder(f"{SHARED}.{forge}"), _folder(SHARED)]
    every = sorted((path.name, path.read_text(encoding="utf-8")) for folder in folders for path in folder.iterdir())
    return f"made by forgekeeper adopt {forge}, {sha256(repr(every).encode()).hexdigest()[:16]}"


def _folder(package: str) -> Traversable:
    return files(package) / "sql"
