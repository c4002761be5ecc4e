"""What people take away from the page at /: examples, links that run, copies and exports, in a real browser.

Tests of: serve/playground: examples, links, copies and exports of the page at /.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from browsers import CHROMIUM, asked, browser, eventually, expect, fits, opened, pass_moment, server
from serving import TIMEOUT_SECONDS, Served, pair, served

__all__ = ["browser", "opened", "server"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")]
CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}


def run(page: Any) -> None:
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#status")).to_contain_text("acceptance length")


def copied(page: Any, name: str) -> str:
    """What a button copies."""
    button = page.get_by_role("button", name=name).element_handle()
    button.click()
    eventually(page, lambda: button.text_content() == "Copied")
    expect(page.get_by_role("status")).to_contain_text("is copied.")
    pass_moment(page)
    return str(page.evaluate("navigator.clipboard.readText()"))


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
    page = opened(f"{server.url}/#n=2&max_tokens=12&compare=false", **CLIPBOARD)
    run(page)
    texts = page.locator("#samples pre").all_text_contents()
    page.get_by_label("Samples (n)").fill("3")  # the link is that of the samples, not of what is asked next
    link = copied(page, "Copy link")

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


# ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sample_is_copied_by_key_and_by_touch(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=2&max_tokens=24&seed=5&compare=false", **CLIPBOARD, **PHONE)
    run(page)
    assert page.locator("#samples s").count() > 0  # rejected drafts are no part of what is copied
    texts = page.locator("#samples pre").all_text_contents()
    first, second = page.get_by_role("button", name="Copy sample").all()
    first.focus()
    page.keyboard.press("Enter")
    expect(first).to_have_text("Copied")
    expect(page.get_by_role("status")).to_have_text("Sample 1 is copied.")
    assert page.evaluate("navigator.clipboard.readText()") == texts[0]
    page.keyboard.press("Tab")  # from the button to the sample's tokens
    expect(page.locator("#samples .token").first).to_be_focused()
    page.keyboard.press("Escape")  # its card
    second.tap()
    expect(second).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == texts[1]
    box = second.bounding_box()
    assert min(box["width"], box["height"]) >= 24
    pass_moment(page)
    expect(second).to_have_text("Copy")
    assert fits(page)


def test_without_a_clipboard_what_is_selected_is_copied(opened: Callable[..., Any], server: Served) -> None:
    """Pages over plain HTTP from another machine have no `navigator.clipboard`."""
    page = opened("about:blank", **CLIPBOARD)
    page.add_init_script("""const kept = navigator.clipboard; window.pasted = () => kept.readText();
        Object.defineProperty(navigator, "clipboard", { value: undefined });""")
    page.goto(f"{server.url}/#n=1&max_tokens=8&compare=false")
    run(page)
    button = page.get_by_role("button", name="Copy sample 1")
    button.click()
    expect(page.get_by_role("status")).to_have_text("Sample 1 is copied.")
    assert page.evaluate("pasted()") == page.locator("#samples pre").text_content()
    expect(button).to_be_focused()
    page.evaluate("document.execCommand = () => false")
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("status")).to_contain_text("Nothing was copied: this browser does not let")


CHANGES = """async (frames) => {
    let changes = 0;
    const seen = new MutationObserver((records) => { changes += records.length; });
    seen.observe(document, { childList: true, characterData: true, attributes: true, subtree: true });
    const [add, clear] = [Highlight.prototype.add, Highlight.prototype.delete];
    Highlight.prototype.add = function (range) { changes += 1; return add.call(this, range); };
    Highlight.prototype.delete = function (range) { changes += 1; return clear.call(this, range); };
    for (let frame = 0; frame < frames; frame++) await new Promise(requestAnimationFrame);
    seen.disconnect();
    [Highlight.prototype.add, Highlight.prototype.delete] = [add, clear];
    return changes;
}"""


def test_the_page_comes_to_rest(opened: Callable[..., Any], server: Served) -> None:
    """Its observers answer nothing that they, or buttons in the headers of samples, change: none would ever end."""
    page = opened(f"{server.url}/#n=2&max_tokens=24&seed=5&compare=false", **CLIPBOARD)
    run(page)
    eventually(page, lambda: page.evaluate("CSS.highlights.size > 0"))  # code colours come a moment after the run
    page.get_by_role("button", name="Copy sample 1").click()
    expect(page.get_by_role("button", name="Copy sample 1")).to_have_text("Copied")
    pass_moment(page)
    expect(page.get_by_role("button", name="Copy sample 1")).to_have_text("Copy")
    eventually(page, lambda: page.evaluate(CHANGES, 20) == 0)
    endless = """() => { const [text] = document.querySelectorAll('#samples .text');
        new MutationObserver(() => requestAnimationFrame(() => text.append(''))).observe(text, { childList: true });
        text.append(''); }"""
    page.evaluate(endless)  # one that answers itself is noticed
    assert all(page.evaluate(CHANGES, 20) > 0 for _ in range(3))


ODD = 'it\'s "so" \\ $HOME `id` %s é 😀\n\t"""\n'
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
REQUESTS = {
    "completion": {"n": 3, "seed": 11, "min_p": 0.01, "top_k": 40, "stop": "zz'z\n\\n\\n", "logprobs": 2},
    "grammar": {"n": 2, "seed": 12, "kind": "regex", "grammar": "[a-e']{9,12}", "speculation": "3"},
    "schema": {"n": 1, "seed": 13, "kind": "json_object", "temperature": 0},
    "chat": {"n": 2, "seed": 14, "chat": "true", "logprobs": 1},
}


@pytest.fixture(scope="module")
def closed() -> Any:
    """A server that wants a key, and has chats."""
    with served(pair(), keys=("secret-key",), chat_template=TEMPLATE) as running:
        yield running


@pytest.mark.parametrize("kind", REQUESTS)
def test_copied_requests_give_the_same_text(
    opened: Callable[..., Any], closed: Served, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By curl in a shell, and by OpenAI's package: with the seed of the samples that are shown, and without the key itself."""
    page = opened("about:blank", **CLIPBOARD)
    page.add_init_script("sessionStorage.setItem('shoal-key', 'secret-key')")
    page.goto(f"{closed.url}/#{urlencode({'prompt': ODD, 'max_tokens': 12, 'compare': 'false', **REQUESTS[kind]})}")
    expect(page.locator("#model")).to_have_text("tiny")
    run(page)
    texts = page.locator("#samples pre").all_text_contents()
    assert all(texts)
    page.get_by_label("Prompt").fill("what is asked next")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    program = copied(page, "Copy as Python")
    told: dict[str, Any] = {}
    exec(compile(program, "copied", "exec"), told)
    answers = [told["completion"].model_dump()]
    command = copied(page, "Copy as curl")
    if shutil.which("curl"):
        done = subprocess.run(
            ["sh", "-c", command], capture_output=True, env=dict(os.environ), timeout=TIMEOUT_SECONDS, check=True
        )
        answers.append(json.loads(done.stdout))
    for answer in answers:
        got = [choice["message"]["content"] if kind == "chat" else choice["text"] for choice in answer["choices"]]
        assert got == texts
        took = answer["usage"]["choices"]
        counts = [sum(one[name] for one in took) for name in ("accepted", "drafted")]
        if kind != "schema":  # whose white space is drafted by the habit that the first answer taught
            assert page.locator("#accepted").text_content() == "{} of {}".format(*counts)
        assert counts[0] > 0
    assert "secret-key" not in program + command


def test_requests_to_an_open_server_need_no_key(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=1&max_tokens=8&compare=false", **CLIPBOARD)
    expect(page.get_by_role("button", name="Copy as curl")).to_be_hidden()  # there is no run yet
    run(page)
    told: dict[str, Any] = {}
    exec(compile(copied(page, "Copy as Python"), "copied", "exec"), told)
    assert told["completion"].choices[0].text == page.locator("#samples pre").text_content()
    assert "authorization" not in copied(page, "Copy as curl")


# ── exports ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def saved(page: Any, name: str) -> Path:
    """The file that a button saves."""
    with page.expect_download() as download:
        page.get_by_role("button", name=name).click()
    expect(page.get_by_role("status")).to_have_text(f"Saved {download.value.suggested_filename}.")
    return Path(download.value.path())


def test_a_run_is_saved_as_json(opened: Callable[..., Any], server: Served) -> None:
    """With what the page holds: the tokens as the API tells them, rounds, models, and the plain run."""
    page = opened(f"{server.url}/#n=2&max_tokens=16&seed=3&logprobs=2")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#gauge-note")).to_contain_text("Both measured")
    run = json.loads(saved(page, "Save JSON").read_text())
    body = run["request"]["body"]
    assert (run["request"]["path"], body["n"], body["seed"]) == ("v1/completions", 2, 3)
    assert run["model"]["id"] == "tiny"
    assert run["model"]["names"] == {"target": "scripted", "drafter": "scripted"}
    fields = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    choices = server.post(**{**fields, "shoal": {"details": True}}).json()["choices"]
    assert [sample["text"] for sample in run["samples"]] == [choice["text"] for choice in choices]
    for sample, choice in zip(run["samples"], choices, strict=True):
        assert [{**token, "top": None} for token in sample["tokens"]] == [
            {**token, "top": None} for token in choice["shoal"]["tokens"]
        ]
        assert {len(token["top"]) for token in sample["tokens"]} == {2, 3}  # the drawn token, and the two most probable
        rounds = sample["by_round"]
        assert len(rounds) == sample["rounds"] < 16
        assert sum(one["accepted"] for one in rounds) == sample["accepted"] == choice["shoal"]["accepted"] > 0
        assert sum(one["accepted"] + len(one["rejected"]) for one in rounds) == sample["drafted"]
        assert (sample["committed"], sample["ended_by"], sample["error"]) == (16, "length", None)
    means = [sample["mean_logprob"] for sample in run["samples"]]
    assert [sample["rank"] for sample in run["samples"]] == [1 + sum(other > mean for other in means) for mean in means]
    assert run["usage"]["by_drafter"]["model"]["accepted"] == sum(sample["accepted"] for sample in run["samples"])
    assert run["plain"]["same_texts"] == 2
    assert min(run["seconds"], run["plain"]["seconds"], run["tokens_per_second"]) > 0


WRITTEN = """() => { window.written = []; const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
        window.written.push([text, Math.round(x), Math.round(y), this.fillStyle]);
        write.call(this, text, x, y, ...more);
    }; }"""


@pytest.mark.parametrize("marked", [True, False])
def test_a_run_is_saved_as_an_image(opened: Callable[..., Any], server: Served, marked: bool) -> None:
    """Every character of prompt and samples is in it, in the colours of the page; rejected drafts only if they are shown."""
    pillow = pytest.importorskip("PIL.Image", reason="needs pillow, which matplotlib brings")
    page = opened(f"{server.url}/#n=3&max_tokens=30&seed=5&compare=false&prompt=ab%0A%09cd", color_scheme="dark")
    run(page)
    if not marked:
        page.get_by_label("Show rejected drafts and rounds").uncheck()
    page.evaluate(WRITTEN)
    file = saved(page, "Save image")
    image = pillow.open(file)
    assert image.format == "PNG"
    assert (image.width, image.height > 400) == (2 * 1204, True)
    colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    shown = "names => names.map((name) => getComputedStyle(document.querySelector(name)).backgroundColor)"
    for colour in page.evaluate(shown, ["body", ".sample", "#samples .draft"]):
        assert tuple(map(int, re.findall(r"\d+", colour))) in colours
    lines: dict[tuple[int, int], str] = {}  # what stands in a line of a box
    for text, x, y, _ in page.evaluate("written"):
        column = 0 if x < 1204 / 2 else 1
        lines[y, column] = lines.get((y, column), "") + text
    drawn = ["".join(text for (_, side), text in sorted(lines.items()) if side == column) for column in (0, 1)]
    assert "ab    cd" in drawn[0]
    samples = page.locator("#samples pre")
    struck = samples.nth(1).locator("s").evaluate_all("nodes => nodes.map((node) => node.dataset.text)")
    assert struck
    nodes = samples.nth(1).locator("span, s" if marked else "span")
    texts = nodes.evaluate_all("nodes => nodes.map((node) => node.dataset.text ?? node.textContent)")
    assert "".join(texts).replace("\n", "") in drawn[1]
    assert ("a round begins" in "".join(drawn)) is marked


def test_a_large_run_is_drawn_in_part(opened: Callable[..., Any], server: Served) -> None:
    """Canvases have a largest size; a phone's is 16 million pixels."""
    pillow = pytest.importorskip("PIL.Image", reason="needs pillow, which matplotlib brings")
    page = opened(f"{server.url}/#n=1&compare=false&prompt={'a' * 200}")
    event = {"choices": [{"index": 0, "text": "x\n" * 2000, "finish_reason": None, "shoal": {
        "tokens": [{"id": 1, "text": "x\n", "logprob": -0.5, "from_draft": False, "drafter": None}] * 2000,
        "mean_logprob": -0.5, "committed": 2000, "drafted": 0, "accepted": 0, "rounds": 2000}}]}  # fmt: skip
    asked(page, f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")
    run(page)
    page.evaluate(WRITTEN)
    image = pillow.open(saved(page, "Save image"))
    assert image.width * image.height <= 16e6
    written = [text for text, *_ in page.evaluate("written")]
    assert written.count("x") == 300
    assert "…" in written
