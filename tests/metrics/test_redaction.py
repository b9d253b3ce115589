"""What is left of foreign text: never a secret, and never for longer than its length allows."""

import json
import time

import hypothesis
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as some

from metrics import logs
from metrics.logs import (
    CUT_MARK,
    MAX_EXAMINED_CHARACTERS,
    MAX_FACT_CHARACTERS,
    MAX_SHOWN_ITEMS,
    SECRET_MASK,
    clean_text,
    describe_error,
    mask_and_escape,
    redact,
)
from tests.harness.thorough import examples, whole_only

LINEAR = 30
"""Ten times the length may take this many times the time: what grows with its square takes a hundred times."""
NOISE = 0.05
"""Seconds below which nobody waits, and no clock is exact."""

SHAPES = {
    "repeated names": (":", "password"),
    "repeated names, signs and spaces": ("", "secret = "),
    "names that never end": (":", "_token"),
    "one long word": ("=", "a"),
    "colons": ("", ":"),
    "spaces behind a sign": ("password=", " "),
    "schemes": ("", "authorization: Bearer "),
    "quotes that never close": ("", 'password="'),
    "escaped quotes": ('password="', '\\"'),
    "quotes that are escaped ever more": ('password="', 'token=\\"secret=\\\\\\"'),
    "backslashes": ("password='", "\\"),
    "chains of URLs": ("", "a://b:"),
    "a password without an end": ("redis://u:", "x"),
    "at signs": ("a://b:", "@"),
    "a name in each mapping of many": ("", '{"api_key": {'),
    "controls": (":", "\x1b[31m\u202e\udc80"),
}


def seconds(function, text):
    """What it takes this thread at best, whatever else the machine, and Python's garbage collector, are at."""
    took = []
    for _ in range(3):
        began = time.thread_time()
        function(text)
        took.append(time.thread_time() - began)
    return min(took)


@whole_only
@pytest.mark.parametrize(("begin", "piece"), SHAPES.values(), ids=SHAPES)
def test_a_text_of_any_shape_takes_as_long_as_it_is(begin, piece):
    less, more = (begin + piece * (size // len(piece)) for size in (15_000, 150_000))

    assert seconds(mask_and_escape, more) <= LINEAR * seconds(mask_and_escape, less) + NOISE


# What a secret is made of here is nowhere else: not one letter of it may be seen.
LETTER = "\u0436"
IN_WORDS = some.text(LETTER + "/@:.'\"=\\-", max_size=6).map(lambda rest: LETTER + rest)
IN_QUOTES = some.text(LETTER + " ,;&:=@/\n'\"\\{}", max_size=8)


def thrice(value):
    for _ in range(3):
        value = json.dumps([value], ensure_ascii=False)
    return value


WHOLE = {
    "a URL": (IN_WORDS, lambda secret: f"redis://u:{secret}@h/0"),
    "a URL without a user": (IN_WORDS, lambda secret: f"postgresql://:{secret}@h:1/d?x=1"),
    "a name and an equals sign": (IN_WORDS, lambda secret: f"PGPASSWORD={secret} x=1"),
    "a name and a colon": (IN_WORDS, lambda secret: f"X-Auth-Token: {secret}\nHost: h"),
    "a signature": (IN_WORDS, lambda secret: f"https://h/o?sv=1&sig={secret}&se=2"),
    "a header": (IN_WORDS, lambda secret: f"Authorization: Bearer {secret}"),
    "JSON": (IN_QUOTES, lambda secret: json.dumps({"n": 1, "api_key": secret}, ensure_ascii=False)),
    "JSON in JSON in JSON": (IN_QUOTES, lambda secret: thrice({"token": secret})),
    "Python": (IN_QUOTES, lambda secret: repr({"account_key": secret, "x": b"1"})),
    "a libpq string": (
        IN_QUOTES,
        lambda secret: "host=h password='{}' dbname=d".format(secret.replace("\\", "\\\\").replace("'", "\\'")),
    ),
}
PIECES = [*logs.SECRET_WORDS[:7], "sig", "PassWord", "://", "Bearer ", *":=@'\"\\\n\x1b ,;&{}x7"]
AROUND = some.lists(some.sampled_from(PIECES), max_size=8).map("".join)
PADDING = some.sampled_from(["x", "x ", "a=1, ", "https://h/p ", "\n", "\x1b"])
BORDERS = some.sampled_from(
    [
        0,
        MAX_FACT_CHARACTERS // 2,
        MAX_FACT_CHARACTERS,
        MAX_EXAMINED_CHARACTERS,
        MAX_EXAMINED_CHARACTERS + MAX_FACT_CHARACTERS,
    ]
)
NEARBY = some.integers(-60, 60)


@whole_only
@pytest.mark.parametrize(("secrets", "written"), WHOLE.values(), ids=WHOLE)
@hypothesis.settings(max_examples=examples(40))
@given(data=some.data())
def test_no_letter_of_a_secret_is_shown_wherever_it_stands_and_however_long_it_is(secrets, written, data):
    secret = data.draw(secrets) * data.draw(
        some.sampled_from([1, 1, 1, MAX_FACT_CHARACTERS, MAX_EXAMINED_CHARACTERS // 3, MAX_EXAMINED_CHARACTERS])
    )
    before, padding = data.draw(AROUND), data.draw(PADDING)
    at = max(0, data.draw(BORDERS) + data.draw(NEARBY) - len(before))
    text = (padding * at)[:at] + before + " " + written(secret) + " " + data.draw(AROUND)
    text += padding * data.draw(some.sampled_from([0, MAX_FACT_CHARACTERS, MAX_EXAMINED_CHARACTERS]))

    assert LETTER not in clean_text(text)
    assert LETTER not in json.dumps(redact([{"fact": text}]), ensure_ascii=False)
    assert LETTER not in mask_and_escape(text)


ODD = (
    f"password=token=Bearer {LETTER}",
    f"password='C:\\' token='{LETTER} {LETTER}'",
    f"secret='never closed {LETTER}",
    "redis://u:" + LETTER * 2 * MAX_EXAMINED_CHARACTERS + "@h",
    "password='" + f"{LETTER} " * MAX_EXAMINED_CHARACTERS + "'",
    thrice({"token": f'{LETTER} "{LETTER}\\'}),
    f"password: X-Auth-Token: {LETTER}",
    f"pa\u017fsword={LETTER}",
    f"AWS_SECRET_ACCESS_KEY={LETTER}",
    f"DefaultEndpointsProtocol=https;AccountKey={LETTER};EndpointSuffix=h",
    f"redis://:p@{LETTER}@h:6379/0",
    f"postgresql://h/d?user=u&password={LETTER}&sslmode=require",
)


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_no_letter_of_an_odd_secret_is_shown(text):
    assert LETTER not in clean_text(text)


@pytest.mark.parametrize("key", ["password", "db password", "Authorization", "x" * MAX_FACT_CHARACTERS + "x"])
def test_what_has_the_name_of_a_secret_is_masked_whole(key):
    assert list(redact({key: "hunter2"}).values()) == [SECRET_MASK]


def test_what_is_too_long_says_how_long_it_is_or_shows_its_end():
    assert clean_text("x " * 500_000).endswith("… (1,000,000 characters)")
    assert len(clean_text("x " * 500_000)) == MAX_FACT_CHARACTERS
    assert clean_text("x" * (MAX_EXAMINED_CHARACTERS - 10) + " the end").endswith("the end")


def nested(levels, kind):
    value = "bottom"
    for _ in range(levels):
        value = {"in": value} if kind is dict else [value]
    return value


def loop():
    parts = []
    parts += [parts, {"parts": parts}]
    return parts


HUGE = {
    "a list": lambda: list(range(1_000_000)),
    "a mapping": lambda: {number: number for number in range(1_000_000)},
    "long keys": lambda: {f"{number}" + "k" * 1_000_000: 1 for number in range(5)},
    "long texts": lambda: ["password=" + "x" * 1_000_000] * 1_000,
    "nested lists": lambda: nested(10_000, list),
    "nested mappings": lambda: nested(10_000, dict),
    "what is in itself": loop,
    "bytes": lambda: b"\0" * 50_000_000,
    "a number in a text": lambda: OverflowError(10**1_000_000),
}


@pytest.mark.parametrize("make", HUGE.values(), ids=HUGE)
def test_a_fact_of_any_size_is_a_line_of_a_bounded_one(make):
    fact = make()

    line = orjson.dumps(redact({"fact": fact}))

    assert len(line) <= 3 * MAX_SHOWN_ITEMS * MAX_FACT_CHARACTERS
    assert seconds(redact, fact) < 5


def test_what_is_not_shown_is_said():
    assert redact(list(range(5_000)))[-1] == f"{CUT_MARK} 5,000 in all"
    assert redact(dict.fromkeys(range(5_000)))[CUT_MARK] == f"{CUT_MARK} 5,000 in all"


def test_an_error_is_one_line_that_every_server_keeps():
    line = describe_error(ValueError("x" * 440 + " \0\udc80 redis://u:" + LETTER * 1_000_000 + "@h\nsecond"))

    assert line.startswith("ValueError: xxx")
    assert (len(line) <= 500, line.isprintable(), LETTER in line) == (True, True, False)
