"""A drafter's step in a captured round: pass, distribution, draw, and the next block filled in.

A step feeds itself: it puts the tokens that it drew into the block of the next step and moves that
block on by a position. So the steps of a round follow each other on the device, and the host only
launches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.models.compiled.block import Block, View
from shoal.models.compiled.captures import Captures, compare
from shoal.models.layers import gpu_draws
from shoal.models.layers.gpu_draws import Softmax, on_device
from shoal.sampling.distributions import pure_probabilities
from shoal.sampling.truncation import first_candidates

Draw = Callable[[Tensor, Tensor], Tensor]
"""A draw: weights [rows, vocab], uniforms [rows, ...] -> tokens [rows] int64."""
COLDEST = 1e-3
"""The temperature below which (but not at 0) rows need care that a captured step does not take."""


class Style(NamedTuple):
    """The part of the rows' sampling that is built into a step; their temperatures are not.

    Attributes:
        greedy: True for all rows, False for none, None for some.
        cut: top_k, top_p, min_p and typical_p of all rows.
        vocab_size: vocabulary of q; the drafter's own is cut or filled up to it.
        draw: draws the tokens from q.
        candidates: number of candidates that the tokens that stay are chosen from.
    """

    greedy: bool | None
    cut: tuple[int, float, float, float]
    vocab_size: int
    draw: Draw
    candidates: int

    @property
    def draws_from_softmax(self) -> bool:
        """True if all rows draw from the softmax of their logits, no token cut away."""
        return self.greedy is False and not _sampling(self.cut).truncates

    def probabilities(
        self, scores: Tensor, temperature: Tensor, *, by_kernels: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the declared distribution of scores [rows, vocab] at temperatures [rows].

        The second value says for which rows it is the declared one (`pure_probabilities`).
        """
        if by_kernels and self.draws_from_softmax and gpu_draws.softmax_runs(scores):
            probs = gpu_draws.softmax(scores, temperature, scores.shape[1])
            assert probs.probs is not None
            return probs.probs, None
        return pure_probabilities(
            scores, temperature, _sampling(self.cut), self.greedy, self.candidates
        )


def _sampling(cut: tuple[int, float, float, float]) -> Sampling:
    return Sampling(top_k=cut[0], top_p=cut[1], min_p=cut[2], typical_p=cut[3])


def style_of(samplings: Sequence[Sampling], vocab_size: int, draw: Draw) -> Style | None:
    """Returns the style of rows, or None where a step cannot be captured.

    A step cannot be captured for rows that cut differently, or that read more than their position's
    scores, such as those of a guide.
    """
    kinds = {(s.top_k, s.top_p, s.min_p, s.typical_p) for s in samplings}
    plain = all(
        not (s.reads_history or s.logit_bias or s.guidance)
        and (s.greedy or s.temperature >= COLDEST)
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


class DraftedStep(NamedTuple):
    """The result of a step.

    Where the logits are NaN or infinite the token is -1, and the confidence 0.

    Attributes:
        q: [rows, vocab], None for point masses.
        tokens: [rows] int64.
        confidence: the drafter's highest probability, [rows]; of greedy rows that at temperature 1.
    """

    q: Tensor | None
    tokens: Tensor
    confidence: Tensor


class StepComputation(NamedTuple):
    """The computation of a step: q and tokens of `DraftedStep`, logits, the tokens to feed next.

    Attributes:
        q: as in `DraftedStep`; None if not asked for.
        tokens: as in `DraftedStep`.
        logits: the logits that the step draws from, [rows, vocab of the drafter].
        fed: the tokens to feed next, [rows]: an id of the drafter also for a row without a
            distribution.
    """

    q: Tensor | None
    tokens: Tensor
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
) -> StepComputation:
    """Computes a drafter's pass over a view, and draws a token of each row; a function of tensors.

    Args:
        uniforms: the uniforms of a position, [rows, ...].
    """
    block, every = view.block, captures.forward(view)
    logits = every[:, 0]
    if block.q > 1:
        logits = every[
            torch.arange(every.shape[0], device=every.device), (block.bounds[1] - 1).clamp(min=0)
        ]
    step = _distribution(logits, style, temperature, captures.by_kernels, want_q)
    tokens_now = step.best
    if step.probs is not None and not style.greedy:
        draw = on_device(style.draw, step.probs) if captures.by_kernels else style.draw
        tokens_now = draw(step.probs, uniforms)
    width = logits.shape[-1]
    fed = tokens_now if width >= style.vocab_size else tokens_now.clamp(max=width - 1)
    q, tokens = step.probs if want_q else None, torch.where(step.sound, tokens_now, -1)
    return StepComputation(q, tokens, logits, fed)


def _distribution(
    logits: Tensor, style: Style, temperature: Tensor, by_kernels: bool, want_q: bool
) -> Softmax:
    """Computes the distribution of logits [rows, vocab], as the rows declare it.

    The probabilities are None if all rows are greedy and `want_q` is false.
    """
    only_best = bool(style.greedy) and not want_q
    from_softmax = style.draws_from_softmax or only_best
    if from_softmax and by_kernels and gpu_draws.softmax_runs(logits):
        own = None if style.greedy else temperature
        return gpu_draws.softmax(logits, own, style.vocab_size, want_probs=not only_best)
    scores, best, sound = _of_target(logits, style)
    # Drafts are drawn from q also where candidates are too few.
    q = None
    if want_q or not style.greedy:
        q, _ = style.probabilities(scores, temperature)
    return Softmax(q, best, sound)


def _of_target(logits: Tensor, style: Style) -> tuple[Tensor, Tensor, Tensor]:
    """Fits logits [rows, vocab] to the target's vocabulary.

    Returns:
        Logits of the target's vocabulary, zeros where there is no distribution; the most probable
        token [rows], the lowest of equal ones; and True where there is a distribution, [rows].
    """
    width = logits.shape[-1]
    if width < style.vocab_size:
        logits = torch.nn.functional.pad(logits, (0, style.vocab_size - width), value=-torch.inf)
    top, best = logits[:, : style.vocab_size].max(-1)
    sound = top.abs() < torch.inf
    return torch.where(sound[:, None], logits[:, : style.vocab_size], 0.0), best, sound


def check(step: StepComputation, right: Tensor, style: Style, temperature: Tensor) -> None:
    """Raises ArithmeticError if the results of a first step differ from an ordinary step's.

    Args:
        right: logits of the ordinary step, [rows, vocab].
    """
    rows = len(right)
    compare(step.logits[:rows], right)
    if step.q is None:
        return
    q, tokens = step.q[:rows], step.tokens[:rows, None]
    possible = (q.gather(1, tokens.clamp(min=0)) > 0) | (tokens < 0)
    expected, enough = style.probabilities(_of_target(step.logits, style)[0], temperature)
    wrong = ~torch.isclose(q, expected[:rows], rtol=1e-3, atol=1e-6).all(-1)
    if enough is not None:
        wrong &= enough[:rows]  # the step may know of more candidates
    if bool(wrong.any()) or not bool(possible.all()):
        raise ArithmeticError("a drafter's step does not draw from the distribution of its logits")


def feed(
    step: StepComputation, then: Block, *, same: bool, by_kernel: bool, kept: Tensor | None = None
) -> None:
    """Puts the tokens that a step drew into the block of the next step.

    Args:
        same: True if the step was of that block, which moves on by a token.
        by_kernel: see `Captures.by_kernels`.
        kept: a tensor [rows] that takes the tokens as well.
    """
    if by_kernel:
        gpu_draws.feed(step.fed, then.tokens, kept, then.moving if same else None)
        return
    then.tokens.copy_(step.fed[:, None])
    if kept is not None:
        kept.copy_(step.fed)
    if same:
        then.advance()
