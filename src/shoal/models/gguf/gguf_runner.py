"""The runner of a GGUF file's model, whose passes llama.cpp computes.

Rows are kept for later rows that begin alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.errors import InternalError, ModelError, OutOfMemory, RequestError, UnsupportedModel
from shoal.models.cache import Plan
from shoal.models.cache.kept_rows import KeptRows
from shoal.models.executor import Executor, PassBatch, PassOutput
from shoal.models.gguf import GgufModel, complaint, library
from shoal.models.gguf.sequences import PASS_TOKENS, Feed, RowState, Sequences
from shoal.models.gguf.state_sequences import StateSequences
from shoal.models.lean.forward import known_tokens
from shoal.models.load_report import StageWatch, unwatched
from shoal.models.runner import Runner
from shoal.models.selfcheck import self_check

NO_ROOM, NO_MEMORY = 1, -2
"""The numbers that `llama_decode` returns."""


class LlamaCpp:
    """The executor that computes chains of tokens by calls of `llama_decode`.

    A pass is one call, or several if it has more than `PASS_TOKENS` tokens.
    """

    name = "llama.cpp"

    def __init__(self, model: GgufModel) -> None:
        self._model = model
        self._feed = Feed()

    def refuses(self, batch: PassBatch) -> str | None:
        """Returns why llama.cpp cannot compute a batch (trees, hidden states, vectors), or None."""
        if batch.plan.parents is not None:
            return "llama.cpp takes chains of tokens, no draft trees"
        return batch.reads_model

    def __call__(self, batch: PassBatch) -> PassOutput:
        """Computes a pass.

        Raises:
            ModelError: llama.cpp failed.
            OutOfMemory: llama.cpp has no memory for the pass.
        """
        plan, cache = batch.plan, batch.cache
        if not isinstance(cache, Sequences):
            raise InternalError("llama.cpp got a cache that is not its own")
        threads = torch.get_num_threads()
        library().llama_set_n_threads(cache.context, threads, threads)
        counts = np.array(plan.counts)
        real = np.arange(plan.q) < counts[:, None]
        ids = known_tokens(plan, batch.tokens, self._model.vocab_size).numpy()[:, : plan.q][real]
        places = plan.positions.numpy()[real]
        rows = np.repeat(plan.slots, counts)
        cache.hear(rows.tolist(), ids.tolist())
        vocab = self._model.vocab_size
        logits = torch.empty(len(ids) if batch.want_logits else 1, vocab)
        for first in range(0, len(ids), PASS_TOKENS):
            part = slice(first, first + PASS_TOKENS)
            self._decode(
                cache, self._feed.fill(ids[part], places[part], rows[part], batch.want_logits)
            )
            if batch.want_logits:
                own = logits[part]  # the next call overwrites those of this one
                address = library().llama_get_logits(cache.context)
                ctypes.memmove(own.data_ptr(), address, own.nbytes)
        return PassOutput(_by_row(plan, logits) if batch.want_logits else logits, None, self.name)

    def _decode(self, cache: Sequences, batch: ctypes.Structure) -> None:
        code = library().llama_decode(cache.context, batch)
        if code in (NO_ROOM, NO_MEMORY):
            raise OutOfMemory(
                f"{self._model.file}: llama.cpp has no memory for a pass: {complaint('no reason')}"
            )
        if code:
            raise ModelError(
                f"{self._model.file}: llama.cpp failed at a pass ({code}): {complaint('no reason')}"
            )


def _by_row(plan: Plan, logits: Tensor) -> Tensor:
    """Converts [tokens, vocab] to [rows, q, vocab]."""
    if len(logits) == plan.rows * plan.q:
        return logits.view(plan.rows, plan.q, -1)
    return plan.spread(logits)


class KeptSequences(KeptRows):
    """The kept tokens of one model, row by row.

    Args:
        capacity: most tokens.
        window: width of the model's sliding windows, 0 without. llama.cpp does not write down the
            tokens before the window of a row's end, so that a longer row can only be used whole.
    """

    def __init__(self, capacity: int, window: int) -> None:
        super().__init__(capacity)
        self._window = window

    def _size(self, state: RowState) -> int:
        return state.length

    def _usable(self, state: RowState, count: int) -> int:
        whole = not self._window or state.length <= self._window or count == state.length
        return count if whole else 0

    def _state_of(self, cache: Sequences, slot: int) -> RowState:
        return cache.state_of(slot)

    def _restore(self, cache: Sequences, slot: int, state: RowState, count: int) -> None:
        cache.restore(slot, state, count)


class GgufRunner(Runner):
    """A runner whose passes llama.cpp computes, over a cache of its own.

    Over quantised weights on a CPU a row's logits have the same bits in any company; in 16 and 32
    bits they depend on the shape of a pass, and near ties may fall otherwise (docs/how-to/gguf.md).
    """

    has_modules = False

    def __init__(self, model: GgufModel, name: str) -> None:
        super().__init__(model, name, "interface", model.context)
        self.takes_trees = self.shares = False
        self._executor = LlamaCpp(model)

    def new_cache(self) -> Sequences:
        """Returns an empty cache."""
        return StateSequences(self.hf) if self.hf.recurrent else Sequences(self.hf)

    def new_kept(self, tokens: int) -> KeptSequences:
        """Returns memory for `tokens` tokens of rows that have left."""
        return KeptSequences(tokens, library().llama_model_n_swa(self.hf.handle))

    def fork(self, ordinary: bool = False) -> Runner:
        """Returns a runner of the same model with a cache and counters of its own."""
        other = super().fork(ordinary)
        assert isinstance(other, GgufRunner)
        other._executor = LlamaCpp(self.hf)
        return other

    def in_4_bits(self) -> GgufRunner:
        """Returns a runner of a copy of the file in 4 bits, see `GgufModel.in_4_bits`."""
        return GgufRunner(self.hf.in_4_bits(), f"{self.name} in 4 bits")

    @torch.inference_mode()
    def plain_logits(self, tokens: Tensor) -> Tensor:
        """Returns logits [rows, q, vocab] of tokens [rows, q].

        Each row is computed alone in a memory of its own, in one pass.
        """
        outputs = []
        for row in tokens:
            alone = self.fork()
            alone.memory.reserve(1, len(row))
            outputs.append(alone.feed([0], row[None], [len(row)]))
        return torch.cat(outputs)

    @property
    def executors(self) -> Sequence[Executor]:
        """The executor llama.cpp alone."""
        return (self._executor,)

    @property
    def parameter_bytes(self) -> int:
        """The number of bytes of the weights in the file."""
        return int(self.hf.parameter_bytes)

    @property
    def parameter_count(self) -> int:
        """The number of the weights."""
        return int(self.hf.parameter_count)

    @property
    def cut_obstacle(self) -> str:
        """The reason why a model cannot be cut: llama.cpp computes whole passes."""
        return "llama.cpp computes whole passes"

    @property
    def keeps_states(self) -> bool:
        """True if layers keep recurrent states, which llama.cpp knows of."""
        return bool(self.hf.recurrent)

    def use_vectors(self, vectors: Tensor) -> None:
        """Raises UnsupportedModel: llama.cpp reads only ids here."""
        raise UnsupportedModel(
            f"{self.name} is computed by llama.cpp, and this drafter feeds vectors of its own"
        )


def load_gguf(
    file: Path,
    name: str,
    *,
    device: str = "auto",
    strict: bool = False,
    watch: StageWatch = unwatched,
    **options: object,
) -> GgufRunner:
    """Loads the model of a GGUF file by llama.cpp.

    Args:
        name: as the user wrote it.
        options: how a Transformers model is read. A GGUF file decides this itself, so only the
            options' defaults are taken.

    Raises:
        RequestError: strict, or another option that does not go with such a file.
        ModelError, UnsupportedModel: see `GgufModel` and `shoal.models.selfcheck`.
    """
    require_own_options(name, strict=strict, **options)
    with watch("weights"):
        runner = GgufRunner(GgufModel(file, str(device)), name)
    with watch("checking"):
        self_check(runner)
    runner.notes |= {"weights": runner.hf.description, "dtype": "float32: llama.cpp's logits"}
    return runner


def require_own_options(name: str, *, strict: bool, **options: object) -> None:
    """Raises RequestError for options that do not go with GGUF files."""
    if strict:
        raise RequestError(
            f"{name}: strict=True does not go with GGUF files: shoal cannot prove the bits of "
            f"llama.cpp's passes"
        )
    names = sorted(
        key for key, value in options.items() if value not in ("auto", "off", False, None)
    )
    if names:
        raise RequestError(
            f"{name}: {' and '.join(names)} does not go with GGUF files, which say what their "
            f"weights are"
        )
