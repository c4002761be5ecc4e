"""Files that drafters read, and whether their tokens are those of a target."""

from __future__ import annotations

from typing import Any

from shoal.drafting.answer_file import require_answers
from shoal.drafting.index_file import open_index
from shoal.drafting.specs import Drafting, Suffix, Sum
from shoal.errors import RequestError
from shoal.models.trimming import fingerprint


def stored(drafting: Drafting | None) -> list[Suffix]:
    """The drafters that have files, of one or of a sum."""
    each = drafting.texts if isinstance(drafting, Sum) else [drafting]
    return [one for one in each if isinstance(one, Suffix) and (one.index or one.answers)]


def require_tokenizer(drafting: Drafting | None, tokenizer: Any) -> None:
    """Checks the files of a drafter, and makes that of its answers. tokenizer: the target's, Transformers'; None = unknown.

    Raises:
        RequestError: a file was made with another tokenizer, or is damaged.
    """
    known = None if tokenizer is None else fingerprint(tokenizer)
    for one in stored(drafting):
        if one.answers:
            require_answers(one.answers, known)
        if one.index and open_index(one.index).tokenizer != known and known is not None:
            raise RequestError(
                f"index {one.index!r} is one of another tokenizer: build it with `shoal index` for this target's"
            )
