"""A copy of an installation's database deletes nothing of the installation's: dumps, templates, renames, other clusters."""

import json
import subprocess
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from demo.servers import servers
from demo.servers.machine import postgres_folder
from forgekeeper.installation import INSTALLATION
from forgekeeper.storage import sentinel

ACTS = "select act, reason, before->>'installation', after->>'installation' from audit_acts where act like 'check --init --%'"


@pytest.fixture
def production(main, own_database, query, tmp_path):
    """An installation with objects to delete, and its store, which has its sentinel; return its settings."""
    store = tmp_path / "store"
    (store / "a").mkdir(parents=True)
    (store / "a" / "b").touch()
    query(own_database, "truncate ci_deleted_objects, ci_job_artifacts")
    query(own_database, "insert into ci_deleted_objects (store_dir, file) values ('a', 'b')")
    settings = {"DATABASE_URL": own_database, "OBJECT_STORES": json.dumps({"artifacts": store.as_uri()})}
    result = main("check", "--init", **settings)
    assert (store / sentinel.NAME).exists(), result.stdout
    return settings


@pytest.fixture
def objects(tmp_path):
    """List the objects in the store of production."""
    return lambda: sorted(path.name for path in (tmp_path / "store").glob("a/*"))


@pytest.fixture
def load(urls, query):
    """Load a dump of one database into another, made for that, of the same cluster or the one at a URL."""
    programs = postgres_folder()

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
    with servers() as running:
        yield running.database_url


@pytest.fixture(params=["same cluster", "another cluster", "renamed"])
def copy(request, production, load, query, urls):
    """The settings of a copy that leads to production's store, as staging's do that were copied with it."""
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


def test_batches_that_delete_rows_alone_are_blocked_in_a_copy_too(main, staging):
    assert main("run", "user_status_cleanup", "--json", **staging).json["skipped"] == "installation"


def test_a_copy_claims_neither_a_redis_nor_a_store(main, staging, server, tmp_path):
    (tmp_path / "store" / sentinel.NAME).unlink()
    server.delete(INSTALLATION)
    main("migrate", **staging)

    result = main("check", "--init", "--json", **staging)

    ((level, message),) = result.findings("installation")
    assert (result.status, level, message.count("of cluster ")) == (1, "error", 2)
    assert server.get(INSTALLATION) is None
    assert not (tmp_path / "store" / sentinel.NAME).exists()


def test_what_was_moved_goes_on_as_the_same_installation(main, staging, query, objects):
    number = identity(query, staging)

    result = main("check", "--init", "--moved", "--reason", "new server", "--json", **staging)

    assert result.findings("installation")[0][0] == "ok", result.stdout
    assert main("run", "delete_objects", "--json", **staging).json["deleted"] == 1
    assert (identity(query, staging), objects()) == (number, [])
    assert query(staging["DATABASE_URL"], ACTS) == [("check --init --moved", "new server", number, number)]


def test_a_copy_becomes_another_installation_with_no_right_to_the_store(main, staging, query, objects, server):
    number = identity(query, staging)

    main("check", "--init", "--copied", "--reason", "for staging", **staging)

    ours = identity(query, staging)
    server.delete(INSTALLATION)  # as if it had a Redis of its own
    result = main("run", "delete_objects", "--json", **staging)
    assert (ours != number, result.json["skipped"], objects()) == (True, "installation", ["b"])
    assert f"belongs to installation {number}, this one is {ours}" in result.json["blocked"]
    assert query(staging["DATABASE_URL"], ACTS) == [("check --init --copied", "for staging", number, ours)]


def test_a_copy_of_a_whole_cluster_can_be_said_to_be_one_though_nothing_shows_it(main, production, query):
    number = identity(query, production)

    main("check", "--init", "--copied", "--reason", "a base backup beside it", **production)

    assert identity(query, production) != number


def test_it_is_for_the_owner_of_the_tables_to_say(main, staging, new_role):
    as_other = new_role(staging["DATABASE_URL"], "grant select on all tables in schema public to ROLE")

    result = main("check", "--init", "--moved", "--reason", "r", "--json", **staging | {"DATABASE_URL": as_other})

    said = "--moved and --copied are for the owner of the tables, as which you run `forgekeeper migrate`"
    assert (result.status, result.findings("installation")) == (1, [("error", said)])
