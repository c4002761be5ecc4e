"""Keys and values rounded once when written, kv="int8": an unmodified Transformers model over a cache that rounds gives the same.

Tests of: models.cache.row_store, models.cache, models.lean.whole, models.loading, models.passes, native.build.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import shoal
from native_kernels import needs_compiler
from shoal.api import Shoal
from shoal.cli.options import ModelSource
from shoal.errors import RequestError
from shoal.models.cache.row_store import SCALE_BYTES, rounded, unrounded
from shoal.models.executor import C_DECODER, MODULES
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.models.selfcheck import largest_error
from shoal.models.sources import bundled
from shoal.testing import tiny_model
from shoal.types.requests import Prefix

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPTS = ("def add(a, b):\n", "class Stack:\n    def push(self, item):\n", "import")


class RoundingCache(DynamicCache):  # type: ignore[misc]
    """A cache of Transformers that rounds every key and value when it is written, by its own arithmetic."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
        return super().update(_rounded(key_states), _rounded(value_states), *args, **options)


def _rounded(states: Tensor) -> Tensor:
    wide = states.double()
    scale = (states.float().abs().amax(-1, keepdim=True) / 127).clamp(min=2.0**-126)
    return ((wide / scale).round() * scale).to(states.dtype)


class GivenCache(DynamicCache):  # type: ignore[misc]
    """A cache that hands out a row's stored keys and values, and keeps how far the bytes of its own rounding are from them."""

    def __init__(self, runner: Runner, slot: int, length: int) -> None:
        super().__init__()
        self._stored = [[t[slot, :length] for t in stores[:2]] for stores in runner.cache.stores()]
        self.differences: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        given = []
        for states, stored in zip((key_states, value_states), self._stored[layer_idx], strict=True):
            own = rounded(states[0].transpose(0, 1))
            self.differences.append((own.int() - stored.int())[..., :-SCALE_BYTES].abs().flatten())
            given.append(unrounded(stored, states.dtype).transpose(0, 1)[None])
        return tuple(given)


def reference(dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(bundled("target"), dtype=DTYPES[dtype]).eval()


@pytest.fixture(scope="module", params=list(DTYPES))
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Shoal, Any]]:
    """The bundled pair with rounded keys, and Transformers' model of its target."""
    pair = shoal.load(kv="int8", dtype=request.param, max_batch=16)
    yield pair, reference(request.param)
    pair.close()


@torch.inference_mode()
def greedy(hf: Any, prompt: list[int], count: int) -> list[int]:
    """The ids of plain decoding over a cache that rounds."""
    cache, ids, new = RoundingCache(), list[int](), prompt
    for _ in range(count):
        new = [int(hf(torch.tensor([new]), past_key_values=cache).logits[0, -1].argmax())]
        ids += new
    return ids


@torch.inference_mode()
def below_best(hf: Any, prompt: list[int], ids: list[int]) -> Tensor:
    """How far the logits of ids lie below the highest, [tokens], by one forward over a cache that rounds."""
    logits = hf(torch.tensor([prompt + ids]), past_key_values=RoundingCache()).logits[0, len(prompt) - 1 : -1].float()
    return logits.amax(dim=1) - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]


def ids_of(result: Any) -> list[list[int]]:
    return [list(sample.token_ids) for output in result for sample in output.samples]


@pytest.mark.slow(but=["bfloat16"])
@needs_compiler
def test_greedy_ids_are_those_of_a_cache_that_rounds(both: tuple[Shoal, Any]) -> None:
    """300 tokens of three unequal prompts, plain and with drafts; in bfloat16 but for near ties, as the products differ."""
    pair, hf = both
    prompts = [pair.tokenizer(text)["input_ids"] for text in PROMPTS]
    options: dict[str, Any] = {"max_new_tokens": 300, "temperature": 0, "eos": ()}
    plain = pair.generate(prompts, lookahead="off", **options)
    drafted = pair.generate(prompts, lookahead=4, **options)
    assert ids_of(plain) == ids_of(drafted)
    assert set(plain.stats.executors["target"]) == set(drafted.stats.executors["target"]) == {C_DECODER}
    assert drafted.stats.accepted > 0
    for found, prompt in zip(ids_of(plain), prompts, strict=True):
        if hf.dtype == torch.float32:
            assert found == greedy(hf, prompt, 300)
        below = below_best(hf, prompt, found)
        assert below.max() < (1e-2 if hf.dtype == torch.float32 else 0.5)
        assert (below > 0).float().mean() < 0.05


@needs_compiler
@torch.inference_mode()
def test_logits_are_those_of_a_cache_that_rounds(both: tuple[Shoal, Any]) -> None:
    """To 1e-4 in float32 over the bytes that the C decoder wrote. Hardly one is another than Transformers' model has there:
    its sums have another order, which decides between two bytes. Without the rounding the logits are farther away."""
    pair, hf = both
    ids = torch.tensor([pair.tokenizer(PROMPTS[1] * 3)["input_ids"]])[:, :60]
    runner = pair.target.fork()
    runner.memory.reserve(1, 64)
    found = torch.cat([runner.feed([0], part, [part.shape[1]])[0] for part in ids.split([37, 1, 8, ids.shape[1] - 46], 1)])
    given = GivenCache(runner, 0, ids.shape[1])
    expected, other = (hf(ids, past_key_values=cache).logits[0] for cache in (given, DynamicCache()))
    error, rounding = (float((found - right).abs().mean()) for right in (expected, other))
    differences = torch.cat(given.differences)
    assert dict(runner.counts.executors) == {C_DECODER: 4}
    if hf.dtype == torch.float32:
        assert float((found - expected).abs().max()) < 1e-4
        assert rounding > 100 * error
        assert differences.max() <= 1
        assert differences.count_nonzero() < len(differences) / 1000
    else:
        assert error < 0.05
        assert differences.float().mean() < 0.5


@pytest.mark.slow(but=["bfloat16-3"])
@needs_compiler
@pytest.mark.parametrize("seed", [3, 5])
def test_a_seed_has_its_tokens_in_any_company(both: tuple[Shoal, Any], seed: int) -> None:
    """Alone, among others that end and are replaced, with drafts, and with prompts that are stored once."""
    pair, _ = both
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "seed": seed, "rule": "coupled"}
    alone = ids_of(pair.generate(PROMPTS[1], n=2, lookahead="off", **options))
    assert alone == ids_of(pair.generate(PROMPTS[1], n=2, lookahead=5, **options))
    company = pair.generate([PROMPTS[0], PROMPTS[1], PROMPTS[2]], n=[7, 2, 9], lookahead=3, **options)
    assert alone == [list(sample.token_ids) for sample in company[1].samples]


@needs_compiler
def test_kept_prompts_are_copied_as_they_were_rounded() -> None:
    with_memory = shoal.load(kv="int8", dtype="float32", prefix_memory=1 << 22)
    prompt = PROMPTS[1] * 4
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.8, "seed": 1, "lookahead": 4}
    first = with_memory.generate(prompt, n=3, **options)
    again = with_memory.generate(prompt, n=3, **options)
    assert (first.stats.restored_tokens, ids_of(first)) == (0, ids_of(again))
    assert again.stats.restored_tokens > 20
    with_memory.close()


def test_a_token_takes_its_bytes_and_scales() -> None:
    """SmolLM2's shape, a head of 64: 0.27 of float32, 0.53 of bfloat16; cells, slots and kept tokens count the same."""
    for dtype, share in ((torch.float32, 4.0), (torch.bfloat16, 2.0)):
        hf = tiny_model("llama").to(dtype).eval()
        plain, eight = wrap(hf, "llama"), wrap(hf, "llama", kv="int8")
        dim = hf.config.head_dim
        assert eight.memory.token_bytes / plain.memory.token_bytes == (dim + SCALE_BYTES) / (share * dim)
        eight.memory.reserve(3, 20, 50)
        held = [tensor.nbytes for stores in eight.cache.stores() for tensor in stores]
        assert eight.cache.nbytes() == eight.memory.cache_bytes(3, 20, 50) == sum(held)


@torch.inference_mode()
def test_modules_attend_over_the_same_keys() -> None:
    """Without the C decoder the modules compute the declared model: at once, in pieces, and over a prompt that is stored once."""
    hf = tiny_model("llama", layers=3).eval()
    runner = wrap(hf, "llama", kv="int8")
    runner.counts.take_executors()
    ids = torch.randint(0, runner.vocab_size, (1, 24), generator=torch.Generator().manual_seed(1))
    expected = hf(ids, past_key_values=RoundingCache()).logits[0]
    runner.memory.reserve(2, 32, 32)
    found = torch.cat([runner.feed([1], part, [part.shape[1]])[0] for part in ids.split([11, 5, 8], 1)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert float((found - hf(ids).logits[0]).abs().max()) > 1e-4
    prefix = Prefix(3, 16)
    runner.feed_prefix(prefix, 0, ids[:, :16])
    runner.cache.enter(0, prefix)
    stored = runner.feed([0], ids[:, 16:], [8])[0]
    torch.testing.assert_close(stored, expected[16:], atol=1e-4, rtol=0)
    assert dict(runner.counts.executors) == {MODULES: 5}


def held(runner: Runner, slot: int, length: int) -> list[Tensor]:
    return [tensor[slot, :length].clone() for stores in runner.cache.stores() for tensor in stores[:2]]


@torch.inference_mode()
def test_rows_move_with_their_scales() -> None:
    """A fork, an accepted path of a tree, growth, and the part of `self:window=N`: the bytes are those that were written."""
    runner = wrap(tiny_model("llama").eval(), "llama", kv="int8")
    runner.memory.reserve(3, 16)
    runner.feed([0], torch.arange(12)[None] + 3, [12])
    before = held(runner, 0, 12)
    runner.cache.copy(0, 2, 12)
    runner.memory.reserve(5, 40)
    part = runner.fork().cache
    part.reserve(1, 16)
    part.take(runner.cache, [2], 2, 4, 9)
    runner.cache.keep(0, 4, [0, 2, 5])
    kept = held(runner, 0, 7)
    for i, written in enumerate(before):
        assert torch.equal(held(runner, 2, 12)[i], written)
        assert torch.equal(kept[i], written[[0, 1, 2, 3, 4, 6, 9]])
        assert torch.equal([t for s in part.stores() for t in s[:2]][i][0, :6], written[[0, 1, 8, 9, 10, 11]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype: torch.dtype) -> None:
    states = torch.randn(40, 2, 5, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    states[0, 0, 0], states[1, 0, 0, 3], states[2, 0, 0, 3] = 0, float("nan"), float("inf")
    stored = rounded(states)
    found = unrounded(stored, torch.float32)
    assert (stored.shape[-1], stored.dtype) == (24 + SCALE_BYTES, torch.int8)
    assert not found[0, 0, 0].any()
    assert found[1, 0, 0].isnan().all()
    assert not found[2, 0, 0].isfinite().any()
    sound = states[3:].float()
    limit = sound.abs().amax(-1, keepdim=True) / 127 * 0.5001
    assert ((found[3:] - sound).abs() <= limit).all()
    assert torch.equal(stored[3:], rounded(found[3:]))  # what was rounded stays


@torch.inference_mode()
def test_what_is_not_finite_can_be_zeroed() -> None:
    runner = wrap(tiny_model("llama").eval(), "llama", kv="int8")
    runner.memory.reserve(1, 8)
    runner.feed([0], torch.tensor([[1, 2, 3]]), [3])
    before, stores = held(runner, 0, 3), runner.cache.stores()[0]
    stores[0][0, 1] = rounded(torch.full(stores[0].shape[2:], float("nan")))[..., SCALE_BYTES:]
    runner.cache.zero_non_finite(0)
    found = unrounded(held(runner, 0, 3)[0], torch.float32)
    assert not found[1].any()
    assert torch.equal(held(runner, 0, 3)[0][[0, 2]], before[0][[0, 2]])


@needs_compiler
def test_the_check_compares_both_executors_over_rounded_keys(both: tuple[Shoal, Any]) -> None:
    pair, _ = both
    error = largest_error(pair.target)
    assert error < (1e-8 if pair.target.dtype == torch.float32 else 5e-3)
    assert {role: (one or {})["kv"] for role, one in pair.loaded.items()} == {"target": "int8", "draft": "off"}
    assert "keys and values in int8" in str(pair.target.explain([0], [1]))


def test_the_command_line_loads_it() -> None:
    pair = ModelSource(kv="int8").load()
    assert pair.target.kv == "int8"
    pair.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv": "int4"}, "kv must be one of off, int8, got 'int4'"),
        ({"kv": "int8", "tensor_parallel": True}, "does not go with tensor_parallel"),
        ({"kv": "int8", "device": "meta"}, "kv='int8' works on a CPU, and meta is none"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=words):
        shoal.load(bundled("target"), **options)
