"""Rows that foreign keys delete or change with a batch's rows: named, counted, limited and audited, or the batch is blocked."""

from datetime import timedelta

import pytest
from peewee import BigIntegerField, CompositeKey
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Rows, Table, batch
from forgekeeper.audit.deletions import Deletion
from forgekeeper.cli.check import collect_findings
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from tests.harness.performing import run_as_worker
from tests.harness.settings import settings_with
from tests.harness.toys import forget_declarations

NAME, DAY = "sweep_events", timedelta(days=1)
EVENTS = """
    create table events (id bigint primary key, at timestamptz not null, parent bigint);
    insert into events select n, now() - interval '2 days' + n * interval '1 second' from generate_series(1, {}) as n
"""
NOTES = """
    create table notes (id bigint generated always as identity primary key, event bigint references events on delete {});
    create index on notes (event);
    insert into notes (event) select event from generate_series(1, {}) as event, generate_series(1, {})
"""


class Event(Table):
    """An event, which is due after a day."""

    id = BigIntegerField(primary_key=True)
    at = DateTimeTZField()

    class Meta:
        table_name = "events"


class Note(Table):
    """A note on an event."""

    grants = "worker: select"

    id = BigIntegerField(primary_key=True)
    event = BigIntegerField(null=True)

    class Meta:
        table_name = "notes"


class Word(Table):
    """A word of a note, which a key of two columns tells apart."""

    grants = "worker: select"

    note = BigIntegerField()
    place = BigIntegerField()

    class Meta:
        table_name = "words"
        primary_key = CompositeKey("note", "place")


@pytest.fixture
def execute(database):
    """Execute SQL of the owner, in a schema that is gone after the test."""
    db.execute_sql("create schema toys; set search_path = toys, forgekeeper, public")
    with forget_declarations():
        yield lambda *statements: [db.execute_sql(one) for one in statements]
    db.execute_sql("reset search_path; drop schema toys cascade")


def declare(*into, **facts):
    def sweep_events(now):
        """Sweep old events."""
        return Rows(Event, Event.at < now - DAY, since=Event.at, cascades_to=into, **facts)

    return batch(cron="* * * * *", budget=timedelta(minutes=1))(sweep_events)


def run(spec, **limits):
    return run_as_worker(spec, settings_with(**{f"{name}_{NAME}": value for name, value in limits.items()})).result


def count(table):
    return db.execute_sql(f"select count(*) from {table}").fetchone()[0]


def said(level):
    return [one.message for one in collect_findings(settings_with()) if one.level == level and NAME in one.message]


@pytest.mark.parametrize(
    ("action", "done"), [("cascade", "deleted"), ("set null", "changed"), ("set default", "changed")]
)
def test_a_batch_whose_rows_take_others_along_that_it_does_not_name_is_blocked(execute, action, done):
    execute(EVENTS.format(7), NOTES.format(action, 7, 10))
    spec = declare()

    result, shown = run(spec), preview_batch(spec, settings_with())

    sentence = f"rows of notes are {done} with rows of events (foreign key notes_event_fkey, on delete {action})"
    assert (result["skipped"], count("events"), count("notes")) == ("schema", 7, 70)
    assert result["blocked"].startswith(sentence)
    assert "add the model of notes to cascades_to= of the Rows of events" in result["blocked"]
    assert [sentence in "; ".join(found) for found in (said("error"), shown.notes)] == [True, True]


def test_seven_rows_take_no_more_of_others_along_than_the_limit_allows(execute):
    execute(EVENTS.format(7), NOTES.format("cascade", 7, 30))

    result = run(declare(Note), max_per_run=100)

    # Three events with thirty notes each.
    assert (result["deleted"], result["cascaded"], count("events"), count("notes")) == (3, 90, 4, 120)
    assert [(total.records, total.reserved) for total in RunTotal.select()] == [(93, 0)]


def test_what_is_deleted_by_a_foreign_key_is_in_the_audit_and_in_the_totals_without_a_limit(execute):
    execute(EVENTS.format(3), NOTES.format("cascade", 2, 5))

    result = run(declare(Note))

    lines = {line.record: line for line in Deletion.select()}
    assert (result["deleted"], result["cascaded"], count("notes")) == (3, 10, 0)
    assert sorted(lines["note"].ids) == list(range(1, 11))
    assert sorted(lines["note"].detail["deleted_with"]) == [1] * 5 + [2] * 5
    assert [total.records for total in RunTotal.select()] == [13]


def test_preview_breaker_and_backlog_count_what_follows(execute):
    execute(EVENTS.format(7), NOTES.format("cascade", 7, 1_000))
    spec = declare(Note)

    shown, stake = preview_batch(spec, settings_with()), spec.stake(now())

    assert [(part.record, part.records) for part in shown.parts] == [("event", 7), ("note", 7_000)]
    assert (shown.due, stake.due(100), stake.total(10_000), spec.sum_backlogs(now()).records) == (7_007, 100, 7_007, 7)


def test_a_row_that_takes_more_along_than_the_limit_goes_into_quarantine_and_the_others_are_deleted(execute):
    execute(EVENTS.format(3), NOTES.format("cascade", 3, 10))
    execute("insert into notes (event) select 1 from generate_series(1, 200)")

    result = run(declare(Note), max_per_run=100)

    (row,) = Quarantined.select()
    assert (result["deleted"], count("events where id = 1")) == (2, 1)
    assert (row.key, row.error) == (
        "1",
        "its deletion counts as 211 records, and FORGEKEEPER_MAX_PER_RUN_SWEEP_EVENTS is 100: raise the setting",
    )


def test_keys_are_followed_over_several_tables_and_several_columns(execute):
    execute(EVENTS.format(2), NOTES.format("cascade", 2, 3))
    execute(
        "create table words (note bigint references notes on delete cascade, place bigint, primary key (note, place))"
    )
    execute("insert into words select note, place from generate_series(1, 6) as note, generate_series(1, 4) as place")
    spec = declare(Note, Word)

    parts = [(part.record, part.records) for part in preview_batch(spec, settings_with()).parts]
    result = run(spec, max_per_run=20)

    # One event, three notes, twelve words.
    assert parts == [("event", 2), ("note", 6), ("word", 24)]
    assert (result["deleted"], result["cascaded"], count("words")) == (1, 15, 12)
    words = Deletion.get(Deletion.record == "word")
    assert min(words.detail["key"]) == "1, 1"


def test_rows_of_one_table_that_lead_to_one_another_are_counted_once_each(execute):
    execute(EVENTS.format(1))
    execute("alter table events add foreign key (parent) references events on delete cascade")
    execute("insert into events select n, now(), n - 1 from generate_series(2, 40) as n")

    with forget_declarations():
        blocked = run(declare())["blocked"]
    result = run(declare(Event), max_per_run=40)

    assert "deleted with rows of events" in blocked
    assert (result["deleted"], result["cascaded"], count("events")) == (1, 39, 0)


def test_a_row_that_can_follow_only_once_has_to_be_named_and_is_a_part_of_the_other(execute):
    execute(EVENTS.format(50))
    execute("create table notes (id bigint primary key references events on delete cascade, event bigint)")
    execute("insert into notes select generate_series(1, 50)")

    with forget_declarations():
        blocked = run(declare())["blocked"]
    result = run(declare(Note), max_per_run=40)

    assert "rows of notes are deleted" in blocked
    assert (result["deleted"], count("notes")) == (40, 10)


def test_parts_of_a_row_do_not_hinder_rows_that_are_counted(execute):
    execute(EVENTS.format(5), NOTES.format("cascade", 5, 2))
    execute("create table words (note bigint primary key references events on delete cascade, place bigint)")
    execute("insert into words select generate_series(1, 5), 1")

    result = run(declare(Note, Word))

    assert (result["deleted"], result["cascaded"], count("words")) == (5, 10, 0)


def test_a_table_that_follows_by_a_unique_key_and_by_another_is_counted_by_both(execute):
    execute(EVENTS.format(5), NOTES.format("cascade", 5, 2))
    execute("alter table notes add part bigint unique references events on delete cascade")
    execute("insert into notes (part) select generate_series(1, 5)")

    result = run(declare(Note))

    assert (result["deleted"], result["cascaded"], count("notes")) == (5, 15, 0)


def test_rows_that_come_while_they_are_counted_are_not_deleted_uncounted(execute):
    execute(EVENTS.format(3), NOTES.format("cascade", 3, 1))
    execute(
        "create function note() returns trigger language plpgsql as $$"
        " begin if old.id = 2 then insert into notes (event) values (2); end if; return old; end $$;"
        "create trigger note before delete on events for each row execute function note()"
    )

    result = run(declare(Note), max_per_run=100)

    (row,) = Quarantined.select()
    assert (result["deleted"], result["cascaded"], row.key, count("events where id = 2")) == (2, 2, "2", 1)
    assert "rows of notes were inserted while dependent rows were counted" in row.error


def test_one_by_one_no_more_is_taken_along_than_the_limit_allows(execute):
    execute(EVENTS.format(10), NOTES.format("cascade", 10, 19))
    execute(
        "create function spoil() returns trigger language plpgsql as $$ begin if old.id = 3 then raise 'no'; end if;"
        " return old; end $$; create trigger spoil before delete on events for each row execute function spoil()"
    )

    result = run(declare(Note), max_per_run=90)

    assert (result["deleted"], result["cascaded"]) == (4, 76)
    assert 200 - count("events") - count("notes") == 80
    assert [(total.records, total.reserved) for total in RunTotal.select()] == [(80, 0)]


def test_rows_that_are_set_to_null_are_counted_as_changed(execute):
    execute(EVENTS.format(2), NOTES.format("set null", 2, 10))
    spec = declare(Note)

    parts = [(part.record, part.verb, part.records) for part in preview_batch(spec, settings_with()).parts]
    result = run(spec, max_per_run=11)

    assert parts == [("event", "deleted", 2), ("note", "changed", 20)]
    assert (result["deleted"], result["cascaded"], count("notes where event is null")) == (1, 10, 10)


def test_check_names_the_keys_that_forbid_a_deletion(execute):
    execute(
        EVENTS.format(1),
        NOTES.format("restrict", 1, 1),
        "create table words (note bigint references events on delete cascade, place bigint, primary key (note, place))",
    )
    declare(Note, Word)

    assert any(
        "foreign key notes_event_fkey of notes prevents the deletion of referenced rows of events" in one
        for one in said("warning")
    )
    assert any("rows of words are deleted with rows of events" in one for one in said("ok"))
