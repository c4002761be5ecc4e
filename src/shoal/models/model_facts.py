"""The facts about a model that its runner was given, or found, when the model was loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal.models.attention import methods
from shoal.models.bridge import Bridge
from shoal.models.cache import SlotCache
from shoal.models.cache.mixing import Mixers
from shoal.models.cache.states import StateCache
from shoal.models.load_checks import KeptChecks
from shoal.models.weights import nbytes
from shoal.models.weights.groups import parameter_count
from shoal.native.build import expect_forks


class ModelFacts:
    """A causal LM, the way into it, and the choices that were made for it at loading.

    Attributes:
        has_modules: True if `hf` is a Transformers model, whose modules and weights may be read.
        hf: the Transformers model, never modified.
        name: the name of the model as the user wrote it.
        bridge: the way into the Transformers model.
        attention_path: "interface" or "mask" (`shoal.models.bridge`).
        attention: the name of the attention method.
        method: that method.
        kv_block: the number of tokens of which a slot's room is a multiple.
        context: the largest number of tokens that a row may hold.
        vocab_size: the width of the logits.
        known_ids: the number of ids that the model can read.
        device: the device of the model when the runner was made or forked.
        dtype: the number format of the model at that time.
        packs: True if blocks with many unused columns are fed without them, as one sequence.
        shares: True if rows of a group may read one stored prompt.
        takes_trees: False if draft trees cannot be fed: the model finds positions, or keeps states.
        mixers: the modules that keep recurrent states (`shoal.models.mixers`); None if none does.
        forward_context: the function of the context of each pass (`shoal.models.passes`).
        kv: the format of keys and values in the cache, "off" or "int8".
        notes: the measurements and choices of the load, by subject.
        absent: the executors that were ruled out when the model was loaded, and the reasons.
        self_check_error: the error that `selfcheck` measured; None before it has run.
        kept_checks: the results of checks that an earlier load has kept.
    """

    has_modules = True

    def __init__(
        self, hf: Any, name: str, attention_path: str, context: int, attention_name: str
    ) -> None:
        self.hf, self.name, self.attention_path, self.context = hf, name, attention_path, context
        masked = name if attention_path == "mask" else ""
        self.attention, self.method = attention_name, methods.method_named(attention_name, masked)
        expect_forks()
        self.device: torch.device = hf.device
        self.dtype: torch.dtype = hf.dtype
        self.mixers: Mixers | None = None
        self.kv = "off"
        self.vocab_size = self.known_ids = int(hf.get_output_embeddings().weight.shape[0])
        self.absent: dict[str, str] = {}
        self.self_check_error: float | None = None
        self.kept_checks = KeptChecks()
        self.bridge = Bridge(hf, attention_path, context)
        self.takes_trees = self.bridge.takes_positions
        self.packs = attention_path == "interface" and self.bridge.takes_positions
        self.shares = self.packs and attention_name in methods.SHARING
        self.forward_context: Callable[[], AbstractContextManager[None]] = nullcontext
        self.notes: dict[str, str] = {}
        self.kv_block = methods.KV_BLOCKS.get(attention_name, 1)

    def new_cache(self) -> SlotCache:
        """Returns an empty cache of the kind that the executors take."""
        rounds = self.kv == "int8"
        return SlotCache(rounds) if self.mixers is None else StateCache(self.mixers, rounds)

    @property
    def parameter_bytes(self) -> int:
        """The number of bytes that the weights take, tied ones counted once."""
        return nbytes(list(self.hf.parameters()))

    @property
    def parameter_count(self) -> int:
        """The number of weights, tied ones counted once."""
        return parameter_count(self.hf)

    @property
    def cut_obstacle(self) -> str | None:
        """The reason why the model's first layers cannot be computed alone; None if they can."""
        return None if self.mixers is None else "its layers keep recurrent states"

    @property
    def keeps_states(self) -> bool:
        """True if layers keep recurrent states, which go back to few earlier lengths."""
        return self.mixers is not None

    def plain_logits(self, tokens: Tensor) -> Tensor:
        """Computes the logits [rows, q, vocab] without a cache, by the model's own attention.

        The passes are checked against these logits.
        """
        return self.bridge.plain_states(tokens, ())[0]
