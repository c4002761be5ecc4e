"""The multi-token-prediction layer in a target's checkpoint drafts (`shoal.models.mtp_layer`).

It is read like EAGLE-3 heads that read the last hidden state (`shoal.drafting.eagle3`): the same
ragged cache, the same states of committed and drafted tokens, chains and trees by their q.
"""

from __future__ import annotations

from pathlib import Path

from shoal.drafting.checkpoints import layers_and_width, once
from shoal.drafting.eagle3 import Eagle3Drafter, Eagle3TreeDrafter
from shoal.drafting.shapes import shape_of
from shoal.errors import UnsupportedModel
from shoal.models.mtp_layer import MtpHeads, checkpoint_of, layer_names, load_layer
from shoal.models.runner import Runner


class MtpDrafter(Eagle3Drafter):
    """A drafter that samples k tokens per row from the layer.

    Its arguments are those of `Eagle3Drafter`.
    """

    name = "mtp"

    @classmethod
    def for_target(
        cls, target: Runner, *, directory: str = "", tree: str = "", width: int = 2, nodes: int = 16
    ) -> Eagle3Drafter:
        """Makes the drafter of an engine.

        Raises:
            UnsupportedModel: the target has no such layer, or not as files on this machine.
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
        if not tree or not target.takes_trees:
            return MtpDrafter(heads, reads, target)
        return MtpTreeDrafter(heads, reads, target, shape=shape_of(tree, width, nodes))


class MtpTreeDrafter(Eagle3TreeDrafter):
    """A drafter of trees drawn from the layer's q.

    Its arguments are those of `Eagle3TreeDrafter`.
    """

    name = "mtp"


def has_layer(target: Runner) -> bool:
    """Returns True if the target's checkpoint has one such layer."""
    place = _place(target)
    return place is not None and len(layer_names(place, layers_and_width(target)[0])) == 1


def _place(target: Runner) -> Path | None:
    """Returns the directory of the checkpoint, if this process has all of the model."""
    if not target.has_modules or (target.mixers is None and target.cut_obstacle is not None):
        return None
    return checkpoint_of(target.hf)


def _load(directory: Path, target: Runner) -> MtpHeads:
    return load_layer(target.hf, directory, target.name)
