"""Token alignment: texts continue the prompt's characters, and with their weights they are samples of p given these.

Tests of: constraints.alignment, constraints.masks.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from enumeration import chi_square
from shoal.api import Shoal
from shoal.config import Grammar, Limits, Sampling
from shoal.constraints import masks
from shoal.constraints.alignment import Alignment, AlignmentVocabulary, align_request, vocabulary_of
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import Drafter
from shoal.drafting.shapes import RsdS, Shape
from shoal.drafting.tree_model import TreeDrafter
from shoal.engine import logprobs
from shoal.engine.engine import Engine
from shoal.errors import RequestError
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.sampling.distributions import probabilities
from shoal.testing.drafters import RandomTrees
from shoal.testing.scripted import hashed, mixed, scripted, table_model
from shoal.types.requests import Request, Row
from shoal.types.trees import Positions
from vocabularies import sentence_piece

SPELLED = (b"a", b"b", b"ab", b"ba", b"abb", b"c")
VOCABULARY = AlignmentVocabulary(SPELLED)
REMAINDER = b"abab"
START = 5


def table(seed: int) -> Tensor:
    weights = torch.rand(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.05
    return weights / weights.sum(-1, keepdim=True)


def agrees(text: bytes, remainder: bytes) -> bool:
    return bool(text) and (text.startswith(remainder) or remainder.startswith(text))


def healings() -> list[tuple[int, ...]]:
    """Every way to write the remainder: the tokens up to the one that completes it."""
    found: list[tuple[int, ...]] = []
    open_: list[tuple[int, ...]] = [()]
    while open_:
        path = open_.pop()
        text = b"".join(SPELLED[token] for token in path)
        if text.startswith(REMAINDER):
            found.append(path)
        else:
            open_ += [(*path, token) for token in range(6) if agrees(SPELLED[token], REMAINDER[len(text) :])]
    return found


def local_law(p: Tensor, path: Sequence[int]) -> tuple[float, float]:
    """Of a way to write the remainder: its probability under the local mask, and its weight prod Z_t; by definition."""
    mass, weight, before, left = 1.0, 1.0, START, REMAINDER
    for token in path:
        z = sum(float(p[before, v]) for v in range(6) if agrees(SPELLED[v], left))
        mass, weight = mass * float(p[before, token]) / z, weight * z
        before, left = token, left[len(SPELLED[token]) :]
    return mass, weight


def exact_law(p: Tensor) -> dict[tuple[int, ...], float]:
    """p given the characters: the probabilities of all ways, normalised."""
    joint = {path: math.prod(float(p[b, t]) for b, t in zip((START, *path), path, strict=False)) for path in healings()}
    return {path: mass / sum(joint.values()) for path, mass in joint.items()}


def row_of(tokens: Sequence[int] = ()) -> Row:
    row = Row(Request((START,)), 0, 0, 0, [START], frozenset(), 99)
    masks.begin(row, [Alignment(REMAINDER, VOCABULARY)])
    for token in tokens:
        row.tokens.append(token)
        masks.advance(row, token)
    return row


def test_weights_make_the_local_law_the_conditional_one() -> None:
    """By enumeration, with the masked p that the engine draws from."""
    p, paths = table(0), healings()
    local, weights = [], []
    for path in paths:
        mass, weight = 1.0, 1.0
        for depth, token in enumerate(path):
            before = (START, *path)[depth]
            masked = probabilities(p[before].log()[None, None], Positions([row_of(path[:depth])], [()]))[0, 0]
            weight *= float(p[before, token] / masked[token])
            mass *= float(masked[token])
        assert (mass, weight) == pytest.approx(local_law(p, path), rel=1e-12)
        local.append(mass)
        weights.append(weight)
    exact = exact_law(p)
    total = sum(m * w for m, w in zip(local, weights, strict=True))
    assert sum(local) == pytest.approx(1)
    assert len(paths) >= 8
    error = max(abs(m * w / total - exact[path]) for m, w, path in zip(local, weights, paths, strict=True))
    distance = sum(abs(m - exact[path]) for m, path in zip(local, paths, strict=True)) / 2
    print(f"TV of the local law {distance:.3f}, greatest error of the weighted one {error:.1e}")
    assert error < 1e-15 * len(paths)
    assert distance > 0.02  # without its weights it is another law


def counted(rule: Any = None, n: int = 1500, drafter: Drafter | None = None) -> tuple[Engine, list[Row]]:
    drafter = drafter or ModelDrafter(table_model(table(1)).fork(), 6)
    target = table_model(table(0), dtype=torch.float64)  # weights are compared to nine digits
    engine = Engine(target, drafter, Fixed(3), max_batch=500, rule=rule or Rejection())
    request = Request(
        (START,), n, Sampling(seed=1, temperature=1.0), Limits(max_new_tokens=6),
        constraints=(Alignment(REMAINDER, VOCABULARY),), weighted=True,
    )  # fmt: skip
    rows = engine.submit(request)
    while engine.step():
        pass
    return engine, rows


def fit(rows: Sequence[Row]) -> float:
    """p-value of the ways that the rows write the remainder, and of the token that follows, under the local law."""
    p, cells = table(0), {}
    for path in healings():
        for after in range(6):
            cells[(*path, after)] = local_law(p, path)[0] * float(p[path[-1], after])
    counts = dict.fromkeys(cells, 0)
    for row in rows:
        new = tuple(row.tokens[1:])
        own = next((new[:i] for i in range(1, len(new) + 1) if new[:i] in cells), None)
        if own is None:
            return 0.0
        counts[own] += 1
    return chi_square(torch.tensor(list(counts.values())), torch.tensor(list(cells.values()), dtype=torch.float64))


def wrong_weights(rows: Sequence[Row]) -> int:
    """Rows whose weight is not the product of Z_t by definition."""
    p, wrong = table(0), 0
    for row in rows:
        path = next(path for path in healings() if tuple(row.tokens[1 : 1 + len(path)]) == path)
        wrong += abs(row.log_weight - math.log(local_law(p, path)[1])) > 1e-9
    return wrong


def drawn_trees(shape: Shape) -> Drafter:
    """Trees of a table model."""
    return TreeDrafter(table_model(table(1)).fork(), 6, shape)


@pytest.mark.slow(but=["rejection"])
@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        pytest.param(Rejection(), None, id="rejection"),
        pytest.param(Coupled(), None, id="coupled", marks=pytest.mark.slow),
        pytest.param(Rejection(), lambda: drawn_trees(RsdS(2, 6)), id="rsd-s", marks=pytest.mark.slow),
        pytest.param(Coupled(), lambda: RandomTrees(6), id="random trees"),
    ],
)
def test_the_law_and_the_weights_through_the_engine(rule: Any, drafter: Callable[[], Drafter] | None) -> None:
    engine, rows = counted(rule, drafter=None if drafter is None else drafter(), n=1500 if drafter is None else 300)
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert fit(rows) > 1e-6
    assert wrong_weights(rows) == 0
    assert not any(row.constraints for row in rows)  # let go of once the text is written


def test_a_mask_one_token_late_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token is free, and the second one is asked for the whole remainder."""

    advance = Alignment.advance

    def late(self: Alignment, state: bytes, token: int) -> bytes:
        return state if state == REMAINDER and SPELLED[token] == b"a" else advance(self, state, token)

    monkeypatch.setattr(Alignment, "advance", late)
    assert fit(counted(n=300)[1]) < 1e-6


def test_a_state_that_is_not_forked_along_the_draft_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unforked(positions: Positions, b: int, constraint: Any, state: Any) -> dict[int, Any]:
        return dict.fromkeys(positions.columns(b), state)

    monkeypatch.setattr(masks, "_states", unforked)
    assert fit(counted(n=300)[1]) < 1e-6


def test_healing_shared_by_rows_is_caught() -> None:
    """Rows whose first tokens are those of the first row, as where a prompt is healed before it is shared."""
    rows = counted(n=300)[1]
    path = next(path for path in healings() if tuple(rows[0].tokens[1 : 1 + len(path)]) == path)
    for row in rows:
        row.tokens[1 : 1 + len(path)] = path
    assert fit(rows) < 1e-6


def test_dropped_weights_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_weights", lambda *_: ([], []))
    assert wrong_weights(counted(n=50)[1]) == 50


# ── vocabularies ────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=40), st.binary(min_size=1, max_size=5))
def test_masks_are_those_of_the_definition(spelled: list[bytes], remainder: bytes) -> None:
    spelled += [b"\xff", b"\xff\xff", remainder[:1]]
    found = AlignmentVocabulary(spelled).allowed(remainder)
    assert found.tolist() == [agrees(text, remainder) for text in spelled]


def byte_pairs(*merges: str) -> Any:
    """A tokenizer of bytes and of these words, each built from its left."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, pairs = {symbol: i for i, symbol in enumerate(symbols)}, []
    for word in merges:
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)[0][0]
        for i in range(1, len(spelled)):
            if spelled[: i + 1] not in vocabulary:
                vocabulary[spelled[: i + 1]] = len(vocabulary)
                pairs.append((spelled[:i], spelled[i]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TOKENIZER = byte_pairs("return", " value", "    ", "\n    ", "self.", "print(", "é", "日本", " == ", "def ")
SIZE = len(TOKENIZER)
TARGET = hashed(SIZE, 0, spread=3.0)
DRAFTER = mixed(TARGET, hashed(SIZE, 1, spread=3.0), every=3)


def made(drafted: bool = True) -> Shoal:
    shoal = Shoal(scripted(TARGET, SIZE), scripted(DRAFTER, SIZE) if drafted else None, TOKENIZER, max_batch=16)
    shoal.eos = (TOKENIZER.eos_token_id,)
    return shoal


def raw_bytes(ids: Sequence[int]) -> bytes:
    return b"".join(vocabulary_of(TOKENIZER).spelled[token] for token in ids)


SOURCE = inspect.getsource(ast.walk) + "# é日本 == naïve\n"


PIECES = sentence_piece()
"""As Llama 2's: a space before each text, a token before it, line feeds as bytes."""
BYTES = torch.tensor([float((text or b" ")[0] > 127 and len(text or b"") == 1) for text in vocabulary_of(PIECES).spelled])


def pieces_target(ids: tuple[int, ...]) -> Tensor:
    """Parts of characters only where they are asked for: tokenizers differ in how they show broken ones."""
    return hashed(len(PIECES), 0, spread=3.0)(ids) - 30 * BYTES


@given(st.integers(1, len(SOURCE)))
@settings(max_examples=25)
def test_texts_of_sentence_piece_follow_the_prompt(end: int) -> None:
    """Its text is what all ids are decoded to, less the prompt; spaces at the beginning of a text are the tokenizer's own."""
    prompt = SOURCE[:end]
    shoal = Shoal(scripted(pieces_target, len(PIECES)), None, PIECES, max_batch=4)
    result = shoal.generate([prompt], n=2, align=True, seed=end, max_new_tokens=3, eos=())[0]
    for sample in result.samples:
        written = b"".join(vocabulary_of(PIECES).spelled[token] for token in (*result.prompt_ids, *sample.token_ids))
        assert written.startswith(b" " + prompt.encode())
        assert sample.text == written[1 + len(prompt.encode()) :].decode()


@given(st.integers(1, len(SOURCE)))
@settings(max_examples=40)
def test_outputs_begin_with_the_bytes_of_the_prompt(end: int) -> None:
    """At any offset of a text, under drafts; the text is what follows the prompt."""
    prompt = SOURCE[:end]
    result = made().generate([prompt], n=2, align=True, seed=end, max_new_tokens=9, lookahead=3)[0]
    for sample in result.samples:
        written = raw_bytes((*result.prompt_ids, *(t for t in sample.token_ids if t != TOKENIZER.eos_token_id)))
        assert written.startswith(prompt.encode())
        assert sample.text == written[len(prompt.encode()) :].decode(errors="replace")


def test_prompts_cut_inside_a_character() -> None:
    """Ids whose last token is the first byte of a character: new tokens go on with it, and the text shows it whole."""
    ids = [*TOKENIZER.encode("print("), TOKENIZER.encode("ü")[0]]
    assert raw_bytes(ids) == b"print(\xc3"
    result = made().generate([ids], n=4, align=True, seed=3, max_new_tokens=4)[0]
    for sample in result.samples:
        written = raw_bytes((*result.prompt_ids, *sample.token_ids))
        assert written.startswith(b"print(\xc3")
        assert sample.text == written.decode(errors="replace")[len("print(") :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("lookahead", "trees"), [(1, False), (4, False), (4, True)])
def test_speculation_changes_no_id(temperature: float, lookahead: int, trees: bool) -> None:
    prompts = ["def f(self):\n    retu", "print(", "self.val", "x =", "日本é"]
    options: dict[str, Any] = dict(n=3, align=True, seed=7, temperature=temperature, max_new_tokens=6)
    plain = made(drafted=False).generate(prompts, **options)
    drafter = RandomTrees(SIZE, guess=lambda path: int(TARGET(tuple(path)).argmax())) if trees else None
    drafted = made(drafted=not trees).generate(prompts, drafter=drafter, lookahead=lookahead, **options)
    assert [[s.token_ids for s in o.samples] for o in drafted] == [[s.token_ids for s in o.samples] for o in plain]
    assert 0 < drafted.stats.accepted < drafted.stats.drafted
    if temperature:
        assert len({s.token_ids for s in drafted[0].samples}) == 3


# ── what counts as new ──────────────────────────────────────────────────────────────────────────────────────────────


def test_stop_strings_are_looked_for_in_new_text_alone() -> None:
    """The prompt ends with the stop string, and taking it back must not end the sample."""
    shoal = Shoal(scripted(hashed(SIZE, 5, spread=3.0), SIZE), None, TOKENIZER)
    stream = shoal.stream(["x = value"], align=True, stop=["value", "lue"], eos=(), seed=2, max_new_tokens=5)
    shown = "".join(part.text for part in stream)
    output = stream.result()[0]
    (sample,) = output.samples
    assert sample.finish_reason == "length"
    assert len(sample.token_ids) == 5 + len(removed("x = value"))
    written = raw_bytes((*output.prompt_ids, *sample.token_ids))
    assert shown == sample.text == written[len("x = value") :].decode(errors="replace")


def removed(prompt: str) -> tuple[int, ...]:
    return align_request(Request(tuple(TOKENIZER.encode(prompt))), TOKENIZER).removed


def test_logprobs_and_ids_include_the_tokens_that_heal() -> None:
    sample = made().generate(["def f():\n    retu"], align=True, seed=1, max_new_tokens=4)[0].samples[0]
    assert len(sample.logprobs) == len(sample.token_ids) == 4 + len(removed("def f():\n    retu"))
    assert sample.log_weight is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(align=True, grammar=Grammar("regex", "a+")), "does not go with a grammar"),
        (dict(exact=True), "needs align=True"),
        (dict(align=True, exact=True, top_p=0.9), "leave out top_k"),
        (dict(align=True, exact=True, temperature=0), "temperature=0"),
        (dict(align=True, exact=True, rule="typical"), "rule='typical'"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        made().generate(["ab"], **options)


def test_ranking_counts_the_weights() -> None:
    output = made().generate(["def f():\n    retu"], n=6, align=True, exact=True, seed=1, max_new_tokens=4)[0]
    for sample in output.samples:
        assert sample.log_weight is not None
        assert sample.log_weight < 0
        # At temperature 1 nothing but the mask stands between the two log-probabilities.
        assert sample.ranking_logprob == pytest.approx(sample.mean_logprob, rel=1e-6)
    assert [s.ranking_logprob for s in output.ranked] == sorted((s.ranking_logprob for s in output.samples), reverse=True)


def test_the_back_off_ends_at_special_tokens_and_leaves_one() -> None:
    end = TOKENIZER.eos_token_id
    a, b = TOKENIZER.encode("a"), TOKENIZER.encode("b")
    for ids, expected in (([*a], 0), ([*a, *b], 1), ([end, *a], 1), ([*a, end], 0), ([*a, *b, *a, *b, *a], 3)):
        assert len(align_request(Request(tuple(ids)), TOKENIZER).removed) == expected
    suffix = align_request(Request((*a, *b, *a, end, *b)), TOKENIZER, at=3)
    assert (suffix.prompt_ids, suffix.removed) == ((*a, end, *b), (*b, *a))
