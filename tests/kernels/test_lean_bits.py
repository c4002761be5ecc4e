"""Lean passes by the kernels: a token's logits have the same bits alone, in a batch and in a verification; in bfloat16 too.

Tests of: models.lean.forward, models.passes, models.weights, models.formats, native.build.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from native_kernels import needs_compiler
from shoal.models import formats, loading, weights
from shoal.models.passes import choose_passes
from shoal.models.prompt_passes import feed_prefix, feed_prompts
from shoal.models.runner import Runner
from shoal.testing import tiny_model
from shoal.types.requests import Prefix

pytestmark = needs_compiler
LENGTHS = (9, 33, 21, 50)


def runner_of(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, packed: bool = True, kv: str = "off"
) -> Runner:
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(packs=frozenset({dtype} if packed else ())))
    hf = tiny_model(name).to(dtype).eval()
    weights.lay_out(hf, lambda keys: dict.fromkeys(keys, "packed" if packed else "as-is"))
    runner = loading.wrap(hf, name, kv=kv)
    choose_passes(runner, "on", owned=True)
    assert runner.lean is not None
    return runner


def decoded(runner: Runner, rows: list[Tensor], steps: list[int]) -> list[Tensor]:
    """Logits of every token of each row, [length, vocab], fed together in ragged blocks: row b's r-th has steps[(b + r) % n]."""
    runner.memory.reserve(len(rows), 64)
    runner.cache.clear()
    logits: list[list[Tensor]] = [[] for _ in rows]
    fed, turn = [0] * len(rows), 0
    while active := [b for b, row in enumerate(rows) if fed[b] < len(row)]:
        counts = [min(steps[(b + turn) % len(steps)], len(rows[b]) - fed[b]) for b in active]
        parts = [rows[b][fed[b] : fed[b] + count] for b, count in zip(active, counts, strict=True)]
        out = runner.feed(active, torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), counts)
        for i, (b, count) in enumerate(zip(active, counts, strict=True)):
            logits[b].append(out[i, :count].clone())
            fed[b] += count
        turn += 1
    return [torch.cat(row) for row in logits]


def texts(runner: Runner) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, runner.vocab_size, (n,), generator=generator) for n in LENGTHS]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", ["off", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2-sliding", "qwen3"])
def test_bits_do_not_depend_on_the_pass(name: str, kv: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(name, dtype, monkeypatch, kv=kv)
    rows = texts(runner)
    alone = [decoded(runner, [row], [1])[0] for row in rows]
    for steps in ([1], [3, 1, 7, 2], [60]):
        for expected, found in zip(alone, decoded(runner, rows, steps), strict=True):
            assert torch.equal(expected, found)


def after_prompt(runner: Runner, prompts: list[list[int]], parts: tuple[int, ...] = (), stored: bool = False) -> Tensor:
    """Logits of a token behind the first prompt, computed beside the others.

    Args:
        parts: the places at which the first prompt is cut.
        stored: True if it lies in the shared store.
    """
    runner.memory.reserve(len(prompts), 320, 320)
    runner.cache.clear()
    first, *others = prompts
    if stored:
        prefix = Prefix(0, len(first))
        feed_prefix(runner, prefix, 0, torch.tensor([first]))
        runner.cache.enter(0, prefix)
    ends = () if stored else (*parts, len(first))
    for start, end in zip((0, *ends), ends, strict=False):
        feed_prompts(runner, [(0, first[start:end]), *enumerate(others, 1)])
        others = []
    return runner.feed([0], torch.tensor([[7]]), [1]).clone()


@torch.inference_mode()
@pytest.mark.parametrize("kv", ["off", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_passes_of_a_prompt(dtype: torch.dtype, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that comes alone, beside longer and shorter ones, in pieces, and stored once for several rows."""
    runner = runner_of("llama", dtype, monkeypatch, kv=kv)
    generator = torch.Generator().manual_seed(0)
    long, short = (torch.randint(0, runner.vocab_size, (n,), generator=generator).tolist() for n in (300, 20))
    for first, other in ((long, short), (short, long)):
        alone = after_prompt(runner, [first])
        assert torch.equal(alone, after_prompt(runner, [first, other]))
        assert torch.equal(alone, after_prompt(runner, [first], (7, 17)))
        assert torch.equal(alone, after_prompt(runner, [first], stored=True))


@torch.inference_mode()
def test_control_products_of_a_library_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("llama", torch.float32, monkeypatch, packed=False)
    rows = texts(runner)
    alone = [decoded(runner, [row], [1])[0] for row in rows]
    assert not all(torch.equal(a, b) for a, b in zip(alone, decoded(runner, rows, [3, 1, 7, 2]), strict=True))
