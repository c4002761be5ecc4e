"""Whether a model still is what was read off it: passes that do without its modules, or were captured, know the weights and layers
that it had. Adapters, hooks and replaced tensors are for its modules alone."""

from __future__ import annotations

import operator
from itertools import repeat
from typing import cast

from torch import Tensor, nn

from shoal.models.weights.parameter import PackedWeight


class Structure:
    """The modules of a model, its parameters and where they lie.

    Each pass asks whether they have changed. Loops of the interpreter would take three times as long as maps.

    Args:
        hf: any module. Packed parameters may move: their matrices know it.
    """

    def __init__(self, hf: nn.Module) -> None:
        modules = list(hf.modules())
        children = [(module._modules, name, child) for module in modules for name, child in module._modules.items()]
        self._parents, self._names, self._children = map(list, zip(*children, strict=True)) if children else ([], [], [])
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._own = [module.__dict__ for module in modules]
        self._forwards = [fields.get("forward") for fields in self._own]
        found = [
            (cast("dict[str, Tensor | None]", module._parameters), name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
        ]
        self._owners, self._parameter_names, self._parameters = (
            map(list, zip(*found, strict=True)) if found else ([], [], [])
        )
        self._plain = [one for *_, one in found if one is not None and not isinstance(one, PackedWeight)]
        self._addresses = list(map(Tensor.data_ptr, self._plain))
        self._hooked = list(map(len, self._hooks))

    @property
    def changed(self) -> bool:
        """Whether a module, a parameter or a tensor behind one is another, or a module has other hooks or another forward."""
        return (
            not all(map(operator.is_, map(dict.get, self._owners, self._parameter_names), self._parameters))
            or list(map(Tensor.data_ptr, self._plain)) != self._addresses
            or not all(map(operator.is_, map(dict.get, self._parents, self._names), self._children))
            or list(map(len, self._hooks)) != self._hooked
            or not all(map(operator.is_, map(dict.get, self._own, repeat("forward")), self._forwards))
        )
