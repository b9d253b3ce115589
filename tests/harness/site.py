"""Build the site of the documentation in a folder, as `make docs` does."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from website.prepare_pages import write_pages

ROOT = Path(__file__).parents[2]
MERMAID = Path(sys.prefix) / "docs" / "node_modules" / "@mermaid-js" / "tiny" / "dist" / "mermaid.tiny.js"


def require_mkdocs() -> None:
    """Skip a test without MkDocs and Mermaid; fail it in CI."""
    if find_spec("mkdocs") is None or not MERMAID.exists():
        skip = pytest.fail if os.environ.get("CI") else pytest.skip
        skip("the packages of the site are not installed: make .venv/.docs")


class BuiltSite(NamedTuple):
    """The folder of a site, and the status and messages of its build."""

    folder: Path
    status: int
    messages: str


def write_sources(folder: Path) -> Path:
    """Write the pages and the configuration of the site, and return the folder of the pages."""
    pages = folder / "website" / "pages"
    write_pages(pages, MERMAID)
    shutil.copy(ROOT / "website" / "mkdocs.yml", folder / "website")
    return pages


def build_site(folder: Path) -> BuiltSite:
    """Build the site of the sources in *folder*."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--config-file", folder / "website" / "mkdocs.yml"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    return BuiltSite(folder / "website" / "html", done.returncode, done.stdout + done.stderr)
