"""What cannot be done is refused with one clear error that names it, before anything is computed where that is possible.

Tests of: engine.validation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from by_pairs import by_pairs
from shoal.api import Shoal
from shoal.config import Limits, Sampling
from shoal.errors import BadLogits, ModelError, RequestError, ShoalError
from shoal.lookahead.controller import Fixed
from shoal.testing import VOCABULARY, tiny_tokenizer
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import ScriptedModel, hashed, runner, scripted
from shoal.types.requests import Request

CONTEXT = 32
V = VOCABULARY


def shoal(tokenizer: Any = None, **options: Any) -> tuple[Shoal, list[ScriptedModel]]:
    """A pair, and its models to see whether they were run."""
    models = [ScriptedModel(hashed(V, seed), V) for seed in (0, 1)]
    target, drafter = runner(models[0], CONTEXT, "the-target"), runner(models[1], CONTEXT - 8, "the-drafter")
    return Shoal(target, drafter, tokenizer, **options), models


def refused(prompts: Any, match: str, tokenizer: Any = None, **options: Any) -> None:
    """A RequestError that says so, and no model was run for it."""
    pair, models = shoal(tokenizer)
    for call in (pair.generate, pair.stream):
        with pytest.raises(RequestError, match=match):
            call(prompts, **options)
    assert [model.forwards for model in models] == [0, 0]


# ── what is asked ───────────────────────────────────────────────────────────────────────────────────────────────────

NO_PROMPT = "a prompt must be a text or a list of token ids, got"
PROMPTS: dict[str, list[Any]] = {
    "the prompt is empty: at least one token": [[[]], [[1], []], ((),), "", ["a", ""]],
    r"the prompt is not text: U\+D83D at position 1": ["a\ud83d"],
    r"the prompt is not text: U\+DCFF at position 0": [["a", "\udcff"]],
    "prompts must be a text, texts or lists of token ids, at least one, got": [[], (), None, 5, 1.5, {}],
    NO_PROMPT: [[None], [1.5], [[None]], [["a"]], [object()], b"abc", [b"abc"], [[1], bytearray(b"abc")]],
    rf"prompt ids must be in 0\.\.{V - 1}, got -1\.\.0": [[[0, -1]]],
    rf"prompt ids must be in 0\.\.{V - 1}, got {V}\.\.{V}": [[[V]]],
    rf"prompt ids must be in 0\.\.{V - 1}, got 3\.\.1000000000000": [[[3, 10**12]]],
    "prompt ids must be in": [[[1, 2], [3], [V + 1]]],
    f"the prompt has {CONTEXT} tokens; the-target holds {CONTEXT}": [[[1] * CONTEXT]],
}


@pytest.mark.parametrize("match", PROMPTS)
def test_what_is_no_prompt(match: str) -> None:
    for prompts in PROMPTS[match]:
        refused(prompts, match, tiny_tokenizer())


OPTIONS: list[tuple[str, str, list[Any]]] = [
    ("temperature", ">= 0", [-0.1, float("nan"), float("inf"), "warm", True]),
    ("top_k", "an integer >= 0", [-1, 2.0]),
    ("top_p", r"in \(0, 1\]", [0, 1.1]),
    ("min_p", r"in \[0, 1\]", [-0.1, 2]),
    ("typical_p", r"in \(0, 1\]", [0.0]),
    ("guidance", "a finite number", [float("inf"), "much"]),
    ("plausibility", r"in \[0, 1\]", [-0.1, 2]),
    ("posterior", ">= 0", [-0.1, "much"]),
    ("repetition_penalty", "> 0", [0, -1.2]),
    ("presence_penalty", "a finite number", [float("inf")]),
    ("frequency_penalty", "a finite number", ["much"]),
    ("logit_bias", "a mapping of token id to a finite number", [{1: float("nan")}, {"a": 1.0}, [(1, 2.0)]]),
    ("bad_words", "a list of non-empty token id lists", [[[]], 5, [5], None]),
    ("processors", "a list of callables", [None, [3]]),
    ("stop", "non-empty strings", [None, b"x", [""], [5]]),
    ("eos", "token ids >= 0", [1.5, "</s>", [-1], ["</s>"]]),
    ("min_new_tokens", "an integer >= 0", [-1]),
    ("no_repeat_ngram", "an integer >= 0", [1.5]),
    ("seed", "an integer or None", [1.5]),
    ("max_new_tokens", "an integer >= 1", [0, 2.5]),
    ("time_budget", "seconds > 0 or None", [0, float("nan")]),
    ("lookahead", ">= 0", [-1]),
    ("lookahead", "'auto', a draft length", ["fast", "fixed:x", None, 1.5, object()]),
    ("n", r"an integer in \[1, 1000000\]", [0, -3, 1.5, "2", True, None]),
    ("top_logprobs", rf"an integer in 0\.\.{V}", [-1, V + 1, 1.5, "3", True, None]),
]


@pytest.mark.parametrize(("name", "expected", "values"), OPTIONS, ids=[f"{name} {text}" for name, text, _ in OPTIONS])
def test_an_option_out_of_range_is_named_with_what_was_expected(name: str, expected: str, values: list[Any]) -> None:
    for value in values:
        refused([[1]], rf"^{name} must be {expected}", **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("bad_words", ["x", ""], "a bad word is empty"),
        ("bad_words", "\ud800", r"a bad word is not text: U\+D800"),
        ("bad_words", [[1, V]], rf"names token id {V}"),
        ("logit_bias", {V: 1.0}, rf"names token id {V}"),
        ("lookahead", 65, r"draft length must be in 0\.\.64, got 65"),
        ("temprature", 1, "unknown option 'temprature'; did you mean 'temperature'"),
        ("max_tokens", 1, "unknown option 'max_tokens'; did you mean 'max_new_tokens'"),
        ("topp", 1, "unknown option 'topp'; did you mean 'top_p'"),
        ("stops", 1, "unknown option 'stops'; did you mean 'stop'"),
        ("look_ahead", 1, "unknown option 'look_ahead'; did you mean 'lookahead'"),
        ("zzz", 1, "unknown option 'zzz'; known options: .*temperature"),
    ],
)
def test_an_option_that_cannot_be_meant(name: str, value: Any, match: str) -> None:
    refused([[1]], match, tiny_tokenizer(), **{name: value})


def test_text_without_a_tokenizer() -> None:
    refused("hello", "a text prompt needs a tokenizer")
    refused([[1]], "bad_words that are texts need a tokenizer", bad_words=["x"])
    refused([[1]], "stop strings need a tokenizer", stop="x")


def test_one_bad_word_is_no_list_of_letters() -> None:
    pair, _ = shoal(tiny_tokenizer())
    asked: dict[str, Any] = {"max_new_tokens": 8, "seed": 0, "top_k": 2}
    free = pair.generate([[1]], **asked)[0].samples[0].token_ids
    letter = pair.tokenizer.decode(free[:1])
    rare, banned = (
        pair.generate([[1]], bad_words=words, **asked)[0].samples[0].token_ids for words in (f"{letter}\0\0", letter)
    )
    assert rare == free != banned


@pytest.mark.parametrize("lookahead", ["off", 4, "auto"])
def test_the_drafter_does_not_limit_the_prompt(lookahead: str | int) -> None:
    pair, _ = shoal()
    sample = pair.generate([[1] * (CONTEXT - 1)], lookahead=lookahead)[0].samples[0]
    assert (len(sample.token_ids), sample.finish_reason) == (1, "length")


@pytest.mark.parametrize("size", [0, -1, 2.5, "4", "all", None])
def test_max_batch(size: Any) -> None:
    with pytest.raises(RequestError, match="max_batch must be 'auto' or an integer >= 1, got"):
        shoal(max_batch=size)


def test_controls_that_leave_no_token_possible() -> None:
    pair, _ = shoal()
    with pytest.raises(RequestError, match=r"no token is left possible by .*bad_words"):
        pair.generate([[1]], bad_words=[[token] for token in range(V)])


# ── models that go wrong ────────────────────────────────────────────────────────────────────────────────────────────

VOCAB = 9


def spoilt(value: float, after: int) -> Callable[[tuple[int, ...]], Tensor]:
    """Sound logits until the history has `after` tokens; then one of them is `value`."""
    sound = hashed(VOCAB, 0)

    def script(ids: tuple[int, ...]) -> Tensor:
        logits = sound(ids)
        if len(ids) >= after:
            logits[4] = value
        return logits

    return script


def decode(target: Any, drafter: Any = None, k: int = 3, **sampling: Any) -> list[int]:
    engine = engine_of(target, drafter, Fixed(k))
    row = engine.submit(Request((1, 2), 1, Sampling(**{"seed": 0, **sampling}), Limits(max_new_tokens=10)))[0]
    while engine.step():
        pass
    if row.error is not None:
        raise row.error
    return row.tokens


@by_pairs({"temperature": [0, 1], "after": [2, 5], "value": [float("nan"), float("inf")], "k": [0, 3]})
def test_bad_logits_of_the_target(value: float, after: int, k: int, temperature: float) -> None:
    """The message names model, row and place in the draft."""
    model = scripted(spoilt(value, after), VOCAB)
    drafter = scripted(hashed(VOCAB, 0), VOCAB)
    with pytest.raises(BadLogits, match=r"scripted returned NaN or infinite logits: row 0 of request 0, draft position \d"):
        decode(model, drafter, k, temperature=temperature)


def test_minus_infinity_is_an_impossible_token_and_no_error() -> None:
    assert 4 not in decode(scripted(spoilt(-torch.inf, 0), VOCAB), scripted(spoilt(-torch.inf, 0), VOCAB))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_logits_of_the_drafter(value: float) -> None:
    """Rows go on without it; more in tests/drafting/test_drafter_faults.py."""
    good = scripted(hashed(VOCAB, 0), VOCAB)
    assert decode(good, scripted(spoilt(value, 2), VOCAB)) == decode(good)


def test_nothing_possible_at_all() -> None:
    dead = scripted(lambda _: torch.full((VOCAB,), -torch.inf, dtype=torch.float64), VOCAB)
    with pytest.raises(BadLogits):
        decode(dead)


OUT_OF_MEMORY = [
    MemoryError("no room"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    ),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("who", ["target", "drafter"])
def test_out_of_memory_inside_a_forward(error: BaseException, who: str) -> None:
    """Says whose pass it was and what to lower."""
    models = {name: ScriptedModel(hashed(VOCAB, 0), VOCAB) for name in ("target", "drafter")}

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    models[who].forward = fail  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=rf"the-{who}: out of memory .*lower max_batch") as caught:
        decode(runner(models["target"], name="the-target"), runner(models["drafter"], name="the-drafter"))
    assert caught.value.__cause__ is error


def test_out_of_memory_while_the_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer request arrives and there is no room for its rows: they are refused, and the one that runs does not notice."""
    target = scripted(hashed(VOCAB, 0), VOCAB)
    engine = engine_of(target, None, Fixed(0))
    row = engine.submit(Request((1,), 1, Sampling(seed=0), Limits(max_new_tokens=4)))[0]
    engine.step()

    def fail(tensor: torch.Tensor, size: tuple[int, ...], kept: tuple[int, ...]) -> torch.Tensor:
        if tensor.shape[: len(size)] != size:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return tensor

    monkeypatch.setattr("shoal.models.cache.row_store.resized", fail)
    longer = engine.submit(Request((1,), 2, Sampling(seed=0), Limits(max_new_tokens=4000)))
    refused = [commit.sample for commit in engine.step() if commit.sample]
    assert [(s.finish_reason, s.token_ids) for s in refused] == [("error", ())] * 2
    assert all("scripted: out of memory" in (s.error or "") and "lower max_batch" in (s.error or "") for s in refused)
    assert all(isinstance(row.error, ModelError) for row in longer)
    while engine.step():
        pass
    assert (row.finish_reason, row.tokens[1:]) == ("length", tokens_alone(4))
    assert engine.scheduler.idle


def tokens_alone(count: int) -> list[int]:
    """What a row of prompt 1 and seed 0 says when nothing happens."""
    engine = engine_of(scripted(hashed(VOCAB, 0), VOCAB), None, Fixed(0))
    row = engine.submit(Request((1,), 1, Sampling(seed=0), Limits(max_new_tokens=count)))[0]
    while engine.step():
        pass
    return row.tokens[1:]


def test_another_error_of_a_model_is_passed_on_as_it_is() -> None:
    model = ScriptedModel(hashed(VOCAB, 0), VOCAB)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    model.forward = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        decode(runner(model))
    assert not isinstance(caught.value, ShoalError)


def test_a_model_is_its_owners_again_after_an_error() -> None:
    model = ScriptedModel(spoilt(float("nan"), 4), VOCAB)
    with pytest.raises(BadLogits):
        decode(runner(model))
    assert model.config._attn_implementation == "eager"
    assert 0 <= decode(scripted(hashed(VOCAB, 0), VOCAB))[-1] < VOCAB
