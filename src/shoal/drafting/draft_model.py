"""A draft model beside a target: the tokens that it may propose, and its way of drafting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.drafting.model import ModelDrafter
from shoal.drafting.multi_exit import MultiExitDrafter, exits_of
from shoal.drafting.other_vocabulary import MethodChoice, OtherVocabularyDrafter
from shoal.errors import PairMismatch
from shoal.models import trimming, vocabulary
from shoal.models.runner import Runner
from shoal.models.trimming import Proposable


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of a pair, from Transformers.

    Attributes:
        target: the target's tokenizer; None = unknown.
        draft: the draft model's tokenizer; None = unknown.
    """

    target: Any = None
    draft: Any = None


@dataclass(frozen=True)
class DraftModel:
    """A draft model beside a target.

    Attributes:
        runner: the model, with a cache that is not used.
        proposable: the tokens that it may propose.
        choice: the choice of the method by which it drafts, by counts; None with the target's
            tokenizer.
    """

    runner: Runner
    proposable: Proposable
    choice: MethodChoice | None

    @staticmethod
    def of(runner: Runner, target: Runner, proposable: Proposable) -> DraftModel:
        """Makes a draft model whose counts begin at 0."""
        other = proposable.vocabularies
        choice = None if other is None else MethodChoice.of_pair(other, target, runner)
        return DraftModel(runner, proposable, choice)

    @staticmethod
    def load(
        source: Any,
        target: Runner,
        tokenizers: Tokenizers,
        load: Callable[[Sequence[int] | None], Runner],
    ) -> DraftModel:
        """Loads a draft model and compares it with its target.

        Args:
            source: a Transformers model, or a Hub id or directory.
            target: the model to draft for.
            tokenizers: the tokenizers of both.
            load: loads the model; its argument is the ids that the model's head is to keep (None =
                all).

        Raises:
            PairMismatch: the model cannot propose for this target.
        """
        named = not isinstance(source, nn.Module)
        kept = trimming.kept_of(source, tokenizers.draft) if named else None
        runner = load(kept)
        other = vocabulary.compared(target, runner, tokenizers.target, tokenizers.draft)
        found = trimming.proposable(other, kept, target.vocab_size)
        return DraftModel.of(runner, target, found)

    def require_guide(self) -> None:
        """Raises PairMismatch if the model cannot guide the target (`shoal.sampling.guidance`)."""
        if self.proposable != Proposable():
            raise PairMismatch(
                f"{self.runner.name} cannot guide its target: it has another tokenizer, or a head "
                f"with a part of the tokens; name another guide"
            )

    def drafter(self, target: Runner) -> ModelDrafter:
        """Makes a drafter for a new engine of the target."""
        runner, size, proposable = self.runner, target.vocab_size, self.proposable
        if proposable.vocabularies is not None and self.choice is not None:
            other = proposable.vocabularies
            return OtherVocabularyDrafter(runner.fork(), size, other, self.choice)
        exits, enough = exits_of(runner) if proposable.shared is None else ([], 0.0)
        if exits:
            return MultiExitDrafter(runner.fork(), size, exits, enough)
        return ModelDrafter(runner.fork(), size, proposable.shared)
