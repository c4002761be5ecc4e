"""Strict passes: the same bits, hence the same tokens, whatever else is in the batch, in 16 bit too.

What is promised, and tested here: greedy ids are those of plain decoding at any draft length, batch size and order of joining;
sampled ids of a seed do not depend on the batch, plainly decoded or with a fixed draft length, and by the coupled rule not on the
draft length either.

Tests of: models.attention.methods, models.passes, models.attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from noisy_heads import noisy
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.errors import RequestError, UnsupportedModel
from shoal.lookahead.controller import by_name
from shoal.models import passes
from shoal.models.attention import AttentionInputs, Masks
from shoal.models.attention.methods import KV_BLOCK, METHODS, TILE
from shoal.models.cache import Plan
from shoal.models.loading import ROWWISE, LoadOptions, load_runner, wrap
from shoal.models.runner import Runner
from shoal.models.sources import bundled
from shoal.testing import VOCABULARY, save_pair, tiny_model
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request

NEW = 14
DTYPES = (torch.bfloat16, torch.float32)

# ── attention ───────────────────────────────────────────────────────────────────────────────────────────────────────


def inputs(
    starts: Sequence[int], counts: Sequence[int], dtype: torch.dtype, *, window: int | None = None, kv_block: int = KV_BLOCK
) -> AttentionInputs:
    """Random tensors whose first row is always the same, beside others that are not."""
    plan = Plan(range(len(starts)), starts, counts, torch.device("cpu"))
    plan.kv_block = kv_block
    rows = []
    for b in range(len(starts)):
        generator = torch.Generator().manual_seed(b if b == 0 else 100 * sum(starts) + b)
        rows.append([torch.randn(heads, 2 * KV_BLOCK, 8, generator=generator).to(dtype) for heads in (4, 2, 2)])
    query, key, value = (torch.stack(parts) for parts in zip(*rows, strict=True))
    positions = plan.positions[:, None, :, None].expand(-1, 4, -1, 8).clamp(max=2 * KV_BLOCK - 1)
    own = query.gather(2, positions)  # a position's query is the same in whatever pass it is asked
    return AttentionInputs(own, key[:, :, : plan.kv], value[:, :, : plan.kv], Masks(plan), 8**-0.5, window)


SHAPES = [
    ([0, 0, 0], [1, 6, 9]),
    ([30, 7], [7, 5]),
    ([5], [1]),
    ([100], [40]),
    ([3, 600, 20], [4, 1, 2]),
    ([0, 511], [13, 2]),
]


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("starts", "counts"), SHAPES)
def test_strict_attention_is_attention(starts: list[int], counts: list[int], window: int | None) -> None:
    asked = inputs(starts, counts, torch.float32, window=window)
    found, expected = METHODS["strict"](asked), METHODS["reference"](asked)
    assert found.shape == expected.shape
    for row, count in enumerate(counts):
        torch.testing.assert_close(found[row, :count], expected[row, :count], rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 8])
def test_its_bits_depend_on_the_row_alone(dtype: torch.dtype, window: int | None) -> None:
    alone = [METHODS["strict"](inputs([p], [1], dtype, window=window))[0, 0] for p in range(40)]
    for others in ([], [17], [700], [0, 5, 9, 100, 20, 31, 3]):
        for start, count in [(0, 40), (3, 1), (3, 7), (20, TILE), (21, 9), (39, 1)]:
            asked = inputs([start, *others], [count, *[3] * len(others)], dtype, window=window)
            out = METHODS["strict"](asked)
            assert torch.equal(out[0, :count], torch.stack(alone[start : start + count])), (others, start, count)


def test_the_usual_attention_is_not_like_that() -> None:
    """The control: else nothing above would be worth testing."""
    alone = [METHODS["pad"](inputs([p], [1], torch.float32, kv_block=1))[0, 0] for p in range(40)]
    together = METHODS["pad"](inputs([0, 700], [40, 3], torch.float32, kv_block=1))[0]
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=2e-6)
    assert not torch.equal(together, torch.stack(alone))


# ── whole passes ────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def pair(dtype: torch.dtype) -> tuple[Any, Any]:
    """A target, and the same with noise on its head."""
    target = tiny_model("llama", seed=3)
    drafter = noisy(target, 0.1)
    return target.to(dtype), drafter.to(dtype)


def test_linear_layers_see_one_shape_only_and_are_the_owners_again_after() -> None:
    hf = tiny_model("llama")
    seen: list[tuple[int, ...]] = []
    own = hf.lm_head.forward

    def noting(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return own(x)

    hf.lm_head.forward = noting  # an owner's own forward on an instance, as offloading tools put one there
    before = {name: module.__dict__.get("forward") for name, module in hf.named_modules()}
    runner = wrap(hf, "tiny", strict=True)
    seen.clear()
    runner.memory.reserve(3, 64)
    runner.feed([0, 1, 2], torch.ones(3, 7, dtype=torch.int64), [7, 7, 7])
    assert seen == [(passes.BLOCK, 32)] * 2  # 21 tokens
    assert {name: module.__dict__.get("forward") for name, module in hf.named_modules()} == before
    hf(torch.ones(1, 5, dtype=torch.int64))
    assert seen[-1] == (1, 5, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2-sliding", "gpt2", "opt", "phi3", "gpt-bigcode-mqa", "olmo2"])
def test_architectures_prove_it(architecture: str, dtype: torch.dtype) -> None:
    runner = wrap(tiny_model(architecture).to(dtype), architecture, strict=True)
    assert runner.attention == "strict"
    assert runner.notes["strict"] == f"{sum(passes.PROOF)} positions bit-equal in 4 ways of computing them"
    assert runner.self_check_error is not None


def test_without_strict_the_proof_fails() -> None:
    """The control: the proof is not one that everything passes; nor do blocks or attention alone do."""
    hf = tiny_model("llama")
    for attention, rowwise in (("pad", ROWWISE), ("strict", set[type[nn.Module]]())):
        runner = wrap(hf, "tiny", attention)
        runner.forward_context = lambda kinds=rowwise: passes._in_blocks([m for m in hf.modules() if type(m) in kinds])  # type: ignore[misc]
        with pytest.raises(UnsupportedModel, match="moved the logits"):
            passes.prove(runner)
    with pytest.raises(UnsupportedModel, match="moved the logits"):
        passes.prove(load_runner(bundled("drafter"), LoadOptions(dtype="bfloat16", attention="pad", pack=False)))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("mixtral", "multiplies matrices in its own way"),
        ("gemma2", "no soft-capped scores"),
        ("mpt", "attends by its own code"),
    ],
)
def test_what_cannot_be_strict_is_refused(architecture: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        wrap(tiny_model(architecture), architecture, strict=True)


def test_strict_chooses_the_attention_itself() -> None:
    with pytest.raises(RequestError, match="attention 'auto', got 'split'"):
        wrap(tiny_model("llama"), "tiny", "split", strict=True)


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def runners(dtype: torch.dtype) -> tuple[Runner, Runner]:
    target, drafter = pair(dtype)
    return wrap(target, "target", strict=True), wrap(drafter, "draft", strict=True)


def decode(
    models: tuple[Runner, Runner], k: int, max_batch: int, *, rows: Sequence[int] = range(8), **sampling: Any
) -> tuple[Engine, dict[int, tuple[int, ...]]]:
    """New tokens of eight ragged prompts, or some of them, in the order given."""
    engine = engine_of(*models, by_name(k), max_batch=max_batch)
    submitted = {}
    for i in rows:
        prompt = torch.randint(0, VOCABULARY, (1 + 5 * i,), generator=torch.Generator().manual_seed(i)).tolist()
        request = Request(tuple(prompt), 1, Sampling(seed=i, **sampling), Limits(max_new_tokens=NEW - i))
        submitted[i] = engine.submit(request)[0]
    while engine.step():
        pass
    return engine, {i: tuple(row.tokens[row.prompt_length :]) for i, row in submitted.items()}


@pytest.mark.slow(but=["dtype1"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_ids_are_plain_ids_at_any_draft_length_and_batch(dtype: torch.dtype) -> None:
    _, expected = decode(runners(dtype), 0, 1, temperature=0)
    for k, batch in [(0, 8), (1, 3), (4, 1), (6, 8)]:
        engine, found = decode(runners(dtype), k, batch, temperature=0)
        assert found == expected, (k, batch)
        assert (engine.stats.drafted > 0) == (k > 0)
        assert k == 0 or 0 < engine.stats.accepted < engine.stats.drafted


@pytest.mark.slow(but=["0-dtype0"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 4])
def test_sampled_ids_do_not_depend_on_the_batch(dtype: torch.dtype, k: int) -> None:
    first, expected = decode(runners(dtype), k, 1, temperature=0.8)
    for batch, order in [(3, range(8)), (8, range(7, -1, -1)), (2, (5, 1, 6))]:
        engine, found = decode(runners(dtype), k, batch, rows=order, temperature=0.8)
        assert found == {i: expected[i] for i in order}, (batch, order)
        if len(order) == 8:
            counts = ("drafted", "accepted", "row_rounds", "committed")
            assert [getattr(engine.stats, name) for name in counts] == [getattr(first.stats, name) for name in counts]
            assert batch == 1 or engine.stats.rounds < first.stats.rounds  # rows really ran together


def test_load_makes_both_models_strict(tmp_path: Any) -> None:
    loaded = shoal.load(
        *save_pair(tmp_path), dtype="bfloat16", strict=True, prefix_sharing="shared"
    )  # which strict does not do
    assert loaded.draft_model is not None
    assert "strict" in loaded.target.notes
    assert "strict" in loaded.draft_model.notes
    run = partial(loaded.generate, "def f(x):", temperature=0.8, seed=5, max_new_tokens=48, eos=())
    alone, among = (run(n, lookahead=3, rule="rejection") for n in (1, 5))
    assert alone[0].samples[0].token_ids == among[0].samples[0].token_ids
    assert among.stats.accepted > 0
    plain, coupled = run(1, lookahead="off"), run(5, lookahead=3, rule="coupled")
    assert plain[0].samples[0].token_ids == coupled[0].samples[0].token_ids
    assert coupled.stats.accepted > 0


@pytest.mark.slow
@pytest.mark.limit(900)
def test_the_bundled_pair_in_bfloat16() -> None:
    """Plain and one by one against six drafted tokens and four rows."""
    prompts = ["def mean(values):\n", "import os\n\n\ndef walk(path):\n", "def f(n):\n    if n", "x = [1, 2"]

    def ids(model: Any, batch: int, k: int) -> list[tuple[int, ...]]:
        model.max_batch = batch
        result = model.generate(prompts, temperature=0, max_new_tokens=16, lookahead=k, eos=())
        assert (result.stats.accepted > 0) == (k > 0)
        return [tuple(output.samples[0].token_ids) for output in result]

    model = shoal.load(dtype="bfloat16", strict=True)
    assert ids(model, 1, 0) == ids(model, 4, 6)
