"""The seam between a runner and its executors, each of which computes passes of one model.

A runner asks its executors in order, and the first that does not refuse a batch computes it;
`Modules`, the last of a Transformers model (`shoal.models.transformers_executors`), computes every
batch. Captured rounds are whole rounds of an engine, and come before all of them
(`shoal.drafting.captured`). `Runner.explain` returns the executor of a batch and the reasons of
those that refuse it; `Stats.executors` counts passes by executor. An executor for another kind of
model needs nothing from the others, and may stand beside its models, as llama.cpp's does
(`shoal.models.gguf.gguf_runner`).

Inputs may be vectors in place of tokens: id -1 - i of a block stands for vector i, which a pass
takes in place of the embedding of a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.errors import UnsupportedModel
from shoal.models.attention.methods import Method
from shoal.models.cache import Plan, SlotCache


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
    """Returns the first executor that computes a batch, None if there is none.

    The refusals are those of the executors before it.
    """
    refusals: list[Refusal] = []
    for executor in executors:
        reason = executor.refuses(batch)
        if reason is None:
            return executor, refusals
        refusals.append(Refusal(executor.name, reason))
    return None, refusals


def embedded(ids: Tensor, table: Callable[[Tensor], Tensor], vectors: Tensor | None) -> Tensor:
    """Returns the embeddings [..., width] of ids [...] int64, some of which are vectors.

    Args:
        table: the function from ids of tokens [...] to embeddings [..., width].
        vectors: [count, width]; None if all ids are tokens.
    """
    if vectors is None:
        return table(ids)
    others = vectors[(-1 - ids).clamp(min=0)]
    return torch.where((ids < 0)[..., None], others, table(ids.clamp(min=0)))


def require_vectors(hf: Any, name: str) -> None:
    """Raises UnsupportedModel if the model takes ids alone."""
    if "inputs_embeds" not in inspect.signature(hf.forward).parameters:
        raise UnsupportedModel(
            f"{name} takes ids of tokens alone, and this drafter feeds vectors of its own: take "
            f"another one"
        )
