"""Processes as threads that stall before any of their questions to a server, go on much later, or never."""

import threading

from forgekeeper.platform import database as db
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import release_connection


class ProcessKilled(BaseException):
    """The process is no more."""


class StallingProcess(threading.Thread):
    """Does its deed, but stalls before its n-th question to a server until it is told what then."""

    def __init__(self, deed, questions):
        super().__init__(daemon=True)
        self.deed = deed
        self.ended = False
        self.error = None
        self._left = questions
        self._dies = False
        self._stalled = threading.Event()
        self._told = threading.Event()
        self.start()
        self._stalled.wait()

    def run(self):
        try:
            db.database.connect()
            self.deed()
        except ProcessKilled:
            pass
        except Exception as error:  # noqa: BLE001, raised in the machine's thread
            self.error = error
        finally:
            release_connection()
            self.ended = True
            self._stalled.set()

    def question(self):
        # While it holds row locks the others would wait for it in vain: races inside the
        # claiming transaction are PostgreSQL's business.
        if db.database.in_transaction():
            return
        if self._left == 0:
            self._stalled.set()
            self._told.wait()
            self._told.clear()
            if self._dies:
                raise ProcessKilled
        self._left -= 1

    def go_on(self, questions):
        self._left = questions
        self._resume()

    def die(self):
        self._dies = True
        self._resume()

    def _resume(self):
        self._stalled.clear()
        self._told.set()
        self._stalled.wait()
        if self.error is not None:
            raise self.error


def stall_at_every_question(patch):
    def stalling(ask):
        def asked(*arguments, **options):
            process = threading.current_thread()
            if isinstance(process, StallingProcess):
                process.question()
            return ask(*arguments, **options)

        return asked

    patch.setattr(db.database.obj, "_execute_cursor", stalling(db.database.obj._execute_cursor))
    patch.setattr(client, "execute_command", stalling(client.execute_command))
