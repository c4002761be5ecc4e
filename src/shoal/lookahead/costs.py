"""What a pass costs, learned from the passes that were made: seconds as a function of a size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class CostCurve:
    """A running estimate of seconds by size (positions of a target pass, rows of a drafter step).

    What was never tried is judged by its neighbours, and kindly beyond them, so that it gets tried: below the smallest size seen
    the cost falls in proportion, above the largest it stays. A pass never counts as dearer than a larger one. What was seen long
    ago is forgotten, so one disturbed measurement cannot rule a size out for good.

    Whatever disturbs a pass makes it slower: the first of its kind, a neighbour on the machine. So of the first two of a size the
    quicker one counts, and later none counts for more than double.
    """

    FADE, FORGOTTEN, TRUST = 0.997, 0.3, 8.0
    """Weight kept per observation of any size; weight below which a size is forgotten; most weight a size can have."""
    SHARE = 0.2
    """What a new observation counts for."""

    def __init__(self) -> None:
        self._points: dict[int, list[float]] = {}  # size -> [seconds, weight]

    def observe(self, size: int, seconds: float) -> None:
        """One pass of that size took that long."""
        for point in self._points.values():
            point[1] *= self.FADE
        self._points = {key: point for key, point in self._points.items() if point[1] >= self.FORGOTTEN}
        value, weight = self._points.setdefault(_rounded(size), [seconds, 0.0])
        if weight < 2:
            value = min(value, seconds)
        else:
            value += self.SHARE * (min(seconds, 2 * value) - value)
        self._points[_rounded(size)] = [value, min(weight + 1, self.TRUST)]

    @property
    def known(self) -> bool:
        """Anything was observed yet."""
        return bool(self._points)

    def table(self, largest: int) -> Array:
        """Seconds of every size 0..largest, [largest + 1]; never falling with the size."""
        sizes = sorted(self._points)
        seconds = np.array([self._points[size][0] for size in sizes])
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        return np.interp(np.arange(largest + 1), [0, *sizes], [0.0, *seconds])


def _rounded(size: int) -> int:
    """Sizes above 16 are kept to within about 6 %: a few dozen points in all."""
    return size if size <= 16 else round(2 ** (round(np.log2(size) * 12) / 12))
