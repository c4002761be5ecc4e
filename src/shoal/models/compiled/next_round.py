"""The inputs of the round that follows another one, filled on the device by its results.

The host need not know the verdict: the next round is launched before it waits for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.compiled.round_functions import RoundFunctions, RoundModel
from shoal.models.compiled.transfer import Upload


class NextRound:
    """The inputs of a round of the same rows, settings and draft lengths as the one before.

    Args:
        functions: the functions of both rounds, and their buffers.
        target: the target.
        drafter: None for plain decoding, k = 0.
    """

    def __init__(
        self, functions: RoundFunctions, target: RoundModel, drafter: RoundModel | None
    ) -> None:
        self._functions, self._target, self._drafter = functions, target, drafter
        kind, device = functions.kind, target.passes.hf.device
        self._shape = kind.rows, 2 * (kind.k + 1), kind.numbers
        rows, positions, numbers = self._shape
        self._table = Upload({"uniforms": rows * positions * numbers}, device)
        self._table.reals_on_host("uniforms").fill(0.5)
        self._positions = torch.arange(1, kind.k + 2, device=device)

    def send(self, uniforms: Tensor) -> None:
        """Sends the uniforms from which `fill` takes those of the next round.

        Args:
            uniforms: those of the next 2 k + 2 positions of the rows, counted from the begin of the
                round before, [rows, positions, numbers] float64 on the host.
        """
        self._table.reuse()
        table = self._table.reals_on_host("uniforms").reshape(self._shape)
        table[: len(uniforms)] = uniforms.numpy()
        self._table.send()

    def fill(self, drafts: int, results: Tensor) -> tuple[Tensor, ...]:
        """Fills the inputs by the results of a round of `drafts` drafts of each row.

        A function to be captured. The drafter's cache lacks the last draft of a row that accepted
        all.

        Args:
            results: the results of the target's pass, [rows, columns] int64.

        Returns:
            No tensors: all that it writes are inputs.
        """
        functions, drafter = self._functions, self._drafter
        block, inputs = functions.target_view(drafts).block, functions.inputs
        # Bounded, as the results hold anything when the function is built.
        accepted, following = results[:, 0].clamp(0, drafts), results[:, 1]
        counts = block.bounds[1].clone()
        real = counts.clamp(max=1)
        starts = block.bounds[0] + (accepted + 1) * real
        block.move(starts, counts, self._target.cache.capacity)
        inputs["last"].copy_(following)
        if drafter is not None:
            lacks, capacity = (accepted == drafts).long() * real, drafter.cache.capacity
            functions.block("first").move(starts - lacks, real + lacks, capacity)
            functions.block("later").move((starts + 1) * real, real, capacity)
            both = torch.stack([functions.tokens[:, drafts], following], dim=1)
            alone = torch.stack([following, torch.zeros_like(following)], dim=1)
            known = drafter.passes.hf.get_output_embeddings().weight.shape[0]
            fed = torch.where(lacks[:, None] > 0, both, alone).clamp(max=known - 1)
            inputs["pending"].view(len(fed), -1).copy_(fed)
        table = self._table.reals("uniforms").view(self._shape)
        places = (accepted[:, None] + self._positions)[..., None].expand_as(functions.uniforms)
        functions.uniforms.copy_(table.gather(1, places))
        return ()
