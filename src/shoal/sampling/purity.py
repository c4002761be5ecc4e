"""The check that processors are pure functions of (ids, scores).

Processors must be pure because they are also called for drafts that are rejected, in any order. A
processor that remembers such calls would bend the distribution in silence, so each one is tried
before any row is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import RequestError

_STATEFUL = frozenset(
    {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}
)
"""The Transformers processors that are known to depend on their earlier calls.

The first holds a model, which should not be copied.
"""


def require_stateless(processors: Sequence[Any]) -> None:
    """Raises RequestError for Transformers' own processors that depend on their earlier calls."""
    for processor in processors:
        if name_of(processor) in _STATEFUL:
            raise _refusal(processor)


def require_pure(
    processors: Sequence[Any],
    prompt_ids: Sequence[int],
    eos: Collection[int],
    vocab: int,
    device: Any,
) -> None:
    """Raises RequestError for processors whose results depend on their earlier calls.

    Copies of the processors are called, in their order, on the prompt, on a continuation of it, and
    on the prompt again. A processor that cannot be copied is called itself. State that shows only
    later than in the third call is not found.

    Args:
        eos: the ids after which processors are not called.
        vocab: the size of the scores.
        device: the device of the ids and scores.

    Raises:
        RequestError: a processor, by its class's name, answered differently the second time,
            failed, or returned no scores.
    """
    if not processors:
        return
    require_stateless(processors)
    copies = [_copied(processor) for processor in processors]
    ids = torch.tensor([list(prompt_ids)], device=device)
    scores = torch.arange(vocab, device=device).mul(0.618034).remainder(1.0).mul(4.0)[None]
    first = _outputs(copies, ids, scores)
    _outputs(copies, _continued(ids, first[-1], eos), scores.flip(-1))
    for processor, before, after in zip(
        processors, first, _outputs(copies, ids, scores), strict=True
    ):
        if not torch.equal(before.nan_to_num(), after.nan_to_num()):
            raise _refusal(processor)


def name_of(processor: Any) -> str:
    """Returns the name of a processor's class, or of the processor that it has as `wrapped`."""
    return type(getattr(processor, "wrapped", processor)).__name__


def _refusal(processor: Any) -> RequestError:
    return RequestError(
        f"processor {name_of(processor)} is not supported: it goes by its calls before, or by "
        f"chance, and is also called for "
        "drafts that are rejected; make it a pure function of (ids, scores)"
    )


def _copied(processor: Any) -> Any:
    try:
        return copy.deepcopy(processor)
    except Exception:  # a lock, a generator or a handle in it may raise any error
        return processor


def _outputs(processors: Sequence[Any], ids: Tensor, scores: Tensor) -> list[Tensor]:
    """Calls the processors in their order, each on the output of the one before it.

    Returns:
        The output of each processor, float32 [1, vocab].
    """
    outputs: list[Tensor] = []
    for processor in processors:
        before = outputs[-1] if outputs else scores
        try:
            after = processor(ids.clone(), before.clone())
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"processor {name_of(processor)} failed on the prompt: {error!r:.200}"
            ) from error
        if not isinstance(after, Tensor) or after.shape != scores.shape:
            got = tuple(after.shape) if isinstance(after, Tensor) else type(after).__name__
            wanted = tuple(scores.shape)
            raise RequestError(
                f"processor {name_of(processor)} must return scores of shape {wanted}, got {got}"
            )
        outputs.append(after.float().clone())
    return outputs


def _continued(ids: Tensor, scores: Tensor, eos: Collection[int]) -> Tensor:
    """Returns the ids and the best token that may follow them.

    Returns the ids themselves if only an EOS may follow.
    """
    allowed = scores[0].clone()
    allowed[[token for token in eos if token < len(allowed)]] = -torch.inf
    if not bool(allowed.amax().isfinite()):
        return ids
    return torch.cat([ids, allowed.argmax().view(1, 1)], dim=1)
