"""The pages: every relative link and anchor resolves, every page is in the index, and what the tutorial shows runs."""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from readme import ROOT, blocks, shoal_commands
from shoal.cli import run

DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "DESIGN.md", "CHANGELOG.md", "benchmarks/README.md")]
PAGES += sorted(DOCS.rglob("*.md"))
KINDS = ("how-to", "reference", "explanation", "measurements")


def anchors(page: Path) -> set[str]:
    """The anchors of a page: its headings as GitHub spells them, and those set by hand."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def broken_links(page: Path) -> Iterator[str]:
    """Relative links of a page to no file, or to no anchor of a page."""
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if "://" not in target and (not file.exists() or (anchor and anchor not in anchors(file))):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert not list(broken_links(page))


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A title: `x`\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-title-x) [b](other.md#no-heading) [c](gone.md) [d](#here) [e](https://x.y/gone.md)")
    assert list(broken_links(page)) == ["other.md#no-heading", "gone.md", "#here"]


def test_pages_named_in_code_exist() -> None:
    folders = (ROOT / name for name in ("src", "tests", "benchmarks", "scripts"))
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".sh")]
    named = {
        (file, name) for file in files for name in re.findall(r"\bdocs/[\w./-]+\.\w+", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert not [f"{file.relative_to(ROOT)}: {name}" for file, name in named if not (ROOT / name).exists()]


RETIRED = (
    "luck referee warden hopeless scrub intake resident seated law laws verdicts judge judged judges judging prices".split()
)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name)
def test_pages_use_the_words_of_the_repository(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", page.read_text(encoding="utf-8"))  # without code and targets of links
    assert not [word for word in RETIRED if re.search(rf"\b{word}\b", text, flags=re.IGNORECASE)]


def test_names_of_the_package_in_pages_exist() -> None:
    named = {
        name
        for page in PAGES[:2] + PAGES[4:]
        for name in re.findall(r"`(shoal(?:\.\w+)+)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert not [name for name in named - {"shoal.notes"} if not _resolves(name)]  # shoal.notes is a field of answers


def _resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_index_has_every_page_once() -> None:
    listed = re.findall(r"\]\((?!\.\./)([^)#]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if page.name != "index.md"]
    assert sorted(listed) == sorted(pages)
    assert {name.partition("/")[0] for name in pages} == {*KINDS, "tutorial.md", "deploy.md"}


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "reference" / "python-api.md").read_text(encoding="utf-8")
    assert not [name for name in shoal.__all__ if f"`{name}" not in page]


def test_the_python_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tutorial = DOCS / "tutorial.md"
    python = blocks(tutorial.read_text(encoding="utf-8"), "python")
    assert len(python) == 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "tutorial"}
    for line, source in python:
        exec(compile("\n" * (line - 1) + source, os.fspath(tutorial), "exec", dont_inherit=True), names)


def test_the_commands_of_the_tutorial_run(capsys: pytest.CaptureFixture[str]) -> None:
    console = blocks((DOCS / "tutorial.md").read_text(encoding="utf-8"), "console")
    commands = [command for _, block in console for command in shoal_commands(block)]
    drafted, plain, check = commands
    texts = []
    for command in (drafted, plain):
        assert run(command) == 0
        texts.append(re.sub(r"^# sample.*$", "", capsys.readouterr().out, flags=re.MULTILINE))
    assert texts[0] == texts[1]  # the same samples with and without the drafter
    assert check[0] == "check"
    assert (
        run([check[0], "--help", *check[1:]]) == 0
    )  # it measures for minutes: tests/cli/test_check.py runs it on small models
