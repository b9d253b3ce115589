"""`forgekeeper up`: every process in one terminal, with servers of its own where no URLs are set."""

import signal
import urllib.request
from functools import partial

import pytest

from demo.tour import ExpectedValue, compare_metrics
from tests.harness.ports import free_ports
from tests.harness.thorough import whole_only
from tests.harness.traps import Traps
from tests.harness.waiting import wait_until

LIMIT = 60.0
RUNS = {"batch": "user_status_cleanup"}
AT_WORK = (
    ExpectedValue("cron", "runs_total", RUNS, 0),
    ExpectedValue("scheduler", "scheduler_enqueued_total", RUNS, 0),
    ExpectedValue("exporter", "exporter_collector_success", {"collector": "queues"}, 0),
)
"""What each page counts once `up` is at work.  A run is in its row a moment before it is on a page."""


class Up:
    """`forgekeeper up` in a folder, and a look into its database."""

    def __init__(self, start, folder, query, **settings):
        settings |= {"CRON_USER_STATUS_CLEANUP": "* * * * * *", "POLL_INTERVAL": "1", "WORKER_PROCESSES": "1"}
        self.command = start("up", folder=folder, **settings)
        self.query = partial(
            query, f"postgresql://forgekeeper@/forgekeeper?host={folder}/.forgekeeper/sockets&port=5432"
        )

    def runs(self):
        """The newest success of the batch that is due every second; others are due at a full minute."""
        done = "batch = 'user_status_cleanup' and state = 'succeeded'"
        return self.query(f"select coalesce(max(id), 0) from job_runs where {done}")[0][0]

    def has_run_since(self, run):
        return self.command.says("forgekeeper is up") and wait_until(lambda: self.runs() > run, 2 * LIMIT)


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    return Traps(tmp_path_factory.mktemp("w"))


@pytest.fixture(scope="module")
def first(start, traps, query):
    """An `up` in an empty folder that has run a batch, was interrupted, and has ended; what its pages said."""
    worker, scheduler, exporter, others, console = free_ports(5)
    ports = {"METRICS_PORT_WORKER": worker, "METRICS_PORT_SCHEDULER": scheduler, "METRICS_PORT_EXPORTER": exporter}
    ports["CONSOLE_PORT"] = console
    up = Up(start, traps.folder, query, **{name: str(port) for name, port in ports.items()})
    assert up.has_run_since(0), up.command.said
    pages = {"cron": worker, "others": others, "scheduler": scheduler, "exporter": exporter}
    urls = {name: f"http://127.0.0.1:{port}/metrics" for name, port in pages.items()}
    up.all_shown = wait_until(lambda: at_work(urls), 2 * LIMIT)
    up.console_shows = wait_until(lambda: shows_a_batch(f"http://127.0.0.1:{console}/"), LIMIT)
    up.query("insert into user_statuses (user_id, message) values (7, 'here to stay')")
    up.last = up.runs()
    up.command.ends(signal.SIGINT)
    return up


def shows_a_batch(console):
    try:
        with urllib.request.urlopen(console, timeout=LIMIT) as answer:
            return "user_status_cleanup" in answer.read().decode()
    except OSError:
        return False


def at_work(urls):
    idle = AT_WORK[0]._replace(page="others")
    (_, of_idle), *shown = compare_metrics(urls, [idle, *AT_WORK], timeout=0)
    return of_idle == 0 and all((count or 0) >= 1 for _, count in shown)


@pytest.fixture(scope="module")
def second(start, traps, query, first):
    """An `up` in the folder of the first, at work."""
    up = Up(start, traps.folder, query)
    assert up.has_run_since(first.last), up.command.said
    return up


def test_without_urls_it_starts_servers_of_its_own_and_says_so(first, traps):
    assert "no URLs are set: using embedded PostgreSQL and Redis in .forgekeeper/" in first.command.said
    assert (traps.folder / ".forgekeeper" / "postgres").is_dir()


def test_it_serves_a_page_of_each_worker_the_scheduler_and_the_exporter(first):
    assert first.all_shown


def test_it_serves_the_console(first):
    assert first.console_shows


def test_it_ends_everything_when_interrupted(first):
    assert first.command.process.returncode == 0
    assert first.command.leaves_nothing(), first.command.process_table()


def test_it_goes_on_with_the_data_of_the_last_time(first, second):
    assert second.query("select message from user_statuses where user_id = 7") == [("here to stay",)]
    assert second.query(f"select state from job_runs where id = {first.last}") == [("succeeded",)]


@whole_only
def test_a_second_one_in_the_same_folder_is_refused_with_one_sentence(start, second, traps):
    refused = start("up", folder=traps.folder)

    assert refused.ends() == 1
    (line,) = refused.said.splitlines()
    assert ".forgekeeper is in use by other embedded servers; stop them, or use another folder" in line
    assert second.command.process.poll() is None


@pytest.mark.parametrize("given", [{"DATABASE_URL": "postgresql://h/n"}, {"REDIS_URL": "redis://h/0"}], ids=list)
def test_one_url_of_two_is_refused_with_one_sentence(start, given):
    refused = start("up", **given)

    assert refused.ends() == 2
    assert refused.said == (
        "forgekeeper: set both FORGEKEEPER_DATABASE_URL and FORGEKEEPER_REDIS_URL, or neither, to use embedded servers\n"
    )


def test_one_that_is_killed_leaves_no_process_and_has_run_nothing_that_lies_in_the_folder(second, traps):
    second.command.ends(signal.SIGKILL)

    assert second.command.leaves_no_process(), second.command.process_table()
    assert traps.sprung() == []
