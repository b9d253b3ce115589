"""Make the pictures of the console for the README: `python -m tests.system.console.screenshots FOLDER`.

They show servers, a console and data of their own, in Debian's Chromium, with the fonts of fonts-noto-cjk.
"""

import logging
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import structlog
from playwright.sync_api import sync_playwright

from demo.servers import run_servers
from demo.tables import make_tables
from forgekeeper.cli.terminal import Problem
from forgekeeper.delivery.boot import load_settings
from forgekeeper.delivery.broker import load_batches
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform import migrations
from forgekeeper.platform.connections import ServerTimeouts, configure_clients
from forgekeeper.platform.database import database
from forgekeeper.platform.installation import Installation
from forgekeeper.platform.settings import PREFIX

from . import lived_in
from .browser import OPTIONS, SEEN, Window, console_in

LARGEST = 250_000
"""Bytes of a picture."""
HEIGHT = 880
BATCH = "git_ref_cleanup"
JAPANESE = ("overview", "batches", "story")
"""Pictures of the pages in Japanese."""


@contextmanager
def lived():
    """Yield a console of an installation that has lived, and the run whose story is told."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    with run_servers() as own:
        os.chdir(own.folder)
        given = {"database_url": own.database_url, "redis_url": own.redis_url, **lived_in.settings_of(own.folder)}
        os.environ.update({PREFIX + name.upper(): value for name, value in given.items()})
        load_batches()
        # What its runs have to say is of no interest.
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        settings = load_settings()
        configure_clients(settings, ServerTimeouts.for_worker(settings), name="screenshots", connections=5)
        with database.connection_context():
            migrations.apply_pending(database.obj)
            make_tables(database.obj)
            lived_in.fill(settings, own.folder, Installation.ensure_id())
            usual = type(settings).model_fields["breaker_share"].default
            run = JobRun.last_ended("user_status_cleanup").id
            with console_in(own.folder, breaker_share=usual) as console:
                yield console, run
        os.chdir("/")


def pictures(run):
    """Return the pictures by name: each of a page, as it opens, or of a part of it."""
    return {
        "overview": ("/", None),
        "batches": ("/", "#batches .scroll"),
        "batch": (f"/batches/{BATCH}", None),
        "story": (f"/runs/{run}", None),
        "quarantine": ("/quarantine", None),
    }


def take(folder):
    """Take the pictures."""
    program = shutil.which("chromium")
    if program is None:
        raise Problem("Chromium is not here: apt-get install chromium")
    with lived() as (console, run), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=OPTIONS)
        looking = Window(browser, console).sign_in("ada")
        looking.page.set_viewport_size({"width": 1280, "height": HEIGHT})
        for name, place in pictures(run).items():
            take_one(looking, place, folder / f"{name}.png")
        looking.page.get_by_role("button", name="日本語").click()
        looking.page.wait_for_selector("html[lang=ja]")
        for name in JAPANESE:
            take_one(looking, pictures(run)[name], folder / f"{name}_ja.png")
        looking.close()
        browser.close()


def take_one(looking, place, picture):
    """Take the picture of a page, or of a part of it."""
    path, part = place
    page = looking.open(path)
    page.evaluate(SEEN, "hidden")
    (page.locator(part) if part else page).screenshot(path=picture)
    if (size := picture.stat().st_size) > LARGEST:
        raise Problem(f"{picture} has {size:,} bytes, more than {LARGEST:,}")


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    take(target)
