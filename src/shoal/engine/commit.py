"""Accepted tokens -> rows, with log-probabilities: EOS, stop strings, criteria, limits, faults.

The earliest end wins, also inside a block. The log-probabilities are those under the target, before
and after processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.constraints import masks
from shoal.constraints.estimates import DrawnValues, log_weights
from shoal.engine.ended_rows import finish, visible_text
from shoal.engine.multi_step import PlainRun
from shoal.errors import RequestError, ShoalError
from shoal.sampling.controls import unbound
from shoal.sampling.processors import name_of
from shoal.sampling.scores import Scores
from shoal.types.requests import Row
from shoal.types.rounds import Commit, Faults
from shoal.types.samples import TopLogprobs
from shoal.types.trees import DraftTree, Verdict

_TOGETHER = 1 << 21
"""The number of logits normalised at a time: more of them leave a CPU's caches."""


class Logprobs(NamedTuple):
    """The natural-log probabilities of the tokens of a row's round.

    Attributes:
        raw: the log-probabilities before processing.
        processed: the log-probabilities after processing.
        top: the most probable tokens, if the row's request asks for them.
        weights: see `Row.log_weight`.
        ends: the log-probabilities of the EOS tokens, see `Row.end_logprobs`.
        seen: the values from which estimates learn (`shoal.constraints.estimates`).
    """

    raw: Sequence[float]
    processed: Sequence[float]
    top: Sequence[TopLogprobs] = ()
    weights: Sequence[float] = ()
    ends: Sequence[float] = ()
    seen: Sequence[DrawnValues] = ()

    def add(self, row: Row, taken: int) -> None:
        """Adds the values of the first `taken` tokens, which are the row's last, to the row."""
        row.logprobs += self.raw[:taken]
        row.processed_logprobs += self.processed[:taken]
        row.top_logprobs += self.top[:taken]
        row.log_allowed += sum(self.weights[:taken])
        row.log_weight += sum(self.weights[:taken])
        row.end_logprobs += self.ends[:taken]
        if row.beginning is not None and taken:
            row.beginning = row.beginning.learn(row.tokens[-taken:], self.seen[:taken])


def logprobs_of(
    rows: Sequence[Row],
    blocks: Sequence[Sequence[int]],
    columns: Sequence[Sequence[int]],
    scores: Scores,
    verdict: Verdict,
) -> list[Logprobs]:
    """Returns the log-probabilities of each row's block, before the round is committed.

    Args:
        rows: the rows.
        blocks: the tokens of each row.
        columns: for each token, the column of the pass that predicts it.
        scores: the target's scores.
        verdict: the verdict of the rule.
    """
    known = verdict.raw_logprobs
    raw = _raw(scores.logits, blocks, columns) if known is None else known.tolist()
    processed = verdict.probs.log().tolist()
    found = []
    for b, row in enumerate(rows):
        if not (row.request.top_logprobs or row.request.weighted or row.cutting is not None):
            found.append(Logprobs(raw[b], processed[b]))
            continue
        weights, seen = _weights(scores, row, b, blocks[b], columns[b])
        if row.request.distinct:
            processed[b] = [math.log(each.p) if each.p else -math.inf for each in seen]
        checked = verdict.check_weights.get(b, ())
        weights = [one + other for one, other in zip_longest(weights, checked, fillvalue=0.0)]
        top, ends = _top(scores, row, b, columns[b]), _ends(scores, row, b, columns[b])
        found.append(Logprobs(raw[b], processed[b], top, weights, ends, seen))
    return found


def _ends(scores: Scores, row: Row, place: int, columns: Sequence[int]) -> list[float]:
    """Returns the natural log of the probability of the row's EOS tokens at its columns.

    The probability is that of the logits alone. The list is empty unless a check may cut the row.
    """
    if row.cutting is None or not columns:
        return []
    logprobs = _log_softmax(scores.logits[place, list(columns)])
    return logprobs[:, sorted(row.eos)].logsumexp(-1).tolist()


def _weights(
    scores: Scores, row: Row, place: int, block: Sequence[int], columns: Sequence[int]
) -> tuple[list[float], list[DrawnValues]]:
    """Returns the natural logs of the weights of a row's block, and the values for estimates.

    A weight is the probability under p, without the row's constraints, of the tokens that the
    constraints allow, at each token of the block for which they hold. Both lists are empty unless
    the row's request asks for weights. Under estimates, the weights are those that the estimates
    leave. Where texts are drawn without replacement, they are not, and the values are those of p
    given that each token is allowed, of all tokens.
    """
    distinct = row.request.distinct
    count = len(block) if distinct else masks.bound(row, block) if row.request.weighted else 0
    if not count:
        return [], []
    own, sampling = scores.of_row(place), row.request.sampling
    logits, positions = own.logits, own.positions
    allowed = masks.allowed(positions, logits)
    at = list(columns[:count])
    free = unbound(logits, sampling, positions, {})[0, at].double()
    inside = (free / sampling.temperature).log_softmax(-1)
    if allowed is not None:
        inside = inside.masked_fill(~allowed[0, at], -math.inf)
    masses = inside.logsumexp(-1)
    if row.beginning is None:
        return masses.tolist(), []
    if distinct:
        return masses.tolist(), _seen(row, block, inside - masses[:, None])
    return log_weights(row.beginning, block[:count], inside), _seen(row, block[:count], inside)


def _seen(row: Row, block: Sequence[int], inside: Tensor) -> list[DrawnValues]:
    """Returns the values for estimates.

    Args:
        inside: natural log of p at each token, [tokens, vocab]; -inf for tokens that are not
            allowed.
    """
    drawn = inside[range(len(block)), list(block)].exp().tolist()
    counts = inside.isfinite().sum(-1).tolist()
    nodes = [row.beginning.after(block[:place]) for place in range(len(block))]
    known = [[] if node is None else list(node.children) for node in nodes]
    for place, token in enumerate(block):
        inside[place, [*known[place], token]] = -math.inf
    rests = inside.logsumexp(-1).exp().tolist()
    return [DrawnValues(*each) for each in zip(counts, drawn, rests, map(len, known), strict=True)]


def _raw(
    logits: Tensor, blocks: Sequence[Sequence[int]], columns: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Returns the log-probabilities of each block's tokens by the logits alone."""
    rows = [b for b, block in enumerate(blocks) for _ in block]
    places = [
        rows,
        [column for own in columns for column in own],
        [token for block in blocks for token in block],
    ]
    index = torch.tensor(places, dtype=torch.long, device=logits.device)
    at = max(1, _TOGETHER // logits.shape[-1]) if logits.device.type == "cpu" else max(1, len(rows))
    found: list[float] = []
    for row, column, token in index.split(at, dim=1) if rows else ():
        found += _log_softmax(logits[row, column]).gather(1, token[:, None]).squeeze(1).tolist()
    ends = list(accumulate(map(len, blocks)))
    return [found[end - len(block) : end] for end, block in zip(ends, blocks, strict=True)]


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _top(scores: Scores, row: Row, place: int, columns: Sequence[int]) -> list[TopLogprobs]:
    """Returns the most probable tokens at the columns of a row that asks for them.

    After processing there are fewer if fewer are possible.
    """
    n = row.request.top_logprobs
    if not n or not columns:
        return []
    probs = scores.of_row(place).p()[0, list(columns)]
    tops = [_pairs(_log_softmax(scores.logits[place, list(columns)]), n), _pairs(probs.log(), n)]
    return [TopLogprobs(before, after) for before, after in zip(*tops, strict=True)]


def _pairs(logprobs: Tensor, n: int) -> list[tuple[tuple[int, float], ...]]:
    top = logprobs.topk(n)
    return [
        tuple((token, value) for token, value in zip(ids, values, strict=True) if value > -math.inf)
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def commit(
    rows: Sequence[Row],
    tree: DraftTree,
    scores: Scores,
    verdict: Verdict,
    drafter: str,
    clock: Callable[[], float],
) -> list[Commit]:
    """Appends each row's accepted drafts and its replacement or bonus.

    A row that ends gets no tokens after the one that ends it. A row whose accepted path leads to a
    fault ends before the fault. The round ends when all rows have their tokens: that moment is the
    end of every row that ends in it.

    Args:
        rows: the rows.
        tree: the drafts of the round.
        scores: the target's scores of the drafts.
        verdict: the verdict of the rule.
        drafter: the name of the engine's drafter.
        clock: returns the time in seconds.
    """
    paths, following = verdict.lists
    blocks = [
        [*(draft[: len(path)] if isinstance(path, range) else map(draft.__getitem__, path)), last]
        for draft, path, last in zip(tree.drafts, paths, following, strict=True)
    ]
    failing = _reached(rows, paths, scores.faults) if scores.faults else {}
    for b, (depth, _) in failing.items():
        blocks[b] = blocks[b][:depth]
    columns = verdict.columns(blocks)
    # What is reported of the tokens may depend on those before them, so it is taken before any is
    # appended.
    reported = logprobs_of(rows, blocks, columns, scores, verdict)
    appended = []
    for b, (row, block) in enumerate(zip(rows, blocks, strict=True)):
        row.rounds += 1
        row.target_passes += 1
        names = [drafter] * len(tree.drafts[b]) if tree.drafters is None else tree.drafters[b]
        row.drafted += len(names)
        for name in set(names):
            row.drafted_by[name] = row.drafted_by.get(name, 0) + names.count(name)
        taken = _append(row, block, scores.logits.shape[-1])
        if b in failing and row.finish_reason is None:
            row.finish_reason, row.error = "error", failing[b][1]
        kept = min(len(paths[b]), taken)
        row.accepted += kept
        row.drafters += [names[node] for node in paths[b][:kept]] + [None] * (taken - kept)
        reported[b].add(row, taken)
        if row.request.keep_logits:
            row.logits += [scores.logits[b, column].clone() for column in columns[b][:taken]]
        appended.append((row, block[:taken], tree.drafts[b], names, paths[b][:kept]))
    now = clock()
    return [_commit(*each, now) for each in appended]


def commit_run(
    rows: Sequence[Row], run: PlainRun, vocab_size: int, clock: Callable[[], float]
) -> list[Commit]:
    """Appends the tokens of several plain rounds to each row, up to the one that ends it."""
    appended = []
    for row, tokens, raw, processed in zip(rows, run.tokens, run.raw, run.processed, strict=True):
        taken = _append(row, tokens, vocab_size)
        row.rounds += taken
        row.target_passes += taken
        row.drafters += [None] * taken
        Logprobs(raw, processed).add(row, taken)
        appended.append((row, tokens[:taken]))
    now = clock()
    return [_commit(row, tokens, (), (), (), now) for row, tokens in appended]


def _commit(
    row: Row,
    tokens: list[int],
    drafts: Sequence[int],
    drafters: Sequence[str],
    path: Sequence[int],
    now: float,
) -> Commit:
    """Returns the commit of a row.

    The sample is made before the text is taken: all text of a row is known once it has ended. The
    sample of a row that may begin again is made later (`shoal.engine.joint_rows`).
    """
    if row.request.distinct and row.finish_reason not in (None, "error"):
        row.held_at = now
    sample = finish(row, now) if row.finish_reason and row.held_at is None else None
    return Commit(
        row,
        tokens,
        len(path),
        text=visible_text(row, sample),
        sample=sample,
        drafts=drafts,
        drafters=drafters,
        path=path,
    )


def _reached(
    rows: Sequence[Row], paths: Sequence[Sequence[int]], faults: Faults
) -> dict[int, tuple[int, ShoalError]]:
    """Returns the first fault on each row's accepted path, by the row's index in the batch.

    A fault is given by its depth and its reason.
    """
    reached: dict[int, tuple[int, ShoalError]] = {}
    for b, row in enumerate(rows):
        columns = (0, *(node + 1 for node in paths[b])) if row in faults else ()
        for depth, column in enumerate(columns):
            if column in faults[row]:
                reached.setdefault(b, (depth, faults[row][column]))
    return reached


def _append(row: Row, block: Sequence[int], vocab_size: int) -> int:
    """Commits tokens until the row ends; returns their number.

    A row whose check or criterion fails ends with that token, "error".
    """
    left, request = row.remaining, row.request
    if not (row.needs_text or row.checks or row.constraints or request.criteria):
        taken = block[:left]
        if row.eos.isdisjoint(taken):
            row.tokens += taken
            row.finish_reason = "length" if len(taken) == left else None
            return len(taken)
    for count, token in enumerate(block, start=1):
        row.tokens.append(token)
        try:
            row.finish_reason = _end(row, token, vocab_size) or (
                "length" if count >= left else None
            )
        except RequestError as error:  # of a check or criterion that a user wrote
            row.finish_reason, row.error = "error", error
        if row.finish_reason:
            return count
    return len(block)


def _end(row: Row, token: int, vocab_size: int) -> str | None:
    """Returns the reason for which the row ends with this token; None if it does not end.

    The row's length is checked elsewhere.
    """
    if row.needs_text:
        row.detokenizer.push(token)
    if row.needs_text and row.detokenizer.stopped:
        return "stop"  # even if the token is an EOS as well: it is cut off with its text
    if token in row.eos:
        return "eos"
    if row.checks:
        row.checks = [(check, _after(check, state, token)) for check, state in row.checks]
    if row.constraints:
        masks.advance(row, token)
    if row.constraints and not row.eos and masks.is_complete(row, vocab_size):
        return "stop"
    if row.request.criteria and _criteria_met(row):
        return "stop"
    return None


def _after(check: Any, state: Any, token: int) -> Any:
    """Returns the state after a token that has passed.

    Raises:
        RequestError: the check fails, or now refuses the token.
    """
    try:
        after = check.after(state, token)
    except Exception as error:
        raise RequestError(f"check {type(check).__name__} failed: {error!r:.200}") from error
    if after is None:
        raise RequestError(
            f"check {type(check).__name__} let token {token} pass, and refused it when it was "
            f"asked again"
        )
    return after


def _criteria_met(row: Row) -> bool:
    """Returns True if a stopping criterion of the row says that it has ended.

    Raises:
        RequestError: a criterion fails.
    """
    ids = torch.tensor([row.tokens])
    for criterion in row.request.criteria:
        try:
            met = bool(torch.as_tensor(criterion(ids, None)).any())
        except Exception as error:
            raise RequestError(
                f"stopping criterion {name_of(criterion)} failed: {error!r:.200}"
            ) from error
        if met:
            return True
    return False
