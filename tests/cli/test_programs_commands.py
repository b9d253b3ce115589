"""`forgekeeper redis` and `forgekeeper psql`: the real programs where they are found, a recorder where TLS is meant."""

import json
import os
import shutil
import sys
from urllib.parse import quote, urlsplit

import pytest

from forgekeeper.connections import client

PASSWORD = "p@ss/w:rd %41'"
RECORDER = """#!{python}
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "password": os.environ.get("REDISCLI_AUTH") or os.environ.get("PGPASSWORD")}}))
"""


@pytest.fixture
def recorded(tmp_path, monkeypatch, forgekeeper, settings):
    """Run a command with nothing on the PATH but recorders of these names; return what they were given."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def call(*arguments, programs, **urls):
        for name in programs:
            (folder / name).write_text(RECORDER.format(python=sys.executable))
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        result = forgekeeper(*arguments, **urls)
        return json.loads(result.stdout) if result.status == 0 else result

    return call


def installed(*programs):
    for program in programs:
        if shutil.which(program) is None:
            assert "CI" not in os.environ, f"{program} is missing: .ci/run installs it"
            pytest.skip(f"{program} is not installed")


def test_redis_does_what_it_is_told_at_the_redis_of_the_settings(forgekeeper, database):
    installed("redis-cli")
    client.set("told", "yes")

    result = forgekeeper("redis", "--raw", "GET", "told")

    assert (result.status, result.stdout, result.stderr) == (0, "yes\n", "")


def test_redis_logs_in_as_the_user_of_the_url(forgekeeper, database, urls):
    installed("redis-cli")
    client.execute_command("ACL", "SETUSER", "operator", "on", f">{PASSWORD}", "+@all")
    parts = urlsplit(urls.redis)
    place = f"{parts.netloc.rpartition('@')[2]}{parts.path}{'?' if parts.query else ''}{parts.query}"

    result = forgekeeper("redis", "ACL", "WHOAMI", REDIS_URL=f"{parts.scheme}://operator:{quote(PASSWORD, '')}@{place}")

    client.execute_command("ACL", "DELUSER", "operator")
    assert (result.status, result.stdout) == (0, "operator\n")


def test_psql_does_what_it_is_told_at_the_database_of_the_settings(forgekeeper, database):
    installed("psql")

    result = forgekeeper("psql", "-Atc", "select current_database(), count(*) from job_runs")

    (expected,) = database.execute_sql("select current_database()").fetchone()
    assert (result.status, result.stdout, result.stderr) == (0, f"{expected}|0\n", "")


def test_the_exit_status_is_the_program_s(forgekeeper, database):
    installed("psql", "redis-cli")

    assert forgekeeper("psql", "-c", "select nonsense").status == 1
    assert forgekeeper("redis", "PING", REDIS_URL="redis://127.0.0.1:1/0").status == 1


@pytest.mark.parametrize(
    ("url", "argv"),
    [
        ("redis://cache", ["-h", "cache", "-p", "6379"]),
        ("redis://:{}@cache:7000/3", ["-h", "cache", "-p", "7000", "-n", "3"]),
        ("redis://[::1]:7000?db=4", ["-h", "::1", "-p", "7000", "-n", "4"]),
        ("unix://:{}@/run/a%20b.sock?db=2", ["-s", "/run/a b.sock", "-n", "2"]),
        ("unix:///run/redis.sock?password={}", ["-s", "/run/redis.sock"]),
        ("redis://cache?username=ops&password={}&protocol=3", ["-h", "cache", "-p", "6379", "-3", "--user", "ops"]),
        (
            "rediss://ops:{}@cache/1?ssl_ca_certs=/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem",
            [
                *("-h", "cache", "-p", "6379", "-n", "1", "--tls", "--cacert", "/ca.pem"),
                *("--cert", "/c.pem", "--key", "/k.pem", "--user", "ops"),
            ],
        ),
        ("rediss://cache?ssl_cert_reqs=none", ["-h", "cache", "-p", "6379", "--tls", "--insecure"]),
    ],
)
def test_redis_is_led_where_the_url_leads_and_no_password_is_on_its_command_line(recorded, url, argv):
    given = recorded(
        "redis",
        "INFO",
        "memory",
        programs=["redis-cli"],
        REDIS_URL=url.format(quote(PASSWORD, "")),
        TLS_UNVERIFIED="redis",
    )

    assert given == {"argv": [*argv, "INFO", "memory"], "password": PASSWORD if "{}" in url else None}


def test_psql_is_led_where_the_url_leads_and_no_password_is_on_its_command_line(recorded):
    url = f"postgresql://ops:{quote(PASSWORD, '')}@db:6543/forge?sslmode=require&connect_timeout=3"

    given = recorded("psql", "-c", "select 1", programs=["psql"], DATABASE_URL=url)

    option, dsn, *rest = given["argv"]
    assert (option, rest, given["password"]) == ("--dbname", ["-c", "select 1"], PASSWORD)
    assert set(dsn.split(" ")) >= {"user=ops", "host=db", "port=6543", "dbname=forge", "sslmode=require"}
    assert "p@ss" not in dsn


def test_valkey_s_program_does_as_well(recorded):
    assert recorded("redis", "PING", programs=["valkey-cli"])["argv"][-1] == "PING"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("redis", "there is no redis-cli or valkey-cli on the PATH: install it (Debian: redis-tools)"),
        ("psql", "there is no psql on the PATH: install it (Debian: postgresql-client)"),
    ],
)
def test_a_program_that_is_not_installed_is_named(recorded, command, sentence):
    result = recorded(command, programs=[])

    assert (result.status, result.complaint) == (1, sentence)


@pytest.mark.parametrize("command", ["redis", "psql"])
def test_without_a_server_in_the_settings_the_setting_is_named(forgekeeper, command):
    result = forgekeeper(command)

    assert result.status == 2
    assert "_URL is not set" in result.complaint
