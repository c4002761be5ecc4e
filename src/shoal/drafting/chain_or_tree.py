"""A draft model that proposes chains or trees, whichever brings most tokens per second: `draft="DIR:tree=auto"`.

A tree of width w finds what the chain misses with siblings, and takes w times the columns of the target's pass; where columns cost
next to nothing and steps of the draft model are dear, trees win, and chains where it is the other way round. `lookahead="auto"`
measures both (`shoal.lookahead.choosing`). With a fixed draft length all are chains.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.drafting.model import ModelDrafter
from shoal.drafting.multi_exit import MultiExitDrafter
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.shapes import RsdS, shape_of
from shoal.drafting.tree_model import TreeDrafter
from shoal.errors import UnsupportedModel
from shoal.models.runner import Runner
from shoal.types.trees import DraftTree

WIDTHS = (2, 4)
"""Widths of the trees among which `tree=auto` chooses, beside chains."""


class ChainOrTreeDrafter(TreeDrafter):
    """Chains, as of `ModelDrafter`, and trees of RSD-S of several widths, by one model with one cache.

    Args:
        runner, vocab_size, pending: as of `ModelDrafter`. widths: of the trees. nodes: most of a tree.

    Raises:
        UnsupportedModel: the draft model takes no trees itself.
    """

    def __init__(self, runner: Runner, vocab_size: int, widths: Sequence[int], nodes: int, *, pending: int = 2) -> None:
        self._shapes = [RsdS(width, nodes) for width in widths]
        super().__init__(runner, vocab_size, self._shapes[0], pending=pending)
        self.choices = ["chain", *(f"tree of width {width}" for width in widths)]
        self._used = 0

    def use(self, choice: int) -> None:
        self._used = choice
        if choice:
            self._shape = self._shapes[choice - 1]

    def propose(self, inputs: DraftInputs) -> DraftTree:
        return super().propose(inputs) if self._used else ModelDrafter.propose(self, inputs)


def tree_drafter(target: Runner, *, model: Drafter, tree: str, nodes: int, width: int = 2) -> TreeDrafter:
    """Makes a drafter of trees from that of a draft model.

    Raises:
        UnsupportedModel: the models have different tokenizers, or the draft model takes no trees.
    """
    assert isinstance(model, ModelDrafter)
    if model.shared is not None or type(model) not in (ModelDrafter, MultiExitDrafter):
        raise UnsupportedModel(
            f"{model.runner.name} has another tokenizer than {target.name}: it can draft chains, not trees"
        )
    if tree == "auto":
        return ChainOrTreeDrafter(model.runner, target.vocab_size, WIDTHS, nodes)
    return TreeDrafter(model.runner, target.vocab_size, shape_of(tree, width, nodes))
