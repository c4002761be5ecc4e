"""The imports that a command does without, of those that Transformers makes.

The classes of models import the compiler of torch and its tensors that are shared among processes,
SciPy and scikit-learn where they are installed. Decoding uses none of them, and they are a quarter
of the time to a command's first token. So Transformers is told that they are not there while its
classes are imported, and a stand-in takes the place of the compiler until something of it is
needed. A library is told nothing: its process belongs to the user, who may train in it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

CLASSES = "transformers.modeling_utils"
OTHERS = ("transformers.masking_utils", "transformers.generation.utils")
"""The modules that the classes of models import besides."""
QUESTIONS = ("is_torch_distributed_available", "is_scipy_available", "is_sklearn_available")
"""The functions that Transformers asks whether a package is there."""
COMPILER = "torch._dynamo"
PART = f"{COMPILER}._trace_wrapped_higher_order_op"
"""The one module of the compiler that Transformers takes something from; it needs no other."""


def spare_imports() -> None:
    """Spares this process the imports of training, from the first import of Transformers' classes.

    A process that shares its model with others is left as it is.
    """
    if "WORLD_SIZE" not in os.environ and CLASSES not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class StandIn(ModuleType):
    """A module in the place of the compiler, whose marks on functions nobody else reads.

    Whatever else is asked of it brings in the compiler itself.
    """

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.torch = importlib.import_module("torch")
        self.__path__ = [os.path.join(place, "_dynamo") for place in self.torch.__path__]

    def take_place(self) -> None:
        """Becomes the module of that name, with the one part that Transformers takes."""
        sys.modules[COMPILER] = vars(self.torch)["_dynamo"] = self
        with suppress(ImportError):
            importlib.import_module(PART)

    def give_way(self) -> ModuleType:
        """Returns the compiler itself, which takes this place."""
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER], vars(self.torch)["_dynamo"]
        return importlib.import_module(COMPILER)

    def allow_in_graph(self, function: Any) -> Any:
        """Returns the function."""
        return function

    assume_constant_result = allow_in_graph

    def disable(self, function: Any = None, *_: Any, **__: Any) -> Any:
        """Returns the function, or a decorator that returns it."""
        return self.allow_in_graph if function is None else function

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
        if name != CLASSES:
            return None
        spec = PathFinder.find_spec(name, path)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            loader.exec_module = _sparing(loader.exec_module)
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
                importlib.import_module(name)

    return spare


@contextmanager
def _denied() -> Iterator[None]:
    """Answers Transformers' questions with no during the block."""
    utils = importlib.import_module("transformers.utils")
    asked = [(place, name) for place in (utils, utils.import_utils) for name in QUESTIONS]
    answers = [(place, name, getattr(place, name)) for place, name in asked]
    for place, name in asked:
        setattr(place, name, lambda: False)
    try:
        yield
    finally:
        for place, name, answer in answers:
            setattr(place, name, answer)
