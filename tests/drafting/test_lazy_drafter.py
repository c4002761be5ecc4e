"""While nothing is drafted the drafter computes nothing, and it catches up in few passes when it is asked again.

Tests of: drafting.model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from policies import auto
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Controller, Fixed, by_name
from shoal.models.loading import wrap
from shoal.sampling.acceptance import Coupled
from shoal.testing import tiny_model
from shoal.testing.drafters import drafted_by, engine_of, runners_of
from shoal.testing.scripted import hashed, mixed, scripted
from shoal.types.requests import Request, Row
from shoal.types.rounds import Outcome

VOCAB, K = 12, 3
SCRIPT = hashed(VOCAB, 0)


class When(Controller):
    """Drafts K tokens in the rounds for which `drafts(round)` is true, none in others."""

    limit = K
    adaptive = True

    def __init__(self, drafts: Callable[[int], bool]) -> None:
        self.drafts, self.round = drafts, 0

    def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
        return [min(K if self.drafts(self.round) else 0, row.max_draft_length) for row in rows]

    def learn(self, outcome: Outcome) -> None:
        self.round += 1


class Counted:
    """An engine whose drafter's passes are counted.

    Attributes:
        prompts: slots and counts of each pass whose logits nobody read. steps: the same of the others. stored: tokens of prompts in
            the shared store.
    """

    def __init__(self, lookahead: Any, *, real: bool = False, k: int = 1, right: bool = False, **options: Any) -> None:
        target, drafter = (
            [wrap(tiny_model("llama", seed=seed), "tiny", checked=False) for seed in (0, 0 if right else 1)]
            if real
            else [scripted(SCRIPT, VOCAB), scripted(SCRIPT if right else mixed(SCRIPT, hashed(VOCAB, 1)), VOCAB)]
        )
        self.engine = engine_of(target, drafter if k else None, lookahead, rule=Coupled(), **options)
        self.prompts: list[tuple[list[int], list[int]]] = []
        self.steps: list[tuple[list[int], list[int]]] = []
        self.stored = 0
        if k:
            self._watch(drafted_by(self.engine))

    def _watch(self, drafter: Any) -> None:
        feed, feed_prefix = drafter.feed, drafter.feed_prefix

        def watched(slots: Sequence[int], tokens: Tensor, counts: Sequence[int], **options: Any) -> Tensor:
            (self.steps if options.get("want_logits", True) else self.prompts).append((list(slots), list(counts)))
            return feed(slots, tokens, counts, **options)

        def watched_prefix(prefix: Any, start: int, tokens: Tensor) -> None:
            self.stored += tokens.shape[1]
            feed_prefix(prefix, start, tokens)

        drafter.feed, drafter.feed_prefix = watched, watched_prefix

    def ask(self, ids: Sequence[int], n: int = 1, new: int = 12, **asked: Any) -> list[Row]:
        return self.engine.submit(Request(tuple(ids), n, Sampling(seed=len(ids)), Limits(new), **asked))

    def finish(self) -> Counted:
        while self.engine.step():
            pass
        return self

    @property
    def computed(self) -> int:
        """Tokens of prompts and of what was decoded plainly."""
        return self.stored + sum(sum(counts) for _, counts in self.prompts)


def plain(asked: Sequence[tuple[Sequence[int], int]], **options: Any) -> list[list[int]]:
    run = Counted(Fixed(0), k=0, **options)
    rows = [row for ids, new in asked for row in run.ask(ids, new=new)]
    run.finish()
    return [row.tokens for row in rows]


PROMPTS = ((1, 2, 3, 4, 5), (6,), (7, 8, 9))


@pytest.mark.parametrize("options", [{}, {"prefix_sharing": "copied"}, {"prefix_sharing": "shared"}, {"chunk": 2}], ids=str)
def test_a_controller_that_never_drafts_costs_no_pass(options: dict[str, Any]) -> None:
    run = Counted(When(lambda _: False), **options)
    for ids in (*PROMPTS, (3,) * 30):
        run.ask(ids, 2)
        run.engine.step()
    run.finish()
    assert (run.prompts, run.steps, run.stored) == ([], [], 0)
    assert (run.engine.stats.draft_passes, run.engine.stats.drafted) == (0, 0)


def test_nor_does_a_pair_with_nothing_to_gain() -> None:
    run = Counted(auto({1: 1.0, 64: 64.0}, 0.6, 0.3), chunk=4)
    run.ask((1, 2, 3), 2)
    run.engine.step()
    run.ask((3,) * 30, 2)
    run.finish()
    assert (run.prompts, run.steps, run.stored) == ([], [], 0)


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
def test_rows_that_never_draft_cost_no_token(prefix_sharing: str) -> None:
    """Beside rows that do they stand as padding of one token in steps; their prompts are not computed, long ones included."""
    run = Counted(Fixed(K), prefix_sharing=prefix_sharing, chunk=8, max_batch=8)
    drafted = run.ask((1, 2, 3, 4, 5), new=30)
    silent = run.ask((6,) * 4, 2, new=9, max_draft=0)
    run.engine.step()
    silent += run.ask((7,) * 20, 2, new=9, max_draft=0)  # computed by the target in several rounds
    silent += run.ask((8, 9, 10), new=1)  # ends with the first token: there is nothing to draft
    run.finish()
    assert run.computed == 4
    assert all(row.drafted == 0 for row in silent)
    assert drafted[0].drafted > 0
    slot = drafted[0].slot
    for slots, counts in run.steps:
        assert all(count == 1 for place, count in zip(slots, counts, strict=True) if place != slot)


def test_a_row_that_drafts_late_has_what_it_needs() -> None:
    """It was padding before, and its keys are then those of its own tokens: the scripted model sees any other."""
    for first in range(1, 6):

        class Turns(When):
            """The first row drafts from the start, the others from round `first` on."""

            def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
                return [
                    min(K if row.index == 0 or self.round >= first else 0, row.max_draft_length)  # noqa: B023
                    for row in rows
                ]

        run = Counted(Turns(lambda _: True))
        rows = run.ask((1, 2, 3), 4, new=20)
        run.finish()
        other = Counted(Fixed(0), k=0)
        expected = other.ask((1, 2, 3), 4, new=20)
        other.finish()
        assert [row.tokens for row in rows] == [row.tokens for row in expected]
        assert all(row.drafted > 0 and row.accepted > 0 for row in rows)


def test_rows_that_take_turns_keep_keys_of_their_own_tokens_only() -> None:
    """A row is padding in the rounds of others, with what it has computed before: padding must not stay."""

    class InTurn(When):
        def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
            return [min(K if (row.index + self.round) % 3 == 0 else 0, row.max_draft_length) for row in rows]

    run = Counted(InTurn(lambda _: True), right=True)  # every draft is right, as long as its history is
    rows = run.ask((1, 2, 3), 4, new=30)
    run.finish()
    assert all(row.drafted == row.accepted > 10 for row in rows)


@pytest.mark.parametrize("real", [False, True], ids=["scripted", "packed"])
def test_laggards_catch_up_in_one_pass(real: bool) -> None:
    """Rows of different prompts and ages, at their first draft and after plain rounds."""
    run = Counted(When(lambda i: i in (7, 13)), real=real)
    rows = []
    for ids in PROMPTS:
        rows += run.ask(ids, new=40)
        run.engine.step()
    run.finish()
    assert len(run.prompts) == 2
    first, again = (counts for _, counts in run.prompts)
    assert first == sorted([len(ids) + 7 - i - 1 for i, ids in enumerate(PROMPTS)], reverse=True)
    assert len(again) == 3
    assert all(count >= 5 for count in again)
    assert len(run.steps) == 2 * K
    assert [row.tokens for row in rows] == plain([(ids, 40) for ids in PROMPTS], real=real)


def test_a_block_of_laggards_stays_within_their_slots() -> None:
    """Padding up to the longest lag would reach beyond the slot of a row that is nearly at its end: that row goes by itself."""

    class Unequal(When):
        """The long row drafts in rounds 0, 16 and 20, the other one in 0 and 20."""

        def lengths(self, rows: Sequence[Row], waiting: int) -> list[int]:
            turns = [(0, 16, 20) if row.prompt_length > 2 else (0, 20) for row in rows]
            return [min(1, row.max_draft_length) if self.round in own else 0 for row, own in zip(rows, turns, strict=True)]

    run = Counted(Unequal(lambda _: True), prefix_sharing="copied", right=True)
    rows = [*run.ask((1, 2), new=60), *run.ask((5,) * 64, new=26)]
    run.finish()
    assert [len(slots) for slots, _ in run.prompts] == [2, 1, 1, 1]
    assert all(row.drafted == row.accepted > 1 for row in rows)
    assert [row.tokens for row in rows] == plain([((1, 2), 60), ((5,) * 64, 26)])


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
def test_siblings_share_what_is_computed_late(prefix_sharing: str) -> None:
    """The prompt once, and of each row what it has decoded."""
    run = Counted(When(lambda i: i >= 4), prefix_sharing=prefix_sharing)
    rows = run.ask((1, 2, 3, 4, 5, 6), 3, new=20)
    run.finish()
    # copied: the first row's prompt with its 4 tokens in one pass, then 4 tokens of each sibling
    assert run.computed == 5 + 3 * 4
    assert run.prompts[0][1] == ([9] if prefix_sharing == "copied" else [4, 4, 4])
    assert all(row.drafted > 0 for row in rows)


def test_the_first_token_waits_for_one_prompt_of_the_drafter() -> None:
    """Of a group with a fixed draft length: its prompt once, and the steps of one draft."""
    run = Counted(Fixed(K))
    run.ask((1, 2, 3, 4, 5, 6), 4)
    assert run.engine.step()
    assert run.computed == 5
    assert len(run.steps) == K
    assert run.engine.stats.target_passes == 1


def test_the_first_token_of_auto_waits_for_nothing_of_an_unknown_drafter() -> None:
    run = Counted(by_name("auto"))
    run.ask((1, 2, 3, 4, 5, 6), 4)
    assert run.engine.step()
    assert (run.prompts, run.steps, run.stored) == ([], [], 0)


class HostReads(TorchDispatchMode):
    """Counts reads of values by Python: `bool`, `item`, `tolist`."""

    count = 0
    READS = (
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.resolve_neg.default,
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.READS
        return func(*args, **(kwargs or {}))


def test_a_step_reads_at_most_one_value_from_the_device() -> None:
    """And all drafted tokens are read at once."""
    engine: Engine = Counted(Fixed(K), real=True).engine
    engine.submit(Request((1, 2, 3), 4, Sampling(seed=1), Limits(60)))
    engine.step()
    drafter = engine.drafter
    assert drafter is not None
    propose, reads = drafter.propose, []

    def watched(inputs: Any) -> Any:
        with HostReads() as counter:
            tree = propose(inputs)
        reads.append(counter.count)
        return tree

    drafter.propose = watched  # type: ignore[method-assign]
    for _ in range(3):
        engine.step()
    assert all(0 < count <= K + 1 for count in reads)


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
def test_a_row_that_plain_rounds_left_in_a_slot_that_ends_is_drafted_for_again(prefix_sharing: str) -> None:
    """Rows below it end while nothing is drafted, so that it is still in slot 2 when memory is wanted and slots are cut to one."""
    asked = [((1, 2, 3), 4), ((4, 5), 4), ((6, 7, 8, 9), 24)]
    sized = Counted(Fixed(K), real=True).engine
    most = sum(model.memory.cache_bytes(3, 40) for model in runners_of(sized))
    run = Counted(
        When(lambda round_: round_ == 0 or round_ > 8), real=True, right=True, max_batch=3, kv_bytes=most,
        prefix_sharing=prefix_sharing,
    )  # fmt: skip
    rows = [row for ids, new in asked for row in run.ask(ids, new=new)]
    while len(run.engine.scheduler.running) != 1 or run.engine.stats.rounds == 0:
        run.engine.step()
    assert max(drafted_by(run.engine).cache.lengths) > 0
    of_target = run.engine.target.memory.cache_bytes
    assert run.engine.reserve_tokens((most - of_target(2, 40)) // of_target(1, 1))
    assert len(drafted_by(run.engine).cache.lengths) == 1
    run.finish()
    assert [row.tokens for row in rows] == plain(asked, real=True)
    assert rows[2].drafted > 9
    assert run.engine.stats.rounds < 24
