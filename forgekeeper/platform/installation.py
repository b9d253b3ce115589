"""The installation: the id of database, Redis, root and stores, and the database's place.

A wrong URL, bucket or mount is refused, and nothing of another installation is deleted.

A copy of the database has the original's id, and another place.  A dump, a template, a rename or a major upgrade
changes the place: nothing is deleted until a person says whether it is a move or a copy.  A copy of the whole cluster's
files keeps the place: see docs/backup.md.
"""

from __future__ import annotations

from typing import NamedTuple

import peewee as pw
import redis
from playhouse.postgres_ext import DateTimeTZField

from forgekeeper.platform.connections import client
from forgekeeper.platform.coordination.redis_values import KEY_TYPES
from forgekeeper.platform.database import Base, database, default_sql, sqlstate
from forgekeeper.platform.database.read_only import read_only_snapshot

INSTALLATION_KEY = "forgekeeper:installation"
"""Key of a string: the id of the installation that owns this Redis."""
KEY_TYPES.update({INSTALLATION_KEY: "string"})

UNDEFINED_TABLE = "42P01"
INSUFFICIENT_PRIVILEGE = "42501"

SELECT_ID = "select id::text from installation"
INSERT_INSTALLATION = """
    insert into installation (cluster, database_name, database_oid)
    select system_identifier, datname, oid from pg_control_system(), pg_database where datname = current_database()
    on conflict do nothing
"""
SELECT_PLACES = """
    select id::text, system_identifier, datname::text, oid::bigint, cluster, database_name, database_oid
    from installation, pg_control_system(), pg_database where datname = current_database()
"""
UPDATE_PLACE = "update installation set cluster = %s, database_name = %s, database_oid = %s"
UPDATE_ID = "update installation set id = gen_random_uuid() returning id::text"
CLUSTER_UNREADABLE_MESSAGE = (
    "this role may not read the id of its cluster: `grant execute on function pg_control_system() to ROLE`"
)


class Installation(Base):
    """The installation of this database: one row, which the first `migrate` inserts."""

    grants = "scheduler: select; worker: select; exporter: select"

    id = pw.UUIDField(primary_key=True, constraints=default_sql("gen_random_uuid()"))
    made_at = DateTimeTZField(constraints=default_sql("clock_timestamp()"))
    cluster = pw.BigIntegerField(null=True)
    database_name = pw.TextField(null=True)
    database_oid = pw.BigIntegerField(null=True)
    audit_keep = pw.IntegerField(null=True)

    class Meta:
        table_name = "installation"

    @classmethod
    def find_id(cls) -> str | None:
        """Return the installation's id, None if the row is missing."""
        row = database.execute_sql(SELECT_ID).fetchone()
        return row and str(row[0])

    @classmethod
    def ensure_id(cls) -> str:
        """Return the installation's id; create it if necessary.

        If several processes create it at the same time, all get the same id.
        """
        while (found := cls.find_id()) is None:
            database.execute_sql(INSERT_INSTALLATION)
        return found


Installation.add_index(pw.SQL("create unique index one_installation on installation ((true))"))


class DatabasePlace(NamedTuple):
    """A database of a cluster."""

    cluster: int
    database: str
    oid: int

    def __str__(self) -> str:
        return f"database {self.database} (oid {self.oid}) of cluster {self.cluster}"


class ClusterUnreadable(Exception):
    """The role may not read the cluster's identifier; the message has the ``grant``."""


class InstallationMismatch(Exception):
    """Database and Redis belong to different installations; the message has the cure."""


class InstallationPlaces(NamedTuple):
    """The installation's id, this database's place, and the recorded place, None if missing."""

    installation: str
    here: DatabasePlace
    recorded: DatabasePlace | None


def why_misplaced() -> str | None:
    """Return why nothing may be deleted, None if this database is in the recorded place."""
    try:
        found = read_places()
    except ClusterUnreadable as unknown:
        return str(unknown)
    if found is None or found.recorded == found.here:
        return None
    if found.recorded is None:
        return "the place of the installation's database is not recorded: run `forgekeeper migrate`"
    return (
        f"installation {found.installation} was in {found.recorded}, but this is {found.here}: if the installation has"
        " moved here and the old database is out of use, run `forgekeeper check --init --moved --reason R`; if this is"
        " a copy, run `forgekeeper check --init --copied --reason R`"
    )


def read_places() -> InstallationPlaces | None:
    """Return the database's present and recorded place, None without an installation.

    Raises `ClusterUnreadable` if the role may not read the present place.
    """
    try:
        # A refusal must not abort the transaction of a caller that looks at more than this.
        with read_only_snapshot():
            row = database.execute_sql(SELECT_PLACES).fetchone()
    except pw.ProgrammingError as error:
        if sqlstate(error) == INSUFFICIENT_PRIVILEGE and "pg_control_system" in str(error):
            raise ClusterUnreadable(CLUSTER_UNREADABLE_MESSAGE) from error
        if sqlstate(error) == UNDEFINED_TABLE:
            return None
        raise
    return row and InstallationPlaces(
        row[0], DatabasePlace(*row[1:4]), None if row[4] is None else DatabasePlace(*row[4:])
    )


def record_first_place() -> None:
    """Record the present place if none is recorded; raise `ClusterUnreadable` if it cannot be read."""
    if (found := read_places()) is not None and found.recorded is None:
        database.execute_sql(UPDATE_PLACE, found.here)


def record_place(*, copied: bool) -> tuple[InstallationPlaces, InstallationPlaces] | None:
    """Record the present place; a copy becomes an installation of its own, with a new id.

    Returns the situation before and after, None if nothing had to change.  The caller writes the audit in the same
    transaction.
    """
    found = read_places()
    if found is None or (found.recorded == found.here and not copied):
        return None
    database.execute_sql(UPDATE_PLACE, found.here)
    ours = database.execute_sql(UPDATE_ID).fetchone()[0] if copied else found.installation
    return found, InstallationPlaces(ours, found.here, found.here)


def find_redis_owner(client: redis.Redis) -> str | None:
    """Return the id of the installation that owns this Redis, None if nobody owns it."""
    found = client.get(INSTALLATION_KEY)
    return found.decode(errors="replace") if isinstance(found, bytes) else found and str(found)


def claim_redis(client: redis.Redis, installation: str) -> str:
    """Claim this Redis for *installation* unless it is claimed; return its owner's id."""
    while (found := find_redis_owner(client)) is None:
        claim_by_writing(client, installation)
    return found


def claim_by_writing(client: redis.Redis, installation: str) -> None:
    """Claim this Redis unless it is claimed; if Redis refuses writes, raise its error."""
    client.set(INSTALLATION_KEY, installation, nx=True)


def require_same_installation() -> str:
    """Return the id of both database and Redis; claim a Redis without an owner.

    A database in another place than the recorded place claims nothing: it may be a copy.  Raises `InstallationMismatch`
    if the ids differ, or if the database lacks an id.
    """
    try:
        ours = Installation.ensure_id()
    except pw.ProgrammingError as error:
        if sqlstate(error) != UNDEFINED_TABLE:
            raise
        raise InstallationMismatch("the database has no installation id: run `forgekeeper migrate`") from error
    theirs = (find_redis_owner(client) or ours) if why_misplaced() else claim_redis(client, ours)
    if theirs != ours:
        raise InstallationMismatch(mismatch_message(ours, theirs))
    return ours


def mismatch_message(ours: str, theirs: str) -> str:
    """Return the message that Redis belongs to another installation, with the cure."""
    return (
        f"the database belongs to installation {ours}, but Redis to installation {theirs}: give each installation its"
        f" own Redis (FORGEKEEPER_REDIS_URL), or delete Redis's key {INSTALLATION_KEY} if installation {theirs} no"
        " longer exists"
    )
