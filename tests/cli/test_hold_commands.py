"""Artifacts that were destroyed wrongly: objects are held back, and rows come back whole, byte for byte, or not at all."""

import os
import shutil
import subprocess
from datetime import timedelta
from itertools import count

import hypothesis
import hypothesis.strategies as st
import pytest

from forgekeeper.audit.acts import Act
from forgekeeper.audit.deletions import Audit, Deletion
from forgekeeper.engine import restoring
from forgekeeper.platform.database import database, now
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.targets.objects import is_normal
from models import CLASS_COUNT, JobArtifact, ProjectStatistics
from tests.harness.artifacts import destroy_chunk
from tests.harness.audited import interrupted_at, record_intent
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from tests.harness.thorough import RUNS_WHOLE_SUITE, examples, whole_only
from workers.delete_objects import delete_objects

RUN = 17
RUNS = count(RUN)
DAY = timedelta(days=1)
HOSTILE = [
    *("a/com.acme:key:1.0.jar", "a/\u200f\u061c/b", "line\u2028break", "no\u00a0break", "spa  ces ", "a\\", "e'", "?"),
    *("\\'; drop table canary; --", "'; drop table canary; --", "\\! touch canary", "*/ /* --", "%s %(a)s %"),
    *(":run :'run' :\"run\" :{?run}", "$$; commit; $$", "😀/ü/\ud7ff\ue000\U0010fffd", "\\u0041", "\\."),
]
"""Paths by which some reader of SQL, or of lines, has been misled."""

pytestmark = pytest.mark.usefixtures("database", "store")


def expired(path, facts):
    usual = {"project_id": 7, "job_id": 3, "file_type": 2, "size": 10, "locked": 0, "expire_at": now() - 3 * DAY}
    return usual | facts | {"file_final_path": path}


def artifact(store, path, **facts):
    """Make an expired artifact with its object."""
    (store / path).parent.mkdir(parents=True, exist_ok=True)
    (store / path).write_bytes(b"")
    JobArtifact.create(**expired(path, facts))


def destroy(*, run=RUN, grace=DAY):
    """Destroy all that has expired, as the batch does."""
    for number in range(CLASS_COUNT):
        audit = Audit("expired_job_artifacts", on=True, run=run)
        destroy_chunk(number, now(), limit=1_000, grace=grace, audit=audit)


def rows():
    return database.execute_sql("select * from ci_job_artifacts order by id").fetchall()


def a_day_later():
    """Let the grace pass, and the batch delete what is due."""
    later = "update deleted_objects set pick_up_at = pick_up_at - interval '25 hours'"
    database.execute_sql(later)
    return perform(delete_objects, settings=settings_with())


def insert_back(result):
    for statement in result.json["statements"]:
        database.execute_sql(statement.replace("%", "%%"))


@pytest.mark.parametrize("words", [["--project", "7"], ["--run", str(RUN)]])
def test_rows_that_are_inserted_back_are_the_old_ones(main, store, words):
    artifact(store, "@final/a'b%s\\", size=None)
    artifact(store, "b", file_store=2, file="b.zip", partition_id=101, updated_at=now() - DAY)
    ProjectStatistics.create(project_id=7, build_artifacts_size=100)
    before = rows()
    destroy()
    assert rows() == []

    result = main("objects", "hold", *words, "--json")
    for _twice in range(2):
        insert_back(result)
        assert rows() == before
        assert ProjectStatistics.get().build_artifacts_size == 100


def test_keep_holds_the_same_objects_as_its_earlier_name_and_is_the_name_that_the_help_shows(main, store):
    artifact(store, "a")
    destroy()

    kept, held = (main("objects", name, "--project", "7", "--json").json for name in ("keep", "hold"))
    shown = main("objects", "--help").stdout

    assert (kept["held"], len(kept["artifacts"])) == (1, 1)
    assert kept == held
    assert ("keep " in shown, "hold " in shown.replace("unhold ", "")) == (True, False)


def test_a_forge_that_counts_no_bytes_has_its_artifacts_destroyed_and_inserted_back(main, store):
    artifact(store, "a", size=10)
    before = rows()
    database.execute_sql("alter table project_statistics rename to gone")
    try:
        destroy()
        assert rows() == []
        insert_back(main("objects", "hold", "--project", "7", "--json"))
    finally:
        database.execute_sql("alter table gone rename to project_statistics")

    assert rows() == before


def test_only_what_the_run_has_destroyed_is_held_and_what_is_gone_is_said_to_be_lost(main, store):
    artifact(store, "earlier")
    destroy(run=RUN - 1)
    artifact(store, "gone")
    destroy(grace=timedelta(0))
    perform(delete_objects, settings=settings_with())
    artifact(store, "a/b [1]")
    destroy()

    found = main("objects", "hold", "--run", str(RUN), "--json").json

    assert [one["file_final_path"] for one in found["artifacts"]] == ["a/b [1]"]
    assert (found["held"], found["lost"], main("objects", "held", "--json").json["held"]) == (1, 1, 1)
    assert "a/b [1]" in main("objects").stdout


@whole_only
def test_one_artifact_comes_back_alone_and_the_audit_says_that_it_is_restored(main, store):
    for path in ("a", "b"):
        artifact(store, path)
    wanted, other = (row.id for row in JobArtifact.select().order_by(JobArtifact.id))
    destroy()
    before = main("audit", "--what", f"artifact:{wanted}", "--json").json

    insert_back(main("objects", "hold", "--artifact", str(wanted), "--json"))

    after, left = (main("audit", "--what", f"artifact:{one}", "--json").json for one in (wanted, other))
    assert ([row.id for row in JobArtifact.select()], DeletedObject.select_held().count()) == ([wanted], 1)
    assert [one["restored"] for one in (before, after, left)] == [False, True, False]
    assert f"It is restored: the forge has artifact {wanted} again." in after["sentences"]
    assert f"`forgekeeper objects hold --artifact {other}` may restore it." in left["sentences"]


@whole_only
@pytest.mark.parametrize("words", [["--project", "7"], ["--run", str(RUN)], ["--artifact", "1"], ["--all"]])
def test_what_is_let_go_is_deleted_a_grace_later(main, store, words):
    artifact(store, "a")
    destroy()
    main("objects", "hold", "--project", "7")

    result = main("objects", "unhold", *words, OBJECT_GRACE="86400")

    assert result.stdout == "1 objects are no longer kept\n"
    assert perform(delete_objects, settings=settings_with()).deleted == 0
    assert a_day_later().deleted == 1


@pytest.mark.parametrize(("failpoint", "too_late"), [("claimed", 0), ("deleted", 1)])
def test_an_object_held_after_it_was_claimed_stays_unless_a_run_is_at_it(main, store, failpoint, too_late):
    artifact(store, "a")
    destroy(grace=timedelta(0))
    with interrupted_at(f"delete_objects.{failpoint}"):
        perform(delete_objects, settings=settings_with())

    assert main("objects", "hold", "--project", "7", "--json").json["too_late"] == too_late
    # The attempt that was interrupted could not count it.
    assert a_day_later().deleted == too_late
    assert (store / "a").exists() != bool(too_late)


def test_held_objects_stay_and_all_others_go(main, store):
    artifact(store, "mine", project_id=7)
    artifact(store, "others", project_id=8)
    destroy()

    main("objects", "hold", "--project", "7")

    assert a_day_later().deleted == 1
    assert (store / "mine").exists()
    assert not (store / "others").exists()


def test_to_hold_and_to_let_go_are_acts_of_a_person(main, store):
    artifact(store, "a")
    destroy()
    main("objects", "hold", "--project", "7")
    main("objects", "unhold", "--run", str(RUN))

    acts = [(act.act, act.what, act.after) for act in Act.select().order_by(Act.id)]
    (number,) = [row.id for row in DeletedObject.select()]
    assert acts == [
        ("objects hold", "project:7", {"count": 1, "first": [number]}),
        ("objects unhold", f"run:{RUN}", {"let_go": 1}),
    ]


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
    JobArtifact.insert_many([expired(path, facts) for path in paths]).execute()
    before = rows()
    destroy(run=run)
    assert rows() == []
    return before


PATHS = st.lists(
    st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20)), min_size=1, max_size=4)
    .map("".join)
    .filter(is_normal),
    min_size=1,
    max_size=50,
)


@whole_only
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
    run = str(next(RUNS))
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


@whole_only
def test_of_a_script_that_is_cut_nothing_comes_back(main, psql, monkeypatch):
    monkeypatch.setattr(restoring, "MAX_ROWS_PER_STATEMENT", 2)
    destroyed(*"abcde")
    text = main("objects", "hold", "--run", str(RUN)).stdout
    ends = [place for place, letter in enumerate(text) if letter in ";\n" and place < text.index("commit;")]

    for end in ends[:: 1 if RUNS_WHOLE_SUITE else 5] + ends[-1:]:
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
    (intent,) = record_intent(audit, "deleted_object", ids=[gone.id], names=["gone"], path=["gone"])
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
    assert "a run may be deleting 1 of them" in main("objects", "hold", "--run", str(RUN)).stdout


def test_nothing_is_held_unless_the_act_can_be_written(main, refuse_acts):
    destroyed("a")

    result = main("objects", "hold", "--run", str(RUN))

    assert (result.status, result.stdout, DeletedObject.select_held().count()) == (1, "", 0)
