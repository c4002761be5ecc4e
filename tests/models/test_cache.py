"""The slot cache: tokens go where the plan says and stay there; nothing else moves.

Tests of: models.cache.row_store, engine.memory.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.engine.memory import grade
from shoal.errors import InternalError
from shoal.models import loading
from shoal.models.attention import Masks
from shoal.models.cache import Plan, SlotCache
from shoal.models.cache.mixing import HeldStates
from shoal.models.cache.pass_plan import PACK_FROM
from shoal.models.cache.row_store import zeros
from shoal.models.runner import Runner
from shoal.testing import VOCABULARY, tiny_model
from shoal.types.requests import Prefix

CPU = torch.device("cpu")
HEADS, KEY_DIM, VALUE_DIM = 2, 4, 3
LAYERS = 2


def write(cache: SlotCache, slots: list[int], counts: list[int], stamp: float) -> list[tuple[Tensor, Tensor]]:
    """One pass in which every key is `stamp` + row + column / 100 and every value its negative; what each layer got back."""
    plan = Plan(slots, [cache.lengths[s] for s in slots], counts, CPU, prefixes=[cache.prefixes[s] for s in slots])
    cells = stamp + torch.arange(plan.rows)[:, None] + torch.arange(plan.q) / 100
    keys = cells[:, None, :, None].expand(-1, HEADS, -1, KEY_DIM)
    values = -cells[:, None, :, None].expand(-1, HEADS, -1, VALUE_DIM)
    cache.begin(plan)
    seen = [cache.update(keys, values, layer) for layer in range(LAYERS)]
    cache.end()
    return seen


def held(cache: SlotCache, slot: int) -> list[float]:
    """The stamps of a slot's tokens, one per token, after checking that all layers, heads, keys and values agree."""
    length = cache.lengths[slot]
    stamps = cache._layers[0].keys[slot, :length, 0, 0]
    for layer in cache._layers:
        assert torch.equal(layer.keys[slot, :length], stamps[:, None, None].expand(-1, HEADS, KEY_DIM))
        assert torch.equal(layer.values[slot, :length], -stamps[:, None, None].expand(-1, HEADS, VALUE_DIM))
    return [round(float(stamp), 2) for stamp in stamps]


@pytest.fixture
def cache() -> SlotCache:
    """Slot 0 holds two tokens, slot 1 four, slot 2 one."""
    cache = SlotCache()
    cache.reserve(3, 12)
    write(cache, [0, 1, 2], [2, 4, 1], 10)
    return cache


def test_tokens_are_appended_at_each_rows_own_length(cache: SlotCache) -> None:
    assert cache.lengths == [2, 4, 1]
    write(cache, [0, 1, 2], [1, 2, 3], 20)
    assert held(cache, 0) == [10, 10.01, 20]
    assert held(cache, 1) == [11, 11.01, 11.02, 11.03, 21, 21.01]
    assert held(cache, 2) == [12, 22, 22.01, 22.02]


def test_slots_in_any_order(cache: SlotCache) -> None:
    write(cache, [2, 0], [2, 1], 20)
    assert held(cache, 2) == [12, 20, 20.01]
    assert held(cache, 0) == [10, 10.01, 21]
    assert cache.lengths == [3, 4, 3]  # slot 1 took no part


def test_rolled_back_tokens_are_overwritten(cache: SlotCache) -> None:
    cache.rollback(1, 1)
    write(cache, [1], [2], 20)
    assert held(cache, 1) == [11, 20, 20.01]
    cache.rollback(1, 3)
    assert cache.lengths == [2, 3, 1]


def test_a_copy_is_independent(cache: SlotCache) -> None:
    cache.copy(1, 0, 3)
    assert held(cache, 0) == [11, 11.01, 11.02]
    write(cache, [0], [1], 20)
    assert held(cache, 0) == [11, 11.01, 11.02, 20]
    assert held(cache, 1) == [11, 11.01, 11.02, 11.03]
    cache.copy(1, 1, 2)  # onto itself: only the length
    assert held(cache, 1) == [11, 11.01]


# ── shared prompts ──────────────────────────────────────────────────────────────────────────────────────────────────


def store(cache: SlotCache, prefix: Prefix, start: int, count: int, stamp: float) -> list[tuple[Tensor, Tensor]]:
    """One pass that writes tokens of a prompt; keys are `stamp` + column / 100; what each layer got back."""
    cache.begin(Plan.of_prompt(prefix, start, count, CPU))
    keys = (stamp + torch.arange(count) / 100)[None, None, :, None].expand(-1, HEADS, -1, KEY_DIM)
    seen = [cache.update(keys, -keys[..., :VALUE_DIM], layer) for layer in range(LAYERS)]
    cache.end()
    return seen


def stamps(keys: Tensor) -> list[float]:
    """Of keys [..., tokens, dim]."""
    return [round(float(stamp), 2) for stamp in keys[..., 0].flatten()]


def test_a_prompt_is_written_in_pieces_and_seen_whole(cache: SlotCache) -> None:
    before = [held(cache, slot) for slot in range(3)]
    cache.reserve(3, 12, 9)
    prefix = Prefix(2, 5)
    store(cache, prefix, 0, 3, 50)
    ((keys, values), _) = store(cache, prefix, 3, 2, 60)
    assert stamps(keys[0, 0]) == [50, 50.01, 50.02, 60, 60.01]
    assert torch.equal(values, -keys[..., :VALUE_DIM])
    shared = cache._layers[0].shared_keys
    assert shared.shape == (9, HEADS, KEY_DIM)
    assert stamps(shared[:, 0]) == [0, 0, 50, 50.01, 50.02, 60, 60.01, 0, 0]
    assert [held(cache, slot) for slot in range(3)] == before


def test_a_slot_holds_what_follows_its_prefix(cache: SlotCache) -> None:
    cache.reserve(3, 12, 20)
    cache.enter(0, Prefix(2, 15))  # longer than a slot
    assert (cache.lengths[0], cache.lengths[1]) == (15, 4)
    write(cache, [0, 1], [2, 1], 20)
    assert (cache.lengths[0], cache.lengths[1]) == (17, 5)
    assert stamps(cache._layers[0].keys[0, :2, 0]) == [20, 20.01]
    cache.rollback(0, 16)
    write(cache, [0], [1], 30)
    assert stamps(cache._layers[0].keys[0, :2, 0]) == [20, 30]
    cache.copy(0, 2, 17)
    assert (cache.prefixes[2], cache.lengths[2]) == (Prefix(2, 15), 17)
    assert stamps(cache._layers[0].keys[2, :2, 0]) == [20, 30]
    cache.copy(1, 0, 3)
    assert cache.prefixes[0] is None
    assert held(cache, 0) == [11, 11.01, 11.02]
    cache.clear()
    assert (cache.prefixes, cache.lengths) == ([None] * 3, [0] * 3)


def test_zeros_of_a_tail_whose_beginning_is_shared(cache: SlotCache) -> None:
    """Positions count from the prompt's first token, which lies in the shared store and stays there."""
    cache.reserve(3, 12, 9)
    store(cache, Prefix(1, 5), 0, 5, 40)
    cache.enter(0, Prefix(1, 5))
    write(cache, [0, 1], [4, 1], 20)
    before = [[tensor.clone() for tensor in tensors] for tensors in cache.stores()]
    cache.zero_tail(0, 7)
    assert held(cache, 1) == [11, 11.01, 11.02, 11.03, 21]
    for now, old in zip(cache.stores(), before, strict=True):
        for tensor, was in zip(now[:2], old[:2], strict=True):
            assert torch.equal(tensor[0, :2], was[0, :2])
            assert not tensor[0, 2:].any()
        assert all(torch.equal(tensor, was) for tensor, was in zip(now[2:], old[2:], strict=True))
    cache.zero_tail(0, 0)
    assert not any(tensor[0].any() for now in cache.stores() for tensor in now[:2])


def test_states_behind_tokens_that_are_taken_back_are_forgotten(cache: SlotCache) -> None:
    for on, left in ((False, [2, 3, 4]), (True, [2, 3])):
        cache.marks.on = on
        cache.marks.put(1, [HeldStates(length, {}) for length in (2, 3, 4)])
        cache.rollback(1, 3)
        assert [mark.length for mark in cache.marks.of(1)] == left


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_zeros_for_what_is_not_finite(cache: SlotCache, value: float) -> None:
    """In a slot and its prefix, keys and values of all layers, also beyond the row's end; nothing else changes."""
    cache.reserve(3, 12, 9)
    store(cache, Prefix(1, 2), 0, 2, 40)
    store(cache, Prefix(3, 4), 0, 4, 50)
    cache.enter(0, Prefix(3, 4))
    write(cache, [0, 1], [3, 1], 20)
    cache.rollback(0, 5)
    everything = [tensor for tensors in cache.stores() for tensor in tensors]
    before = [tensor.clone() for tensor in everything]
    for keys, values, shared_keys, shared_values in cache.stores():
        for tensor in (keys, values):
            tensor[0, [0, 2, 11]] = tensor[1, 2] = value
        for tensor in (shared_keys, shared_values):
            tensor[[2, 4, 7]] = value
    cache.zero_non_finite(0)
    for i, (tensor, old) in enumerate(zip(everything, before, strict=True)):
        if i % 4 < 2:
            old[0, [0, 2, 11]], old[1, 2] = 0, value
        else:
            old[4], old[[2, 7]] = 0, value
        assert torch.equal(tensor.nan_to_num(7.0), old.nan_to_num(7.0))


def test_gaps_go_with_copies_and_end_with_their_rows(cache: SlotCache) -> None:
    """Of rows whose first and last tokens were taken from another cache: the next tokens stand behind the gap."""
    part = SlotCache()
    part.reserve(3, 12)
    part.take(cache, [0, 1], 1, 2, LAYERS)
    assert held(part, 1) == [11, 11.02, 11.03]
    part.copy(1, 2, 3)
    assert held(part, 2) == held(part, 1)
    assert part.gaps == [0, 1, 1]
    part.enter(1)
    assert part.gaps == [0, 0, 1]


def test_rows_of_one_length_see_other_keys_behind_prompts_of_unequal_lengths() -> None:
    """So their pass needs a mask."""
    plan = Plan([0, 1], [7, 7], [1, 1], CPU, prefixes=[Prefix(0, 5), Prefix(5, 2)])
    assert (plan.tails, plan.kv, plan.common_keys) == ([3, 6], 6, 3)
    bias = Masks(plan).bias(torch.float32)
    assert bias is not None
    assert (bias == 0).sum(-1).flatten().tolist() == plan.tails


def test_the_shared_store_grows_alone(cache: SlotCache) -> None:
    cache.reserve(3, 12, 4)
    store(cache, Prefix(1, 3), 0, 3, 50)
    slots = cache._layers[0].keys
    cache.reserve(1, 1, 10)
    assert cache._layers[0].keys is slots
    assert stamps(cache._layers[0].shared_keys[:5, 0]) == [0, 50, 50.01, 50.02, 0]
    assert cache.nbytes() == (3 * 12 + 10) * cache.bytes_per_token()


def test_growth_keeps_what_is_there(cache: SlotCache) -> None:
    before = [held(cache, slot) for slot in range(3)]
    cache.reserve(5, 40)
    assert (cache.slots, cache.capacity, cache.lengths) == (5, 40, [2, 4, 1, 0, 0])
    assert [held(cache, slot) for slot in range(3)] == before
    cache.reserve(1, 1)
    assert (cache.slots, cache.capacity) == (5, 40)  # never shrinks
    write(cache, [4], [30], 20)
    assert len(held(cache, 4)) == 30


def test_growth_copies_no_more_than_what_rows_have(cache: SlotCache) -> None:
    """Rejected drafts lie beyond; what is new is zero, also where a mask would hide it: 0 * NaN is NaN."""
    cache.stores()[0][0][:, 4:] = torch.nan  # beyond all rows' ends
    cache.reserve(5, 40)
    keys = cache.stores()[0][0]
    assert keys[1, :4].all()
    assert not keys[:, 4:].any()
    assert keys.data_ptr() % 64 == 0


@pytest.mark.parametrize("layer", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_of_any_dtype(layer: torch.dtype) -> None:
    made = zeros(torch.ones(1, dtype=layer), (5, 6, 2, 4))
    assert (made.shape, made.dtype) == ((5, 6, 2, 4), layer)
    assert not made.any()
    assert not zeros(torch.ones(1), (0, 6)).numel()


def test_side_by_side_slots_are_views_and_others_copies(cache: SlotCache) -> None:
    store = cache._layers[0].keys.data_ptr()
    ((keys, values), _) = write(cache, [0, 1], [1, 1], 20)
    assert keys.shape == (2, HEADS, 5, KEY_DIM)
    assert values.shape == (2, HEADS, 5, VALUE_DIM)
    assert keys.data_ptr() == store
    ((gathered, _), _) = write(cache, [2, 0], [1, 1], 30)
    assert gathered.data_ptr() != store
    assert torch.equal(gathered[0, :, :2], cache._layers[0].keys[2, :2].transpose(0, 1))
    assert torch.equal(gathered[1, :, :4], cache._layers[0].keys[0, :4].transpose(0, 1))


def test_bytes_are_those_of_the_tensors(cache: SlotCache) -> None:
    tensors = [tensor for layer in cache._layers for tensor in layer.tensors()]
    assert cache.nbytes() == sum(t.untyped_storage().nbytes() for t in tensors)
    assert cache.bytes_per_token() == LAYERS * HEADS * (KEY_DIM + VALUE_DIM) * 4
    assert len(cache) == LAYERS
    assert SlotCache().bytes_per_token() == 0


def test_what_transformers_asks_between_and_during_passes(cache: SlotCache) -> None:
    assert (cache.get_seq_length(), cache.get_mask_sizes(1), cache.get_max_length(), cache.get_max_cache_shape()) == (
        0,
        (0, 0),
        12,
        12,
    )
    cache.begin(Plan([0, 1], [2, 4], [3, 1], CPU))
    assert (cache.get_seq_length(), cache.get_mask_sizes(3)) == (4, (7, 0))


# ── packed passes ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_packing_and_back() -> None:
    plan = Plan([0, 1, 2], [4, 0, 2], [1, 4, 2], CPU, pack_from=PACK_FROM)
    block = torch.tensor([[10, 0, 0, 0], [20, 21, 22, 23], [30, 31, 0, 0]])
    assert plan.pack(block).tolist() == [[10, 20, 21, 22, 23, 30, 31]]
    assert plan.pack(plan.positions).tolist() == [[4, 0, 1, 2, 3, 2, 3]]
    assert plan.unpack(plan.pack(block)).tolist() == [[10, 10, 10, 10], [20, 21, 22, 23], [30, 31, 31, 31]]
    assert plan.cells(100).tolist() == [4, 100, 101, 102, 103, 202, 203]
    assert plan.kv == max(plan.lengths) == 5  # unused columns ask for no room


@pytest.mark.parametrize(
    ("counts", "packed"),
    [([4, 4], False), ([4, 3], True), ([1, 1, 1], False), ([8] * 7 + [2], False), ([8] * 6 + [4, 4], True)],
)
def test_packed_where_an_eighth_is_unused(counts: list[int], packed: bool) -> None:
    plan = Plan(range(len(counts)), [0] * len(counts), counts, CPU, pack_from=PACK_FROM)
    assert plan.packed is packed
    block = torch.zeros(plan.rows, plan.q)
    assert plan.pack(block).shape == ((1, sum(counts)) if packed else (plan.rows, plan.q))
    assert packed or plan.unpack(block) is block


# ── misuse is a bug of ours ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("slots", "starts", "counts"), [([0], [10], [3]), ([0, 1], [10, 0], [1, 3]), ([3], [0], [1])])
def test_beyond_capacity(cache: SlotCache, slots: list[int], starts: list[int], counts: list[int]) -> None:
    with pytest.raises(InternalError, match="cache of 3 x 12 got slot"):
        cache.begin(Plan(slots, starts, counts, CPU))


def test_an_unplanned_update(cache: SlotCache) -> None:
    states = torch.zeros(1, HEADS, 1, KEY_DIM)
    with pytest.raises(InternalError, match="outside of a planned forward pass"):
        cache.update(states, states, 0)


def test_rolling_forward(cache: SlotCache) -> None:
    with pytest.raises(InternalError, match="cannot roll slot 1 of length 4 back to 5"):
        cache.rollback(1, 5)


# ── any schedule equals a computation from scratch ──────────────────────────────────────────────────────────────────

SLOTS, MOST = 3, 24


@lru_cache(maxsize=1)
def llama() -> Runner:
    return loading.wrap(tiny_model("llama"), "llama")


def from_scratch(tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return llama().hf(torch.tensor([tokens]), use_cache=False).logits[0]


class Ragged:
    """A runner and, beside it, the token lists that its slots should hold."""

    def __init__(self) -> None:
        self.runner = llama().fork()
        self.runner.cache.reserve(SLOTS, MOST + 4)
        self.tokens: list[list[int]] = [[] for _ in range(SLOTS)]

    def feed(self, slots: list[int], blocks: list[list[int]]) -> float:
        """Feeds a block to each slot; returns the largest difference to a computation from scratch."""
        width = max(map(len, blocks))
        padded = torch.tensor([block + [0] * (width - len(block)) for block in blocks])
        logits = self.runner.feed(slots, padded, [len(block) for block in blocks])
        worst = 0.0
        for row, (slot, block) in enumerate(zip(slots, blocks, strict=True)):
            self.tokens[slot] += block
            expected = from_scratch(self.tokens[slot])[-len(block) :]
            worst = max(worst, float((logits[row, : len(block)] - expected).abs().max()))
        return worst

    def rollback(self, slot: int, length: int) -> None:
        self.runner.cache.rollback(slot, length)
        del self.tokens[slot][length:]

    def copy(self, source: int, target: int, length: int) -> None:
        self.runner.cache.copy(source, target, length)
        self.tokens[target] = self.tokens[source][:length]


TOLERANCE = 5e-5
"""Logits have a standard deviation of 2 and reach 10; float32 sums in another order differ by 1e-6 of that, seen: 8e-6."""

token = st.integers(0, VOCABULARY - 1)


@settings(max_examples=25)
@given(st.data())
def test_any_schedule_equals_a_computation_from_scratch(data: st.DataObject) -> None:
    ragged = Ragged()
    for _ in range(data.draw(st.integers(2, 6))):
        room = [slot for slot in range(SLOTS) if len(ragged.tokens[slot]) <= MOST - 5]
        if room:
            slots = data.draw(st.lists(st.sampled_from(room), min_size=1, max_size=SLOTS, unique=True))
            blocks = [data.draw(st.lists(token, min_size=1, max_size=5)) for _ in slots]
            assert ragged.feed(slots, blocks) < TOLERANCE
        slot, other = data.draw(st.integers(0, SLOTS - 1)), data.draw(st.integers(0, SLOTS - 1))
        length = data.draw(st.integers(0, len(ragged.tokens[slot])))
        if data.draw(st.booleans()):
            ragged.rollback(slot, length)
        else:
            ragged.copy(slot, other, length)
        assert ragged.runner.cache.lengths == list(map(len, ragged.tokens))


def test_one_token_rolled_back_too_few_shows() -> None:
    """Negative control for the test above."""
    ragged = Ragged()
    assert ragged.feed([0, 1], [[5, 6, 7, 8], [9]]) < TOLERANCE
    ragged.runner.cache.rollback(0, 3)
    del ragged.tokens[0][2:]
    assert ragged.feed([0], [[1, 2]]) > 0.1


def test_a_cache_grows_under_a_running_model() -> None:
    ragged = Ragged()
    assert ragged.feed([0, 1], [[5, 6, 7, 8], [9]]) < TOLERANCE
    ragged.runner.cache.reserve(SLOTS + 2, 2 * MOST)
    assert ragged.feed([1, 0], [[1, 2], [3]]) < TOLERANCE
    assert ragged.runner.memory.cache_bytes(SLOTS + 2, 2 * MOST) == ragged.runner.cache.nbytes()


def test_forks_share_weights_and_nothing_else() -> None:
    one, two = llama().fork(), llama().fork()
    assert one.hf is two.hf
    one.cache.reserve(1, 8)
    one.feed([0], torch.tensor([[1, 2, 3]]), [3])
    assert (one.counts.passes, two.counts.passes) == (1, 0)
    assert (one.cache.lengths, two.cache.lengths) == ([3], [])


@given(st.integers(0, 10_000))
def test_room_to_spare_is_at_most_a_quarter(size: int) -> None:
    assert size <= grade(size) <= 1.25 * size
    assert grade(grade(size)) == grade(size)


def test_what_grows_one_by_one_is_copied_a_few_times() -> None:
    assert len({grade(size) for size in range(1, 257)}) <= 32
