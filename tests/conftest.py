"""What holds for every test: no network, few threads, a time limit, the same examples on every CI run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import certifi

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the folder of the process that started them
    _caches = tempfile.TemporaryDirectory(prefix="shoal-tests-")
    os.environ["XDG_CACHE_HOME"] = _caches.name
    # Tests reach no other machine, and reading all authorities is half of what a request of a new client takes: here is one.
    _authority = Path(_caches.name, "authority.pem")
    _head, _end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----\n")
    _authority.write_text(_head + _end, encoding="utf-8")
    os.environ["SSL_CERT_FILE"] = str(_authority)
# Read by the libraries when they are imported, here or in a subprocess of a test.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TRANSFORMERS_NO_ADVISORY_WARNINGS="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("SHOAL_MARCH", "native")  # all processes of a run compute by the same kernels, none by carried ones
if "PYTEST_XDIST_WORKER" in os.environ:  # one process per core: more threads only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import ctypes
import gc
import inspect
import ipaddress
import logging
import random
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType, SimpleNamespace
from typing import Any

import httpx
import hypothesis
import pytest
import torch
from transformers.utils import logging as transformers_logging

from bare_logger import require_bare_logger
from shoal import load
from shoal.api import Shoal
from shoal.cli import console
from shoal.engine import validation
from shoal.engine.engine import Engine
from shoal.models import formats
from shoal.native.build import missing
from shoal.testing import save_pair
from shoal.types.stats import Stats

pytest_plugins = ["groups", "parts"]  # of tests/helpers
gc.disable()  # until all tests are collected

SECONDS_PER_TEST = 300  # `@pytest.mark.limit(seconds)` sets another; a machine may be ten times slower than an idle one

transformers_logging.disable_progress_bar()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that Ctrl-C is ignored
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(2, os.cpu_count() or 1))  # tiny models: more threads only wait for each other

hypothesis.settings.register_profile("here", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many as there are cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pytest_collection_finish() -> None:
    """What was imported stays: it is not looked through again whenever garbage is collected, and while tests are collected none is.

    PyTorch's loggers, some sixty, speak through their parent: pytest would set two handlers to each of them, thrice a test.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.enable()


MAIN = "PYTEST_XDIST_WORKER" not in os.environ
KERNELS = Path(__file__).parents[1] / ".pytest_cache" / f"kernels-{os.environ['SHOAL_MARCH']}"
"""Where one run leaves the kernels in C that it has compiled, for the next one: their names have a digest of their sources."""


def pytest_configure(config: pytest.Config) -> None:
    """Compiles the kernels before there are workers, each of which would."""
    if MAIN:
        if KERNELS.is_dir():
            shutil.copytree(KERNELS, Path(_caches.name, "shoal"), dirs_exist_ok=True)
        if getattr(config.option, "numprocesses", None):
            missing()


def pytest_sessionfinish() -> None:
    """Extension modules complain of what is left when Python ends."""
    gc.unfreeze()
    if MAIN:
        with suppress(OSError):
            keep_kernels()


def keep_kernels() -> None:
    """Leaves the kernels of this run, and no others, for the next one."""
    made = {file.name: file for file in Path(_caches.name, "shoal").glob("kernels-*.so")}
    kept = {file.name for file in KERNELS.glob("*.so")}
    if made and made.keys() != kept:
        KERNELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KERNELS.parent) as folder:
            for name, file in made.items():
                shutil.copy2(file, Path(folder, name))
            for name in kept - made.keys():
                (KERNELS / name).unlink(missing_ok=True)
            for name in made:
                Path(folder, name).replace(KERNELS / name)


class _Network(BaseException):
    """Not an Exception: no library may take it for a flaky connection and go on."""


def _refuse_unless_local(host: object) -> None:
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost"):
        return
    try:
        local = ipaddress.ip_address(str(name).partition("%")[0]).is_loopback
    except ValueError:
        local = False
    if not local:
        raise _Network(f"a test tried to reach {name!r}: tests do without the network")


def _guarded(connect: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family != getattr(socket, "AF_UNIX", None):
            _refuse_unless_local(address[0])
        return connect(self, address)

    return guarded


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Fails whatever connects or resolves a name beyond this machine."""
    resolve = socket.getaddrinfo

    def guarded_resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_unless_local(host)
        return resolve(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _guarded(socket.socket.connect))
        patch.setattr(socket.socket, "connect_ex", _guarded(socket.socket.connect_ex))
        patch.setattr(socket, "getaddrinfo", guarded_resolve)
        yield


@pytest.fixture(autouse=True, scope="session")
def patient_clients() -> Iterator[None]:
    """httpx gives up after 5 seconds unless a call says otherwise, and a busy machine may need more: a hang is found by the test's
    own limit."""
    default = (
        inspect.signature(httpx.get).parameters["timeout"].default
    )  # one object, the default of all functions and clients
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "read", "write", "pool"):
            patch.setattr(default, name, float(SECONDS_PER_TEST))
        assert httpx.Client().timeout.read == SECONDS_PER_TEST
        yield


HELPERS = [file.stem for file in Path(__file__).parent.glob("helpers/*.py")]
SEEDS = random.Random()
"""Where requests without a seed get theirs."""
SEED_TORCH = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
"""Seeds the devices that are there: for those that are not, PyTorch writes down the stack of every call."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same in every run, whatever ran before it in its process."""
    SEEDS.seed(item.nodeid)
    SEED_TORCH(0)


def forget(*modules: str) -> None:
    """Clears what the functions of these modules have cached."""
    for name in sys.modules.keys() & set(modules):
        for value in vars(sys.modules[name]).values():
            if getattr(value, "__module__", None) == name and hasattr(value, "cache_clear"):
                value.cache_clear()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Frees the models and servers of a file of tests behind its last one; those of helpers behind the last of its folder."""
    yield
    if nextitem is None or nextitem.path != item.path:
        forget(item.path.stem, "fastapi.dependencies.models")  # which remembers endpoints, and with them the whole server
        if nextitem is None or nextitem.path.parent != item.path.parent:
            forget(*HELPERS)
            gc.collect()
        with suppress(AttributeError, OSError, TypeError):  # of another C library
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True, scope="session")
def same_seeds() -> Iterator[None]:
    """Requests without a seed take theirs from `SEEDS`, not from the system."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "secrets", SimpleNamespace(randbits=SEEDS.getrandbits))
        yield


@pytest.fixture(autouse=True)
def one_kind_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number format and form of weights follow the CPU (shoal.models.formats); in tests it has MKL, no 16-bit instructions, and
    packs no weights, which would follow a measurement."""
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(mkl=True))


@pytest.fixture(autouse=True, scope="session")
def streams_stay_open() -> Iterator[None]:
    """No code closes the streams of pytest's capture: all later tests of the process would fail. absl's log handler would, which
    `rouge_score` imports: it closes its stream when logging is configured anew while a test has another `sys.stderr`."""
    with pytest.MonkeyPatch.context() as patch:
        for stream in (sys.stdout, sys.stderr):
            patch.setattr(stream, "close", stream.flush)
        yield


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command prints its progress where stderr is no terminal after some seconds: on a busy machine, but not on another."""
    monkeypatch.setattr(console, "PACE", 3600.0)


@pytest.fixture(autouse=True)
def no_log_handlers() -> Iterator[None]:
    """Fails a test that leaves our logger configured: with a handler on its own captured stderr, which is closed by then, a later
    test of the same process finds "Logging error" on stderr."""
    yield
    require_bare_logger()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Ends a test that hangs, so that one bug costs five minutes and not the whole run."""
    if not hasattr(signal, "SIGALRM"):
        return (yield)
    marker = item.get_closest_marker("limit")
    seconds = marker.args[0] if marker else SECONDS_PER_TEST

    def stop(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail(f"took more than {seconds} s; @pytest.mark.limit(seconds) allows more")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def saved_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of a tiny target and drafter. They are shared: no test writes there."""
    return save_pair(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="session")
def bundled() -> Shoal:
    """The bundled pair. It is shared: no test changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "cpu", lambda: formats.Cpu(mkl=True))  # as `one_kind_of_cpu` has it for each test
        return load(compile="off", max_batch=8)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Stats]:
    """The stats of every engine that is made: proof that the speculative path ran."""
    stats: list[Stats] = []
    made = Engine.__init__

    def spy(self: Engine, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        stats.append(self.stats)

    monkeypatch.setattr(Engine, "__init__", spy)
    return stats
