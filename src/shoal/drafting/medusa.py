"""Medusa heads: each predicts one position further ahead, all from one hidden state of the target.

After Cai et al., "Medusa" (ICML 2024, arXiv 2401.10774), section 2.1, without its typical
acceptance, which is lossy. Head i is residual blocks x + SiLU(W x + b), then a matrix to the
vocabulary, and predicts the token i + 2 positions after that of the hidden state. A round reads the
hidden state of the deepest accepted node, from which the row's last token was drawn: head 0 then
predicts the token that follows it.

Heads are independent of each other, so a tree of their most probable tokens is as good as its paths
are probable (`shoal.drafting.text`). They propose point masses: the tokens of a tree say nothing
about a q.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.drafting.distillation import Learner, Passes, chance_of_most_probable
from shoal.drafting.protocol import DraftCounters, DraftInputs, Keeps
from shoal.drafting.text import CHOICES, NOTHING, independent, most_probable, tree_of
from shoal.drafting.trained_heads import (
    LastStateDrafter,
    fill,
    last_states,
    layers_and_width,
    once,
    read_config,
    read_tensors,
    require_width,
    whole_number,
)
from shoal.models.runner import Runner
from shoal.types.trees import DraftTree

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")
ToVocabulary = Callable[[Tensor], Tensor]


class ResidualBlock(nn.Module):
    """The block x + SiLU(W x + b), the identity at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """The heads, with parameters named as published.

    The names are "0.0.linear.weight", ..., and "0.1.weight" for a matrix to the vocabulary.

    Args:
        heads: the number of heads.
        layers: the number of residual blocks of each head.
        width: the width of hidden states.
        vocab_size: the width of the logits.
        shared: the target's own head, if heads have no matrices of their own.
    """

    def __init__(
        self,
        heads: int,
        layers: int,
        width: int,
        vocab_size: int,
        shared: ToVocabulary | None = None,
    ) -> None:
        own = [] if shared is not None else [vocab_size]
        super().__init__(
            nn.ModuleList(
                [
                    *(ResidualBlock(width) for _ in range(layers)),
                    *(nn.Linear(width, size, bias=False) for size in own),
                ]
            )
            for _ in range(heads)
        )
        self._shared = [shared]  # in a list, because it is the target's and no module of this one

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the logits [heads, ..., vocab] of hidden states [..., width]."""
        return torch.stack([self._logits(head, hidden) for head in self])

    def _logits(self, head: nn.Module, hidden: Tensor) -> Tensor:
        # Heads that learn have more bits than the hidden states and the target's own head.
        x = hidden.to(next(head.parameters(), hidden).dtype)
        for layer in head.children():
            x = layer(x)
        shared = self._shared[0]
        return x if shared is None else shared(x.to(hidden.dtype))

    def learner(self, layers: int) -> Learner:
        """Returns the heads with their passes, for a target with `layers` layers."""
        return Learner(self, _passes, chance_of_most_probable, (layers,))


def _passes(heads: MedusaHeads, tokens: Tensor, states: Tensor) -> Passes:
    """Yields the logits of each head at all places behind which there are as many tokens."""
    for i, logits in enumerate(heads(states[:, : -len(heads)])):
        yield logits, i + 1


def load_medusa(directory: Path, target: Runner) -> MedusaHeads:
    """Returns the heads in a directory, in the target's number format.

    They are as many as the file has: the published Medusa-1 files have five beside a config.json
    that says two.

    Raises:
        RequestError: there are no heads.
        ModelError: files are damaged or tensors are missing.
        PairMismatch: the heads belong to another target.
    """
    config, tensors = read_config(directory), read_tensors(directory, *FILES)
    heads = whole_number(config, directory, "medusa_num_heads")
    layers = whole_number(config, directory, "medusa_num_layers", default=1)
    tensors = {
        name.removeprefix("medusa_head.").removeprefix("heads."): tensor
        for name, tensor in tensors.items()
    }
    stored = {name.partition(".")[0] for name in tensors if name.partition(".")[0].isdecimal()}
    heads = max(heads, len(stored))
    _, width = layers_and_width(target)
    own = tensors.get(f"0.{layers}.weight")
    if (first := tensors.get("0.0.linear.weight")) is not None:
        require_width(directory, "hidden states", first.shape[-1], target, width)
    if own is not None:
        require_width(directory, "a vocabulary", len(own), target, target.vocab_size)
    vocabulary = config.get("vocab_size", target.vocab_size)
    require_width(directory, "a vocabulary", vocabulary, target, target.vocab_size)
    made = MedusaHeads(
        heads,
        layers,
        width,
        target.vocab_size,
        target.hf.get_output_embeddings() if own is None else None,
    )
    fill(made, tensors, directory)
    return made.to(target.device, target.dtype).eval().requires_grad_(False)


class MedusaDrafter(LastStateDrafter):
    """A drafter that proposes the most probable paths of the heads.

    Args:
        heads: hidden states [rows, width] -> logits [heads, rows, vocab].
        layers: see `LastStateDrafter`.
        nodes: the nodes of a tree; 0 = chains.
        keeps: see `LastStateDrafter`; None = none.
    """

    name = "medusa"

    def __init__(
        self,
        heads: Callable[[Tensor], Tensor],
        layers: int,
        nodes: int = 0,
        keeps: Keeps | None = None,
    ) -> None:
        super().__init__(layers, keeps or Keeps())
        self.max_nodes, self._heads = nodes, heads
        self.weights = heads if isinstance(heads, nn.Module) else None
        self._passes, self._seconds = 0, 0.0

    @classmethod
    def for_target(cls, target: Runner, *, directory: str, nodes: int = 16) -> MedusaDrafter:
        heads = once(target, directory, load_medusa)
        layers, keeps = last_states(target)
        return cls(heads, layers, nodes if target.takes_trees else 0, keeps)

    def propose(self, inputs: DraftInputs) -> DraftTree:
        started = time.perf_counter()
        row_states = [
            self.state_of(row) if length else None
            for row, length in zip(inputs.rows, inputs.lengths, strict=True)
        ]
        states = [state for state in row_states if state is not None]
        most = CHOICES if self.max_nodes else 1
        following = iter(
            most_probable(self._heads(torch.stack(states)).transpose(0, 1), most) if states else ()
        )
        guesses = [
            NOTHING if state is None else independent(next(following), length, self.max_nodes)
            for state, length in zip(row_states, inputs.lengths, strict=True)
        ]
        self._passes += bool(states)
        self._seconds += time.perf_counter() - started
        return tree_of(guesses, inputs)

    def learner(self) -> Learner | None:
        heads = self._heads
        return heads.learner(*self.hidden_layers) if isinstance(heads, MedusaHeads) else None

    def take_counters(self) -> DraftCounters:
        taken = DraftCounters(self._passes, self._seconds)
        self._passes, self._seconds = 0, 0.0
        return taken
