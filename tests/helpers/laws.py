"""Laws of tokens by definition and by counting: tables, joint laws, contingency."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Lookahead
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Rule
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request, Row

ALPHA = 1e-6
EXACT = 1e-12
SAMPLES = 2000


def table(vocab: int, seed: int, *, order: int = 1, power: float = 2.0, zeros: float = 0.0) -> Tensor:
    """A random Markov table [vocab] * order + [vocab], float64; a share of `zeros` of it is 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = [vocab] * (order + 1)
    weights = torch.rand(shape, generator=generator, dtype=torch.float64) ** power
    weights = weights.masked_fill(torch.rand(shape, generator=generator) < zeros, 0.0)
    weights[..., 0] += (weights.sum(dim=-1) == 0).double()
    return weights / weights.sum(dim=-1, keepdim=True)


def one_hot(weights: Tensor) -> Tensor:
    return torch.zeros_like(weights).scatter_(-1, weights.argmax(dim=-1, keepdim=True), 1.0)


def halves(vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """Disjoint supports: the drafter only says what the target never says."""
    mask = torch.arange(vocab) % 2 == 0
    p, q = table(vocab, seed) * mask, table(vocab, seed + 1) * ~mask
    return p / p.sum(dim=-1, keepdim=True), q / q.sum(dim=-1, keepdim=True)


def close(vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """Equal up to the last bits."""
    p = table(vocab, seed)
    q = p * (1 + 1e-15 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return p, q / q.sum(dim=-1, keepdim=True)


PAIRS: dict[str, Callable[[int, int], tuple[Tensor, Tensor]]] = {
    "random": lambda v, s: (table(v, s), table(v, s + 1)),
    "peaked": lambda v, s: (table(v, s, power=12), table(v, s + 1, power=12)),
    "zeros in p": lambda v, s: (table(v, s, zeros=0.5), table(v, s + 1)),
    "zeros in q": lambda v, s: (table(v, s), table(v, s + 1, zeros=0.5)),
    "zeros in both": lambda v, s: (table(v, s, zeros=0.5), table(v, s + 1, zeros=0.5)),
    "equal": lambda v, s: (table(v, s), table(v, s)),
    "equal up to rounding": close,
    "greedy target": lambda v, s: (one_hot(table(v, s)), table(v, s + 1)),
    "greedy drafter": lambda v, s: (table(v, s), one_hot(table(v, s + 1))),
    "both greedy": lambda v, s: (one_hot(table(v, s)), one_hot(table(v, s + 1))),
    "disjoint": halves,
    "tiny tails": lambda v, s: (table(v, s, power=40), table(v, s + 1, power=0.5)),
}


def run(
    target: Runner, drafter: Runner | None, lookahead: Lookahead, *, horizon: int = 4, samples: int = SAMPLES, max_batch: int = 250,
    rule: Rule | None = None, **sampling: float,
) -> tuple[Engine, list[Row]]:  # fmt: skip
    """Samples of one prompt of zeros, all through one engine."""
    engine = engine_of(target, drafter, lookahead, max_batch=max_batch, rule=rule)
    rows = engine.submit(Request((0, 0), samples, Sampling(**{"seed": 1, **sampling}), Limits(max_new_tokens=horizon)))
    while engine.step():
        pass
    return engine, rows


def shifted(law: Tensor, distance: float) -> Tensor:
    """A law at that total variation: every other outcome more likely in proportion, the others less, which is hardest to see."""
    up = (torch.arange(law.numel()) % 2 == 0).view(law.shape)
    share = law[up].sum()
    return torch.where(up, law * (1 + distance / share), law * (1 - distance / (1 - share)))


def codes(rows: Sequence[Row], vocab: int, tokens: slice = slice(None)) -> Tensor:
    """New tokens of each row as one number, [rows]."""
    new = torch.tensor([row.tokens[row.prompt_length :][tokens] for row in rows])
    return (new * vocab ** torch.arange(new.shape[1] - 1, -1, -1)).sum(dim=1)


def joint(rows: Sequence[Row], vocab: int) -> Tensor:
    """Counts of the rows' new tokens, [vocab] * horizon."""
    horizon = rows[0].new_tokens
    return torch.bincount(codes(rows, vocab), minlength=vocab**horizon).view([vocab] * horizon)


P, Q = table(4, 0, order=2), table(4, 1, order=2)


def declared_law(step: Callable[[tuple[int, ...]], Tensor], vocab: int, horizon: int) -> Tensor:
    """The chain rule for any memory: `step` gives the distribution after the new tokens so far."""
    law = torch.zeros([vocab] * horizon, dtype=torch.float64)
    steps = {tokens: step(tokens) for t in range(horizon) for tokens in itertools.product(range(vocab), repeat=t)}
    for tokens in itertools.product(range(vocab), repeat=horizon):
        law[tokens] = torch.stack([steps[tokens[:t]][tokens[t]] for t in range(horizon)]).prod()
    return law


def contingency(first: Tensor, second: Tensor) -> Tensor:
    """How often each pair of values occurs, [a, b]."""
    counts = torch.zeros(int(first.max()) + 1, int(second.max()) + 1, dtype=torch.long)
    return counts.index_put_((first, second), torch.ones_like(first), accumulate=True)
