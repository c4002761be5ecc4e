"""What `draft="DIR:tree=rsd-s,width=3,nodes=12"` means: a draft model that proposes trees. Torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.errors import RequestError, UnsupportedModel

if TYPE_CHECKING:
    from shoal.drafting.growth import Shape
    from shoal.drafting.protocol import Drafter
    from shoal.models.runner import Runner

MOST_NODES = 63
"""Of a draft tree (`shoal.types.trees`)."""
TREES = ("rsd-c", "rsd-s", "dyspec", "k-seq", "auto")
WIDTHS = (2, 4)
"""Of the trees among which `tree=auto` chooses, beside chains."""


@dataclass(frozen=True)
class ModelTrees:
    """Trees drawn from a draft model, see `shoal.drafting.shapes`.

    Attributes:
        source: the model's Hub id, directory or "bundled". tree: one of `TREES`; "auto" = chains or trees, by what they bring.
        width: first children, beam or sequences; 0 = 2, of dyspec the only one.
        nodes: most of a row's tree, of dyspec the mean over the rows of the batch.

    Raises:
        RequestError: another tree, a width that the tree does not have, or nodes not in width..63.
    """

    source: str
    tree: str
    width: int = 0
    nodes: int = 16

    def __post_init__(self) -> None:
        if self.tree not in TREES:
            raise RequestError(f"tree must be one of {', '.join(TREES)}, got {self.tree!r}")
        if self.tree in ("dyspec", "auto") and self.width:
            raise RequestError(f"tree={self.tree} takes no width: give nodes alone, as in tree={self.tree},nodes=16")
        if not self._width <= self.nodes <= MOST_NODES:
            raise RequestError(f"a draft tree has at most {MOST_NODES} nodes and at least its width, got {self.name}")

    @property
    def _width(self) -> int:
        return self.width or 2

    @property
    def name(self) -> str:
        width = "" if self.tree in ("dyspec", "auto") else f",width={self._width}"
        return f"model:tree={self.tree}{width},nodes={self.nodes}"

    @property
    def shape(self) -> Shape:
        """Imports torch."""
        from shoal.drafting.shapes import shape_of

        return shape_of(self.tree, self._width, self.nodes)

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        from shoal.drafting.chain_or_tree import ChainOrTreeDrafter
        from shoal.drafting.model import ModelDrafter
        from shoal.drafting.multi_exit import MultiExitDrafter
        from shoal.drafting.tree_model import TreeDrafter

        assert isinstance(model, ModelDrafter)
        if model.shared is not None or type(model) not in (ModelDrafter, MultiExitDrafter):
            raise UnsupportedModel(f"{self.source} has another tokenizer than {target.name}: it can draft chains, not trees")
        if self.tree == "auto":
            return ChainOrTreeDrafter(model.runner, target.vocab_size, WIDTHS, self.nodes)
        return TreeDrafter(model.runner, target.vocab_size, self.shape)
