"""How a command starts a process of ours: nothing of the current folder is run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from sysconfig import get_path


def python(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of ours, and nothing of the current folder's.

    Without `-P` that folder would come first of all: what lies there under the name of any module would be
    run, with every password that we have.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def python_path() -> str:
    """Return the PYTHONPATH with which children find us: no part of it may depend on the current folder."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(part).is_absolute()]
    # Where packages are installed children look anyway, and after the standard library.
    installed = {get_path("purelib"), get_path("platlib")}
    return os.pathsep.join([*([] if root in installed else [root]), *given])
