"""A target drafts for itself with its first layers, its last norm and its head.

The model is in `shoal.models.target_models`. The drafter feeds the target's own cache. Committed
tokens are there already, so the drafter computes no prompts, never lags and has no memory of its
own. Its writes for drafts are rolled back, and written again by the verification. The exit that
drafts may change from round to round: the keys and values of a layer do not depend on the exit that
reads them.

If no exit is given, `ExitChoice` chooses the exit and the draft length by the drafts that all exits
would have made. The exits are compared on committed tokens alone, in a few rounds that keep hidden
states. Rejected drafts have no part in the choice, so their uniforms may be used again as in any
other round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from shoal.drafting.draft_slots import DraftSlots
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import DraftCounters, Drafter, DraftInputs
from shoal.drafting.text import NOTHING, tree_of
from shoal.drafting.trained_heads import kept_states
from shoal.errors import InternalError
from shoal.models.runner import Runner
from shoal.models.target_models import first_layers, head_of, layer_count
from shoal.sampling.distributions import Scores
from shoal.types.requests import Row
from shoal.types.trees import DraftTree, Verdict

MOST_EXITS = 8
"""The most exits that are compared: each costs a product with the head in a comparing round."""


class EarlyExitDrafter(Drafter):
    """A drafter that samples from an exit of the target under the row's own sampling controls.

    Args:
        exit: the number of layers that draft; None = chosen, together with the draft length.

    Attributes:
        exit: the argument.
        choice: the choice of the exit; None if the exit is given.
    """

    name = "self"

    def __init__(self, exit: int | None = None) -> None:
        self.exit = exit
        self._exits: dict[int, ModelDrafter] = {}
        self._attached: Runner | None = None
        self.choice: ExitChoice | None = None
        self._head: Callable[[Tensor], Tensor] | None = None
        self._measuring = False

    def attach(self, target: Runner) -> None:
        self._attached, self._exits = target, {}
        if self.exit is None:
            layers = layer_count(target)
            self.choice = ExitChoice(candidates(layers), layers, _head_share(target))
            self._head = head_of(target)

    @property
    def _target(self) -> Runner:
        if self._attached is None:
            raise InternalError("a drafter that feeds its target was not attached to an engine")
        return self._attached

    def propose(self, inputs: DraftInputs) -> DraftTree:
        exit, most = self._choose(max(inputs.lengths))
        # A cache without layers gets all of them in the target's own first pass.
        if not most or not len(self._target.cache):
            return tree_of([NOTHING] * len(inputs.rows), inputs)
        tree = self._drafter(exit).propose(
            replace(inputs, lengths=[min(length, most) for length in inputs.lengths])
        )
        for row in inputs.rows:
            self._target.cache.rollback(row.slot, len(row.tokens) - 1)
        return tree

    def _choose(self, most: int) -> tuple[int, int]:
        """Returns the exit that drafts, and the draft length."""
        if self.exit is not None:
            return self.exit, most
        assert self.choice is not None
        self._measuring = self.choice.due()
        self._target.hidden_layers = tuple(self.choice.exits) if self._measuring else ()
        return self.choice.best(most)

    def _drafter(self, exit: int) -> ModelDrafter:
        if exit not in self._exits:
            self._exits[exit] = _AtExit(first_layers(self._target, exit), self._target.vocab_size)
        return self._exits[exit]

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        if self.choice is None or not self._measuring:
            return
        self._measuring, self._target.hidden_layers = False, ()
        self.choice.learn(*self._agreement(rows, scores, verdict))

    def _agreement(
        self, rows: Sequence[Row], scores: Scores, verdict: Verdict
    ) -> tuple[list[float], int]:
        """Compares the exits on the committed columns of a round.

        Returns:
            For each exit, the sum over these columns of the probability that a token of its
            distribution would be accepted, sum(min(p, q)), with p and q at the row's temperature;
            and the number of columns.
        """
        assert self.choice is not None
        assert self._head is not None
        paths, _ = verdict.lists
        columns = [[0, *(node + 1 for node in path)] for path in paths]
        logits = torch.cat(
            [own[places] for own, places in zip(scores.logits, columns, strict=True)]
        )
        states = torch.cat(kept_states(scores, verdict)).chunk(len(self.choice.exits), dim=-1)
        temperatures = [
            row.request.sampling.temperature
            for row, own in zip(rows, columns, strict=True)
            for _ in own
        ]
        p = _at(logits, temperatures)
        counts = [
            float(torch.minimum(p, _at(self._head(layer), temperatures)).sum()) for layer in states
        ]
        return counts, len(temperatures)

    def take_counters(self) -> DraftCounters:
        exits = (drafter.take_counters() for drafter in self._exits.values())
        return reduce(DraftCounters.plus, exits, DraftCounters())


class _AtExit(ModelDrafter):
    """A draft model that shares the target's cache."""

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        super().__init__(runner, vocab_size)
        self._slots = TargetSlots(runner)

    def clean(self, rows: Sequence[Row]) -> None:
        """Zeroes the cells of drafts alone; cells that the target wrote are not the drafter's."""
        for row in rows:
            self.runner.cache.zero_tail(row.slot, len(row.tokens) - 1)


class TargetSlots(DraftSlots):
    """The slots that the engine has given to its rows, in which all tokens are present."""

    computes_prompts = False

    def of(self, row: Row) -> int:
        return row.slot

    def place(self, rows: Sequence[Row], drafting: Sequence[bool]) -> None:
        """Does nothing: the engine has placed the rows."""


def candidates(layers: int) -> list[int]:
    """Returns at most `MOST_EXITS` of the exits 1..layers - 1, evenly spread."""
    count = min(layers - 1, MOST_EXITS)
    return sorted({round((place + 1) * layers / (count + 1)) for place in range(count)})


def _head_share(target: Runner) -> float:
    """Returns the number of layers that have as many weights as the head."""
    head = target.hf.get_output_embeddings().weight
    embedding = target.hf.get_input_embeddings().weight
    layers = sum(
        parameter.numel()
        for parameter in target.hf.parameters()
        if parameter is not head and parameter is not embedding
    )
    return float(head.numel() / max(layers / layer_count(target), 1.0))


def _at(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Returns the distributions of logits [n, vocab] at these temperatures; one-hot ones at 0."""
    heat = torch.tensor(temperatures, device=logits.device)[:, None]
    logits = logits.float()
    point = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])
    return torch.where(heat > 0, (logits / heat.clamp(min=1e-3)).softmax(-1), point)


FIRST, EVERY = 4, 16
"""The rounds that compare exits: the first `FIRST` rounds, then one of `EVERY`."""
KEPT = 0.9
"""The share of earlier counts that is kept in each round that compares exits."""


def tokens_per_layer(
    acceptance: float, exit: int, length: int, layers: int, head: float = 0.0
) -> float:
    """Returns the tokens that a round brings, divided by the layers that it computes.

    Args:
        acceptance: the probability that a draft is accepted if all drafts before it were.
        exit: the number of layers that draft.
        length: the draft length.
        layers: the number of the target's layers.
        head: the cost of the head, in layers.
    """
    return sum(acceptance**i for i in range(length + 1)) / (length * (exit + head) + layers + head)


def best(
    acceptances: Mapping[int, float], layers: int, most: int, head: float = 0.0
) -> tuple[int, int]:
    """Returns the exit and the draft length, at most `most`, that bring the most tokens per layer.

    Returns (0, 0) if plain decoding brings more.
    """

    def worth(option: tuple[int, int]) -> float:
        exit, length = option
        return tokens_per_layer(acceptances.get(exit, 0.0), exit, length, layers, head)

    return max(
        [(0, 0), *((exit, length) for exit in acceptances for length in range(1, most + 1))],
        key=worth,
    )


class ExitChoice:
    """The choice of one engine: the exit that drafts and the draft length, for all rows at once.

    After DEL (Zarch et al., COLM 2025, arXiv 2504.05598). Costs are counted in layers: a draft at
    exit l takes l and the head, a verification takes all layers and the head. If each draft is
    accepted with probability a, a round of g drafts brings 1 + a + ... + a^g tokens. The pair (l,
    g) that brings the most tokens per layer is taken, or no drafts if plain decoding brings more.

    Args:
        exits: the exits that are compared.
        layers: the number of the target's layers.
        head: the cost of the head, in layers.
    """

    def __init__(self, exits: Sequence[int], layers: int, head: float) -> None:
        self.exits, self._layers, self._head = list(exits), layers, head
        self._agreed = dict.fromkeys(self.exits, 0.0)
        self._columns = 0.0
        self._rounds = 0

    def due(self) -> bool:
        """Returns True if the coming round is to compare exits; called once per round."""
        self._rounds += 1
        return self._rounds <= FIRST or self._rounds % EVERY == 0

    def learn(self, agreed: Sequence[float], columns: int) -> None:
        """Learns how much would have been accepted of each exit's drafts.

        Args:
            agreed: for each exit, the sum of the acceptance probabilities over the columns.
            columns: the number of columns.
        """
        self._columns = KEPT * self._columns + columns
        for exit, count in zip(self.exits, agreed, strict=True):
            self._agreed[exit] = KEPT * self._agreed[exit] + count

    @property
    def acceptances(self) -> dict[int, float]:
        """The acceptance rate of each exit; empty until a round has compared them."""
        if self._columns:
            return {exit: count / self._columns for exit, count in self._agreed.items()}
        return {}

    def best(self, most: int) -> tuple[int, int]:
        """Returns the exit that drafts, and the longest draft length.

        Returns (0, 0) if no round has compared exits yet, or if no drafts pay.
        """
        return best(self.acceptances, self._layers, most, self._head)
