"""Drafters that need no model, by their names: what `draft="ngram:min=2"` and `--draft ngram` mean.

A text is that of a drafter if its first word, up to a colon, is in `DRAFTINGS`, of a sum if a plus and a model's name follow
(`suffix+DIR`), of trained heads if it is in `HEADS` (`medusa:DIR`), of a model that drafts trees if `:tree=` stands in it; every
other text names a model. Torch is not imported, so that a command line is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.drafting.model_trees import MOST_NODES, ModelTrees
from shoal.drafting.trained import HEADS
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.drafting.protocol import Drafter
    from shoal.models.runner import Runner


SCOPES = ("row", "group", "engine")


class Drafting(Protocol):
    """Makes the drafters of a pair: one for each engine.

    Attributes:
        name: as users write it.
    """

    @property
    def name(self) -> str: ...

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        """A drafter for one engine of the target. model: that of the pair's draft model, for a sum."""
        ...


@dataclass(frozen=True)
class NGram:
    """The last `max` to `min` tokens of a row are looked up in the row itself: what followed them last time is proposed.

    Raises:
        RequestError: the lengths are not 1 <= min <= max <= 16.
    """

    min: int = 2
    max: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max <= 16:
            raise RequestError(f"ngram needs 1 <= min <= max <= 16, got min={self.min}, max={self.max}")

    @property
    def name(self) -> str:
        return spelled(self)

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        from shoal.drafting.ngram import NGramDrafter

        return NGramDrafter(self.min, self.max)


@dataclass(frozen=True)
class Suffix:
    """The longest end of a row that stands elsewhere too is looked up, and what followed it there most often is proposed.

    Attributes:
        scope: where it is looked up: row, group (the rows of the same request) or engine (earlier answers to whomever, too).
        min: tokens that must match. nodes: of a draft tree; 0 = chains. limit: tokens of a table; see `SuffixDrafter`.

    Raises:
        RequestError: another scope, more than 63 nodes, or a number that is too small.
    """

    scope: str = "group"
    min: int = 1
    nodes: int = 0
    limit: int = 1 << 16

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise RequestError(f"suffix needs a scope of {', '.join(SCOPES)}, got {self.scope!r}")
        if self.min < 1 or not 0 <= self.nodes <= MOST_NODES or self.limit < 64:
            raise RequestError(f"suffix needs min >= 1, nodes in 0..{MOST_NODES} and limit >= 64, got {self.name}")

    @property
    def name(self) -> str:
        return spelled(self)

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        from shoal.drafting.suffix import SuffixDrafter

        return SuffixDrafter(self.scope, self.min, self.nodes, self.limit)


@dataclass(frozen=True)
class Recycling:
    """Tokens that the target found most probable after a token are proposed when that token comes again.

    Attributes:
        scope: whose tokens share a table: row, group (the rows of the same request) or engine (all rows).
        k: successors of a token. nodes: of a draft tree; 0 = chains, also for a target that takes no trees.

    Raises:
        RequestError: another scope, k or nodes.
    """

    scope: str = "group"
    k: int = 8
    nodes: int = 8

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise RequestError(f"recycling needs a scope of {', '.join(SCOPES)}, got {self.scope!r}")
        if not 1 <= self.k <= MOST_NODES or not 0 <= self.nodes <= MOST_NODES:
            raise RequestError(f"recycling needs k in 1..{MOST_NODES} and nodes in 0..{MOST_NODES}, got {self.name}")

    @property
    def name(self) -> str:
        return spelled(self)

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        from shoal.drafting.recycling import RecyclingDrafter

        return RecyclingDrafter(self.scope, self.k, self.nodes if target.takes_trees else 0)


DRAFTINGS: dict[str, type[Any]] = {"ngram": NGram, "suffix": Suffix, "recycling": Recycling}
"""Drafters by name. Their options are fields: integers or words."""


AUTO = "auto"
"""The drafter for a target that has none: the one without a model that brings most for what it drafts, by
`benchmarks/drafters.py`."""
BUNDLED = "bundled"
"""The draft model of the bundled pair, in a sum or drafting trees."""


@dataclass(frozen=True)
class Sum:
    """A drafter without a model for the rows where it is sure, a draft model for the others.

    Attributes:
        first: proposes chains. source: the model's Hub id, directory or `BUNDLED`.
    """

    first: Drafting
    source: str

    @property
    def name(self) -> str:
        return f"{self.first.name}+model"

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        from shoal.drafting.sums import SumDrafter
        from shoal.drafting.text import TextDrafter

        text = self.first.drafter(target)
        assert isinstance(text, TextDrafter)
        assert model is not None
        return SumDrafter(text, model)


WITH_MODEL = (Sum, ModelTrees)
"""Draftings whose `source` is a draft model."""


@dataclass(frozen=True)
class Given:
    """A drafter that a user made: for one engine at a time."""

    made: Drafter

    @property
    def name(self) -> str:
        return type(self.made).__name__

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        return self.made


def drafting_of(draft: object) -> Drafting | None:
    """The drafter that a text names or an object is; None for anything else, such as a model or its name.

    Raises:
        RequestError: see `named`.
    """
    if isinstance(draft, str):
        return named(draft)
    return Given(draft) if callable(getattr(draft, "propose", None)) else None  # type: ignore[arg-type]


def named(text: str) -> Drafting | None:
    """The drafter that a text names; None where it is the name of a model.

    Raises:
        RequestError: an unknown drafter or option, a wrong value, or a directory that has the name of a drafter.
    """
    model, tree, options = text.rpartition(":tree=")
    if tree:
        return _trees(text, model, f"tree={options}")
    head, plus, source = text.partition("+")
    if plus and head.partition(":")[0] in DRAFTINGS:
        return _sum(text, head, source)
    if text == AUTO and not Path(text).exists():
        return Suffix()
    name, colon, options = text.partition(":")
    if name in HEADS and (colon or not Path(text).exists()):
        return _heads(name, options)
    if name not in DRAFTINGS:
        _require_model_name(text, name if colon else text)
        return None
    if Path(text).exists():
        raise RequestError(
            f"{text!r} is a drafter's name and a directory here: write ./{text} for the model in the directory"
        )
    kind = DRAFTINGS[name]
    known = {field.name: field.default for field in fields(kind)}
    return kind(**_options(name, known, options, f"{name}:{_example(known)}")) if colon else kind()


def _heads(name: str, text: str) -> Drafting:
    """Those of `DIR,key=value`: options stand after the last comma that a slash does not follow."""
    kind = HEADS[name]
    known = {field.name: field.default for field in fields(kind)[1:]}
    directory = text
    options: list[str] = []
    while (parts := directory.rpartition(","))[1] and "=" in parts[2] and "/" not in parts[2]:
        directory, options = parts[0], [parts[2], *options]
    example = f"{name}:DIR,{_example(known)}"
    if not directory:
        raise RequestError(f"{name} needs the directory of its heads, as in {name}:DIR or {example}")
    return kind(directory, **_options(name, known, ",".join(options), example) if options else {})  # type: ignore[no-any-return]


def _sum(text: str, head: str, source: str) -> Sum:
    first = named(head)
    assert first is not None
    if not source or source.partition(":")[0] in {*DRAFTINGS, *HEADS} or "+" in source:
        raise RequestError(f"a sum is a drafter and a draft model, as in suffix+DIR, got {text!r}")
    if getattr(first, "nodes", 0):
        first = _chains(first, text)
    _require_one_bundled(source)
    return Sum(first, source)


def _trees(text: str, source: str, options: str) -> ModelTrees:
    if not source or source.partition("+")[0].partition(":")[0] in {*DRAFTINGS, *HEADS}:
        raise RequestError(f"trees with tree= are those of a draft model, as in DIR:tree=rsd-s, got {text!r}")
    _require_one_bundled(source)
    if source != BUNDLED:
        _require_model_name(source, source)
    known = {field.name: field.default for field in fields(ModelTrees)[2:]}
    return ModelTrees(source, **_options("a draft model", {"tree": "", **known}, options, "DIR:tree=rsd-s,width=2,nodes=16"))


def _require_one_bundled(source: str) -> None:
    """Raises RequestError: the bundled model is meant, or a directory of that name."""
    if source == BUNDLED and Path(source).exists():
        raise RequestError(
            f"{source!r} means the bundled draft model, and is a directory here: write ./{source} for the directory"
        )


def _chains(drafting: Any, text: str) -> Drafting:
    """The same without trees, which it has by itself. Raises RequestError: they were asked for."""
    if "nodes=" in text:
        raise RequestError(f"a sum proposes chains: leave out nodes in {text!r}")
    chained: Drafting = replace(drafting, nodes=0)
    return chained


def spelled(drafting: Any) -> str:
    """A drafter's name with all its options, as `named` reads it."""
    name = next(name for name, kind in DRAFTINGS.items() if type(drafting) is kind)
    return f"{name}:" + ",".join(f"{field.name}={getattr(drafting, field.name)}" for field in fields(drafting))


def _require_model_name(text: str, name: str) -> None:
    """Raises RequestError for what is no path, and is no model's name or is much like that of a drafter."""
    if any(character in text for character in "/\\") or Path(text).exists():
        return
    close = get_close_matches(name, [*DRAFTINGS, *HEADS], n=1, cutoff=0.75)
    if ":" in text or close:
        meant = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(DRAFTINGS)}"
        raise RequestError(
            f"{name!r} is no drafter, and no directory here: {meant} A model is named by its Hub id or directory"
        )


def _options(name: str, known: dict[str, Any], text: str, example: str) -> dict[str, Any]:
    """The options of a text `key=value,key=value`, of the types of their defaults `known`."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            raise RequestError(f"{name} has no option {key!r}: it has {', '.join(known)}, as in {example}")
        if not equals or not value or key in found:
            raise RequestError(f"{name} needs one value for {key}, as in {example}")
        if isinstance(known[key], int) and not value.isdecimal():
            raise RequestError(f"{name} needs a whole number for {key}, got {value!r}")
        found[key] = int(value) if isinstance(known[key], int) else value
    return found


def _example(known: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in known.items())
