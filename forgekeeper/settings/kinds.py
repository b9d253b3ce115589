"""What kinds of value a setting can have, and how each is read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Json, PlainValidator, SecretStr
from pydantic_settings import NoDecode

from forgekeeper.settings.addresses import database_url, redis_url
from forgekeeper.settings.cron import Cron, parse


def _duration(value: object) -> object:
    """Let a bare number mean seconds."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("not a number of seconds") from None


def _folders(value: tuple[str, ...]) -> tuple[str, ...]:
    """Take folders without the slash at their end; raise for what is none, and for no folder at all."""
    folders = tuple(folder.removesuffix("/") for folder in value)
    if not folders:
        raise ValueError("an empty list would let nothing be deleted there: name a folder, or leave the location out")
    for folder in folders:
        parts = folder.split("/")
        if {"", ".", ".."}.intersection(parts) or not folder.isprintable():
            raise ValueError(f"{folder!r} is no folder of a store: write a/b, without a slash in front, '.' or '..'")
    return folders


def _modules(value: object) -> tuple[str, ...]:
    names = tuple(name.strip() for name in str(value).split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name!r} is no module: name modules such as workers, with commas between them")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Kind:
    """What people call the kind of a value, where its type alone does not say."""

    name: str


# Three weeks: PostgreSQL counts its time-outs in milliseconds, in 31 bits.
Duration = Annotated[timedelta, BeforeValidator(_duration), Field(gt=timedelta(0), le=timedelta(weeks=3))]
Visibility = Annotated[Duration, Field(ge=timedelta(seconds=2))]
Schedule = Annotated[Cron | None, PlainValidator(parse), NoDecode]
DatabaseUrl = Annotated[SecretStr, AfterValidator(database_url)]
RedisUrl = Annotated[SecretStr, AfterValidator(redis_url)]
Share = Annotated[float, Field(ge=0, le=1), Kind("share, 0 to 1")]
Pace = Annotated[float, Field(gt=0), Kind("per second")]
Count = Annotated[int, Field(ge=1), Kind("count")]
Bytes = Annotated[int, Field(ge=1), Kind("bytes")]
Days = Annotated[int, Field(ge=31, le=36_500), Kind("days")]
Port = Annotated[int, Field(ge=0, le=65535), Kind("port")]
Grace = Annotated[timedelta, BeforeValidator(_duration), Field(ge=timedelta(0))]
ObjectStores = Annotated[Json[dict[str, SecretStr]], NoDecode]
ObjectPrefixes = Annotated[Json[dict[str, Annotated[tuple[str, ...], AfterValidator(_folders)]]], NoDecode]
Modules = Annotated[tuple[str, ...], PlainValidator(_modules), NoDecode]
CatchUp = Literal["once", "skip"]


def setting(default: Any, sentence: str) -> Any:
    """Declare a setting: its default, written as an operator would, and what it is for."""
    return Field(default=default, description=sentence, validate_default=True)
