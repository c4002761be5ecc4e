"""A smaller model of the same vocabulary drafts token by token, with a ragged cache of its own.

Its cache holds a prefix of each row's committed tokens, without the last one; it is empty for a row
that was never drafted for. It lags by one after a full acceptance (it never saw its own last draft)
and by more after plain rounds. Before it drafts, rows that lag by more are brought up to date
(`shoal.drafting.draft_slots`); the first pass of a proposal feeds the tokens still pending.

A row with more tokens than the context, or memory, of the drafter holds gets no draft
(`Row.max_draft_length`). The cache keeps its prompt alone, or none of it if the prompt is too long
as well. In passes for other rows it stands as padding, as do all rows that are not drafted for in
the round.

If the drafter has no distribution (NaN, an infinite logit, or -inf everywhere) the draft ends, and
the row goes on as in plain decoding. NaN and infinite values in its cells become zero: they would
otherwise reach the row's later drafts, and the next row of the slot. The drafts that follow are
then worse, which costs acceptance and never exactness.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shoal.drafting.draft_slots import DraftMemory, DraftSlots
from shoal.drafting.protocol import DraftCounters, Drafter, DraftInputs
from shoal.models.compiled.draft_functions import DraftedStep
from shoal.models.lean.steps import Drawing, lean_steps
from shoal.models.runner import Runner
from shoal.models.vocabulary import SharedIds, SharedTokens
from shoal.sampling.controls import change
from shoal.sampling.distributions import RACES, Scores, draws
from shoal.sampling.native_draws import knows
from shoal.types.requests import Row
from shoal.types.rounds import Faults, PrefillChunk
from shoal.types.trees import DraftTree, Positions, Verdict, chains

log = logging.getLogger("shoal")

Step = Callable[[Tensor, Sequence[int]], DraftedStep | None]
"""A step of drafting: (uniforms of the next position, draft lengths) -> the draws there.

The uniforms are [rows, ...]; the result is None if the step cannot go on.
"""


class ModelDrafter(Drafter):
    """A drafter that samples k tokens per row from a model under the row's own sampling controls.

    Args:
        runner: the draft model, with a cache of its own.
        vocab_size: the target's; the drafter's logits are cut or filled up to it.
        shared: the tokens that it may propose; None = those of the same ids.
        pending: the most committed tokens of a row that the first pass of a proposal feeds; older
            ones are fed before.
    """

    name = "model"
    observes_plain_rounds = False

    def __init__(
        self,
        runner: Runner,
        vocab_size: int,
        shared: SharedTokens | None = None,
        *,
        pending: int = 2,
    ) -> None:
        self.runner, self.vocab_size = runner, vocab_size
        self.weights: nn.Module | Tensor | None = runner.hf
        self.shared = shared and SharedIds(shared, runner.device)
        self._slots = DraftSlots(runner, pending)
        self.memory = DraftMemory(self._slots)
        self._warned = False

    def attach(self, target: Runner) -> None:
        """Forgets rows and prompts of an earlier engine: each counts its groups from 0."""
        self._slots.leave(None)

    def propose(self, inputs: DraftInputs) -> DraftTree:
        """Proposes drafts in at most max(lengths) passes.

        Rows with shorter drafts take part in all passes, and their surplus is ignored.
        """
        before, _ = self.lacking(inputs.rows, inputs.lengths)
        fast = self._lean_steps(inputs)
        tree = fast and self._drafted(inputs, fast, {})
        if tree is None:  # there are none, or they failed
            for row, length in zip(inputs.rows, before, strict=True):
                self.runner.cache.rollback(self._slot(row), length)
            faults: Faults = {}
            tree = self._drafted(inputs, OrdinarySteps(self, inputs, faults), faults)
        assert tree is not None
        self.leave_out(inputs.rows, inputs.lengths, before)
        return tree

    def lacking(
        self, rows: Sequence[Row], lengths: Sequence[int]
    ) -> tuple[list[int], list[list[int]]]:
        """Puts the rows of a round into their slots.

        Returns:
            The number of tokens of each row in the cache; and the tokens that the cache lacks, at
            least the last one. A row that is not drafted for has one padding token.
        """
        read = [self.read_as(row) for row in rows]
        self._slots.place(read, [length > 0 for length in lengths])
        held = self.runner.cache.lengths[: len(rows)]
        return held, [
            row.tokens[own:] if length else [0]
            for row, own, length in zip(read, held, lengths, strict=True)
        ]

    def leave_out(self, rows: Sequence[Row], lengths: Sequence[int], held: Sequence[int]) -> None:
        """Rolls rows that were not drafted for back to the tokens held before.

        These rows stood as padding in the passes.
        """
        for row, length, own in zip(rows, lengths, held, strict=True):
            if not length:
                self.runner.cache.rollback(self._slot(row), own)

    def _drafted(self, inputs: DraftInputs, step: Step, faults: Faults) -> DraftTree | None:
        """Returns the drafts of a round, made step by step; None if a step gave up.

        Steps tell in `faults` which rows cannot go on, or by a token of -1, which is read when all
        steps are done.
        """
        rows, lengths = inputs.rows, list(inputs.lengths)
        looked: list[DraftedStep] = []
        steps = 0
        while steps < max(lengths):
            j, steps = steps, steps + 1
            drawn = step(inputs.uniforms[:, j], lengths)
            if drawn is None:
                return None
            looked.append(drawn)
            if inputs.stop is not None:
                lengths = [
                    min(pair)
                    for pair in zip(lengths, inputs.stop(j, drawn.confidence.tolist()), strict=True)
                ]
            if faults:
                lengths = [
                    min(length, j) if row in faults else length
                    for row, length in zip(rows, lengths, strict=True)
                ]
            if max(lengths) <= j:
                break
        drafted = torch.stack([drawn.tokens for drawn in looked], dim=1)
        every = drafted.tolist()
        drafts = [_drawable(tokens[:length]) for tokens, length in zip(every, lengths, strict=True)]
        self.clean([row for row, tokens in zip(rows, every, strict=True) if -1 in tokens])
        k = max(map(len, drafts))
        if not k:
            return DraftTree.empty(len(rows), drafted.device, steps)
        own = torch.tensor([len(tokens) for tokens in drafts], device=drafted.device)
        q = [drawn.q for drawn in looked[:k] if drawn.q is not None] or None
        return DraftTree(drafted[:, :k].clamp(min=0), own, q, drafts, chains(drafts), steps)

    def clean(self, rows: Sequence[Row]) -> None:
        """Zeroes values that are not finite in the cells of these rows, drafts or others."""
        for row in rows:
            self.runner.cache.zero_non_finite(self._slot(row))
        if rows and not self._warned:
            self._warned = True
            log.warning(
                "the drafter %s returned NaN or infinite logits; rows go on without those drafts",
                self.runner.name,
            )

    def prepare(self, chunks: Sequence[PrefillChunk]) -> None:
        self._slots.keep_pace(
            [
                chunk
                for chunk in chunks
                if chunk.row.draft_reach and chunk.row.request.max_draft != 0
            ]
        )

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        """Rolls rows back to their committed tokens, and outgrown rows to their prompts.

        A row is outgrown if it has more tokens than the drafter holds.
        """
        for row in self._slots.with_slots(rows):
            _cut(self, row, _kept(row))

    def roll_back(self, row: Row, tokens: int) -> None:
        """Forgets the tokens of a row beyond the first `tokens`.

        All are forgotten if the model's states cannot go back that far.
        """
        if self._slots.with_slots([row]):
            _cut(self, row, tokens)

    def pause(self, rows: Sequence[Row]) -> None:
        """Frees the slots of rows; the prompts in them stay usable."""
        self._slots.leave([self.read_as(row) for row in rows])

    def end(self, rows: Sequence[Row]) -> None:
        self._slots.leave(rows)

    def releases(self) -> Sequence[Callable[[], None]]:
        return () if self.runner.captures is None else (self.runner.captures.release,)

    def take_counters(self) -> DraftCounters:
        passes, seconds = self.runner.counts.take()
        return DraftCounters(
            passes, seconds, self._slots.take_seconds(), self.runner.counts.take_executors()
        )

    @property
    def seconds_preparing(self) -> float:
        return self._slots.seconds + self.runner.seconds_building

    def read_as(self, row: Row) -> Row:
        """Returns the row as the model reads it: with tokens in the model's ids."""
        return row

    def _slot(self, row: Row) -> int:
        return self._slots.of(self.read_as(row))

    def _held(self, row: Row) -> int:
        """Returns the number of tokens of the row in the cache."""
        return self.runner.cache.lengths[self._slot(row)]

    def pending(self, inputs: DraftInputs) -> tuple[Tensor, list[int]]:
        """Returns each row's committed tokens that the cache lacks, and their counts.

        The tokens, at least the last one of each row, are a block [rows, q] int64, padded. A row
        that is not drafted for has one padding token.
        """
        _, pending = self.lacking(inputs.rows, inputs.lengths)
        counts = [len(tokens) for tokens in pending]
        block = [tokens + tokens[-1:] * (max(counts) - len(tokens)) for tokens in pending]
        return torch.tensor(block, device=self.runner.device), counts

    def slots(self, rows: Sequence[Row]) -> list[int]:
        """Returns the slots of the rows in the cache."""
        return [self._slots.of(self.read_as(row)) for row in rows]

    def first_logits(self, inputs: DraftInputs) -> Tensor:
        """Feeds the tokens that the cache lacks; returns the logits after them.

        The logits have shape [rows, vocab of the drafter].
        """
        block, counts = self.pending(inputs)
        logits = self.runner.feed(self.slots(inputs.rows), block, counts)
        if min(counts) == max(counts):
            return logits[:, -1]
        ends = torch.tensor([count - 1 for count in counts], device=logits.device)
        return logits[torch.arange(len(counts), device=logits.device), ends]

    def of_target(self, logits: Tensor) -> Tensor:
        """Returns logits [n, vocab of the target]; ids that the drafter lacks get probability 0."""
        if self.shared:
            return self.shared.of_target(logits, self.vocab_size)
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.vocab_size] if missing else logits

    def _lean_steps(self, inputs: DraftInputs) -> Step | None:
        """Returns steps by the kernels in C.

        Returns None if the runner has none, or if a control changes the logits.
        """
        samplings = [row.request.sampling for row in inputs.rows]
        race = RACES.get(inputs.sampler)
        if (
            race is None
            or inputs.uniforms.device.type != "cpu"
            or not knows(samplings)
            or change(inputs.rows)
        ):
            return None
        if self.shared:
            return None
        drawing = Drawing(
            self.vocab_size,
            samplings,
            inputs.uniforms,
            race,
            want_q=inputs.needs_q,
            want_highest=inputs.stop is not None,
        )
        step = lean_steps(
            self.runner,
            self.slots(inputs.rows),
            *self.pending(inputs),
            max(inputs.lengths),
            drawing,
        )
        return step and (lambda uniforms, lengths: step())


def _kept(row: Row) -> int:
    """Returns the most tokens of the row that the cache keeps between rounds.

    Other rows may copy its prompt from its slot.
    """
    return (len(row.tokens) if len(row.tokens) <= row.draft_context else row.prompt_length) - 1


def _cut(drafter: ModelDrafter, row: Row, tokens: int) -> None:
    slot, cache = drafter._slot(row), drafter.runner.cache
    length = min(cache.lengths[slot], tokens)
    if cache.reaches(slot, length):
        cache.rollback(slot, length)
    else:
        drafter._slots.leave([drafter.read_as(row)])


def _drawable(tokens: Sequence[int]) -> list[int]:
    """Returns the tokens before the first one that could not be drawn."""
    return list(itertools.takewhile(lambda token: token >= 0, tokens))


class OrdinarySteps:
    """The steps of a draft by ordinary passes, for any settings.

    Also for controls that read earlier drafts. A step reads one value from the device, which says
    if each row has a distribution (`probabilities`); a second one if drafts may be shortened, and
    one more if a control reads the drafts.

    Attributes:
        slots: the slots of the rows.
        steps: the number of steps made so far.
        last: the tokens drawn in the step before, [rows]; None in the first step.
    """

    def __init__(self, drafter: ModelDrafter, inputs: DraftInputs, faults: Faults) -> None:
        self._drafter, self._rows, self._inputs, self._faults = drafter, inputs.rows, inputs, faults
        self.slots = drafter.slots(inputs.rows)
        self._ones = [1] * len(inputs.rows)
        self._reads_history = any(row.reads_history for row in self._rows)
        self._needs_q = inputs.needs_q
        self._histories: list[list[int]] = [[] for _ in self._rows]
        self.steps = 0
        self.last: Tensor | None = None

    def __call__(self, uniforms: Tensor, lengths: Sequence[int]) -> DraftedStep:
        logits = self._drafter.of_target(self.logits(lengths))
        positions = Positions(self._rows, self._histories, first=self.steps)
        drawn = draws(
            logits[:, None],
            positions,
            self._inputs.sampler,
            uniforms[:, None],
            self._faults,
            want_p=self._needs_q,
            want_highest=self._inputs.stop is not None,
        )
        q, tokens = None if drawn.p is None else drawn.p[:, 0], drawn.tokens[:, 0]
        confidence = drawn.probs[:, 0] if drawn.highest is None else drawn.highest[:, 0]
        if self._faults:
            sound = torch.tensor(
                [row not in self._faults for row in self._rows], device=tokens.device
            )
            tokens = torch.where(sound | self._finite(logits), tokens, -1)
            confidence = torch.where(sound, confidence, 0.0)
        self.last, self.steps = tokens, self.steps + 1
        return DraftedStep(q, tokens, confidence)

    @staticmethod
    def _finite(logits: Tensor) -> Tensor:
        return logits.amax(-1).isfinite()

    def logits(self, lengths: Sequence[int]) -> Tensor:
        """Returns the logits of the next position, [rows, vocab of the drafter]."""
        runner, last = self._drafter.runner, self.last
        if last is None:
            return self._drafter.first_logits(self._inputs)
        self.note_history(last, lengths)
        block = last.clamp(min=0) if self._faults else last
        if self._drafter.shared:
            block = self._drafter.shared.of_draft(block)
        return runner.feed(self.slots, block[:, None], self._ones)[:, -1]

    def note_history(self, last: Tensor, lengths: Sequence[int]) -> None:
        """Appends the drawn tokens, for controls that read them."""
        if self._reads_history:
            for history, drawn, length in zip(self._histories, last.tolist(), lengths, strict=True):
                # Drafts beyond the row's own length are ignored, so no control may fail on them.
                if self.steps < length:
                    history.append(drawn)
