"""A tick and a child enter no more files than `docs/architecture/README.md` says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from forgekeeper.api.batches import FeatureFlag
from forgekeeper.platform.connections import client
from tests.harness.artifacts import buckets
from tests.harness.thorough import whole_only
from workers.expired_job_artifacts import FLAG, MAX_BUCKETS

ROOT = Path(__file__).parents[2]
LIMIT = 120

ADD_DUE = """
    insert into user_statuses (user_id, clear_status_at) values (1, now() - interval '1 day');
    insert into ci_job_artifacts (project_id, job_id, file_type, file_final_path, expire_at, locked)
    select 1, number, 1, number::text, now() - interval '1 day', 0 from generate_series(1, 20) as number;
    insert into batches (name, registered_at) values ('user_status_cleanup', now() - interval '61 s');
"""


@whole_only
def test_a_tick_and_a_child_enter_as_few_files_as_the_page_says(database):
    database.execute_sql(ADD_DUE)
    FeatureFlag.turn(FLAG, on=True)
    buckets.tidy(client, MAX_BUCKETS)
    program = [sys.executable, "-m", "tests.harness.entering"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, timeout=LIMIT, check=False)
    assert found.returncode == 0, found.stderr.decode()
    assert database.execute_sql("select count(*) from user_statuses").fetchone() == (0,)
    assert database.execute_sql("select count(*) < 20 from ci_job_artifacts").fetchone() == (True,)
    entered = json.loads(found.stdout)

    page = (ROOT / "docs" / "architecture" / "README.md").read_text()
    for name in ("tick", "child"):
        said = re.search(rf"a {name} enters (\d+) files in all", page)
        assert 0 < len(entered[name]) <= int(said[1]), entered[name]
