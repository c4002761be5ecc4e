"""llama.cpp by a loop of our own over `llama_decode`: its server and tools have no batched speculative sampling of n rows.

Every row is a sequence of one context; a prompt is computed once and copied to its rows. Tokens are drawn by NumPy from the
logits of all rows at once. With a draft model all rows are drafted for and verified in one batch; drafts are accepted by rejection
sampling, and the caches go back to what the rows keep.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from engines import gguf_file
from engines.draws import Floats, Ints, Sampler, kept_drafts, plain_rows, row_end
from engines.tasks import Absent, Answer, Setup, Task, convert

SLACK = 8  # positions beyond the longest row: drafts that are not kept


def prepare(setup: Setup) -> None:
    """Writes both models as GGUF files, matrices in the dtype; "int8" is Q8_0."""
    for model in filter(None, (setup.target, setup.draft)):
        convert(setup.gguf_file(model), partial(gguf_file.write, Path(model), dtype=setup.dtype))


class Model:
    """One model with a context for so many sequences.

    Attributes:
        stored: [sequences], positions in the cache of each.
    """

    def __init__(self, file: Path, setup: Setup) -> None:
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        length = setup.length + SLACK
        params.n_ctx, params.n_seq_max = setup.rows * (-(-length // 256) * 256), setup.rows
        params.n_batch = max(2048, length, setup.rows * (1 + setup.drafted))
        params.n_threads = params.n_threads_batch = setup.threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context for {setup.rows} rows of {length} tokens")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        size = (params.n_batch,)
        self.tokens, self.positions, self.wanted = (
            np.ctypeslib.as_array(ctypes.cast(field, ctypes.POINTER(kind)), size)
            for field, kind in (
                (self.batch.token, ctypes.c_int32), (self.batch.pos, ctypes.c_int32), (self.batch.logits, ctypes.c_int8)
            )
        )  # fmt: skip
        self.sequences = [self.batch.seq_id[i] for i in range(params.n_batch)]
        for i in range(params.n_batch):
            self.batch.n_seq_id[i] = 1
        self.placed: list[int] = []
        self.stored = np.zeros(setup.rows, dtype=np.int64)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)
        self.stored[:] = 0

    def decode(self, rows: Ints, tokens: Ints, wanted: NDArray[np.bool_] | None = None) -> Floats:
        """Logits, [tokens that are wanted (None: all), vocabulary]; overwritten by the next call.

        Args:
            rows: [tokens], the sequence of each, tokens of a sequence one after the other.
        """
        count = len(rows)
        first = np.r_[True, rows[1:] != rows[:-1]]
        start = np.maximum.accumulate(np.where(first, np.arange(count), 0))
        self.tokens[:count] = tokens
        self.positions[:count] = self.stored[rows] + np.arange(count) - start
        self.wanted[:count] = 1 if wanted is None else wanted
        placed = rows.tolist()
        if self.placed[:count] != placed:
            for i, row in enumerate(placed):
                self.sequences[i][0] = row
            self.placed = placed
        self.batch.n_tokens = count
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")
        np.add.at(self.stored, rows, 1)
        outputs = int(self.wanted[:count].sum())
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (outputs, self.vocabulary))

    def read(self, prompts: list[list[int]], n: int) -> Floats:
        """Computes every prompt once, in the first of its n sequences, and copies it to the others. Logits of the last tokens."""
        found = []
        for i, prompt in enumerate(prompts):
            wanted = np.arange(len(prompt)) == len(prompt) - 1
            found.append(self.decode(np.full(len(prompt), i * n), np.array(prompt), wanted).copy())
            for row in range(i * n + 1, (i + 1) * n):
                llama_cpp.llama_memory_seq_cp(self.memory, i * n, row, -1, -1)
            self.stored[i * n : (i + 1) * n] = len(prompt)
        return np.repeat(np.concatenate(found), n, axis=0)

    def keep(self, rows: Ints, lengths: Ints) -> None:
        """Forgets what these rows have beyond so many positions."""
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            if self.stored[row] > length:
                llama_cpp.llama_memory_seq_rm(self.memory, row, length, -1)
                self.stored[row] = length


class Engine:
    """See `engines.tasks.Engine`."""

    def __init__(self, setup: Setup) -> None:
        llama_cpp.llama_log_set(_silent, None)
        if setup.isa and b"AVX512 = 1" in llama_cpp.llama_print_system_info():
            raise Absent("this build of llama.cpp computes with AVX-512: build it with -DGGML_NATIVE=OFF -DGGML_AVX512=OFF")
        self.drafted, self.directory, self.tokenizer = setup.drafted, setup.target, None
        self.target = Model(setup.gguf_file(setup.target), setup)
        self.draft = Model(setup.gguf_file(setup.draft), setup) if setup.draft is not None and setup.drafted else None
        self.version = version("llama-cpp-python")
        self.settings = {
            "weights": gguf_file.TYPES[setup.dtype].name if setup.dtype in gguf_file.TYPES else setup.dtype,
            "drafted": str(self.drafted),
        }

    def generate(self, task: Task) -> Answer:
        """One call; rows that have all their tokens, or an end, drop out of the batch."""
        started = time.perf_counter()
        sampler = Sampler(task.temperature, task.top_p, np.random.default_rng(task.seed))
        prompts = [list(prompt) for prompt in task.prompts]
        self.target.clear()
        logits = self.target.read(prompts, task.n)
        if self.draft is None:
            return plain_rows(logits, self.target.decode, task, sampler, self._ends(task), started)
        written = [[token] for token in sampler.draw(sampler.probabilities(logits)).tolist()]
        self.draft.clear()
        self.draft.read(prompts, task.n)
        drafted, accepted, passes = self._speculative(written, task.new_tokens, sampler, self.draft)
        return Answer([row[: task.new_tokens] for row in written], drafted, accepted, (accepted + passes) / max(1, passes))

    def _ends(self, task: Task) -> Callable[[list[int]], bool]:
        if not task.stops:
            return row_end(task.eos)
        from tokenizers import Tokenizer

        if self.tokenizer is None:
            self.tokenizer = Tokenizer.from_file(str(Path(self.directory) / "tokenizer.json"))
        return row_end(task.eos, task.stops, partial(self.tokenizer.decode, skip_special_tokens=False))

    def _speculative(self, written: list[list[int]], tokens: int, sampler: Sampler, draft: Model) -> tuple[int, int, int]:
        """(drafted, accepted, target passes of rows). Invariant: all but the last token of a row is in the target's cache."""
        drafted = accepted = passes = 0
        k, starts = self.drafted, self.target.stored.copy()
        while running := [i for i, row in enumerate(written) if len(row) < tokens]:
            rows = np.array(running)
            proposed, q = self._propose(rows, written, starts, sampler, draft)
            last = np.array([[written[row][-1]] for row in running])
            block = np.concatenate([last, proposed], axis=1)
            logits = self.target.decode(np.repeat(rows, k + 1), block.ravel())
            p = sampler.probabilities(logits).reshape(len(rows), k + 1, -1)
            for i, row in enumerate(running):
                kept, extra = kept_drafts(p[i], q[:, i], proposed[i], sampler)
                written[row] += [*proposed[i, :kept].tolist(), extra]
                drafted, accepted, passes = drafted + k, accepted + kept, passes + 1
            ends = starts[rows] + np.array([len(written[row]) for row in running]) - 1
            self.target.keep(rows, ends)
            draft.keep(rows, ends)
        return drafted, accepted, passes

    def _propose(
        self, rows: Ints, written: list[list[int]], starts: Ints, sampler: Sampler, draft: Model
    ) -> tuple[Ints, Floats]:
        """Drafts, [rows, k], and the distributions they come from, [k, rows, vocabulary]."""
        tokens, distributions = [], []
        missing = [written[row][draft.stored[row] - starts[row] :] for row in rows.tolist()]  # one, or two after k accepted
        lengths = np.array([len(one) for one in missing])
        last = np.zeros(lengths.sum(), dtype=bool)
        last[np.cumsum(lengths) - 1] = True
        logits = draft.decode(np.repeat(rows, lengths), np.concatenate([np.array(one) for one in missing]), last)
        for step in range(self.drafted):
            distributions.append(sampler.probabilities(logits))
            tokens.append(sampler.draw(distributions[-1]))
            if step + 1 < self.drafted:
                logits = draft.decode(rows, tokens[-1])
        return np.stack(tokens, axis=1), np.stack(distributions)


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: Any) -> None:
    """llama.cpp's log is pages long."""
