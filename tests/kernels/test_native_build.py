"""How the kernels in C are built: once per machine, by anybody at any time, and what happens where they cannot be.

Tests of: models.lean.forward, models.attention.unfused, native.build, native.compiling.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import shoal
from attending import build
from native_kernels import excess, needs_compiler
from shoal.errors import RequestError
from shoal.models.attention import unfused as native_attention
from shoal.models.executor import C_DECODER, MODULES
from shoal.native import build as building
from shoal.native import compiling
from shoal.native.build import NotBuilt
from shoal.testing import save_pair

pytestmark = needs_compiler


def script(place: Path, body: str) -> str:
    """A program of the shell."""
    place.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    place.chmod(place.stat().st_mode | stat.S_IXUSR)
    return str(place)


class Calls:
    """A C compiler as CC, counted: the machine's, without optimisation and with nothing inline, which is faster.

    Attributes:
        folder: where libraries are kept.
    """

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, first: str = "", copied: Path | None = None) -> None:
        """copied: the library that a call leaves instead of compiling one."""
        self._log, self.folder = place / "calls", place / "kept" / "shoal"
        self._log.touch()
        real = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        compile_ = f'exec "{real}" "$@" -O0 "-DINLINE=static inline"'
        if copied is not None:
            compile_ = (
                f'case "$*" in *kernels.c*) while [ "$1" != -o ]; do shift; done; cp "{copied}" "$2";; *) {compile_};; esac'
            )
        counted = script(place / "counted cc", f'{first}echo "$@" >> "{self._log}"; {compile_}')
        monkeypatch.setenv("CC", shlex.quote(counted))
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "kept"))
        monkeypatch.setattr(tempfile, "tempdir", str(place / "temporary"))
        monkeypatch.setattr(building, "CARRIED", place / "carried")
        (place / "temporary").mkdir()

    @property
    def lines(self) -> list[str]:
        """The arguments of each call that compiled."""
        return [line for line in self._log.read_text(encoding="utf-8").splitlines() if "kernels.c" in line]

    @property
    def compiled(self) -> int:
        return len(self.lines)

    @property
    def kept(self) -> list[Path]:
        return sorted(self.folder.iterdir())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, compiled once for all tests of how they are kept."""
    flags = [*building.machine_flags(), "-O0", "-DINLINE=static inline"]
    return building.compiled(building.sources(), tmp_path_factory.mktemp("library"), building.compiler(), flags)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path) -> Calls:
    return Calls(tmp_path, monkeypatch, copied=library)


def built() -> Any:
    """The kernels as a new process gets them; they compute."""
    made, _ = building._chosen()
    with patch.object(native_attention, "library", lambda: made):
        assert excess(build([9, 3], [2, 1], torch.float32)) <= 1
    return made


def test_the_second_process_compiles_nothing(calls: Calls) -> None:
    built()
    (place,) = calls.kept
    assert calls.compiled == 1
    assert built()._name == str(place)
    assert (calls.compiled, calls.kept) == (1, [place])


def test_other_sources_or_another_compiler_are_another_library(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    built()
    texts = building.sources()
    monkeypatch.setattr(building, "sources", lambda: {**texts, "kernels.c": texts["kernels.c"] + b"/* newer */"})
    built()
    monkeypatch.setattr(building, "instructions", lambda: frozenset({"another processor"}))
    built()
    assert (calls.compiled, len(calls.kept)) == (3, 3)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
def test_kernels_for_other_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(tmp_path, monkeypatch)
    built()
    for march in ("x86-64", "x86-64-v2"):
        monkeypatch.setenv("SHOAL_MARCH", march)
        built()
        assert f"-march={march} " in calls.lines[-1]
    assert (calls.compiled, len(calls.kept)) == (3, 3)
    monkeypatch.setattr(building, "instructions", lambda: frozenset({"sse42"}))
    built()
    monkeypatch.setenv("SHOAL_MARCH", "x86-64-v3")
    with pytest.raises(NotBuilt, match=r"SHOAL_MARCH=x86-64-v3: this processor has no abm, avx2, bmi1"):
        built()


def test_a_library_that_another_user_wrote_is_not_run(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    built()
    (place,) = calls.kept
    try:
        os.chown(place, 4711, -1)
    except PermissionError:  # only root may
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    built()
    assert calls.compiled == 2


FULL, NOEXEC = {"f_bavail": 1}, {"f_flag": getattr(os, "ST_NOEXEC", 0)}


@pytest.mark.parametrize(
    "fault", [FULL, pytest.param(NOEXEC, marks=pytest.mark.skipif(not NOEXEC["f_flag"], reason="Linux"))]
)
def test_a_folder_that_is_full_or_runs_nothing(fault: dict[str, int], calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = [calls.folder]
    good = {"f_bavail": 2**20, "f_frsize": 4096, "f_flag": 0}
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(**good | (fault if Path(place) in faulty else {})))
    with patch.object(building.Path, "replace", side_effect=OSError):
        built()
    assert f"{tempfile.gettempdir()}/kernels-" in calls.lines[-1]
    assert not calls.kept
    assert not os.listdir(tempfile.gettempdir())
    faulty.append(Path(tempfile.gettempdir()))
    with pytest.raises(NotBuilt, match=r"no place to compile in: .*kept/shoal or .*temporary must be writable"):
        built()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "half of it": lambda whole: whole[: len(whole) // 2],
    "zeros": lambda whole: bytes(len(whole)),
    "empty": lambda whole: b"",
    "its last byte": lambda whole: whole[:-1],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_compiled_again(damage: str, calls: Calls) -> None:
    built()
    (place,) = calls.kept
    place.unlink()  # this process has it mapped
    whole = building.compiled(building.sources(), calls.folder.parent, building.compiler(), building.FLAGS).read_bytes()
    place.write_bytes(DAMAGE[damage](whole))
    before = calls.compiled
    built()
    assert calls.compiled == before + 1
    assert [path.stem.endswith(building.digest(path.read_bytes())) for path in calls.kept] == [True]


def test_a_library_that_cannot_be_loaded_is_compiled_again(calls: Calls) -> None:
    """Undamaged, but linked against what is not here: a folder shared by unlike containers."""
    built()
    (place,) = calls.kept
    text = b"no library"
    place.unlink()
    (place.parent / f"{place.stem.rpartition('-')[0]}-{building.digest(text)}.so").write_bytes(text)
    built()
    built()
    assert calls.compiled == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, children = Calls(tmp_path, monkeypatch), []
    for _ in range(2):
        child = os.fork()
        if not child:
            code = 1
            try:
                building._chosen()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert 1 <= calls.compiled <= 2
    assert 1 <= len(calls.kept) <= 2
    assert all(place.suffix == ".so" for place in calls.kept)
    before = calls.compiled
    built()
    assert calls.compiled == before


@pytest.mark.parametrize("folder", ["none", "not writable"])
def test_without_a_folder_every_process_compiles(folder: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    file = calls.folder.parent.parent / "file"
    file.touch()
    monkeypatch.setattr(building, "cache_folder", lambda: None if folder == "none" else file)
    built()
    built()
    assert calls.compiled == 2
    assert not os.listdir(tempfile.gettempdir())  # nothing is left there


def test_a_compiler_without_openmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Calls(tmp_path, monkeypatch, 'case "$*" in *-fopenmp*) exit 1;; esac; ')
    built()


# ── carried kernels ──


V3, V4 = (building.NEEDED[level] for level in ("x86-64-v3", "x86-64-v4"))


@pytest.fixture
def carried(calls: Calls, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with kernels for two levels: copies of the machine's own, which any processor of a test may run."""
    folder = tmp_path / "carried"
    folder.mkdir()
    for level in building.LEVELS["x86_64"]:
        copy = shutil.copy(library, folder / "copy.so")
        compiling.keep(Path(copy), folder, f"{level}-{building.digest_of(building.sources())}")
    monkeypatch.setattr(building, "instructions", lambda: V4)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("SHOAL_MARCH")
    return folder


def of_level(folder: Path, level: str) -> Path:
    (place,) = folder.glob(f"{level}-*.so")
    return place


def without_compiler() -> tuple[str, str]:
    """The path of the kernels, which compute, and the remark on them."""
    with patch.dict(os.environ, CC="/bin/false"):
        made = built()
        return made._name, building._chosen()[1]


@pytest.mark.parametrize(
    ("known", "level"), [(V4, "v4"), (V4 - {"avx512vl"}, "v3"), (V4 - {"avx512f"}, "v3"), (V3, "v3"), (V3 - {"movbe"}, "")]
)
def test_no_kernels_are_loaded_that_the_processor_cannot_run(
    known: frozenset[str], level: str, carried: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    load = building.loaded
    monkeypatch.setattr(building, "loaded", lambda place: opened.append(place.name[:9]) or load(place))
    monkeypatch.setattr(building, "instructions", lambda: known)
    if level:
        place, remark = without_compiler()
        assert place == str(of_level(carried, f"x86-64-{level}"))
        assert remark == f"carried, x86-64-{level} (/bin/false failed: 1)"
    else:
        with pytest.raises(NotBuilt, match=r"^/bin/false failed: 1$"):
            without_compiler()
    assert set(opened) == ({f"x86-64-{level}"} if level else set())


def test_carried_kernels_that_are_damaged_or_of_other_sources_are_not_used(carried: Path, calls: Calls) -> None:
    best, other = of_level(carried, "x86-64-v4"), of_level(carried, "x86-64-v3")
    whole = best.read_bytes()
    best.unlink()
    best.write_bytes(whole[: len(whole) // 2])
    place, remark = without_compiler()
    assert (place, remark) == (
        str(other), "carried, x86-64-v3 (/bin/false failed: 1; carried kernels for x86-64-v4 are damaged)"
    )  # fmt: skip
    other.rename(carried / f"x86-64-v3-{building.digest(b'older')}-{building.digest(whole)}.so")
    faults = "carried kernels for x86-64-v4 are damaged; carried kernels for x86-64-v3 are of other sources"
    with pytest.raises(NotBuilt, match=f"^/bin/false failed: 1; {faults}$"):
        without_compiler()
    assert building._chosen()[1] == faults
    assert calls.compiled == 1
    assert building._chosen()[1] == ""


def test_carried_kernels_that_do_not_load_are_not_used(carried: Path) -> None:
    text = b"no library"
    of_level(carried, "x86-64-v4").unlink()
    (carried / f"x86-64-v4-{building.digest_of(building.sources())}-{building.digest(text)}.so").write_bytes(text)
    place, remark = without_compiler()
    assert place == str(of_level(carried, "x86-64-v3"))
    assert "file too short" in remark or "invalid" in remark


def test_the_machine_s_own_are_compiled_behind_carried_ones(carried: Path, calls: Calls) -> None:
    """The first process does not wait for them; those that follow use them."""
    assert built()._name == str(of_level(carried, "x86-64-v4"))
    for _ in range(600):
        if made := list(calls.folder.glob("kernels-*.so")):
            break
        time.sleep(0.1)
    assert [built()._name] == [str(place) for place in made]
    assert calls.compiled == 1
    assert not list(calls.folder.glob("compiling-*"))


def test_kernels_of_a_level_that_is_asked_for(carried: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_MARCH", "x86-64-v3")
    assert built()._name == str(of_level(carried, "x86-64-v3"))
    assert calls.compiled == 0
    monkeypatch.setenv("SHOAL_MARCH", "native")
    assert Path(built()._name).parent != carried
    assert calls.compiled == 1


def test_a_report_names_carried_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = save_pair(tmp_path)
    assert "kernels" not in shoal.load(target).loaded["target"]
    monkeypatch.setattr(building, "_attempt", lambda: (library_here, "carried, x86-64-v3"))
    library_here = building._chosen()[0]
    model = shoal.load(target)
    assert model.loaded["target"]["kernels"] == "carried, x86-64-v3"
    runner = model.target.fork()
    runner.memory.reserve(1, 8)
    assert " (kernels: carried, x86-64-v3" in str(runner.explain([0], [1]))


# ── where they cannot be built ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'cc: this machine is out of order' >&2; exit 1", "failed: cc: this machine is out of order"),
        ("exit 3", "failed: 3"),
        ("sleep 9", "failed: .*timed out"),
        ('while [ $# -gt 0 ]; do [ "$1" = -o ] && echo text > "$2"; shift; done; true', "kernels.so: "),
    ],
)
def test_why_there_are_none(body: str, reason: str, tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "SECONDS", 0.5)
    monkeypatch.setenv("CC", script(tmp_path / "cc", body))
    with pytest.raises(NotBuilt, match=reason):
        built()


def test_no_compiler(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotBuilt, match="no C compiler"):
        built()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_attempt", lambda: "no C compiler (cc, gcc or clang)")


def test_a_library_that_is_asked_for_says_why_it_is_missing(without: None) -> None:
    with pytest.raises(NotBuilt, match="no C compiler"):
        building.library()
    with pytest.raises(RequestError, match=r"float32 or bfloat16; got cpu, torch\.float32, no C compiler"):
        native_attention.native(build([3], [1], torch.float32))


def test_compile_on_needs_them(without: None, tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path)
    with pytest.raises(
        RequestError, match="compile='on' needs kernels in C, and they could not be built here: no C compiler"
    ):
        shoal.load(target, compile="on")


def test_auto_does_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same greedy tokens by the model's modules."""
    target, draft = save_pair(tmp_path)
    expected, executors = said(shoal.load(target, draft))
    assert MODULES not in executors
    monkeypatch.setattr(building, "_attempt", lambda: "no C compiler")
    pair = shoal.load(target, draft)
    assert said(pair) == (expected, {MODULES})
    assert pair.target.attention == "pad"
    assert pair.target.absent[C_DECODER] == "no C compiler"


def said(pair: shoal.Shoal) -> tuple[list[list[int]], set[str]]:
    """Returns greedy tokens, and the executors of both models."""
    result = pair.generate("Hello", 2, temperature=0.0, max_new_tokens=20)
    tokens = [list(sample.token_ids) for output in result for sample in output.samples]
    return tokens, {name for counts in result.stats.executors.values() for name in counts}
