"""SLRS: drafts of a model that writes bytes or characters, verified by the probability that it writes a token's bytes.

Tests of: drafting.contexts, models.spelling, drafting.string_rejection, drafting.other_vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from enumeration import chain_rule, committed_distribution
from laws import ALPHA, EXACT, table
from shoal.config import Limits, Sampling
from shoal.drafting import string_rejection
from shoal.drafting.other_vocabulary import SLEM, SLRS, TLI, MethodChoice
from shoal.drafting.protocol import DraftInputs
from shoal.engine.engine import Engine
from shoal.errors import PairMismatch
from shoal.lookahead.controller import Fixed
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import VOCABULARY, tiny_model
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import hashed, runner, says, scripted, table_model
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree
from vocabularies import (
    OTHERS,
    STORY,
    TOKENIZERS,
    VOCAB,
    P,
    both,
    byte_level,
    common_start,
    counted,
    drafter_of,
    finished,
    letters,
    prompts,
    watched,
)

LETTERS = ("c", "a", "d", "b")
"""Of the drafter; no token of the target has a "d"."""
SAYS = torch.tensor(
    [[0.2, 0.5, 0.1, 0.2], [0.15, 0.1, 0.1, 0.65], [0.3, 0.2, 0.2, 0.3], [0.1, 0.6, 0.1, 0.2]], dtype=torch.float64
)
"""What it writes after each: "ab" and "ba" are likely."""


def psi(says: Tensor, last: str) -> Tensor:
    """By enumeration of texts: with what probability each token of VOCAB is the longest that the drafter's text begins with."""
    found = torch.zeros(len(VOCAB), dtype=torch.float64)
    longest = max(map(len, VOCAB))
    for text in product(LETTERS, repeat=longest):
        chance, before = 1.0, last
        for letter in text:
            chance *= float(says[LETTERS.index(before), LETTERS.index(letter)])
            before = letter
        tokens = [word for word in VOCAB if "".join(text).startswith(word)]
        if tokens:
            found[VOCAB.index(max(tokens, key=len))] += chance
    return found / found.sum()


def q_table() -> Tensor:
    """psi after each token of the target, [vocab, vocab]."""
    return torch.stack([psi(SAYS, word[-1]) for word in VOCAB])


def proposed(drafter: Any, rows: int, length: int) -> tuple[DraftTree, list[Row]]:
    """What is proposed for rows of the prompt "a"."""
    made = [Row(Request((0,), rows), 0, i, i, [0], frozenset(), 1 << 10) for i in range(rows)]
    drafter.memory.reserve(rows, 200)
    inputs = DraftInputs(made, [length] * rows, torch.rand(rows, length + 1, 3, dtype=torch.float64), Rejection.draw)
    return drafter.propose(inputs), made


def test_psi_is_the_probability_of_the_longest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(string_rejection, "LIKELY", 0.0)
    drafter = drafter_of(table_model(SAYS, dtype=torch.float64), len(VOCAB), letters(VOCAB, LETTERS), SLRS)
    tree, _ = proposed(drafter, 5, 3)
    assert tree.q is not None
    known = q_table()
    for row, draft in enumerate(tree.drafts):
        for at, (before, values) in enumerate(zip([0, *draft], tree.q, strict=False)):
            torch.testing.assert_close(values[row], known[before], rtol=0, atol=1e-12, msg=f"{row}, {at}")
    assert len({tuple(draft) for draft in tree.drafts}) > 1


def test_the_rule_by_psi_has_the_law_of_the_target() -> None:
    """By enumeration; and it accepts more than TLI, by which such a drafter proposes its letters alone."""
    law = committed_distribution(P, q_table(), 3, (2, 1, 3))
    torch.testing.assert_close(law, chain_rule(P, 3), rtol=0, atol=EXACT)
    like, single = q_table(), q_table()  # a target that is like the drafter
    single[:, :2] += single[:, [2, 4]]  # "a" for "ab", "b" for "ba"
    single[:, [2, 4]] = 0.0
    assert float(torch.minimum(like, single).sum()) < 0.95 * len(VOCAB)


@pytest.mark.parametrize(
    ("rule", "likely"),
    [(Rejection(), 0.05), (Coupled(), 0.05), (Rejection(), 0.5)],
    ids=["rejection", "coupled", "less far"],
)
def test_samples_have_the_law_of_the_target(rule: Rule, likely: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(string_rejection, "LIKELY", likely)
    value, engine = counted(rule, SLRS, samples=300, says=SAYS, words=LETTERS)
    assert value > ALPHA
    assert engine.stats.drafted > 400
    assert engine.stats.accepted > 120  # of 300 rows


def of_beginnings(tree: DraftTree) -> DraftTree:
    """q as the probability that the text begins with a token's bytes, whatever follows: that of longer tokens counted twice."""
    assert tree.q
    q = [values.clone() for values in tree.q]
    for values in q:
        values[:, 0] += values[:, 2]
        values[:, 1] += values[:, 4]
    return DraftTree(tree.tokens, tree.lengths, q, tree.drafts, tree.parents, tree.steps)


def test_a_wrong_psi_is_noticed() -> None:
    value, _ = counted(Rejection(), SLRS, samples=300, says=SAYS, words=LETTERS, change=of_beginnings)
    assert value < ALPHA


def test_the_choice_knows_nothing_of_drafts_that_were_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes depend on what is drawn; the cost that methods are compared by does not."""
    monkeypatch.setattr(string_rejection, "LIKELY", 0.55)
    drafter = drafter_of(table_model(SAYS), len(VOCAB), letters(VOCAB, LETTERS), SLRS)
    seen: set[int] = set()
    costs: set[int] = set()
    for _ in range(12):
        before = drafter.runner.counts.passes
        _, rows = proposed(drafter, 1, 4)
        seen.add(drafter.runner.counts.passes - before)
        costs.add(drafter._passes)
        drafter.end(rows)
    assert len(seen) > 1 == len(costs)


def test_what_every_drafter_must_keep_to() -> None:
    found = letters(VOCAB, LETTERS)
    draft = scripted(hashed(len(LETTERS)), len(LETTERS))
    assert check_drafter(lambda: drafter_of(draft, len(VOCAB), found, SLRS), len(VOCAB)) > 0


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def models() -> tuple[Runner, Runner]:
    """A target of byte-level BPE and a drafter of bytes."""
    target = tiny_model("llama", vocab_size=len(byte_level()), layers=1)
    return runner(target), runner(tiny_model("llama", vocab_size=VOCABULARY, seed=1, layers=1))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_ids_are_those_of_plain_decoding_in_a_full_batch(models: tuple[Runner, Runner], temperature: float) -> None:
    """Cut characters, runs of white space; rows that join and leave; all methods in turn."""
    target, draft = models
    sampling = Sampling(temperature=temperature, seed=3)
    asked = [Request(ids, 2, sampling, Limits(max_new_tokens=4 + i % 5)) for i, ids in enumerate(prompts("byte-level", 12))]
    plain = finished(Engine(target, None, Fixed(0), max_batch=9, rule=Coupled()), asked)
    drafter = drafter_of(draft, target.vocab_size, both("byte-level", "bytes"))
    assert set(drafter.choice.methods) == {SLRS, SLEM}
    engine = Engine(target, drafter, Fixed(3), max_batch=9, rule=Coupled())
    assert finished(engine, asked) == plain
    assert engine.stats.drafted > 60
    assert all(tally.rows for tally in drafter.choice.methods.values())


@pytest.mark.parametrize("kept", [True, False], ids=["rolled back", "left"])
def test_the_cache_holds_what_was_committed(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that were looked at and not drafted leave nothing; if they do, it is noticed. Scripted models keep ids for keys."""
    ours, theirs = byte_level(), TOKENIZERS["bytes"]()
    ids, own = ours.encode(STORY), theirs.encode(STORY)
    if not kept:
        beyond = string_rejection._Round._beyond

        def left(self: Any, known: Sequence[Any], chosen: Sequence[Any]) -> Tensor:
            found = beyond(self, known, chosen)
            self._runner.cache.lengths[self._slots[0]] += 1
            self._ends[0] += 1
            return found

        monkeypatch.setattr(string_rejection._Round, "_beyond", left)
    drafter = drafter_of(scripted(says([own], len(theirs)), len(theirs)), len(ours), both("byte-level", "bytes"), SLRS)
    engine = Engine(scripted(says([ids], len(ours)), len(ours)), drafter, Fixed(3), max_batch=1)
    start = common_start("bytes", ids, own)
    engine.submit(Request(tuple(ids[:start]), 1, Sampling(temperature=0.0), Limits(max_new_tokens=20)))
    wrong, seen = 0, 0
    while engine.step():
        for _, keys, again in watched(drafter):
            wrong, seen = wrong + int((keys != again).any()), seen + 1
    assert seen > 3
    assert (wrong == 0) if kept else (wrong > 0)


def test_a_drafter_that_gives_nan_ends_its_drafts(models: tuple[Runner, Runner]) -> None:
    """Where its probabilities are none, rows go on as in plain decoding."""
    target, ordinary = models[0], hashed(VOCABULARY)

    def script(ids: tuple[int, ...]) -> Tensor:
        return ordinary(ids) * (float("nan") if len(ids) % 5 == 0 else 1.0)

    drafter = drafter_of(scripted(script, VOCABULARY), target.vocab_size, both("byte-level", "bytes"), SLRS)
    asked = [Request(ids, 1, Sampling(seed=1), Limits(max_new_tokens=8)) for ids in prompts("byte-level", 3)]
    engine = Engine(target, drafter, Fixed(3), max_batch=3, rule=Coupled())
    assert finished(engine, asked) == finished(Engine(target, None, Fixed(0), max_batch=3, rule=Coupled()), asked)
    assert engine.stats.drafted > 0


# ── which drafters ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_other_drafters_are_refused_by_name() -> None:
    """One of whose tokens another begins with: there are several ways to write a text."""
    found = letters(VOCAB, OTHERS)
    assert found.trie is None
    assert set(MethodChoice.of(found, 0.1).methods) == {TLI, SLEM}
    with pytest.raises(PairMismatch, match="scripted cannot draft by SLRS: it is for drafters whose tokens are bytes or"):
        drafter_of(table_model(table(len(OTHERS), 1)), len(VOCAB), found, SLRS)


def test_who_takes_no_trees_drafts_by_the_other_methods() -> None:
    assert set(MethodChoice.of(letters(VOCAB, LETTERS), 0.1, trees=False).methods) == {TLI, SLEM}
    assert set(MethodChoice.of(letters(VOCAB, LETTERS), 0.1).methods) == {SLRS, SLEM}


def test_the_trie_has_all_tokens_of_the_target() -> None:
    """Special ones that both have too; none of more than the most bytes."""
    found = both("byte-level", "bytes")
    trie = found.trie
    assert trie is not None
    for token, piece in found.target.pieces.items():
        assert found.draft.spelled(trie.sequences.get(token, ())) in (piece, b"")
        assert (token in trie.sequences) == (len(piece) <= string_rejection.MOST_DEPTH)
    assert found.target.end in trie.sequences
