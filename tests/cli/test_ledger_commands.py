"""Commands that prepare an installation, and what they answer: `settings`, `check`, `migrate`, `seed`, `flags`."""

from datetime import timedelta
from pathlib import Path

import pytest

from forgekeeper.api.batches import BATCHES, FeatureFlag
from forgekeeper.targets import sentinel
from tests.harness.catalogue import METRICS
from tests.harness.thorough import whole_only

FLAG = "bulk_delete_job_artifacts"


def test_settings_with_json_lists_them_all(main, settings):
    shown = {setting["name"]: setting for setting in main("settings", "--json", CRON_PRUNE="off").json}

    assert set(shown) == {f"FORGEKEEPER_{name.upper()}" for name in type(settings).model_fields}
    assert shown["FORGEKEEPER_CRON_PRUNE"] == {
        "name": "FORGEKEEPER_CRON_PRUNE",
        "type": "cron",
        "default": "0 * * * *",
        "value": "off",
        "sentence": "When prune runs.",
        "source": "environment",
    }


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_settings_masks_what_may_hold_a_password(main, settings, form):
    result = main(
        "settings",
        *form,
        DATABASE_URL="postgresql://forge:hunter2@host/forge",
        REDIS_URL="redis://forge:hunter2@host/0",
        OBJECT_STORES='{"artifacts": "s3://bucket?secret_access_key=hunter2"}',
    )

    assert result.status == 0
    assert "artifacts: s3://bucket?secret_access_key=********" in result.stdout
    assert "hunter2" not in result.stdout


def test_check_names_the_servers_that_the_settings_lead_to_and_where_they_were_set(main, settings, tmp_path):
    Path(".env").write_text("FORGEKEEPER_REDIS_URL=redis://:hunter2@127.0.0.1:1/3\n")

    lines = main(
        "check", REDIS_URL=None, DATABASE_URL="postgresql://forge:hunter2@127.0.0.1:1/forge"
    ).stdout.splitlines()

    assert lines[0] == (
        "ok      settings: all names are known and all values are valid:"
        " FORGEKEEPER_DATABASE_URL=postgresql://forge@127.0.0.1:1/forge (environment),"
        " FORGEKEEPER_REDIS_URL=redis://127.0.0.1:1/3 (.env)"
    )


@whole_only
def test_a_missing_sentinel_is_an_error_until_init_has_made_it(forgekeeper, main, database, root, store):
    for place in (root, store):
        (place / sentinel.SENTINEL_NAME).unlink()

    missing = main("check", "--json")
    made = main("check", "--init", "--json")
    found = forgekeeper("check", "--json")

    for result, levels, end in (
        (missing, ["error"], "has no .forgekeeper-root; `forgekeeper check --init` creates it"),
        (made, ["ok"], "had no .forgekeeper-root; created it"),
        (found, ["ok"], ""),
    ):
        for subject in ("repositories", "object store"):
            assert [(level, message.endswith(end)) for level, message in result.findings(subject)] == [(*levels, True)]
    assert (missing.status, made.status, found.status, found.stderr, found.json["ok"]) == (1, 0, 0, "", True)
    for subject in ("settings", "schedules", "postgresql", "schema", "contract"):
        assert {level for level, _ in found.findings(subject)} == {"ok"}


@whole_only
@pytest.mark.parametrize(
    ("spoil", "level", "named", "status"),
    [
        ("drop index user_statuses_clear_status_at", "warning", "on user_statuses (clear_status_at, user_id)", 0),
        ("alter table user_statuses drop column clear_status_at", "error", "column user_statuses.clear_status_at", 1),
    ],
)
def test_a_missing_index_is_a_warning_and_a_missing_column_an_error(
    *, main, own_database, query, spoil, level, named, status
):
    query(own_database, spoil)

    result = main("check", "--json", DATABASE_URL=own_database)

    ((found, message),) = [one for one in result.findings("contract") if one[0] != "ok"]
    assert (result.status, found, named in message) == (status, level, True)


def test_a_database_without_our_tables_is_an_error_that_names_its_remedy(main, settings, new_database):
    result = main("check", "--json", DATABASE_URL=new_database())

    assert result.status == 1
    assert result.findings("schema") == [
        ("error", "forgekeeper's tables do not exist yet; run `forgekeeper migrate`, as the owner of the tables")
    ]
    assert result.findings("installation") == [
        ("error", "there is no installation yet: `forgekeeper migrate` creates it")
    ]
    assert result.findings("privileges") == []


def test_check_reports_on_servers_that_are_away(main, settings):
    result = main(
        "check",
        "--json",
        DATABASE_URL="postgresql://forge:hunter2@127.0.0.1:1/forge",
        REDIS_URL="redis://forge:hunter2@127.0.0.1:1/0",
    )

    assert result.status == 1
    for subject in ("postgresql", "redis"):
        ((level, message),) = result.findings(subject)
        assert (level, "refused" in message) == ("error", True)
    assert "hunter2" not in result.stdout


def test_check_names_a_clock_that_is_ahead(forgekeeper, url_with_clock_ahead):
    result = forgekeeper("check", "--json", DATABASE_URL=url_with_clock_ahead(timedelta(hours=1)))

    assert result.status == 1
    assert result.findings("clocks") == [
        ("error", "PostgreSQL's clock is 3600 s ahead of Redis's clock; correct the wrong clock"),
        ("warning", "PostgreSQL's clock is 3600 s ahead of this machine's clock; correct the wrong clock"),
    ]


def test_migrate_refuses_a_database_that_has_such_a_table_already(main, settings, new_database, query):
    url = new_database()
    query(url, "create schema forgekeeper; create table forgekeeper.job_runs (somebody_elses int)")

    result = main("migrate", DATABASE_URL=url)

    assert result.status == 1
    assert "job_runs" in result.complaint


@whole_only
def test_seed_refuses_the_database_of_a_forge(main, settings, new_database, query):
    url = new_database()
    main("migrate", DATABASE_URL=url)
    query(url, "create table public.user_statuses (user_id bigint primary key)")

    result = main("seed", DATABASE_URL=url)

    assert result.status == 1
    assert "use another database for sample data" in result.complaint
    assert query(url, "select count(*) from user_statuses") == [(0,)]


@pytest.mark.parametrize(("command", "on"), [("on", True), ("off", False)])
def test_a_flag_that_is_turned_is_answered_as_the_list_has_it(main, database, command, on):
    FeatureFlag.turn(FLAG, on=not on)

    assert main("flags", command, FLAG, "--json").json["flags"] == {FLAG: on}
    assert FeatureFlag.is_on(FLAG) is on


@whole_only
@pytest.mark.parametrize(
    ("group", "default"),
    [*((group, "list") for group in ("flags", "leases", "quarantine")), ("objects", "held")],
)
def test_a_group_that_lists_without_a_command_does_so_with_json(main, database, group, default):
    assert main(group, "--json").json == main(group, default, "--json").json


def test_migrate_with_json_says_what_was_applied_and_what_is_pending(main, settings, new_database):
    url = new_database()

    before = main("migrate", "--check", "--json", DATABASE_URL=url)
    made = main("migrate", "--json", DATABASE_URL=url)
    after = main("migrate", "--check", "--json", DATABASE_URL=url)

    names, deleting = before.json["pending"], [name for name in BATCHES if name != "prune"]
    assert names[0] == "0001_ledger"
    assert (before.status, before.json["applied"], before.stderr) == (1, [], "")
    assert (made.status, made.json) == (0, {"applied": names, "pending": [], "held": deleting})
    assert (after.status, after.json) == (0, {"applied": [], "pending": [], "too_old": []})


def test_metrics_prints_the_catalogue(main):
    found, shown = main("metrics", "--json").json["metrics"], main("metrics").stdout

    assert [metric["name"] for metric in found] == list(METRICS)
    assert [name for name in METRICS if name not in shown] == []
