"""Secrets in files: ``FORGEKEEPER_<NAME>_FILE`` names a file with the value of a setting that holds secrets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import SecretStr
from pydantic_settings import BaseSettings

FILE_SUFFIX = "_FILE"
MAX_SECRET_BYTES = 65_536
"""Maximum size of a file: larger than any URL or list of stores, and small enough to read a wrong file at once."""


def list_secret_settings(model: type[BaseSettings]) -> list[str]:
    """Return the names of the fields that hold secrets: they are shown masked, and may be in files."""
    return [name for name, field in model.model_fields.items() if _holds_secret(field.annotation)]


def read_secret_files(model: type[BaseSettings], given: Mapping[str, str | None]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of settings in files, by field, and a sentence for each problem.

    *given* has the settings of the environment, by upper-case name.  A line break at the end of a file is removed.  No
    sentence repeats a value: instead of a file, somebody may have given the secret.
    """
    values, problems = dict[str, Any](), list[str]()
    prefix = str(model.model_config.get("env_prefix", "")).upper()
    for field in list_secret_settings(model):
        name = prefix + field.upper()
        if not (path := given.get(name + FILE_SUFFIX)):
            continue
        if given.get(name):
            problems.append(f"both {name} and {name}{FILE_SUFFIX} are set: remove one of them")
            continue
        try:
            values[field] = _read_secret(Path(path))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            problems.append(f"cannot read the file that {name}{FILE_SUFFIX} names: {reason}")
    return values, problems


def _holds_secret(annotation: Any) -> bool:
    return annotation is SecretStr or any(map(_holds_secret, get_args(annotation)))


def _read_secret(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_SECRET_BYTES + 1)
    if len(content) > MAX_SECRET_BYTES:
        raise ValueError(f"it has more than {MAX_SECRET_BYTES} bytes")
    try:
        value = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    if not value:
        raise ValueError("it is empty")
    return value
