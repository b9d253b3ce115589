"""What PostgreSQL writes about itself into its data folder: who runs there, and how far it is."""

from pathlib import Path

PID_LINE = 0
STATUS_LINE = 7


def is_ready(data: Path, pid: int) -> bool:
    """Return True once the server *pid* takes connections in *data*."""
    lines = _lines(data)
    return len(lines) > STATUS_LINE and lines[PID_LINE] == str(pid) and lines[STATUS_LINE] == "ready"


def forget_dead_server(data: Path) -> None:
    """Remove the file a killed server left behind.

    PostgreSQL would take any process that was given the same number since for a live server, and
    does not start on an empty file, as a power failure may leave it.
    """
    lines = _lines(data)
    if not lines or not _works_in(lines[PID_LINE], data):
        _path(data).unlink(missing_ok=True)


def _works_in(pid: str, data: Path) -> bool:
    try:
        return Path("/proc", pid, "cwd").samefile(data)
    except OSError:
        return False


def _lines(data: Path) -> list[str]:
    try:
        return [line.strip() for line in _path(data).read_text().splitlines()]
    except FileNotFoundError:
        return []


def _path(data: Path) -> Path:
    return data / "postmaster.pid"
