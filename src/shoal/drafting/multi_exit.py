"""A draft model with several exits: each token is drafted by the first exit that is sure of it.

S2D, Kavehzadeh et al. 2024, arXiv 2407.01955. The first layers of the model, its last norm and its
head are drafters themselves, if they were trained to be. If the highest probability after the first
exit reaches the model's threshold, the token is drawn there; otherwise the row goes on to the next
exit, and at last to the whole model. The exit is known before the token is drawn, and q is the
distribution of that exit: rejection sampling stays exact.

Keys and values of the layers behind an exit are missing for a row that left there. A pass to a
later exit feeds all tokens that are missing, through all layers up to it; between rounds the cache
keeps the tokens that went through all layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from shoal.drafting.model import ModelDrafter, OrdinarySteps
from shoal.drafting.protocol import DraftCounters, DraftInputs
from shoal.errors import RequestError
from shoal.models.runner import Runner
from shoal.models.target_models import first_layers, layer_count, require_exit
from shoal.types.rounds import Faults
from shoal.types.trees import DraftTree

EXITS, CONFIDENCE = "draft_exits", "draft_exit_confidence"
"""The names in the draft model's config.json of its exits and of their threshold.

An exit is a number of layers after which the model may leave; the threshold is the highest
probability that is enough.
"""
ENOUGH = 0.7
"""The threshold for a config without one."""
PENDING = 16
"""The most tokens of a row that the layers behind the first exit may lack.

A row that lacks more goes through all layers first.
"""


def exits_of(model: Runner) -> tuple[list[int], float]:
    """Returns the exits of a draft model, in rising order, and its threshold.

    There are no exits for a model whose config names none.

    Raises:
        RequestError: the exits are not rising numbers of its layers, or the threshold is no
            probability.
        UnsupportedModel: the model cannot leave after its first layers.
    """
    config = getattr(model.hf, "config", None)
    exits, enough = getattr(config, EXITS, None), getattr(config, CONFIDENCE, ENOUGH)
    if not exits:
        return [], ENOUGH
    whole = isinstance(exits, list) and all(
        isinstance(layers, int) and not isinstance(layers, bool) for layers in exits
    )
    if (
        not whole
        or sorted(set(exits)) != exits
        or not isinstance(enough, float | int)
        or not 0 <= enough <= 1
    ):
        raise RequestError(
            f"{model.name}: config.json needs rising numbers of layers for {EXITS} and a "
            f"probability for {CONFIDENCE}, got {exits!r} and {enough!r}"
        )
    for layers in exits:
        require_exit(model, layers)
    return exits, float(enough)


class MultiExitDrafter(ModelDrafter):
    """A drafter that samples each token from the first exit that is sure of it.

    Args:
        runner: see `ModelDrafter`.
        vocab_size: see `ModelDrafter`.
        exits: the numbers of layers after which the model may leave, rising.
        enough: the highest probability at an exit, at temperature 1, from which on the row leaves
            there.

    Attributes:
        used: the number of tokens drawn after each number of layers.
    """

    def __init__(
        self, runner: Runner, vocab_size: int, exits: Sequence[int], enough: float = ENOUGH
    ) -> None:
        super().__init__(runner, vocab_size, pending=PENDING)
        self.layers = [*exits, layer_count(runner)]
        self.models = [*(first_layers(runner, layers) for layers in exits), runner]
        self.enough = enough
        self.used: Counter[int] = Counter()

    def propose(self, inputs: DraftInputs) -> DraftTree:
        """Proposes drafts, with one pass of the first exit for each position.

        Each later exit has at most as many passes, over the rows that go on.
        """
        before, pending = self.lacking(inputs.rows, inputs.lengths)
        faults: Faults = {}
        steps = _ExitSteps(self, inputs, faults, before, pending)
        tree = self._drafted(inputs, steps, faults)
        assert tree is not None
        for slot, whole in zip(self.slots(inputs.rows), steps.whole, strict=True):
            self.runner.cache.rollback(slot, whole)
        self.leave_out(inputs.rows, inputs.lengths, before)
        return tree

    def take_counters(self) -> DraftCounters:
        exits = (
            DraftCounters(*model.counts.take(), 0.0, model.counts.take_executors())
            for model in self.models[:-1]
        )
        return reduce(DraftCounters.plus, exits, super().take_counters())


class _ExitSteps(OrdinarySteps):
    """The steps of a draft, each of which leaves by the first exit that is sure.

    Args:
        held: the tokens of each row in the cache before the round, which went through all layers.
        pending: the committed tokens that follow.

    Attributes:
        whole: the number of tokens of each row that went through all layers.
    """

    def __init__(
        self,
        drafter: MultiExitDrafter,
        inputs: DraftInputs,
        faults: Faults,
        held: Sequence[int],
        pending: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(drafter, inputs, faults)
        self._exits, self._held = drafter, held
        self._fed = [list(tokens) for tokens in pending]  # the tokens of each row since then
        # For each exit and row, the number of tokens that went through the exit's layers.
        self._valid = [list(held) for _ in drafter.models]

    @property
    def whole(self) -> list[int]:
        return self._valid[-1]

    def logits(self, lengths: Sequence[int]) -> Tensor:
        if self.last is not None:
            for fed, token in zip(self._fed, self.last.clamp(min=0).tolist(), strict=True):
                fed.append(token)
            self.note_history(self.last, lengths)
        drafting = [row for row, length in enumerate(lengths) if length > self.steps]
        exits = self._exits
        # The first pass of a cache must go through all layers.
        first = 0 if len(exits.runner.cache) == exits.layers[-1] else len(exits.models) - 1
        logits_of_pass = self._pass(first, range(len(lengths)))
        self._count(first, len(drafting))
        for exit in range(first + 1, len(exits.models)):
            sure = logits_of_pass[drafting].float().softmax(-1).amax(-1) >= exits.enough
            drafting = [
                row for row, leaves in zip(drafting, sure.tolist(), strict=True) if not leaves
            ]
            if not drafting:
                break
            logits_of_pass[drafting] = self._pass(exit, drafting)
            exits.used[exits.layers[exit - 1]] -= len(drafting)
            self._count(exit, len(drafting))
        return logits_of_pass

    def _count(self, exit: int, rows: int) -> None:
        self._exits.used[self._exits.layers[exit]] += rows

    def _pass(self, exit: int, rows: Sequence[int]) -> Tensor:
        """Feeds the tokens that an exit's layers lack; returns the logits after the last ones.

        The logits have shape [rows, vocab of the drafter].
        """
        drafter = self._exits
        slots = [self.slots[row] for row in rows]
        missing = [self._fed[row][self._valid[exit][row] - self._held[row] :] for row in rows]
        for slot, row in zip(slots, rows, strict=True):
            drafter.runner.cache.rollback(slot, self._valid[exit][row])
        counts = [len(tokens) for tokens in missing]
        block = [tokens + tokens[-1:] * (max(counts) - len(tokens)) for tokens in missing]
        logits = drafter.models[exit].feed(
            slots, torch.tensor(block, device=drafter.runner.device), counts
        )
        for row in rows:
            for lower in range(exit + 1):
                self._valid[lower][row] = self._held[row] + len(self._fed[row])
        ends = torch.tensor([count - 1 for count in counts], device=logits.device)
        return logits[torch.arange(len(counts), device=logits.device), ends].clone()
