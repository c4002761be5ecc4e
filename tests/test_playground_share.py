"""What people take away from the page at /: examples, links that run, copies and exports, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serving import Served
from test_playground import CHROMIUM, asked, browser, eventually, expect, fits, opened, server

__all__ = ["browser", "opened", "server"]  # fixtures
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}


def run(page: Any) -> None:
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#status")).to_contain_text("acceptance length")


# ── examples ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_example_fills_the_form_and_runs(opened: Callable[..., Any], server: Served) -> None:
    """It says what is to be written; how many samples and how they are drawn stays as it was."""
    page = opened(f"{server.url}/#n=2&compare=false&stop=x&kind=regex&grammar=a", **PHONE)
    got = asked(page)
    examples = page.get_by_role("group", name="Examples").get_by_role("button")
    assert 3 <= examples.count() <= 5
    for number, example in enumerate(examples.all()):
        example.tap()
        eventually(page, lambda: len(got) == number + 1)  # noqa: B023
        expect(page.get_by_role("status")).to_contain_text("0 tokens")
        assert got[-1]["prompt"] == page.get_by_label("Prompt").input_value()
        assert (got[-1]["n"], got[-1].get("stop")) == (2, None)
    assert len({body["prompt"] for body in got}) == len(got)
    assert [body["grammar"]["type"] for body in got if "grammar" in body] == ["regex"]
    assert "kind" not in page.evaluate("location.hash") or "grammar" in got[-1]
    assert fits(page)


def test_every_example_can_be_run(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=1&max_tokens=4&compare=false")
    for example in page.get_by_role("group", name="Examples").get_by_role("button").all():
        example.press("Enter")
        expect(page.get_by_role("status")).to_contain_text("1 sample, 4 tokens")


# ── links ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_copied_link_draws_the_samples_again_once(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=2&max_tokens=12&compare=false", permissions=["clipboard-read", "clipboard-write"])
    run(page)
    texts = page.locator("#samples pre").all_text_contents()
    page.get_by_label("Samples (n)").fill("3")  # the link is that of the samples, not of what is asked next
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("status")).to_have_text("The link is copied.")
    link = page.evaluate("navigator.clipboard.readText()")

    other = opened("about:blank")
    requests: list[str] = []
    other.on("request", lambda request: requests.append(request.url) if "completions" in request.url else None)
    other.goto(link)
    expect(other.get_by_role("status")).to_contain_text("2 samples, 24 tokens")
    assert other.locator("#samples pre").all_text_contents() == texts
    assert "run" not in other.evaluate("location.hash").split("&")  # nor does a reload, or a link made of the address
    other.reload()
    expect(other.locator("#model")).to_have_text("tiny")
    other.wait_for_timeout(300)
    expect(other.get_by_role("status")).to_have_text("Ready.")
    assert len(requests) == 1

    other.evaluate("(link) => { location.href = link; }", link)  # pasted into a page that is open: only the hash changes
    expect(other.get_by_role("status")).to_contain_text("2 samples, 24 tokens")
    assert other.locator("#samples pre").all_text_contents() == texts
    assert len(requests) == 2


def test_a_link_waits_for_the_key(opened: Callable[..., Any], server: Served) -> None:
    page = opened("about:blank")
    refused = {"error": {"message": "an API key is needed", "param": None}}
    page.route("**/v1/models", lambda route: route.fulfill(status=401, json=refused))
    got = asked(page)
    page.goto(f"{server.url}/#n=1&seed=4&run")
    expect(page.get_by_label("API key")).to_be_focused()
    page.wait_for_timeout(200)
    assert got == []
