"""Code colours and token cards of the page, in a real browser.

Tests of: serve/playground: code colours and token cards of the page at /.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from browsers import CHROMIUM, RANGES, asked, browser, eventually, expect, fits, opened, server, sse
from serving import Served

__all__ = ["browser", "opened", "server"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")]


def token(text: str, id: int = 1, logprob: float = -0.5, drafter: str | None = None) -> dict[str, Any]:
    """A token as the details of a choice have it."""
    return {"id": id, "text": text, "logprob": logprob, "from_draft": drafter is not None, "drafter": drafter}


def details(tokens: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The field "shoal" of a choice."""
    counts = {"committed": len(tokens), "drafted": 0, "accepted": 0, "rounds": 1, "mean_logprob": -0.5}
    return {"tokens": tokens, **counts, **more}


def completion(*texts: str, logprobs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """An event with one sample's tokens, accepted drafts and the target's own in turn."""
    tokens = [token(text, 40 + i, -0.5 * i, None if i % 2 else "model") for i, text in enumerate(texts)]
    choice = {
        "index": 0,
        "text": "".join(texts),
        "finish_reason": None,
        "logprobs": logprobs,
        "shoal": details(tokens, **more),
    }
    return {"choices": [choice]}


# ── code colours ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_code_is_coloured_across_tokens_and_stays_the_same_text(opened: Callable[..., Any], server: Served) -> None:
    """What comes before counts: the sample begins inside the prompt's docstring."""
    texts = ("hi", '"""', "\n  ret", "urn", " 1", "2 # <b>&amp;", "\nf('", "x')")
    page = opened(f"{server.url}/#n=1&compare=false&prompt=def+f():%0A++%22%22%22")
    asked(page, sse(completion(*texts)))
    page.get_by_role("button", name="Run").click()
    eventually(page, lambda: bool(page.evaluate("CSS.highlights.get('code-keyword')?.size")))
    found = {name: page.evaluate(RANGES, f"code-{name}") for name in ("keyword", "string", "number", "comment", "type")}
    assert found == {
        "keyword": ["return"],
        "string": ['hi"""', "'x'"],
        "number": ["12"],
        "comment": ["# <b>&amp;"],
        "type": [],
    }
    assert page.locator("#samples pre").text_content() == "".join(texts)
    tokens = page.locator("#samples .token")
    assert tokens.all_text_contents() == list(texts)
    assert ["draft" in (one.get_attribute("class") or "") for one in tokens.all()] == [True, False] * 4
    selected = "(pre) => { getSelection().selectAllChildren(pre); return getSelection().toString(); }"
    assert page.locator("#samples pre").evaluate(selected) == "".join(texts)
    page.get_by_label("Code colours").select_option("off")
    eventually(page, lambda: bool(page.evaluate("!CSS.highlights.get('code-keyword').size")))
    page.get_by_label("Code colours").select_option("guessed")
    eventually(page, lambda: bool(page.evaluate("CSS.highlights.get('code-keyword').size")))


@pytest.mark.parametrize("missing", ["the API", "the library"])
def test_without_highlights_code_is_plain(opened: Callable[..., Any], server: Served, missing: str) -> None:
    page = opened("about:blank")
    if missing == "the API":
        page.add_init_script("delete CSS.highlights")
    else:
        page.route("**/highlight.min.js", lambda route: route.abort())
    page.goto(f"{server.url}/#n=1&compare=false")
    asked(page, sse(completion("return", " 1")))
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("2 tokens")
    assert page.evaluate("'highlights' in CSS") == (missing == "the library")
    assert page.locator("#samples pre").text_content() == "return 1"


# ── cards of tokens ─────────────────────────────────────────────────────────────────────────────────────────────────


ROUNDS = [
    {"start": 0, "committed": 2, "accepted": 1, "rejected": []},
    {"start": 2, "committed": 2, "accepted": 1, "rejected": []},
]


def test_the_keyboard_goes_from_token_to_token(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=1&compare=false")
    asked(page, sse(completion("one", " two", "\nthree", " four", by_round=ROUNDS)))
    page.get_by_role("button", name="Run").click()
    tokens, card = page.locator("#samples .token"), page.get_by_role("tooltip")
    expect(tokens).to_have_count(4)
    assert page.locator("#samples [tabindex='0']").count() == 1  # one stop for a sample of any length
    page.get_by_label("Code colours").focus()
    page.keyboard.press("Tab")
    while not tokens.first.evaluate("node => node === document.activeElement"):
        page.keyboard.press("Tab")
    expect(card).to_contain_text("accepted draft of model")
    assert tokens.first.get_attribute("aria-describedby") == card.get_attribute("id")
    reached = []
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "End", "ArrowRight", "ArrowLeft", "Home", "ArrowDown"):
        page.keyboard.press(key)
        reached.append(page.evaluate("document.activeElement.textContent"))
    assert reached == [" two", "\nthree", "one", " four", " four", "\nthree", "one", "\nthree"]
    assert page.locator("#samples [tabindex='0']").count() == 1
    assert page.locator("#samples [aria-describedby]").count() == 1
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    assert page.locator("#samples [aria-describedby]").count() == 0
    page.keyboard.press("Enter")
    expect(card).to_contain_text("↵three")
    assert card.locator("dd").all_text_contents() == ["accepted draft of model", "2", "42", "−1.000", "36.8 %"]


def test_a_tap_shows_alternatives_that_were_asked_for(opened: Callable[..., Any], server: Served) -> None:
    size = {"width": 390, "height": 844}
    page = opened(f"{server.url}/#n=1&compare=false", viewport=size, has_touch=True)
    top = {"tokens": ["a", " b"], "token_logprobs": [0.0, -0.5], "top_logprobs": [None, {"<b>": -2.5, " b": -0.5}]}
    got = asked(page, sse(completion("a", " b", logprobs=top)))
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Alternatives per token").fill("2")
    page.get_by_role("button", name="Run").click()
    tokens, card = page.locator("#samples .token"), page.get_by_role("tooltip")
    tokens.nth(1).tap()
    assert card.get_by_role("listitem").all_inner_texts() == ["␣b\n60.7 %", "<b>\n8.2 %"]
    assert card.locator(".drawn").count() == 1
    assert card.locator("b b").count() == 0
    box = card.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= size["width"]
    assert fits(page)
    tokens.first.tap()
    expect(card).to_contain_text("100.0 %")
    assert card.get_by_role("listitem").count() == 0
    tokens.first.tap()
    expect(card).to_be_hidden()
    tokens.first.tap()
    page.get_by_label("Code colours").tap()
    expect(card).to_be_hidden()
    assert [body["logprobs"] for body in got] == [2]


def test_alternatives_of_the_server_are_in_the_card(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=1&compare=false&max_tokens=4&logprobs=3&seed=1")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("1 sample, 4 tokens")
    page.locator("#samples .token").first.click()
    card = page.get_by_role("tooltip")
    body = {"max_tokens": 4, "logprobs": 3, "seed": 1, "temperature": 0.8, "top_p": 0.95, "prompt": ""}
    body["prompt"] = page.get_by_label("Prompt").input_value()
    (choice,) = server.post(**body, shoal={"details": True}).json()["choices"]
    first = choice["shoal"]["tokens"][0]
    assert card.get_by_role("listitem").count() == len(choice["logprobs"]["top_logprobs"][0]) == 4  # the drawn one, too
    expected = f"{first['logprob']:.3f}".replace("-", "−")
    assert card.locator("dd").all_text_contents()[2:4] == [str(first["id"]), expected]


# ── libraries of others ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["highlight.min.js", "marked.esm.js"])
def test_vendored_files_are_served_under_the_policy(server: Served, name: str) -> None:
    answer = httpx.get(f"{server.url}/playground/vendor/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert httpx.get(f"{server.url}/playground/vendor/..%2f..%2fpage.py").status_code == 404
