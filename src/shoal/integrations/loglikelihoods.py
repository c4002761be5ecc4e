"""The log-probabilities that a model gives to texts behind contexts, many at a time.

A context that several share is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import fsum

import torch
from torch import Tensor

from shoal.errors import RequestError
from shoal.models.runner import Runner

ROWS = 16
"""The number of contexts in the cache at once."""
POSITIONS = 512
"""The number of positions per pass; their logits [positions, vocab] are in memory at once."""

Pair = tuple[Sequence[int], Sequence[int]]
"""The ids of a context, at least one, and of its continuation."""


@dataclass
class _Context:
    """A context, and which of the pairs have it."""

    ids: list[int]
    pairs: list[int] = field(default_factory=list)
    longest: int = 0  # tokens of the longest continuation

    @property
    def cells(self) -> int:
        return len(self.ids) - 1 + self.longest


def loglikelihoods(
    target: Runner, pairs: Sequence[Pair], done: Callable[[int], None] = lambda count: None
) -> list[tuple[float, bool]]:
    """Computes the log-probability of each pair's continuation.

    It is the sum over its tokens (natural logarithm, unprocessed logits at temperature 1), with
    whether every token is the most probable one.

    Args:
        pairs: the input of a pair, all of its tokens but the last, is at most `target.context`
            long.
        done: called with the number of pairs that were computed since the last call.

    Raises:
        RequestError: an empty context, too many tokens, or an id outside of the vocabulary.
        OutOfMemory: the memory does not suffice.
    """
    return [(fsum(each), greedy) for each, greedy in _scored(target, pairs, 1.0, done)]


def token_logprobs(
    target: Runner, pairs: Sequence[Pair], temperature: float = 1.0
) -> list[list[float]]:
    """Computes the natural-log probability of each token of each pair's continuation.

    It is the model's at a temperature, without truncation and penalties.
    """
    return [each for each, _ in _scored(target, pairs, temperature)]


def _scored(
    target: Runner,
    pairs: Sequence[Pair],
    temperature: float,
    done: Callable[[int], None] = lambda count: None,
) -> list[tuple[list[float], bool]]:
    results: list[tuple[list[float], bool]] = [([], True) for _ in pairs]
    contexts = _contexts(target, pairs)
    runner = target.fork(ordinary=True)
    for start in range(0, len(contexts), ROWS):
        batch = contexts[start : start + ROWS]
        runner.memory.reserve(len(batch), max(context.cells for context in batch))
        for slot in range(len(batch)):
            runner.cache.rollback(slot, 0)
        for _ in _fed(runner, [context.ids[:-1] for context in batch], want_logits=False):
            pass
        for turn in range(max(len(context.pairs) for context in batch)):
            asked = {
                slot: context.pairs[turn]
                for slot, context in enumerate(batch)
                if turn < len(context.pairs)
            }
            scored = _continued(
                runner, batch, {slot: pairs[pair][1] for slot, pair in asked.items()}, temperature
            )
            for slot, pair in asked.items():
                results[pair] = scored[slot]
                runner.cache.rollback(slot, len(batch[slot].ids) - 1)
            done(len(asked))
    return results


def _contexts(target: Runner, pairs: Sequence[Pair]) -> list[_Context]:
    """Returns the contexts of all pairs, each once, the longest first."""
    contexts: dict[tuple[int, ...], _Context] = {}
    for i, (before, after) in enumerate(pairs):
        if not before or len(before) + len(after) - 1 > target.context:
            raise RequestError(
                "a context must have at least one token, and with its continuation at most "
                f"{target.context + 1}: got {len(before)} and {len(after)}"
            )
        if not all(0 <= token < target.vocab_size for token in (*before, *after)):
            raise RequestError(f"token ids must be in 0..{target.vocab_size - 1}")
        context = contexts.setdefault(tuple(before), _Context(list(before)))
        context.pairs.append(i)
        context.longest = max(context.longest, len(after))
    return sorted(contexts.values(), key=lambda context: -context.cells)


def _continued(
    runner: Runner, batch: Sequence[_Context], after: dict[int, Sequence[int]], temperature: float
) -> dict[int, tuple[list[float], bool]]:
    """Returns the scores of one continuation per slot."""
    inputs: list[Sequence[int]] = [()] * len(batch)
    for slot, ids in after.items():
        inputs[slot] = [batch[slot].ids[-1], *ids[:-1]] if ids else ()
    scores: dict[int, tuple[list[float], bool]] = {slot: ([], True) for slot in after}
    for slot, start, logits in _fed(runner, inputs):
        chosen = torch.tensor(after[slot][start : start + len(logits)], device=logits.device)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs = (logits / temperature).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        before, greedy = scores[slot]
        scores[slot] = (
            before + logprobs.tolist(),
            greedy and bool((logits.argmax(-1) == chosen).all()),
        )
    return scores


def _fed(
    runner: Runner, inputs: Sequence[Sequence[int]], *, want_logits: bool = True
) -> Iterator[tuple[int, int, Tensor]]:
    """Appends inputs[slot] to every slot.

    Yields:
        Pieces: a slot, its first token's index, and the logits from there.
    """
    start = 0
    while slots := [slot for slot, ids in enumerate(inputs) if len(ids) > start]:
        width = max(POSITIONS // len(slots), 1)
        pieces = [list(inputs[slot][start : start + width]) for slot in slots]
        counts = [len(piece) for piece in pieces]
        block = torch.zeros(len(slots), max(counts), dtype=torch.long)
        for row, piece in enumerate(pieces):
            block[row, : len(piece)] = torch.tensor(piece)
        logits = runner.feed(slots, block.to(runner.device), counts, want_logits=want_logits)
        if want_logits:
            for row, slot in enumerate(slots):
                yield slot, start, logits[row, : counts[row]]
        start += width
