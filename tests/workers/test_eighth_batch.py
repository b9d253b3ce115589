"""The eighth batch: one file in a folder of its own, named by a setting; nothing else is touched."""

import json
import os
import re
import shutil
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import psycopg2
import pytest
import redis
import yaml
from psycopg2.extensions import make_dsn

from forgekeeper.platform.settings import PREFIX
from tests.harness import forks
from tests.harness.ports import free_ports
from tests.harness.rules import RULES_FILE
from tests.harness.thorough import whole_only
from tests.harness.waiting import wait_until
from tests.metrics.pages import ran

ROOT = Path(__file__).parents[2]
NAME = "stale_pipelines"
EXAMPLE = ROOT / "examples" / NAME / f"{NAME}.py"
OLD, YOUNG = 250, 3
PIPELINES = f"""
    create table pipelines (id bigint generated always as identity primary key, updated_at timestamptz not null);
    insert into pipelines (updated_at)
    select now() - case when n <= {OLD} then interval '2 years' else interval '1 day' end
    from generate_series(1, {OLD + YOUNG}) as n
"""
ADD = "insert into pipelines (updated_at) select now() - interval '2 years' from generate_series(1, {}) returning id"
LIMIT = 60


@pytest.fixture(scope="module")
def world(urls, tmp_path_factory):
    """An installation with the eighth batch, after its first tick: a scheduler, a worker and an exporter."""
    folder = tmp_path_factory.mktemp("eighth")
    shutil.copy(EXAMPLE, folder)
    ports = dict(zip(("worker", "scheduler", "exporter"), free_ports(3), strict=True))
    with ExitStack() as stack:
        rows = stack.enter_context(database(urls))
        stack.callback(emptied(urls))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)} | {
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
            PREFIX + "BATCHES": f"workers,{NAME}",
            PREFIX + "DATABASE_URL": make_dsn(urls.database, dbname="eighth"),
            PREFIX + "REDIS_URL": urls.redis,
            PREFIX + f"CRON_{NAME.upper()}": "* * * * * *",
            PREFIX + f"PACE_{NAME.upper()}": "1000",
            **{f"{PREFIX}METRICS_PORT_{process.upper()}": str(port) for process, port in ports.items()},
        }
        made = SimpleNamespace(folder=folder, rows=rows, environment=environment, ports=ports)
        for command in (["migrate"], ["seed", "--scale", "0"]):
            assert run(made, *command).returncode == 0
        rows(PIPELINES)
        assert run(made, "release", "--all", "--reason", "I looked").returncode == 0
        log = stack.enter_context((folder / "log").open("wb"))
        started = [
            forks.start(["-m", "forgekeeper.cli", *process.split()], cwd=folder, env=environment, stderr=log)
            for process in ("scheduler", "exporter", "worker --processes 1 --threads 2")
        ]
        for act in ("wait", "terminate"):
            for process in started:
                stack.callback(getattr(process, act))
        done = wait_until(lambda: rows("select count(*) from pipelines") == YOUNG and ended(made), LIMIT)
        assert done, (folder / "log").read_text()
        yield made


@contextmanager
def database(urls):
    """Make a database of its own; return what asks it for one value."""
    with closing(psycopg2.connect(urls.database)) as server:
        server.autocommit = True
        server.cursor().execute("drop database if exists eighth with (force)")
        server.cursor().execute("create database eighth template template0")
    connection = psycopg2.connect(make_dsn(urls.database, dbname="eighth"))
    connection.autocommit = True
    cursor = connection.cursor()

    def ask(statement):
        cursor.execute(statement)
        return cursor.fetchone()[0] if cursor.description else None

    yield ask
    connection.close()


def emptied(urls):
    client = redis.Redis.from_url(urls.redis)
    client.flushdb()
    return client.flushdb


def ended(world):
    return world.rows(f"select count(*) from job_runs where batch = '{NAME}' and state = 'succeeded'")


def run(world, *arguments, **settings):
    environment = world.environment | {PREFIX + name: value for name, value in settings.items()}
    return forks.run(["-m", "forgekeeper.cli", *arguments], cwd=world.folder, env=environment)


def told(world, *arguments):
    """Return the JSON that a command answers with."""
    answer = run(world, *arguments, "--json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def page(world, process):
    with urlopen(f"http://127.0.0.1:{world.ports[process]}/metrics", timeout=LIMIT) as answer:
        return answer.read().decode()


def test_its_ticks_are_claimed_and_what_is_stale_is_deleted(world):
    # One a second: on a busy machine many have come since.
    ticks = told(world, "ticks", NAME, "--limit", "1000")["ticks"]

    assert world.rows("select count(*) from pipelines") == YOUNG
    assert any(tick["state"] == "succeeded" and tick["result"]["deleted"] == OLD for tick in ticks)


def test_its_preview_and_status_show_what_is_due_its_schedule_and_its_last_run(world):
    shown, status = told(world, "run", NAME, "--dry-run"), told(world, "status")["batches"][NAME]

    assert [(part["record"], part["records"]) for part in shown["parts"]] == [("pipeline", 0)]
    assert (status["schedule"], status["last"]["state"], status["backlog"]) == ("* * * * * *", "succeeded", 0)


def test_it_is_counted_has_its_zeros_and_is_on_every_page(world):
    all_of_them = f'forgekeeper_records_processed_total{{batch="{NAME}",record="pipeline"}} {float(OLD)}'
    # A run is in its row a moment before it is on a page.
    assert wait_until(lambda: all_of_them in page(world, "worker"), LIMIT)
    counted = page(world, "worker")

    assert f'forgekeeper_run_failures_total{{batch="{NAME}",error_kind="redis"}} 0.0' in counted
    assert f'forgekeeper_run_dead_letters_total{{batch="{NAME}"}} 0.0' in counted
    assert f'forgekeeper_scheduler_misfires_total{{batch="{NAME}"}}' in page(world, "scheduler")
    assert f'forgekeeper_backlog_records{{batch="{NAME}",record="pipeline"}} 0.0' in page(world, "exporter")


def test_the_batch_that_contributing_shows_runs(world):
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (world.folder / "pull_weeds.py").write_text(shown)
    world.rows("create table weed (id bigint generated always as identity primary key, grown_at timestamptz)")
    world.rows("insert into weed (grown_at) select now() - interval '1 day' from generate_series(1, 150)")

    answer = run(world, "run", "pull_weeds", "--json", BATCHES=f"workers,{NAME},pull_weeds")

    assert json.loads(answer.stdout)["deleted"] == 150, answer.stderr


def left(world):
    return world.rows("select count(*) from pipelines")


def test_the_audit_has_each_of_them_by_its_id(world):
    answer = told(world, "audit", "--what", "pipeline:7")

    assert [(one["batch"], one["record"]) for one in answer["found"]] == [(NAME, "pipeline")]


def pause(world):
    """Pause the batch, and wait until the run that had started has ended: it would delete what is inserted now."""
    run(world, "pause", NAME)
    assert wait_until(lambda: world.rows("select count(*) from job_runs where state = 'started'") == 0, LIMIT)


@pytest.fixture
def locked_row(world):
    """A row that became due ten minutes ago, and that a session has locked: the batch runs and cannot delete it."""
    pause(world)
    row = world.rows("insert into pipelines (updated_at) values (now() - interval '365 days 10 minutes') returning id")
    with closing(psycopg2.connect(world.environment[PREFIX + "DATABASE_URL"])) as other, other.cursor() as cursor:
        cursor.execute("select from pipelines where id = %s for update", (row,))
        run(world, "resume", NAME)
        yield


@whole_only
@pytest.mark.usefixtures("locked_row")
def test_no_alert_fires_for_a_row_that_has_been_due_for_minutes(world, tmp_path):
    labels = f'{{batch="{NAME}",record="pipeline"}}'
    oldest, objective = (
        f"forgekeeper_backlog_{name}_seconds{labels}" for name in ("oldest_timestamp", "age_objective")
    )

    def shown(series):
        lines = page(world, "exporter").splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} ")]

    assert wait_until(lambda: shown(oldest) and shown(objective), LIMIT)
    case = {
        "interval": "1m",
        "input_series": [
            {"series": oldest, "values": f"{shown(oldest)[0] - time.time():.0f}+0x30"},
            {"series": objective, "values": f"{shown(objective)[0]:.0f}+0x30"},
        ],
        "alert_rule_test": [{"eval_time": "30m", "alertname": "BatchBacklogTooOld", "exp_alerts": []}],
    }
    tests = tmp_path / "tests.yml"
    tests.write_text(yaml.safe_dump({"rule_files": [str(RULES_FILE)], "tests": [case]}))

    assert ran("promtool", "test", "rules", tests)[0] == 0


@whole_only
def test_a_row_that_raises_lies_in_quarantine_and_the_others_go(world):
    run(world, "resume", NAME)
    # In one transaction: what is due may go at any moment.
    pinned = world.rows(
        "create table pinned (pipeline bigint references pipelines);"
        f" with made as ({ADD.format(20)}) insert into pinned select min(id) from made returning pipeline"
    )

    assert wait_until(lambda: left(world) == YOUNG + 1, LIMIT)
    assert wait_until(lambda: str(pinned) in run(world, "quarantine", "list").stdout, LIMIT)
    world.rows("drop table pinned")
    assert run(world, "quarantine", "retry", "--all").returncode == 0
    assert wait_until(lambda: left(world) == YOUNG, LIMIT)


@whole_only
def test_a_mistake_is_held_by_the_breaker_and_a_release_lets_exactly_so_many_go(world):
    # A run is weighed as it begins.
    pause(world)
    world.rows(f"with made as ({ADD.format(60_000)}) select count(*) from made")
    run(world, "resume", NAME)
    assert wait_until(lambda: told(world, "status")["batches"][NAME]["held"], LIMIT)
    assert (left(world), told(world, "run", NAME, "--dry-run")["due"]) == (YOUNG + 60_000, 60_000)

    assert run(world, "release", NAME, "--expect", "1500", "--reason", "these are meant").returncode == 0
    assert wait_until(lambda: left(world) == YOUNG + 58_500, LIMIT)
    assert wait_until(lambda: told(world, "status")["batches"][NAME]["held"], LIMIT)

    assert left(world) == YOUNG + 58_500
