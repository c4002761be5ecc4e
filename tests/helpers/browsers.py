"""A browser on the playground."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serving import TIMEOUT_SECONDS, Served, pair, served

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")
expect: Any = playwright.expect
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as api:
        running = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A scripted pair: it answers at once, and has no tokens to fill in with."""
    with served(pair()) as running:
        yield running


HELD = """{
    const begin = window.setTimeout;
    window.moments = [];
    window.setTimeout = (what, after, ...given) => (after === 1500 ? -moments.push(what) : begin(what, after, ...given));
}"""


def pass_moment(page: Any) -> None:
    """Ends what buttons say for a moment, 1.5 seconds, which a busy machine may not see: in tests it lasts until this is called."""
    page.evaluate("moments.splice(0).forEach((end) => end())")


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages, each in a profile of its own; what their scripts complain about fails the test."""
    contexts, complaints = [], []

    def complain(message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # a status of 400 is an answer
            complaints.append(message.text)

    def make(url: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(TIMEOUT_SECONDS * 1000)
        context.add_init_script(HELD)
        contexts.append(context)
        page = context.new_page()
        page.on("console", complain)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    expect.set_options(timeout=TIMEOUT_SECONDS * 1000)
    yield make
    for context in contexts:
        context.close()
    assert not complaints, complaints


def asked(page: Any, answer: str = "data: [DONE]\n\n") -> list[dict[str, Any]]:
    """Answers requests of a page in the server's place; the list holds what they asked, path included."""
    got: list[dict[str, Any]] = []

    def fulfil(route: Any) -> None:
        got.append({"path": route.request.url.split("/v1/")[1], **route.request.post_data_json})
        route.fulfill(status=200, content_type="text/event-stream", body=answer)

    page.route("**/completions", fulfil)
    return got


def eventually(page: Any, what: Callable[[], bool]) -> None:
    """Waits until it holds; a hang is a failure. The page waits: its routes are answered only while Playwright is called."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not what():
        assert time.monotonic() < deadline
        page.wait_for_timeout(10)


def fits(page: Any) -> bool:
    """Nothing is to be scrolled to sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


RANGES = """(name) => [...(CSS.highlights.get(name) ?? [])].map((range) => {
    const live = new Range();
    live.setStart(range.startContainer, range.startOffset);
    live.setEnd(range.endContainer, range.endOffset);
    return live.toString();
})"""


def sse(*events: dict[str, Any]) -> str:
    """A streamed answer of these events."""
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
