"""The exact enumeration of the output distribution by the real acceptance code.

Every decision of a round is a step function of its uniform, and p and q determine the steps. One
evaluation per step, weighted by the step's width, integrates over all uniforms. No random number is
drawn, so the result is exact up to rounding.

Counts of samples are tested by Pearson's chi-square: fit to a distribution, and independence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.sampling import drawing
from shoal.sampling.acceptance import rejection

EDGE = 1e-6
"""The share of a step's width in its two margins.

The margins are evaluated too, so that a misplaced step is noticed.
"""


def draw_measure(weights: Tensor) -> Tensor:
    """Computes the distribution of `drawing.draw` for weights [n, vocab] float64; [n, vocab]."""
    rows, vocab = weights.shape
    steps = _steps(weights / weights.sum(dim=-1, keepdim=True))
    measure = torch.zeros_like(weights)
    for at, share in ((EDGE / 2, EDGE), (0.5, 1 - 2 * EDGE), (1 - EDGE / 2, EDGE)):
        left, width = steps[:, :-1], steps.diff(dim=-1)
        u = (left + at * width).clamp(max=1 - 2**-53)
        token = drawing.draw(weights.repeat_interleave(vocab, dim=0), u.reshape(-1)).view(rows, vocab)
        measure.scatter_add_(1, token, share * width)
    return measure


def acceptance_measure(p: Tensor, q: Tensor) -> Tensor:
    """Computes the measure of uniforms that `rejection.acceptance_mask` accepts.

    Args:
        p: probabilities, float64.
        q: probabilities of the same shape, float64.
    """
    step = _threshold(p, q)
    measure = torch.zeros_like(p)
    for left, width in ((torch.zeros_like(step), step), (step, 1 - step)):
        for at, share in ((EDGE / 2, EDGE), (0.5, 1 - 2 * EDGE), (1 - EDGE / 2, EDGE)):
            passes = rejection.acceptance_mask(p, q, left + at * width)
            measure += share * width * passes
    return measure


def _threshold(p: Tensor, q: Tensor) -> Tensor:
    """Computes min(1, p / q), and 1 where q is 0: such a token is never drafted."""
    return torch.where(q > 0, p / q, 1.0).clamp(max=1)


def _steps(p: Tensor) -> Tensor:
    """Returns 0, the inner cumulative sums, 1; [n, vocab + 1]."""
    inner = p.cumsum(dim=-1)[:, :-1].clamp(max=1)
    return torch.cat([torch.zeros_like(p[:, :1]), inner, torch.ones_like(p[:, :1])], dim=-1)


def chain_rule(table: Tensor, horizon: int) -> Tensor:
    """Computes the distribution of `horizon` tokens drawn one by one from a Markov table.

    They follow a prompt of zeros; the result is [vocab] * horizon.
    """
    order, vocab = table.dim() - 1, table.shape[-1]
    histories = _digits(torch.arange(vocab**horizon), horizon, vocab)
    padded = torch.nn.functional.pad(histories, (order, 0))
    joint = torch.ones(vocab**horizon, dtype=table.dtype)
    for t in range(horizon):
        joint = joint * table[tuple(padded[:, t : t + order + 1].unbind(dim=1))]
    return joint.view([vocab] * horizon)


def committed_distribution(
    target: Tensor, drafter: Tensor, horizon: int, lengths: Sequence[int], *, clip: bool = True
) -> Tensor:
    """Computes the distribution of the first `horizon` tokens that rounds of acceptance commit.

    The rounds run the real acceptance code.

    Args:
        target: a Markov table, [vocab] * order + [vocab] float64; the prompt is zeros.
        drafter: a Markov table of the same order.
        lengths: possible draft lengths of a round; a fixed function of the row's history chooses
            one, so the rows of one call have different ones.
        clip: no row drafts more than it may still commit, minus one, as in the engine. Otherwise
            surplus tokens are cut off.

    Returns:
        [vocab] * horizon float64.
    """
    vocab, pair = target.shape[-1], _Pair(target, drafter)
    mass = [torch.zeros(vocab**depth, dtype=torch.float64) for depth in range(horizon + 1)]
    mass[0][0] = 1.0
    for depth in range(horizon):
        codes = mass[depth].nonzero().squeeze(1)
        if not len(codes):  # every round so far has committed more
            continue
        histories = _digits(codes, depth, vocab)
        own = torch.tensor(lengths)[(histories.sum(dim=1) + depth) % len(lengths)]
        own = own.clamp(max=horizon - depth - 1) if clip else own
        for outcome in pair.round(histories, own):
            _advance(mass, depth, codes[outcome.row], outcome)
    return mass[horizon].view([vocab] * horizon)


@dataclass(frozen=True)
class _Outcomes:
    """The outcomes of a round.

    Attributes:
        drafts: the drafted tokens, [m, k].
        accepted: the verdict's number of accepted drafts, [m].
        token: the verdict's next token, [m].
        row: the row of each outcome, [m].
        weight: the probability of each outcome, [m].
    """

    drafts: Tensor
    accepted: Tensor
    token: Tensor
    row: Tensor
    weight: Tensor


def _advance(mass: list[Tensor], depth: int, codes: Tensor, outcomes: _Outcomes) -> None:
    """Moves the outcomes' share of mass[depth] to the histories after their blocks.

    Args:
        codes: the histories before, [m].
    """
    vocab, remaining = len(mass[1]), len(mass) - 1 - depth
    block = torch.cat([outcomes.drafts, outcomes.token[:, None]], dim=1)
    block[torch.arange(len(block)), outcomes.accepted] = outcomes.token
    committed = (outcomes.accepted + 1).clamp(max=remaining)
    share, code = mass[depth][codes] * outcomes.weight, codes
    for length in range(1, min(remaining, block.shape[1]) + 1):
        code = code * vocab + block[:, length - 1]
        ends = committed == length
        mass[depth + length].index_add_(0, code[ends], share[ends])


@dataclass
class _Pair:
    """The Markov tables of target and drafter, of one order and vocabulary."""

    target: Tensor
    drafter: Tensor

    def __post_init__(self) -> None:
        vocab = self.target.shape[-1]
        self.drafted = draw_measure(self.drafter.reshape(-1, vocab)).view_as(self.drafter)
        self.accepts = acceptance_measure(self.target, self.drafter)

    def round(self, histories: Tensor, lengths: Tensor) -> list[_Outcomes]:
        """Returns all outcomes of one round, by the number of accepted drafts.

        Args:
            histories: [rows, depth] new tokens so far.
            lengths: the draft length of each row, [rows].
        """
        vocab, order, k = self.target.shape[-1], self.target.dim() - 1, int(lengths.max())
        every = _digits(torch.arange(vocab**k), k, vocab)
        row = torch.arange(len(histories)).repeat_interleave(len(every))
        drafts, own = every.repeat(len(histories), 1), lengths[row]
        tokens = torch.nn.functional.pad(torch.cat([histories[row], drafts], dim=1), (order, 0))
        start = histories.shape[1]
        contexts = [tuple(tokens[:, start + j : start + j + order].unbind(dim=1)) for j in range(k + 1)]
        inside = torch.arange(k) < own[:, None]
        of_draft = [(*context, drafts[:, j]) for j, context in enumerate(contexts[:k])]
        # Padding is drafted uniformly, which must not change the result.
        made = _stack([self.drafted[index] for index in of_draft], len(row)).where(inside, 1 / vocab).prod(dim=1)
        passes = _stack([self.accepts[index] for index in of_draft], len(row))
        step = _stack([_threshold(self.target[index], self.drafter[index]) for index in of_draft], len(row))
        p, q = (torch.stack([table[context] for context in contexts], dim=1) for table in (self.target, self.drafter))
        return [
            self._outcome(j, drafts, own, p=p, q=q, step=step, weight=made * _run(passes, inside, j), row=row)
            for j in range(k + 1)
            if bool((own >= j).any())
        ]

    def _outcome(
        self,
        j: int,
        drafts: Tensor,
        own: Tensor,
        p: Tensor,
        q: Tensor,
        step: Tensor,
        weight: Tensor,
        row: Tensor,
    ) -> _Outcomes:
        """Returns the outcomes with exactly the first j drafts accepted.

        They are evaluated at one uniform per step of the next token.
        """
        u_accept = step / 2
        if j < drafts.shape[1]:
            u_accept[:, j] = (1 + step[:, j]) / 2
            u_accept[:, j + 1 :] = 0.0  # accepted, which must not count behind a rejection
        rest = (p[:, j] - q[:, j]).clamp(min=0)
        total = rest.sum(dim=-1, keepdim=True)
        steps = torch.cat([_steps(p[:, j]), _steps(torch.where(total > 0, rest / total, p[:, j]))], dim=1).sort(dim=1).values
        width = weight[:, None] * steps.diff(dim=1)
        at, which = (width > 0).nonzero().unbind(dim=1)
        u = ((steps[:, :-1] + steps[:, 1:]) / 2)[at, which]
        k = drafts.shape[1]
        verdict = rejection.reject_and_replace(
            drafts[at],
            own[at],
            q[at, :k] if k else None,
            p[at],
            u_accept[at],
            u[:, None, None].expand(-1, k + 1, 2),
        )
        return _Outcomes(drafts[at], verdict.accepted, verdict.token, row[at], width[at, which])


def _run(passes: Tensor, inside: Tensor, j: int) -> Tensor:
    """Computes the probability that exactly the first j drafts are accepted, [rows].

    It is 0 for rows that draft fewer than j.
    """
    run = passes[:, :j].where(inside[:, :j], 0.0).prod(dim=1)
    if j < passes.shape[1]:
        run = run * torch.where(inside[:, j], 1 - passes[:, j], 1.0)
    return run


def _stack(columns: Sequence[Tensor], rows: int) -> Tensor:
    return torch.stack(list(columns), dim=1) if columns else torch.ones(rows, 0, dtype=torch.float64)


def _digits(codes: Tensor, length: int, base: int) -> Tensor:
    """Writes numbers as their `length` digits, most significant first; [n, length]."""
    powers = base ** torch.arange(length - 1, -1, -1)
    return codes[:, None] // powers % base


def chi_square(counts: Tensor, expected: Tensor, least: float = 5.0) -> float:
    """Computes the p-value of Pearson's test that `counts` come from `expected`.

    Args:
        counts: the observed counts, any shape.
        expected: probabilities of the same shape, sum 1.
        least: cells expected less often than this are pooled into one.

    Returns:
        The p-value; 0.0 if something impossible was observed.
    """
    counts, expected = counts.flatten().double(), expected.flatten().double() * counts.sum()
    if bool(((expected == 0) & (counts > 0)).any()):
        return 0.0
    small = expected < least
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    wanted = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return _tail(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1)


def independence(table: Tensor, least: float = 5.0) -> float:
    """Computes the p-value of Pearson's test that the indices of a table [a, b] are independent.

    Args:
        least: every cell expects at least this many, because values too rare for that are pooled
            into one.

    Raises:
        ValueError: one index has a single value left, so that nothing is tested.
    """
    rare = (least * float(table.sum())) ** 0.5
    table = _pooled(_pooled(table.double(), rare).T, rare)
    if min(table.shape) < 2:
        raise ValueError(f"nothing to test: {table.shape[0]} x {table.shape[1]} values are frequent enough")
    expected = table.sum(dim=1, keepdim=True) * table.sum(dim=0, keepdim=True) / table.sum()
    return _tail(((table - expected) ** 2 / expected).sum(), (table.shape[0] - 1) * (table.shape[1] - 1))


def _pooled(table: Tensor, rare: float) -> Tensor:
    """Sums rows with a sum below `rare` into one.

    That row joins the smallest other row if it is still rare.
    """
    small = table.sum(dim=1) < rare
    if not bool(small.any()):
        return table
    rest, kept = table[small].sum(dim=0, keepdim=True), table[~small]
    if float(rest.sum()) >= rare or not len(kept):
        return torch.cat([kept, rest])
    kept = kept.clone()
    kept[kept.sum(dim=1).argmin()] += rest[0]
    return kept


def _tail(statistic: Tensor, freedom: int) -> float:
    """Computes the probability that chi-square with `freedom` degrees exceeds the statistic."""
    if freedom < 1:
        return 1.0
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))
