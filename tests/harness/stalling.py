"""Threads that simulate processes, stall before any query to a server, and continue much later or never."""

import threading

from forgekeeper.platform import database as db
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import release_connection


class ProcessKilled(BaseException):
    """The simulated process has been killed."""


class StallingProcess(threading.Thread):
    """Executes *work*, and stalls before a query to a server after the first *queries* queries.

    `resume` lets it continue, `die` kills it.
    """

    def __init__(self, work, queries):
        super().__init__(daemon=True)
        self.work = work
        self.ended = False
        self.error = None
        self._left = queries
        self._dies = False
        self._stalled = threading.Event()
        self._told = threading.Event()
        self.start()
        self._stalled.wait()

    def run(self):
        try:
            db.database.connect()
            self.work()
        except ProcessKilled:
            pass
        except Exception as error:  # noqa: BLE001, raised in the machine's thread
            self.error = error
        finally:
            release_connection()
            self.ended = True
            self._stalled.set()

    def stall_if_due(self):
        # Do not stall inside a transaction: others would wait for its row locks.  PostgreSQL handles races in there.
        if db.database.in_transaction():
            return
        if self._left == 0:
            self._stalled.set()
            self._told.wait()
            self._told.clear()
            if self._dies:
                raise ProcessKilled
        self._left -= 1

    def resume(self, queries):
        self._left = queries
        self._continue()

    def die(self):
        self._dies = True
        self._continue()

    def _continue(self):
        self._stalled.clear()
        self._told.set()
        self._stalled.wait()
        if self.error is not None:
            raise self.error


def stall_before_every_query(patch):
    def stalling(ask):
        def asked(*arguments, **options):
            process = threading.current_thread()
            if isinstance(process, StallingProcess):
                process.stall_if_due()
            return ask(*arguments, **options)

        return asked

    patch.setattr(db.database.obj, "_execute_cursor", stalling(db.database.obj._execute_cursor))
    patch.setattr(client, "execute_command", stalling(client.execute_command))
