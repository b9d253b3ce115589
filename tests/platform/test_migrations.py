"""Migrations: they make what the models expect, once, completely or not at all, and touch nothing else."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import peewee as pw
import pytest
from psycopg2.extensions import make_dsn

import models
from demo.tables import EXAMPLE_MIGRATIONS, make_tables
from forgekeeper.cli.migrate import OWN_TABLES
from forgekeeper.platform import database as db
from forgekeeper.platform import migrations
from forgekeeper.platform.database.schema import SchemaDifference, find_differences
from forgekeeper.platform.database.session_settings import Timeouts
from forgekeeper.platform.database.sessions import DEFAULT_SCHEMAS, open_pool
from tests.harness.thorough import whole_only
from tests.harness.waiting import wait_until

MODELS = (*OWN_TABLES, *models.FORGE_MODELS)
HALF_A_MINUTE = timedelta(seconds=30)
TIMEOUTS = Timeouts(HALF_A_MINUTE, HALF_A_MINUTE, timedelta(milliseconds=50), HALF_A_MINUTE, HALF_A_MINUTE)
COLUMNS = """
    select c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity::text,
        pg_get_expr(d.adbin, d.adrelid)
    from pg_attribute a join pg_class c on c.oid = a.attrelid
        left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where c.relnamespace = to_regnamespace(%s) and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped
"""
INDEXES = """
    select c.relname, i.indisprimary, i.indisunique, regexp_replace(pg_get_indexdef(i.indexrelid), '.* USING ', '')
    from pg_index i join pg_class c on c.oid = i.indrelid
    where c.relnamespace = to_regnamespace(%s)
"""
# PostgreSQL 18 lists "not null" too, which is a property of columns; unique ones are indexes.
CONSTRAINTS = """
    select relname, conname, pg_get_constraintdef(s.oid)
    from pg_constraint s join pg_class c on c.oid = conrelid
    where connamespace = to_regnamespace(%s) and contype in ('c', 'f', 'x')
"""
WAITERS = """
    select count(*) from pg_stat_activity
    where datname = current_database() and wait_event = 'advisory'
"""
UNIQUE = "create unique index one_open_run on job_runs (batch) where state in ('claimed', 'enqueued', 'started')"
INDEX = (
    "create index user_statuses_clear_status_at on user_statuses"
    " (clear_status_at, user_id) where clear_status_at is not null"
)


@pytest.fixture
def empty(urls):
    """An empty database of its own, which the models use, on the server of the other tests."""
    open_pool(urls.database, TIMEOUTS, name="tests", size=1)
    server = db.database.obj
    with server.connection_context():
        server.execute_sql("drop database if exists migrated with (force)")
        server.execute_sql("create database migrated template template0")
    open_pool(make_dsn(urls.database, dbname="migrated"), TIMEOUTS, name="tests", size=5)
    with db.database.connection_context():
        yield db.database.obj
    db.database.close_all()
    with server.connection_context():
        server.execute_sql("drop database migrated with (force)")
    server.close_all()


@pytest.fixture
def migrated(empty):
    migrations.apply_pending(empty)
    make_tables(empty)
    return empty


@pytest.fixture
def ours(tmp_path):
    """Our migrations in a folder to which others can be added."""
    shutil.copytree(migrations.OWN_MIGRATIONS.folder, tmp_path / "forgekeeper")
    return migrations.OWN_MIGRATIONS._replace(folder=tmp_path / "forgekeeper")


def catalog(database, *schemas):
    """Describe the tables of the schemas, ours and the forge's unless others are named; what they are called is in it, what the migrations remember is not.

    Nor is the audit, whose tables have partitions.
    """
    return {
        row
        for query in (COLUMNS, INDEXES, CONSTRAINTS)
        for schema in schemas or DEFAULT_SCHEMAS
        for row in database.execute_sql(query, (schema,)).fetchall()
        if not (row[0].endswith("_migrations") or row[0].startswith("audit_"))
    }


def tables(database):
    return set(database.get_tables())


def migrating(database):
    """Migrate through a connection of one's own."""
    with database.connection_context():
        return migrations.apply_pending(database)


def waiting(database):
    """Count the sessions that wait for an advisory lock."""
    return database.execute_sql(WAITERS).fetchone()[0]


def test_the_migrations_make_what_the_models_would(migrated):
    for schema in DEFAULT_SCHEMAS:
        migrated.execute_sql(f"alter schema {schema} rename to {schema}_by_migrations")
    migrated.execute_sql("create schema public")

    migrated.create_tables(MODELS)

    assert catalog(migrated) == catalog(migrated, *(f"{schema}_by_migrations" for schema in DEFAULT_SCHEMAS))


@pytest.mark.parametrize("which", [migrations.OWN_MIGRATIONS, EXAMPLE_MIGRATIONS])
def test_migrating_applies_what_is_pending_once(empty, which):
    pending = migrations.list_pending(empty, which)
    assert set(empty.get_tables()) == set()

    assert migrations.apply_pending(empty, which) == pending != []
    assert migrations.apply_pending(empty, which) == migrations.list_pending(empty, which) == []


def test_a_schema_of_another_name_is_as_good(empty):
    empty.schema = "ours"
    empty.execute_sql("set search_path to ours, public")

    migrations.apply_pending(empty)

    assert migrations.list_pending(empty) == []
    assert list(find_differences(OWN_TABLES)) == []


@pytest.fixture
def of_the_last_version(empty, ours, tmp_path):
    """The database as the last version has it, with a run, an object, an act, and a role with grants."""
    newer = [file for file in ours.folder.glob("0*.py") if file.name > "0018"]
    newer = [file.rename(tmp_path / file.name) for file in newer]
    empty.schema = "public"
    empty.execute_sql("set search_path to public")
    migrations.apply_pending(empty, ours)
    empty.execute_sql("""
        insert into job_runs (batch, state) values ('a', 'succeeded');
        insert into ci_deleted_objects (store_dir, file) values ('a', 'b');
        insert into audit_acts (act, what, by_user, by_host) values ('pause', 'a', 'ann', 'here');
        drop role if exists of_the_last_version;
        create role of_the_last_version;
        grant select, insert, update (since), delete on holds to of_the_last_version;
        grant select, insert on audit_acts to of_the_last_version;
        grant select on job_runs to of_the_last_version;
    """)
    for file in newer:
        file.rename(ours.folder / file.name)
    empty.schema = "forgekeeper"
    empty.execute_sql("set search_path to forgekeeper, public")
    yield empty
    empty.execute_sql("reset role; drop owned by of_the_last_version; drop role of_the_last_version")


KEPT = "select (select count(*) from job_runs), (select file from deleted_objects), (select act from audit_acts)"


def test_what_lies_among_the_forge_s_tables_moves_with_its_rows(of_the_last_version):
    migrations.apply_pending(of_the_last_version)

    of_the_last_version.execute_sql("set search_path to forgekeeper")
    assert of_the_last_version.execute_sql(KEPT).fetchall() == [(1, "b", "pause")]
    assert list(find_differences(OWN_TABLES)) == migrations.list_pending(of_the_last_version) == []


def test_processes_of_the_last_version_go_on_where_they_were_and_what_they_write_is_ours(of_the_last_version):
    migrations.apply_pending(of_the_last_version)

    of_the_last_version.execute_sql("set search_path to public")
    of_the_last_version.execute_sql("""
        insert into job_runs (batch, state, tick) values ('a', 'claimed', '2026-01-01') on conflict (batch, tick) do nothing;
        insert into ci_deleted_objects (store_dir, file) values ('c', 'd');
        delete from ci_deleted_objects where id = any(array(
            select id from ci_deleted_objects order by id limit 1 for update skip locked
        ));
        set role of_the_last_version;
        select audit_partitions(now());
        insert into holds (batch, kind, by) values ('a', 'pause', 'bob');
        update holds set since = now();
        reset role;
    """)
    of_the_last_version.execute_sql("set search_path to forgekeeper")
    found = (
        "select (select count(*) from job_runs), (select array_agg(file) from deleted_objects), (select by from holds)"
    )
    assert of_the_last_version.execute_sql(found).fetchall() == [(2, ["d"], "bob")]


def test_a_process_of_the_last_version_that_starts_finds_its_migrations(of_the_last_version, ours):
    migrations.apply_pending(of_the_last_version)

    of_the_last_version.execute_sql("set search_path to public")
    of_the_last_version.schema = "public"
    pending = migrations.list_pending(of_the_last_version, ours)
    assert "0017_one_quarantine" not in pending


def test_a_new_installation_leaves_nothing_among_the_forge_s_tables(empty):
    migrations.apply_pending(empty)

    assert (
        empty.execute_sql("select relname from pg_class where relnamespace = 'public'::regnamespace").fetchall() == []
    )


def test_tables_in_a_schema_that_nobody_has_named_are_not_made_once_more(of_the_last_version):
    of_the_last_version.execute_sql("alter schema public rename to keeper")

    with pytest.raises(migrations.TablesElsewhere, match="in schema keeper: set FORGEKEEPER_OWN_SCHEMA to keeper"):
        migrations.apply_pending(of_the_last_version)

    assert of_the_last_version.execute_sql("select to_regnamespace('forgekeeper')").fetchall() == [(None,)]


def test_of_two_that_migrate_at_once_one_does_it_and_the_other_has_nothing_to_do(empty):
    names = migrations.list_pending(empty)
    empty.execute_sql("select pg_advisory_lock(%s)", (migrations.MIGRATIONS_LOCK,))
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(migrating, empty) for _ in range(2)]
        waited = wait_until(lambda: waiting(empty) == 2, 30)
        empty.execute_sql("select pg_advisory_unlock(%s)", (migrations.MIGRATIONS_LOCK,))

    assert waited
    assert sorted(one.result() for one in both) == [[], names]


def test_the_forge_s_own_tables_are_left_alone(empty):
    empty.execute_sql("create table user_statuses (user_id int primary key, mood text)")
    empty.execute_sql("create index on user_statuses (mood)")
    empty.execute_sql("create table projects (id int)")
    before = catalog(empty)

    migrations.apply_pending(empty)

    assert {row for row in catalog(empty) if row[0] in {"user_statuses", "projects"}} == before


@pytest.mark.parametrize("table", ["feature_flags", "job_runs", "quarantine"])
def test_a_table_that_is_there_already_is_an_error_and_nothing_is_changed(empty, table):
    empty.execute_sql(f"create schema forgekeeper; create table forgekeeper.{table} (of_the_forge int)")
    before = catalog(empty), tables(empty)

    with pytest.raises(migrations.TableExists, match=f'"{table}" already exists'):
        migrations.apply_pending(empty)

    assert (catalog(empty), tables(empty)) == before


def test_a_migration_that_fails_leaves_nothing_of_itself_and_others_can_migrate(empty, ours):
    migrations.apply_pending(empty)
    before = catalog(empty)
    (ours.folder / "0099_broken.py").write_text(
        "def up(migrator, db):\n    db.execute_sql('create table half ()')\n    db.execute_sql('select 1 / 0')\n"
    )

    with pytest.raises(pw.DataError):
        migrations.apply_pending(empty, ours)

    assert catalog(empty) == before
    assert migrations.list_pending(empty, ours) == ["0099_broken"]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(migrating, empty).result() == []


@whole_only
@pytest.mark.parametrize(
    ("change", "sentence", "harmless"),
    [
        ("drop table user_statuses", "table user_statuses is missing", False),
        ("alter table projects drop disk_path", "column projects.disk_path is missing", False),
        (
            "alter table projects alter disk_path type bytea using null",
            "column projects.disk_path is bytea, should be text",
            False,
        ),
        (
            "alter table user_statuses alter clear_status_at type timestamp",
            "column user_statuses.clear_status_at is timestamp without time zone, should be timestamp with time zone",
            False,
        ),
        (
            "drop index user_statuses_clear_status_at",
            f"an index is missing, runs will be slow: {INDEX}",
            True,
        ),
        (
            "drop index one_open_run; create index one_open_run on job_runs (batch)",
            f"an index is missing, rows may be duplicated: {UNIQUE}",
            False,
        ),
    ],
)
def test_what_is_missing_is_told_and_whether_it_does_harm(migrated, change, sentence, harmless):
    for statement in change.split(";"):
        migrated.execute_sql(statement)

    assert SchemaDifference(sentence, harmless) in list(find_differences(MODELS))


@whole_only
@pytest.mark.parametrize(
    "change",
    [
        "alter index user_statuses_clear_status_at rename to of_the_forge",
        "drop index user_statuses_clear_status_at; create index x on user_statuses (clear_status_at, user_id)",
        "drop index ci_job_artifacts_expired; create index on ci_job_artifacts (mod(project_id+job_id,10),expire_at,id)",
        "alter table user_statuses alter user_id type int",
        "alter table projects alter disk_path type varchar(255)",
        "alter table user_statuses add likes int not null default 0",
        "create table of_the_forge ()",
    ],
)
def test_a_database_that_only_looks_different_is_as_good(migrated, change):
    for statement in change.split(";"):
        migrated.execute_sql(statement)

    assert list(find_differences(MODELS)) == []


def test_what_held_batches_back_in_columns_does_so_in_rows(empty, ours, tmp_path):
    later = [(ours.folder / name).rename(tmp_path / name) for name in ("0012_holds.py", "0022_trigger_functions.py")]
    migrations.apply_pending(empty, ours)
    empty.execute_sql("""
        insert into batches (name, paused_until, paused_since, paused_reason, paused_by) values
            ('a', '9999-12-31 00:00Z', now(), 'a move', 'ann'), ('b', now() + interval '1 h', now(), null, 'bob'),
            ('c', now() - interval '1 h', now(), 'over', 'bob');
        insert into batches (name, stopped_since, stopped_reason, stopped_by, held_since, held_reason, held_sentence)
        values ('d', now(), 'wrong', 'ann', now(), 'new', 'nobody has looked')
    """)
    for migration in later:
        migration.rename(ours.folder / migration.name)

    migrations.apply_pending(empty, ours)

    found = empty.execute_sql("select batch, kind, reason, by, until is null from holds order by batch, kind desc")
    assert found.fetchall() == [
        ("a", "pause", "a move", "ann", True),
        ("b", "pause", None, "bob", False),
        ("d", "stop", "wrong", "ann", True),
        ("d", "new", "nobody has looked", "forgekeeper", True),
    ]
