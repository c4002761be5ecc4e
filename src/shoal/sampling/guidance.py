"""Guided targets: a declared transform of the target's distribution by a second model's logits.

With p the target's distribution at a position and g the guide's, both after the same tokens,

    log p' = log p + guidance * (log p - log g) + a constant,

over the tokens with p >= plausibility * max p; the others are impossible, and so are those that one
of the models excludes (a logit of -inf). All controls, temperature and truncation act on p', which
is the distribution that verification promises.

A small guide of the target's family makes this contrastive decoding (Li et al. 2023, arXiv
2210.15097). A negative `guidance` leads towards the guide: -1 is the guide itself. FS-GEN (arXiv
2406.12295) puts this transform and speculative decoding into one frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.sampling.controls import width


def guided(logits: Tensor, said: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Returns log p' of the guided rows, and the logits of the others.

    Args:
        logits: the target's logits, [rows, q, vocab].
        said: the guide's logits for the rows with guidance alone, [guided rows, q, its vocab]. Ids
            that it lacks count as excluded; its further ids are left out.
        samplings: the settings of the rows, of which one has guidance.

    Returns:
        [rows, q, vocab] float32, or float64 for float64 logits. A position where a model says NaN
        has no finite score.
    """
    dtype, own = width(logits), [b for b, one in enumerate(samplings) if one.guidance]
    index = torch.tensor(own, device=logits.device)
    p = logits[index].log_softmax(-1, dtype=dtype)
    g = _of_vocabulary(said, logits.shape[-1]).log_softmax(-1, dtype=dtype)
    strength, cut = (
        torch.tensor(values, dtype=dtype, device=logits.device)[:, None, None]
        for values in (
            [samplings[b].guidance for b in own],
            [samplings[b].plausibility for b in own],
        )
    )
    scores = p + strength * (p - g)
    excluded = (p == -torch.inf) | (g == -torch.inf) | (p < cut.log() + p.amax(-1, keepdim=True))
    scores.masked_fill_(excluded, -torch.inf)
    if len(own) == len(samplings):
        return scores
    found = logits.to(dtype, copy=True)
    found[index] = scores
    return found


def _of_vocabulary(said: Tensor, size: int) -> Tensor:
    """Returns logits for ids 0 to `size` - 1; those of missing ids are -inf."""
    missing = size - said.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(said, (0, missing), value=-torch.inf)
    return said[..., :size]
