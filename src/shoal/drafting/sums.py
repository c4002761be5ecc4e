"""Several drafters as one: text drafters for rows of which they are sure, the last for the rest.

Text drafters that propose chains draft for the rows of which they are sure, and the last drafter
for the others. Trees of text (`max_nodes` more than 0) are joined to the last drafter's proposal
for the same row (`shoal.drafting.grafting`). If the last drafter's drafts are verified by q, the
text drafters' tokens need a q as well. They get a one-hot q, because they were chosen, not sampled.

`use` says which of them may propose in a round: a controller that measures the costs and the
acceptance of each (`shoal.lookahead.choosing`) leaves one, or all. If several may propose for a
row, the outcome of their first tokens in past rounds decides, which no later uniform changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from shoal.config import MOST_NODES
from shoal.drafting.grafting import FirstTokens, grafted
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import DraftCounters, Drafter, DraftInputs, Keeps, name_of
from shoal.drafting.text import NOTHING, Guess, TextDrafter, with_point_masses
from shoal.models.runner import Runner
from shoal.sampling.distributions import Scores
from shoal.sampling.uniforms import tree_uniforms
from shoal.types.requests import Row
from shoal.types.rounds import PrefillChunk
from shoal.types.trees import DraftTree, Verdict, chains


class _ModelChains:
    """The rows of a round in which text nodes may follow a draft model's chains."""

    def __init__(self) -> None:
        self._chains: list[tuple[Row, int, int]] = []  # a row, its tokens, the model's drafts

    def note(self, rows: Sequence[Row], drafted: DraftTree) -> None:
        """Notes the drafts of a round's rows."""
        drafts = zip(rows, drafted.drafts, strict=True)
        self._chains = [(row, len(row.tokens), len(draft)) for row, draft in drafts]

    def roll_back(self, model: Drafter, rows: Sequence[Row], verdict: Verdict) -> None:
        """Rolls the model back to its own drafts that were accepted, and forgets the round.

        A path may leave the model's chain.
        """
        chains, self._chains = self._chains, []
        if not chains:
            return
        assert isinstance(model, ModelDrafter)
        paths = dict(zip(rows, verdict.lists[0], strict=True))
        for row, tokens, own in chains:
            if row in paths:
                model.roll_back(row, tokens + sum(node < own for node in paths[row]))


class SumDrafter(Drafter):
    """A drafter that joins several drafters.

    Args:
        texts: the text drafters. The first one with chains that is sure of a row drafts for it;
            trees are joined to the model's drafts.
        model: the drafter for the rows of which no text drafter is sure.

    Attributes:
        choices: the names of the ways to propose in a round: one of the drafters, or all of them.
    """

    choices_join = True

    def __init__(self, texts: Sequence[TextDrafter], model: Drafter) -> None:
        self.texts, self.model, self._members = list(texts), model, [*texts, model]
        self.memory, self.hidden_layers = model.memory, model.hidden_layers
        self.weights = model.weights
        self._names = [name_of(member) for member in self._members]
        self.name = self._names[-1]
        self.keeps = _common([member.keeps for member in self._members])
        self.choices = [*self._names, "+".join(self._names)]
        self._used = list(range(len(self._members)))
        joined = [text.max_nodes for text in texts if text.max_nodes]
        # A chain of any length becomes a tree with nodes that are joined to it.
        most = min(sum(joined) + (model.max_nodes or MOST_NODES), MOST_NODES)
        self.max_nodes = most if joined else model.max_nodes
        self._chains = _ModelChains()
        self._first = FirstTokens(len(self._members))

    def use(self, choice: int) -> None:
        """Sets the choice that proposes in the next rounds."""
        self._used = [choice] if choice < len(self._members) else list(range(len(self._members)))

    def propose(self, inputs: DraftInputs) -> DraftTree:
        *before, last = self._used
        guesses = [NOTHING] * len(inputs.rows)
        whose = [last] * len(inputs.rows)
        trees = [NOTHING] * len(inputs.rows)
        for member in before:
            joins = self.texts[member].max_nodes > 0
            lengths = [
                0 if guess.tokens else length
                for guess, length in zip(guesses, inputs.lengths, strict=True)
            ]
            chains = self.texts[member].guesses(replace(inputs, lengths=lengths))
            for i, (row, guess) in enumerate(zip(inputs.rows, chains, strict=True)):
                if joins:
                    trees[i] = trees[i] if trees[i].tokens else guess
                elif guess.tokens and self._first.takes(row, member, guess.confidence[0]):
                    guesses[i], whose[i] = guess, member
        trees = [
            NOTHING if guess.tokens else tree for guess, tree in zip(guesses, trees, strict=True)
        ]
        tree, own = self._together(guesses, trees, inputs, self._members[last])
        sure = [guess.confidence[0] if guess.tokens else 1.0 for guess in guesses]
        self._first.proposed(inputs.rows, whose, sure, [len(draft) for draft in tree.drafts])
        text = next((self._names[member] for member in before if self.texts[member].max_nodes), "")
        names = [
            [self._names[member]] * count + [text] * (len(draft) - count)
            for member, draft, count in zip(whose, tree.drafts, own, strict=True)
        ]
        return replace(tree, drafters=names)

    def _together(
        self, guesses: Sequence[Guess], trees: Sequence[Guess], inputs: DraftInputs, last: Drafter
    ) -> tuple[DraftTree, list[int]]:
        """Joins the guesses, the last drafter's proposal for the other rows, and trees.

        Returns:
            The joined tree, and the number of nodes of each row that are not of the text trees.
        """
        lengths = [
            0 if guess.tokens else length
            for guess, length in zip(guesses, inputs.lengths, strict=True)
        ]
        known = [
            guess if guess.tokens else tree for guess, tree in zip(guesses, trees, strict=True)
        ]
        ends = _Ends(known, inputs, [bool(guess.tokens) for guess in guesses])
        own = DraftTree.empty(len(lengths), inputs.uniforms.device)
        if max(lengths):
            joins = any(text.max_nodes for text in self.texts)
            uniforms = _of_rounds(inputs) if joins and inputs.needs_q else inputs.uniforms
            own = last.propose(
                replace(inputs, lengths=lengths, stop=inputs.stop and ends.ask, uniforms=uniforms)
            )
        steps = ends.finish(own.steps)
        kept = [guess.up_to(end) for guess, end in zip(known, ends.lengths, strict=True)]
        each = zip(guesses, kept, own.drafts, strict=True)
        counts = [len(cut.tokens) if guess.tokens else len(draft) for guess, cut, draft in each]
        if not any(guess.tokens for guess in kept):
            return own if own.steps else DraftTree.empty(
                len(kept), inputs.uniforms.device, steps
            ), counts
        if not any(tree.tokens for tree in trees) and not own.branches and own.siblings is None:
            return _chain(own, [list(guess.tokens) for guess in kept], steps), counts
        if isinstance(last, ModelDrafter) and not last.max_nodes:
            self._chains.note(inputs.rows, own)
        return grafted(own, kept, steps), counts

    def attach(self, target: Runner) -> None:
        for member in self._members:
            member.attach(target)
        self.memory, self.hidden_layers = self.model.memory, self.model.hidden_layers
        self.keeps = _common([member.keeps for member in self._members])

    def begin(self, rows: Sequence[Row]) -> None:
        for member in self._members:
            member.begin(rows)

    def prepare(self, chunks: Sequence[PrefillChunk]) -> None:
        if self._used[-1] == len(self.texts):
            self.model.prepare(chunks)

    def read_prompts(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        self.model.read_prompts(chunks, hidden)

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        self._first.learn(rows, verdict)
        self._chains.roll_back(self.model, rows, verdict)
        for member in self._members:
            member.observe(rows, scores, verdict)

    def pause(self, rows: Sequence[Row]) -> None:
        for member in self._members:
            member.pause(rows)

    def replace(self, copies: Sequence[tuple[Row, Row]]) -> None:
        self._first.forget([row for row, _ in copies])
        for member in self._members:
            member.replace(copies)

    def end(self, rows: Sequence[Row]) -> None:
        self._first.forget(rows)
        for member in self._members:
            member.end(rows)

    def releases(self) -> Sequence[Callable[[], None]]:
        return self.model.releases()

    def take_counters(self) -> DraftCounters:
        return reduce(DraftCounters.plus, (member.take_counters() for member in self._members))

    @property
    def kept_bytes(self) -> int:
        return sum(member.kept_bytes for member in self._members)

    @property
    def seconds_preparing(self) -> float:
        return sum(member.seconds_preparing for member in self._members)


def _common(each: Sequence[Keeps]) -> Keeps:
    """Returns a bound of the bytes that all of them keep."""
    per_token, per_row, always = (
        sum(getattr(one, name) for one in each) for name in ("per_token", "per_row", "always")
    )
    return Keeps(per_token, per_row, always=always, on_device=any(one.on_device for one in each))


class _Ends:
    """The ends of the drafts of a round: all drafters ask `DraftInputs.stop` as one.

    Args:
        guesses: the guesses of the rows.
        inputs: the inputs of the round.
        alone: for each row, True if its guess stands alone, without drafts of the last drafter.

    Attributes:
        lengths: the lengths of the guesses so far: tokens of chains, depths of trees.
    """

    def __init__(
        self, guesses: Sequence[Guess], inputs: DraftInputs, alone: Sequence[bool]
    ) -> None:
        self._guesses, self._stop, self._alone = guesses, inputs.stop, alone
        self.lengths = [len(guess.confidence) for guess in guesses]

    def ask(self, position: int, confidence: Sequence[float]) -> Sequence[int]:
        """Asks `stop` with the higher of two confidences: the last drafter's, and the guess's."""
        assert self._stop is not None
        sure = [
            max(
                0.0 if alone else model,
                guess.confidence[position] if position < len(guess.confidence) else 0.0,
            )
            for model, guess, alone in zip(confidence, self._guesses, self._alone, strict=True)
        ]
        ends = self._stop(position, sure)
        self.lengths = [min(pair) for pair in zip(self.lengths, ends, strict=True)]
        return ends

    def finish(self, position: int) -> int:
        """Goes on asking for guesses from a position on; returns the number of positions in all."""
        if self._stop is None:
            return max(position, *self.lengths, 1)
        while max(self.lengths) > position or not position:
            self.ask(position, [0.0] * len(self.lengths))
            position += 1
        return position


def _of_rounds(inputs: DraftInputs) -> Tensor:
    """Returns uniforms of this round alone, which no verification of drafts reads.

    They have the shape of the round's uniforms. They are needed because a node may be joined to a
    chain depending on later tokens of the chain (`shoal.sampling.uniforms.tree_uniforms`).
    """
    width = inputs.uniforms.shape[1]
    seeds = [row.seed for row in inputs.rows for _ in range(width)]
    firsts = [len(row.tokens) for row in inputs.rows for _ in range(width)]
    drawn = torch.from_numpy(tree_uniforms(seeds, firsts, list(range(width)) * len(inputs.rows)))[
        :, :1
    ]
    return drawn.view(-1, width, 1).to(inputs.uniforms.device)


def _chain(own: DraftTree, chosen: Sequence[list[int]], steps: int) -> DraftTree:
    """Returns the chains chosen for some rows, and the last drafter's for the others."""
    drafts = [mine or theirs for mine, theirs in zip(chosen, own.drafts, strict=True)]
    tree = DraftTree.of(drafts, device=own.tokens.device, steps=steps)
    q = None if own.q is None else with_point_masses(own.q[: tree.m], chosen)
    return DraftTree(tree.tokens, tree.lengths, q, tree.drafts, chains(drafts), steps)
