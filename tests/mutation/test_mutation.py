"""What counts as a mutant, and that a sample can be drawn again."""

import subprocess

import pytest

from .choosing import Product, sample
from .spoiling import spoilings


def spoilt(source, path="a.py"):
    found = spoilings(path, source.encode())
    return {(one.kind, source[: one.start] + one.text + source[one.end :]) for one in found}


@pytest.mark.parametrize(
    ("source", "kind", "others"),
    [
        ("a < b", "comparison", {"a <= b", "a >= b"}),
        ("a == b is c", "comparison", {"a != b is c", "a == b is not c"}),
        ("a not in b", "comparison", {"a in b"}),
        ("a and b or c", "and/or", {"a or b or c", "a and b and c"}),
        ("a & b", "and/or", {"a | b"}),
        ("not a", "not", {" a"}),
        ("min(a, b)", "limit", {"max(a, b)"}),
        ("a = True", "boolean", {"a = False"}),
        ("a = 60", "number", {"a = 61", "a = 59"}),
        ('a: int = f("15")', "number", {'a: int = f("16")'}),
        ("def f():\n    return a", "return", {"def f():\n    return None"}),
        ("a.go()", "statement", {"pass"}),
        ("a.b = c", "statement", {"pass"}),
        ("raise a", "statement", {"pass"}),
    ],
)
def test_each_place_of_python_is_spoilt(source, kind, others):
    assert {text for found, text in spoilt(source) if found == kind} == others


@pytest.mark.parametrize(
    "source", ['"""A < 1, and not b."""', "assert a < 1", "def f(a: Literal[1]) -> Literal[2]: ...", "a = 'b < 1'"]
)
def test_prose_annotations_and_assertions_stay_whole(source):
    assert spoilt(source) == set()


def test_conditions_of_sql_are_spoilt_and_assignments_stay():
    query = "a = 'update t set b = %(c)s where d <= e and f is null'"

    assert {text for _kind, text in spoilt(query)} == {
        query.replace("<=", "<"),
        query.replace("<=", ">"),
        query.replace("and", "or"),
        query.replace("is null", "is not null"),
    }


def test_a_limit_in_sql_lets_one_more_through():
    assert ("sql", "select a from b limit %(c)s + 1") in spoilt("select a from b limit %(c)s", "a.sql")


def test_calls_of_redis_comparisons_and_numbers_in_lua_are_spoilt():
    script = "-- 1 < 2\nif redis.call('get', KEYS[1]) == '1' then\n  redis.call('del', KEYS[1])\n  return 5\nend"

    assert {text for _kind, text in spoilt(script, "a.lua")} == {
        script.replace("==", "~="),
        script.replace("  redis.call('del', KEYS[1])", ""),
        script.replace("5", "6"),
        script.replace("5", "4"),
    }


@pytest.fixture
def tree(tmp_path):
    """A repository with two rooms, one file large."""
    for path, lines in (("small.py", 3), ("large/inside.py", 30), ("tests/test_it.py", 30)):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("".join(f"if a[{path!r}, {n}] < b:\n    c({n})\n" for n in range(lines)))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    return tmp_path


def drawn(tree, seed=1):
    return sample(Product(tree).mutants(), 12, seed)


def test_a_sample_has_every_room_of_the_product_by_its_size(tree):
    rooms = [mutant.room for mutant in drawn(tree)]

    assert (rooms.count("large"), rooms.count("small")) == (10, 2)


def test_a_sample_has_no_line_twice(tree):
    assert len({(mutant.path, mutant.line) for mutant in drawn(tree)}) == 12


def test_the_same_seed_chooses_the_same_mutants_and_another_one_others(tree):
    assert drawn(tree) == drawn(tree) != drawn(tree, seed=2)


def test_what_was_chosen_is_chosen_again_when_it_has_moved(tree):
    before = {mutant.words for mutant in drawn(tree)}

    subprocess.run(["git", "mv", "large/inside.py", "large/elsewhere.py"], cwd=tree, check=True)

    assert {mutant.words for mutant in drawn(tree)} == before
