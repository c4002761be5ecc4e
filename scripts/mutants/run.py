"""Runs mutants of a room, so that it shows which wrong changes no test sees.

    python scripts/mutants/run.py sample ROOM [--count N] [--again]
    python scripts/mutants/run.py hand [WORDS of a mutant's room, file or name]

`sample` draws mutants at random among those that mutmut makes of the room's sources (rooms.toml) and runs each against the tests
that call the mutated function. `hand` applies those of by_hand.toml, C and Triton among them, and runs the tests that are named
beside them. Those of equivalent.toml, which no test can see, do not count. Both write build/mutants/ROOM.json and print the diffs
of survivors. `--again` runs only the survivors of the last sample.

Needs mutmut: `pip install -e '.[mutants]'`. `make mutants ROOM=sampling` does all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "mutants"
MESSAGES = [r"^\s*raise ", r"\b(logger|log|warnings)\.\w+\("]
"""Lines whose mutants are left out: the words of messages."""
SELECTED = "not slow and not real"
PYTEST = ["-p", "quickest_first", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", SELECTED]
LIMIT = 240
"""Seconds for a mutant made by hand."""
SEEN = ("killed", "timeout", "segfault")
COPIED = ("src", "tests", "benchmarks", "scripts", "docs", "README.md", "DESIGN.md")


def toml(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def change(diff: str) -> tuple[list[str], list[str]]:
    """The lines that a diff takes away and those that it adds, without indents."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    return ([line[1:].strip() for line in lines if line[0] == "-"], [line[1:].strip() for line in lines if line[0] == "+"])


def reason(module: str, diff: str, equivalents: Sequence[dict[str, str]]) -> str | None:
    """The reason why no test can see that mutant, if equivalent.toml has it."""
    before, after = (" ".join(lines) for lines in change(diff))
    for one in equivalents:
        if (module, before, after) == (one["module"], one["before"], one["after"]):
            return one["reason"]
    return None


# ── mutants of mutmut ───────────────────────────────────────────────────────────────────────────────────────────────


def folder_of(name: str, room: dict[str, Any]) -> Path:
    """A copy of the sources and tests that mutmut may write into, with its configuration."""
    work = BUILD / name
    work.mkdir(parents=True, exist_ok=True)
    for part in COPIED:
        _mirror(ROOT / part, work / part)
    settings = {
        "source_paths": ["src"],
        "only_mutate": room["sources"],
        "do_not_mutate_patterns": MESSAGES,
        "also_copy": [part for part in COPIED if part not in ("src", "tests")],
        "pytest_add_cli_args": PYTEST,
        "pytest_add_cli_args_test_selection": room["tests"],
        "timeout_constant": 5.0,
        "timeout_multiplier": 10.0,
        "use_git_change_detection": False,
        "track_dependencies": False,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (work / "pyproject.toml").write_text(project + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return work


def _mirror(source: Path, target: Path) -> None:
    """Copies what changed and removes what is gone."""
    if source.is_file():
        shutil.copy2(source, target)
        return
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    theirs = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    for path in list(target.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.relative_to(target) not in theirs:
            path.unlink()
            (target.parent / "mutants" / target.name / path.relative_to(target)).unlink(missing_ok=True)
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)


def environment(work: Path, seconds: float) -> dict[str, str]:
    """The sources of the copy come before the installed ones, in the processes of tests as well."""
    paths = [str(work / "mutants" / "src"), str(HERE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # a fork has no threads of the process that it left
    return os.environ | threads | {"PYTHONPATH": os.pathsep.join(paths), "MUTANTS_SECONDS": str(seconds)}


def names_of(work: Path) -> list[str]:
    """The names of all mutants of a folder's sources."""
    os.chdir(work)
    from mutmut.configuration import config
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.file_utils import walk_mutatable_files
    from mutmut.utils.format_utils import get_mutant_name

    config()
    return sorted(
        get_mutant_name(path, name).replace("__init__.", "")
        for path in walk_mutatable_files()
        for name in mutate_file_contents(str(path), path.read_text(encoding="utf-8")).mutant_names
    )


def statuses(work: Path) -> dict[str, str]:
    """How the mutants that ran ended, by name."""
    from mutmut.stats import status_by_exit_code

    ended: dict[str, str] = {}
    for path in (work / "mutants" / "src").rglob("*.py.meta"):
        codes = json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
        ended |= {name: status_by_exit_code[code] for name, code in codes.items() if code is not None}
    return ended


def sample(name: str, count: int | None, again: bool) -> dict[str, Any]:
    """Runs a sample of the mutants of a room."""
    room, report = toml("rooms.toml")[name], BUILD / f"{name}.json"
    work = folder_of(name, room)
    every = names_of(work)
    drawn = random.Random(name).sample(every, min(count or room["sample"], len(every)))
    last: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if again else {}
    tried = [mutant for mutant in drawn if not again or last["status"].get(mutant) not in SEEN]
    command = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()", "run", "--max-children", "1", *tried]
    with (BUILD / f"{name}.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=work, env=environment(work, room["seconds"]), stdout=log, stderr=log, check=True)
    ended = statuses(work)
    status = last.get("status", {}) | {mutant: ended.get(mutant, "no tests") for mutant in tried}
    return {
        "room": name,
        "of": len(every),
        "status": {mutant: status[mutant] for mutant in drawn},
        **_survivors(work, status),
    }


def _survivors(work: Path, status: dict[str, str]) -> dict[str, Any]:
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    equivalents = toml("equivalent.toml").get("mutant", [])
    survivors, equivalent = {}, {}
    for mutant in (mutant for mutant, how in status.items() if how not in SEEN):
        diff = get_diff_for_mutant(mutant)
        why = reason(mutant.rpartition(".")[0], diff, equivalents)
        (survivors if why is None else equivalent)[mutant] = diff if why is None else why
    return {"survivors": survivors, "equivalent": equivalent}


# ── mutants made by hand ────────────────────────────────────────────────────────────────────────────────────────────


def pattern(text: str) -> re.Pattern[str]:
    """Matches a text whatever its line breaks and spaces."""
    words = re.findall(r"\w+|[^\w\s]", text)
    joints = (r"\s+" if left[-1].isalnum() and right[0].isalnum() else r"\s*" for left, right in pairwise(words))
    return re.compile(
        re.escape(words[0]) + "".join(joint + re.escape(word) for joint, word in zip(joints, words[1:], strict=True))
    )


def by_hand(words: str) -> Iterator[dict[str, Any]]:
    """Those whose room, file or name has the words."""
    for one in toml("by_hand.toml")["mutant"]:
        if words in f"{one['room']} {one['file']} {one['name']}":
            yield one


def hand(words: str) -> dict[str, Any]:
    """Applies mutants to a copy, one by one, and runs their tests."""
    name = re.sub(r"\W+", "-", words).strip("-") or "all"
    work = BUILD / f"hand-{name}"
    work.mkdir(parents=True, exist_ok=True)
    for part in (*COPIED, "pyproject.toml"):
        _mirror(ROOT / part, work / part)
    _preload()
    status, survivors = {}, {}
    for one in by_hand(words):
        mutant = f"{one['room']}: {one['name']}"
        status[mutant] = _tried(one, work)
        print(f"{status[mutant]:9} {mutant}", flush=True)
        if status[mutant] not in ("killed", "segfault"):  # a busy machine makes timeouts as well
            survivors[mutant] = f"{one['file']}\n- {one['old']}\n+ {one['new']}"
    return {"room": work.name, "of": len(status), "status": status, "survivors": survivors, "equivalent": {}}


def _tried(one: dict[str, Any], work: Path) -> str:
    """What became of one mutant; the copy is right again afterwards."""
    file = work / one["file"]
    text, changes = pattern(one["old"]).subn(lambda _: one["new"], file.read_text(encoding="utf-8"))
    if changes != 1:
        return f"the old text stands {changes} times in {one['file']}"
    if file.suffix == ".py" and not compiles(text):  # each test would fail, whatever it asserts
        return f"the new text makes no Python of {one['file']}"
    file.write_text(text, encoding="utf-8")
    try:
        return _ended(work, one["tests"])
    finally:
        shutil.copyfile(ROOT / one["file"], file)


def compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _preload() -> None:
    """Imports what takes seconds and is not mutated, as the tests import it."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import pytest  # noqa: F401
    import torch  # noqa: F401
    import transformers
    from transformers import LlamaForCausalLM  # noqa: F401

    assert "shoal" not in sys.modules
    assert transformers


def _ended(work: Path, tests: Sequence[str]) -> str:
    """Runs tests in a fork, which has imported nothing of shoal; says what became of the mutant."""
    child = os.fork()
    if child == 0:
        _run_tests(work, tests)
    last, done, status = time.monotonic() + LIMIT, 0, 0
    while not done:
        time.sleep(0.05)
        done, status = os.waitpid(child, os.WNOHANG)
        if not done and time.monotonic() > last:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timeout"
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1) and code >= 0:  # not even a test failed: the mutant, or a wrong name of a test
        print((work / "output.txt").read_text(encoding="utf-8")[-2000:])
    return "survived" if code == 0 else "killed" if code in (1, 2, 3) else "segfault" if code < 0 else "no tests"


def _run_tests(work: Path, tests: Sequence[str]) -> NoReturn:
    import pytest

    quiet = os.open(work / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.chdir(work)
    os.environ["PYTHONPATH"] = str(work / "src")
    if any(test.endswith("_cases.py") for test in tests):  # for a GPU, or for Triton's interpreter
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:] = [str(work / "src"), *(path for path in sys.path if not path.endswith("/src"))]
    code = 3
    try:
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests, "-m"]
        code = int(pytest.main([*arguments, SELECTED]))
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):  # a slow test may be the one that sees it
            slow = int(pytest.main([*arguments, "slow and not real"]))
            code = code if slow == pytest.ExitCode.NO_TESTS_COLLECTED else slow
    finally:
        sys.stdout.flush()
        os._exit(code)


# ── the report ──────────────────────────────────────────────────────────────────────────────────────────────────────


def written(report: dict[str, Any]) -> str:
    """Keeps a report in the build folder; returns its survivors and its score."""
    BUILD.mkdir(parents=True, exist_ok=True)
    place = BUILD / f"{report['room']}.json"
    place.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    counted = len(report["status"]) - len(report["equivalent"])
    survivors = len(report["survivors"])
    diffs = "\n\n".join(f"# {name}: {report['status'][name]}\n{diff}" for name, diff in report["survivors"].items())
    share = 100 * survivors / counted if counted else 0.0
    return (
        f"{diffs}\n\n{report['room']}: {len(report['status'])} of {report['of']} mutants tried, {len(report['equivalent'])} "
        f"of them equivalent; {survivors} of the {counted} others survived ({share:.1f} %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("sample")
    one.add_argument("room", choices=sorted(toml("rooms.toml")))
    one.add_argument("--count", type=int)
    one.add_argument("--again", action="store_true")
    verbs.add_parser("hand").add_argument("words", nargs="?", default="")
    chosen = parser.parse_args()
    if chosen.verb == "hand":
        print(written(hand(chosen.words)))
    else:
        print(written(sample(chosen.room, chosen.count, chosen.again)))


if __name__ == "__main__":
    main()
