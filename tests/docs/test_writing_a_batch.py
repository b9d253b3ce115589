"""What mypy says of the likeliest mistakes in a batch: the page of writing a batch promises it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.thorough import whole_only

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing_a_batch.md").read_text()
WHOLE, OBJECTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
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
    (folder / "wrong_path.py").write_text(OBJECTS.replace("path=Parcel.path", "path=Parcel.paths"))
    (folder / "no_location.py").write_text(OBJECTS.replace('location="parcels", ', ""))
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


@whole_only
@pytest.mark.parametrize("file", ["whole.py", "objects.py"])
def test_the_batches_that_the_page_shows_are_typed(said, file):
    assert file not in said


@whole_only
@pytest.mark.parametrize(
    ("file", "error"),
    [("wrong_path.py", '"type[Parcel]" has no attribute "paths"'), ("no_location.py", 'named argument "location"')],
)
def test_a_mistake_in_a_batch_of_objects_is_found(said, file, error):
    assert any(error in line for line in said.splitlines() if file in line)


@whole_only
@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=list(MISTAKES))
def test_each_mistake_is_found_with_the_message_that_the_page_promises(said, number):
    of_this = [line for line in said.splitlines() if f"mistake_{number}.py" in line]

    assert any(MESSAGES[number] in line for line in of_this), of_this
