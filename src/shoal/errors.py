"""Every error shoal raises on purpose.

    ShoalError
    ├── RequestError      what was asked cannot be done: the caller can mend it (CLI exit code 2)
    ├── ModelError        the model, drafter or pair cannot do it (CLI exit code 2)
    │   ├── UnsupportedModel    an architecture whose cache or attention cannot be ragged
    │   ├── PairMismatch        target and drafter do not fit each other
    │   ├── BadLogits           the model returned NaN or +inf
    │   ├── OutOfMemory         no memory for it
    │   └── OutOfStep           of the processes that share a model one has failed, or ended
    └── InternalError     a bug of ours (CLI exit code 1)

A message names what was expected and what was got, and where there is one, the way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


class ShoalError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        result: when some rows of a run failed and others did not: the whole `Result`, failed
            samples marked "error".
    """

    result: Any = None


class RequestError(ShoalError, ValueError):
    """The request is wrong: an unknown option, a value out of range, a prompt too long."""


class ModelError(ShoalError):
    """The model or the pair cannot do what was asked."""


class UnsupportedModel(ModelError):
    """This architecture cannot decode ragged batches; the message names the reason."""


class PairMismatch(ModelError):
    """Target and drafter do not share tokenizer or vocabulary."""


class OutOfMemory(ModelError):
    """There was no memory for what was asked, on the device or in the machine."""


class OutOfStep(ModelError):
    """Of the processes that share a model one has failed, or ended, and the others cannot go on:
    all must be started again."""


class BadLogits(ModelError):
    """A forward pass returned NaN or +inf; nothing sampled from it would mean anything."""


class InternalError(ShoalError):
    """An invariant of shoal's own broke: please report it."""
