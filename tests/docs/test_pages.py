"""What the pages show is true: their Python runs, their commands parse, their links lead somewhere, their names exist.

Tests of: README.md, DESIGN.md, CHANGELOG.md, docs/, benchmarks/README.md, scripts/help_pages.py.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer import rich_utils

import module_map
import shoal
from help_pages import render
from readme import ROOT, blocks, run_blocks, shoal_commands
from shoal.cli import run
from shoal.drafting import registry

README, DESIGN, DOCS = ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "docs"
PAGES = [README, DESIGN, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.rglob("*.md"))]
EXAMPLES = blocks(DESIGN.read_text(encoding="utf-8"), "python")


# ── Python ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.limit(900)
@pytest.mark.parametrize("page", ["README.md", "docs/how-to/python.md", "docs/how-to/transformers.md", "docs/tutorial.md"])
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # whatever an example writes
    run_blocks(ROOT / page)


@pytest.mark.slow
def test_the_python_of_the_page_on_constraints_runs() -> None:
    """What is banned there is seldom written. Of a letter that is often written nothing is left, in tokens of any kind."""
    names = run_blocks(DOCS / "how-to" / "constraints.md")
    pair, prompt = names["pair"], "def is_even(x):\n    "
    free, banned = (
        pair.generate(prompt, n=4, seed=0, max_new_tokens=12, constraints=constraints)[0].samples
        for constraints in ((), (names["Ban"](pair.tokenizer, rb"e"),))
    )
    assert sum("e" in sample.text for sample in free) > 1
    assert not any("e" in sample.text for sample in banned)
    assert all(sample.text for sample in banned)


@pytest.mark.parametrize(("line", "source"), EXAMPLES, ids=[f"line {line}" for line, _ in EXAMPLES])
def test_an_example_of_the_design_runs(line: int, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How to write a drafter, a controller, a constraint: each by itself. The drafter's name goes with the test."""
    monkeypatch.setattr(registry, "_kinds", dict(registry._kinds))
    exec(compile("\n" * (line - 1) + source, os.fspath(DESIGN), "exec", dont_inherit=True), {"__name__": "example"})


def test_the_page_names_every_drafter_that_is_refused_by_its_kind() -> None:
    """With what shows it, and the drafter to take in its place."""
    page = (DOCS / "reference" / "drafters.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+ \| `\w+:DIR`) \|$", page, re.MULTILINE))
    assert list(rows) == [kind for kind, *_ in registry.UNSUPPORTED]
    for kind, _, marks, instead in registry.UNSUPPORTED:
        assert rows[kind].endswith(f"`{instead}:DIR`")
        assert all(f"`{mark}`" in rows[kind] for mark in marks)


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_commands_of_the_pages_parse(capsys: pytest.CaptureFixture[str]) -> None:
    """All options are parsed before --help answers, and nothing runs."""
    shown: dict[str, list[list[str]]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        prompted = [block for _, block in blocks(text, "console")] + [f"$ {block}" for _, block in blocks(text, "bash")]
        shown[os.path.relpath(page, ROOT)] = [command for block in prompted for command in shoal_commands(block)]
    assert shown["README.md"], "README.md shows no `$ shoal ...` command"
    assert sum(map(len, shown.values())) > 50
    for name, commands in shown.items():
        for command in commands:
            code = run([*command[:1], "--help", *command[1:]])
            assert code == 0, f"{name}: shoal {shlex.join(command)}: {capsys.readouterr().err}"
    capsys.readouterr()
    assert run(["demo", "--help", "--no-such-option"]) == 2  # the control
    assert "--no-such-option" in capsys.readouterr().err


CALLED = re.compile(r"python ((?:benchmarks|training|scripts)/[\w/]+\.py)([^`\n#]*(?:\n(?=[^`\n]*`)[^`\n#]*)?)")


def unknown_options(text: str) -> Iterator[str]:
    """Calls of scripts in a text, and their options that the script's source does not have."""
    for script, given in CALLED.findall(text):
        file = ROOT / script
        source = file.read_text(encoding="utf-8") if file.exists() else ""
        for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", given):
            name = option.lstrip("-").replace("-", "_")
            if f'"{option}"' not in source and not re.search(rf"\b{name}\s*:", source):
                yield f"{script} {option}"


def test_options_of_scripts_are_there() -> None:
    pages = {os.path.relpath(page, ROOT): page.read_text(encoding="utf-8") for page in PAGES}
    assert sum(len(CALLED.findall(text)) for text in pages.values()) > 40
    assert {name: found for name, text in pages.items() if (found := [*unknown_options(text)])} == {}
    wrong = "`python benchmarks/drafters.py --repeats 3\n--gone 4 -k 4`, `python benchmarks/gone.py --json FILE`"
    assert [*unknown_options(wrong)] == [
        "benchmarks/drafters.py --gone",
        "benchmarks/drafters.py -k",
        "benchmarks/gone.py --json",
    ]


def test_commands_are_taken_apart() -> None:
    block = (
        "$ make demo\n$ A=1 shoal demo | head\nshoal: no command\n$ echo 'x; y' | shoal generate \\\n  --n 4 'a | b' > out\n"
        "$ curl -d '{\n}'\n$ shoal bench --baselines ''\n"
    )
    assert shoal_commands(block) == [["demo"], ["generate", "--n", "4", "a | b"], ["bench", "--baselines", ""]]


@pytest.mark.slow
def test_the_commands_of_the_tutorial_run(capsys: pytest.CaptureFixture[str]) -> None:
    console = blocks((DOCS / "tutorial.md").read_text(encoding="utf-8"), "console")
    drafted, plain, check = (command for _, block in console for command in shoal_commands(block))
    texts = []
    for command in (drafted, plain):
        assert run(command) == 0
        texts.append(re.sub(r"^# sample.*$", "", capsys.readouterr().out, flags=re.MULTILINE))
    assert texts[0] == texts[1]  # the same samples with and without the drafter
    assert run([check[0], "--help", *check[1:]]) == 0  # it measures for minutes: tests/cli/test_check_command.py runs it


def words_by_page(text: str) -> dict[str, set[str]]:
    """What each page of help says: options, defaults and sentences; neither their frames nor the kinds of values."""
    pages = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    plain = [re.sub(r"<[^>]*>|\[x[<>=][^\]]*\]|\b[A-Z]{2,}\b|[│╭╮╰╯─]", " ", page) for page in pages]
    return {page.partition("\n")[0]: {*words.split()} for page, words in zip(pages, plain, strict=True)}


def test_the_help_page_is_what_the_program_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the version of Typer makes of it."""
    for name in ("MAX_WIDTH", "COLOR_SYSTEM", "FORCE_TERMINAL"):
        monkeypatch.setattr(rich_utils, name, getattr(rich_utils, name))  # rendering sets them
    written, said = words_by_page((DOCS / "help.txt").read_text(encoding="utf-8")), words_by_page(render())
    assert written == said, "docs/help.txt is out of date: run python scripts/help_pages.py"
    assert {"--max-new-tokens", "--temperature"} <= said["shoal generate --help"]


def test_the_page_of_the_modules_is_what_their_docstrings_say() -> None:
    found = module_map.PAGE.read_text(encoding="utf-8")
    assert found == module_map.page(), "docs/explanation/modules.md is out of date: run python scripts/module_map.py"
    listed = re.findall(r"^ *- `(\w+\.py)`", found, flags=re.MULTILINE)
    assert sorted(listed) == sorted(
        file.name for file in module_map.PACKAGE.rglob("*.py") if not file.name.startswith("__") and "data" not in file.parts
    )


# ── links and names ─────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_links_lead_to_files_and_headings() -> None:
    assert {os.path.relpath(page, ROOT): found for page in PAGES if (found := [*broken_links(page)])} == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A title: `x`\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-title-x) [b](other.md#no-heading) [c](gone.md) [d](#here) [e](https://x.y/gone.md)")
    assert list(broken_links(page)) == ["other.md#no-heading", "gone.md", "#here"]


RESULTS = re.compile(r"benchmarks/results/[\w.-]+\.json")
COMMAND = re.compile(r"\b((?:benchmarks|training)/[\w/]+\.(?:py|sh))|shoal \w+|make \w+")
COMMIT, DATE = re.compile(r"`[0-9a-f]{7,40}`"), re.compile(r"\b20\d\d-\d\d-\d\d\b")


def tables_of_unknown_origin(page: Path, root: Path = ROOT) -> Iterator[str]:
    """The sections of a page with a table and no command, or neither a results file of a commit and a date nor both beside the
    command; and those whose files are of changed trees, if they do not say so."""
    for section in re.split(r"^(?=#+ )", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        files = [json.loads((root / name).read_text()) for name in RESULTS.findall(section) if (root / name).exists()]
        scripts = [match[1] for match in COMMAND.finditer(section) if not match[1] or (root / match[1]).exists()]
        machines = [file["machine"] for file in files]
        dated = any(one["commit"] and one["date"] for one in machines) or (COMMIT.search(section) and DATE.search(section))
        honest = "changes" in section or not any("dirty" in one["commit"] for one in machines)
        if "\n| " in section and not (scripts and dated and honest):
            yield section.partition("\n")[0]


def test_tables_name_their_file_or_their_command_and_commit(tmp_path: Path) -> None:
    pages = sorted((DOCS / "measurements").glob("*.md"))
    assert {page.name: found for page in pages if (found := [*tables_of_unknown_origin(page)])} == {}
    clean, changed = (f"benchmarks/results/{name}.json" for name in ("clean", "changed"))
    (tmp_path / clean).parent.mkdir(parents=True)
    (tmp_path / "benchmarks" / "quality.sh").touch()
    for name, commit in ((clean, "0123456789ab"), (changed, "0123456789ab-dirty")):
        (tmp_path / name).write_text(json.dumps({"machine": {"commit": commit, "date": "2026-01-01"}}))
    (tmp_path / "page.md").write_text(
        "# a\n\n| x |\n\n`python benchmarks/gone.py`, `1234567`, 2026-01-01\n\n## b\n\n| x |\n\n[b](benchmarks/results/gone.json)\n"
        "## c\n\n`make demo`, commit `1234567`, 2026-01-01:\n\n| x |\n\n## d\n\n`make demo`, 2026-01-01\n\n| x |\n"
        f"## e\n\n| x |\n\n[e]({clean})\n\n## f\n\n| x |\n\n`benchmarks/quality.sh`, [f]({clean})\n"
        f"## g\n\n| x |\n\n`benchmarks/quality.sh`, [g]({changed})\n\n## h\n\n| x |\n\n`make demo`, with changes, [h]({changed})\n"
    )
    assert [*tables_of_unknown_origin(tmp_path / "page.md", tmp_path)] == ["# a", "## b", "## d", "## e", "## g"]


def test_pages_named_in_code_exist() -> None:
    folders = (ROOT / name for name in ("src", "tests", "benchmarks", "scripts"))
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".sh")]
    named = {
        (file, name)
        for file in files
        for name in re.findall(r"(?<![\w/])docs/[\w./-]+\.(?!py\b)\w+", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert not [f"{file.relative_to(ROOT)}: {name}" for file, name in named if not (ROOT / name).exists()]


def test_names_of_the_package_in_pages_exist() -> None:
    pages = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "benchmarks"]
    named = {name for page in pages for name in re.findall(r"`(shoal(?:\.\w+)+)", page.read_text(encoding="utf-8"))}
    assert len(named) > 5
    other = {"shoal.notes", "shoal.drafters"}  # a field of answers, a group of entry points
    assert not [name for name in named - other if not _resolves(name)]


def _resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_index_has_every_page_and_the_api_page_every_public_name() -> None:
    listed = re.findall(r"\]\((?!\.\./)([^)#]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if page.name != "index.md"
    )
    page = (DOCS / "reference" / "python-api.md").read_text(encoding="utf-8")
    assert not [name for name in shoal.__all__ if f"`{name}" not in page]
