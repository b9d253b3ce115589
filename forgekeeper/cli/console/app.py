"""The web application: pages, forms for acts, and the files in `static/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from anyio import CapacityLimiter
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from forgekeeper.api.batches import BATCHES
from forgekeeper.cli.console.access import Gate
from forgekeeper.cli.console.acting import act
from forgekeeper.cli.console.backlogs import BACKLOGS
from forgekeeper.cli.console.pages import PAGES, Asked, Page, load_pages, shown
from forgekeeper.cli.console.reading import Busy, Reader
from forgekeeper.cli.console.words import FILTERS
from forgekeeper.ledger.processes import version
from forgekeeper.platform.settings import Settings

HERE = Path(__file__).parent
SENTENCES = {"Not Found": "there is no such page", "Method Not Allowed": "that cannot be asked of this page"}
"""Texts for people in place of Starlette's own errors."""
MAX_ACTS = 3
"""Maximum concurrent acts; pages leave a database connection free for each."""
BUSY = "the console is busy: too many questions wait for the servers; try again in a moment"


def application(settings: Settings) -> Starlette:
    """Create the web application; the process must be connected, with its batches loaded."""
    load_pages()
    BACKLOGS.begin()
    made = Starlette(
        routes=[
            *(Route(page.address, _endpoint(page), name=page.address) for page in PAGES),
            Route("/act/{name}", act, methods=["GET", "POST"]),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ],
        middleware=[Middleware(Gate, settings=settings)],
        exception_handlers={HTTPException: _refused, Exception: _mistake},
    )
    # Every value is escaped, and a missing name is an error.
    made.state.templates = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.state.templates.filters.update(FILTERS)
    made.state.templates.globals.update(batches=BATCHES, version=version(), trouble=None, live=False)
    made.state.settings, made.state.reader, made.state.acts = settings, Reader(), CapacityLimiter(MAX_ACTS)
    return made


def _endpoint(page: Page) -> Callable[[Request], Response]:
    def show(request: Request) -> Response:
        # A function that is not async: Starlette calls it in a thread, because it blocks.
        query = {name: value for name in page.query if (value := request.query_params.get(name))}
        asked = Asked(request.path_params, query, request.app.state.settings)
        key = (page.address, *sorted(request.path_params.items()), *sorted(query.items()))
        try:
            known = request.app.state.reader.ask(key, lambda: page.look(asked), patience=page.patience)
        except Busy:
            return shown(request, "problem.html", "Busy", 503, sentence=BUSY)
        if known.problem is not None:
            raise HTTPException(404, str(known.problem))
        title = page.title.format(**request.path_params)
        facts = {"trouble": known.trouble, "age": known.age, "live": page.live}
        if known.value is None:
            return shown(request, "away.html", title, 503, **facts | {"live": True})
        return shown(request, page.template, title, **facts | known.value)

    return show


def _refused(request: Request, error: Exception) -> Response:
    """Show the sentence of an error that was raised for a page or an act."""
    assert isinstance(error, HTTPException)
    title = "Refused" if error.status_code == 403 else "Nothing here"
    sentence = SENTENCES.get(error.detail, error.detail)
    return shown(request, "problem.html", title, error.status_code, sentence=sentence)


def _mistake(request: Request, _error: Exception) -> Response:
    """Report a bug of ours; Starlette raises the error again and so logs its trace."""
    return shown(request, "problem.html", "Something is wrong", 500, sentence="the log of the console says what")
