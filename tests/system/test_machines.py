"""Three machines share one PostgreSQL and one Redis: one is cut off, one loses its power, all are upgraded in turn."""

import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from datetime import timedelta
from threading import Event, Thread

import psycopg2
import pytest
import redis

from demo import sample_data as sample
from demo.tables import make_tables
from forgekeeper.api.batches import BATCHES, FeatureFlag
from forgekeeper.platform.connections import client
from forgekeeper.platform.database import database
from forgekeeper.platform.database.session_settings import Timeouts
from forgekeeper.platform.database.sessions import open_pool
from tests.harness.installation import INSTALLATION
from tests.harness.programs import ROOT
from tests.harness.waiting import wait_until

from .machines import Machine, Network, SharedServers, unpack_version, why_without_namespaces
from .worlds import DEAD_AFTER, World

LIMIT = 90.0
MACHINES = 3
LAST_RELEASE = "109ed00e"
"""The commit of release 0.3.0."""
SETTINGS = {f"cron_{batch}": "*/2 * * * * *" for batch in BATCHES}
SETTINGS |= {f"metrics_port_{process}": "0" for process in ("worker", "scheduler")}
SETTINGS |= {"breaker_share": "1", "database_network_timeout": "5", "redis_timeout": "3"}
PROJECTS, REFS, ARTIFACTS = 12, 40, 600
KEPT_REF = "refs/heads/kept"
INSERT_STATUSES = (
    "insert into user_statuses (user_id, clear_status_at) select n, now() from generate_series(%s, %s) as n"
)
EXTEND_STATUS = "update user_statuses set clear_status_at = now() + interval '1 day' where user_id = %s returning true"
INSERT_ARTIFACTS = f"""
    insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path, size, expire_at, locked)
        select mod(n, 7), n, 1, 'artifact/' || n, 1, now() - interval '1 day', 0 from generate_series(1, {ARTIFACTS}) as n;
    insert into project_statistics select n, {ARTIFACTS} from generate_series(0, 6) as n
"""
LEFT = {
    "statuses": "user_statuses where clear_status_at <= now()",
    "artifacts": "ci_job_artifacts",
    "objects": "deleted_objects",
    "refs": "batched_git_ref_updates_deletions where status = 1",
}
"""The due work of each batch, by name."""
DELETED_TWICE = """
    select batch, one from audit_deletions, unnest(ids) as one
    where phase = 'done' and batch in ('user_status_cleanup', 'expired_job_artifacts')
    group by batch, one having count(*) > 1
"""
TICKS_TWICE = "select batch, tick from job_runs where tick is not null group by batch, tick having count(*) > 1"
SUCCEEDED_SINCE = (
    "select count(distinct batch) from job_runs where state = 'succeeded' and started_at > to_timestamp(%s)"
)


@pytest.fixture
def shared(tmp_path):
    """The network, the servers, and what the batches work on."""
    if (reason := why_without_namespaces()) is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with ExitStack() as stack:
        network = Network(stack)
        servers = SharedServers(stack, network)
        open_pool(servers.local_url, Timeouts(*[timedelta(minutes=1)] * 5), name="tests", size=2)
        client.connection_pool = redis.ConnectionPool.from_url(servers.local_redis_url)
        stack.callback(client.connection_pool.disconnect)
        yield stack, network, servers, World.make(None, tmp_path)


def migrate(servers, version=ROOT):
    """Execute `forgekeeper migrate` of the version in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(version)}
    environment |= {"FORGEKEEPER_DATABASE_URL": servers.local_url, "FORGEKEEPER_REDIS_URL": servers.local_redis_url}
    subprocess.run([sys.executable, "-m", "forgekeeper.cli", "migrate"], env=environment, check=True)


class Load(Thread):
    """Users who insert expired statuses, extend some, and request deletions of refs, until they are stopped."""

    def __init__(self, url, refs):
        super().__init__(daemon=True)
        self._url, self._stopped, self._dice = url, Event(), random.Random(1)
        self._refs = refs
        self.extended, self.last_user = set(), 0
        self.error = None

    def run(self):
        try:
            with closing(psycopg2.connect(self._url)) as connection, connection.cursor() as cursor:
                connection.autocommit = True
                with database.connection_context():
                    while not self._stopped.wait(0.05):
                        self._act(cursor)
        except Exception as error:  # noqa: BLE001, the test raises it
            self.error = error

    def _act(self, cursor):
        first, self.last_user = self.last_user + 1, self.last_user + 20
        cursor.execute(INSERT_STATUSES, (first, self.last_user))
        for user in self._dice.sample(range(first, self.last_user + 1), 3):
            cursor.execute(EXTEND_STATUS, (user,))
            self.extended |= {user} if cursor.fetchone() else set()
        if project := self._dice.choice([project for project in self._refs if self._refs[project]] or [None]):
            some = [self._refs[project].pop() for _ in self._refs[project][:2]]
            sample.add_ref_deletions([project], some)

    def stop(self):
        self._stopped.set()
        self.join()
        if self.error is not None:
            raise self.error


def fill(world):
    """Add artifacts with objects, and projects with refs; return the refs to delete and the repositories by project."""
    make_tables(database.obj)
    database.execute_sql("update installation set id = %s", (INSTALLATION,))
    client.flushdb()
    database.execute_sql("delete from holds")
    FeatureFlag.turn("bulk_delete_job_artifacts", on=True)
    database.execute_sql(INSERT_ARTIFACTS)
    world.put(*(f"artifact/{number}" for number in range(1, ARTIFACTS + 1)), "artifact/kept")
    refs = [f"refs/merge-requests/{number}/head" for number in range(REFS)]
    projects = sample.add_projects(PROJECTS)
    first, *others = projects.values()
    sample.create_repository(world.repositories, first, [*refs, KEPT_REF])
    for path in others:
        shutil.copytree(world.repositories / first, world.repositories / path)
    return {project: list(refs) for project in projects}, projects


def count(sql):
    return database.execute_sql(f"select count(*) from {sql}").fetchone()[0]


def succeeded_since(instant):
    """Return whether each batch has succeeded in a run that began after that instant."""
    return database.execute_sql(SUCCEEDED_SINCE, (instant,)).fetchone()[0] == len(BATCHES)


def cut_one_off(machines, _servers):
    machines[0].cut_off()
    # By then the machine counts as dead, and others have taken over its work.
    taken_over = time.time() + 3 * float(DEAD_AFTER)
    assert wait_until(lambda: succeeded_since(taken_over), LIMIT), "the other machines did not continue"
    machines[0].reconnect()


def kill_one(machines, _servers):
    machines[0].kill()
    began = time.time()
    assert wait_until(lambda: succeeded_since(began), LIMIT), "the other machines did not continue"
    machines[0].start()


def upgrade_all(machines, servers):
    migrate(servers)
    for machine in machines:
        machine.end()
        machine.start()
        began = time.time()
        assert wait_until(lambda began=began: succeeded_since(began), LIMIT), "no run succeeded during the upgrade"


@pytest.mark.parametrize("trouble", [cut_one_off, kill_one, upgrade_all])
def test_three_machines_delete_each_record_once_and_no_other(shared, tmp_path, say, trouble):
    stack, network, servers, world = shared
    version = ROOT
    if trouble is upgrade_all:
        version = unpack_version(LAST_RELEASE, tmp_path / "last_release")
        if version is None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)("the history lacks the last release")
    migrate(servers, version)
    with database.connection_context():
        refs, projects = fill(world)
        places = {"database_url": servers.database_url, "redis_url": servers.redis_url}
        settings = world.environment | SETTINGS | places
        machines = [Machine(network, number, tmp_path, settings) for number in range(MACHINES)]
        for machine in machines:
            stack.callback(machine.kill)
            machine.start(version)
        load = Load(servers.local_url, refs)
        load.start()
        began = time.time()
        assert wait_until(lambda: succeeded_since(began), LIMIT), "nothing ever ran"

        trouble(machines, servers)
        load.stop()
        ended = time.monotonic()
        drained = wait_until(lambda: not any(count(rows) for rows in LEFT.values()), LIMIT)

        say(
            f"{trouble.__name__}: {load.last_user} statuses, {len(load.extended)} of them extended; drained in"
            f" {time.monotonic() - ended:.1f} s"
        )
        assert drained, {name: count(rows) for name, rows in LEFT.items()}
        assert count("user_statuses") == len(load.extended)
        assert database.execute_sql(DELETED_TWICE).fetchall() == []
        assert database.execute_sql(TICKS_TWICE).fetchall() == []
        assert world.files() == {"artifact/kept"}
        for project, path in projects.items():
            packed, loose = world.refs(path)
            left = {ref for ref in packed.split() if ref.startswith("refs/merge-requests/")}
            assert (left, loose) == ({f"{ref}" for ref in refs[project]}, set())
            assert KEPT_REF in packed
