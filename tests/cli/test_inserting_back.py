"""What `objects hold` prints: a script that brings rows back byte for byte, as a whole or not at all."""

import os
import shutil
import subprocess
from datetime import timedelta
from itertools import count

import hypothesis
import hypothesis.strategies as st
import pytest

from forgekeeper.audit.deletions import Audit, Deletion
from forgekeeper.database import database, now
from forgekeeper.storage.objects import is_normal
from forgekeeper.storage.outbox import DeletedObject
from models import CLASSES, JobArtifact
from tests.harness.artifacts import destroy_chunk
from tests.harness.thorough import WHOLE, examples
from workers.expired_job_artifacts import commands

RUN = 17
DAY = timedelta(days=1)
HOSTILE = [
    *("a/com.acme:key:1.0.jar", "a/\u200f\u061c/b", "line\u2028break", "no\u00a0break", "spa  ces ", "a\\", "e'", "?"),
    *("\\'; drop table canary; --", "'; drop table canary; --", "\\! touch canary", "*/ /* --", "%s %(a)s %"),
    *(":run :'run' :\"run\" :{?run}", "$$; commit; $$", "😀/ü/\ud7ff\ue000\U0010fffd", "\\u0041", "\\."),
]
"""Paths by which some reader of SQL, or of lines, has been misled."""

pytestmark = pytest.mark.usefixtures("database")
runs = count(RUN)


@pytest.fixture
def psql(urls):
    """Feed a script to psql; return it once it has ended."""
    program = shutil.which("psql")
    if program is None:
        assert "CI" not in os.environ, "psql is missing: .ci/run installs it"
        pytest.skip("psql is not installed")

    def feed(text, *options, **environment):
        command = [program, "-X", *options, "-d", urls.database]
        given = text if isinstance(text, bytes) else text.encode()
        return subprocess.run(command, input=given, env=os.environ | environment, capture_output=True, check=False)

    return feed


@pytest.fixture
def canary():
    """A table that nothing may touch."""
    database.execute_sql("create table canary ()")
    yield lambda: database.execute_sql("select count(*) from pg_class where relname = 'canary'").fetchone()[0]
    database.execute_sql("drop table if exists canary")


def destroyed(*paths, run=RUN, **facts):
    """Destroy artifacts with these paths; return the rows as they were."""
    expired = now() - timedelta(days=3)
    facts = {"project_id": 7, "job_id": 3, "file_type": 2, "size": 10, "locked": 0, "expire_at": expired} | facts
    JobArtifact.insert_many([facts | {"file_final_path": path} for path in paths]).execute()
    before = rows()
    for number in range(CLASSES):
        audit = Audit("expired_job_artifacts", on=True, run=run)
        destroy_chunk(number, now(), limit=1_000, grace=DAY, audit=audit)
    assert rows() == []
    return before


def rows():
    return database.execute_sql("select * from ci_job_artifacts order by id").fetchall()


PATHS = st.lists(
    st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20)), min_size=1, max_size=4)
    .map("".join)
    .filter(is_normal),
    min_size=1,
    max_size=50,
)


@hypothesis.given(PATHS)
@hypothesis.example([path for path in HOSTILE if is_normal(path)])
@hypothesis.settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_every_path_that_names_an_object_comes_back_byte_for_byte_and_is_found_by_unhold(main, psql, paths):
    JobArtifact.delete().execute()
    DeletedObject.delete().execute()
    run = str(next(runs))
    before = destroyed(*paths, run=int(run))

    done = psql(main("objects", "hold", "--run", run).stdout, "-v", "ON_ERROR_STOP=1")

    assert (done.returncode, rows()) == (0, before), done.stderr
    assert JobArtifact.named(paths) == set(paths)
    assert main("objects", "unhold", "--run", run, "--json").json == {"let_go": len(paths)}


@pytest.mark.parametrize("options", ["", "-c standard_conforming_strings=off -c backslash_quote=on"])
def test_no_path_leaves_its_literal_whatever_the_session_s_settings_are(main, psql, canary, options):
    before = destroyed(*HOSTILE, file="a\n\\! touch canary\n\t:key:")
    text = main("objects", "hold", "--run", str(RUN)).stdout

    done = psql(text, "-v", "ON_ERROR_STOP=1", "-v", "run=1", PGOPTIONS=options, PGCLIENTENCODING="LATIN1")

    assert (done.returncode, done.stderr, rows(), canary()) == (0, b"", before, 1)


def test_of_a_script_that_is_cut_nothing_comes_back(main, psql, monkeypatch):
    monkeypatch.setattr(commands, "STATEMENT", 2)
    destroyed(*"abcde")
    text = main("objects", "hold", "--run", str(RUN)).stdout
    ends = [place for place, letter in enumerate(text) if letter in ";\n" and place < text.index("commit;")]

    for end in ends[:: 1 if WHOLE else 5] + ends[-1:]:
        psql(text[:end])
        assert rows() == [], text[:end]
    psql(text)
    assert len(rows()) == 5


def test_of_an_artifact_that_was_destroyed_twice_the_last_row_comes_back_alone(main, psql):
    destroyed("a", id=5, run=1)
    DeletedObject.delete().execute()
    before = destroyed("b", id=5, run=2)

    result = main("objects", "hold", "--project", "7", "--json")

    assert [one["file_final_path"] for one in result.json["artifacts"]] == ["b"]
    psql("\n".join(result.json["statements"]))
    assert rows() == before


def test_an_object_that_was_deleted_before_its_row_could_go_is_lost(main):
    destroyed("gone", "there")
    gone = DeletedObject.get(DeletedObject.file == "gone")
    audit = Audit("delete_objects", on=True)
    (intent,) = audit.intent("deleted_object", ids=[gone.id], names=["gone"], path=["gone"])
    Deletion.insert(
        batch="delete_objects", record="deleted_object", phase="outcome", intent=intent, ids=[gone.id], hashes=[],
        detail={"state": "deleted", "path": "gone"},
    ).execute()  # fmt: skip

    result = main("objects", "hold", "--run", str(RUN), "--json").json

    assert ([one["file_final_path"] for one in result["artifacts"]], result["lost"]) == (["there"], 1)


def test_too_late_is_said_of_an_intent_of_any_age(main):
    destroyed("a", "b")
    number = DeletedObject.get(DeletedObject.file == "a").id
    Deletion.insert(
        at=now() - timedelta(hours=2), batch="delete_objects", record="deleted_object", phase="intent",
        ids=[number], hashes=[], detail={"path": "a"},
    ).execute()  # fmt: skip

    assert main("objects", "hold", "--run", str(RUN), "--json").json["too_late"] == 1
    assert "1 of them a run may be deleting" in main("objects", "hold", "--run", str(RUN)).stdout


def test_nothing_is_held_unless_the_act_can_be_written(main, unwritten):
    destroyed("a")

    result = main("objects", "hold", "--run", str(RUN))

    assert (result.status, result.stdout, DeletedObject.held().count()) == (1, "", 0)
