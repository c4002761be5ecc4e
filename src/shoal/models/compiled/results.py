"""The results of a round: packed on the device, unpacked on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.models.compiled.transfer import Numbers, packed
from shoal.types.rounds import Verdict

_TOO_FEW = 2
"""A number added to `sound` of a row whose verdict would need more candidates."""


class Found(NamedTuple):
    """The results of a round, of its real rows.

    Attributes:
        drafts: [rows, k], -1 where the drafter has no distribution.
        accepted: numbers of accepted drafts, [rows].
        tokens: the verdict's tokens, [rows].
        sound: [rows], True if the target's logits are sound and the verdict is by the declared
            distributions.
        too_few: True if candidates were too few for some row; the next round looks at more.
        probs: the verdict's probabilities, [rows, k + 1].
        logprobs: log-probabilities of the tokens, [rows, k + 1].
        logits: logits of the target, [rows, k + 1, vocab], on the device, good until the next
            round.
        drafting: seconds of the drafter on the device.
        verifying: seconds of the target on the device.
    """

    drafts: Numbers
    accepted: Numbers
    tokens: Numbers
    sound: npt.NDArray[np.bool_]
    too_few: bool
    probs: npt.NDArray[np.float64]
    logprobs: npt.NDArray[np.float64]
    logits: Tensor
    drafting: float
    verifying: float


def packed_results(
    logits: Tensor, fed: Tensor, drawn: Sequence[Tensor], verdict: Verdict, listed: Tensor | None
) -> Tensor:
    """Packs all results of a round but its logits, [rows, columns] int64; a function of tensors.

    Args:
        logits: logits of the target, [rows, k + 1, vocab].
        fed: the drafts that the target was fed, [rows, k].
        drawn: the tokens that the drafter drew, k times [rows].
        listed: True for rows whose verdict is by the declared distributions, [rows] bool; None =
            all.
    """
    inside = torch.arange(fed.shape[1], device=fed.device) < verdict.accepted[:, None]
    path = torch.cat(
        [torch.where(inside, fed, verdict.token[:, None]), verdict.token[:, None]], dim=1
    )
    width = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits.log_softmax(-1, dtype=width).gather(-1, path[..., None]).squeeze(-1)
    sound = (logits.amax(-1).abs().amax(-1) < torch.inf).long()
    if listed is not None:
        sound = torch.where(listed, sound, sound + _TOO_FEW)
    drafts = [tokens[:, None] for tokens in drawn]
    return packed(verdict.accepted, verdict.token, sound, verdict.probs, logprobs, *drafts)


def unpacked(numbers: Numbers, logits: Tensor, drafting: float, verifying: float) -> Found:
    """Unpacks the results [rows, columns] on the host; the logits are those of the same rows."""
    columns, reals, sound = logits.shape[1], numbers.view(np.float64), numbers[:, 2]
    return Found(
        numbers[:, 3 + 2 * columns :],
        numbers[:, 0],
        numbers[:, 1],
        sound=sound == 1,
        too_few=bool(sound.max() >= _TOO_FEW),
        probs=reals[:, 3 : 3 + columns],
        logprobs=reals[:, 3 + columns : 3 + 2 * columns],
        logits=logits,
        drafting=drafting,
        verifying=verifying,
    )
