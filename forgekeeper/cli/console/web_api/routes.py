"""Routes of the API: each asks the reader that the pages share, and answers with JSON."""

from __future__ import annotations

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forgekeeper.cli.console.pages import PageRequest
from forgekeeper.cli.console.problem_details import API_ROOT, render_problem_details
from forgekeeper.cli.console.reading import BUSY_SENTENCE, ReaderBusy
from forgekeeper.cli.console.web_api.endpoints import DECLARED_ENDPOINTS, Endpoint, ServerAway, load_endpoints
from forgekeeper.cli.console.web_api.openapi import OPENAPI_ADDRESS, build_document
from forgekeeper.cli.terminal import WRONG_USE_STATUS, Problem, encode_json

ANSWER_TIMEOUT_SECONDS = 10.0
"""Time limit of an answer: a program waits longer than a person, and wants no old answer."""
RETRY_AFTER = {"Retry-After": "1"}


def create_api_routes() -> list[Route]:
    """Create the routes below the API's root."""
    load_endpoints()
    found = [Route(_pattern(one), _create_endpoint(one), methods=["GET"]) for one in DECLARED_ENDPOINTS]
    return [*found, Route(OPENAPI_ADDRESS, _answer_document, methods=["GET"])]


def _pattern(one: Endpoint) -> str:
    # An id of the quarantine may contain slashes.
    return one.address.replace("{id}", "{id:path}")


def _answer_document(_request: Request) -> Response:
    return _render_json(build_document())


def _create_endpoint(one: Endpoint) -> Callable[[Request], Response]:
    def answer_request(request: Request) -> Response:
        # A function that is not async: Starlette calls it in a thread, because it blocks.
        query = _read_query(request, one)
        asked = PageRequest(request.path_params, query, request.app.state.settings)
        key = (API_ROOT, one.address, *sorted(request.path_params.items()), *sorted(query.items()))
        try:
            known = request.app.state.reader.ask(
                key, lambda: one.read_facts(asked), timeout_seconds=ANSWER_TIMEOUT_SECONDS, serves_later=False
            )
        except ReaderBusy:
            return render_problem_details(503, BUSY_SENTENCE, RETRY_AFTER)
        if known.problem is not None:
            return render_problem_details(_find_status(known.problem), str(known.problem))
        if known.trouble is not None:
            return render_problem_details(503, known.trouble, RETRY_AFTER)
        return _render_json(known.value)

    return answer_request


def _read_query(request: Request, one: Endpoint) -> dict[str, str]:
    """Return the parameters; raise `HTTPException` if one is unknown, empty or repeated."""
    names, found = [parameter.name for parameter in one.query], request.query_params.multi_items()
    for name, value in found:
        if name not in names:
            raise HTTPException(400, f"there is no parameter {name!r}; there are: {', '.join(names) or 'none'}")
        if not value or request.query_params.getlist(name) != [value]:
            raise HTTPException(400, f"give the parameter {name} one value, or leave it out")
    return dict(found)


def _find_status(problem: Problem) -> int:
    if isinstance(problem, ServerAway):
        return 503
    return 400 if problem.status == WRONG_USE_STATUS else 404


def _render_json(value: object) -> Response:
    return Response(encode_json(value), headers={"Cache-Control": "no-store"}, media_type="application/json")
