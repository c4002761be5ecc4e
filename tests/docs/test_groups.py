"""Groups of tests that may be skipped: which they are, and what makes a run fail without them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from groups import GROUPS, Group, required, skipped_groups

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("reason", "group"),
    [
        ("Skipped: needs chromium on the PATH", "chromium"),
        ("Skipped: llm is not installed (extra clients)", "llm"),
        ("Skipped: could not import 'ray': No module named 'ray'", "ray"),
        ("Skipped: the sandbox 'bubblewrap' does not work here: bwrap: No permissions", "bubblewrap"),
        ("Skipped: needs compiler: cc failed: timed out after 120 seconds", "compiler"),
        ("Skipped: could not import 'lm_eval': No module named 'lm_eval'", "lm-eval"),
    ],
)
def test_reasons_name_a_group(reason: str, group: str) -> None:
    assert skipped_groups([reason, "Skipped: needs CUDA"], GROUPS) == [group]


def test_reasons_that_are_no_want_of_a_group() -> None:
    reasons = ["Skipped: bubblewrap: programs are not kept from mounts here", "Skipped: needs rayon", "Skipped: an array"]
    assert skipped_groups(reasons, GROUPS) == []


def test_names_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_REQUIRE", "ray, llm")
    assert required() == ["ray", "llm"]
    monkeypatch.setenv("SHOAL_TEST_REQUIRE", "ray,lmm")
    with pytest.raises(pytest.UsageError, match=r"there is no lmm; there are bubblewrap, chromium"):
        required()
    monkeypatch.delenv("SHOAL_TEST_REQUIRE")
    assert required() == []


def test_ci_requires_every_group() -> None:
    (line,) = [line for line in (ROOT / ".ci/run").read_text().splitlines() if "SHOAL_TEST_REQUIRE=" in line]
    assert line.partition("=")[2].split(",") == list(GROUPS)


QUICK = {
    "bubblewrap": "evaluation/test_execution.py::test_results_of_a_language",
    "chromium": "serve/test_playground.py::test_the_columns_are_what_the_bundled_pair_generates",
    "ray": "serve/test_ray.py::test_a_cluster_of_our_own_listens_on_loopback_and_asks_for_a_token",
    "lm-eval": "integrations/test_lm_eval.py::test_scores_of_lm_eval_are_those_of_its_class_for_transformers",
    "llm": "integrations/test_llm_plugin.py::test_it_streams_the_texts_of_generate",
    "gguf": "models/test_gguf.py::test_greedy_ids_are_those_of_transformers",
    "compiler": "kernels/test_native.py::test_the_kernel_is_the_definition",
    "smollm2": "real/test_real_tokenizer.py::test_texts_are_read_and_written_back",
}
"""A test of each group that every run of CI has."""


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_has_tests_that_are_not_slow(group: str) -> None:
    file, _, name = QUICK[group].partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
    (test,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    marks = [node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])]
    assert not [mark for mark in [*test.decorator_list, *marks] if re.search(r"mark\.slow(?!\(but)", ast.unparse(mark))]


CASE = """
import pytest
@pytest.mark.skipif({absent}, reason="needs chromium on the PATH")
def test_case(): pass
"""


@pytest.mark.slow(but=["True-False-0-1 passed"])
@pytest.mark.parametrize(("present", "absent", "code", "says"), [
    (True, False, 0, "1 passed"),
    (True, True, 1, "FAILED: tests that need chromium were skipped"),
    (False, True, 4, "asks for chromium, not installed here: apt-get install chromium"),
])  # fmt: skip
def test_a_run_fails_without_a_group_that_it_requires(
    present: bool, absent: bool, code: int, says: str, tmp_path: Path
) -> None:
    """A session of its own, with the hooks of these tests alone."""
    (tmp_path / "test_case.py").write_text(CASE.format(absent=absent))
    (tmp_path / "conftest.py").write_text(
        "import groups\npytest_plugins = ['groups']\n"
        f"groups.GROUPS['chromium'] = groups.Group(lambda: {present}, groups.GROUPS['chromium'].command)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/helpers"), "SHOAL_TEST_REQUIRE": "chromium"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plug-ins of others take longer than the session
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout + done.stderr


def test_every_group_says_what_brings_it() -> None:
    assert all(isinstance(group, Group) and "install" in group.command for group in GROUPS.values())
