"""Every page, wide and narrow, light and dark, by keyboard alone, without JavaScript and in Japanese, of an installation that has lived.

In it every text that comes from outside wants to be run as a script: a page that runs one fails.
"""

import re
from urllib.parse import quote

import pytest

from forgekeeper.cli.console.pages import DECLARED_PAGES, load_pages
from forgekeeper.delivery.boot import load_settings
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform import database as db
from forgekeeper.platform.connections import ServerTimeouts, client, configure_clients
from forgekeeper.platform.settings import PREFIX
from tests.harness.installation import INSTALLATION
from tests.harness.tables import empty

from . import lived_in
from .browser import NARROW, SEEN, Window, console_in

load_pages()
FORMS = [
    "/act/run?batch=user_status_cleanup",
    "/act/pause?batch=user_status_cleanup",
    "/act/stop?batch=*",
    "/act/resume?batch=stale_imports",
    "/act/release?batch=expired_job_artifacts",
    "/act/cancel?run={run}",
    "/act/flag?name=bulk_delete_job_artifacts&to=off",
    "/act/retry?all=on&batch=git_ref_cleanup&kind=child",
    "/act/discard?id={id}",
    "/act/break?lease=git:sample/3.git",
]
"""Forms of actions."""
MISSING = {"/runs/4711000": 404}
ADDRESSES = [*(page.address for page in DECLARED_PAGES), "/login", *MISSING, *FORMS]
FITS = "() => document.documentElement.scrollWidth <= document.documentElement.clientWidth"
STICKS_OUT = """() => [...document.querySelectorAll("main *, header *, footer *")]
    .filter(one => one.getBoundingClientRect().right > innerWidth && !one.closest(".scroll, nav, pre"))
    .map(one => one.outerHTML.slice(0, 120)).slice(0, 3)"""
FINDINGS = """async options => {
    const found = await axe.run(document, options);
    return found.violations.filter(one => ["serious", "critical"].includes(one.impact))
        .map(one => `${one.id}: ${one.nodes.length} times, first ${one.nodes[0].html.slice(0, 160)} ${one.nodes[0].failureSummary}`);
}"""
STOPS = """() => {
    document.body.tabIndex = -1;
    document.body.focus();
    // Ticks in a chart are passed over: the table beside it has the same links.
    const can = "a[href]:not([tabindex='-1']), button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']";
    const seen = one => one.checkVisibility({visibilityProperty: true}) && !one.disabled;
    window.stops = [...document.querySelectorAll(can)].filter(seen);
    window.stood = [];
    document.addEventListener("focusin", ({target}) => {
        const look = getComputedStyle(target);
        const rung = look.outlineStyle !== "none" && parseFloat(look.outlineWidth) > 0;
        window.stood.push([window.stops.indexOf(target), rung ? "" : target.outerHTML.slice(0, 120)]);
    });
    return window.stops.length;
}"""

MISSED = """() => {
    const come = new Set(window.stood.map(([place]) => place));
    return window.stops.filter((_, place) => !come.has(place)).map(one => one.outerHTML.slice(0, 120)).slice(0, 3);
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lived")


@pytest.fixture(scope="module")
def console(_migrated, urls, folder):
    """A console of an installation that has lived."""
    given = {"database_url": urls.database, "redis_url": urls.redis, **lived_in.settings_of(folder)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(PREFIX + name.upper(), value)
        settings = load_settings()
        configure_clients(settings, ServerTimeouts.for_worker(settings), name="tests", connections=20)
        with db.database.connection_context():
            empty()
            client.flushdb()
            lived_in.fill(settings, folder, INSTALLATION, hostile=True)
            parts = {"run": JobRun.find_open("git_ref_cleanup").id, "id": Quarantined.oldest_first().first().id}
        with console_in(folder, **given) as one:
            one.parts = parts | {"batch": "git_ref_cleanup", "time": "2026-01-01T00:00", "name": "quarantine"}
            yield one
        with db.database.connection_context():
            empty()
            client.flushdb()
        db.database.close_all()
        client.connection_pool.disconnect()


@pytest.fixture(scope="module")
def windows(console, chromium):
    """A wide window, a narrow one, one without JavaScript and a narrow one in Japanese, in which an operator has signed in."""
    wide = Window(chromium, console).sign_in("ada")
    opened = [wide, Window(chromium, console, width=NARROW, like=wide)]
    opened.append(Window(chromium, console, javascript=False, like=wide))
    opened.append(Window(chromium, console, width=NARROW, like=wide, language="ja"))
    yield opened
    for one in opened:
        one.close()


def filled(console, address):
    """Put something that there is into the parts of an address."""
    return re.sub(r"{(\w+)(:\w+)?}", lambda part: quote(str(console.parts[part[1]])), address)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_page_fits_and_can_be_used_by_everybody(address, console, windows, axe):
    wide, narrow, without_javascript, japanese = windows
    path = filled(console, address)

    wrong = [
        *_shown(wide, path, [_misfits, _inaccessible(axe), _unreachable]),
        *_shown(narrow, path, [_misfits, _inaccessible(axe)]),
        *_shown(without_javascript, path, [_misfits]),
        *_shown(japanese, path, [_misfits, _inaccessible(axe), _untranslated]),
    ]

    assert wrong == []


def _shown(looking, path, looks):
    """Open the page; name what is wrong with it."""
    answer = looking.page.goto(path)
    expected = MISSING.get(path, 200)
    if answer.status != expected:
        yield f"{path} is answered by {answer.status}"
    if looking.page.locator("h1").count() != 1:
        yield "it has not one heading"
    looking.page.evaluate(SEEN, "hidden")
    for look in looks:
        yield from (f"{looking.name}: {one}" for one in look(looking.page))
    yield from (one for one in looking.wrong if f"status of {expected}" not in one)
    looking.wrong.clear()


def _misfits(page):
    """Name what makes the page wider than the window."""
    if not page.evaluate(FITS):
        yield f"it is wider than the window: {page.evaluate(STICKS_OUT)}"


def _untranslated(page):
    """Name the language of a page if it is not Japanese."""
    if (language := page.evaluate("document.documentElement.lang")) != "ja":
        yield f"it is in {language}"


def _inaccessible(axe):
    """Name what axe-core finds, in the light; and in the dark what cannot be read there."""

    def look(page):
        page.evaluate(axe)
        for scheme, options in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
            page.emulate_media(color_scheme=scheme)
            yield from (f"{scheme}: {found}" for found in page.evaluate(FINDINGS, options))
        page.emulate_media(color_scheme="light")

    return look


def _unreachable(page):
    """Name what Tab does not come to in the order of the page, or without showing where one is."""
    stops = page.evaluate(STOPS)
    for _ in range(stops):
        page.keyboard.press("Tab")
    stood = page.evaluate("() => window.stood")
    if [place for place, _ in stood] != list(range(stops)):
        missed = page.evaluate(MISSED)
        yield f"of {stops} stops Tab came to {len(stood)}, or in another order; it missed {missed}"
    yield from (f"nothing shows that one is at {where}" for _, where in stood if where)


def test_the_first_stop_leads_past_the_navigation(windows):
    page = windows[0].open("/")

    page.keyboard.press("Tab")
    page.keyboard.press("Enter")

    assert page.evaluate("() => document.activeElement.id") == "main"


@pytest.mark.parametrize("path", ["/", "/quarantine", "/batches/stale_direct_uploads"])
def test_what_wants_to_be_a_script_is_text_also_after_the_page_has_renewed_itself(windows, path):
    looking = windows[0]
    page = looking.open(path)

    with page.expect_response(lambda answer: answer.request.resource_type == "xhr"):
        page.locator("#live").get_by_text("<script>alert('ran')").first.wait_for()

    assert looking.wrong == []
