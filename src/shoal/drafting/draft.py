"""The meaning of `draft=` and `--draft`, for the library, the commands and the Transformers entry.

    NAME[:key=value,...]       a drafter of `shoal.drafting.registry`
    NAME:DIR[,key=value,...]   trained heads in a directory; DIR alone is enough
    MODEL                      a draft model, by its Hub id or directory
    MODEL:tree=...             a draft model that proposes trees
    NAME[:...]+...+LAST        a sum: drafters that read text, and a draft model or trained heads
    auto                       `mtp` if the target's checkpoint has it, else `suffix`

Torch is not imported here, so a wrong command line is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.drafting.registry import (
    MODEL,
    MTP,
    SUFFIX,
    DrafterKind,
    File,
    Options,
    kind_of,
    kind_of_heads,
    kinds,
    names,
)
from shoal.errors import RequestError, UnsupportedModel

if TYPE_CHECKING:
    from shoal.drafting.protocol import Drafter
    from shoal.models.runner import Runner

AUTO = "auto"
"""The drafter without a model that is fastest by `benchmarks/drafters.py`."""
BUNDLED = "bundled"
"""The draft model of the bundled pair, in a sum or drafting trees."""
DRAFT_GUIDES, TARGET_GUIDES = "draft", "target"
"""The guides that are the pair's own draft model and the target itself."""


@dataclass(frozen=True)
class DraftSpec:
    """A drafter and its options.

    Attributes:
        kind: its entry in the registry.
        options: the settled options of the kind.
        place: the directory of heads; the Hub id, directory or object of a draft model; a drafter
            that a user made, for one engine at a time.
    """

    kind: DrafterKind
    options: Options = field(default_factory=dict)
    place: Any = ""

    @property
    def name(self) -> str:
        """The name and options, as in reports."""
        return self.kind.spelled(self.options)

    @property
    def has_files(self) -> bool:
        """True if some option names a file."""
        return any(isinstance(self.kind.options[key], File) for key in self.options)

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        """Makes a drafter for one engine.

        Args:
            target: the target.
            model: the drafter of the draft model, for a kind that needs one.

        Raises:
            RequestError, ModelError: the drafter does not fit the target.
        """
        if not self.kind.maker:
            return self.place
        options = dict(self.options)
        if self.kind is MODEL:
            assert model is not None
            if not options:
                return model
            options["model"] = model
        elif self.kind.directory:
            options["directory"] = self.place
        maker = self.kind.load_maker()
        return getattr(maker, "for_target", maker)(target, **options)


@dataclass(frozen=True)
class Draft:
    """A drafter, or several as a sum.

    Attributes:
        parts: one drafter; or drafters that read text and, as the last, a draft model or heads.
        auto: True if the target decides.
    """

    parts: tuple[DraftSpec, ...]
    auto: bool = False

    @property
    def name(self) -> str:
        """The names of all parts, as in reports."""
        return "+".join(part.name for part in self.parts)

    @property
    def source(self) -> Any:
        """The draft model: a Hub id, directory, object or `BUNDLED`; None without one."""
        last = self.parts[-1]
        return last.place if last.kind is MODEL else None

    @property
    def is_model(self) -> bool:
        """True if the only drafter is a draft model that proposes chains."""
        return self.source is not None and self.name == MODEL.name

    @property
    def has_files(self) -> bool:
        """True if some part reads or writes files."""
        return any(part.has_files for part in self.parts)

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        """Makes the drafter of an engine.

        Args:
            target: the target.
            model: the drafter of the draft model, if there is one.

        Raises:
            RequestError, ModelError: the drafter does not fit the target.
        """
        made = [part.drafter(target, model) for part in self.parts]
        return made[0] if len(made) == 1 else self._sum(made, target)

    def _sum(self, made: list[Drafter], target: Runner) -> Drafter:
        from shoal.drafting.other_vocabulary import OtherVocabularyDrafter
        from shoal.drafting.sums import SumDrafter
        from shoal.drafting.text import TextDrafter

        *others, last = made
        texts = [one for one in others if isinstance(one, TextDrafter)]
        if len(texts) < len(others):
            alone = next(type(one) for one in others if not isinstance(one, TextDrafter))
            raise RequestError(
                f"{self.name} cannot be joined: {alone.__name__} is no "
                f"shoal.drafting.text.TextDrafter, and only these stand before another drafter"
            )
        if any(text.max_nodes for text in texts) and isinstance(last, OtherVocabularyDrafter):
            raise UnsupportedModel(
                f"{self.source} has another tokenizer than {target.name}: leave out nodes in "
                f"{self.name}"
            )
        return SumDrafter(texts, last)

    def settled(self, target: Runner) -> Draft:
        """Returns the draft that `auto` means for a target; any other as it is."""
        if not self.auto:
            return self
        from shoal.drafting.mtp import has_layer

        return Draft((DraftSpec(MTP, MTP.read(None)),) if has_layer(target) else self.parts)

    def require_fit(self, target: Runner) -> None:
        """Makes a drafter of heads or of the target itself, and drops it.

        Raises:
            RequestError, ModelError: the drafter does not fit the target.
        """
        last = self.parts[-1]
        if last.kind is not MODEL and not last.kind.reads_text:
            last.drafter(target)

    def require_files(self, tokenizer: Any) -> None:
        """Checks the drafter's files, and creates the files that it writes.

        Args:
            tokenizer: the target's tokenizer, from Transformers; None = unknown.

        Raises:
            RequestError: a file was made with another tokenizer, or is damaged.
        """
        for part in self.parts:
            if part.has_files:
                part.kind.load_maker().require_files(tokenizer, **part.options)


def read_draft(draft: object, argument: str = "draft") -> Draft | None:
    """Reads `draft=`: a text, a model, an object that proposes, or None.

    Args:
        draft: the value.
        argument: its name, for errors.

    Raises:
        RequestError: an unknown drafter or option, a value out of bounds, or a directory that has
            the name of a drafter.
    """
    if draft is None:
        return None
    if isinstance(draft, str):
        return Draft(_parts(draft), auto=draft == AUTO and not Path(draft).exists())
    if callable(getattr(draft, "propose", None)):
        given = DrafterKind(type(draft).__name__, "", in_sums=True)
        return Draft((DraftSpec(given, place=draft),))
    if isinstance(draft, Path) or callable(getattr(draft, "forward", None)):
        return Draft((_placed(draft),))
    raise RequestError(
        f"{argument} must be a hub id, a directory, a Transformers model, a drafter's name or an "
        f"object of shoal.drafting.protocol.Drafter, got a {type(draft).__name__}"
    )


def draft_help() -> str:
    """Returns the forms of `--draft` in words."""
    plain = [kind.name for kind in kinds() if not kind.directory and not kind.about]
    heads = [kind.as_written for kind in kinds() if kind.directory]
    others = [f"; or {one.about}: {one.example.split(' or ')[0]}" for one in kinds() if one.about]
    return (
        f"Draft model: Hub id or directory; or without a model: {', '.join(plain)}; or "
        f"{SUFFIX.name}+DIR ({AUTO}+DIR); or DIR:tree=rsd-s; or trained heads: "
        f"{', '.join(heads)}{''.join(others)}."
    )


def _parts(text: str) -> tuple[DraftSpec, ...]:
    head, plus, _ = text.partition("+")
    word = head.partition(":")[0]
    if plus and (word == AUTO or _is_plain(kind_of(word))):
        return _sum(text)
    if "tree" in getattr(kind_of(word), "options", ()):
        return (_one(text),)
    source, tree, options = text.rpartition(":tree=")
    return (_trees(text, source, f"tree={options}") if tree else _one(text),)


def _placed(place: Any) -> DraftSpec:
    """Returns the draft model at a place, or the heads in that directory."""
    heads = kind_of_heads(place)
    if heads is None:
        return DraftSpec(MODEL, place=place)
    return DraftSpec(heads, heads.read(None), str(place))


def _is_plain(kind: DrafterKind | None) -> bool:
    """Returns True for a drafter that is named without a directory."""
    return kind is not None and not kind.directory


def _one(text: str) -> DraftSpec:
    if text == AUTO and not Path(text).exists():
        return DraftSpec(SUFFIX, SUFFIX.read(None))
    name, colon, options = text.partition(":")
    kind = kind_of(name)
    if kind is not None and kind.directory and (colon or not Path(text).exists()):
        return _heads(kind, options)
    if kind is None or kind.directory:
        _require_model_name(text, name if colon else text)
        return _placed(text)
    if Path(text).exists():
        raise RequestError(
            f"{text!r} is a drafter's name and a directory here: write ./{text} for the model "
            f"in the directory"
        )
    return DraftSpec(kind, kind.read(options if colon else None))


def _heads(kind: DrafterKind, text: str) -> DraftSpec:
    """Reads `DIR,key=value`: options stand after the last comma that no slash follows."""
    directory = text
    options: list[str] = []
    while (parts := directory.rpartition(","))[1] and "=" in parts[2] and "/" not in parts[2]:
        directory, options = parts[0], [parts[2], *options]
    if not directory:
        kind.require_directory("")
    read = kind.read(",".join(options) if options else None)
    kind.require_directory(directory)
    return DraftSpec(kind, read, directory)


def _trees(text: str, source: str, options: str) -> DraftSpec:
    word = source.partition("+")[0].partition(":")[0]
    if not source or kind_of(word) is not None:
        raise RequestError(
            f"trees with tree= are those of a draft model, as in DIR:tree=rsd-s, got {text!r}"
        )
    _require_one_bundled(source)
    if source != BUNDLED:
        _require_model_name(source, source)
    kind = kind_of_heads(source) or MODEL
    return DraftSpec(kind, kind.read(options), source)


def _sum(text: str) -> tuple[DraftSpec, ...]:
    *heads, source = text.split("+")
    word, colon, options = source.partition(":")
    last = kind_of(word)
    in_target = last is not None and last.in_target
    is_heads = last is not None and last.in_sums and (in_target or bool(last.directory and colon))
    before = [SUFFIX if head == AUTO else kind_of(head.partition(":")[0]) for head in heads]
    readable = all(kind is not None and kind.reads_text for kind in before)
    if not (source and readable and (is_heads or (last is None and word != AUTO))):
        raise RequestError(f"a sum is a drafter and a draft model, as in suffix+DIR, got {text!r}")
    parts = [_one(head) for head in heads]
    if len({part.kind.name for part in parts}) < len(parts):
        raise RequestError(f"a sum has each drafter once, got {text!r}")
    chains = [
        part
        if "nodes=" in head or "nodes" not in part.options
        else DraftSpec(part.kind, part.options | {"nodes": 0})
        for head, part in zip(heads, parts, strict=True)
    ]
    if last is not None and is_heads:
        return (*chains, _one(source) if in_target else _heads(last, options))
    return (*chains, _model_of_sum(text, source))


def _model_of_sum(text: str, source: str) -> DraftSpec:
    if ":tree=" not in source:
        _require_one_bundled(source)
        last = _placed(source)
    else:
        last = _parts(source)[0]
    if last.kind is not MODEL and not last.kind.in_sums:
        raise RequestError(f"{source} holds heads of {last.kind.name}, which draft alone")
    tree = last.options.get("tree")
    if tree == "auto":
        raise RequestError(
            f"a sum is chosen from by its drafters: give their trees one shape, as rsd-s, in "
            f"{text!r}"
        )
    if tree == "k-seq":
        raise RequestError(
            f"k-seq trees are drawn independently, and nothing can be joined to them: take "
            f"rsd-s in {text!r}"
        )
    return last


def _require_one_bundled(source: str) -> None:
    """Raises RequestError if BUNDLED is meant and there is a directory of that name."""
    if source == BUNDLED and Path(source).exists():
        raise RequestError(
            f"{source!r} means the bundled draft model, and is a directory here: write "
            f"./{source} for the directory"
        )


def _require_model_name(text: str, name: str) -> None:
    """Raises RequestError if a text is no path and resembles a drafter's name."""
    if any(character in text for character in "/\\") or Path(text).exists():
        return
    known = names()
    close = get_close_matches(name, known, n=1, cutoff=0.75)
    if ":" in text or close:
        heads = [kind.name for kind in kinds() if kind.directory]
        plain = [one for one in known if one not in heads]
        meant = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(plain)}."
        raise RequestError(
            f"{name!r} is no drafter, and no directory here: {meant} A model is named by its "
            f"Hub id or directory"
        )
