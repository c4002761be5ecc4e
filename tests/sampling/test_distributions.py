"""The declared distribution: each control against Transformers' own, and every draft position against its true history.

Tests of: sampling.penalties, sampling.controls, sampling.processors, sampling.native_draws,
sampling.distributions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from shoal.config import Sampling
from shoal.errors import BadLogits, RequestError, ShoalError
from shoal.sampling import distributions, native_draws
from shoal.sampling.distributions import pure_probabilities
from shoal.types.requests import Request, Row
from shoal.types.trees import Positions


def probabilities(logits: Tensor, rows: Sequence[Row], drafts: Sequence[Sequence[int]], first: int = 0) -> Tensor:
    return distributions.probabilities(logits, Positions(rows, drafts, first=first))


VOCABS = (7, 40, 333, 2048)
quick = settings(max_examples=40, deadline=None)


def make_row(
    sampling: Sampling, tokens: Sequence[int], prompt: int | None = None, eos: Sequence[int] = (), index: int = 0
) -> Row:
    """A row whose first `prompt` tokens (all, if None) are the request's."""
    request = Request(tuple(tokens if prompt is None else tokens[:prompt]), sampling=sampling)
    return Row(request, group=0, index=index, seed=0, tokens=list(tokens), eos=frozenset(eos), max_length=10_000)


def random_logits(seed: int, rows: int, q: int, vocab: int, scale: float = 3.0, grid: float = 0.0) -> Tensor:
    """Random scores; a grid rounds them, so that many are equal."""
    logits = torch.randn(rows, q, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return (logits / grid).round() * grid if grid else logits


def one(sampling: Sampling, logits: Tensor, tokens: Sequence[int] = (0,), **row: Any) -> Tensor:
    """The distribution of a single position with logits [vocab]."""
    return probabilities(logits[None, None], [make_row(sampling, tokens, **row)], [()])[0, 0]


@pytest.fixture(scope="module", params=["kernels", "torch"], autouse=True)
def computed_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything holds for the kernels in C, and for the operations of torch where there are none."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native_draws, "takes", lambda scores, samplings: False)
        yield


def transformers(processors: Sequence[Any], logits: Tensor, tokens: Sequence[int] = (0,)) -> Tensor:
    """The same by Transformers: the processors in turn, then softmax."""
    scores = logits[None].clone()
    for processor in processors:
        scores = processor(torch.tensor([list(tokens)]), scores)
    return scores.softmax(-1)[0]


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    tiny = 2 * torch.finfo(torch.float32).tiny  # the kernel has no numbers below
    assert torch.equal(got > tiny, expected > tiny), "another set of tokens is kept"
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-7)


def assert_same_but_for_ties(got: Tensor, expected: Tensor, logits: Tensor) -> None:
    """The same, where Transformers' unstable sort chooses among equal scores at the end of the set and we the lowest ids."""
    assert_same(got.sort(descending=True).values, expected.sort(descending=True).values)
    last = logits[got > 0].min()
    tied = got[logits == last] > 0
    assert torch.equal(tied, tied.sort(descending=True).values)


scores_1d = st.builds(
    lambda vocab, seed, scale, grid: random_logits(seed, 1, 1, vocab, scale, grid)[0, 0],
    st.sampled_from(VOCABS),
    st.integers(0, 10**6),
    st.sampled_from([0.01, 1.0, 4.0, 12.0]),
    st.sampled_from([0.0, 0.25, 1.0]),
)


def near_threshold(logits: Tensor, mass: float) -> bool:
    """True when float rounding, not the rule, decides whether a set of tokens reaches `mass`."""
    cumulative = logits.double().softmax(-1).sort(descending=True).values.cumsum(-1)
    return bool(((cumulative - mass).abs() < 1e-5).any())


# Each control alone.


@quick
@given(scores_1d, st.floats(0.05, 20))
def test_temperature(logits: Tensor, temperature: float) -> None:
    expected = transformers([hf.TemperatureLogitsWarper(temperature)], logits)
    torch.testing.assert_close(one(Sampling(temperature=temperature), logits), expected)


@quick
@given(scores_1d, st.integers(1, 3000))
def test_top_k_with_ties(logits: Tensor, k: int) -> None:
    assert_same(one(Sampling(top_k=k), logits), transformers([hf.TopKLogitsWarper(k)], logits))


@quick
@given(scores_1d, st.sampled_from([1e-6, 0.1, 0.31, 0.5, 0.77, 0.9, 0.95, 0.999]))
def test_top_p_with_ties(logits: Tensor, p: float) -> None:
    if not near_threshold(logits, p):
        expected = transformers([hf.TopPLogitsWarper(p)], logits)
        assert_same_but_for_ties(one(Sampling(top_p=p), logits), expected, logits)


def test_top_p_reached_exactly_needs_no_further_token() -> None:
    logits = torch.tensor([0.25, 0.5, 0.125, 0.125]).log()
    assert one(Sampling(top_p=0.5), logits).tolist() == [0, 1, 0, 0]
    assert (one(Sampling(top_p=0.51), logits) > 0).tolist() == [True, True, False, False]
    assert (one(Sampling(top_p=0.8), logits) > 0).tolist() == [True, True, True, False]


def test_top_p_of_a_flat_distribution_over_a_large_vocabulary() -> None:
    logits = random_logits(3, 2, 2, 20_011, scale=0.5)
    got = probabilities(logits, [make_row(Sampling(top_p=0.8), [1])] * 2, [(1,)] * 2)
    for b, j in itertools.product(range(2), range(2)):
        assert_same(got[b, j], transformers([hf.TopPLogitsWarper(0.8)], logits[b, j]))


@quick
@given(scores_1d, st.sampled_from([0.001, 0.05, 0.1, 0.5, 1.0]))
def test_min_p(logits: Tensor, p: float) -> None:
    assert_same(one(Sampling(min_p=p), logits), transformers([hf.MinPLogitsWarper(p)], logits))


@quick
@given(st.sampled_from(VOCABS), st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 0.9, 0.99]))
def test_typical_p(vocab: int, seed: int, p: float) -> None:
    logits = random_logits(seed, 1, 1, vocab, grid=0.5)[0, 0]
    logp = logits.double().log_softmax(-1)
    distance, order = (-logp + (logp * logp.exp()).sum()).abs().sort()
    close = ((distance[1:] - distance[:-1]) < 1e-4) & (logits[order][1:] != logits[order][:-1])
    if not bool(close.any()) and not bool(((logp.exp()[order].cumsum(-1) - p).abs() < 1e-5).any()):
        assert_same(one(Sampling(typical_p=p), logits), transformers([hf.TypicalLogitsWarper(p)], logits))


tokens_below_seven = st.lists(st.integers(0, 6), min_size=1, max_size=30)


@quick
@given(scores_1d, tokens_below_seven, st.sampled_from([0.5, 1.1, 2.0]))
def test_repetition_penalty(logits: Tensor, tokens: list[int], penalty: float) -> None:
    expected = transformers([hf.RepetitionPenaltyLogitsProcessor(penalty)], logits, tokens)
    assert_same(one(Sampling(repetition_penalty=penalty), logits, tokens, prompt=1), expected)


@quick
@given(scores_1d, tokens_below_seven, st.data(), st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalties(
    logits: Tensor, tokens: list[int], data: st.DataObject, presence: float, frequency: float
) -> None:
    prompt = data.draw(st.integers(1, len(tokens)))
    expected = logits.double()
    for token in range(len(logits)):
        count = sum(t == token for t in tokens[prompt:])
        expected[token] -= presence * (count > 0) + frequency * count
    got = one(Sampling(presence_penalty=presence, frequency_penalty=frequency), logits, tokens, prompt=prompt)
    torch.testing.assert_close(got, expected.softmax(-1).float(), rtol=1e-4, atol=1e-7)


@quick
@given(scores_1d, st.dictionaries(st.integers(0, 6), st.floats(-50, 50), min_size=1))
def test_logit_bias(logits: Tensor, bias: dict[int, float]) -> None:
    expected = transformers([hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})], logits)
    torch.testing.assert_close(one(Sampling(logit_bias=bias), logits), expected)


@quick
@given(scores_1d, st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(2, 5))
def test_no_repeat_ngram(logits: Tensor, tokens: list[int], size: int) -> None:
    expected = transformers([hf.NoRepeatNGramLogitsProcessor(size)], logits, tokens)
    assert_same(one(Sampling(no_repeat_ngram=size), logits, tokens), expected)


def test_no_repeat_of_single_tokens() -> None:
    assert (one(Sampling(no_repeat_ngram=1), torch.zeros(5), [3, 1, 3]) > 0).tolist() == [True, False, True, False, True]


@quick
@given(
    scores_1d,
    st.lists(st.integers(0, 3), min_size=3, max_size=10),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6),
)
def test_bad_words(logits: Tensor, tokens: list[int], words: list[list[int]]) -> None:
    expected = transformers([hf.NoBadWordsLogitsProcessor(words)], logits, tokens)
    assert_same(one(Sampling(bad_words=[tuple(word) for word in words]), logits, tokens), expected)


def test_bad_words_that_begin_with_the_text() -> None:
    """Transformers 5.5 lets them pass where the text is all but their last token."""
    found = one(Sampling(bad_words=[(3, 1, 2), (1, 0), (0, 3, 1, 1)]), torch.zeros(4), [3, 1])
    assert (found > 0).tolist() == [False, True, False, True]


@quick
@given(scores_1d, st.integers(0, 4), st.sampled_from([(2,), (0, 5), ()]))
def test_min_new_tokens(logits: Tensor, new: int, eos: tuple[int, ...]) -> None:
    tokens = [1, 2, 3, 4, 5, 6][: 2 + new]
    expected = transformers([hf.MinNewTokensLengthLogitsProcessor(2, 3, list(eos))] if eos else [], logits, tokens)
    assert_same(one(Sampling(min_new_tokens=3), logits, tokens, prompt=2, eos=eos), expected)


# All together, in Transformers' order.


@quick
@given(scores_1d, st.lists(st.integers(0, 6), min_size=3, max_size=20), st.booleans())
def test_every_control_at_once_against_the_chain(logits: Tensor, tokens: list[int], cut_by_k: bool) -> None:
    sampling = Sampling(
        temperature=0.7, top_k=20 if cut_by_k else 0, top_p=0.9, min_p=0.02, repetition_penalty=1.3,
        logit_bias={2: 1.5, 0: -1.0}, bad_words=[[1], [4, 5]], min_new_tokens=30, no_repeat_ngram=3,
    )  # fmt: skip
    before = [
        hf.SequenceBiasLogitsProcessor({(2,): 1.5, (0,): -1.0}),
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.NoRepeatNGramLogitsProcessor(3),
        hf.NoBadWordsLogitsProcessor([[1], [4, 5]]),
        hf.MinNewTokensLengthLogitsProcessor(2, 30, [3]),
        hf.TemperatureLogitsWarper(0.7),
        *([hf.TopKLogitsWarper(20)] if cut_by_k else []),
    ]
    if not near_threshold(transformers(before, logits, tokens).log(), 0.9):
        expected = transformers([*before, hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.02)], logits, tokens)
        changed = transformers(before, logits, tokens).log()
        assert_same_but_for_ties(one(sampling, logits, tokens, prompt=2, eos=[3]), expected, changed)


@quick
@given(scores_1d, st.integers(1, 60), st.sampled_from([0.5, 0.9]))
def test_typical_p_after_top_k(logits: Tensor, k: int, p: float) -> None:
    logits = logits + torch.linspace(0, 0.1, len(logits))
    expected = transformers([hf.TopKLogitsWarper(k), hf.TypicalLogitsWarper(p)], logits)
    got = one(Sampling(top_k=k, typical_p=p), logits)
    # Where the mass is reached exactly, rounding decides on one more token and on the one that lies as far on the other side.
    assert int((got > 0).sum()) == pytest.approx(int((expected > 0).sum()), abs=2)


def test_ties_with_the_kth_score_beyond_any_short_list() -> None:
    logits = torch.zeros(3000)
    logits[::2] = 1.0
    assert int((one(Sampling(top_k=5), logits) > 0).sum()) == 1500
    expected = transformers([hf.TopKLogitsWarper(5), hf.TopPLogitsWarper(0.301)], logits)
    assert_same_but_for_ties(one(Sampling(top_k=5, top_p=0.301), logits), expected, logits)


# Histories.


RICH = Sampling(
    temperature=0.8, top_k=30, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.6, no_repeat_ngram=2,
    bad_words=[(3, 4), (1, 2, 3)], min_new_tokens=5, logit_bias={1: 2.0},
)  # fmt: skip
HISTORIES = {
    "repetition": Sampling(repetition_penalty=1.4),
    "presence": Sampling(presence_penalty=0.7),
    "frequency": Sampling(frequency_penalty=0.7),
    "ngram": Sampling(no_repeat_ngram=2),
    "bad_words": Sampling(bad_words=[(3, 4), (1, 2, 3), (0, 0)]),
    "min_new_tokens": Sampling(min_new_tokens=5),
    "all": RICH,
    "greedy": Sampling(temperature=0, repetition_penalty=3.0, frequency_penalty=1.0),
}


@pytest.mark.parametrize("name", HISTORIES)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_draft_position_equals_a_row_that_committed_the_draft(name: str, data: st.DataObject) -> None:
    sampling, vocab = HISTORIES[name], data.draw(st.sampled_from([40, 333]))
    small = st.integers(0, 5)
    tokens = data.draw(st.lists(st.lists(small, min_size=1, max_size=12), min_size=1, max_size=3))
    drafts = [data.draw(st.lists(small, max_size=5)) for _ in tokens]
    prompts = [data.draw(st.integers(1, len(t))) for t in tokens]
    q = max(map(len, drafts)) + 1
    logits = random_logits(data.draw(st.integers(0, 999)), len(tokens), q, vocab)
    rows = [make_row(sampling, t, prompt=p, eos=[2]) for t, p in zip(tokens, prompts, strict=True)]
    block = probabilities(logits, rows, drafts)
    assert bool(block.isfinite().all())
    for b, draft in enumerate(drafts):
        for j in range(1 + (draft.index(2) if 2 in draft else len(draft))):  # the row ends with an EOS
            committed = make_row(sampling, [*tokens[b], *draft[:j]], prompt=prompts[b], eos=[2])
            alone = probabilities(logits[b : b + 1, j : j + 1], [committed], [()])[0, 0]
            assert_same(block[b, j], alone)
            as_drafter = probabilities(logits[:, j : j + 1], rows, [d[:j] for d in drafts], first=j)[b, 0]
            assert_same(block[b, j], as_drafter)
            # The drafter may know more of its draft than the position may see.
            assert_same(block[b, j], probabilities(logits[:, j : j + 1], rows, drafts, first=j)[b, 0])


@pytest.mark.parametrize(
    ("name", "position"),
    [("repetition", 1), ("presence", 1), ("frequency", 1), ("ngram", 2), ("bad_words", 1), ("min_new_tokens", 4)],
)
def test_a_history_one_token_short_is_noticed(name: str, position: int) -> None:
    """The negative control of the test above: applied one token late, each control gives another distribution."""
    row, draft, logits = make_row(HISTORIES[name], [5, 4, 5, 1, 3], prompt=4, eos=[2]), [6, 4, 6, 6], torch.ones(1, 5, 40)
    exact = probabilities(logits, [row], [draft])[0, position]
    late = probabilities(logits[:, :1], [row], [draft], first=position - 1)[0, 0]
    assert not torch.allclose(exact, late)
    torch.testing.assert_close(probabilities(logits[:, :1], [row], [draft], first=position)[0, 0], exact)


class Recorder(hf.LogitsProcessor):
    """Remembers what it was called with; answers by what it has seen last, and scribbles over the scores it was given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.dtype == torch.int64
        assert input_ids.shape[0] == 1
        assert scores.shape[0] == 1
        self.seen.append(input_ids[0].tolist())
        answer = scores.clone()
        answer[0, input_ids[0, -1]] = -torch.inf
        scores.zero_()
        return answer


def test_a_processor_sees_exactly_the_histories() -> None:
    recorder = Recorder()
    sampling = Sampling(processors=[hf.TemperatureLogitsWarper(0.5), recorder, hf.TopKLogitsWarper(10)])
    rows = [make_row(sampling, [1, 2, 3], prompt=1), make_row(sampling, [4])]
    drafts = [[5, 6], [7]]
    logits = random_logits(0, 2, 3, 40)
    kept = logits.clone()
    got = probabilities(logits, rows, drafts)
    histories = [[1, 2, 3], [1, 2, 3, 5], [1, 2, 3, 5, 6], [4], [4, 7]]
    assert recorder.seen == histories
    assert torch.equal(logits, kept)
    for (b, j), ids in zip([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], histories, strict=True):
        chain = [hf.TemperatureLogitsWarper(0.5), Recorder(), hf.TopKLogitsWarper(10)]
        assert_same(got[b, j], transformers(chain, logits[b, j], ids))


@pytest.mark.parametrize(
    "processor",
    [
        hf.TopPLogitsWarper(0.8), hf.MinPLogitsWarper(0.1), hf.TopHLogitsWarper(0.5), hf.TypicalLogitsWarper(0.7),
        hf.EpsilonLogitsWarper(0.01), hf.EtaLogitsWarper(0.02), hf.InfNanRemoveLogitsProcessor(), hf.LogitNormalization(),
        hf.SuppressTokensLogitsProcessor([1, 2]), hf.RepetitionPenaltyLogitsProcessor(1.5),
        hf.NoRepeatNGramLogitsProcessor(2),
    ],
    ids=lambda processor: type(processor).__name__,
)  # fmt: skip
def test_transformers_processors_in_a_block(processor: Any) -> None:
    logits, draft = random_logits(5, 2, 4, 40), [3, 1, 3]
    rows = [make_row(Sampling(processors=[processor], temperature=0.9), [1, 3, 1])] * 2
    got = probabilities(logits, rows, [draft, draft])
    for b, j in itertools.product(range(2), range(4)):
        expected = transformers([processor, hf.TemperatureLogitsWarper(0.9)], logits[b, j], [1, 3, 1, *draft[:j]])
        assert_same(got[b, j], expected)


def test_a_class_that_only_bears_a_known_name_is_called_per_position() -> None:
    calls = []

    class TopKLogitsWarper:
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            calls.append(input_ids[0].tolist())
            return scores

    probabilities(torch.zeros(1, 2, 5), [make_row(Sampling(processors=[TopKLogitsWarper()]), [1])], [[2]])
    assert calls == [[1], [1, 2]]


def test_a_processor_that_changes_the_shape_is_named() -> None:
    sampling = Sampling(processors=[lambda ids, scores: scores[:, :3]])
    with pytest.raises(RequestError, match=r"function must return scores of shape \(1, 5\), got \(1, 3\)"):
        one(sampling, torch.zeros(5))


# Batches.


MIXED = [
    Sampling(), Sampling(seed=4), Sampling(temperature=0), Sampling(temperature=0.3), Sampling(top_k=3), Sampling(top_p=0.6),
    Sampling(min_p=0.2), Sampling(typical_p=0.5), RICH, Sampling(temperature=0, no_repeat_ngram=1),
    Sampling(top_k=9, top_p=0.8),
]  # fmt: skip


@pytest.mark.parametrize("vocab", [40, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mixed_batch_equals_each_row_alone(vocab: int, dtype: torch.dtype) -> None:
    rows = [make_row(sampling, [b % 5, 3, b % 3], prompt=1, eos=[2]) for b, sampling in enumerate(MIXED)]
    drafts = [[1, 3, 3, 2][: b % 5] for b in range(len(rows))]
    logits = random_logits(8, len(rows), 5, vocab).to(dtype)
    kept = logits.clone()
    together = probabilities(logits, rows, drafts)
    assert torch.equal(logits, kept)
    assert together.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(together.sum(-1), torch.ones_like(together[..., 0]))
    for b, row in enumerate(rows):
        alone = probabilities(logits[b : b + 1], [row], [drafts[b]])[0]
        assert_same(together[b], alone)


@pytest.mark.parametrize("sampling", MIXED)
def test_logits_are_never_written(sampling: Sampling) -> None:
    logits = random_logits(2, 2, 3, 40).transpose(0, 1).contiguous().transpose(0, 1)
    kept = logits.clone()
    probabilities(logits, [make_row(sampling, [1, 2], prompt=1)] * 2, [[1, 2], [2]])
    assert torch.equal(logits, kept)


def test_float64_is_computed_in_float64() -> None:
    logits = random_logits(2, 1, 1, 40).double()
    got = probabilities(logits, [make_row(Sampling(temperature=0.7, repetition_penalty=1.2), [1])], [()])
    expected = logits.clone()
    expected[..., 1] = torch.where(expected[..., 1] < 0, expected[..., 1] * 1.2, expected[..., 1] / 1.2)
    torch.testing.assert_close(got, (expected / 0.7).softmax(-1), rtol=1e-14, atol=0)


# Edges.


def test_greedy_takes_the_lowest_of_equal_scores() -> None:
    logits = torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0])
    assert one(Sampling(temperature=0), logits).tolist() == [0, 1, 0, 0, 0]
    assert one(Sampling(temperature=0, bad_words=[(1,)], top_k=1, top_p=0.1), logits).tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-9, 1e30, 1e308])
def test_extreme_temperatures_are_finite(temperature: float) -> None:
    got = one(Sampling(temperature=temperature), torch.tensor([-torch.inf, 3.0, 80.0, -200.0]))
    expected = [0, 0, 1, 0] if temperature < 1 else [0, 1 / 3, 1 / 3, 1 / 3]
    assert got.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("sampling", MIXED)
def test_columns_that_are_impossible_from_the_start(sampling: Sampling) -> None:
    logits = random_logits(1, 1, 2, 40)
    logits[..., 10:] = -torch.inf
    got = probabilities(logits, [make_row(sampling, [30, 1], prompt=1)], [[35]])
    assert bool((got[..., 10:] == 0).all())
    torch.testing.assert_close(got.sum(-1), torch.ones(1, 2))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("controls", "position"), [({"bad_words": [(0,), (1,), (2,)]}, 0), ({"no_repeat_ngram": 1}, 1)])
def test_controls_that_ban_everything_are_named(controls: dict[str, Any], position: int, temperature: float) -> None:
    row = make_row(Sampling(temperature=temperature, seed=3, **controls), [0, 1], index=6)
    name = next(iter(controls))
    with pytest.raises(RequestError, match=rf"row 6 of request 0, draft position {position}: .*{name}=") as error:
        probabilities(torch.zeros(1, 2, 3), [row], [[2]])
    assert "seed" not in str(error.value)


def test_padding_is_finite_whatever_it_holds() -> None:
    logits = torch.zeros(2, 3, 4)
    logits[1, 1] = torch.nan
    logits[1, 2] = -torch.inf
    for sampling in [
        Sampling(),
        Sampling(temperature=0),
        Sampling(top_p=0.5),
        Sampling(processors=[hf.EtaLogitsWarper(0.1)]),
    ]:
        rows = [make_row(sampling, [1])] * 2
        assert bool(probabilities(logits, rows, [[1, 2], []]).isfinite().all())
        with pytest.raises(BadLogits, match="draft position 1"):
            probabilities(logits, rows, [[1, 2], [3]])


def test_padding_is_a_fault_where_its_logits_are_no_numbers_alone() -> None:
    """The cells of such a column must be zeroed; what controls forbid there is nobody's fault."""
    logits, faults = torch.zeros(1, 3, 4), dict[Row, dict[int, ShoalError]]()
    logits[0, 1] = torch.nan
    logits[0, 2, 1:] = -torch.inf
    row = make_row(Sampling(bad_words=[(0,)]), [1])
    distributions.probabilities(logits, Positions([row], [[]]), faults)
    assert {column: type(error) for column, error in faults[row].items()} == {1: BadLogits}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1.0])
def test_bad_logits_are_the_models_fault(bad: float, temperature: float) -> None:
    with pytest.raises(BadLogits):
        one(Sampling(temperature=temperature, bad_words=[(0,)]), torch.tensor([0.0, bad, 1.0]))


@pytest.mark.parametrize("bias", [1e39, -1e39, 1e308])
@pytest.mark.parametrize("temperature", [1.0, 0.01])
def test_a_bias_beyond_the_dtype_is_a_large_one(bias: float, temperature: float) -> None:
    """It allows or forbids its token, and says nothing else."""
    found = one(Sampling(logit_bias={2: bias}, temperature=temperature), torch.randn(5, dtype=torch.float32))
    assert found.isfinite().all()
    assert float(found.flatten()[2]) == (1.0 if bias > 0 else 0.0)


@pytest.mark.parametrize("bias", [1e39, 1e308, 1e5])
def test_tokens_of_equal_huge_biases_keep_their_ratio(bias: float) -> None:
    """The bias names the tokens that are left; which of them comes is the model's to say."""
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, 9.0])
    found = one(Sampling(logit_bias={0: bias, 1: bias, 2: bias}), logits)
    torch.testing.assert_close(found.flatten()[:3].float(), logits[:3].softmax(-1), rtol=2e-3, atol=0)
    assert float(found.flatten()[3:].sum()) == 0


HUGE = [
    {"presence_penalty": -1e39}, {"frequency_penalty": -1e308}, {"presence_penalty": 1e300, "frequency_penalty": -1e301},
    {"presence_penalty": 1e39}, {"repetition_penalty": 1e-39}, {"repetition_penalty": 5e-324}, {"repetition_penalty": 1e39},
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("penalties", HUGE, ids=str)
def test_penalties_beyond_the_dtype_are_large_ones(penalties: dict[str, float], temperature: float) -> None:
    row = make_row(Sampling(temperature=temperature, **penalties), [1, 2, 2], prompt=1, eos=[8])
    found = probabilities(torch.tensor([[[-3.0, 1.0, 2.0, -1.0, 0.5]]]), [row], [[]]).flatten()
    assert float(found.sum()) == pytest.approx(1)
    favoured = min(penalties.values()) < 0 or penalties.get("repetition_penalty", 9) < 1
    assert float(found[2]) == pytest.approx(1.0 if favoured else 0.0, abs=0.3)


@pytest.mark.parametrize("sampling", [Sampling(logit_bias={9: 1.0}), Sampling(bad_words=[(1, 9)])])
def test_ids_outside_the_vocabulary_are_refused(sampling: Sampling) -> None:
    with pytest.raises(RequestError, match=r"token id 9, expected ids in \[0, 5\)"):
        one(sampling, torch.zeros(5))


def test_history_ids_beyond_the_output_layer_are_passed_over() -> None:
    sampling = Sampling(repetition_penalty=2.0, frequency_penalty=1.0, no_repeat_ngram=2, min_new_tokens=9)
    row = make_row(sampling, [1, 7, 1, 7, 9], prompt=1, eos=[8])
    got = probabilities(torch.ones(1, 2, 5), [row], [[6]])
    assert bool((got[..., 1] < got[..., 2]).all())
    assert torch.equal(got[..., 2], got[..., 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_p=0.9), Sampling(logit_bias={3: 1.0})]
)
def test_logits_of_16_bits_give_probabilities_of_32(dtype: torch.dtype, sampling: Sampling) -> None:
    """In 16 bits they would not sum to 1, and a draft would be judged by another q than it was drawn from."""
    logits = random_logits(0, 4, 3, 2048).to(dtype)
    rows = [make_row(sampling, [0]) for _ in range(4)]
    ours = [probabilities(logits, rows, [(1, 2)] * 4)]
    if not sampling.logit_bias:
        ours.append(pure_probabilities(logits[:, 0], torch.full((4,), sampling.temperature), sampling, False, 1024)[0])
    for probs in ours:
        assert probs.dtype == torch.float32
        torch.testing.assert_close(probs.double().sum(-1), torch.ones(probs.shape[:-1]).double(), rtol=0, atol=1e-5)
