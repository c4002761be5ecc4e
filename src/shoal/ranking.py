"""Which sample to show first."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shoal.request import Sample


def ranked(samples: Iterable[Sample]) -> list[Sample]:
    """Best first: finished before unfinished, then by mean log-probability per token (BASS, mean-logP); an empty
    sample, whose mean is NaN, comes last of its kind. Ties keep row order."""

    def key(sample: Sample) -> tuple[bool, float]:
        mean = sample.mean_logprob
        return (not sample.finished, math.inf if math.isnan(mean) else -mean)

    return sorted(samples, key=key)
