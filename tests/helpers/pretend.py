"""A device that pretends to be a GPU: tensors that say `cuda:0`, whose values lie on the CPU.

Within `Pretend`, tensors of that device mix with those of the CPU only where CUDA allows it, and whatever crosses between host and
device is counted. So the whole engine can be run as it would run on a GPU, and held to what a round may ask of the host.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda:0")
aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.item.default, aten.equal.default, aten.is_nonzero.default}
"""Give a value to the host."""
SIZES = {aten.nonzero.default, aten.unique_consecutive.default, aten._unique2.default, aten.masked_select.default}
"""Have a result whose size the host must wait for."""
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


WHOLE = {aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default}
"""One launch each, though PyTorch composes them of others."""


class Mixed(RuntimeError):
    """Expected all tensors to be on the same device."""


class InCapture(RuntimeError):
    """Operation not permitted when stream is capturing."""


class OnDevice(Tensor):
    """A tensor that says it is on the device; `held` has its values.

    It says so to Python alone: a torch without CUDA has no guard for such a device, which its own code asks for.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device="cpu"
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} of a tensor of the pretended device, outside of it")

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Where the device is among what is asked, it is a copy from there, or none."""
        places = [place for place in (*args, kwargs.get("device")) if isinstance(place, (str, torch.device))]
        if not places:
            return super().to(*args, **kwargs)
        rest = [value for value in args if not isinstance(value, (str, torch.device))]
        kwargs.pop("device", None)
        moved = self if torch.device(places[0]).type == "cuda" else self.cpu()
        return Tensor.to(moved, *rest, **kwargs) if rest or kwargs else moved

    def cpu(self) -> Tensor:  # type: ignore[override]
        return aten._to_copy.default(self, device="cpu")

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"


class Pretend(TorchDispatchMode):
    """Within it, there is such a device.

    Attributes:
        counts: "upload" and "download" (copies between host and device), "read" (a value that the host waits for), "size" (a
            result whose size the host waits for), "launch" (of any operation on the device), "captured" (of those in a captured
            function), "replay" (of such a function).
        where: the operations behind crossings, and the lines of shoal that they are of.
        lost: the device fails whenever somebody waits for it.

    Asynchronous copies and replays happen at the next wait, or where another operation is launched: a buffer of the host that is
    written before is what the device gets, and one that is read before has what it had.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.where: list[tuple[str, str]] = []
        self.capturing = False
        self.lost = False
        self._depth = 0
        self._queue: list[Callable[[], None]] = []
        self._pinned: list[Tensor] = []

    def count(self, what: str, function: Any) -> None:
        if self.capturing:
            raise InCapture(f"{what} by {function} within a captured function")
        self.counts[what] += 1
        self.where.append((what, f"{function} at {_line()}"))

    def later(self, work: Callable[[], None]) -> None:
        """Puts off a copy or a replay until the host waits for the device, or launches an operation of another kind."""
        self._queue.append(work)

    def after(self, work: Callable[[], None]) -> None:
        """Does it once the device has done what it was given before."""
        if self._queue:
            self.later(work)
        else:
            work()

    def flush(self) -> None:
        """The device does what it was given."""
        queue, self._queue = self._queue, []
        if queue:
            with self:
                for work in queue:
                    work()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Within it nothing may cross between host and device."""
        before, self.capturing = self.capturing, True
        try:
            yield
        finally:
            self.capturing = before

    def synchronize(self) -> None:
        """Waits for the device's only stream."""
        self.flush()
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def __enter__(self) -> Pretend:
        if not self._depth:
            torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]  # torch.tensor makes it on the host, then moves it
            self._lazy_init, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None
            self._current_stream, torch.cuda.current_stream = torch.cuda.current_stream, lambda device=None: self
            self._is_pinned, Tensor.is_pinned = Tensor.is_pinned, lambda tensor, *_: self._pins(tensor)  # type: ignore[method-assign]
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if not self._depth:
            torch._C._set_only_lift_cpu_tensors(False)  # type: ignore[attr-defined]
            torch.cuda._lazy_init, torch.cuda.current_stream = self._lazy_init, self._current_stream
            Tensor.is_pinned = self._is_pinned  # type: ignore[method-assign]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(
            function.name(), "CompositeImplicitAutograd"
        ):
            with self:  # in inference mode these come as they were called
                return function.decompose(*args, **kwargs)
        if function is aten.alias.default and isinstance(args[0], OnDevice):
            return OnDevice(args[0].held)
        tensors: list[Tensor] = []
        mapped(tensors.append, (args, kwargs))
        devices = {isinstance(tensor, OnDevice) for tensor in tensors}
        asked = kwargs.get("device")
        to_device = torch.device(asked).type == "cuda" if asked is not None else True in devices
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        pinned = kwargs.pop("pin_memory", None)
        if function is aten._to_copy.default and to_device not in devices:
            self.count("upload" if to_device else "download", function)
        elif function is aten.copy_.default and len(devices) == 2:
            self.count("upload" if isinstance(args[0], OnDevice) else "download", function)
            asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if asynchronous and any(self._pins(tensor) for tensor in tensors):
                self.later(lambda: held(args[0]).copy_(held(args[1])))
                return args[0]
        elif True in devices:
            self._check(function, args, tensors)
        if True in devices and not is_free(function):
            self.flush()
        if function is aten.histc.default:
            args = (args[0].held.float() if True in devices else args[0].float(), *args[1:])  # a CPU has none of integers
        result = function(*mapped(held, args), **mapped(held, kwargs))
        if pinned:
            self._pinned.append(result)
        if not to_device:
            return result
        given = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
        return mapped(lambda tensor: given[id(tensor)] if id(tensor) in given else OnDevice(tensor), result)

    def _pins(self, tensor: Tensor) -> bool:
        """Whether it is of pinned memory: copies between it and the device go on while the host does."""
        return any(tensor.untyped_storage()._cdata == one.untyped_storage()._cdata for one in self._pinned)

    def _check(self, function: Any, args: Any, tensors: list[Tensor]) -> None:
        """An operation on the device."""
        for tensor in tensors:
            if not isinstance(tensor, OnDevice) and tensor.dim() > 0:
                if function not in INDEXING:
                    raise Mixed(f"{function}: tensors of both devices")
                self.count("upload", function)  # an index on the host: allowed, and copied each time
        by_truth = function in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        if function in READS:
            self.count("read", function)
        elif function in SIZES or by_truth:
            self.count("size", function)
        self.counts["captured" if self.capturing else "launch"] += not is_free(function)


def _line() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/shoal/" in frame.filename]
    return f"{frames[-1].filename.split('/shoal/')[-1]}:{frames[-1].lineno} {frames[-1].line}" if frames else "outside"


def mapped(change: Callable[[Tensor], Any], values: Any) -> Any:
    """The same with all tensors changed."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, (list, tuple)):
        return type(values)(mapped(change, value) for value in values)
    return {name: mapped(change, value) for name, value in values.items()} if isinstance(values, dict) else values


def held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, OnDevice) else tensor


def is_free(function: Any) -> bool:
    """Whether it only makes a view, or memory."""
    name = function._schema.name.split("::")[1]
    returns = function._schema.returns
    view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return view or name.startswith(("empty", "new_empty", "detach", "lift", "_unsafe_view"))


def moved(model: Any) -> Any:
    """A model with its parameters and buffers on the device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(OnDevice(parameter.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnDevice(buffer)
    return model
