"""Tri-gram tables: counts, scopes, what they forget, playouts. Their exactness is tested in test_text_drafters.py.

Tests of: drafting.text, drafting.ngram.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from drafts import group, heard, proposed, row
from shoal.drafting.ngram import BACKED_OFF, UNSEEN, TrigramDrafter, explored, likeliest
from shoal.drafting.ngram import Trigrams as Table
from shoal.drafting.text import probable
from shoal.types.requests import Request


def test_two_tokens_of_context_and_one_where_they_are_new() -> None:
    read = row(1, 2, 3, 9, 2, 4, 1, 2, prompt=8)
    assert proposed(TrigramDrafter("row", nodes=0), read, length=1) == [[3]]
    often = row(1, 2, 3, 9, 2, 4, 9, 2, 4, 1, 2, prompt=11)  # 2 was followed by 4 twice, but not behind 1
    assert proposed(TrigramDrafter("row", nodes=0), often, length=1) == [[3]]
    read.tokens += [3, 7, 2]  # 7 2 is new, and 2 was followed by 3 twice and by 4 once
    drafter = TrigramDrafter("row", nodes=0)
    assert proposed(drafter, read, length=1) == [[3]]
    assert drafter.guess(read, 1).confidence == pytest.approx([BACKED_OFF * 2 / (3 + UNSEEN)])


def test_what_the_target_says_is_counted_for_the_pair_before_it() -> None:
    """Of the root, and of a node whose parent is the root; twice what was said once."""
    rows = group(Request((5, 1), 1), [])
    drafter, logits = TrigramDrafter(k=3, nodes=0), torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    heard(drafter, rows, [[4, 2]], logits)
    table = drafter._of(rows[0])
    assert isinstance(table, Table)
    probs = logits[0].softmax(-1)
    for column, context in enumerate(((5, 1), (1, 4), (4, 2))):
        top = probs[column].topk(3)
        assert table.table[context] == pytest.approx(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
    heard(drafter, rows, [[4, 2]], logits)
    assert sum(table.table[5, 1].values()) == pytest.approx(2 * float(probs[0].topk(3).values.sum()))


def test_memory_is_bounded_and_the_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def most() -> int:
        drafter, largest = TrigramDrafter("engine", k=2, nodes=0, limit=100), 0
        read = row(*range(1, 5))
        for token in range(5, 600):
            read.tokens += [token, token % 7]
            proposed(drafter, read)
            largest = max(largest, drafter.table_bytes)
        read.tokens.append(599)
        assert proposed(drafter, read, length=1) == [[599 % 7]]
        assert 0 < drafter.table_bytes <= drafter.keeps.always
        return largest

    bound = most()
    assert bound <= 100 * (600 + 4 * 104)
    monkeypatch.setattr("shoal.drafting.ngram.Trigrams._add", unbounded)
    with pytest.raises(AssertionError):  # a sabotage
        most()


def unbounded(self: Table, context: tuple[int, ...], tokens: list[int], counts: list[float]) -> None:
    for part in {context, context[-1:]}:
        for token in tokens:
            self.table.setdefault(part, {})[token] = 1.0


def test_playouts_find_the_probable_paths_and_are_the_same_each_time() -> None:
    table = {(1, 2): {3: 6.0, 4: 3.0, 5: 1.0}, (2, 3): {6: 8.0}, (2, 4): {7: 4.0, 8: 4.0}, (3, 6): {1: 2.0}}
    following = partial(likeliest, table)
    for nodes in (1, 3, 6):
        one, other = (explored((1, 2), following, 3, nodes, 200) for _ in range(2))
        assert one == other
        assert len(one.tokens) == min(nodes, 7)
        assert one.tokens[0] == probable((1, 2), following, 3, nodes).tokens[0] == 3
        assert all(parent < node for node, parent in enumerate(one.parents or ()))
        assert all(0 < sure <= 1 for sure in one.confidence)
    assert {3, 4} <= set(
        explored((1, 2), following, 3, 4, 200).tokens
    )  # explored, though 3 and what follows it are likelier
    assert len(explored((1, 2), following, 1, 8, 50).confidence) == 1
    assert not explored((9, 9), following, 3, 8, 50).tokens
