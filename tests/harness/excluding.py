"""Create exclusions, and relations that a forge may lack, for tests."""

from contextlib import contextmanager

from forgekeeper.platform.database import database, now
from forgekeeper.platform.database.exclusions import Exclusion, ExclusionSubject


def exclude(what, *, batch=None, ended=None):
    """Add an exclusion as a person does; *ended* is the time since the exclusion ended."""
    instant = now()
    until = None if ended is None else instant - ended
    return Exclusion.add(
        ExclusionSubject.from_text(what), batch=batch, reason="a test", by="erika", since=instant, until=until
    )


@contextmanager
def relation(name, columns, *rows):
    """Create a relation that the forge may lack, with these rows; drop it at the end."""
    values = ", ".join(f"({', '.join(map(str, row))})" for row in rows)
    database.execute_sql(f"create table {name} ({columns}); insert into {name} values {values}")
    try:
        yield
    finally:
        database.execute_sql(f"drop table {name}")


def groups(*rows):
    """Create `project_groups` with rows of project and group."""
    return relation("project_groups", "project_id bigint, group_id bigint", *rows)
