"""The head start of a load, and the imports of Transformers that a command does without.

A command imports torch and Transformers for seconds, on one core. Meanwhile a thread reads the
files of the weights, so that they lie in the system's cache, and has the system find memory for
packed matrices: the first write to a huge page waits until it is cleared, which takes a virtual
machine up to a second for the weights of 135 million parameters. Results are the same with
and without a head start, and this module does not import torch.

The classes of models import the compiler of torch and its tensors that are shared among processes,
SciPy and scikit-learn where they are installed. Decoding uses none of them, and they are a quarter
of the time to a command's first token. So Transformers is told that they are not there while its
classes are imported, and a stand-in takes the place of the compiler until something of it is
needed. Transformers finds the names that each of its files exports by the last lines of the file.
Until the first load has ended, the collector of reference cycles runs seldom: imports make
objects by the hundred thousand that stay. All this is done for a command alone: the process of a
library belongs to the user, who may train in it. A user's module may ask for the compiler at any
time. It then gets the compiler itself, which learns of the functions that were marked before.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import inspect
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import Any

SELDOM = 200_000
"""The new objects after which cycles are looked for while a command imports and loads."""
_thresholds: tuple[int, int, int] | None = None
"""The collector's own thresholds, while it runs seldom."""
CLASSES = "transformers.modeling_utils"
OTHERS = ("transformers.masking_utils", "transformers.generation.utils")
"""The modules that the classes of models import besides."""
QUESTIONS = ("is_torch_distributed_available", "is_scipy_available", "is_sklearn_available")
"""The functions that Transformers asks whether a package is there."""
COMPILER = "torch._dynamo"
TABLES = "transformers.utils.import_utils"
"""The module that reads the exported names of all files of Transformers' models."""
PART = f"{COMPILER}._trace_wrapped_higher_order_op"
"""The one module of the compiler that Transformers takes something from; it needs no other."""


def spare_imports() -> None:
    """Spares this process the imports of training, from the first import of Transformers' classes.

    It collects reference cycles seldom until the end of the first load. A process that shares its
    model with others has the same imports as ever.
    """
    global _thresholds
    _thresholds = _thresholds or gc.get_threshold()
    gc.set_threshold(SELDOM, *_thresholds[1:])
    if "WORLD_SIZE" not in os.environ and CLASSES not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class StandIn(ModuleType):
    """A stand-in for the compiler that keeps functions' marks; other attributes import it."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.torch = importlib.import_module("torch")
        self.__path__ = [os.path.join(place, "_dynamo") for place in self.torch.__path__]
        self.__spec__ = PathFinder.find_spec(COMPILER, self.torch.__path__)
        self._marks: list[tuple[str, Any]] = []
        self._leaving = threading.Lock()

    def take_place(self) -> None:
        """Becomes the module of that name, with the one part that Transformers takes.

        Where the part cannot be imported alone, as in another release of torch, the compiler stays
        in its place.
        """
        sys.modules[COMPILER] = vars(self.torch)["_dynamo"] = self
        try:
            importlib.import_module(PART)
        except Exception:
            self._leave()

    def give_way(self) -> ModuleType:
        """Returns the compiler itself, which takes this place."""
        self._leave()
        compiler = importlib.import_module(COMPILER)
        if PART in sys.modules:  # imported before its parent, which does not know it yet
            setattr(compiler, PART.rpartition(".")[2], sys.modules[PART])
        while self._marks:
            with suppress(IndexError):  # another thread has it
                name, function = self._marks.pop(0)
                getattr(compiler, name)(function)
        return compiler

    def _leave(self) -> None:
        """Frees the place, unless the compiler has taken it. No import waits for the lock."""
        with self._leaving:
            if sys.modules.get(COMPILER) is self:
                del sys.modules[COMPILER], vars(self.torch)["_dynamo"]

    def allow_in_graph(self, function: Any) -> Any:
        """Returns the function, which the compiler learns of later."""
        self._marks.append(("allow_in_graph", function))
        return function

    def assume_constant_result(self, function: Any) -> Any:
        """Returns the function, which the compiler learns of later."""
        self._marks.append(("assume_constant_result", function))
        return function

    def disable(self, function: Any = None, *options: Any, **named: Any) -> Any:
        """Returns a function that the compiler does not trace, or a decorator that returns it."""
        if function is None:
            return lambda given: self.disable(given, *options, **named)
        if not inspect.isfunction(function):
            return self.give_way().disable(function, *options, **named)
        disabled: list[Any] = []

        @functools.wraps(function)
        def untraced(*arguments: Any, **keywords: Any) -> Any:
            if sys.modules.get(COMPILER) is self:
                return function(*arguments, **keywords)
            if not disabled:
                disabled.append(self.give_way().disable(function, *options, **named))
            return disabled[0](*arguments, **keywords)

        vars(untraced)["_torchdynamo_disable"] = True
        return untraced

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as `inspect` asks of every module
            raise AttributeError(name)
        return getattr(self.give_way(), name)


class _Finder(MetaPathFinder):
    """The finder of Transformers' classes, and of modules of the compiler."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of the classes as other finders have it, with a loader that spares.

        A module of the compiler brings in the compiler itself first, which may import the module.
        """
        parent = sys.modules.get(name.rpartition(".")[0])
        if isinstance(parent, StandIn) and name != PART:
            parent.give_way()
            module = sys.modules.pop(name, None)  # else importlib takes it for one to load again
            return None if module is None else ModuleSpec(name, _Imported(module))
        if name not in (CLASSES, TABLES):
            return None
        spec = PathFinder.find_spec(name, path)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            change = _sparing if name == CLASSES else _skimming
            loader.exec_module = change(loader.exec_module)
        return spec


class _Imported(Loader):
    """The loader of a module that has been imported meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module."""
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module as it was."""
        module.__spec__ = self.spec


def _sparing(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Returns a function that executes the module of the classes, and imports the others."""

    def spare(module: ModuleType) -> None:
        if COMPILER not in sys.modules:
            StandIn().take_place()
        with _denied():
            execute(module)
            for name in OTHERS:
                with suppress(ImportError):  # told to the code that needs it
                    importlib.import_module(name)

    return spare


def _skimming(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Returns a function that executes the module of the tables, which then reads last lines."""

    def skim(module: ModuleType) -> None:
        execute(module)
        with suppress(AttributeError):  # another release
            vars(module)["fetch__all__"] = from_last_lines(module.fetch__all__)

    return skim


def from_last_lines(fetch: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a function with the same results for texts of thousands of lines.

    Args:
        fetch: finds the names in the last statement of a text that begins a line with `__all__`.
    """
    return lambda text: fetch(text[text.rfind("\n__all__") + 1 :])


@contextmanager
def _denied() -> Iterator[None]:
    """Answers Transformers' questions with no during the block."""
    utils = importlib.import_module("transformers.utils")
    questions = [(place, name) for place in (utils, utils.import_utils) for name in QUESTIONS]
    answers = [
        (place, name, getattr(place, name)) for place, name in questions if hasattr(place, name)
    ]
    for place, name, _ in answers:
        setattr(place, name, lambda: False)
    try:
        yield
    finally:
        for place, name, answer in answers:
            setattr(place, name, answer)


HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
CHUNK = 32 * 2**20
"""The size of a mapping that small matrices share, the one kind that is made beforehand."""
BLOCK = 2**20
"""The bytes that are read at once."""
MOST = 2**30
"""The bytes of weights up to which memory is found beforehand; matrices of larger models have
mappings of their own."""
_running: HeadStart | None = None
"""The head start of the load that is under way."""


def mapping(size: int) -> mmap.mmap:
    """Returns memory in huge pages, from the head start if that has such a mapping ready."""
    running = _running
    if running is not None and size == CHUNK:
        with suppress(IndexError):
            return running.ready.pop()
    return _new(size)


def _new(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if HUGE is not None:
        mapping.madvise(HUGE)
    return mapping


class HeadStart:
    """The reading of weights on a thread, from the beginning of a `with` block to its end.

    Files that cannot be read are left to the load, which says why.

    Args:
        memory: True if the weights are going to be packed on a CPU.

    Attributes:
        bytes_read: the bytes that were read.
        ready: the mappings of `CHUNK` bytes that are ready; `mapping` takes them.
    """

    def __init__(self, files: Sequence[Path], *, memory: bool = True) -> None:
        self.bytes_read, self.ready, self._count = 0, list[mmap.mmap](), 0
        self._files: list[FileIO] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shoal-head-start", daemon=True)
        self._paths, self._memory = files, memory and HUGE is not None

    def __enter__(self) -> HeadStart:
        global _running
        for path in self._paths:
            with suppress(OSError):
                self._memory = self._memory and path.stat().st_size <= MOST
                self._files.append(FileIO(path))
        _running = self
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        global _running, _thresholds
        if _thresholds is not None:
            gc.set_threshold(*_thresholds)
            _thresholds = None
        self._end.set()
        self._thread.join()
        _running = None
        self.ready.clear()
        for file in self._files:
            file.close()

    def wait(self) -> None:
        """Waits until all is read."""
        self._thread.join()

    def _work(self) -> None:
        block = bytearray(BLOCK)
        for file in self._files:
            with suppress(OSError):
                while not self._end.is_set() and (count := file.readinto(block)):
                    self.bytes_read += count
                    if self._memory and self.bytes_read >= (self._count + 1) * CHUNK:
                        self._prepare()

    def _prepare(self) -> None:
        """Makes a mapping and writes to its pages; without memory none is made."""
        with suppress(OSError):
            mapping = _new(CHUNK)
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), 0, CHUNK)
            self.ready.append(mapping)
        self._count += 1
