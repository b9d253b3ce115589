"""Where the installation's database is: a copy of it has the original's id, and another place.

A dump, a template, a rename or a major upgrade changes the place: nothing is deleted until a person says which it is.
A copy of the whole cluster's files does not: see docs/backup.md.
"""

from __future__ import annotations

from typing import NamedTuple

import peewee as pw

from forgekeeper.database import database, sqlstate

FOUND = """
    select id::text, system_identifier, datname::text, oid::bigint, cluster, database_name, database_oid
    from installation, pg_control_system(), pg_database where datname = current_database()
"""
RECORD = "update installation set cluster = %s, database_name = %s, database_oid = %s"
CHANGE_ID = "update installation set id = gen_random_uuid() returning id::text"
ASK = "this role may not ask which cluster it is in: `grant execute on function pg_control_system() to ROLE`"


class Place(NamedTuple):
    """A database of a cluster."""

    cluster: int
    database: str
    oid: int

    def __str__(self) -> str:
        return f"database {self.database} (oid {self.oid}) of cluster {self.cluster}"


class Unknown(Exception):
    """The role may not ask which cluster the database is in; the message says what to grant."""


class Situation(NamedTuple):
    """The installation's id, where this database is, and where the installation was last, None if not recorded."""

    installation: str
    here: Place
    recorded: Place | None


def objection() -> str | None:
    """Say why nothing may be deleted, None where this database is in the installation's place."""
    try:
        found = look()
    except Unknown as unknown:
        return str(unknown)
    if found is None or found.recorded == found.here:
        return None
    if found.recorded is None:
        return "it is not recorded where the installation's database is: run `forgekeeper migrate`"
    return (
        f"installation {found.installation} was in {found.recorded}, this is {found.here}: say which it is with "
        "`forgekeeper check --init --moved --reason R` (the same installation in a new place, and the old database is "
        "out of use) or `forgekeeper check --init --copied --reason R` (a copy beside it)"
    )


def look() -> Situation | None:
    """Return where the database is and should be, None where there is no installation; raise `Unknown`."""
    try:
        row = database.execute_sql(FOUND).fetchone()
    except pw.ProgrammingError as error:
        match sqlstate(error):
            case "42501" if "pg_control_system" in str(error):
                raise Unknown(ASK) from error
            case "42P01":
                return None
        raise
    if row is None:
        return None
    return Situation(row[0], Place(*row[1:4]), None if row[4] is None else Place(*row[4:]))


def record_first() -> None:
    """Record the place of an installation that has none recorded; raise `Unknown` where that cannot be asked."""
    if (found := look()) is not None and found.recorded is None:
        database.execute_sql(RECORD, found.here)


def settle(*, copied: bool) -> tuple[Situation, Situation] | None:
    """Record that the installation is here now; a copy becomes one of its own, with another id.

    Returns how it was before and is after, None where nothing had to change.  The caller audits it, in one transaction.
    """
    found = look()
    if found is None or (found.recorded == found.here and not copied):
        return None
    database.execute_sql(RECORD, found.here)
    ours = database.execute_sql(CHANGE_ID).fetchone()[0] if copied else found.installation
    return found, Situation(ours, found.here, found.here)
