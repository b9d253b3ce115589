"""Whose rights the adopted views have, what `adopt` refuses because others would share them, and what `check` says."""

import re

import pytest

from tests.harness.adopted import KEEPER, VIEWS, adopted  # noqa: F401
from tests.harness.gitlab_tables import PARTITIONS, TABLES, ids
from tests.harness.thorough import whole_only

FUNCTION, OPERATOR = f"{TABLES}.format(text, name)", f"{TABLES}.|| (name, text)"
JOINED = f"{TABLES}.joined(name, text)"
OPENINGS = {
    f"public may create objects in schema {TABLES}, ": f"grant create on schema {TABLES} to public",
    f"{KEEPER} may create objects in schema {TABLES}, ": f"grant create on schema {TABLES} to {KEEPER}",
    f"{KEEPER} may create objects in schema forgekeeper, ": f"grant create on schema forgekeeper to {KEEPER}",
    f"function {FUNCTION} of {KEEPER} hides PostgreSQL's own ": (
        f"create function {FUNCTION} returns text return $1; alter function {FUNCTION} owner to {KEEPER}"
    ),
    f"operator {OPERATOR} of {KEEPER} hides PostgreSQL's own ": (
        f"create function {JOINED} returns text return $2;"
        f" create operator {TABLES}.|| (leftarg = name, rightarg = text, function = {JOINED});"
        f" alter operator {OPERATOR} owner to {KEEPER}"
    ),
}
"""What is said, and the statements by which others get in."""
WRONG = {("forge", "error"), ("privileges", "error"), ("privileges", "warning")}
OWNERS = f"""
    select distinct owner from (
        select nspowner from pg_namespace where nspname = '{VIEWS}'
        union all select relowner from pg_class where relnamespace = '{VIEWS}'::regnamespace and relkind in ('r', 'v')
        union all select proowner from pg_proc where pronamespace = '{VIEWS}'::regnamespace
    ) as made (owner)
"""
OWNER_OF_TABLES = f"select relowner from pg_class where oid = '{TABLES}.user_statuses'::regclass"


@pytest.fixture
def adopt(main, settings):
    """Adopt the tables."""
    return lambda: main("adopt", "gitlab", "--tables", TABLES, "--role", KEEPER, FORGE_SCHEMA=VIEWS)


@pytest.fixture
def errors(main, settings):
    """What `check` has against the views and the rights of functions."""

    def look():
        found = main("check", "--json", FORGE_SCHEMA=VIEWS).json["findings"]
        return [one["message"] for one in found if (one["subject"], one["level"]) in WRONG]

    return look


def test_a_schema_that_others_share_is_refused_and_found_until_what_is_said_is_done(adopt, errors, adopted):  # noqa: F811
    adopted.execute("; ".join(OPENINGS.values()))

    refused, found = adopt(), errors()
    for cure in re.findall("`(.*)`", "\n".join(found)):
        adopted.execute(cure)

    assert (refused.status, refused.complaint in found) == (1, True)
    assert [[one.startswith(said) for one in found].count(True) for said in OPENINGS] == [1] * len(found)
    assert (adopt().status, errors()) == (0, [])


def test_the_views_own_schema_must_not_be_shared_either(adopt, adopted):  # noqa: F811
    adopted.execute(f"grant create on schema {VIEWS} to public")

    assert adopt().complaint.startswith(f"public may create objects in schema {VIEWS}, ")
    adopted.execute(f"revoke create on schema {VIEWS} from public")


@whole_only
def test_views_that_an_older_version_has_made_are_found_and_made_again(adopt, errors, adopted):  # noqa: F811
    function = f"{VIEWS}.record_deletion()"
    adopted.execute(f"grant execute on function {function} to public; comment on schema {VIEWS} is null")

    outdated, open_to_all = sorted(errors(), reverse=True)

    assert outdated.startswith(f"the views in schema {VIEWS} are of another version")
    assert (
        f"public may use it as a trigger of another table: `revoke execute on function {function} from public`"
        in open_to_all
    )
    assert (adopt().status, errors()) == (0, [])


@pytest.fixture
def forge(adopted):  # noqa: F811
    """Let a role that is no superuser own the tables."""
    schemas = f"'{TABLES}'::regnamespace, '{PARTITIONS}'::regnamespace"
    adopted.execute(f"create role forge; grant usage, create on schema {TABLES}, {PARTITIONS} to forge")
    adopted.execute(f"select oid::regclass from pg_class where relkind in ('r', 'p') and relnamespace in ({schemas})")
    for (table,) in adopted.fetchall():
        adopted.execute(f"alter table {table} owner to forge")
    yield
    adopted.execute("reassign owned by forge to current_user; drop owned by forge; drop role forge")


def test_what_a_superuser_makes_has_the_rights_of_who_owns_the_tables(adopt, adopted, forge):  # noqa: F811
    before, again, repaired = ids(adopted, OWNERS), adopt(), ids(adopted, OWNERS)
    adopted.execute(f"drop schema {VIEWS} cascade")
    anew, made = adopt(), ids(adopted, OWNERS)

    assert (again.status, anew.status, before == repaired) == (0, 0, False)
    assert repaired == made == ids(adopted, OWNER_OF_TABLES)
