"""Users and their forge, simulated: what they do beside the batches, straight to the servers, and written down.

Each thing belongs to one citizen, a thread, so what is done to it has an order.  Whatever a
citizen does not see the end of counts as *maybe* from then on.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress

import psycopg2
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.harness.git_samples import Bare
from workers.stale_direct_uploads import register

from .history import DAY, UPLOAD
from .service import LIMIT

REMEMBERED = 200
"""So many of the things that he has made a citizen comes back to."""
UNSEEN = (psycopg2.OperationalError, psycopg2.InterfaceError, redis.ConnectionError, redis.TimeoutError, OSError)
"""After these nobody knows whether it was done."""
COMMITS = 3_000
"""More than one ref is ever pushed, so that none comes back to a commit at which it was listed."""
PLANTED = "\x1b[31mplanted\r\x9b"
"""What no log line may repeat as it is."""
HISTORY = "commit refs/heads/line\ncommitter A <a@example.org> {} +0000\ndata 1\nx"


class NotDone(Exception):
    """It was refused, whatever the state of what it was for."""


class Place:
    """Where citizens find everything: the servers themselves, the store's folder wherever it is, repositories."""

    def __init__(self, world, database_url, make_redis):
        self.world = world
        self.database_url = database_url
        self.make_redis = make_redis
        # They know the folder itself: to them it is not away when its name is.
        self.store = os.open(world.root, os.O_DIRECTORY)

    def close(self):
        os.close(self.store)

    def connect(self):
        connection = psycopg2.connect(self.database_url, application_name="citizen", connect_timeout=int(LIMIT))
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
        self.place = place
        self.history = history
        self.dice = random.Random(f"{seed} {type(self).__name__}")
        self.broken = None
        self.made = 0
        self.known = []
        self._stopped = threading.Event()
        self._connection = None

    def stop(self):
        self._stopped.set()
        self.join()

    def run(self):
        try:
            with closing(self.place.make_redis(retry=Retry(NoBackoff(), 0))) as self.redis:
                self.begin()
                while not self._stopped.wait(self.dice.expovariate(1 / self.pause)):
                    try:
                        self.act()
                    except (*UNSEEN, psycopg2.Error, redis.RedisError):
                        self._disconnect()
        except BaseException as error:
            self.broken = error
            raise
        finally:
            self._disconnect()

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

    def change(self, sql, *values):
        """Change rows; say whether there were any."""
        return self.ask(sql, *values) > 0

    @contextmanager
    def transaction(self):
        self.ask("begin")
        try:
            yield
        except BaseException:
            # Whatever it was, the session ends here, and the transaction with it.
            self._disconnect()
            raise

    def attempt(self, subject, do, work, **args):
        """Do *work* and note it: its answer, or that nobody knows; return the outcome."""
        number = self.history.intend(subject, do, args, at=self.now())
        outcome, value = "maybe", None
        try:
            value = work()
            outcome = "ok" if do == "read" or value else "no"
        except (redis.ResponseError, NotDone):
            outcome = "failed"
        except UNSEEN:
            self._disconnect()
        finally:
            self.history.result(
                number, subject, do, outcome, at=self._now_or_none(), value=value if do == "read" else None
            )
        return outcome

    def remember(self, one):
        self.known.append(one)
        if len(self.known) > REMEMBERED:
            self.known.pop(self.dice.randrange(REMEMBERED // 2))

    def _now_or_none(self):
        # Without the database the machine's clock is as good: it is the same one.
        try:
            return self.now()
        except UNSEEN:
            self._disconnect()
            return None

    def _disconnect(self):
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
            self.attempt(f"status:{user}", "set", lambda: self.change(sql, user, _instant(clear)), clear=clear)
            return
        user = self.dice.choice(self.known)
        subject = f"status:{user}"
        do = self.dice.choice(["extend", "extend", "clear", "read"])
        if do == "extend":
            sql = "update user_statuses set clear_status_at = to_timestamp(%s) where user_id = %s"
            self.attempt(subject, do, lambda: self.change(sql, _instant(clear), user), clear=clear)
        elif do == "clear":
            self.attempt(subject, do, lambda: self.change("delete from user_statuses where user_id = %s", user))
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
            self.attempt(subject, do, lambda: self.change(sql, touched, number), touched=touched)
        elif do == "finish":
            sql = f"update {table} set status = 2 where id = %s and status in (0, 1)"
            self.attempt(subject, do, lambda: self.change(sql, number))
        else:
            sql = f"select status, extract(epoch from updated_at)::float8 from {table} where id = %s"
            self.attempt(subject, do, lambda: next(map(list, self.ask(sql, number)), None))

    def _touched(self, now):
        return now - self.dice.choice([60, DAY - 3, DAY - 6, DAY + 3600])

    def _begin(self, now):
        """Make an import of one or two entities, with trackers; each by itself, so that each has its outcome."""
        self.made += 1
        number, status, touched = self.made, self.dice.randint(0, 1), self._touched(now)
        sql = "insert into bulk_imports (id, user_id, status, updated_at) values (%s, 1, %s, to_timestamp(%s))"
        self.attempt(
            f"import:{number}",
            "create",
            lambda: self.change(sql, number, status, touched),
            status=status,
            touched=touched,
        )
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


class Artisan(Citizen):
    """Makes artifacts with their objects; locks, unlocks and keeps some until later."""

    first = 1
    step = 2
    """Uploads become artifacts, too: theirs have the even ids."""

    def act(self):
        now = int(self.now())
        if not self.known or self.dice.random() < 0.5:
            self._make(now)
            return
        number = self.dice.choice(self.known)
        subject = f"artifact:{number}"
        do = self.dice.choice(["lock", "unlock", "extend", "extend", "read"])
        if do == "read":
            sql = "select extract(epoch from expire_at)::float8, locked, file_type from ci_job_artifacts where id = %s"
            self.attempt(subject, do, lambda: next(map(list, self.ask(sql, number)), None))
        elif do == "extend":
            expires = self._expires(now)
            sql = "update ci_job_artifacts set expire_at = to_timestamp(%s) where id = %s"
            self.attempt(subject, do, lambda: self.change(sql, expires, number), expires=expires)
        else:
            locked = int(do == "lock")
            sql = "update ci_job_artifacts set locked = %s where id = %s"
            self.attempt(subject, do, lambda: self.change(sql, locked, number), locked=locked)

    def _expires(self, now):
        return self.dice.choice([now - 60, *(now + self.dice.randint(1, 5) for _ in range(3)), now + 3600, None])

    def _make(self, now):
        self.made += 1
        number = self.first + self.step * self.made
        path = f"d{number % 16}/{number}"
        self.place.put(path)
        row = {
            "expires": self._expires(now),
            "locked": self.dice.choice([0, 0, 0, 1]),
            "type": self.dice.choice([1, 1, 1, 3]),
        }

        def make():
            with self.transaction():
                insert_artifact(self, number, path, row)
                self.ask("commit")
            return True

        self.attempt(f"artifact:{number}", "create", make, path=path, **row)
        self.remember(number)


def insert_artifact(citizen, number, path, row):
    """Insert the row and add its bytes to its project's, inside the citizen's transaction."""
    citizen.ask(
        "insert into ci_job_artifacts (id, project_id, job_id, file_type, file_final_path, size, expire_at, locked)"
        " values (%s, %s, %s, %s, %s, %s, to_timestamp(%s), %s)",
        *(number, number % 3, number, row["type"], path, number % 100, row["expires"], row["locked"]),
    )
    citizen.ask(
        "insert into project_statistics values (%s, %s) on conflict (project_id)"
        " do update set build_artifacts_size = project_statistics.build_artifacts_size + excluded.build_artifacts_size",
        *(number % 3, number % 100),
    )


class Uploader(Citizen):
    """A producer as docs/uploads.md wants it: some of his uploads complete, some just as they go stale, some never.

    Three hours are too long: he sets the register's clock for an upload back, to a few seconds
    before it is stale.
    """

    def act(self):
        now = int(self.now())
        if self.dice.random() < 0.01:
            # What another program may have written.
            self.redis.zadd(register.PENDING, {f"artifacts:{PLANTED}{now}": now - UPLOAD - 60})
        due = [one for one in self.known if one[1] <= now]
        if due and self.dice.random() < 0.6:
            self.known.remove(due[0])
            self._complete(due[0][0], now)
        else:
            self._begin(now)

    def _begin(self, now):
        self.made += 1
        path = f"u{self.made % 16}/{self.made}"
        subject = f"upload:artifacts:{path}"
        # Not the check of rows that docs/uploads.md asks for as well: these paths are used once.
        if self.attempt(subject, "prepare", lambda: register.prepare(self.redis, "artifacts", path) is None) != "ok":
            return
        self.place.put(path)
        if self.dice.random() < 0.9:
            since = now - UPLOAD + self.dice.randint(-1, 5)
            args = {"xx": True, "ch": True}
            member = {f"artifacts:{path}": since}
            self.attempt(subject, "age", lambda: self.redis.zadd(register.PENDING, member, **args), since=since)
        if self.dice.random() < 0.6:
            self.known.append((self.made, now + self.dice.randint(0, 6)))

    def _complete(self, upload, now):
        path, number = f"u{upload % 16}/{upload}", 2 * upload
        row = {"expires": self.dice.choice([None, now + 3600, now + 5]), "locked": 0, "type": 1}
        with self.transaction():
            insert_artifact(self, number, path, row)
            session = self._connection
            answer = self._ask_to_complete(f"upload:artifacts:{path}", path)
            if answer == "ok":
                self.attempt(f"artifact:{number}", "create", lambda: self._commit(session), path=path, **row)
            else:
                # No answer is False, and False is final.
                self.ask("rollback")

    def _commit(self, session):
        if self._connection is not session:
            # While we waited for an answer the session ended; on another one a commit commits nothing, and says nothing.
            raise psycopg2.OperationalError("the session has ended, and the transaction with it")
        return self.ask("commit") is not None

    def _ask_to_complete(self, subject, path):
        return self.attempt(subject, "complete", lambda: self._complete_under_lock(path))

    def _complete_under_lock(self, path):
        self.ask("select pg_advisory_xact_lock(hashtextextended(%s, 1801807216))", f"artifacts:{path}")
        if self.ask("select 1 from settled_uploads where location = 'artifacts' and path = %s", path):
            return False
        return register.complete(self.redis, "artifacts", path)


class Developer(Citizen):
    """Pushes refs, lists some for deletion, and makes some anew meanwhile, each time at another commit."""

    projects = 4
    pool = 12
    """Refs of each project that come back again and again; all others are made once."""

    def begin(self):
        self.bares = {}
        self.later = []
        self.busy = set()
        self.values = {}
        self.turns = Counter()
        self.requests = 0
        for number in range(1, self.projects + 1):
            bare = Bare(self.place.world.repositories, f"{number}.git")
            bare.git("config", "core.packedRefsTimeout", "5000")
            bare.git("fast-import", "--quiet", given=_commits().encode())
            self.bares[number] = (bare, bare.git("rev-list", "--reverse", "line").split())
            self.ask("insert into projects values (%s, %s) on conflict do nothing", number, bare.disk_path)

    def act(self):
        due = [one for one in self.later if one[0] <= time.monotonic()]
        if due:
            self.later.remove(due[0])
            due[0][1]()
            return
        project = self.dice.randrange(1, self.projects + 1)
        do = self.dice.choice([self._keep, self._make, self._make, self._odd, *4 * [self._come_back]])
        do(project)

    def _keep(self, project):
        self.made += 1
        self._push(project, f"refs/heads/kept/{self.made}")

    def _make(self, project):
        """Push what is listed without an oid, and so never made anew."""
        self.made += 1
        ref = f"refs/merge-requests/{self.made}/head"
        self._push(project, ref)
        if self.dice.random() < 0.9:
            self._list(project, ref, None)

    def _come_back(self, project):
        """Push a ref, list it where it is, make it anew before or after it has gone, and look what has become of it."""
        ref = f"refs/heads/topic/{self.dice.randrange(self.pool)}"
        if (project, ref) in self.busy:
            self._look(project, ref)
            return
        self.busy.add((project, ref))
        self._push(project, ref)
        soon = time.monotonic() + self.dice.uniform(0, 3)
        self.later.append((soon, lambda: self._list(project, ref, self.values[project, ref])))
        if self.dice.random() < 0.7:
            soon += self.dice.uniform(0, 2)
            self.later.append((soon, lambda: self._push(project, ref)))
        self.later.append((soon + self.dice.uniform(2, 5), lambda: self._look_at_last(project, ref)))

    def _look(self, project, ref):
        self.attempt(f"ref:{project}:{ref}", "read", lambda: self._value(project, ref))

    def _look_at_last(self, project, ref):
        self._look(project, ref)
        self.busy.discard((project, ref))

    def _push(self, project, ref):
        bare, commits = self.bares[project]
        self.turns[project, ref] += 1
        self.values[project, ref] = oid = commits[self.turns[project, ref]]
        command = ["git", f"--git-dir={bare.path}", "update-ref", ref, oid]
        self.attempt(f"ref:{project}:{ref}", "push", lambda: _done(command), oid=oid)

    def _value(self, project, ref):
        command = ["git", f"--git-dir={self.bares[project][0].path}", "rev-parse", "--verify", "--quiet", ref]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode not in (0, 1):
            raise OSError(answer.stderr)
        return answer.stdout.strip() or None

    def _list(self, project, ref, expected):
        self.requests += 1
        number = self.requests
        sql = (
            "insert into batched_git_ref_updates_deletions (id, project_id, ref, expected_oid) values (%s, %s, %s, %s)"
        )
        self.attempt(
            *(f"ref:{project}:{ref}", "list", lambda: self.change(sql, number, project, ref, expected)),
            id=number,
            expected=expected,
        )

    def _odd(self, project):
        """List what must be refused, and leave an old record to be pruned."""
        self.requests += 1
        self.ask(
            "insert into batched_git_ref_updates_deletions (id, project_id, ref) values (%s, %s, %s)",
            *(self.requests, project, f"refs/heads/{PLANTED}"),
        )
        self.requests += 1
        self.ask(
            "insert into batched_git_ref_updates_deletions (id, project_id, ref, status, processed_at)"
            " values (%s, %s, 'refs/old', 2, now() - interval '2 days')",
            *(self.requests, project),
        )


def _commits():
    return "\n".join(HISTORY.format(1_600_000_000 + second) for second in range(COMMITS)) + "\n"


def _done(command):
    """Run git; what it refuses is not done."""
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise NotDone(answer.stderr)
    return True


CITIZENS = (StatusUser, Importer, Artisan, Uploader, Developer)
