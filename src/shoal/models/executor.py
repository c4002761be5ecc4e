"""The seam between a runner and its executors, and the executors of Transformers models.

A runner asks its executors in order, and the first that does not refuse a batch computes it;
`Modules`, the last of a Transformers model, computes every batch. Captured rounds are whole rounds
of an engine, and come before all of them (`shoal.drafting.captured`). `Runner.explain` returns the
executor of a batch and the reasons of those that refuse it; `Stats.executors` counts passes by
executor. An executor for another kind of model is independent of the others, and may stand beside
its models, as llama.cpp's does (`shoal.models.gguf.gguf_runner`).

Passes of Llama-like models may go without modules: on a CPU by one call of C, or layer by layer
(`shoal.models.lean`); on CUDA by Triton kernels that are launched one by one
(`shoal.models.layers`).

Inputs may be vectors in place of tokens: id -1 - i of a block stands for vector i, which a pass
takes in place of the embedding of a token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from shoal.models.attention.methods import Method
from shoal.models.attention.unfused import MOST_COLUMNS, takes
from shoal.models.bridge import Bridge
from shoal.models.cache import Plan, SlotCache
from shoal.models.compiled.captures import require_device, words_of
from shoal.models.device import is_out_of_memory
from shoal.models.lean.forward import LeanPass, known_tokens


@dataclass(frozen=True, eq=False)
class PassBatch:
    """The input of one pass.

    Attributes:
        plan: the rows, their slots, and how many tokens each of them appends.
        tokens: ids, [rows, q] int64 or more columns; a negative id stands for a row of `vectors`.
        cache: the keys and values of the rows. Executors write into it, `Runner` begins and ends
            it.
        method: the attention method of the runner, for executors that have no attention of their
            own.
        want_logits: False if only the keys and values matter (prompts).
        hidden_layers: numbers of the hidden states that a drafter reads (`Runner.hidden_layers`).
        vectors: inputs that negative ids stand for, [count, width], or None.
        riding: the number of last rows of which only the keys and values matter: chunks of prompts
            that ride in a pass of other rows.
    """

    plan: Plan
    tokens: Tensor
    cache: SlotCache
    method: Method
    want_logits: bool = True
    hidden_layers: Sequence[int] = ()
    vectors: Tensor | None = None
    riding: int = 0

    @property
    def reads_model(self) -> str | None:
        """The reason why the pass is not just tokens in and logits out of the model, or None."""
        if self.hidden_layers:
            return "a drafter reads hidden states"
        return None if self.vectors is None else "a drafter feeds vectors"


class PassOutput(NamedTuple):
    """The result of a pass.

    Attributes:
        logits: [rows, q, vocab]; columns beyond a row's count are meaningless. Rows that ride, and
            columns that only they have, may be missing. Without `PassBatch.want_logits`, any
            tensor.
        hidden: the hidden states of `PassBatch.hidden_layers` side by side, or None,
            [rows, q, layers * width].
        executor: the name of the executor that computed the pass.
    """

    logits: Tensor
    hidden: Tensor | None
    executor: str


class Executor(Protocol):
    """An executor of one model's passes, over any of the model's caches."""

    @property
    def name(self) -> str:
        """The word for the executor in reports and counts."""

    def refuses(self, batch: PassBatch) -> str | None:
        """Returns the reason why the executor does not compute this batch, or None if it does."""

    def __call__(self, batch: PassBatch) -> PassOutput:
        """Computes a batch that it does not refuse."""


class Refusal(NamedTuple):
    """An executor that does not compute a batch, and the reason."""

    executor: str
    reason: str


class Explanation(NamedTuple):
    """The executor that computes a batch, and the executors that were asked before it.

    Attributes:
        executor: the name of the executor that computes the batch.
        refusals: the other executors with their reasons, in the order in which they are asked.
        kernels: a remark on the kernels in C that compute it (`shoal.native.build.remark`).
        kv: the format that keys and values are rounded to, or "off".
    """

    executor: str
    refusals: Sequence[Refusal]
    kernels: str = ""
    kv: str = "off"

    def __str__(self) -> str:
        parts = [] if self.kv == "off" else [f"keys and values in {self.kv}"]
        parts += [f"kernels: {self.kernels}"] if self.kernels else []
        parts += [f"not {executor}: {reason}" for executor, reason in self.refusals]
        reasons = "; ".join(parts)
        return f"{self.executor} ({reasons})" if reasons else self.executor


def first_of(
    executors: Sequence[Executor], batch: PassBatch
) -> tuple[Executor | None, list[Refusal]]:
    """Returns the first executor that computes a batch, or None, and the refusals before it."""
    refusals: list[Refusal] = []
    for executor in executors:
        reason = executor.refuses(batch)
        if reason is None:
            return executor, refusals
        refusals.append(Refusal(executor.name, reason))
    return None, refusals


MODULES = "modules"


class Modules:
    """The executor that computes any batch by a model's modules, with shoal's attention.

    Attributes:
        forward_context: entered for the length of each pass (`shoal.models.passes`).
    """

    name = MODULES

    def __init__(
        self,
        bridge: Bridge,
        known_ids: int,
        forward_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._bridge, self._known_ids, self.forward_context = bridge, known_ids, forward_context

    def refuses(self, batch: PassBatch) -> None:
        """Returns None: the modules compute every batch."""

    def __call__(self, batch: PassBatch) -> PassOutput:
        """Computes a pass; raises UnsupportedModel if a model lacks the hidden states."""
        plan = batch.plan
        logits, hidden = self._bridge.ordinary(
            plan.pack(known_tokens(plan, batch.tokens, self._known_ids)),
            batch.cache,
            batch.method,
            forward_context=self.forward_context(),
            want_logits=batch.want_logits,
            hidden_layers=batch.hidden_layers,
            vectors=batch.vectors,
        )
        hidden = None if hidden is None else plan.unpack(hidden)
        return PassOutput(plan.unpack(logits) if batch.want_logits else logits, hidden, self.name)


REPLACED = "weights or layers of the model were replaced by others"
C_DECODER, C_LAYERS = "C decoder", "C layers"


class CDecoder:
    """The executor that computes a pass in one call of the kernel `decode`."""

    name = C_DECODER

    def __init__(self, lean: LeanPass) -> None:
        self._lean = lean

    def refuses(self, batch: PassBatch) -> str | None:
        """Returns the reason why C does not compute the batch, or None.

        Reasons are packed weights of another form (`shoal.models.lean.whole.whole_pass` has them),
        replaced weights, hidden states, or too many tokens a row.
        """
        if self._lean.whole is None:
            return self._lean.no_whole or "it was not made"
        if self._lean.decoder.stale:
            return REPLACED
        if batch.hidden_layers:
            return batch.reads_model
        if not takes(batch.plan):
            return f"{batch.plan.q} tokens of a row in one pass, and it takes {MOST_COLUMNS}"
        return None

    def __call__(self, batch: PassBatch) -> PassOutput:
        """Computes a pass.

        Raises:
            MemoryError: there is no memory for the pass.
            IndexError: an id that the model does not have.
        """
        whole = self._lean.whole
        assert whole is not None
        logits = whole(
            batch.plan,
            batch.tokens,
            batch.cache,
            batch.want_logits,
            vectors=batch.vectors,
            riding=batch.riding,
        )
        return PassOutput(logits, None, self.name)


class CLayers:
    """The executor that computes a pass layer by layer, by PyTorch's products and kernels in C."""

    name = C_LAYERS

    def __init__(self, lean: LeanPass) -> None:
        self._lean = lean

    def refuses(self, batch: PassBatch) -> str | None:
        """Returns the reason why the loop does not compute the batch, replaced weights, or None."""
        return REPLACED if self._lean.decoder.stale else None

    def __call__(self, batch: PassBatch) -> PassOutput:
        """Computes a pass."""
        logits, hidden = self._lean(
            batch.plan,
            batch.tokens,
            batch.cache,
            method=batch.method,
            want_logits=batch.want_logits,
            hidden_layers=batch.hidden_layers,
            vectors=batch.vectors,
        )
        return PassOutput(logits, None if hidden is None else batch.plan.unpack(hidden), self.name)


TRITON_LAYERS = "Triton layers"


class TritonLayers:
    """The executor that computes prompts, blocks and draft trees by a model's fused layers.

    The module `shoal.models.layers` has the layers. A kernel may need more registers or shared
    memory than a GPU has for some shape of a pass: the layers are then given up, for all runners of
    the model, and a row never ends for that reason.

    Args:
        bridge: has the layers.
        known_ids: number of ids that the model can read.
        otherwise: computes a pass for which a kernel failed.
        absent: receives the reason (`Runner.absent`).
    """

    name = TRITON_LAYERS

    def __init__(
        self, bridge: Bridge, known_ids: int, otherwise: Executor, absent: dict[str, str]
    ) -> None:
        self._bridge, self._known_ids = bridge, known_ids
        self._otherwise, self._absent = otherwise, absent

    def refuses(self, batch: PassBatch) -> str | None:
        """Returns the reason why the layers do not compute the batch, or None.

        Reasons are inputs and outputs that the layers do not have, and replaced weights.
        """
        layers = self._bridge.layers
        if layers is None or batch.reads_model is not None:
            return batch.reads_model or "the model has none"
        return REPLACED if layers.stale else None

    def __call__(self, batch: PassBatch) -> PassOutput:
        """Computes a pass."""
        try:
            return PassOutput(self._logits(batch), None, self.name)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            require_device(batch.plan.device, error)
            self._absent[self.name] = words_of(error)
        self._bridge.layers = None
        warnings.warn(
            f"no more {self.name}, modules compute ({self._absent[self.name]})",
            RuntimeWarning,
            stacklevel=3,
        )
        return self._otherwise(batch)

    def _logits(self, batch: PassBatch) -> Tensor:
        layers, plan = self._bridge.layers, batch.plan
        assert layers is not None
        tokens = plan.pack(known_tokens(plan, batch.tokens, self._known_ids))
        logits = layers.ordinary(tokens, batch.cache, batch.method, batch.want_logits)
        return plan.unpack(logits) if batch.want_logits else logits
