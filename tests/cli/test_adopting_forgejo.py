"""Forgejo's artifacts expire by views of its tables, and their objects go; what was marked wrongly comes back."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import psycopg2
import pytest

from tests.harness.waiting import wait_until

TABLES = Path(__file__).parents[1] / "harness" / "forgejo_tables.sql"
VIEWS = "forgekeeper_forgejo"
LIMIT = 30.0
WHOLE = "select line::text from action_artifact as line order by id"
SECONDS = "floor(extract(epoch from now()))"
OUTCOME = f"""
    select id, case
        when status = 1 and updated_unix < {SECONDS} - 86400 then 3
        when status = 2 and expired_unix < {SECONDS} then 4
        when status = 5 then 6 else status end
    from action_artifact order by id
"""
PATHS = "select storage_path from action_artifact where storage_path <> '' and status {} order by 1"


class Forgejo:
    """Its database as its owner, and the settings of forgekeeper's role and of the owner."""

    def __init__(self, url, keeper, query, objects):
        self._url, self._query = url, query
        stores = {"OBJECT_STORES": json.dumps({"artifacts": objects.as_uri()}), "OBJECT_GRACE": "0"}
        self.owner = {"DATABASE_URL": url, "FORGE_SCHEMA": VIEWS} | stores
        self.keeper = self.owner | {"DATABASE_URL": keeper}

    def ask(self, sql):
        return self._query(self._url, f"set search_path = public; {sql}")


@pytest.fixture
def forgejo(*, main, settings, new_database, new_role, query, tmp_path, server):
    url = new_database()
    server.flushdb()
    query(url, TABLES.read_text())
    made = Forgejo(url, new_role(url), query, tmp_path)
    for (path,) in made.ask(PATHS.format("not in (4, 6)")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    role = urlsplit(made.keeper["DATABASE_URL"]).username
    for words in ("migrate", f"adopt forgejo --role {role}", f"grants --role {role}", "check --init"):
        done = main(*words.split(), **made.owner)
        assert done.status == 0 or words.startswith("check"), done.stderr
    main("flags", "on", "bulk_delete_job_artifacts", **made.keeper)
    main("release", "expired_job_artifacts", "--reason", "I have looked", **made.keeper)
    return made


def test_expired_artifacts_get_the_status_of_forgejos_own_job_and_their_objects_go(main, forgejo, tmp_path):
    expected = forgejo.ask(OUTCOME)

    results = [main("run", batch, **forgejo.keeper) for batch in ("expired_job_artifacts", "delete_objects")]

    assert [one.status for one in results] == [0, 0], results
    assert forgejo.ask("select id, status from action_artifact order by id") == expected
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.gz")}
    assert left == {path for (path,) in forgejo.ask(PATHS.format("not in (4, 6)"))}


def test_what_was_marked_comes_back_as_it_was(main, forgejo):
    before = forgejo.ask(WHOLE)
    run = main("run", "expired_job_artifacts", "--json", **forgejo.keeper).json["run"]
    marked = forgejo.ask(WHOLE)

    held = main("objects", "hold", "--run", str(run), "--json", **forgejo.keeper)
    forgejo.ask("\n".join(held.json["statements"]))

    assert (marked != before, forgejo.ask(WHOLE)) == (True, before)


def test_check_finds_nothing_wrong_once_the_indexes_are_built(main, forgejo):
    for statement in main("adopt", "forgejo", "--json", **forgejo.owner).json["indexes"]:
        forgejo.ask(f"{statement}".replace("concurrently ", ""))

    found = main(
        "check",
        "--json",
        CRON_USER_STATUS_CLEANUP="off",
        CRON_GIT_REF_CLEANUP="off",
        CRON_STALE_IMPORTS="off",
        **forgejo.keeper,
    ).json["findings"]

    about = ("forge", "privileges", "schema", "postgresql")
    assert [one["message"] for one in found if one["level"] != "ok" and one["subject"] in about] == []
    assert [one["message"] for one in found if one["level"] == "error"] == []


def test_a_row_into_which_a_repeated_run_uploads_meanwhile_stays(forgejo, query):
    (number,), *_ = forgejo.ask(f"select id from action_artifact where status = 2 and expired_unix < {SECONDS}")
    uploaded = f"update action_artifact set expired_unix = expired_unix + 1000000 where id = {number}"
    delete = f"delete from {VIEWS}.ci_job_artifacts where id = {number}"

    with closing(psycopg2.connect(forgejo.owner["DATABASE_URL"])) as run, run.cursor() as cursor:
        cursor.execute(uploaded)
        with ThreadPoolExecutor(1) as thread:
            deletion = thread.submit(query, forgejo.keeper["DATABASE_URL"], f"{delete} returning id")
            waits = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like 'delete from%'"
            assert wait_until(lambda: forgejo.ask(waits) == [(1,)], LIMIT)
            run.commit()
            deleted = deletion.result()

    assert (deleted, forgejo.ask(f"select status from action_artifact where id = {number}")) == ([], [(2,)])


def test_an_artifact_that_has_not_expired_cannot_be_deleted_by_the_view(forgejo, query):
    (number,), *_ = forgejo.ask(f"select id from action_artifact where status = 2 and expired_unix > {SECONDS}")

    with pytest.raises(Exception, match="expired artifacts alone are deleted here"):
        query(forgejo.keeper["DATABASE_URL"], f"delete from {VIEWS}.ci_job_artifacts where id = {number}")
