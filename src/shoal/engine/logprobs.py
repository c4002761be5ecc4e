"""The log-probabilities of a round's tokens under the target, before and after processing.

Rows that ask for them also get the most probable tokens, and the weights of their constraints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.constraints import masks
from shoal.constraints.estimates import DrawnValues, log_weights
from shoal.sampling.controls import unbound
from shoal.sampling.distributions import Scores
from shoal.types.requests import Row
from shoal.types.samples import TopLogprobs
from shoal.types.trees import Verdict

_TOGETHER = 1 << 21
"""The number of logits normalised at a time: more of them leave a CPU's caches."""


class Logprobs(NamedTuple):
    """The natural-log probabilities of the tokens of a row's round.

    Attributes:
        raw: the log-probabilities before processing.
        processed: the log-probabilities after processing.
        top: the most probable tokens, if the row's request asks for them.
        weights: see `Row.log_weight`.
        ends: the log-probabilities of the EOS tokens, see `Row.end_logprobs`.
        values: the values from which estimates learn (`shoal.constraints.estimates`).
    """

    raw: Sequence[float]
    processed: Sequence[float]
    top: Sequence[TopLogprobs] = ()
    weights: Sequence[float] = ()
    ends: Sequence[float] = ()
    values: Sequence[DrawnValues] = ()

    def add(self, row: Row, count: int) -> None:
        """Adds the values of the first `count` tokens, which are the row's last, to the row."""
        row.logprobs += self.raw[:count]
        row.processed_logprobs += self.processed[:count]
        row.top_logprobs += self.top[:count]
        row.log_allowed += sum(self.weights[:count])
        row.log_weight += sum(self.weights[:count])
        row.end_logprobs += self.ends[:count]
        if row.beginning is not None and count:
            row.beginning = row.beginning.learn(row.tokens[-count:], self.values[:count])


def logprobs_of(
    rows: Sequence[Row],
    blocks: Sequence[Sequence[int]],
    columns: Sequence[Sequence[int]],
    scores: Scores,
    verdict: Verdict,
) -> list[Logprobs]:
    """Returns the log-probabilities of each row's block, before the round is committed.

    Args:
        blocks: the tokens of each row.
        columns: for each token, the column of the pass that predicts it.
    """
    by_kernel = verdict.raw_logprobs
    raw = _raw(scores.logits, blocks, columns) if by_kernel is None else by_kernel.tolist()
    processed = verdict.probs.log().tolist()
    logprobs = []
    for b, row in enumerate(rows):
        if not (row.request.top_logprobs or row.request.weighted or row.cutting is not None):
            logprobs.append(Logprobs(raw[b], processed[b]))
            continue
        weights, values = _weights(scores, row, b, blocks[b], columns[b])
        if row.request.distinct:
            processed[b] = [math.log(each.p) if each.p else -math.inf for each in values]
        checked = verdict.check_weights.get(b, ())
        weights = [one + other for one, other in zip_longest(weights, checked, fillvalue=0.0)]
        top, ends = _top(scores, row, b, columns[b]), _ends(scores, row, b, columns[b])
        logprobs.append(Logprobs(raw[b], processed[b], top, weights, ends, values))
    return logprobs


def _ends(scores: Scores, row: Row, place: int, columns: Sequence[int]) -> list[float]:
    """Returns the natural log of the probability of the row's EOS tokens at its columns.

    The probability is computed from the logits alone. The list is empty unless a check may cut the
    row.
    """
    if row.cutting is None or not columns:
        return []
    logprobs = _log_softmax(scores.logits[place, list(columns)])
    return logprobs[:, sorted(row.eos)].logsumexp(-1).tolist()


def _weights(
    scores: Scores, row: Row, place: int, block: Sequence[int], columns: Sequence[int]
) -> tuple[list[float], list[DrawnValues]]:
    """Returns the natural logs of the weights of a row's block, and the values for estimates.

    A weight is the probability under p, without the row's constraints, of the tokens that the
    constraints allow, at each token of the block for which they hold. Both lists are empty unless
    the row's request asks for weights. Under estimates, the weights are the rest that the estimates
    do not account for. If texts are drawn without replacement, estimates do not change the weights,
    and the values are probabilities under p, given that each token is allowed, of all tokens of the
    block.
    """
    distinct = row.request.distinct
    count = (
        len(block) if distinct else masks.bound_tokens(row, block) if row.request.weighted else 0
    )
    if not count:
        return [], []
    own, sampling = scores.of_row(place), row.request.sampling
    logits, positions = own.logits, own.positions
    mask = masks.allowed_tokens(positions, logits)
    at = list(columns[:count])
    free = unbound(logits, sampling, positions, {})[0, at].double()
    inside = (free / sampling.temperature).log_softmax(-1)
    if mask is not None:
        inside = inside.masked_fill(~mask[0, at], -math.inf)
    masses = inside.logsumexp(-1)
    if row.beginning is None:
        return masses.tolist(), []
    if distinct:
        return masses.tolist(), _drawn_values(row, block, inside - masses[:, None])
    return log_weights(row.beginning, block[:count], inside), _drawn_values(
        row, block[:count], inside
    )


def _drawn_values(row: Row, block: Sequence[int], inside: Tensor) -> list[DrawnValues]:
    """Returns the values from which estimates learn.

    Args:
        inside: natural log of p at each token, [tokens, vocab]; -inf for tokens that are not
            allowed.
    """
    probs = inside[range(len(block)), list(block)].exp().tolist()
    counts = inside.isfinite().sum(-1).tolist()
    nodes = [row.beginning.after(block[:place]) for place in range(len(block))]
    below = [[] if node is None else list(node.children) for node in nodes]
    for place, token in enumerate(block):
        inside[place, [*below[place], token]] = -math.inf
    rests = inside.logsumexp(-1).exp().tolist()
    return [DrawnValues(*each) for each in zip(counts, probs, rests, map(len, below), strict=True)]


def _raw(
    logits: Tensor, blocks: Sequence[Sequence[int]], columns: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Returns the log-probabilities of each block's tokens by the logits alone."""
    rows = [b for b, block in enumerate(blocks) for _ in block]
    places = [
        rows,
        [column for own in columns for column in own],
        [token for block in blocks for token in block],
    ]
    index = torch.tensor(places, dtype=torch.long, device=logits.device)
    at = max(1, _TOGETHER // logits.shape[-1]) if logits.device.type == "cpu" else max(1, len(rows))
    logprobs: list[float] = []
    for row, column, token in index.split(at, dim=1) if rows else ():
        logprobs += _log_softmax(logits[row, column]).gather(1, token[:, None]).squeeze(1).tolist()
    ends = list(accumulate(map(len, blocks)))
    return [logprobs[end - len(block) : end] for end, block in zip(ends, blocks, strict=True)]


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _top(scores: Scores, row: Row, place: int, columns: Sequence[int]) -> list[TopLogprobs]:
    """Returns the most probable tokens at a row's columns, fewer if fewer are possible."""
    n = row.request.top_logprobs
    if not n or not columns:
        return []
    probs = scores.of_row(place).p()[0, list(columns)]
    tops = [_pairs(_log_softmax(scores.logits[place, list(columns)]), n), _pairs(probs.log(), n)]
    return [TopLogprobs(before, after) for before, after in zip(*tops, strict=True)]


def _pairs(logprobs: Tensor, n: int) -> list[tuple[tuple[int, float], ...]]:
    top = logprobs.topk(n)
    return [
        tuple((token, value) for token, value in zip(ids, values, strict=True) if value > -math.inf)
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
