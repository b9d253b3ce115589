"""Read the settings from the environment, and show them without their secrets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from dotenv import dotenv_values
from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings

from forgekeeper.platform.settings import PREFIX, Modules, Settings, SettingsError, setting
from forgekeeper.platform.settings.addresses import (
    MASK,
    find_unverified_servers,
    show_database_url,
    show_redis_url,
    show_store_url,
)
from forgekeeper.platform.settings.secret_files import FILE_SUFFIX, list_secret_settings, read_secret_files

ENV_FILE = ".env"
URL_DISPLAYS = {"database_url": show_database_url, "redis_url": show_redis_url, "object_stores": show_store_url}
"""Functions that show the URL of a setting; secrets of all other settings are masked as a whole."""
KEYED_SETTINGS = {"object_stores", "object_prefixes"}


@dataclass(frozen=True)
class ShownSetting:
    """A setting as the command line and the documentation show it."""

    name: str
    type: str
    default: str
    value: str
    sentence: str
    source: str
    """``environment``, ``.env``, ``file`` or ``default``."""


class _ModulesSetting(BaseSettings):
    model_config = Settings.model_config
    batches: Modules = setting("workers", "")


def read_modules() -> tuple[str, ...]:
    """Return the modules that declare batches; they are read first, as they add settings.

    Raises `SettingsError`.
    """
    found, problems = _read_model(_ModulesSetting)
    _raise_problems(problems)
    names: tuple[str, ...] = found.batches
    return names


def read_settings(model: type[Settings]) -> Settings:
    """Read the settings; raise `SettingsError` naming every unknown name and bad value.

    No message repeats a value that may hold a password.
    """
    settings, problems = _read_model(model)
    _raise_problems([*_unknown_names(model), *(find_unverified_servers(settings) if settings else ()), *problems])
    made: Settings = settings
    return made


def _read_model(model: type[BaseSettings]) -> tuple[Any, list[str]]:
    """Return the settings from the environment and files, and no problems; or None and the problems."""
    try:
        secrets, problems = read_secret_files(model, _read_environment())
        if problems:
            return None, problems
        return model(_env_file=ENV_FILE, **secrets), []
    except ValidationError as error:
        return None, [_bad_value(details) for details in error.errors(include_input=False, include_url=False)]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(
            f"cannot read the file {ENV_FILE}: {why}; correct it, or run this in another folder"
        ) from None


def _raise_problems(problems: list[str]) -> None:
    if problems:
        raise SettingsError("; ".join(problems) + "; `forgekeeper settings --help` says how settings are given")


def list_settings(settings: Settings) -> list[ShownSetting]:
    """List every setting with its present value, secrets masked, and the value's source."""
    sources: dict[str, str] = dict.fromkeys(_set_names(dotenv_values(ENV_FILE)), ".env")
    sources |= dict.fromkeys(_set_names(os.environ), "environment")
    in_files = [name.removesuffix(FILE_SUFFIX) for name in sources if name.endswith(FILE_SUFFIX)]
    sources |= dict.fromkeys(in_files, "file")
    return [
        ShownSetting(
            name=PREFIX + name.upper(),
            type=_type_name(field.annotation, field.metadata),
            default=_show_value(field.default, name),
            value=_show_value(getattr(settings, name), name, none="off" if name.startswith("cron_") else ""),
            sentence=field.description or "",
            source=sources.get(PREFIX + name.upper(), "default"),
        )
        for name, field in type(settings).model_fields.items()
    ]


def show_servers(settings: Settings) -> str:
    """Return a line with the servers, folder and stores of these settings, and their sources."""
    wanted = {PREFIX + name.upper() for name in ("database_url", "redis_url", "repositories_root", "object_stores")}
    shown = [one for one in list_settings(settings) if one.name in wanted and one.value]
    return ", ".join(f"{one.name}={one.value} ({one.source})" for one in shown)


def _set_names(values: Mapping[str, str | None]) -> set[str]:
    """Return the names with a value; an empty value counts as unset, as in `Settings`."""
    return {name.upper() for name, value in values.items() if value}


def _read_environment() -> dict[str, str | None]:
    """Return the settings of the environment and of the file `.env`, by upper-case name; the environment wins."""
    given = {**dotenv_values(ENV_FILE), **os.environ}
    return {name.upper(): value for name, value in given.items() if value}


def _unknown_names(model: type[Settings]) -> Iterator[str]:
    known = {PREFIX + name.upper() for name in model.model_fields}
    known |= {f"{PREFIX}{name.upper()}{FILE_SUFFIX}" for name in list_secret_settings(model)}
    for name in sorted({*os.environ, *dotenv_values(ENV_FILE)}):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            # Compared without the prefix, which makes all names alike.
            own = [one.removeprefix(PREFIX) for one in known]
            close = get_close_matches(name.upper().removeprefix(PREFIX), own, n=1)
            yield f"unknown setting {name}" + (f" (did you mean {PREFIX}{close[0]}?)" if close else "")


def _bad_value(details: ErrorDetails) -> str:
    name, *inside = (str(part) for part in details["loc"])
    reason = details["msg"].removeprefix("Value error, ")
    reason = reason.replace("datetime.timedelta(0)", "0").replace("datetime.timedelta(days=21)", "three weeks")
    # pydantic also names the branch of a union; only an operator's own keys help.
    key = f" ({inside[0]})" if inside and name.lower() in KEYED_SETTINGS else ""
    return f"bad value of {PREFIX}{name.upper()}{key}: {reason}"


def _type_name(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return the name of a setting's type: from its metadata, choices or Python type."""
    for fact in metadata:
        if isinstance(fact, str):
            return fact
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " | ".join(inner)
    return _type_name(inner[0], inner[1:]) if inner else annotation.__name__.lower()


def _show_value(value: Any, setting: str, none: str = "") -> str:
    if value is None:
        return none
    if isinstance(value, SecretStr):
        return URL_DISPLAYS[setting](value.get_secret_value()) if setting in URL_DISPLAYS else MASK
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_show_value(part, setting)}" for key, part in value.items())
    if isinstance(value, tuple):
        return (" " if setting == "object_prefixes" else ", ").join(str(part) for part in value)
    return str(value)
