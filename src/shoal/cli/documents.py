"""The results and samples as JSON objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shoal.cli.prompt_lines import PromptLine
from shoal.types.samples import Output, Result, Sample
from shoal.types.stats import as_dicts


def document(
    result: Result,
    asked: Sequence[PromptLine],
    sample: Callable[[Sample], dict[str, Any]],
    *,
    ranked: bool = False,
) -> dict[str, Any]:
    """Returns the JSON object of a result.

    Args:
        sample: makes the object of a sample.
        ranked: put samples with the best mean log-probability first.
    """
    prompts = []
    for output, one in zip(result, asked, strict=True):
        samples = [sample(each) for each in (output.ranked if ranked else output.samples)]
        prompts.append(
            {"prompt": one.text, "samples": samples}
            | ({} if one.id is None else {"id": one.id})
            | _worth(output)
        )
    return {"prompts": prompts, "stats": result.stats.to_dict()}


def _worth(output: Output) -> dict[str, Any]:
    """Returns the effective number and the log mass of weighted samples."""
    number, mass = output.effective_samples, output.log_mass
    return (
        {}
        if number is None or mass is None
        else {"effective_samples": number, "log_mass": _finite(mass)}
    )


def sample_document(
    sample: Sample, *, logprobs: bool = False, top_logprobs: bool = False
) -> dict[str, Any]:
    """Returns the JSON object of a sample.

    Args:
        logprobs: add the log-probabilities of its tokens.
        top_logprobs: add the log-probabilities of the most probable tokens.
    """
    entry: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "mean_logprob": _finite(sample.mean_logprob),
        "finish_reason": sample.finish_reason,
        "finished": sample.finished,
        "finished_at_s": sample.finished_at,
        "rounds": sample.rounds,
        "drafted": sample.drafted,
        "accepted": sample.accepted,
        "by_drafter": as_dicts(sample.by_drafter),
    }
    if sample.syntax is not None:
        entry["syntax"] = sample.syntax
    if sample.log_weight is not None:
        entry["log_weight"] = _finite(sample.log_weight)
    if sample.error:
        entry["error"] = sample.error
    if logprobs:
        entry["logprobs"] = [_finite(value) for value in sample.logprobs]
        entry["processed_logprobs"] = [_finite(value) for value in sample.processed_logprobs]
    if top_logprobs:
        entry["top_logprobs"] = [
            {"raw": _pairs(top.raw), "processed": _pairs(top.processed)}
            for top in sample.top_logprobs
        ]
    return entry


def _pairs(pairs: Sequence[tuple[int, float]]) -> list[list[int | float | None]]:
    return [[token, _finite(value)] for token, value in pairs]


def _finite(value: float) -> float | None:
    """Returns None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None
