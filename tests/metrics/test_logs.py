"""Log lines: what is on them, what is masked, and that each is one line."""

import json
import logging
import os
from pathlib import Path

import pytest
import structlog

from metrics import logs
from metrics.logs import MAX_FACT_CHARACTERS, MAX_SHOWN_ITEMS, SECRET_WORDS, redact
from tests.harness.pipes import drain, full_pipe

SECRET = "hunter2"
LIMIT = 60.0


class Tripped(Exception):
    """Something to log."""


@pytest.fixture
def line(stream):
    """Read the one line that was logged."""

    def read():
        (text,) = stream.getvalue().splitlines()
        return json.loads(text)

    return read


log = structlog.get_logger("tests")
LOGGERS = [log, logging.getLogger("library")]


def test_facts_keep_their_types(line):
    facts = {"count": 3, "share": 0.5, "late": False, "tick": None, "ids": [1, 2], "by": {"table": 1}}

    log.info("run finished", **facts)

    assert {name: line()[name] for name in facts} == facts


def test_a_library_s_record_looks_like_ours(line):
    logging.getLogger("library").warning("%d connections", 3, extra={"pool": "main"})

    assert line() | {"at": ""} == {"at": "", "level": "warning", "message": "3 connections", "pool": "main"}


@pytest.mark.parametrize("logger", LOGGERS)
def test_what_is_bound_to_the_context_is_on_every_line(line, logger):
    structlog.contextvars.bind_contextvars(batch="prune", run=7)

    logger.info("run started")

    assert (line()["batch"], line()["run"]) == ("prune", 7)


@pytest.mark.parametrize("logger", LOGGERS)
def test_an_exception_and_its_cause_are_on_the_same_line(line, logger):
    try:
        trip("the second", Tripped("the first"))
    except Tripped:
        logger.exception("run failed")

    assert line()["message"] == "run failed"
    assert "Tripped: the first" in line()["exception"]
    assert line()["exception"].endswith("Tripped: the second")


def test_a_person_gets_lines_to_read(stream):
    logs.configure("console", "INFO", stream)

    log.info("run finished", deleted=3)

    assert "[info     ] run finished" in stream.getvalue()
    assert "deleted=3" in stream.getvalue()


URL = "redis://:hunter2@h/0"
FACTS = [[URL], {"urls": {"redis": URL}}, (1, URL), Tripped(URL), URL.encode(), {"password": SECRET}]


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_secret_is_masked_in_message_fact_trace_and_a_library_s_line(stream, style):
    text = "cannot reach postgresql://u:hunter2@h/d with token=hunter2"
    logs.configure(style, "INFO", stream)
    try:
        trip(text)
    except Tripped:
        log.exception(text, fact=text)
    logging.getLogger("library").warning("failed: %s", text, extra={"url": text})
    log.info("connected", facts=FACTS, **{"a URL": URL, "an exception": Tripped(URL)})

    assert SECRET not in stream.getvalue()
    assert "********" in stream.getvalue()


TO_REDACT = {
    "the name of a secret": {"api_key": SECRET},
    "a secret with its name": {"fact": f"token={SECRET}"},
    "a name in other letters": {"fact": f"pa\u017fsword={SECRET}"},
    "a signature": {"fact": f"?sig={SECRET}"},
    "a URL": {"fact": URL},
    "controls that JSON escapes": {"fact": "\x1b"},
    "controls that it does not": {"fact": "\x7f"},
    "a long text": {"fact": "x" * 2 * MAX_FACT_CHARACTERS},
    "a large number": {"fact": 2**63},
    "many parts": {"fact": list(range(2 * MAX_SHOWN_ITEMS))},
    "many facts": {f"fact {number}": number for number in range(2 * MAX_SHOWN_ITEMS)},
    **{word: {word.title(): 7} for word in SECRET_WORDS},
}


@pytest.mark.parametrize("facts", TO_REDACT.values(), ids=TO_REDACT)
def test_a_line_of_plain_facts_is_redacted_where_there_is_something_to_redact(line, facts):
    log.info("odd", **facts)

    whole = {"at": line()["at"], "level": "info", "message": "odd", **facts}
    assert line() == redact(whole) != whole


@pytest.mark.parametrize(
    "text",
    [
        *("run 7 of prune at 10:31", "s3://bucket/a@b", "see https://h:443/p", "the password was wrong"),
        "ended by a signal: 9",
    ],
)
def test_what_is_no_secret_stays(line, text):
    log.info(text)

    assert line()["message"] == text


@pytest.mark.parametrize("style", ["json", "console"])
@pytest.mark.parametrize("code", [0x1B, 0x0D, 0, 7, 0x7F, 0x9B, 0x2028, 0x202E])
def test_control_characters_are_escaped(stream, style, code):
    logs.configure(style, "INFO", stream)

    log.info("odd", name=f"a{chr(code)}b")

    escaped = f"a\\x{code:02x}b" if code < 256 else f"a\\u{code:04x}b"
    assert chr(code) not in stream.getvalue()
    assert (json.loads(stream.getvalue())["name"] if style == "json" else stream.getvalue()).count(escaped) == 1


class Speechless:
    """Something that has no text."""

    def __str__(self):
        raise Tripped


@pytest.mark.parametrize("value", ["broken\udc80", 2**70, float("nan"), {1: 2}, object, Speechless()], ids=type)
def test_a_fact_that_json_cannot_write_costs_no_line(line, value):
    log.info("odd", value=value)

    assert line()["message"] == "odd"


@pytest.mark.parametrize("logger", LOGGERS)
def test_a_line_that_cannot_be_written_fails_nobody(stream, logger):
    with Path("/dev/full").open("w") as full:
        logs.configure("json", "INFO", full)

        logger.warning("run started")

        # What it holds would be written once more when it is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_lines_that_nobody_reads_are_lost_and_the_next_says_how_many():
    with full_pipe() as (reading, writing), os.fdopen(writing, "w", closefd=False) as pipe:
        logs.configure("json", "INFO", pipe)
        for logger in LOGGERS:
            logger.warning("unread")
        drain(reading)

        log.info("read")

        lines = list(map(json.loads, drain(reading).splitlines()))
    facts = [(one["level"], one["message"], one.get("lost")) for one in lines]
    assert facts == [("warning", "log lines lost, nobody read them", len(LOGGERS)), ("info", "read", None)]


def test_a_line_of_which_a_slow_reader_takes_a_part_comes_whole_before_the_next():
    long, last = {"fact": "a" * 3000, "more": "b" * 3000}, {"fact": "c"}
    with full_pipe() as (reading, writing), os.fdopen(writing, "w", closefd=False) as pipe:
        logs.configure("json", "INFO", pipe)
        read = os.read(reading, 4096)
        log.info("long", **long)
        read += drain(reading).encode()

        log.info("last", **last)

        read += drain(reading).encode()
    lines = [json.loads(line) for line in read.decode().lstrip(".").splitlines()]
    assert [{name: one[name] for name in one if name in long} for one in lines] == [long, last]


def test_the_level_of_each_line_is_counted(stream):
    levels = []
    logs.configure("json", "INFO", stream, on_line=levels.append)

    log.debug("not written")
    log.info("run started")
    logging.getLogger("library").warning("connection lost")
    log.error("run failed")

    assert levels == ["info", "warning", "error"]


@pytest.mark.parametrize("style", ["json", "console"])
@pytest.mark.parametrize("logger", LOGGERS)
def test_a_trace_keeps_its_end_however_long_the_errors_are(stream, style, logger):
    logs.configure(style, "INFO", stream)
    try:
        trip("the reason", Tripped("\x1b password='hunter2 " + "x" * 1_000_000))
    except Tripped:
        logger.exception("run failed")

    assert len(stream.getvalue()) < 4 * MAX_FACT_CHARACTERS
    assert "Tripped: the reason" in stream.getvalue()
    assert "Tripped: \\" in stream.getvalue()
    assert SECRET not in stream.getvalue()


def trip(text, cause=None):
    raise Tripped(text) from cause
