"""What the page at / does with a run once it is there: steps, race, links and exports, in a real browser.

Tests of: serve/playground: replay and race of the page at /; models.sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browsers import CHROMIUM, browser, expect, fits, opened, server
from serving import Served, pair, served
from shoal.models.sources import bundled, people_call

__all__ = ["browser", "opened", "server"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")]
HIDDEN = "nodes => nodes.filter((node) => !node.getClientRects().length).length"


def run(page: Any, *, compared: bool = False) -> None:
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#status")).to_contain_text("the speed of plain decoding" if compared else "acceptance length")


def number(locator: Any) -> int:
    """The first number in an element's text."""
    return int(re.findall(r"\d+", locator.text_content())[0])


# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_is_stepped_through_round_by_round(opened: Callable[..., Any], server: Served) -> None:
    """In each round the drafts appear, then the rejected ones are struck, then the target's own token comes."""
    page = opened(f"{server.url}/#n=3&max_tokens=24&seed=5&compare=false")
    run(page)
    texts = page.locator("#samples pre").all_text_contents()
    sentence, on = page.locator("#frame"), page.get_by_role("button", name="Step forward")
    page.get_by_role("button", name="Step through rounds").click()
    assert re.fullmatch(r"Before the first of \d+ rounds\.", sentence.text_content())
    rounds = number(sentence)
    assert page.locator("#scrubber").get_attribute("max") == str(rounds)
    assert page.locator("#samples .token").evaluate_all(HIDDEN) == page.locator("#samples .token").count()
    drafted = accepted = rejected = own = 0
    while on.is_enabled():
        on.click()
        told = sentence.text_content()
        struck = page.locator("#samples s:not(.later):not(.proposed)").count()
        if (found := re.search(r"(\d+) tokens? drafted", told)) is not None:
            drafted += int(found[1])
            assert page.locator("#samples .proposed").count() == int(found[1])
            assert struck == rejected  # the target has not decided yet
            assert styles(page.locator("#samples .proposed").first, "textDecorationLine", "outlineStyle") == [
                "none",
                "dashed",
            ]
        elif (found := re.search(r"accepts (\d+) and rejects (\d+)", told)) is not None:
            accepted, rejected = accepted + int(found[1]), rejected + int(found[2])
            assert page.locator("#samples .proposed").count() == 0
            assert struck == rejected
        else:
            own += int(re.findall(r"adds (\d+) token", told)[0])
            assert page.locator("#samples .now").count() > 0
        assert page.locator("#samples .token:not(.later)").count() == accepted + own + pending(page)
    stats = [number(page.locator(f"#{name}")) for name in ("accepted", "tokens")]
    assert [accepted, accepted + own] == stats
    assert drafted == accepted + rejected
    assert page.locator("#accepted").text_content() == f"{accepted} of {drafted}"
    assert rejected == page.locator("#samples s").count() > 0
    page.get_by_role("button", name="Close the replay").click()
    assert page.locator("#samples .later, #samples .proposed, #samples .now, .step").count() == 0
    assert page.locator("#samples pre").all_text_contents() == texts
    expect(page.get_by_role("button", name="Step through rounds")).to_be_focused()


def pending(page: Any) -> int:
    """Accepted drafts that are shown before the target has decided."""
    return int(page.locator("#samples .token.proposed").count())


def styles(locator: Any, *names: str) -> list[str]:
    found: list[str] = locator.evaluate(f"node => {list(names)}.map((name) => getComputedStyle(node)[name])")
    return found


def test_the_replay_is_used_by_keys_and_plays(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=2&max_tokens=12&seed=1&compare=false", reduced_motion="reduce")
    run(page)
    page.get_by_role("button", name="Step through rounds").click()
    sentence, play = page.locator("#frame"), page.locator("#play")
    expect(play).to_be_focused()
    rounds = number(sentence)
    for key, says in (
        ("ArrowRight", "Round 1 of"), ("ArrowRight", "Round 1 of"), ("ArrowLeft", "drafted"), ("ArrowLeft", "Before the first"),
        ("End", f"Round {rounds} of {rounds}"), ("Home", "Before the first"),
    ):  # fmt: skip
        page.keyboard.press(key)
        expect(sentence).to_contain_text(says)
    scrubber = page.get_by_label("Round", exact=True)
    scrubber.focus()
    page.keyboard.press("ArrowRight")  # a whole round: its last step
    expect(sentence).to_contain_text("Round 1 of")
    assert scrubber.input_value() == "1"
    assert scrubber.get_attribute("aria-valuetext") == sentence.text_content()
    assert sentence.get_attribute("aria-live") == "polite"
    page.get_by_label("Times").select_option("as recorded")
    expect(page.locator("#times-note")).to_contain_text("arrived in this browser")
    play.focus()
    page.keyboard.press("Space")
    expect(sentence).to_contain_text(f"Round {rounds} of {rounds}")
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()  # it pauses at the end
    page.keyboard.press("Escape")
    expect(page.locator("#replay")).to_be_hidden()


def test_the_player_covers_no_sample_on_a_phone(opened: Callable[..., Any], server: Served) -> None:
    """It grows when it is opened, and the browser would scroll by as much."""
    page = opened(f"{server.url}/#n=2&max_tokens=40&seed=5&compare=false", viewport={"width": 390, "height": 844})
    run(page)
    page.get_by_role("button", name="Step through rounds").click()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    player, first = page.locator("#replay").bounding_box(), page.locator("#samples header").first.bounding_box()
    assert player["y"] >= -1
    assert player["y"] + player["height"] <= first["y"]


@pytest.mark.parametrize("size", [(1280, 720), (390, 844)])
def test_what_is_replayed_is_in_view(opened: Callable[..., Any], server: Served, size: tuple[int, int]) -> None:
    page = opened(f"{server.url}/#n=2&max_tokens=40&seed=5&compare=false", viewport={"width": size[0], "height": size[1]})
    run(page)
    page.get_by_role("button", name="Step through rounds").click()
    page.get_by_role("button", name="Step forward").click()
    top, text = page.locator("#samples").bounding_box()["y"], page.locator("#samples .text").first.bounding_box()
    assert top <= text["y"] < top + 150  # heads do not grow where texts shrink
    assert text["y"] + 40 < size[1]


def test_a_next_run_ends_the_replay(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=2&max_tokens=8&compare=false")
    run(page)
    page.get_by_role("button", name="Step through rounds").click()
    run(page)
    expect(page.locator("#replay")).to_be_hidden()
    assert page.locator("#samples .later").count() == 0
    assert page.locator("#samples .token").evaluate_all(HIDDEN) == 0


# ── the race ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [390, 1440])
def test_the_plain_run_races_beside_it(opened: Callable[..., Any], server: Served, width: int) -> None:
    page = opened(f"{server.url}/#n=2&max_tokens=16&seed=3", viewport={"width": width, "height": 844})
    run(page, compared=True)
    page.get_by_role("button", name="Watch the race").click()
    sentence = page.locator("#frame")
    assert sentence.text_content() == "After 0.000 s: speculative 0 tokens; plain 0 tokens."
    assert "measured one after the other, not at once" in page.locator("#times-note").text_content()
    page.keyboard.press("ArrowRight")
    first = [int(found) for found in re.findall(r"(\d+) tokens", sentence.text_content())]
    assert 0 < sum(first) < 32  # what came first, of either
    assert sum(map(number, page.locator("#lanes b").all())) == sum(first)
    page.keyboard.press("End")
    told = sentence.text_content()
    assert re.fullmatch(
        r"After [\d.]+ s: speculative 32 tokens, ended at [\d.]+ s; plain 32 tokens, ended at [\d.]+ s\.", told
    )
    lanes = page.locator("#lanes > li").all()
    assert [lane.locator(".lane.ended").count() for lane in lanes] == [2, 2]
    assert [number(lane.locator("b").first) for lane in lanes] == [16, 16]
    last = max(float(ended) for ended in re.findall(r"ended at ([\d.]+) s", told))
    assert f"After {last:.3f} s" in told
    assert page.locator("#race svg polyline").count() == 4  # both as they went, and as they will go
    scale = "node => node.getBoundingClientRect().width / node.viewBox.baseVal.width"
    assert page.locator("#race svg").evaluate(scale) == pytest.approx(1, abs=0.1)  # its words are as large as others
    page.locator("#lanes").focus()
    expect(page.locator("#lanes")).to_be_focused()  # it scrolls by keys
    page.get_by_label("Show", exact=True).select_option("sample 2")
    text = page.locator("#samples pre").nth(1).text_content()
    assert [page.locator(f"#race-{name}").text_content() for name in ("mine", "plain")] == [text, text]
    page.locator("#play").focus()
    page.keyboard.press("Home")
    assert [page.locator(f"#race-{name}").text_content() for name in ("mine", "plain")] == ["", ""]
    assert fits(page)


def test_a_run_that_was_not_compared_has_no_race(opened: Callable[..., Any], server: Served) -> None:
    page = opened(f"{server.url}/#n=1&max_tokens=8&compare=false")
    run(page)
    expect(page.get_by_role("button", name="Watch the race")).to_be_hidden()
    expect(page.get_by_role("button", name="Step through rounds")).to_be_visible()


# ── the bar ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_bar_names_the_models(opened: Callable[..., Any], server: Served) -> None:
    page = opened(server.url)
    expect(page.locator("#pair")).to_have_text("target: scripted (float32 on cpu) · drafter: scripted")


def test_the_bar_names_a_model_once(opened: Callable[..., Any]) -> None:
    with served(pair(), model="scripted") as running:
        page = opened(running.url)
        expect(page.locator("#model")).to_have_text("scripted")
        expect(page.locator("#pair")).to_have_text("float32 on cpu · drafter: scripted")


def test_names_have_no_paths(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    names = [
        str(bundled("target")),
        str(tmp_path / "small"),
        "Qwen/Qwen3-8B",
        "suffix:scope=group,answers=/some/file",
        "suffix:min=1+model",
    ]
    assert [people_call(name) for name in names] == ["bundled target", "small", "Qwen/Qwen3-8B", "suffix", "suffix+model"]
