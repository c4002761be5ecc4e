"""A model with its ragged cache: tokens in, logits out. The engine sees models only through it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InternalError, RequestError, UnsupportedModel
from shoal.models import compiled
from shoal.models.attention import methods
from shoal.models.attention.inputs import AttentionInputs
from shoal.models.attention.native import takes
from shoal.models.available import explained
from shoal.models.bridge import Bridge, Layers
from shoal.models.cache import Plan, SlotCache
from shoal.models.cache.kept_prompts import KeptPrefixes
from shoal.models.cache.kept_rows import KeptStates
from shoal.models.cache.mixing import BLOCK, Mixers
from shoal.models.cache.pass_plan import PACK_FROM, Parents
from shoal.models.cache.states import StateCache
from shoal.models.compiled.captures import CAPTURED
from shoal.models.compiled.draft_functions import DraftedStep
from shoal.models.device_time import Spans
from shoal.models.executors.executor import (
    Executor,
    Explanation,
    PassBatch,
    PassOutput,
    Refusal,
    require_vectors,
)
from shoal.models.executors.transformers_models import (
    C_DECODER,
    CDecoder,
    LayerLoop,
    Modules,
    TritonLayers,
)
from shoal.models.forks import expect_forks
from shoal.models.lean.forward import LeanPass
from shoal.models.lean.whole import Drawing, LeanSteps
from shoal.models.load_checks import KeptChecks
from shoal.models.weights import nbytes
from shoal.models.weights.groups import GroupLinear
from shoal.types.requests import Prefix

BYTES_AT_ONCE = 160 << 20
"""The bytes of weights that passes may read before Python looks at their tokens."""


class Runner:
    """A causal LM that feeds ragged blocks.

    Attributes:
        has_modules: True if `hf` is a Transformers model, whose modules and weights drafters and
            executors may read.
        hf: the Transformers model, never modified.
        name: the name of the model as the user wrote it.
        attention_path: "interface" or "mask" (`shoal.models.bridge`).
        attention: the name of the attention method.
        context: the largest number of tokens that a row may hold.
        vocab_size: the width of the logits.
        known_ids: the number of ids that the model can read.
        device: the device of the model when the runner was made or forked.
        dtype: the number format of the model when the runner was made or forked.
        cache: the slot cache.
        passes: the number of forward calls, see `take_counters`.
        seconds: the time spent in forward calls that were computed elsewhere, see `count`.
        spans: the stretches of time spent in forward calls.
        captures: the captured rounds, if any.
        lean: the lean pass that computes ordinary passes in place of the model's modules, if set.
        packs: True if blocks with many unused columns are fed without them, as one sequence.
        shares: True if rows of a group may read one stored prompt.
        takes_trees: True if a block's tokens may be draft trees; False if the model finds positions
            itself, or keeps recurrent states.
        mixers: the modules that keep recurrent states (`shoal.models.mixers`); None if none does.
        hidden_layers: the numbers of the hidden states that each pass keeps in `hidden`, as
            Transformers numbers them: 0 is the embeddings, i the output of layer i, and the number
            of layers is the input of the head. The tuple is empty until a drafter asks for hidden
            states. With hidden states no round is captured and no pass is one call, as captured
            rounds and passes in one call return none.
        vectors: the vectors that negative ids of a block stand for, [count, width] in the model's
            number format; None if all ids are tokens. With vectors no round is captured.
        hidden: the hidden states of the last pass, [rows, q, layers * width], the layers side by
            side; padding columns are meaningless.
        forward_context: the function of the context that is entered during each pass
            (`shoal.models.fixed_shapes`).
        notes: the measurements and choices of the load, by subject.
        computed: the number of passes by executor, see `take_executors`.
        absent: the executors that were ruled out when the model was loaded, and the reasons.
        self_check_error: the error that `selfcheck` measured; None before it has run.
        kept_checks: the results of checks that an earlier load has kept.
    """

    has_modules = True

    def __init__(
        self, hf: Any, name: str, attention_path: str, context: int, attention_name: str = "auto"
    ) -> None:
        self.hf, self.name, self.attention_path, self.context = hf, name, attention_path, context
        self._method = methods.method_named(attention_name)
        self.attention = attention_name
        if attention_path == "mask" and attention_name not in ("auto", "pad"):
            raise RequestError(
                f"{name} attends by its own eager code under a mask: attention must be 'auto' "
                f"or 'pad', got {attention_name!r}"
            )
        expect_forks()
        # Stored here: Transformers looks through the parameters at each access, and a round makes
        # a dozen.
        self.device: torch.device = hf.device
        self.dtype: torch.dtype = hf.dtype
        self.mixers: Mixers | None = None
        self.vocab_size = int(hf.get_output_embeddings().weight.shape[0])
        self.known_ids = self.vocab_size
        self.cache = self.new_cache()
        self.passes = 0
        self.seconds = 0.0
        self.computed: Counter[str] = Counter()
        self.absent: dict[str, str] = {}
        self.spans = Spans(self.device)
        self.hidden_layers: tuple[int, ...] = ()
        self.hidden: Tensor | None = None
        self.vectors: Tensor | None = None
        self.captures: compiled.Captures | None = None
        self.lean: LeanPass | None = None
        self.self_check_error: float | None = None
        self.kept_checks = KeptChecks()
        self._bridge = Bridge(hf, attention_path, context)
        self.takes_trees = self._bridge.takes_positions
        self.packs = attention_path == "interface" and self._bridge.takes_positions
        self.shares = self.packs and attention_name in methods.SHARING
        self.forward_context: Callable[[], AbstractContextManager[None]] = nullcontext
        self.notes: dict[str, str] = {}
        self._kv_block = methods.KV_BLOCKS.get(attention_name, 1)

    def new_cache(self) -> SlotCache:
        """Returns an empty cache of the kind that the executors take."""
        return SlotCache() if self.mixers is None else StateCache(self.mixers)

    def new_kept(self, tokens: int) -> KeptPrefixes:
        """Returns memory for tokens of rows that have left (`shoal.models.cache.kept_prompts`)."""
        if self.mixers is not None:
            return KeptStates(tokens * self.kept_token_bytes)
        return KeptPrefixes(tokens)

    @property
    def parameter_bytes(self) -> int:
        """The number of bytes that the weights take, tied ones counted once."""
        return nbytes(list(self.hf.parameters()))

    @property
    def parameter_count(self) -> int:
        """The number of parameters, tied ones counted once."""
        grouped = [module for module in self.hf.modules() if isinstance(module, GroupLinear)]
        return sum(layer.in_features * layer.out_features for layer in grouped) + sum(
            each.numel() for each in self.hf.parameters() if each.is_floating_point() or not grouped
        )

    def cache_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        """Returns the number of bytes that a cache of that size takes."""
        slots, capacity = self._room(slots, capacity)
        return self._bytes(slots, capacity, cells)

    @property
    def token_bytes(self) -> int:
        """The number of bytes of the keys and values of one token of one row, over all layers."""
        if not self.cache.measured:
            self._learn_bytes()
        return self.cache.bytes_per_token()

    @property
    def kept_token_bytes(self) -> int:
        """The number of bytes of a token that is kept for later rows, with its share of states."""
        own = self.token_bytes
        return own if self.mixers is None else own + -(-self.cache.bytes_per_slot() // BLOCK)

    @property
    def block(self) -> int:
        """The number of tokens at whose multiples passes over prompts end; 0 = anywhere."""
        return 0 if self.mixers is None or self.mixers.stepwise else BLOCK

    def grown_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        """Returns the number of bytes of the cache once it also has room for that size."""
        cache, (slots, capacity) = self.cache, self._room(slots, capacity)
        return self._bytes(
            max(slots, cache.slots), max(capacity, cache.capacity), max(cells, cache.cells)
        )

    def _bytes(self, slots: int, capacity: int, cells: int) -> int:
        tokens = slots * capacity + cells
        return tokens * self.token_bytes + slots * self.cache.bytes_per_slot()

    @property
    def allocated_bytes(self) -> int:
        """The number of bytes that the cache takes now."""
        return self.cache.nbytes()

    @property
    def attends_in_one_call(self) -> bool:
        """True if attention is one call for a row's own keys and the shared ones."""
        return methods.resolved(self.attention, self.device, self.dtype) in methods.KERNELS

    @property
    def captures_without_prefixes(self) -> bool:
        """True if rows whose prompt is stored once would keep rounds from being captured."""
        return self.captures is not None and not self.captures.knows_prefixes

    def _learn_bytes(self) -> None:
        """Feeds one token, as the bytes of a token in the cache are known only after a pass."""
        self.reserve(1, 1)
        self.feed(
            [0], torch.zeros(1, 1, dtype=torch.long, device=self.device), [1], want_logits=False
        )
        self.cache.rollback(0, 0)
        self.take_counters()

    def use_attention(self, name: str, *, instead_of: str) -> None:
        """Chooses an attention method, unless the caller asked for another than `instead_of`.

        Raises:
            RequestError: the name is unknown.
        """
        if self.attention == instead_of and self.attention_path == "interface":
            self.attention, self._method = name, methods.method_named(name)

    @property
    def skips_padding(self) -> bool:
        """True if a pass takes the time of its real tokens only.

        Such a pass leaves unused columns out; captured rounds compute them.
        """
        return self.packs and self.captures is None

    @property
    def cut_obstacle(self) -> str | None:
        """The reason why the model's first layers cannot be computed alone; None if they can."""
        return None if self.mixers is None else "its layers keep recurrent states"

    @property
    def can_keep_prefixes(self) -> bool:
        """True if prompts may be copied in part from tokens that earlier rows have left.

        Prompts are not copied if a drafter wants the hidden states of all tokens, or if layers that
        keep recurrent states go on from them token by token alone.
        """
        goes_on = self.mixers is not None and not self.mixers.stepwise
        return not self.hidden_layers and (goes_on or not self.keeps_states)

    @property
    def keeps_states(self) -> bool:
        """True if layers keep recurrent states, which go back to few earlier lengths."""
        return self.mixers is not None

    @property
    def can_be_lean(self) -> bool:
        """True if a pass may leave the model's modules out.

        The modules are needed if the caller asked for bits that depend on them.
        """
        return self.packs and self.forward_context is nullcontext

    def capture_rounds(self, executor: str | None) -> None:
        """Captures rounds from now on if that is possible.

        Args:
            executor: a name in `shoal.models.compiled`, or None for no more captured rounds.
        """
        self.captures = None
        self.absent.pop(CAPTURED, None)
        if executor is None:
            return
        reason = compiled.obstacle(self.hf) if executor == "graphed" else None
        if self.attention_path != "interface":
            reason = "the model attends by its own code"
        elif self.mixers is not None:
            reason = self.cut_obstacle
        elif self.attention not in compiled.ATTENTION:
            reason = f"attention={self.attention!r}"
        if reason is None:
            self.captures = self._new_captures(executor)
        else:
            self.absent[CAPTURED] = reason

    def _new_captures(self, executor: str) -> compiled.Captures:
        return compiled.Captures(self._bridge, self.name, executor, self.attention)

    @property
    def fused_layers(self) -> Layers | None:
        """The layers that compute passes in place of the model's modules, or None.

        They are the same for all runners forked from this one.
        """
        return self._bridge.layers

    @fused_layers.setter
    def fused_layers(self, layers: Layers | None) -> None:
        self._bridge.layers = layers

    def plain_logits(self, tokens: Tensor) -> Tensor:
        """Computes the logits [rows, q, vocab] without a cache, by the model's own attention.

        The passes are checked against these logits.
        """
        return self.plain_states(tokens, ())[0]

    def plain_states(self, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Computes such logits, and the hidden states of some layers, see `hidden_layers`."""
        return self._bridge.plain_states(tokens, layers)

    def stepped_logits(self, tokens: Tensor, first: int) -> Tensor:
        """Computes the logits of a prompt of `first` tokens, and of others one by one after it.

        Passes are checked against these logits if layers keep recurrent states that they compute
        in another way for several tokens.
        """
        return self._bridge.stepped_logits(tokens, first)

    @property
    def seconds_building(self) -> float:
        """The seconds that captures have taken so far."""
        return self.captures.seconds_building if self.captures is not None else 0.0

    @property
    def capture_failure(self) -> str | None:
        """The reason why captured rounds have ended; None while they go on.

        Measured times are then not those of captured rounds, even if the caller asked for them.
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

    def fork(self) -> Runner:
        """Returns the same model for one engine, with a cache and counters of its own."""
        other = copy.copy(self)
        other.device, other.dtype = self.hf.device, self.hf.dtype
        other.cache = self.new_cache() if self.captures is None else self.captures.cache_for(other)
        other.passes, other.seconds, other.spans = 0, 0.0, Spans(other.device)
        other.computed = Counter()
        other.hidden_layers, other.hidden, other.vectors = (), None, None
        return other

    def fork_for_ordinary_passes(self) -> Runner:
        """Returns the same model for ordinary passes, over a cache without captures."""
        other = self.fork()
        other.captures = None
        return other

    def over_same_cache(self, hf: Any, lean: LeanPass | None) -> Runner:
        """Returns a runner of another model over this one's cache.

        The other model's layers are the first layers of this one. The runner has counters of its
        own, and ordinary passes. Two passes over a cache must not run at the same time.
        """
        other = copy.copy(self)
        other.hf, other.lean, other.captures = hf, lean, None
        other._bridge = self._bridge.of(hf)
        other.passes, other.seconds, other.spans = 0, 0.0, Spans(other.device)
        other.computed = Counter()
        other.hidden_layers, other.hidden, other.vectors = (), None, None
        return other

    def take_counters(self) -> tuple[int, float]:
        """Returns the passes, and the seconds in them on the device, since the last call.

        Waits for the last of the passes.
        """
        taken = self.passes, self.seconds + self.spans.take()
        self.passes, self.seconds = 0, 0.0
        return taken

    @contextmanager
    def noting_windows(self) -> Iterator[set[int | None]]:
        """Collects the sliding windows that the layers ask for within the context.

        The window None stands for full attention.
        """
        method = self._method
        seen: set[int | None] = set()

        def noting(inputs: AttentionInputs) -> Tensor:
            seen.add(inputs.window)
            return method(inputs)

        self._method = noting
        try:
            yield seen
        finally:
            self._method = method

    def reserve(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Makes room in the cache for rows and shared prompts.

        Args:
            slots: the number of rows.
            capacity: the number of tokens of a row.
            cells: the number of tokens of shared prompts.

        Raises:
            OutOfMemory: the memory does not suffice.
        """
        cache, (slots, capacity) = self.cache, self._room(slots, capacity)
        if self.captures is not None and (
            slots > cache.slots or capacity > cache.capacity or cells > cache.cells
        ):
            self.captures.forget(cache)
        with explained(self.name):
            cache.reserve(slots, capacity, cells)

    def trim(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Gives unused room of the cache back, and drops rounds that were captured over it."""
        slots, capacity = self._room(slots, capacity)
        if self.captures is not None and (slots, capacity, cells) != (
            self.cache.slots,
            self.cache.capacity,
            self.cache.cells,
        ):
            self.captures.forget(self.cache)
        self.cache.trim(slots, capacity, cells)

    def _room(self, slots: int, capacity: int) -> tuple[int, int]:
        """Returns the slots and the tokens per slot of a cache with room for that size.

        They are those of captured rounds, in whole blocks of keys.
        """
        if self.captures is not None:
            by_kernel = self.captures.knows_prefixes
            slots, capacity = compiled.reservation(slots, capacity, by_kernel=by_kernel)
        return slots, -(-capacity // self._kv_block) * self._kv_block

    @torch.inference_mode()
    def feed(
        self,
        slots: Sequence[int],
        tokens: Tensor,
        counts: Sequence[int],
        *,
        parents: Parents | None = None,
        want_logits: bool = True,
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
        with self._counted():
            return self._computed(self._batch(plan, tokens, want_logits))

    @property
    def rounds_at_once(self) -> int:
        """The most plain rounds that `lean_steps` may compute before Python looks at them.

        So many passes read no more than `BYTES_AT_ONCE` of weights: ten milliseconds at the most.
        """
        whole = None if self.captures is not None or self.lean is None else self.lean.whole
        return 1 if whole is None or self.ordinary_only else BYTES_AT_ONCE // whole.weight_bytes

    def lean_steps(
        self,
        slots: Sequence[int],
        pending: Tensor,
        counts: Sequence[int],
        most: int,
        drawing: Drawing,
    ) -> Callable[[], DraftedStep | None] | None:
        """Returns a drafter's step of a round as a lean pass (`shoal.models.lean.whole`).

        Returns None if lean passes cannot compute the steps. A step returns None if it failed; then
        the rows must go back to their earlier lengths.
        """
        lean = (
            None
            if self.captures is not None or self.lean is None or self.lean.decoder.stale
            else self.lean.whole
        )
        if lean is None or self.vocab_size < drawing.vocab_size:
            return None
        plan = self.plan(slots, counts, packed=self.packs)
        if not takes(plan) or plan.kv + most - 1 > self.cache.capacity:
            return None
        steps = LeanSteps(lean, self.cache, plan, pending, most, drawing)

        def step() -> DraftedStep | None:
            with self._counted():
                drawn = steps()
                self.computed[C_DECODER] += 1
                return drawn

        return step

    def _counted(self) -> _Counted:
        return _Counted(self)

    @torch.inference_mode()
    def feed_prefix(self, prefix: Prefix, start: int, tokens: Tensor) -> None:
        """Appends a piece of a prompt to its place in the shared store.

        Args:
            start: the position of the first token.
            tokens: [1, q] int64.

        Raises:
            OutOfMemory: the memory does not suffice.
        """
        plan = Plan([], [start], [tokens.shape[1]], self.device, into=prefix)
        with self._counted():
            self._computed(self._batch(plan, tokens, want_logits=False))

    def plan(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        packed: bool = False,
        parents: Parents | None = None,
    ) -> Plan:
        """Makes the plan of a pass that appends counts[b] tokens to each row."""
        cache = self.cache
        starts, gaps = ([of[slot] for slot in slots] for of in (cache.lengths, cache.gaps))
        prefixes = [cache.prefixes[slot] for slot in slots]
        share = PACK_FROM if self.lean is None else 0.0
        return Plan(
            slots,
            starts,
            counts,
            self.device,
            packed=packed,
            pack_from=share,
            prefixes=prefixes,
            kv_block=self._kv_block,
            parents=parents,
            gaps=gaps,
        )

    def ordinary(self, plan: Plan, tokens: Tensor, want_logits: bool = True) -> Tensor:
        """Computes a pass as long as its rows are; returns its logits, see `feed`."""
        return self._ordinary(self._batch(plan, tokens, want_logits)).logits

    def count(self, passes: int, seconds: float, executor: str) -> None:
        """Adds passes that were computed elsewhere, by an executor of that name."""
        self.passes += passes
        self.seconds += seconds
        self.computed[executor] += passes

    # ── executors ─────────────────────────────────────────────────────────────────────────────────

    @property
    def executors(self) -> Sequence[Executor]:
        """The executors in the order in which they are asked; the last one computes every batch."""
        lean = () if self.lean is None else (CDecoder(self.lean), LayerLoop(self.lean))
        modules = Modules(self._bridge, self.known_ids, self.forward_context)
        if self.fused_layers is None:
            return (*lean, modules)
        return (*lean, TritonLayers(self._bridge, self.known_ids, modules, self.absent), modules)

    def explain(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        *,
        parents: Parents | None = None,
        want_logits: bool = True,
    ) -> Explanation:
        """Tells which executor computes a pass, and why the executors before it do not.

        Args:
            slots: see `feed`.
            counts: see `feed`.
            parents: see `feed`.
            want_logits: see `feed`.
        """
        plan = self.plan(slots, counts, packed=self.packs, parents=parents)
        tokens = torch.zeros(plan.rows, plan.q, dtype=torch.long, device=self.device)
        batch = self._batch(plan, tokens, want_logits)
        absent = self.absent
        if self.captures is not None:
            absent = {
                CAPTURED: self.capture_failure or "they compute whole rounds of an engine"
            } | absent
        refusals = [Refusal(name, reason) for name, reason in absent.items()]
        for executor in self.executors:
            reason = executor.refuses(batch)
            if reason is None:
                return Explanation(executor.name, refusals)
            refusals.append(Refusal(executor.name, reason))
        raise InternalError("the modules refused a pass")

    def take_executors(self) -> Counter[str]:
        """Returns the passes since the last call by executor, those of prompts included."""
        taken, self.computed = self.computed, Counter()
        return taken

    def _batch(self, plan: Plan, tokens: Tensor, want_logits: bool) -> PassBatch:
        plan.final = not want_logits
        return PassBatch(
            plan,
            tokens,
            self.cache,
            method=self._method,
            want_logits=want_logits,
            hidden_layers=self.hidden_layers,
            vectors=self.vectors,
        )

    def _computed(self, batch: PassBatch) -> Tensor:
        """Computes a pass and counts it."""
        output = self._ordinary(batch)
        self.computed[output.executor] += 1
        return output.logits

    def _ordinary(self, batch: PassBatch) -> PassOutput:
        """Computes a pass by the first of `executors` that does not refuse it."""
        self.cache.begin(batch.plan)
        output = self._first(batch)(batch)
        self.hidden = output.hidden
        self.cache.end()
        return output

    def _first(self, batch: PassBatch) -> Executor:
        """Returns the first of `executors` that does not refuse a batch.

        Raises:
            UnsupportedModel: all executors refuse the batch.
        """
        reason: str | None = None
        for executor in self.executors:
            reason = executor.refuses(batch)
            if reason is None:
                return executor
        raise UnsupportedModel(f"{self.name}: {reason}")


class _Counted(explained):
    """A context of one pass, which is timed and counted if it succeeds."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.name)
        self._runner = runner
        runner.spans.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self._runner.spans.end()
            self._runner.passes += 1
