"""An installation has an id, the same in its database, Redis, root and stores; a copy of it deletes nothing of its."""

import json
import shutil
import subprocess
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from demo.servers import run_servers
from demo.servers.machine import find_postgres_folder
from forgekeeper.platform.installation import INSTALLATION_KEY
from forgekeeper.targets import sentinel
from tests.harness.every import every
from tests.harness.thorough import whole_only

OLD = (b"", sentinel.SENTINEL_TEXT)
"""What sentinels said before they had ids."""
OTHER = "0a2b4c6d-0000-4000-8000-000000000001"


@pytest.fixture
def database_id(own_database, query):
    ((number,),) = query(own_database, "select id::text from installation")
    return number


def test_migrate_makes_an_id_once_and_puts_it_into_redis(main, settings, new_database, query, server):
    url = new_database()

    for _ in range(2):
        main("migrate", DATABASE_URL=url)

    assert query(url, "select id::text from installation") == [(server.get(INSTALLATION_KEY),)]


@whole_only
@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", None], ids=["away", "not set"])
def test_migrate_needs_no_redis(main, settings, new_database, query, url):
    database = new_database()

    result = main("migrate", DATABASE_URL=database, REDIS_URL=url)

    assert (result.status, query(database, "select count(*) from installation")) == (0, [(1,)])


@whole_only
@pytest.mark.parametrize("command", [("worker",), ("scheduler",), ("run", "prune")], ids=lambda words: words[0])
def test_what_would_share_redis_with_another_installation_does_not_start(
    forgekeeper, own_database, database_id, server, command
):
    server.set(INSTALLATION_KEY, OTHER)

    result = forgekeeper(*command, DATABASE_URL=own_database)
    server.delete(INSTALLATION_KEY)

    assert result.status == 1
    assert result.complaint == (
        f"the database belongs to installation {database_id}, but Redis to installation {OTHER}: give each installation"
        " its own Redis (FORGEKEEPER_REDIS_URL), or delete Redis's key forgekeeper:installation if installation"
        f" {OTHER} no longer exists"
    )


@whole_only
def test_a_redis_that_was_emptied_is_claimed_again(main, own_database, database_id, server):
    server.delete(INSTALLATION_KEY)

    main("run", "prune", DATABASE_URL=own_database)

    assert server.get(INSTALLATION_KEY) == database_id


class Place:
    """A root of repositories or a store, as a setting, of which the database may know what should be in it."""

    def __init__(self, subject, folder, url, query):
        self.subject, self.folder = subject, folder
        self.ask = lambda sql: query(url, sql)
        named = {"REPOSITORIES_ROOT": str(folder)}
        if subject == "object store":
            named = {"OBJECT_STORES": json.dumps({"artifacts": folder.as_uri()})}
        self.settings = {"DATABASE_URL": url} | named

    def make(self, there, *, known, old):
        """Put there what is known, something unrelated or nothing, and *old* into the sentinel."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.ask("truncate projects, ci_job_artifacts, deleted_objects")
        if known:
            self.ask("insert into projects values (1, 'a/1.git'), (2, 'a/2.git')")
            self.ask("insert into deleted_objects (store_dir, file) values ('a', 'b'), ('a', 'gone')")
        if there == "known":
            (self.folder / "a" / "1.git").mkdir(parents=True)
            (self.folder / "a" / "b").touch()
        elif there == "unrelated":
            (self.folder / "holiday.jpg").touch()
        if old is not None:
            (self.folder / sentinel.SENTINEL_NAME).write_bytes(old)

    @property
    def sentinel(self):
        file = self.folder / sentinel.SENTINEL_NAME
        return file.read_bytes() if file.exists() else None


@pytest.fixture(params=["repositories", "object store"])
def place(request, tmp_path, own_database, query, server):
    # The register's own samples name nothing here.
    server.flushdb()
    return Place(request.param, tmp_path / "place", own_database, query)


PLACES = [
    ("nothing", False, None, None),
    *(("known", True, old, None) for old in (None, *OLD)),
    ("known", True, sentinel.build_content(OTHER), f"belongs to installation {OTHER}"),
    ("nothing", True, b"", "is this the right disk or bucket?"),
    ("unrelated", False, None, "is not empty, but the database names no data in it"),
    *(("unrelated", True, old, "paths that the database names: are this disk or bucket") for old in (None, *OLD)),
]
"""What is there, whether the database knows anything of it, the sentinel, and why the place is refused, if it is."""


@whole_only
@every("case", PLACES)
def test_a_place_is_taken_only_where_it_is_proved_to_be_the_right_one(main, place, database_id, case):
    there, known, old, refusal = case
    place.make(there, known=known, old=old)

    level, message = main("check", "--init", "--json", **place.settings).findings(place.subject)[0]

    if refusal is None:
        assert (level, place.sentinel) == ("ok", sentinel.build_content(database_id))
    else:
        assert (level, place.sentinel, refusal in message) == ("error", old, True)


@whole_only
def test_pending_uploads_prove_a_location_of_which_the_database_knows_nothing(main, own_database, server, tmp_path):
    server.flushdb()
    server.zadd("{pending_direct_uploads}:pending", {"uploads:a/b": 1})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").touch()
    stores = json.dumps({"uploads": tmp_path.as_uri()})

    result = main("check", "--init", "--json", DATABASE_URL=own_database, OBJECT_STORES=stores)

    assert [level for level, _ in result.findings("object store")] == ["ok"]


BATCHES = {"repositories": ["git_ref_cleanup"], "object store": ["delete_objects", "stale_direct_uploads"]}


@pytest.mark.parametrize(
    ("content", "said"), [(sentinel.build_content(OTHER), OTHER), (b"", "`forgekeeper check --init`")]
)
def test_no_run_deletes_from_a_place_that_is_not_its_installation_s(main, place, content, said):
    place.make("known", known=True, old=content)
    place.ask("insert into batched_git_ref_updates_deletions (project_id, ref) values (2, 'refs/x')")

    for batch in BATCHES[place.subject]:
        result = main("run", batch, "--json", **place.settings)

        assert (result.status, result.json["skipped"]) == (3, "installation")
        assert said in result.json["blocked"]
    assert place.ask("select count(*) from deleted_objects where attempts > 0") == [(0,)]
    assert (place.folder / "a" / "b").exists()


ACTS = "select act, reason, before->>'installation', after->>'installation' from audit_acts where act like 'check --init --%'"


@pytest.fixture
def production(main, own_database, query, tmp_path):
    """An installation with objects to delete, and its store, which has its sentinel; return its settings."""
    store = tmp_path / "store"
    (store / "a").mkdir(parents=True)
    (store / "a" / "b").touch()
    query(own_database, "truncate deleted_objects, ci_job_artifacts")
    query(own_database, "insert into deleted_objects (store_dir, file) values ('a', 'b')")
    settings = {"DATABASE_URL": own_database, "OBJECT_STORES": json.dumps({"artifacts": store.as_uri()})}
    result = main("check", "--init", **settings)
    assert (store / sentinel.SENTINEL_NAME).exists(), result.stdout
    return settings


@pytest.fixture
def objects(tmp_path):
    """List the objects in the store of production."""
    return lambda: sorted(path.name for path in (tmp_path / "store").glob("a/*"))


@pytest.fixture
def load(urls, query):
    """Load a dump of one database into another, made for that, of the same cluster or the one at a URL."""
    programs = find_postgres_folder()

    def copy(url, cluster=urls.database):
        name = f"staging_{uuid4().hex}"
        query(cluster, f"create database {name} template template0")
        target = urlsplit(cluster)._replace(path=f"/{name}").geturl()
        dump = subprocess.run([programs / "pg_dump", url], capture_output=True, check=True).stdout
        subprocess.run([programs / "psql", "-qX", target], input=dump, capture_output=True, check=True)
        return target

    return copy


@pytest.fixture(scope="module")
def another_cluster():
    with run_servers() as running:
        yield running.database_url


@pytest.fixture(params=["same cluster", "another cluster", "renamed"])
def copy(request, production, load, query, urls):
    """The settings of a staging copy that still name production's store."""
    url = production["DATABASE_URL"]
    if request.param == "same cluster":
        there = load(url)
    elif request.param == "another cluster":
        there = load(url, request.getfixturevalue("another_cluster"))
    else:
        name, other = urlsplit(url).path[1:], f"other_{uuid4().hex}"
        query(urls.database, f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")
        query(urls.database, f"alter database {name} rename to {other}")
        there = urlsplit(url)._replace(path=f"/{other}").geturl()
    return production | {"DATABASE_URL": there}


@pytest.fixture
def staging(production, load):
    return production | {"DATABASE_URL": load(production["DATABASE_URL"])}


def identity(query, settings):
    ((number,),) = query(settings["DATABASE_URL"], "select id::text from installation")
    return number


def test_a_copy_deletes_nothing_until_a_person_says_what_it_is(main, copy, objects):
    result = main("run", "delete_objects", "--json", **copy)

    assert (result.json["skipped"], objects()) == ("installation", ["b"])
    assert "--moved" in result.json["blocked"]
    assert "--copied" in result.json["blocked"]


@whole_only
def test_batches_that_delete_rows_alone_are_blocked_in_a_copy_too(main, staging):
    assert main("run", "user_status_cleanup", "--json", **staging).json["skipped"] == "installation"


@whole_only
def test_a_copy_claims_neither_a_redis_nor_a_store(main, staging, server, tmp_path):
    (tmp_path / "store" / sentinel.SENTINEL_NAME).unlink()
    server.delete(INSTALLATION_KEY)
    main("migrate", **staging)

    result = main("check", "--init", "--json", **staging)

    ((level, message),) = result.findings("installation")
    assert (result.status, level, message.count("of cluster ")) == (1, "error", 2)
    assert server.get(INSTALLATION_KEY) is None
    assert not (tmp_path / "store" / sentinel.SENTINEL_NAME).exists()


@whole_only
def test_what_was_moved_goes_on_as_the_same_installation(main, staging, query, objects):
    number = identity(query, staging)

    result = main("check", "--init", "--moved", "--reason", "new server", "--json", **staging)

    assert result.findings("installation")[0][0] == "ok", result.stdout
    assert main("run", "delete_objects", "--json", **staging).json["deleted"] == 1
    assert (identity(query, staging), objects()) == (number, [])
    assert query(staging["DATABASE_URL"], ACTS) == [("check --init --moved", "new server", number, number)]


@whole_only
def test_a_copy_becomes_another_installation_with_no_right_to_the_store(main, staging, query, objects, server):
    number = identity(query, staging)
    epoch = "insert into forgekeeper.batches (name, redis_epoch) values ('stale_direct_uploads', 'of production')"
    query(staging["DATABASE_URL"], f"{epoch} on conflict (name) do update set redis_epoch = excluded.redis_epoch")

    main("check", "--init", "--copied", "--reason", "for staging", **staging)

    ours = identity(query, staging)
    assert query(staging["DATABASE_URL"], "select count(redis_epoch) from forgekeeper.batches") == [(0,)]
    server.delete(INSTALLATION_KEY)  # as if it had a Redis of its own
    held = main("run", "delete_objects", "--json", **staging)
    assert held.json["skipped"] == "held"
    main("release", "delete_objects", "--expect", "1", "--reason", "looked at", **staging)
    result = main("run", "delete_objects", "--json", **staging)
    assert (ours != number, result.json["skipped"], objects()) == (True, "installation", ["b"])
    assert f"belongs to installation {number}, but this is installation {ours}" in result.json["blocked"]
    assert query(staging["DATABASE_URL"], ACTS)[0] == ("check --init --copied", "for staging", number, ours)


@whole_only
def test_a_copy_of_a_whole_cluster_can_be_said_to_be_one_though_nothing_shows_it(main, production, query):
    number = identity(query, production)

    main("check", "--init", "--copied", "--reason", "a base backup beside it", **production)

    assert identity(query, production) != number


@whole_only
def test_it_is_for_the_owner_of_the_tables_to_say(main, staging, new_role):
    as_other = new_role(staging["DATABASE_URL"], "grant select on all tables in schema public, forgekeeper to ROLE")

    result = main("check", "--init", "--moved", "--reason", "r", "--json", **staging | {"DATABASE_URL": as_other})

    said = "--moved and --copied need the owner of the tables: use the role that runs `forgekeeper migrate`"
    assert (result.status, result.findings("installation")) == (1, [("error", said)])
