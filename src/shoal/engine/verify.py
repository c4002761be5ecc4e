"""The stages of a round up to the verdict: drafts, one target pass over them, the rule's decision.

The pass is over the last committed token and the draft tree of every row. Where the rows' settings
allow it, a round is one captured function instead (`shoal.drafting.captured`).

Chunks of long prompts ride in the pass (`Rides`). After SARATHI (Agrawal et al. 2023, arXiv
2308.16369): a round's pass takes the next chunk of a waiting prompt along as one more row, which
has no drafts and takes no part in the verdict. One pass in place of two reads the weights once. The
scheduler decides which chunk rides; `shoal.models.prompt_passes.carries_prompts` decides which
passes take one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shoal.drafting.captured import CapturedRounds
from shoal.drafting.grafting import ForcedTokens
from shoal.drafting.protocol import DraftInputs, within
from shoal.drafting.recycling import habits_of
from shoal.engine.accounting import Stopwatch
from shoal.engine.guide import Guide
from shoal.engine.running_rows import Batch
from shoal.errors import BadLogits, ModelError, ShoalError
from shoal.lookahead import Controller
from shoal.models.prompt_passes import carries_prompts, feed_carrying
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rule
from shoal.sampling.distributions import Scores
from shoal.sampling.drawing import finite
from shoal.sampling.guidance import ClassOdds, apply_guidance
from shoal.sampling.uniforms import UniformsAhead
from shoal.types.requests import Row
from shoal.types.rounds import Commit, PrefillChunk
from shoal.types.trees import Block, DraftTree, Positions, Probes, Verdict


class Rides:
    """The chunks that ride in the passes of an engine's rows.

    Args:
        batch: the running rows, with the target.

    Attributes:
        tokens: the number of prompt tokens that have ridden in the round under way.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch, self.tokens = batch, 0
        batch.scheduler.carries = partial(carries_prompts, batch.target)
        self._computed: PrefillChunk | None = None  # the drafter has not heard of it

    def feed(self, slots: Sequence[int], block: Block) -> Tensor:
        """Appends a block to the rows that run, and the next chunk of a prompt if one can ride.

        If the pass fails, it is computed without the chunk, and no other chunk rides: prompts are
        then computed in passes of their own, which show whose prompt has failed.

        Returns:
            The logits of the block.
        """
        batch = self._batch
        chunk = batch.scheduler.riding()
        if chunk is not None:
            prompt = chunk.row.tokens[chunk.start : chunk.stop]
            try:
                logits = feed_carrying(batch.target, slots, block, chunk.slot, prompt)
            except ModelError:
                batch.scheduler.carries = lambda: False
            else:
                self._note(chunk)
                return logits
        tokens, counts, parents = block
        return batch.target.feed(slots, tokens, counts, parents=parents)

    def _note(self, chunk: PrefillChunk) -> None:
        self.tokens, self._computed = chunk.stop - chunk.start, chunk
        self._batch.scheduler.slots.rode(chunk)
        stats = self._batch.stats
        stats.prefill_chunks += 1
        stats.fused_chunks += 1
        stats.prefill_tokens += self.tokens

    def keep_pace(self, *, drafting: bool) -> None:
        """Begins a round: the drafter and the guides compute the chunk that rode in the last one.

        Args:
            drafting: True if the drafter computes long prompts along with the target.
        """
        chunk, self._computed, self.tokens = self._computed, None, 0
        if chunk is not None and chunk.row.finish_reason is None:
            self._batch.keep_pace([chunk], drafting=drafting)


class Stages:
    """The stages of an engine's rounds: draft, verify, accept.

    Args:
        batch: the running rows, with the target, the drafter and the guides.
        lookahead: decides draft lengths.
        rule: the rule by which drafts are drawn and judged.

    Attributes:
        uniforms: the uniforms of the rows.
        captured: the rounds that are one captured function.
        rides: the chunks of prompts that ride in verifying passes.
    """

    def __init__(self, batch: Batch, lookahead: Controller, rule: Rule) -> None:
        self._batch, self._lookahead, self._rule = batch, lookahead, rule
        self._target, self._drafter = batch.target, batch.drafter
        self.uniforms = UniformsAhead(rule)
        self.rides = Rides(batch)
        self.captured = CapturedRounds(batch.target, batch.drafter, rule)
        vocab_size = batch.target.vocab_size
        habits = habits_of(batch.target.hf) if isinstance(rule, Coupled) else None
        self._forced = ForcedTokens(lookahead.limit, vocab_size, batch.drafter_name, habits)
        self._drafting = not lookahead.adaptive  # or if the last round drafted
        self._gathered = True  # if rows could join before this round

    def gather(self, commits: list[Commit]) -> Sequence[Row]:
        """Returns the rows of this round. If the round was launched ahead, they are the rows of
        that launch.

        Args:
            commits: receives rows that end, see `Batch.gather`.
        """
        self.rides.keep_pace(drafting=self._drafting)
        rows: Sequence[Row] = ()
        if self.captured.is_ahead:
            rows = self.captured.under_way(self._batch.scheduler.running)
        self._gathered = not rows
        return rows or self._batch.gather(commits, drafting=self._drafting)

    def lengths(self, rows: Sequence[Row]) -> Sequence[int]:
        """Returns the draft length of each row."""
        if self._drafter is None:
            lengths = [0] * len(rows)
        elif self._gathered:
            lengths = self._lookahead.lengths(rows, len(self._batch.scheduler.waiting))
        else:
            lengths = self._lookahead.repeat(rows)
        self._drafting = max(lengths) > 0 or not self._lookahead.adaptive
        return lengths

    def decide(
        self, rows: Sequence[Row], lengths: Sequence[int], watch: Stopwatch
    ) -> tuple[DraftTree, Scores, Verdict]:
        """Drafts, verifies and accepts.

        If the rows' settings allow it, this is one captured round; otherwise it is one stage after
        the other. The stages take rows in adjacent slots. Rows of a round that was launched ahead
        may have gaps between their slots; closing the gaps changes their order
        (`Scores.positions`).
        """
        decided = None
        if not max(lengths) or self._lookahead.shorten is None:
            decided = self.captured.decide(
                rows, lengths, partial(self._noise, rows), goes_on=self._goes_on(rows)
            )
        if decided is not None:
            watch.lap_shares((decided.share, 1 - decided.share, 0.0))
            return (
                decided.tree,
                scores_of(self._target, rows, decided.tree, decided.logits),
                decided.verdict,
            )
        if not self._gathered:
            length_of = dict(zip(rows, lengths, strict=True))
            rows = self._batch.close_up()
            lengths = [length_of[row] for row in rows]
        uniforms, tree = self._propose(rows, lengths, watch)
        watch.lap()
        tree = self._forced.joined(rows, tree)
        if tree.forced is not None and (depth := max(map(max, tree.depths))) >= uniforms.shape[1]:
            uniforms = self._noise(rows, depth + 1).to(self._target.device)
        scores = verify(self._target, rows, tree, self._batch.guides, self.rides.feed)
        watch.lap()
        verdict = self._rule.decide(tree, scores, uniforms)
        _ = verdict.lists  # waits for a device
        watch.lap()
        return tree, scores, verdict

    def _noise(self, rows: Sequence[Row], positions: int, later: int = 0) -> Tensor:
        """Returns the uniforms of a round for its rule, [rows, positions, ...], on the host.

        Args:
            later: the number of rounds from now on to the round.
        """
        return self.uniforms.of_round(rows, positions, self._lookahead.adaptive, later)

    def _propose(
        self, rows: Sequence[Row], lengths: Sequence[int], watch: Stopwatch
    ) -> tuple[Tensor, DraftTree]:
        """Returns the uniforms of the round, and the trees drawn by them.

        The uniforms are [rows, longest draft + 1, ...].
        """
        uniforms = self._noise(rows, max(lengths) + 1).to(self._target.device)
        watch.note_plan()
        if self._drafter is None or not max(lengths):
            return uniforms, DraftTree.empty(len(rows), uniforms.device)
        stop = self._lookahead.shorten
        inputs = DraftInputs(rows, lengths, uniforms, self._rule.draw, stop and watch.timer(stop))
        return uniforms, within(self._drafter.propose(inputs), inputs)

    def _goes_on(self, rows: Sequence[Row]) -> bool:
        """Returns True if the next round may be launched before the verdict of this one is known.

        No row must join the next round: its rows are the rows of this round that do not end. While
        rows wait for free slots, a round that was launched ahead is followed by one that is not,
        which lets them join.
        """
        scheduler = self._batch.scheduler
        if self._target.captures is None or self._batch.guides or scheduler.slots.filling:
            return False
        if not self._lookahead.steady:
            return False
        full = len(rows) >= scheduler.capacity
        joins = scheduler.waiting and not (full or self._gathered)
        return not joins and self._batch.plain.includes(rows)

    def now(self) -> float:
        """Returns the clock of the stages.

        The clock stands still while prompts are computed for the drafter or a guide, or a round
        is captured: that time does not recur in the next round.
        """
        drafter = self._drafter
        return (
            self._batch.clock()
            - self._target.seconds_building
            - (0.0 if drafter is None else drafter.seconds_preparing)
            - sum([one.slots.seconds for one in self._batch.guides])
        )


def verify(
    target: Runner,
    rows: Sequence[Row],
    tree: DraftTree,
    guides: Sequence[Guide] = (),
    feed: Callable[[Sequence[int], Block], Tensor] | None = None,
) -> Scores:
    """Returns the target's scores of the m + 1 columns of every row.

    With an empty tree this is a step of plain decoding.

    Args:
        target: the target, with the engine's cache.
        guides: the guide of rows with guidance, and the expert, if there is one; rows with guidance
            get the scores of the guided target.
        feed: appends a block to slots, and returns its logits; None = by the target.
    """
    block = _block(target, rows, tree)
    slots = [row.slot for row in rows]
    if feed is None:
        tokens, counts, parents = block
        logits = target.feed(slots, tokens, counts, parents=parents)
    else:
        logits = feed(slots, block)
    own = logits[:, : tree.m + 1]
    if guides and tree.probes is not None:  # vectors of the target alone
        block = _block(target, rows, replace(tree, probes=None))
    guiding = [
        logits_of_guide
        for one in guides
        if (logits_of_guide := one.logits(rows, block)) is not None
    ]
    odds = None
    if guiding:
        samplings = [row.request.sampling for row in rows]
        if any(one.posterior for one in samplings):
            odds = ClassOdds(rows, tree)
        own = apply_guidance(own, guiding[0], samplings, guiding[1] if guiding[1:] else None, odds)
    scores = scores_of(target, rows, tree, own)
    columns = None if tree.probes is None else logits
    scores = replace(scores, hidden=target.hidden, columns=columns, odds=odds)
    if not all(finite(one[..., 0]) for one in (logits, *guiding)):
        # A state that is NaN makes NaN of every logit. `p` notes the fault of each such column, so
        # that its cells in the cache are zeroed although no accepted path may lead there.
        scores.p()
        _note_probes(scores, logits, target)
    return scores


def _block(target: Runner, rows: Sequence[Row], tree: DraftTree) -> Block:
    if tree.probes is not None:
        return _with_probes(target, rows, tree, tree.probes)
    last = torch.tensor([[row.tokens[-1]] for row in rows], device=target.device)
    block = torch.cat([last, tree.tokens], dim=1) if tree.m else last
    counts = [1 + len(drafts) for drafts in tree.drafts]
    if min(counts) < max(counts):
        # Padding is the row's own token: hidden keys count with weight 0, but where they are NaN, 0
        # * NaN is NaN.
        own = (
            torch.arange(block.shape[1], device=block.device)
            < torch.tensor(counts, device=block.device)[:, None]
        )
        block = torch.where(own, block, last)
    return block, counts, tree.parents if tree.branches else None


def _with_probes(target: Runner, rows: Sequence[Row], tree: DraftTree, probes: Probes) -> Block:
    """Returns a block like `_block`, with each row's probes behind its nodes.

    The probes are leaves, apart from other probes that follow them, so no token sees them.
    """
    pairs = zip(rows, tree.drafts, probes.vectors, strict=True)
    own = [
        [row.tokens[-1], *draft, *(-1 - vector for vector in vectors)]
        for row, draft, vectors in pairs
    ]
    counts = [len(columns) for columns in own]
    padded = [columns + columns[:1] * (max(counts) - len(columns)) for columns in own]
    parents = [
        [*nodes, *(column - 1 for column in after)]
        for nodes, after in zip(tree.parents, probes.after, strict=True)
    ]
    return torch.tensor(padded, device=target.device), counts, parents


def _note_probes(scores: Scores, logits: Tensor, target: Runner) -> None:
    """Notes the columns behind all nodes that are not finite.

    No row's path reaches them, but their cells must be zeroed.
    """
    first = scores.logits.shape[1]
    for b, column in (~logits[:, first:, 0].isfinite()).nonzero().tolist():
        error = BadLogits(f"column {first + column}, which the drafter reads, is NaN or infinite")
        scores.faults.setdefault(scores.positions.rows[b], {})[first + column] = _blame(
            error, target
        )


def scores_of(target: Runner, rows: Sequence[Row], tree: DraftTree, logits: Tensor) -> Scores:
    """Returns the target's scores of a draft tree, by logits [rows, m + 1, vocab]."""
    return Scores(logits, Positions.of(rows, tree), named=lambda error: _blame(error, target))


def _blame(error: ShoalError, target: Runner) -> ShoalError:
    """Returns the error with the user's name of the model, if the model is at fault."""
    if not isinstance(error, BadLogits):
        return error
    advice = f"the weights may be damaged, or {target.dtype} may overflow: try dtype='float32'"
    return BadLogits(f"{target.name} returned NaN or infinite logits: {error}; {advice}")
