"""Guided targets: a declared transform of the target's distribution by other models' logits.

With p the target's distribution at a position, g the guide's and e the expert's after the
same new tokens,

    log p' = log p + guidance * (log e - log g) + a constant,

over the tokens with p >= plausibility * max p; the others are impossible, and so are those that one
of the models excludes (a logit of -inf). Without an expert e is p. All controls, temperature and
truncation act on p', which is the distribution that verification promises.

A small guide of the target's family makes this contrastive decoding (Li et al. 2023, arXiv
2210.15097). A negative `guidance` without an expert leads towards the guide: -1 is the guide
itself. A small model for the guide and the same model after its tuning for the expert make proxy
tuning (Liu et al. 2024, arXiv 2401.08565); models of unwanted and of wanted texts make
DExperts (2105.03023). The target as its own guide, after a `negative_prompt`, makes classifier-free
guidance (Sanchez et al. 2023, arXiv 2306.17806), whose strength gamma is 1 + guidance. FS-GEN
(2406.12295) puts such transforms and speculative decoding into one frame.

With a `posterior` of a > 0 the guide and the expert are models of two classes, equally likely
before the text, and the second term is guidance * log P(class of the expert | the new tokens, this
one included), by Bayes' rule:

    log P = log sigmoid(a / t * (log e(new tokens) - log g(new tokens))), t = their number

(GeDi, Krause et al. 2020, arXiv 2009.06367). One model for both, after a `negative_prompt` and a
`positive_prompt` that name the classes, is the paper's class-conditional model with its two control
codes c: P = p(text | c+) / (p(text | c+) + p(text | c-)), for a = t.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from shoal.config import Sampling
from shoal.sampling.controls import width
from shoal.types.requests import Row
from shoal.types.trees import DraftTree


class ClassOdds:
    """The log-odds of the expert's class against the guide's, along the drafts of a `tree`."""

    def __init__(self, rows: Sequence[Row], tree: DraftTree) -> None:
        drafts = zip(rows, tree.drafts, tree.parents, tree.depths, strict=True)
        self._rows = [one for one in drafts if one[0].request.sampling.guidance]
        self._lead = torch.empty(0)
        self._before: dict[Row, list[float]] = {}

    def led(self, lead: Tensor) -> Tensor:
        """Returns the log posterior of each token for rows with one, and `lead` for the others.

        Args:
            lead: log e - log g of each token, [guided rows, q, vocab].
        """
        led, self._lead = lead.clone(), lead
        for place, (row, drafts, parents, depths) in enumerate(self._rows):
            scale = row.request.sampling.posterior
            if not scale:
                continue
            before = self._before[row] = [row.class_odds]
            above = [parent + 1 for parent in parents]
            # The columns behind a token that a model excludes are never reached.
            steps = lead[place, above, list(drafts)].nan_to_num(0.0, 0.0, 0.0).tolist()
            for parent, step in zip(above, steps, strict=True):
                before.append(before[parent] + step)
            columns = len(before)
            tokens = lead.new_tensor([row.new_tokens + 1 + depth for depth in depths])
            odds = lead.new_tensor(before)[:, None] + lead[place, :columns]
            led[place, :columns] = logsigmoid(scale / tokens[:, None] * odds)
        return led

    def learn(self, row: Row, columns: Sequence[int], token: int) -> None:
        """Adds a round's tokens to the odds of a row.

        Args:
            columns: the columns that predict its committed tokens.
            token: the last of these tokens.
        """
        if row in self._before:
            place = [one[0] for one in self._rows].index(row)
            column = columns[-1]
            row.class_odds = self._before[row][column] + float(self._lead[place, column, token])


def apply_guidance(
    logits: Tensor,
    guide: Tensor,
    samplings: Sequence[Sampling],
    expert: Tensor | None = None,
    odds: ClassOdds | None = None,
) -> Tensor:
    """Returns log p' of the guided rows, and the logits of the others.

    Args:
        logits: the target's logits, [rows, q, vocab].
        guide: the guide's logits for the rows with guidance alone, [guided rows, q, its vocab]. Ids
            that it lacks count as excluded; its further ids are left out.
        samplings: the settings of the rows, of which one has guidance.
        expert: the expert's logits, like the guide's; None = the target is the expert.
        odds: the odds of the classes before each column; None = no row has a posterior.

    Returns:
        [rows, q, vocab] float32, or float64 for float64 logits. A position where a model says NaN
        has no finite score.
    """
    dtype, own = width(logits), [b for b, one in enumerate(samplings) if one.guidance]
    index = torch.tensor(own, device=logits.device)
    p = logits[index].log_softmax(-1, dtype=dtype)
    g = _of_vocabulary(guide, logits.shape[-1]).log_softmax(-1, dtype=dtype)
    strength, cut = (
        torch.tensor(values, dtype=dtype, device=logits.device)[:, None, None]
        for values in (
            [samplings[b].guidance for b in own],
            [samplings[b].plausibility for b in own],
        )
    )
    e = p
    if expert is not None:
        e = _of_vocabulary(expert, logits.shape[-1]).log_softmax(-1, dtype=dtype)
    lead = e - g
    scores = p + strength * (lead if odds is None else odds.led(lead))
    excluded = (p == -torch.inf) | (g == -torch.inf) | (e == -torch.inf)
    excluded |= p < cut.log() + p.amax(-1, keepdim=True)
    scores.masked_fill_(excluded, -torch.inf)
    if len(own) == len(samplings):
        return scores
    guided_logits = logits.to(dtype, copy=True)
    guided_logits[index] = scores
    return guided_logits


def _of_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Returns logits for ids 0 to `size` - 1; missing ids have the logit -inf."""
    missing = size - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[..., :size]
