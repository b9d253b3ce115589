"""Many who look, and some who send half of a request: whoever acts is answered, and connections are left for others."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from demo.sample_data import add_statuses
from forgekeeper.cli.console.connections import MAX_CONNECTIONS_PER_ADDRESS, REQUEST_SECONDS
from forgekeeper.cli.console.named_lines import LineFile
from forgekeeper.cli.console.reading import MAX_QUESTIONS, PageReader, ReaderBusy
from forgekeeper.cli.console.users import USER_FORMAT, User, hash_password
from forgekeeper.ledger.holds import Hold
from tests.harness.thorough import whole_only
from tests.harness.waiting import scale_timeout, wait_until

PASSWORD, LIMIT = "correct horse", 60.0
BATCH = "user_status_cleanup"


THREADS = 40
"""As many as Starlette has for pages."""
READING = """
    select exists (
        select from pg_stat_activity where application_name = 'forgekeeper console' and wait_event = 'PgSleep'
    )
"""


@pytest.fixture
def acting(console, tmp_path):
    """A console in which anna may act, and her session."""
    users = LineFile(tmp_path / "users", USER_FORMAT)
    with users.edit_lines() as known:
        known["anna"] = User("anna", "operator", hash_password(PASSWORD))
    one = console(console_users=users.path, console_actions="on")
    return one, one.log_in("anna", PASSWORD)


@pytest.fixture
def slow_table(database):
    """Let whatever reads the statuses take a minute; sessions of the console that still read in the end are ended."""
    add_statuses(5)
    database.execute_sql(
        "alter table user_statuses rename to quick;"
        "create view user_statuses as select * from quick where pg_sleep(60) is not null"
    )
    yield
    database.execute_sql(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'forgekeeper console'"
    )
    database.execute_sql("drop view user_statuses; alter table quick rename to user_statuses")


@whole_only
@pytest.mark.usefixtures("slow_table")
def test_an_operator_stops_all_while_many_wait_for_previews(acting, database):
    console, cookie = acting
    with ThreadPoolExecutor(THREADS) as crowd:
        answers = [crowd.submit(console.get, f"/batches/{BATCH}/preview", Cookie=cookie) for _ in range(THREADS)]
        assert wait_until(lambda: database.execute_sql(READING).fetchone()[0], LIMIT)

        stopped = console.post("/act/stop", {"batch": "*", "reason": "wrong rows go"}, cookie=cookie)

        waiting = sum(not one.done() for one in answers)
        said = {one.result().status for one in answers}
    assert (stopped.status, Hold.find_state(BATCH), waiting > 0) == (303, "stopped", True)
    assert said == {503}
    assert "The page is" not in answers[0].result().text


@whole_only
def test_a_parameter_that_a_page_does_not_know_asks_no_other_question(acting, other):
    console, cookie = acting
    other.execute("lock table user_statuses")
    with ThreadPoolExecutor(20) as crowd:
        paths = [f"/batches/{BATCH}/preview?turn={number}" for number in range(20)]
        answers = [crowd.submit(console.get, path, Cookie=cookie) for path in paths]
        locks = (
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%%user_statuses%%'"
        )
        other.execute(locks)
        waiting = other.fetchone()[0]
        other.connection.rollback()
        for one in answers:
            one.result()

    assert waiting <= 1


def test_more_questions_than_it_can_ask_at_a_time_are_refused_and_later_ones_answered(database):
    reader, let_go = PageReader(), threading.Event()

    def ask(number):
        return reader.ask(
            number, lambda: {"waited": let_go.wait(scale_timeout(LIMIT))}, timeout_seconds=scale_timeout(LIMIT)
        )

    with ThreadPoolExecutor(MAX_QUESTIONS) as crowd:
        asked = [crowd.submit(ask, number) for number in range(MAX_QUESTIONS)]
        assert wait_until(lambda: len(reader._in_flight) == MAX_QUESTIONS, LIMIT)
        with pytest.raises(ReaderBusy):
            ask("one more")
        let_go.set()
        assert all(one.result().problem is None for one in asked)
        assert wait_until(lambda: not reader._in_flight, LIMIT)
        assert ask("later").problem is None


def connect(console, stack):
    port = int(console.settings["FORGEKEEPER_CONSOLE_PORT"])
    made = stack.enter_context(
        socket.create_connection(("127.0.0.1", port), timeout=scale_timeout(REQUEST_SECONDS + 20))
    )
    made.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
    return made


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_half_a_request_is_cut_off_and_an_address_has_a_number_of_connections(console):
    one = console()
    with ExitStack() as stack:
        halves = [connect(one, stack) for _ in range(MAX_CONNECTIONS_PER_ADDRESS)]
        assert is_closed(connect(one, stack))
        assert is_closed(halves[0])
        assert wait_until(lambda: one.get("/").status == 200, LIMIT)
