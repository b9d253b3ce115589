"""`forgekeeper demo`: the whole system at work, its figures checked, and nothing left behind."""

import signal

import pytest

from demo.sample_data import SampleCount
from demo.tour import ExpectedValue, check_results
from forgekeeper.cli.terminal import Problem
from tests.harness.thorough import whole_only
from tests.harness.traps import Traps
from tests.harness.waiting import wait_until

LIMIT = 60.0
FIGURES = {
    "user statuses 5,000 2,000 3,000 0",
    "git refs 909 450 459 0",
    "bulk imports 200 40 200 0",
    "job artifacts 1,000 600 400 0",
    "direct uploads 203 103 100 0",
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
    "exporter forgekeeper_quarantine_records rejected_ref 6 6",
    "exporter forgekeeper_exporter_collector_success all 19 19",
}
DONE = ExpectedValue("worker", "things_total", {"kind": "good"}, 3)


@pytest.fixture(scope="module")
def tour(start, tmp_path_factory):
    """A tour that has ended, on a machine whose own settings are bad, in a folder full of traps."""
    traps = Traps(folder := tmp_path_factory.mktemp("traps"))
    (folder / ".env").write_text("FORGEKEEPER_CRON_USER_STATUS_CLEANUP=off\nFORGEKEEPER_NO_SUCH_SETTING=1\n")
    lay = set(folder.iterdir())
    command = start("demo", folder=folder, CRON_PRUNE="nonsense", DATABASE_URL="postgresql://nowhere/x", NO_SUCH="1")
    command.ends()
    command.left, command.sprung = set(folder.iterdir()) - lay, traps.sprung()
    return command


@whole_only
def test_it_ends_well_on_a_machine_whose_own_settings_are_bad(tour):
    assert tour.process.returncode == 0, tour.said


@whole_only
def test_it_shows_what_there_was_and_is_left_and_that_the_metrics_say_so(tour):
    assert {" ".join(line.split()) for line in tour.said.splitlines()} >= FIGURES | SHOWN


@whole_only
def test_it_shows_no_log_lines(tour):
    assert not [line for line in tour.said.splitlines() if line.startswith("{")]


@whole_only
def test_it_leaves_nothing_behind_and_runs_nothing_that_lies_in_the_folder(tour):
    assert tour.leaves_nothing(), tour.process_table()
    assert (tour.left, tour.sprung) == (set(), [])


@whole_only
@pytest.mark.parametrize(
    ("deadly", "status"), [pytest.param(signal.SIGINT, 130, marks=whole_only), (signal.SIGTERM, 143)]
)
def test_one_that_is_ended_in_the_middle_leaves_nothing_behind(start, deadly, status):
    tour = start("demo")
    assert tour.says("A scheduler, a worker, an exporter and a console start")
    # The log is made a moment after that is said.
    logs = lambda: tour.temporary.glob("*/forgekeeper.log")  # noqa: E731
    assert wait_until(lambda: any("scheduler started" in log.read_text() for log in logs()), LIMIT)

    assert tour.ends(deadly) == status
    assert tour.leaves_nothing(), tour.process_table()
    assert "Traceback" not in tour.said


def test_a_figure_that_is_not_as_expected_is_a_problem():
    with pytest.raises(Problem, match="a figure is wrong"):
        check_results({"batch": SampleCount("things", 5, 2)}, {"batch": SampleCount("things", 4, 1)}, [])


@pytest.mark.parametrize("shown", [4, None])
def test_a_metric_that_shows_something_else_or_nothing_is_a_problem(shown):
    with pytest.raises(Problem, match=f"things_total.* is {shown}, not 3"):
        check_results({}, {}, [(DONE, shown)])
