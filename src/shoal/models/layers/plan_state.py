"""The state of a pass that is launched kernel by kernel.

It is a plan over a slot cache, as long as its rows are.
"""

from __future__ import annotations

from torch import Tensor

from shoal.models.attention.masks import Masks
from shoal.models.attention.methods import Method
from shoal.models.cache import Plan, SlotCache


class PlanState:
    """The state of a pass that was announced to the cache.

    See `shoal.models.layers.decoder.PassState`.

    Args:
        method: attends.
    """

    def __init__(self, plan: Plan, cache: SlotCache, method: Method) -> None:
        self.masks, self.method = Masks(plan), method
        self._plan, self._cache = plan, cache

    @property
    def cells(self) -> Tensor:
        """The cells that the tokens are written to, [tokens] int64."""
        return self._cache.written

    def stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of a layer as they are written.

        They are those of the slots, or of the shared store.
        """
        return self._cache.written_stores(layer)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the rows of the pass, [rows, kv heads, keys, dim]."""
        return self._cache.rows(layer)

    def shared(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the shared store of the layer that was asked for last.

        Returns:
            [cells, kv heads, dim] each; (None, None) without prefixes.
        """
        return self._cache.shared()

    def unpacked(self, query: Tensor) -> Tensor:
        """Converts [tokens, heads, dim] to [rows, q, heads, dim]."""
        plan = self._plan
        return (
            plan.unpack(query[None])
            if plan.packed
            else query.view(plan.rows, plan.q, *query.shape[1:])
        )

    def packed(self, attended: Tensor) -> Tensor:
        """Converts [rows, q, heads, dim] to [tokens, heads, dim]."""
        return self._plan.pack(attended)[0] if self._plan.packed else attended.flatten(0, 1)
