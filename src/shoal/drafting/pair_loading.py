"""The loading of a pair: a target, the draft model or other drafter that `draft=` names, a guide
and an expert.

`DraftModel` is a draft model beside a target: the tokens that it may propose, and its way of
drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from shoal.drafting.draft import BUNDLED, DRAFT_GUIDES, TARGET_GUIDES, Draft, read_draft
from shoal.drafting.model import ModelDrafter
from shoal.drafting.multi_exit import MultiExitDrafter, exits_of
from shoal.drafting.other_vocabulary import MethodChoice, OtherVocabularyDrafter
from shoal.drafting.protocol import Drafter
from shoal.errors import PairMismatch, RequestError
from shoal.models import loading, pretrained, sources, vocabulary
from shoal.models.load_report import LoadStages, StageModel, StageWatch
from shoal.models.loading import LoadOptions
from shoal.models.passes import choose_passes
from shoal.models.quantize import parse as parse_formats
from shoal.models.runner import Runner
from shoal.models.sources import require_source
from shoal.models.vocabulary import Proposable, require_guide


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
        kept = vocabulary.kept_of(source, tokenizers.draft) if named else None
        runner = load(kept)
        other = vocabulary.compared(target, runner, tokenizers.target, tokenizers.draft)
        kept_ids = vocabulary.proposable(other, kept, target.vocab_size)
        return DraftModel.of(runner, target, kept_ids)

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


Source = str | Path | nn.Module
"""A Hub id, a directory or a Transformers model."""


@dataclass(frozen=True)
class PairOptions:
    """The options of a pair that is loaded.

    Attributes:
        target: the options of the target; its `quantize` is not read.
        draft_revision: the draft model's revision on the Hub.
        quantize: the formats of both, see `shoal.models.quantize.parse`.
        tokenizer: a Transformers tokenizer; None = the one saved with the target.
        guide: the guide, `DRAFT_GUIDES` or `TARGET_GUIDES`; None = there is none.
        expert: the expert, `DRAFT_GUIDES` or `TARGET_GUIDES`; None = the target's own logits
            of the prompt.
    """

    target: LoadOptions
    draft_revision: str | None = None
    quantize: str | Mapping[str, str] = "off"
    tokenizer: Any = None
    guide: Source | None = None
    expert: Source | None = None

    @property
    def other_guides(self) -> dict[StageModel, Source]:
        """The guide and the expert that are loaded beside the pair, by role."""
        given: dict[StageModel, Source | None] = {"guide": self.guide, "expert": self.expert}
        own = (None, DRAFT_GUIDES, TARGET_GUIDES)
        return {role: one for role, one in given.items() if one is not None and one not in own}

    def guides(
        self, loaded: Mapping[StageModel, Runner], target: Runner, draft: Runner | None
    ) -> dict[str, Runner | None]:
        """Returns the guide and the expert by role; None = there is none."""
        own = {DRAFT_GUIDES: draft, TARGET_GUIDES: target}
        given = {"guide": self.guide, "expert": self.expert}
        others = {str(role): one for role, one in loaded.items()}
        return {
            role: others.get(role, own.get(source) if isinstance(source, str) else None)
            for role, source in given.items()
        }


@dataclass(frozen=True)
class LoadedPair:
    """A pair that was loaded.

    Attributes:
        target: the target.
        draft: the draft model; None = there is none.
        tokenizer: the target's tokenizer; None = unknown.
        drafting: the drafter that `draft=` names; None = plain decoding, or the bundled pair.
        proposable: the tokens that the draft model may propose; None = there is no draft model.
        guides: the guide and the expert by role; None = there is none.
    """

    target: Runner
    draft: Runner | None
    tokenizer: Any
    drafting: Draft | None
    proposable: Proposable | None
    guides: Mapping[str, Runner | None]


def load_pair(
    target: Source | None, draft: Source | Drafter | None, options: PairOptions, stages: LoadStages
) -> LoadedPair:
    """Loads a target, its drafter and its guides. For arguments and errors see `shoal.load`."""
    drafting = read_draft(draft)
    target, model = _sources(target, drafting)
    formats = parse_formats(options.quantize)
    _check_options(target, model, drafting, options, formats)
    load_options = _within_reach(target, model, options)
    tokenizer = options.tokenizer
    if tokenizer is None:
        with stages.stage("tokenizer", "target"):
            tokenizer = _tokenizer(target, load_options)
    if drafting is not None:
        drafting.require_files(tokenizer)
    runner = _runner(target, replace(load_options, quantize=formats["target"]), stages.of("target"))
    draft_model = None
    if model is not None:
        asked_of_draft = replace(
            load_options,
            revision=options.draft_revision,
            quantize=formats["draft"],
            target_dtype=runner.dtype,
            tensor_parallel=False,
            kv="off",
        )
        draft_model = _draft_model(model, runner, tokenizer, asked_of_draft, stages.of("draft"))
    draft_runner = None if draft_model is None else draft_model.runner
    asked_of_guides = replace(
        load_options, revision=None, target_dtype=runner.dtype, tensor_parallel=False, kv="off"
    )
    others = {
        role: _guide(source, runner, tokenizer, asked_of_guides, stages.of(role))
        for role, source in options.other_guides.items()
    }
    if draft_model is not None and DRAFT_GUIDES in (options.guide, options.expert):
        draft_model.require_guide()
    loaded: list[tuple[StageModel, Source | None, Runner | None]] = [
        ("target", target, runner),
        ("draft", model, draft_runner),
        *((role, options.other_guides[role], one) for role, one in others.items()),
    ]
    for role, source, one in loaded:
        if one is not None:
            owned = not isinstance(source, nn.Module) and not load_options.tensor_parallel
            with stages.of(role)("passes"):
                choose_passes(one, load_options.compile, owned=owned)
    if draft_runner is not None:
        exits_of(draft_runner)  # exits that it does not have are refused here
    if drafting is not None:
        drafting = drafting.settled(runner)
        drafting.require_fit(runner)
    proposable = None if draft_model is None else draft_model.proposable
    guides = options.guides(others, runner, draft_runner)
    return LoadedPair(runner, draft_runner, tokenizer, drafting, proposable, guides)


def _sources(target: Source | None, drafting: Draft | None) -> tuple[Source, Source | None]:
    """Returns the target and the draft model to load, the bundled ones by their directories.

    Raises:
        RequestError: one is bundled and the other is not.
    """
    model: Source | None = None if drafting is None else drafting.source
    if target is None:
        if model not in (None, BUNDLED):
            raise RequestError("a draft model was given without a target model")
        bundled = drafting is None or model == BUNDLED
        return sources.bundled("target"), sources.bundled("drafter") if bundled else None
    if model == BUNDLED:
        raise RequestError(
            "the bundled draft model fits the bundled target alone: give the directory of a "
            "draft model"
        )
    return target, model


def _check_options(
    target: Source,
    model: Source | None,
    drafting: Draft | None,
    options: PairOptions,
    formats: Mapping[str, str],
) -> None:
    """Raises RequestError for options that a source does not take."""
    load_options, draft_revision = options.target, options.draft_revision
    placing = {
        "dtype": load_options.dtype,
        "device": load_options.device,
        "revision": load_options.revision,
        "tensor_parallel": load_options.tensor_parallel,
    }
    _check_source("target", target, **placing, quantize=formats["target"])
    for_models = draft_revision is not None or formats["draft"] != "off"
    if model is None and drafting is not None and for_models:
        raise RequestError(
            f"{drafting.name} is no model: draft_revision and quantize=draft are for models"
        )
    _check_source("draft", model, draft_revision=draft_revision, quantize=formats["draft"])
    _check_guides(options, model)


def _check_guides(options: PairOptions, model: Source | None) -> None:
    """Raises RequestError for a guide or an expert that cannot be one."""
    for role, source in options.other_guides.items():
        _check_source(role, source)
    for role, one in (("guide", options.guide), ("expert", options.expert)):
        if one == DRAFT_GUIDES and model is None:
            raise RequestError(
                f"{role}='draft' needs a draft model: name another {role}, or give draft="
            )
        if one == TARGET_GUIDES and options.target.tensor_parallel:
            raise RequestError(
                f"{role}='target' does not go with tensor_parallel: name another {role}"
            )
    if options.expert is not None and options.guide is None:
        raise RequestError("an expert needs a guide, which samples are led away from: give guide=")


def _check_source(role: str, source: Source | None, **options: Any) -> None:
    """Raises RequestError if a source is no model, or a model object has options for loading."""
    if source is None or isinstance(source, (str, Path)):
        return
    if not pretrained.is_model(source):
        raise RequestError(
            f"{role} must be a hub id, a directory or a Transformers model, got a "
            f"{type(source).__name__}"
        )
    given = [name for name, value in options.items() if value not in ("auto", "off", None, False)]
    if given:
        raise RequestError(
            f"{role} is a model object and used as it is: {' and '.join(given)} can only be "
            f"given with a name"
        )


def _within_reach(target: Source, model: Source | None, options: PairOptions) -> LoadOptions:
    """Returns the target's options; files are local where one of the models is.

    Raises:
        RequestError: a model is not within reach.
    """
    load_options = options.target
    sources = (
        (target, load_options.revision),
        (model, options.draft_revision),
        *((source, None) for source in options.other_guides.values()),
    )
    local = [
        require_source(name, version, load_options.local_files_only)
        for name, version in sources
        if isinstance(name, (str, Path))
    ]
    return replace(load_options, local_files_only=any(local))


def _draft_model(
    source: Source, target: Runner, tokenizer: Any, options: LoadOptions, watch: StageWatch
) -> DraftModel:
    tokenizers = Tokenizers(tokenizer, _tokenizer(source, options))
    return DraftModel.load(
        source, target, tokenizers, lambda kept: _runner(source, replace(options, kept=kept), watch)
    )


def _guide(
    source: Source, target: Runner, tokenizer: Any, options: LoadOptions, watch: StageWatch
) -> Runner:
    guide = _runner(source, options, watch)
    require_guide(target, guide, tokenizer, _tokenizer(source, options))
    return guide


def _tokenizer(source: Source, options: LoadOptions) -> Any:
    if isinstance(source, nn.Module):
        return pretrained.tokenizer_at_hand(source)
    return pretrained.load_tokenizer(
        source,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        local_files_only=options.local_files_only,
    )


def _runner(source: Source, options: LoadOptions, watch: StageWatch) -> Runner:
    if isinstance(source, nn.Module):
        with watch("checking"):
            name = pretrained.name_of(source)
            return loading.wrap(
                source, name, options.attention, strict=options.strict, kv=options.kv
            )
    return loading.load_runner(source, options, watch)
