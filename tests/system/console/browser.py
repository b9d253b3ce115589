"""A window of Chromium on a console, which notes whatever is not right with the pages that it opens."""

import re
from contextlib import contextmanager
from pathlib import Path

from forgekeeper.cli.console.named_lines import LineFile
from forgekeeper.cli.console.users import USER_FORMAT, User, hash_password
from tests.harness.console import Console
from tests.harness.ports import free_ports
from tests.harness.programs import eventually

OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE, NARROW = 1280, 375
ROLES = {"ada": "operator", "eve": "viewer"}
PATIENCE = 15_000
"""Milliseconds that a page has for what it is expected to do."""
PASSWORD = "a swordfish in a teacup"
SEEN = """state => {
    Object.defineProperty(document, "hidden", {configurable: true, get: () => state === "hidden"});
    document.dispatchEvent(new Event("visibilitychange"));
}"""
"""Lets a page be taken for one that can be seen, or not."""
NOT_READY = r"status of 503|Error Code 503"
"""What a page complains of while the servers have not answered the console, as on a busy machine; it asks again."""


@contextmanager
def console_in(folder, **settings):
    """Run a console that is ready, its log in the folder: `ada` operates it, `eve` may look."""
    (port,) = free_ports(1)
    users = Path(folder) / f"users-{port}"
    with LineFile(users, USER_FORMAT).edit_lines() as known:
        known |= {name: User(name, role, hash_password(PASSWORD)) for name, role in ROLES.items()}
    settings = {"console_users": users, "console_actions": "on"} | settings
    log = Path(folder) / f"console-{port}.log"
    one = Console(log, "-m", "forgekeeper.cli", "console", console_port=port, cwd=folder, **settings)
    try:
        eventually(one.ready)
        yield one
    finally:
        one.kill()


class Window:
    """A window of the browser on a console; *allowed* is what its pages may complain of, a regular expression,
    and *like* a window whose person looks here, too.

    Every page that it has opened is watched; `wrong` is what was not right, `requests` what was asked for.
    """

    def __init__(
        self,
        browser,
        console,
        *,
        width=WIDE,
        scheme="light",
        javascript=True,
        allowed=NOT_READY,
        like=None,
        language="en",
    ):
        self.console, self._allowed = console, re.compile(allowed)
        self.name = f"{width} pixels, {scheme}, {language}{'' if javascript else ', no JavaScript'}"
        self.wrong, self.requests = [], []
        options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme, "reduced_motion": "reduce"}
        options["locale"] = language
        if like is not None:
            options["storage_state"] = like.context.storage_state()
        self.context = browser.new_context(base_url=console.url, java_script_enabled=javascript, **options)
        self.context.set_default_timeout(PATIENCE)
        self.context.on("request", self._request)
        self.context.on("console", lambda said: said.type == "error" and self._complain(said.text))
        self.context.on("weberror", lambda error: self._complain(str(error.error)))
        self.context.on("dialog", self._dialog)
        self.page = self.context.new_page()

    def open(self, path):
        """Go to a page; return it."""
        self.page.goto(path)
        return self.page

    def sign_in(self, name):
        """Say who one is; return the window."""
        page = self.open("/login")
        page.get_by_label("Name").fill(name)
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(self.console.url + "/")
        return self

    def close(self):
        self.context.close()

    def _request(self, request):
        self.requests.append(request)
        if not request.url.startswith(self.console.url + "/"):
            self._complain(f"another host was asked: {request.url}")

    def _dialog(self, dialog):
        self.wrong.append(f"a script of somebody else's ran: {dialog.message}")
        dialog.dismiss()

    def _complain(self, sentence):
        if not self._allowed.search(sentence):
            self.wrong.append(sentence)


def tab_to(page, selector, most=900):
    """Go with Tab to what the selector names, if one is not there."""
    for _ in range(most):
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not come to {selector}")
