"""What pages show is asked once for all who look."""

import threading
from concurrent.futures import ThreadPoolExecutor

import peewee as pw
import pytest

from forgekeeper.cli.console import reading
from forgekeeper.cli.console.reading import PageReader
from forgekeeper.cli.terminal import Problem
from tests.harness.programs import eventually


@pytest.fixture
def reader(database):
    return PageReader()


class Question:
    """What a page asks: counts how often, and answers once it is let."""

    def __init__(self, *answers):
        self.answers, self.asked, self.let = list(answers), 0, threading.Event()

    def __call__(self):
        self.asked += 1
        self.let.wait(30)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_hundred_who_ask_at_once_ask_the_servers_once(reader):
    question = Question({"n": 1})
    with ThreadPoolExecutor(100) as viewers:
        answers = [viewers.submit(reader.ask, "page", question, timeout_seconds=30) for _ in range(100)]
        eventually(lambda: question.asked)

        question.let.set()

        assert {answer.result().value["n"] for answer in answers} == {1}
    assert question.asked == 1


def test_an_answer_serves_all_who_ask_within_a_second(reader):
    question = Question({"n": 1})
    question.let.set()
    reader.ask("page", question, timeout_seconds=30)

    reader.ask("page", question, timeout_seconds=30)

    assert question.asked == 1


def test_an_answer_that_is_no_longer_fresh_is_asked_for_again(reader, monkeypatch):
    monkeypatch.setattr(reading, "ANSWER_VALID_SECONDS", 0.0)
    question = Question({"n": 1}, {"n": 2})
    question.let.set()
    reader.ask("page", question, timeout_seconds=30)

    eventually(lambda: reader.ask("page", question, timeout_seconds=30).value == {"n": 2})


def test_who_has_acted_is_shown_nothing_that_was_asked_for_before(reader):
    before, after = Question({"n": 1}), Question({"n": 2})
    after.let.set()
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(reader.ask, "page", before, timeout_seconds=30)
        eventually(lambda: before.asked)
        reader.discard_answers()

        seen = [reader.ask("page", after, timeout_seconds=30).value]
        before.let.set()
        assert slow.result().value == {"n": 1}

    seen.append(reader.ask("page", after, timeout_seconds=30).value)
    reader.discard_answers()
    reader.ask("page", after, timeout_seconds=30)
    assert (seen, after.asked) == ([{"n": 2}] * 2, 2)


def test_where_a_server_refuses_the_last_answer_stays_and_the_trouble_is_said(reader, monkeypatch):
    monkeypatch.setattr(reading, "ANSWER_VALID_SECONDS", 0.0)
    question = Question({"n": 1}, pw.OperationalError("could not connect to server"))
    question.let.set()
    reader.ask("page", question, timeout_seconds=30)

    eventually(lambda: reader.ask("page", question, timeout_seconds=30).trouble)

    known = reader.ask("page", question, timeout_seconds=30)
    assert known.value == {"n": 1}
    assert "cannot use PostgreSQL: could not connect to server" in known.trouble


def test_an_answer_that_serves_nobody_later_is_dropped_once_it_has_expired(reader, monkeypatch):
    question = Question({"n": 1})
    question.let.set()
    reader.ask("program", question, timeout_seconds=30, serves_later=False)
    again = reader.ask("program", question, timeout_seconds=30, serves_later=False)
    asked = question.asked
    monkeypatch.setattr(reading, "ANSWER_VALID_SECONDS", 0.0)

    reader.ask("page", question, timeout_seconds=30)

    assert (again.value, asked, list(reader._answers)) == ({"n": 1}, 1, ["page"])


def test_a_page_waits_no_longer_than_its_patience_and_says_so(reader):
    question = Question({"n": 1})

    known = reader.ask("page", question, timeout_seconds=0.01)

    question.let.set()
    assert (known.value, known.trouble) == (None, reading.NO_ANSWER_SENTENCE)


def test_what_does_not_exist_is_a_problem_and_no_trouble(reader):
    question = Question(Problem("there is no such run"))
    question.let.set()

    known = reader.ask("page", question, timeout_seconds=30)

    assert (str(known.problem), known.trouble) == ("there is no such run", None)


def test_of_many_answers_the_last_are_kept(reader, monkeypatch):
    monkeypatch.setattr(reading, "MAX_KEPT_ANSWERS", 2)
    question = Question({"n": 1})
    question.let.set()
    for page in ("first", "second", "third"):
        reader.ask(page, question, timeout_seconds=30)

    reader.ask("first", question, timeout_seconds=30)

    assert question.asked == 4


def test_a_fault_of_a_page_is_said_and_the_page_is_asked_again(reader, monkeypatch):
    monkeypatch.setattr(reading, "ANSWER_VALID_SECONDS", 0.0)
    question = Question(ZeroDivisionError(), {"n": 1})
    question.let.set()

    assert "this page failed" in reader.ask("page", question, timeout_seconds=30).trouble

    eventually(lambda: reader.ask("page", question, timeout_seconds=30).value == {"n": 1})
