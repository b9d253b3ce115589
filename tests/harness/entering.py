"""Print the files of the product that a tick and a child enter: `python -m tests.harness.entering`.

A file is entered if one of its functions is called.  A tick begins in the loop that APScheduler wakes, and ends with the
acknowledgement of its message after a deletion.  A child begins with its message and ends with its acknowledgement.
Everything runs in this process, on the servers that the settings name and a test has prepared.
"""

import json
import os
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

from dramatiq import Worker

from forgekeeper.api.batches import BATCHES, CHILDREN
from forgekeeper.delivery.boot import load_settings
from forgekeeper.delivery.broker import broker, load_batches
from forgekeeper.delivery.children import send_children
from forgekeeper.delivery.queues import count_messages
from forgekeeper.platform.database import database
from scheduler import BatchLoop
from tests.harness.waiting import wait_until

ROOT = Path(__file__).parents[2]
PRODUCT = ("forgekeeper", "metrics", "models.py", "scheduler.py", "workers")
BATCH, CHILD = "user_status_cleanup", "delete_artifact_bucket"
LIMIT = 60.0

entered: set[str] = set()


def note(frame, event, _argument):
    """Record the file of a called function."""
    file = Path(frame.f_code.co_filename)
    if event != "call" or frame.f_code.co_name == "<module>" or not file.is_relative_to(ROOT):
        return
    if file.relative_to(ROOT).parts[0] in PRODUCT:
        entered.add(str(file.relative_to(ROOT)))


def note_workers(*call):
    """Record the calls of Dramatiq's worker threads, but not of the threads for heartbeats and supervision."""
    if type(threading.current_thread()).__module__ == "dramatiq.worker":
        note(*call)


def wait_until_idle(queue):
    """Wait until the worker has emptied the queue; return the files entered since the last call."""
    assert wait_until(lambda: sum(count_messages(broker.client, queue).values()) == 0, LIMIT)
    found = sorted(entered)
    entered.clear()
    return found


def main():
    """Run a tick and a child, and print the entered files as JSON."""
    load_batches()
    batch, child = BATCHES[BATCH], CHILDREN[CHILD]
    broker.emit_after("process_boot")
    threading.setprofile(note_workers)
    with database.connection_context():
        loop = BatchLoop(batch, load_settings(), broken=threading.Event(), stop_requests=SimpleQueue())
        sys.setprofile(note)
        loop.reconcile_once()
        sys.setprofile(None)
    Worker(broker, queues={batch.queue, child.queue}, worker_threads=1).start()
    tick = wait_until_idle(batch.queue)
    with database.connection_context():
        send_children(broker, None, child, [(f"{CHILD}:1", ())], limit_depth=None)
    json.dump({"tick": tick, "child": wait_until_idle(child.queue)}, sys.stdout)
    sys.stdout.flush()
    # A graceful shutdown would enter further files.
    os._exit(0)


if __name__ == "__main__":
    main()
