"""A drafter's step in a captured round: pass, distribution, draw, and the next block filled in.

A step feeds itself: it puts the tokens that it drew into the block of the next one and moves that
on by a position. So the steps of a round follow each other on the device, and the host only
launches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.models.compiled.block import Block
from shoal.models.compiled.captures import Captures, compare
from shoal.models.compiled.view import View
from shoal.models.layers import drawing
from shoal.models.layers.drawing import on_device
from shoal.sampling.distributions import pure_probabilities
from shoal.sampling.truncation import first_candidates

Draw = Callable[[Tensor, Tensor], Tensor]
"""Weights [rows, vocab], uniforms [rows, ...] -> tokens [rows] int64."""
COLDEST = 1e-3
"""Temperatures below (but not 0) need care that a captured step does not take."""


class Style(NamedTuple):
    """What of the rows' sampling is built into a step; their temperatures are not.

    Attributes:
        greedy: True for all rows, False for none, None for some.
        cut: top_k, top_p, min_p and typical_p of all rows.
        vocab_size: of q; the drafter's own is cut or filled up to it.
        candidates: how many the tokens that stay are chosen from.
    """

    greedy: bool | None
    cut: tuple[int, float, float, float]
    vocab_size: int
    draw: Draw
    candidates: int

    def probabilities(self, scores: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor | None]:
        """The declared distribution of scores [rows, vocab] at temperatures [rows], and where it is
        that (`pure_probabilities`)."""
        return pure_probabilities(
            scores, temperature, _sampling(self.cut), self.greedy, self.candidates
        )


def _sampling(cut: tuple[int, float, float, float]) -> Sampling:
    return Sampling(top_k=cut[0], top_p=cut[1], min_p=cut[2], typical_p=cut[3])


def style_of(samplings: Sequence[Sampling], vocab_size: int, draw: Draw) -> Style | None:
    """Returns None where a step cannot be captured: rows that cut differently, or that read more
    than their position's scores."""
    kinds = {(s.top_k, s.top_p, s.min_p, s.typical_p) for s in samplings}
    plain = all(
        not s.reads_history and not s.logit_bias and (s.greedy or s.temperature >= COLDEST)
        for s in samplings
    )
    if len(kinds) > 1 or not plain:
        return None
    greedy, cut = {s.greedy for s in samplings}, kinds.pop()
    return Style(
        greedy.pop() if len(greedy) == 1 else None,
        cut,
        vocab_size,
        draw,
        first_candidates(_sampling(cut)),
    )


class Drawn(NamedTuple):
    """What a step gives: q [rows, vocab], None for point masses; tokens [rows] int64; the drafter's
    highest probability [rows].

    Where the logits are NaN or infinite the token is -1, and the probability 0. Beside greedy rows
    the probability is that before processing, as a greedy q says nothing.
    """

    q: Tensor | None
    tokens: Tensor
    confidence: Tensor


class Result(NamedTuple):
    """What a step computes: `Drawn`, the logits that it is of, [rows, vocab of the drafter], and
    the tokens to feed next, [rows], which are ids of the drafter also where nothing can be drawn.
    What nobody asked for is None."""

    q: Tensor | None
    tokens: Tensor
    confidence: Tensor | None
    logits: Tensor
    fed: Tensor


def stepped(
    captures: Captures,
    view: View,
    style: Style,
    temperature: Tensor,
    uniforms: Tensor,
    *,
    want_q: bool = True,
    want_confidence: bool = True,
) -> Result:
    """A drafter's pass over a view, and what is drawn from it by the uniforms of a position [rows,
    ...]; a function of tensors."""
    block, every = view.block, captures.forward(view)
    logits = every[:, 0]
    if block.q > 1:
        logits = every[
            torch.arange(every.shape[0], device=every.device), (block.bounds[1] - 1).clamp(min=0)
        ]
    scores, best, sound = _of_target(logits, style)
    if style.greedy and not want_q:
        q, drawn = None, best
    else:
        q, _ = style.probabilities(
            scores, temperature
        )  # drafts are drawn from q also where candidates are too few
        drawn = (
            best
            if style.greedy
            else (on_device(style.draw, q) if captures.by_kernels else style.draw)(q, uniforms)
        )
    confidence = None
    if want_confidence:
        confidence = (
            q
            if q is not None and style.greedy is False
            else scores.to(temperature.dtype).softmax(-1)
        ).amax(-1) * sound
    known = logits.shape[-1]
    fed = drawn if known >= style.vocab_size else drawn.clamp(max=known - 1)
    return Result(q if want_q else None, torch.where(sound, drawn, -1), confidence, logits, fed)


def _of_target(logits: Tensor, style: Style) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [rows, vocab] of the target's vocabulary, zeros where there is no distribution; the
    most probable token [rows], the lowest of equal ones; whether there is a distribution [rows]."""
    known = logits.shape[-1]
    if known < style.vocab_size:
        logits = torch.nn.functional.pad(logits, (0, style.vocab_size - known), value=-torch.inf)
    top, best = logits[:, : style.vocab_size].max(-1)
    sound = top.abs() < torch.inf
    return torch.where(sound[:, None], logits[:, : style.vocab_size], 0.0), best, sound


def check(found: Result, right: Tensor, style: Style, temperature: Tensor) -> None:
    """Raises ArithmeticError if the results of a first step are not those of an ordinary one, of
    rows with the logits `right`."""
    rows = len(right)
    compare(found.logits[:rows], right)
    if found.q is None:
        return
    q, tokens = found.q[:rows], found.tokens[:rows, None]
    possible = (q.gather(1, tokens.clamp(min=0)) > 0) | (tokens < 0)
    expected, enough = style.probabilities(_of_target(found.logits, style)[0], temperature)
    wrong = ~torch.isclose(q, expected[:rows], rtol=1e-3, atol=1e-6).all(-1)
    if enough is not None:
        wrong &= enough[:rows]  # the step may know of more candidates
    if bool(wrong.any()) or not bool(possible.all()):
        raise ArithmeticError("a drafter's step does not draw from the distribution of its logits")


def feed(
    found: Result, then: Block, *, same: bool, by_kernel: bool, kept: Tensor | None = None
) -> None:
    """Puts what a step drew into the block of the next one.

    Args:
        same: the step was of that block, which moves on by a token.
        by_kernel: see `Captures.by_kernels`.
        kept: takes what was drawn as well, [rows].
    """
    if by_kernel:
        drawing.feed(found.fed, then.tokens, kept, then.moving if same else None)
        return
    then.tokens.copy_(found.fed[:, None])
    if kept is not None:
        kept.copy_(found.fed)
    if same:
        then.advance()
