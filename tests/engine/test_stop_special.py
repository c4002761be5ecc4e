"""Stop strings that are, or contain, special tokens: they end a row although its text is decoded without them.

Tests of: engine.detokenizer.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from endings import DRAFTERS, PROMPT, TOKENIZER, encode, only, stream_of
from shoal.api import Shoal
from shoal.engine.detokenizer import Detokenizer
from shoal.engine.stop_strings import Stops
from shoal.testing import BEGIN, END, PAD, VOCABULARY
from shoal.testing.scripted import one_hot, says, scripted

SEQUENCES = {
    "alone": ([*encode("abc"), BEGIN, *encode("def")], "<|begin|>", "abc"),
    "at once": ([BEGIN, *encode("def")], "<|begin|>", ""),
    "behind text": ([*encode("ab\n"), BEGIN, *encode("d")], "\n<|begin|>", "ab"),
    "before text": ([*encode("ab"), BEGIN, *encode("user: x")], "<|begin|>user", "ab"),
    "between": ([*encode("a\n"), PAD, *encode("b\n"), BEGIN, *encode("x")], "b\n<|begin|>x", "a\n"),
    "two": ([*encode("ab"), PAD, BEGIN, *encode("x")], "<|pad|><|begin|>", "ab"),
    "from within another": ([*encode("ab"), PAD, BEGIN, *encode("x")], "d|><|begin|>", "ab"),
    "after another": ([*encode("a"), BEGIN, PAD, BEGIN, *encode("x")], "<|pad|><|begin|>", "a"),
    "an EOS": ([*encode("abc"), END, *encode("def")], "<|end|>", "abc"),
    "spelled out": (encode("ab<|begin|>cd"), "<|begin|>", "ab"),
    "in pieces": ([*encode("aé"), BEGIN, *encode("x")], "é<|begin|>", "a"),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", SEQUENCES)
def test_it_ends_the_row(name: str, kind: str) -> None:
    """Streamed and not, drafted and not; nothing of it is shown, and neither is what stands before it in the stop string."""
    ids, stop, text = SEQUENCES[name]
    sample = only(ids, kind, stop=[stop])
    assert (sample.text, sample.finish_reason) == (text, "stop")
    assert list(sample.token_ids) == ids[: len(sample.token_ids)]


@pytest.mark.parametrize("stop", ["<|begin|>x", "\n<|pad|>", "<|end|", "begin", "ab<|pad|>c"])
def test_what_is_not_there_ends_nothing(stop: str) -> None:
    """Without a whole special token in it, a stop string is looked for in the text as it is shown."""
    ids = [*encode("ab"), BEGIN, *encode("c\nd"), END]
    sample = only(ids, "oracle", stop=[stop])
    assert (sample.text, sample.finish_reason) == ("abc\nd", "eos")


def test_the_earliest_of_both_kinds_wins() -> None:
    ids = [*encode("one two"), BEGIN, *encode("three")]
    for stops, text in (
        (["two", "<|begin|>"], "one "),
        (["<|begin|>", "three"], "one two"),
        (["<|begin|>", "two<|begin|>"], "one "),
        (["e two<|begin|>", "two"], "one "),
    ):
        assert only(ids, "oracle", stop=stops).text == text
    assert only(ids, "oracle", stop=["twothree"]).text == "one "  # hidden tokens do not part the text that is shown


def test_what_may_become_a_stop_string_is_held_back() -> None:
    """The line's end waits for the next token, and is shown once it can no longer belong to a stop string."""
    text = Detokenizer(TOKENIZER, (), Stops(["\n\n<|begin|>"]))
    shown = []
    for token in [*encode("a\n\nb\n\n"), PAD, *encode("\n\n"), BEGIN]:
        text.push(token)
        shown.append(text.take(final=text.stopped))
    assert shown == ["a", "", "", "\n\nb", "", "", "\n\n", "", "", ""]
    assert (text.stopped, text.text) == (True, "a\n\nb\n\n")


def test_a_copy_of_a_text_has_special_tokens_of_its_own() -> None:
    one = Detokenizer(TOKENIZER, (), Stops(["p<|begin|>"]))
    other = one.copy()
    for text, ids in ((one, [BEGIN]), (other, [*encode("abcdefghijklmnop"), BEGIN])):
        for token in ids:
            text.push(token)
    assert (other.stopped, other.text) == (True, "abcdefghijklmno")


@pytest.mark.parametrize("least", [1, 3, 5])
def test_with_min_new_tokens(least: int) -> None:
    """An EOS that stands in a stop string is impossible for so long, and ends the row by the stop string then."""

    def hesitant(_: tuple[int, ...]) -> torch.Tensor:
        logits = one_hot(END, VOCABULARY)
        logits[encode("a")[0]] = -9.0  # the next best
        return logits

    for drafter in (None, scripted(hesitant, VOCABULARY)):
        shoal = Shoal(scripted(hesitant, VOCABULARY), drafter, TOKENIZER)
        asked: dict[str, Any] = {"temperature": 0, "eos": END, "min_new_tokens": least, "max_new_tokens": 12, "lookahead": 3}
        (sample,) = shoal.generate(PROMPT, stop=["a<|end|>"], **asked)[0].samples
        assert (sample.text, sample.finish_reason) == ("a" * (least - 1), "stop")


def test_in_the_server() -> None:
    from serving import pair, served

    script = says([[*encode("hello"), *encode("abc\n"), BEGIN, *encode("def")]], VOCABULARY, otherwise=encode("?")[0])
    with served(pair(script)) as server:
        asked: dict[str, Any] = {"max_tokens": 20, "stop": ["\n<|begin|>"], "temperature": 0}
        choice = server.post(**asked).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
        stream = server.client.completions.create(model="tiny", prompt="hello", stream=True, **asked)
        parts = [part.choices[0].text for part in stream if part.choices]
        assert "".join(parts) == "abc"


def test_streams_show_nothing_that_is_taken_back() -> None:
    ids, stop, text = SEQUENCES["behind text"]
    for k in range(1, 6):
        increments = list(stream_of(ids, "oracle", k, stop=[stop]))
        shown = list(itertools.accumulate(increment.text for increment in increments))
        assert all(text.startswith(part) for part in shown)
        assert shown[-1] == text
