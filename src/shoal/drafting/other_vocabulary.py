"""A draft model whose tokenizer differs from the target's.

There are three methods (Timor et al. 2025, arXiv 2502.05202). The one that commits more tokens for
its cost is used:

- TLI, token-level intersection: the drafter samples among the tokens that both vocabularies have,
  from its distribution renormalised over them, which is an exact q.
- SLEM, string-level exact match: the drafter writes text, the most probable token after each; in
  the target's tokens these are point masses. They are the drafter's argmax also if rows sample:
  drafts drawn by a round's uniforms would say, in a round of numbered uniforms, something about the
  uniforms by which later positions are verified.
- SLRS, string-level rejection sampling, in place of TLI if the drafter writes bytes or characters:
  its tokens are the target's, by the probabilities with which it writes their bytes. With tokens
  that it has itself, this is TLI.

The methods are compared by counts of past rounds, which depend on no uniform of a later position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from shoal.drafting.contexts import Contexts, StringDrafts
from shoal.drafting.draft_slots import DraftMemory, DraftSlots
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import DraftInputs
from shoal.drafting.string_rejection import ROOM, StringRejection
from shoal.models.runner import Runner
from shoal.models.vocabulary import Vocabularies
from shoal.sampling.distributions import Scores
from shoal.types.requests import Row
from shoal.types.rounds import PrefillChunk
from shoal.types.trees import DraftTree, Verdict

TLI, SLEM, SLRS = "TLI", "SLEM", "SLRS"
LAG = 16
"""The most tokens of a row that a proposal's first pass feeds.

A token of the target may be several of the drafter's.
"""
TRIED = 8
"""The number of rounds of each method in its turn.

The first round is not counted: it begins at a place where the other method has failed.
"""
AGAIN = 64
"""The number of rounds after which the methods take turns again."""
SPARE = 1.25
"""The room for the drafter's tokens, as a multiple of the number that usual texts take."""
KEPT = 0.99
"""The factor by which the counts fade from a trial to the next."""


@dataclass
class MethodTally:
    """The counts of one method of drafting in its trials.

    Attributes:
        rows: the number of rows that drafted.
        accepted: the number of accepted tokens of their drafts.
        cost: the cost of all rows' rounds, in passes of the target.
    """

    rows: float = 0.0
    accepted: float = 0.0
    cost: float = 0.0

    def learn(self, rows: int, accepted: int, cost: float) -> None:
        """Adds a round.

        Args:
            rows: the number of rows that drafted.
            accepted: the number of accepted tokens.
            cost: the cost of all their rounds, in passes of the target.
        """
        self.rows = KEPT * self.rows + rows
        self.accepted = KEPT * self.accepted + accepted
        self.cost = KEPT * self.cost + cost

    @property
    def rate(self) -> float:
        """The number of committed tokens per cost of a target pass."""
        return (self.rows + self.accepted) / max(self.cost, 1e-9)


@dataclass
class MethodChoice:
    """The choice of the method by which a pair drafts, shared by its engines.

    Only rounds in which the methods take turns are compared, several of each at a time: some places
    in a text are harder to guess than others, and a round begins at a place that depends on the
    round before.

    Attributes:
        cost: the cost of a pass of the drafter, in passes of the target.
        methods: the possible methods, and their counts.
    """

    cost: float
    methods: dict[str, MethodTally]
    rounds: int = 0
    method: str = ""
    _counted: int = 0

    @staticmethod
    def of(vocabularies: Vocabularies, cost: float, *, trees: bool = True) -> MethodChoice:
        """Makes a choice for two vocabularies.

        It has SLRS for drafters that write bytes or characters and take draft trees themselves;
        otherwise TLI, if the vocabularies share tokens. It always has SLEM.
        """
        exact = SLRS if trees and vocabularies.trie is not None else TLI
        methods = [SLEM] if exact == TLI and vocabularies.shared is None else [exact, SLEM]
        return MethodChoice(cost, {method: MethodTally() for method in methods})

    @staticmethod
    def of_pair(vocabularies: Vocabularies, target: Runner, draft: Runner) -> MethodChoice:
        """Makes a choice for models of these sizes."""
        return MethodChoice.of(
            vocabularies,
            draft.parameter_bytes / max(target.parameter_bytes, 1),
            trees=draft.takes_trees,
        )

    @property
    def best(self) -> str:
        """The method that has committed most tokens for its cost."""
        return max(self.methods, key=lambda method: self.methods[method].rate)

    def next(self) -> str:
        """Returns the method of the coming round."""
        turn, place = divmod(self.rounds % AGAIN, TRIED)
        trying = turn < len(self.methods)
        self.method, self._counted = (list(self.methods)[turn], place) if trying else (self.best, 0)
        self.rounds += 1
        return self.method

    def learn(self, rows: int, accepted: int, passes: int) -> None:
        """Adds the outcome of the round that `next` was asked for.

        Args:
            rows: the number of rows that drafted.
            accepted: the number of accepted tokens of their drafts.
            passes: the number of passes of the drafter.
        """
        if self._counted:
            self.methods[self.method].learn(rows, accepted, rows * (1 + self.cost * passes))


class OtherVocabularyDrafter(ModelDrafter):
    """A drafter that proposes by the methods of a choice.

    Args:
        runner: the draft model, with a cache of its own.
        vocab_size: the size of the target's vocabulary.
        vocabularies: the target's vocabulary and the drafter's.
        choice: the choice of the pair.

    Raises:
        PairMismatch: the choice has SLRS, and the drafter does not fit it.
    """

    def __init__(
        self, runner: Runner, vocab_size: int, vocabularies: Vocabularies, choice: MethodChoice
    ) -> None:
        super().__init__(runner, vocab_size, vocabularies.shared, pending=LAG)
        self.memory = OwnMemory(
            self._slots, vocabularies.ratio, ROOM if SLRS in choice.methods else 0
        )
        self.contexts, self.choice = Contexts(vocabularies), choice
        self._strings = StringDrafts(self, self.contexts, vocabularies)
        self._rejection = (
            StringRejection(self, self.contexts, vocabularies) if SLRS in choice.methods else None
        )
        self._passes = 0
        self._asked: set[Row] = set()

    def read_as(self, row: Row) -> Row:
        return self.contexts.of(row).row

    def propose(self, inputs: DraftInputs) -> DraftTree:
        for row in inputs.rows:
            self._follow(row)
        method = self.choice.next()
        rejection = self._rejection if method == SLRS else None
        ahead = self._strings.steps(inputs.lengths) if method == SLEM else max(inputs.lengths)
        inputs = self._that_fit(
            inputs, ahead if rejection is None else rejection.steps(inputs.lengths)
        )
        if not max(inputs.lengths):
            return DraftTree.empty(len(inputs.rows), inputs.uniforms.device, 1)
        if rejection is not None:
            tree = rejection.propose(inputs)
        elif method == SLEM:
            tree = self._strings.propose(inputs, ahead)
        else:
            tree = super().propose(inputs)
            for row, drafts in zip(inputs.rows, tree.drafts, strict=True):
                self.contexts.of(row).drafted = [self.contexts.same[token] for token in drafts]
        self._passes = (
            self.runner.counts.passes if rejection is None else rejection.passes(inputs.lengths)
        )
        self._asked = {
            row for row, length in zip(inputs.rows, inputs.lengths, strict=True) if length
        }
        return tree

    def prepare(self, chunks: Sequence[PrefillChunk]) -> None:
        """Does nothing: chunks hold the target's tokens."""

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        """Learns the outcome, and reads the committed tokens of the rows that drafted."""
        paths, _ = verdict.lists
        accepted = [len(path) for row, path in zip(rows, paths, strict=True) if row in self._asked]
        if accepted:
            self.choice.learn(len(accepted), sum(accepted), self._passes)
        for row in self.contexts.with_contexts(self._asked):
            self._follow(row)
        self._asked = set()

    def end(self, rows: Sequence[Row]) -> None:
        known = self.contexts.with_contexts(rows)
        self._slots.leave([self.read_as(row) for row in known])
        self.contexts.leave(known)

    def _follow(self, row: Row) -> None:
        """Reads a row's committed tokens; the cache keeps the unchanged ones before the last."""
        same, own = self.contexts.follow(row), self.read_as(row)
        if self._slots.with_slots([own]):
            self._keep(own, min(same, len(own.tokens) - 1))

    def _keep(self, own: Row, most: int) -> None:
        slot = self._slots.of(own)
        self.runner.cache.rollback(slot, min(self.runner.cache.lengths[slot], most))

    def _that_fit(self, inputs: DraftInputs, ahead: int) -> DraftInputs:
        """Returns the inputs without drafts for rows that have outgrown their room.

        These rows have more tokens of the drafter than there is room for. The cache keeps their
        prompts: passes for other rows write padding behind them.
        """
        most = min(self.runner.cache.capacity, self.runner.context) - ahead
        lengths = list(inputs.lengths)
        for b, row in enumerate(inputs.rows):
            own = self.read_as(row)
            if len(own.tokens) > most:
                lengths[b] = 0
                if self._slots.with_slots([own]):
                    self._keep(own, max(min(own.prompt_length - 1, most), 0))
        return replace(inputs, lengths=lengths)


class OwnMemory(DraftMemory):
    """The memory of slots of the drafter's own tokens.

    All sizes that the engine gives are in the target's tokens.

    Args:
        slots: the slots.
        ratio: the number of the drafter's tokens per token of the target, in usual texts.
        beside: the number of tokens of a row beside its text and drafts.
    """

    def __init__(self, slots: DraftSlots, ratio: float, beside: int = 0) -> None:
        super().__init__(slots)
        self._ratio, self._beside = SPARE * ratio, LAG + beside

    def _size(self, slots: int, capacity: int, cells: int) -> tuple[int, int, int]:
        return slots, ceil(self._ratio * capacity) + self._beside, 0

    @property
    def context(self) -> int:
        return max(int((super().context - self._beside) / self._ratio), 0)

    @property
    def shares(self) -> bool:
        return False
