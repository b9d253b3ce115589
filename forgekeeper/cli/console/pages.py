"""Declarations of pages: each is a function that returns the facts for its template.

The function is called in a thread of the reader, connected to PostgreSQL. Its result is shown to everybody who asks for
the same address, so the function knows the address, and neither the person nor the language.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from forgekeeper.cli.console.languages import choose_language
from forgekeeper.cli.console.problem_details import is_for_api, render_problem_details
from forgekeeper.cli.console.reading import ANSWER_TIMEOUT_SECONDS
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.cli.terminal import read_number
from forgekeeper.platform.settings import Settings


class PageRequest(NamedTuple):
    """Request of a page: the address's *path* parts and *query*, and the settings."""

    path: Mapping[str, str]
    query: Mapping[str, str]
    settings: Settings


PageFunction = Callable[[PageRequest], dict[str, Any]]


class ConsolePage(NamedTuple):
    """A page: address, template, title, seconds to wait, and whether it renews itself.

    *query* are the parameters that change its answer. Other parameters are ignored.
    """

    address: str
    template: str
    title: TranslatableText
    collect_facts: PageFunction
    timeout_seconds: float
    live: bool
    query: tuple[str, ...]


DECLARED_PAGES: list[ConsolePage] = []
FLASH_COOKIE = "forgekeeper_said"
"""Cookie with a sentence for the top of the next page."""


def page(
    address: str,
    template: str,
    title: TranslatableText,
    *,
    query: tuple[str, ...] = (),
    timeout_seconds: float = ANSWER_TIMEOUT_SECONDS,
    live: bool = True,
) -> Callable[[PageFunction], PageFunction]:
    """Declare a page; *title* may name parts of the path, as in ``%(batch)s``."""

    def register_page(function: PageFunction) -> PageFunction:
        DECLARED_PAGES.append(ConsolePage(address, template, title, function, timeout_seconds, live, query))
        return function

    return register_page


def choose_page(rows: Sequence[Any], request: PageRequest, size: int) -> dict[str, Any]:
    """Return *size* rows for the requested ``page``, and queries of ``first`` and ``next``.

    ``first`` is None on the first page, and ``next`` on the last.
    """
    number = read_number(request.query.get("page", "1"), "a page")
    others = {name: value for name, value in request.query.items() if name != "page"}
    return {
        "shown": rows[(number - 1) * size : number * size],
        "first": others if number > 1 else None,
        "next": others | {"page": number + 1} if number * size < len(rows) else None,
    }


def load_pages() -> None:
    """Import all modules that declare pages."""
    for module in ("overview", "undo", "batch", "story", "processes", "quarantine", "audit", "declared"):
        import_module(f"forgekeeper.cli.console.{module}")


def render_page(
    request: Request, template: str, title: TranslatableText, status: int = 200, /, **facts: Any
) -> HTMLResponse:
    """Render a template for the requesting person; *facts* add to or replace common facts."""
    common_facts = {
        "person": request.state.person,
        "flash_message": request.state.flash_message,
        "path": request.scope["path"],
        "query": {name: value for name, value in request.query_params.items() if value},
        "title": title,
    }
    environment = request.app.state.templates[choose_language(request)]
    text = environment.get_template(template).render(common_facts | facts)
    answer = HTMLResponse(text, status, {"Cache-Control": "no-store"})
    if request.state.flash_message:
        answer.delete_cookie(FLASH_COOKIE, httponly=True, samesite="lax")
    return answer


def render_refusal(request: Request, title: TranslatableText, status: int, sentence: str) -> Response:
    """Render an error as a page, or for the API as problem details; *sentence* has the cause and the remedy."""
    if is_for_api(request):
        return render_problem_details(status, sentence)
    return render_page(request, "problem.html", title, status, sentence=sentence)
