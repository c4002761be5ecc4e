"""What `draft=` can be besides a model: drafters without one, sums and objects, each of which makes the drafters of engines. Their
names are read by `shoal.drafting.names`. Torch is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.drafting.model_trees import MOST_NODES, ModelTrees
from shoal.drafting.self_drafting import SelfDrafting
from shoal.errors import RequestError, UnsupportedModel

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
        index: a file of `shoal index`, whose texts are looked up as well; "" = none.
        answers: a file of earlier answers, of this and other runs; made if there is none. "" = none are kept.

    Raises:
        RequestError: another scope, more than 63 nodes, a number that is too small, or no such file or directory.
    """

    scope: str = "group"
    min: int = 1
    nodes: int = 0
    limit: int = 1 << 16
    index: str = ""
    answers: str = ""

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise RequestError(f"suffix needs a scope of {', '.join(SCOPES)}, got {self.scope!r}")
        if self.min < 1 or not 0 <= self.nodes <= MOST_NODES or self.limit < 64:
            raise RequestError(f"suffix needs min >= 1, nodes in 0..{MOST_NODES} and limit >= 64, got {self.name}")
        if self.index and not Path(self.index).is_file():
            raise RequestError(f"there is no index {self.index!r}: `shoal index --output FILE` makes one")
        if self.answers and not Path(self.answers).parent.is_dir():
            raise RequestError(f"cannot keep answers in {self.answers!r}: there is no such directory")

    @property
    def name(self) -> str:
        return spelled(self)

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        from shoal.drafting.answer_file import AnswerFile
        from shoal.drafting.corpus import Corpus
        from shoal.drafting.index_file import fitting_index
        from shoal.drafting.suffix import SuffixDrafter

        corpus = Corpus(fitting_index(self.index, target.vocab_size)) if self.index else None
        answers = AnswerFile(self.answers, self.limit, target.vocab_size) if self.answers else None
        return SuffixDrafter(self.scope, self.min, self.nodes, self.limit, corpus, answers)


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


@dataclass(frozen=True)
class Trigrams:
    """What followed the last two tokens most often, in texts and by what the target said, is proposed.

    Attributes:
        scope, k, nodes: as of `Recycling`. limit: contexts of a table. playouts: by which trees are searched; 0 = not at all: the
            most probable paths.

    Raises:
        RequestError: another scope, or a number out of range.
    """

    scope: str = "group"
    k: int = 8
    nodes: int = 8
    limit: int = 1 << 15
    playouts: int = 0

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise RequestError(f"trigrams needs a scope of {', '.join(SCOPES)}, got {self.scope!r}")
        if not 1 <= self.k <= MOST_NODES or not 0 <= self.nodes <= MOST_NODES or self.limit < 64 or self.playouts > 1024:
            raise RequestError(
                f"trigrams needs k in 1..{MOST_NODES}, nodes in 0..{MOST_NODES}, limit >= 64 and at most 1024 playouts, "
                f"got {self.name}"
            )

    @property
    def name(self) -> str:
        return spelled(self)

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        from shoal.drafting.trigrams import TrigramDrafter

        return TrigramDrafter(self.scope, self.k, self.nodes if target.takes_trees else 0, self.limit, self.playouts)


SELF = "self"
DRAFTINGS: dict[str, type[Any]] = {
    "ngram": NGram,
    "suffix": Suffix,
    "recycling": Recycling,
    "trigrams": Trigrams,
    SELF: SelfDrafting,
}
"""Drafters by name. Their options are fields: integers or words."""


AUTO = "auto"
"""The drafter for a target that has none: the one without a model that brings most for what it drafts, by
`benchmarks/drafters.py`."""
BUNDLED = "bundled"
"""The draft model of the bundled pair, in a sum or drafting trees."""


@dataclass(frozen=True)
class Sum:
    """Drafters without a model for the rows where they are sure, a draft model or trained heads for the others; or trees of both.

    Attributes:
        texts: propose chains, and the first that is sure of a row does; or trees, where they have nodes, which are joined to those
            of the last one. source: of a draft model, its Hub id, directory or `BUNDLED`; None without one.
        last: trained heads, or how the model drafts trees; None = the model drafts chains.
    """

    texts: tuple[Drafting, ...]
    source: str | None
    last: Drafting | None = None

    @property
    def name(self) -> str:
        return "+".join([*(text.name for text in self.texts), "model" if self.last is None else self.last.name])

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        from shoal.drafting.other_vocabulary import OtherVocabularyDrafter
        from shoal.drafting.sums import SumDrafter
        from shoal.drafting.text import TextDrafter

        made = [text.drafter(target) for text in self.texts]
        texts = [text for text in made if isinstance(text, TextDrafter)]
        assert len(texts) == len(made)
        last = model if self.last is None else self.last.drafter(target, model)
        assert last is not None
        if any(text.max_nodes for text in texts) and isinstance(last, OtherVocabularyDrafter):
            raise UnsupportedModel(f"{self.source} has another tokenizer than {target.name}: leave out nodes in {self.name}")
        return SumDrafter(texts, last)


WITH_MODEL = (Sum, ModelTrees)
"""Draftings whose `source` is a draft model, or None."""


@dataclass(frozen=True)
class Given:
    """A drafter that a user made: for one engine at a time."""

    made: Drafter

    @property
    def name(self) -> str:
        return type(self.made).__name__

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        return self.made


def spelled(drafting: Any) -> str:
    """A drafter's name with all its options, as `named` reads it; without files that it does not have."""
    name = next(name for name, kind in DRAFTINGS.items() if type(drafting) is kind)
    options = {field.name: getattr(drafting, field.name) for field in fields(drafting)}
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items() if value != "")
