"""The registry of drafters: the name of each, its options with bounds, and the place of its class.

The parser (`shoal.drafting.draft`), the help of commands and the errors come from this table. A
package registers its own drafter by an entry point of the group `shoal.drafters` that is a
`DrafterKind`. Torch is not imported here, so a wrong command line is refused at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from shoal.config import MOST_NODES
from shoal.errors import RequestError

GROUP = "shoal.drafters"
SCOPES = ("row", "group", "engine")
TREES = ("rsd-c", "rsd-s", "dyspec", "k-seq", "auto")
SINKS = 4
"""The number of first tokens that attention needs in any text (StreamingLLM, section 3.1)."""
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
        in_sums: True if it may be a part of a sum: the last one if it has a directory or reads
            states, else one before.
        reads_states: True for heads in the target's own checkpoint, which need no directory.
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
    reads_states: bool = False
    recognise: Callable[[Path], bool] | None = None
    about: str = ""
    example: str = ""
    title: str = ""

    @property
    def reads_text(self) -> bool:
        """True for a drafter that may be a part of a sum before the last one."""
        return self.in_sums and not self.directory and not self.reads_states

    @property
    def as_written(self) -> str:
        """The name, and a place for the directory."""
        return f"{self.name}:DIR" if self.directory else self.name

    def _sample(self) -> str:
        defaults = spelled({key: option.default for key, option in self.options.items()})
        return self.example or f"{self.as_written}{',' if self.directory else ':'}{defaults}"

    def made(self) -> Any:
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


_kinds: dict[str, DrafterKind] = {}


def kind_of_heads(directory: object) -> DrafterKind | None:
    """Returns the drafter whose heads a directory holds; None if it holds none."""
    if not isinstance(directory, str | Path):
        return None
    place = Path(directory)
    return next((k for k in kinds() if k.recognise is not None and k.recognise(place)), None)


def register(kind: DrafterKind) -> DrafterKind:
    """Adds a drafter to the named ones.

    Raises:
        RequestError: another drafter has the name.
    """
    if _kinds.setdefault(kind.name, kind) is not kind:
        raise RequestError(f"there is a drafter {kind.name!r} already: give another name")
    return kind


@cache
def _entries() -> dict[str, Any]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def kind_of(name: str) -> DrafterKind | None:
    """Returns the drafter of a name: shoal's own, or that of an installed package.

    Raises:
        RequestError: the entry point of a package cannot be loaded, or is no `DrafterKind`.
    """
    if name not in _kinds and name in _entries():
        try:
            kind = _entries()[name].load()
        except Exception as error:
            raise RequestError(f"the drafter {name!r} cannot be loaded: {error!r:.200}") from error
        if not isinstance(kind, DrafterKind) or kind.name != name:
            raise RequestError(f"the entry point {GROUP}.{name} is no DrafterKind of that name")
        register(kind)
    return _kinds.get(name)


def names() -> list[str]:
    """Returns the names of all drafters, shoal's own first."""
    return [*_kinds, *(name for name in _entries() if name not in _kinds)]


def kinds() -> list[DrafterKind]:
    """Returns the drafters that are registered in this process, shoal's own first."""
    return list(_kinds.values())


# ── shoal's own ─────────────────────────────────────────────────────────────────────────────────


def _settled_ngram(options: Options) -> Options:
    if options["min"] > options["max"]:
        raise RequestError(f"ngram needs min <= max, got ngram:{spelled(options)}")
    return options


def _settled_self(options: Options) -> Options:
    if options["int4"] and without_blanks(options) != {"int4": True}:
        raise RequestError(f"self:int4 has all layers and sees all tokens: {SELF_EXAMPLE}")
    if options["window"] == 0:
        raise RequestError("self needs a window of at least 1 token, got window=0")
    if options["window"] is None and options["sinks"] is not None:
        raise RequestError(
            f"self sees all tokens without a window: leave out sinks, or give {SELF_EXAMPLE}"
        )
    if options["window"] is not None and options["sinks"] is None:
        options = options | {"sinks": SINKS}
    return without_blanks(options)


def _settled_trees(options: Options) -> Options:
    """Returns the options of trees that are drawn from a model's q; none for chains."""
    tree, width, nodes = options["tree"], options["width"], options["nodes"]
    if not tree:
        return {}
    if tree not in TREES:
        raise RequestError(f"tree must be one of {', '.join(TREES)}, got {tree!r}")
    wide = tree not in ("dyspec", "auto")
    if width and not wide:
        raise RequestError(
            f"tree={tree} takes no width: give nodes alone, as in tree={tree},nodes=16"
        )
    settled = {"tree": tree, **({"width": width or 2} if wide else {}), "nodes": nodes}
    if not (width or 2) <= nodes <= MOST_NODES:
        got = MODEL.spelled(settled)
        raise RequestError(
            f"a draft tree has at most {MOST_NODES} nodes and at least its width, got {got}"
        )
    return settled


def _settled_heads(example: str, options: Options) -> Options:
    if options["tree"] == "auto":
        name = example.partition(":")[0]
        raise RequestError(
            f"{name} takes trees of one shape, as in {example}tree=rsd-s: tree=auto is for "
            f"draft models"
        )
    return _settled_trees(options)


def _settled_ppd(options: Options) -> Options:
    return {key: value for key, value in options.items() if value}


def _holds(pattern: str, directory: Path) -> bool:
    return any(directory.glob(pattern))


def _entry(directory: Path, name: str) -> str:
    """Returns an entry of the directory's config.json in words; "" without one."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return str(config.get(name) or "")
    except (OSError, ValueError, AttributeError):
        return ""


def _is_medusa(directory: Path) -> bool:
    return _holds("medusa_lm_head.*", directory) or bool(_entry(directory, "medusa_num_heads"))


def _is_eagle3(directory: Path) -> bool:
    """Returns True for EAGLE-3 heads, and for all heads in the form of the package speculators."""
    named = "eagle3" in _entry(directory, "architectures").lower()
    return named or bool(_entry(directory, "speculators_model_type"))


_NODES = Number(16, 0, MOST_NODES)
_TREES: dict[str, Option] = {"tree": Word(""), "width": Number(0), "nodes": Number(16)}
_TABLE: dict[str, Option] = {
    "scope": Word("group", SCOPES),
    "k": Number(8, 1, MOST_NODES),
    "nodes": Number(8, 0, MOST_NODES),
}
SELF_EXAMPLE = "self:exit=6, self:int4 or self:window=256,sinks=4"
MODEL = DrafterKind(
    "model",
    "shoal.drafting.tree_model:tree_drafter",
    _TREES,
    _settled_trees,
    example="DIR:tree=rsd-s,width=2,nodes=16",
    title="a draft model",
)
"""A draft model, which is named by its Hub id or directory in the place of `model`."""
OWN = (
    DrafterKind(
        "ngram",
        "shoal.drafting.ngram:NGramDrafter",
        {"min": Number(2, 1, 16), "max": Number(4, 1, 16)},
        _settled_ngram,
        in_sums=True,
    ),
    DrafterKind(
        "suffix",
        "shoal.drafting.suffix:SuffixDrafter",
        {
            "scope": Word("group", SCOPES),
            "min": Number(1, 1),
            "nodes": Number(0, 0, MOST_NODES),
            "limit": Number(1 << 16, 64),
            "index": File("`shoal index --output FILE` makes one"),
            "answers": File(),
        },
        in_sums=True,
    ),
    DrafterKind("recycling", "shoal.drafting.recycling:RecyclingDrafter", _TABLE, in_sums=True),
    DrafterKind(
        "trigrams",
        "shoal.drafting.trigrams:TrigramDrafter",
        {**_TABLE, "limit": Number(1 << 15, 64), "playouts": Number(0, 0, 1024)},
        in_sums=True,
    ),
    DrafterKind(
        "self",
        "shoal.drafting.reduced_cache:self_drafter",
        {"exit": Number(None), "window": Number(None), "sinks": Number(None), "int4": Flag()},
        _settled_self,
        about="the target's own first layers, or its copy in 4 bits",
        example=SELF_EXAMPLE,
    ),
    DrafterKind(
        "medusa",
        "shoal.drafting.medusa:MedusaDrafter",
        {"nodes": _NODES},
        in_sums=True,
        directory="`shoal train medusa` makes such a directory",
        recognise=_is_medusa,
    ),
    DrafterKind(
        "eagle3",
        "shoal.drafting.eagle3:Eagle3Drafter",
        {**_TREES, "nodes": _NODES},
        partial(_settled_heads, "eagle3:DIR,"),
        in_sums=True,
        directory="`shoal train eagle3` makes such a directory",
        recognise=_is_eagle3,
    ),
    DrafterKind(
        "mtp",
        "shoal.drafting.mtp:MtpDrafter",
        {**_TREES, "nodes": _NODES},
        partial(_settled_heads, "mtp:"),
        in_sums=True,
        reads_states=True,
        about="the layer in the target's checkpoint that predicts further tokens",
        example="mtp or mtp:tree=rsd-s,width=2,nodes=16",
    ),
    DrafterKind(
        "ppd",
        "shoal.drafting.ppd:PpdDrafter",
        {"nodes": Number(0, 0, MOST_NODES)},
        _settled_ppd,
        directory="`shoal train ppd` makes such a directory",
        recognise=partial(_holds, "prompt_tokens.*"),
    ),
)
"""The drafters of shoal; torch is imported with the class of one."""
for _kind in OWN:
    register(_kind)
SUFFIX, MTP = _kinds["suffix"], _kinds["mtp"]
