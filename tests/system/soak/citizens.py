"""Users and their forge, simulated: what they do beside the batches, straight to the servers, and written down.

Each thing belongs to one citizen, a thread, so what is done to it has an order.  Whatever a
citizen does not see the end of counts as *maybe* from then on.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import closing, contextmanager, suppress

import psycopg2
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.system.service import LIMIT

from .models import DAY

REMEMBERED = 200
"""So many of the things that he has made a citizen comes back to."""
UNSEEN = (psycopg2.OperationalError, psycopg2.InterfaceError, redis.ConnectionError, redis.TimeoutError, OSError)
"""After these nobody knows whether it was done."""
PLANTED = "\x1b[31mplanted\r\x9b"
"""What no log line may repeat as it is."""


class NotDone(Exception):
    """It was refused, whatever the state of what it was for."""


class Place:
    """Where citizens find everything: the servers themselves, the store's folder wherever it is, repositories."""

    def __init__(self, rig):
        self.rig, self.world = rig, rig.world
        # They know the folder itself: to them it is not away when its name is.
        self.store = os.open(self.world.root, os.O_DIRECTORY)

    def close(self):
        os.close(self.store)

    def connect(self):
        url = self.rig.servers.database_url
        connection = psycopg2.connect(url, application_name="citizen", connect_timeout=int(LIMIT))
        connection.autocommit = True
        return connection

    def put(self, path):
        """Write an object; a folder that has become empty may be cleared away at any moment."""
        folder = path.partition("/")[0]
        for _ in range(20):
            with suppress(FileExistsError):
                os.mkdir(folder, dir_fd=self.store)
            with suppress(FileNotFoundError):
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=self.store))
                return
        raise OSError("the folder is cleared away each time")

    def has(self, path):
        try:
            os.stat(path, dir_fd=self.store)
        except FileNotFoundError:
            return False
        return True


class Citizen(threading.Thread):
    """Acts every now and then until stopped, and notes each act."""

    pause = 0.15

    def __init__(self, place, history, seed):
        super().__init__(name=type(self).__name__, daemon=True)
        self.place, self.history = place, history
        self.dice = random.Random(f"{seed} {type(self).__name__}")
        self.made, self.known = 0, []
        self._stopped, self.broken = threading.Event(), None
        self._connection = None

    def stop(self):
        self._stopped.set()
        self.join()

    def run(self):
        try:
            with closing(self.connect_redis(retry=Retry(NoBackoff(), 0))) as self.redis:
                self.begin()
                while not self._stopped.wait(self.dice.expovariate(1 / self.pause)):
                    try:
                        self.act()
                    except (*UNSEEN, psycopg2.Error, redis.RedisError):
                        self.disconnect()
        except BaseException as error:
            self.broken = error
            raise
        finally:
            self.disconnect()

    def connect_redis(self, **options):
        return self.place.rig.servers.redis(**options)

    def begin(self):
        """Make what is needed once."""

    def now(self):
        return self.ask("select extract(epoch from clock_timestamp())::float8")[0][0]

    def ask(self, sql, *values):
        if self._connection is None:
            self._connection = self.place.connect()
        with self._connection.cursor() as cursor:
            cursor.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else cursor.rowcount

    @contextmanager
    def transaction(self):
        self.ask("begin")
        try:
            yield
        except BaseException:
            # Whatever it was, the session ends here, and the transaction with it.
            self.disconnect()
            raise

    def attempt(self, subject, do, work, **args):
        """Do *work* and note it: its answer, or that nobody knows; return the outcome."""
        operation = self.history.begin(subject, do, args, at=self.now())
        outcome, value = "maybe", None
        try:
            value = work()
            outcome = "ok" if do == "read" or value else "no"
        except (redis.ResponseError, NotDone):
            outcome = "failed"
        except UNSEEN:
            self.disconnect()
        finally:
            operation.end(outcome, at=self._now_or_none(), value=value if do == "read" else None)
        return outcome

    def alter(self, subject, do, sql, *values, **args):
        """Attempt to change rows."""
        self.attempt(subject, do, lambda: self.ask(sql, *values) > 0, **args)

    def look(self, subject, sql, *values):
        """Attempt to read a row."""
        self.attempt(subject, "read", lambda: next(map(list, self.ask(sql, *values)), None))

    def remember(self, one):
        self.known.append(one)
        if len(self.known) > REMEMBERED:
            self.known.pop(self.dice.randrange(REMEMBERED // 2))

    def _now_or_none(self):
        # Without the database the machine's clock is as good: it is the same one.
        try:
            return self.now()
        except UNSEEN:
            self.disconnect()
            return None

    def disconnect(self):
        if self._connection is not None:
            with suppress(psycopg2.Error):
                self._connection.close()
            self._connection = None


class StatusUser(Citizen):
    """Sets statuses that clear themselves soon, late or never; extends, clears and looks at some."""

    def act(self):
        now = int(self.now())
        clear = self.dice.choice([now + self.dice.randint(1, 6)] * 4 + [now + 3600, "never"])
        if not self.known or self.dice.random() < 0.5:
            self.made += 1
            user = self.made
            self.remember(user)
            sql = "insert into user_statuses (user_id, message, clear_status_at) values (%s, 'away', to_timestamp(%s))"
            self.alter(f"status:{user}", "set", sql, user, _instant(clear), clear=clear)
            return
        user = self.dice.choice(self.known)
        subject = f"status:{user}"
        do = self.dice.choice(["extend", "extend", "clear", "read"])
        if do == "extend":
            sql = "update user_statuses set clear_status_at = to_timestamp(%s) where user_id = %s"
            self.alter(subject, do, sql, _instant(clear), user, clear=clear)
        elif do == "clear":
            self.alter(subject, do, "delete from user_statuses where user_id = %s", user)
        else:
            self.attempt(subject, do, lambda: self._look(user))

    def _look(self, user):
        sql = "select extract(epoch from clear_status_at)::float8 from user_statuses where user_id = %s"
        return next(("never" if clear is None else clear for (clear,) in self.ask(sql, user)), None)


def _instant(clear):
    return None if clear == "never" else clear


class Importer(Citizen):
    """Begins imports, some of them long ago; resumes some of what has stalled, finishes some."""

    tables = {"import": "bulk_imports", "entity": "bulk_import_entities"}  # noqa: RUF012, never changed

    def act(self):
        now = int(self.now())
        if not self.known or self.dice.random() < 0.5:
            self._begin(now)
            return
        subject = self.dice.choice(self.known)
        kind, _, number = subject.partition(":")
        table = self.tables[kind]
        do = self.dice.choice(["resume", "resume", "finish", "read"])
        if do == "resume":
            touched = self._touched(now)
            sql = f"update {table} set status = 1, updated_at = to_timestamp(%s) where id = %s and status in (0, 1)"
            self.alter(subject, do, sql, touched, number, touched=touched)
        elif do == "finish":
            self.alter(subject, do, f"update {table} set status = 2 where id = %s and status in (0, 1)", number)
        else:
            sql = f"select status, extract(epoch from updated_at)::float8 from {table} where id = %s"
            self.look(subject, sql, number)

    def _touched(self, now):
        return now - self.dice.choice([60, DAY - 3, DAY - 6, DAY + 3600])

    def _begin(self, now):
        """Make an import of one or two entities, with trackers; each by itself, so that each has its outcome."""
        self.made += 1
        number, status, touched = self.made, self.dice.randint(0, 1), self._touched(now)
        sql = "insert into bulk_imports (id, user_id, status, updated_at) values (%s, 1, %s, to_timestamp(%s))"
        self.alter(f"import:{number}", "create", sql, number, status, touched, status=status, touched=touched)
        self.remember(f"import:{number}")
        for entity in range(2 * number, 2 * number + self.dice.randint(1, 2)):
            self._entity(number, entity, self._touched(now))

    def _entity(self, number, entity, touched):
        def make():
            with self.transaction():
                self.ask(
                    "insert into bulk_import_entities (id, bulk_import_id, source_full_path, destination_name,"
                    " destination_namespace, status, updated_at) values (%s, %s, %s, 'a', 'b', 1, to_timestamp(%s))",
                    *(entity, number, PLANTED if self.dice.random() < 0.1 else "group/project", touched),
                )
                self.ask(
                    "insert into bulk_import_trackers (bulk_import_entity_id, relation, status)"
                    " select %s, 'relation', unnest(array[0, 1, 3, 2, -1])",
                    entity,
                )
                self.ask("commit")
            return True

        self.attempt(f"entity:{entity}", "create", make, status=1, touched=touched)
        self.remember(f"entity:{entity}")
