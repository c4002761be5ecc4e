"""The runs of a real model's quality: stopped after minutes, gone on with, and shown from the files that there are.

Tests of: evaluation.journal.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import quality_tables
import summaries
from quality_tables import PAGE, between, keep, kept, pages, pair_pages, passes, written
from shoal.evaluation.tasks import Document, read_documents

SCRIPT = Path(quality_tables.__file__).with_name("quality_real.sh")
FAKE = """#!/bin/sh
trap 'echo "stopped $place" >>{log}; exit 130' INT
for place; do :; done
mkdir -p "$place"
echo "$*" >>{log}
while [ ! -e {go} ]; do sleep 0.05; done
: >"$place/summary.json"
"""


def run(folder: Path, *options: str, **variables: str) -> tuple[int, list[str]]:
    """Two sets with two numbers of samples each, by a stand-in that ends once there is a file `go`."""
    fake, log = folder / "shoal", folder / "log"
    fake.write_text(FAKE.format(log=log, go=folder / "go"))
    fake.chmod(0o755)
    log.write_text("")
    env = {"SHOAL": str(fake), "ROWS": "8 1", "SETS": "humaneval mbpp-chat", "PATH": "/usr/bin:/bin"} | variables
    command = ["sh", str(SCRIPT), *options, "MODEL", "HUMANEVAL", "MBPP", str(folder / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, log.read_text().splitlines()


def test_time_that_is_over_ends_a_run_and_the_next_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "out" / "humaneval-8"
    (tmp_path / "shortened").write_text(SCRIPT.read_text().replace("$2 * 60", "$2"))
    assert run(tmp_path, "--minutes", "0") == (3, [])
    short = subprocess.run(
        ["sh", str(tmp_path / "shortened"), "--minutes", "1", "MODEL", "HUMANEVAL", "MBPP", str(tmp_path / "out")],
        env={"SHOAL": str(tmp_path / "shoal"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (short.returncode, "time is over in humaneval, n = 8" in short.stderr) == (3, True)
    assert (tmp_path / "log").read_text().splitlines()[-1] == f"stopped {place}"
    (tmp_path / "go").touch()
    code, asked = run(tmp_path, "--minutes", "5")
    assert (code, [one.rsplit("/", 1)[1] for one in asked]) == (
        0,
        ["humaneval-8", "humaneval-1", "mbpp-chat-8", "mbpp-chat-1"],
    )
    assert "--methods plain,plain-single,single,batched -n 8" in asked[0]
    assert "eval mbxp --data MBPP --limit 200 --chat --model MODEL" in asked[3]
    assert "--methods plain,batched -n 1" in asked[3]
    assert run(tmp_path) == (0, [])  # all are there


def test_summaries_are_a_set_where_their_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    code, asked = run(tmp_path, SETS="", SUMMARIES="FILE", ROWS="8")
    assert (code, [one.rsplit("/", 1)[1] for one in asked]) == (
        0,
        ["summaries-8", "humaneval-8", "humaneval-chat-8", "mbpp-8", "mbpp-chat-8"],
    )
    assert "eval summarize --data FILE --chat --model MODEL" in asked[0]
    assert ["--max-new-tokens 96 " in one for one in asked] == [True, False, False, False, False]
    assert "summaries-8" not in run(tmp_path, SETS="", ROWS="1")[1]


def test_papers_become_documents_with_the_sentence_of_an_aspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"challenge": "It was hard.", "approach": "They tried.", "outcome": "It is easy."}
    sentences = {"abstract": ["We try ( twice ) .", "It works , mostly ."], "introduction": ["Long ago ."]}
    papers, file = tmp_path / "test.jsonl", tmp_path / "build" / "summaries.jsonl"
    papers.write_text("".join(json.dumps({"id": str(i), "summary": said, "sentences": sentences}) + "\n" for i in range(2)))
    for options, summary in (([], "They tried."), (["--aspect", "outcome"], "It is easy.")):
        monkeypatch.setattr("sys.argv", ["summaries.py", str(papers), str(file), *options])
        summaries.main()
        assert read_documents(file) == [Document(str(i), "We try (twice). It works, mostly.", summary) for i in range(2)]
    assert capsys.readouterr().out == f"2 documents in {file}\n" * 2


def test_an_error_ends_all_runs_with_its_code(tmp_path: Path) -> None:
    fake = tmp_path / "shoal"
    fake.write_text(f"#!/bin/sh\necho x >>{tmp_path / 'log'}\nexit 2\n")
    fake.chmod(0o755)
    env = {"SHOAL": str(fake), "PATH": "/usr/bin:/bin"}
    for options in ((), ("--minutes", "5")):
        command = ["sh", str(SCRIPT), *options, "MODEL", "HUMANEVAL", "MBPP", str(tmp_path / "out")]
        assert subprocess.run(command, env=env, timeout=120).returncode == 2
    assert (tmp_path / "log").read_text() == "x\nx\n"


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(n: int, shift: float = 0.0) -> dict[str, Any]:
    def line(method: str, budget: float | None, share: float) -> dict[str, Any]:
        names = ("passed_first", "passed_all", "pass@1", "finished", "seconds")
        means = (share, share + 0.05, share / 2, share + 0.3, 1.234 + shift)
        return {
            "method": method,
            "budget": budget,
            **{name: {"mean": mean} for name, mean in zip(names, means, strict=True)},
        }

    shares = {0.5: 0.1, 1: 0.2, 2: 0.3, 3: 0.9, 4: 0.4, None: 0.5}
    methods = ["plain", "batched"]
    return {
        "settings": {"model": "/some/where/small", "methods": methods},
        "machine": {"commit": "0123456789ab", "date": "2026-01-02"},
        "problems": 7,
        "scores": ["passed"],
        "lines": [line(method, budget, share + shift) for method in methods for budget, share in shares.items()],
        "against": [{"method": "batched", "other": "plain", "samples": 7 * n, "same_ids": 7 * n - 1}],
    }


def test_tables_are_of_the_runs_that_have_ended(tmp_path: Path) -> None:
    runs, results = tmp_path / "runs", tmp_path / "results"
    results.mkdir()
    for name, n in (("mbpp-chat", 16), ("mbpp-chat", 8), ("humaneval", 1)):
        (runs / f"{name}-{n}").mkdir(parents=True)
        (runs / f"{name}-{n}" / "summary.json").write_text(json.dumps(summary(n)))
    (runs / "mbpp-1").mkdir()  # has not ended
    keep(runs, results)
    assert [file.name for file in sorted(results.iterdir())] == [
        f"quality-smollm2-{name}.json" for name in ("humaneval-1", "mbpp-chat-16", "mbpp-chat-8")
    ]
    found = kept(results)
    assert {name: list(one) for name, one in found.items()} == {"humaneval": [1], "mbpp-chat": [8, 16]}
    assert found["humaneval"][1]["settings"]["model"] == "small"
    page = written(f"before\n{quality_tables.BEGIN}old\n{quality_tables.END}after\n", found)
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert written(page, found) == page
    row = "10.0 / 15.0 | 20.0 / 25.0 | 30.0 / 35.0 | 40.0 / 45.0 | 50.0 / 55.0 | 25.0 | 50.0 | 1.23 |"
    assert f"| 8 | plain | {row}  |\n| 8 | batched | {row} 55 of 56 |\n| 16 | plain | {row}  |" in page
    assert "[n = 16](../../benchmarks/results/quality-smollm2-mbpp-chat-16.json), commit `0123456789ab`, 2026-01-02" in page
    assert "quality-smollm2-mbpp-chat.png" in page
    with pytest.raises(SystemExit, match="no marks"):
        written("a page", found)


def test_a_set_of_which_nothing_passes_has_no_plot() -> None:
    flat = summary(1)
    for line in flat["lines"]:
        line["passed_all"]["mean"] = 0.0
    assert passes({1: flat, 2: summary(2)})
    assert not passes({1: flat})
    (text,) = pages({"mbpp": {1: flat}})
    assert "png" not in text


def test_tables_of_summaries_have_rouge_2_in_place_of_passing() -> None:
    compared = summary(8) | {"scores": ["rouge2", "rougeL"]}
    for line in compared["lines"]:
        del line["pass@1"]
        for which in ("first", "all"):
            line[f"rouge2_{which}"] = line.pop(f"passed_{which}")
            line[f"rougeL_{which}"] = {"mean": 0.99}
    (text,) = pages({"summaries": {8: compared}})
    assert "![ROUGE-2@First and ROUGE-2@All over the time budget]" in text
    assert "| no budget | finished by 1 s, % | all there after, s | ids of plain |" in text
    assert "| 8 | plain | 10.0 / 15.0 | 20.0 / 25.0 | 30.0 / 35.0 | 40.0 / 45.0 | 50.0 / 55.0 | 50.0 | 1.23 |  |" in text


def test_the_page_has_the_tables_of_the_files() -> None:
    found = kept()
    text = PAGE.read_text("utf-8")
    assert found
    assert written(text, found) == text
    assert all(
        (quality_tables.RESULTS / f"quality-smollm2-{name}.png").exists() for name, runs in found.items() if passes(runs)
    )
    pair = quality_tables.kept_pair()
    assert between(text, quality_tables.PAIR_BEGIN, quality_tables.PAIR_END, pair_pages(pair)) == text


def test_tables_of_the_pair_name_their_files_and_tell_methods_apart(tmp_path: Path) -> None:
    runs, results = tmp_path / "runs", tmp_path / "results"
    results.mkdir()
    means = {"mean": 0.01, "low": -0.02, "high": 0.03, "p": 0.5}
    metric = {
        "better": 3,
        "worse": 1,
        "gain": {"difference": 0.25, "budget": 0.125},
        "loss": {"difference": 0.0, "budget": 1},
    }
    for name in (*quality_tables.SEEDED, *quality_tables.FRESH):
        compared = summary(8)
        compared["machine"]["commit"] += "-dirty" * (name == "fresh-0.8")
        compared["against"][0] |= {"first": metric, "all": metric, "pass@1": means}
        (runs / name).mkdir(parents=True)
        (runs / name / "summary.json").write_text(json.dumps(compared))
    quality_tables.keep_pair(runs, results)
    text = "\n".join(pair_pages(quality_tables.kept_pair(results)))
    assert text.count("(commit `0123456789ab`, 2026-01-02)") == 3
    assert text.count("(commit `0123456789ab` with changes, 2026-01-02)") == 1
    heads = "| method | 0.5 s | 1 s | 2 s | 3 s | 4 s | no budget | all there after, s |"
    assert text.count(heads) == 2
    assert "| batched: finished, % | 40.0 | 50.0 | 60.0 | 120.0 | 70.0 | 80.0 |  |" in text
    assert "| 0.2 | batched, plain | Pass@All | 3 | 1 | +25.0 (0.12 s) | 0 | 55 of 56 |" in text
    assert "| 0.8 | pass@1 | 25.00 | 25.00 | +1.00 [-2.00, +3.00] | 0.50 |" in text


def test_a_table_has_the_budgets_at_which_methods_differ_most(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = summary(8)
    for line in compared["lines"]:
        line["finished"]["mean"] = {0.5: 0.1, 2: 0.3, 4: 0.2}.get(line["budget"], 0.0) * (line["method"] == "batched")
    monkeypatch.setattr(quality_tables, "COLUMNS", 2)
    assert quality_tables.telling_budgets(compared) == [2, 4]
