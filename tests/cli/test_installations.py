"""An installation has an id: one in the database, the same in Redis, and in every root and store."""

import json
import shutil
from contextlib import closing
from uuid import uuid4

import pytest
import redis

from forgekeeper.installation.in_redis import INSTALLATION
from forgekeeper.storage import sentinel

OLD = (b"", sentinel.TEXT)
"""What sentinels said before they had ids."""


@pytest.fixture
def server(urls):
    """The Redis that processes use."""
    with closing(redis.from_url(urls.redis, decode_responses=True)) as server:
        yield server


@pytest.fixture
def database_id(own_database, query):
    ((number,),) = query(own_database, "select id::text from installation")
    return number


@pytest.fixture
def of_another(server):
    """Let Redis be another installation's; return which."""
    number = str(uuid4())
    server.set(INSTALLATION, number)
    yield number
    server.delete(INSTALLATION)


def findings(result, subject):
    return [(f["level"], f["message"]) for f in result.json["findings"] if f["subject"] == subject]


def test_migrate_makes_an_id_once_and_puts_it_into_redis(main, settings, new_database, query, server):
    url = new_database()

    for _ in range(2):
        main("migrate", DATABASE_URL=url)

    assert query(url, "select id::text from installation") == [(server.get(INSTALLATION),)]


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", None], ids=["away", "not set"])
def test_migrate_needs_no_redis(main, settings, new_database, query, url):
    database = new_database()

    result = main("migrate", DATABASE_URL=database, REDIS_URL=url)

    assert (result.status, query(database, "select count(*) from installation")) == (0, [(1,)])


@pytest.mark.parametrize("command", [("worker",), ("scheduler",), ("run", "prune")], ids=lambda words: words[0])
def test_what_would_share_redis_with_another_installation_does_not_start(
    forgekeeper, own_database, database_id, of_another, command
):
    result = forgekeeper(*command, DATABASE_URL=own_database)

    assert result.status == 1
    assert result.complaint == (
        f"the database is of installation {database_id}, Redis of installation {of_another}: give each a Redis of its "
        "own (FORGEKEEPER_REDIS_URL), or delete Redis's key forgekeeper:installation if that installation is no more"
    )


def test_a_redis_that_was_emptied_is_claimed_again(main, own_database, database_id, server):
    server.delete(INSTALLATION)

    main("run", "prune", DATABASE_URL=own_database)

    assert server.get(INSTALLATION) == database_id


class Place:
    """A root of repositories or a store, as a setting, and something that the database says is in it."""

    def __init__(self, subject, folder, url, query):
        self.subject, self.folder, self._url, self._query = subject, folder, url, query
        folder.mkdir()
        self.settings = {"DATABASE_URL": url}
        if subject == "repositories":
            self.settings["REPOSITORIES_ROOT"] = str(folder)
        else:
            self.settings["OBJECT_STORES"] = json.dumps({"artifacts": folder.as_uri()})

    @property
    def sentinel(self):
        file = self.folder / sentinel.NAME
        return file.read_bytes() if file.exists() else None

    def write(self, content):
        (self.folder / sentinel.NAME).write_bytes(content)

    def forget_everything(self):
        """Let the database know nothing of what could be in it."""
        self._query(self._url, "truncate projects, ci_job_artifacts, ci_deleted_objects")

    def put(self):
        """Put there what the database knows of."""
        self.forget_everything()
        if self.subject == "repositories":
            self._query(self._url, "insert into projects select n, 'a/' || n || '.git' from generate_series(1, 3) n")
            for number in (1, 2, 3):
                (self.folder / "a" / f"{number}.git").mkdir(parents=True)
        else:
            self._query(self._url, "insert into ci_deleted_objects (store_dir, file) values ('a', 'b'), ('a', 'gone')")
            (self.folder / "a").mkdir()
            (self.folder / "a" / "b").touch()

    def put_something_unrelated(self):
        (self.folder / "holiday.jpg").touch()


@pytest.fixture(params=["repositories", "object store"])
def place(request, tmp_path, own_database, query, server):
    # The register's own samples name nothing here.
    server.flushdb()
    return Place(request.param, tmp_path / "place", own_database, query)


@pytest.fixture
def init(main, place):
    return lambda: findings(main("check", "--init", "--json", **place.settings), place.subject)[0]


def test_an_unrelated_place_is_refused_while_the_database_knows_nothing(init, place):
    place.forget_everything()
    place.put_something_unrelated()

    level, message = init()

    assert (level, place.sentinel) == ("error", None)
    assert "is not empty, and the database knows of nothing in it" in message


@pytest.mark.parametrize("old", [None, *OLD], ids=["none", "empty", "text"])
def test_an_unrelated_place_is_refused_while_the_database_knows_other_things(init, place, query, old):
    query(place.settings["DATABASE_URL"], "insert into projects values (1, 'a/1.git')")
    place.put_something_unrelated()
    if old is not None:
        place.write(old)

    level, message = init()

    assert (level, place.sentinel) == ("error", old)
    assert "things looked for that should be in it: is it the right disk or bucket" in message


@pytest.mark.parametrize("old", [None, *OLD], ids=["none", "empty", "text"])
def test_a_place_in_which_there_is_what_the_database_knows_is_taken(init, place, database_id, old):
    place.put()
    if old is not None:
        place.write(old)

    assert init()[0] == "ok"
    assert place.sentinel == sentinel.text(database_id)


def test_an_empty_place_is_refused_where_there_should_be_something(init, place):
    place.put()
    shutil.rmtree(place.folder / "a")
    place.write(b"")

    level, message = init()

    assert (level, place.sentinel) == ("error", b"")
    assert message.endswith("is the right disk or bucket there?")


def test_a_place_of_another_installation_is_refused_whatever_is_in_it(init, place, database_id):
    other = str(uuid4())
    place.put()
    place.write(sentinel.text(other))

    level, message = init()

    assert (level, place.sentinel) == ("error", sentinel.text(other))
    assert other in message
    assert database_id in message


def test_pending_uploads_prove_a_location_of_which_the_database_knows_nothing(main, own_database, server, tmp_path):
    server.flushdb()
    server.zadd("{pending_direct_uploads}:pending", {"uploads:a/b": 1})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").touch()
    stores = json.dumps({"uploads": tmp_path.as_uri()})

    result = main("check", "--init", "--json", DATABASE_URL=own_database, OBJECT_STORES=stores)

    assert [level for level, _ in findings(result, "object store")] == ["ok"]


BATCHES = {"repositories": ["git_ref_cleanup"], "object store": ["delete_objects", "stale_direct_uploads"]}


@pytest.mark.parametrize("content", ["another's", "nobody's"])
def test_no_run_deletes_from_a_place_that_is_not_its_installation_s(main, place, query, database_id, content):
    place.put()
    other = str(uuid4())
    place.write(sentinel.text(other) if content == "another's" else b"")
    query(
        place.settings["DATABASE_URL"],
        "insert into batched_git_ref_updates_deletions (project_id, ref) values (2, 'refs/x')",
    )

    for batch in BATCHES[place.subject]:
        result = main("run", batch, "--json", **place.settings)

        assert (result.status, result.json["skipped"]) == (3, "installation")
        if content == "another's":
            assert other in result.json["blocked"]
            assert database_id in result.json["blocked"]
        else:
            assert "`forgekeeper check --init`" in result.json["blocked"]
    assert query(place.settings["DATABASE_URL"], "select count(*) from ci_deleted_objects where attempts > 0") == [(0,)]
    assert place.subject == "repositories" or (place.folder / "a" / "b").exists()
