"""What `scripts/check_package.py` finds in distributions, and what their metadata say. `make package` builds and uses them.

Tests of: scripts/check_package.py, scripts/carried_kernels.py; pyproject.toml.
"""

from __future__ import annotations

import re
from email.message import Message
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import build.util
import pytest
import readme_renderer.markdown
import trove_classifiers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import carried_kernels
import check_package
import shoal
from readme import ROOT

WHEEL_ONLY = {
    "shoal-1.dist-info/entry_points.txt", "shoal-1.dist-info/licenses/LICENSE", "shoal-1.dist-info/RECORD",
    "shoal-1.dist-info/licenses/src/shoal/data/pair/LICENSE.md",
}  # fmt: skip


@pytest.fixture(scope="module")
def package() -> set[str]:
    """The files of the package."""
    return check_package.package_files()


@pytest.fixture(scope="module")
def metadata() -> Message:
    """The metadata of a wheel, as they would be built."""
    found: Any = build.util.project_wheel_metadata(ROOT, isolated=False)
    return found


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_whole_wheel_has_no_fault(package: set[str]) -> None:
    assert len(package) > 350
    assert not list(check_package.wheel_faults(package | WHEEL_ONLY, package))


@pytest.mark.parametrize(
    "gone",
    [
        "shoal/py.typed", "shoal/native/kernels.c", "shoal/native/attend.h", "shoal/data/pair/target/model.safetensors",
        "shoal/data/repository/custom_generate/generate.py", "shoal/serve/playground/index.html", "shoal/cli/serve.py",
        "shoal-1.dist-info/licenses/src/shoal/data/pair/LICENSE.md", "shoal-1.dist-info/entry_points.txt",
        "shoal/data/programs/guard.js",
    ],
)  # fmt: skip
def test_a_missing_file_is_named(gone: str, package: set[str]) -> None:
    """Also one that the repository has no longer, if a wheel cannot do without it."""
    names = (package | WHEEL_ONLY) - {gone}
    faults = list(check_package.wheel_faults(names, package))
    assert any(gone in fault or "*" in fault for fault in faults)
    if gone in check_package.NEEDED:
        assert list(check_package.wheel_faults(names, package - {gone})) == [f"the wheel has nothing like {gone}"]


@pytest.mark.parametrize(
    "more", ["tests/test_api.py", "benchmarks/peers.py", "shoal/__pycache__/api.cpython-311.pyc", "setup.py"]
)
def test_what_does_not_belong_in_a_wheel_is_named(more: str, package: set[str]) -> None:
    names = package | WHEEL_ONLY | {more}
    assert list(check_package.wheel_faults(names, package)) == [f"the wheel has {more}, which is no file of the package"]


def test_sources_have_what_tests_need_and_no_builds(package: set[str]) -> None:
    tracked = [file.relative_to(ROOT).as_posix() for folder in ("docs", "tests", "scripts", "benchmarks", "deploy")
               for file in (ROOT / folder).rglob("*") if "__pycache__" not in file.parts]  # fmt: skip
    top = {file.name for file in ROOT.iterdir() if file.is_file()} | {"PKG-INFO"}
    names = {*tracked, *top, *(f"src/{name}" for name in package)}
    assert not list(check_package.source_faults(names, package))
    wrong = (names | {"tests/__pycache__/x.pyc", ".venv/pyvenv.cfg"}) - {"DESIGN.md", "src/shoal/api.py"}
    assert set(check_package.source_faults(wrong, package)) == {
        "the sources have no src/shoal/api.py", "the sources have nothing like DESIGN.md", "the sources have .venv/pyvenv.cfg",
        "the sources have tests/__pycache__/x.pyc",
    }  # fmt: skip


def test_kernels_that_a_wheel_lacks_are_named() -> None:
    names = [f"shoal/native/carried/x86-64-v{level}-0-1.so" for level in (3, 4)]
    assert list(check_package.carried_faults(names, "x86_64")) == []
    assert list(check_package.carried_faults(names[1:], "x86_64")) == ["the wheel has no kernels for x86-64-v3"]
    assert list(check_package.carried_faults(names, "riscv64")) == [f"the wheel has {name}" for name in names]
    assert list(check_package.wheel_faults({*names, "shoal/native/carried/x.o"}, {"shoal/x.py"}))[:2] == [
        "the wheel has no shoal/x.py", "the wheel has shoal/native/carried/x.o, which is no file of the package"
    ]  # fmt: skip


def test_a_wheel_s_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, folder = tmp_path / "cc", tmp_path / "src/shoal/native/carried"
    compiler.write_text(
        '#!/bin/sh\necho "$@" >> "$0.log"; while [ "$1" != -o ]; do shift; done; echo GLIBC_2.31 > "$2"\n', encoding="utf-8"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    folder.mkdir(parents=True)
    for stale in ("x86-64-v3-0-1", "another-0-1"):
        (folder / f"{stale}.so").touch()
    compiling = carried_kernels.module_of(ROOT)
    made = carried_kernels.carry(tmp_path, "x86_64", compiling)
    levels = {place.stem.rsplit("-", 2)[0] for place in made}
    assert levels == {"x86-64-v3", "x86-64-v4"}
    assert {*folder.iterdir()} == {*made, folder / "another-0-1.so"}
    log = Path(f"{compiler}.log").read_text(encoding="utf-8")
    assert all(f"-march={level} -c" in log for level in levels)
    assert len(log.splitlines()) == 4  # two objects, each linked
    assert carried_kernels.carry(tmp_path, "x86_64", compiling) == made
    made[0].write_bytes(b"damaged")
    assert carried_kernels.carry(tmp_path, "x86_64", compiling) == made
    assert len(Path(f"{compiler}.log").read_text(encoding="utf-8").splitlines()) == 6
    assert carried_kernels.platform_tag("x86_64", [place.read_bytes() for place in made]) == "manylinux_2_31_x86_64"
    assert carried_kernels.platform_tag("x86_64", [b"GLIBC_2.4"]) == "manylinux_2_17_x86_64"
    assert carried_kernels.platform_tag("x86_64", [b"musl"]) == "linux_x86_64"
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(compiling.NotBuilt):
        carried_kernels.carry(tmp_path / "src", "aarch64", compiling)


# ── use ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def shown(**changes: Any) -> dict[str, Any]:
    """What a demo prints that did what it should."""
    plain = {"rounds": 32, "target_passes": 32, "committed": 128}
    drafted = {"rounds": 7, "drafted": 100, "accepted": 90, "committed": 128, **changes.pop("speculative", {})}
    made = {"plain": plain, "speculative": drafted, "greedy_identical": True, "greedy": {"drafted": 9}}
    return {**made, "loaded": {"target": {"passes": "C decoder", "kernels": "carried, x86-64-v3"}}, **changes}


def test_a_demo_that_speculates_passes(capsys: pytest.CaptureFixture[str]) -> None:
    check_package.check_demo(shown(), carried=True)
    assert "'rounds': 7, 'drafted': 100, 'accepted': 90" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative": {"rounds": 32}}, {"speculative": {"accepted": 0}}, {"speculative": {"accepted": 101}},
        {"speculative": {"committed": 127}}, {"greedy_identical": False}, {"greedy": {"drafted": 0}},
    ],
)  # fmt: skip
def test_a_demo_that_does_not_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="did not do what it should"):
        check_package.check_demo(shown(**changes), carried=True)


@pytest.mark.parametrize("target", [{"passes": "modules"}, {"passes": "C decoder"}])
def test_a_demo_by_other_kernels_than_the_wheel_s_is_refused(target: dict[str, str]) -> None:
    check_package.check_demo(shown(loaded={"target": target}), carried=False)
    with pytest.raises(SystemExit, match="the wheel carries kernels, and it computed by"):
        check_package.check_demo(shown(loaded={"target": target}), carried=True)


def test_a_wheel_that_is_not_used_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """An editable install would answer for the wheel."""
    for where in (shoal.__file__, "/elsewhere/shoal/__init__.py"):
        monkeypatch.setattr(check_package.Installed, "_run", lambda self, *_, where=where: f"{where}\n")
        with pytest.raises(SystemExit, match="does not use the wheel"):
            check_package.Installed("python", tmp_path, tmp_path)


# ── metadata ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_metadata_are_those_of_the_package(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("shoal", shoal.__version__)
    assert metadata["License-Expression"] == "Apache-2.0 AND BSD-3-Clause AND MIT"
    assert metadata.get_all("License-File") == [
        "LICENSE", "src/shoal/data/pair/LICENSE.md", "src/shoal/serve/playground/vendor/LICENSE-highlightjs",
        "src/shoal/serve/playground/vendor/LICENSE-marked",
    ]  # fmt: skip
    assert metadata.get_all("Project-URL") is None  # there is no public address yet, and none is invented
    assert set(metadata.get_all("Classifier", [])) <= trove_classifiers.classifiers


def test_the_description_renders(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = readme_renderer.markdown.render(str(metadata.get_payload()))
    assert page is not None
    assert re.search(r"<h1[^>]*>shoal<", page)
    assert page.count("<table>") >= 2


def test_extras_are_of_packages_that_exist(metadata: Message) -> None:
    """Of those that are installed the version fits; and those of `dev` are installed: a misspelt name could not be."""
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == {canonicalize_name(extra) for extra in extras}
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    assert not [requirement for requirement in requirements if requirement.url]
    assert not [requirement for requirement in requirements if _fits(requirement) is False]
    in_dev = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": "dev"})]
    assert len(in_dev) > 25
    assert not [requirement for requirement in in_dev if _fits(requirement) is None]


def _fits(requirement: Requirement) -> bool | None:
    """Whether the installed version is one of those; None = not installed."""
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return None


def test_extras_that_are_named_exist(metadata: Message) -> None:
    """In messages, help and pages: pip install '.[name]'."""
    files = [file for name, kind in NAMING.items() for file in (ROOT / name).rglob(kind)]
    texts = [file.read_text(encoding="utf-8") for file in files]
    named = {
        extra
        for text in texts
        for found in re.findall(r"(?:'\.|\bshoal)\\*\[([a-z][a-z,-]*)\]", text)
        for extra in found.split(",")
    }
    assert len(named) > 3
    assert named <= set(metadata.get_all("Provides-Extra", []))


NAMING = {"src": "*.py", "benchmarks": "*.py", "docs": "*.md"}
