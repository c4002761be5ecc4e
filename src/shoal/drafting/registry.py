"""The registry of drafters: the name of each, its options with bounds, and the place of its class.

The parser (`shoal.drafting.draft`), the help of commands and the errors come from this table. A
package registers its own drafter by an entry point of the group `shoal.drafters` that is a
`DrafterKind`. Torch is not imported here, so a wrong command line is refused at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from shoal.config import MOST_NODES
from shoal.drafting import (
    DrafterKind,
    File,
    Flag,
    Number,
    Option,
    Options,
    Word,
    spelled,
    without_blanks,
)
from shoal.errors import RequestError

__all__ = [
    "DrafterKind",
    "File",
    "Flag",
    "Number",
    "Option",
    "Options",
    "Word",
    "kind_of",
    "kind_of_heads",
    "unsupported_kind",
    "kinds",
    "names",
    "register",
]

GROUP = "shoal.drafters"
SCOPES = ("row", "group", "engine")
TREES = ("rsd-c", "rsd-s", "dyspec", "k-seq", "auto")
SINKS = 4
"""The number of first tokens that attention needs in any text (StreamingLLM, section 3.1)."""
KINDS = "model_type", "speculators_model_type", "projector_type"
"""The entries of config.json that name a kind of drafter, beside the names of classes."""


class Unsupported(NamedTuple):
    """A published kind of drafter that shoal does not compute.

    Attributes:
        kind: its name.
        reason: the name or the entry in config.json that shows it.
        instead: the name of the drafter of shoal that is closest to it.
    """

    kind: str
    reason: str
    instead: str


UNSUPPORTED = (
    ("DFlash 2", "dflash2", ("selector_rank",), "dflash"),
    ("DSpark", "dspark", ("sample_from_anchor",), "dflash"),
    ("Domino", "domino", (), "dflash"),
    ("P-EAGLE", "p_?eagle", ("parallel_drafting",), "eagle3"),
    ("EAGLE-3.1", "eagle3[._]1", ("fc_norm", "norm_output"), "eagle3"),
    ("EAGLE-1 or EAGLE-2", "causallmeagle$|^eagle(llama|qwen)", (), "eagle3"),
    ("Hydra", "^hydra$", ("hydra_num_heads",), "medusa"),
    ("MLP speculator", "^mlp_?speculator", (), "medusa"),
)
"""Kinds of drafters: a pattern of names, entries of config.json, and the drafter instead."""
_kinds: dict[str, DrafterKind] = {}


def kind_of_heads(directory: object) -> DrafterKind | None:
    """Returns the drafter whose heads a directory holds; None if it holds none."""
    if not isinstance(directory, str | Path):
        return None
    place = Path(directory)
    return next((k for k in kinds() if k.recognise is not None and k.recognise(place)), None)


def unsupported_kind(config: Mapping[str, Any]) -> Unsupported | None:
    """Returns the published kind of drafter of a config.json that shoal does not compute, or None.

    Args:
        config: the object in the file.
    """
    parts = [config.get(name) or {} for name in ("dflash_config", "eagle_config")]
    entries = {**config, **{key: value for part in parts for key, value in part.items()}}
    named = [*(entries.get("architectures") or ()), *(str(entries.get(name)) for name in KINDS)]
    for kind, words, marks, instead in UNSUPPORTED:
        word = next((name for name in named if re.search(words, name, re.IGNORECASE)), None)
        mark = next((name for name in marks if entries.get(name)), None)
        if word or mark:
            return Unsupported(kind, word or f"{mark}: {entries[mark]}", instead)
    return None


def register(kind: DrafterKind) -> DrafterKind:
    """Adds a drafter to the named ones; raises RequestError if the name is taken."""
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


def _settle_ngram(options: Options) -> Options:
    if options["min"] > options["max"]:
        raise RequestError(f"ngram needs min <= max, got ngram:{spelled(options)}")
    return options


def _settle_self(options: Options) -> Options:
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


def _settle_trees(options: Options) -> Options:
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


def _settle_heads(example: str, options: Options) -> Options:
    if options["tree"] == "auto":
        name = example.partition(":")[0]
        raise RequestError(
            f"{name} takes trees of one shape, as in {example}tree=rsd-s: tree=auto is for "
            f"draft models"
        )
    return _settle_trees(options)


def _settle_ppd(options: Options) -> Options:
    return {key: value for key, value in options.items() if value}


def _holds(pattern: str, directory: Path) -> bool:
    return any(directory.glob(pattern))


def _config(directory: Path) -> dict[str, Any]:
    """Returns the object in the directory's config.json; an empty one without such a file."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _entry(directory: Path, name: str) -> str:
    """Returns an entry of the directory's config.json in words; "" without one."""
    return str(_config(directory).get(name) or "")


def _is_medusa(directory: Path) -> bool:
    return _holds("medusa_lm_head.*", directory) or bool(_entry(directory, "medusa_num_heads"))


def _is_assistant(directory: Path) -> bool:
    return _entry(directory, "model_type") in ASSISTANTS


def _is_eagle3(directory: Path) -> bool:
    """Returns True for EAGLE-3 heads, and for heads that are refused by their kind."""
    named = "eagle3" in _entry(directory, "architectures").lower()
    other = unsupported_kind(_config(directory)) is not None
    return named or other or _entry(directory, "speculators_model_type") not in ("", "dflash")


def _is_dflash(directory: Path) -> bool:
    return (
        "dflash" in _entry(directory, "architectures").lower()
        or bool(_entry(directory, "dflash_config"))
        or _entry(directory, "speculators_model_type") == "dflash"
        or _entry(directory, "model_type") == "muse_glimmer_assistant"
    )


_NODES = Number(16, 0, MOST_NODES)
_TREES: dict[str, Option] = {"tree": Word(""), "width": Number(0), "nodes": Number(16)}
_TABLE: dict[str, Option] = {
    "scope": Word("group", (*SCOPES, "model")),
    "k": Number(8, 1, MOST_NODES),
    "nodes": Number(8, 0, MOST_NODES),
}
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""The model types of the assistants that draft from their target's keys and values."""
SELF_EXAMPLE = "self:exit=6, self:int4 or self:window=256,sinks=4"
MODEL = DrafterKind(
    "model",
    "shoal.drafting.tree_model:tree_drafter",
    _TREES,
    _settle_trees,
    example="DIR:tree=rsd-s,width=2,nodes=16",
    title="a draft model",
)
"""A draft model, which is named by its Hub id or directory in the place of `model`."""
OWN = (
    DrafterKind(
        "ngram",
        "shoal.drafting.ngram:NGramDrafter",
        {"min": Number(2, 1, 16), "max": Number(4, 1, 16)},
        _settle_ngram,
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
        "shoal.drafting.ngram:TrigramDrafter",
        {**_TABLE, "limit": Number(1 << 15, 64), "playouts": Number(0, 0, 1024)},
        in_sums=True,
    ),
    DrafterKind(
        "self",
        "shoal.drafting.target_keys:self_drafter",
        {"exit": Number(None), "window": Number(None), "sinks": Number(None), "int4": Flag()},
        _settle_self,
        in_sums=True,
        in_target=True,
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
        partial(_settle_heads, "eagle3:DIR,"),
        in_sums=True,
        directory="`shoal train eagle3` makes such a directory",
        recognise=_is_eagle3,
    ),
    DrafterKind(
        "assistant",
        "shoal.drafting.target_keys:AssistantDrafter",
        in_sums=True,
        directory="it is the `*-assistant` checkpoint that is published beside a Gemma 4 model",
        recognise=_is_assistant,
    ),
    DrafterKind(
        "dflash",
        "shoal.drafting.dflash:BlockDrafter",
        in_sums=True,
        directory="it is a DFlash checkpoint that is published for the target",
        recognise=_is_dflash,
    ),
    DrafterKind(
        "mtp",
        "shoal.drafting.mtp:MtpDrafter",
        {**_TREES, "nodes": _NODES},
        partial(_settle_heads, "mtp:"),
        in_sums=True,
        in_target=True,
        about="the layer in the target's checkpoint that predicts further tokens",
        example="mtp or mtp:tree=rsd-s,width=2,nodes=16",
    ),
    DrafterKind(
        "ppd",
        "shoal.drafting.ppd:PpdDrafter",
        {"nodes": Number(0, 0, MOST_NODES)},
        _settle_ppd,
        directory="`shoal train ppd` makes such a directory",
        recognise=partial(_holds, "prompt_tokens.*"),
    ),
)
"""The drafters of shoal; torch is imported with the class of one."""
for _kind in OWN:
    register(_kind)
SUFFIX, MTP = _kinds["suffix"], _kinds["mtp"]
