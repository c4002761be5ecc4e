"""The vocabulary of a drafter: its comparison with the target's, and the tokens of its head.

Tokens are compared by the bytes that they write. Special tokens are compared by their names, and
the tokens that end a text by their role.

VocabTrim (arXiv 2506.22694) is a drafter whose head has only its target's most used tokens. A small
file beside the drafter lists these tokens. A drafter that is loaded with the file has logits of
these tokens alone. The embedding keeps all tokens, as prompts may hold any.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.durable import write_synced
from shoal.errors import ModelError, PairMismatch, RequestError, UnsupportedModel
from shoal.models.runner import Runner
from shoal.models.sources import directory_of
from shoal.models.spelling import PROBE, Spelling, TokenTrie, token_trie

USUAL = f"""{PROBE}

class Stack:
    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
        self.items.append(item)
        return len(self.items)

Bread is made of flour, water, salt and yeast. To bake a loaf at home, first mix them well, \
then wait for an hour or two: the dough
should have doubled in size. "How long?" she asked. \
- Das hängt von der Wärme ab; im Winter dauert es länger.
""".encode()
"""A text of code and prose, to compare the lengths of two vocabularies' tokens."""
VOCABULARY_PADDING = 512
"""The largest difference of two vocabularies' sizes that counts as padding without tokenizers."""
SPLIT_PROBE = 'def f(x):\n    return x ** 2  # Größe ≤ 10 → 你好, I\'m 3.14\n\t<b>"ok"</b>'
"""A text that different tokenizers split differently."""


@dataclass(frozen=True)
class SharedTokens:
    """The tokens that two vocabularies share: the intersection.

    Attributes:
        target: the target's ids of the shared tokens, sorted. At least one.
        draft: the drafter's ids of the same tokens, in the same order.
        columns: the columns of the drafter's logits that belong to these tokens.
        target_size: the number of the target's ids.
    """

    target: tuple[int, ...]
    draft: tuple[int, ...]
    columns: tuple[int, ...]
    target_size: int


class SharedIds:
    """The tokens that a drafter and its target share, as tensors.

    Proposals of these alone are exact, as q is renormalised over them: TLI (Timor et al. 2025,
    arXiv 2502.05202), and the rule of VocabTrim (arXiv 2506.22694), where they are the tokens that
    are left of the drafter's head.
    """

    def __init__(self, shared: SharedTokens, device: torch.device) -> None:
        self._target = torch.tensor(shared.target, device=device)
        self._columns = torch.tensor(shared.columns, device=device)
        self._draft = torch.zeros(shared.target_size, dtype=torch.long, device=device)
        self._draft[self._target] = torch.tensor(shared.draft, device=device)

    def of_target(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Returns logits [rows, vocab_size] for the target's ids: -inf for ids that are not shared.

        Args:
            logits: the drafter's logits, [rows, its columns].
            vocab_size: the size of the target's vocabulary.
        """
        scattered = logits.new_full((len(logits), vocab_size), -torch.inf)
        scattered[:, self._target] = logits[:, self._columns]
        return scattered

    def of_draft(self, tokens: Tensor) -> Tensor:
        """Returns the drafter's ids of shared tokens, of any shape."""
        return self._draft[tokens]


@dataclass(frozen=True)
class Vocabularies:
    """A pair of vocabularies and the tokens that they share.

    Attributes:
        shared: the shared tokens; None if there are none.
        kept: the drafter's ids of its logits; None if it has the logits of all ids.
        sizes: the number of ids of each model.
    """

    target: Spelling
    draft: Spelling
    shared: SharedTokens | None
    kept: tuple[int, ...] | None = None
    sizes: tuple[int, int] = (0, 0)

    @cached_property
    def trie(self) -> TokenTrie | None:
        """The target's tokens as the drafter writes them, or None.

        The value is None if some token of the drafter begins with another one, or if the drafter
        does not have the logits of all ids.
        """
        if self.kept is not None:
            return None
        shared = (
            () if self.shared is None else zip(self.shared.target, self.shared.draft, strict=True)
        )
        special = {ours: theirs for ours, theirs in shared if ours not in self.target.pieces}
        return token_trie(self.target, self.draft, special, *self.sizes)

    @cached_property
    def ratio(self) -> float:
        """The number of the drafter's tokens for one of the target's, in a usual text."""
        return len(self.draft.ids(USUAL)) / len(self.target.ids(USUAL))


def vocabularies(
    target: Spelling, draft: Spelling, target_size: int, draft_size: int
) -> Vocabularies:
    """Compares two vocabularies.

    Args:
        target_size: the number of ids of the target; ids beyond it are not shared.
        draft_size: the number of ids of the drafter; ids beyond it are not shared.
    """
    pairs: dict[int, int] = {}
    for i, piece in target.pieces.items():
        ours, theirs = target.tokens_of(piece), draft.tokens_of(piece)
        place = ours.index(i)
        if place < len(theirs):
            pairs[i] = theirs[place]
    names = {name: i for i, name in draft.special.items()}
    pairs |= {i: names[name] for i, name in target.special.items() if name in names}
    ends = target.end, draft.end
    if (
        ends[0] is not None
        and ends[1] is not None
        and ends[0] not in pairs
        and ends[1] not in pairs.values()
    ):
        pairs[ends[0]] = ends[1]
    common = sorted((i, j) for i, j in pairs.items() if i < target_size and j < draft_size)
    if not common:
        return Vocabularies(target, draft, None, sizes=(target_size, draft_size))
    ours, theirs = zip(*common, strict=True)
    return Vocabularies(
        target,
        draft,
        SharedTokens(ours, theirs, theirs, target_size),
        sizes=(target_size, draft_size),
    )


def compared(
    target: Runner, draft: Runner, tokenizer: Any = None, draft_tokenizer: Any = None
) -> Vocabularies | None:
    """Returns the vocabularies of a pair whose tokenizers differ; None if they do not differ.

    Tokenizers decide, not sizes: models often pad one vocabulary to different widths. Without both
    tokenizers the widths must agree up to `VOCABULARY_PADDING`.

    Raises:
        PairMismatch: this drafter cannot propose for this target.
    """
    if target.device != draft.device:
        raise PairMismatch(
            f"{draft.name} cannot draft for {target.name}: target is on {target.device}, "
            f"drafter on {draft.device}"
        )
    if tokenizer is None or draft_tokenizer is None:
        if abs(target.vocab_size - draft.known_ids) > VOCABULARY_PADDING:
            raise PairMismatch(
                f"{draft.name} cannot draft for {target.name}: vocabulary of "
                f"{target.vocab_size} v {draft.known_ids} and no "
                "tokenizers to compare: load both models from where their tokenizers lie"
            )
        return None
    if same_tokens(tokenizer, draft_tokenizer):
        return None
    if draft.keeps_states:
        raise PairMismatch(
            f"{draft.name} cannot draft for {target.name}: their tokenizers differ, so a text's "
            f"last tokens may change, and its layers keep recurrent states, which cannot go back"
        )
    spellings = Spelling.of(tokenizer, target.name), Spelling.of(draft_tokenizer, draft.name)
    return vocabularies(*spellings, target.vocab_size, draft.known_ids)


def require_guide(
    target: Runner, guide: Runner, tokenizer: Any = None, guide_tokenizer: Any = None
) -> None:
    """Checks that a guide reads and writes the target's tokens.

    Raises:
        PairMismatch: the tokenizers differ; without both, the sizes of the vocabularies; or the
            models are on different devices.
    """
    if target.device != guide.device:
        why = f"target is on {target.device}, guide on {guide.device}"
    elif tokenizer is None or guide_tokenizer is None:
        if target.vocab_size == guide.known_ids:
            return
        why = (
            f"vocabulary of {target.vocab_size} v {guide.known_ids} and no tokenizers to compare: "
            f"load both models from where their tokenizers lie"
        )
    elif same_tokens(tokenizer, guide_tokenizer):
        return
    else:
        why = "their tokenizers differ; give a model with the target's tokenizer"
    raise PairMismatch(f"{guide.name} cannot guide {target.name}: {why}")


def same_tokens(tokenizer: Any, other: Any) -> bool:
    """Returns True if common ids mean the same tokens, and both tokenizers split text alike."""
    ours, theirs = ({i: t for t, i in tok.get_vocab().items()} for tok in (tokenizer, other))
    if any(ours[i] != theirs[i] for i in ours.keys() & theirs.keys()):
        return False
    return bool(tokenizer.encode(SPLIT_PROBE) == other.encode(SPLIT_PROBE))


TRIM_FILE = "shoal-trim.json"


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


def save_trim(directory: Path, ids: Sequence[int], tokenizer: Any) -> Path:
    """Writes the `ids` that a drafter's head keeps to a file beside it; returns its path."""
    path = directory / TRIM_FILE
    write_synced(path, json.dumps({"vocabulary": fingerprint(tokenizer), "kept": list(ids)}) + "\n")
    return path


def kept_of(source: str | Path, tokenizer: Any) -> tuple[int, ...] | None:
    """Returns the ids that the file in a drafter's directory keeps; None without such a file.

    Raises:
        ModelError: the file is damaged, or belongs to another tokenizer.
    """
    place = directory_of(source)
    path = None if place is None else place / TRIM_FILE
    if path is None or not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids, vocabulary = tuple(content["kept"]), content["vocabulary"]
        ordered = (
            bool(ids)
            and all(isinstance(i, int) for i in ids)
            and list(ids) == sorted(set(ids))
            and ids[0] >= 0
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
    return ids


def with_head_of(hf: Any, ids: Sequence[int], name: str) -> Any:
    """Makes a model that shares all modules with another one, with some rows of its head.

    Raises:
        ModelError: the head has no such rows.
        UnsupportedModel: the head is not a linear layer.
    """
    head = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModel(
            f"the head of {name} is a {type(head).__name__}, which cannot be trimmed: delete "
            f"{TRIM_FILE}"
        )
    if ids[-1] >= head.out_features:
        raise ModelError(
            f"{TRIM_FILE} of {name} keeps token {ids[-1]}, and its head has {head.out_features}: "
            f"write it again"
        )
    rows = torch.tensor(ids, device=head.weight.device)
    with torch.device("meta"):
        smaller = nn.Linear(
            head.in_features, len(ids), bias=head.bias is not None, dtype=head.weight.dtype
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
    both: Vocabularies | None, head_ids: Sequence[int] | None, target_size: int
) -> Proposable:
    """Returns the tokens that both models have and the drafter's head has kept.

    Args:
        both: the two vocabularies; None if the tokenizers are the same.
        head_ids: the ids that the drafter's head keeps; None for all.

    Raises:
        RequestError: there are no such tokens.
    """
    if head_ids is None:
        return Proposable(both, None if both is None else both.shared)
    columns = {token: column for column, token in enumerate(head_ids)}
    if both is None:
        pairs = [(token, token) for token in head_ids if token < target_size]
    else:
        pairs = (
            []
            if both.shared is None
            else list(zip(both.shared.target, both.shared.draft, strict=True))
        )
    pairs = [pair for pair in pairs if pair[1] in columns]
    if not pairs:
        raise RequestError(
            f"the drafter's {TRIM_FILE} keeps no token that the target has: delete it"
        )
    ours, theirs = zip(*pairs, strict=True)
    shared = SharedTokens(ours, theirs, tuple(columns[token] for token in theirs), target_size)
    return Proposable(
        None if both is None else replace(both, shared=shared, kept=tuple(head_ids)), shared
    )
