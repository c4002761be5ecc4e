"""The acceptance rules, which choose the drafts to keep: pure functions on tensors.

`Rejection` verifies by q, chains and trees. Glossary, used in every module, log line and figure:

    p               the target's declared distribution at a position, after all of the row's
                    sampling controls
    q               the drafter's distribution the draft token was really drawn from
    draft           a token proposed for a position
    accepted        a draft token that is kept
    replacement     the token drawn from norm(max(p - q, 0)) at the first rejected position
    bonus           the token drawn from p after all drafts of the row were accepted (with no
                    drafts: plain decoding)
    committed       part of the row for good: the accepted drafts, then one replacement or bonus

Every rule commits tokens that have exactly the distribution of tokens drawn from p one by one,
except `Typical`. That rule is lossy, says so by `lossy`, and is never chosen unless it is named. A
greedy row's p is one-hot: its argmax is accepted, and any other token is replaced by it.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.sampling.acceptance.one_sample import (
    ChainRule,
    Coupled,
    Rule,
    Typical,
    accepted_lengths,
    by_samples,
    decides_chains,
    exact_match,
)
from shoal.sampling.acceptance.rejection import (
    Rejection,
    acceptance_mask,
    by_rejection,
    reject_and_replace,
    rejection_by_tensors,
    residual,
)

RULES: dict[str, Callable[[], Rule]] = {
    "rejection": Rejection,
    "coupled": Coupled,
    "typical": Typical,
}

__all__ = [
    "RULES",
    "ChainRule",
    "Coupled",
    "Rejection",
    "Rule",
    "Typical",
    "acceptance_mask",
    "accepted_lengths",
    "by_rejection",
    "by_samples",
    "decides_chains",
    "exact_match",
    "reject_and_replace",
    "rejection_by_tensors",
    "residual",
]
