"""Write the pages of the site in a folder, from pages that are written for the forge.

    python website/prepare_pages.py website/pages .venv/docs/node_modules/@mermaid-js/tiny/dist/mermaid.tiny.js

The folder has docs/ and some pages outside of docs/.  Links to these pages are rewritten, and links to other files of
the repository lead to the forge.  A link that leads nowhere stays as it is, and the generator of the site fails for it.
"""

import posixpath
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE_URL = "https://github.com/forgekeeper/forgekeeper"
PAGES_OUTSIDE_OF_DOCS = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "vulnerabilities.md",
    "benchmarks/README.md": "benchmarks.md",
    "deploy/systemd/README.md": "systemd.md",
    "examples/stale_pipelines/README.md": "example.md",
}
"""Path in the repository, and path in the site."""
BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
BLOCK_OR_CODE = re.compile(rf"{BLOCK.pattern}|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LIST_OR_TABLE_BELOW_A_LINE = re.compile(r"^(?!(?:[*-]|\d+\.) |\|)(\S.*|\A)\n(?=(?:[*-]|\d+\.) |\|)", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def write_pages(folder: Path, mermaid: Path) -> None:
    """Replace *folder* by the pages and pictures of the site, and the library that draws diagrams."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for path, site_path in PAGES_OUTSIDE_OF_DOCS.items():
        shutil.copy(ROOT / path, folder / site_path)
    for page in folder.rglob("*.md"):
        page.write_text(prepare_page(page.read_text(), page.relative_to(folder).as_posix()))
    (folder / "javascripts").mkdir()
    shutil.copy(mermaid, folder / "javascripts" / "mermaid.js")


def prepare_page(text: str, site_path: str) -> str:
    """Rewrite the links, and separate lists and tables from the line above, as Python-Markdown requires."""
    sources = {one: path for path, one in PAGES_OUTSIDE_OF_DOCS.items()}
    source = sources.get(site_path, f"docs/{site_path}")

    text = replace_outside(BLOCK, text, lambda prose: LIST_OR_TABLE_BELOW_A_LINE.sub(r"\1\n\n", prose))
    return replace_outside(
        BLOCK_OR_CODE, text, lambda prose: LINK.sub(lambda link: rewrite_link(link[1], source, site_path), prose)
    )


def replace_outside(kept: re.Pattern[str], text: str, replace: Callable[[str], str]) -> str:
    """Replace the text between the matches of *kept*."""
    pieces, matches = kept.split(text), [*kept.findall(text), ""]
    return "".join(replace(piece) + match for piece, match in zip(pieces, matches, strict=True))


def rewrite_link(link: str, source: str, site_path: str) -> str:
    """Return the link from a page of the site to the file that *link* names in the page *source* of the repository."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    file = ROOT / path
    if path.startswith("..") or not file.exists():
        return link
    if file.is_dir():
        return f"{SOURCE_URL}/tree/main/{path}"
    if path in PAGES_OUTSIDE_OF_DOCS or path.startswith("docs/"):
        target = PAGES_OUTSIDE_OF_DOCS.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(site_path) or ".")
    return f"{SOURCE_URL}/blob/main/{path}"


if __name__ == "__main__":
    write_pages(*map(Path, sys.argv[1:]))
