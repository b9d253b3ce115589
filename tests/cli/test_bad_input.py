"""What a person can get wrong: each is one sentence that says what to do, and its exit status."""

import socket
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from forgekeeper.api.batches import BATCHES
from forgekeeper.ledger.job_runs import JobRun
from tests.harness.every import every
from tests.harness.thorough import whole_only

NAME = "user_status_cleanup"
FLAG = "bulk_delete_job_artifacts"
NO_SOCKET = "postgresql://forge:hunter2@/forge?host=/nowhere/at/all"
NEED_SERVERS = [f"run {NAME}", f"send {NAME}", "status", f"ticks {NAME}", "flags list --json", f"flags on {FLAG}"]
SENTENCES = {
    "run user_status": f"there is no batch 'user_status'; there are: {', '.join(sorted(BATCHES))}",
    "why user_status": f"there is no batch 'user_status'; there are: {', '.join(sorted(BATCHES))}",
    "worker --queues cron,crone": "there is no queue 'crone'; there are: cron, git, artifacts, objects",
    f"pause {NAME} --until 2020-01-01": "2020-01-01 00:00:00 has passed; give a future time, in UTC",
    f"why {NAME} 25:00": "'25:00' is not a time: write it as 08:30, 2h or 2026-11-20T08:30, in UTC",
    "psql": 'there is no command `psql` any more: run `psql "$FORGEKEEPER_DATABASE_URL"`',
    "refs rejected": "there is no command `refs rejected` any more: run `forgekeeper quarantine list --kind ref`",
    **{
        f"{command}{given} --reason R": "name the batches, or use --all"
        for command in ("pause", "stop", "resume", "release")
        for given in ("", f" {NAME} --all")
    },
    f"stop {NAME}": "give a --reason: other people need to know why the batches are stopped",
}
NAMED = {
    f"runs {NAME}": "runs",
    "run": "BATCH",
    f"run {NAME} --jsn": "--jsn",
    f"run {NAME} prune": "prune",
    f"run {NAME} --sample 3": "--sample",
    "worker --threads 0": "--threads",
    f"flags onn {FLAG}": "onn",
    "flags on bulk_delete": FLAG,
    f"stop {NAME} nonsense --reason R": "'nonsense'",
    f"release {NAME}": "--reason",
    **dict.fromkeys(("quarantine retry", "quarantine retry 1 --all", "quarantine discard"), "--all"),
    "quarantine list --kind nothing": "'nothing'",
    "uploads reconcile": "Missing argument",
    "uploads reconcile artifacts": "--prefix",
    **dict.fromkeys(("uploads forget", "uploads forget artifacts:a --all"), "--all"),
    **dict.fromkeys(("objects keep", "objects unhold", "objects hold --project 7 --run 1"), "--project"),
    **dict.fromkeys(("check --moved --reason r", "check --init --moved", "check --reason r"), "--init"),
    "check --init --moved --copied --reason r": "not both",
}


@pytest.fixture
def closed_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


@whole_only
@every("command", [*NEED_SERVERS, "scheduler", "worker", "check", "migrate"])
def test_without_a_url_a_command_names_the_setting_and_shows_one(main, command):
    result = main(*command.split())

    assert result.status == 2
    assert result.complaint.startswith("FORGEKEEPER_DATABASE_URL is not set: set it to a URL such as postgresql://")


@whole_only
@every("command", [*NEED_SERVERS, "migrate --check"])
def test_where_there_is_no_server_a_command_names_it_and_the_setting(main, settings, closed_port, command):
    no_socket = main(*command.split(), DATABASE_URL=NO_SOCKET)
    no_port = main(*command.split(), DATABASE_URL=f"postgresql://forge:hunter2@127.0.0.1:{closed_port}/forge")

    for result, named in ((no_socket, "/nowhere/at/all"), (no_port, str(closed_port))):
        assert result.status == 1
        assert result.complaint.startswith("cannot use PostgreSQL: ")
        assert named in result.complaint
        assert result.complaint.endswith("; check FORGEKEEPER_DATABASE_URL")
        assert "hunter2" not in result.complaint


def test_where_redis_does_not_listen_it_is_named_with_its_port_and_setting_and_nothing_is_sent(
    main, database, closed_port
):
    result = main("send", NAME, REDIS_URL=f"redis://forge:hunter2@127.0.0.1:{closed_port}/0")

    assert (result.status, JobRun.select().count()) == (1, 0)
    assert result.complaint.startswith("cannot use Redis: ")
    assert str(closed_port) in result.complaint
    assert result.complaint.endswith("; check FORGEKEEPER_REDIS_URL")
    assert "hunter2" not in result.complaint


@every("command", [f"pause {NAME}", f"resume {NAME}"])
def test_without_the_url_of_redis_batches_are_held_back_and_let_go(main, database, command):
    assert main(*command.split(), "--reason", "a test", REDIS_URL=None).status == 0


def test_on_a_database_without_our_tables_a_command_says_how_to_make_them(main, settings, new_database):
    result = main("status", DATABASE_URL=new_database())

    assert result.status == 1
    assert result.complaint.endswith("migration(s): run `forgekeeper migrate`")


@whole_only
@every("command", SENTENCES)
def test_wrong_use_is_refused_with_a_sentence(main, database, command):
    result = main(*command.split())

    assert (result.status, result.complaint) == (2, SENTENCES[command])


@whole_only
@every("command", NAMED)
def test_wrong_use_is_refused_with_a_sentence_that_names_it(main, database, command):
    result = main(*command.split())

    assert (result.status, NAMED[command] in result.complaint) == (2, True)


def test_an_unknown_setting_is_refused_with_the_name_that_was_meant(forgekeeper, settings):
    result = forgekeeper("status", CRON_PRUNES="* * * * *")

    assert result.status == 2
    assert result.complaint.startswith("unknown setting FORGEKEEPER_CRON_PRUNES (did you mean FORGEKEEPER_CRON_PRUNE?)")


@every("command", [f"{command} {NAME}" for command in ("stop", "release")])
def test_a_reason_of_blanks_is_none(main, database, command):
    assert main(*command.split(), "--reason", " ").complaint.startswith("give a --reason")


def test_a_run_that_the_ledger_does_not_have_is_none(main, database):
    result = main("cancel", "17")

    assert result.status == 1
    assert result.complaint == "the ledger has no run 17; `forgekeeper ticks BATCH` lists the runs of a batch"


def test_help_is_there_whatever_the_settings_say(main):
    assert main("--help", BATCHES="no.such.module").status == 0


def test_an_exporter_without_an_endpoint_is_wrong_use(forgekeeper, settings):
    result = forgekeeper("exporter", METRICS_PORT_EXPORTER="0")

    assert (result.status, "set it to the port" in result.complaint) == (2, True)


def test_an_exporter_whose_port_is_busy_does_not_start(forgekeeper, settings):
    with closing(socket.create_server(("127.0.0.1", 0))) as somebody:
        port = somebody.getsockname()[1]
        result = forgekeeper("exporter", METRICS_PORT_EXPORTER=str(port))

    assert result.status == 1
    assert result.complaint == (
        f"cannot serve metrics at 127.0.0.1:{port}: Address already in use; stop the program that uses it, or choose another port"
    )


def test_a_role_that_may_make_no_tables_is_said_what_it_needs_and_that_is_enough(main, new_database, new_role, query):
    as_role = new_role(url := new_database())

    refused = main("migrate", DATABASE_URL=as_role)
    query(url, f"create schema forgekeeper authorization {urlsplit(as_role).username}")
    granted = main("migrate", DATABASE_URL=as_role)

    assert (refused.status, granted.status) == (1, 0)
    assert refused.complaint == (
        "permission denied for database "
        f"{urlsplit(url).path[1:]}: nothing was changed; run `forgekeeper migrate` as the role that owns forgekeeper's "
        "tables, or, if their schema does not exist yet, let a superuser run `create schema forgekeeper "
        "authorization ROLE` (docs/security.md)"
    )
