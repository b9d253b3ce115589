"""Where GitLab's uploader puts an artifact's file, computed in the database, against examples computed here."""

from datetime import UTC, datetime, timedelta, timezone
from hashlib import sha256

from tests.harness.adopted import VIEWS
from tests.harness.every import every

TRACE, ARCHIVE, LEGACY, HASHED, UNHEARD_OF = 3, 1, 1, 2, 9
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def hashed(project):
    """Return the folder of a project, as GitLab's storage by hash has it."""
    name = sha256(str(project).encode()).hexdigest()
    return f"{name[:2]}/{name[2:4]}/{name}"


def facts(**changes):
    """Return what is known of an artifact, in the order of the function's arguments."""
    known = {"project": 42, "job": 4711, "id": 815, "created_at": NOON, "file": "artifacts.zip"}
    return tuple((known | {"location": HASHED, "file_type": ARCHIVE} | changes).values())


EXAMPLES = {
    # The one in GitLab's own words: half past eleven in the evening at New York is the next day in UTC.
    facts(created_at=datetime(2026, 11, 1, 23, 30, tzinfo=timezone(timedelta(hours=-5)))): (
        "73/47/73475cb40a568e8da8a045ced110137e159f890ac4da883b6b17dc651b3a8049/2026_11_02/4711/815/artifacts.zip"
    ),
    facts(location=None): f"{hashed(42)}/2026_11_20/4711/815/artifacts.zip",
    facts(location=LEGACY): "2026_11/42/4711/artifacts.zip",
    facts(location=LEGACY, created_at=datetime(2016, 1, 1, 0, 30, tzinfo=timezone(timedelta(hours=2)))): (
        "2015_12/42/4711/artifacts.zip"
    ),
    facts(file_type=TRACE, file="job.log"): f"{hashed(42)}/2026_11_20/4711/815/job.log",
    facts(file_type=TRACE, location=LEGACY, file="job.log"): f"{hashed(42)}/2026_11_20/4711/815/job.log",
    facts(
        project=2**53 + 1, job=2**62, id=2**62 + 1
    ): f"{hashed(2**53 + 1)}/2026_11_20/{2**62}/{2**62 + 1}/artifacts.zip",
    facts(created_at=datetime(2024, 2, 29, 23, 59, 59, 999999, UTC)): f"{hashed(42)}/2024_02_29/4711/815/artifacts.zip",
    facts(file="отчёт 1%.xml"): f"{hashed(42)}/2026_11_20/4711/815/отчёт 1%.xml",
    facts(location=UNHEARD_OF): "",
    facts(file=None): "",
    facts(file=""): "",
    facts(file="../other"): "",
    facts(file=".."): "",
    facts(project=None): "",
    facts(created_at=None): "",
}


@every("known", EXAMPLES)
def test_the_path_is_the_one_of_gitlab_s_uploader_or_unknown(keeper, known):
    keeper.execute(f"select {VIEWS}.artifact_path(%s, %s, %s, %s, %s, %s::smallint, %s)", known)

    assert keeper.fetchone() == (EXAMPLES[known],)


@every("zone", ["UTC", "Asia/Tokyo", "America/Los_Angeles"])
@every("style", ["ISO, DMY", "German", "Postgres, MDY"])
def test_the_path_does_not_depend_on_the_session_s_settings(keeper, zone, style):
    keeper.execute("select set_config('timezone', %s, true), set_config('datestyle', %s, true)", (zone, style))

    keeper.execute(f"select {VIEWS}.artifact_path(%s, %s, %s, %s, %s, %s::smallint, %s)", facts())

    assert keeper.fetchone() == (f"{hashed(42)}/2026_11_20/4711/815/artifacts.zip",)
