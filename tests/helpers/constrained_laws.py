"""Laws of rows under constraints: by their definition over whole texts, and by counting what an engine writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from enumeration import chi_square
from shoal.config import Limits, Sampling
from shoal.lookahead.controller import Fixed
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Rule
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request, Row
from shoal.types.stats import Stats

Tokens = tuple[int, ...]


def law_of(following: Callable[[Tokens], Mapping[int, float]], longest: int, end: int) -> dict[Tokens, float]:
    """Every text with its probability, by the chain rule.

    Args:
        following: what may follow new tokens, with weights that need not add up to 1.
        longest: new tokens; a text of so many has no end.
    """
    found, open_ = dict[Tokens, float](), [((), 1.0)]
    while open_:
        new, mass = open_.pop()
        weights = following(new)
        for token, weight in weights.items():
            grown, share = (*new, token), mass * weight / sum(weights.values())
            if token == end or len(grown) == longest:
                found[grown] = share
            else:
                open_.append((grown, share))
    assert abs(sum(found.values()) - 1) < 1e-6
    return found


def law_given(
    target: Callable[[Tokens], Tensor], passes: Callable[[Tokens, int], bool], vocab: int, longest: int, end: int
) -> dict[Tokens, float]:
    """The law of what a target writes behind token 0, given at each place that the token passes behind the new ones."""

    def following(new: Tokens) -> dict[int, float]:
        p = target((0, *new)).double().softmax(-1)
        return {token: float(p[token]) for token in range(vocab) if passes(new, token)}

    return law_of(following, longest, end)


def rows_of(
    target: Runner, drafter: Runner | None, k: int, rule: Rule, n: int, longest: int, end: int, constraints: Sequence[Any],
    *, prompt: Tokens = (0,), tokenizer: Any = None, **sampling: Any,
) -> tuple[list[Row], Stats]:  # fmt: skip
    """Rows of one prompt, all through one engine; drafts are accepted and rejected, or there are none."""
    engine = engine_of(target, drafter if k else None, Fixed(k), max_batch=250, tokenizer=tokenizer, eos=(end,), rule=rule)
    asked = Request(prompt, n, Sampling(**{"seed": 5, **sampling}), Limits(max_new_tokens=longest), constraints=constraints)
    rows = engine.submit(asked)
    while engine.step():
        pass
    assert 0 < engine.stats.accepted < engine.stats.drafted or not k
    return rows, engine.stats


def agreement(rows: Sequence[Row], law: Mapping[Tokens, float]) -> float:
    """The p-value of what rows wrote under a law; 0 if one of them wrote what the law does not have."""
    counts = Counter(tuple(row.tokens[row.prompt_length :]) for row in rows)
    if not counts.keys() <= law.keys():
        return 0.0
    return chi_square(torch.tensor([float(counts[text]) for text in law]), torch.tensor(list(law.values())))
