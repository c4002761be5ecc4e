"""Every architecture: what the ragged engine says is what Transformers says, or the model is refused with the reason.

Tests of: models.bridge, models.selfcheck, models.attention, models.attention.methods.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from attention_paths import ARCHITECTURES_HERE, KINDS, MASK_PATH, RECURRENT_HERE, UNSHARED, greedy_ids, prompt
from mtp_layers import HYBRID, PLAIN, STACKED
from shoal.api import Shoal, Stream
from shoal.cli.check_model import drafters_in_the_box
from shoal.config import Limits, Sampling
from shoal.engine import running_rows
from shoal.engine.scheduler import ScheduledRound
from shoal.errors import RequestError, UnsupportedModel
from shoal.lookahead.controller import Fixed
from shoal.models import bridge, loading
from shoal.models.attention import AttentionInputs, methods
from shoal.models.lean import FAMILY
from shoal.models.load_checks import LIMITS
from shoal.models.runner import Runner
from shoal.models.selfcheck import self_check
from shoal.testing import ARCHITECTURES, REFUSED, VOCABULARY, save_pair, tiny_model, tiny_tokenizer
from shoal.testing.architectures import WINDOW
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request
from shoal.types.samples import Result

SLIDING = {
    "qwen2-sliding", "qwen2-moe-sliding", "mistral-sliding", "starcoder2", "gemma2", "gemma3", "gemma4", "phi3", "smollm3",
    "cohere2", "gpt-oss",
}  # fmt: skip

K = 3
MAX_BATCH = 3

ERROR = 1e-4
"""Largest difference in standard deviations of the logits. Sums of up to 64 terms in two layers come out of order: about
2^-23 * 64 * 2 = 1.5e-5 of a value, and the softmax of large scores multiplies that. A wrong mask or position costs 0.1."""


@pytest.fixture(params=sorted([*ARCHITECTURES_HERE, *RECURRENT_HERE]))
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Prompt and new tokens: one token only; longer than the window from the start; grows past it. The unequal ends make rows
# join late and the last ones move into holes.
ASKED = ((prompt(1), 6), (prompt(WINDOW + 5), 14), (prompt(4), 24))


@lru_cache
def table() -> dict[str, list[str]]:
    """What docs/reference/models.md says of each target: trees, prefix memory, fused passes, drafters."""
    text = (Path(__file__).parents[2] / "docs/reference/models.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and line.count("|") == 6]
    names = {letters(name.partition("(")[0]): said for targets, *said in rows for name in targets.split(", ")}
    return {name: said for name, said in names.items() if not name.startswith(("through", "with"))}


def letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def test_the_table_of_models_says_what_the_code_can(architecture: str) -> None:
    runner = loading.wrap(tiny_model(architecture), architecture, checked=False)
    family = architecture.removesuffix("-sliding").removesuffix("-mqa").removesuffix("-mha")
    said = table()[letters(family)]
    fused = type(runner.hf).__name__ in FAMILY
    assert [word == "yes" for word in said[:3]] == [runner.takes_trees, runner.can_keep_prefixes, fused]
    assert ("without `self`" in said[3]) == (runner.cut_obstacle is not None)
    everywhere = re.findall("`(.+?)`", table()["llama"][3])
    left = [name for name in everywhere if f"without `{name}`" not in said[3]]
    assert said[3].startswith(("the same", "`suffix`"))
    assert drafters_in_the_box(runner) == left  # `mtp` needs a checkpoint: tests/drafting/test_mtp.py
    assert ("and `mtp`" in said[3]) == (architecture in (*PLAIN, *HYBRID, STACKED))


@lru_cache(maxsize=1)  # the tests of one architecture run side by side
def expected_ids(architecture: str) -> list[tuple[int, ...]]:
    """What Transformers makes of `ASKED`."""
    hf = tiny_model(architecture)
    return [greedy_ids(hf, ids, new) for ids, new in ASKED]


def unchecked(hf: Any, method: str = "auto") -> Runner:
    """Without the self-check, which has a test of its own, and so without shared prompts, which only it can allow."""
    made = loading.wrap(hf, "tiny", method, checked=False)
    made.shares = False
    return made


Asked = Sequence[tuple[Sequence[int], int]]


def shoal_ids(target: Runner, drafter: Runner | None, asked: Asked = ASKED, n: int = 2) -> Result:
    """Greedy samples of each prompt, through a batch too small for all of them."""
    stream = Stream(engine_of(target, drafter, Fixed(K), max_batch=MAX_BATCH), requests(asked, n), text=False)
    for _ in stream:
        pass
    return stream.result()


def requests(asked: Asked, n: int) -> list[Request]:
    return [Request(tuple(ids), n, Sampling(temperature=0), Limits(max_new_tokens=new)) for ids, new in asked]


def wavering(hf: Any, amount: float = 0.15) -> Any:
    """The same model with noise on its head: a drafter that is right now and then."""
    other = copy.deepcopy(hf)
    head = other.get_output_embeddings().weight.data
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(7))
    head.add_(amount * float(head.std()) * noise)
    return other


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[ScheduledRound]:
    """The rounds in which rows joined or moved."""
    seen: list[ScheduledRound] = []
    real = running_rows.prefill

    def spy(runner: Runner, round_: ScheduledRound, *rest: Any) -> int:
        seen.append(round_)
        return real(runner, round_, *rest)

    monkeypatch.setattr(running_rows, "prefill", spy)
    return seen


# ── supported ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_self_check_passes(architecture: str) -> None:
    runner = loading.wrap(tiny_model(architecture), architecture)
    assert runner.attention_path == ("mask" if architecture in MASK_PATH else "interface")
    assert runner.self_check_error is not None
    assert runner.self_check_error < LIMITS[torch.float32] / 10
    assert runner.packs is (architecture not in MASK_PATH)
    assert runner.shares is (architecture in ARCHITECTURES.keys() - UNSHARED)
    assert runner.takes_trees is (architecture in ARCHITECTURES.keys() - {"mpt"})


@pytest.mark.slow(but=["bamba"])
def test_greedy_ids_are_those_of_generate(architecture: str, rounds: list[ScheduledRound]) -> None:
    hf, expected = tiny_model(architecture), expected_ids(architecture)
    assert len(set(expected[1])) > 4  # it wanders: equality says something
    target = unchecked(hf)

    result = shoal_ids(target, unchecked(wavering(hf)))

    assert [[s.token_ids for s in output.samples] for output in result] == [[ids, ids] for ids in expected]
    stats = result.stats
    assert 0 < stats.accepted < stats.drafted
    assert stats.row_rounds < stats.committed == 2 * sum(new for _, new in ASKED)
    assert any(round_.moves for round_ in rounds)
    assert sum(bool(round_.admissions) for round_ in rounds) > 1  # some joined while others ran


@pytest.mark.parametrize("architecture", KINDS)
def test_a_drafter_equal_to_the_target_is_always_right(architecture: str) -> None:
    target = unchecked(tiny_model(architecture))
    result = shoal_ids(target, target)
    for output, (_, new) in zip(result, ASKED, strict=True):
        for sample in output.samples:
            assert sample.accepted == sample.drafted
            assert sample.rounds == math.ceil(new / (K + 1))


@pytest.mark.parametrize("architecture", KINDS)
def test_plain_decoding_is_that_of_generate(architecture: str) -> None:
    result = shoal_ids(unchecked(tiny_model(architecture)), None, ASKED[1:2], n=1)
    assert result[0].samples[0].token_ids == expected_ids(architecture)[1]
    assert result.stats.acceptance_length == 1.0


# ── attention methods ───────────────────────────────────────────────────────────────────────────────────────────────


def ragged_logits(runner: Runner) -> list[Tensor]:
    """Logits of a small ragged schedule: unequal prompts beyond the window, swapped slots, a rollback, unequal blocks."""
    ids = torch.randint(0, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(5))
    runner.cache.reserve(4, 48)
    seen = []
    for slots, starts, counts in (
        ([2, 0, 1], [0, 0, 0], [19, 1, 11]),
        ([0, 1, 2], [1, 11, 19], [5, 2, 3]),
        ([1, 2], [12, 22], [4, 1]),
        ([0, 1, 2], [6, 16, 23], [1, 1, 1]),
    ):
        for slot, start in zip(slots, starts, strict=True):
            runner.cache.rollback(slot, start)
        block = torch.stack([ids[slot, start : start + max(counts)] for slot, start in zip(slots, starts, strict=True)])
        logits = runner.feed(slots, block, counts)
        seen += [logits[row, :count] for row, count in enumerate(counts)]
    return seen


@pytest.mark.parametrize("name", [name for name in KINDS if name in ARCHITECTURES.keys() - MASK_PATH])
def test_attention_methods_agree(name: str) -> None:
    hf = tiny_model(name)
    expected = ragged_logits(unchecked(hf, "reference"))
    spread = float(torch.cat(expected).std())
    for method in ("pad", "split", "auto"):
        for ours, theirs in zip(ragged_logits(unchecked(hf, method)), expected, strict=True):
            assert float((ours - theirs).abs().max()) < ERROR * spread, method


# ── packed blocks ───────────────────────────────────────────────────────────────────────────────────────────────────


def shapes_fed(hf: Any, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """The logits of a small ragged schedule and the shapes of the blocks that the model saw for it."""
    real, shapes = hf.forward, []

    def forward(ids: Tensor, **options: Any) -> Any:
        shapes.append(tuple(ids.shape))
        return real(ids, **options)

    with monkeypatch.context() as patch:
        patch.setattr(hf, "forward", forward)
        return ragged_logits(runner), shapes


@pytest.mark.parametrize("architecture", KINDS)
def test_packed_passes_see_real_tokens_only(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tiny_model(architecture)
    padded = unchecked(hf)
    padded.packs = False
    expected, shapes = shapes_fed(hf, padded, monkeypatch)
    assert shapes == [(3, 19), (3, 5), (2, 4), (3, 1)]
    if architecture not in MASK_PATH:
        shapes = [(1, 19 + 1 + 11), (1, 5 + 2 + 3), (1, 4 + 1), (3, 1)]  # equal counts: nothing to leave out

    logits, seen = shapes_fed(hf, loading.wrap(hf, architecture), monkeypatch)

    assert seen == shapes
    spread = float(torch.cat(expected).std())
    assert max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True)) < ERROR * spread


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_mixes_tokens_of_a_sequence_is_not_packed(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control for the test above: each token is told a little of the one before it, or a batch of one is refused."""
    hf = tiny_model("llama")
    real = hf.model.embed_tokens.forward

    def forward(ids: Tensor) -> Tensor:
        if fails and hf.config._attn_implementation == bridge.NAME and len(ids) == 1:
            raise RuntimeError("expected two rows")
        embedded = real(ids)
        if hf.config._attn_implementation == bridge.NAME and len(ids) == 1:
            embedded[:, 1:] += embedded[:, :-1]
        return embedded

    monkeypatch.setattr(hf.model.embed_tokens, "forward", forward)
    runner = loading.wrap(hf, "llama")
    assert not runner.packs
    assert runner.self_check_error is not None
    assert runner.self_check_error < LIMITS[torch.float32] / 10


@pytest.mark.parametrize("name", sorted(MASK_PATH))
@pytest.mark.parametrize("method", ["split", "reference"])
def test_the_mask_path_has_one_method(name: str, method: str) -> None:
    with pytest.raises(RequestError, match=f"attention must be 'auto' or 'pad', got '{method}'"):
        loading.wrap(tiny_model(name), name, method)


def test_the_model_is_its_owners_again_after_a_pass() -> None:
    hf = tiny_model("llama")
    before = hf.config._attn_implementation
    runner = loading.wrap(hf, "llama")
    ragged_logits(runner)
    assert hf.config._attn_implementation == before != bridge.NAME
    with pytest.raises(RuntimeError):
        runner.feed([0], torch.zeros(1, 2, 3, dtype=torch.long), [1])  # fails inside the model
    assert hf.config._attn_implementation == before


# ── sliding windows ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", sorted(SLIDING))
def test_the_window_is_felt(name: str) -> None:
    """Negative control for the tests above: with the window gone, the same tokens get other logits."""
    hf = tiny_model(name)
    ids = torch.tensor([prompt(3 * WINDOW)])
    with torch.inference_mode():
        short, long = (m(ids, use_cache=False).logits for m in (hf, tiny_model(name, sliding_window=64)))
    assert float((short[:, -1] - long[:, -1]).abs().max()) > 0.1 * float(short.std())
    assert float((short[:, 0] - long[:, 0]).abs().max()) < 1e-3


def test_a_window_that_only_the_mask_knows_bounds_the_context() -> None:
    """PhiMoE leaves its window to the mask, which shoal replaces: within the window nothing is lost."""
    hf = tiny_model("phimoe", sliding_window=24)
    runner = loading.wrap(hf, "phimoe")
    assert runner.context == 24
    sample = shoal_ids(runner, runner, [(prompt(13), 100)], n=1)[0].samples[0]
    assert sample.finish_reason == "length"
    assert sample.token_ids == greedy_ids(hf, prompt(13), 24 - 13)


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────

REASONS_AFTER_A_PASS = {
    "deepseek-v4": "states in a cache of its own kind",
    "minimax": "states in a cache of its own kind .ValueError: MiniMax uses cache of its own",
    "xlstm": "states in a cache of its own kind",
}
REASONS = {
    "bloom": "ALiBi biases are built from a 2D mask shared by all rows",
    "gpt-neo": "local layers slice keys at an offset common to all rows",
    "falcon-alibi": "ALiBi: its position biases are built from a 2D mask",
    **REASONS_AFTER_A_PASS,
    **dict.fromkeys(("inkling", "inkling2", "inkling2-loop"), "relative biases count from Transformers' own cache"),
    **dict.fromkeys(("deepseek-v3.2", "glm-moe-dsa", "qwen4-exp"), "indexers choose each token's keys"),
    "rwkv": "recurrent states in an object of its own kind",
    "t5": "encoder-decoder",
}


def test_every_refused_architecture_has_a_reason() -> None:
    assert REASONS.keys() == REFUSED.keys()


@pytest.mark.slow(but=["bloom"])
@pytest.mark.parametrize("name", sorted(REASONS.keys() - REASONS_AFTER_A_PASS.keys()))
def test_refused_before_any_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tiny_model(name)
    monkeypatch.setattr(type(hf), "forward", _no_pass)
    with pytest.raises(UnsupportedModel, match=f"my-{name} .* is not supported: .*{REASONS[name]}"):
        loading.wrap(hf, f"my-{name}")


def _no_pass(*_: Any, **__: Any) -> None:
    raise AssertionError("a refused model ran")


@pytest.mark.parametrize("name", ["bloom", "t5", *(sorted(REASONS_AFTER_A_PASS) if RECURRENT_HERE else [])])
def test_refused_when_loaded(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=REASONS[name]):
        shoal.load(tmp_path)


def test_refused_as_a_drafter(tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path)
    draft = tmp_path / "gpt-neo"
    tiny_model("gpt-neo").save_pretrained(draft)
    tiny_tokenizer().save_pretrained(draft)
    with pytest.raises(UnsupportedModel, match=REASONS["gpt-neo"]):
        shoal.load(target, draft)


def test_refused_in_training_mode() -> None:
    with pytest.raises(RequestError, match=r"call model\.eval\(\) first"):
        loading.wrap(tiny_model("llama").train(), "llama")


# ── the self-check catches what nobody listed ───────────────────────────────────────────────────────────────────────


def _all_keys(inputs: AttentionInputs) -> Tensor:
    """What a method that forgets the mask would do."""
    keys, values = (t.repeat_interleave(inputs.group, dim=1) for t in (inputs.key, inputs.value))
    return torch.nn.functional.scaled_dot_product_attention(inputs.query, keys, values, scale=inputs.scale).transpose(1, 2)


def _same_window_for_all(inputs: AttentionInputs) -> Tensor:
    """What a method that forgets which slot is whose would do."""
    return methods.METHODS["reference"](inputs).flip(0)


@pytest.mark.parametrize("sabotage", [_all_keys, _same_window_for_all])
def test_a_broken_attention_is_refused(sabotage: methods.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.METHODS, "pad", sabotage)
    with pytest.raises(UnsupportedModel, match=r"diverges from a plain forward by [\d.]+ nats"):
        loading.wrap(tiny_model("llama"), "llama", "pad")


def test_a_model_through_the_wrong_door_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model takes the registered name without a word and computes something else, as CodeGen did before Transformers 5.24."""
    hf = tiny_model("llama")
    real = hf.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(hf.config, "_attn_implementation", "eager")
        return real(*args, **kwargs)

    monkeypatch.setattr(hf.model, "forward", forward)
    runner = Runner(hf, "own", "interface", 128)
    with pytest.raises(UnsupportedModel, match="diverges from a plain forward"):
        self_check(runner)
    assert runner.self_check_error is not None
    assert runner.self_check_error > 0.01


@pytest.mark.skipif("gemma4" not in ARCHITECTURES_HERE, reason="an older Transformers computes all tokens")
def test_a_model_that_leaves_tokens_of_a_pass_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels would read behind the end of its queries. Without the number such a model computes all tokens."""
    monkeypatch.setattr(bridge, "last_column", lambda _hf: 1)
    runner = unchecked(tiny_model("gemma4"))
    runner.memory.reserve(1, 8)
    with pytest.raises(UnsupportedModel, match="a layer attends from 1 columns in a pass of 8: the model leaves"):
        runner.feed([0], torch.tensor([prompt(8)]), [8], want_logits=False)


def test_a_model_that_ignores_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tiny_model("llama")
    real = hf.model.forward

    def forward(*args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        return real(*args, **kwargs)

    monkeypatch.setattr(hf.model, "forward", forward)
    with pytest.raises(UnsupportedModel, match="diverges from a plain forward"):
        loading.wrap(hf, "llama")


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_the_self_check_tolerates_no_more_than_it_says(
    dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise that diverges by half of what is allowed passes, by twice that it does not; beside what the format itself costs."""
    runner = Runner(tiny_model("llama").to(dtype), "llama", "interface", 128)
    assert self_check(runner) < LIMITS[dtype] / 4
    feed, generator = Runner.feed, torch.Generator().manual_seed(0)

    def noisy(*args: Any, **named: Any) -> Tensor:
        logits = feed(*args, **named).double()
        deviations = torch.randn(logits.shape, generator=generator, dtype=torch.float64) * logits.std(-1, keepdim=True)
        return logits + (2 * share * LIMITS[dtype]) ** 0.5 * deviations

    monkeypatch.setattr(Runner, "feed", noisy)
    if share < 1:
        assert share * LIMITS[dtype] / 2 < self_check(runner) < LIMITS[dtype]
    else:
        with pytest.raises(UnsupportedModel, match="diverges from a plain forward"):
            self_check(runner)


# ── low precision ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "falcon"])
def test_bfloat16_runs(name: str) -> None:
    hf = tiny_model(name).to(torch.bfloat16)
    target = loading.wrap(hf, name)
    assert target.self_check_error is not None
    assert target.self_check_error < LIMITS[torch.bfloat16]
    pair = Shoal(target, target, max_batch=MAX_BATCH)
    result = pair.generate([ids for ids, _ in ASKED], n=2, lookahead=K, max_new_tokens=10, seed=1)
    assert all(len(sample.token_ids) == 10 for output in result for sample in output.samples)
    assert result.stats.accepted > 0
