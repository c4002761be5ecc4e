"""How rows end: EOS, stop strings, limits, time, cancellation; what is cut, what is shown, and the same with speculation.

Tests of: engine.detokenizer, engine.stop_strings, engine.stream.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from endings import DRAFTERS, PROMPT, TOKENIZER, assert_consistent, encode, only, pair, stream_of
from shoal.api import Shoal
from shoal.config import Limits, Sampling
from shoal.engine.detokenizer import Detokenizer
from shoal.engine.stop_strings import Passages, RowStops, Stops
from shoal.lookahead.controller import Fixed
from shoal.models.runner import Runner
from shoal.testing import END
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import adversary, hashed, says, scripted
from shoal.types.requests import Request
from shoal.types.samples import Increment, Sample


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [("oracle", [True, True, True, False] * 2), ("adversarial", [False] * 8), ("plain", [False] * 8)],
)
def test_a_sample_knows_which_tokens_were_drafts(kind: str, pattern: list[bool]) -> None:
    sample = only("abcdefghij", kind, k=3, max_new_tokens=8)
    assert list(sample.from_draft) == pattern
    assert sample.accepted == sum(pattern)
    cut = only("abcdefghij", kind, k=3, stop=("e",), top_logprobs=1)
    assert list(cut.from_draft) == pattern[:4]
    assert [top.raw[0][0] for top in cut.top_logprobs] == list(cut.token_ids)


# ── EOS ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("before", range(8))
def test_eos_anywhere_in_a_block(before: int, kind: str) -> None:
    """As a draft, a replacement or a bonus: the EOS is the last id, and not in the text."""
    sample = only([*encode("abcdefgh"[:before]), END, *encode("never")], kind)
    assert sample.finish_reason == "eos"
    assert sample.token_ids[-1] == END
    assert sample.text == "abcdefgh"[:before]
    assert sample.accepted == sum(sample.from_draft)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_first_of_several_eos_ids_ends(kind: str) -> None:
    ids = [*encode("ab"), encode("X")[0], END, *encode("c")]
    assert only(ids, kind, eos=[END, encode("X")[0]]).token_ids == tuple(ids[:3])
    assert only(ids, kind, eos=[END]).token_ids == tuple(ids[:4])
    assert only(ids, kind, eos=(), max_new_tokens=5).finish_reason == "length"


@pytest.mark.parametrize("kind", DRAFTERS)
def test_eos_in_the_prompt_does_not_end(kind: str) -> None:
    sample = only("abc" + ":" + "d", kind, eos=encode(":"), max_new_tokens=10)
    assert sample.text == "abc:"
    assert sample.finish_reason == "eos"


def test_the_models_own_eos_is_used_unless_told_otherwise() -> None:
    target, _ = pair([*encode("ab"), END, *encode("cd")], "plain")
    target.hf.config.eos_token_id = END
    shoal = Shoal(target, None, TOKENIZER)
    assert shoal.generate(PROMPT, temperature=0)[0].samples[0].finish_reason == "eos"
    assert shoal.generate(PROMPT, temperature=0, eos=(), max_new_tokens=5)[0].samples[0].text == "abcd"


def nothing_after_eos(ids: Tensor, scores: Tensor) -> Tensor:
    """Like a grammar: once it is over, no token is possible, and it must not be asked again after that."""
    if END in ids[0, :-1].tolist():
        raise AssertionError("asked beyond the end")
    return torch.full_like(scores, -torch.inf) if int(ids[0, -1]) == END else scores


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_processor_that_allows_nothing_after_eos(kind: str) -> None:
    """Drafts may run past an EOS; what would come after it is nobody's business."""
    ids = [*encode("ab"), END]
    sample = only(ids, kind, k=6, processors=[nothing_after_eos])
    assert sample.token_ids == tuple(ids)


# ── stop strings ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "k"),
    [("plain", 1), *(("oracle", k) for k in (1, 2, 4, 7)), ("adversarial", 4), ("sometimes", 2), ("sometimes", 7)],
)
def test_a_stop_string_inside_and_across_blocks(kind: str, k: int) -> None:
    """Several tokens long, so that it begins and ends at every place of a block."""
    for before in range(7):
        text = "0123456"[:before]
        sample = only(f"{text}STOP after", kind, k, stop="STOP")
        assert (sample.text, sample.finish_reason) == (text, "stop")
        assert sample.token_ids == tuple(encode(text))


@pytest.mark.parametrize("kind", DRAFTERS)
def test_overlapping_stops_end_at_the_first_completed(kind: str) -> None:
    assert only("xabcd", kind, stop=["abcd", "bc"]).text == "xa"
    assert only("xabcd", kind, stop=["bcd", "abc"]).text == "x"
    assert only("aaaab", kind, stop=["aab"]).text == "aa"
    for both in (["abcd", "bcd"], ["bcd", "abcd"]):  # completed by the same token: the one that begins first
        assert only("xabcd", kind, stop=both).text == "x"
    assert only("ababac", kind, stop=["abac"]).text == "ab"


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_earliest_end_wins_within_a_block(kind: str) -> None:
    assert only("abSTOP", kind, stop="STOP", max_new_tokens=6).finish_reason == "stop"  # the last allowed token completes it
    cut = only("abSTOP", kind, stop="STOP", max_new_tokens=5)
    assert (cut.text, cut.finish_reason) == ("abSTO", "length")
    ids = [*encode("abST"), END, *encode("OP")]
    eos = only(ids, kind, stop="STOP")
    assert (eos.text, eos.finish_reason) == ("abST", "eos")
    assert only([*encode("abSTOP"), END], kind, stop="STOP").finish_reason == "stop"
    assert only([*encode("ab"), END], kind, max_new_tokens=3).finish_reason == "eos"


@pytest.mark.parametrize("kind", DRAFTERS)
def test_an_eos_that_is_also_the_end_of_a_stop_string(kind: str) -> None:
    """An ordinary token can be both; the text is cut, so the reason is the stop string."""
    sample = only("abcd", kind, stop="bc", eos=encode("c"))
    assert (sample.text, sample.token_ids, sample.finish_reason) == ("a", tuple(encode("a")), "stop")


def test_a_stop_string_in_the_prompt_or_across_its_end_does_not_count() -> None:
    assert only("bc", "oracle", stop=["it:", ":b"], max_new_tokens=2).text == "bc"
    text = Detokenizer(TOKENIZER, (), Stops(["ab"]), visible_from=1)  # an "a" that the user has, decoded anew
    for token in encode("abcab"):
        text.push(token)
    assert (text.stopped, text.text) == (True, "abc")
    assert [text.piece(index) for index in range(5)] == ["", "b", "c", "", ""]
    text, shown = Detokenizer(TOKENIZER, (), Stops(["abc"]), visible_from=2), []
    for token in encode("abx"):
        text.push(token)
        shown.append(text.take(final=False))
    assert shown == ["", "", "x"]  # what the user has is held back, and not shown again
    text, stopped = Detokenizer(TOKENIZER, (), Stops(["c"], least=3)), []
    for token in encode("abcdc"):
        text.push(token)
        stopped.append(text.stopped)
    assert stopped == [False] * 4 + [True]  # the third token is one of the least


class Chunks:
    """A tokenizer whose tokens are given byte strings, to cut text at awkward places."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(self.pieces[token])


def chunked(pieces: Sequence[bytes], kind: str, k: int, **limits: Any) -> tuple[list[str], Sample]:
    """(shown increments, sample) of a model that says these pieces one after the other."""
    said = says([range(len(pieces) + 1)], len(pieces) + 1)
    scripts = {"oracle": said, "adversarial": adversary(said, len(pieces) + 1)}
    drafter = None if kind == "plain" else scripted(scripts[kind], len(pieces) + 1)
    engine = engine_of(scripted(said, len(pieces) + 1), drafter, Fixed(k), tokenizer=Chunks(b">", *pieces))
    request = Request((0,), 1, Sampling(temperature=0), Limits(**{"max_new_tokens": len(pieces), **limits}))
    engine.submit(request, stream=True)
    shown = []
    while commits := engine.step():
        shown += [c.text for c in commits]
        last = commits[-1].sample
    assert last is not None
    assert "".join(shown) == last.text
    return shown, last


CUTS = [("plain", 0), ("oracle", 1), ("oracle", 4), ("adversarial", 4)]


@pytest.mark.parametrize(("kind", "k"), CUTS)
def test_one_token_may_hold_the_stop_and_text_on_both_sides(kind: str, k: int) -> None:
    _, sample = chunked([b"one ", b"two END thr", b"ee"], kind, k, stop="END")
    assert (sample.text, sample.finish_reason) == ("one two ", "stop")
    assert sample.token_ids == (1, 2)  # the second token covers "two "
    assert len(sample.logprobs) == 2


@pytest.mark.parametrize(("kind", "k"), CUTS)
def test_a_stop_split_over_tokens_with_text_before_it(kind: str, k: int) -> None:
    _, sample = chunked([b"a", b"b.E", b"N", b"D.c"], kind, k, stop="END")
    assert (sample.text, sample.token_ids) == ("ab.", (1, 2))


@pytest.mark.parametrize(("kind", "k"), CUTS)
@pytest.mark.parametrize("last", [b"END\xf0", b"END\xf0\x9f", b"xEND\xe2\x82"])
def test_a_stop_in_a_token_that_also_begins_a_character(kind: str, k: int, last: bytes) -> None:
    """The character is never finished: the stop string must be seen all the same."""
    _, sample = chunked([b"ab", last], kind, k, stop="END")
    assert (sample.text, sample.finish_reason) == ("abx"[: 2 + last.startswith(b"x")], "stop")


# ── limits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("new", [1, 2, 5, 6])
def test_max_new_tokens_is_exact(kind: str, new: int) -> None:
    sample = only("abcdefghij", kind, max_new_tokens=new)
    assert (sample.text, sample.finish_reason) == ("abcdefghij"[:new], "length")
    if new == 1:
        assert (sample.drafted, sample.rounds) == (0, 1)  # nothing to draft for one token


@pytest.mark.parametrize(("context", "draft_context"), [(12, 99), (99, 12), (12, 12)])
@pytest.mark.parametrize("k", [1, 4, 20])
def test_the_context_of_the_target_is_a_limit(context: int, draft_context: int, k: int) -> None:
    target, drafter = pair(encode("abcdefghij"), "oracle", context, draft_context)
    shoal = Shoal(target, drafter, TOKENIZER)
    for lookahead in (k, 0):
        sample = shoal.generate(PROMPT, temperature=0, lookahead=lookahead, eos=END, max_new_tokens=9)[0].samples[0]
        assert (sample.text, sample.finish_reason) == ("abcdefghi"[: context - 7], "length")
        assert (sample.accepted > 0) == (lookahead > 0)


def test_a_prompt_one_short_of_the_context() -> None:
    target, drafter = pair(encode("abc"), "oracle", 8, 8)
    sample = Shoal(target, drafter, TOKENIZER).generate(PROMPT, temperature=0, eos=END)[0].samples[0]
    assert (sample.text, sample.finish_reason, sample.drafted) == ("a", "length", 0)


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Clock:
    """A clock that moves one second per target pass."""

    def __init__(self, target: Runner) -> None:
        self.now = 0.0
        forward = target.hf.forward

        def slow(*arguments: Any, **options: Any) -> Any:
            self.now += 1.0
            return forward(*arguments, **options)

        target.hf.forward = slow
        self.forward = slow


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[Shoal, Clock]:
    """A pair whose target takes one second per pass, the prompt's pass included."""
    target, drafter = pair(encode("abcdefghijklmnopqrstuvwxyz"), "oracle")
    clock = Clock(target)
    for module in ("engine.engine", "api"):
        monkeypatch.setattr(f"shoal.{module}.time.perf_counter", lambda: clock.now)
    return Shoal(target, drafter, TOKENIZER, max_batch=2), clock


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("budget", [0.5, 2, 3.5, 4])
def test_time_is_over_after_at_most_one_more_round(timed: tuple[Shoal, Clock], budget: float, k: int) -> None:
    shoal, clock = timed
    stream = shoal.stream(PROMPT, 3, temperature=0, lookahead=k, eos=END, time_budget=budget)
    increments = list(stream)
    assert clock.now < budget + 2  # one round, and the prompt's pass if it came in between
    running, other, waiting = stream.result()[0].samples
    rounds = max(0, int(clock.now) - 1)
    for sample in (running, other):
        assert (sample.finish_reason, sample.finished) == ("time" if rounds else "not started", False)
        assert sample.text == "abcdefghijklmnopqrstuvwxyz"[: rounds * (k + 1)]
        assert sample.finished_at == clock.now
        assert_consistent(sample)
    assert (waiting.finish_reason, waiting.token_ids, waiting.text) == ("not started", (), "")
    assert not waiting.finished
    assert waiting.mean_logprob != waiting.mean_logprob  # NaN: there is nothing to rank
    assert stream.result()[0].ranked[-1] is waiting
    assert joined(increments, 0) == running.text


def test_a_row_that_ends_in_time_keeps_its_reason(timed: tuple[Shoal, Clock]) -> None:
    shoal, clock = timed
    result = shoal.generate(PROMPT, 3, temperature=0, lookahead=3, eos=END, max_new_tokens=8, time_budget=3)
    assert [sample.finish_reason for sample in result[0].samples] == ["length", "length", "not started"]
    assert clock.now == 3  # prompt, two rounds


def test_prompts_of_one_call_take_turns(timed: tuple[Shoal, Clock]) -> None:
    shoal, clock = timed
    result = shoal.generate([PROMPT] * 3, 2, temperature=0, lookahead=3, max_new_tokens=4, time_budget=4)
    assert clock.now == 4  # two prompts, their round, the third prompt, and the round of it and of the second again
    reasons = [[sample.finish_reason for sample in output.samples] for output in result]
    assert reasons == [["length", "not started"], ["length", "length"], ["length", "not started"]]


def test_held_back_text_is_shown_when_time_is_over(timed: tuple[Shoal, Clock]) -> None:
    """What might have become a stop string belongs to the text once it cannot any more."""
    shoal, _ = timed
    stream = shoal.stream(PROMPT, 1, temperature=0, lookahead=3, eos=END, time_budget=2, stop="cdX")
    increments = list(stream)
    assert [i.text for i in increments] == ["ab", "cd"]
    assert stream.result()[0].samples[0].text == "abcd"


# ── cancellation ────────────────────────────────────────────────────────────────────────────────────────────────────


def joined(increments: Sequence[Increment], sample: int) -> str:
    return "".join(i.text for i in increments if i.sample == sample)


def test_one_row_is_cancelled_and_the_others_go_on() -> None:
    stream = stream_of("abcdefghij", "oracle", 1, n=3, max_new_tokens=10)
    increments = [next(stream) for _ in range(3)]
    stream.cancel(sample=1)
    increments += list(stream)
    texts = [sample.text for sample in stream.result()[0].samples]
    assert texts == ["abcdefghij", "ab", "abcdefghij"] == [joined(increments, i) for i in range(3)]
    assert [s.finish_reason for s in stream.result()[0].samples] == ["length", "cancelled", "length"]
    stream.cancel()  # nothing is left to cancel
    assert [s.finish_reason for s in stream.result()[0].samples] == ["length", "cancelled", "length"]


def test_all_are_cancelled_waiting_ones_too() -> None:
    stream = stream_of("abcdefghij", "sometimes", 2, n=6, max_new_tokens=10)
    next(stream)
    stream.cancel()
    increments = list(stream)
    samples = stream.result()[0].samples
    assert {sample.finish_reason for sample in samples} == {"cancelled"}
    assert [bool(sample.token_ids) for sample in samples] == [True] * 4 + [False] * 2
    assert sum(i.finish_reason == "cancelled" for i in increments) == 6
    for sample in samples:
        assert_consistent(sample)


def test_held_back_text_is_shown_when_cancelled() -> None:
    stream = stream_of("abcdefgh", "oracle", 3, stop="cdX")
    first = next(stream)
    stream.cancel()
    rest = list(stream)
    assert first.text == "ab"
    assert first.text + "".join(i.text for i in rest) == stream.result()[0].samples[0].text == "abcd"


def test_one_prompt_of_two_is_cancelled() -> None:
    target, drafter = pair(encode("abcdefghij"), "oracle")
    stream = Shoal(target, drafter, TOKENIZER).stream(
        [PROMPT, PROMPT], 2, temperature=0, eos=END, max_new_tokens=10, lookahead=1
    )
    next(stream)
    stream.cancel(prompt=0)
    list(stream)
    assert [[s.finish_reason for s in output.samples] for output in stream.result()] == [["cancelled"] * 2, ["length"] * 2]


# ── streaming ───────────────────────────────────────────────────────────────────────────────────────────────────────

TEXTS = ("déjà vu", "a😀b", "👩‍👩‍👧‍👦!", "你好，世界", "x\u00a0y\u2028z", "🏳️‍🌈")


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole(text: str, kind: str) -> None:
    """One token per byte: a block ends inside characters more often than not."""
    stream = stream_of(text, kind, 2, max_new_tokens=len(encode(text)))
    increments = list(stream)
    assert not any("\ufffd" in i.text for i in increments)
    assert "".join(i.text for i in increments) == stream.result()[0].samples[0].text == text
    assert only(text, kind, 2, max_new_tokens=len(encode(text))).text == text


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_character_cut_by_the_limit_appears_only_at_the_end(kind: str) -> None:
    stream = stream_of("a😀", kind, 2, max_new_tokens=3)
    increments = list(stream)
    assert not any("\ufffd" in i.text for i in increments[:-1])
    assert "".join(i.text for i in increments) == stream.result()[0].samples[0].text == "a\ufffd"


@example("aSSTSTOPb", "STOP", 2)
@example("ab", "ab", 1)
@given(st.text("aST", max_size=12), st.text("aST", min_size=1, max_size=4), st.integers(0, 5))
def test_no_part_of_a_stop_string_is_ever_shown(text: str, stop: str, k: int) -> None:
    """Shown text only grows, and all of it is in the final text, which ends before the first stop string."""
    stream = stream_of(text + "aaSSTT", "sometimes", k, stop=stop, max_new_tokens=len(text) + 6)
    said = text + "aaSSTT"
    expected = said.partition(stop)[0]
    shown = ""
    for increment in stream:
        shown += increment.text
        assert expected.startswith(shown)
    sample = stream.result()[0].samples[0]
    assert shown == sample.text == expected
    assert sample.finish_reason == ("stop" if stop in said else "length")
    assert sample.token_ids == tuple(encode(expected))
    assert_consistent(sample)


def test_increments_add_up_to_the_counts() -> None:
    stream = stream_of("abcdefghijklmnop", "sometimes", 3, n=5, max_new_tokens=12)
    increments = list(stream)
    for index, sample in enumerate(stream.result()[0].samples):
        own = [i for i in increments if i.sample == index]
        assert sum((i.token_ids for i in own), ()) == sample.token_ids
        assert sum(i.accepted for i in own) == sample.accepted
        assert len(own) == sample.rounds == sample.target_passes
    assert all(a.result is None or a is not b for a, b in pairwise(increments))


def test_a_result_is_not_given_before_its_time() -> None:
    stream = stream_of("abcdefgh", "oracle", 1)
    next(stream)
    with pytest.raises(ValueError, match="1 rows are still running"):
        stream.result()


def test_ids_only_without_a_tokenizer() -> None:
    target, drafter = pair(encode("abcdef"), "oracle")
    shoal = Shoal(target, drafter)
    sample = shoal.generate([encode(PROMPT)], temperature=0, max_new_tokens=5)[0].samples[0]
    assert (sample.text, sample.token_ids) == ("", tuple(encode("abcde")))


class AfterThree:
    """A Transformers stopping criterion."""

    def __call__(self, ids: Tensor, _scores: Any) -> Tensor:
        return torch.tensor([ids.shape[1] >= len(encode(PROMPT)) + 3])


@pytest.mark.parametrize("k", [0, 4])
def test_stopping_criteria_are_asked_after_every_token(k: int) -> None:
    target, drafter = pair(encode("abcdefgh"), "oracle")
    engine = engine_of(target, drafter, Fixed(k), tokenizer=TOKENIZER)
    engine.submit(Request(tuple(encode(PROMPT)), 1, Sampling(temperature=0), criteria=[AfterThree()]))
    while commits := engine.step():
        last = commits[-1].sample
    assert last is not None
    assert (last.text, last.finish_reason) == ("abc", "stop")


@pytest.mark.parametrize("k", [0, 1, 6])
def test_a_short_row_beside_a_long_one_is_not_asked_beyond_its_end(k: int) -> None:
    """Of five tokens none may come twice, so a sixth is impossible; the short row has just room for its five."""
    model = scripted(hashed(5, 0), 5)
    engine = engine_of(model, model, Fixed(k))
    short = engine.submit(Request((0,), 1, Sampling(seed=1, no_repeat_ngram=1), Limits(max_new_tokens=4)))[0]
    long = engine.submit(Request((0,), 1, Sampling(seed=1), Limits(max_new_tokens=12)))[0]
    while engine.step():
        pass
    assert sorted(short.tokens) == [0, 1, 2, 3, 4]
    assert long.new_tokens == 12


# ── parts in which stop strings end nothing ─────────────────────────────────────────────────────────────────────────


def within(unstopped: Sequence[tuple[str, str]], text: str, start: int, end: int) -> bool | None:
    """By the words of `Request.unstopped`: a part begins before the place, and the place does not hold its closing.

    Blanks behind a part that begins the text belong to it. Places within an opening that is a text are in it, once it is there.
    """
    undecided = False
    for opening, _ in unstopped:
        mark, first = re.sub(r"^\\A|\\s\*", "", opening), opening.startswith(r"\A")
        for begin in range(len(text)) if mark.startswith("<") else ():
            at_mark = begin <= start < begin + len(mark) and (not first or not text[:begin].strip())
            if at_mark and text[begin:].startswith(mark) and (begin < start or end < begin + len(mark)):
                return True
            undecided |= at_mark and text[begin:] in (mark[:length] for length in range(1, len(mark)))
    for opening, closing in unstopped:
        for begin in re.finditer(opening, text[:start]):
            close = text.find(closing, begin.end()) if closing else -1
            behind = close + len(closing)
            if close < 0 or (start < behind and not start <= close <= behind <= end):
                return True
            if opening.startswith(r"\A") and behind <= start and text[behind:end].isspace():
                return True
    return None if undecided else False


PARTS = [
    [(r"\A", "b>")],
    [(r"\A\s*<a", "b>")],
    [("<a", "b>")],
    [("<a", "")],
    [(r"\A\s*<a", "b>"), ("<c", "d>")],
    [("<a", "b>"), (r"\A\s*\[\w+\(", "")],
    [("<a", "b<")],
]


@given(
    st.sampled_from(PARTS), st.lists(st.sampled_from(["<a", "b>", "<c", "d>", "x", " ", "[f(", "<", "a", ">"]), max_size=24)
)
@example(PARTS[2], ["<a", "x", "b", ">", "x"])  # a closing that comes in pieces
@example(PARTS[6], ["<a", "b", "<a", "x"])  # the closing is the beginning of another opening
def test_parts_without_stops_are_those_of_their_marks(parts: list[tuple[str, str]], pieces: list[str]) -> None:
    passages, text = Passages(Stops(unstopped=tuple(parts))), ""
    for piece in pieces:
        text += piece
        start = len(text) - 1
        assert passages.cover(text, len(text), start, len(text)) == within(parts, text, start, len(text)), text
        other = passages.copy()
        assert other.cover(text + "x", len(text) + 1, len(text), len(text) + 1) == within(
            parts, text + "x", len(text), len(text) + 1
        )


@pytest.mark.parametrize("text", ["<aSTOPb>", "<a STOPb> STOP", "<ab><aSTOPb>"])
def test_a_stop_string_right_before_the_end_of_a_part_ends_nothing(text: str) -> None:
    parts, start = [("<a", "b>")], text.index("STOP")
    assert text[start + 4 :].startswith("b>")
    assert Passages(Stops(unstopped=tuple(parts))).cover(text, len(text), start, start + 4)
    assert within(parts, text, start, start + 4)


@pytest.mark.parametrize(
    ("said", "stops", "text"),
    [
        ("<th>n</th>  an n", ["n"], "<th>n</th>  a"),  # within the part and its marks nothing ends, whichever stop string
        ("<th>n</th>  an n", ["h"], "<th>n</th>  an n"),
        ("<th>n</th>  an n", ["/"], "<th>n</th>  an n"),
        ("<th>n</th>  an n", [">"], "<th>n</th>  an n"),
        ("<th>n</th>  an n", ["<th>"], ""),  # a mark as a whole is meant
        ("<th>n</th>  an n", ["</th>"], "<th>n"),
        ("<th>n</th>  an n", [">  a"], "<th>n</th>  an n"),
        ("<ta>h", ["h"], "<ta>"),  # what might have become a mark, and did not
        ("<ta>h", ["t"], "<"),
        ("<t", ["t"], "<"),
        ("a <call>b</call> <c", ["c"], "a <call>b</call> <"),
        ("a <call>b</call> <calm", ["al", "c"], "a <call>b</call> <"),
        ("a <call>b</call> <call>", ["al", "c"], "a <call>b</call> <call>"),
        ("final: finally", ["in"], "final: f"),
        ("final: <th>", ["th"], "final: <"),
        ("<th>n</th>  an n", ["</th> "], "<th>n"),
        ("final:\n\nx\ny", ["\n"], "final:\n\nx"),
    ],
)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_stop_string_within_a_mark_cuts_it_not(said: str, stops: list[str], text: str, kind: str) -> None:
    parts: Any = ((r"\A\s*<th>", "</th>"), (r"\A\s*final:", None), ("<call>", "</call>"))
    target, drafter = pair([*encode(said), END], kind)
    engine = engine_of(target, drafter, Fixed(4), tokenizer=TOKENIZER)
    limits = Limits(stop=stops, eos=(END,), max_new_tokens=40)
    engine.submit(Request(tuple(encode(PROMPT)), 1, Sampling(temperature=0), limits, unstopped=parts))
    shown, last = "", None
    while commits := engine.step():
        shown, last = shown + commits[-1].text, commits[-1].sample
    assert last is not None
    assert (last.text, shown, last.finish_reason) == (text, text, "eos" if text == said else "stop")
    assert last.token_ids[: len(text)] == tuple(encode(text))
    assert len(last.token_ids) == len(text) + (text == said)


def test_stop_strings_of_one_token_are_looked_for_each_by_itself() -> None:
    """The place of the first is behind a part, and that of the second within it."""
    passages = RowStops(Stops(["y", "x"], unstopped=((r"\A", "</th>"),))).passages
    assert [passages[stop].cover("x</th>y", 7, at, at + 1) for stop, at in (("y", 6), ("x", 0))] == [False, True]


def test_parts_begin_and_end_where_characters_were_held_back() -> None:
    """Bytes are shown as many characters until they are one, so that places behind them are others then."""
    face, held = "\N{GRINNING FACE}", "\ufffd"
    ends = Passages(Stops(unstopped=(("<a", f"{face}>"),)))
    assert ends.cover(f"<a{held * 3}", 2, 4, 5) is True
    assert ends.cover(f"<a{face}>x", 5, 4, 5) is False
    begins = Passages(Stops(unstopped=((f"{face}<", ""),)))
    assert begins.cover(held * 7, 0, 6, 7) is False
    assert begins.cover(f"{face}<x", 3, 2, 3) is True
    grows = Passages(Stops(unstopped=((f"<{face}", ""),)))
    assert grows.cover(f"<{held}", 1, 0, 1) is None


def test_a_place_within_one_opening_waits_for_no_other() -> None:
    passages = Passages(Stops(unstopped=(("<th>", "</th>"), ("<t", "."))))
    assert passages.cover("<t", 2, 1, 2) is True


def test_a_stop_string_that_waits_is_forgotten_once_it_is_in_a_mark() -> None:
    text = Detokenizer(TOKENIZER, (), Stops(["t"], unstopped=(("<th>", "</th>"),)))
    shown = []
    for token in encode("<th>x"):
        text.push(token)
        shown.append(text.take(final=False))
    assert "".join(shown) == "<th>x"


def test_a_copy_of_a_text_waits_by_itself() -> None:
    one = Detokenizer(TOKENIZER, (), Stops(["t"], unstopped=(("<th>", "</th>"),)))
    for token in encode("<t"):
        one.push(token)
    other = one.copy()
    for token, detokenizer in zip(encode("ab"), (one, other), strict=True):
        detokenizer.push(token)
        assert (detokenizer.stopped, detokenizer.text, detokenizer.ends) == (True, "<", [1, 2, 3])


def test_a_stop_string_that_is_shown_is_covered_and_not_held_back() -> None:
    text = Detokenizer(TOKENIZER, (), Stops(["abc"], shown=frozenset(["abc"])))
    for token, shown in zip(encode("xabc"), "xabc", strict=True):
        text.push(token)
        assert text.take(final=False) == shown
    assert (text.stopped, text.text, text.token_count) == (True, "xabc", 4)


def test_a_copy_of_a_text_opens_parts_of_its_own() -> None:
    one = Detokenizer(TOKENIZER, (), Stops(["x"], unstopped=(("<a", "b>"),)))
    other = one.copy()
    for detokenizer, text in ((one, "<ax"), (other, "cdx")):
        for token in encode(text):
            detokenizer.push(token)
    assert (one.stopped, other.stopped) == (False, True)


@pytest.mark.parametrize("parts", [[(r"\A", "b>")], [("<a", "b>")], [("<a", "b>"), ("<c", "")], [("<c", "d>")]], ids=str)
def test_a_stop_string_within_a_thought_of_twice_the_length_is_twice_the_work(parts: list[tuple[str, str]]) -> None:
    """By the characters that are looked at: each line of a thought may hold a stop string."""

    class Counted(str):
        work = 0

        def find(self, what: str, start: Any = 0, end: Any = None) -> int:
            Counted.work += len(self) - start
            return super().find(what, start)

    class CountedPattern:
        def __init__(self, real: re.Pattern[str]) -> None:
            self._real = real

        def match(self, text: str, at: int, end: int) -> Any:
            return self._real.match(text, at, end)

        def search(self, text: str, at: int, end: int) -> Any:
            Counted.work += end - at
            return self._real.search(text, at, end)

    counts = []
    for lines in (200, 400):
        passages, text, Counted.work = Passages(Stops(unstopped=tuple(parts))), "<a", 0
        for part in passages._parts:
            part._opening = CountedPattern(part._opening)  # type: ignore[assignment]
        for _ in range(lines):
            text += "a line.\n"
            passages.cover(Counted(text), len(text), len(text) - 1, len(text))
        counts.append(Counted.work)
    assert counts[1] < 2.2 * counts[0], counts
    assert counts[1] < 20 * len(text)
