"""The options that a chat passes to `Shoal.stream` beside its messages, as /set changes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.cli.options import parse_lookahead
from shoal.cli.prompt_lines import OPTIONS, with_ends
from shoal.errors import RequestError
from shoal.types.options import split_options

SHORT = {"max_tokens": "max_new_tokens"}
"""The other names of options."""
NAMES = ("n", *(name for name in OPTIONS if name != "logit_bias"), "lookahead", "rule")
"""The names of the options that /set changes."""


class ChatSettings:
    """The candidates per message, and the options of `Shoal.stream`.

    Args:
        options: the options of the command line.
        ends: stop strings beside these, see `with_ends`.

    Raises:
        RequestError: an option is out of range.
    """

    def __init__(self, n: int, options: Mapping[str, Any], ends: Sequence[str] = ()) -> None:
        self.values: dict[str, Any] = {"n": n, **options}
        self._ends, self._first = tuple(ends), dict(self.values)
        split_options(options)

    @property
    def n(self) -> int:
        """The number of candidates of a message."""
        return int(self.values["n"])

    def asked(self, attempt: int) -> dict[str, Any]:
        """Returns the options of `Shoal.stream`.

        With a seed, each later attempt at a message has the next seed, so that it differs.
        """
        options = with_ends(
            {name: value for name, value in self.values.items() if name != "n"}, self._ends
        )
        if options.get("seed") is not None:
            options["seed"] += attempt
        return options

    def set(self, name: str, text: str) -> str:
        """Changes an option, and returns its name.

        The text is a value as JSON writes it, a text, or "default" for the command line's value.

        Raises:
            RequestError: the name is unknown, or the value out of range.
        """
        name = SHORT.get(name.replace("-", "_"), name.replace("-", "_"))
        if name not in NAMES:
            raise RequestError(f"there is no option {name!r}; there are {', '.join(NAMES)}")
        values = {**self.values}
        if text == "default":
            values.pop(name, None)
            values |= {name: self._first[name]} if name in self._first else {}
        else:
            values[name] = parse_lookahead(text) if name == "lookahead" else _value(text)
        if not isinstance(values["n"], int) or isinstance(values["n"], bool) or values["n"] < 1:
            raise RequestError(f"n must be an integer >= 1, got {values['n']!r}")
        split_options(
            {name: value for name, value in values.items() if name not in ("n", "bad_words")}
        )
        self.values = values
        return name


def _value(text: str) -> Any:
    """Reads the value of an option: a number, a list or a text."""
    if text == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
