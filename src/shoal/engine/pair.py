"""A loaded pair, and the engines that it gives to `generate` and `shoal serve`."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch

from shoal.drafting.captured_kinds import is_captured
from shoal.drafting.draft import Draft
from shoal.drafting.pair_loading import DraftModel
from shoal.drafting.protocol import Drafter
from shoal.engine.admission import check_policy
from shoal.engine.batch_size import BatchSizes, require_max_batch
from shoal.engine.engine import Engine
from shoal.engine.prefix_cache import PrefixMemory
from shoal.engine.scheduler import CHUNK
from shoal.errors import RequestError
from shoal.lookahead import controller as controllers
from shoal.models import pretrained
from shoal.models.load_report import load_report
from shoal.models.runner import Runner
from shoal.models.vocabulary import Proposable
from shoal.sampling.acceptance import Rule
from shoal.values import plain, require_bytes

if TYPE_CHECKING:
    from typing_extensions import Self


class Pair:
    """A loaded pair. As a context manager it closes itself.

    Attributes:
        target: the target's `Runner`.
        draft_model: the draft model's `Runner`; None = there is no second model.
        tokenizer: the Transformers tokenizer; None = ids only.
        max_batch: see `shoal.loader.load`.
        prefix_sharing: see `shoal.loader.load`.
        prefixes: the prefixes of earlier calls; None = none are kept.
        drafting: makes drafters other than the draft model's; None = there are none.
        proposable: the tokens that a draft model may propose.
        vocabularies: the vocabularies of a pair whose draft model has another tokenizer.
        choice: the choice of the method by which it drafts, by counts; None with the same
            tokenizer.
        shared: the tokens that a draft model may propose, if these are not all.
        rule: a rule for all runs, in place of the one that a run asks for (experiments); None =
            each run has its own.
        guide: the `Runner` of the guide; None = there is none.
        expert: the `Runner` of the expert; None = the target.
    """

    def __init__(
        self,
        target: Runner,
        draft_model: Runner | None = None,
        tokenizer: Any = None,
        *,
        max_batch: int | str = "auto",
        prefix_sharing: str = "auto",
        prefix_memory: int = 0,
        drafting: Draft | None = None,
        proposable: Proposable | None = None,
    ) -> None:
        self._models: tuple[Runner, Runner | None] | None = (target, draft_model)
        check_policy(prefix_sharing)
        self.tokenizer = tokenizer
        self.max_batch = require_max_batch(plain(max_batch))
        self.prefix_sharing = prefix_sharing
        self.drafting = None if drafting is None or drafting.is_model else drafting
        self.proposable = proposable or Proposable()
        self.vocabularies, self.shared = self.proposable.vocabularies, self.proposable.shared
        self._draft = (
            None if draft_model is None else DraftModel.of(draft_model, target, self.proposable)
        )
        self.choice = None if self._draft is None else self._draft.choice
        self.rule: Rule | None = None
        self.guide: Runner | None = None
        self.expert: Runner | None = None
        self.pair_costs = controllers.PairCosts(packed=target.skips_padding)
        self._batch_sizes = BatchSizes()
        self._costs_of: weakref.WeakKeyDictionary[Drafter, controllers.PairCosts] = (
            weakref.WeakKeyDictionary()
        )
        self.eos = pretrained.eos_ids(target.hf, tokenizer)
        self.prefixes = self._prefix_memory(require_bytes("prefix_memory", plain(prefix_memory)))

    @property
    def target(self) -> Runner:
        """The target's `Runner`. Raises RequestError once this is closed."""
        return self._open()[0]

    @property
    def draft_model(self) -> Runner | None:
        """The draft model's `Runner`, or None; raises RequestError once the pair is closed."""
        return self._open()[1]

    @property
    def drafter_name(self) -> str | None:
        """The name of the draft model or other drafter with its options; None = plain decoding."""
        if self.drafting is not None:
            return self.drafting.name
        return None if self.draft_model is None else self.draft_model.name

    def _open(self) -> tuple[Runner, Runner | None]:
        if self._models is None:
            raise RequestError("this Shoal is closed: load the pair again")
        return self._models

    def close(self) -> None:
        """Frees caches and models.

        A model object that was given to `load` stays its owner's. Later calls raise RequestError.
        Closing twice has no further effect.
        """
        self._models = self.prefixes = self._draft = self.guide = self.expert = None
        gc.collect()  # engines and models hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def engine(
        self,
        lookahead_name: object,
        rule: Rule,
        *,
        drafter: Drafter | None = None,
        chunk: int = CHUNK,
        kv_bytes: int | None = None,
        prefix_bytes: int | None = None,
        quantum: int | None = None,
    ) -> Engine:
        """Returns an engine for this pair, with caches of its own.

        It is for callers that submit requests one by one, as `shoal serve` does.

        Args:
            lookahead_name: the draft length, see `shoal.lookahead.controller.by_name`.
            rule: the rule by which drafts are drawn and judged.
            drafter: a drafter in place of the pair's own.
            chunk: see `shoal.engine.engine.Engine`.
            kv_bytes: see `shoal.engine.engine.Engine`.
            prefix_bytes: the bytes for prompts of earlier requests of this engine alone; None = the
                pair's memory, if it has one.
            quantum: see `shoal.engine.engine.Engine`.

        Raises:
            RequestError: the lookahead is unknown.
        """
        costs = self.pair_costs
        max_batch = self._batch_sizes.of(
            self.max_batch, costs if drafter is None else drafter, lookahead_name
        )
        if drafter is not None:
            costs = self._costs_of.setdefault(
                drafter, controllers.PairCosts(packed=self.target.skips_padding)
            )
        else:
            drafter = self.new_drafter()
        captured = is_captured(self.target, drafter)
        controller = controllers.by_name(lookahead_name, costs, drafter, captured=captured)
        engine = Engine(
            self.target,
            drafter,
            controller,
            max_batch=max_batch,
            tokenizer=self.tokenizer,
            eos=self.eos,
            rule=rule,
            prefix_sharing=self.prefix_sharing,
            chunk=chunk,
            kv_bytes=kv_bytes,
            prefixes=self.prefixes if prefix_bytes is None else self._prefix_memory(prefix_bytes),
            quantum=quantum,
            guide=self.guide,
            expert=self.expert,
        )
        engine.stats.loaded = self.loaded
        return engine

    def _prefix_memory(self, nbytes: int) -> PrefixMemory | None:
        """Returns a memory for prefixes; None if `nbytes` is 0 or the target cannot keep them."""
        possible = nbytes and self.target.can_keep_prefixes
        return PrefixMemory(self.target, self.draft_model, nbytes) if possible else None

    def new_drafter(self) -> Drafter | None:
        """Returns a drafter of the pair for a new engine; None = plain decoding."""
        model = None if self._draft is None else self._draft.drafter(self.target)
        return model if self.drafting is None else self.drafting.drafter(self.target, model)

    @property
    def loaded(self) -> dict[str, dict[str, str] | None]:
        """The choices that were made for "target", "draft", "guide" and "expert" at loading.

        See `shoal.models.load_report`.
        """
        drafter = None if self.drafting is None else self.drafting.name
        guides = {"guide": self.guide, "expert": self.expert}
        return load_report(self.target, self.draft_model, drafter, guides)
