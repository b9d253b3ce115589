"""Each known version of GitLab's tables: what is due goes, no more, and artifacts come back byte for byte."""

from datetime import timedelta

import pytest

from forgekeeper.audit.deletions import Audit
from forgekeeper.platform import database as db
from models import CLASS_COUNT, GitRefDeletion
from tests.harness import bulk_imports, gitlab_tables
from tests.harness.adopted import adopted_gitlab
from tests.harness.artifacts import destroy_chunk
from tests.harness.gitlab_tables import ids, rows
from tests.harness.gitlab_versions import VERSIONS
from tests.harness.performing import perform
from tests.harness.thorough import select_rows
from workers.user_status_cleanup import user_status_cleanup

RUN = 17


def whole(cursor, *tables):
    return [rows(cursor, f"select line::text from {table} as line order by 1") for table in tables]


@pytest.mark.parametrize("version", select_rows(list(VERSIONS)))
@pytest.mark.usefixtures("settings", "_migrated", "store")
def test_what_is_due_goes_and_destroyed_artifacts_come_back_as_they_were(main, urls, monkeypatch, version):
    with adopted_gitlab(urls, monkeypatch, VERSIONS[version]) as cursor:
        due = gitlab_tables.find_due(cursor)
        kept = ids(cursor, "select id from p_ci_job_artifacts") - due.artifacts
        before = whole(cursor, "p_ci_job_artifacts", "project_statistics")
        audit = Audit("expired_job_artifacts", on=True, run=RUN)

        statuses, imports = perform(user_status_cleanup).deleted, bulk_imports.run()
        for number in range(CLASS_COUNT):
            destroy_chunk(number, db.now(), limit=1_000, grace=timedelta(days=1), audit=audit)

        assert (statuses, imports.imports, imports.entities, imports.trackers) == tuple(
            map(len, (due.statuses, due.imports, due.entities, due.trackers))
        )
        assert {row.id for row in GitRefDeletion.select_pending()} == due.refs
        assert ids(cursor, "select id from p_ci_job_artifacts") == kept
        assert gitlab_tables.statistics(cursor) == gitlab_tables.left_over(cursor)

        cursor.execute("\n".join(main("objects", "hold", "--run", str(RUN), "--json").json["statements"]))
        assert whole(cursor, "p_ci_job_artifacts", "project_statistics") == before
