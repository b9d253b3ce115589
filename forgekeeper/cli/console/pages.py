"""Pages: each is a function that says what its template shows.

It is called in a thread of the reader, connected to PostgreSQL, and what it returns is shown to all who ask for the
same address.  So it knows the address alone, and not who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse

from forgekeeper.cli.console.reading import PATIENCE
from forgekeeper.cli.terminal import read_number
from forgekeeper.platform.settings import Settings


class Asked(NamedTuple):
    """What a page is asked for: the *path*'s parts and the *query* of its address, and the settings."""

    path: Mapping[str, str]
    query: Mapping[str, str]
    settings: Settings


Look = Callable[[Asked], dict[str, Any]]


class Page(NamedTuple):
    """A page: address, template and title, how many seconds it waits for its answer, and whether it renews itself.

    *query* are the parameters that its answer depends on; others ask no other question.
    """

    address: str
    template: str
    title: str
    look: Look
    patience: float
    live: bool
    query: tuple[str, ...]


PAGES: list[Page] = []
SAID = "forgekeeper_said"
"""The cookie with what the next page says first."""


def page(
    address: str,
    template: str,
    title: str,
    *,
    query: tuple[str, ...] = (),
    patience: float = PATIENCE,
    live: bool = True,
) -> Callable[[Look], Look]:
    """Declare a page; *title* may name parts of the path, as in ``{batch}``."""

    def declare(look: Look) -> Look:
        PAGES.append(Page(address, template, title, look, patience, live, query))
        return look

    return declare


def choose_page(rows: Sequence[Any], asked: Asked, size: int) -> dict[str, Any]:
    """Return *size* of the *rows*, those of the ``page`` that is asked for; ``first`` and ``next`` are queries.

    They lead to the first page and to the next, and are None where the page is that one, or the last.
    """
    number = read_number(asked.query.get("page", "1"), "a page")
    others = {name: value for name, value in asked.query.items() if name != "page"}
    return {
        "shown": rows[(number - 1) * size : number * size],
        "first": others if number > 1 else None,
        "next": others | {"page": number + 1} if number * size < len(rows) else None,
    }


def load_pages() -> None:
    """Have all pages declared."""
    for module in ("overview", "undo", "batch", "story", "working", "quarantine", "recorded", "declared"):
        import_module(f"forgekeeper.cli.console.{module}")


def shown(request: Request, template: str, title: str, status: int = 200, /, **facts: Any) -> HTMLResponse:
    """Render a template for the person who asks; *facts* add to what every template is given, or replace it."""
    of_all = {
        "person": request.state.person,
        "said": request.state.said,
        "path": request.scope["path"],
        "query": {name: value for name, value in request.query_params.items() if value},
        "title": title,
    }
    text = request.app.state.templates.get_template(template).render(of_all | facts)
    answer = HTMLResponse(text, status, {"Cache-Control": "no-store"})
    if request.state.said:
        answer.delete_cookie(SAID, httponly=True, samesite="lax")
    return answer
