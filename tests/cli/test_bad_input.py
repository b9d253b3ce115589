import socket
from contextlib import closing
from pathlib import Path

import pytest

from forgekeeper import migrations
from forgekeeper.batches import BATCHES

NAME = "user_status_cleanup"
FLAG = "bulk_delete_job_artifacts"
NO_SOCKET = "postgresql://forge:hunter2@/forge?host=/nowhere/at/all"
NEED_SERVERS = [
    ("run", NAME),
    ("send", NAME),
    ("status",),
    ("status", "--json"),
    ("ticks", NAME),
    ("why", NAME),
    ("pause", NAME),
    ("resume", NAME),
    ("flags",),
    ("flags", "list", "--json"),
    ("flags", "on", FLAG),
    ("seed",),
]
SERVE = [("scheduler",), ("worker",)]
"""They wait for servers; what the settings lack ends them like any other."""
HOLD = [("pause", NAME), ("resume", NAME)]
"""What they change is in PostgreSQL: they need no Redis."""
NEED_A_BATCH = ["run", "send", "ticks", "why", "pause", "resume"]


def words(value):
    return value if isinstance(value, str) else " ".join(value)


@pytest.fixture
def closed_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def unmigrated(new_database):
    return new_database()


@pytest.mark.parametrize(
    "command", [*NEED_SERVERS, *SERVE, ("check",), ("migrate",), ("migrate", "--check")], ids=words
)
def test_without_a_url_a_command_names_the_setting_and_shows_one(main, command):
    result = main(*command)

    assert result.status == 2
    assert result.complaint.startswith(
        "FORGEKEEPER_DATABASE_URL is not set: set it to a URL such as postgresql://user@host/name"
    )


@pytest.mark.parametrize("command", [("run", NAME, "--json"), ("check", "--json"), ("worker",)], ids=words)
def test_a_process_that_refuses_its_settings_ends_with_status_2_and_one_sentence(forgekeeper, command):
    result = forgekeeper(*command)

    assert result.status == 2
    assert result.complaint.startswith("FORGEKEEPER_DATABASE_URL is not set")


@pytest.mark.parametrize("command", [("status", "--json"), ("ticks", NAME)], ids=words)
def test_a_process_that_cannot_reach_its_database_ends_with_status_1_and_one_sentence(forgekeeper, settings, command):
    result = forgekeeper(*command, DATABASE_URL=NO_SOCKET)

    assert result.status == 1
    assert result.complaint.startswith("cannot use PostgreSQL: ")


@pytest.mark.parametrize("command", [one for one in [*NEED_SERVERS, *SERVE] if one not in HOLD], ids=words)
def test_without_the_url_of_redis_a_command_names_the_setting(main, settings, command):
    result = main(*command, REDIS_URL=None)

    assert result.status == 2
    assert result.complaint.startswith("FORGEKEEPER_REDIS_URL is not set")


@pytest.mark.parametrize("command", HOLD, ids=words)
def test_without_the_url_of_redis_batches_are_held_back_and_let_go(main, database, command):
    assert main(*command, "--reason", "a test", REDIS_URL=None).status == 0


@pytest.mark.parametrize("command", [*NEED_SERVERS, ("migrate",), ("migrate", "--check")], ids=words)
def test_where_there_is_no_socket_a_command_names_server_socket_and_setting(main, settings, command):
    result = main(*command, DATABASE_URL=NO_SOCKET)

    assert result.status == 1
    assert result.complaint.startswith('cannot use PostgreSQL: connection to server on socket "/nowhere/at/all/')
    assert result.complaint.endswith("; check FORGEKEEPER_DATABASE_URL")


@pytest.mark.parametrize("command", [*NEED_SERVERS, ("migrate",), ("migrate", "--check")], ids=words)
def test_where_nobody_listens_a_command_names_server_port_and_setting(main, settings, closed_port, command):
    result = main(*command, DATABASE_URL=f"postgresql://forge:hunter2@127.0.0.1:{closed_port}/forge")

    assert result.status == 1
    assert result.complaint.startswith("cannot use PostgreSQL: ")
    assert str(closed_port) in result.complaint
    assert result.complaint.endswith("; check FORGEKEEPER_DATABASE_URL")
    assert "hunter2" not in result.complaint


def test_a_database_that_does_not_exist_is_named(main, settings, urls):
    result = main("status", DATABASE_URL=urls.database.replace("/forgekeeper?", "/elsewhere?"))

    assert result.status == 1
    assert '"elsewhere" does not exist' in result.complaint


def test_where_redis_does_not_listen_a_command_names_server_port_and_setting(main, database, closed_port):
    result = main("send", NAME, REDIS_URL=f"redis://forge:hunter2@127.0.0.1:{closed_port}/0")

    assert result.status == 1
    assert result.complaint.startswith("cannot use Redis: ")
    assert str(closed_port) in result.complaint
    assert result.complaint.endswith("; check FORGEKEEPER_REDIS_URL")
    assert "hunter2" not in result.complaint


def test_where_redis_does_not_listen_status_warns_with_server_port_and_setting(main, database, closed_port):
    result = main("status", "--json", REDIS_URL=f"redis://forge:hunter2@127.0.0.1:{closed_port}/0")

    (warning,) = [one for one in result.json["warnings"] if "Redis" in one]
    assert result.status == 0
    assert warning.startswith("cannot use Redis: ")
    assert str(closed_port) in warning
    assert "; check FORGEKEEPER_REDIS_URL" in warning
    assert "hunter2" not in result.stdout + result.stderr


def test_where_redis_has_no_socket_a_command_names_the_socket(main, database):
    result = main("send", NAME, REDIS_URL="unix://:hunter2@/nowhere/redis.sock?db=0")

    assert result.status == 1
    assert "/nowhere/redis.sock" in result.complaint
    assert "hunter2" not in result.complaint


@pytest.mark.parametrize("command", NEED_SERVERS, ids=words)
def test_on_a_database_without_our_tables_a_command_says_how_to_make_them(main, settings, unmigrated, command):
    result = main(*command, DATABASE_URL=unmigrated)

    count = len(list((Path(migrations.__file__).parent / "forgekeeper").glob("0*.py")))
    sentence = f"the database lacks {count} migration(s): run `forgekeeper migrate`"
    assert (result.status, result.complaint) == (1, sentence)


def test_status_says_which_table_of_the_forge_is_missing(main, own_database, query):
    query(own_database, "drop table user_statuses")

    result = main("status", DATABASE_URL=own_database)

    assert result.status == 1
    assert "user_statuses" in result.complaint
    assert "forgekeeper check" in result.complaint


@pytest.mark.parametrize("command", NEED_A_BATCH)
def test_an_unknown_batch_is_refused_with_the_names_there_are(main, settings, command):
    result = main(command, "user_status")

    assert (result.status, result.complaint) == (
        2,
        f"there is no batch 'user_status'; there are: {', '.join(sorted(BATCHES))}",
    )


@pytest.mark.parametrize("command", ["on", "off"])
def test_an_unknown_flag_is_refused_with_the_names_there_are(main, settings, command):
    result = main("flags", command, "bulk_delete")

    assert result.status == 2
    assert result.complaint.startswith("there is no flag 'bulk_delete'; there are: bulk_delete_job_artifacts, ")


def test_an_unknown_queue_is_refused_with_the_names_there_are(main, settings):
    result = main("worker", "--queues", "cron", "--queues", "crone")

    assert (result.status, result.complaint) == (
        2,
        "there is no queue 'crone'; there are: cron, git, artifacts, objects",
    )


@pytest.mark.parametrize(
    ("command", "forms"),
    [(("why", NAME), "08:30, today 08:30 or "), (("pause", NAME, "--until"), "+2h, 90m, 06:00, tomorrow 06:00 or ")],
    ids=words,
)
@pytest.mark.parametrize("time", ["tomorrow", "", "2026-13-01", "25:00"])
def test_what_is_no_time_is_refused_with_one_that_is(main, database, command, forms, time):
    result = main(*command, time)

    assert (result.status, result.complaint) == (
        2,
        f"{time!r} is not a time: write it as {forms}2026-11-20T08:30, in UTC",
    )


@pytest.mark.parametrize("command", [("why", NAME), ("pause", NAME, "--until")], ids=words)
@pytest.mark.parametrize("time", ["0001-01-01", "9999-12-31T23:59:59", "9999-12-31T23:59:59-12:00"])
def test_a_time_at_the_end_of_the_calendar_is_no_crash(main, database, command, time):
    result = main(*command, time)

    assert "Traceback" not in result.stderr
    assert main("status").status == 0


def test_a_pause_that_would_end_in_the_past_is_refused(main, database):
    result = main("pause", NAME, "--until", "2020-01-01")

    assert (result.status, result.complaint) == (2, "2020-01-01 00:00:00 has passed; give a time to come, in UTC")


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("* * * *", "'* * * *' has 4 fields; a schedule has five"),
        ("61 * * * *", "'61 * * * *' is not a cron expression: "),
        ("* * 30 2 *", "'* * 30 2 *' never fires"),
        ("* * 1 * 1", "restricts both the day of the month and the day of the week"),
        ("hourly", "a schedule has five"),
    ],
)
def test_a_malformed_schedule_is_refused_with_its_setting_and_what_is_wrong(main, settings, expression, sentence):
    result = main("settings", CRON_PRUNE=expression)

    assert result.status == 2
    assert result.complaint.startswith("bad value of FORGEKEEPER_CRON_PRUNE: ")
    assert sentence in result.complaint


def test_an_unknown_setting_is_refused_with_the_name_that_was_meant(forgekeeper, settings):
    result = forgekeeper("status", CRON_PRUNES="* * * * *")

    assert result.status == 2
    assert result.complaint.startswith("unknown setting FORGEKEEPER_CRON_PRUNES (did you mean FORGEKEEPER_CRON_PRUNE?)")


def test_for_a_name_like_no_other_nothing_is_suggested(main, settings):
    result = main("status", FROBNICATE="1")

    assert "did you mean" not in result.complaint


def test_an_unknown_setting_in_the_env_file_is_refused_too(forgekeeper, settings, tmp_path):
    (tmp_path / ".env").write_text("FORGEKEEPER_DATABSE_URL=postgresql://u:hunter2@h/n\n")

    result = forgekeeper("status")

    assert result.status == 2
    assert "FORGEKEEPER_DATABSE_URL (did you mean FORGEKEEPER_DATABASE_URL?)" in result.complaint
    assert "hunter2" not in result.complaint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKER_THREADS", "many"),
        ("WORKER_THREADS", "0"),
        ("DEAD_AFTER", "soon"),
        ("DEAD_AFTER", "-1"),
        ("LOG_LEVEL", "LOUD"),
        ("LOG_FORMAT", "xml"),
        ("CATCH_UP_PRUNE", "twice"),
        ("PACE_PRUNE", "0"),
        ("OBJECT_STORES", "{not json"),
        ("OBJECT_STORES", "[]"),
    ],
)
def test_a_bad_value_is_refused_with_its_setting(main, settings, name, value):
    result = main("status", **{name: value})

    assert result.status == 2
    assert f"FORGEKEEPER_{name}" in result.complaint


def test_all_that_is_wrong_with_the_settings_is_said_at_once(main, settings):
    result = main("status", CRON_PRUNE="x", WORKER_THREADS="many", SHEDULE="1")

    for name in ("CRON_PRUNE", "WORKER_THREADS", "SHEDULE"):
        assert f"FORGEKEEPER_{name}" in result.complaint


@pytest.mark.parametrize(
    "url",
    [
        "mysql://forge:hunter2@host/forge",
        "postgresql://forge:x@hunter2@host/forge",
        "postgresql://forge:x/hunter2@host/forge",
        "postgresql://forge:hunter2@host:port/forge",
        "host=h password=hunter2 nonsense",
    ],
)
def test_a_database_url_that_makes_no_sense_is_refused_without_its_password(main, settings, url):
    result = main("status", DATABASE_URL=url)

    assert result.status == 2
    assert result.complaint.startswith("bad value of FORGEKEEPER_DATABASE_URL: ")
    assert "hunter2" not in result.complaint


@pytest.mark.parametrize(
    "url",
    [
        "http://forge:hunter2@host/0",
        "redis://forge:x/hunter2@host/0",
        "redis://forge:hunter2#x@host/0",
        "redis://forge:hunter2@host:port/0",
        "hunter2",
    ],
)
def test_a_redis_url_that_makes_no_sense_is_refused_without_its_password(main, settings, url):
    result = main("status", REDIS_URL=url)

    assert result.status == 2
    assert result.complaint.startswith("bad value of FORGEKEEPER_REDIS_URL: ")
    assert "hunter2" not in result.complaint


def test_a_redis_database_that_is_no_number_is_refused(main, settings):
    result = main("settings", REDIS_URL="redis://127.0.0.1/zero")

    assert result.status == 2
    assert "FORGEKEEPER_REDIS_URL" in result.complaint


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("runs", NAME), "runs"),
        (("run",), "BATCH"),
        (("run", NAME, "--jsn"), "--jsn"),
        (("run", NAME, "prune"), "prune"),
        (("worker", "--threads", "0"), "--threads"),
        (("seed", "--scale", "x"), "--scale"),
        (("flags", "onn", FLAG), "onn"),
    ],
    ids=words,
)
def test_wrong_use_is_refused_with_a_sentence_that_names_it(main, settings, command, named):
    result = main(*command)

    assert result.status == 2
    assert named in result.complaint
