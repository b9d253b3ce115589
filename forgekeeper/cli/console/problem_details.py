"""Errors of the API as `application/problem+json` (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from forgekeeper.cli.terminal import encode_json

API_ROOT = "/api/v1"
"""Address of the API's first version."""
PROBLEM_MEDIA_TYPE = "application/problem+json"


def is_for_api(request: Request) -> bool:
    """Check whether the request is for the API, of any version."""
    path: str = request.scope["path"]
    return path == "/api" or path.startswith("/api/")


def render_problem_details(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """Render an error; *sentence* is the cause and the remedy."""
    content = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": sentence}
    given = {"Cache-Control": "no-store", **(headers or {})}
    return Response(encode_json(content), status, given, PROBLEM_MEDIA_TYPE)
