"""The errors that shoal raises on purpose.

    ShoalError
    ├── RequestError      the request is impossible: the caller can mend it (CLI exit code 2)
    ├── ModelError        the model, drafter or pair cannot do it (CLI exit code 2)
    │   ├── UnsupportedModel    an architecture whose cache or attention cannot be ragged
    │   ├── PairMismatch        target and drafter do not fit each other
    │   ├── BadLogits           the model returned NaN or +inf
    │   ├── OutOfMemory         too little memory
    │   └── OutOfStep           one of the processes that share a model has failed or ended
    └── InternalError     a bug in shoal (CLI exit code 1)

A message names the expected and the actual value, and the way out if there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


class ShoalError(Exception):
    """The base of all errors that shoal raises on purpose.

    Attributes:
        result: the whole `Result`, failed samples marked "error", if some rows of a run failed and
            others did not.
    """

    result: Any = None


class RequestError(ShoalError, ValueError):
    """The request is wrong: an unknown option, a value out of range, a prompt too long."""


class ModelError(ShoalError):
    """The model or the pair cannot do the request."""


class UnsupportedModel(ModelError):
    """An architecture that cannot decode ragged batches; the message names the reason."""


class PairMismatch(ModelError):
    """A target and a drafter that do not share tokenizer or vocabulary."""


class OutOfMemory(ModelError):
    """The device or the machine has too little memory for the request."""


class OutOfStep(ModelError):
    """One of the processes that share a model has failed or ended, and the others cannot go on.

    All the processes must be started again.
    """


class BadLogits(ModelError):
    """A forward pass returned NaN or +inf; no sample from it would be valid."""


class InternalError(ShoalError):
    """An invariant of shoal's own broke: please report it."""
