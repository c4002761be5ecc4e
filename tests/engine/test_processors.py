"""Processors must be pure functions of (ids, scores); others are refused by name before anything is computed.

Tests of: integrations.transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, WatermarkLogitsProcessor
from transformers.generation import logits_process as hf

import shoal
from serving import pair
from shoal.errors import RequestError
from shoal.testing import END, VOCABULARY, tiny_model

PURE: dict[str, Callable[[], Any]] = {
    "repetition": lambda: hf.RepetitionPenaltyLogitsProcessor(1.5),
    "n-grams": lambda: hf.NoRepeatNGramLogitsProcessor(2),
    "top-k": lambda: hf.TopKLogitsWarper(9),
    "top-p": lambda: hf.TopPLogitsWarper(0.9),
    "temperature": lambda: hf.TemperatureLogitsWarper(0.7),
    "forced first": lambda: hf.ForcedBOSTokenLogitsProcessor(3),
    "forced last": lambda: hf.ForcedEOSTokenLogitsProcessor(20, END),
    "at least": lambda: hf.MinNewTokensLengthLogitsProcessor(5, 3, END),
    "bad words": lambda: hf.NoBadWordsLogitsProcessor([[5], [6, 7]], eos_token_id=END),
    "bias": lambda: hf.SequenceBiasLogitsProcessor({(5,): 2.0, (6, 7): -1.0}),
    "decay": lambda: hf.ExponentialDecayLengthPenalty((3, 1.1), END, 5),
    "watermark": lambda: WatermarkLogitsProcessor(VOCABULARY, "cpu"),
    "list": lambda: LogitsProcessorList([hf.TopKLogitsWarper(9), hf.MinPLogitsWarper(0.1)]),
    "in place": lambda: in_place,
    "function": lambda: lambda ids, scores: scores / 2,
    "holds what cannot be copied": lambda: Locked(),
    "picky": lambda: picky,
}


def in_place(ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, ids[0, -1]] -= 2
    return scores


class Locked:
    """Pure, but a lock cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        with self.lock:
            return scores * 0.5


def picky(ids: Tensor, scores: Tensor) -> Tensor:
    """Allows one way only, and fails on every other, as a trie would; nor does it know how to go on after an EOS."""
    ways = {0: 7, 1: 8, 2: END}
    new = ids[0].tolist()[len(PROMPT) :]
    assert new == list(ways.values())[: len(new)]
    only = torch.full_like(scores, -torch.inf)
    only[:, ways[len(new)]] = 0.0
    return only


class Counter:
    """Bans one more token with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(-1, torch.tensor([self.calls]), -torch.inf)


class Remembering:
    """Bans what stood last when it was called before, as one that holds a cache of its past calls might."""

    def __init__(self) -> None:
        self.past: list[int] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        banned = scores.index_fill(-1, torch.tensor(self.past, dtype=torch.int64), -torch.inf)
        self.past.append(int(ids[0, -1]))
        return banned


class LockedCounter(Counter):
    """Cannot be copied: it is called itself, and refused all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class OnlyLonger:
    """Answers by whether the ids are longer than ever before: the same input twice in a row would not show it."""

    def __init__(self) -> None:
        self.longest = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        behind = ids.shape[1] < self.longest
        self.longest = max(self.longest, ids.shape[1])
        return scores - 5.0 * torch.arange(scores.shape[1]) if behind else scores


class Dice:
    """Random."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand(scores.shape)


class Overwriting:
    """Writes over ids and scores that it was given, and returns its own."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        answer = scores.clone()
        scores.zero_()
        return answer


def three_by_sum(ids: Tensor, scores: Tensor) -> Tensor:
    """Allows three tokens only, so that drafts are often accepted; which ones depends on all ids."""
    allowed = (int(ids.sum()) + torch.arange(3)) % scores.shape[1]
    return torch.full_like(scores, -torch.inf).index_copy(1, allowed, scores[:, allowed])


def overwrites_ids(ids: Tensor, scores: Tensor) -> Tensor:
    answer = three_by_sum(ids, scores)
    ids.zero_()
    return answer


def favours_by_sum(ids: Tensor, scores: Tensor) -> Tensor:
    return scores + 3.0 * (torch.arange(scores.shape[1]) % 3 == ids.sum() % 3)


IMPURE = [Counter, Remembering, LockedCounter, OnlyLonger, Dice]
PROMPT = [5, 6, 7, 5, 6]


@pytest.mark.parametrize("name", PURE)
def test_pure_processors_are_taken_and_drafts_do_not_matter(name: str) -> None:
    options: dict[str, Any] = {"n": 2, "seed": 3, "max_new_tokens": 12, "eos": (END,)}
    spoken = pair()
    plain, drafted = (
        spoken.generate([PROMPT], processors=[PURE[name]()], lookahead=lookahead, **options) for lookahead in ("off", 4)
    )
    ids = [[sample.token_ids for sample in result[0].samples] for result in (plain, drafted)]
    assert ids[0] == ids[1]
    assert drafted.stats.drafted > 0


@pytest.mark.parametrize("kind", IMPURE)
def test_others_are_refused_by_name_before_anything_is_computed(kind: type[Any]) -> None:
    engine = pair().engine(4, shoal.sampling.acceptance.Coupled())
    chain = [hf.TemperatureLogitsWarper(0.5), hf.NoRepeatNGramLogitsProcessor(2), kind(), hf.TopKLogitsWarper(50)]
    request = shoal.types.requests.Request(tuple(PROMPT), 1, shoal.Sampling(processors=chain))
    with pytest.raises(RequestError, match=f"processor {kind.__name__} is not supported: .*pure function"):
        engine.submit(request)
    assert engine.stats.target_passes == engine.stats.prefills == 0
    assert not engine.step()


def test_the_caller_s_own_is_not_called() -> None:
    mine = Remembering()
    with pytest.raises(RequestError):
        pair().generate([PROMPT], processors=[mine])
    assert mine.past == []


def untouched(ids: Tensor, scores: Tensor) -> Tensor:
    """So that both runs are decided by torch: log-probabilities of the kernels in C have other last bits."""
    return scores


def test_what_a_processor_does_to_its_arguments_changes_nothing() -> None:
    options: dict[str, Any] = {"n": 2, "seed": 3, "max_new_tokens": 12, "lookahead": 4, "top_logprobs": 3}
    for first in ([], [hf.TopKLogitsWarper(50)]):
        with_it, without = (
            pair().generate([PROMPT], processors=[*first, *more], **options) for more in ([Overwriting()], [untouched])
        )
        for a, b in zip(with_it[0].samples, without[0].samples, strict=True):
            assert (a.token_ids, a.logprobs, a.top_logprobs) == (b.token_ids, b.logprobs, b.top_logprobs)


def test_processors_are_tried_in_their_order_each_on_what_the_one_before_it_left() -> None:
    def behind(ids: Tensor, scores: Tensor) -> Tensor:
        assert int(scores.isfinite().sum()) == 9
        return scores

    assert pair().generate([PROMPT], processors=[hf.TopKLogitsWarper(9), behind], max_new_tokens=3)


@pytest.mark.parametrize("others", [-1.0, -torch.inf])
def test_nothing_is_tried_behind_an_eos(others: float) -> None:
    def ends(ids: Tensor, scores: Tensor) -> Tensor:
        assert END not in ids[0, len(PROMPT) :]
        return torch.full_like(scores, others).index_fill(-1, torch.tensor([END]), 50.0)

    (sample,) = pair().generate([PROMPT], processors=[ends], eos=(END,), max_new_tokens=3)[0].samples
    assert sample.finish_reason == "eos"


@pytest.mark.parametrize("name", ["UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"])
def test_known_ones_are_neither_copied_nor_called(name: str) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    known = type(name, (), {"__call__": never, "__deepcopy__": never})()
    with pytest.raises(RequestError, match=f"processor {name} is not supported"):
        pair().generate([PROMPT], processors=[known])


@pytest.mark.parametrize("lookahead", ["off", 4])
def test_ids_that_a_processor_writes_over_are_its_own(lookahead: Any) -> None:
    """Neither the block's later positions nor the processors behind it read them."""
    options: dict[str, Any] = {"n": 2, "seed": 3, "max_new_tokens": 12, "lookahead": lookahead}
    for behind in ([], [favours_by_sum]):
        written, read = (
            pair().generate([PROMPT], processors=[first, *behind], **options) for first in (overwrites_ids, three_by_sum)
        )
        assert [sample.token_ids for sample in written[0].samples] == [sample.token_ids for sample in read[0].samples]
    assert (written.stats.accepted > 0) is (lookahead == 4)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda ids, scores: scores[:, :3], "must return scores of shape"),
        (lambda ids, scores: None, "must return scores of shape .* got NoneType"),
        (lambda ids, scores: 1 / 0, "failed on the prompt: ZeroDivisionError"),
    ],
)
def test_what_fails_on_the_prompt_fails_before_anything_is_computed(processor: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"processor function {message}"):
        pair().generate([PROMPT], processors=[processor])


def test_generate_of_transformers_refuses_them_too() -> None:
    target, drafter = (tiny_model("llama", seed=seed) for seed in (0, 1))
    options: dict[str, Any] = {
        "max_new_tokens": 8, "do_sample": True, "custom_generate": shoal.custom_generate, "draft_model": drafter,
        "pad_token_id": 0, "lookahead": 3, "output_scores": True, "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    ids = torch.tensor([PROMPT])
    for kind in IMPURE:
        with pytest.raises(RequestError, match=f"processor {kind.__name__} is not supported"):
            target.generate(ids, logits_processor=LogitsProcessorList([kind()]), **options)
    torch.manual_seed(1)
    plain = target.generate(ids, **options)
    torch.manual_seed(1)
    written = target.generate(ids, logits_processor=LogitsProcessorList([Overwriting()]), **options)
    assert torch.equal(plain.sequences, written.sequences)
    for name in ("logits", "scores"):
        torch.testing.assert_close(torch.stack(getattr(plain, name)), torch.stack(getattr(written, name)))
