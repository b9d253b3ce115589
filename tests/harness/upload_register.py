"""Upload register: what tests of them share."""

from datetime import timedelta

from workers.stale_direct_uploads.entries import Claim, Entry

LOCATION, PATH = "artifacts", "a/b"

MEMBER = f"{LOCATION}:{PATH}"

THREE_HOURS = timedelta(hours=3)

VISIBILITY = timedelta(hours=2)

DONE = "done"


def put(client, world, me):
    return {"then": "insert", "stored": True, "came_late": world.register.pending is None}


def insert(client, world, me):
    return {"then": "complete"}


def commit(client, world, me):
    return {"then": DONE, "row": True}


def roll_back(client, world, me):
    return {"then": DONE}


def look(client, world, me):
    return {"then": "forget" if world.row else "check"}


def check(client, world, me):
    return {"then": DONE if me in world.late else "delete"}


def delete(client, world, me):
    return {"then": "forget", "stored": False}


def refuse(client, world, me):
    return {"then": "fail"}


def stop_location(client, world, me):
    return {"then": "put back"}


WITHOUT_REDIS = {put, insert, commit, roll_back, look, check, delete, refuse, stop_location}


def held_by(me):
    return Claim(me, [Entry(MEMBER, 0)])


def insert_then_ask(client, world, me):
    return {"then": "ask"}


def ask(client, world, me):
    return {"then": "roll back", "told": False} if world.reaped else {"then": "complete", "locked": True}


def remember(client, world, me):
    """Look and remember in one transaction, under the lock."""
    if world.locked:
        return {"then": DONE}
    return {"then": "forget"} if world.row else {"then": "check", "reaped": True}


FIVE_MINUTES = timedelta(minutes=5)
