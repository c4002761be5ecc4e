"""Masks over scripted tokens, and the law of sequences under them by enumeration."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shoal.constraints.protocol import Allowed, Check, Constraint
from shoal.testing.scripted import History, hashed
from shoal.types.requests import Row

V, EOS, NEW, ROWS, REQUESTS = 5, 4, 5, 6, 200
SCRIPT = hashed(V, 2, spread=1.5)
PROMPT = (0, 1)


def allowed(tokens: Sequence[int]) -> bool:
    """After 0 comes 1 and after 1 no 2, whatever p thinks of it: beginnings differ in what they are worth. An end after 3."""
    if any((before == 0 and after != 1) or (before == 1 and after == 2) for before, after in itertools.pairwise(tokens)):
        return False
    return EOS not in tokens or (len(tokens) > 1 and tokens[-2] == 3)


@dataclass(frozen=True)
class Texts:
    """Texts of a script, of which some are allowed: those of so many tokens and those that end."""

    vocab: int
    eos: int
    longest: int
    script: History
    prompt: tuple[int, ...]
    allowed: Callable[[tuple[int, ...]], bool]

    @cached_property
    def law(self) -> dict[tuple[int, ...], float]:
        """p of every text that is allowed."""
        found: dict[tuple[int, ...], float] = {}

        def go_on(tokens: tuple[int, ...], probability: float) -> None:
            if len(tokens) == self.longest or tokens[-1:] == (self.eos,):
                found[tokens] = probability
                return
            p = self.script((*self.prompt, *tokens)).double().softmax(-1)
            for token in range(self.vocab):
                if self.allowed((*tokens, token)):
                    go_on((*tokens, token), probability * float(p[token]))

        go_on((), 1.0)
        return found


TEXTS = Texts(V, EOS, NEW, SCRIPT, PROMPT, allowed)


def truth() -> dict[tuple[int, ...], float]:
    return TEXTS.law


class Asked(Check):
    """Refuses single tokens."""

    texts = TEXTS

    def start(self, row: Row) -> tuple[int, ...]:
        return ()

    def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...] | None:
        return (*state, token) if self.texts.allowed((*state, token)) else None

    def may_end(self, state: tuple[int, ...]) -> bool:
        return self.texts.allowed((*state, self.texts.eos))


class Masked(Constraint[tuple[int, ...]]):
    """Masks the vocabulary."""

    texts = TEXTS

    def begin(self, row: Row) -> tuple[int, ...]:
        return ()

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def mask(self, states: Any, vocab_size: int, device: torch.device) -> Allowed:
        allowed, tokens, eos = self.texts.allowed, range(self.texts.vocab), self.texts.eos
        mask = torch.tensor([[token != eos and allowed((*state, token)) for token in tokens] for state in states])
        return Allowed(mask, torch.tensor([allowed((*state, eos)) for state in states]))


def deviation(groups: Sequence[Sequence[Row]], least: float = 0.0) -> float:
    """Of the mean weights of what texts begin and go on with from p of it, the greatest in standard errors over requests, which
    are independent; of parts that p gives at least so much to: rare ones whose weights differ much have no standard error yet."""
    expected: dict[Any, float] = defaultdict(float)
    for text, p in truth().items():
        for part in parts(text):
            expected[part] += p
    found = {part: [0.0] * len(groups) for part in expected}
    for number, rows in enumerate(groups):
        for row in rows:
            for part in parts(tuple(row.tokens[2:])):
                found[part][number] += math.exp(row.log_weight) / len(rows)
    seen = {part: values for part, values in found.items() if sum(value > 0 for value in values) >= 40}
    often = {part: values for part, values in seen.items() if expected[part] >= least}
    assert len(often) > 10
    spread = {part: statistics.stdev(values) / math.sqrt(len(values)) for part, values in often.items()}
    return max(abs(statistics.mean(values) - expected[part]) / spread[part] for part, values in often.items())


def parts(text: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """What a text is counted as; all texts are "any"."""
    return [("any", ()), ("begins", text[:2]), ("goes on", text[2:4]), ("ends", text[-1:])]


def by_script(row: Row, penalty: float = 0.0) -> float:
    """What the script gives to a row's text under a frequency penalty, as a log-probability."""
    places = range(len(PROMPT), len(row.tokens))
    counts = [torch.bincount(torch.tensor(row.tokens[2:place], dtype=torch.long), minlength=V) for place in places]
    scores = [
        (SCRIPT(tuple(row.tokens[:place])).double() - penalty * count).log_softmax(-1)
        for place, count in zip(places, counts, strict=True)
    ]
    return sum(float(own[token]) for own, token in zip(scores, row.tokens[2:], strict=True))
