"""The invented forge of docs/adopting.md is adopted by what that page says, and nothing else."""

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.harness.git_samples import BareRepository
from tests.system.soak import rights

PAGE = Path(__file__).parents[2] / "docs" / "adopting.md"
OURS = [line for line in rights.grants()[rights.PERSON].splitlines() if " forgekeeper." in line]
NOW = "extract(epoch from now())::bigint"
ROWS = f"""
    insert into moods values (1, 'x', 'over', {NOW} - 60, false), (2, 'x', 'later', {NOW} + 3600, false),
        (3, 'x', 'for ever', null, false), (4, 'x', 'over and removed', {NOW} - 60, true);
    insert into repos values (7, 'a/seven', 1000, false), (8, 'a/gone', 0, true);
    insert into build_files
        select file, 7, 70, kind, 'f.zip', 'files/' || file, 10, {NOW} - 7200, until_s, keep, removed
        from (values (1, 'zip', {NOW} - 60, false, false), (2, 'zip', {NOW} + 3600, false, false),
            (3, 'log', {NOW} - 60, false, false), (4, 'zip', {NOW} - 60, true, false),
            (5, 'zip', {NOW} - 60, null, false), (6, 'zip', null, false, false), (7, 'zip', {NOW} - 60, false, true),
            (8, 'zip', {NOW} - 90, false, false)) as made (file, kind, until_s, keep, removed);
    insert into ref_trash (repo, name, asked_s) values (7, 'refs/mr/1', {NOW}), (7, 'HEAD', {NOW});
"""
BATCHES = ("user_status_cleanup", "git_ref_cleanup", "expired_job_artifacts", "delete_objects")


class Tide:
    """The forge, as its owner asks it, and the settings of forgekeeper, which has its own role there."""

    def __init__(self, url, query, as_role, folder):
        self._url, self._query = url, query
        self.objects, self.repositories = folder / "objects", folder / "repositories"
        self.settings = {
            "DATABASE_URL": as_role,
            "FORGE_SCHEMA": "tide_views",
            "CRON_STALE_IMPORTS": "off",
            "OBJECT_STORES": json.dumps({"artifacts": self.objects.as_uri()}),
            "REPOSITORIES_ROOT": str(self.repositories),
        }

    def ask(self, sql):
        return self._query(self._url, f"set search_path = public; {sql}")

    def keys(self, table, key):
        return {row for (row,) in self.ask(f"select {key} from {table}")}


@pytest.fixture
def tide(*, main, settings, new_database, new_role, query, tmp_path):
    tables, *adopted, grants = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    url = new_database()
    main("migrate", DATABASE_URL=url)
    as_role = new_role(url, "\n".join(OURS).replace(f" to {rights.PERSON};", " to ROLE;"))
    forge = Tide(url, query, as_role, tmp_path)
    for block in (tables, ROWS, *adopted):
        forge.ask(block)
    of_the_role = grants.replace("create role forgekeeper login;\n", "")
    forge.ask(of_the_role.replace(" to forgekeeper;", f" to {urlsplit(as_role).username};"))
    (forge.objects / "files").mkdir(parents=True)
    for file in range(1, 9):
        (forge.objects / "files" / str(file)).touch()
    return forge


@pytest.fixture
def repository(tide):
    tide.repositories.mkdir()
    made = BareRepository(tide.repositories, "a/seven.git")
    made.packed("refs/mr/1", "refs/mr/2")
    return made


def test_a_forge_with_other_names_times_and_removed_rows_is_kept_clean_through_views(main, tide, repository, server):
    server.flushdb()
    checked = main("check", "--init", "--json", **tide.settings)
    assert main("flags", "on", "bulk_delete_job_artifacts", **tide.settings).status == 0
    for batch in BATCHES:
        assert main("release", batch, "--reason", "I have looked", **tide.settings).status == 0
        assert main("run", batch, **tide.settings).status == 0

    assert [one["message"] for one in checked.json["findings"] if one["level"] == "error"] == []
    assert tide.keys("moods", "person") == {2, 3, 4}
    assert tide.keys("build_files", "file") == {2, 3, 4, 5, 6, 7}
    assert tide.ask("select files_bytes from repos where repo = 7") == [(980,)]
    assert {file.name for file in (tide.objects / "files").iterdir()} == {"2", "3", "4", "5", "6", "7"}
    assert tide.ask("select name, done_s is null, note from ref_trash order by item") == [
        ("refs/mr/1", False, None),
        ("HEAD", False, "not_under_refs"),
    ]
    assert repository.refs().keys() == {"refs/heads/main", "refs/mr/2"}


def test_destroyed_artifacts_come_back_as_they_were_in_all_columns(main, tide, server):
    server.flushdb()
    main("check", "--init", **tide.settings)
    main("flags", "on", "bulk_delete_job_artifacts", **tide.settings)
    main("release", "expired_job_artifacts", "--reason", "I have looked", **tide.settings)
    tables = "select file::text, repo::text from build_files as file join repos as repo using (repo) order by 1"
    before = tide.ask(tables)
    main("run", "expired_job_artifacts", **tide.settings)
    destroyed = tide.ask(tables)

    held = main("objects", "hold", "--project", "7", "--json", **tide.settings)
    tide.ask("\n".join(held.json["statements"]))

    assert (len(destroyed), tide.ask(tables)) == (len(before) - 2, before)


def test_its_role_can_do_nothing_to_the_tables(tide, query):
    for table in ("moods", "repos", "build_files", "ref_trash"):
        with pytest.raises(Exception, match="permission denied for table"):
            query(tide.settings["DATABASE_URL"], f"select from public.{table}")
