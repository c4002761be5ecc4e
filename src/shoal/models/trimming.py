"""VocabTrim (arXiv 2506.22694): a drafter whose head has only its target's most used tokens.

A small file beside the drafter lists these tokens. A drafter that is loaded with the file has
logits of these tokens alone. The embedding keeps all tokens, as prompts may hold any.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.durable import write_synced
from shoal.errors import ModelError, RequestError, UnsupportedModel
from shoal.models.sources import directory_of
from shoal.models.vocabulary import SharedTokens, Vocabularies

FILE = "shoal-trim.json"


def fingerprint(tokenizer: Any) -> str:
    """Returns a hash of a tokenizer's tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[
        :16
    ]


def most_used(
    counts: Mapping[int, int], k: int, size: int, always: Sequence[int]
) -> tuple[int, ...]:
    """Returns k of `size` tokens, sorted by id.

    The tokens in `always` come first, then the tokens with the highest counts, then the tokens with
    the lowest ids: in vocabularies of merges these are the most common.
    """
    rest = sorted(set(range(size)) - set(always), key=lambda token: (-counts.get(token, 0), token))
    return tuple(sorted({*always, *rest[: max(k - len(set(always)), 0)]}))


def save(directory: Path, kept: Sequence[int], tokenizer: Any) -> Path:
    """Writes the file beside a drafter, and returns its path.

    Args:
        kept: the drafter's ids that its head keeps.
    """
    path = directory / FILE
    write_synced(
        path, json.dumps({"vocabulary": fingerprint(tokenizer), "kept": list(kept)}) + "\n"
    )
    return path


def kept_of(source: str | Path, tokenizer: Any) -> tuple[int, ...] | None:
    """Returns the ids that the file in a drafter's directory keeps; None without such a file.

    Raises:
        ModelError: the file is damaged, or belongs to another tokenizer.
    """
    place = directory_of(source)
    path = None if place is None else place / FILE
    if path is None or not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kept, vocabulary = tuple(found["kept"]), found["vocabulary"]
        ordered = (
            bool(kept)
            and all(isinstance(i, int) for i in kept)
            and list(kept) == sorted(set(kept))
            and kept[0] >= 0
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{path} cannot be read ({error!r}): delete it, or write it again by shoal check --trim"
        ) from error
    if not ordered:
        raise ModelError(
            f"{path} holds no sorted list of token ids: delete it, or write it again by shoal "
            f"check --trim"
        )
    if vocabulary != fingerprint(tokenizer):
        raise ModelError(
            f"{path} is of another tokenizer: delete it, or write it again by shoal check --trim"
        )
    return kept


def with_head_of(hf: Any, kept: Sequence[int], name: str) -> Any:
    """Makes a model that shares all modules with another one, with some rows of its head.

    Raises:
        ModelError: the head has no such rows.
        UnsupportedModel: the head is not a linear layer.
    """
    head = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModel(
            f"the head of {name} is a {type(head).__name__}, which cannot be trimmed: delete {FILE}"
        )
    if kept[-1] >= head.out_features:
        raise ModelError(
            f"{FILE} of {name} keeps token {kept[-1]}, and its head has {head.out_features}: "
            f"write it again"
        )
    rows = torch.tensor(kept, device=head.weight.device)
    with torch.device("meta"):
        smaller = nn.Linear(
            head.in_features, len(kept), bias=head.bias is not None, dtype=head.weight.dtype
        )
    smaller.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        smaller.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    trimmed = copy.copy(hf)
    trimmed.__dict__["_modules"] = dict(hf._modules)
    trimmed.set_output_embeddings(smaller)
    return trimmed


@dataclass(frozen=True)
class Proposable:
    """The tokens that a draft model may propose.

    Attributes:
        vocabularies: the two vocabularies; None if the drafter's tokenizer is the target's.
        shared: the shared tokens; None if the drafter may propose all tokens of the target.
    """

    vocabularies: Vocabularies | None = None
    shared: SharedTokens | None = None


def proposable(
    found: Vocabularies | None, kept: Sequence[int] | None, target_size: int
) -> Proposable:
    """Returns the tokens that both models have and the drafter's head has kept.

    Args:
        found: the two vocabularies; None if the tokenizers are the same.
        kept: the ids that the drafter's head keeps; None for all.

    Raises:
        RequestError: there are no such tokens.
    """
    if kept is None:
        return Proposable(found, None if found is None else found.shared)
    columns = {token: column for column, token in enumerate(kept)}
    if found is None:
        pairs = [(token, token) for token in kept if token < target_size]
    else:
        pairs = (
            []
            if found.shared is None
            else list(zip(found.shared.target, found.shared.draft, strict=True))
        )
    pairs = [pair for pair in pairs if pair[1] in columns]
    if not pairs:
        raise RequestError(f"the drafter's {FILE} keeps no token that the target has: delete it")
    ours, theirs = zip(*pairs, strict=True)
    shared = SharedTokens(ours, theirs, tuple(columns[token] for token in theirs), target_size)
    return Proposable(
        None if found is None else replace(found, shared=shared, kept=tuple(kept)), shared
    )
