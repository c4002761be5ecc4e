"""PPD: trained prompt tokens make the target itself guess tokens further ahead.

Chen et al. 2024, arXiv 2405.18628. A prompt token is a vector in place of a token's embedding. m of
them stand behind the last token of a text, and the target's output at the i-th is a guess of the
token i + 1 positions on. They are part of the pass that verifies: behind the root and the nodes of
a tree, as columns that only the drafter reads (`shoal.types.trees.Probes`). Wherever the accepted
path ends, the prompt tokens behind that node have guessed the tokens after the one that the target
draws there. They are the next round's tree, which needs no pass of its own.

Guesses of different positions do not depend on each other, and are proposed as point masses. A row
has no drafts in its first round, and in a round after one without prompt tokens.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.drafting.protocol import DraftCounters, Drafter, DraftInputs
from shoal.drafting.shapes import Accuracies, TreePlan, chosen, ends, placed, planned, reached
from shoal.drafting.text import (
    CHOICES,
    NOTHING,
    Choices,
    Guess,
    independent,
    most_probable,
    tree_of,
)
from shoal.drafting.trained_heads import (
    layers_and_width,
    once,
    read_config,
    read_tensors,
    require_width,
)
from shoal.errors import ModelError, RequestError
from shoal.models.runner import Runner
from shoal.sampling.distributions import Scores
from shoal.types.requests import Row
from shoal.types.trees import DraftTree, Probes, Verdict

FILE, TENSOR = "prompt_tokens.safetensors", "prompt_tokens"
MOST = 32
"""The most columns of a tree whose size is chosen: the largest of `probe_trees.SIZES`."""
MOST_TOKENS = 16
"""The most prompt tokens behind a node."""
Seconds = Callable[[int], float]
"""The seconds of a pass, by the number of columns beside each row's last token."""


class PromptTokens(NamedTuple):
    """The prompt tokens of a target.

    Attributes:
        vectors: the vectors, [m, width].
        accuracies: how often each guesses right, see `shoal.drafting.shapes.Accuracies`.
    """

    vectors: Tensor
    accuracies: Accuracies


def load_ppd(directory: Path, target: Runner) -> PromptTokens:
    """Returns the prompt tokens in a directory.

    Raises:
        RequestError: there are none, or config.json has no accuracies for them.
        ModelError: files are damaged, or tensors are missing or not finite.
        PairMismatch: they belong to another target.
    """
    config, tensors = read_config(directory), read_tensors(directory, FILE)
    if (
        TENSOR not in tensors
        or tensors[TENSOR].dim() != 2
        or not 1 <= len(tensors[TENSOR]) <= MOST_TOKENS
    ):
        raise ModelError(
            f"{directory / FILE} lacks {TENSOR}, 1 to {MOST_TOKENS} vectors; train it again"
        )
    vectors = tensors[TENSOR].float()
    require_width(directory, "prompt tokens", vectors.shape[1], target, layers_and_width(target)[1])
    vocabulary = config.get("vocab_size", target.vocab_size)
    require_width(directory, "a vocabulary", vocabulary, target, target.vocab_size)
    if not bool(vectors.isfinite().all()):
        raise ModelError(f"{directory / FILE} holds NaN or infinite numbers; train it again")
    accuracies = _accuracies(config.get("accuracies"), directory, len(vectors))
    return PromptTokens(vectors.to(target.device, target.dtype), accuracies)


def _accuracies(table: Any, directory: Path, count: int) -> Accuracies:
    try:
        rows = tuple(tuple(float(chance) for chance in row) for row in table)
    except (TypeError, ValueError):
        rows = ()
    if len(rows) != count or not all(
        row and all(0.0 <= chance <= 1.0 for chance in row) for row in rows
    ):
        raise RequestError(
            f"{directory}/config.json needs accuracies, a list of shares for each of {count} "
            f"prompt tokens"
        )
    return rows


class PpdDrafter(Drafter):
    """A drafter that proposes the most probable paths of the guesses from the round before.

    Args:
        tokens: the prompt tokens.
        nodes: the nodes and prompt tokens of a row's tree; 0 = as many as pay by `seconds`.
        seconds: returns the seconds of passes over a number of rows; None = measured, once for a
            target and number of rows.
    """

    name = "ppd"

    def __init__(
        self, tokens: PromptTokens, nodes: int = 0, seconds: Callable[[int], Seconds] | None = None
    ) -> None:
        self._tokens, self._nodes, self._seconds_of = tokens, nodes, seconds
        self.weights = tokens.vectors
        self.max_nodes = nodes or MOST
        self._target: Runner | None = None
        self._plans: dict[int, TreePlan | None] = {}  # by rows, to a power of two
        self._known: dict[Row, list[Choices]] = {}
        """The guesses for rows whose last path ended before prompt tokens."""
        self._placed: dict[Row, list[list[int]]] = {}
        """The columns of the prompt tokens behind each column of a row, in this round."""
        self._seconds = self._preparing = self._prepared = 0.0

    @classmethod
    def for_target(cls, target: Runner, *, directory: str, nodes: int = 0) -> PpdDrafter:
        return cls(once(target, directory, load_ppd), nodes)

    def attach(self, target: Runner) -> None:
        target.use_vectors(self._tokens.vectors)
        self._target = target

    def propose(self, inputs: DraftInputs) -> DraftTree:
        plan = self._plan(inputs)
        started = time.perf_counter()
        if plan is None:
            guesses = [NOTHING] * len(inputs.rows)
        else:
            guesses = [
                self._guess(plan, *pair) for pair in zip(inputs.rows, inputs.lengths, strict=True)
            ]
        tree = tree_of(guesses, inputs)
        if plan is not None:
            tree = replace(tree, probes=self._probes(plan, tree, inputs))
        self._seconds += time.perf_counter() - started
        return tree

    def _guess(self, plan: TreePlan, row: Row, length: int) -> Guess:
        known = self._known.get(row, [])[:length]
        nodes = plan.candidates[len(known)]
        return independent(known, length, nodes) if nodes else NOTHING

    def _plan(self, inputs: DraftInputs) -> TreePlan | None:
        """Returns the plan for the trees of a round; None if no trees pay."""
        if self._nodes:
            return planned(self._tokens.accuracies, self._nodes)
        rows = 1 << (len(inputs.rows) - 1).bit_length()
        if rows not in self._plans:
            started = time.perf_counter()
            seconds = (
                self._measure(inputs.rows, rows)
                if self._seconds_of is None
                else self._seconds_of(rows)
            )
            self._plans[rows] = chosen(self._tokens.accuracies, seconds)
            self._preparing += time.perf_counter() - started
        return self._plans[rows]

    def _measure(self, rows: Sequence[Row], size: int) -> Seconds:
        assert self._target is not None
        return pass_times(
            self._target,
            [(row.slot, row.tokens[-1], len(row.tokens) - 1) for row in rows],
            size,
            MOST,
        )

    # ── prompt tokens of a round ──────────────────────────────────────────────────────────────────

    def _probes(self, plan: TreePlan, tree: DraftTree, inputs: DraftInputs) -> Probes | None:
        """Places prompt tokens behind the columns where paths of drafted rows probably end."""
        self._placed = {}
        vectors: list[list[int]] = []
        after: list[list[int]] = []
        for b, (row, length) in enumerate(zip(inputs.rows, inputs.lengths, strict=True)):
            counts = (
                self._counts(plan, row, tree.drafts[b], tree.parents[b], tree.depths[b])
                if length
                else []
            )
            own, columns, behind = _chains(counts, 1 + len(tree.drafts[b]))
            self._placed[row] = columns
            vectors.append(own)
            after.append(behind)
        return Probes(vectors, after) if any(vectors) else None

    def _counts(
        self,
        plan: TreePlan,
        row: Row,
        draft: Sequence[int],
        parents: Sequence[int],
        depths: Sequence[int],
    ) -> list[int]:
        """Returns the number of prompt tokens behind each column, none beyond the row's end."""
        chances = [dict(choices) for choices in self._known.get(row, [])]
        own = [chances[depth - 1][token] for token, depth in zip(draft, depths[1:], strict=True)]
        ending = ends(parents, reached(parents, own))
        limits = [max(row.max_draft_length - depth - 1, 0) for depth in depths]
        return placed(ending, plan.gains, plan.columns - len(draft), limits)

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        placed = self._placed
        self._placed = {}
        self._known = {row: k for row, k in self._known.items() if row not in rows}
        if scores.columns is None:
            return
        paths, _ = verdict.lists
        last = [path[-1] + 1 if path else 0 for path in paths]
        behind = [
            placed[row][column] if placed.get(row) else []
            for row, column in zip(rows, last, strict=True)
        ]
        most = max(map(len, behind))
        if not most:
            return
        device = scores.columns.device
        index = torch.tensor(
            [columns + [0] * (most - len(columns)) for columns in behind], device=device
        )
        choices = most_probable(
            scores.columns[torch.arange(len(rows), device=device)[:, None], index], CHOICES
        )
        for row, choice, columns in zip(rows, choices, behind, strict=True):
            if columns:
                self._known[row] = list(choice[: len(columns)])

    def end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._known.pop(row, None)
            self._placed.pop(row, None)

    def take_counters(self) -> DraftCounters:
        seconds, self._seconds = self._seconds, 0.0
        prepared, self._prepared = self._preparing - self._prepared, self._preparing
        return DraftCounters(0, seconds, prepared)

    @property
    def seconds_preparing(self) -> float:
        return self._preparing


def _chains(counts: Sequence[int], first: int) -> tuple[list[int], list[list[int]], list[int]]:
    """Lays prompt tokens out as columns, from column `first` on.

    Args:
        counts: the number of prompt tokens behind each column.
        first: the first free column.

    Returns:
        The prompt tokens, their columns behind each column, and the columns that they follow.
    """
    vectors: list[int] = []
    columns: list[list[int]] = []
    after: list[int] = []
    for column, count in enumerate(counts):
        own = list(range(first + len(vectors), first + len(vectors) + count))
        columns.append(own)
        vectors += range(count)
        after += [column, *own[:-1]] if own else []
    return vectors, columns, after


TIMES = 3
"""The passes of each size; the fastest counts, as disturbances only make a pass slower."""
_known: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, int], list[float]]] = (
    weakref.WeakKeyDictionary()
)


def pass_times(
    target: Runner, rows: Sequence[tuple[int, int, int]], size: int, most: int
) -> Callable[[int], float]:
    """Returns the seconds of a pass by the number of columns beside each row's last token.

    Between the measured sizes it is interpolated.

    Args:
        target: the target.
        rows: the slot, the last token and the number of tokens in the cache of each row.
        size: the key of the measurement: for one size and target it is made once.
        most: the most columns beside the last token.
    """
    known = _known.setdefault(target.hf, {})
    sizes = [0, most // 4, most // 2, most]
    if (size, most) not in known:
        known[size, most] = [_seconds(target, rows, columns) for columns in sizes]
    seconds = known[size, most]
    return lambda columns: float(np.interp(columns, sizes, seconds))


def _seconds(target: Runner, rows: Sequence[tuple[int, int, int]], columns: int) -> float:
    """Returns the seconds of the fastest of some passes over the target's own cache.

    The cache is then as it was before. The target's counters do not count these passes.
    """
    runner = target.over_same_cache(target.hf, target.lean)
    block = torch.tensor([[token] * (1 + columns) for _, token, _ in rows], device=target.device)
    seconds = []
    for _ in range(TIMES):
        started = time.perf_counter()
        runner.feed([slot for slot, _, _ in rows], block, [1 + columns] * len(rows))
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        seconds.append(time.perf_counter() - started)
        for slot, _, length in rows:
            runner.cache.rollback(slot, length)
    return min(seconds)
