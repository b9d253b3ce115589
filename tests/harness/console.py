"""Run `forgekeeper console` as a process, and send requests to it over HTTP."""

import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import NamedTuple

from tests.harness.programs import Program


class Answer(NamedTuple):
    """A response of the console."""

    status: int
    headers: dict
    text: str


class Console(Program):
    """The console as a process; `get` and `post` send requests like a browser, without following redirects."""

    def get(self, path, **headers):
        return self.ask(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path, fields=(), **headers):
        """Submit a form, as a browser does from a page of the console; names of headers have _ instead of -."""
        headers = {"sec-fetch-site": "same-origin"} | {name.replace("_", "-"): one for name, one in headers.items()}
        data = urllib.parse.urlencode(fields, doseq=True).encode()
        given = {name: value for name, value in headers.items() if value is not None}
        return self.ask(urllib.request.Request(self.url + path, data=data, headers=given, method="POST"))

    def log_in(self, name, password, **fields):
        """Log in; return the session's cookie as the value of a header."""
        answer = self.post("/login", {"name": name, "password": password, **fields})
        assert answer.status == 303, answer.text
        return answer.headers["set-cookie"].partition(";")[0]

    def ask(self, request):
        certificate = self.settings.get("FORGEKEEPER_CONSOLE_TLS_CERTIFICATE")
        tls = (
            [urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=certificate))] if certificate else []
        )
        opener = urllib.request.build_opener(_NoRedirect, *tls)
        try:
            with opener.open(request, timeout=30) as answer:
                return Answer(answer.status, answer.headers, answer.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read().decode())

    @property
    def url(self):
        scheme = "https" if "FORGEKEEPER_CONSOLE_TLS_CERTIFICATE" in self.settings else "http"
        return f"{scheme}://127.0.0.1:{self.settings['FORGEKEEPER_CONSOLE_PORT']}"

    def ready(self):
        try:
            return self.get("/static/console.css").status == 200
        except OSError:
            return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_args):
        return None
