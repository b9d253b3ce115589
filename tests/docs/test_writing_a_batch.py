"""The tutorial: the batch of each step deletes what is due, and each mistake has the error that the page promises."""

import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from forgekeeper import Table
from forgekeeper.api.answers import Mistake
from forgekeeper.platform.database import now
from tests.harness import public_names
from tests.harness.performing import perform
from tests.harness.settings import settings_with
from tests.harness.thorough import whole_only
from tests.harness.toys import forget_declarations

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing_a_batch.md").read_text()
WHOLE, OBJECTS, DECORATOR, REFS, REGISTER, BUCKETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DIVIDED = re.sub(r"@batch.*\n", DECORATOR, OBJECTS)
NAMES = "from peewee import Model\nfrom forgekeeper import Retry\n"
"""Names that a mistake uses and the page does not."""
REFUSED = re.findall(r"^\| `(.+?)` \| (?:`(.+?)`|nothing) \| `(.+?)` \|$", PAGE, re.MULTILINE)
MISTAKES = {
    "wrong column": ("Pipeline.updated_at", "Pipeline.updated"),
    "deletes by itself": (
        re.search(r"-> Rows.*", WHOLE, re.DOTALL)[0],
        "-> int:\n    return int(Pipeline.delete().where(Pipeline.updated_at < now).execute())\n",
    ),
    "no since": ("since=Pipeline.updated_at, ", ""),
    "budget in seconds": ("budget=timedelta(minutes=1)", "budget=60"),
    "no time": ("stale_pipelines(now: datetime)", "stale_pipelines()"),
}
MESSAGES = [
    row[0].replace("\\", "")
    for row in re.findall(r"^\| [^|]+ \| `(([^`]+))` \|$", PAGE.partition("## Messages")[2], re.MULTILINE)
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What mypy says of the whole batch, and of it with each mistake."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "whole.py").write_text(WHOLE)
    (folder / "objects.py").write_text(OBJECTS)
    (folder / "divided.py").write_text(DIVIDED)
    (folder / "examples.py").write_text(public_names.write_examples())
    (folder / "refs.py").write_text(REFS)
    (folder / "wrong_ref.py").write_text(REFS.replace("ref=Branch.ref", "ref=Branch.name"))
    (folder / "no_repository.py").write_text(REFS.replace("        repository=Repository.path,\n", ""))
    (folder / "buckets.py").write_text(BUCKETS)
    (folder / "wrong_path.py").write_text(OBJECTS.replace("path=Parcel.path", "path=Parcel.paths"))
    (folder / "wrong_store.py").write_text(BUCKETS.replace("location=Package.store", "location=Package.stores"))
    (folder / "no_location.py").write_text(OBJECTS.replace('location="parcels", ', ""))
    (folder / "register.py").write_text(REGISTER)
    (folder / "location.py").write_text(REGISTER.replace("Objects(UPLOADS)", 'Objects(UPLOADS, location="packages")'))
    (folder / "no_time.py").write_text(REGISTER.replace(", older_than=timedelta(hours=3)", ""))
    for number, (right, wrong) in enumerate(MISTAKES.values()):
        assert right in WHOLE
        (folder / f"mistake_{number}.py").write_text(WHOLE.replace(right, wrong))
    files = [str(path) for path in sorted(folder.glob("*.py"))]
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder / "cache"), *files]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("page", ["README.md", "docs/writing_a_batch.md"])
def test_the_answer_that_a_page_shows_is_that_of_the_example(page):
    (answer,) = re.findall(r"    return Rows\(.*", (ROOT / "examples/stale_pipelines/stale_pipelines.py").read_text())

    assert answer in (ROOT / page).read_text()


def declare(source):
    """Execute a batch's module; return its names."""
    names = {"__name__": "stranger"}
    exec(compile(source, "stranger.py", "exec"), names)
    return names


@pytest.fixture
def stranger(database):
    """Declare the batches of a module, and create its tables."""
    made = []

    def declare_and_create(source):
        names = declare(source)
        made.extend(one for one in names.values() if isinstance(one, type) and issubclass(one, Table) and one != Table)
        database.create_tables(made)
        return names

    with forget_declarations():
        yield declare_and_create
        database.drop_tables(made)


def put_parcels(parcel, folder):
    """Store an object for each parcel: two parcels are due, a third is not."""
    for project, age in ((1, 1), (2, 1), (2, -1)):
        at = now() - timedelta(minutes=age)
        parcel.create(due_at=at, created_at=at, project_id=project, path=f"{project}/{age}")
        folder.put(f"{project}/{age}")


def test_the_batch_of_the_first_step_deletes_the_rows_that_are_due(stranger):
    names = stranger(WHOLE)
    for days in (366, 364):
        names["Pipeline"].create(updated_at=now() - timedelta(days=days))

    outcome = perform(names["stale_pipelines"])

    assert (outcome.deleted, names["Pipeline"].select().count()) == (1, 1)


def test_the_batch_of_the_second_step_deletes_the_objects_that_are_due(stranger, folder):
    names = stranger(OBJECTS)
    put_parcels(names["Parcel"], folder)

    outcome = perform(names["old_parcels"], settings=settings_with(object_stores={"parcels": folder.url}))

    assert (outcome.deleted, folder.keys(), names["Parcel"].select().count()) == (2, {"2/-1"}, 1)


def test_a_child_of_the_third_step_deletes_the_objects_of_its_project(stranger, folder):
    names = stranger(DIVIDED)
    put_parcels(names["Parcel"], folder)
    (child,) = names["old_parcels"].children

    outcome = perform(child, 2, settings=settings_with(object_stores={"parcels": folder.url}))

    assert (outcome.deleted, folder.keys()) == (1, {"1/1", "2/-1"})


def test_the_batch_of_the_third_step_is_short_and_imports_public_names_alone():
    imported = re.findall(r"^from forgekeeper import (.+)$", DIVIDED, re.MULTILINE)

    assert (len(DIVIDED.splitlines()) <= 45, imported) == (True, ["Objects, Queue, Table, batch"])


@pytest.mark.parametrize(("right", "wrong", "error"), REFUSED, ids=[one[2] for one in REFUSED])
def test_each_mistake_is_an_error_at_import_with_the_sentence_of_the_page(right, wrong, error):
    assert DIVIDED.count(right) == 1
    with forget_declarations(), pytest.raises(Mistake) as raised:
        declare(NAMES + DIVIDED.replace(right, wrong))

    assert error in str(raised.value)


def test_the_page_has_twenty_mistakes_or_more():
    assert len(REFUSED) >= 20


@whole_only
@pytest.mark.parametrize(
    "file", ["whole.py", "objects.py", "divided.py", "refs.py", "register.py", "buckets.py", "examples.py"]
)
def test_the_batches_and_examples_of_the_pages_are_typed(said, file):
    assert file not in said


@whole_only
@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("wrong_path.py", '"type[Parcel]" has no attribute "paths"'),
        ("wrong_store.py", '"type[Package]" has no attribute "stores"'),
        ("wrong_ref.py", '"type[Branch]" has no attribute "name"'),
        ("no_repository.py", 'named argument "repository"'),
        ("no_location.py", 'No overload variant of "Objects" matches argument types "Queue[Parcel]"'),
        ("location.py", 'No overload variant of "Objects" matches argument types "Register"'),
        ("no_time.py", 'Missing named argument "older_than" for "Register"'),
    ],
)
def test_a_mistake_in_a_source_or_a_target_is_found(said, file, error):
    assert any(error in line for line in said.splitlines() if file in line)


@whole_only
@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=list(MISTAKES))
def test_each_mistake_is_found_with_the_message_that_the_page_promises(said, number):
    of_this = [line for line in said.splitlines() if f"mistake_{number}.py" in line]

    assert any(MESSAGES[number] in line for line in of_this), of_this
