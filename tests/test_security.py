"""What docs/security.md grants in Redis is what the code asks for, command by command."""

import ast
import re
from pathlib import Path

import pytest
from dramatiq.brokers import redis as dramatiq_redis

from tests.system.soak import rights

ROOT = Path(__file__).parent.parent
LUA = {path.stem: path for folder in ("forgekeeper", "workers") for path in (ROOT / folder).rglob("*.lua")}
LUA["dispatch"] = Path(dramatiq_redis.__file__).parent / "redis" / "dispatch.lua"
CALLERS = [*ROOT.glob("forgekeeper/**/*.py"), *ROOT.glob("workers/**/*.py"), *ROOT.glob("metrics/*.py")]
ON_SAMPLES = {"demo", "sample"}
"""Modules that only ever meet a Redis of their own."""
CONNECTING = {"ping", "select"}
LOADING = {"script|load"}
"""How Dramatiq's script, and those of producers in other languages, come to the server."""
CLIENTS = {"client", "pipe", "broker.client", "self.client", "self._client", "subscription"}
OPTIONAL = {"info"}
NO_COMMANDS = {"execute", "execute_command", "register_script", "get_message", "pubsub"}
AS = {"pipeline": {"multi", "exec"}}
"""What the client's methods are on the wire, where that is not their name."""
ALL = {"allkeys", "allcommands", "allchannels"}
DANGEROUS = {"flushall", "flushdb", "config", "debug", "info", "acl", "sort", "restore", "migrate", "script"}


SCRIPTS = set(LUA)
BY_HAND = {"lease_break", "upload_adopt", "upload_withdraw", "upload_retry"}
OF = {"uploads": {"upload_prepare"}, "worker": SCRIPTS - BY_HAND - {"upload_prepare"}}
"""Which scripts each runs."""


def commands(user):
    """Name the commands that a user has been granted."""
    return {rule[1:] for rule in rights.users()[user] if rule.startswith("+")}


def in_scripts(names):
    return {call for name in names for call in re.findall(r"redis\.p?call\(['\"](\w+)['\"]", LUA[name].read_text())}


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
    asked = in_scripts(SCRIPTS) | set(in_code()) | CONNECTING | LOADING

    assert commands(rights.PERSON) == asked - NO_COMMANDS - OPTIONAL


@pytest.mark.parametrize("who", OF)
def test_everybody_may_do_what_their_scripts_do(who):
    assert in_scripts(OF[who]) - commands(f"{rights.PERSON}-{who}") == set()


@pytest.mark.parametrize("user", sorted(set(rights.users()) - {rights.PERSON}))
def test_nobody_may_do_more_than_who_may_do_everything(user):
    assert commands(user) - commands(rights.PERSON) == set()


@pytest.mark.parametrize("user", sorted(rights.users()))
def test_nobody_is_granted_a_category_or_a_dangerous_command_or_every_key_or_channel(user):
    rules = rights.users()[user]

    assert not [rule for rule in rules if rule.startswith(("+@", "~*", "%", "&*")) or rule in ALL]
    assert commands(user).isdisjoint(DANGEROUS)
