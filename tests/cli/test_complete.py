"""`shoal complete`, and texts between others: where the cursor is, what is asked of the model, what is shown.

Tests of: cli.complete, constraints.fim.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commands import SAMPLE_KEYS, Command, Models, press_ctrl_c, shoal, tiny
from shoal.api import Shoal
from shoal.cli import complete
from shoal.cli.complete import NO_NEWLINE, diff, split_at
from shoal.constraints import fim, members
from shoal.constraints.syntax.tree_middles import CursorTrees, tree_sitter_language
from shoal.errors import RequestError
from shoal.loader import load
from shoal.testing import tiny_model, tiny_tokenizer
from shoal.types.arguments import line_end, with_line_ends

__all__ = ["shoal", "tiny"]  # fixtures
TEXT = "def f(a):\n    retu\n\n\nx = f(1)\n"
TOKENIZER = tiny_tokenizer()


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tokens of the tiny tokenizer those for filling in."""
    monkeypatch.setattr(fim, "TOKENS", (("Q", "W", "Z"),))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"  # its name says no language
    path.write_text(TEXT)
    return path


# ── the cursor ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cut", range(len(TEXT) + 1))
def test_every_place_of_a_file_has_a_name(file: Path, cut: int) -> None:
    line, column = TEXT[:cut].count("\n") + 1, cut - (TEXT.rfind("\n", 0, cut) + 1) + 1
    assert split_at(file, f"{line}:{column}") == (TEXT[:cut], TEXT[cut:])


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("2", "two numbers from 1"), ("0:1", "two numbers from 1"), ("1:0", "two numbers from 1"), ("7:1", "has 6 lines"),
        ("2:10", "its last column is 9"),
    ],
)  # fmt: skip
def test_cursors_outside_are_refused(shoal: Command, tiny: Models, file: Path, at: str, words: str) -> None:
    answer = shoal("complete", file, "--at", at, "--model", tiny.target)
    assert answer.code == 2
    assert words in answer.err


def test_a_file_that_is_not_there_is_refused(shoal: Command, tmp_path: Path) -> None:
    answer = shoal("complete", tmp_path / "no.py", "--at", "1:1")
    assert (answer.code, "cannot read file" in answer.err) == (2, True)


# ── texts between others ────────────────────────────────────────────────────────────────────────────────────────────


def test_suffixes_are_those_of_their_prompts(fills: None) -> None:
    made = load(tiny_model("llama"), tokenizer=TOKENIZER, compile="off")
    options: dict[str, Any] = dict(temperature=0, max_new_tokens=6)
    both = made.generate(["ab", "cd"], suffix=["x", "yz"], **options)
    alone = [made.generate([prompt], suffix=suffix, **options)[0] for prompt, suffix in (("ab", "x"), ("cd", "yz"))]
    assert [o.samples[0].token_ids for o in both] == [o.samples[0].token_ids for o in alone]
    assert [o.prompt for o in both] == ["ab", "cd"]
    naive = made.generate([fim.fill_in_middle(TOKENIZER, "ab", "x")], **options)[0]
    assert made.generate(["ab"], suffix="x", align=False, **options)[0].samples[0].token_ids == naive.samples[0].token_ids
    # Aligned, unless told otherwise: what was taken away is written again, and is no part of the text.
    ids, end = TOKENIZER.encode, fim.middle_prompt(TOKENIZER, "ab", "x").end
    assert alone[0].prompt_ids != naive.prompt_ids
    assert TOKENIZER.decode(alone[0].samples[0].token_ids).startswith(
        TOKENIZER.decode(naive.prompt_ids[len(ids("")) + 1 : end][-2:])
    )


@pytest.mark.parametrize(
    ("prompts", "suffix", "words"),
    [
        ([[1, 2]], "x", "texts"),
        (["a", "b"], ["x"], "2 prompts and 1 suffixes"),
        ([], "x", "texts"),
        ("a", "x", "trained|no fill"),
    ],
)
def test_wrong_suffixes_are_refused(prompts: Any, suffix: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        load(tiny_model("llama"), tokenizer=TOKENIZER, compile="off").generate(prompts, suffix=suffix)


LINES = "".join(f"line {i} of it\n" for i in range(40))


@pytest.mark.parametrize("room", [1, 7, 30, 100, 150, 10_000])
@pytest.mark.parametrize(
    ("before", "behind"), [(LINES, LINES), (LINES, ""), ("", LINES), ("x" * 300, "y" * 300), (LINES, "\n")]
)
def test_the_nearest_text_is_kept(room: int, before: str, behind: str) -> None:
    left, right = fim.nearest(TOKENIZER, before, behind, room)
    size = len(TOKENIZER.encode(left, add_special_tokens=False)) + len(TOKENIZER.encode(right, add_special_tokens=False))
    assert size <= room
    assert before.endswith(left)
    assert behind.startswith(right)
    if room == 10_000:
        assert (left, right) == (before, behind)
    if room == 100 and before == behind == LINES:
        assert left.startswith("line ")
        assert right.endswith("\n")
        assert len(left) > 2 * len(right) > 20
    if room == 100 and not (before and behind):
        assert size > 80


# ── what is shown ───────────────────────────────────────────────────────────────────────────────────────────────────


def patched(old: str, lines: list[str]) -> str:
    """A text after a unified diff of one hunk, as `patch` applies it."""
    found = re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@", lines[2])
    assert found is not None
    count = int(found[2] or 1)
    start = int(found[1]) - (count > 0)
    sides: dict[str, list[str]] = {"-": [], "+": []}
    last: list[list[str]] = []
    for line in lines[3:]:
        if line == NO_NEWLINE:
            for side in last:
                side[-1] = side[-1].removesuffix("\n")
            continue
        last = [sides[name] for name in ("-+" if line[0] == " " else line[0])]
        for side in last:
            side.append(line[1:] + "\n")
    kept = old.splitlines(keepends=True)
    assert kept[start : start + count] == sides["-"]
    return "".join(kept[:start] + sides["+"] + kept[start + count :])


@pytest.mark.parametrize("text", ["rn a", "rn a\n", "\n\n", "é"])
@pytest.mark.parametrize("cut", [0, 18, len(TEXT)])
@pytest.mark.parametrize("whole", [TEXT, TEXT[:-1], ""])
def test_diffs_lead_from_the_old_file_to_the_new_one(text: str, cut: int, whole: str) -> None:
    before, behind = whole[:cut], whole[cut:]
    lines = diff("/tmp/a.py", before, text, behind)
    assert lines[:2] == ["--- a/tmp/a.py", "+++ b/tmp/a.py"]
    assert patched(whole, lines) == before + text + behind


@pytest.mark.parametrize(
    "name", ["x.py", "a b.py", "sub dir/é.py", 'q"uote.py', "back\\slash.py", "tab\tname.py", "blank.py "]
)
@pytest.mark.parametrize("tool", [["git", "apply", "-"], ["patch", "-p1", "--binary", "-s"]], ids=lambda tool: tool[0])
def test_tools_apply_a_diff_whatever_the_name_and_ends_of_the_file(tool: list[str], name: str, tmp_path: Path) -> None:
    if shutil.which(tool[0]) is None:
        pytest.skip(f"{tool[0]} is not installed")
    file = tmp_path / "w" / name
    file.parent.mkdir(parents=True)
    for old in ("a\r\n  b\r\n", "a\r\nb", "a\rb\r\n", "a\u2028b\x0c\r\nc\x85\r\n", "a\r\r\n", "\ufeffa\r\nb\r", "\r\n"):
        file.write_bytes(old.encode())
        lines = diff(name, old[:2], "x\r\n    y", old[2:])
        subprocess.run(
            tool, cwd=tmp_path / "w", input="".join(f"{line}\n" for line in lines).encode(), check=True,
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)},
        )  # fmt: skip
        assert file.read_bytes().decode() == old[:2] + "x\r\n    y" + old[2:]


def test_suggestions_are_ranked_and_shown_as_diffs(
    shoal: Command, tiny: Models, file: Path, fills: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ["complete", file, "--at", "2:9", "-n", 4, "--seed", 3, "--max-new-tokens", 12, *tiny.pair]
    found = shoal(*ask, "--json")
    assert found.code == 0
    assert [set(sample) for sample in found.json["suggestions"]] == [SAMPLE_KEYS] * 4
    keys = [(s["finish_reason"] != "eos", -s["mean_logprob"]) for s in found.json["suggestions"]]
    assert keys == sorted(keys)
    shown = shoal(*ask)
    assert shown.code == 0
    assert "\x1b" not in shown.out
    assert shown.out.count("# suggestion ") == shown.out.count("-    retu\n") == 4
    best = found.json["suggestions"][0]["text"].split("\n")[0].rstrip()
    assert shown.out.split("+    retu")[1].startswith(best)
    coloured = io.StringIO()
    monkeypatch.setattr("shoal.cli.complete.stdout", lambda: Console(file=coloured, force_terminal=True, width=80))
    assert shoal(*ask).code == 0
    assert "\x1b[31m-    retu" in coloured.getvalue()
    assert "\x1b[32m+    retu" in coloured.getvalue()


def test_a_file_with_the_line_ends_of_windows(shoal: Command, tiny: Models, file: Path, fills: None) -> None:
    """The model reads line feeds, and the diff applies to the file; its suggestion ends lines as the file does."""
    ask = ["complete", file, "--at", "2:9", "-n", 4, "--seed", 3, "--max-new-tokens", 12, *tiny.pair]
    plain, old = shoal(*ask, "--json").json["suggestions"], TEXT.replace("\n", "\r\n")
    file.write_bytes(old.encode())
    found = shoal(*ask, "--json").json["suggestions"]
    assert [one["text"] for one in found] == [one["text"].replace("\n", "\r\n") for one in plain]
    assert [one["token_ids"] for one in found] == [one["token_ids"] for one in plain]
    before, behind = split_at(file, "2:9")
    assert before + behind == old
    for text in ("rn a\r\n    b", "x"):
        assert patched(old, diff("/tmp/a.py", before, text, behind)) == before + text + behind
    assert shoal(*ask).out.count("-    retu\r\n") == 4
    file.write_bytes(b"\xef\xbb\xbf" + old.encode())  # a byte order mark is read over, and stays
    assert [one["token_ids"] for one in shoal(*ask, "--json").json["suggestions"]] == [one["token_ids"] for one in plain]


@pytest.mark.parametrize(
    ("texts", "end"),
    [
        (("a\r\nb", "c\n"), "\r\n"), (("a\nb\n", "c\r\n"), "\n"), (("a", ""), "\n"), (("a\r", "b\r"), "\n"),
        (("a\r\n",), "\r\n"), (("a\n", "b\r\nc\r\n"), "\r\n"),
    ],
)  # fmt: skip
def test_a_suggestion_ends_lines_as_most_of_the_file(texts: tuple[str, ...], end: str) -> None:
    assert line_end(*texts) == end


@pytest.mark.parametrize(("at", "cut"), [("1:1", 0), ("1:2", 1), ("2:1", 3), ("2:3", 5)])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("stdin", [False, True])
def test_a_byte_order_mark_is_no_character(
    mark: str, at: str, cut: int, stdin: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Editors do not count it, and nothing may stand before it."""
    text = f"{mark}x\r\nyz"
    (tmp_path / "a.py").write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    assert split_at(Path("-") if stdin else tmp_path / "a.py", at) == (text[: len(mark) + cut], text[len(mark) + cut :])


APPLIERS = (("patch", "-p1", "--batch"), ("git", "apply"))


@pytest.mark.parametrize("applier", APPLIERS, ids=lambda command: command[0])
@pytest.mark.parametrize("name", ["a.py", "./a.py", "a folder/of mine.py", "é.py", "one/../a.py"])
@pytest.mark.parametrize(
    ("old", "cut", "text"),
    [
        ("a\r\n    \r\nb\r\n", 7, "x = 1\n    \n    y = 2"), ("a\r\nb = ", 7, "1\n"), ("a\rb\r\nc", 6, "d"),
        ("a\nb\n", 2, "c\n"),
    ],
)  # fmt: skip
def test_diffs_apply(tmp_path: Path, old: str, cut: int, text: str, name: str, applier: tuple[str, ...]) -> None:
    """By the commands themselves, under names that they read each in its way; a lone carriage return stays."""
    if shutil.which(applier[0]) is None:
        pytest.skip(f"{applier[0]} is not installed")
    file = tmp_path / name
    (tmp_path / "one").mkdir()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(old.encode())
    before, behind = old[:cut], old[cut:]
    new = with_line_ends(text, line_end(before, behind))
    made = "\n".join([f"# suggestion of {name}", *diff(name, before, new, behind), ""])
    command = [*applier] if applier[0] == "patch" else [applier[0], "-c", "core.autocrlf=false", *applier[1:]]
    subprocess.run(command, cwd=tmp_path, input=made.encode(), check=True, capture_output=True)
    assert file.read_bytes() == (before + new + behind).encode()


def test_a_model_that_cannot_fill_in_continues_the_end_of_a_file(shoal: Command, tiny: Models, file: Path) -> None:
    answer = shoal("complete", file, "--at", "2:9", "--model", tiny.target)
    assert answer.code == 2
    assert "text behind the cursor" in answer.err
    file.write_text("x = 1\n\n", encoding="utf-8")
    ask = ["--model", tiny.target, "-n", 1, "--max-new-tokens", 4, "--greedy", "--json"]
    (sample,) = shoal("complete", file, "--at", "1:6", "--no-align", *ask).json["suggestions"]
    (plain,) = shoal("generate", "-p", "x = 1", *ask).json["prompts"][0]["samples"]
    assert sample["token_ids"] == plain["token_ids"]
    file.write_text("", encoding="utf-8")
    assert "no text before the cursor" in shoal("complete", file, "--at", "1:1", "--model", tiny.target).err


def test_long_files_are_cut_to_the_context(shoal: Command, tiny: Models, file: Path, fills: None) -> None:
    file.write_text(LINES * 40, encoding="utf-8")
    ask = ["complete", file, "--model", tiny.target, "-n", 1, "--max-new-tokens", 4, "--json"]
    assert len(shoal(*ask, "--at", "800:3").json["suggestions"]) == 1
    assert "leaves no space" in shoal(*ask, "--at", "800:3", "--max-new-tokens", 100_000).err


def test_ctrl_c_keeps_what_finished(
    shoal: Command, tiny: Models, file: Path, fills: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    press_ctrl_c(monkeypatch, complete, 10)
    answer = shoal("complete", file, "--at", "2:9", "--model", tiny.target, "-n", 2, "--seed", 1, "--max-new-tokens", 60)
    assert answer.code == 130
    assert "interrupted: 0 of 2 suggestions finished" in answer.err
    assert "# suggestion" not in answer.out


@pytest.fixture
def loaded(bundled: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled pair is there at once."""
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda self: bundled)


@pytest.mark.slow
def test_suggestions_parse_under_a_syntax(shoal: Command, loaded: None, tmp_path: Path) -> None:
    """The whole file counts, also where the model sees its nearest parts alone."""
    path = tmp_path / "b.py"
    path.write_text(LINES.replace("line", "x = 1  # line") * 8 + "def f(a):\n    retu\n\nx = f(1)\n")
    ask = ["complete", path, "--at", "322:9", "-n", 4, "--seed", 1, "--syntax", "python", "--max-new-tokens", 24]
    found = shoal(*ask, "--json").json["suggestions"]
    before, behind = split_at(path, "322:9")
    kinds = [suggestion["syntax"] for suggestion in found]
    assert kinds == sorted(kinds, key=["complete", "cut", "incomplete"].index)
    parsing = [suggestion for suggestion in found if suggestion["syntax"] != "incomplete"]
    assert parsing
    for suggestion in parsing:
        ast.parse(before + suggestion["text"] + behind)
    path.write_text("def (\n")
    assert "not the beginning of a Python program" in shoal("complete", path, "--at", "1:6", "--syntax", "python").err
    path.write_text('{"name": "sh", "numbers": []}\n')
    ask = ["complete", path, "--at", "1:13"]
    for suggestion in shoal(*ask, "-n", 2, "--seed", 1, "--syntax", "json", "--json").json["suggestions"]:
        assert suggestion["syntax"] in ("complete", "cut")
        json.loads('{"name": "sh' + suggestion["text"] + '", "numbers": []}')
    assert "syntax must be one of python, json" in shoal(*ask, "--syntax", "ruby").err
    assert "members are those of Python" in shoal(*ask, "--syntax", "json", "--members", "--model", "nowhere").err


def test_the_name_of_a_file_says_its_syntax(
    shoal: Command, loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless `--syntax` does; suggestions are ranked by what the whole file then is."""
    path = tmp_path / "é.js"
    before, behind = 'const ü = "é";\r\nfunction f(a) {\r\n\treturn g(a, ', ");\r\n}\r\n"
    path.write_bytes((before + behind).encode())
    ask = ["complete", path, "--at", "3:14", "-n", 6, "--seed", 1, "--max-new-tokens", 16, "--json"]
    answer = shoal(*ask)
    found = answer.json["suggestions"]
    kinds = [suggestion["syntax"] for suggestion in found]
    assert kinds == sorted(kinds, key=["complete", "cut", "incomplete"].index)
    assert "cut" in kinds
    for suggestion in found:
        whole = before + suggestion["text"] + behind
        assert _faults(whole) == (suggestion["syntax"] == "incomplete")
    assert answer.err == ""
    named = shoal(*ask, "--syntax", "javascript").json["suggestions"]
    assert [one["text"] for one in named] == [one["text"] for one in found]
    free = shoal(*ask, "--syntax", "none").json["suggestions"]
    assert all("syntax" not in one for one in free)
    assert not all(not _faults(before + one["text"] + behind) for one in free)
    weighed = shoal(*ask, "--exact", "weights")
    assert (weighed.code, "syntax" in weighed.json["suggestions"][0]) == (0, False)
    assert "may not parse: there is no check of syntax beside --exact" in weighed.err
    assert "may not parse" not in shoal(*ask, "--syntax", "none", "--exact", "weights").err
    tree_sitter_language.cache_clear()
    monkeypatch.setitem(sys.modules, "tree_sitter_javascript", None)
    unchecked = shoal(*ask)
    assert [one["text"] for one in unchecked.json["suggestions"]] == [one["text"] for one in free]
    assert "may not parse: syntax='javascript' needs tree-sitter" in unchecked.err
    assert "pip install '.[syntax]'" in unchecked.err
    refused = shoal(*ask, "--syntax", "javascript")
    assert (refused.code, "pip install '.[syntax]'" in refused.err) == (2, True)


def _faults(source: str) -> bool:
    return bool(CursorTrees("javascript", source, "")._base.root_node.has_error)


def test_a_python_file_that_no_program_begins_with_is_not_checked(shoal: Command, loaded: None, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = = \ny = \n")
    answer = shoal("complete", path, "--at", "2:5", "-n", 2, "--seed", 1, "--max-new-tokens", 4, "--json")
    assert [one.get("syntax") for one in answer.json["suggestions"]] == [None, None]
    assert "not the beginning of a Python program" in answer.err


@pytest.mark.parametrize("syntax", [(), ("--syntax", "python")])
def test_only_members_that_exist(
    shoal: Command, loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syntax: tuple[str, ...]
) -> None:
    """A cursor inside a name behind a dot; what is before it is written again."""
    asked = []

    def names(before: str, behind: str) -> list[str]:
        asked.append((before, behind))
        return ["count", "contents"]

    monkeypatch.setattr(members, "jedi_analyser", lambda: names)
    path = tmp_path / "a.py"
    path.write_text("def f(text):\n    return text.con\n\n\nx = f(1)\n")
    ask = ("complete", path, "--at", "2:20", "-n", 4, "--seed", 0, "--max-new-tokens", 6, *syntax)
    free = {sample["text"] for sample in shoal(*ask, "--json").json["suggestions"]}
    assert not all(text.startswith(("t", "e")) for text in free)
    found = [sample["text"] for sample in shoal(*ask, "--members", "--json").json["suggestions"]]
    assert len(found) == 4
    assert all(re.match(r"(tents|tent?|te)\b", text) or text in ("", "t", "te") for text in found), found
    assert ("def f(text):\n    return text.", "\n\n\nx = f(1)\n") in asked


def test_members_without_jedi_are_refused_before_a_model_is_loaded(
    shoal: Command, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jedi", None)
    answer = shoal("complete", file, "--at", "1:6", "--members", "--model", "nowhere")
    assert (answer.code, "pip install '.[members]'" in answer.err) == (2, True)
