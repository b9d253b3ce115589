"""What the keeper tells the process that started it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """The servers accept connections; *temporary_folders* have to be gone in the end."""

    folder: str
    database_url: str
    redis_url: str
    postgres_pid: int
    redis_pid: int
    temporary_folders: list[str]
