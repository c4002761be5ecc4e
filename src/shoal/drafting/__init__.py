"""The Drafter protocol and every drafter; here the kinds of drafters, which `registry` lists.

A drafter sees rows and uniforms, never the engine or the target; it keeps its own state. A
`DrafterKind` is a name with its options, their bounds, and the place of its class. It reads options
as users write them, and writes them again. Torch is not imported here, so a wrong command line is
refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.errors import RequestError

Options = dict[str, Any]


@dataclass(frozen=True)
class Number:
    """A whole number.

    Attributes:
        default: the value without the option; None = no value.
        least: the smallest value.
        most: the largest value; None = any.
    """

    default: int | None
    least: int = 0
    most: int | None = None

    def bounds(self, key: str) -> str:
        """Returns the bounds in words; "" if there are none."""
        if self.most is not None:
            return f"{key} in {self.least}..{self.most}"
        return f"{key} >= {self.least}" if self.least else ""

    def allows(self, value: int | None) -> bool:
        """Returns False if the value is out of bounds."""
        return value is None or (self.least <= value and (self.most is None or value <= self.most))


@dataclass(frozen=True)
class Word:
    """A word.

    Attributes:
        default: the value without the option.
        words: the possible values; empty = any, or those that `DrafterKind.settle` allows.
    """

    default: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class File:
    """A file; "" = none.

    Attributes:
        hint: how users make it; "" = the drafter makes it, in a directory that exists.
    """

    hint: str = ""
    default: str = ""

    def require(self, key: str, path: str) -> None:
        """Raises RequestError if there is no such file, or no directory for it."""
        if self.hint and not Path(path).is_file():
            raise RequestError(f"there is no {key} {path!r}: {self.hint}")
        if not Path(path).parent.is_dir():
            raise RequestError(f"cannot keep {key} in {path!r}: there is no such directory")


@dataclass(frozen=True)
class Flag:
    """A word that stands without a value."""

    default: bool | None = None


Option = Number | Word | File | Flag


def without_blanks(options: Options) -> Options:
    """Returns the options that have a value."""
    return {key: value for key, value in options.items() if value not in ("", None)}


def spelled(options: Options) -> str:
    """Returns the options that have a value, as in a spec."""
    given = without_blanks(options).items()
    return ",".join(key if value is True else f"{key}={value}" for key, value in given)


@dataclass(frozen=True)
class DrafterKind:
    """A drafter that has a name.

    Attributes:
        name: the first word of a spec.
        maker: "module:class". `Drafter.for_target` of the class makes a drafter for an engine. A
            function in the place of the class is called likewise, with the target and options.
        options: the options of a spec by name.
        settle: raises RequestError if options do not fit together; returns the options for the
            maker.
        directory: the way to get the directory that has to follow the name; "" = none follows.
        in_sums: True if it may be a part of a sum: the last one if it has a directory or is in
            the target, else one before, which has to be a `shoal.drafting.text.TextDrafter`.
        in_target: True for drafters that are a part of the target, which need no directory.
        recognise: returns True if a directory holds such heads: it needs no name before it.
        about: the purpose, in the help of `--draft`.
        example: a spec, for errors; "" = one with the default of each option.
        title: the drafter in errors; "" = its name.
    """

    name: str
    maker: str
    options: Mapping[str, Option] = field(default_factory=dict)
    settle: Callable[[Options], Options] = without_blanks
    directory: str = ""
    in_sums: bool = False
    in_target: bool = False
    recognise: Callable[[Path], bool] | None = None
    about: str = ""
    example: str = ""
    title: str = ""

    @property
    def reads_text(self) -> bool:
        """True for a drafter that may be a part of a sum before the last one."""
        return self.in_sums and not self.directory and not self.in_target

    @property
    def as_written(self) -> str:
        """The name, and a place for the directory."""
        return f"{self.name}:DIR" if self.directory else self.name

    def _sample(self) -> str:
        defaults = spelled({key: option.default for key, option in self.options.items()})
        return self.example or f"{self.as_written}{',' if self.directory else ':'}{defaults}"

    def load_maker(self) -> Any:
        """Imports the class or function that makes drafters."""
        module, _, name = self.maker.partition(":")
        return getattr(import_module(module), name)

    def spelled(self, options: Options) -> str:
        """Returns the name with options, as a spec without a directory."""
        words = spelled(options)
        return f"{self.name}:{words}" if words else self.name

    def read(self, text: str | None) -> Options:
        """Reads `key=value,key=value`; None = defaults.

        Raises:
            RequestError: an unknown option, a value out of bounds, or a file that is not there.
        """
        title, given = self.title or self.name, Options()
        for part in [] if text is None else text.split(","):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key not in self.options:
                options = ", ".join(self.options) or "none"
                raise RequestError(
                    f"{title} has no option {key!r}: it has {options}, as in {self._sample()}"
                )
            if isinstance(self.options[key], Flag):
                if equals:
                    raise RequestError(
                        f"{title} takes {key} without a value, as in {self._sample()}"
                    )
                given[key] = True
                continue
            if not equals or not value or key in given:
                raise RequestError(f"{title} needs one value for {key}, as in {self._sample()}")
            number = isinstance(self.options[key], Number)
            if number and not value.isdecimal():
                raise RequestError(f"{title} needs a whole number for {key}, got {value!r}")
            given[key] = int(value) if number else value
        values: Options = {key: given.get(key, one.default) for key, one in self.options.items()}
        self._require_values(title, values)
        return self.settle(values)

    def _require_values(self, title: str, values: Options) -> None:
        for key, option in self.options.items():
            if isinstance(option, Word) and option.words and values[key] not in option.words:
                raise RequestError(
                    f"{title} needs a {key} of {', '.join(option.words)}, got {values[key]!r}"
                )
        numbers = {key: one for key, one in self.options.items() if isinstance(one, Number)}
        if not all(option.allows(values[key]) for key, option in numbers.items()):
            bounds = {
                key: bound for key, option in numbers.items() if (bound := option.bounds(key))
            }
            *others, last = bounds.values()
            words = f"{', '.join(others)} and {last}" if others else last
            got = self.spelled(values) if others else values[next(iter(bounds))]
            raise RequestError(f"{title} needs {words}, got {got}")
        for key, option in self.options.items():
            if isinstance(option, File) and values[key]:
                option.require(key, values[key])

    def require_directory(self, directory: str) -> None:
        """Raises RequestError if the directory holds no heads, or is not named."""
        if not directory:
            raise RequestError(
                f"{self.name} needs the directory of its heads, as in {self.as_written} or "
                f"{self._sample()}"
            )
        if not (Path(directory) / "config.json").is_file():
            raise RequestError(
                f"no heads in {directory!r}: expected its config.json; {self.directory}"
            )
