"""The check of a drafter that cannot propose all tokens.

Such a drafter has another tokenizer, or a trimmed head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.cli.check_case import Case
from shoal.cli.check_prompts import measured_on
from shoal.cli.check_result import CheckResult
from shoal.errors import RequestError
from shoal.models.sources import directory_of

PIECE = 64
"""The number of tokens that go together to one half or the other."""
LEAST = 0.95
"""A share of the tokens below which a trimmed head gives away more than it saves."""
LOST = 0.25
"""A share of the target's tokens that TLI cannot propose from which it is worth a word."""


def written(case: Case) -> list[Sequence[int]]:
    """Returns the target's tokens of each sample, from the runs that measured acceptance."""
    results = [result for by_temperature in case.acceptance for result in by_temperature.values()]
    return [one.token_ids for result in results for output in result for one in output.samples]


def trim(case: Case, k: int, texts: Sequence[str]) -> CheckResult:
    """Writes which k tokens the drafter's head is to keep (`shoal.models.trimming`).

    They are the tokens that the target writes most, or, with texts, the tokens that the texts hold
    most. The reported share is the part of one half of these tokens that the k most used tokens of
    the other half cover.

    Raises:
        RequestError: there is no draft model, or none in a directory; or it is trimmed already.
    """
    from shoal.models import trimming
    from shoal.models.loading import load_tokenizer

    model = case.model
    draft = model.draft_model
    place = None if draft is None else directory_of(draft.name)
    if draft is None or place is None:
        raise RequestError(
            "--trim writes a file beside the drafter: give --draft a model's directory"
        )
    if draft.known_ids != draft.vocab_size:
        raise RequestError(f"the drafter is trimmed already: delete {place / trimming.FILE} first")
    tokenizer = load_tokenizer(place)
    if not texts and model.vocabularies is not None:
        texts = [model.tokenizer.decode(row, skip_special_tokens=True) for row in written(case)]
    rows = (
        [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        if texts
        else written(case)
    )
    pieces = [row[at : at + PIECE] for row in rows for at in range(0, len(row), PIECE)]
    halves = [Counter(token for piece in pieces[half::2] for token in piece) for half in (0, 1)]
    size = (
        draft.vocab_size
        if model.vocabularies is not None
        else min(draft.vocab_size, model.target.vocab_size)
    )
    always = [i for i in (tokenizer.eos_token_id,) if i is not None and i < size]
    half = set(trimming.most_used(halves[0], k, size, always))
    share = sum(count for token, count in halves[1].items() if token in half) / max(
        halves[1].total(), 1
    )
    counts = halves[0] + halves[1]
    kept = trimming.most_used(counts, k, size, always)
    path = trimming.save(place, kept, tokenizer)
    figure = (
        f"{path} keeps {len(kept)} of the {draft.vocab_size} tokens of the drafter's head, and "
        f"the next load reads it; chosen by "
        f"one half of {counts.total()} tokens, as many hold {share:.1%} of the other"
    )
    data = {"kept": len(kept), "of": draft.vocab_size, "share": share, "counted": counts.total()}
    advice = "give more text (--trim-text), or a larger K" if share < LEAST else ""
    return CheckResult("trim", "warn" if advice else "ok", figure, advice, data)


def vocabulary(case: Case) -> Iterator[CheckResult]:
    """Yields a result if the drafter cannot propose all tokens."""
    found, choice, shared_tokens = case.model.vocabularies, case.model.choice, case.model.shared
    if found is None and shared_tokens is None:
        return
    counts = Counter(token for row in written(case) for token in row)
    shared = set() if shared_tokens is None else set(shared_tokens.target)
    if found is not None and found.trie is not None:
        shared = set(found.trie.sequences)  # a drafter of bytes or characters writes the others
    share = sum(count for token, count in counts.items() if token in shared) / max(
        counts.total(), 1
    )
    size = f"{len(shared)} of {case.model.target.vocab_size} ids"
    figure = f"the drafter can propose {share:.1%} of the tokens that the target wrote ({size})"
    data: dict[str, Any] = {"share": share, "shared": len(shared)}
    if choice is not None:
        rates = {method: tally.rate for method, tally in choice.methods.items() if tally.cost}
        said = ", ".join(f"{method} {rate:.2f}" for method, rate in rates.items())
        figure += f"; tokens per cost of a target pass: {said}; drafts by {choice.best}"
        data |= {"rates": rates, "method": choice.best}
    advice = (
        "SLEM loses less of the others than TLI; a drafter with the target's tokenizer loses none"
        if 1 - share > LOST
        else ""
    )
    yield measured_on(CheckResult("vocabulary", "ok", figure, advice, data), *case.sets)
