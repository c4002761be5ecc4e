"""The rows' checks, which see the tokens of a round before they are committed.

If a check refuses a token, another token is drawn in its place, and the rest of the path is given
up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import RequestError
from shoal.sampling.controls import control_all
from shoal.sampling.distributions import Scores
from shoal.sampling.drawing import Following, Phantoms, awrs, draw
from shoal.sampling.uniforms import Purpose, uniforms
from shoal.types.requests import Row
from shoal.types.trees import DraftTree, Verdict

States = list[tuple[Any, Any]]


def apply_checks(tree: DraftTree, scores: Scores, verdict: Verdict) -> Verdict:
    """Returns the verdict after the rows' checks.

    A row's path is cut before the first token that a check of the row refuses. Another token, which
    all checks pass, takes the place of that token. The tokens are distributed as in
    `shoal.constraints.protocol`. If no token passes, the column counts as a fault of the row.
    """
    rows = scores.positions.rows
    if not any(map(attrgetter("checks"), rows)):
        return verdict
    paths, following = verdict.lists
    accepted, token, probs = verdict.accepted.clone(), verdict.token.clone(), verdict.probs.clone()
    weights: dict[int, list[float]] = {}
    changed = False
    for b, row in enumerate(rows):
        if not row.checks:
            continue
        columns = [0, *(node + 1 for node in paths[b])]
        path = [*(tree.drafts[b][node] for node in paths[b]), following[b]]
        refusals = _first_refusal(row, path, columns, scores)
        if row.request.weighted:
            weights[b] = _weights(
                scores, b, path if refusals is None else path[: refusals[0]], columns
            )
        if refusals is None:
            continue
        depth, states = refusals
        try:
            other, probability, weight = _draw_passing_token(
                scores, b, columns[depth], len(row.tokens) + depth, states, path[depth]
            )
        except Exception as error:
            _fail(scores, row, columns[depth], error)
            continue
        accepted[b], token[b], probs[b, depth], changed = depth, other, probability, True
        if row.request.weighted:
            weights[b].append(math.log(weight) if weight else -math.inf)
    if changed:
        verdict = replace(verdict, accepted=accepted, token=token, probs=probs, raw_logprobs=None)
    return replace(verdict, check_weights=weights) if weights else verdict


def _first_refusal(
    row: Row, path: Sequence[int], columns: Sequence[int], scores: Scores
) -> tuple[int, States] | None:
    """Returns the depth of the first token refused, and the states before it.

    Returns None if no token is refused, or if a fault comes first.
    """
    states, faults = row.checks, scores.faults.get(row, {})
    for depth, (token, column) in enumerate(zip(path, columns, strict=True)):
        if column in faults:
            return None
        try:
            if not _passes(row, states, token):
                return depth, states
            if token in row.eos:
                return None
            states = [(check, check.after(state, token)) for check, state in states]
        except Exception as error:  # of a check that a user wrote
            _fail(scores, row, column, error)
            return None
    return None


def _fail(scores: Scores, row: Row, column: int, error: Exception) -> None:
    """Marks a fault that ends the row before this column's token; the other rows go on."""
    reason = (
        error
        if isinstance(error, RequestError)
        else RequestError(f"a check of the request failed: {error!r:.200}")
    )
    scores.faults.setdefault(row, {})[column] = reason


def _passes(row: Row, states: States, token: int) -> bool:
    if token in row.eos:
        return all(check.may_end(state) for check, state in states)
    return all(check.after(state, token) is not None for check, state in states)


def _weights(scores: Scores, b: int, path: Sequence[int], columns: Sequence[int]) -> list[float]:
    """Returns the natural logs of the weights of the tokens.

    Each of them passes its checks, and is the first token drawn at its place.
    """
    row, weights = scores.positions.rows[b], []
    states, start = row.checks, len(row.tokens)
    for depth, token in enumerate(path):
        try:
            p = _p(scores, b, columns[depth])
            _, weight = awrs(
                p, token, partial(_passes, row, states), *_draws(row.seed, start + depth)
            )
            weights.append(math.log(weight))
            if token in row.eos:
                break
            states = [(check, check.after(state, token)) for check, state in states]
        except Exception as error:  # of a check that a user wrote
            _fail(scores, row, columns[depth], error)
            break
    return weights


def _p(scores: Scores, b: int, column: int) -> Tensor:
    return scores.of_row(b).p()[0, column].double().cpu()


def _draws(seed: int, position: int) -> tuple[Following, Phantoms]:
    """Returns the functions of further draws at a position; each has a uniform of its own."""
    turns = count()

    def number() -> float:
        return float(uniforms(seed, position, np.array(Purpose.CHECK + next(turns))))

    def following(left: Tensor) -> int:
        return int(draw(left[None], torch.tensor([number()], dtype=torch.float64)))

    def phantoms(mass: float) -> int:
        return int(math.log1p(-number()) / math.log(mass)) if 0 < mass < 1 else 0

    return following, phantoms


def _draw_passing_token(
    scores: Scores, b: int, column: int, position: int, states: States, first: int
) -> tuple[int, float, float]:
    """Draws a token that passes; returns it, its probability under p, and its weight.

    See `shoal.sampling.drawing`. If no token with positive p passes, the token of the highest score
    that passes is taken, with weight 0.
    """
    row = scores.positions.rows[b]

    def passes(token: int) -> bool:
        return _passes(row, states, token)

    token, weight = None, 0.0
    p = _p(scores, b, column)
    if not row.request.sampling.greedy:
        token, weight = awrs(
            p, first, passes, *_draws(row.seed, position), weighs=row.request.weighted
        )
    if token is None:
        own = scores.of_row(b)
        token = _by_score(control_all(own.logits, own.positions, {})[0, column], passes)
    if token is None:
        names = ", ".join(type(check).__name__ for check, _ in states)
        error = RequestError(
            f"no token passes the checks of the request, {names}: what has been written cannot "
            f"be completed"
        )
        scores.faults.setdefault(row, {})[column] = error
        return first, 1.0, 0.0
    return token, float(p[token]), weight


def _by_score(scores: Tensor, passes: Callable[[int], bool]) -> int | None:
    """Returns the token of the highest score that passes."""
    order = scores.argsort(descending=True, stable=True)
    possible = order[scores[order].isfinite()].tolist()
    return next((token for token in possible if passes(token)), None)
