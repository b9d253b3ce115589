"""A tick and a child cross the files that `docs/architecture/` names, and no others."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forgekeeper.connections import client
from forgekeeper.declaring.flags import FeatureFlag
from workers.expired_job_artifacts import FLAG, MAX_BUCKETS, buckets

ROOT = Path(__file__).parents[2]
LIMIT = 120
MOST = {"tick": 14, "child": 12}

ADD_DUE = """
    insert into user_statuses (user_id, clear_status_at) values (1, now() - interval '1 day');
    insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path, expire_at, locked)
    select 1, number, 1, number::text, now() - interval '1 day', 0 from generate_series(1, 20) as number;
    insert into batches (name, registered_at) values ('user_status_cleanup', now() - interval '61 s');
"""


@pytest.fixture
def crossed(database):
    """What a tick and a child cross, each with something to delete."""
    database.execute_sql(ADD_DUE)
    FeatureFlag.turn(FLAG, on=True)
    buckets.tidy(client, MAX_BUCKETS)
    program = [sys.executable, "-m", "tests.harness.crossing"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, timeout=LIMIT, check=False)
    assert found.returncode == 0, found.stderr.decode()
    assert database.execute_sql("select count(*) from user_statuses").fetchone() == (0,)
    assert database.execute_sql("select count(*) < 20 from ci_job_artifacts").fetchone() == (True,)
    return json.loads(found.stdout)


def told(what):
    """What the page says of it, in order."""
    page = "".join(page.read_text() for page in (ROOT / "docs" / "architecture").glob("*.md"))
    _, _, section = page.partition(f"<!-- crossed by a {what} -->\n")
    return re.findall(r"^\d+\. `([^`]+)`", section.partition("<!-- end -->")[0], re.MULTILINE)


def test_a_tick_and_a_child_cross_the_files_that_the_page_names(crossed):
    assert crossed == {what: sorted(told(what)) for what in MOST}


@pytest.mark.parametrize(("what", "most"), MOST.items())
def test_few_files_are_crossed(what, most):
    assert 0 < len(told(what)) <= most
