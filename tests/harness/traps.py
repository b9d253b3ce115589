"""A folder of traps: a module that is imported from there, or a program that is run, leaves a mark.

Every module of the standard library, of installed packages and of forgekeeper has a trap.
"""

import sys
from importlib.metadata import packages_distributions

OURS = {"demo", "forgekeeper", "forges", "metrics", "models", "scheduler", "workers"}
"""Top-level modules and packages of forgekeeper."""
PROGRAMS = ("forgekeeper", "git", "psql", "redis-cli", "valkey-cli", "python", "python3", "setpriv", "sh")
STARTED = ("sitecustomize", "usercustomize")
"""Modules that Python imports at its start if it finds them."""


class Traps:
    """Traps in an existing folder; their marks are in a file beside it."""

    def __init__(self, folder):
        self.folder = folder
        self._marks = folder.with_name(f"{folder.name}.marks")
        mark = f'open({str(self._marks)!r}, "a").write(__file__ + "\\n")\n'
        for name in {*sys.stdlib_module_names, *packages_distributions(), *STARTED, *OURS}:
            (folder / f"{name}.py").write_text(mark)
        # A name that is also a program's has only the file of the module.
        for name in OURS - set(PROGRAMS):
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(mark)
        for name in PROGRAMS:
            (folder / name).write_text(f"#!/bin/sh\necho {name} >> '{self._marks}'\n")
            (folder / name).chmod(0o755)

    def sprung(self):
        """Return the traps that were imported or run."""
        return self._marks.read_text().splitlines() if self._marks.exists() else []
