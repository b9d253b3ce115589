"""What docs/security.md grants in Redis is what the code asks for, command by command."""

import ast
import re
from pathlib import Path

import dramatiq
import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from redis.lock import Lock

from tests.system.soak import rights

ROOT = Path(__file__).parents[2]
DRAMATIQ = {"dispatch": Path(dramatiq.__file__).parent / "brokers" / "redis" / "dispatch.lua"}
OURS = {path.stem: path for folder in ("forgekeeper", "workers") for path in (ROOT / folder).rglob("*.lua")}
LUA = OURS | DRAMATIQ
CALLERS = [*ROOT.glob("forgekeeper/**/*.py"), *ROOT.glob("workers/**/*.py"), *ROOT.glob("metrics/*.py")]
ON_SAMPLES = {"demo", "sample"}
"""Modules that only ever meet a Redis of their own."""
CONNECTING = {"ping", "select", "evalsha", "script|load"}
"""What the clients do by themselves: redis-py loads the scripts, and runs them."""
CLIENTS = {"client", "pipe", "broker.client", "self.client", "self._client"}
OPTIONAL = {"info"}
NO_COMMANDS = {"execute", "execute_command"}
LOCKS = (Lock.LUA_RELEASE_SCRIPT, Lock.LUA_REACQUIRE_SCRIPT)
"""Scripts of redis-py that leases run."""
AS = {"pipeline": {"multi", "exec"}, "delete": {"del"}, "scan_iter": {"scan"}}
AS["register_script"] = {call for script in LOCKS for call in re.findall(r"redis\.call\('(\w+)'", script)}
"""What the client's methods are on the wire, where that is not their name."""
ALL = {"allkeys", "allcommands", "allchannels"}
DANGEROUS = {"keys", "flushall", "flushdb", "config", "debug", "info", "acl", "sort", "restore", "migrate", "script"}


SCRIPTS = set(LUA)
BY_HAND = {"upload_adopt"}
OF = {"uploads": {"upload_prepare"}, "worker": SCRIPTS - BY_HAND - {"upload_prepare"}}
"""Which scripts each runs; a scheduler runs a part of Dramatiq's."""
SENDS = ("forgekeeper", "forgekeeper-scheduler", "forgekeeper-worker")
MAINTAINS = {"forgekeeper", "forgekeeper-worker"}
"""Who may list keys: Dramatiq's maintenance does."""


def commands(user):
    """Name the commands that a user has been granted."""
    return {rule[1:] for rule in rights.users()[user] if rule.startswith("+")}


def in_scripts(names):
    return {call for name in names for call in re.findall(r"redis\.p?call\([\"'](\w+)[\"']", LUA[name].read_text())}


def in_code():
    for path in CALLERS:
        if path.stem in ON_SAMPLES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) in CLIENTS
            ):
                yield from AS.get(node.func.attr, {node.func.attr})
                if node.func.attr == "zrange" and any(keyword.arg == "desc" for keyword in node.keywords):
                    yield "zrevrange"


def test_whoever_may_do_everything_may_do_what_the_code_does_and_no_more():
    asked = in_scripts(SCRIPTS) | set(in_code()) | CONNECTING

    assert commands(rights.PERSON) == asked - NO_COMMANDS - OPTIONAL


@pytest.mark.parametrize("who", OF)
def test_everybody_may_do_what_their_scripts_do(who):
    assert in_scripts(OF[who]) - commands(f"{rights.PERSON}-{who}") == set()


@pytest.mark.parametrize("user", sorted(set(rights.users()) - {rights.PERSON}))
def test_nobody_may_do_more_than_who_may_do_everything(user):
    # Producers in other languages load their script.
    assert commands(user) - commands(rights.PERSON) <= {"script|load"}


@pytest.mark.parametrize("user", sorted(rights.users()))
def test_nobody_is_granted_a_category_or_a_dangerous_command_or_every_key_or_channel(user):
    rules = rights.users()[user]

    assert not [rule for rule in rules if rule.startswith(("+@", "~*", "%", "&*")) or rule in ALL]
    assert commands(user).isdisjoint(DANGEROUS - ({"keys"} if user in MAINTAINS else set()))


@pytest.fixture
def connect(database, urls):
    """Connect as a user of the page."""
    with redis.from_url(urls.redis) as server:
        rights.make_users(server, "secret")

        def client(user):
            return redis.from_url(urls.redis, username=user, password="secret", driver_info=None)

        yield client
        server.execute_command("ACL", "DELUSER", *rights.users())


def broker(client, **options):
    return RedisBroker(client=client, namespace="forgekeeper", middleware=[], **options)


@pytest.mark.parametrize("user", SENDS)
def test_who_sends_may_do_what_dramatiq_does_to_send(connect, user):
    sending = broker(connect(user), maintenance_chance=0)
    connect(user).script_load("return 1")

    sending.declare_queue("cron")
    sending.enqueue(Message("cron", "prune", (), {}, {}))

    assert sending.client.type("forgekeeper:cron") == b"list"


def test_a_worker_may_do_what_dramatiq_does_with_messages(connect):
    mine, other = (broker(connect("forgekeeper-worker"), maintenance_chance=1_000_000) for _ in range(2))
    for one in (mine, other):
        one.declare_queue("cron")
    for _ in range(4):
        mine.enqueue(Message("cron", "prune", (), {}, {}))

    first, second, third, _ = (Message.decode(body) for body in mine.do_fetch("cron", 4))
    for command, message in (("ack", first), ("nack", second), ("requeue", third)):
        getattr(mine, f"do_{command}")("cron", message.options["redis_message_id"])
    mine.client.zadd("forgekeeper:__heartbeats__", {mine.broker_id: 1})

    assert len(other.do_fetch("cron", 4)) == 2
    assert other.do_qsize("cron") >= 2
