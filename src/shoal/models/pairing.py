"""The comparison of a drafter's vocabulary with a target's: it gives the tokens to propose."""

from __future__ import annotations

from typing import Any

from shoal.errors import PairMismatch
from shoal.models.runner import Runner
from shoal.models.spelling import Spelling
from shoal.models.vocabulary import Vocabularies, vocabularies

VOCABULARY_PADDING = 512
"""The largest difference of two vocabularies' sizes that counts as padding without tokenizers."""
PROBE = 'def f(x):\n    return x ** 2  # Größe ≤ 10 → 你好, I\'m 3.14\n\t<b>"ok"</b>'
"""A text that different tokenizers split differently."""


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
    if draft.mixers is not None:
        raise PairMismatch(
            f"{draft.name} cannot draft for {target.name}: their tokenizers differ, so a text's "
            f"last tokens may change, and its layers keep recurrent states, which cannot go back"
        )
    spellings = Spelling.of(tokenizer, target.name), Spelling.of(draft_tokenizer, draft.name)
    return vocabularies(*spellings, target.vocab_size, draft.known_ids)


def same_tokens(tokenizer: Any, other: Any) -> bool:
    """Returns True if common ids mean the same tokens, and both tokenizers split text alike."""
    ours, theirs = ({i: t for t, i in tok.get_vocab().items()} for tok in (tokenizer, other))
    if any(ours[i] != theirs[i] for i in ours.keys() & theirs.keys()):
        return False
    return bool(tokenizer.encode(PROBE) == other.encode(PROBE))
