import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry, Counter

from forgekeeper.cli.scraping import Figure, PageMissing, compare, scrape
from forgekeeper.embedded.waiting import wait_until
from forgekeeper.settings import PREFIX
from metrics.endpoint import Endpoint, listen
from tests.harness.ports import free_ports
from tests.harness.thorough import whole_only
from tests.harness.traps import Traps

ROOT = Path(__file__).parents[2]
MARK = "DEMO_MARK"
LIMIT = 60.0
PATIENCE = 120.0
"""Seconds that two busy cores may take for a tour, or to make a database and start all processes."""
FIGURES = {
    "user statuses 5,000 2,000 3,000 0",
    "git refs 909 450 459 0",
    "bulk imports 200 40 200 0",
    "job artifacts 1,000 600 400 0",
    "direct uploads 204 104 100 0",
    "objects 1,198 698 500 0",
}
SHOWN = {
    "worker forgekeeper_records_processed_total user_status 2,000 2,000",
    "worker forgekeeper_records_processed_total git_ref_deletion 450 450",
    "worker forgekeeper_records_processed_total stale_upload 100 100",
    "worker forgekeeper_records_processed_total bulk_import 40 40",
    "worker forgekeeper_records_processed_total expired_artifact 600 600",
    "worker forgekeeper_records_processed_total deleted_object 600 600",
    "worker forgekeeper_record_errors_total git_ref_deletion 6 6",
    "worker forgekeeper_run_failures_total all 0 0",
    "exporter forgekeeper_quarantine_records failed_upload 3 3",
    "exporter forgekeeper_exporter_collector_success all 18 18",
}


class Command:
    """A `forgekeeper` process in a folder of its own, whose temporary files and descendants can be told from others."""

    def __init__(self, folder, *arguments, **settings):
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(prefix="t", dir=folder.parent))
        self.output = self.temporary.with_suffix(".out")
        self._mark = uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary), MARK: self._mark}
        own |= {f"{PREFIX}METRICS_PORT_{process}": "0" for process in ("WORKER", "SCHEDULER", "EXPORTER")}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "forgekeeper.cli", *arguments],
                cwd=folder,
                env=inherited | own | {PREFIX + name: value for name, value in settings.items()},
                stdout=output,
                stderr=output,
            )

    @property
    def said(self):
        return self.output.read_text()

    def says(self, text):
        return wait_until(lambda: text in self.said or self.process.poll() is not None, PATIENCE) and text in self.said

    def ends(self, signal_number=None):
        if signal_number:
            self.process.send_signal(signal_number)
        return self.process.wait(PATIENCE)

    def pids(self):
        """Find our processes: they have inherited our mark, or work in our folders.

        Servers write their titles over their environment.
        """
        return [int(process.name) for process in Path("/proc").glob("[0-9]*") if self._is_ours(process)]

    def process_table(self):
        """Say which processes of ours there are, and what they last logged."""
        logs = [log.read_text()[-2000:] for log in self.temporary.glob("*/forgekeeper.log")]
        return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in self.pids()], logs

    def _is_ours(self, process):
        with suppress(OSError):  # it has ended
            if f"{MARK}={self._mark}".encode() in (process / "environ").read_bytes():
                return True
            place = (process / "cwd").readlink()
            return place.is_relative_to(self.folder) or place.is_relative_to(self.temporary)
        return False

    def leaves_no_process(self):
        return wait_until(lambda: not self.pids(), LIMIT)

    def leaves_no_folder(self):
        return wait_until(lambda: not any(self.temporary.iterdir()), LIMIT)

    def kill(self):
        self.process.kill()
        self.process.wait()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start commands, in a new folder if none is given; in the end nothing of them is left."""
    commands = []

    def begin(*arguments, folder=None, **settings):
        commands.append(Command(folder or tmp_path_factory.mktemp("w"), *arguments, **settings))
        return commands[-1]

    yield begin
    for command in commands:
        command.kill()


# demo


@pytest.fixture(scope="module")
def tour(start, tmp_path_factory):
    """A tour that has ended, on a machine whose own settings are bad, in a folder full of traps."""
    traps = Traps(folder := tmp_path_factory.mktemp("w"))
    (folder / ".env").write_text("FORGEKEEPER_CRON_USER_STATUS_CLEANUP=off\nFORGEKEEPER_NO_SUCH_SETTING=1\n")
    lay = set(folder.iterdir())
    command = start("demo", folder=folder, CRON_PRUNE="nonsense", DATABASE_URL="postgresql://nowhere/x", NO_SUCH="1")
    command.ends()
    command.left, command.sprung = set(folder.iterdir()) - lay, traps.sprung()
    return command


def test_the_tour_ends_well_on_a_machine_whose_own_settings_are_bad(tour):
    assert tour.process.returncode == 0, tour.said


def test_the_tour_shows_the_expected_figures(tour):
    assert {" ".join(line.split()) for line in tour.said.splitlines()} >= FIGURES


def test_the_tour_shows_that_the_pages_of_metrics_say_what_was_done(tour):
    assert {" ".join(line.split()) for line in tour.said.splitlines()} >= SHOWN


def test_the_tour_tells_the_story_of_a_tick(tour):
    assert "was claimed by scheduler" in tour.said
    assert "It ended well after" in tour.said


def test_the_tour_shows_people_no_log_lines(tour):
    assert not [line for line in tour.said.splitlines() if line.startswith("{")]


def test_the_tour_leaves_nothing_behind(tour):
    assert tour.leaves_no_process()
    assert tour.leaves_no_folder()
    assert tour.left == set()


def test_the_tour_runs_nothing_that_lies_in_the_folder(tour):
    assert tour.sprung == []


@pytest.mark.parametrize(
    "deadly",
    [pytest.param(signal.SIGINT, marks=whole_only), pytest.param(signal.SIGTERM, marks=whole_only), signal.SIGKILL],
    ids=lambda number: number.name,
)
def test_a_tour_that_is_killed_in_the_middle_leaves_nothing_behind(start, deadly):
    tour = start("demo")
    assert tour.says("A scheduler, a worker and an exporter start")
    logs = partial(tour.temporary.glob, "*/forgekeeper.log")
    assert wait_until(lambda: any("scheduler started" in log.read_text() for log in logs()), LIMIT)

    status = tour.ends(deadly)

    assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[deadly]
    assert tour.leaves_no_process(), tour.process_table()
    assert tour.leaves_no_folder()
    assert "Traceback" not in tour.said


# pages, held against what was done

DONE = Figure("worker", "things_total", {"kind": "good"}, 3)


@pytest.fixture
def things():
    return Counter("forgekeeper_things", "x", ["kind", "size"], registry=CollectorRegistry())


@pytest.fixture
def pages(things):
    registry = CollectorRegistry()
    registry.register(things)
    page = Endpoint(listen("127.0.0.1", 0), registry)
    page.start()
    yield {"worker": page.url}
    page.shutdown()
    page.server_close()


def test_a_page_agrees_when_the_series_with_those_labels_add_up_to_what_was_done(pages, things):
    things.labels("good", "small").inc(1)
    things.labels("good", "large").inc(2)
    things.labels("bad", "small").inc(7)

    (compared,) = compare(pages, lambda _pages: [DONE], patience=0)

    assert (compared.shown, compared.agrees) == (3, True)


def test_a_page_that_says_something_else_is_found_out(pages, things):
    things.labels("good", "small").inc(4)

    (compared,) = compare(pages, lambda _pages: [DONE], patience=0.2)

    assert (compared.shown, compared.agrees) == (4, False)


def test_a_series_that_is_not_there_is_not_zero(pages):
    (compared,) = compare(pages, lambda _pages: [DONE._replace(done=0)], patience=0)

    assert (compared.shown, compared.agrees) == (None, False)


def test_what_is_counted_a_moment_later_is_waited_for(pages, things):
    def count_one_more(_pages):
        things.labels("good", "small").inc()
        return [DONE._replace(done=4)]

    # It is asked twice for each look at the pages.
    (compared,) = compare(pages, count_one_more, patience=LIMIT)

    assert (compared.shown, compared.agrees) == (4, True)


def test_pages_do_not_count_that_were_read_while_work_went_on(pages, things):
    things.labels("good", "small").inc(3)
    answers = iter([3, 4, 3, 3])

    compare(pages, lambda _pages: [DONE._replace(done=next(answers))], patience=LIMIT)

    assert next(answers, None) is None


def test_a_page_that_never_comes_is_an_error_that_names_it():
    url = f"http://127.0.0.1:{free_ports(1)[0]}/metrics"

    with pytest.raises(PageMissing, match=url):
        compare({"worker": url}, lambda _pages: [], patience=0.2)


# up


RUNS = {"batch": "user_status_cleanup"}
# What each page counts once `up` is at work. A run is in its row a moment before it is on a page.
AT_WORK = (
    Figure("cron", "runs_total", RUNS, 0),
    Figure("scheduler", "scheduler_enqueued_total", RUNS, 0),
    Figure("exporter", "exporter_collector_success", {"collector": "queues"}, 0),
)


class Up:
    """`forgekeeper up` in a folder, and a look into its database."""

    def __init__(self, start, folder, query, **settings):
        settings |= {"CRON_USER_STATUS_CLEANUP": "* * * * * *", "POLL_INTERVAL": "1", "WORKER_PROCESSES": "1"}
        self.command = start("up", folder=folder, **settings)
        url = f"postgresql://forgekeeper@/forgekeeper?host={folder}/.forgekeeper/sockets&port=5432"
        self.query = partial(query, url)

    def runs(self):
        """The newest success of the batch that is due every second; others are due at a full minute."""
        done = "batch = 'user_status_cleanup' and state = 'succeeded'"
        return self.query(f"select coalesce(max(id), 0) from job_runs where {done}")[0][0]

    def has_run_since(self, run):
        return self.command.says("forgekeeper is up") and wait_until(lambda: self.runs() > run, PATIENCE)


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    return Traps(tmp_path_factory.mktemp("w"))


@pytest.fixture(scope="module")
def folder(traps):
    return traps.folder


@pytest.fixture(scope="module")
def first(start, folder, query):
    """An `up` in an empty folder that has run a batch, was interrupted, and has ended; what its pages said."""
    worker, scheduler, exporter, others = free_ports(4)
    ports = {"METRICS_PORT_WORKER": worker, "METRICS_PORT_SCHEDULER": scheduler, "METRICS_PORT_EXPORTER": exporter}
    up = Up(start, folder, query, **{name: str(port) for name, port in ports.items()})
    up.ran = up.has_run_since(0)
    assert up.ran, up.command.said
    try:
        up.pages = pages_of({"cron": worker, "others": others, "scheduler": scheduler, "exporter": exporter}, AT_WORK)
    except PageMissing as missing:
        pytest.fail(f"{missing}; {up.command.said}")
    up.query("insert into user_statuses (user_id, message) values (7, 'here to stay')")
    up.last = up.runs()
    up.command.ends(signal.SIGINT)
    return up


def pages_of(ports, figures):
    """Read the pages at these ports, as soon as all are there and show these figures (or after `PATIENCE`, as they are)."""
    urls, found = {name: f"http://127.0.0.1:{port}/metrics" for name, port in ports.items()}, []

    def all_there():
        with suppress(PageMissing):
            found[:] = [scrape(urls)]
        return found and all((figure.shown(found[0]) or 0) >= 1 for figure in figures)

    wait_until(all_there, PATIENCE)
    return found[0] if found else scrape(urls)


@pytest.fixture(scope="module")
def second(start, folder, query, first):
    """An `up` in the folder of the first, at work."""
    up = Up(start, folder, query)
    up.ran = up.has_run_since(first.last)
    return up


def test_up_without_urls_starts_servers_of_its_own_and_says_so(first, folder):
    assert "no URLs are set: using embedded PostgreSQL and Redis in .forgekeeper/" in first.command.said
    assert (folder / ".forgekeeper" / "postgres").is_dir()


def test_up_runs_batches(first):
    assert first.ran, first.command.said


def test_up_serves_a_page_of_each_worker_the_scheduler_and_the_exporter(first):
    assert [figure for figure in AT_WORK if not figure.shown(first.pages)] == []
    assert AT_WORK[0]._replace(page="others").shown(first.pages) == 0


def test_up_ends_everything_when_interrupted(first):
    assert first.command.process.returncode == 0
    assert first.command.leaves_no_process(), first.command.process_table()
    assert first.command.leaves_no_folder()


def test_up_goes_on_with_the_data_of_the_last_time(first, second):
    assert second.ran, second.command.said
    assert second.query("select message from user_statuses where user_id = 7") == [("here to stay",)]
    assert second.query(f"select state from job_runs where id = {first.last}") == [("succeeded",)]


def test_a_second_up_in_the_same_folder_is_refused_with_one_sentence(start, second, folder):
    refused = start("up", folder=folder)

    status = refused.ends()

    (line,) = refused.said.splitlines()
    assert status == 1
    assert line.startswith("forgekeeper: ")
    assert ".forgekeeper is in use by other embedded servers; stop those, or use another folder" in line
    assert second.command.process.poll() is None


@pytest.mark.parametrize("given", [{"DATABASE_URL": "postgresql://h/n"}, {"REDIS_URL": "redis://h/0"}], ids=list)
def test_up_with_one_url_of_two_is_refused_with_one_sentence(main, given):
    result = main("up", **given)

    assert result.status == 2
    assert result.complaint == (
        "set both FORGEKEEPER_DATABASE_URL and FORGEKEEPER_REDIS_URL, or neither to use embedded servers"
    )


def test_up_on_servers_that_are_not_there_waits_for_them_and_says_so(start):
    up = start("up", DATABASE_URL="postgresql://forge:hunter2@127.0.0.1:1/x", REDIS_URL="redis://127.0.0.1:1/0")

    assert wait_until(lambda: "cannot use PostgreSQL: " in up.said, LIMIT)

    assert up.ends(signal.SIGTERM) == 0
    assert "hunter2" not in up.said


def test_up_that_is_killed_leaves_no_process(second):
    second.command.ends(signal.SIGKILL)

    assert second.command.leaves_no_process(), second.command.process_table()


def test_up_runs_nothing_that_lies_in_the_folder(second, traps):
    assert traps.sprung() == []
