"""A real console: `forgekeeper console` as a process, asked over HTTP."""

import urllib.error
import urllib.request
from typing import NamedTuple

from tests.harness.programs import Program


class Answer(NamedTuple):
    """What the console has answered."""

    status: int
    headers: dict
    text: str


class Console(Program):
    """The console as a process; `get` and `post` ask it as a browser would, without following redirects."""

    def get(self, path, **headers):
        return self.ask(urllib.request.Request(self.url + path, headers=headers))

    def ask(self, request):
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=30) as answer:
                return Answer(answer.status, answer.headers, answer.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read().decode())

    @property
    def url(self):
        return f"http://127.0.0.1:{self.settings['FORGEKEEPER_CONSOLE_PORT']}"

    def ready(self):
        try:
            return self.get("/static/console.css").status == 200
        except OSError:
            return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args):
        return None
