"""One model with its ragged cache: tokens in, logits out. The engine sees models only through this.

Two doors lead into an unmodified Transformers model. Most take attention from the AttentionInterface ("interface": shoal's own
ragged attention, no mask). A few older ones do not ("mask": their own eager attention under a hand-made 4D mask).
"""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal import attention
from shoal.cache import Plan, SlotCache
from shoal.errors import ModelError, RequestError, UnsupportedModel

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest difference a ragged forward may show against a plain one, in standard deviations of the logits."""


class Runner:
    """A causal LM that feeds ragged blocks.

    Attributes:
        hf: the Transformers model, never modified. name: as the user wrote it.
        door: "interface" or "mask". attention: name of the attention method.
        context: most tokens a row may hold. vocab_size: width of the logits.
        cache: the slot cache. passes, seconds: forward calls so far and time spent in them.
    """

    def __init__(self, hf: Any, name: str, door: str, context: int, attention_name: str = "auto") -> None:
        self.hf, self.name, self.door, self.context = hf, name, door, context
        self._method = attention.method_named(attention_name)
        self.attention = attention_name
        if door == "mask" and attention_name not in ("auto", "pad"):
            raise RequestError(
                f"{name} attends by its own eager code under a mask: attention must be 'auto' or 'pad', got {attention_name!r}"
            )
        self.vocab_size = int(hf.get_output_embeddings().weight.shape[0])
        self.cache = SlotCache()
        self.passes = 0
        self.seconds = 0.0
        self._lock = threading.RLock()
        self.self_check_error: float | None = None
        self._keeps_last = "logits_to_keep" in inspect.signature(hf.forward).parameters
        self._positional = "position_ids" in inspect.signature(hf.forward).parameters

    @property
    def device(self) -> torch.device:
        return self.hf.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype  # type: ignore[no-any-return]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights, tied ones counted once."""
        return sum(p.numel() * p.element_size() for p in self.hf.parameters())

    def cache_bytes(self, slots: int, capacity: int) -> int:
        """Bytes a cache of that size takes; known once the self-check has run."""
        return slots * capacity * self.cache.bytes_per_token()

    def fork(self) -> Runner:
        """The same model with a cache and counters of its own: what one engine works with."""
        other = copy.copy(self)
        other.cache = SlotCache()
        other.passes, other.seconds = 0, 0.0
        return other

    @contextmanager
    def _switched(self) -> Iterator[None]:
        """The model attends through shoal for the length of one forward pass, and is its owner's again after it."""
        config = self.hf.config
        with self._lock:
            before = config._attn_implementation
            if self.door == "interface":
                config._attn_implementation = attention.NAME
            try:
                yield
            finally:
                if self.door == "interface":
                    config._attn_implementation = before

    @torch.inference_mode()
    def feed(self, slots: Sequence[int], tokens: Tensor, counts: Sequence[int], *, want_logits: bool = True) -> Tensor:
        """Appends counts[b] tokens to each row's slot in one pass.

        Args:
            slots: one slot per row, each once. tokens: [rows, q] int64; column j of row b is padding from counts[b] on.
            counts: 1..q per row.
            want_logits: False when only the cache matters (prompts); then the logits may be cut to the last column.

        Returns:
            Logits [rows, q, vocab]; those of padding columns are meaningless.

        Raises:
            ModelError: out of memory.
        """
        started = time.perf_counter()
        plan = Plan(slots, [self.cache.lengths[s] for s in slots], counts, self.device)
        options: dict[str, Any] = {} if want_logits or not self._keeps_last else {"logits_to_keep": 1}
        if self._positional:
            options["position_ids"] = plan.positions.clamp(max=self.context - 1)
        if self.door == "mask":
            options["attention_mask"] = (
                plan.bias(self.dtype) if plan.bias(self.dtype) is not None else plan.zero_bias(self.dtype)
            )
        try:
            self.cache.begin(plan)
            with self._switched(), attention.planned(plan, self._method):
                # A drafter may lack ids of a wider target; a row that holds one is drafted for as if it held another.
                known = tokens[:, : plan.q].clamp(max=self.vocab_size - 1)
                logits = self.hf(known, past_key_values=self.cache, use_cache=True, **options).logits
        except (MemoryError, RuntimeError) as error:
            raise _explained(error, self.name) from error
        self.cache.end()
        self.passes += 1
        self.seconds += time.perf_counter() - started
        return logits  # type: ignore[no-any-return]

    @torch.inference_mode()
    def self_check(self) -> float:
        """One ragged decode against plain forwards of the same tokens, before the first real token.

        Two rows of unequal lengths in swapped slots, a short block, a rollback of one row, another block: what decoding does.
        A sliding window that the attention never hears of bounds the context, as longer rows would see too much.

        Returns:
            The largest difference in standard deviations of the logits; kept in `self_check_error`.

        Raises:
            UnsupportedModel: if it exceeds `TOLERANCE` of the model's dtype.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, (2, min(12, self.context)), generator=generator).to(self.device)
        plain = self.hf(ids, use_cache=False).logits.double()
        with self._noting_windows() as windows:
            ragged = self._ragged_decode(ids)
        declared = _declared_window(self.hf.config.get_text_config())
        if self.door == "interface" and declared is not None and declared not in windows:
            self.context = min(self.context, declared)
        worst = max(float((block - plain[row, span]).abs().max()) for row, span, block in ragged)
        error = worst / max(float(plain.std()), 1e-9)
        self.self_check_error = error
        if not error <= TOLERANCE[self.dtype]:
            raise UnsupportedModel(
                f"{self.name}: ragged decoding differs from a plain forward by {error:.3g} standard deviations of the logits, "
                f"more than {self.dtype} allows ({TOLERANCE[self.dtype]:.3g}); this architecture cannot be used"
            )
        return error

    @contextmanager
    def _noting_windows(self) -> Iterator[set[int | None]]:
        """The windows that the layers ask for meanwhile."""
        method = self._method
        seen: set[int | None] = set()

        def noting(problem: attention.Problem) -> Tensor:
            seen.add(problem.window)
            return method(problem)

        self._method = noting
        try:
            yield seen
        finally:
            self._method = method

    def _ragged_decode(self, ids: Tensor) -> list[tuple[int, slice, Tensor]]:
        """(row, positions, logits [positions, vocab]) of a small ragged decode of `ids` [2, length]."""
        length = ids.shape[1]
        self.cache.reserve(2, length + 4)
        self.cache.lengths = [0] * self.cache.slots
        long, short = max(1, length - 5), max(1, length - 8)
        pairs: list[tuple[int, slice, Tensor]] = []

        def block(slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
            rows = [1 - slot for slot in slots]  # row 0 lives in slot 1, row 1 in slot 0
            q = max(counts)
            tokens = torch.stack(
                [
                    torch.nn.functional.pad(ids[r, s : s + c], (0, q - c))
                    for r, s, c in zip(rows, starts, counts, strict=True)
                ]
            )
            logits = self.feed(slots, tokens, counts).double()
            pairs.extend(
                (r, slice(s, s + c), logits[i, :c]) for i, (r, s, c) in enumerate(zip(rows, starts, counts, strict=True))
            )

        block([1, 0], [0, 0], [long, short])
        block([0, 1], [short, long], [2, 3])
        self.cache.rollback(1, long + 1)
        block([0, 1], [short + 2, long + 1], [1, 2])
        self.cache.lengths = [0] * self.cache.slots
        return pairs


def _declared_window(config: Any) -> int | None:
    """The sliding window some layers of this model have by its config."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    return window if kinds is None or "sliding_attention" in kinds else None


def _explained(error: BaseException, name: str) -> BaseException:
    """Out of memory becomes a ModelError that says what to do; anything else stays what it is."""
    text = str(error).lower()
    if (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or "can't allocate memory" in text
        or "not enough memory" in text
    ):
        return ModelError(f"{name}: out of memory ({error}); lower max_batch, n, max_new_tokens or use dtype='bfloat16'")
    return error
