"""What `draft_model=` means beside a target of `model.generate`: models and names, kept from call to call."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.drafting.names import drafting_of
from shoal.drafting.other_vocabulary import Choice, model_drafter
from shoal.drafting.protocol import Drafter
from shoal.drafting.specs import BUNDLED, DRAFTINGS, WITH_MODEL, Drafting
from shoal.drafting.stored import require_tokenizer, stored
from shoal.errors import RequestError
from shoal.models import loading, pairing, trimming
from shoal.models.belongings import Belongings
from shoal.models.runner import Runner
from shoal.models.sources import require_source


@dataclass(frozen=True)
class Tokenizers:
    """Of a target and a draft model, Transformers'; None = that which lies where the model was loaded from, if there is one."""

    target: Any = None
    draft: Any = None


@dataclass(frozen=True)
class DraftModel:
    """A draft model beside a target.

    Attributes:
        runner: whose cache nobody uses. proposable: what it may propose. choice: how it drafts, with another tokenizer.
        tokenizers: that were given.
    """

    runner: Runner
    proposable: trimming.Proposable
    choice: Choice | None
    tokenizers: Tokenizers

    @staticmethod
    def of(source: Any, target: Runner, attention: str, given: Tokenizers) -> DraftModel:
        """source: a Transformers model, or the Hub id or directory of one that lies on this machine.

        Raises:
            RequestError: there is none. PairMismatch: it cannot propose for this target.
        """
        at_hand = given.target or loading.tokenizer_at_hand(target.hf)
        if at_hand is None and given.draft is not None:
            raise RequestError("a draft model's tokenizer says nothing without the target's: give tokenizer= beside it")
        kept = None
        if isinstance(source, nn.Module):
            tokenizer = given.draft or loading.tokenizer_at_hand(source)
            runner = loading.wrap(source, loading.name_of(source), attention)
        else:
            require_source(source, local_files_only=True)
            tokenizer = given.draft or loading.load_tokenizer(source, local_files_only=True)
            kept = trimming.kept_of(source, tokenizer)
            runner = loading.load_runner(
                source,
                device=target.device,
                attention=attention,
                local_files_only=True,
                target_dtype=target.dtype,
                kept=kept,
            )
        other = pairing.compared(target, runner, at_hand, tokenizer)
        choice = None if other is None else Choice.of_pair(other, target, runner)
        return DraftModel(runner, trimming.proposable(other, kept, target.vocab_size), choice, given)


_named: Belongings[DraftModel] = Belongings("draft models")
"""Of a target, by the name of a draft model and attention."""
_given: Belongings[weakref.WeakKeyDictionary[nn.Module, DraftModel]] = Belongings("targets")
"""Of a draft model, by attention and target."""


def drafter_of(draft: Any, target: Runner, attention: str, tokenizers: Tokenizers) -> Drafter | None:
    """A drafter for one call.

    Args:
        draft: see `shoal.integrations.transformers.custom_generate`; None = nothing drafts.

    Raises:
        RequestError: it is none. PairMismatch: it cannot propose for this target.
    """
    if draft is None:
        return None
    if isinstance(draft, nn.Module):
        return _of_model(draft, target, attention, tokenizers)
    drafting = drafting_of(draft)
    if drafting is None and not isinstance(draft, str):
        *names, last = DRAFTINGS
        raise RequestError(
            f"draft_model must be a Transformers model, its directory, {', '.join(names)} or {last}, got {draft!r:.80}"
        )
    if stored(drafting):
        require_tokenizer(drafting, tokenizers.target or loading.tokenizer_at_hand(target.hf))
    source = _source(draft, drafting)
    model = None if source is None else _of_model(source, target, attention, tokenizers)
    return model if drafting is None else drafting.drafter(target, model)


def _source(draft: str, drafting: Drafting | None) -> str | None:
    """The name of the draft model that is part of it. Raises RequestError: the bundled one."""
    source = draft if drafting is None else drafting.source if isinstance(drafting, WITH_MODEL) else None
    if source == BUNDLED:
        raise RequestError("the bundled draft model fits the bundled target alone: give the directory of a draft model")
    return source


def _of_model(source: Any, target: Runner, attention: str, tokenizers: Tokenizers) -> Drafter:
    found = known_of(source, target, attention)
    if found is None or found.tokenizers != tokenizers:
        found = DraftModel.of(source, target, attention, tokenizers)
        if isinstance(source, nn.Module):
            _given.of(source).setdefault(attention, weakref.WeakKeyDictionary())[target.hf] = found
        else:
            _named.of(target.hf)[source, attention] = found
    return model_drafter(found.runner, target.vocab_size, found.proposable, found.choice)


def known_of(source: Any, target: Runner, attention: str) -> DraftModel | None:
    """What earlier calls have made of a draft model, or of its name, beside a target; None = nothing."""
    if isinstance(source, nn.Module):
        return _given.of(source).get(attention, {}).get(target.hf)
    return _named.of(target.hf).get((source, attention))
