"""The versions of a model's weights: whether they were written since the last question.

There are two questions. `writes` asks the counters of PyTorch and of packed weights, which takes
0.1 ms for 160 modules; it misses writes through `Tensor.data` of ordinary weights. It is enough for
drafters, which may be wrong. `sums` reads all bytes, for prefixes, which must be right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.weights.matrix import PACKED
from shoal.models.weights.parameter import PackedWeight

WORDS = 1 << 20
"""The number of words of 8 bytes that one sum of a weight reads."""
PLAIN = (bool, int, float, str, type(None))
"""The types of a module's attributes that count as its settings."""
Version = list[tuple[int, int]]
"""An identity and a number of writes for each tensor."""


def writes(module: nn.Module | Tensor, without: Collection[int] = ()) -> Version:
    """Returns numbers that change when weights or buffers of a module are written or replaced.

    Args:
        module: a module, or one tensor.
        without: the identities of tensors that are left out.
    """
    return [_counted(one) for one in tensors(module) if id(one) not in without]


def tensors(module: nn.Module | Tensor) -> Iterator[Tensor]:
    """Yields the weights and buffers of a module, several times if they are tied.

    PyTorch's own iterators know names and take ten times as long.
    """
    if isinstance(module, Tensor):
        yield module
        return
    left = [module] if isinstance(module, nn.Module) else []  # other passes have no modules
    while left:
        one = left.pop()
        yield from (each for each in one._parameters.values() if each is not None)
        yield from (each for each in one._buffers.values() if each is not None)
        left += [each for each in one._modules.values() if each is not None]


def _counted(tensor: Tensor) -> tuple[int, int]:
    if isinstance(tensor, PackedWeight):
        return id(tensor.matrix), tensor.matrix.epoch
    return id(tensor), 0 if tensor.is_inference() else tensor._version


class Updates:
    """A count of a target's updates that the weights of its drafter have not followed.

    Args:
        target: the target.

    Attributes:
        behind: the number of questions that found another target since the drafter's own weights
            were written last.
    """

    def __init__(self, target: nn.Module) -> None:
        self._target, self._own, self.behind = writes(target), Version(), 0

    def count(self, target: nn.Module, own: nn.Module | Tensor | None) -> int:
        """Counts an update if there was one since the last question, and returns `behind`.

        Args:
            target: the target.
            own: the drafter's weights; those that are the target's follow it and do not count.
        """
        version = Version() if own is None else writes(own, {id(one) for one in tensors(target)})
        if not version:
            return 0
        found = writes(target)
        if found != self._target:
            self._target, self.behind = found, self.behind + 1
        if version != self._own:
            self.behind = 0 if self._own else self.behind
            self._own = version
        return self.behind


def sums(hf: nn.Module) -> list[Tensor]:
    """Returns sums that change with a write into the weights and buffers of a model.

    They change with the hooks and the plain attributes of its modules as well: a pass over a few
    tokens need not meet a hook that looks for another one. Packed weights are written by their
    matrix alone, which counts the writes; so does PyTorch for tensors without bytes of their own.
    """
    found: list[Tensor] = []
    counts = [hash(_settings(module)) for module in hf.modules()]
    for tensor in (*hf.parameters(), *hf.buffers()):
        if isinstance(tensor, PackedWeight):
            counts += [id(tensor.matrix), tensor.matrix.epoch]
            if tensor.matrix.form == PACKED:
                continue
            tensor = tensor.of(tensor.matrix.dense())
        try:
            found += _sums_of(tensor.detach())
        except (NotImplementedError, TypeError, RuntimeError):
            counts += [id(tensor), 0 if tensor.is_inference() else tensor._version]
    devices = dict.fromkeys(each.device for each in found)
    return [
        torch.tensor(counts),
        *(torch.stack([one for one in found if one.device == device]) for device in devices),
    ]


def _settings(module: nn.Module) -> tuple[object, ...]:
    own = vars(module)
    plain = [(name, value) for name, value in own.items() if isinstance(value, PLAIN)]
    return (*own["_forward_hooks"], None, *own["_forward_pre_hooks"], own.get("forward"), *plain)


def _sums_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a sum of each `WORDS` words of a tensor, each word times an odd number of its place.

    The sums tell where a word is. A single word that changes always changes its sum, as odd numbers
    have inverses modulo 2^64.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # this process's shard of a parallel model
    rows = tensor.t() if tensor.ndim == 2 and tensor.t().is_contiguous() else tensor
    data = rows.contiguous().flatten().view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = F.pad(data, (0, -len(data) % 8)).clone()
    words, factors = data.view(torch.int64), _factors(tensor.device)
    for part in words.split(WORDS):
        yield (part * factors[: len(part)]).sum()


@cache
def _factors(device: torch.device) -> Tensor:
    """Makes `WORDS` odd numbers, int64."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(torch.int64)
    numbers = torch.randint(limits.min, limits.max, (WORDS,), generator=generator)
    return (numbers | 1).to(device)
