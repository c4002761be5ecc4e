"""The drafters for `draft_model=` beside a target of `model.generate`.

Models are kept between calls.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import nn

from shoal.drafting.draft import BUNDLED, read_draft
from shoal.drafting.draft_model import DraftModel, Tokenizers
from shoal.drafting.protocol import Drafter
from shoal.errors import RequestError
from shoal.models import loading, pretrained
from shoal.models.runner import Runner
from shoal.models.sources import require_source
from shoal.models.structure import Belongings


class KeptModel(NamedTuple):
    """A draft model of earlier calls, and the tokenizers that they gave."""

    model: DraftModel
    given: Tokenizers


_named: Belongings[KeptModel] = Belongings("draft models")
"""The draft models of a target, by name and attention."""
_given: Belongings[weakref.WeakKeyDictionary[nn.Module, KeptModel]] = Belongings("targets")
"""The uses of a draft model, by attention and target."""


def drafter_of(
    draft: Any, target: Runner, attention: str, tokenizers: Tokenizers
) -> Drafter | None:
    """Makes a drafter for one call.

    Args:
        draft: see `shoal.integrations.transformers.custom_generate`; None = nothing drafts.
        target: the model to draft for.
        attention: the attention method of a draft model.
        tokenizers: the tokenizers that the caller gives.

    Raises:
        RequestError: no drafter is meant.
        PairMismatch: it cannot propose for this target.
    """
    spec = read_draft(draft, "draft_model")
    if spec is None:
        return None
    if spec.source == BUNDLED:
        raise RequestError(
            "the bundled draft model fits the bundled target alone: give the directory of a "
            "draft model"
        )
    spec = spec.settled(target)
    if spec.has_files:
        spec.require_files(tokenizers.target or pretrained.tokenizer_at_hand(target.hf))
    model = None
    if spec.source is not None:
        model = _model_of(spec.source, target, attention, tokenizers).drafter(target)
    return spec.drafter(target, model)


def _model_of(source: Any, target: Runner, attention: str, tokenizers: Tokenizers) -> DraftModel:
    kept = kept_model(source, target, attention)
    if kept is None or kept.given != tokenizers:
        kept = KeptModel(_loaded(source, target, attention, tokenizers), tokenizers)
        if isinstance(source, nn.Module):
            _given.of(source).setdefault(attention, weakref.WeakKeyDictionary())[target.hf] = kept
        else:
            _named.of(target.hf)[source, attention] = kept
    return kept.model


def kept_model(source: Any, target: Runner, attention: str) -> KeptModel | None:
    """Returns the draft model that earlier calls made beside a target, by its name or object."""
    if isinstance(source, nn.Module):
        return _given.of(source).get(attention, {}).get(target.hf)
    return _named.of(target.hf).get((source, attention))


def _loaded(source: Any, target: Runner, attention: str, given: Tokenizers) -> DraftModel:
    at_hand = given.target or pretrained.tokenizer_at_hand(target.hf)
    if at_hand is None and given.draft is not None:
        raise RequestError(
            "a draft model's tokenizer says nothing without the target's: give tokenizer= beside it"
        )
    if isinstance(source, nn.Module):
        tokenizer = given.draft or pretrained.tokenizer_at_hand(source)
    else:
        require_source(source, local_files_only=True)
        tokenizer = given.draft or pretrained.load_tokenizer(source, local_files_only=True)

    def load(kept: Any) -> Runner:
        if isinstance(source, nn.Module):
            return loading.wrap(source, pretrained.name_of(source), attention)
        return loading.load_runner(
            source,
            loading.LoadOptions(
                device=target.device,
                attention=attention,
                local_files_only=True,
                target_dtype=target.dtype,
                kept=kept,
            ),
        )

    return DraftModel.load(source, target, Tokenizers(at_hand, tokenizer), load)
