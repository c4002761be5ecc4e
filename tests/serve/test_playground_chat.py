"""The chat at /chat, in a real browser: markdown, history, candidates, what is edited, drawn again and stopped.

Tests of: serve/playground: the page at /chat.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from browsers import CHROMIUM, RANGES, browser, eventually, expect, fits, opened, sse
from serving import TIMEOUT_SECONDS, Gate, Served, legible, pair, served

__all__ = ["browser", "opened"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A scripted pair with a chat template: it answers at once."""
    with served(pair(), chat_template=TEMPLATE) as running:
        yield running


def said(index: int, text: str = "", reasoning: str = "", tokens: int = 4, mean: float = -0.5) -> dict[str, Any]:
    """An event with a piece of one candidate."""
    delta = {name: piece for name, piece in (("content", text), ("reasoning_content", reasoning)) if piece}
    details = {"committed": tokens, "rounds": 2, "drafted": 4, "accepted": 2, "mean_logprob": mean, "tokens": []}
    return {"choices": [{"index": index, "delta": delta, "finish_reason": None, "shoal": details}]}


def ended(*by_themselves: bool) -> dict[str, Any]:
    """The usage of so many candidates: whether each ended by itself; the server also calls one of the greatest length finished."""
    choices = [
        {"index": index, "completion_tokens": 4, "ended_by": "eos" if by_itself else "length", "finished": True}
        for index, by_itself in enumerate(by_themselves)
    ]
    return {"choices": [], "usage": {"choices": choices, "by_drafter": {}}}


class Answers:
    """Answers a page's chats in the server's place with prepared events, in turn.

    Attributes:
        asked: the requests so far.
    """

    def __init__(self, page: Any, *answers: str | None) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answers = iter(answers)
        page.route("**/chat/completions", self._fulfil)

    def _fulfil(self, route: Any) -> None:
        self.asked.append(route.request.post_data_json)
        body = next(self._answers)
        if body is None:
            route.fulfill(status=400, json={"error": {"message": "no", "param": None}})
        else:
            route.fulfill(status=200, content_type="text/event-stream", body=body)

    @property
    def conversations(self) -> list[list[tuple[str, str]]]:
        """Roles and contents of each request."""
        return [[(one["role"], one["content"]) for one in body["messages"]] for body in self.asked]


def send(page: Any, text: str) -> None:
    page.get_by_role("textbox", name="Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def idle(page: Any) -> None:
    """Waits until nothing is being written."""
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def one(text: str) -> str:
    """A whole answer of one candidate."""
    return sse(said(0, text), ended(True))


# ── markdown ────────────────────────────────────────────────────────────────────────────────────────────────────────


MARKDOWN = """# Title

A **bold** &amp; *slanted* `x < 1 &lt;` [link](https://a.example/b?c=1 "t").

1. one
   - [x] inner

| a | b |
|---|--:|
| 1 | ~~2~~ |

> quoted

```python
return "x"  # <b>
```
"""


def test_markdown_becomes_elements(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/chat", permissions=["clipboard-read", "clipboard-write"])
    Answers(page, one(MARKDOWN))
    send(page, "hi **you**")
    idle(page)
    answer = page.locator(".markdown")
    assert page.locator(".user .said").text_content() == "hi **you**"  # what was typed is shown as it is
    assert answer.locator("> *").evaluate_all("nodes => nodes.map((node) => node.localName)") == [
        "h3", "p", "ol", "div", "blockquote", "figure",
    ]  # fmt: skip
    assert answer.locator("> p").text_content() == "A bold & slanted x < 1 &lt; link."
    assert answer.locator("figure pre").get_attribute("tabindex") == "0"  # long lines scroll by keys too
    assert answer.locator("strong, em, p code, del").all_text_contents() == ["bold", "slanted", "x < 1 &lt;", "2"]
    link = answer.get_by_role("link", name="link")
    assert [link.get_attribute(name) for name in ("href", "rel", "title")] == [
        "https://a.example/b?c=1", "noopener noreferrer", "t",
    ]  # fmt: skip
    assert answer.locator("ol > li > ul > li input[type=checkbox]").is_checked()
    assert answer.locator("td").last.evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    code = answer.locator("pre code")
    assert code.text_content() == 'return "x"  # <b>'
    eventually(page, lambda: page.evaluate(RANGES, "code-keyword") == ["return"])
    answer.locator("figure").get_by_role("button", name="Copy").click()
    expect(answer.locator("figure button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'return "x"  # <b>'


ATTACKS = [
    "<img src=x onerror=\"document.title='taken'\">",
    "<script>document.title='taken'</script>",
    "[x](javascript:document.title='taken')",
    "[x](  &#106;avascript:alert(1))",
    "[y](data:text/html,hi)",
    "<a href='https://a.example'>z</a>",
    "![picture](javascript:alert(2))",
]


def test_attacks_stay_text(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/chat")
    deep = ">" * 20_000  # marked recurses
    Answers(page, one("\n\n".join(ATTACKS) + "\n\n![out](https://a.example/pixel.png)"), one(deep))
    send(page, ATTACKS[0])
    idle(page)
    answer = page.locator(".markdown")
    shown = answer.text_content()
    assert all(attack.split("(")[0] in shown for attack in ATTACKS)
    assert all(text in shown for text in (ATTACKS[0], ATTACKS[1], ATTACKS[2], ATTACKS[5], ATTACKS[6]))
    assert page.locator("#messages :is(img, script, iframe, object)").count() == 0
    assert answer.locator("a").evaluate_all("links => links.map((one) => one.href)") == ["https://a.example/pixel.png"]
    handlers = "nodes => nodes.flatMap((node) => [...node.attributes]).filter(({ name }) => name.startsWith('on')).length"
    assert page.locator("#messages *").evaluate_all(handlers) == 0
    assert "taken" not in page.title()
    send(page, "more")
    idle(page)
    assert page.locator(".markdown").last.text_content() == deep


def test_blocks_that_are_done_keep_their_elements(opened: Callable[..., Any], server: Served) -> None:
    """A growing text draws only its last block anew; a definition draws all, for what it names becomes a link."""
    page = opened(f"{server.url}/chat")
    kept = page.evaluate(
        """async () => {
            const { Markdown } = await import("/playground/markdown.js");
            const box = document.createElement("div");
            const markdown = new Markdown(box);
            markdown.update("a [b]\\n\\nc");
            const [first, second] = box.children;
            markdown.update("a [b]\\n\\nc **d**");
            const grown = [first === box.children[0], second === box.children[1], box.textContent];
            markdown.update("a [b]\\n\\nc **d**\\n\\n[b]: https://e.example");
            return [...grown, box.querySelector("a").href];
        }"""
    )
    assert kept == [True, False, "a [b]c d", "https://e.example/"]


# ── the server's own answers ────────────────────────────────────────────────────────────────────────────────────────


def test_candidates_are_what_the_server_draws(opened: Callable[..., Any], server: Served) -> None:
    stats = server.worker.thread.engine.stats
    before = [stats.committed, stats.drafted, stats.accepted]
    page = opened(server.url)
    page.get_by_role("link", name="Chat").click()
    expect(page.locator("#model")).to_have_text("tiny")
    page.get_by_label("Candidates").fill("3")
    page.get_by_label("Most tokens").fill("24")
    page.get_by_label("Temperature").fill("0")
    send(page, "hello")
    expect(page.get_by_role("status")).to_contain_text("3 candidates, 72 tokens")
    committed, drafted, accepted = (
        now - then for now, then in zip([stats.committed, stats.drafted, stats.accepted], before, strict=True)
    )
    assert committed == 72
    assert 0 < accepted <= drafted
    body = {"messages": [{"role": "user", "content": "hello"}], "n": 3, "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT_SECONDS).json()
    lengths = [f"{took['completion_tokens'] / took['rounds']:.2f}" for took in answer["usage"]["choices"]]
    (text,) = {choice["message"]["content"] for choice in answer["choices"]}
    kept = page.evaluate("JSON.parse(Object.entries(localStorage).find(([key]) => key.startsWith('shoal-chat:'))[1])")
    assert [candidate["text"] for candidate in kept["messages"][1]["candidates"]] == [text] * 3
    figures = [line.replace("\xa0", " ") for line in page.locator(".candidate .about").all_text_contents()]
    assert all(line.startswith("24 tokens in ") and line.endswith("reached the limit of tokens") for line in figures)
    assert [line.split(" tokens per pass")[0].split(" ")[-1] for line in figures] == lengths
    assert all(float(length) > 1 for length in lengths)
    assert fits(page)


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stopping_keeps_what_came_and_frees_the_rows(opened: Callable[..., Any], way: str) -> None:
    gate = Gate(legible(0), length=60)
    with served(pair(gate), chat_template=TEMPLATE) as server:
        page = opened(f"{server.url}/chat")
        expect(page.locator("#model")).to_have_text("tiny")
        page.get_by_label("Candidates").fill("2")
        send(page, "hello")
        assert gate.reached.wait(TIMEOUT_SECONDS)
        expect(page.locator(".candidate .about").last).to_contain_text("tokens")
        assert server.worker.rows == 2
        page.keyboard.press("Escape") if way == "Escape" else page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("status")).to_have_text("Stopped.")
        idle(page)
        expect(page.get_by_role("textbox", name="Message", exact=True)).to_be_focused()
        gate.opened.set()
        eventually(page, lambda: server.worker.rows == 0 and server.worker.thread.engine.scheduler.idle)
        texts = page.locator(".markdown").all_text_contents()
        assert all(texts)
        assert page.locator(".about").first.text_content().endswith("not\xa0finished")
        page.reload()
        assert page.locator(".markdown").all_text_contents() == texts


def test_a_model_without_a_chat_template_says_so(opened: Callable[..., Any]) -> None:
    with served(pair()) as server:
        page = opened(f"{server.url}/chat")
        expect(page.locator("#unable")).to_contain_text("This model has no chat template")
        expect(page.locator("#unable")).to_contain_text("--chat-template")
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_disabled()


# ── conversations ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_chosen_candidate_goes_into_the_next_request(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/chat")
    pieces = [said(1, "b", mean=-0.1), said(0, "a", mean=-2.0), said(2, "c", mean=-1.0), ended(True, False, True)]
    answers = Answers(page, ": keep-alive\n\n" + sse(*pieces), one("d"), one("e"))
    page.get_by_label("System prompt").fill("be brief")
    page.get_by_label("Candidates").fill("3")
    page.get_by_label("Temperature").fill("0.5")
    send(page, "hi")
    idle(page)
    places = page.locator(".candidate")
    tops = [place.bounding_box()["y"] for place in places.all()]
    assert len(tops) == 3
    assert len(set(tops)) == 1  # beside each other
    assert places.locator("[aria-pressed=true]").count() == 1
    assert places.nth(2).locator("[aria-pressed=true]").count() == 1  # the best of those that ended by themselves
    places.nth(1).get_by_role("button", name="Choose").click()
    page.get_by_label("Candidates").fill("1")
    send(page, "go on")
    idle(page)
    (first, second) = answers.conversations
    assert first == [("system", "be brief"), ("user", "hi")]
    assert second == [*first, ("assistant", "b"), ("user", "go on")]
    sent = [[body[name] for name in ("n", "temperature", "max_tokens", "stream", "shoal")] for body in answers.asked]
    assert sent == [[n, 0.5, 512, True, {"details": True}] for n in (3, 1)]
    page.get_by_text("2 other candidates").click()
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator(".others .candidate").first.get_by_role("button", name="Choose").click()  # to go on from another
    assert page.locator(".message").count() == 2
    send(page, "and now")
    idle(page)
    assert answers.conversations[2] == [*first, ("assistant", "a"), ("user", "and now")]


def test_settings_saved_chats_and_the_room_that_is_left(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/chat", accept_downloads=True)
    answers = Answers(page, one("a\nb"))
    for label, text in {"Top p": "0.5", "Seed": "-3", "Stop strings": "END\n\\n\\n", "System prompt": "be brief"}.items():
        page.get_by_label(label, exact=True).fill(text)
    page.get_by_label("Theme").select_option("dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert page.locator("#room").is_hidden()
    send(page, "hi\nyou")
    idle(page)
    assert [answers.asked[0][name] for name in ("top_p", "seed", "stop")] == [0.5, -3, ["END", "\n\n"]]
    assert "\n" in page.locator(".markdown").inner_text()  # a single line break stays
    expect(page.locator(".about")).to_contain_text("stopped by itself")
    assert page.locator("#room").is_hidden()  # the prepared usage does not say how long the prompt was
    page.unroute("**/chat/completions")
    page.get_by_label("Most tokens").fill("4")
    send(page, "more")
    idle(page)
    asked = page.evaluate("JSON.parse(Object.entries(localStorage).find(([key]) => key.startsWith('shoal-chat:'))[1])")
    said_so_far = [("system", "be brief"), ("user", "hi\nyou"), ("assistant", "a\nb"), ("user", "more")]
    body = {"messages": [{"role": role, "content": text} for role, text in said_so_far], "max_tokens": 1}
    prompt = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT_SECONDS).json()["usage"][
        "prompt_tokens"
    ]
    took = asked["messages"][-1]["candidates"][0]["stats"]["tokens"]
    expect(page.locator("#used")).to_have_text(f"{prompt + took} of 2,048 tokens")
    files = {}
    for kind in ("Markdown", "JSON"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save as {kind}").click()
        files[kind] = Path(download.value.path()).read_text(encoding="utf-8")
    assert files["Markdown"].startswith(
        "# hi\n\n## System\n\nbe brief\n\n## You\n\nhi\nyou\n\n## Answer\n\na\nb\n\n## You\n\nmore"
    )
    kept = json.loads(files["JSON"])
    assert [(one["role"], one["content"]) for one in kept["messages"]][:3] == [
        ("system", "be brief"),
        ("user", "hi\nyou"),
        ("assistant", "a\nb"),
    ]
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    assert page.get_by_label("Seed").input_value() == "-3"


def test_editing_and_drawing_again(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/chat")
    answers = Answers(page, one("a"), one("b"), one("c"), None, one("d"))
    send(page, "one")
    idle(page)
    send(page, "two")
    idle(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".markdown").last).to_have_text("c")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("alert")).to_have_text("no")
    idle(page)
    expect(page.locator(".markdown").last).to_have_text("c")  # refused: the answer that was there is there again
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Edited message")
    expect(field).to_be_focused()
    page.keyboard.press("Escape")
    assert page.locator(".message").count() == 4
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    field.fill("uno")
    page.keyboard.press("Enter")
    expect(page.locator(".markdown")).to_have_text(["d"])
    assert answers.conversations == [
        [("user", "one")],
        *[[("user", "one"), ("assistant", "a"), ("user", "two")]] * 3,
        [("user", "uno")],
    ]
    page.locator(".assistant").get_by_role("button", name="Edit").click()
    field.fill("dd")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".markdown")).to_have_text(["dd"])
    assert page.locator(".about").text_content() == "edited"


def test_history_survives_a_reload(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/chat")
    Answers(page, sse(said(0, reasoning="hm"), said(0, "**a**"), ended(True)), one("b"))
    page.get_by_label("System prompt").fill("be brief")
    page.get_by_label("Temperature").fill("0.25")
    send(page, "first line\nsecond")
    idle(page)
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0
    send(page, "other")
    idle(page)
    page.reload()
    titles = page.locator("#list .title")
    assert titles.all_text_contents() == ["other", "first line"]
    assert page.locator(".markdown").all_text_contents() == ["b"]  # the one that was open
    titles.nth(1).click()
    assert page.locator(".user .said").text_content() == "first line\nsecond"
    assert page.locator(".markdown strong").text_content() == "a"
    thought = page.locator(".reasoning .said")
    assert thought.is_hidden()
    page.get_by_text("Reasoning").click()
    assert thought.inner_text() == "hm"
    assert page.get_by_label("Temperature").input_value() == "0.25"
    assert page.get_by_label("System prompt").input_value() == "be brief"
    page.get_by_role("button", name="Rename").last.click()
    page.keyboard.type("<b>named</b>")
    page.keyboard.press("Enter")
    expect(titles.first).to_have_text("<b>named</b>")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete", exact=True).first.click()
    expect(titles).to_have_text(["other"])
    page.get_by_role("button", name="Delete all chats").click()
    expect(titles).to_have_count(0)
    page.reload()
    assert titles.count() == 0
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('shoal-chat:'))") == []


def test_the_key_is_asked_for_and_tabs_see_each_other(opened: Callable[..., Any]) -> None:
    with served(pair(), chat_template=TEMPLATE, keys=("secret-key",)) as server:
        page = opened(f"{server.url}/chat")
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        other = page.context.new_page()
        other.goto(page.url)
        page.get_by_label("Most tokens").fill("4")
        send(page, "hi")
        expect(page.get_by_role("alert")).to_contain_text("an API key is needed")
        key.fill("secret-key")
        page.get_by_role("button", name="Try again").click()
        expect(page.get_by_role("status")).to_contain_text("4 tokens in")
        assert "secret-key" not in page.evaluate("JSON.stringify(localStorage) + location.href + document.cookie")
        expect(other.locator("#list .title")).to_have_text(["hi"])
        other.locator("#list .title").click()
        assert other.locator(".markdown").all_text_contents() == page.locator(".markdown").all_text_contents()


def test_a_full_browser_is_told(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/chat")
    Answers(page, one("a"))
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }; }")
    send(page, "hi")
    expect(page.get_by_role("alert")).to_contain_text("This chat cannot be kept")
    expect(page.locator(".markdown")).to_have_text("a")


@pytest.mark.parametrize(("width", "height"), [(390, 844), (390, 560), (1280, 900)])
def test_settings_stay_in_their_frame(opened: Callable[..., Any], server: Served, width: int, height: int) -> None:
    """Whole where there is room, else scrolled; also beside kept chats."""
    page = opened(f"{server.url}/chat", viewport={"width": width, "height": height})
    Answers(page, one("a"))
    for kept in (False, True):
        if width < 800:
            page.get_by_role("button", name="Settings").click()
        bottom = "node => node.getBoundingClientRect().bottom"
        frame, end = (page.locator(name).evaluate(bottom) for name in ("aside", "#controls"))
        assert end <= frame
        scrolled = page.locator("#controls").evaluate("node => node.scrollHeight > node.clientHeight")
        assert scrolled == (height < 600)
        assert page.locator("#composer").evaluate("node => node.getBoundingClientRect().top") >= (
            frame if width < 800 else 0
        )
        if not kept:
            send(page, "hi")
            idle(page)


@pytest.mark.parametrize("told", [{"isComposing": True}, {"keyCode": 229}])
def test_keys_of_an_input_method_are_its_own(opened: Callable[..., Any], server: Served, told: dict[str, Any]) -> None:
    """Enter takes a word of Japanese; it neither sends the message nor ends the field of a title. Safari tells its code alone."""
    page = opened(f"{server.url}/chat")
    answers = Answers(page, one("a"))
    press = "(node, key) => node.dispatchEvent(new KeyboardEvent('keydown', {bubbles: true, ...key}))"
    message = page.get_by_role("textbox", name="Message", exact=True)
    message.fill("日")
    message.evaluate(press, {"key": "Enter", **told})
    send(page, "日本")
    idle(page)
    assert answers.conversations == [[("user", "日本")]]
    page.get_by_role("button", name="Rename").click()
    field = page.get_by_label("Title")
    for key in ("Enter", "Escape"):
        field.evaluate(press, {"key": key, **told})
    field.fill("東京")
    page.keyboard.press("Enter")
    expect(page.locator("#list .title")).to_have_text(["東京"])


def test_on_a_phone_and_with_the_keyboard(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/chat", viewport={"width": 390, "height": 844}, color_scheme="dark")
    wide = "```\n" + "x" * 300 + "\n```\n\n" + "y" * 300
    answers = Answers(page, sse(said(0, wide), said(1, wide), ended(True, True)))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Candidates").fill("2")
    assert fits(page)
    message = page.get_by_role("textbox", name="Message", exact=True)
    message.fill("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    page.keyboard.press("Enter")
    idle(page)
    assert answers.conversations == [[("user", "a\nb")]]
    assert fits(page)
    places = [page.locator(".user").get_by_role("button", name=name).bounding_box() for name in ("Edit", "Copy")]
    assert places[0]["y"] == places[1]["y"]  # beside each other, as on a desktop
    expect(page.get_by_label("Candidates")).to_be_hidden()
    assert message.evaluate("node => node.getBoundingClientRect().bottom <= innerHeight")
    page.get_by_role("button", name="Chats").click()
    expect(page.locator("#list .title")).to_have_text(["a"])
    assert fits(page)
    assert page.evaluate(
        "[...document.querySelectorAll('input, select, textarea')].every((one) => one.labels.length || one.ariaLabel)"
    )
