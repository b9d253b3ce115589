"""A fork of GitLab that has a part of its tables: `adopt gitlab` adopts it, and its artifacts are kept clean."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from forgekeeper.api.batches import BATCHES

TABLES = Path(__file__).parents[1] / "harness" / "gisia_tables.sql"
VIEWS = "forgekeeper_gitlab"
WHOLE = "select line::text from ci_job_artifacts as line order by id"
BLOCKED = {
    "user_status_cleanup": "table user_statuses is missing",
    "git_ref_cleanup": "table batched_git_ref_updates_deletions is missing, table projects is missing",
    "stale_imports": "table bulk_import_trackers is missing, table bulk_imports is missing, table bulk_import_entities is missing",
}
DUE = """
    select artifact.id from ci_job_artifacts as artifact
        join ci_builds on ci_builds.id = job_id join ci_pipelines as pipeline on pipeline.id = commit_id
    where expire_at < now() at time zone 'UTC' and file_type <> 3 and pipeline.locked = 0
"""


@pytest.fixture
def settings_of_gisia(main, settings, new_database, new_role, query):
    """Adopt the tables; return the settings of forgekeeper's role and those of the tables' owner."""
    owner = {"DATABASE_URL": new_database(), "FORGE_SCHEMA": VIEWS, "UNKNOWN_LOCKS": "resolve"}
    query(owner["DATABASE_URL"], TABLES.read_text())
    main("migrate", **owner)
    keeper = new_role(owner["DATABASE_URL"])
    adopted = main("adopt", "gitlab", "--role", urlsplit(keeper).username, "--json", **owner)
    granted = main("grants", "--role", urlsplit(keeper).username, **owner)
    assert granted.status == 0, granted.stderr
    main("check", "--init", **owner)
    assert {batch for one in adopted.json["left_out"] for batch in one["blocks"]} == {
        "user_status_cleanup",
        "git_ref_cleanup",
        "stale_imports",
    }
    return owner | {"DATABASE_URL": keeper}, owner


def test_artifacts_of_gisia_go_and_come_back_and_batches_that_it_has_no_tables_for_are_blocked(
    main, query, settings_of_gisia
):
    keeper, owner = settings_of_gisia
    before, due = query(owner["DATABASE_URL"], WHOLE), query(owner["DATABASE_URL"], DUE)
    main("flags", "on", "bulk_delete_job_artifacts", **keeper)
    looked_at = {batch: main("run", batch, "--dry-run", **keeper) for batch in BATCHES if batch != "prune"}
    main("release", "expired_job_artifacts", "--reason", "I have looked", **keeper)
    run = main("run", "expired_job_artifacts", "--json", **keeper).json["run"]

    assert {batch: one.complaint.split(": ")[1] for batch, one in looked_at.items() if one.status} == BLOCKED
    left = query(owner["DATABASE_URL"], "select id from ci_job_artifacts")
    assert (len(before) - len(left), set(left) & set(due), len(due) > 0) == (len(due), set(), True)
    held = main("objects", "hold", "--run", str(run), "--json", **keeper)
    query(owner["DATABASE_URL"], "\n".join(held.json["statements"]))
    assert query(owner["DATABASE_URL"], WHOLE) == before
