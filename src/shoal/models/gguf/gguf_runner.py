"""The runner of a GGUF file's model, and the rows that it keeps for later rows that begin alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.errors import RequestError, UnsupportedModel
from shoal.models.cache import SlotCache
from shoal.models.cache.kept_prompts import MIN_TOKENS, KeptPrefixes
from shoal.models.executors.executor import Executor
from shoal.models.executors.llama_cpp import LlamaCpp
from shoal.models.gguf.gguf_model import GgufModel, library
from shoal.models.gguf.sequences import RowState, Sequences
from shoal.models.gguf.state_sequences import StateSequences
from shoal.models.runner import Runner
from shoal.models.selfcheck import self_check
from shoal.types.load_stages import StageWatch, unwatched
from shoal.types.requests import Prefix


class _KeptRow(NamedTuple):
    """A kept row.

    Attributes:
        owner: the row's owner.
        tokens: the row's tokens, [tokens] int64.
        state: the row's keys and values, as llama.cpp writes them down.
    """

    owner: str
    tokens: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    state: RowState


class KeptSequences(KeptPrefixes):
    """The kept tokens of one model, row by row.

    The row that was not used for the longest time is given up first.

    Args:
        capacity: most tokens.
        window: width of the model's sliding windows, 0 without. llama.cpp does not write down the
            tokens before the window of a row's end, so that a longer row can only be used whole.
    """

    def __init__(self, capacity: int, window: int) -> None:
        super().__init__(capacity)
        self._capacity, self._window = capacity, window
        self._rows: OrderedDict[int, _KeptRow] = OrderedDict()
        self._number = 0

    @property
    def allocated_bytes(self) -> int:
        """The number of bytes of the kept rows."""
        return sum(row.state.nbytes for row in self._rows.values())

    def known(self, owner: str, tokens: Sequence[int]) -> int:
        """Returns the number of first tokens that are kept for the owner; 0 if too few to copy."""
        return self._longest(owner, tokens)[0]

    def load(
        self,
        cache: SlotCache,
        owner: str,
        tokens: Sequence[int],
        slot: int,
        prefix: Prefix | None = None,
    ) -> int:
        """Copies the kept tokens to a slot of a cache; returns their number."""
        assert isinstance(cache, Sequences)
        count, number = self._longest(owner, tokens)
        if count:
            cache.restore(slot, self._rows[number].state, count)
            self._rows.move_to_end(number)
        return count

    def keep(self, cache: SlotCache, owner: str, tokens: Sequence[int], slot: int) -> None:
        """Keeps tokens that the row in a cache's slot begins with, unless they are kept."""
        assert isinstance(cache, Sequences)
        count, number = self._longest(owner, tokens)
        if count >= len(tokens) or not MIN_TOKENS <= cache.lengths[slot] <= self._capacity:
            return
        if count and count == len(self._rows[number].tokens):  # that row begins this one
            del self._rows[number]
        self._number += 1
        self._rows[self._number] = _KeptRow(owner, np.array(tokens), cache.state_of(slot))
        while sum(row.state.length for row in self._rows.values()) > self._capacity:
            self._rows.popitem(last=False)

    def _longest(self, owner: str, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns the number of tokens that the best row shares with these, and the row's number.

        Both are 0 where the shared tokens are too few.
        """
        wanted, best = np.array(tokens), (0, 0)
        for number, row in self._rows.items():
            length = min(len(wanted), len(row.tokens))
            differ = np.flatnonzero(wanted[:length] != row.tokens[:length])
            count = int(differ[0]) if len(differ) else length
            whole = (
                not self._window or row.state.length <= self._window or count == row.state.length
            )
            if row.owner == owner and whole and count > best[0]:
                best = count, number
        return best if best[0] >= MIN_TOKENS else (0, 0)


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

    def fork(self) -> Runner:
        """Returns a runner of the same model with a cache and counters of its own."""
        other = super().fork()
        assert isinstance(other, GgufRunner)
        other._executor = LlamaCpp(self.hf)
        return other

    @torch.inference_mode()
    def plain_logits(self, tokens: Tensor) -> Tensor:
        """Returns logits [rows, q, vocab] of tokens [rows, q].

        Each row is computed alone in a memory of its own, in one pass.
        """
        outputs = []
        for row in tokens:
            alone = self.fork()
            alone.reserve(1, len(row))
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

    @property
    def can_be_lean(self) -> bool:
        """False: the weights are llama.cpp's."""
        return False

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
    given = sorted(
        key for key, value in options.items() if value not in ("auto", "off", False, None)
    )
    if given:
        raise RequestError(
            f"{name}: {' and '.join(given)} does not go with GGUF files, which say what their "
            f"weights are"
        )
