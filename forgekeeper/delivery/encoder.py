"""Message bodies as JSON, and a place for those that are no messages.

Dramatiq's consumer starts again when it cannot decode a body, and forgets what it fetched beside it: those messages
would stay with this process until it ends.  So a body that cannot be decoded becomes a message of an actor that does
not exist; Dramatiq rejects it, and `ChildMessages` puts it into quarantine.
"""

from __future__ import annotations

from typing import Any

from dramatiq.encoder import JSONEncoder
from dramatiq.errors import DecodeError

UNREADABLE = "unreadable"
"""The actor of a body that is no message, and the option that has the body."""
FIELDS: dict[str, type] = {
    "queue_name": str,
    "actor_name": str,
    "args": list,
    "kwargs": dict,
    "options": dict,
    "message_id": str,
    "message_timestamp": int,
}


class Encoder(JSONEncoder):
    """Dramatiq's JSON, which reads every body."""

    def decode(self, data: bytes) -> dict[str, Any]:
        """Return the fields of a message."""
        try:
            found = super().decode(data)
        except (DecodeError, ValueError, RecursionError):
            found = {}
        return found if _is_message(found) else _unreadable(data)


def _is_message(found: object) -> bool:
    return (
        isinstance(found, dict)
        and found.keys() == FIELDS.keys()
        and all(isinstance(found[name], kind) for name, kind in FIELDS.items())
        and isinstance(found["options"].get("redis_message_id"), str)
    )


def _unreadable(data: bytes) -> dict[str, Any]:
    return {
        "queue_name": UNREADABLE,
        "actor_name": UNREADABLE,
        "args": [],
        "kwargs": {},
        "options": {UNREADABLE: data},
        "message_id": UNREADABLE,
        "message_timestamp": 0,
    }
