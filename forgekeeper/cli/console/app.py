"""The web application: pages, forms for acts, and the files in `static/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from anyio import CapacityLimiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from forgekeeper.cli.console.access import AccessMiddleware
from forgekeeper.cli.console.acting import handle_action
from forgekeeper.cli.console.backlogs import BACKLOG_HISTORY
from forgekeeper.cli.console.pages import (
    DECLARED_PAGES,
    ConsolePage,
    PageRequest,
    load_pages,
    render_page,
    render_refusal,
)
from forgekeeper.cli.console.problem_details import API_ROOT, is_for_api
from forgekeeper.cli.console.reading import BUSY_SENTENCE, PageReader, ReaderBusy
from forgekeeper.cli.console.template_environments import create_environments
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.cli.console.web_api.openapi import OPENAPI_ADDRESS
from forgekeeper.cli.console.web_api.routes import create_api_routes
from forgekeeper.platform.settings import Settings

CONSOLE_FOLDER = Path(__file__).parent
HTTP_ERROR_SENTENCES = {
    "Not Found": TranslatableText("there is no such page"),
    "Method Not Allowed": TranslatableText("this page does not accept that method"),
}
"""Texts for people in place of Starlette's own errors."""
NO_ENDPOINT_SENTENCE = f"the API has no such address: {API_ROOT}{OPENAPI_ADDRESS} lists its addresses"
MAX_CONCURRENT_ACTS = 3
"""Maximum concurrent acts; pages leave a database connection free for each."""


def create_application(settings: Settings) -> Starlette:
    """Create the web application; the process must be connected, with its batches loaded."""
    load_pages()
    BACKLOG_HISTORY.start_reading()
    made = Starlette(
        routes=[
            *(Route(page.address, _create_endpoint(page), name=page.address) for page in DECLARED_PAGES),
            Mount(API_ROOT, routes=create_api_routes()),
            Route("/act/{name}", handle_action, methods=["GET", "POST"]),
            Mount("/static", StaticFiles(directory=CONSOLE_FOLDER / "static")),
        ],
        middleware=[Middleware(AccessMiddleware, settings=settings)],
        exception_handlers={HTTPException: _show_refusal, Exception: _show_internal_error},
    )
    made.state.templates = create_environments()
    made.state.settings, made.state.reader, made.state.acts = (
        settings,
        PageReader(),
        CapacityLimiter(MAX_CONCURRENT_ACTS),
    )
    return made


def _create_endpoint(page: ConsolePage) -> Callable[[Request], Response]:
    def show_page(request: Request) -> Response:
        # A function that is not async: Starlette calls it in a thread, because it blocks.
        query = {name: value for name in page.query if (value := request.query_params.get(name))}
        page_request = PageRequest(request.path_params, query, request.app.state.settings)
        key = (page.address, *sorted(request.path_params.items()), *sorted(query.items()))
        try:
            known = request.app.state.reader.ask(
                key, lambda: page.collect_facts(page_request), timeout_seconds=page.timeout_seconds
            )
        except ReaderBusy:
            return render_refusal(request, TranslatableText("Busy"), 503, BUSY_SENTENCE)
        if known.problem is not None:
            raise HTTPException(404, known.problem.sentence)
        title = TranslatableText(page.title.pattern, **request.path_params)
        facts = {"trouble": known.trouble, "age": known.age, "live": page.live}
        if known.value is None:
            return render_page(request, "away.html", title, 503, **facts | {"live": True})
        return render_page(request, page.template, title, **facts | known.value)

    return show_page


def _show_refusal(request: Request, error: Exception) -> Response:
    """Show the sentence of an error that was raised for a page or an act."""
    assert isinstance(error, HTTPException)
    title = TranslatableText("Refused") if error.status_code == 403 else TranslatableText("Nothing here")
    sentence = HTTP_ERROR_SENTENCES.get(error.detail, error.detail)
    if is_for_api(request) and error.detail == "Not Found":
        sentence = NO_ENDPOINT_SENTENCE
    return render_refusal(request, title, error.status_code, sentence)


def _show_internal_error(request: Request, _error: Exception) -> Response:
    """Report a bug of ours; Starlette raises the error again and so logs its trace."""
    title, sentence = TranslatableText("Something is wrong"), TranslatableText("the console failed; see its log")
    return render_refusal(request, title, 500, sentence)
