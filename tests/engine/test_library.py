"""The library as users see it: names, types, reprs, other libraries' values, model objects, progress, `async for`, `close`.

Tests of: api, engine.stream, types.arguments.
"""

from __future__ import annotations

import asyncio
import gc
import io
import subprocess
import sys
import threading
import types
import typing
import weakref
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.api import Shoal
from shoal.errors import PairMismatch, RequestError
from shoal.testing import tiny_model, tiny_tokenizer
from shoal.testing.scripted import hashed, scripted
from shoal.types.arguments import SETTINGS, Options, split_options
from shoal.types.samples import Increment

VOCAB = 260
PROMPT = [5, 6, 7]


@pytest.fixture
def pair() -> Shoal:
    return Shoal(scripted(hashed(VOCAB), VOCAB), scripted(hashed(VOCAB, seed=1), VOCAB), tiny_tokenizer(), max_batch=4)


def ids_of(result: shoal.Result) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in output.samples] for output in result]


def test_a_row_that_is_cut_before_it_began_costs_no_text(pair: Shoal) -> None:
    decodes: list[object] = []
    decode = pair.tokenizer.decode
    pair.tokenizer.decode = lambda ids, **options: decodes.append(ids) or decode(ids, **options)
    stream = pair.stream(PROMPT, 60, max_new_tokens=4)
    stream.cancel()
    assert [(sample.text, sample.token_ids) for sample in stream.result()[0].samples] == [("", ())] * 60
    assert not decodes


# ── names and types ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_dir_shows_the_public_names_before_their_first_use() -> None:
    code = "import shoal, sys; print(*dir(shoal)); assert 'torch' not in sys.modules"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in names if not name.startswith("__")] == sorted(shoal.__all__)
    assert "__version__" in names


def alternatives(hint: Any) -> set[Any]:
    return set(typing.get_args(hint)) if typing.get_origin(hint) in (typing.Union, types.UnionType) else {hint}


def test_options_are_the_fields_of_the_settings() -> None:
    """In their order, and each takes at least what its field takes."""
    typed = typing.get_type_hints(Options)
    declared = {f.name: typing.get_type_hints(cls)[f.name] for cls in SETTINGS.values() for f in fields(cls)}
    assert list(typed) == [*declared, *SETTINGS]
    for name, hint in declared.items():
        assert alternatives(hint) <= alternatives(typed[name]), name
    assert Options.__required_keys__ == frozenset()


@pytest.mark.parametrize("method", [Shoal.generate, Shoal.stream])
def test_generate_and_stream_have_typed_options(method: Any) -> None:
    assert method.__annotations__["options"] == "Unpack[GenerateOptions]"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is new in Python 3.11")
def test_an_output_of_a_result_is_typed() -> None:
    hints = [typing.get_type_hints(one, {"Output": shoal.Output}) for one in typing.get_overloads(shoal.Result.__getitem__)]
    assert [(hint["index"], hint["return"]) for hint in hints] == [(int, shoal.Output), (slice, tuple[shoal.Output, ...])]


def test_slices_of_a_result(pair: Shoal) -> None:
    result = pair.generate([PROMPT, [8], [9]], max_new_tokens=2)
    assert result[1:] == (result[1], result[2])
    assert result[-1] is result.outputs[2]


# ── reprs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prompt", ["a long text\n" * 50, list(range(200))], ids=["text", "ids"])
def test_reprs_are_one_short_line(pair: Shoal, prompt: Any) -> None:
    pair = pair if isinstance(prompt, str) else Shoal(pair.target)
    result = pair.generate(prompt if isinstance(prompt, str) else [prompt], 3, max_new_tokens=200, seed=0)
    sample = result[0].samples[0]
    shown = [repr(thing) for thing in (pair, result, result[0], sample, result.stats)]
    for text in shown:
        assert "\n" not in text
        assert len(text) < 220, text
    assert shown[0].startswith("Shoal(target='scripted'")
    assert "1 prompts, 3 samples, 3 finished" in shown[1]
    assert f"{len(sample.token_ids)} tokens" in shown[3]
    assert sample.finish_reason in shown[3]
    assert f"committed={result.stats.committed}" in shown[4]


# ── inputs of other libraries ───────────────────────────────────────────────────────────────────────────────────────

ROWS = [[5, 6, 7], [8, 9, 10]]
IDS: dict[str, Any] = {
    "tensor": torch.tensor(ROWS),
    "array": np.array(ROWS),
    "tuple": tuple(map(tuple, ROWS)),
    "tensors": [torch.tensor(row, dtype=torch.int32) for row in ROWS],
    "arrays in a tuple": tuple(np.array(row, dtype=np.uint8) for row in ROWS),
    "numbers of NumPy": [[np.int64(token) for token in row] for row in ROWS],
    "generators": [iter(row) for row in ROWS],
}


@pytest.mark.parametrize("given", IDS.values(), ids=IDS.keys())
def test_prompts_of_ids(pair: Shoal, given: Any) -> None:
    assert ids_of(pair.generate(given, max_new_tokens=4, seed=0)) == ids_of(pair.generate(ROWS, max_new_tokens=4, seed=0))


def test_one_prompt_of_ids(pair: Shoal) -> None:
    expected = pair.generate([PROMPT], max_new_tokens=4, seed=0)
    for given in (
        PROMPT,
        tuple(PROMPT),
        torch.tensor(PROMPT),
        np.array(PROMPT),
        iter(PROMPT),
        (np.int32(i) for i in PROMPT),
    ):
        result = pair.generate(given, max_new_tokens=4, seed=0)
        assert ids_of(result) == ids_of(expected)
        assert all(type(token) is int for token in result[0].prompt_ids)


def test_prompts_that_are_texts(pair: Shoal) -> None:
    texts = ["ab", "cd"]
    expected = ids_of(pair.generate(texts, max_new_tokens=4, seed=0))
    for given in (tuple(texts), (text for text in texts), np.array(texts), np.array(texts, dtype=object)):
        result = pair.generate(given, max_new_tokens=4, seed=0)
        assert ids_of(result) == expected
        assert [output.prompt for output in result] == texts


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([[0.5]]),
        np.array(5),
        torch.tensor(5),
        {"a": 1},
        {5, 6},
        iter(()),
        np.empty((0, 3)),
        [[None]],
        b"ab",
        None,
        5,
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_prompt(pair: Shoal, given: Any) -> None:
    with pytest.raises(RequestError, match=r"prompts must be|a prompt must be"):
        pair.generate(given)


def test_options_of_other_libraries(pair: Shoal) -> None:
    plain: dict[str, Any] = dict(
        temperature=0.5, top_k=7, logit_bias={5: 2.5}, bad_words=[[3], [4, 5]], eos=[250, 251], stop=["zzz", "yyy"], seed=3,
        max_new_tokens=6, lookahead=2, top_logprobs=2,
    )  # fmt: skip
    theirs: dict[str, Any] = dict(
        temperature=np.float32(0.5), top_k=torch.tensor(7), logit_bias={np.int64(5): np.float64(2.5)},
        bad_words=(np.array(word) for word in ([3], [4, 5])), eos=np.array([250, 251]), stop=(s for s in ("zzz", "yyy")),
        seed=np.uint64(3), max_new_tokens=np.int16(6), lookahead=np.int64(2), top_logprobs=np.int8(2),
    )  # fmt: skip
    expected = pair.generate(PROMPT, 3, **plain)
    result = pair.generate(PROMPT, np.int64(3), **theirs)
    assert ids_of(result) == ids_of(expected)
    assert len(result[0].samples) == 3
    assert [s.top_logprobs for s in result[0].samples] == [s.top_logprobs for s in expected[0].samples]
    assert result.stats.drafted == expected.stats.drafted > 0


def test_generators_of_bad_words_and_processors(pair: Shoal) -> None:
    words = pair.generate("a", bad_words=(word for word in ("x", "y")), max_new_tokens=4, seed=0)
    assert ids_of(words) == ids_of(pair.generate("a", bad_words=["x", "y"], max_new_tokens=4, seed=0))

    def only_nine(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(VOCAB) == 9, 0.0, -torch.inf).expand_as(scores)

    result = pair.generate(PROMPT, 2, processors=(step for step in [only_nine]), max_new_tokens=4)
    assert ids_of(result) == [[(9, 9, 9, 9)] * 2]


@pytest.mark.parametrize(
    "wrong",
    [{"top_k": np.float64(2.0)}, {"max_new_tokens": np.array([1, 2])}, {"temperature": torch.tensor([0.5])}, {"seed": "1"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_numbers_of_the_wrong_kind(pair: Shoal, wrong: Any) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(wrong))} must be"):
        pair.generate(PROMPT, **wrong)
    for number in (np.float64(2.0), True, 1_000_001):
        with pytest.raises(RequestError, match=r"n must be an integer in \[1, 1000000\], got"):
            pair.generate(PROMPT, number)


# ── whole settings ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_settings_given_whole(pair: Shoal) -> None:
    sampling, limits, speculation = shoal.Sampling(temperature=0.7, seed=2), shoal.Limits(5), shoal.Speculation(lookahead=3)
    expected = pair.generate(PROMPT, 2, temperature=0.7, seed=2, max_new_tokens=5, lookahead=3)
    whole = pair.generate(PROMPT, 2, sampling=sampling, limits=limits, speculation=speculation)
    mixed = pair.generate(PROMPT, 2, sampling=sampling, max_new_tokens=5, lookahead=3, limits=None)
    assert ids_of(whole) == ids_of(mixed) == ids_of(expected)
    assert whole.stats.drafted == expected.stats.drafted > 0
    stream = pair.stream(PROMPT, 2, sampling=sampling, limits=limits)
    assert stream.run()[0].samples[0].token_ids == expected[0].samples[0].token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": shoal.Sampling(), "temperature": 0.5}, r"temperature given beside sampling="),
        ({"sampling": shoal.Sampling(), "bad_words": ["a"]}, r"bad_words given beside sampling="),
        ({"limits": shoal.Limits(), "stop": "a", "max_new_tokens": 4}, r"max_new_tokens and stop given beside limits="),
        ({"speculation": shoal.Speculation(), "rule": "auto"}, r"rule given beside speculation="),
        ({"sampling": {"temperature": 1}}, r"sampling must be a shoal\.Sampling"),
        ({"limits": shoal.Sampling()}, r"limits must be a shoal\.Limits"),
        ({"limit": shoal.Limits()}, r"did you mean 'limits'"),
    ],
)
def test_settings_that_are_refused(pair: Shoal, options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pair.generate("a", **options)
    with pytest.raises(RequestError, match=message):
        split_options(options)


# ── model objects ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_loading_model_objects(saved_pair: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    target, drafter = (AutoModelForCausalLM.from_pretrained(place).eval() for place in saved_pair)
    before = {name: (value.data_ptr(), value.stride()) for name, value in target.state_dict().items()}
    model = shoal.load(target, draft=drafter)
    assert model.target.hf is target
    assert model.tokenizer.encode("ab") == tiny_tokenizer().encode("ab")  # from where the model was
    asked: dict[str, Any] = {"n": 2, "seed": 0, "max_new_tokens": 6, "lookahead": 2}
    result = model.generate("ab", **asked)
    by_name = shoal.load(saved_pair[0], draft=saved_pair[1], dtype="float32").generate("ab", **asked)
    assert ids_of(result) == ids_of(by_name)
    assert result.stats.drafted > 0
    assert {name: (value.data_ptr(), value.stride()) for name, value in target.state_dict().items()} == before
    mixed = shoal.load(saved_pair[0], draft=drafter, dtype="float32").generate("ab", **asked)
    assert ids_of(mixed) == ids_of(by_name)


def test_model_objects_from_nowhere_have_ids_only() -> None:
    model = shoal.load(tiny_model("llama"), draft=tiny_model("llama", seed=1, layers=1))
    assert model.tokenizer is None
    assert len(model.generate(PROMPT, max_new_tokens=3)[0].samples[0].token_ids) == 3
    with pytest.raises(RequestError, match="needs a tokenizer"):
        model.generate("ab")
    named = shoal.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    assert named.generate("ab", max_new_tokens=3)[0].prompt == "ab"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype can only be given with a name"),
        ({"dtype": torch.float32, "device": "cpu"}, "dtype and device can only"),
        ({"revision": "main"}, "target is a model object.*revision"),
        ({"quantize": "target=int8"}, "target is a model object.*quantize"),
        ({"quantize": "draft=int8"}, "draft is a model object.*quantize"),
        ({"draft_revision": "main"}, "draft is a model object.*draft_revision"),
        ({"tensor_parallel": True}, "tensor_parallel"),
    ],
)
def test_what_says_how_to_load_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        shoal.load(tiny_model("llama"), draft=tiny_model("llama", layers=1), **options)


def test_model_objects_that_cannot_be_used() -> None:
    with pytest.raises(RequestError, match="target must be a hub id, a directory or a Transformers model, got a Linear"):
        shoal.load(torch.nn.Linear(2, 2))
    with pytest.raises(RequestError, match=r"draft must be a hub id.*got a int"):
        shoal.load(tiny_model("llama"), draft=5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="training mode"):
        shoal.load(tiny_model("llama").train())
    with pytest.raises(PairMismatch):
        shoal.load(tiny_model("llama"), draft=tiny_model("llama", vocab_size=2000))


# ── progress ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "file"])
def test_progress(pair: Shoal, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    asked: dict[str, Any] = {"n": 3, "seed": 0, "max_new_tokens": 6}
    result = pair.generate(PROMPT, **asked, progress=True)
    shown = screen.getvalue()
    assert ("3/3 rows, 18 tokens" in shown) if terminal else shown == ""
    assert ids_of(result) == ids_of(pair.generate(PROMPT, **asked))
    assert screen.getvalue() == shown  # without progress=True there is none


def test_progress_reaches_its_end_when_rows_end_early(monkeypatch: pytest.MonkeyPatch, pair: Shoal) -> None:
    from rich.progress import Progress

    seen: list[float] = []
    monkeypatch.setattr(Progress, "update", lambda self, task, completed, description: seen.append(completed))
    result = pair.generate(PROMPT, 6, seed=0, max_new_tokens=40, eos=list(range(40)), progress=True)
    assert any(sample.finish_reason == "eos" for sample in result[0].samples)
    assert seen == sorted(seen)
    assert seen[-1] == 6 * 40


# ── async for ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_async_for_gives_what_for_gives(pair: Shoal) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 0, "max_new_tokens": 6, "lookahead": 2}
    expected = [(i.sample, i.text, i.token_ids, i.finish_reason) for i in pair.stream(PROMPT, **asked)]
    threads: set[int] = set()
    stream = pair.stream(PROMPT, **asked)
    advance = stream._advance

    def noting() -> bool:
        threads.add(threading.get_ident())
        return advance()

    stream._advance = noting  # type: ignore[method-assign]

    async def gather() -> list[Increment]:
        return [increment async for increment in stream]

    found = asyncio.run(gather())
    assert [(i.sample, i.text, i.token_ids, i.finish_reason) for i in found] == expected
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert stream.result().stats.committed == 18


def test_the_loop_goes_on_while_a_round_is_computed(pair: Shoal) -> None:
    stream = pair.stream(PROMPT, max_new_tokens=3, lookahead=0)
    told, advance = threading.Event(), stream._advance

    def waiting() -> bool:
        assert told.wait(280)
        return advance()

    stream._advance = waiting  # type: ignore[method-assign]

    async def both() -> Increment:
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        told.set()  # nobody could say so if the round ran in the loop
        return await first

    assert asyncio.run(both()).token_ids


def test_several_streams_take_turns(pair: Shoal) -> None:
    asked: dict[str, Any] = {"n": 2, "seed": 0, "max_new_tokens": 5}
    expected = [ids_of(pair.generate(prompt, **asked)) for prompt in (PROMPT, [9], [1, 2])]
    streams = [pair.stream(prompt, **asked) for prompt in (PROMPT, [9], [1, 2])]

    async def drain(stream: Any) -> None:
        async for _ in stream:
            pass

    async def together() -> None:
        await asyncio.gather(*map(drain, streams))

    asyncio.run(together())
    assert [ids_of(stream.result()) for stream in streams] == expected


def test_cancelling_the_task_cancels_the_rows(pair: Shoal) -> None:
    stream = pair.stream(PROMPT, 3, max_new_tokens=1000, lookahead=0)
    inside, go_on, advance = threading.Event(), threading.Event(), stream._advance
    rounds: list[bool] = []

    def slowly() -> bool:
        if rounds:
            inside.set()
            assert go_on.wait(280)
        rounds.append(advance())
        return rounds[-1]

    stream._advance = slowly  # type: ignore[method-assign]

    async def drain() -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        task = asyncio.ensure_future(drain())
        while not inside.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()  # the round uses the caches
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    samples = stream.result()[0].samples
    assert [sample.finish_reason for sample in samples] == ["cancelled"] * 3
    assert [len(sample.token_ids) for sample in samples] == [2, 2, 2]
    assert len(rounds) == 2
    assert next((i for i in stream if i.result is None and i.token_ids == ()), None) is None


def test_an_error_of_a_round_comes_out(pair: Shoal) -> None:
    stream = pair.stream(PROMPT, max_new_tokens=3)

    def broken() -> bool:
        raise ZeroDivisionError

    stream._advance = broken  # type: ignore[method-assign]

    async def first() -> Any:
        return await anext(stream)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(first())


# ── close ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_close_frees_models_and_caches(saved_pair: tuple[Path, Path]) -> None:
    model = shoal.load(saved_pair[0], draft=saved_pair[1])
    stream = model.stream("ab", 2, max_new_tokens=50)
    next(stream)
    engine = stream._engine
    assert engine is not None
    held = [weakref.ref(thing) for thing in (model.target.hf, model.draft_model.hf, engine, engine.target.cache)]  # type: ignore[union-attr]
    del engine
    model.close()
    assert [thing() for thing in held] == [None] * 4
    assert {sample.finish_reason for sample in stream.result()[0].samples} == {"cancelled"}
    assert all(increment.finish_reason == "cancelled" for increment in stream if increment.result)
    assert stream.result().stats.rounds >= 1
    assert repr(model) == "Shoal(closed)"


def used_after_closing(model: Shoal) -> Iterator[Any]:
    yield lambda: model.generate("ab")
    yield lambda: model.stream(PROMPT)
    yield lambda: model.target
    yield lambda: model.draft_model
    yield lambda: model.loaded


def test_later_use_is_refused(pair: Shoal) -> None:
    with pair as same:
        assert same is pair
        open_stream = pair.stream(PROMPT, max_new_tokens=3)
    for use in used_after_closing(pair):
        with pytest.raises(RequestError, match="this Shoal is closed"):
            use()
    pair.close()  # again

    async def rest() -> list[Increment]:
        return [increment async for increment in open_stream]

    assert [increment.finish_reason for increment in asyncio.run(rest())] == ["cancelled"]
    assert asyncio.run(rest()) == []


def test_a_model_object_stays_its_owners() -> None:
    hf = tiny_model("llama")
    before = hf.generate(torch.tensor([PROMPT]), max_new_tokens=3, do_sample=False)
    with shoal.load(hf) as model:
        model.generate(PROMPT, max_new_tokens=3)
    assert torch.equal(hf.generate(torch.tensor([PROMPT]), max_new_tokens=3, do_sample=False), before)


def test_a_dropped_stream_is_not_kept(pair: Shoal) -> None:
    stream = weakref.ref(pair.stream(PROMPT, max_new_tokens=3))
    gc.collect()
    assert stream() is None


# ── settings of single prompts ──────────────────────────────────────────────────────────────────────────────────────

PROMPTS = [[5, 6, 7], [9, 8], [5, 6, 7]]
EACH = [
    shoal.Sampling(seed=3, temperature=0.7),
    shoal.Sampling(temperature=0.0),
    shoal.Sampling(seed=4, repetition_penalty=1.3),
]
LIMITS = [shoal.Limits(max_new_tokens=9), shoal.Limits(max_new_tokens=14), shoal.Limits(max_new_tokens=6)]


@pytest.mark.parametrize("lookahead", [0, 3])
def test_each_prompt_has_its_own_settings(pair: Shoal, lookahead: int) -> None:
    """Together they give what each gives alone, drafting included; the third prompt is the first with another seed."""
    together = pair.generate(PROMPTS, [2, 1, 3], sampling=iter(EACH), limits=LIMITS, lookahead=lookahead)
    asked = zip(PROMPTS, [2, 1, 3], EACH, LIMITS, strict=True)
    alone = [pair.generate([ids], n, sampling=one, limits=limits, lookahead=lookahead) for ids, n, one, limits in asked]
    assert ids_of(together) == [ids_of(one)[0] for one in alone]
    assert [len(output.samples) for output in together] == [2, 1, 3]
    assert [len(output.samples[0].token_ids) for output in together] == [9, 14, 6]
    assert (together.stats.drafted > 0) == (lookahead > 0)
    assert together.stats.committed == sum(one.stats.committed for one in alone)


def test_a_seed_among_the_settings_asks_for_the_coupled_rule(pair: Shoal) -> None:
    """Its tokens are those of plain decoding, beside a prompt without a seed too."""
    mixed = [shoal.Sampling(), shoal.Sampling(seed=5)]
    found = [pair.generate(PROMPTS[:2], sampling=mixed, lookahead=k, max_new_tokens=16) for k in (0, 4)]
    assert ids_of(found[0])[1] == ids_of(found[1])[1]
    assert found[1].stats.accepted > 0


def test_one_seed_for_all_counts_repeated_prompts(pair: Shoal) -> None:
    same = [shoal.Sampling(seed=3)] * 3
    assert ids_of(pair.generate(PROMPTS, sampling=same)) == ids_of(pair.generate(PROMPTS, seed=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": EACH[:2]}, "sampling= has 2 entries for 3 prompts"),
        ({"limits": []}, "limits= has 0 entries for 3 prompts"),
        ({"n": [1, 2]}, "n= has 2 entries for 3 prompts"),
        ({"n": [1, 0, 1]}, r"prompt 2 of 3: n must be an integer in \[1, 1000000\], got 0"),
        ({"sampling": [EACH[0], {"seed": 1}, EACH[2]]}, r"prompt 2 of 3: sampling must be a shoal\.Sampling, got \{'seed': 1\}"),
        ({"sampling": EACH, "temperature": 1}, "prompt 1 of 3: temperature given beside sampling="),
        ({"sampling": [EACH[0], EACH[0], shoal.Sampling(bad_words=[[999]])]}, "prompt 3 of 3: .*999"),
    ],
)  # fmt: skip
def test_errors_name_the_prompt(pair: Shoal, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pair.generate(PROMPTS, **options)
    with pytest.raises(RequestError, match=r"^prompt 2 of 2: the prompt is empty"):
        pair.generate(["a", ""])
    with pytest.raises(RequestError, match=r"^the prompt is empty"):
        pair.generate("")
