"""A target drafts for itself: its first layers, its last norm and its head
(`shoal.models.early_exit`).

The drafter feeds the target's own cache. What is committed is there already, so that it computes no
prompts, never lags and has no memory of its own; what it writes of drafts is rolled back, and
written again by the verification. Which exit drafts may change from round to round: the keys and
values of a layer are the same whichever exit reads them.

Without an exit, `ExitChoice` chooses one, and how many tokens are drafted, by the drafts that all
exits would have made. They are compared on committed tokens alone, in a few rounds that keep hidden
states: what was drafted and thrown away has no part in the choice, so that its uniforms may be used
again as in any other round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from shoal.drafting.hidden import kept
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import DraftCounters, Drafter, DraftInputs
from shoal.drafting.slots import DraftSlots
from shoal.drafting.text import NOTHING, tree_of
from shoal.errors import InternalError
from shoal.models.early_exit import first_layers, head_of, layer_count
from shoal.models.runner import Runner
from shoal.sampling.scores import Scores
from shoal.types.requests import Row
from shoal.types.rounds import Verdict
from shoal.types.trees import DraftTree

MOST_EXITS = 8
"""Exits that are compared: each costs a product with the head in a round that compares them."""


class EarlyExitDrafter(Drafter):
    """Samples tokens from an exit of the target under the row's own sampling controls.

    Args:
        exit: layers that draft; None = chosen, with the length of drafts.

    Attributes:
        choice: of the exit, where it is chosen; None otherwise.
    """

    name = "self"

    def __init__(self, exit: int | None = None) -> None:
        self._exit = exit
        self._exits: dict[int, ModelDrafter] = {}
        self._attached: Runner | None = None
        self.choice: ExitChoice | None = None
        self._head: Callable[[Tensor], Tensor] | None = None
        self._measuring = False

    def attach(self, target: Runner) -> None:
        self._attached, self._exits = target, {}
        if self._exit is None:
            layers = layer_count(target)
            self.choice, self._head = (
                ExitChoice(candidates(layers), layers, _head_share(target)),
                head_of(target),
            )

    @property
    def _target(self) -> Runner:
        if self._attached is None:
            raise InternalError("a drafter that feeds its target was not attached to an engine")
        return self._attached

    def propose(self, inputs: DraftInputs) -> DraftTree:
        exit, most = self._chosen(max(inputs.lengths))
        if not most or not len(
            self._target.cache
        ):  # whose layers the target makes, all of them, in its own first pass
            return tree_of([NOTHING] * len(inputs.rows), inputs)
        tree = self._drafter(exit).propose(
            replace(inputs, lengths=[min(length, most) for length in inputs.lengths])
        )
        for row in inputs.rows:
            self._target.cache.rollback(row.slot, len(row.tokens) - 1)
        return tree

    def _chosen(self, most: int) -> tuple[int, int]:
        """The exit that drafts, and how many tokens."""
        if self._exit is not None:
            return self._exit, most
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
        """Of each exit, the sum over the columns that were kept of the probability that a token of
        its distribution would be accepted, sum(min(p, q)), both at the row's temperature; and how
        many columns there are."""
        assert self.choice is not None
        assert self._head is not None
        paths, _ = verdict.lists
        columns = [[0, *(node + 1 for node in path)] for path in paths]
        logits = torch.cat(
            [own[places] for own, places in zip(scores.logits, columns, strict=True)]
        )
        states = torch.cat(kept(scores, verdict)).chunk(len(self.choice.exits), dim=-1)
        temperatures = [
            row.request.sampling.temperature
            for row, own in zip(rows, columns, strict=True)
            for _ in own
        ]
        p = _at(logits, temperatures)
        found = [
            float(torch.minimum(p, _at(self._head(layer), temperatures)).sum()) for layer in states
        ]
        return found, len(temperatures)

    def take_counters(self) -> DraftCounters:
        exits = (drafter.take_counters() for drafter in self._exits.values())
        return reduce(DraftCounters.plus, exits, DraftCounters())


class _AtExit(ModelDrafter):
    """A draft model whose cache is the target's."""

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        super().__init__(runner, vocab_size)
        self._slots = _TargetSlots(runner)

    def clean(self, rows: Sequence[Row]) -> None:
        """Of drafts alone: what the target computed is none of the drafter's."""
        for row in rows:
            self.runner.cache.zero_tail(row.slot, len(row.tokens) - 1)


class _TargetSlots(DraftSlots):
    """Those that the engine has given its rows, in which all is present."""

    computes_prompts = False

    def of(self, row: Row) -> int:
        return row.slot

    def place(self, rows: Sequence[Row], drafting: Sequence[bool]) -> None:
        """They are placed."""


def candidates(layers: int) -> list[int]:
    """At most `MOST_EXITS` of the exits 1..layers - 1, evenly spread."""
    count = min(layers - 1, MOST_EXITS)
    return sorted({round((place + 1) * layers / (count + 1)) for place in range(count)})


def _head_share(target: Runner) -> float:
    """How many layers have as many weights as the head."""
    head, embedding = (
        target.hf.get_output_embeddings().weight,
        target.hf.get_input_embeddings().weight,
    )
    layers = sum(
        parameter.numel()
        for parameter in target.hf.parameters()
        if parameter is not head and parameter is not embedding
    )
    return float(head.numel() / max(layers / layer_count(target), 1.0))


def _at(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """[n, vocab] -> distributions at the temperatures of each; a point mass at 0."""
    heat = torch.tensor(temperatures, device=logits.device)[:, None]
    logits = logits.float()
    point = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])
    return torch.where(heat > 0, (logits / heat.clamp(min=1e-3)).softmax(-1), point)


FIRST, EVERY = 4, 16
"""Rounds in which exits are compared: the first so many, then one of so many."""
KEPT = 0.9
"""Of what was known before, in each round that compares."""


def tokens_per_layer(
    acceptance: float, exit: int, length: int, layers: int, head: float = 0.0
) -> float:
    """Tokens that a round of so many drafts brings, over the layers that it computes.

    Args:
        acceptance: of a draft, if those before it were accepted.
        head: its cost in layers.
    """
    return sum(acceptance**i for i in range(length + 1)) / (length * (exit + head) + layers + head)


def best(
    acceptances: Mapping[int, float], layers: int, most: int, head: float = 0.0
) -> tuple[int, int]:
    """The exit and the number of drafts, at most `most`, that bring most tokens per layer; (0, 0)
    where no drafts do."""

    def worth(option: tuple[int, int]) -> float:
        exit, length = option
        return tokens_per_layer(acceptances.get(exit, 0.0), exit, length, layers, head)

    return max(
        [(0, 0), *((exit, length) for exit in acceptances for length in range(1, most + 1))],
        key=worth,
    )


class ExitChoice:
    """The choice of one engine: which exit drafts, and how many tokens, for all rows at once.

    After DEL (Zarch et al., COLM 2025, arXiv 2504.05598). Costs are counted in layers: a draft at
    exit l takes l and the head, a verification all layers and the head. If each draft is accepted
    with probability a, a round of g drafts brings 1 + a + ... + a^g tokens. The pair (l, g) that
    brings most per layer is taken, or none where plain decoding does.

    Args:
        exits: that are compared.
        layers: of the target.
        head: its cost in layers.
    """

    def __init__(self, exits: Sequence[int], layers: int, head: float) -> None:
        self.exits, self._layers, self._head = list(exits), layers, head
        self._agreed = dict.fromkeys(self.exits, 0.0)
        self._columns = 0.0
        self._rounds = 0

    def due(self) -> bool:
        """Whether the coming round is to compare exits; asked once per round."""
        self._rounds += 1
        return self._rounds <= FIRST or self._rounds % EVERY == 0

    def learn(self, agreed: Sequence[float], columns: int) -> None:
        """What would have been accepted of each exit's drafts, in so many columns."""
        self._columns = KEPT * self._columns + columns
        for exit, found in zip(self.exits, agreed, strict=True):
            self._agreed[exit] = KEPT * self._agreed[exit] + found

    @property
    def acceptances(self) -> dict[int, float]:
        """By exit; nothing before any round has compared them."""
        return (
            {exit: found / self._columns for exit, found in self._agreed.items()}
            if self._columns
            else {}
        )

    def best(self, most: int) -> tuple[int, int]:
        """The exit that drafts, and at most how many tokens; (0, 0) where nothing is known, or
        pays."""
        return best(self.acceptances, self._layers, most, self._head)
