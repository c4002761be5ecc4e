"""The loop: draft -> verify -> accept -> commit, for all active rows at once.

Invariant: **between rounds every cache holds exactly the committed tokens of its row except the
last one.** (A drafter's cache may hold fewer: after a full acceptance the drafter never saw its own
last draft, and catches up when it next proposes.) The first round, full acceptance and a row that
ends inside a round are all cases of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shoal.config import Sampling
from shoal.constraints.estimates import Estimates
from shoal.drafting.protocol import DraftCounters, Drafter
from shoal.engine.accounting import Stopwatch, count_round, outcome
from shoal.engine.batch_size import FIRST, AutoBatchSize, BatchSize, batch_size_of
from shoal.engine.checks import apply_checks
from shoal.engine.commit import commit, commit_run
from shoal.engine.guide import Guide
from shoal.engine.joint_rows import Distinct, resample
from shoal.engine.memory import memory_of
from shoal.engine.multi_step import MultiStep
from shoal.engine.prefix_cache import PrefixCache, PrefixMemory, policy_for
from shoal.engine.running_rows import Batch
from shoal.engine.scheduler import CHUNK, Scheduler
from shoal.engine.validation import RequestValidator
from shoal.engine.verify import Stages, scores_of
from shoal.engine.waiting import Fairness
from shoal.errors import OutOfMemory
from shoal.lookahead.controller import Controller, Lookahead, as_controller
from shoal.models.device import explained
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Rejection, Rule
from shoal.sampling.distributions import Scores
from shoal.types.arguments import of_prompt
from shoal.types.requests import Request, Row
from shoal.types.rounds import Commit
from shoal.types.stats import Stats
from shoal.types.trees import DraftTree, Verdict

PREPARED_TOKENS = 2048
"""The tokens of a row for which caches are sized before there are rows."""
COMMON = (Sampling(), Sampling(temperature=0.0))
"""The settings whose rounds are captured before any request asks for them.

Temperatures are no part of a capture.
"""


class Computed(NamedTuple):
    """The results of a round, or of several plain ones.

    Attributes:
        tree: the drafts.
        scores: the target's scores of them; without logits for several rounds.
        verdict: the decision of the rule; for several rounds the decision of the last round.
        commits: the commits of the rows.
        rounds: the number of rounds.
    """

    tree: DraftTree
    scores: Scores
    verdict: Verdict
    commits: list[Commit]
    rounds: int


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine: its texts, its memory, and the order of its rows.

    Attributes:
        tokenizer: the tokenizer for text and stop strings; None = ids only.
        eos: the model's own EOS ids, for requests that name none.
        prefix_sharing: "auto", "shared" (stored once per group) or "copied", see
            `shoal.engine.admission`.
        chunk: the most prompt tokens computed at once while rows run or any row has a deadline;
            deadlines are read in between.
        kv_bytes: the most bytes of the caches of all models. Rows wait until there is enough, and
            are decoded plainly if the drafter's keys do not fit as well. None = no limit but the
            machine's.
        prefixes: the memory for prefixes of earlier rows, beside `kv_bytes`
            (`shoal.engine.prefix_cache`); None = none are kept.
        quantum: the tokens by which a call may get ahead of one that waits before its rows pause
            (`shoal.engine.waiting`); None = first come, first served.
        guide: the second model of rows with guidance (`shoal.engine.guide`); None = such rows are
            refused.
        expert: the model that guided rows are led towards; None = the target.
        clock: returns seconds, on the clock of the requests' submission; None =
            `time.perf_counter`.
    """

    tokenizer: Any = None
    eos: Sequence[int] = ()
    prefix_sharing: str = "auto"
    chunk: int = CHUNK
    kv_bytes: int | None = None
    prefixes: PrefixMemory | None = None
    quantum: int | None = None
    guide: Runner | None = None
    expert: Runner | None = None
    clock: Callable[[], float] | None = None


class Engine:
    """An engine that runs any number of requests through one batch of rows.

    Rows join and leave the batch between rounds.

    Args:
        target: the model whose distribution is promised.
        drafter: the drafter, for this engine alone; None = plain decoding.
        lookahead: decides draft lengths.
        max_batch: the number of rows that run at once; None = an `AutoBatchSize` of its own.
        rule: the rule by which drafts are drawn and judged; None = rejection sampling.
        settings: the fields of `EngineSettings` by name.

    Attributes:
        stats: the counts and times so far.
        estimates: the estimates of `exact="asap"`.
        batch_size: decides how many rows run.
        memory: the memory of the caches, and its limits.
    """

    def __init__(
        self,
        target: Runner,
        drafter: Drafter | None,
        lookahead: Lookahead | Controller,
        *,
        max_batch: int | BatchSize | None = None,
        rule: Rule | None = None,
        **settings: Any,
    ) -> None:
        own = EngineSettings(**settings)
        controller, self.target = as_controller(lookahead), target.fork()
        self.drafter = drafter if controller.limit > 0 and controller.may_speculate else None
        self.guides = [] if own.guide is None else [Guide(own.guide)]
        self.guides += [] if own.expert is None else [Guide(own.expert, "expert")]
        self.lookahead, self.rule = controller, rule or Rejection()
        self.batch_size = batch_size_of(AutoBatchSize() if max_batch is None else max_batch)
        self.memory = memory_of(
            self.target,
            self.drafter,
            self.guides,
            controller.limit,
            most=own.kv_bytes,
            bounded=self.batch_size.bounds_memory,
        )
        self.kept_prefixes: PrefixCache | None = None
        if own.prefixes is not None and self.target.can_keep_prefixes:
            self.kept_prefixes = PrefixCache(self.target, self.drafter, own.prefixes)
        self.scheduler = Scheduler(
            self.batch_size.most,
            prefix_sharing=policy_for(own.prefix_sharing, self.memory.models),
            chunk=own.chunk,
            fits=self.memory.fits,
            rows_now=self.batch_size.rows,
            prefixes=self.kept_prefixes,
            fairness=Fairness(own.quantum),
        )
        self.validator = RequestValidator(
            self.target, self.memory, own.tokenizer, own.eos, self.guides
        )
        self.stats, self.estimates = Stats(lossy=self.rule.lossy), Estimates()
        self._batch = Batch(
            self.target,
            self.drafter,
            self.scheduler,
            memory=self.memory,
            prefixes=self.kept_prefixes,
            stats=self.stats,
            clock=own.clock or time.perf_counter,
            guides=self.guides,
        )
        self._stages = Stages(self._batch, controller, self.rule)
        self._distinct = Distinct(self._batch)
        self._multi_step = MultiStep.of(self._batch, controller, self.rule, self._stages.uniforms)

    @property
    def context(self) -> int:
        """The most tokens of a row: the target's context.

        Beyond its own context the drafter makes no proposals.
        """
        return self.target.context

    def continue_stats(self, stats: Stats) -> None:
        """Continues the counts of an earlier engine."""
        self.stats = self._batch.stats = stats

    def releases(self) -> list[Callable[[], None]]:
        """Returns functions that free memory which outlives the engine; called once it is gone."""
        captures = self.target.captures
        own = [] if captures is None else [captures.release]
        return own if self.drafter is None else [*own, *self.drafter.releases()]

    # ── asking ────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: Request, *, stream: bool = False) -> list[Row]:
        """Queues a request's rows, which join the batch as slots fall free, also while others run.

        Args:
            stream: True if commits carry text as it grows.

        Raises:
            RequestError: the request cannot be served; raised before any computation.
        """
        return self.submit_all([request], stream=stream)[0]

    def submit_all(self, requests: Iterable[Request], *, stream: bool = False) -> list[list[Row]]:
        """Queues the rows of several requests of one call, all or none; returns the rows of each.

        With time budgets the requests take turns: each gets its first row before any gets its
        second.

        Args:
            stream: True if commits carry text as it grows.

        Raises:
            RequestError: one of them cannot be served; raised before any computation.
        """
        requests, groups = list(requests), []
        for place, request in enumerate(requests):
            with of_prompt(place, len(requests)):
                groups.append(self.validator.rows(request, needs_text=stream))
        for rows in groups:
            self.estimates.begin(rows)
            self._distinct.begin(rows)
        self.scheduler.add([row for rows in groups for row in rows])
        return groups

    def cancel(self, rows: Iterable[Row]) -> list[Commit]:
        """Ends rows now; returns their samples so far, marked "cancelled"."""
        return self._distinct.with_joint_draws(self._batch.cut(rows, "cancelled"))

    def reserve_tokens(self, tokens: int) -> bool:
        """Reserves memory for tokens beside the rows, such as a prompt that is only scored.

        Args:
            tokens: the number of tokens; 0 gives the memory back.

        Returns:
            True if there is enough memory yet. Rows that would not fit beside it wait in any case.

        Raises:
            RequestError: there is never enough memory.
        """
        self.memory.reserve_tokens(tokens)
        self.scheduler.memory_reserved = tokens > 0
        return not tokens or self._batch.trim()

    # ── before anything is asked ──────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def prepare(
        self,
        rows: int = FIRST,
        tokens: int = PREPARED_TOKENS,
        samplings: Sequence[Sampling] = COMMON,
    ) -> None:
        """Makes room for rows, and names their rounds for `build_ahead`.

        If memory is scarce, it makes room for shorter rows. Does nothing if rounds are not
        captured.

        Args:
            samplings: the settings of the rounds.
        """
        if self.target.captures is None:
            return
        rows = min(rows, self.batch_size.most)
        while tokens >= 1:
            with suppress(OutOfMemory):
                if self.memory.prepare(rows, tokens):
                    break
            tokens //= 2
        else:
            return
        longest = 0 if self.drafter is None else self.lookahead.limit
        drafts = list(dict.fromkeys([longest, 0]))  # a row's last token is decoded plainly
        self._stages.captured.want(rows, drafts, samplings)

    @torch.inference_mode()
    def build_ahead(self) -> bool:
        """Builds one function of captured rounds; called between rounds, while no row waits.

        Otherwise it would be built in the path of the first rows that need it.

        Returns:
            True if there was a function to build.
        """
        return self._stages.captured.build_next()

    # ── the algorithm ─────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def step(self) -> list[Commit]:
        """Computes one round; returns its commits, rows cut by their time budget included.

        The list is empty when all is done, or `Waiting.interrupted` is true between two pieces of
        a prompt. A row without a distribution to draw from (NaN from a
        model, or no possible token under its controls or grammar) ends there, marked "error"; other
        rows are not affected.

        Raises:
            OutOfMemory: anywhere in the round but in the admission of rows, which end alone. The
                content of the caches is then unknown: the engine can no longer be used.
        """
        with explained(self.target.name):
            return self._step()

    def _step(self) -> list[Commit]:
        cut_commits = self._batch.expire()
        rows = self._stages.gather(cut_commits)
        if not rows:
            return self._distinct.with_joint_draws(cut_commits)
        watch = Stopwatch(self._stages.now)
        lengths = self._stages.lengths(rows)
        watch.note_plan()
        tree, scores, verdict, commits, rounds = self._several(rows, lengths, watch) or self._one(
            rows, lengths, watch
        )
        self._batch.settle(commits, scores, verdict)
        self.stats.resampled += resample(
            [commit.row for commit in commits if not commit.row.finish_reason],
            self.target.cache,
            [one.replace for one in (self.drafter, *self.guides) if one is not None],
        )
        watch.lap()
        drafter = DraftCounters() if self.drafter is None else self.drafter.take_counters()
        self.stats.count_executors("target", self.target.counts.take_executors())
        for one in self.guides:
            one.count(self.stats)
        count_round(
            self.stats,
            tree,
            commits,
            laps=watch.laps,
            target=self.target.counts.take(),
            drafter=drafter,
            name=self._batch.drafter_name,
            rounds=rounds,
        )
        paths, _ = verdict.lists
        riding, committed = (
            self._stages.rides.tokens,
            sum([len(commit.tokens) for commit in commits]),
        )
        self.lookahead.learn(outcome(tree, paths, watch, drafter.preparing, rounds, riding))
        if not riding:
            self.batch_size.learn(len(rows), committed, sum(watch.laps))
        return self._distinct.with_joint_draws(cut_commits + commits)

    def _one(self, rows: Sequence[Row], lengths: Sequence[int], watch: Stopwatch) -> Computed:
        """Computes a round of these draft lengths, and commits it."""
        tree, scores, verdict = self._stages.decide(rows, lengths, watch)
        verdict, rows = apply_checks(tree, scores, verdict), scores.positions.rows
        batch = self._batch
        commits = commit(rows, tree, scores, verdict, batch.drafter_name, batch.clock)
        return Computed(tree, scores, verdict, commits, 1)

    def _several(
        self, rows: Sequence[Row], lengths: Sequence[int], watch: Stopwatch
    ) -> Computed | None:
        """Computes several plain rounds in one go, and commits them; None if that is not possible.

        It is possible where Python would take as long as the passes (`shoal.engine.multi_step`).
        """
        scheduler = self.scheduler
        if self._multi_step is None or any(lengths) or scheduler.slots.filling:
            return None
        run = self._multi_step.run(rows, may_change=bool(scheduler.waiting))
        if run is None:
            return None
        watch.lap_shares((0.0, 1.0, 0.0))
        tree = DraftTree.empty(len(rows), self.target.device)
        scores, verdict = scores_of(self.target, rows, tree, run.no_logits), run.verdict
        commits = commit_run(rows, run, self.target.vocab_size, self._batch.clock)
        return Computed(tree, scores, verdict, commits, run.rounds)
