"""The declared distribution of logits: one function for target, drafter and plain decoding.

`Scores` are the logits of a draft tree with the distributions that a decision on it asks for.

Speculative sampling returns samples of the target's declared distribution p for any q of the
drafter, provided that p at a position depends only on the position's logits and history. So every
control is applied here, to both models, at each drafted position with the history that the position
would have.

On a CPU with a compiler a kernel in C computes the distributions (`shoal.sampling.native_draws`),
else operations of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.constraints import masks
from shoal.errors import ShoalError
from shoal.sampling import controls, native_draws, truncation
from shoal.sampling.controls import control, control_all, groups, possible, report, width
from shoal.sampling.drawing import exponential_race, finite, highest, inverse_transform
from shoal.sampling.guidance import ClassOdds
from shoal.types.rounds import Faults
from shoal.types.trees import DraftTree, Positions, Verdict

Sampler = Callable[[Tensor, Tensor], Tensor]
"""A function that draws one token per row, [n] int64.

Its arguments are weights [n, vocab], and the uniforms [n, ...] of each row's position.
"""

RACES: dict[Sampler, bool] = {exponential_race: True, inverse_transform: False}
"""The samplers that the kernels know; True if the sampler draws by an exponential race."""


class Draws(NamedTuple):
    """The tokens that were drawn at positions [rows, q].

    Attributes:
        tokens: the tokens, int64.
        probs: the probabilities of the tokens.
        highest: the highest probability at each position, for greedy rows that at temperature 1;
            None if it was not asked for.
        p: the distributions, [rows, q, vocab]; None if they were not asked for.
    """

    tokens: Tensor
    probs: Tensor
    highest: Tensor | None = None
    p: Tensor | None = None


def probabilities(logits: Tensor, positions: Positions, faults: Faults | None = None) -> Tensor:
    """Computes the declared distribution of each (row, position).

    The controls of the row's own `Sampling` are applied in the order that it documents. Padding
    gets finite numbers without a meaning. A greedy row is one-hot at its highest score, lowest id
    on a tie.

    Args:
        logits: [rows, q, vocab], any float dtype; -inf is allowed. Not modified.
        positions: the history of each (row, column), and the columns that are padding.
        faults: a dict that receives the reason for a position without a distribution, instead of an
            error being raised; for padding only if the logits themselves are at fault. Such a
            position then counts as padding.

    Returns:
        [rows, q, vocab] float32, or float64 for float64 logits. Rows sum to 1 and hold no NaN.

    Raises:
        RequestError: a row's controls leave no token possible, or name ids outside the vocabulary.
        BadLogits: the logits themselves leave none (NaN, +inf, or -inf everywhere).
    """
    results = draws(logits, positions, None, None, faults, want_p=True)
    assert results.p is not None
    return results.p


def draws(
    logits: Tensor,
    positions: Positions,
    sampler: Sampler | None,
    uniforms: Tensor | None,
    faults: Faults | None = None,
    *,
    want_p: bool = False,
    want_highest: bool = False,
) -> Draws:
    """Draws tokens from the `probabilities` of each (row, position).

    Args:
        sampler: the sampler; None if only greedy rows get tokens.
        uniforms: [rows, q, ...] float64.
        want_p: True to return the distributions beside the tokens.
        want_highest: True to return the highest probabilities beside the tokens.
    """
    samplings = [row.request.sampling for row in positions.rows]
    options = _Options(sampler, faults, want_p, want_highest)
    if not (options.by_kernels and native_draws.takes(logits, samplings)):
        return _by_torch(logits, positions, uniforms, options)
    scores = control_all(logits, positions, faults)
    return _by_kernels(scores, samplings, logits, positions, uniforms, options)


class _Options(NamedTuple):
    """The arguments of `draws` that are the same for all rows."""

    sampler: Sampler | None
    faults: Faults | None
    p: bool
    highest: bool

    @property
    def by_kernels(self) -> bool:
        """True if the kernels in C know the sampler."""
        return self.sampler is None or self.sampler in RACES


def _by_kernels(
    scores: Tensor,
    samplings: Sequence[Sampling],
    logits: Tensor,
    positions: Positions,
    uniforms: Tensor | None,
    options: _Options,
) -> Draws:
    """Computes `draws` from the scores after all other controls, by the kernels in C."""
    race = options.sampler is not None and RACES[options.sampler]
    results = native_draws.draw(
        scores, samplings, uniforms, race=race, want_p=options.p, want_highest=options.highest
    )
    if results.impossible:
        report(results.tokens < 0, logits, positions, options.faults)
    return Draws(
        results.tokens.clamp_(min=0) if results.impossible else results.tokens,
        results.probs,
        results.highest,
        results.p,
    )


def pure_probabilities(
    logits: Tensor, temperature: Tensor, cut: Sampling, greedy: bool | None, candidates: int
) -> tuple[Tensor, Tensor | None]:
    """Computes `probabilities` of one position as a function of tensors that looks at no value.

    Such a function can be compiled and captured.

    Args:
        logits: [rows, vocab]; rows without a finite highest logit give nonsense.
        temperature: [rows], 0 for greedy rows, else not tiny.
        cut: the settings of top_k, top_p, min_p and typical_p of all rows; its other fields are not
            read.
        greedy: True if all rows are greedy, False if none is; None if some are.
        candidates: the number of candidates for the tokens that stay (`truncation.listed_softmax`).

    Returns:
        The distributions [rows, vocab] float32, or float64 for float64 logits.
        A mask of the rows for which the candidates suffice, [rows] bool; None if they suffice for
        all. The other rows have a distribution over candidates that is not the declared one.
    """
    if greedy:
        return _one_hot(logits.to(width(logits))), None
    heat = (temperature if greedy is False else torch.where(temperature > 0, temperature, 1.0)).to(
        width(logits)
    )
    scores = logits / heat[:, None]  # in the wider of both formats
    if cut.truncates:
        probs, enough = truncation.listed_softmax(scores, cut, candidates)
    else:
        probs, enough = scores.softmax(-1), None
    if greedy is False:
        return probs, enough
    hot = temperature > 0
    return torch.where(
        hot[:, None], probs, _one_hot(scores)
    ), None if enough is None else enough | ~hot


def _one_hot(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)


def _by_torch(
    logits: Tensor, positions: Positions, uniforms: Tensor | None, options: _Options
) -> Draws:
    """Computes `draws` by operations of torch, for rows of the same settings at a time."""
    allowed, rows = masks.allowed_tokens(positions, logits), groups(positions.rows)
    if len(rows) == 1:
        return _of_group(logits, rows[0][0], positions, uniforms, allowed, options)
    shape, dtype = logits.shape[:2], width(logits)
    every = Draws(
        torch.empty(shape, dtype=torch.long, device=logits.device),
        torch.empty(shape, dtype=dtype, device=logits.device),
        torch.empty(shape, dtype=dtype, device=logits.device) if options.highest else None,
        torch.empty(logits.shape, dtype=dtype, device=logits.device) if options.p else None,
    )
    for sampling, members in rows:
        index = torch.tensor(members, device=logits.device)
        mask, own = (None if values is None else values[index] for values in (allowed, uniforms))
        some = positions.of_rows(members)
        part_of_rows = _of_group(logits[index], sampling, some, own, mask, options)
        for values, part in zip(every, part_of_rows, strict=True):
            if values is not None and part is not None:
                values[index] = part
    return every


def _of_group(
    logits: Tensor,
    sampling: Sampling,
    positions: Positions,
    uniforms: Tensor | None,
    allowed: Tensor | None,
    options: _Options,
) -> Draws:
    """Computes `draws` of rows with the same `Sampling` except seed and grammar."""
    faults, sampler = options.faults, options.sampler
    scores = control(logits, sampling, positions, allowed, faults)
    if options.by_kernels and native_draws.takes(scores, [sampling]):
        # The bits of these rows must not depend on the settings of other rows.
        return _by_kernels(scores, [sampling], logits, positions, uniforms, options)
    if sampling.greedy:
        tokens = _best(scores, logits, positions, faults)
        p = None
        if options.p:
            p = torch.zeros(logits.shape, dtype=width(logits), device=logits.device).scatter_(
                -1, tokens[..., None], 1.0
            )
        top = scores.softmax(-1, dtype=width(logits)).amax(-1) if options.highest else None
        return Draws(
            tokens, torch.ones(tokens.shape, dtype=width(logits), device=logits.device), top, p
        )
    p = _distribution(
        _at_temperature(scores.to(width(logits)), sampling.temperature),
        logits,
        sampling,
        positions,
        faults,
    )
    top = p.amax(-1) if options.highest else None
    if sampler is None or uniforms is None:
        return Draws(
            torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device), p[..., 0], top, p
        )
    tokens = sampler(p.flatten(0, 1), uniforms.flatten(0, 1)).view(logits.shape[:2])
    return Draws(tokens, p.gather(-1, tokens[..., None]).squeeze(-1), top, p if options.p else None)


def _distribution(
    scores: Tensor, logits: Tensor, sampling: Sampling, positions: Positions, faults: Faults | None
) -> Tensor:
    """Computes the distribution of scores after temperature, [rows, q, vocab]."""
    truncates = sampling.truncates
    if not truncates:
        probs = scores.softmax(-1)
        if finite(probs[..., 0]):  # one impossible position makes NaN of all its probabilities
            return probs
    scores = possible(scores, logits, positions, faults)
    if truncates:
        return truncation.truncated_softmax(scores.flatten(0, 1), sampling).view(scores.shape)
    return scores.softmax(-1)


def _best(scores: Tensor, logits: Tensor, positions: Positions, faults: Faults | None) -> Tensor:
    """Returns greedy rows' tokens of the highest score, [rows, q] int64, on a tie the lowest id."""
    values, tokens = highest(scores)
    return tokens if finite(values) else highest(possible(scores, logits, positions, faults))[1]


def _at_temperature(scores: Tensor, temperature: float) -> Tensor:
    if temperature == 1:
        return scores
    limits = torch.finfo(scores.dtype)
    if temperature < 1e-6:
        # Dividing by so little overflows. Relative to the highest score, only scores that do not
        # matter overflow.
        scores = scores - scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    return scores / min(max(temperature, limits.tiny), limits.max)


@dataclass(frozen=True)
class Scores:
    """The scores of the m + 1 columns of a pass (`shoal.types.trees`).

    Distributions may be asked for until the round is committed, as they depend on the tokens before
    it.

    Attributes:
        logits: the raw logits, [rows, m + 1, vocab].
        positions: the positions that the columns score.
        faults: the columns that were asked for and have no distribution, some of them on paths that
            may be rejected.
        named: the function that makes the error that users see of a fault.
        hidden: the target's hidden states that the drafter reads, [rows, m + 1, layers * width];
            None if it reads none.
        columns: the logits of all columns of a pass with probes (`shoal.types.trees.Probes`),
            [rows, columns, vocab]; None for other passes.
        odds: the odds of the classes of rows with a posterior; None if there are none.
    """

    logits: Tensor
    positions: Positions
    faults: Faults = field(default_factory=dict)
    named: Callable[[ShoalError], ShoalError] = lambda error: error
    hidden: Tensor | None = None
    columns: Tensor | None = None
    odds: ClassOdds | None = None

    @property
    def greedy(self) -> bool:
        """True if all rows are greedy, so that every distribution is a point mass."""
        return all(row.request.sampling.greedy for row in self.positions.rows)

    def of_row(self, b: int) -> Scores:
        """Returns the scores of one row, [1, m + 1, vocab], with the faults of all."""
        return replace(self, logits=self.logits[b : b + 1], positions=self.positions.of_rows([b]))

    def note(self, faults: Faults) -> None:
        """Keeps the first fault of each column."""
        for row, columns in faults.items():
            own = self.faults.setdefault(row, {})
            own.update(
                {
                    column: self.named(error)
                    for column, error in columns.items()
                    if column not in own
                }
            )

    def p(self) -> Tensor:
        """Returns the declared distributions, [rows, m + 1, vocab]; see `probabilities`."""
        faults: Faults = {}
        probs = probabilities(self.logits, self.positions, faults)
        self.note(faults)
        return probs

    def draw(self, sampler: Sampler, uniforms: Tensor) -> Draws:
        """Draws a token of each column by uniforms [rows, m + 1, ...]; see `draws`."""
        faults: Faults = {}
        tokens = draws(self.logits, self.positions, sampler, uniforms, faults)
        self.note(faults)
        return tokens


def by_kernel(
    tree: DraftTree, scores: Scores, sampler: Sampler, uniforms: Tensor, *, rejection: bool
) -> Verdict | None:
    """Decides on chains by the kernel in C, which stops at a row's first rejection.

    Args:
        tree: the chains.
        sampler: the sampler of the tokens behind the accepted ones.
        uniforms: by column, [rows, m + 1, ...].
        rejection: True for rejection sampling of drafts whose q is known; False for exact match.

    Returns:
        The verdict; None for trees, and for distributions that the kernel does not compute.
    """
    samplings = [row.request.sampling for row in scores.positions.rows]
    if tree.branches or sampler not in RACES or not native_draws.takes(scores.logits, samplings):
        return None
    faults: Faults = {}
    logits = controls.control_all(scores.logits, scores.positions, faults)
    race = RACES[sampler]
    decision = native_draws.verify(
        logits, samplings, tree, uniforms, race=race, rejection=rejection
    )
    if decision.impossible:
        reached = torch.arange(tree.m + 1) == decision.accepted[:, None]
        report((decision.token < 0)[:, None] & reached, scores.logits, scores.positions, faults)
        decision.token.clamp_(min=0)
    scores.note(faults)
    raw = decision.logprobs if logits is scores.logits else None
    return Verdict(decision.accepted, decision.token, decision.probs, raw_logprobs=raw)
