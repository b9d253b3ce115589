"""The site of the documentation in Chromium: diagrams are drawn and the search answers, without another host."""

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.harness.site import build_site, require_mkdocs, write_sources


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves the files of a folder, and logs nothing."""

    def log_message(self, *_arguments):
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    require_mkdocs()
    folder = tmp_path_factory.mktemp("site")
    write_sources(folder)
    built = build_site(folder)
    assert built.status == 0, built.messages
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=built.folder)) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def page(chromium, address):
    """Open a page; at the end, fail if a request was for another host or the browser's console has an error."""
    opened = chromium.new_page()
    wrong = []
    opened.on(
        "request", lambda request: request.url.startswith((address, "data:", "blob:")) or wrong.append(request.url)
    )
    opened.on("console", lambda message: message.type != "error" or wrong.append(message.text))
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    yield opened
    opened.close()
    assert wrong == []


def test_the_diagrams_of_the_architecture_are_drawn(page, address):
    page.goto(f"{address}/architecture/index.html")

    # The theme replaces the text of a diagram by a shadow root with the picture.
    page.wait_for_function("document.querySelectorAll('div.mermaid').length === 3")
    heights = page.eval_on_selector_all("div.mermaid", "found => found.map(one => one.clientHeight)")
    assert min(heights) > 200


def test_the_search_finds_a_page_by_its_words(page, address):
    page.goto(f"{address}/index.html")

    page.keyboard.press("f")
    page.get_by_role("textbox", name="Search").fill("pt-archiver")

    page.wait_for_selector(".md-search-result__link[href*='comparison.html']")
