"""The loop: draft -> verify -> accept -> commit, for all active rows at once.

Invariant: **between rounds every cache holds exactly the committed tokens of its row except the last one.** (The drafter's may
hold fewer: it never saw its own last draft after a full acceptance, and catches up when it next proposes.) The first round, full
acceptance and a row that ends inside a round are all cases of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.drafting.protocol import Drafter, ModelDrafter
from shoal.engine.commit import commit
from shoal.engine.memory import Memory
from shoal.engine.prefill import policy_for, prefill
from shoal.engine.samples import finish, visible_text
from shoal.engine.scheduler import CHUNK, Scheduler
from shoal.engine.validation import Intake
from shoal.engine.verify import verify
from shoal.errors import BadLogits, ModelError, ShoalError
from shoal.lookahead.controller import Controller, Lookahead, as_controller
from shoal.models.out_of_memory import explained
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Rejection, Rule
from shoal.types.requests import Request, Row
from shoal.types.rounds import Commit, Outcome, Proposal, Scores
from shoal.types.schedule import PromptOrigin, Round
from shoal.types.stats import Stats


class Engine:
    """Runs any number of requests through a batch of at most `max_batch` rows.

    Args:
        target: the model whose distribution is promised. drafter_model: proposes, or None for plain decoding.
        lookahead: decides draft lengths. tokenizer: for text and stop strings; None gives ids only.
        eos: the model's own EOS ids, for requests that name none.
        rule: how drafts are drawn and judged; rejection sampling unless said otherwise.
        prefix_sharing: "auto", "shared" (stored once per group) or "copied", see `shoal.engine.prefix_store`.
        chunk: most prompt tokens computed at once while rows run or any row has a deadline; deadlines are read in between.
        kv_bytes: what the caches of all models may take; rows wait until there is enough, and are decoded plainly where it does not
            hold the drafter's keys as well. None = no limit but the machine's.
        clock: seconds, as requests say when they were submitted; None = `time.perf_counter`.

    Attributes:
        stats: what was done so far. memory: what the caches take and may take.
    """

    def __init__(
        self, target: Runner, drafter_model: Runner | None, lookahead: Lookahead | Controller, *, max_batch: int = 16,
        tokenizer: Any = None, eos: Sequence[int] = (), rule: Rule | None = None, prefix_sharing: str = "auto", chunk: int = CHUNK,
        kv_bytes: int | None = None, clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        controller = as_controller(lookahead)
        speculative = drafter_model is not None and controller.limit > 0 and controller.may_speculate
        self.target = target.fork()
        self.models = [self.target]
        self.drafter: Drafter | None = None
        if drafter_model is not None and speculative:
            self.models.append(drafter_model.fork())
            self.drafter = ModelDrafter(self.models[1], target.vocab_size)
        self.lookahead, self.rule = controller, rule or Rejection()
        # A pass may write up to `limit` unused columns beyond a row's last token.
        self.memory = Memory(self.models, controller.limit + 1, kv_bytes)
        self.scheduler = Scheduler(
            max_batch, prefix_sharing=policy_for(prefix_sharing, self.models), chunk=chunk, fits=self.memory.fits
        )
        self.intake = Intake(self.models, self.memory, tokenizer, eos)
        self.stats = Stats()
        self._clock = clock or time.perf_counter

    @property
    def context(self) -> int:
        """Most tokens of a row: as many as the target holds. Beyond its own context the drafter proposes nothing."""
        return self.target.context

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: Request, *, stream: bool = False) -> list[Row]:
        """Queues a request's rows; they join the batch as slots fall free, also while others run.

        Args:
            stream: commits carry text as it grows.

        Raises:
            RequestError: before anything is computed, if the request cannot be served.
        """
        return self.submit_all([request], stream=stream)[0]

    def submit_all(self, requests: Iterable[Request], *, stream: bool = False) -> list[list[Row]]:
        """Queues the rows of several requests of one call, all or none; returns the rows of each.

        With time budgets the requests take turns: each gets its first row before any gets its second.

        Args:
            stream: commits carry text as it grows.

        Raises:
            RequestError: before anything is computed, if one of them cannot be served.
        """
        groups = [self.intake.rows(request, needs_text=stream) for request in requests]
        self.scheduler.add([row for rows in groups for row in rows])
        return groups

    def cancel(self, rows: Iterable[Row]) -> list[Commit]:
        """Ends rows now; what they have is returned, marked "cancelled"."""
        return self._cut(rows, "cancelled")

    def reserve_tokens(self, tokens: int) -> bool:
        """Reserves memory for so many tokens beside the rows, such as a prompt that is only scored; 0 gives it back.

        Returns:
            Whether there is enough memory yet; rows that would not fit beside it wait in any case.

        Raises:
            RequestError: there never is.
        """
        self.memory.reserve_tokens(tokens)
        self.scheduler.memory_reserved = tokens > 0
        return not tokens or self._trim_caches()

    @torch.inference_mode()
    def _trim_caches(self) -> bool:
        """Whether all that is in slots fits beside what is reserved; the caches are then no larger than that."""
        round_ = self.scheduler.release_free_slots()
        self._fill(round_)
        fits = self.memory.fits(round_.in_slots, round_.slots, round_.prefixes)
        if fits:
            self.memory.allocate(round_)
        return fits

    def _cut(self, rows: Iterable[Row], reason: str, error: ShoalError | None = None) -> list[Commit]:
        unfinished = [row for row in dict.fromkeys(rows) if row.finish_reason is None]
        self.scheduler.remove(unfinished)
        now, commits = self._clock(), []
        for row in unfinished:
            row.finish_reason, row.error = reason, error
            sample = finish(row, now)
            commits.append(Commit(row, [], 0, visible_text(row), sample))
        return commits

    # ── the algorithm ───────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def step(self) -> list[Commit]:
        """One round; returns what it committed, rows cut by their time budget included. Empty when all is done.

        A row without a distribution to draw from (NaN from a model, controls or a grammar that leave nothing possible) ends there,
        marked "error"; the others do not notice.

        Raises:
            OutOfMemory: anywhere in the round but in the admission of rows, which end alone. What the caches hold is then unknown:
                the engine is of no use any more.
        """
        with explained(self.target.name):
            return self._step()

    def _step(self) -> list[Commit]:
        ended = self._expire()
        rows = self._gather(ended)
        if not rows:
            return ended
        clock = [self._now()]
        luck, proposal = self._propose(rows)
        clock.append(self._now())
        scores = verify(self.target, rows, proposal)
        clock.append(self._now())
        verdict = self.rule.decide(proposal, scores.p, luck)
        accepted = verdict.accepted.tolist()
        clock.append(self._now())
        commits = commit(rows, proposal, scores, verdict, self._clock)
        self._settle(rows)
        self._scrub(scores)
        clock.append(self._now())
        self._count(proposal, commits, clock)
        self._learn(proposal, accepted, clock)
        return ended + commits

    def _now(self) -> float:
        """The clock of the stages; it stands still while a static pass is built, which says nothing of the next round."""
        return self._clock() - sum(model.seconds_building for model in self.models)

    def _expire(self) -> list[Commit]:
        """Ends the rows whose deadline has passed; those that had no round yet were not started."""
        due = self.scheduler.expire(self._clock())
        started, others = [row for row in due if row.rounds], [row for row in due if not row.rounds]
        return self._cut(started, "time") + self._cut(others, "not started")

    def _gather(self, ended: list[Commit]) -> Sequence[Row]:
        """The rows of this round, their prompts in the caches and their slots side by side.

        Rows that there is no memory for, and those whose deadline passes while prompts are computed, join those that have `ended`.
        Empty also if nothing runs for now and rows have ended: they are returned before the next prompt is computed.
        """
        while True:
            round_ = self.scheduler.next_round()
            if not (round_.admissions or round_.chunks or round_.moves):
                return round_.rows
            try:
                with explained(self.target.name):
                    self._prefill(round_)
                failure = None
            except ModelError as error:
                failure = error.with_traceback(None)  # its frames hold the tensors of the pass, and rows keep their error
            if failure is not None:
                ended += self._refuse(round_, failure)
                continue
            late = self._expire()
            rows = self._close_up() if late else round_.rows
            ended += late
            if rows or ended:
                return rows

    def _close_up(self) -> Sequence[Row]:
        """The rows of a round that others have left since their prompts were computed: their slots side by side again."""
        round_ = self.scheduler.close_up()
        self._fill(round_)
        return round_.rows

    def _fill(self, round_: Round) -> int:
        """Carries out a round's admissions and moves in all caches; returns how many prompt tokens the target computed."""
        computed = [prefill(model, round_, drafting=model is not self.target) for model in self.models]
        return computed[0]

    def _refuse(self, round_: Round, error: ModelError) -> list[Commit]:
        """Ends the rows that a round was to admit, as their prompts could not be computed; raises the error if there are none."""
        refused = self.scheduler.refuse(round_)
        if not refused:
            raise error
        moves = [move for move in round_.moves if move.row not in refused]
        self._fill(Round(round_.rows, moves=moves))
        return self._cut(refused, "error", error)

    def _prefill(self, round_: Round) -> None:
        started = self._clock()
        self.memory.allocate(round_)
        computed = self._fill(round_)
        for model in self.models:
            model.take_counters()  # no part of a round
        self.stats.prefills += sum(admission.origin is PromptOrigin.COMPUTE for admission in round_.admissions)
        self.stats.prefill_chunks += len(round_.chunks)
        self.stats.prefill_tokens += computed
        self.stats.seconds_prefill += self._clock() - started

    def _propose(self, rows: Sequence[Row]) -> tuple[Tensor, Proposal]:
        """The round's luck, [rows, k + 1, ...] as its rule has it, and the drafts drawn by it."""
        lengths = self.lookahead.lengths(rows, len(self.scheduler.waiting)) if self.drafter is not None else [0] * len(rows)
        longest = max(lengths)
        rounds = [row.rounds for row in rows] if self.lookahead.adaptive else None
        seeds, firsts = [row.seed for row in rows], [len(row.tokens) for row in rows]
        luck = self.rule.luck(seeds, firsts, longest + 1, rounds).to(self.target.device)
        if self.drafter is None or longest == 0:
            return luck, Proposal.empty(len(rows), luck.device)
        proposal = self.drafter.propose(rows, lengths, luck, self.rule.draw, self.lookahead.shorten)
        return luck[:, : proposal.k + 1], proposal

    def _settle(self, rows: Sequence[Row]) -> None:
        """Restores the invariant and lets finished rows go."""
        for row in rows:
            self.target.cache.rollback(row.slot, len(row.tokens) - 1)
        if self.drafter is not None:
            self.drafter.observe(rows)
        self.scheduler.remove([row for row in rows if row.finish_reason])

    def _scrub(self, scores: Scores) -> None:
        """Removes what a faulty pass of the target has left: hidden keys count with weight 0, and 0 * NaN is NaN. Of a row that
        failed all goes, of others what lies beyond their ends: drafts that were rejected, and padding."""
        for row, fault in scores.faults.items():
            if isinstance(fault.error, BadLogits):
                failed = row.error is fault.error
                self.target.cache.zero_tail(row.slot, 0 if failed else self.target.cache.lengths[row.slot])
                if failed:
                    self.scheduler.forget(row.slot)

    def _count(self, proposal: Proposal, commits: Sequence[Commit], clock: Sequence[float]) -> None:
        stats = self.stats
        stats.rounds += 1
        stats.row_rounds += len(commits)
        stats.drafted += sum(map(len, proposal.drafts))
        stats.accepted += sum(c.accepted for c in commits)
        stats.committed += sum(len(c.tokens) for c in commits)
        stats.seconds_rounds += clock[-1] - clock[0]
        stats.seconds_propose += clock[1] - clock[0]
        stats.seconds_verify += clock[2] - clock[1]
        stats.seconds_accept += clock[3] - clock[2]
        stats.seconds_commit += clock[4] - clock[3]
        target, *drafting = [model.take_counters() for model in self.models]
        stats.target_passes += target[0]
        stats.seconds_target += target[1]
        stats.draft_passes += sum(passes for passes, _ in drafting)
        stats.seconds_draft += sum(seconds for _, seconds in drafting)

    def _learn(self, proposal: Proposal, accepted: list[int], clock: Sequence[float]) -> None:
        drafted = [len(drafts) for drafts in proposal.drafts]
        self.lookahead.learn(Outcome(drafted, accepted, proposal.steps, clock[-1] - clock[0], clock[1] - clock[0]))
