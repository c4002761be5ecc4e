"""What drafters keep beside their keys and values: counted as it is, bounded by what the plan counts, and heeded by it.

Tests of: drafting.draft_slots, drafting.answers, drafting.corpus, drafting.recycling, drafting.target_keys,
drafting.eagle3.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_heads import CONFIG, WIDTH, random_heads
from eagle_heads import V as WORDS
from medusa_heads import guessing
from shoal.config import Limits, Sampling
from shoal.drafting.answers import AnswerFile, require_answers
from shoal.drafting.corpus import Corpus, IndexWriter, open_index
from shoal.drafting.draft_slots import DraftMemory, DraftSlots
from shoal.drafting.eagle3 import Eagle3Drafter
from shoal.drafting.medusa import MedusaDrafter
from shoal.drafting.model import ModelDrafter
from shoal.drafting.ngram import NGramDrafter, TrigramDrafter
from shoal.drafting.other_vocabulary import OwnMemory
from shoal.drafting.protocol import Drafter, Keeps
from shoal.drafting.recycling import RecyclingDrafter
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.sums import SumDrafter
from shoal.drafting.target_keys import ReducedCacheDrafter
from shoal.drafting.text import TextDrafter
from shoal.drafting.trained_heads import PromptStates
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled
from shoal.testing import tiny_model
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Prefix, Request, Row
from shoal.types.rounds import PrefillChunk
from shoal.types.trees import Positions

TOKENS, NEW = 4_000, 1_000
VOCABULARY = 2_000


def rows_of(words: int) -> list[Row]:
    """Two rows of one request, whose tokens are drawn from so many words."""
    draw = random.Random(0).randrange
    prompt = tuple(1000 + draw(words) for _ in range(TOKENS))
    texts = [[1000 + draw(words) for _ in range(NEW)] for _ in range(2)]
    request = Request(prompt, 2)
    return [Row(request, 0, i, i, [*prompt, *texts[i]], frozenset(), 1 << 20) for i in range(2)]


def traced(work: Callable[[], Any]) -> int:
    """Bytes that are allocated and still held once it is done."""
    gc.collect()  # empties lists of free tuples, which would be taken unseen
    tracemalloc.start()
    work()
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used


TABLES: dict[str, Callable[[], TextDrafter]] = {
    "ngram": lambda: NGramDrafter(2, 4),
    "suffix": lambda: SuffixDrafter("group"),
    "recycling": lambda: RecyclingDrafter("group", k=8, nodes=0),
    "trigrams": lambda: TrigramDrafter("group", k=8, nodes=0),
}


@pytest.mark.slow(but=["ngram-2000"])
@pytest.mark.parametrize("words", [VOCABULARY, 30])
@pytest.mark.parametrize("name", TABLES)
def test_tables_take_what_is_counted_and_no_more_than_the_plan(name: str, words: int) -> None:
    rows, drafter = rows_of(words), TABLES[name]()
    used = traced(lambda: drafter.read(rows))
    assert drafter.kept_bytes == pytest.approx(used, rel=0.05, abs=3000)
    planned = drafter.keeps.of_request(TOKENS + 2 * NEW, 2)
    assert used <= planned
    assert name in ("recycling", "trigrams") or used > 0.3 * planned  # what the target says takes the rest
    for row in rows:
        row.finish_reason = "length"
    drafter.end(rows)
    assert drafter.kept_bytes == 0


@pytest.mark.parametrize(("kind", "least"), [(RecyclingDrafter, 0.7), (TrigramDrafter, 0.3)])
def test_a_table_of_what_the_target_said_takes_what_is_counted(kind: type[RecyclingDrafter], least: float) -> None:
    """Once every token was heard of."""
    (row, _), drafter = rows_of(VOCABULARY), kind("group", k=8, nodes=0)
    row.tokens = row.tokens[-400:]
    logits = torch.randn(1, 400, VOCABULARY + 1000)
    scores: Any = SimpleNamespace(positions=Positions([row], [row.tokens[1:]]), logits=logits)

    def hear() -> None:
        drafter.begin([row])
        drafter.read([row])
        drafter.observe([row], scores, None)  # type: ignore[arg-type]

    hear()  # what torch makes once
    drafter._tables.clear()
    used = traced(hear)
    assert drafter.kept_bytes == pytest.approx(used, rel=0.05)
    assert least * drafter.keeps.of_request(400, 1) < used <= drafter.keeps.of_request(400, 1)


@pytest.mark.slow(but=["engine"])
@pytest.mark.parametrize("place", ["engine", "file", "file of another engine"])
def test_earlier_answers_take_what_is_counted(place: str, tmp_path: Path) -> None:
    """An automaton, and the texts that it is made of anew."""
    limit, file = 1 << 14, tmp_path / "answers"
    require_answers(str(file), None)

    def made() -> SuffixDrafter:
        scope, kept = ("engine", None) if place == "engine" else ("group", AnswerFile(str(file), limit, VOCABULARY + 1000))
        return SuffixDrafter(scope, limit=limit, answers=kept)

    def answered(drafter: SuffixDrafter) -> None:
        rows = rows_of(VOCABULARY)
        drafter.read(rows)
        for row in rows:
            row.finish_reason = "length"
        drafter.end(rows)
        drafter.read([])

    drafter = made()
    used = traced(lambda: answered(drafter))
    if place == "file of another engine":
        drafter = made()
        used = traced(lambda: drafter.read([]))
    assert drafter.kept_bytes == pytest.approx(used, rel=0.05)
    assert 0.2 * drafter.keeps.always < used <= drafter.keeps.always


def test_a_corpus_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    """It is mapped: only what a lookup is about to need lies there."""
    path = tmp_path / "index"
    tokens = [1000 + random.Random(1).randrange(VOCABULARY) for _ in range(20_000)]
    with path.open("wb") as file:
        writer = IndexWriter(file)
        writer.add(tokens)
        writer.finish("x")
    drafters: list[SuffixDrafter] = []
    used = traced(lambda: drafters.append(SuffixDrafter(corpus=Corpus(open_index(str(path))))))
    assert used < 20_000 < 0.15 * path.stat().st_size
    (row, _), (drafter,) = rows_of(VOCABULARY), drafters
    used = traced(lambda: (drafter.read([row]), drafter.guess(row, 4)))
    assert drafter.kept_bytes == pytest.approx(used, rel=0.05)  # what the row wrote


def test_a_part_of_the_cache_takes_what_is_planned() -> None:
    """`self:window=16`: the same for a row of any length."""
    drafter = ReducedCacheDrafter(16, 4)
    engine = decoded(wrap(tiny_model("llama").double(), "tiny"), drafter, Fixed(3))
    assert engine.stats.drafted > 0
    assert drafter.memory is not None
    planned = drafter.memory.cache_bytes(3, 64)
    assert planned == drafter.memory.cache_bytes(3, 100) == pytest.approx(drafter.memory.allocated_bytes, rel=0.05)
    held = [tensor for stores in drafter._drafter.runner.cache.stores() for tensor in stores]  # type: ignore[union-attr]
    assert storages(held) == pytest.approx(planned, rel=0.05)


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes that live as long as these tensors, once each."""
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(held.values())


class Silent:
    """Drafts nothing, but might."""

    limit = 4

    def next_length(self) -> int:
        return 0

    def update(self, drafted: Any, accepted: Any) -> None:
        pass


def decoded(target: Runner, drafter: Drafter, lookahead: Any, **options: Any) -> Engine:
    """An engine in the middle of three rows of one request, of 64 tokens each, 40 of them in the prompt."""
    engine = Engine(target, drafter, lookahead, max_batch=3, rule=Coupled(), **options)
    engine.submit(Request(tuple(range(40)), 3, Sampling(seed=1), Limits(max_new_tokens=30)))
    while max((len(row.tokens) for row in engine.scheduler.running), default=0) < 64:
        engine.step()
    return engine


@pytest.mark.parametrize("lookahead", [Silent(), Fixed(3)], ids=["silent", "drafting"])
def test_states_kept_for_eagle3_take_what_is_planned(lookahead: Any) -> None:
    target = wrap(tiny_model("llama").double(), "tiny")
    drafter = Eagle3Drafter(random_heads(CONFIG, 3 * WIDTH, WORDS, own=True).double(), (0, 1, 2), target)
    engine = decoded(target, drafter, lookahead)
    held = [piece for _, pieces, _ in drafter._prompts._of.values() for piece in pieces]
    held += [piece for _, pieces in drafter._own.values() for piece in pieces]
    assert drafter.kept_bytes == storages(held)
    tokens = 40 + sum(row.new_tokens for row in engine.scheduler.running)
    planned = drafter.keeps.of_request(tokens, 3)
    if isinstance(lookahead, Silent):
        assert planned == pytest.approx(storages(held), rel=0.05)
    assert storages(held) <= planned


def test_states_kept_for_medusa_take_what_is_planned() -> None:
    target = wrap(tiny_model("llama").double(), "tiny")
    state = WIDTH * target.dtype.itemsize
    drafter = MedusaDrafter(guessing(WIDTH, WORDS), 2, keeps=Keeps(state, per_row=state, tokens=1))
    decoded(target, drafter, Fixed(3), chunk=8)
    held = [
        *drafter._last.values(),
        *(piece for _, pieces, _ in drafter._prompts._of.values() for piece in pieces),
    ]
    assert drafter.kept_bytes == storages(held) == drafter.keeps.of_request(40, 3)


def test_views_that_keep_more_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the last position of a chunk as a view of it."""
    monkeypatch.setattr(Tensor, "clone", lambda self: self)
    states, row = PromptStates(most=1), Row(Request((1,) * 40, 1), 0, 0, 0, [1] * 40, frozenset(), 99)
    chunk: Any = SimpleNamespace(row=row, start=0, stop=39)
    states.read([chunk], [torch.zeros(39, WIDTH)])
    ((_, pieces, _),) = states._of.values()
    assert storages(pieces) > 30 * states.bytes


def test_the_cache_of_another_vocabulary_takes_what_is_planned() -> None:
    runner = wrap(tiny_model("llama").double(), "tiny")
    slots = OwnMemory(DraftSlots(runner), 1.6)
    slots.reserve(3, 50)
    assert slots.cache_bytes(3, 50) == pytest.approx(slots.allocated_bytes, rel=0.05)
    assert slots.cache_bytes(3, 50) > 1.6 * runner.memory.cache_bytes(3, 50)


def test_rows_whose_slots_are_given_back_are_forgotten() -> None:
    slots = DraftSlots(wrap(tiny_model("llama"), "tiny"))
    rows = [Row(Request((1, 2, i), 1), i, 0, 0, [1, 2, i], frozenset(), 99) for i in range(3)]
    memory = DraftMemory(slots)
    memory.reserve(3, 8)
    slots.place(rows, [True] * 3)
    memory.trim(2, 8)
    assert slots.with_slots(rows) == rows[:2]


def test_a_prompt_is_copied_from_a_row_that_begins_with_it() -> None:
    """Not from one that has moved to where such a row was: its keys are those that a row has alone."""
    runner = wrap(tiny_model("llama"), "tiny")
    slots, pair, other = DraftSlots(runner), Request((1, 2, 3, 4), 2), Request((5, 6, 7, 8), 1)
    first, second = (Row(pair, 0, i, i, [*pair.prompt_ids], frozenset(), 99) for i in range(2))
    third = Row(other, 1, 0, 0, [*other.prompt_ids], frozenset(), 99)
    DraftMemory(slots).reserve(2, 16)
    keys = []
    for rows in ([first, third], [third], [third, second], [second]):
        slots.leave(set(slots.with_slots([first, second, third])) - set(rows) if rows != [second] else None)
        slots.place(rows, [True] * len(rows))
        keys.append(runner.cache.stores()[0][0][slots.of(rows[-1]), :3].clone())
    torch.testing.assert_close(keys[2], keys[3])
    assert not torch.allclose(keys[1], keys[3])


def test_a_stored_prompt_that_another_overlaps_is_computed_again() -> None:
    runner = wrap(tiny_model("llama"), "tiny")
    slots = DraftSlots(runner)
    DraftMemory(slots).reserve(1, 16, 8)
    rows = [Row(Request((i, 2, 3, 4, 5), 1), i, 0, 0, [i, 2, 3, 4, 5], frozenset(), 99) for i in range(2)]
    keys = []
    for place in (0, 1, 0):
        rows[place].prefix = Prefix(2 * (1 - place), 4)
        slots.place([rows[place]], [True])
        keys.append(runner.cache.stores()[0][2][2:6].clone())
        slots.leave([rows[place]])
    torch.testing.assert_close(keys[2], keys[0])
    assert not torch.allclose(keys[1], keys[0])


def test_a_chunk_that_does_not_follow_is_left_out() -> None:
    runner = wrap(tiny_model("llama"), "tiny")
    slots, row = DraftSlots(runner), Row(Request((1,) * 12, 1), 0, 0, 0, [1] * 12, frozenset(), 99)
    DraftMemory(slots).reserve(1, 16)
    for start, stop in ((0, 4), (8, 11)):
        slots.keep_pace([PrefillChunk(row, 0, start, stop)])
    assert runner.cache.lengths[0] == 4


# ── the plan ────────────────────────────────────────────────────────────────────────────────────────────────────────


def most_at_once(kv_bytes: int | None) -> tuple[int, Engine, list[list[int]]]:
    """Rows that run at once where so many bytes are there; the engine, and what rows became."""
    engine = Engine(scripted(hashed(6), 6), SuffixDrafter("group"), Fixed(3), max_batch=4, rule=Coupled(), kv_bytes=kv_bytes)
    rows = [engine.submit(Request((i, 1), 1, Sampling(temperature=0.0), Limits(max_new_tokens=20)))[0] for i in range(4)]
    most = 0
    while engine.step():
        most = max(most, len(engine.scheduler.running))
    return most, engine, [row.tokens for row in rows]


def test_rows_wait_for_tables_and_are_decoded_plainly_where_there_is_no_room_for_one() -> None:
    table = SuffixDrafter("group").keeps.of_request(22, 1)
    most, engine, expected = most_at_once(None)
    assert most == 4
    caches = engine.memory.used
    assert caches < table / 4  # what a row takes here is its table
    for room, together in ((5 * table, 4), (2 * table + caches, 2), (table + caches, 1)):
        most, engine, found = most_at_once(room)
        assert (most, found) == (together, expected)
        assert engine.stats.drafted > 0
    most, engine, found = most_at_once(caches)
    assert found == expected
    assert engine.stats.drafted < 10  # as long as rows are short


def test_a_plan_that_forgets_tables_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr("shoal.engine.memory.Memory.kept_bytes", lambda self, rows: 0)
    with pytest.raises(AssertionError):
        test_rows_wait_for_tables_and_are_decoded_plainly_where_there_is_no_room_for_one()


def test_a_sum_keeps_what_its_parts_keep() -> None:
    parts = [SuffixDrafter("engine", limit=100), NGramDrafter(2, 3)]
    keeps = SumDrafter(parts[:1], parts[1]).keeps
    assert keeps.always == parts[0].keeps.always > 0
    assert keeps.of_request(50, 2) == sum(part.keeps.of_request(50, 2) for part in parts)


def test_a_drafter_of_several_engines_keeps_no_prompt_of_the_one_before() -> None:
    """The second engine's prompt is another, and as long: its group has the same number."""
    model = wrap(tiny_model("llama"), "tiny", checked=False)
    drafter = ModelDrafter(wrap(tiny_model("llama"), "tiny", checked=False), model.vocab_size)
    for prompt in ((5, 6, 7, 8), (9, 3, 2, 4)):
        engine = Engine(model, drafter, Fixed(3), max_batch=2)
        rows = engine.submit(Request(prompt, 2, Sampling(temperature=0.0), Limits(max_new_tokens=9, eos=())))
        while engine.step():
            pass
        assert [row.accepted for row in rows] == [row.drafted for row in rows] != [0, 0]
