"""The values that callers give: as Python's own, checked, and declared with a range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from shoal.errors import RequestError

_OWN = (type(None), bool, int, float, str, bytes)


def plain(value: Any) -> Any:
    """Returns the value in Python's own types.

    NumPy scalars and arrays, tensors and other objects with a `tolist` become numbers or nested
    lists; iterators (generators) become lists. Values inside lists, tuples and mappings are
    converted too. All other values are returned unchanged.
    """
    if type(value) in _OWN:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Iterator):
        value = list(value)
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def require(ok: bool, name: str, expected: str, got: object) -> None:
    """Raises RequestError unless `ok`."""
    if not ok:
        raise RequestError(f"{name} must be {expected}, got {got!r}")


def is_int(value: object) -> bool:
    """Returns True for an integer that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_list(value: object) -> bool:
    """Returns True for a sequence that is no text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def is_number(value: object) -> bool:
    """Returns True for a finite number that is no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


MOST_SAMPLES = 1_000_000
"""The most samples of a prompt: each takes some 3 kB before it begins."""


def require_samples(n: object, name: str = "n") -> None:
    """Checks a number of samples of a prompt. Raises RequestError: it is none, or too large."""
    require(
        is_int(n) and 1 <= n <= MOST_SAMPLES,  # type: ignore[operator]
        name,
        f"an integer in [1, {MOST_SAMPLES}]",
        n,
    )


def require_bytes(name: str, value: object) -> int:
    """Returns the number of bytes. Raises RequestError if the value is none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RequestError(f"{name} must be a number of bytes, 0 for none, got {value!r}")
    return value


def take_plain(options: Any, *names: str) -> None:
    """Converts the named fields, or all fields, to Python's numbers and lists (see `plain`)."""
    for name in names or [f.name for f in fields(options)]:
        object.__setattr__(options, name, plain(getattr(options, name)))


def require_text(text: str, name: str) -> None:
    """Checks that a tokenizer can read the text.

    Raises:
        RequestError: the text is empty, or holds half of a surrogate pair: bytes that were no
            UTF-8, or an escape cut in two.
    """
    if not text:
        raise RequestError(f"{name} is empty: at least one token is needed")
    half = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
    if half is not None:
        raise RequestError(
            f"{name} is not text: U+{ord(text[half]):04X} at position {half} stands for no "
            f"character"
        )


@dataclass(frozen=True)
class Parameter:
    """The declaration of a number that changes how tokens are chosen.

    Attributes:
        help: a sentence, for the help of commands and the description of requests.
        least: the smallest value; None = none.
        above: the value that has to be exceeded; None = none.
        most: the largest value; None = none.
        whole: True for integers.
        api: the name in requests of a server; "" = they have no such field.
        off: a further value in requests that stands for the default; None = none.
    """

    help: str
    least: int | None = None
    above: int | None = None
    most: int | None = None
    whole: bool = False
    api: str = ""
    off: int | None = None

    @property
    def range(self) -> str:
        """The possible values, in words."""
        if self.most is not None:
            return (
                f"in {'[' if self.above is None else '('}{self.least or self.above or 0}, "
                f"{self.most}]"
            )
        bound = f"> {self.above}" if self.least is None else f">= {self.least}"
        if self.least is None and self.above is None:
            return "a finite number"
        return f"an integer {bound}" if self.whole else bound

    def allows(self, value: object) -> bool:
        """Returns True for a number in range."""
        if not (is_int(value) if self.whole else is_number(value)):
            return False
        number: Any = value
        low = (self.least is None or number >= self.least) and (
            self.above is None or number > self.above
        )
        return low and (self.most is None or number <= self.most)


def declared(default: float, help: str, **declaration: Any) -> Any:
    """Returns a field of a dataclass with the declaration of a parameter."""
    return field(default=default, metadata={"parameter": Parameter(help, **declaration)})
