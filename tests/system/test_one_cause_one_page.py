"""One cause is one page: PostgreSQL's clock jumps by an hour and comes back, under real processes, our rules and routes.

At sixty times the pace of the rules (`monitoring.py`); the clock of what processes ask PostgreSQL is the test's.
"""

from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from forgekeeper.batches import BATCHES
from forgekeeper.flags import FeatureFlag
from tests.harness.ports import free_ports
from tests.harness.waiting import wait_until

from .monitoring import monitoring
from .worlds import World

pytestmark = pytest.mark.timeout(300)

LIMIT = 90.0
NEWS, TRIES = 20.0, 3
"""So long, in seconds, and so often ticks that were ahead are waited for."""
HOUR = 3600
CLOCK = """
    create schema if not exists shifted;
    create table shifted.clock (ahead interval);
    insert into shifted.clock values ('0');
    create function shifted.clock_timestamp() returns timestamptz language sql volatile
        as 'select pg_catalog.clock_timestamp() + ahead from shifted.clock';
"""
PAGE = "BatchClockOff"
BLOCKED = {f"BatchBlocked {batch}" for batch in BATCHES}
EARLY = {f"BatchTicksAhead {batch}" for batch in BATCHES}


def listens(port):
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5):
            return True
    except (URLError, OSError):
        return False


@pytest.fixture
def jump(database):
    """Set the clock that all sessions but ours see ahead by so many seconds."""
    database.execute_sql(CLOCK)
    yield lambda seconds: database.execute_sql("update shifted.clock set ahead = %s * interval '1 s'", (seconds,))
    database.execute_sql("drop schema shifted cascade")


@pytest.fixture
def watch(database, urls, jump, services, tmp_path):
    """All processes at work on nothing, each batch every ten seconds, and Prometheus and Alertmanager beside them."""
    worker, scheduler, exporter = free_ports(3)
    options = quote("-c search_path=public,shifted,pg_catalog")
    settings = World.make(database, tmp_path).environment | {
        "database_url": urls.database + ("&" if "?" in urls.database else "?") + f"options={options}",
        # Patient enough that a busy machine is not taken for a dead worker.
        "dead_after": "10",
        "scheduler_timeout": "10",
        "metrics_port_scheduler": str(scheduler),
        "metrics_port_exporter": str(exporter),
        **{f"cron_{batch}": "*/10 * * * * *" for batch in BATCHES},
    }
    FeatureFlag.turn("bulk_delete_job_artifacts", on=True)
    services("worker", "worker", "--processes", "1", "--threads", "4", "--metrics-port", str(worker), **settings)
    services("scheduler", "scheduler", **settings)
    services("exporter", "exporter", **settings)
    assert wait_until(lambda: all(map(listens, (worker, scheduler, exporter))), LIMIT)
    pages = {
        "forgekeeper-worker": [worker],
        "forgekeeper-scheduler": [scheduler],
        "forgekeeper-exporter": [exporter],
    }
    with monitoring(tmp_path, pages) as watch:
        yield watch


def paged(watch):
    return {told.alert for told in watch.sink.told if told.receiver == "pager"}


@pytest.mark.parametrize(
    ("seconds", "follows"), [(HOUR, {"BatchTimestampAhead"}), (-HOUR, set())], ids=["ahead", "behind"]
)
def test_a_jump_of_the_databases_clock_is_one_page_and_over_when_the_clock_is_right(watch, jump, seconds, follows):
    seen = set()

    def have_fired(names):
        seen.update(watch.firing())
        return seen >= names

    jump(seconds)
    # What fires is looked at all the time: a clock that is behind has ticks ahead at once, and news for some seconds only.
    assert wait_until(lambda: have_fired(BLOCKED | follows) and watch.sink.status("pager", PAGE) == "firing", LIMIT), (
        seen
    )
    jump(0)
    # It is news to Prometheus for ten seconds: where the machine kept the exporter from answering so long, once more.
    for _ in range(TRIES):
        if wait_until(lambda: have_fired(EARLY), NEWS):
            break
        jump(seconds)
        wait_until(lambda: have_fired(EARLY), NEWS)
        jump(0)
    assert seen >= EARLY, sorted(EARLY - seen)

    over = wait_until(lambda: watch.sink.status("pager", PAGE) == "resolved", LIMIT)

    assert over, watch.firing()
    assert paged(watch) == {PAGE}
    assert not watch.firing() & (BLOCKED | follows | EARLY | {PAGE})
