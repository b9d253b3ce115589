"""`check --watch` tells another program that does our work from our own runs."""

from demo.sample_data import add_imports, add_statuses
from forgekeeper.cli.check_others import watch_other_programs

DUE = "clear_status_at <= now()"


def found(wait):
    return [(one.level, one.message) for one in watch_other_programs(wait)]


def test_due_records_that_go_without_a_run_of_ours_are_another_program_s_work(database):
    add_statuses(10)

    (one,) = found(lambda: database.execute_sql(f"delete from user_statuses where {DUE}"))

    assert one[0] == "warning"
    assert one[1].startswith("user_status_cleanup: another program deleted or claimed 4 of 4 due records")


def test_due_records_that_another_program_claims_by_their_status_are_its_work(database):
    add_imports(10)

    (one,) = found(lambda: database.execute_sql("update bulk_imports set status = 3"))

    assert one[0] == "warning"
    assert one[1].startswith("stale_imports: ")


def test_what_our_runs_delete_and_what_becomes_due_meanwhile_is_nobody_elses(database, main):
    add_statuses(10)

    def wait():
        assert main("run", "user_status_cleanup").status == 0
        database.execute_sql("update user_statuses set clear_status_at = now() where clear_status_at is not null")

    assert found(wait) == [("ok", "no other program deleted or claimed due records")]


def test_check_watches_only_when_asked(main, database):
    assert main("check", "--json").findings("others") == []
