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
from shoal.testing.engines import engine_of
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


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prompts", [[[]], [[1], []], ((),)], ids=str)
def test_an_empty_prompt_of_ids(prompts: Any) -> None:
    refused(prompts, "the prompt is empty: at least one token")


@pytest.mark.parametrize("prompts", ["", ["a", ""]])
def test_an_empty_prompt_of_text(prompts: Any) -> None:
    refused(prompts, "the prompt is empty: at least one token", tiny_tokenizer())


def test_half_a_surrogate_pair_is_no_text() -> None:
    refused("a\ud83d", r"the prompt is not text: U\+D83D at position 1", tiny_tokenizer())
    refused(["a", "\udcff"], r"the prompt is not text: U\+DCFF at position 0", tiny_tokenizer())


@pytest.mark.parametrize("prompts", [[], (), None, 5, 1.5, {}], ids=str)
def test_no_prompts(prompts: Any) -> None:
    refused(prompts, "prompts must be a text, texts or lists of token ids, at least one, got")


@pytest.mark.parametrize(
    "prompts", [[None], [1.5], [[None]], [["a"]], [object()]], ids=["None", "1.5", "[None]", "['a']", "object"]
)
def test_what_is_no_prompt(prompts: Any) -> None:
    refused(prompts, "a prompt must be a text or a list of token ids, got")


def test_bytes_are_no_token_ids() -> None:
    for prompts in (b"abc", [b"abc"], [[1], bytearray(b"abc")]):
        refused(prompts, "a prompt must be a text or a list of token ids, got")


def test_text_without_a_tokenizer() -> None:
    refused("hello", "a text prompt needs a tokenizer")
    refused([[1]], "bad_words that are texts need a tokenizer", bad_words=["x"])


def test_bad_words_that_are_no_texts() -> None:
    refused([[1]], "a bad word is empty", tiny_tokenizer(), bad_words=["x", ""])
    refused([[1]], r"a bad word is not text: U\+D800", tiny_tokenizer(), bad_words="\ud800")


def test_one_bad_word_is_no_list_of_letters() -> None:
    pair, _ = shoal(tiny_tokenizer())
    asked: dict[str, Any] = {"max_new_tokens": 8, "seed": 0, "top_k": 2}
    free = pair.generate([[1]], **asked)[0].samples[0].token_ids
    letter = pair.tokenizer.decode(free[:1])
    rare, banned = (
        pair.generate([[1]], bad_words=words, **asked)[0].samples[0].token_ids for words in (f"{letter}\0\0", letter)
    )
    assert rare == free != banned


@pytest.mark.parametrize(
    ("ids", "got"), [([0, -1], r"-1\.\.0"), ([V], rf"{V}\.\.{V}"), ([3, 10**12], r"3\.\.1000000000000")]
)
def test_ids_outside_the_vocabulary(ids: list[int], got: str) -> None:
    refused([ids], rf"prompt ids must be in 0\.\.{V - 1}, got {got}")


def test_a_prompt_longer_than_the_context() -> None:
    refused([[1] * CONTEXT], f"the prompt has {CONTEXT} tokens; the-target holds {CONTEXT}")


@pytest.mark.parametrize("lookahead", ["off", 4, "auto"])
def test_the_drafter_does_not_limit_the_prompt(lookahead: str | int) -> None:
    pair, _ = shoal()
    sample = pair.generate([[1] * (CONTEXT - 1)], lookahead=lookahead)[0].samples[0]
    assert (len(sample.token_ids), sample.finish_reason) == (1, "length")


def test_one_bad_prompt_of_many_stops_all_before_the_first() -> None:
    refused([[1, 2], [3], [V + 1]], "prompt ids must be in")


# ── n and limits ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [0, -3, 1.5, "2", None])
def test_n(n: Any) -> None:
    refused([[1]], "n must be an integer >= 1, got", n=n)


@pytest.mark.parametrize("top", [-1, V + 1, 1.5, "3", None])
def test_top_logprobs(top: Any) -> None:
    refused([[1]], rf"top_logprobs must be an integer in 0\.\.{V}, got", top_logprobs=top)


@pytest.mark.parametrize("size", [0, -1, 2.5, "4", "all", None])
def test_max_batch(size: Any) -> None:
    with pytest.raises(RequestError, match="max_batch must be 'auto' or an integer >= 1, got"):
        shoal(max_batch=size)


def test_stop_strings_without_a_tokenizer() -> None:
    refused([[1]], "stop strings need a tokenizer", stop="x")


# ── options ─────────────────────────────────────────────────────────────────────────────────────────────────────────

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, ">= 0"),
    ("temperature", float("nan"), ">= 0"),
    ("temperature", float("inf"), ">= 0"),
    ("temperature", "warm", ">= 0"),
    ("temperature", True, ">= 0"),
    ("top_k", -1, "an integer >= 0"),
    ("top_k", 2.0, "an integer >= 0"),
    ("top_p", 0, r"in \(0, 1\]"),
    ("top_p", 1.1, r"in \(0, 1\]"),
    ("min_p", -0.1, r"in \[0, 1\]"),
    ("min_p", 2, r"in \[0, 1\]"),
    ("typical_p", 0.0, r"in \(0, 1\]"),
    ("repetition_penalty", 0, "> 0"),
    ("repetition_penalty", -1.2, "> 0"),
    ("presence_penalty", float("inf"), "a finite number"),
    ("frequency_penalty", "much", "a finite number"),
    ("logit_bias", {1: float("nan")}, "a mapping of token id to a finite number"),
    ("logit_bias", {"a": 1.0}, "a mapping of token id to a finite number"),
    ("logit_bias", [(1, 2.0)], "a mapping of token id to a finite number"),
    ("bad_words", [[]], "a list of non-empty token id lists"),
    ("bad_words", 5, "a list of non-empty token id lists"),
    ("bad_words", [5], "a list of non-empty token id lists"),
    ("bad_words", None, "a list of non-empty token id lists"),
    ("processors", None, "a list of callables"),
    ("stop", None, "non-empty strings"),
    ("stop", b"x", "non-empty strings"),
    ("eos", 1.5, "token ids >= 0"),
    ("eos", "</s>", "token ids >= 0"),
    ("min_new_tokens", -1, "an integer >= 0"),
    ("no_repeat_ngram", 1.5, "an integer >= 0"),
    ("processors", [3], "a list of callables"),
    ("seed", 1.5, "an integer or None"),
    ("max_new_tokens", 0, "an integer >= 1"),
    ("max_new_tokens", 2.5, "an integer >= 1"),
    ("stop", [""], "non-empty strings"),
    ("stop", [5], "non-empty strings"),
    ("eos", [-1], "token ids >= 0"),
    ("eos", ["</s>"], "token ids >= 0"),
    ("time_budget", 0, "seconds > 0 or None"),
    ("time_budget", float("nan"), "seconds > 0 or None"),
    ("lookahead", -1, ">= 0"),
]


@pytest.mark.parametrize(("name", "value", "expected"), OUT_OF_RANGE, ids=[f"{n}={v!r}" for n, v, _ in OUT_OF_RANGE])
def test_an_option_out_of_range_is_named_with_what_was_expected(name: str, value: Any, expected: str) -> None:
    refused([[1]], rf"^{name} must be {expected}, got ", **{name: value})


NEAR = {
    "temprature": "temperature",
    "max_tokens": "max_new_tokens",
    "topp": "top_p",
    "stops": "stop",
    "look_ahead": "lookahead",
}


@pytest.mark.parametrize(("wrong", "meant"), NEAR.items())
def test_an_unknown_option_suggests_the_nearest(wrong: str, meant: str) -> None:
    refused([[1]], f"unknown option '{wrong}'; did you mean '{meant}'", **{wrong: 1})


def test_an_option_like_no_other_lists_them_all() -> None:
    refused([[1]], "unknown option 'zzz'; known options: .*temperature", zzz=1)


@pytest.mark.parametrize("name", ["fast", "fixed:x", None, 1.5, object()], ids=["fast", "fixed:x", "None", "1.5", "object"])
def test_an_unknown_lookahead(name: Any) -> None:
    refused([[1]], "lookahead must be 'auto', a draft length", lookahead=name)


def test_a_draft_length_too_long() -> None:
    refused([[1]], r"draft length must be in 0\.\.64, got 65", lookahead=65)


@pytest.mark.parametrize("options", [{"logit_bias": {V: 1.0}}, {"bad_words": [[1, V]]}], ids=str)
def test_ids_in_options_outside_the_vocabulary(options: dict[str, Any]) -> None:
    refused([[1]], rf"names token id {V}", **options)


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

    monkeypatch.setattr("shoal.models.cache.layer.resized", fail)
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
