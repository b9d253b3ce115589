"""Users whose things lie outside the database too: artifacts, uploads and refs."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from functools import partial

import psycopg2

from tests.harness.git_samples import BareRepository
from tests.harness.stale_uploads import uploads as register

from .citizens import PLANTED, Citizen, Importer, NotDone, StatusUser
from .models import UPLOAD

COMMITS = 3_000
"""More than one ref is ever pushed, so that none comes back to a commit at which it was listed and is pending."""
LOOK_SECONDS = 0.3
"""Seconds between two looks at the deletions whose end a developer waits for."""
LISTED = "batched_git_ref_updates_deletions"
HISTORY = "commit refs/heads/line\ncommitter A <a@example.org> {} +0000\ndata 1\nx"


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
            self.look(subject, sql, number)
        elif do == "extend":
            expires = self._expires(now)
            sql = "update ci_job_artifacts set expire_at = to_timestamp(%s) where id = %s"
            self.alter(subject, do, sql, expires, number, expires=expires)
        else:
            locked = int(do == "lock")
            sql = "update ci_job_artifacts set locked = %s where id = %s"
            self.alter(subject, do, sql, locked, number, locked=locked)

    def _expires(self, now):
        return self.dice.choice([now - 60, *(now + self.dice.randint(1, 5) for _ in range(3)), now + 3600, None])

    def _make(self, now):
        self.made += 1
        number = self.first + self.step * self.made
        path = f"d{number % 16}/{number}"
        self.place.put(path)
        locked, kind = self.dice.choice([0, 0, 0, 1]), self.dice.choice([1, 1, 1, 3])
        row = {"expires": self._expires(now), "locked": locked, "type": kind}

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

    def connect_redis(self, **options):
        """Connect as the forge does to the register of uploads."""
        return super().connect_redis(username="forgekeeper-uploads", driver_info=None, **options)

    def act(self):
        now = int(self.now())
        if self.dice.random() < 0.01:
            # What another program may have written.
            self.redis.zadd(register.keys.pending, {f"artifacts:{PLANTED}{now}": now - UPLOAD - 60})
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
            member = {f"artifacts:{path}": since}
            age = partial(self.redis.zadd, register.keys.pending, member, xx=True, ch=True)
            self.attempt(subject, "age", age, since=since)
        if self.dice.random() < 0.6:
            self.known.append((self.made, now + self.dice.randint(0, 6)))

    def _complete(self, upload, now):
        path, number = f"u{upload % 16}/{upload}", 2 * upload
        row = {"expires": self.dice.choice([None, now + 3600, now + 5]), "locked": 0, "type": 1}
        with self.transaction():
            insert_artifact(self, number, path, row)
            session = self._connection
            answer = self.attempt(f"upload:artifacts:{path}", "complete", lambda: self._complete_under_lock(path))
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
        self.bares, self.values = {}, {}
        self.later, self.busy = [], set()
        self.awaited, self.looked_at = {}, 0.0
        self.turns, self.requests = Counter(), 0
        for number in range(1, self.projects + 1):
            bare = BareRepository(self.place.world.repositories, f"{number}.git")
            bare.git("config", "core.packedRefsTimeout", "5000")
            bare.git("fast-import", "--quiet", given=_commits().encode())
            self.bares[number] = (bare, bare.git("rev-list", "--reverse", "line").split())
            self.ask("insert into projects values (%s, %s) on conflict do nothing", number, bare.disk_path)

    def act(self):
        if self.awaited and time.monotonic() > self.looked_at + LOOK_SECONDS:
            self._push_what_is_closed()
        due = [one for one in self.later if one[0] <= time.monotonic()]
        if due:
            self.later.remove(due[0])
            due[0][1]()
            return
        project = self.dice.randrange(1, self.projects + 1)
        do = self.dice.choice([self._keep, self._make, self._odd, *2 * [self._restore], *3 * [self._come_back]])
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

    def _restore(self, project):
        """Push a ref, list it, and push it again, at the same value or another, as soon as its deletion is closed."""
        self.made += 1
        ref = f"refs/heads/restored/{self.made}"
        self._push(project, ref)
        self._list(project, ref, self.dice.choice([None, self.values[project, ref]]))
        self.awaited[self.requests] = (project, ref)

    def _push_what_is_closed(self):
        self.looked_at = time.monotonic()
        for (number,) in self.ask(f"select id from {LISTED} where id = any(%s) and status <> 1", list(self.awaited)):
            project, ref = self.awaited.pop(number)
            self.attempt(f"ref:{project}:{ref}", "close", lambda: True, id=number)
            self._push(project, ref, again=self.dice.random() < 0.7)

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

    def _push(self, project, ref, *, again=False):
        bare, commits = self.bares[project]
        self.turns[project, ref] += not again
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
        values = (self.requests, project, ref, expected)
        sql = f"insert into {LISTED} (id, project_id, ref, expected_oid) values (%s, %s, %s, %s)"
        self.alter(f"ref:{project}:{ref}", "list", sql, *values, id=self.requests, expected=expected)

    def _odd(self, project):
        """List what must be refused, and leave an old record to be pruned."""
        self.requests += 2
        sql = f"insert into {LISTED} (id, project_id, ref) values (%s, %s, %s)"
        self.ask(sql, self.requests - 1, project, f"refs/heads/{PLANTED}")
        old = "(id, project_id, ref, status, processed_at) values (%s, %s, 'refs/old', 2, now() - interval '2 days')"
        self.ask(f"insert into {LISTED} {old}", self.requests, project)


def _commits():
    return "\n".join(HISTORY.format(1_600_000_000 + second) for second in range(COMMITS)) + "\n"


def _done(command):
    """Run git; what it refuses is not done."""
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise NotDone(answer.stderr)
    return True


CITIZENS = (StatusUser, Importer, Artisan, Uploader, Developer)
