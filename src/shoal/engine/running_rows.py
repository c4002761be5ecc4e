"""The rows that run: they join, are paused and leave, while the caches hold their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from shoal.drafting.protocol import Drafter, name_of, observes_plain_rounds
from shoal.engine.commit import finish, visible_text
from shoal.engine.guide import Guide
from shoal.engine.memory import Memory
from shoal.engine.prefix_cache import PrefixCache, prefill
from shoal.engine.scheduler import Scheduler
from shoal.errors import BadLogits, ModelError, ShoalError
from shoal.models.device import explained
from shoal.models.runner import Runner
from shoal.sampling.distributions import Scores
from shoal.types.requests import Row
from shoal.types.rounds import Commit, PrefillChunk, PromptOrigin, ScheduledRound
from shoal.types.stats import Stats
from shoal.types.trees import Verdict


class Batch:
    """The running rows; carries out the scheduler's decisions in the caches and with the drafter.

    Args:
        target: the target, with the engine's cache.
        drafter: the drafter; None = plain decoding.
        scheduler: decides which rows run, and in which slots.
        memory: sizes the caches.
        prefixes: the prefixes of earlier rows; None = none are kept.
        stats: the counts of prompts and pauses.
        clock: returns seconds.
        guides: the guide of rows with guidance, and the expert.

    Attributes:
        drafter_name: the name of the drafter in counts; "" without one.
        plain: tells the rows of which only tokens and their probabilities are read.
    """

    def __init__(
        self,
        target: Runner,
        drafter: Drafter | None,
        scheduler: Scheduler,
        memory: Memory,
        prefixes: PrefixCache | None,
        stats: Stats,
        clock: Callable[[], float],
        guides: Sequence[Guide] = (),
    ) -> None:
        self.target, self.drafter, self.scheduler, self.memory = target, drafter, scheduler, memory
        self.drafter_name = "" if drafter is None else name_of(drafter)
        self.plain = PlainRows(drafter)
        self.prefixes, self.stats, self.clock, self.guides = prefixes, stats, clock, guides

    # ── joining ───────────────────────────────────────────────────────────────────────────────────

    def gather(self, commits: list[Commit], *, drafting: bool) -> Sequence[Row]:
        """Returns the rows of this round, with their prompts in the caches and adjacent slots.

        The list is empty also if no row runs for now and rows have ended, or the caller interrupts:
        both are before the next prompt, or piece of one, is computed.

        Args:
            commits: receives rows without memory, and rows whose deadline passes while prompts are
                computed.
            drafting: True if the drafter computes long prompts along with the target.
        """
        while True:
            round_ = self.scheduler.next_round()
            if not (round_.admissions or round_.chunks or round_.moves):
                return round_.rows
            try:
                with explained(self.target.name):
                    self._prefill(round_, drafting)
                failure = None
            except ModelError as error:
                # The frames hold the tensors of the pass, and rows keep their error.
                failure = error.with_traceback(None)
            if failure is not None:
                commits += self._refuse(round_, failure)
                continue
            late = self.expire()
            rows = self.close_up() if late else round_.rows
            commits += late
            if rows or commits or self.scheduler.waiting.interrupted():
                return rows

    def close_up(self) -> Sequence[Row]:
        """Returns the running rows after some have left; their slots are adjacent again."""
        round_ = self.scheduler.close_up()
        prefill(self.target, round_)
        return round_.rows

    def _refuse(self, round_: ScheduledRound, error: ModelError) -> list[Commit]:
        """Ends the rows that a round was to admit, because their prompts could not be computed.

        Raises the error if there are none.
        """
        rows = self.scheduler.refuse(round_)
        if not rows:
            raise error
        moves = [move for move in round_.moves if move.row not in rows]
        prefill(self.target, ScheduledRound(round_.rows, moves=moves))
        return self.cut(rows, "error", error)

    def _prefill(self, round_: ScheduledRound, drafting: bool) -> None:
        started = self.clock()
        for admission in round_.admissions:
            if admission.row.started_at is None:
                admission.row.started_at = started
        self.memory.allocate(round_)
        hidden: list[Tensor] = []
        computed = prefill(self.target, round_, hidden, self.prefixes)
        self.target.counts.take()  # no part of a round
        self.stats.count_executors("target", self.target.counts.take_executors())
        self.stats.prefills += sum(
            admission.origin is PromptOrigin.COMPUTE for admission in round_.admissions
        )
        self.stats.prefill_chunks += len(round_.chunks)
        self.stats.prefill_tokens += computed
        self.stats.restored_tokens += sum(admission.restored for admission in round_.admissions)
        self.stats.seconds_prefill += self.clock() - started
        if self.drafter is not None:
            self.drafter.begin(
                [admission.row for admission in round_.admissions if not admission.row.paused_at]
            )
        self.keep_pace(round_.chunks, hidden, drafting=drafting)

    def keep_pace(
        self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor] = (), *, drafting: bool
    ) -> None:
        """Has the drafter and the guides read chunks of prompts that the target has computed.

        A row that was paused is left out: the drafter knows it and its prompt already.

        Args:
            hidden: the target's hidden states of each chunk, if it keeps any.
            drafting: True if the drafter computes long prompts along with the target.
        """
        for one in self.guides:  # its seconds are in its own counters, as the drafter's are
            one.prepare(chunks)
        if self.drafter is None:
            return
        new = [i for i, chunk in enumerate(chunks) if not chunk.row.paused_at]
        chunks = [chunks[i] for i in new]
        if hidden and new:
            self.drafter.read_prompts(chunks, [hidden[i] for i in new])
        if drafting:
            self.drafter.prepare(chunks)

    # ── leaving ───────────────────────────────────────────────────────────────────────────────────

    def expire(self) -> list[Commit]:
        """Ends the rows whose deadline has passed; rows without a round yet were not started."""
        due = self.scheduler.expire(self.clock())
        if not due:
            return []
        started, others = [row for row in due if row.rounds], [row for row in due if not row.rounds]
        return self.cut(started, "time") + self.cut(others, "not started")

    def cut(
        self, rows: Iterable[Row], reason: str, error: ShoalError | None = None
    ) -> list[Commit]:
        """Ends the rows still running, between two rounds; returns their commits and samples."""
        unfinished = [
            row
            for row in dict.fromkeys(rows)
            if row.finish_reason is None or row.held_at is not None
        ]
        self.remove(unfinished)
        now, commits = self.clock(), []
        for row in unfinished:
            row.finish_reason, row.error, row.held_at = reason, error, None
            sample = finish(row, now)
            commits.append(Commit(row, [], 0, visible_text(row, sample), sample))
        return commits

    def remove(self, rows: Sequence[Row]) -> None:
        """Removes rows from slots or the queue, and from the drafter."""
        self._vacate(rows)
        if self.drafter is not None:
            self.drafter.end(rows)

    def hold(self, rows: Sequence[Row]) -> None:
        """Removes rows from their slots that may come back, with other tokens."""
        self._vacate(rows)
        if self.drafter is not None and rows:
            self.drafter.replace([(row, row) for row in rows])

    def _vacate(self, rows: Sequence[Row]) -> None:
        self.scheduler.remove(rows)
        self.plain.forget()
        for one in self.guides:
            one.leave(rows)

    def restart(self, row: Row, first: Row, seed: int) -> None:
        """Removes all new tokens of a row, which waits for a slot and goes on by another seed.

        Args:
            row: a row that runs or is held.
            first: a row of its group as they all began, which itself never runs.
        """
        if row.held_at is None:
            self.hold([row])
        row.become(first, seed)
        row.finish_reason = row.held_at = None
        self.scheduler.put_back(row)
        self.stats.restarted += 1

    def pause(self) -> None:
        """Pauses a row of a call that is ahead, for one that waits.

        The row gives up its slot. Its tokens in the cache are kept if there is room.
        """
        row = self.scheduler.to_pause()
        if row is None:
            return
        if self.prefixes is not None:
            self.prefixes.keep(row)
        for follower in (self.drafter, *self.guides):
            if follower is not None:
                follower.pause([row])
        self.scheduler.pause(row)
        self.stats.pauses += 1

    # ── the contents of the caches ────────────────────────────────────────────────────────────────

    def settle(self, commits: Sequence[Commit], scores: Scores, verdict: Verdict) -> None:
        """Restores the invariant: the cache keeps the committed tokens of each row's tree.

        Rows that have ended leave.
        """
        of_rows = verdict.columns([commit.tokens for commit in commits])
        for commit, columns in zip(commits, of_rows, strict=True):
            row, cache = commit.row, self.target.cache
            cache.keep(row.slot, len(row.tokens) - 1 - len(columns), columns)
            if scores.odds is not None and commit.tokens:
                scores.odds.learn(row, columns, commit.tokens[-1])
        rows = [commit.row for commit in commits]
        for one in self.guides:
            one.keep(rows, of_rows, scores.faults)
        if self.prefixes is not None:
            self.prefixes.learn([commit for commit in commits if commit.row not in scores.faults])
        if self.drafter is not None:
            self.drafter.observe(rows, scores, verdict)
        for commit in commits:
            self.scheduler.fairness.serve(commit.row, len(commit.tokens))
        finished = [row for row in rows if row.finish_reason]
        if finished:
            self.remove([row for row in finished if row.held_at is None])
            self.hold([row for row in finished if row.held_at is not None])
        self.zero_faults(scores)
        self.pause()

    @torch.inference_mode()
    def trim(self) -> bool:
        """Trims the caches to the rows in slots.

        Returns:
            True if all rows in slots fit beside the reserved memory; only then are the caches
            trimmed.
        """
        round_ = self.scheduler.release_free_slots()
        prefill(self.target, round_)
        fits = self.memory.fits(round_.in_slots, round_.slots, round_.prefixes)
        if fits:
            self.memory.allocate(round_)
        return fits

    def zero_faults(self, scores: Scores) -> None:
        """Zeroes cells that a faulty pass of the target has written.

        Hidden keys count with weight 0, and 0 * NaN is NaN. A row that failed loses all its cells,
        other rows those beyond their ends: rejected drafts, and padding.
        """
        for row, faults in scores.faults.items():
            if any(isinstance(error, BadLogits) for error in faults.values()):
                failed = any(row.error is error for error in faults.values())
                self.target.cache.zero_tail(
                    row.slot, 0 if failed else self.target.cache.lengths[row.slot]
                )
                if failed:
                    self.scheduler.slots.forget(row.slot)


class PlainRows:
    """A test whether the engine reads only tokens and their probabilities of a round.

    Args:
        drafter: the drafter of the engine; one that observes plain rounds reads more.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self._observes = observes_plain_rounds(drafter)
        self._rows: Sequence[Row] = ()
        self._plain = not self._observes  # of these rows

    def includes(self, rows: Sequence[Row]) -> bool:
        """Returns True if the rows are plain (`_is_plain`)."""
        if self._rows != rows:
            self._rows = list(rows)
            self._plain = not self._observes and all(map(_is_plain, rows))
        return self._plain

    def forget(self) -> None:
        """Forgets the rows of the last call, so that ended rows are freed."""
        self._rows, self._plain = (), not self._observes


def _is_plain(row: Row) -> bool:
    """Returns True if only tokens and their probabilities are read of a round of the row."""
    request = row.request
    return not (
        row.checks
        or row.cutting is not None
        or request.sampling.guidance
        or request.criteria
        or request.keep_logits
        or request.top_logprobs
        or request.weighted
        or request.distinct
    )
