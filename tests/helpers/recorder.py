"""CUDA graphs that are pretended: operations are recorded once and replayed as they were, without any Python.

A stand-in that ran the Python function again would find what a graph never sees: weights that were replaced, a number that changed,
a tensor that was freed. This one knows storages alone, and hands out the memory of its pool as the allocator does: nothing is
computed by a capture, and what a function frees belongs to the other graphs of its pool.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretend import READS, SIZES, InCapture, OnDevice, Pretend, held, mapped
from shoal.models.compiled import Run


class Recorder:
    """Stands in for `shoal.models.compiled.Graphs`, on the CPU or on a pretended device.

    Attributes:
        log: "capture" and "replay", as they happened.
        device: the pretended device; its operations are counted as captured, and its replays wait with its copies.
    """

    log: ClassVar[list[str]] = []
    device: Pretend | None = None

    def __init__(self, device: torch.device) -> None:
        self._pool: weakref.WeakSet[Graph] = weakref.WeakSet()

    @classmethod
    def on(cls, device: Pretend) -> type[Recorder]:
        """Those of a pretended device."""
        return type("Recorder", (cls,), {"device": device})

    def __call__(self, run: Run) -> Run:
        run()
        graph, device = Graph(), self.device
        self.log.append("capture")
        with self._capture():
            graph.record(run)
        graph.spoil(lambda storage: True)  # a capture computes nothing
        self._pool.add(graph)

        def replay() -> Any:
            self.log.append("replay")
            if device is None:
                self._replay(graph)
            else:
                device.counts["replay"] += 1
                device.later(lambda: self._replay(graph))
            return graph.result

        return replay

    def _replay(self, graph: Graph) -> None:
        for other in self._pool:
            if not other.spoilt:
                other.spoil(other.is_free)
        with self._capture():
            graph.replay()

    def _capture(self) -> AbstractContextManager[None]:
        return nullcontext() if self.device is None else self.device.capture()


class Graph:
    """The operations of a function, over the storages that they had.

    Attributes:
        result: what the function returned; each replay writes it.
        spoilt: its free memory was written over since its last replay.
    """

    def __init__(self) -> None:
        self.result: Any = None
        self.spoilt = False
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self._own: dict[
            int, tuple[Tensor, list[weakref.ref[Tensor]]]
        ] = {}  # by storage: memory that the capture took, and its users
        self._aliases: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def record(self, run: Run) -> None:
        with _Recording(self):
            self.result = run()
        self._aliases.clear()

    def add(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Computes an operation, and records it unless it only makes a view, or memory."""
        own = mapped(self._alias, (args, kwargs))
        known = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        result = function(*args, **kwargs)
        outputs = [tensor for tensor in _tensors(result) if _storage(tensor) not in known]
        for tensor in outputs:
            self._own[_storage(tensor)] = self._alias(tensor), []
        for tensor in _tensors(result):
            if _storage(tensor) in self._own:
                self._own[_storage(tensor)][1].append(weakref.ref(tensor))
        name = function._schema.name.split("::")[1]
        if (outputs or function._schema.is_mutable) and not name.startswith(("empty", "new_empty")):
            self.operations.append((function, *own, [self._alias(tensor) for tensor in outputs]))
        return result

    def replay(self) -> None:
        self.spoilt = False
        for function, args, kwargs, outputs in self.operations:
            known = {_storage(tensor) for tensor in _tensors((args, kwargs))}
            found = [tensor for tensor in _tensors(function(*args, **kwargs)) if _storage(tensor) not in known]
            for output, tensor in zip(outputs, found, strict=True):
                held(output).copy_(held(tensor))

    def is_free(self, storage: int) -> bool:
        """Whether nobody has a tensor of this memory any more."""
        return all(user() is None for user in self._own[storage][1])

    def spoil(self, chosen: Callable[[int], bool]) -> None:
        """Writes values that nobody can go on with into memory of the capture."""
        self.spoilt = True
        for storage, (tensor, _) in self._own.items():
            if chosen(storage):
                values = held(tensor)
                values.fill_(torch.nan if values.is_floating_point() else values.dtype == torch.bool or SPOILT)

    def _alias(self, tensor: Tensor) -> Tensor:
        """A tensor over the same memory, which it stays with whatever becomes of the other."""
        owner, alias = self._aliases.get(id(tensor), (None, tensor))
        if owner is None or owner() is not tensor:
            alias = held(tensor).detach()
            alias = OnDevice(alias) if isinstance(tensor, OnDevice) else alias
            self._aliases[id(tensor)] = weakref.ref(tensor), alias
        return alias


SPOILT = 1 << 40
"""No index, token or position. Smaller formats have a part of it."""


class _Recording(TorchDispatchMode):
    """Within it, operations are added to a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS | SIZES:
            raise InCapture(f"read by {function} within a captured function")
        return self._graph.add(function, args, kwargs or {})


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _storage(tensor: Tensor) -> int:
    return held(tensor).untyped_storage()._cdata
