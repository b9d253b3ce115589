"""The web application: pages that are read, forms that act, and what lies in `static/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from forgekeeper.batches import BATCHES
from forgekeeper.console.access import Gate
from forgekeeper.console.acting import act
from forgekeeper.console.backlogs import BACKLOGS
from forgekeeper.console.pages import PAGES, Asked, Page, load_pages, shown
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
    BACKLOGS.begin()
    reader = Reader()
    routes: list[Route | Mount] = [
        Route(page.address, _endpoint(page, settings, reader), name=page.address) for page in PAGES
    ]
    routes.append(Route("/act/{name}", act, methods=["GET", "POST"]))
    routes.append(Mount("/static", StaticFiles(directory=HERE / "static")))
    made = Starlette(
        routes=routes,
        middleware=[Middleware(Gate, settings=settings)],
        exception_handlers={HTTPException: _no_page, Exception: _mistake},
    )
    made.state.settings, made.state.reader, made.state.templates = settings, reader, environment()
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


def _endpoint(page: Page, settings: Settings, reader: Reader) -> Callable[[Request], Response]:
    def show(request: Request) -> Response:
        # Starlette calls it in a thread, as it waits.
        query = {name: value for name, value in request.query_params.items() if value}
        asked = Asked(request.path_params, query, settings)
        key = (page.address, *sorted(request.path_params.items()), *sorted(query.items()))
        known = reader.ask(key, lambda: page.look(asked), patience=page.patience)
        title = page.title.format(**request.path_params)
        facts = {"address": page.address, "trouble": known.trouble, "age": known.age, "live": page.live}
        if known.problem is not None:
            return shown(request, "problem.html", title, MISSING, **facts, sentence=str(known.problem))
        if known.value is None:
            return shown(request, "away.html", title, AWAY, **facts | {"live": True})
        return shown(request, page.template, title, **facts | known.value)

    return show


def _no_page(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", MISSING)
    sentence = "there is no such page" if status == MISSING else "that cannot be asked of this page"
    return shown(request, "problem.html", "Nothing here", status, sentence=sentence)


def _mistake(request: Request, _error: Exception) -> Response:
    """Say that there is a mistake of our own; it is raised again, and so logged with its trace."""
    return shown(request, "problem.html", "Something is wrong", 500, sentence="the log of the console says what")
