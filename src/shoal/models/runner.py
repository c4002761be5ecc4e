"""A model with its ragged cache: tokens in, logits out. The engine sees models only through it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InternalError, UnsupportedModel
from shoal.models import compiled
from shoal.models.cache import Plan
from shoal.models.cache.kept_prompts import KeptPrefixes
from shoal.models.cache.kept_rows import KeptStates
from shoal.models.cache.pass_plan import ALWAYS, PACK_FROM, Parents
from shoal.models.compiled.captures import CAPTURED, Captures
from shoal.models.device import RunnerCounts
from shoal.models.executor import (
    CDecoder,
    CLayers,
    Executor,
    Explanation,
    Modules,
    PassBatch,
    PassOutput,
    Refusal,
    TritonLayers,
    first_of,
)
from shoal.models.lean.forward import LeanPass
from shoal.models.runner_parts import CacheMemory, ModelFacts
from shoal.models.structure import chunk_of, require_vectors
from shoal.types.requests import Prefix


class Runner(ModelFacts):
    """A causal LM that feeds ragged blocks.

    Attributes:
        cache: the slot cache.
        counts: the passes so far, and the time in them.
        captures: the captured rounds, if any.
        lean: the lean pass that computes ordinary passes in place of the model's modules, if set.
        hidden_layers: the numbers of the hidden states that each pass keeps in `hidden`, as
            Transformers numbers them: 0 is the embeddings, i the output of layer i, and the number
            of layers is the input of the head. With them no round is captured or one call.
        vectors: the vectors that negative ids stand for, [count, width], or None (`use_vectors`).
        hidden: the hidden states of the last pass, [rows, q, layers * width], the layers side by
            side; padding columns are meaningless.
    """

    def __init__(
        self, hf: Any, name: str, attention_path: str, context: int, attention_name: str = "auto"
    ) -> None:
        super().__init__(hf, name, attention_path, context, attention_name)
        self.cache = self.new_cache()
        self.counts = RunnerCounts(self.device)
        self.hidden_layers: tuple[int, ...] = ()
        self.hidden: Tensor | None = None
        self.vectors: Tensor | None = None
        self.captures: Captures | None = None
        self.lean: LeanPass | None = None

    @property
    def memory(self) -> CacheMemory:
        """The keys and values in the cache, as memory that grows with the rows."""
        return CacheMemory(self)

    def new_kept(self, tokens: int) -> KeptPrefixes:
        """Returns memory for tokens of rows that have left (`shoal.models.cache.kept_prompts`)."""
        if self.mixers is not None:
            return KeptStates(tokens * self.memory.kept_token_bytes, self.mixers.block)
        return KeptPrefixes(tokens)

    @property
    def skips_padding(self) -> bool:
        """True if a pass leaves out unused columns and their time; captured rounds compute them."""
        return self.packs and self.captures is None

    @property
    def can_keep_prefixes(self) -> bool:
        """True if prompts may be copied in part from tokens that earlier rows have left.

        Prompts are not copied if a drafter wants the hidden states of all tokens, or if recurrent
        states are kept elsewhere than in the cache.
        """
        return not self.hidden_layers and (self.mixers is not None or not self.keeps_states)

    def capture_rounds(self, executor: str | None) -> None:
        """Captures rounds from now on if that is possible.

        Args:
            executor: a name in `shoal.models.compiled`, or None for no more captured rounds.
        """
        self.captures = None
        self.absent.pop(CAPTURED, None)
        if executor is None:
            return
        reason = compiled.attention_obstacle(self.attention_path, self.attention)
        if reason is None and executor == "graphed":
            reason = compiled.obstacle(self.hf)
        if self.mixers is not None and self.attention_path == "interface":
            reason = self.cut_obstacle
        if self.counts_columns or any(map(chunk_of, self.hf.modules())):
            reason = "its layers attend in chunks, or count their columns"
        if reason is None:
            self.captures = self._new_captures(executor)
        else:
            self.absent[CAPTURED] = reason

    def _new_captures(self, executor: str) -> Captures:
        return Captures(self.bridge, self.name, executor, self.attention)

    @property
    def seconds_building(self) -> float:
        """The seconds that captures have taken so far."""
        return self.captures.seconds_building if self.captures is not None else 0.0

    @property
    def capture_failure(self) -> str | None:
        """The reason why captured rounds have ended; None while they go on.

        Times are then measured of other passes than captured rounds, even if the caller asked for
        captures.
        """
        if self.captures is None:
            return None
        if self.ordinary_only:
            return f"a drafter {'reads hidden states' if self.hidden_layers else 'feeds vectors'}"
        return self.captures.failed.end

    @property
    def ordinary_only(self) -> bool:
        """True if a drafter reads hidden states or feeds vectors: then no round is captured."""
        return bool(self.hidden_layers) or self.vectors is not None

    def use_vectors(self, vectors: Tensor) -> None:
        """Sets the vectors [count, width] that negative ids of a block stand for from now on.

        A pass takes them in place of the embeddings of tokens.

        Raises:
            UnsupportedModel: the model takes ids alone, or several processes share it.
        """
        require_vectors(self.hf, self.name)
        self.vectors = vectors.to(self.device, self.dtype).contiguous()

    def fork(self, ordinary: bool = False) -> Runner:
        """Returns the same model for one engine, with a cache and counters of its own.

        Args:
            ordinary: True = no round of it is captured.
        """
        other = self._copied()
        other.device, other.dtype = self.hf.device, self.hf.dtype
        other.counts = RunnerCounts(other.device)  # which may have moved
        other.cache = self.new_cache() if self.captures is None else self.captures.cache_for(other)
        if ordinary:
            other.captures = None
        return other

    def over_same_cache(self, hf: Any, lean: LeanPass | None) -> Runner:
        """Returns a runner of another model over the cache of this runner.

        The other model consists of the first layers of this runner's model. The runner has counters
        of its own, and ordinary passes. Two passes over a cache must not run at once.
        """
        other = self._copied()
        other.hf, other.lean, other.captures, other.bridge = hf, lean, None, self.bridge.of(hf)
        return other

    def _copied(self) -> Runner:
        """Returns a runner of the same model for which no drafter has asked for anything."""
        other = copy.copy(self)
        other.counts = RunnerCounts(other.device)
        other.hidden_layers, other.hidden, other.vectors = (), None, None
        return other

    @torch.inference_mode()
    def feed(
        self,
        slots: Sequence[int],
        tokens: Tensor,
        counts: Sequence[int],
        *,
        parents: Parents | None = None,
        want_logits: bool = True,
        riding: int = 0,
    ) -> Tensor:
        """Appends counts[b] tokens to each row's slot in one pass.

        Args:
            slots: one slot per row, each once.
            tokens: [rows, q] int64; column j of row b is padding from counts[b] on. Negative ids
                are `vectors`.
            counts: 1..q per row.
            parents: the draft tree of each row's tokens, of counts[b] - 1 nodes
                (`shoal.models.cache.pass_plan`); None for chains. Keys are written in the order of
                the columns: `SlotCache.keep` moves an accepted path together.
            want_logits: False if only the cache matters (prompts).
            riding: the number of last rows for which only the cache matters (`PassBatch.riding`).

        Returns:
            Logits [rows, q, vocab]; the logits of padding columns are meaningless. Without
            `want_logits`, some of them.

        Raises:
            OutOfMemory: the memory does not suffice.
            UnsupportedModel: a tree branches, and the model does not take trees (`takes_trees`).
            RequestError: a tree has more than 63 nodes.
        """
        plan = self.plan(slots, counts, packed=self.packs, parents=parents)
        if plan.parents is not None and not self.takes_trees:
            why = self.cut_obstacle or "it does not attend by the positions it is given"
            raise UnsupportedModel(f"{self.name} cannot verify draft trees: {why}")
        return self._counted(self._batch(plan, tokens, want_logits, riding))

    @torch.inference_mode()
    def feed_prefix(self, prefix: Prefix, start: int, tokens: Tensor) -> None:
        """Appends a piece of a prompt to its place in the shared store.

        Args:
            start: the position of the first token.
            tokens: [1, q] int64.

        Raises:
            OutOfMemory: the memory does not suffice.
        """
        plan = Plan.of_prompt(prefix, start, tokens.shape[1], self.device)
        self._counted(self._batch(plan, tokens, want_logits=False))

    def plan(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        packed: bool = False,
        parents: Parents | None = None,
    ) -> Plan:
        """Makes the plan of a pass that appends counts[b] tokens to each row."""
        pack_from = PACK_FROM if self.lean is None else 0.0
        share = ALWAYS if self.counts_columns else pack_from if packed else None
        plan = self.cache.next_plan(slots, counts, self.device, pack_from=share, parents=parents)
        plan.kv_block = self.kv_block
        return plan

    def ordinary(self, plan: Plan, tokens: Tensor, want_logits: bool = True) -> Tensor:
        """Computes a pass by an executor, not by a captured round; returns logits, see `feed`."""
        return self._ordinary(self._batch(plan, tokens, want_logits)).logits

    @property
    def executors(self) -> Sequence[Executor]:
        """The executors in the order in which they are asked; the last one computes every batch."""
        lean = () if self.lean is None else (CDecoder(self.lean), CLayers(self.lean))
        modules = Modules(self.bridge, self.known_ids, self.forward_context)
        if self.bridge.layers is None:
            return (*lean, modules)
        return (*lean, TritonLayers(self.bridge, self.known_ids, modules, self.absent), modules)

    def explain(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        *,
        parents: Parents | None = None,
        want_logits: bool = True,
    ) -> Explanation:
        """Tells which executor computes a pass of `feed`, and why those before it do not."""
        plan = self.plan(slots, counts, packed=self.packs, parents=parents)
        tokens = torch.zeros(plan.rows, plan.q, dtype=torch.long, device=self.device)
        batch = self._batch(plan, tokens, want_logits)
        whole = self.capture_failure or "they compute whole rounds of an engine"
        absent = ({} if self.captures is None else {CAPTURED: whole}) | self.absent
        executor, refusals = first_of(self.executors, batch)
        if executor is None:
            raise InternalError("the modules refused a pass")
        ruled_out = [Refusal(name, reason) for name, reason in absent.items()]
        kernels = self.notes.get("kernels", "")
        return Explanation(executor.name, [*ruled_out, *refusals], kernels, self.kv)

    def _batch(self, plan: Plan, tokens: Tensor, want_logits: bool, riding: int = 0) -> PassBatch:
        plan.final = not want_logits
        return PassBatch(
            plan,
            tokens,
            self.cache,
            method=self.method,
            want_logits=want_logits,
            hidden_layers=self.hidden_layers,
            vectors=self.vectors,
            riding=riding,
        )

    def _counted(self, batch: PassBatch) -> Tensor:
        """Computes a pass, and counts and times it."""
        with self.counts.timed(self.name):
            output = self._ordinary(batch)
            self.counts.executors[output.executor] += 1
            return output.logits

    def _ordinary(self, batch: PassBatch) -> PassOutput:
        """Computes a pass by the first executor that takes it, or raises UnsupportedModel."""
        self.cache.begin(batch.plan)
        executor, refusals = first_of(self.executors, batch)
        if executor is None:
            raise UnsupportedModel(f"{self.name}: {refusals[-1].reason}")
        output = executor(batch)
        self.hidden = output.hidden
        self.cache.end()
        return output
