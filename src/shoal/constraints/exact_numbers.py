"""Numbers and depths of a JSON schema that the grammar library would misread, or would not survive.

The library computes with doubles and 64-bit integers: 725653563933458431 becomes ...432, and the
constant -2^63 ends the process. It reads documents of some 120 levels.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from shoal.errors import RequestError

EXACT = 2**53
"""The largest number up to which all integers are doubles."""
LARGEST = 2**63 - 1024
"""The largest double that is a 64-bit integer."""
MOST_LEVELS = 120
"""The most levels of arrays and objects in a schema."""
BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""The keywords that bound numbers, and the direction of the numbers that they leave."""


def require_levels(root: Any) -> None:
    """Raises RequestError: a document has more levels than can be read."""
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > MOST_LEVELS + 1:
            raise too_deep()
        level = [one for whole in level for one in _parts(whole)]


def too_deep() -> RequestError:
    """Returns the error for a document of too many levels."""
    return RequestError(
        f"the json_schema grammar cannot be used: it is nested more than {MOST_LEVELS} levels "
        f"deep; "
        "define parts of it in $defs and refer to them by $ref"
    )


def require_exact(value: Any) -> None:
    """Raises RequestError: a constant holds an integer that would come out as another one."""
    parts = [value]
    while parts:
        one = parts.pop()
        parts += _parts(one)
        if isinstance(one, int) and _written(one) != one:
            raise RequestError(
                f"the json_schema grammar cannot be used: {one} in const or enum has more than "
                f"53 bits and "
                "would come out as another number; give it as a string, or leave it out"
            )


def _written(number: int) -> int | None:
    """Returns the integer that the grammar library writes for this one; None beyond all doubles."""
    if abs(number) <= EXACT:
        return number
    try:
        double = float(number)
    except OverflowError:
        return None
    return int(double) if abs(number) <= LARGEST else int(Decimal(repr(double)))


def inward(keyword: str, bound: Any) -> Any:
    """Returns a bound of numbers, rounded so that it still excludes all numbers that it excluded.

    Args:
        keyword: one of `BOUNDS`.
    """
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or abs(bound) <= EXACT:
        return bound
    way = BOUNDS[keyword]
    if abs(bound) > LARGEST:
        clamped = LARGEST if bound > 0 else -LARGEST
        # -1e30 as a minimum excludes no number that the grammar writes.
        return clamped if clamped * way < 0 else bound
    if isinstance(bound, float):
        return bound
    rounded = float(bound)
    outside = (int(rounded) - bound) * way < 0
    return int(math.nextafter(rounded, way * math.inf) if outside else rounded)


def _parts(whole: Any) -> list[Any]:
    if isinstance(whole, dict):
        return list(whole.values())
    return whole if isinstance(whole, list) else []
