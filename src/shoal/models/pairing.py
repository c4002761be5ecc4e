"""Whether a drafter can propose for a target."""

from __future__ import annotations

from typing import Any

from shoal.errors import PairMismatch
from shoal.models.runner import Runner

VOCABULARY_PADDING = 512
"""Without tokenizers to compare, vocabularies this close count as one padded to different sizes."""
PROBE = 'def f(x):\n    return x ** 2  # Größe ≤ 10 → 你好, I\'m 3.14\n\t<b>"ok"</b>'
"""Text that different tokenizers split differently."""


def pair_report(target: Runner, draft: Runner, tokenizer: Any = None, draft_tokenizer: Any = None) -> list[str]:
    """What keeps this drafter from proposing for this target; empty if nothing does.

    Tokenizers decide, not sizes: models often pad one vocabulary to different widths. Without both tokenizers the widths
    must agree up to `VOCABULARY_PADDING`.
    """
    problems = []
    if target.device != draft.device:
        problems.append(f"target is on {target.device}, drafter on {draft.device}")
    if tokenizer is None or draft_tokenizer is None:
        if abs(target.vocab_size - draft.vocab_size) > VOCABULARY_PADDING:
            problems.append(f"vocabulary of {target.vocab_size} v {draft.vocab_size} and no tokenizers to compare")
        return problems
    ours, theirs = ({i: t for t, i in tok.get_vocab().items()} for tok in (tokenizer, draft_tokenizer))
    differing = [i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i]]
    if differing:
        i = min(differing)
        problems.append(
            f"tokenizers differ: {len(differing)} of {len(ours)} ids mean different tokens, for example {i} is {ours[i]!r} for the "
            f"target and {theirs[i]!r} for the drafter"
        )
    elif tokenizer.encode(PROBE) != draft_tokenizer.encode(PROBE):
        problems.append("tokenizers differ: the same vocabulary, but they split the same text differently")
    return problems


def check_pair(target: Runner, draft: Runner, tokenizer: Any = None, draft_tokenizer: Any = None) -> None:
    """Raises PairMismatch naming what `pair_report` found."""
    problems = pair_report(target, draft, tokenizer, draft_tokenizer)
    if problems:
        raise PairMismatch(
            f"{draft.name} cannot draft for {target.name}: {'; '.join(problems)}. A drafter must share the target's tokenizer; "
            "drafters with another tokenizer are not supported yet"
        )
