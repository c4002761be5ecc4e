"""Pictures the playground for docs/images, with the bundled pair and a fixed draft length:  python scripts/picture_playground.py

With --chat DIR it pictures a chat instead, by that model (in the docs SmolLM2-135M-Instruct, tests/helpers/smollm2.py writes it).

Needs playwright and chromium (extra `dev`). The seed is fixed, so the samples are the same each time. Times are this machine's, and
differ from run to run: a picture is of a run whose speed, beside plain decoding's, is within a tenth of the median.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
MILLISECONDS = 60_000
"""Longest wait for anything on the page."""
FEWEST_RUNS, MOST_RUNS = 9, 40
"""How many runs the median is of at least, and after how many the search for one near it ends."""
QUESTION = "Write a Python function that counts the vowels of a text."
FILE = 'def largest(numbers):\n    """Return the largest of numbers."""\n    best = numb|\n    return best\n'
"""The file of the editor; | is the cursor."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
DESKTOP = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"}
EDITOR = {"viewport": {"width": 1280, "height": 760}, "color_scheme": "light"}
PHONE = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True}


@contextmanager
def served(*options: str) -> Iterator[str]:
    """`shoal serve` on any free port of this machine, in a process of its own; yields its URL."""
    command = [sys.executable, "-m", "shoal", "serve", "--port", "0", "--json", "--log-level", "warning", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said:
                raise SystemExit("picture_playground: the server ended; it said why above")
            yield json.loads(said)["url"].removesuffix("v1")
        finally:
            process.terminate()


def samples(page: Any, folder: Path, name: str) -> None:
    """A run, and beside it the plain one; on a phone from the samples on."""
    if page.viewport_size["width"] < 800:
        page.locator(".watch").evaluate("buttons => buttons.scrollIntoView()")
    page.screenshot(path=folder / f"{name}.png")


def replay(page: Any, folder: Path, name: str) -> None:
    """The replay, where the target has decided on the drafts of a round."""
    page.get_by_role("button", name="Step through rounds").click()
    for _ in range(8):
        page.get_by_role("button", name="Step forward").click()
    page.screenshot(path=folder / f"{name}.png")


def image(page: Any, folder: Path, name: str) -> None:
    """What the page saves as an image."""
    with page.expect_download() as download:
        page.get_by_role("button", name="Save image").click()
    download.value.save_as(folder / f"{name}.png")


PICTURES: dict[str, tuple[dict[str, Any], int, Callable[[Any, Path, str], None]]] = {
    "playground-desktop": (DESKTOP, 4, samples),
    "playground-replay": (DESKTOP, 4, replay),
    "playground-phone": (PHONE, 2, samples),
    "playground-image": (DESKTOP, 2, image),
}
"""Of each picture, the window, the number of samples, and what takes it."""
NAMES = (*PICTURES, "editor")


def take(browser: Any, url: str, folder: Path, name: str) -> None:
    """Opens the page by a link that runs until a run is a usual one, and takes its picture."""
    window, n, picture = PICTURES[name]
    context = browser.new_context(**window)
    context.set_default_timeout(MILLISECONDS)
    page = context.new_page()
    ratios: list[float] = []
    while len(ratios) < FEWEST_RUNS or abs(ratios[-1] / statistics.median(ratios) - 1) > 0.1:
        if len(ratios) == MOST_RUNS:
            raise SystemExit(f"picture_playground: speeds differ too much to call one usual: {ratios}")
        page.goto("about:blank")
        page.goto(f"{url}#n={n}&seed=7&run")
        expect(page.locator("#gauge-note")).to_contain_text("Both measured")
        ratios.append(float(page.locator("#times").inner_text().rstrip("×")))
    page.wait_for_timeout(500)  # code colours come with the frames after the last token
    picture(page, folder, name)
    context.close()
    print(f"{folder / name}.png: {ratios[-1]}, the median of {len(ratios)} runs is {statistics.median(ratios)}")


def chat(browser: Any, url: str, folder: Path) -> None:
    """Three candidates beside each other."""
    context = browser.new_context(**DESKTOP)
    page = context.new_page()
    page.goto(f"{url}chat")
    for label, text in (("Candidates", "3"), ("Most tokens", "256"), ("Seed", "1")):
        page.get_by_label(label, exact=True).fill(text)
    page.get_by_role("textbox", name="Message", exact=True).fill(QUESTION)
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_contain_text("3 candidates")
    page.wait_for_timeout(500)
    page.screenshot(path=folder / "playground-chat.png")
    context.close()


def editor(browser: Any, url: str, folder: Path, name: str) -> None:
    """Suggestions at a cursor, in the language that the file's name says. They have no seed."""
    context = browser.new_context(**EDITOR)
    page = context.new_page()
    page.goto(f"{url}editor")
    page.get_by_role("spinbutton", name="Suggestions").fill("4")
    for label, text in (("Most tokens", "24"), ("Temperature", "0.6"), ("File name", "largest.py")):
        page.get_by_label(label, exact=True).fill(text)
    field = page.get_by_label("Text", exact=True)
    before, behind = FILE.split("|")
    field.fill(before + behind)
    field.evaluate("(field, place) => field.setSelectionRange(place, place)", len(before))
    field.press("Control+Enter")
    expect(page.get_by_role("status")).to_contain_text("different texts of 4")
    page.wait_for_timeout(500)
    page.screenshot(path=folder / f"{name}.png")
    context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"which pictures, of {', '.join(NAMES)}; all without one")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images", help="where they are written")
    parser.add_argument("--chat", metavar="DIR", help="picture a chat with the model in this directory")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no picture {', '.join(sorted(unknown))}")
    expect.set_options(timeout=MILLISECONDS)
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    how = ("--lookahead", "4") if options.chat is None else ("--model", options.chat, "--name", "SmolLM2-135M-Instruct")
    with served(*how) as url, sync_playwright() as api:
        browser = api.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        if options.chat is not None:
            chat(browser, url, options.folder)
        for name in () if options.chat is not None else options.names or NAMES:
            (editor if name == "editor" else take)(browser, url, options.folder, name)
        browser.close()


if __name__ == "__main__":
    main()
