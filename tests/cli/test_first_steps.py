"""What goes wrong before anything works: each is a sentence that says what to do."""

import subprocess
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis

from demo.servers.machine import redis_binary
from forgekeeper.process.presence import version
from tests.harness.ports import free_ports
from tests.harness.waiting import wait_until


@pytest.fixture
def plain_redis(tmp_path):
    """The port of a Redis without TLS."""
    (port,) = free_ports(1)
    binary = redis_binary()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as client:
            assert wait_until(lambda: answers(client), 20)
        yield port
    finally:
        server.terminate()
        server.wait()


def answers(client):
    try:
        return client.ping()
    except redis.ConnectionError:
        return False


@pytest.mark.parametrize("command", [("send", "prune"), ("leases",)], ids=" ".join)
def test_tls_at_a_port_that_has_none_is_named(main, database, plain_redis, command):
    result = main(*command, REDIS_URL=f"rediss://127.0.0.1:{plain_redis}/0")

    assert (result.status, "speaks no TLS though FORGEKEEPER_REDIS_URL begins with rediss://" in result.complaint) == (
        1,
        True,
    )


def test_check_says_so_too(main, database, plain_redis):
    result = main("check", "--json", REDIS_URL=f"rediss://127.0.0.1:{plain_redis}/0")

    (said,) = [f["message"] for f in result.json["findings"] if f["subject"] == "redis"]
    assert "check host, port and scheme" in said


def test_check_shows_the_version(main, database):
    found = main("check", "--json").json["findings"]

    assert [f["message"] for f in found if f["subject"] == "forgekeeper"] == [f"version {version()}"]


@pytest.fixture
def plain_role(settings, new_database, query):
    """A database's URL as a role that may do nothing in it, its URL as the owner's, and the role."""
    url, name = new_database(), f"r{uuid4().hex}"
    query(url, f"create role {name} login")
    parts = urlsplit(url)
    yield parts._replace(netloc=f"{name}@{parts.netloc.rpartition('@')[2]}").geturl(), url, name
    query(url, f"drop owned by {name}; drop role {name}")


def test_a_role_that_may_make_no_tables_is_said_who_migrates(main, plain_role):
    result = main("migrate", DATABASE_URL=plain_role[0])

    assert result.status == 1
    assert result.complaint == (
        "permission denied for schema public: nothing was changed; run `forgekeeper migrate` as the role that owns "
        "forgekeeper's tables, or, before there are any, `grant usage, create on schema public to ROLE` "
        "(docs/security.md)"
    )


def test_what_a_role_is_said_to_need_is_enough_to_migrate(main, plain_role, query):
    as_role, url, name = plain_role
    query(url, f"grant usage, create on schema public to {name}")

    assert main("migrate", DATABASE_URL=as_role).status == 0


def test_check_init_does_not_send_to_itself(main, settings, new_database, tmp_path):
    stores = f'{{"artifacts": "{tmp_path.as_uri()}"}}'

    result = main("check", "--init", "--json", DATABASE_URL=new_database(), OBJECT_STORES=stores)

    assert not [f["message"] for f in result.json["findings"] if "check --init" in f["message"]]
