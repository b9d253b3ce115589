"""SQL templates for views of a forge's tables, and their version for the schema's comment."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

SHARED_PACKAGE = "forges"
"""Package with the templates that all forges share."""


def read_template(forge: str, part: str) -> str:
    """Return the template of a part, of the *forge* or shared, with placeholders like VIEWS."""
    own = _find_sql_folder(f"{SHARED_PACKAGE}.{forge}") / f"{part}.sql"
    return (own if own.is_file() else _find_sql_folder(SHARED_PACKAGE) / f"{part}.sql").read_text(encoding="utf-8")


@cache
def write_version_comment(forge: str) -> str:
    """Return the beginning of the comment on a schema of views created by this version."""
    folders = [_find_sql_folder(f"{SHARED_PACKAGE}.{forge}"), _find_sql_folder(SHARED_PACKAGE)]
    every = sorted((path.name, path.read_text(encoding="utf-8")) for folder in folders for path in folder.iterdir())
    return f"made by forgekeeper adopt {forge}, {sha256(repr(every).encode()).hexdigest()[:16]}"


def _find_sql_folder(package: str) -> Traversable:
    return files(package) / "sql"
