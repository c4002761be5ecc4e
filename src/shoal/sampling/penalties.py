"""The controls that read the tokens before a position.

They are bias, penalties, bans, and the caller's own processors. `shoal.types.trees.Positions` gives
the tokens before each position. Padding is left as it is.
"""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.config import Sampling
from shoal.errors import RequestError
from shoal.sampling.processors import name_of
from shoal.types.rounds import Faults
from shoal.types.stats import TokenCounts
from shoal.types.trees import Positions

_POSITION_INDEPENDENT = frozenset(
    {
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TopHLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    }
)
"""The Transformers processors that read neither input_ids nor other rows.

One call of them does the whole block.
"""
LARGEST_BIAS = 1e4
"""The most that a bias or penalty adds or takes away: no logit is near it, and in float32 the
logits of tokens with equal biases keep three digits beside it.
"""
LARGEST_FACTOR = 1e30
"""The most that a penalty multiplies or divides a score by: products stay finite in float32."""


def require_ids(sampling: Sampling, vocab: int) -> None:
    """Checks the token ids that the caller named.

    Raises:
        RequestError: logit_bias or bad_words name an id that a model of this vocabulary does not
            have.
    """
    for name, ids in (
        ("logit_bias", sampling.logit_bias),
        ("bad_words", itertools.chain.from_iterable(sampling.bad_words)),
    ):
        wrong = [token for token in ids if not 0 <= token < vocab]
        if wrong:
            raise RequestError(
                f"{name} names token id {wrong[0]}, expected ids in [0, {vocab}), the model's "
                f"vocabulary"
            )


def bias_and_penalise(scores: Tensor, sampling: Sampling, positions: Positions) -> None:
    """Applies bias, penalties and bans to `scores` in place.

    They are logit_bias, the three penalties, no_repeat_ngram, bad_words and min_new_tokens.
    The source of repetition_penalty is Keskar et al. 2019, "CTRL". The source of presence_penalty
    and frequency_penalty, which count output tokens only, is OpenAI's API reference.

    Args:
        scores: [rows, q, vocab] float32 or float64, contiguous.

    Raises:
        RequestError: see `require_ids`.
    """
    rows = positions.rows
    require_ids(sampling, scores.shape[-1])
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=scores.device)
        biases = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float64)
        scores[..., ids] += biases.clamp(-LARGEST_BIAS, LARGEST_BIAS).to(scores)
    if sampling.repetition_penalty != 1:
        penalty = min(max(sampling.repetition_penalty, 1 / LARGEST_FACTOR), LARGEST_FACTOR)
        before = [row.counts.upto(row.tokens) for row in rows]
        _replace(
            scores, before, positions, lambda s, _: torch.where(s < 0, s * penalty, s / penalty)
        )
    if sampling.presence_penalty or sampling.frequency_penalty:
        presence, frequency = (
            min(max(penalty, -LARGEST_BIAS), LARGEST_BIAS)
            for penalty in (sampling.presence_penalty, sampling.frequency_penalty)
        )
        output = [row.output_counts.upto(row.tokens) for row in rows]
        _replace(scores, output, positions, lambda s, count: s - (presence + frequency * count))
    if sampling.no_repeat_ngram or sampling.bad_words or sampling.min_new_tokens:
        always, per_position = _bans(sampling, positions, *scores.shape[1:])
        if always:
            scores.index_fill_(-1, torch.tensor(always, device=scores.device), -torch.inf)
        if per_position:
            scores.view(-1).index_fill_(0, _ints(per_position, scores.device), -torch.inf)


def _ints(values: Sequence[int], device: torch.device) -> Tensor:
    """Makes a tensor int64 [len(values)] from an array, which is faster than from a list.

    This way is several times faster than torch.tensor of a list.
    """
    return _join([array("q", values)], device)


def _join(parts: Sequence[array[int]], device: torch.device) -> Tensor:
    """Joins copies of the parts, which may grow later, to a tensor int64 [total length]."""
    buffer = array("q")
    for part in parts:
        buffer.extend(part)
    if not buffer:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.frombuffer(buffer, dtype=torch.int64).to(device)


def _replace(
    scores: Tensor,
    committed: Sequence[TokenCounts],
    positions: Positions,
    change: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Replaces the score of every token that occurs before a position by change(score, count).

    Args:
        scores: [rows, q, vocab], contiguous; modified in place.
        committed: the counts of the tokens before each row's draft. Only the draft's own tokens are
            counted here.
        change: a function of scores [m] and counts [m], both of scores' dtype, to scores [m].
    """
    flat = scores.view(-1)
    parts = [_committed_counts(scores, committed), _draft_counts(scores, committed, positions)]
    before = [flat.index_select(0, index) for index, _ in parts]
    # The second part repeats entries of the first with the draft counted in, so it must be written
    # after it.
    for (index, count), score in zip(parts, before, strict=True):
        flat.index_copy_(0, index, change(score, count))


def _committed_counts(scores: Tensor, committed: Sequence[TokenCounts]) -> tuple[Tensor, Tensor]:
    """Returns the indices and counts of every row's committed tokens at each of its positions.

    The indices are flat, into scores [rows, q, vocab].
    """
    (n, q, vocab), device = scores.shape, scores.device
    ids = _join([counts.ids for counts in committed], device)
    count = _join([counts.counts for counts in committed], device)
    sizes = _ints([len(counts.ids) for counts in committed], device)
    row = torch.arange(n, device=device).repeat_interleave(sizes, output_size=len(ids))
    # An embedding may be larger than the output layer: such ids have no score to change.
    inside = ids < vocab
    if not bool(inside.all()):
        ids, count, row = ids[inside], count[inside], row[inside]
    position = row[:, None] * q + torch.arange(q, device=device)
    return (position * vocab + ids[:, None]).flatten(), count.to(scores.dtype).repeat_interleave(q)


def _draft_counts(
    scores: Tensor, committed: Sequence[TokenCounts], positions: Positions
) -> tuple[Tensor, Tensor]:
    """Returns the indices and counts of the tokens of the drafts.

    The indices are flat, into scores [rows, q, vocab]. Each position counts the drafted tokens
    before it and the committed ones.
    """
    q, vocab = scores.shape[1:]
    index: list[int] = []
    counts: list[int] = []
    for b in range(len(positions.rows)):
        for j, path in positions.paths(b, q):
            count_by_token: dict[int, int] = {}
            for token in path:
                if token < vocab:
                    count_by_token[token] = count_by_token.get(token, committed[b].of(token)) + 1
            index.extend((b * q + j) * vocab + token for token in count_by_token)
            counts.extend(count_by_token.values())
    return _ints(index, scores.device), _ints(counts, scores.device).to(scores.dtype)


def _bans(
    sampling: Sampling, positions: Positions, q: int, vocab: int
) -> tuple[list[int], list[int]]:
    """Returns the ids that are impossible everywhere, and those that are at one position.

    The latter are flat indices into [rows, q, vocab].
    """
    always = [word[0] for word in sampling.bad_words if len(word) == 1]
    words: dict[int, list[list[int]]] = defaultdict(list)
    for word in sampling.bad_words:
        if len(word) > 1:
            words[word[-2]].append(list(word))
    flat: list[int] = []
    for b, row in enumerate(positions.rows):
        history = list(row.tokens)
        for j, path in positions.paths(b, q):
            history[len(row.tokens) :] = path
            end = len(history)
            banned = (
                _would_repeat(history, end, sampling.no_repeat_ngram)
                if sampling.no_repeat_ngram
                else set()
            )
            for word in words.get(history[-1], ()):
                if end >= len(word) - 1 and history[end - len(word) + 1 :] == word[:-1]:
                    banned.add(word[-1])
            if end - row.prompt_length < sampling.min_new_tokens:
                banned |= row.eos
            flat.extend((b * q + j) * vocab + token for token in banned if token < vocab)
    return always, flat


def _would_repeat(history: list[int], end: int, size: int) -> set[int]:
    """Returns the tokens that would repeat an n-gram of `size` after history[:end]."""
    if size == 1:
        return set(history[:end])
    repeating: set[int] = set()
    prefix = history[max(end - size + 1, 0) : end]
    at = size - 3
    # Only the places where the prefix's last token occurs are compared: list.index runs at C speed.
    while len(prefix) == size - 1:
        try:
            at = history.index(prefix[-1], at + 1, end - 1)
        except ValueError:
            break
        if history[at - size + 2 : at + 1] == prefix:
            repeating.add(history[at + 1])
    return repeating


def process(
    scores: Tensor, processors: Sequence[Any], positions: Positions, faults: Faults | None = None
) -> Tensor:
    """Runs Transformers `LogitsProcessor`s or other pure functions of (ids, scores) in order.

    Each is called once per (row, position), rows first, with the exact ids before the position
    (int64 [1, length]) and scores [1, vocab]. The processors of `_POSITION_INDEPENDENT` are called
    once on the whole block, with empty ids.

    Args:
        scores: [rows, q, vocab] float32 or float64, contiguous; may be overwritten.
        faults: a dict that receives the errors of processors, by row and column; the scores of such
            a position are left as they were.

    Raises:
        RequestError: without `faults`, a processor raises, or returns something else than scores of
            the shape it was given.
    """
    n, q, vocab = scores.shape
    for independent, run in itertools.groupby(processors, key=position_independent):
        steps = list(run)
        if independent:
            ids = torch.empty(n * q, 0, dtype=torch.int64, device=scores.device)
            scores = _chain(steps, ids, scores.view(n * q, vocab)).view(n, q, vocab)
            continue
        for b, row in enumerate(positions.rows):
            ids = _ints([*row.tokens, *[0] * max(map(len, positions.drafts))], scores.device)[None]
            for j, path in positions.paths(b, q):
                end = len(row.tokens) + len(path)
                ids[0, len(row.tokens) : end] = _ints(path, scores.device)
                try:
                    scores[b, j] = _chain(steps, ids[:, :end], scores[b, j, None].clone())[0]
                except RequestError as error:
                    if faults is None:
                        raise
                    faults.setdefault(row, {}).setdefault(positions.first + j, error)
    return scores


def position_independent(processor: Any) -> bool:
    """Returns True if a processor is known to read neither ids nor other rows."""
    kind = type(processor)
    return kind.__name__ in _POSITION_INDEPENDENT and kind.__module__.startswith("transformers.")


def _chain(processors: Sequence[Any], ids: Tensor, scores: Tensor) -> Tensor:
    shape, dtype = scores.shape, scores.dtype
    for processor in processors:
        try:
            # A copy: the processor may write into its ids, which other processors still read.
            scores = processor(ids.clone(), scores)
        except RequestError:
            raise
        except Exception as error:  # a user's processor may raise any error
            raise RequestError(f"processor {name_of(processor)} failed: {error!r:.200}") from error
        if not isinstance(scores, Tensor) or scores.shape != shape:
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise RequestError(
                f"processor {name_of(processor)} must return scores of shape {tuple(shape)}, "
                f"got {got}"
            )
    return scores.to(dtype).contiguous()
