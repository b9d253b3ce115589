"""What people exclude, held against a batch from outside the project, which says nothing of exclusions."""

from datetime import timedelta

import pytest
from peewee import BigIntegerField, TextField
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper import Rows, Table, batch
from forgekeeper.engine.previewing import preview_batch
from forgekeeper.guards.preconditions import Blocked, require_met
from forgekeeper.platform.database import now
from tests.harness.excluding import exclude, groups
from tests.harness.performing import perform, run_as_worker
from tests.harness.settings import settings_with
from tests.harness.toys import forget_declarations

ROWS, CHUNK = 60, 10


class Nut(Table):
    """A row of an operator's own."""

    tree = BigIntegerField(null=True)
    name = TextField(null=True)
    fell_at = DateTimeTZField()


@pytest.fixture
def nuts(database):
    """Rows of six trees, of one of which nobody knows its number, and one has no name."""
    database.create_tables([Nut])
    database.execute_sql(
        "insert into nut (tree, name, fell_at) select nullif(n %% 6, 0), nullif('nut_' || n, 'nut_6'),"
        " now() - n * interval '1 minute' from generate_series(1, %s) as n",
        (ROWS,),
    )
    yield
    database.drop_tables([Nut])


def declared(until=None):
    def gather_nuts(now):
        """Gather nuts."""
        facts = {"since": Nut.fell_at, "chunk": CHUNK, "project": Nut.tree, "name": Nut.name, "until": until}
        return Rows(Nut, Nut.fell_at < now, **facts)

    return batch(cron="off", budget=timedelta(minutes=1))(gather_nuts)


@pytest.fixture
def gather(nuts):
    with forget_declarations():
        yield declared()


def run(spec):
    return run_as_worker(spec, settings_with()).result["deleted"]


def left():
    return Nut.select().count()


@pytest.mark.parametrize(
    ("what", "kept"),
    [("project:3", 10), ("project:6", 0), ("pattern:nut_1?", 10), ("pattern:*", ROWS - 1), ("pattern:nut_1", 1)],
)
def test_what_is_excluded_stays_and_is_in_no_backlog_stake_or_preview(gather, what, kept):
    exclude(what)
    shown = preview_batch(gather, settings_with())

    assert (gather.sum_backlogs(now()).records, shown.due, shown.parts[0].records) == (ROWS - kept,) * 3
    assert shown.parts[0].kept == ({"excluded": kept} if kept else {})
    assert any(f"{what} is excluded by erika" in note for note in shown.notes)
    assert (run(gather), left()) == (ROWS - kept, kept)


def test_an_exclusion_that_comes_while_a_run_works_counts_from_its_next_chunk_on(nuts, other):
    def exclude_by_another():
        other.execute("insert into exclusions (kind, subject, number, reason, by) values ('project', '3', 3, 'r', 'b')")
        other.connection.commit()

    with forget_declarations():
        deleted = run(declared(until=exclude_by_another))

    # Of the oldest ten that went before, one or two were of that tree.
    assert (deleted + left(), Nut.select().where(Nut.tree != 3).count()) == (ROWS, 0)
    assert left() in {8, 9}


def test_an_exclusion_that_has_ended_or_is_of_another_batch_keeps_nothing(gather):
    exclude("project:3", ended=timedelta(0))
    exclude("project:4", batch="user_status_cleanup")

    assert run(gather) == ROWS


def test_a_group_keeps_its_projects_and_nothing_goes_while_nobody_says_which_they_are(gather):
    exclude("group:9")
    with pytest.raises(Blocked, match=r"lacks project_groups \(project_id, group_id\)"):
        require_met(gather, settings_with())
    # Should the relation vanish while a run works.
    assert (perform(gather).deleted, left()) == (0, ROWS)

    with groups((3, 9), (3, 1), (4, 9), (5, 1)):
        require_met(gather, settings_with())
        assert (run(gather), left()) == (ROWS - 20, 20)
