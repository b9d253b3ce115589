"""A folder full of traps: whatever is imported or run from there leaves a mark.

There is one for every module of the standard library, of every package that is installed, and of ours.
"""

import sys
from importlib.metadata import packages_distributions

OURS = {"demo", "forgekeeper", "forges", "metrics", "models", "scheduler", "workers"}
"""What an installation has of ours at the top."""
PROGRAMS = ("forgekeeper", "git", "psql", "redis-cli", "valkey-cli", "python", "python3", "setpriv", "sh")
STARTED = ("sitecustomize", "usercustomize")
"""Python imports these by itself where it finds them."""


class Traps:
    """Traps in a folder that is there; their marks are beside it."""

    def __init__(self, folder):
        self.folder = folder
        self._marks = folder.with_name(f"{folder.name}.marks")
        mark = f'open({str(self._marks)!r}, "a").write(__file__ + "\\n")\n'
        for name in {*sys.stdlib_module_names, *packages_distributions(), *STARTED, *OURS}:
            (folder / f"{name}.py").write_text(mark)
        # What is a program's name, too, is a module's file alone.
        for name in OURS - set(PROGRAMS):
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(mark)
        for name in PROGRAMS:
            (folder / name).write_text(f"#!/bin/sh\necho {name} >> '{self._marks}'\n")
            (folder / name).chmod(0o755)

    def sprung(self):
        """List what has been imported or run."""
        return self._marks.read_text().splitlines() if self._marks.exists() else []
