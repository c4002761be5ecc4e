"""What the text of `draft=` and `--draft` means.

It names a drafter if its first word, up to a colon, is in `DRAFTINGS` (`ngram:min=2`), a sum if more of these and the name of a
model or of trained heads follow, with a plus between them (`suffix+DIR`, `suffix+medusa:DIR`, `auto+DIR`), trained heads if that
word is in `HEADS` (`medusa:DIR`), a model that drafts trees if `:tree=` stands in it; `auto` is the drafter for a target without
one; every other text names a model. Torch is not imported, so that a command line is refused at once.
"""

from __future__ import annotations

from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.drafting.model_trees import ModelTrees
from shoal.drafting.specs import AUTO, BUNDLED, DRAFTINGS, SELF, Drafting, Given, Suffix, Sum
from shoal.drafting.trained import HEADS, heads_in
from shoal.errors import RequestError

IN_SUMS = ("medusa", "eagle3")
"""Trained heads that may be the last part of a sum."""


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
    head, plus, _ = text.partition("+")
    if plus and head.partition(":")[0] in {*DRAFTINGS, AUTO}:
        return _sum(text)
    model, tree, options = text.rpartition(":tree=")
    if tree:
        return _trees(text, model, f"tree={options}")
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
    example = getattr(kind, "EXAMPLE", f"{name}:{_example(known)}")
    return kind(**_options(name, known, options, example)) if colon else kind()


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


def _sum(text: str) -> Sum:
    *heads, source = text.split("+")
    names = [head.partition(":")[0] for head in heads]
    word, colon, options = source.partition(":")
    is_heads = word in IN_SUMS and bool(colon)
    if not source or (word in {*DRAFTINGS, *HEADS, AUTO} and not is_heads) or not {*names} <= {*DRAFTINGS, AUTO} - {SELF}:
        raise RequestError(f"a sum is a drafter and a draft model, as in suffix+DIR, got {text!r}")
    texts = [DRAFTINGS["suffix"]() if head == AUTO else named(head) for head in heads]
    kinds = [type(one) for one in texts]
    if len({*kinds}) < len(kinds):
        raise RequestError(f"a sum has each drafter once, got {text!r}")
    given = tuple(
        one if "nodes=" in head or not getattr(one, "nodes", 0) else replace(one, nodes=0)  # type: ignore[type-var]
        for head, one in zip(heads, texts, strict=True)
        if one is not None
    )
    if is_heads:
        return Sum(given, None, _heads(word, options))
    last = named(source) if ":tree=" in source else None
    if isinstance(last, ModelTrees):
        if last.tree == "auto":
            raise RequestError(f"a sum is chosen from by its drafters: give their trees one shape, as rsd-s, in {text!r}")
        if last.tree == "k-seq":
            raise RequestError(
                f"k-seq trees are drawn independently, and nothing can be joined to them: take rsd-s in {text!r}"
            )
        return Sum(given, last.source, last)
    _require_one_bundled(source)
    _require_no_heads(source)
    return Sum(given, source)


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


def _require_model_name(text: str, name: str) -> None:
    """Raises RequestError for heads, and for what is no path, and is no model's name or is much like that of a drafter."""
    _require_no_heads(text)
    if any(character in text for character in "/\\") or Path(text).exists():
        return
    close = get_close_matches(name, [*DRAFTINGS, *HEADS], n=1, cutoff=0.75)
    if ":" in text or close:
        meant = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(DRAFTINGS)}"
        raise RequestError(
            f"{name!r} is no drafter, and no directory here: {meant} A model is named by its Hub id or directory"
        )


def _require_no_heads(source: str) -> None:
    """Raises RequestError: a directory of heads is given as a model's."""
    if kind := heads_in(Path(source)):
        raise RequestError(f"{source} holds trained heads, no model: write {kind}:{source}")


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
    return ",".join(f"{key}={value}" for key, value in known.items() if value != "")
