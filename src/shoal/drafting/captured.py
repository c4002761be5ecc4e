"""Whole rounds as captured functions: where target and drafter have passes of fixed shape and nothing of the rows asks for more.

What a round decides is what its stages decide one after the other: the same uniforms, distributions and rule. Everything else
(controls that read what was generated, grammars, trees, drafts that end by the drafter's confidence, logits that are not finite)
is left to the stages.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.drafting.captured_inputs import Round, fill
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import Drafter
from shoal.models.compiled.buckets import COLUMNS, bucket_for
from shoal.models.compiled.drafting import Style, check, style_of
from shoal.models.compiled.passes import Passes, compare
from shoal.models.compiled.rounds import CapturedRound, Found, Kind, Model
from shoal.models.runner import Runner
from shoal.sampling.acceptance import ChainRule, Rule, decides_chains
from shoal.types.requests import Row
from shoal.types.rounds import Verdict
from shoal.types.trees import DraftTree, chains

MOST = 32
"""Rounds kept per generation of captures: a graph takes a few megabytes, and what it returns."""
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
"""Rows that rounds are captured for: a round of fewer rows takes about as long, and each capture takes as long as many rounds."""
STEADY = 8
"""Rounds of one draft length, one after the other, before it is captured where a longer one has been."""
PENDING = 2
"""Columns of a drafter's first pass: most tokens of a row that its cache lacks."""


_PROPOSE = ModelDrafter.propose
"""What captured rounds compute in one go; a drafter whose own is another one is asked for it."""


class Decided(NamedTuple):
    """A round up to its verdict, which is on the host: the drafts, the target's logits [rows, k + 1, vocab], good until the next
    round, and how much of its time was the drafter's."""

    tree: DraftTree
    logits: Tensor
    verdict: Verdict
    share: float


class CapturedRounds:
    """The captured rounds of one engine.

    Args:
        target: with the engine's cache. drafter: of the engine; None = plain decoding. rule: decides.
    """

    def __init__(self, target: Runner, drafter: Drafter | None, rule: Rule) -> None:
        self._target, self._rule = target, rule
        self._drafter = drafter if isinstance(drafter, ModelDrafter) else None
        self._longest, self._rounds = 0, 0  # the length last asked for, and rounds that have asked for it since

    def decide(self, rows: Sequence[Row], lengths: Sequence[int], uniforms: Callable[[int], Tensor]) -> Decided | None:
        """The round of these rows; None where it is left to its stages, which then find the caches as they were.

        Args:
            lengths: drafts of each row. uniforms: of so many positions, on the host, [rows, positions, ...] float64.
        """
        passes = self._target.static
        if passes is None or passes.rounds_failure is not None:
            return None
        work = None
        try:
            work = self._round(rows, lengths)
            return None if work is None else self._decided(work, uniforms(work.k + 1).flatten(2))
        except Exception as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            passes.rounds_failure = f"{type(error).__name__}: {reason:.300}"
            message = f"{self._target.name}: no more captured rounds, their stages do the work ({passes.rounds_failure})"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            if work is not None:
                self._undo(work)
            return None

    def _round(self, rows: Sequence[Row], lengths: Sequence[int]) -> Round | None:
        """None where the round cannot be captured."""
        target, k = self._target, max(lengths)
        drafter = self._drafter if k else None
        if not decides_chains(self._rule) or k >= COLUMNS[-1] or any(row.reads_history for row in rows):
            return None
        style = style_of([row.request.sampling for row in rows], target.vocab_size, self._rule.draw)
        plan = target.plan([row.slot for row in rows], [1 + length for length in lengths])
        if style is None or target.static is None or not target.static.covers(plan, target.cache):
            return None
        if not k:
            return Round(rows, lengths, style, k, plan, None, (), ())
        if drafter is None or getattr(drafter.propose, "__func__", None) is not _PROPOSE:
            return None
        if drafter.runner.static is None or drafter.runner.device != target.device:
            return None
        held, pending = drafter.lacking(rows, lengths)
        first = drafter.runner.plan(drafter.slots(rows), [len(tokens) for tokens in pending])
        for steps in dict.fromkeys((self._steps(k, target.static, style), k)):
            if first.q <= PENDING and drafter.runner.static.covers(first, drafter.runner.cache, ahead=steps - 1):
                return Round(rows, lengths, style, steps, plan, first, pending, held)
        return None

    def _steps(self, k: int, passes: Passes, style: Style) -> int:
        """Drafts to compute where k are asked for: more where that has been captured and k has not, as rows that are about to end
        ask for a few rounds of each length. What is not captured costs nothing to build."""
        if passes.executor == "eager":
            return k
        self._rounds = self._rounds + 1 if k == self._longest else 1
        self._longest = k
        kinds = passes.generation(self._target.cache).rounds
        captured = [kind.k for kind in kinds if isinstance(kind, Kind) and kind.style == style and kind.k >= k]
        return min(captured, default=k) if self._rounds < STEADY else k

    def _decided(self, work: Round, noise: Tensor) -> Decided | None:
        """The round; None where logits are not finite."""
        target, drafter = self._target, self._drafter
        round_ = self._prepared(work, noise.shape[2])
        fill(round_, work, noise, target.vocab_size, 0 if drafter is None else drafter.runner.vocab_size)
        started = time.perf_counter()
        found = round_(work.plan.rows)
        seconds = time.perf_counter() - started
        # Also of drafts that nobody asked for: they leave keys and values.
        if not found.sound.all() or (found.drafts < 0).any():
            self._undo(work)
            return None
        if not round_.checked:
            self._check(round_, work, found)
        target.cache.wrote(work.plan)
        target.count(1, seconds * (1 - found.share))
        if work.first is not None and drafter is not None:
            drafter.runner.cache.wrote(work.later(0, work.k) if work.k > 1 else work.first)
            drafter.runner.count(work.k, seconds * found.share)
            drafter.leave_out(work.rows, work.lengths, work.held)
        return _outcome(found, work)

    def _prepared(self, work: Round, numbers: int) -> CapturedRound:
        """The round's functions, built if need be."""
        target, drafter = self._target, self._drafter
        assert target.static is not None
        assert isinstance(self._rule, ChainRule)
        slots = target.cache.slots - 1
        rows = min(next((size for size in ROWS if size >= work.plan.rows), slots), slots)
        built = target.static.generation(target.cache)
        drafting, keys, rounds = None, 0, built.rounds
        if work.first is not None and drafter is not None and drafter.runner.static is not None:
            drafting = Model(drafter.runner.static, drafter.runner.cache)
            rounds = built.rounds_with(drafting.passes.generation(drafting.cache))
            keys = _keys(drafting, max(work.first.tails) + work.k - 1)
        targeted = Model(target.static, target.cache)
        kind = Kind(
            rows, work.k, PENDING, _keys(targeted, max(work.plan.tails)), keys, work.style, self._rule, numbers, False
        )
        if kind not in rounds:
            while len(rounds) >= MOST:
                rounds.pop(next(iter(rounds)))
            with target.static.building(f"a round of {kind.rows} rows and {kind.k} drafts"):
                rounds[kind] = CapturedRound(kind, targeted, drafting)
            for model in (targeted, drafting):
                if model is not None:
                    model.passes.built[kind] += 1
        target.static.ran[kind] += 1
        if drafting is not None:
            drafting.passes.ran[kind] += work.k
        round_: CapturedRound = rounds[kind]
        return round_

    def _check(self, round_: CapturedRound, work: Round, found: Found) -> None:
        """Raises ArithmeticError if a first round is not what ordinary passes and the rule make of it."""
        rows, k = len(work.rows), work.k
        logits, steps = found.logits.clone(), list(round_.steps)
        drafts = torch.from_numpy(found.drafts).to(logits.device)
        verdict = round_.decided(round_.logits, round_.target_drafts)
        decided = torch.stack([verdict.accepted, verdict.token])[:, :rows].tolist()
        if decided != [found.accepted.tolist(), found.tokens.tolist()]:
            raise ArithmeticError("a captured round does not decide what its rule decides")
        last = torch.tensor([[row.tokens[-1]] for row in work.rows], device=logits.device)
        right = self._target.ordinary(work.plan, torch.cat([last, drafts.clamp(min=0)], dim=1)[:, : work.plan.q])
        real = torch.arange(work.plan.q) < torch.tensor(work.plan.counts)[:, None]
        compare(*(block[:, : work.plan.q][real.to(block.device)] for block in (logits, right)))
        if work.first is not None and self._drafter is not None:
            runner = self._drafter.runner
            width = work.first.q
            tokens = [[own[min(i, len(own) - 1)] for i in range(width)] for own in work.pending]
            fed = torch.tensor(tokens, device=logits.device)
            for j in range(k):
                plan = work.later(j) if j else work.first
                every = runner.ordinary(plan, fed)
                at = torch.tensor([count - 1 for count in plan.counts], device=logits.device)
                check(steps[j], every[torch.arange(rows, device=logits.device), at], work.style, round_.temperatures)
                fed = drafts[:, j : j + 1].clamp(min=0, max=runner.vocab_size - 1)
        round_.checked = True

    def _undo(self, work: Round) -> None:
        """Nothing of a round counts. What is not finite must not stand in the cells that it wrote, where others read past it."""
        for row, start in zip(work.rows, work.plan.starts, strict=True):
            self._target.cache.lengths[row.slot] = start
            self._target.cache.zero_tail(row.slot, start)
        if self._drafter is not None and work.first is not None:
            self._drafter.forget_round(work.rows, work.held)


def _keys(model: Model, keys: int) -> int:
    """Keys that a pass spans: a kernel that reads lengths on the device is given whole slots, and one round serves all lengths."""
    cache = model.cache
    bucket = None if model.passes.knows_prefixes else bucket_for(1, 1, keys, cache.capacity)
    return cache.capacity if bucket is None else bucket.keys


def _outcome(found: Found, work: Round) -> Decided:
    """The round as the stages after the verdict take it."""
    k, rows = max(work.lengths), len(work.rows)
    drafts = [own[:length].tolist() for own, length in zip(found.drafts, work.lengths, strict=True)]
    tree = DraftTree.empty(rows, torch.device("cpu"))
    if k:
        tokens = torch.from_numpy(found.drafts[:, :k])
        tree = DraftTree(tokens, torch.tensor(work.lengths), None, drafts, chains(drafts), work.k)
    width = torch.promote_types(found.logits.dtype, torch.float32)
    probs, logprobs = (torch.from_numpy(values[:, : k + 1]).to(width) for values in (found.probs, found.logprobs))
    accepted, following = torch.from_numpy(found.accepted), torch.from_numpy(found.tokens)
    verdict = Verdict(accepted, following, probs, raw_logprobs=logprobs)
    return Decided(tree, found.logits[:, : k + 1], verdict, found.share)
