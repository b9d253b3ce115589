"""`run --dry-run`, and what `flags on` shows before it turns one on."""

import pytest

from forgekeeper.batches import BATCHES
from forgekeeper.connections import client
from forgekeeper.database import database as db
from forgekeeper.database import now
from forgekeeper.delivery.queues import INSTALLATION
from forgekeeper.flags import FeatureFlag
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun
from models import UserStatus
from tests.harness import samples as sample
from tests.harness.terminal import on_a_terminal

NAME = "user_status_cleanup"
ARTIFACTS = "expired_job_artifacts"
FLAG = "bulk_delete_job_artifacts"
OTHER_FLAG = "bulk_delete_job_artifacts_high_concurrency"
CLOSED_REDIS = "redis://127.0.0.1:1/0"


def preview(main, *options, batch=NAME, **settings):
    result = main("run", batch, "--dry-run", "--json", *options, **settings)
    assert result.status == 0, result.stderr
    return result.json


def the_part(found):
    (part,) = found["parts"]
    return part


def test_a_preview_says_how_many_would_go(main, database):
    sample.user_statuses(5)

    result = main("run", NAME, "--dry-run")

    assert result.status == 0
    assert f"\n  user_status of {NAME}: 2 would be deleted\n" in result.stdout


def test_a_preview_says_that_nothing_has_been_changed(main, database):
    first, *_ = main("run", NAME, "--dry-run").stdout.splitlines()

    assert first.endswith("UTC; nothing has been changed:")


def test_a_preview_deletes_nothing(main, database):
    sample.user_statuses(5)

    preview(main)

    assert UserStatus.due(now()).count() == 2


def test_a_preview_is_no_run(main, database):
    preview(main)

    assert JobRun.of(NAME).count() == 0


def test_a_preview_with_json_prints_one_object(main, database):
    sample.user_statuses(5)

    found = preview(main)

    assert (found["batch"], found["dry_run"], found["notes"]) == (NAME, True, [])
    assert (the_part(found)["records"], the_part(found)["estimate"]) == (2, False)


def test_a_preview_names_ten_records(main, database):
    sample.user_statuses(100)

    assert len(the_part(preview(main))["sample"]) == 10


def test_a_preview_names_as_many_records_as_it_is_told(main, database):
    sample.user_statuses(100)

    assert len(the_part(preview(main, "--sample", "3"))["sample"]) == 3


def test_a_preview_of_artifacts_says_how_much_and_whose(main, database):
    sample.job_artifacts(10)

    part = the_part(preview(main, batch=ARTIFACTS))

    assert (part["records"], part["bytes"], sum(part["projects"].values())) == (6, 615, 6)


def test_a_preview_says_what_stays_and_why(main, database):
    sample.job_artifacts(10)

    assert the_part(preview(main, batch=ARTIFACTS))["kept"] == {"locked": 1, "unknown": 1, "trace": 1}


def test_of_many_projects_the_preview_names_some_and_sums_the_rest(main, database):
    db.execute_sql(
        "insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path, size, expire_at, locked)"
        " select n, n, 1, 'a/' || n, 1, now() - interval '1 day', 0 from generate_series(1, 30) as n"
    )

    part = the_part(preview(main, batch=ARTIFACTS))

    assert (len(part["projects"]), part["other_projects"]) == (10, {"projects": 20, "records": 20})


def test_a_parent_previews_its_children(main, database):
    batches = {part["batch"] for part in preview(main, batch=ARTIFACTS)["parts"]}

    assert batches == {"delete_artifact_bucket"}


@pytest.mark.parametrize("batch", BATCHES)
def test_every_batch_has_a_preview(batch, main, database):
    assert "declares no preview" not in main("run", batch, "--dry-run").stdout


def test_how_long_it_takes_is_unknown_of_a_batch_that_has_not_run(main, database):
    assert preview(main)["pace"]["unknown"] == "unknown, it has not run yet"


def test_how_long_it_takes_goes_by_the_last_runs(main, database):
    db.execute_sql(
        "insert into job_runs (batch, state, started_at, finished_at, result)"
        f" values ('{NAME}', 'succeeded', now() - interval '10 s', now(), '{{\"deleted\": 20}}')"
    )
    sample.user_statuses(100)

    assert preview(main)["pace"]["seconds"] == pytest.approx(20, rel=0.01)


RUN_SECONDS = """
    insert into job_runs (batch, state, started_at, finished_at, result) select 'user_status_cleanup', 'succeeded',
        now() - interval '1 hour', now() - interval '1 hour' + %s * interval '1 s', json_build_object('deleted', %s)
    from generate_series(1, %s)
"""


def test_runs_that_had_next_to_nothing_to_do_do_not_say_how_long_many_take(main, database):
    db.execute_sql(RUN_SECONDS, (1, 10_000, 1))
    db.execute_sql(RUN_SECONDS, (0.1, 6, 90))
    sample.user_statuses(10_000)

    pace = preview(main)["pace"]

    assert (pace["seconds"], pace["at_most"]) == (pytest.approx(0.4), False)


def test_where_no_run_had_many_the_preview_says_how_long_it_takes_at_most(main, database):
    db.execute_sql(RUN_SECONDS, (0.1, 6, 90))
    sample.user_statuses(10_000)

    assert preview(main)["pace"]["at_most"] is True
    assert "it would take: at most 1 min 7 s" in main("run", NAME, "--dry-run").stdout


def test_a_preview_says_how_many_records_a_release_would_let_go(main, database):
    sample.user_statuses(5)

    assert preview(main)["due"] == 2
    assert "\n  due in all: 2\n" in main("run", NAME, "--dry-run").stdout


def test_a_preview_says_that_the_breaker_would_hold_it(main, database):
    sample.user_statuses(100)

    found = preview(main, BREAKER_SHARE="0.3", BREAKER_LEAST="30")

    assert found["notes"] == [
        "the breaker would hold it: it would delete 40 of about 100 records (40%), and no run of it has deleted any yet"
    ]


@pytest.mark.parametrize("given", [{"BREAKER_LEAST": "40"}, {"MAX_PER_RUN_USER_STATUS_CLEANUP": "20"}])
def test_a_preview_says_nothing_of_the_breaker_where_that_would_let_the_run_begin(main, database, given):
    sample.user_statuses(100)

    notes = preview(main, **{"BREAKER_SHARE": "0.3", "BREAKER_LEAST": "30", **given})["notes"]

    assert not any("breaker" in note for note in notes)


def test_a_preview_of_what_was_released_does_not_say_that_the_breaker_would_hold_it(main, database):
    sample.user_statuses(100)
    Hold.add(NAME, "breaker", by="a run", reason="too much")
    main("release", NAME, "--reason", "I looked")

    assert preview(main, BREAKER_SHARE="0.3", BREAKER_LEAST="30")["notes"] == [
        "40 records of it are released, for the next run and those that follow until one is ordinary"
    ]


def test_how_long_it_takes_goes_by_the_pace_where_that_is_slower(main, database):
    sample.user_statuses(5)

    assert preview(main, PACE_USER_STATUS_CLEANUP="0.5")["pace"]["seconds"] == 4


def test_how_long_children_take_goes_by_what_runs_have_deleted_with_them(main, database):
    db.execute_sql(
        f"insert into job_runs (id, batch, state, started_at) values (1, '{ARTIFACTS}', 'succeeded',"
        f" now() - interval '10 minutes'); insert into run_totals (batch, run, day, records)"
        f" values ('{ARTIFACTS}', 1, current_date, 3000)"
    )
    sample.job_artifacts(100)

    assert preview(main, batch=ARTIFACTS)["pace"]["seconds"] == pytest.approx(6)


def test_a_paused_batch_can_be_previewed(main, database):
    sample.user_statuses(5)
    Hold.add(NAME, "pause", until=None, reason="the disk is full", by="ops:1")

    found = preview(main)

    assert (the_part(found)["records"], found["notes"]) == (
        2,
        [f"{NAME} is paused by ops:1: `forgekeeper resume {NAME}` ends that"],
    )


def test_a_held_batch_can_be_previewed(main, database):
    sample.user_statuses(5)
    Hold.add(NAME, "breaker", by="worker-1:9", reason="2 of 5")

    found = preview(main)

    assert (the_part(found)["records"], found["notes"]) == (
        2,
        [f"{NAME} is held (breaker): 2 of 5; `forgekeeper release {NAME}` lets it go"],
    )


def test_a_stopped_batch_can_be_previewed(main, database):
    Hold.add(NAME, "stop", reason="wrong", by="ops:1")

    assert preview(main)["notes"] == [f"{NAME} is stopped by ops:1 (wrong): `forgekeeper resume {NAME}` ends that"]


def test_a_batch_whose_flag_is_off_can_be_previewed(main, database):
    (note,) = preview(main, batch=ARTIFACTS)["notes"]

    assert note == f"flag {FLAG} is off: no run does anything until `forgekeeper flags on {FLAG}`"


def test_a_preview_claims_no_redis(main, database):
    client.delete(INSTALLATION)

    preview(main)

    assert client.get(INSTALLATION) is None


def test_a_preview_says_of_another_s_redis_that_a_run_would_be_blocked(main, database):
    client.set(INSTALLATION, "another")

    (note,) = preview(main)["notes"]

    assert note.startswith("a run would be blocked: the database is of installation ")


def test_a_preview_without_redis_shows_what_postgresql_knows(main, database):
    sample.user_statuses(5)

    found = preview(main, REDIS_URL=CLOSED_REDIS)

    assert the_part(found)["records"] == 2
    assert found["notes"][0].startswith("Redis is away")


def test_a_batch_that_does_not_exist_has_no_preview(main, database):
    result = main("run", "nothing", "--dry-run")

    assert result.status == 2
    assert result.complaint.startswith("there is no batch 'nothing'; there are: ")


def test_a_sample_without_a_preview_is_wrong_use(main, database):
    result = main("run", NAME, "--sample", "3")

    assert (result.status, result.complaint) == (2, "--sample is for --dry-run: a run names no records")


def test_help_says_what_a_preview_is(main):
    told = " ".join(main("run", "--help").stdout.replace("│", " ").split())

    assert "--dry-run" in told
    assert "--sample" in told
    assert "what it has not counted by then is an estimate" in told


# flags


def test_turning_a_flag_on_shows_what_it_switches_on(main, database):
    sample.job_artifacts(10)

    result = main("flags", "on", FLAG)

    assert (result.status, result.stdout) == (0, f"{FLAG} is on\n")
    assert "expired_artifact of delete_artifact_bucket: 6 would be deleted" in result.stderr


def test_turning_a_flag_on_with_json_has_the_preview(main, database):
    sample.job_artifacts(10)

    result = main("flags", "on", FLAG, "--json").json

    assert result["flags"] == {FLAG: True}
    assert the_part(result["preview"][0])["records"] == 6


def test_turning_a_flag_on_that_switches_no_batch_shows_nothing(main, database):
    result = main("flags", "on", OTHER_FLAG, "--json")

    assert (result.json, result.stderr) == ({"flags": {OTHER_FLAG: True}}, "")


def test_turning_a_flag_on_goes_on_where_there_can_be_no_preview(main, database):
    db.execute_sql("alter table project_statistics rename to elsewhere")
    try:
        result = main("flags", "on", FLAG)
    finally:
        db.execute_sql("alter table elsewhere rename to project_statistics")

    assert (result.status, FeatureFlag.is_on(FLAG)) == (0, True)
    assert f"{ARTIFACTS} cannot be previewed: " in result.stderr


@pytest.mark.parametrize(("answer", "status", "on"), [("y", 0, True), ("n", 1, False), ("", 1, False)])
def test_on_a_terminal_turning_a_flag_on_shows_and_asks_first(answer, status, on, environment, database):
    sample.job_artifacts(10)

    ended, screen = on_a_terminal(environment(), answer + "\n", "flags", "on", FLAG)

    assert "6 would be deleted" in screen
    assert f"Turn {FLAG} on? [y/N]" in screen
    assert (ended, FeatureFlag.is_on(FLAG)) == (status, on)


def test_on_a_terminal_nothing_is_asked_with_yes(environment, database):
    ended, screen = on_a_terminal(environment(), "", "flags", "on", FLAG, "--yes")

    assert (ended, "[y/N]" in screen, FeatureFlag.is_on(FLAG)) == (0, False, True)


def test_on_a_terminal_a_preview_shows_how_far_it_has_got(environment, database):
    sample.user_statuses(5)

    ended, screen = on_a_terminal(environment() | {"TERM": "xterm"}, "", "run", NAME, "--dry-run")

    assert (ended, f"{NAME}: 2 counted, user_status" in screen) == (0, True)
