"""The web application: pages that are read, forms that act, and what lies in `static/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from forgekeeper.batches import BATCHES
from forgekeeper.console.access import Person
from forgekeeper.console.pages import PAGES, Asked, Page, load_pages
from forgekeeper.console.reading import Reader
from forgekeeper.console.words import FILTERS
from forgekeeper.runs.processes import version
from forgekeeper.settings import Settings

HERE = Path(__file__).parent
ORDER = ("Now", "Processes", "Quarantine", "Audit", "Alerts", "Flags", "Leases", "Settings", "Check")
"""The places of the navigation as they are shown: what one looks for most often first."""
MISSING, AWAY = 404, 503


def application(settings: Settings) -> Starlette:
    """Return the console's web application; the process has to be connected, and the batches loaded."""
    load_pages()
    reader, templates = Reader(), environment()
    routes: list[Route | Mount] = [
        Route(page.address, _endpoint(page, settings, reader, templates), name=page.address) for page in PAGES
    ]
    routes.append(Mount("/static", StaticFiles(directory=HERE / "static")))
    made = Starlette(routes=routes)
    made.state.reader = reader
    return made


def environment() -> Environment:
    """Return what renders templates: every value is escaped, and a name that is missing is an error."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(FILTERS)
    places = [(page.place, page.address) for page in PAGES if page.place]
    places.sort(key=lambda one: ORDER.index(one[0]) if one[0] in ORDER else len(ORDER))
    made.globals.update(places=places, batches=BATCHES, version=version())
    return made


def _endpoint(page: Page, settings: Settings, reader: Reader, templates: Environment) -> Callable[[Request], Response]:
    def show(request: Request) -> Response:
        # Starlette calls it in a thread, as it waits.
        query = {name: value for name, value in request.query_params.items() if value}
        asked = Asked(request.path_params, query, settings)
        key = (page.address, *sorted(request.path_params.items()), *sorted(query.items()))
        known = reader.ask(key, lambda: page.look(asked), patience=page.patience)
        facts: dict[str, Any] = {
            "person": getattr(request.state, "person", Person("anybody", "viewer")),
            "path": request.url.path,
            "address": page.address,
            "query": query,
            "title": page.title.format(**request.path_params),
            "trouble": known.trouble,
            "age": known.age,
            "live": page.live,
        }
        if known.problem is not None:
            return _html(templates, "problem.html", facts | {"sentence": str(known.problem)}, MISSING)
        if known.value is None:
            return _html(templates, "away.html", facts | {"live": True}, AWAY)
        return _html(templates, page.template, facts | known.value)

    return show


def _html(templates: Environment, name: str, facts: dict[str, Any], status: int = 200) -> HTMLResponse:
    return HTMLResponse(templates.get_template(name).render(facts), status, {"Cache-Control": "no-store"})
