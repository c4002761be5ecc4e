"""The whole rounds that captured functions compute, if the rows' settings allow it.

A captured round decides the same as its stages one after the other: it has the same uniforms,
distributions and rule. All other rounds are left to the stages: controls that read generated
tokens, grammars, trees, drafts that end by the drafter's confidence, logits that are not finite.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.drafting.captured_inputs import (
    DraftRound,
    RoundAhead,
    Uniforms,
    check_drafts,
    check_verdict,
    fill_drafting,
    fill_target,
    may_follow,
)
from shoal.drafting.captured_kinds import RoundKinds
from shoal.drafting.protocol import Drafter
from shoal.errors import OutOfStep
from shoal.models.compiled.captured_round import CapturedRound, Launched
from shoal.models.compiled.captures import CAPTURED, require_device
from shoal.models.compiled.transfer import RoundResults
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Rule
from shoal.types.requests import Row
from shoal.types.trees import DraftTree, Verdict, chains


class DecidedRound(NamedTuple):
    """A round up to its verdict, which is on the host.

    Attributes:
        tree: the drafts.
        logits: the target's logits, [rows, k + 1, vocab], valid until the next round is launched.
        verdict: the verdict of the rule.
        share: the drafter's share of the round's time.
    """

    tree: DraftTree
    logits: Tensor
    verdict: Verdict
    share: float


class RoundUnderWay(NamedTuple):
    """A round that is under way.

    Attributes:
        round: its functions.
        work: the round.
        launched: the target's pass.
        places: the places of the round's rows among those of the pass.
    """

    round: CapturedRound
    work: DraftRound
    launched: Launched
    places: Sequence[int]


class CapturedRounds:
    """The captured rounds of one engine.

    Args:
        target: the target, with the engine's cache.
        drafter: the engine's drafter; None = plain decoding.
        rule: the rule that decides about drafts.

    Attributes:
        launched_ahead: the number of rounds that were launched before the verdict of the round
            before was known, "used" or "dropped".
    """

    def __init__(self, target: Runner, drafter: Drafter | None, rule: Rule) -> None:
        self._target, self._kinds = target, RoundKinds(target, drafter, rule)
        self._drafter = self._kinds.drafter
        self._runner = None if self._drafter is None else self._drafter.runner
        self._ahead: RoundAhead | None = None
        self.launched_ahead: Counter[str] = Counter()

    @property
    def is_ahead(self) -> bool:
        """True if a round was launched ahead."""
        return self._ahead is not None

    def under_way(self, running: Sequence[Row]) -> list[Row]:
        """Returns the rows of a round that was launched ahead; none without a valid one.

        They are the rows of the next call of `decide`. A round that does not hold is dropped.

        Args:
            running: the rows in slots.
        """
        ahead = self._ahead
        places = [] if ahead is None else ahead.places(running)
        if not places:
            self._drop()
        return [] if ahead is None else [ahead.work.rows[place] for place in places]

    def decide(
        self,
        rows: Sequence[Row],
        lengths: Sequence[int],
        uniforms: Uniforms,
        *,
        goes_on: bool = False,
    ) -> DecidedRound | None:
        """Computes the round of these rows; returns None if the round is left to its stages.

        If it is left to the stages, the caches are as they were before.

        Args:
            rows: the rows; those of `under_way`, if there are any: their round was launched.
            lengths: the draft length of each row, unless their round was launched.
            uniforms: returns the uniforms of a round.
            goes_on: True if the next round may be launched before this one's verdict is known: its
                rows and draft lengths will be the same, and nobody reads this round's logits.

        Raises:
            OutOfStep.
        """
        captures, ahead = self._target.captures, self._ahead
        if captures is None or self._target.ordinary_only or captures.failed.waits():
            self._drop()
            return None
        work, self._ahead = None, None
        try:
            if ahead is None:
                work = self._kinds.round_of(rows, lengths)
                running = None if work is None else self._launch(work, uniforms)
            else:
                places = [row.slot for row in rows]
                work = ahead.narrowed(places, self._target, self._drafter)
                running = RoundUnderWay(ahead.round, work, ahead.launched, places)
                self.launched_ahead["used"] += 1
            if running is None:
                return None
            if goes_on and (ahead is None or len(rows) == len(ahead.work.rows)):
                self._ahead = self._launch_next(running, uniforms)
            return self._wait(running)
        except OutOfStep:
            raise
        except Exception as error:
            self._fail(error)
            self._drop()
            if work is not None:
                self._undo(work)
            return None

    def want(self, rows: int, drafts: Sequence[int], samplings: Sequence[Sampling]) -> None:
        """Names rounds for `build_next` to build, see `RoundKinds.want`."""
        if self._target.captures is not None and not self._target.ordinary_only:
            self._kinds.want(rows, drafts, samplings)

    def build_next(self) -> bool:
        """Builds one function of rounds that no row has asked for yet; runs between two rounds.

        Returns:
            True if there was a function to build.

        Raises:
            OutOfStep.
        """
        captures = self._target.captures
        if captures is None or captures.failed.pause:
            return False
        try:
            return self._kinds.build_next()
        except OutOfStep:
            raise
        except Exception as error:
            self._fail(error)
            return False

    def _fail(self, error: Exception) -> None:
        """Leaves rounds of a failed kind to their stages; raises the error of a lost device."""
        require_device(self._target.device, error)
        message = f"{self._target.name}: {self._kinds.fail(error)}; their stages do the work"
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _launch(self, work: DraftRound, uniforms: Uniforms) -> RoundUnderWay | None:
        """Launches the round; returns None if its kind has failed."""
        noise = uniforms(work.k + 1).flatten(2)
        round_ = self._kinds.prepared(work, noise.shape[2])
        if round_ is None:
            return None
        fill_drafting(round_, work, noise, 0 if self._runner is None else self._runner.vocab_size)
        fill_target(round_, work, self._target.vocab_size)
        round_.begin()
        if self._runner is not None and round_.unchecked("draft"):
            with round_.comparing():
                check_drafts(round_, work, self._runner)
        return RoundUnderWay(round_, work, round_.launch(), range(work.plan.rows))

    def _launch_next(self, running: RoundUnderWay, uniforms: Uniforms) -> RoundAhead | None:
        """Launches the round after one that is under way; returns None if that is not possible."""
        round_, work, target = running.round, running.work, self._target
        if not may_follow(round_, work, target, self._drafter):
            return None
        noise = uniforms(2 * work.k + 2, 1).flatten(2)
        caches = [target.cache]
        if work.first is not None and self._runner is not None:
            caches.append(self._runner.cache)
        stores = [cache.stores_of(0)[0] for cache in caches]
        return RoundAhead(round_, work, round_.follow(noise), caches, stores)

    def _wait(self, running: RoundUnderWay) -> DecidedRound | None:
        """Waits for the verdict; None: logits are not finite, and stages compute the round."""
        target, round_, work = self._target, running.round, running.work
        round_.require_same_weights()  # while the device works
        decided = round_.collect(running.launched, running.places)
        for runner, passes in ((target, 1), (self._runner, work.k)):
            if runner is not None and runner.captures is not None and passes:
                runner.captures.ran[round_.kind] += passes
        # Surplus drafts count as well: they leave keys and values.
        if not (decided.sound.all() and decided.drafts.min(initial=0) >= 0):
            self._drop()
            if decided.too_few:
                round_.widen()
            self._undo(work)
            return None
        if round_.unchecked("verify"):
            with round_.comparing():
                check_verdict(round_, work, decided, target)
        if self._ahead is not None:
            lengths = list(map(add, work.plan.starts, (1 + decided.accepted).tolist()))
            self._ahead = self._ahead._replace(lengths=lengths)
        target.cache.wrote(work.plan)
        target.counts.add(1, decided.verifying, CAPTURED)
        if work.first is not None and self._drafter is not None and self._runner is not None:
            self._runner.counts.add(work.k, decided.drafting, CAPTURED)
            self._runner.cache.wrote(work.first, ahead=work.k - 1)
            self._drafter.leave_out(work.rows, work.lengths, work.held)
        return _outcome(decided, work)

    def _drop(self) -> None:
        """Waits for a round that was launched ahead, and discards its results.

        The cells that it wrote lie behind the tokens of all rows. They are set to zero if its
        logits are not finite.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        self.launched_ahead["dropped"] += 1
        decided = ahead.round.collect(ahead.launched, range(len(ahead.work.rows)))
        if not decided.sound.all():
            for cache in ahead.caches:
                for slot in range(min(len(ahead.work.rows), cache.slots)):
                    cache.zero_tail(slot, cache.lengths[slot])

    def _undo(self, work: DraftRound) -> None:
        """Takes a round back.

        The cells that it wrote are set to zero: passes of other rows read past these cells, and
        must not find values there that are not finite.
        """
        for row, start in zip(work.rows, work.plan.starts, strict=True):
            self._target.cache.lengths[row.slot] = start
            self._target.cache.zero_tail(row.slot, start)
        if self._drafter is not None and work.first is not None:
            cache = self._drafter.runner.cache
            for slot, own in zip(self._drafter.slots(work.rows), work.held, strict=True):
                cache.lengths[slot] = own
                cache.zero_non_finite(slot)


def _outcome(results: RoundResults, work: DraftRound) -> DecidedRound:
    """Returns the round in the form that the stages after the verdict take."""
    k = max(work.lengths)
    if k:
        every, tokens = results.drafts.tolist(), torch.from_numpy(results.drafts[:, :k])
        drafts = [own[:length] for own, length in zip(every, work.lengths, strict=True)]
        tree = DraftTree(tokens, torch.tensor(work.lengths), None, drafts, chains(drafts), work.k)
    else:
        tree = DraftTree.empty(len(work.rows), torch.device("cpu"), work.k)
    width = torch.promote_types(results.logits.dtype, torch.float32)
    probs, logprobs = (
        torch.from_numpy(values[:, : k + 1]).to(width)
        for values in (results.probs, results.logprobs)
    )
    accepted, following = torch.from_numpy(results.accepted), torch.from_numpy(results.tokens)
    verdict = Verdict(accepted, following, probs, raw_logprobs=logprobs)
    share = results.drafting / max(results.drafting + results.verifying, 1e-12)
    return DecidedRound(tree, results.logits[:, : k + 1], verdict, share)
