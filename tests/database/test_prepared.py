"""A statement that runs again and again is planned once, and runs all the same where it cannot be."""

import pytest

from forgekeeper.database import database
from forgekeeper.database.sessions import execute_prepared

STATEMENT = "select %(one)s::bigint + %(other)s::bigint, '100 %%'"
PREPARED = "select name, statement from pg_prepared_statements"

pytestmark = pytest.mark.usefixtures("database")


def added(one, other):
    return execute_prepared("add", STATEMENT, {"one": one, "other": other}).fetchone()


def names():
    return [name for name, _ in database.execute_sql(PREPARED).fetchall()]


def test_a_statement_is_prepared_once_and_executed_with_each_values():
    assert [added(1, 2), added(3, 4)] == [(3, "100 %"), (7, "100 %")]
    ((name, statement),) = database.execute_sql(PREPARED).fetchall()
    assert statement == f"prepare {name} as select $1::bigint + $2::bigint, '100 %'"


def test_what_stands_before_it_is_of_the_same_transaction():
    statement = "select current_setting('enable_bitmapscan')"

    found = [execute_prepared("look", statement, {}, first="set local enable_bitmapscan = off; ") for _ in range(2)]

    assert [cursor.fetchone() for cursor in found] == [("off",), ("off",)]
    assert database.execute_sql(statement).fetchone() == ("on",)


def test_a_statement_that_a_pooler_has_taken_away_is_executed_all_the_same():
    added(1, 2)
    database.execute_sql("deallocate all")

    assert added(3, 4) == (7, "100 %")
    assert (added(5, 6), names()) == ((11, "100 %"), [])


def test_a_statement_that_fails_for_another_reason_is_not_executed_twice():
    database.execute_sql("create temp sequence counted")
    statement = "select nextval('counted') / %(by)s::bigint"
    execute_prepared("divide", statement, {"by": 1})

    with pytest.raises(Exception, match="division by zero"):
        execute_prepared("divide", statement, {"by": 0})

    assert database.execute_sql("select last_value from counted").fetchone() == (2,)
