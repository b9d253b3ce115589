"""What people exclude, as tests exclude it."""

from contextlib import contextmanager

from forgekeeper.platform.database import database, now
from forgekeeper.platform.database.exclusions import Exclusion, ExclusionSubject


def exclude(what, *, batch=None, ended=None):
    """Exclude it, as if a person had; *ended* says how long ago that ended."""
    instant = now()
    until = None if ended is None else instant - ended
    return Exclusion.add(
        ExclusionSubject.from_text(what), batch=batch, reason="a test", by="erika", since=instant, until=until
    )


@contextmanager
def relation(name, columns, *rows):
    """Give the forge a relation that it may lack, with these rows."""
    values = ", ".join(f"({', '.join(map(str, row))})" for row in rows)
    database.execute_sql(f"create table {name} ({columns}); insert into {name} values {values}")
    try:
        yield
    finally:
        database.execute_sql(f"drop table {name}")


def groups(*rows):
    """Let projects be in groups."""
    return relation("project_groups", "project_id bigint, group_id bigint", *rows)
