"""The multi-token-prediction layers in a target's checkpoint draft (`shoal.models.mtp_layer`).

They are read like EAGLE-3 heads that read the last hidden state (`shoal.drafting.eagle3`): the same
ragged cache, the same states of committed and drafted tokens, chains and trees by their q.

Several layers are a cascade in one cache. The first pass of a draft computes all layers for the
tokens that were committed: the state of a token for layer k is the result of layer k - 1 for the
token before. A later pass, over the j-th drafted token, computes the layers from j on: those whose
keys a further draft will read. Layer j draws the next token; behind the last layer the last one
goes on by its own results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shoal.drafting.eagle3 import Eagle3Drafter, Eagle3TreeDrafter
from shoal.drafting.protocol import DraftInputs
from shoal.drafting.shapes import shape_of
from shoal.drafting.trained_heads import layers_and_width, once
from shoal.errors import ModelError, UnsupportedModel
from shoal.models.cache import Plan
from shoal.models.eagle3_layer import Eagle3Model
from shoal.models.load_report import LOG
from shoal.models.mtp_layer import MtpHeads, layer_names, load_layer, unplaced
from shoal.models.pretrained import SCALES, checkpoint_of
from shoal.models.runner import Runner
from shoal.types.requests import Row
from shoal.types.trees import DraftTree


class MtpDrafter(Eagle3Drafter):
    """A drafter that samples k tokens per row from the layer (arguments: see `Eagle3Drafter`)."""

    name = "mtp"

    @classmethod
    def for_target(
        cls, target: Runner, *, directory: str = "", tree: str = "", width: int = 2, nodes: int = 16
    ) -> Eagle3Drafter:
        """Makes the drafter of an engine.

        Raises:
            UnsupportedModel: the target has no such layer, or not as files on this machine; or
                trees of several layers are asked for.
            ModelError: tensors are missing.
        """
        place = _place(target)
        if place is None:
            raise UnsupportedModel(
                f"mtp reads the layer from the checkpoint of {target.name}, which is no directory "
                f"of a Transformers model on this machine, or is shared by several processes"
            )
        heads = once(target, str(place), _load)
        reads = (layers_and_width(target)[0],)
        if tree and heads.depth > 1:
            raise UnsupportedModel(
                f"{target.name} has {heads.depth} multi-token-prediction layers, which draft "
                f"chains: leave out tree="
            )
        if heads.depth > 1:
            return CascadeDrafter(heads, reads, target)
        if not tree or not target.takes_trees:
            return MtpDrafter(heads, reads, target)
        return MtpTreeDrafter(heads, reads, target, shape=shape_of(tree, width, nodes))


class MtpTreeDrafter(Eagle3TreeDrafter):
    """A drafter of trees drawn from the layer's q (arguments: see `Eagle3TreeDrafter`)."""

    name = "mtp"


class CascadeDrafter(MtpDrafter):
    """A drafter that samples token k + 1 of each row from layer k.

    Its arguments are those of `Eagle3Drafter`.
    """

    def __init__(self, heads: MtpHeads, reads: Sequence[int], target: Runner) -> None:
        super().__init__(heads, reads, target)
        self._padding: set[Row] = set()
        """The rows of the round that are not drafted for: their tokens are padding."""
        self._last: dict[Row, tuple[int, Tensor]] = {}
        """The results of all layers, [layers, width], for a committed token, by its position.

        It is the last one in the cache.
        """
        self._ends: dict[int, tuple[int, Tensor]] = {}
        """Such results for the last token of a prompt's cells, by the identity of the request."""

    def _model_of(self, heads: Any) -> Eagle3Model:
        return CascadeModel(heads, self)

    def propose(self, inputs: DraftInputs) -> DraftTree:
        pairs = zip(inputs.rows, inputs.lengths, strict=True)
        self._padding = {row for row, length in pairs if not length}
        tree = super().propose(inputs)
        self._padding = set()
        return tree

    def step(self, plan: Plan) -> int:
        """Returns how many drafted tokens the rows of a pass have, with its own: 0 in the first."""
        ends = [
            start - len(row.tokens) + 1
            for row, start in zip(self._rows(plan), plan.starts, strict=True)
            if row is not None
        ]
        return max(0, *ends) if ends else 0

    def before(self, plan: Plan) -> Tensor:
        """Returns the results before the first token of each row, [layers, rows, width].

        They are zeros for rows that begin.
        """
        heads, parts = self._heads, []
        for row, start in zip(self._rows(plan), plan.starts, strict=True):
            known = [] if row is None else [self._last.get(row), self._ends.get(id(row.request))]
            fitting = (one[1] for one in known if one is not None and one[0] == start - 1)
            none = torch.zeros(
                heads.depth, heads.width, dtype=self.model.dtype, device=self.model.device
            )
            parts.append(next(fitting, none))
        return torch.stack(parts, dim=1)

    def note(self, plan: Plan, results: Tensor) -> None:
        """Keeps the results of a first pass, [layers, rows, q, width], that later passes read."""
        for b, (row, start, count) in enumerate(
            zip(self._rows(plan), plan.starts, plan.counts, strict=True)
        ):
            if row is None or row in self._padding:
                continue
            end = min(start + count, len(row.tokens)) - 1
            if end >= start:
                self._last[row] = end, results[:, b, end - start].clone()
            boundary = row.prompt_length - 2
            if start <= boundary <= end:
                self._ends[id(row.request)] = boundary, results[:, b, boundary - start].clone()

    def end(self, rows: Sequence[Row]) -> None:
        super().end(rows)
        for row in rows:
            self._last.pop(row, None)
        left = self._prompts._of
        self._ends = {key: one for key, one in self._ends.items() if key in left}


class CascadeModel(Eagle3Model):
    """A model of several layers and a runner's cache, in which each has its own keys.

    Args:
        heads: the layers.
        drafter: the drafter, which knows the states of tokens.
    """

    def __init__(self, heads: MtpHeads, drafter: CascadeDrafter) -> None:
        super().__init__(heads, drafter._states)
        self._drafter = [drafter]  # in a list, because it is no module
        self._results = torch.empty(0)
        """The results of all layers for the last token of each row in the pass before."""

    def forward(
        self,
        tokens: Tensor,
        past_key_values: Any,
        use_cache: bool,
        position_ids: Tensor,
        logits_to_keep: int = 0,
    ) -> Any:
        """Computes the logits of the layer that draws the next token; see `Eagle3Model.forward`."""
        plan, drafter = past_key_values.plan, self._drafter[0]
        step, depth = drafter.step(plan), self.heads.depth

        def compute(number: int, states: Tensor) -> tuple[Tensor, Tensor]:
            packed = self.heads.compute(
                tokens, plan.pack(states), position_ids, past_key_values, number
            )
            return packed, plan.unpack(packed)

        if not step:
            states, before = self._states(plan), drafter.before(plan)
            drawing_states, parts = torch.empty(0), []
            for number in range(depth):
                packed, own = compute(number, states)
                drawing_states = packed if number == 0 else drawing_states
                states = torch.cat([before[number][:, None], own[:, :-1]], dim=1)
                parts.append(own)
            results = torch.stack(parts)
            ends = torch.tensor(plan.counts, device=results.device) - 1
            self._results = results[:, torch.arange(plan.rows, device=results.device), ends]
            drafter.note(plan, results)
        else:
            results, drawing = self._results.clone(), min(step, depth - 1)
            drawing_states = torch.empty(0)
            for number in range(drawing, depth):
                above = number if step > number else number - 1
                packed, own = compute(number, self._results[above][:, None])
                drawing_states = packed if number == drawing else drawing_states
                results[number] = own[:, -1]
            self._results = results
        return SimpleNamespace(logits=self.heads.logits(drawing_states[:, -logits_to_keep:]))


def has_layer(target: Runner) -> bool:
    """Returns True if the target's checkpoint has such layers, and they can be loaded."""
    place = _place(target)
    if place is None or not (layer_names(place, layers_and_width(target)[0]) or unplaced(place)):
        return False
    try:
        once(target, str(place), _load)
    except ModelError as error:
        LOG.warning("draft=auto passes over the layer for further tokens: %s", error)
        return False
    return True


def _place(target: Runner) -> Path | None:
    """Returns the directory of the checkpoint, if this process has all of the model."""
    if not target.has_modules or (target.mixers is None and target.cut_obstacle is not None):
        return None
    return checkpoint_of(target.hf)


def _load(directory: Path, target: Runner) -> MtpHeads:
    """Loads the layers. Raises UnsupportedModel if they are quantised: scales would be ignored."""
    names = layer_names(directory, layers_and_width(target)[0])
    scales = [name for each in names.values() for name in each if SCALES.search(name)]
    if scales:
        raise UnsupportedModel(
            f"{target.name}: its multi-token-prediction layer is quantised ({scales[0]}), and "
            f"Transformers reads no scales of it; take a checkpoint that leaves the layer in floats"
        )
    return load_layer(target.hf, directory, target.name)
