"""`/livez`, `/readyz` and `/metrics` of the console: no login, and no server is asked."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from metrics.threads import find_stalled

_registry = CollectorRegistry()
ProcessCollector(registry=_registry)


def answer_probe(request: Request) -> Response | None:
    """Return the answer to a probe, or None. `/metrics` has memory, CPU and files.

    The console is ready while it serves: if its servers are away, its pages say so.
    """
    path = request.scope["path"]
    if request.method not in {"GET", "HEAD"}:
        return None
    if path == "/livez":
        reason = find_stalled()
        return PlainTextResponse(f"{reason or 'alive'}\n", 200 if reason is None else 503)
    if path == "/readyz":
        return PlainTextResponse("ready\n")
    if path == "/metrics":
        return Response(generate_latest(_registry), media_type=CONTENT_TYPE_LATEST)
    return None
