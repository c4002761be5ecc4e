"""A drafter's step as one static function: pass, distribution, draw, and the next block filled in.

A step feeds itself: it puts the tokens it drew into the block of the next one and moves that on by a position. So the steps of a
round follow each other on the device, and the host only launches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.models.cache import Plan, SlotCache
from shoal.models.compiled.block import Block
from shoal.models.compiled.buckets import bucket_for
from shoal.models.compiled.passes import Pass, Passes, compare
from shoal.models.compiled.view import View
from shoal.models.layers import drawing
from shoal.models.layers.drawing import on_device
from shoal.sampling.distributions import pure_probabilities
from shoal.sampling.truncation import first_candidates

Draw = Callable[[Tensor, Tensor], Tensor]
"""Weights [rows, vocab], uniforms [rows, ...] -> tokens [rows] int64."""
COLDEST = 1e-3
"""Temperatures below (but not 0) need care that a static step does not take."""


class Style(NamedTuple):
    """What of the rows' sampling is built into a step; their temperatures are not.

    Attributes:
        greedy: True for all rows, False for none, None for some. cut: top_k, top_p, min_p and typical_p of all rows.
        vocab_size: of q; the drafter's own is cut or filled up to it.
        candidates: how many the tokens that stay are chosen from.
    """

    greedy: bool | None
    cut: tuple[int, float, float, float]
    vocab_size: int
    draw: Draw
    candidates: int

    def probabilities(self, scores: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor | None]:
        """The declared distribution of scores [rows, vocab] at temperatures [rows], and where it is that (`pure_probabilities`)."""
        return pure_probabilities(scores, temperature, _sampling(self.cut), self.greedy, self.candidates)


def _sampling(cut: tuple[int, float, float, float]) -> Sampling:
    return Sampling(top_k=cut[0], top_p=cut[1], min_p=cut[2], typical_p=cut[3])


def style_of(samplings: Sequence[Sampling], vocab_size: int, draw: Draw) -> Style | None:
    """None where a step cannot be static: rows that cut differently, or that read more than their position's scores."""
    kinds = {(s.top_k, s.top_p, s.min_p, s.typical_p) for s in samplings}
    plain = all(not s.reads_history and not s.logit_bias and (s.greedy or s.temperature >= COLDEST) for s in samplings)
    if len(kinds) > 1 or not plain:
        return None
    greedy, cut = {s.greedy for s in samplings}, kinds.pop()
    return Style(greedy.pop() if len(greedy) == 1 else None, cut, vocab_size, draw, first_candidates(_sampling(cut)))


class Drawn(NamedTuple):
    """What a step gives: q [rows, vocab], None for point masses; tokens [rows] int64; the drafter's highest probability [rows].

    Where the logits are NaN or infinite the token is -1, and the probability 0. Beside greedy rows the probability is that before
    processing, as a greedy q says nothing.
    """

    q: Tensor | None
    tokens: Tensor
    confidence: Tensor


class Result(NamedTuple):
    """What a step computes: `Drawn`, the logits that it is of, [rows, vocab of the drafter], and the tokens to feed next, [rows],
    which are ids of the drafter also where nothing can be drawn. What nobody asked for is None."""

    q: Tensor | None
    tokens: Tensor
    confidence: Tensor | None
    logits: Tensor
    fed: Tensor


def stepped(
    passes: Passes, view: View, style: Style, temperature: Tensor, uniforms: Tensor, *, want_q: bool = True,
    want_confidence: bool = True,
) -> Result:  # fmt: skip
    """A drafter's pass over a view, and what is drawn from it by the uniforms of a position [rows, ...]; a function of tensors."""
    block, every = view.block, passes.forward(view)
    logits = every[:, 0]
    if block.q > 1:
        logits = every[torch.arange(every.shape[0], device=every.device), (block.bounds[1] - 1).clamp(min=0)]
    scores, best, sound = _of_target(logits, style)
    if style.greedy and not want_q:
        q, drawn = None, best
    else:
        q, _ = style.probabilities(scores, temperature)  # drafts are drawn from q also where candidates are too few
        drawn = best if style.greedy else (on_device(style.draw, q) if passes.by_kernels else style.draw)(q, uniforms)
    confidence = None
    if want_confidence:
        confidence = (q if q is not None and style.greedy is False else scores.to(temperature.dtype).softmax(-1)).amax(
            -1
        ) * sound
    known = logits.shape[-1]
    fed = drawn if known >= style.vocab_size else drawn.clamp(max=known - 1)
    return Result(q if want_q else None, torch.where(sound, drawn, -1), confidence, logits, fed)


def _of_target(logits: Tensor, style: Style) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [rows, vocab] of the target's vocabulary, zeros where there is no distribution; the most probable token [rows], the
    lowest of equal ones; whether there is a distribution [rows]."""
    known = logits.shape[-1]
    if known < style.vocab_size:
        logits = torch.nn.functional.pad(logits, (0, style.vocab_size - known), value=-torch.inf)
    top, best = logits[:, : style.vocab_size].max(-1)
    sound = top.abs() < torch.inf
    return torch.where(sound[:, None], logits[:, : style.vocab_size], 0.0), best, sound


def check(found: Result, right: Tensor, style: Style, temperature: Tensor) -> None:
    """Raises ArithmeticError if the results of a first step are not those of an ordinary one, of rows with the logits `right`."""
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


class _Step:
    """The function. Buffers: uniforms [rows, ...] float64, temperature [rows]. `then`: the block to fill, by default its own."""

    def __init__(self, passes: Passes, style: Style, rows: int, uniforms: Tensor, then: Block | None) -> None:
        self.passes, self.style, self.then = passes, style, then
        self.uniforms = uniforms.new_zeros(rows, *uniforms.shape[1:])
        self.temperature = torch.ones(
            rows, dtype=torch.promote_types(passes.hf.dtype, torch.float32), device=uniforms.device
        )

    def __call__(self, view: View) -> Result:
        block = view.block
        found = stepped(self.passes, view, self.style, self.temperature, self.uniforms)
        feed(found, block if self.then is None else self.then, same=self.then is None, by_kernel=self.passes.by_kernels)
        return found


def feed(found: Result, then: Block, *, same: bool, by_kernel: bool, kept: Tensor | None = None) -> None:
    """Puts what a step drew into the block of the next one.

    Args:
        same: the step was of that block, which moves on by a token.
        by_kernel: see `Passes.by_kernels`. kept: takes what was drawn as well, [rows].
    """
    if by_kernel:
        drawing.feed(found.fed, then.tokens, kept, then.moving if same else None)
        return
    then.tokens.copy_(found.fed[:, None])
    if kept is not None:
        kept.copy_(found.fed)
    if same:
        then.advance()


class Steps:
    """The steps of one round in order; call it with the uniforms of each position, [rows, ...].

    Args:
        passes: of the drafter, over `cache`. plan: of the first step, which feeds `pending`, one or two tokens per row.
        most: steps there may be. temperatures: of the rows, 0 = greedy. uniforms: of any position, for its shape.
        ordinary: the logits of an ordinary pass over the plan's rows, [rows, columns, vocab]; first steps are compared with it.
    """

    def __init__(
        self, passes: Passes, cache: SlotCache, plan: Plan, pending: Tensor, most: int, style: Style,
        temperatures: Sequence[float], uniforms: Tensor, ordinary: Callable[[Plan, Tensor], Tensor],
    ) -> None:  # fmt: skip
        self._ordinary = ordinary
        self._passes, self._cache, self._plan = passes, cache, plan
        self._style, self._uniforms, self._keys = style, uniforms, max(plan.tails) + most
        following = Plan(plan.slots, plan.lengths, [1] * plan.rows, plan.device, prefixes=plan.prefixes)
        self._later = self._prepared(following, None)
        self._next = self._prepared(plan, self._later[1].block)
        self._next[1].block.fill(pending)
        heat = torch.tensor(temperatures)
        for _, _, step in (self._next, self._later):
            step.temperature[: plan.rows].copy_(heat)

    def _prepared(self, plan: Plan, then: Block | None) -> tuple[object, Pass, _Step]:
        """A step with its rows in place."""
        bucket = bucket_for(plan.rows, plan.q if then is None else 2, self._keys, self._cache.capacity)
        assert bucket is not None
        key = (bucket, self._style, self._uniforms.shape[1:])
        made = self._passes.prepared(
            key, bucket, self._cache, lambda: _Step(self._passes, self._style, bucket.rows, self._uniforms, then)
        )
        made.block.place(plan, self._cache.capacity)
        assert isinstance(made.function, _Step)
        return key, made, made.function

    def __call__(self, uniforms: Tensor) -> Drawn:
        key, made, step = self._next
        plan, rows = self._plan, self._plan.rows
        step.uniforms[:rows].copy_(uniforms)
        fed = None if made.checked else made.block.tokens[:rows, : plan.q].clone()
        found: Result = self._passes.run(key, made)
        assert found.q is not None
        assert found.confidence is not None
        if fed is not None:
            right = self._ordinary(plan, fed)
            last = torch.tensor([count - 1 for count in plan.counts], device=right.device)
            check(found, right[torch.arange(rows, device=right.device), last], self._style, step.temperature)
            made.checked = True
        self._cache.wrote(plan)
        self._plan = Plan(plan.slots, plan.lengths, [1] * rows, plan.device, prefixes=plan.prefixes)
        self._next = self._later
        # The next step writes its result over this one's.
        return Drawn(found.q[:rows].clone(), found.tokens[:rows].clone(), found.confidence[:rows].clone())
