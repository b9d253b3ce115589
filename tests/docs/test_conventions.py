"""What no contract of import-linter in `setup.cfg` can say: who knows what, and that importing does nothing."""

import ast
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import models
from forgekeeper.api.batches import all_declared
from tests.harness.every import every
from tests.harness.thorough import whole_only

ROOT = Path(__file__).parents[2]
CONTRACTS = ConfigParser()
CONTRACTS.read(ROOT / "setup.cfg")
LAYERS = set(re.findall(r"[\w.]+", CONTRACTS["importlinter:contract:layers"]["layers"]))
OURS = {layer.partition(".")[0] for layer in LAYERS}
UNREAD = {
    "models": {"forgekeeper.platform.connections", "forgekeeper.platform.database"},
    "scheduler": {
        *("forgekeeper.api.batches", "forgekeeper.delivery", "forgekeeper.ledger", "metrics"),
        *(f"forgekeeper.platform.{one}" for one in ("connections", "database", "failpoints", "settings")),
    },
    "forgekeeper.platform.migrations.forgekeeper": {"forgekeeper.platform.database", "forgekeeper.platform.migrations"},
}
"""Modules whose imports import-linter does not read, as they are in no package, and the modules they may import."""
ENVIRONMENT = {
    "benchmarks",
    "forgekeeper.platform.settings",
    "demo",
    "forgekeeper.audit.acts",  # who is behind sudo
    "metrics.endpoint",
    "forgekeeper.cli.serving",
    "forgekeeper.platform.readiness",  # what the page has put there
    "metrics.supervisor",  # what systemd has put there
}
"""Who may know the environment: the settings, and whoever prepares it for children."""
CLOCKS = {"datetime.now", "datetime.utcnow", "datetime.today", "date.today", "time.time"}
IMPORT_EVERYTHING = """
import os, sys
import wsgiref.handlers  # of prometheus_client's: it copies the environment for the programs it serves

def refuse(event, arguments):
    writes = event == "open" and not isinstance(arguments[1], int) and set(arguments[1] or "r") & set("wax+")
    if writes or event in {"socket.connect", "socket.bind", "subprocess.Popen", "os.mkdir", "os.posix_spawn"}:
        raise SystemExit(f"importing {module} does {event} {arguments}")

def get(self, key, reading=os._Environ.__getitem__):
    if str(key).upper().startswith("FORGEKEEPER_"):
        raise SystemExit(f"importing {module} reads {key}")
    return reading(self, key)

os._Environ.__getitem__ = get
sys.addaudithook(refuse)
for module in sys.argv[1:]:
    __import__(module)
"""


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = [path for name in sorted(OURS) for path in (*ROOT.glob(f"{name}.py"), *(ROOT / name).rglob("*.py"))]
TREES = {module_name(path): ast.parse(path.read_text()) for path in FILES}
every_module = every("module", TREES)


def within(module, places):
    """Say which of the *places*, the narrowest, the module is or lies in."""
    found = [place for place in places if f"{module}.".startswith(f"{place}.")]
    return max(found, key=len, default=None)


def imports(module):
    """List what the module imports, names included: one of them may be a module."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(module):
    """List the calls of attributes, as in ``time.time()``: the expression before the dot, the name, the arguments."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value), node.func.attr, node.args


def test_every_module_at_the_top_and_every_room_of_the_engine_has_a_layer():
    top, rooms = (
        {*(path.stem for path in folder.glob("[!_]*.py")), *(path.parent.name for path in folder.glob("*/__init__.py"))}
        for folder in (ROOT, ROOT / "forgekeeper")
    )

    assert top - {"forgekeeper"} | {f"forgekeeper.{room}" for room in rooms} == LAYERS


def test_the_engine_has_at_most_ten_rooms():
    assert len(list((ROOT / "forgekeeper").glob("*/__init__.py"))) <= 10


def test_the_architecture_draws_exactly_the_rooms_of_the_engine_in_the_order_of_their_layers():
    page = (ROOT / "docs" / "architecture" / "README.md").read_text()
    (picture,) = re.findall(r"^ *subgraph forgekeeper\n(.*?)^ *end$", page, re.MULTILINE | re.DOTALL)
    rooms = {path.parent.name for path in (ROOT / "forgekeeper").glob("*/__init__.py")}
    layers = re.findall(r"forgekeeper\.(\w+)", CONTRACTS["importlinter:contract:layers"]["layers"])

    assert re.findall(r'\b(\w+)\["', picture) == [layer for layer in layers if layer in rooms]


@every("module", [module for module in TREES if within(module, UNREAD)])
def test_a_module_that_import_linter_does_not_read_imports_only_what_it_may(module):
    imported = {name for name in imports(module) if name.partition(".")[0] in OURS}

    assert {name for name in imported if not within(name, UNREAD[within(module, UNREAD)])} == set()


NAMES = {
    *(one.name for one in all_declared()),
    *(table._meta.table_name for table in (*models.FORGE_MODELS, *models.OPTIONAL_MODELS)),
    *(flag for one in all_declared() for flag in one.flags),
    *(key for path in (ROOT / "workers").rglob("*.py") for key in re.findall(r"\{\w+\}:\w+", path.read_text())),
} - {"projects"}
"""What the engine may not know; one table is called as people are used to call what is in it."""


@whole_only
@every("path", sorted(path for path in (ROOT / "forgekeeper").rglob("*") if path.suffix in {".py", ".lua"}))
def test_the_engine_names_no_batch_table_or_key_of_a_forge(path):
    if (ROOT / "forgekeeper" / "platform" / "migrations") in path.parents:
        return  # what has been applied stays as it is

    assert {name for name in NAMES if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", path.read_text())} == set()


@every_module
def test_one_module_of_the_engine_writes_the_names_of_models_relations(module):
    names = {ast.unparse(node) for node in ast.walk(TREES[module]) if isinstance(node, ast.Attribute)}

    written = {name for name in names if name.endswith(("_meta.table_name", "_meta.schema"))}
    assert written == set() or module == "forgekeeper.platform.database.naming" or not within(module, {"forgekeeper"})


@every_module
def test_the_environment_is_the_settings_affair(module):
    knows = any(
        isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in {"os.environ", "os.getenv", "environ"}
        for node in ast.walk(TREES[module])
    )

    assert not knows or within(module, ENVIRONMENT)


@every_module
def test_no_clock_but_the_database_s_and_the_monotonic_one(module):
    # The one compares them; the other ends tokens while PostgreSQL is away; a benchmark's processes are on one machine.
    readers = {"forgekeeper.guards.preconditions", "forgekeeper.cli.console.tokens"}
    if module in readers or module.startswith("benchmarks."):
        return
    asked = {f"{owner.rpartition('.')[2]}.{name}" for owner, name, _arguments in calls(module)}

    assert asked & CLOCKS == set()


def test_importing_does_nothing():
    # Run in a Python of its own, whose hooks end it at the first misdeed.  Programs are left
    # out, and migrations, whose names are not Python's: both are run, not imported.
    modules = [name for name in TREES if not re.search(r"\.(__main__|\d+_\w+)$", name)]
    bad = {"FORGEKEEPER_DATABASE_URL": "nonsense", "FORGEKEEPER_DEAD_AFTER": "-1", "FORGEKEEPER_NOTHING": "1"}

    imported = subprocess.run(
        [sys.executable, "-B", "-c", IMPORT_EVERYTHING, *modules],
        env={"PYTHONPATH": str(ROOT), **bad},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (imported.returncode, imported.stdout + imported.stderr) == (0, "")
