"""Drafters with another tokenizer: which tokens are shared, what the drafter reads; the tokens are those of plain decoding.

Tests of: models.vocabulary, drafting.contexts, drafting.model, models.spelling, drafting.other_vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import shoal
from enumeration import chain_rule, committed_distribution
from laws import ALPHA, EXACT
from shoal.cli.check_case import CheckCase
from shoal.cli.check_pair import vocabulary
from shoal.cli.check_prompts import PromptSet
from shoal.config import Limits, Sampling
from shoal.drafting import contexts as contexts_module
from shoal.drafting.other_vocabulary import SLEM, SLRS, TLI, OtherVocabularyDrafter
from shoal.engine.engine import Engine
from shoal.errors import PairMismatch
from shoal.lookahead.controller import Fixed
from shoal.models.runner import Runner
from shoal.models.spelling import Spelling
from shoal.models.vocabulary import SharedIds, proposable, vocabularies
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import save_pair, tiny_model, tiny_tokenizer
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import hashed, runner, says, scripted
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree
from vocabularies import (
    OTHERS,
    STORY,
    TEXTS,
    TOKENIZERS,
    VOCAB,
    P,
    Q,
    both,
    byte_level,
    common_start,
    counted,
    drafter_of,
    finished,
    letters,
    prompts,
    sentence_piece,
    spelling,
    watched,
)

# ── two tokenizers ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_spell_their_texts(name: str) -> None:
    for text in TEXTS:
        for first in (True, False):
            ids = spelling(name).ids(text.encode(), first=first)
            assert spelling(name).spelled(ids) in ([text.encode()] if not first else [text.encode(), b" " + text.encode()])
        assert spelling(name).ids(text.encode(), first=True) == TOKENIZERS[name]().encode(text, add_special_tokens=False)
        assert spelling(name).text(spelling(name).ids(text.encode(), first=True)) == text.encode()


@given(st.binary(max_size=12) | st.text(max_size=8).map(str.encode))
def test_any_bytes_are_spelled(data: bytes) -> None:
    """Cut characters, and bytes that are none, too."""
    for name in TOKENIZERS:
        assert spelling(name).spelled(spelling(name).ids(data)) == data


def test_the_shared_tokens_are_those_that_write_the_same() -> None:
    found = both("byte-level", "SentencePiece")
    shared = found.shared
    assert shared is not None
    assert list(shared.target) == sorted(set(shared.target))
    assert len(set(shared.draft)) == len(shared.draft)
    target, draft = TOKENIZERS["byte-level"](), TOKENIZERS["SentencePiece"]()
    pairs = {
        target.convert_ids_to_tokens(i): draft.convert_ids_to_tokens(j)
        for i, j in zip(shared.target, shared.draft, strict=True)
    }
    assert pairs["Ġthe"] == "▁the"
    assert pairs["Ċ"] == "<0x0A>"
    assert pairs["<|user|>"] == "<|user|>"
    assert pairs["<|end|>"] == "</s>"
    assert "Ã" in pairs  # a byte that is no character
    for i, j in zip(shared.target, shared.draft, strict=True):
        assert found.target.pieces.get(i) == found.draft.pieces.get(j)
    for i, piece in found.target.pieces.items():
        assert (i in shared.target) == (piece in set(found.draft.pieces.values()))
    assert list(shared.draft) != sorted(shared.draft)  # the order of ids differs, or the tests below would notice nothing


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda made: setattr(made, "normalizer", normalizers.Lowercase()), id="lower case"),
        pytest.param(lambda made: setattr(made, "decoder", decoders.WordPiece()), id="another alphabet"),
    ],
)
def test_a_tokenizer_that_changes_texts_is_refused(change: Callable[[Tokenizer], None]) -> None:
    made = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    change(made)
    with pytest.raises(PairMismatch, match="the tokenizer of drafter cannot be compared with another one: it changes texts"):
        Spelling.of(PreTrainedTokenizerFast(tokenizer_object=made), "drafter")


# ── engines ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def llamas() -> tuple[Runner, Runner]:
    """A target of byte-level BPE and a drafter of SentencePiece's pieces."""
    target = tiny_model("llama", vocab_size=len(byte_level()), layers=1)
    draft = tiny_model("llama", vocab_size=len(sentence_piece()), seed=1, layers=1)
    return runner(target), runner(draft)


def test_greedy_ids_are_those_of_plain_decoding_for_many_prompts(llamas: tuple[Runner, Runner]) -> None:
    """200 prompts in one run of 33 rows at a time: Unicode, cut characters, runs of white space, special tokens."""
    target, draft = llamas
    limits, sampling = Limits(max_new_tokens=8), Sampling(temperature=0.0)
    asked = [Request(ids, 1, sampling, limits) for ids in prompts("byte-level", 200)]
    plain = finished(Engine(target, None, Fixed(0), max_batch=33), asked)
    drafter = drafter_of(draft, target.vocab_size, both("byte-level", "SentencePiece"))
    engine = Engine(target, drafter, Fixed(3), max_batch=33)
    assert finished(engine, asked) == plain
    assert engine.stats.drafted > 1000
    assert engine.stats.accepted > 0
    assert not drafter.contexts.rows


@pytest.mark.parametrize(("batch", "temperature"), [(1, 0.7), (3, 0.0), (9, 0.7)])
def test_seeds_mean_the_same_tokens_beside_rows_that_join_and_leave(
    llamas: tuple[Runner, Runner], batch: int, temperature: float
) -> None:
    """The coupled rule; groups of two rows that share a prompt, and a cancellation."""
    target, draft = llamas
    sampling = Sampling(temperature=temperature, seed=5)
    asked = [Request(ids, 2, sampling, Limits(max_new_tokens=8 + i)) for i, ids in enumerate(prompts("byte-level", 6))]

    def run(drafter: OtherVocabularyDrafter | None) -> tuple[list[list[int]], Engine]:
        engine = Engine(target, drafter, Fixed(3 if drafter else 0), max_batch=batch, rule=Coupled())
        rows = [row for request in asked[:4] for row in engine.submit(request)]
        for _ in range(3):
            engine.step()
        engine.cancel(rows[1:2])
        rows += [row for request in asked[4:] for row in engine.submit(request)]
        while engine.step():
            pass
        return [row.tokens for row in rows[:1] + rows[2:]], engine

    plain, _ = run(None)
    drafter = drafter_of(draft, target.vocab_size, both("byte-level", "SentencePiece"))
    found, engine = run(drafter)
    assert found == plain
    assert engine.stats.drafted > 100
    assert {method for method, tally in drafter.choice.methods.items() if tally.rows} == {TLI, SLEM}


def test_what_every_drafter_must_keep_to() -> None:
    found = letters(VOCAB, VOCAB)
    draft = scripted(hashed(len(VOCAB)), len(VOCAB))
    for methods in ((TLI,), (SLEM,)):
        assert check_drafter(lambda methods=methods: drafter_of(draft, len(VOCAB), found, *methods), len(VOCAB)) > 0  # type: ignore[misc]


# ── what the drafter reads ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("draft", ["SentencePiece", "bytes"])
def test_a_drafter_that_knows_the_text_is_accepted(draft: str) -> None:
    """It says what follows only after the tokens into which its own tokenizer splits the text."""
    ours, theirs = TOKENIZERS["byte-level"](), TOKENIZERS[draft]()
    ids, own = ours.encode(STORY), theirs.encode(STORY)
    target = scripted(says([ids], len(ours)), len(ours))
    start = common_start(draft, ids, own)
    asked = Request(tuple(ids[:start]), 1, Sampling(temperature=0.0), Limits(max_new_tokens=len(ids) - start))
    for methods, least in (((SLEM,), 0.75), ((TLI,), 0.1), *([((SLRS,), 0.6)] if draft == "bytes" else [])):
        drafter = drafter_of(scripted(says([own], len(theirs)), len(theirs)), len(ours), both("byte-level", draft), *methods)
        engine = Engine(target, drafter, Fixed(4), max_batch=1)
        assert finished(engine, [asked]) == [ids]
        assert engine.stats.accepted > least * engine.stats.drafted, (draft, methods)


def letters_alone() -> Any:
    """A tokenizer of spaces, letters and a few signs, as of SentencePiece without bytes: no line feed, no quote."""
    pieces = ["<unk>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789().,:"]
    made = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Replace("▁", " ")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("method", [TLI, SLEM])
def test_a_drafter_that_cannot_write_every_text_drafts_what_it_can(method: str) -> None:
    """Of characters that it lacks it reads nothing, in prompts and in what is written, and drafts on behind them."""
    ours, theirs = byte_level(), letters_alone()
    read = Spelling.of(theirs, "drafter")
    assert read.spelled(theirs.encode('a\tb "é" c')) == b"ab  c"
    text = (
        "the drafter,\nGröße ≤ 10: the target reads\n\tthe text again: the drafter writes\n你好 the text again, the drafter"
    )
    ids, own = ours.encode(text), read.ids(text.encode())
    target = scripted(says([ids], len(ours)), len(ours))
    draft = scripted(says([own], len(theirs)), len(theirs))
    start = len(ours.encode(text[: text.index(" the target")]))
    assert ours.decode(ids[:start]) == text[: text.index(" the target")]
    found = vocabularies(spelling("byte-level"), read, len(ours), len(theirs))
    engine = Engine(target, drafter_of(draft, len(ours), found, method), Fixed(4), max_batch=1)
    asked = Request(tuple(ids[:start]), 1, Sampling(temperature=0.0), Limits(max_new_tokens=len(ids) - start))
    assert finished(engine, [asked]) == [ids]
    assert engine.stats.accepted > (0.3 if method == SLEM else 0.02) * engine.stats.drafted > 0


def test_special_tokens_of_a_chat_are_read_where_the_drafter_has_them() -> None:
    ours, theirs = byte_level(), sentence_piece()
    found = both("byte-level", "SentencePiece")
    ids = ours.encode("<|user|>the text<|end|>again")
    row = Row(Request(tuple(ids)), 0, 0, 0, list(ids), frozenset(), 100)
    reads = contexts_module.Contexts(found)
    tokens = reads.of(row).row.tokens
    assert theirs.convert_ids_to_tokens(tokens)[:2] == ["<s>", "<|user|>"]
    assert found.draft.special[tokens[-len(spelling("SentencePiece").ids(b"again")) - 1]] == "</s>"
    assert found.draft.spelled(tokens) == b"the textagain"
    row.tokens += [*ours.encode("<|user|>"), *ours.encode("naïve")]
    reads.follow(row)
    assert found.draft.spelled(tokens) == "the textagainnaïve".encode()
    unknown = both("bytes", "SentencePiece")  # <|pad|> is no token of the drafter
    other = Row(Request((258, *unknown.target.ids(b"ab"), 257)), 0, 0, 0, [0], frozenset(), 100)
    assert unknown.draft.spelled(contexts_module.Contexts(unknown).of(other).row.tokens) in (b"ab", b" ab")
    empty = Row(Request((258,)), 0, 0, 0, [0], frozenset(), 100)
    assert len(contexts_module.Contexts(unknown).of(empty).row.tokens) >= 1


@pytest.mark.parametrize("stale", [False, True])
def test_the_cache_holds_the_tokens_that_the_drafter_reads(
    llamas: tuple[Runner, Runner], monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    """After every round, with both methods in turn; a cache that keeps what was split anew is noticed."""
    texts = [byte_level().encode(text) for text in (*TEXTS, STORY)]
    target, draft = scripted(says(texts, len(byte_level())), len(byte_level())), llamas[1]
    respelled = 0
    ordinary = contexts_module.Contexts.follow

    def follow(self: contexts_module.Contexts, row: Row) -> int:
        nonlocal respelled
        before = list(self.of(row).row.tokens)
        same = ordinary(self, row)
        after = self.of(row).row.tokens
        respelled += after[: len(before)] != before
        return len(after) if stale else same

    monkeypatch.setattr(contexts_module.Contexts, "follow", follow)
    drafter = drafter_of(draft, target.vocab_size, both("byte-level", "SentencePiece"))
    engine = Engine(target, drafter, Fixed(3), max_batch=9, rule=Coupled())
    for ids in texts:
        engine.submit(Request(tuple(ids[:2]), 2, Sampling(temperature=1.0), Limits(max_new_tokens=len(ids) - 2)))
    off, seen = 0.0, 0
    while engine.step():
        for row, keys, again in watched(drafter):
            off, seen = max(off, float((keys - again).abs().max())), seen + 1
            new = spelling("byte-level").spelled(row.tokens[row.prompt_length :])
            assert spelling("SentencePiece").spelled(drafter.read_as(row).tokens).endswith(new)
    assert seen > 20
    assert respelled > 0
    assert (off > 1e-2) if stale else (off < 1e-5)


def test_a_row_that_outgrows_the_drafters_room_is_decoded_plainly() -> None:
    """A target's token of many bytes is many tokens of a drafter that has bytes alone."""
    ours, theirs = byte_level(), tiny_tokenizer()
    (run,) = ours.encode("        ", add_special_tokens=False)
    target = scripted(says([[run] * 60], len(ours)), len(ours))
    found = both("byte-level", "bytes")
    drafter = drafter_of(scripted(hashed(len(theirs)), len(theirs), context=200), len(ours), found)
    engine = Engine(target, drafter, Fixed(2), max_batch=2)
    asked = [Request((run,) * n, 1, Sampling(temperature=0.0), Limits(max_new_tokens=40)) for n in (1, 5, 19)]
    assert finished(engine, asked) == [[run] * (n + 40) for n in (1, 5, 19)]
    assert engine.stats.drafted > 0


# ── laws ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def restricted(q: Tensor) -> Tensor:
    """The drafter's table over the target's ids, renormalised over those that it has; a context it lacks is read as letters."""
    shared = letters(VOCAB, OTHERS).shared
    assert shared is not None
    theirs = list(shared.draft)
    found = torch.zeros(len(VOCAB), len(VOCAB), dtype=torch.float64)
    for row in range(len(VOCAB)):
        own = theirs[shared.target.index(row)] if row in shared.target else OTHERS.index(VOCAB[row][-1])
        found[row, list(shared.target)] = q[own, theirs] / q[own, theirs].sum()
    return found


def test_the_rule_over_the_intersection_has_the_law_of_the_target() -> None:
    """By enumeration; and it accepts more than the rule that draws from all of q and rejects what the target lacks."""
    law = committed_distribution(P, restricted(Q), 3, (2, 1, 3))
    torch.testing.assert_close(law, chain_rule(P, 3), rtol=0, atol=EXACT)
    q = restricted(Q)
    union = q * 0.6  # the mass of what the target lacks is rejected
    assert float(torch.minimum(P, q).sum()) > float(torch.minimum(P, union).sum())


def test_logits_of_the_target_are_those_of_the_same_words() -> None:
    """By hand: a map whose columns are in another order than its ids is noticed."""
    shared = letters(VOCAB, OTHERS).shared
    assert shared is not None
    assert (shared.target, shared.draft) == ((0, 1, 2, 3), (4, 5, 2, 0))
    ids = SharedIds(shared, torch.device("cpu"))
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    assert ids.of_target(logits, len(VOCAB)).tolist() == [[4.0, 5.0, 2.0, 0.0, -torch.inf]]
    assert ids.of_draft(torch.tensor([0, 1, 2, 3])).tolist() == [4, 5, 2, 0]


@pytest.mark.slow(but=["TLI", "TLI, coupled"])
@pytest.mark.parametrize(
    ("rule", "methods"),
    [(Rejection(), (TLI,)), (Coupled(), (TLI,)), (Rejection(), (SLEM,)), (Rejection(), ())],
    ids=["TLI", "TLI, coupled", "SLEM", "both"],
)
def test_samples_have_the_law_of_the_target(rule: Rule, methods: tuple[str, ...]) -> None:
    value, engine = counted(rule, *methods)
    assert value > ALPHA
    assert engine.stats.drafted > 900
    assert engine.stats.accepted > 250


def without_renormalising(tree: DraftTree) -> DraftTree:
    """q as it is over the whole vocabulary of the drafter."""
    assert tree.q
    return DraftTree(tree.tokens, tree.lengths, [values * 0.6 for values in tree.q], tree.drafts, tree.parents, tree.steps)


def in_another_order(tree: DraftTree) -> DraftTree:
    """q by the drafter's order of tokens: the defect of Transformers' translator."""
    assert tree.q
    q = [values[:, [3, 2, 0, 1, 4]] for values in tree.q]
    return DraftTree(tree.tokens, tree.lengths, q, tree.drafts, tree.parents, tree.steps)


@pytest.mark.parametrize("change", [without_renormalising, in_another_order])
def test_a_wrong_q_is_noticed(change: Callable[[DraftTree], DraftTree]) -> None:
    value, _ = counted(Rejection(), TLI, change=change)
    assert value < ALPHA


# ── pairs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pair_whose_tokenizers_differ_is_loaded(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path)
    tiny_model("llama", vocab_size=len(sentence_piece()), layers=1, eos_token_id=2).save_pretrained(draft)
    for old in draft.glob("token*"):
        old.unlink()
    sentence_piece().save_pretrained(draft)
    with shoal.load(target, draft) as pair, shoal.load(target) as alone:
        assert pair.vocabularies is not None
        asked: dict[str, Any] = {"seed": 1, "max_new_tokens": 12, "n": 3}
        found, plain = pair.generate(TEXTS, lookahead=3, **asked), alone.generate(TEXTS, **asked)
        assert [[s.token_ids for s in one.samples] for one in found] == [[s.token_ids for s in one.samples] for one in plain]
        assert found.stats.drafted > 100
        again = pair.generate(TEXTS, **asked, rule="rejection", lookahead="auto", stop=["e"])
        assert again.stats.row_rounds > 0
        summed = shoal.load(target, f"ngram+{draft}")
        assert summed.generate(TEXTS, lookahead=3, **asked)[0].samples[0].token_ids == plain[0].samples[0].token_ids


@pytest.mark.parametrize("method", [TLI, SLEM])
def test_a_trimmed_head_of_another_vocabulary(llamas: tuple[Runner, Runner], method: str) -> None:
    """Its columns are no ids: a drafter that knows the text is accepted as far as it may say it."""
    ours, theirs = byte_level(), sentence_piece()
    ids, own = ours.encode(STORY), theirs.encode(STORY)
    kept = tuple(sorted(set(own) - set(own[20::5]) - {own[0]}))
    following = says([own], len(theirs))
    draft = scripted(lambda history: following(history)[list(kept)], len(kept))
    draft.known_ids = len(theirs)
    found = proposable(both("byte-level", "SentencePiece"), kept, len(ours)).vocabularies
    assert found is not None
    drafter = drafter_of(draft, len(ours), found, method)
    engine = Engine(scripted(says([ids], len(ours)), len(ours)), drafter, Fixed(3), max_batch=1)
    start = common_start("SentencePiece", ids, own)
    asked = Request(tuple(ids[:start]), 1, Sampling(temperature=0.0), Limits(max_new_tokens=len(ids) - start))
    assert finished(engine, [asked]) == [ids]
    assert engine.stats.accepted > 0.1 * engine.stats.drafted > 0


def test_check_says_what_is_lost_and_which_method_drafts(llamas: tuple[Runner, Runner]) -> None:
    target, draft = llamas
    pair = shoal.Shoal(
        target, draft, byte_level(), proposable=proposable(both("byte-level", "SentencePiece"), None, target.vocab_size)
    )
    case = CheckCase(pair, [PromptSet.of("", "here", [TEXTS[0]], byte_level())], 2, 24, 3, 1, lambda _: None)
    (said,) = vocabulary(case)
    rows = [row for by in case.acceptance for one in by.values() for out in one for row in out.samples]
    shared = set(both("byte-level", "SentencePiece").shared.target)  # type: ignore[union-attr]
    tokens = [token for row in rows for token in row.token_ids]
    assert said.data["share"] == sum(token in shared for token in tokens) / len(tokens)
    assert 0 < said.data["share"] < 1
    assert set(said.data["rates"]) == {TLI, SLEM}
    assert f"drafts by {said.data['method']}" in said.figure
