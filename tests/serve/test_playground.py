"""The page at /, in a real browser: it shows what the API tells, asks for what its controls say, and runs nothing it should not.

What only looks, or asks for less than another test does, is slow as the pages of chats, replays, links and tokens are.

Tests of: serve.app and serve/playground: the pages at / and /editor.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import shoal
from browsers import CHROMIUM, asked, browser, eventually, expect, fits, opened, pass_moment, server
from serving import TIMEOUT_SECONDS, Gate, Served, legible, pair, served

__all__ = ["browser", "opened", "server"]  # fixtures

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")
CONTROLS = "input, select, textarea"


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


# ── what it shows ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_columns_are_what_the_bundled_pair_generates(opened: Callable[..., Any]) -> None:
    prompt, options = "def add(a, b):\n", {"temperature": 0.8, "top_p": 0.95, "seed": 7}
    bundled = shoal.load(dtype="float32", quantize="target=off,draft=off")
    samples = bundled.generate(prompt, 3, max_new_tokens=24, lookahead=4, rule="coupled", **options)[0].samples
    with served(bundled) as server:
        page = opened(f"{server.url}/#n=3&max_tokens=24&seed=7")
        expect(page.locator("#suffix")).to_be_enabled()  # the bundled pair was trained to fill in
        page.get_by_label("Prompt").fill(prompt)
        page.get_by_role("button", name="Run").click()
        expect(page.get_by_role("status")).to_contain_text("the speed of plain decoding")
        stats = server.worker.thread.engine.stats
        assert stats.drafted == sum(sample.drafted for sample in samples)
        assert stats.accepted == sum(sample.accepted for sample in samples)
        assert stats.committed == 2 * sum(len(sample.token_ids) for sample in samples)  # once more, and without a draft
    columns = page.get_by_role("article").all()
    assert [column.locator("pre").text_content() for column in columns] == [sample.text for sample in samples]
    struck = [column.locator("s").count() for column in columns]
    assert sum(struck) == stats.drafted - stats.accepted > 0
    assert struck == [sample.drafted - sample.accepted for sample in samples]
    assert [column.locator(".begins").count() for column in columns] == [sample.rounds for sample in samples]
    first = page.locator("#samples s").first
    expect(first).to_have_css("text-decoration-line", "line-through")
    assert first.bounding_box()["width"] > 0
    begins = page.locator("#samples .begins").first
    expect(begins).not_to_have_css("box-shadow", "none")
    page.get_by_label("Show rejected drafts and rounds").uncheck()
    expect(first).to_be_hidden()
    expect(begins).to_have_css("box-shadow", "none")
    page.get_by_label("Show rejected drafts and rounds").check()
    expect(first).to_be_visible()
    tinted = [[("draft" in token.get_attribute("class")) for token in column.locator(".token").all()] for column in columns]
    assert tinted == [list(sample.from_draft) for sample in samples]
    means = [sample.mean_logprob for sample in samples]
    ranks = [sorted(means, reverse=True).index(mean) + 1 for mean in means]
    assert [column.locator(".rank").inner_text() for column in columns] == [f"#{rank}" for rank in ranks]
    best = page.locator(".best").inner_text().replace("−", "-").replace("\xa0", " ")
    assert f"mean log-prob {max(means):.3f}" in best
    assert {"eos": "stopped by itself", "length": "reached the limit of tokens"}[
        samples[means.index(max(means))].finish_reason
    ] in best
    assert page.locator("#accepted").inner_text() == f"{stats.accepted} of {stats.drafted}"
    rounds = sum(sample.rounds for sample in samples)
    assert page.locator("#acceptance").inner_text() == f"{stats.committed / 2 / rounds:.2f}"
    assert re.fullmatch(r"\d+\.\d\d×", page.locator("#times").inner_text())
    assert "wrote the same text in 3 of 3 samples" in page.locator("#gauge-note").inner_text()


@pytest.mark.slow
def test_a_plain_run_is_called_plain(opened: Callable[..., Any], server: Served) -> None:
    before = server.worker.thread.engine.stats.committed
    page = opened(f"{server.url}/#n=2&max_tokens=8&speculation=off")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("2 samples, 16 tokens")
    expect(page.locator("#gauge-note")).to_contain_text("this run is plain decoding itself")
    assert page.locator("#samples .draft").count() == 0
    assert page.locator("#accepted").inner_text() == "none drafted"
    assert server.worker.thread.engine.stats.committed == before + 16  # nothing was run to compare with


def test_a_texts_markup_stays_text(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=1&compare=false")
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    token = {"id": 1, "text": evil, "logprob": -0.5, "from_draft": True, "drafter": evil}
    details = {"tokens": [token], "mean_logprob": -0.5, "committed": 1, "drafted": 1, "accepted": 1, "rounds": 1}
    chunk = {"choices": [{"index": 0, "text": evil, "finish_reason": None, "shoal": details}]}
    asked(page, f"data: {json.dumps(chunk)}\n\ndata: {json.dumps({'error': {'message': evil, 'param': None}})}\n\n")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("alert")).to_have_text(evil)
    assert page.locator("pre").text_content() == evil
    assert page.locator("#drafters .token").text_content() == evil
    assert page.locator("pre img, pre script, #error *, #drafters .token *").count() == 0
    assert "taken" not in page.title()


def chunk_of(*texts: str, drafters: Sequence[str | None] = ("model",)) -> str:
    """An event with one sample's tokens, proposed by these drafters in turn."""
    tokens = [
        {"id": 1, "text": text, "logprob": -0.5, "from_draft": drafter is not None, "drafter": drafter}
        for text, drafter in zip(texts, itertools.cycle(drafters), strict=False)
    ]
    details = {"tokens": tokens, "mean_logprob": -0.5, "committed": len(texts), "drafted": 1, "accepted": 1, "rounds": 1}
    text = "".join(texts)
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, 'finish_reason': None, 'shoal': details}]})}\n\n"


@pytest.mark.slow
def test_a_tinted_blank_is_no_underscore(opened: Callable[..., Any], server: Served) -> None:
    """Nothing is drawn below a token; what tells it without colour stands above it."""
    for scheme in ("none", "active"):
        page = opened(f"{server.url}/#n=1&compare=false", forced_colors=scheme)
        asked(page, chunk_of("for", " c", " in", "    ") + "data: [DONE]\n\n")
        page.get_by_role("button", name="Run").click()
        expect(page.locator("#samples .draft")).to_have_count(4)
        below, line, above = styles(
            page.locator("#samples .draft").last, "borderBottomStyle", "textDecorationLine", "borderTopStyle"
        )
        assert (below, line, above) == ("none", "none", "solid")


def styles(locator: Any, *names: str) -> list[str]:
    """What a browser makes of an element's style."""
    found: list[str] = locator.evaluate(f"node => {json.dumps(names)}.map((name) => getComputedStyle(node)[name])")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["none", "active"])
def test_each_drafter_has_a_colour_a_line_and_an_entry(opened: Callable[..., Any], server: Served, scheme: str) -> None:
    page = opened(f"{server.url}/#n=1&compare=false", forced_colors=scheme)
    by_drafter = {
        "suffix": {"drafted": 9, "accepted": 2},
        "model": {"drafted": 3, "accepted": 1},
        "ngram": {"drafted": 4, "accepted": 0},
    }
    end = f"data: {json.dumps({'choices': [], 'usage': {'choices': [], 'by_drafter': by_drafter}})}\n\ndata: [DONE]\n\n"
    asked(page, chunk_of("a", "b", "c", "d", drafters=("suffix", None, "model", "suffix")) + end)
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#drafters li")).to_have_text(
        ["suffix 2 of 9 accepted", "model 1 of 3 accepted", "ngram 0 of 4 accepted"]
    )
    tokens, entries = page.locator("#samples .token"), page.locator("#drafters .token")
    assert [tokens.nth(i).get_attribute("title").partition(",")[0] for i in range(4)] == [
        "accepted draft of suffix", "the target's own", "accepted draft of model", "accepted draft of suffix",
    ]  # fmt: skip
    drawn = [styles(tokens.nth(i), "backgroundColor", "borderTopStyle") for i in range(4)]
    assert drawn[0] == drawn[3] == styles(entries.nth(0), "backgroundColor", "borderTopStyle")
    assert drawn[2] == styles(entries.nth(1), "backgroundColor", "borderTopStyle")
    lines = [drawn[1][1], drawn[0][1], drawn[2][1], styles(entries.nth(2), "borderTopStyle")[0]]
    assert lines == ["none", "solid", "dashed", "dotted"]  # without colour, too
    assert scheme == "active" or len({colour for colour, _ in drawn}) == 3


@pytest.mark.slow
def test_blanks_stay_in_their_column(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=1&compare=false", viewport={"width": 390, "height": 800})
    asked(page, chunk_of("{", " " * 300, "\n", " " * 200, "}") + "data: [DONE]\n\n")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#samples .draft")).to_have_count(5)
    right = page.locator(".text").evaluate("node => node.getBoundingClientRect().right")
    reach = "node => Math.max(...[...node.getClientRects()].map((box) => box.right))"
    assert all(token.evaluate(reach) <= right for token in page.locator("#samples .token").all())


@pytest.mark.slow
def test_what_was_shown_goes_when_the_next_run_is_refused(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=2&max_tokens=4&compare=false")
    run = page.get_by_role("button", name="Run")
    run.click()
    expect(page.get_by_role("status")).to_contain_text("2 samples, 8 tokens")
    page.route("**/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "no", "param": None}}))
    run.click()
    expect(page.get_by_role("alert")).to_have_text("no")
    assert page.get_by_role("article").count() == 0
    assert page.locator("#figures").is_hidden()
    page.unroute("**/completions")
    broken = chunk_of("a") + 'data: {"error": {"message": "broke", "param": null}}\n\n'
    asked(page, broken)
    run.click()
    expect(page.get_by_role("alert")).to_have_text("broke")
    assert page.locator("pre").first.text_content() == "a"  # what came before the fault is of this run
    assert page.locator("#figures").is_visible()


@pytest.mark.slow
def test_the_gauge_says_what_is_being_measured(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=1")
    note, held = page.locator("#gauge-note"), []
    answer = chunk_of("a") + 'data: {"choices": [], "usage": {"choices": [], "by_drafter": {}}}\n\ndata: [DONE]\n\n'

    def fulfil(route: Any) -> None:
        if route.request.post_data_json["speculation"] == "off":
            held.append(route)
        else:
            route.fulfill(status=200, content_type="text/event-stream", body=answer)

    page.route("**/completions", fulfil)
    page.get_by_role("button", name="Run").click()
    expect(note).to_have_text("Plain decoding is being measured.")
    page.keyboard.press("Escape")
    expect(note).to_have_text("Plain decoding has not been measured.")
    page.get_by_role("button", name="Run").click()
    eventually(page, lambda: len(held) == 2)
    held[1].fulfill(status=200, content_type="text/event-stream", body=answer)
    expect(note).to_contain_text("Both measured just now")
    page.get_by_label("Then decode the same plainly").uncheck()
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("1 token")
    expect(note).to_have_text("Plain decoding has not been measured.")


@pytest.mark.slow
def test_the_prompt_is_the_readme_s(opened: Callable[..., Any], server: Served) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (prompt,) = re.findall(r"^prompt = '''(.*?)'''$", readme, re.DOTALL | re.MULTILINE)
    assert opened(server.url).get_by_label("Prompt").input_value() == prompt


# ── what it asks ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_untouched_controls_ask_for_nothing(opened: Callable[..., Any], server: Served) -> None:
    page = opened(server.url)
    got = asked(page)
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("the speed of plain decoding")
    seeds = [request.pop("seed") for request in got]
    assert len(seeds) == 2  # drawn once: plain decoding is asked for the very same
    assert seeds[0] == seeds[1]
    prompt = page.get_by_label("Prompt").input_value()
    fresh = {"path": "completions", "prompt": prompt, "n": 4, "max_tokens": 128, "temperature": 0.8, "top_p": 0.95}
    always = {"stream": True, "stream_options": {"include_usage": True}, "shoal": {"rounds": True}}
    assert got == [fresh | always | {"speculation": way} for way in ("auto", "off")]


@pytest.mark.slow
def test_every_control_is_asked_for(opened: Callable[..., Any]) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with served(pair(), chat_template=template) as server:
        page = opened(server.url)
        got = asked(page)
        expect(page.get_by_label("Send as a message")).to_be_visible()
        expect(page.get_by_label("Send as a message")).to_be_checked()
        page.get_by_label("Send as a message").uncheck()
        page.get_by_text("More", exact=True).click()
        fields = {
            "Prompt": "hi", "Samples (n)": "2", "Most tokens": "5", "Temperature": "0.25", "Top p": "0.5", "Seed": "-3",
            "Top k": "40", "Min p": "0.1", "Repetition penalty": "1.5", "Time budget, seconds": "2.5",
            "Stop strings": "END\n\\n\\n\na\\\\nb",
        }  # fmt: skip
        for label, text in fields.items():
            page.get_by_label(label, exact=True).fill(text)
        page.get_by_label("Speculation").select_option("3")
        page.get_by_label("Then decode the same plainly").uncheck()
        page.keyboard.press("Control+Enter")
        expect(page.get_by_role("status")).to_contain_text("0 tokens")
        page.get_by_label("Send as a message").check()
        page.keyboard.press("Control+Enter")
        eventually(page, lambda: len(got) == 2)
        expect(page.get_by_role("status")).to_contain_text("0 tokens")
        assert "prompt=hi&chat=true" in page.url
        for link, message in (("#prompt=hi", False), ("#prompt=hi&chat=true", True), ("#n=2", True)):
            other = opened(f"{server.url}/{link}")  # one of a model without a template means a text
            expect(other.locator("#model")).to_have_text("tiny")
            expect(other.get_by_label("Send as a message")).to_be_checked(checked=message)
    (completion, chat) = got
    assert completion.pop("path") == "completions"
    assert chat.pop("path") == "chat/completions"
    prompt = completion.pop("prompt")
    assert chat.pop("messages") == [{"role": "user", "content": prompt}]
    assert completion == chat
    for name in ("stream", "stream_options", "shoal"):
        del completion[name]
    assert completion == {
        "n": 2, "max_tokens": 5, "temperature": 0.25, "top_p": 0.5, "seed": -3, "top_k": 40, "min_p": 0.1,
        "repetition_penalty": 1.5, "time_budget": 2.5, "stop": ["END", "\n\n", "a\\nb"], "speculation": 3,
    }  # fmt: skip


SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("", {}),
    "json_object": ("", {"response_format": {"type": "json_object"}}),
    "json_schema": (
        json.dumps(SCHEMA),
        {"response_format": {"type": "json_schema", "json_schema": {"name": "playground", "schema": SCHEMA}}},
    ),
    "regex": ("[a-c]{3}", {"grammar": {"type": "regex", "text": "[a-c]{3}"}}),
    "lark": ('start: "a"\n\n', {"grammar": {"type": "lark", "text": 'start: "a"\n\n'}}),
}


@pytest.mark.slow
def test_every_kind_of_grammar_is_asked_for(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=1&compare=false")
    got = asked(page)
    page.get_by_text("More", exact=True).click()
    text = page.get_by_label("Schema, expression or rules")
    for kind, (written, _) in KINDS.items():
        page.get_by_label("Grammar", exact=True).select_option(kind)
        assert text.is_visible() == bool(written)
        if written:
            text.fill(written)
        page.get_by_role("button", name="Run").click()
        eventually(page, lambda: len(got) == list(KINDS).index(kind) + 1)  # noqa: B023
        expect(page.get_by_role("status")).to_contain_text("0 tokens")
        link = opened(page.evaluate("location.href"))
        assert link.get_by_label("Grammar", exact=True).input_value() == kind
        assert link.locator("#grammar").is_enabled() == bool(written)
        assert link.locator("#grammar").input_value() == text.input_value()
    constraints = [{name: value for name, value in body.items() if name in ("grammar", "response_format")} for body in got]
    assert constraints == [fields for _, fields in KINDS.values()]


@pytest.mark.slow
def test_samples_keep_to_the_grammar(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=3&seed=1&kind=regex&grammar=%5Ba-e%5D%7B9%2C12%7D")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("the speed of plain decoding")
    texts = [column.locator("pre").text_content() for column in page.get_by_role("article").all()]
    assert [bool(re.fullmatch("[a-e]{9,12}", text)) for text in texts] == [True] * 3
    assert page.locator("#samples .draft").count() > 0


def test_a_grammar_that_is_wrong_is_told_where_it_is_written(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#kind=json_schema&grammar=%7B")
    got = asked(page)
    text = page.get_by_label("Schema, expression or rules")
    page.get_by_role("button", name="Run").click()
    expect(text).to_be_focused()  # and unfolded: a text that is no JSON never leaves the page
    assert "This is no JSON" in text.evaluate("field => field.validationMessage")
    assert got == []
    page.unroute("**/completions")
    for kind, wrong in (("json_schema", '{"not": {}}'), ("regex", "(")):
        page.get_by_label("Grammar", exact=True).select_option(kind)
        text.fill(wrong)
        page.get_by_role("button", name="Run").click()
        expect(page.get_by_role("alert")).to_contain_text(f"the {kind} grammar cannot be used")
        expect(text).to_be_focused()
        assert text.get_attribute("aria-invalid") == "true"


@pytest.mark.slow
def test_what_a_server_does_not_have_is_not_offered(opened: Callable[..., Any]) -> None:
    with served(pair(), rule="rejection", max_n=6) as server:
        page = opened(server.url)
        expect(page.locator("#seed")).to_be_disabled()
        expect(page.locator("#suffix")).to_be_hidden()
        expect(page.locator("#chat")).to_be_hidden()
        assert page.locator("#n").get_attribute("max") == "6"
        page.locator("#max_tokens").fill("4")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#gauge-note")).to_contain_text("keeps no seeds")
        assert page.locator("#used-seed").inner_text() == "none"


# ── links, keys, stopping, errors ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_link_brings_the_controls_back(opened: Callable[..., Any], server: Served) -> None:
    page = opened(server.url)
    assert page.evaluate("location.hash") == ""
    page.get_by_label("Prompt").fill("a&b=\n#ü")
    page.get_by_label("Samples (n)").fill("7")
    page.get_by_label("Speculation").select_option("off")
    page.get_by_label("Then decode the same plainly").uncheck()
    link = page.evaluate("location.href")
    other = opened(link)
    assert other.get_by_label("Prompt").input_value() == "a&b=\n#ü"
    assert other.get_by_label("Samples (n)").input_value() == "7"
    assert other.get_by_label("Speculation").input_value() == "off"
    assert not other.get_by_label("Then decode the same plainly").is_checked()
    assert other.get_by_label("Temperature").input_value() == "0.8"
    other.evaluate("location.hash = '#temperature=0&speculation=99'")
    expect(other.get_by_label("Temperature")).to_have_value("0")
    assert other.get_by_label("Samples (n)").input_value() == "4"  # not in the hash: as on a fresh page
    assert other.get_by_label("Speculation").input_value() == "auto"


@pytest.mark.slow
def test_a_copied_link_brings_the_samples_back(opened: Callable[..., Any], server: Served) -> None:
    """With the seed that was drawn; the page itself goes on drawing."""
    page = opened(f"{server.url}/#n=2&max_tokens=12&compare=false", permissions=["clipboard-read", "clipboard-write"])

    def copied() -> str:
        button = page.get_by_role("button", name="Copy link").element_handle()
        button.click()
        eventually(page, lambda: button.text_content() == "Copied")
        expect(page.get_by_role("status")).to_have_text("The link is copied.")
        pass_moment(page)
        return str(page.evaluate("navigator.clipboard.readText()"))

    assert "seed" not in copied()  # nothing was drawn yet
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("2 samples, 24 tokens")
    link, seed = copied(), page.locator("#used-seed").inner_text()
    assert f"seed={seed}" in link
    assert "seed" not in page.evaluate("location.hash")
    assert page.get_by_label("Seed").input_value() == ""
    other = opened(link)  # it draws at once
    expect(other.get_by_role("status")).to_contain_text("2 samples, 24 tokens")
    assert other.locator("pre").all_text_contents() == page.locator("pre").all_text_contents()
    page.route("**/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "no", "param": None}}))
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("alert")).to_have_text("no")
    assert "seed" not in copied()  # the samples of that seed are gone
    page.get_by_label("Seed").fill("5")
    assert "seed=5" in copied()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stopping_gives_the_rows_back(opened: Callable[..., Any], way: str) -> None:
    gate = Gate(legible(0), length=40)
    with served(pair(gate)) as server:
        page = opened(f"{server.url}/#prompt=hello&n=3&max_tokens=900")
        stop = page.get_by_role("button", name="Stop")
        assert stop.is_disabled()
        page.get_by_role("button", name="Run").click()
        assert gate.reached.wait(TIMEOUT_SECONDS)
        expect(page.locator("article").nth(2).locator(".token").first).to_be_attached()
        assert server.worker.rows == 3
        if way == "button":
            stop.click()
        else:
            page.keyboard.press(way)
        expect(page.get_by_role("status")).to_have_text("Stopped.")
        gate.opened.set()
        eventually(page, lambda: server.worker.rows == 0 and server.worker.thread.engine.scheduler.idle)
        assert (
            server.worker.thread.engine.stats.committed < 3 * 900
        )  # and nothing was run to compare with what had been stopped
        assert stop.is_disabled()
        expect(page.get_by_role("button", name="Run")).to_be_focused()


@pytest.mark.slow
def test_with_the_keyboard_alone(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#max_tokens=6")
    expect(page.locator("#model")).to_have_text("tiny")
    reached = [""]
    while reached[-1] != "run" and len(reached) < 30:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.localName"))
    order = "link theme prompt n max_tokens temperature top_p seed speculation summary compare run".split()
    assert [place for place in reached if place in order] == order  # Stop has nothing to stop
    page.get_by_label("Samples (n)").focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("2")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("status")).to_contain_text("2 samples, 12 tokens")
    expect(page.get_by_label("Samples (n)")).to_be_focused()  # a run takes the focus nowhere
    assert page.get_by_role("article", name="Sample 2").count() == 1
    assert page.evaluate(f"[...document.querySelectorAll('{CONTROLS}')].every((control) => control.labels.length)")


def test_an_error_is_told_at_its_field(opened: Callable[..., Any]) -> None:
    with served(pair(), queue=0) as server:  # eight samples at most
        page = opened(f"{server.url}/#n=9")
        page.get_by_role("button", name="Run").click()
        expect(page.get_by_role("alert")).to_contain_text("Expected a value <= 8 on this server, but got 9")
        field = page.get_by_label("Samples (n)")
        expect(field).to_be_focused()
        assert field.get_attribute("aria-invalid") == "true"
        field.fill("2")
        page.get_by_label("Most tokens").fill("4")
        page.get_by_role("button", name="Run").click()
        expect(page.get_by_role("status")).to_contain_text("2 samples, 8 tokens")
        assert page.get_by_role("alert").is_hidden()
        assert field.get_attribute("aria-invalid") is None


def test_a_server_that_is_gone_is_told(opened: Callable[..., Any]) -> None:
    with served(pair()) as server:
        page = opened(server.url)
        expect(page.locator("#model")).to_have_text("tiny")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")


def test_the_key_is_asked_for_and_kept_for_the_tab_only(opened: Callable[..., Any]) -> None:
    with served(pair(), keys=("secret-key",)) as server:
        page = opened(f"{server.url}/#max_tokens=4")
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        expect(page.get_by_role("alert")).to_contain_text("an API key is needed")
        key.fill("wrong")
        page.keyboard.press("Control+Enter")
        expect(page.get_by_role("alert")).to_contain_text("the API key is wrong")
        key.fill("secret-key")
        page.keyboard.press("Control+Enter")
        expect(page.get_by_role("status")).to_contain_text("4 samples, 16 tokens")
        assert page.evaluate("sessionStorage.getItem('shoal-key')") == "secret-key"
        kept = page.evaluate("JSON.stringify(localStorage) + location.href + document.cookie")
        assert "secret-key" not in kept


# ── how it looks ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_light_and_dark(opened: Callable[..., Any], server: Served) -> None:
    light, dark = opened(server.url, color_scheme="light"), opened(server.url, color_scheme="dark")
    colours = [background(page) for page in (light, dark)]
    assert colours[0] != colours[1]
    for page, choice, colour in ((light, "dark", colours[1]), (dark, "light", colours[0])):
        page.get_by_label("Theme").select_option(choice)
        assert background(page) == colour
        page.reload()
        assert background(page) == colour
        page.get_by_label("Theme").select_option("system")
    assert [background(page) for page in (light, dark)] == colours


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(opened: Callable[..., Any], server: Served, width: int) -> None:
    page = opened(
        f"{server.url}/#n=4&max_tokens=24&prompt={'x' * 300}&kind=regex&grammar=.{{9,}}{'x?' * 300}",
        viewport={"width": width, "height": 800},
    )
    page.get_by_text("More", exact=True).click()
    assert fits(page)
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("status")).to_contain_text("the speed of plain decoding")
    assert fits(page)
    left = {column.bounding_box()["x"] for column in page.get_by_role("article").all()}
    assert len(left) == (1 if width == 390 else 4)  # below each other, or side by side
    assert page.get_by_role("button", name="Stop").is_visible()


@pytest.mark.slow
def test_many_events_at_once_are_drawn_together(opened: Callable[..., Any], server: Served) -> None:
    """Drawing would delay reading, and count as the time of the run."""
    page = opened(f"{server.url}/#n=1&compare=false")
    page.evaluate("""() => {
        window.drawn = [];
        const count = (changes) => changes.filter(({ target, addedNodes }) => target.matches(".text") && addedNodes.length);
        new MutationObserver((changes) => window.drawn.push(...count(changes)))
            .observe(document.getElementById("samples"), { childList: true, subtree: true });
    }""")
    asked(page, chunk_of("a") * 200 + "data: [DONE]\n\n")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#samples .token")).to_have_count(200)
    assert 0 < page.evaluate("window.drawn.length") < 50


@pytest.mark.slow
def test_drawing_goes_on_after_an_error(opened: Callable[..., Any], server: Served) -> None:
    page = opened(server.url)
    page.evaluate("""async () => {
        const { framed } = await import("/playground/page.js");
        addEventListener("error", (event) => event.preventDefault());
        window.drawn = 0;
        window.draw = framed(() => { window.drawn += 1; if (window.drawn === 1) throw new Error("planted"); });
        window.draw();
    }""")
    eventually(page, lambda: page.evaluate("window.drawn") == 1)
    page.evaluate("window.draw()")
    eventually(page, lambda: page.evaluate("window.drawn") == 2)


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_samples_stay_where_they_are_while_speeds_come(opened: Callable[..., Any], server: Served, width: int) -> None:
    page = opened(f"{server.url}/#n=2", viewport={"width": width, "height": 800})
    held: list[Any] = []
    answer = chunk_of("a") + chunk_of("b").replace('"index": 0', '"index": 1')
    answer += 'data: {"choices": [], "usage": {"choices": [], "by_drafter": {"model": {"drafted": 2, "accepted": 2}}}}\n\n'
    page.route("**/completions", lambda route: held.append(route))
    page.get_by_role("button", name="Run").click()
    tops: list[int] = []
    for _ in range(2):
        eventually(page, lambda: len(held) > len(tops))
        held[-1].fulfill(status=200, content_type="text/event-stream", body=answer + "data: [DONE]\n\n")
        expect(page.get_by_role("status")).to_contain_text("the speed of" if tops else "to compare…")
        tops.append(page.locator("#samples").evaluate("node => node.offsetTop"))
    assert tops[0] == tops[1]
    expect(page.get_by_role("button", name="Watch the race")).to_be_visible()
    figures = page.locator(".gauge").evaluate("node => [node.scrollWidth, node.clientWidth]")
    assert figures[0] <= figures[1]


@pytest.mark.slow
def test_texts_of_one_row_begin_on_one_line(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=2&compare=false", viewport={"width": 1280, "height": 800})
    failed = {"index": 1, "ended_by": "error", "error": "a long reason " * 20}
    usage = {"choices": [{"index": 0, "ended_by": "eos", "error": None}, failed], "by_drafter": {}}
    asked(page, chunk_of("a") + f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".failed .about")).to_contain_text("a long reason")
    first, second = (text.bounding_box() for text in page.locator("#samples .text").all())
    assert first["y"] == second["y"]


@pytest.mark.parametrize("path", ["/", "/chat", "/editor"])
def test_only_its_own_files_run_on_it(server: Served, path: str) -> None:
    page = httpx.get(server.url + path)
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert not re.search(r"<script(?! type=\"module\" src=)|\sstyle=|\son\w+=|https?://", page.text)
    parts = [
        part for part in re.findall(r'(?:src|href)="([^"]+)"', page.text) if part not in ("chat", "editor", ".")
    ]  # the other pages
    assert {Path(part).suffix for part in parts} == {".js", ".css", ".svg"}
    for part in parts:
        response = httpx.get(f"{server.url}/{part}")
        assert response.status_code == 200
        assert response.headers["content-security-policy"] == policy
    missing = httpx.get(f"{server.url}/playground/secrets")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    described = httpx.get(f"{server.url}/openapi.json").json()["paths"].keys()
    assert described.isdisjoint({"/", "/playground/{name}", "/playground/{name:path}"})


# ── the editor ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_editor_shows_what_fits_at_the_cursor_and_takes_it(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.constraints.fim.TOKENS", (("Q", "W", "Z"),))  # tokens of the tiny tokenizer
    with served(pair()) as filling:
        page = opened(filling.url)
        page.get_by_role("link", name="Editor").click()
        area, ghost = page.get_by_label("Text"), page.locator("pre#ghost")
        expect(page.get_by_role("button", name="Suggest")).to_be_enabled()
        page.get_by_label("Most tokens").fill("8")
        page.get_by_label("File name").fill("notes.txt")
        area.fill("ab cd")
        page.keyboard.press("Escape")
        area.evaluate("area => area.setSelectionRange(2, 2)")
        page.keyboard.press("Control+Enter")
        expect(page.get_by_role("status")).to_contain_text("different texts of 6")
        texts = page.get_by_role("listitem").locator("pre").all_text_contents()
        assert len(texts) > 2
        assert re.search(
            "(reached the limit of tokens|stopped by itself)$",
            page.get_by_role("listitem").locator("p").first.text_content() or "",
        )
        assert ghost.text_content() == f"ab{texts[0]} cd\n"
        page.keyboard.press("Alt+ArrowDown")
        assert ghost.text_content() == f"ab{texts[1]} cd\n"
        page.keyboard.press("Tab")
        assert area.input_value() == f"ab{texts[1]} cd"
        assert area.evaluate("area => area.selectionStart") == 2 + len(texts[1])
        expect(ghost).to_be_hidden()
        page.keyboard.type("x")  # asks by itself after a pause
        expect(ghost).to_be_visible()
        assert (ghost.text_content() or "").startswith(f"ab{texts[1]}x")
        page.keyboard.press("Escape")
        expect(ghost).to_be_hidden()
        assert fits(page)


@pytest.mark.slow
def test_the_editor_asks_for_a_syntax_that_the_server_has_and_shows_its_state(
    opened: Callable[..., Any],
) -> None:
    page = opened("about:blank")
    about = {"context": 100, "max_n": 9, "max_tokens": 99, "fill_in_middle": True, "syntax": ["python"], "members": True}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "m", "shoal": about}]}))
    ends = [("complete", "1)"), ("incomplete", "1 +")]
    choices = [{"index": i, "text": text, "shoal": {"mean_logprob": i - 2.0}} for i, (_, text) in enumerate(ends)]
    usage = {"choices": [{"index": i, "ended_by": "length", "syntax": end} for i, (end, _) in enumerate(ends)]}
    events = [{"choices": choices}, {"choices": [], "usage": usage}]
    got = asked(page, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")
    with served(pair()) as server:
        page.goto(f"{server.url}/editor")
        expect(page.get_by_label("Syntax")).to_have_value("filename")
        page.get_by_label("Syntax").select_option("python")
        page.get_by_label("Known members only").check()
        area = page.get_by_label("Text")
        area.fill("print(\n" + "x" * 300)
        page.keyboard.press("Escape")
        area.evaluate("area => area.setSelectionRange(6, 6)")
        page.keyboard.press("Control+Enter")
        expect(page.get_by_role("listitem").first).to_contain_text("the file parses")
        expect(page.get_by_role("listitem").nth(1)).to_contain_text("the file does not parse yet")
        page.get_by_label("Syntax").select_option("filename")
        page.get_by_label("File name").fill("a.rs")
        area.evaluate("area => area.setSelectionRange(6, 6)")
        page.keyboard.press("Control+Enter")
        expect(page.get_by_role("listitem").first).to_contain_text("the file parses")
    body, by_name = got
    assert ("syntax" in by_name, by_name["filename"]) == (False, "a.rs")
    assert ("filename" in body, body["members"]) == (False, True)
    assert (body["syntax"], body["prompt"], len(body["suffix"])) == ("python", "print(", 50)


@pytest.mark.slow
def test_a_model_that_cannot_fill_in_has_no_editor(opened: Callable[..., Any], server: Served) -> None:
    page = opened(server.url)
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.get_by_role("link", name="Editor")).to_be_hidden()
    page.goto(f"{server.url}/editor")
    expect(page.get_by_role("status")).to_have_text("This model was not trained to fill in.")
    expect(page.get_by_role("button", name="Suggest")).to_be_disabled()
