"""What a batch answers with, and what follows from it: a batch from outside the project, with a table of its own."""

from dataclasses import dataclass
from datetime import timedelta

import pytest
from peewee import SQL, BigIntegerField, CharField, TextField
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Children, Note, Rows, Table, Total, batch, child
from forgekeeper.api.answers import Mistake
from forgekeeper.api.batches import BATCHES, CHILDREN
from forgekeeper.audit.deletions import Deletion
from forgekeeper.delivery.broker import broker, load_batches
from forgekeeper.guards.run_guard import RunGuard
from forgekeeper.ledger.limits import RunTotal
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.database import database as db
from forgekeeper.platform.database import now
from tests.harness.performing import perform, run_as_worker, run_child_as_worker
from tests.harness.settings import settings_with
from tests.harness.thorough import whole_only

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
ROWS = 500


class Weed(Table):
    """A row of an operator's own."""

    garden = BigIntegerField()
    name = TextField()
    size = BigIntegerField(null=True)
    grown_at = DateTimeTZField(null=True)


TOTAL = Total(Weed.size, of=Weed.garden)


class Named(Table):
    """A table that has no number for a key."""

    name = CharField(primary_key=True)
    grown_at = DateTimeTZField()


@pytest.fixture
def weeds(database):
    """A table of which all rows but five are due: of these two have no time at all."""
    database.create_tables([Weed])
    database.execute_sql(
        "insert into weed (garden, name, size, grown_at)"
        " select n %% 5, 'weed-' || n, 10, now() - n * interval '1 minute' - interval '1 day'"
        " from generate_series(1, %s) as n",
        (ROWS,),
    )
    for grown_at in (now(), now(), now() + DAY, None, None):
        Weed.create(garden=9, name="young", grown_at=grown_at)
    yield
    database.drop_tables([Weed])
    for name in ("pull_weeds", "clear_garden"):
        BATCHES.pop(name, None)
        CHILDREN.pop(name, None)


def old(now):
    return Rows(Weed, since=Weed.grown_at, older_than=DAY)


def declared(work=old, **options):
    def pull_weeds(now):
        """Pull what should not grow here."""
        return work(now)

    return batch(cron="off", budget=HOUR, **options)(pull_weeds)


def left():
    return Weed.select().count()


@pytest.mark.usefixtures("weeds")
def test_a_row_that_has_no_time_is_due_to_nobody():
    spec = declared(lambda _now: Rows(Weed, Weed.garden == 9, since=Weed.grown_at))

    assert (spec.sum_backlogs(now()).records, perform(spec).deleted, left()) == (3, 3, ROWS + 2)


@pytest.mark.usefixtures("weeds")
def test_the_contract_has_an_index_by_which_the_rows_are_walked_though_the_model_says_nothing_of_one():
    (relation,) = declared().relations

    assert [index.create_statement(relation.name) for index in relation.indexes] == [
        "create index concurrently on weed (grown_at, id)"
    ]


@pytest.mark.usefixtures("weeds")
def test_a_process_needs_no_more_rights_than_the_answer():
    (relation,) = declared().relations

    needs = {process: relation.needed_privileges(process) for process in ("worker", "exporter", "scheduler")}
    assert needs == {"worker": ["select", "update (id)", "delete"], "exporter": ["select"], "scheduler": []}


@pytest.mark.usefixtures("weeds")
def test_the_audit_has_each_row_its_due_time_and_what_was_asked_for():
    first = Weed.select().order_by(Weed.grown_at).first()
    spec = declared(
        lambda _now: Rows(Weed, since=Weed.grown_at, older_than=DAY, name=Weed.name, audit={"garden": "garden"})
    )
    run_as_worker(spec, settings_with())

    lines = list(Deletion.select().where(Deletion.record == "weed").order_by(Deletion.id))
    assert sum(len(line.ids) for line in lines) == ROWS
    place = lines[0].ids.index(first.id)
    assert lines[0].detail["due"][place][:19] == (first.grown_at + DAY).isoformat()[:19]
    assert lines[0].detail["garden"][place] == first.garden


@pytest.mark.usefixtures("weeds")
@pytest.mark.parametrize("limit", [1, 100, 101, 500])
def test_a_limit_of_records_is_exact(limit):
    row = run_as_worker(declared(), settings_with(max_per_run_pull_weeds=limit))

    assert (row.result["deleted"], left(), [total.reserved for total in RunTotal.select()]) == (
        limit,
        ROWS + 5 - limit,
        [0],
    )


@pytest.mark.usefixtures("weeds")
@pytest.mark.parametrize(("limit", "rows"), [(9, 0), (10, 1), (1_009, 100), (10_000, 500)])
def test_a_limit_of_bytes_is_never_exceeded(limit, rows):
    spec = declared(
        lambda now: Rows(Weed, Weed.grown_at < now - DAY, since=Weed.grown_at, size=Weed.size, counted_bytes="bytes")
    )

    row = run_as_worker(spec, settings_with(max_bytes_per_run_pull_weeds=limit))

    assert (row.result["deleted"], row.result["bytes"]) == (rows, 10 * rows)


@whole_only
@pytest.mark.usefixtures("weeds")
def test_a_row_that_is_locked_once_its_bytes_are_reserved_ends_no_run(monkeypatch, other):
    # The rows behind it are larger than what was reserved for it.
    Weed.update(size=1).where(Weed.id == ROWS).execute()  # it grew first
    reserve, held = RunGuard.reserve, []

    def reserve_and_lose(guard, *amounts, **least):
        granted = reserve(guard, *amounts, **least)
        if not held:
            held.append(ROWS)
            other.execute("select from weed where id = %s for update", held)
        return granted

    monkeypatch.setattr(RunGuard, "reserve", reserve_and_lose)
    spec = declared(
        lambda now: Rows(
            Weed, Weed.grown_at < now - DAY, since=Weed.grown_at, size=Weed.size, counted_bytes="bytes", chunk=1
        )
    )

    row = run_as_worker(spec, settings_with(max_bytes_per_run_pull_weeds=10_000))

    assert (row.result["deleted"], left()) == (ROWS - 1, 6)


@pytest.mark.usefixtures("weeds")
def test_what_goes_with_rows_goes_in_their_statement_or_nothing_does():
    gone = SQL("insert into weed (garden, name) select 7, name || %s from deleted", [" was here"])
    spec = declared(lambda now: Rows(Weed, Weed.grown_at < now - DAY, since=Weed.grown_at, also=[gone]))

    db.execute_sql("alter table weed add constraint spoilt check (name <> 'weed-200 was here')")

    outcome = perform(spec)

    assert (outcome.deleted, Weed.select().where(Weed.garden == 7).count()) == (ROWS - 1, ROWS - 1)
    assert [row.name for row in Weed.select().where(Weed.garden < 7)] == ["weed-200"]


@pytest.mark.usefixtures("weeds")
def test_several_answers_are_worked_off_one_after_another_and_may_bring_facts():
    def work(now):
        yield Rows(Weed, Weed.garden == 1, since=Weed.grown_at, record="first", counted="firsts")
        yield Rows(Weed, Weed.garden == 2, since=Weed.grown_at, record="second", counted="seconds")
        if now.year > 2000:
            yield Note(batches=77)
            return "tired"
        return None

    outcome = perform(declared(work))

    assert (outcome.firsts, outcome.seconds, outcome.batches, outcome.stopped) == (100, 100, 77, "tired")


@pytest.mark.usefixtures("weeds")
def test_a_batch_cannot_say_of_less_that_it_is_due_than_it_returns():
    some = lambda _now: Rows(Weed, Weed.garden == 1, since=Weed.grown_at)  # noqa: E731

    with pytest.raises(Mistake, match=r"^pull_weeds: there is no option due="):
        declared(due=some)


# Children


@dataclass
class Sent:
    """What a fan-out comes to."""

    children_enqueued: int = 0


@pytest.fixture
def gardens(weeds):
    """A batch whose children clear a garden each."""

    def pull_weeds(_now):
        """Pull what should not grow here."""
        return Children(CHILDREN["clear_garden"], range(5))

    spec = batch(cron="off", budget=HOUR, records=(), outcome=Sent)(pull_weeds)

    @child(spec, queue="cron", budget=HOUR, due=old)
    def clear_garden(_now, garden):
        """Clear one garden."""
        return Rows(Weed, Weed.garden == garden, since=Weed.grown_at)

    load_batches()
    yield spec, clear_garden
    for name in ("pull_weeds", "clear_garden"):
        del broker.actors[name]


def test_children_are_sent_and_delete_what_is_due_to_them_and_no_more(gardens):
    spec, clear_garden = gardens
    row = run_as_worker(spec, settings_with(breaker_share=1))
    for garden in (*range(5), 9):
        run_child_as_worker(clear_garden, settings_with(breaker_share=1), garden, message_id=str(garden))

    # Of the ninth garden nothing is due, though its child answers with all of it.
    assert (row.result["children_enqueued"], left()) == (5, 5)


def test_a_limit_holds_across_children_one_of_which_is_killed(gardens):
    spec, clear_garden = gardens
    given = settings_with(breaker_share=1, max_per_run_pull_weeds=250)
    run = run_as_worker(spec, given).id
    killed = RunGuard(clear_garden, given, clear_garden.outcome(), run)
    killed.find_stop_reason(now=True)
    assert killed.reserve(100).records == 100  # and no word of it since

    for garden in range(5):
        run_child_as_worker(clear_garden, given, garden, message_id=str(garden), run=run)

    assert left() == ROWS + 5 - 150


def test_a_child_forgets_no_row_that_failed_in_the_share_of_another(gardens):
    _, clear_garden = gardens
    db.execute_sql("create table pot (weed int references weed); insert into pot values (10)")
    try:
        for garden in (0, 1):
            run_child_as_worker(clear_garden, settings_with(breaker_share=1), garden)
    finally:
        db.execute_sql("drop table pot")

    assert Quarantined.select().count() == 1


# Mistakes


@pytest.mark.usefixtures("weeds")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda _now: None, "pull_weeds answers with None: return Rows, Objects, Refs, Children or Skip"),
        (lambda _now: 7, "pull_weeds failed when it was called for its declaration"),
        (lambda now: Rows(Weed, Weed.grown_at < now, since=Weed.name), "since has to be a DateTimeTZField of Weed"),
        (lambda now: Rows(Named, Named.grown_at < now, since=Named.grown_at), "primary key has to be one column"),
        (lambda _now: Rows(Weed, True, since=Weed.grown_at), "the condition has to be an expression"),
        (lambda _now: Rows(Weed, since=Weed.grown_at), "which rows are due is unknown; write older_than="),
        (lambda now: Rows(Weed, Weed.grown_at < now, since=Weed.grown_at, chunk=0), "a chunk has at least one row"),
        (lambda now: Rows(Weed, Weed.grown_at < now, since=Weed.grown_at, total=TOTAL), "size has to be a column"),
    ],
)
def test_an_answer_that_cannot_be_worked_on_is_refused_where_it_is_declared(answer, said):
    with pytest.raises(Mistake, match=said):
        declared(answer)
