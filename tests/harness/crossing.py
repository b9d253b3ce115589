"""A program that prints which files of the product a tick and a child cross: `python -m tests.harness.crossing`.

A tick: from what APScheduler wakes, through Redis and Dramatiq's worker, to a deleted row and back to the
acknowledgement.  A child: from its message to its acknowledgement.  All in this process, on the servers that the
settings name, which a test has prepared.

Crossed is a file whose functions wait for one another when something is changed in PostgreSQL or Redis: when the tick is
claimed, sent, fetched, begun, when its row is deleted, when it is closed and acknowledged.  What is asked, counted and
logged on the way returns before that.
"""

import json
import os
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from dramatiq import Worker

from forgekeeper.batches import BATCHES, CHILDREN
from forgekeeper.boot import load
from forgekeeper.database import database
from forgekeeper.delivery.broker import broker, load_batches
from forgekeeper.delivery.children import send_children
from forgekeeper.delivery.queues import depth
from scheduler import Loop
from tests.harness.waiting import wait_until

ROOT = Path(__file__).parents[2]
PRODUCT = ("forgekeeper", "metrics", "models", "scheduler.py", "models.py", "workers")
BATCH, CHILD = "user_status_cleanup", "delete_artifact_bucket"
LIMIT = 60.0
CHANGE = re.compile(r"\b(insert into|update \S+ set|delete from)\b")

crossed: set[str] = set()


def note(frame, event, _argument):
    """Where something is changed, note the files of all functions that wait for it."""
    if event == "call" and _changes(frame.f_code, frame.f_locals):
        crossed.update(_files(frame))


def _changes(code, given):
    """Say whether a call of Peewee's or redis-py's changes something."""
    if code.co_name == "execute_sql" and "peewee" in code.co_filename:
        return bool(CHANGE.search(given["sql"].lower().replace('"', "")))
    return code.co_name in {"evalsha", "eval"} and "/redis/" in code.co_filename


def _files(frame):
    """Yield the product's files on the stack."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in PRODUCT:
            yield str(file.relative_to(ROOT))
        frame = frame.f_back


def note_workers(*call):
    """Note what Dramatiq's threads do, and nothing of those that beat and watch beside them."""
    if type(threading.current_thread()).__module__ == "dramatiq.worker":
        note(*call)


@contextmanager
def noted():
    """Note what this thread does."""
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def idle(queue):
    """Say whether the queue has no message that waits or is in hand."""
    counts = depth(broker.client, queue)
    return counts["ready"] + counts["in_flight"] == 0


def worked_off(queue):
    """Wait until the worker is done with what is in the queue; return what has been crossed since last time."""
    assert wait_until(lambda: idle(queue), LIMIT)
    found = sorted(crossed)
    crossed.clear()
    return found


def main():
    """Cross them."""
    load_batches()
    batch, child = BATCHES[BATCH], CHILDREN[CHILD]
    broker.emit_after("process_boot")
    threading.setprofile(note_workers)
    settings = load()
    with database.connection_context(), noted():
        Loop(batch, settings, broken=threading.Event(), asked=SimpleQueue()).turn()
    Worker(broker, queues={batch.queue, child.queue}, worker_threads=1).start()
    tick = worked_off(batch.queue)
    with database.connection_context():
        send_children(broker, None, child, [(f"{CHILD}:1", ())], limit_depth=None)
    json.dump({"tick": tick, "child": worked_off(child.queue)}, sys.stdout)
    sys.stdout.flush()
    # A drain would be one more way.
    os._exit(0)


if __name__ == "__main__":
    main()
