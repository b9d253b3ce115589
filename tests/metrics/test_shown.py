"""What a batch declares to be shown is shown: by the exporter and by `status`."""

from datetime import timedelta

import pytest

from forgekeeper.batches import FeatureFlag, Record, Threshold
from forgekeeper.cli.status import gather
from forgekeeper.database import now
from forgekeeper.database.queries import Backlog
from forgekeeper.declaring.shown import Refused
from metrics.catalogue import Gauge, Reading
from tests.harness.toys import declaring, toy

SINCE = timedelta(minutes=7)
REFUSED = Refused(
    kind="toy",
    record="broken_toy",
    count=lambda: 2,
    entries=lambda _settings, _limit: [],
    retry=lambda _keys: 0,
    discard=lambda _keys: 0,
)
BOXES = Gauge("boxes", "Boxes for toys.", ("state",), (("full",), ("empty",)))


@pytest.fixture
def toys():
    with declaring():
        yield toy(
            records=[Record("toy", objective=timedelta(hours=1)), Record("broken_toy", refused=True)],
            thresholds=[Threshold("duration", above=60), Threshold("backlog", above=7)],
            flag="tidy",
            flags={"tidy": "Put toys away at all."},
        )


@pytest.fixture
def shelf(toys):
    """Let three toys be due, and two be broken."""
    toys.backlog("toy")(lambda instant: Backlog(3, instant - SINCE))
    toys.quarantines(REFUSED)
    return toys


def test_the_exporter_reads_the_backlogs_that_a_batch_declares(shelf, look):
    page = look()

    since = page.value("backlog_oldest_timestamp_seconds", batch="toys", record="toy")
    assert page.value("exporter_collector_success", collector="toys") == 1
    assert page.value("backlog_records", batch="toys", record="toy") == 3
    assert since == pytest.approx((now() - SINCE).timestamp(), abs=20)
    assert page.value("quarantine_records", batch="toys", record="broken_toy") == 2
    assert page.value("schedule_interval_seconds", batch="toys") == 60


def test_records_of_a_batch_whose_flag_is_off_may_wait(shelf, look):
    off = look().value("backlog_age_objective_seconds", batch="toys", record="toy")
    FeatureFlag.turn("tidy", on=True)
    on = look()

    assert (off, on.value("backlog_age_objective_seconds", batch="toys", record="toy")) == (None, 3600)
    assert on.value("feature_flag_enabled", flag="tidy") == 1


def test_the_exporter_asks_what_a_batch_brings_and_one_that_fails_takes_no_other_away(shelf, look):
    shelf.collector("shelf", gauges=[BOXES], database=False)(lambda _settings: iter([Reading("boxes", 4, ("full",))]))

    @shelf.collector("cellar", gauges=[BOXES])
    def fail(_settings):
        yield Reading("boxes", 4, ("empty",))
        raise KeyError("no cellar")

    page = look()

    assert page.series("boxes") == {("full",): 4}
    assert page.value("exporter_collector_success", collector="shelf") == 1
    assert page.value("exporter_collector_success", collector="cellar") == 0
    assert page.value("backlog_records", batch="toys", record="toy") == 3


def test_status_has_the_batch_and_the_part_that_it_brings(shelf, database, settings):
    shelf.status("shelves", lambda: 5, lambda found: f"Shelves: {found}.")

    found = gather(settings.model_copy(update={"cron_toys": None}))

    assert found["batches"]["toys"]["backlog"] == 3
    assert found["shelves"] == 5
