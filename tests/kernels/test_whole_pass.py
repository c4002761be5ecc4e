"""A pass in one call has the bits of the same pass operation by operation, whatever the model, the rows and the threads.

Negative controls compile the sources with one thing wrong, and the same comparison must notice.

Tests of: models.cache, models.lean, models.lean.forward, models.lean.whole,
models.weights.panels.
"""

from __future__ import annotations

import copy
import ctypes
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lean_passes import MODELS, WRITES, Rows, life, original
from mutants import wrong_ones
from native_kernels import needs_compiler, threads
from shoal.models import cache as cache_module
from shoal.models import formats, quantize, weights
from shoal.models.attention.unfused import MOST_COLUMNS
from shoal.models.executor import C_DECODER
from shoal.models.lean import decoder_of, forward, whole
from shoal.models.lean.forward import LeanPass, NativeKernels
from shoal.models.lean.whole import WholePass, whole_pass
from shoal.models.loading import wrap
from shoal.models.passes import choose_passes
from shoal.models.prompt_passes import feed_carrying, feed_prefix, feed_prompts
from shoal.models.runner import Runner
from shoal.models.weights.matrix import AS_IS, PACKED
from shoal.models.weights.panels import Int8PanelMatrix, PanelMatrix
from shoal.types.requests import Prefix
from shoal.types.trees import Block
from wrong_kernels import compiled_as_wrong_ones_are, wrong_kernels

pytestmark = needs_compiler
DTYPES = (torch.float32, torch.bfloat16)
CALLS = 11
"""Passes of `life` that the kernel computes: all but the one with a long prompt."""


@pytest.fixture(autouse=True)
def _panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(packs=frozenset(DTYPES)))
    monkeypatch.setitem(MODELS, "a narrow window", ("qwen2-sliding", {"sliding_window": 3}))  # shorter than trees are deep


def packed(name: str, dtype: torch.dtype = torch.float32, form: str = PACKED, bytes_: bool = False) -> Runner:
    """bytes_: with weights of bytes."""
    hf = copy.deepcopy(original(name))
    for seed, weight in enumerate(hf.parameters()):
        if weight.dim() == 1:  # unlike norms, and biases, which Transformers makes all ones and zeros
            weight.data += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    hf = hf.to(dtype)
    if bytes_:
        hf = quantize._int8_copy(hf, Int8PanelMatrix)
    weights.lay_out(hf, lambda keys: dict.fromkeys(keys, form))
    runner = wrap(hf, name, checked=False)
    choose_passes(runner, "on", owned=True)
    assert runner.lean is not None
    return runner


def by_operations(runner: Runner) -> Runner:
    """The same model without passes in one call."""
    other = runner.fork()
    assert runner.lean is not None
    other.lean = LeanPass(runner.lean.decoder, runner.lean._kernels)
    return other


def lived(runner: Runner) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the logits of all tokens of `life`, and the keys and values that the cache holds after it."""
    rows = Rows(runner.fork())
    life(rows)
    assert rows.runner.counts.take_executors()[C_DECODER] == (0 if runner.lean.whole is None else CALLS)
    cache = rows.runner.cache
    held = [
        tensor[slot, :length]
        for stores in cache.stores()
        for tensor in stores[:2]
        for slot, length in enumerate(cache.lengths)
    ]
    return rows.logits, held + [tensor for stores in cache.stores() for tensor in stores[2:]]


def differing(runner: Runner, other: Runner) -> int:
    """How many tokens have other logits, or leave other keys and values."""
    return unequal(lived(runner), lived(other))


def unequal(lives: tuple[list[Tensor], list[Tensor]], others: tuple[list[Tensor], list[Tensor]]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip([*lives[0], *lives[1]], [*others[0], *others[1]], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*MODELS, "a narrow window"])
def test_the_bits_are_those_of_the_operations(name: str, dtype: torch.dtype) -> None:
    runner = packed(name, dtype)
    assert not differing(runner, by_operations(runner))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["tied", "qwen3", "qwen2 with windows"])
def test_the_bits_with_weights_of_bytes_are_those_of_the_operations(name: str, dtype: torch.dtype) -> None:
    runner = packed(name, dtype, bytes_=True)
    assert not differing(runner, by_operations(runner))
    with threads(2):
        assert not differing(runner, by_operations(runner))


def test_prompts_are_computed_in_narrow_passes_in_one_call() -> None:
    runner = packed("llama").fork()
    runner.memory.reserve(1, 300, 300)
    ids = [i % 40 for i in range(4 * MOST_COLUMNS + 1)]
    for count, passes in ((MOST_COLUMNS, 1), (MOST_COLUMNS + 11, 2), (len(ids), 5)):
        feed_prompts(runner, [(0, ids[:count])])
        feed_prefix(runner, Prefix(0, count), 0, torch.tensor([ids[:count]]))
        assert runner.counts.take_executors() == {C_DECODER: 2 * passes}
        runner.cache.enter(0)


def test_a_prompt_at_the_wrong_place_of_the_shared_store_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, as_slot = packed("llama"), cache_module._as_slot
    operations = by_operations(runner)
    expected = lived(operations)
    monkeypatch.setattr(
        cache_module, "_as_slot", lambda into, *stores: as_slot(replace(into, base=max(into.base - 1, 0)), *stores)
    )
    found = lived(runner)
    assert any(
        not torch.equal(a, b) for one, two in zip(expected, found, strict=True) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_threads_give_the_bits_of_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernels: PyTorch, which attends over the long prompt, rounds otherwise with other threads on some processors."""
    attended = forward.attended

    def by_one_thread(*arguments: Any) -> Tensor:
        with threads(1):
            return attended(*arguments)

    monkeypatch.setattr(forward, "attended", by_one_thread)
    runner = packed("qwen2 with windows", dtype)
    expected = lived(runner)
    with threads(2):
        found = lived(runner)
    assert all(torch.equal(a, b) for one, two in zip(expected, found, strict=True) for a, b in zip(one, two, strict=True))


def test_a_prompt_without_logits_is_written() -> None:
    runner = packed("llama")
    caches = []
    for each in (runner.fork(), by_operations(runner)):
        each.memory.reserve(2, 20)
        each.feed([1, 0], torch.arange(14).view(2, 7), [7, 3], want_logits=False)
        caches.append([tensor for stores in each.cache.stores() for tensor in stores[:2]])
    assert all(torch.equal(a[0, :3], b[0, :3]) and torch.equal(a[1, :7], b[1, :7]) for a, b in zip(*caches, strict=True))


@pytest.mark.parametrize("trees", [None, [[-1, -1, 0], [-1]]], ids=["chains", "trees"])
@pytest.mark.parametrize("piece", [MOST_COLUMNS, 3])
@pytest.mark.parametrize("name", ["tied", "qwen2 with windows"])
def test_a_piece_of_a_prompt_rides_in_the_pass_of_other_rows(name: str, piece: int, trees: list[list[int]] | None) -> None:
    """All has the bits of two passes, and no logits of the piece are computed: the result holds those of the block alone."""
    ids = [i * i % 40 for i in range(20 + piece)]
    block: Block = torch.arange(8).view(2, 4), [4, 2], trees
    logits, held = [], []
    for together in (True, False):
        runner = packed(name).fork()
        runner.memory.reserve(4, 100)
        feed_prompts(runner, [(0, ids[:9]), (1, ids[:5]), (3, ids[:20])])
        runner.counts.take_executors()
        if together:
            logits.append(feed_carrying(runner, [1, 0], block, 3, ids[20:]))
            assert runner.counts.take_executors() == {C_DECODER: 1}
        else:
            logits.append(runner.feed([1, 0], *block[:2], parents=trees))
            feed_prompts(runner, [(3, ids[20:])])
            assert runner.counts.take_executors() == {C_DECODER: 2}
        assert runner.cache.lengths == [11, 9, 0, len(ids)]
        lengths, stores = runner.cache.lengths, [store for each in runner.cache.stores() for store in each[:2]]
        held.append([store[slot, : lengths[slot]] for store in stores for slot in (0, 1, 3)])
    assert torch.equal(*logits)
    assert logits[0].untyped_storage().nbytes() == 2 * 4 * runner.vocab_size * 4
    assert all(map(torch.equal, *held))


def test_a_piece_rides_by_other_executors() -> None:
    """They may compute its logits too; those of the block have the same bits."""
    logits = []
    for runner in (packed("tied").fork(), by_operations(packed("tied"))):
        runner.memory.reserve(3, 40)
        logits.append(feed_carrying(runner, [0, 1], (torch.arange(4).view(2, 2), [2, 1], None), 2, range(9)))
    assert logits[0].shape == (2, 2, runner.vocab_size)
    assert torch.equal(*logits)


def test_unused_columns_repeat_the_last_token() -> None:
    runner = packed("llama")
    logits = []
    for each in (runner.fork(), by_operations(runner)):
        each.memory.reserve(3, 8)
        logits.append(each.feed([2, 0, 1], torch.arange(12).view(3, 4), [2, 4, 1]))
    assert torch.equal(*logits)
    assert torch.equal(logits[0][0, 3], logits[0][0, 1])


@torch.inference_mode()
def test_a_cache_that_has_moved_is_followed() -> None:
    """Between two passes of the same runner; the old memory is overwritten, as its next owner would."""
    runner = packed("llama")
    logits = []
    for each in (runner.fork(), by_operations(runner)):
        each.memory.reserve(2, 16)
        each.feed([0, 1], torch.arange(10).view(2, 5), [5, 5])
        old = [tensor for stores in each.cache.stores() for tensor in stores]
        each.memory.reserve(3, 64)
        for tensor in old:
            tensor.fill_(torch.nan)
        logits.append(each.feed([1, 0], torch.arange(4).view(2, 2), [2, 2]))
    assert torch.equal(*logits)


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def test_packed_weights_never_move() -> None:
    matrix = PanelMatrix(torch.randn(40, 24))
    place, x = matrix.panels.data_ptr(), torch.randn(2, 24)
    other = torch.randn(40, 24)
    for _ in range(2):
        matrix.write(other.clone())
        assert matrix.panels.data_ptr() == place
    assert torch.equal(matrix.linear(x), PanelMatrix(other).linear(x))


IN_PLACE = [name for name in WRITES if name.startswith("in place") and name != "in place: bias"]


@pytest.mark.parametrize("write", IN_PLACE)
def test_weights_written_in_place_are_read(write: str) -> None:
    runner = packed("tied")
    before, _ = lived(runner)
    WRITES[write](runner.hf)
    after, _ = lived(runner)
    assert all(torch.equal(a, b) for a, b in zip(after, lived(by_operations(runner))[0], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_token_that_the_model_lacks_is_its_last() -> None:
    """A drafter may have a smaller vocabulary than its target. Columns behind the block are not read."""
    runner = packed("llama")
    logits = []
    for each, tokens in (
        (runner.fork(), [[9999, 5, -1], [3, 1, -1]]),
        (by_operations(runner), [[runner.vocab_size - 1, 5], [3, 1]]),
    ):
        each.memory.reserve(2, 4)
        logits.append(each.feed([0, 1], torch.tensor(tokens), [2, 1]))
    assert torch.equal(logits[0][0], logits[1][0])
    assert torch.equal(logits[0][1, 0], logits[1][1, 0])


def test_a_token_that_is_not_in_the_vocabulary() -> None:
    runner = packed("llama").fork()
    runner.memory.reserve(1, 4)
    with pytest.raises(IndexError):
        runner.feed([0], torch.tensor([[-1]]), [1])


def test_which_decoders_have_passes_in_one_call() -> None:
    assert packed("llama", form=AS_IS).lean.no_whole == "its weights are not packed in panels"  # type: ignore[union-attr]
    hf = packed("llama").hf
    decoder = decoder_of(hf)
    assert decoder is not None
    other = replace(decoder, activation="gelu")
    assert whole_pass(other, NativeKernels(other).angles) == (None, "its gate is gelu, and the kernel has silu")
    hf.model.norm.weight.data = torch.ones(2 * hf.config.hidden_size)[::2]
    decoder = decoder_of(hf)
    assert decoder is not None
    assert whole_pass(decoder, NativeKernels(decoder).angles) == (None, "a weight has gaps in memory")


# ── negative controls ───────────────────────────────────────────────────────────────────────────────────────────────

LOOP = "for (int64_t n = panels; panel < end; panel += n) {"
LATE = (LOOP, LOOP + " if (!panel) for (volatile int i = 0; i < 20000; i++) {}")
"""The thread that has the first outputs of a product is late."""
# What they read and write is inside the arrays, as the process goes on with what they leave.
MUTANTS = wrong_ones("whole passes")
WEAK = {"no window": "mistral with a window", "one norm of heads": "qwen3", "one window for all trees": "a narrow window"}


def with_kernels(runner: Runner, made: ctypes.CDLL) -> Runner:
    """The same model with passes in one call by these kernels."""
    other, lean = runner.fork(), runner.lean
    assert lean is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "library", lambda: made)
        other.lean = LeanPass(lean.decoder, lean._kernels, WholePass(lean.decoder, NativeKernels(lean.decoder).angles))
    return other


@cache
def right_life(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """By the right kernels, compiled as wrong ones are, in two threads."""
    with threads(2):
        return lived(with_kernels(packed(name), compiled_as_wrong_ones_are()))


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_caught(name: str) -> None:
    model = WEAK.get(name, "llama")
    wrong = with_kernels(packed(model), wrong_kernels(MUTANTS[name], LATE))
    with threads(2):
        assert unequal(lived(wrong), right_life(model)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *WEAK.values(), "qwen2 with windows"])
def test_a_late_thread_changes_nothing(name: str) -> None:
    """The same comparison passes the right kernels."""
    late = with_kernels(packed(name), wrong_kernels(LATE))
    with threads(2):
        assert not unequal(lived(late), right_life(name))
