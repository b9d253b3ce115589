"""Names and prose stay as plain as those of other job systems.

The limits are about twice the medians of procrastinate, dramatiq and pgqueuer.  A failure lists the places: rewrite the
sentence instead of replacing the word.
"""

import ast
import re
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = sorted(
    path
    for top in ("forgekeeper", "forges", "metrics", "workers", "demo", "scheduler.py", "models.py")
    for path in ((ROOT / top).rglob("*.py") if (ROOT / top).is_dir() else [ROOT / top])
    if "migrations/forgekeeper" not in path.as_posix()
)
PAGES = sorted(
    page
    for page in chain(ROOT.glob("*.md"), (ROOT / "docs").rglob("*.md"), (ROOT / "metrics").rglob("*.md"))
    if ROOT / "docs" / "ja" not in page.parents and page.name != "README.ja.md"  # Japanese
)
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in PRODUCT}
HABITS = {
    "what": (r"what", 4.0, 5.0),
    "where for if": (r"where", 2.5, 3.0),
    "one that": (r"(?:one|those|that) (?:that|which|of|whose|in which|by which)", 1.0, 1.0),
    "go for delete": (r"go|goes|gone|went", 1.0, 1.5),
    "so many": (r"so (?:many|much|long|few|often)", 0.3, 0.2),
    "of which": (r"(?:of|by|in|for|at|to|from|with) (?:which|whom|whose)", 0.7, 0.6),
    "stand for exist": (r"lie|lies|stand|stands|stood", 0.4, 0.4),
    "come to": (r"com(?:e|es|ing) (?:to|of)", 0.2, 0.2),
    "is no": (r"(?:is|are|was|were|has|have) (?:no|none)", 1.2, 1.5),
}
"""A habit of our earlier prose, its pattern, and how often it may occur in 1,000 words of code and of pages."""
COMMON = {"__all__", "BATCH_SIZE", "MAX_RUNTIME"}
"""Constants with one meaning in all files."""


def comments_and_docstrings():
    """Yield the place and text of each line of a docstring or comment."""
    for path, tree in TREES.items():
        documented = set()
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                documented.update(range(node.lineno, node.end_lineno + 1))
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            if number in documented or line.lstrip().startswith("#"):
                yield f"{path}:{number}", line.strip()


def paragraphs():
    """Yield the place and text of each line of a page that is outside of code blocks."""
    for path in PAGES:
        in_code = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            in_code ^= line.startswith("```")
            if not in_code:
                yield f"{path.relative_to(ROOT)}:{number}", line.strip()


PROSE = {"code": list(comments_and_docstrings()), "pages": list(paragraphs())}


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("kind", PROSE)
def test_prose_avoids_the_habit(kind, habit):
    pattern, *limits = HABITS[habit]
    found = [
        (place, line) for place, line in PROSE[kind] for _ in re.findall(rf"\b(?:{pattern})\b", line, re.IGNORECASE)
    ]
    words = sum(len(line.split()) for _place, line in PROSE[kind])
    assert 1000 * len(found) / words <= limits[kind == "pages"], "\n".join(f"{place} {line}" for place, line in found)


def test_most_functions_are_named_with_a_verb_and_an_object():
    functions = [
        (f"{path}:{node.lineno}", node.name.strip("_"))
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__")
    ]
    one_word = [f"{place} {name}" for place, name in functions if "_" not in name]
    assert len(one_word) / len(functions) <= 0.4, "\n".join(one_word)


def test_few_names_of_classes_have_several_meanings():
    classes = defaultdict(set)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(path)
    repeated = {name: sorted(paths) for name, paths in classes.items() if len(paths) > 1}
    assert len(repeated) <= 5, repeated


def test_few_names_of_constants_occur_in_three_files():
    constants = defaultdict(set)
    for path, tree in TREES.items():
        for statement in tree.body:
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            for node in chain.from_iterable(ast.walk(target) for target in targets if target is not None):
                if isinstance(node, ast.Name) and node.id.isupper() and node.id not in COMMON:
                    constants[node.id].add(path)
    repeated = {name: sorted(paths) for name, paths in constants.items() if len(paths) > 2}
    assert len(repeated) <= 3, repeated
