"""What the kernels of a drafter's step must do, on the device at hand: a CUDA GPU, or the CPU through Triton's interpreter.

Not collected by itself: `test_layers.py` runs this file in a process of its own.

Tests of: models.layers.gpu_draws, models.layers.triton_decoder, models.layers.draw_kernels,
drafting.captured, models.compiled.round_functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mutants import mutant, wrong_ones
from shoal.config import Limits, Sampling
from shoal.drafting.captured import CapturedRounds
from shoal.lookahead.controller import Fixed
from shoal.models import loading
from shoal.models.compiled import EXECUTORS, round_functions
from shoal.models.compiled.captures import CAPTURED
from shoal.models.executor import TRITON_LAYERS
from shoal.models.layers import draw_kernels
from shoal.models.layers import gpu_draws as on_gpu
from shoal.models.layers.triton_decoder import fused_layers_of
from shoal.models.runner import Runner
from shoal.sampling import drawing
from shoal.sampling.acceptance import RULES
from shoal.sampling.uniforms import BUCKETS
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of, runners_of
from shoal.types.requests import Request

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a CUDA device nor TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
QWEN = 151_936 // (16 if INTERPRETED else 1)
"""Tokens of Qwen's vocabulary; a part of them in the interpreter, which takes minutes for all."""
Draw = Callable[[Tensor, Tensor], Tensor]
DRAWS: dict[str, tuple[Draw, Draw]] = {
    "inverse_transform": (drawing.inverse_transform, on_gpu.inverse_transform),
    "exponential_race": (drawing.exponential_race, on_gpu.exponential_race),
}


def weights_of(vocabulary: int, rows: int, generator: torch.Generator) -> Tensor:
    """Softmax, with many zeros; the last row has one token alone, the one before none at all, as padding may."""
    made = torch.rand(rows, vocabulary, generator=generator) ** 8
    made = torch.where(torch.rand(rows, vocabulary, generator=generator) < 0.4, 0.0, made)
    made[:, 0] += 0.01
    made[-2:] = 0
    made[-1, vocabulary - 1] = 1e-20
    return made.to(DEVICE)


def uniforms_of(rows: int, generator: torch.Generator) -> Tensor:
    """As rules make them, [rows, 1 + BUCKETS]; among the first also 0 and the largest below 1. Rows are not side by side."""
    made = torch.rand(rows, 2, 1 + BUCKETS, generator=generator, dtype=torch.float64)
    made[..., 1:] = -made[..., 1:].clamp(min=1e-9).log()
    made[:2, 0, 0] = torch.tensor([0.0, 1 - 2.0**-53])
    return made.to(DEVICE)[:, 0]


def differing(name: str, vocabulary: int, seeds: int = 3) -> int:
    """Rows in which kernel and definition draw another token; or a token that has no weight."""
    right, found = DRAWS[name]
    wrong = 0
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        weights, uniforms = weights_of(vocabulary, 8, generator), uniforms_of(8, generator)
        ours, theirs = found(weights, uniforms), right(weights, uniforms)
        assert ours.dtype == theirs.dtype == torch.int64
        assert bool(((ours >= 0) & (ours < vocabulary)).all())
        real = torch.arange(8) != 6  # nothing can be drawn there
        weightless = weights.gather(1, ours[:, None]).squeeze(1).cpu() == 0
        wrong += int((((ours != theirs).cpu() | weightless) & real).sum())
    return wrong


@pytest.mark.parametrize("vocabulary", [1, 70, 256, 257, 5003, QWEN])
@pytest.mark.parametrize("name", DRAWS)
def test_a_kernel_draws_what_the_definition_draws(name: str, vocabulary: int) -> None:
    assert differing(name, vocabulary, seeds=1 if vocabulary == QWEN else 3) == 0


def test_tokens_have_the_weights_that_they_are_drawn_by() -> None:
    """Evenly spread uniforms: each token is drawn as often as its weight says."""
    weights = torch.tensor([3.0, 0.0, 1.0, 0.0, 4.0], device=DEVICE).expand(32, 5).contiguous()
    uniforms = ((torch.arange(32, dtype=torch.float64) + 0.5) / 32)[:, None].to(DEVICE)
    assert on_gpu.inverse_transform(weights, uniforms).bincount(minlength=5).tolist() == [12, 0, 4, 0, 16]


FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("known", "vocabulary", "dtype"),
    [
        *((4500, 4500, dtype) for dtype in FORMATS),
        *((*sizes, FORMATS[i % 3]) for i, sizes in enumerate([(1, 1), (70, 70), (70, 90), (90, 70), (2048, 2048)])),
        (QWEN, QWEN, torch.bfloat16),
    ],
    ids=str,
)
def test_the_softmax_is_that_of_float64(known: int, vocabulary: int, dtype: torch.dtype) -> None:
    assert softmax_error(known, vocabulary, dtype) < 1


def softmax_error(known: int = 4500, vocabulary: int = 4500, dtype: torch.dtype = torch.float32) -> float:
    """In units of what rounding may do; infinite where a token, a mark or an unsound row is wrong. Rows are not side by side."""
    generator = torch.Generator().manual_seed(known + vocabulary)
    logits = (4 * torch.randn(7, 2, known, generator=generator)).to(dtype).to(DEVICE)[:, 1]
    logits[1, : known // 2] = -torch.inf
    logits[2, known // 3 :] = logits[2, known // 3 :].amax()  # equals: the first is meant
    logits[4] = -torch.inf
    logits[5, known // 2], logits[6, known - 1] = torch.nan, torch.inf
    temperatures = torch.linspace(0.3, 2.0, 7, device=DEVICE)
    worst = 0.0
    for temperature in (temperatures, None):
        found = on_gpu.softmax(logits, temperature, vocabulary)
        read = logits[:, :vocabulary].double()
        unsound = ~(read.amax(-1).abs() < torch.inf)
        assert found.probs is not None
        exact = torch.nn.functional.pad(read, (0, max(0, vocabulary - known)), value=-torch.inf)
        exact = (exact / (1.0 if temperature is None else temperature.double()[:, None])).softmax(-1)
        exact[unsound] = 1 / vocabulary
        only = on_gpu.softmax(logits, temperature, vocabulary, want_probs=False)
        same = torch.equal(found.sound, ~unsound) and torch.equal(found.best[~unsound], read.argmax(-1)[~unsound])
        if (
            not same
            or only.probs is not None
            or not all(torch.equal(a, b) for a, b in zip(found[1:], only[1:], strict=True))
        ):
            return torch.inf
        error = (found.probs - exact).abs() / exact.amax(-1, keepdim=True)
        worst = max(worst, float(error.nan_to_num(torch.inf).amax()) / 4e-6)
    return worst


def fed(advances: bool = True) -> list[Any]:
    """All that the kernel has written."""
    drawn = torch.tensor([5, 6, 7], device=DEVICE)
    numbers = torch.arange(1, 13, device=DEVICE).view(4, 3)
    tokens, kept = torch.zeros(3, 1, dtype=torch.long, device=DEVICE), torch.zeros(3, 4, dtype=torch.long, device=DEVICE)
    positions, cells, starts, counts = numbers[0].view(3, 1), *numbers[1:]
    on_gpu.feed(drawn, tokens, kept[:, 2], (positions, cells, starts, counts) if advances else None)
    return [tokens.flatten().tolist(), kept.tolist(), numbers.tolist()]


KEPT = [[0, 0, 5, 0], [0, 0, 6, 0], [0, 0, 7, 0]]
MOVED = [[11, 13, 15], [14, 16, 18], [17, 19, 21], [10, 11, 12]]


def test_the_next_block_is_filled_and_moves_on() -> None:
    assert fed() == [[5, 6, 7], KEPT, MOVED]
    assert fed(advances=False) == [[5, 6, 7], KEPT, torch.arange(1, 13).view(4, 3).tolist()]


MUTANTS = wrong_ones("Triton: draws")


@pytest.mark.skipif(not INTERPRETED, reason="the checks themselves are checked in the interpreter")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, right, wrong = MUTANTS[name]
    monkeypatch.setattr(draw_kernels, kernel, getattr(mutant(draw_kernels, right, wrong, tmp_path), kernel))
    drawn = "inverse_transform" if kernel in ("block_sums", "inverse_transform") else "exponential_race"
    assert differing(drawn, 4999, seeds=1) > 0


@pytest.mark.skipif(not INTERPRETED, reason="the checks themselves are checked in the interpreter")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tl.store(tokens + row, token)", "tl.store(tokens + row, row)"),
        ("tl.load(cells + row) + count", "tl.load(cells + row) + 1"),
        ("row * kept_stride", "row"),
    ],
)
def test_a_wrong_feed_is_caught(right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_kernels, "feed", mutant(draw_kernels, right, wrong, tmp_path).feed)
    assert fed() != [[5, 6, 7], KEPT, MOVED]


@pytest.mark.skipif(not INTERPRETED, reason="the checks themselves are checked in the interpreter")
@pytest.mark.parametrize(
    ("kernel", "right", "wrong"),
    [
        ("parts_of_softmax", "tl.max((values != values).to(tl.int32), 0)", "0"),
        ("parts_of_softmax", "tl.exp(values / temperature - origin)", "tl.exp(values - origin * temperature)"),
        (
            "parts_of_softmax",
            "tl.min(tl.where(values == top, token, known), 0)",
            "tl.max(tl.where(values == top, token, 0), 0)",
        ),
        (
            "parts_of_softmax",
            'row * row_stride + token, mask=token < known, other=-float("inf"))\n    values = values',
            'row * known + token, mask=token < known, other=-float("inf"))\n    values = values',
        ),
        ("softmax", "tl.exp(each / temperature - origin))", "1.0)"),
        (
            "softmax",
            'mask=token < known, other=-float("inf"))\n        weight',
            "mask=token < known, other=0.0)\n        weight",
        ),
        ("softmax", "tl.where(real, total, vocabulary * 1.0)", "total"),
        ("softmax", "tl.where(each == top, place, known)", "tl.where(each < top, place, known)"),
        ("softmax", "weight / total", "weight"),
    ],
)
def test_a_wrong_softmax_is_caught(
    kernel: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_kernels, kernel, getattr(mutant(draw_kernels, right, wrong, tmp_path), kernel))
    assert any(softmax_error(known, vocabulary) > 1 for known, vocabulary in ((70, 90), (4500, 4500)))


# ── whole rounds ────────────────────────────────────────────────────────────────────────────────────────────────────


def runner(seed: int) -> Runner:
    hf = tiny_model("llama", seed=seed, layers=1).to(DEVICE)
    made = loading.wrap(hf, "tiny", "pad", checked=False)
    made.capture_rounds("eager" if INTERPRETED else "graphed")
    made.bridge.layers = fused_layers_of(made.hf)
    assert made.bridge.layers is not None
    return made


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_rounds_decide_what_their_stages_decide(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models, used = (runner(0), runner(1)), list[str]()

    def noting(name: str, kernel: Draw) -> Draw:
        def noted(weights: Tensor, uniforms: Tensor) -> Tensor:
            used.append(name)
            return kernel(weights, uniforms)

        return noted

    for name, (definition, kernel) in DRAWS.items():
        monkeypatch.setitem(on_gpu.KERNELS, definition, noting(name, kernel))
    softmax = on_gpu.softmax

    def counted(*arguments: Any, **options: Any) -> Any:
        used.append("softmax")
        return softmax(*arguments, **options)

    monkeypatch.setattr(on_gpu, "softmax", counted)

    def result() -> tuple[list[list[int]], int, int]:
        made = engine_of(*models, Fixed(2), rule=RULES[rule](), max_batch=2)
        settings = [Sampling(0.9, seed=3)]
        rows = [row for s in settings for row in made.submit(Request((1, 2, 3), 1, s, Limits(max_new_tokens=4)))]
        while made.step():
            pass
        target = runners_of(made)[0].captures
        assert target is not None
        assert target.failures == []
        return (
            [row.tokens for row in rows],
            made.stats.accepted,
            target.ran.total(),
        )

    found, accepted, rounds = result()
    assert rounds
    assert set(used) == {"softmax", "inverse_transform" if rule != "coupled" else "exponential_race"}
    monkeypatch.setattr(CapturedRounds, "decide", lambda *_, **__: None)
    assert result()[:2] == (found, accepted)


def test_a_capture_that_fails_leaves_rounds_to_triton_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched one by one they are bound by the GPU; the model's modules are four times as many launches."""

    def fails(run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    def result(made: Runner) -> tuple[list[int], dict[str, int]]:
        engine = engine_of(made, None, Fixed(0), max_batch=2)
        (row,) = engine.submit(Request((1, 2, 3), 1, Sampling(0.9, seed=3), Limits(max_new_tokens=4)))
        while engine.step():
            pass
        return row.tokens, dict(engine.stats.executors["target"])

    made = runner(0)
    expected, executors = result(made)
    assert executors == {CAPTURED: 4, TRITON_LAYERS: 1}
    monkeypatch.setitem(EXECUTORS, "fails", lambda device: fails)
    failing = runner(0)
    failing.capture_rounds("fails")
    with pytest.warns(RuntimeWarning, match="no more captured rounds of this kind"):
        assert result(failing) == (expected, {TRITON_LAYERS: 5})


@pytest.mark.skipif(not INTERPRETED, reason="the checks themselves are checked in the interpreter")
def test_a_wrong_draw_of_the_verdict_is_found_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round is compared with the rule as it is defined, not with the same kernels again."""

    def next_token(draw: Draw, _: Tensor) -> Draw:
        return lambda weights, uniforms: (draw(weights, uniforms) + 1) % weights.shape[1]

    monkeypatch.setattr(round_functions, "on_device", next_token)
    made = engine_of(runner(0), None, Fixed(0), max_batch=2)
    made.submit(Request((1, 2, 3), 1, Sampling(0.9, seed=3), Limits(max_new_tokens=4)))
    with pytest.warns(RuntimeWarning, match="does not decide what its rule decides"):
        made.step()
