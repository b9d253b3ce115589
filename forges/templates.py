"""SQL templates for views of a forge's tables, and their version for the schema's comment."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

SHARED = "forges"
"""Package with the templates that all forges share."""


def read_template(forge: str, part: str) -> str:
    """Return the template of a part, of the *forge* or shared, with placeholders like VIEWS."""
    own = _folder(f"{SHARED}.{forge}") / f"{part}.sql"
    return (own if own.is_file() else _folder(SHARED) / f"{part}.sql").read_text(encoding="utf-8")


@cache
def comment_of_version(forge: str) -> str:
    """Return the beginning of the comment on a schema of views created by this version."""
    folders = [_folder(f"{SHARED}.{forge}"), _folder(SHARED)]
    every = sorted((path.name, path.read_text(encoding="utf-8")) for folder in folders for path in folder.iterdir())
    return f"made by forgekeeper adopt {forge}, {sha256(repr(every).encode()).hexdigest()[:16]}"


def _folder(package: str) -> Traversable:
    return files(package) / "sql"
