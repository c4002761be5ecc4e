"""Draft trees in a pass: every node's logits are those of its path decoded as a chain, by every way there is to compute a pass.

Tests of: models.cache.row_store, models.cache, models.cache.pass_plan, models.attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.config import MOST_NODES
from shoal.errors import InternalError, RequestError, UnsupportedModel
from shoal.models import loading
from shoal.models.attention import Masks, within
from shoal.models.cache import Plan, SlotCache
from shoal.models.cache.pass_plan import branching, chain_words, layout
from shoal.models.runner import Runner
from shoal.testing import VOCABULARY, tiny_model
from shoal.testing.scripted import hashed, scripted
from shoal.types.requests import Prefix
from tree_masks import Tree, path_of, random_tree

CPU = torch.device("cpu")
ERROR = 1e-9
"""Of logits of a few units in float64, with norms in float32 all the same: their rounding of equal numbers is equal."""
ROUNDED = {"gemma2": 1e-5, "deepseek-v3": 1e-5, "codegen": 1e-5}
"""Where such float32 parts round numbers that differ in their last bits. A wrong mask or position costs 0.1."""
ARCHITECTURES = ("llama", "qwen2-sliding", "gemma2", "gpt2", "gpt-oss", "deepseek-v3", "codegen", "llama4")
"""GQA; a sliding window of 8; soft caps and windows; learned positions; sinks; MLA; a model that attends by its own code; chunks
of 8 and layers that count columns."""
METHODS = ("reference", "pad", "split", "bifurcated", "strict")


# ── the definition ──────────────────────────────────────────────────────────────────────────────────────────────────


def random_ids(count: int, generator: torch.Generator) -> list[int]:
    return [int(token) for token in torch.randint(0, VOCABULARY, (count,), generator=generator)]


@cache
def hf(architecture: str) -> Any:
    model = tiny_model(architecture).double()
    model.config._experts_implementation = "eager"  # torch multiplies the others' matrices in 32 bits at most
    return model


@torch.inference_mode()
def stock(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits after the last of these tokens, by a plain forward of the stock model."""
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


class Rows:
    """A runner, the tokens its slots should hold, and the largest difference to the definition so far.

    Attributes:
        columns: of blocks that branched, fed so far.
    """

    def __init__(
        self, runner: Runner, histories: Sequence[Sequence[int]], prompts: Sequence[int | None] | None = None
    ) -> None:
        self.runner, self.tokens = runner.fork(), [list(history) for history in histories]
        self.worst, self.columns = 0.0, 0
        self.runner.memory.reserve(len(histories) + 1, 70, 40)
        base = 3
        for slot, history in enumerate(self.tokens):
            shared = None if prompts is None else prompts[slot]
            if shared is not None:
                prefix = Prefix(base, shared)
                base += shared + 1
                self.runner.feed_prefix(prefix, 0, torch.tensor([history[:shared]]))
                self.runner.cache.enter(slot, prefix)
            rest = history[shared or 0 :]
            if rest:
                self.runner.feed([slot], torch.tensor([rest]), [len(rest)], want_logits=False)

    def feed(self, slots: Sequence[int], blocks: Sequence[Sequence[int]], trees: Sequence[Tree] | None) -> Tensor:
        """Feeds a block to each slot and compares every node."""
        width = max(map(len, blocks))
        tokens = torch.tensor([[*block, *[0] * (width - len(block))] for block in blocks])
        logits = self.runner.feed(slots, tokens, [len(block) for block in blocks], parents=trees)
        chains = [range(-1, len(block) - 2) for block in blocks] if trees is None else trees
        for row, (slot, block, tree) in enumerate(zip(slots, blocks, chains, strict=True)):
            for column in range(len(block)):
                path = [*self.tokens[slot], *(block[c] for c in path_of(tree, column))]
                self.worst = max(self.worst, float((logits[row, column] - stock(self.runner.hf, path)).abs().max()))
        self.columns += sum(map(len, blocks)) if branching(trees) else 0
        return logits

    def keep(self, slot: int, block: Sequence[int], columns: Sequence[int]) -> None:
        self.runner.cache.keep(slot, len(self.tokens[slot]), columns)
        self.tokens[slot] += [block[column] for column in columns]
        assert self.runner.cache.lengths[slot] == len(self.tokens[slot])


def random_round(rows: Rows, slots: Sequence[int], nodes: Sequence[int], seed: int) -> None:
    """A tree for each slot, then a random path of each is kept."""
    generator = torch.Generator().manual_seed(seed)
    trees = [random_tree(n, generator) for n in nodes]
    blocks = [random_ids(1 + n, generator) for n in nodes]
    rows.feed(slots, blocks, trees)
    for slot, block, tree in zip(slots, blocks, trees, strict=True):
        rows.keep(slot, block, path_of(tree, int(torch.randint(0, len(block), (1,), generator=generator))))


def runner(architecture: str, method: str = "auto") -> Runner:
    return loading.wrap(hf(architecture), architecture, method, checked=False)


def life(rows: Rows) -> None:
    """Two rounds of ragged trees, one of chains beside trees, one of chains."""
    random_round(rows, [0, 1, 2], [6, 1, 3], seed=1)
    random_round(rows, [2, 0, 1], [9, 4, 0], seed=2)
    rows.feed([0, 1], [[5, 6, 7], [8, 9, 1]], [[-1, 0], [-1, -1]])
    rows.keep(0, [5, 6, 7], [0, 1])
    rows.keep(1, [8, 9, 1], [0, 2])
    chains = [3, 1], [2], [4, 4, 4]
    rows.feed([0, 1, 2], chains, None)
    for slot, block in enumerate(chains):
        rows.keep(slot, block, range(len(block)))


HISTORIES = [[7, 1, 200, 31, 7, 7, 80, 16, 3, 44, 21], [5], [9, 9, 9, 3]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_node_says_what_its_path_says(architecture: str) -> None:
    """Also after accepted paths were moved together, and with windows that end inside a tree."""
    rows = Rows(runner(architecture), HISTORIES)
    life(rows)
    assert rows.worst < ROUNDED.get(architecture, ERROR)
    assert rows.columns == (3 + 10) + (3 + 13) + 6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2-sliding"])
def test_by_every_method(architecture: str, method: str) -> None:
    rows = Rows(runner(architecture, method), HISTORIES)
    life(rows)
    assert rows.worst < ERROR
    assert rows.columns > 30


@pytest.mark.parametrize("method", ["reference", "pad", "bifurcated"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2-sliding", "gemma2", "gpt-oss"])
def test_beside_shared_prompts(architecture: str, method: str) -> None:
    rows = Rows(runner(architecture, method), HISTORIES, prompts=[9, None, 4])
    life(rows)
    assert rows.worst < ROUNDED.get(architecture, ERROR)
    assert rows.runner.cache.prefixes[0] is not None


@settings(max_examples=30)
@given(st.data())
def test_random_trees_by_random_methods(data: st.DataObject) -> None:
    architecture = data.draw(st.sampled_from(["llama", "qwen2-sliding"]))
    made = runner(architecture, data.draw(st.sampled_from(METHODS)))
    slots = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
    prompts = [9, None, 4] if made.shares and data.draw(st.booleans()) else None
    rows = Rows(made, HISTORIES, prompts)
    for _ in range(data.draw(st.integers(1, 3))):
        nodes = data.draw(st.lists(st.integers(0, 9), min_size=len(slots), max_size=len(slots)))
        random_round(rows, slots, nodes, data.draw(st.integers(0, 1000)))
    assert rows.worst < ERROR


# ── negative controls: each is caught by the checks above ───────────────────────────────────────────────────────────


def siblings_visible(parents: Any, counts: Any) -> tuple[Any, Any]:
    depths, words = layout(parents, counts)
    return depths, np.tile(chain_words(words.shape[1]), (len(words), 1))


def positions_by_column(parents: Any, counts: Any) -> tuple[Any, Any]:
    depths, words = layout(parents, counts)
    return np.tile(np.arange(depths.shape[1]), (len(depths), 1)), words


def window_by_column(words: Tensor, positions: Tensor, window: int | None) -> Tensor:
    return within(words, torch.arange(words.shape[1]).expand(words.shape), window)


def without_window(words: Tensor, positions: Tensor, window: int | None) -> Tensor:
    return words


def in_wrong_order(self: SlotCache, slot: int, start: int, cells: Sequence[int], gather: Any = SlotCache.gather) -> None:
    gather(self, slot, start, cells[::-1])


def not_moved(self: SlotCache, slot: int, start: int, cells: Sequence[int]) -> None:
    pass


PLAN = "shoal.models.cache.pass_plan"
SABOTAGE: dict[str, tuple[str, Any]] = {
    "siblings are visible": (f"{PLAN}.layout", siblings_visible),
    "positions by column": (f"{PLAN}.layout", positions_by_column),
    "window by column": ("shoal.models.attention.within", window_by_column),
    "window forgotten in the tree": ("shoal.models.attention.within", without_window),
    "kept in the wrong order": ("shoal.models.cache.SlotCache.gather", in_wrong_order),
    "not moved": ("shoal.models.cache.SlotCache.gather", not_moved),
}


@pytest.mark.parametrize("method", ["reference", "pad", "split"])
@pytest.mark.parametrize("name", SABOTAGE)
def test_what_is_wrong_shows(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pad` and `split` make their masks in different places. Mistakes cost 0.05 to 10."""
    made = runner("qwen2-sliding", method)
    monkeypatch.setattr(*SABOTAGE[name])
    rows = Rows(made, HISTORIES)
    deep, block = [-1, -1, 1, 2, 3, 4, 5, 6, 7, 8], [*range(40, 51)]  # longer than the window, and a sibling before it
    for _ in range(2):
        rows.feed([0, 1], [block, block], [deep, deep])
        for slot in (0, 1):
            rows.keep(slot, block, path_of(deep, 9))
    assert rows.worst > 0.01


# ── words and positions ─────────────────────────────────────────────────────────────────────────────────────────────


def test_words_and_depths_by_hand() -> None:
    depths, words = layout([[-1, 0, -1, 2, 0], [-1], []], [6, 2, 1])
    assert depths.tolist() == [[0, 1, 2, 1, 2, 2], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]  # unused columns go on as a chain
    own = [[0b1, 0b11, 0b111, 0b1001, 0b11001, 0b100011], *[[0b1, 0b11, 0b111, 0b1111, 0b11111, 0b111111]] * 2]
    assert words.tolist() == own


def test_a_chain_is_not_a_tree() -> None:
    assert not branching(None)
    assert not branching([range(-1, 4), [], [-1, 0, 1]])
    assert branching([range(-1, 4), [-1, -1]])
    plan = Plan([0, 1], [4, 7], [5, 1], CPU, parents=[range(-1, 3), []])
    assert (plan.parents, plan.words, Masks(plan).tree()) == (None, None, None)


def test_the_largest_tree_uses_every_bit() -> None:
    """Also the sign; a row of 64 columns sees what the definition says."""
    tree = random_tree(MOST_NODES, torch.Generator().manual_seed(0))
    visible = Masks(Plan([0], [3], [64], CPU, parents=[tree])).visible()[0]
    for column in range(64):
        assert visible[column].nonzero().flatten().tolist() == [0, 1, 2, *(3 + c for c in path_of(tree, column))]


@pytest.mark.parametrize(
    ("parents", "counts", "error", "message"),
    [
        ([[-1] * 64], [65], RequestError, "at most 63 nodes, got 64"),
        ([[-1, -1]], [4], InternalError, "trees of .2. nodes in blocks of .4. columns"),
        ([[-1, 1]], [3], InternalError, "whose parent does not come before it"),
        ([[-2, -1]], [3], InternalError, "whose parent does not come before it"),
    ],
)
def test_what_is_no_tree(parents: list[list[int]], counts: list[int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Plan([0], [0], counts, CPU, parents=parents)


def test_a_model_that_counts_positions_itself_takes_chains_only() -> None:
    mpt = loading.wrap(tiny_model("mpt"), "an MPT", checked=False)
    mpt.memory.reserve(1, 20)
    assert not mpt.takes_trees
    assert runner("llama").takes_trees
    mpt.feed([0], torch.ones(1, 3, dtype=torch.int64), [3], parents=[[-1, 0]])
    with pytest.raises(UnsupportedModel, match="an MPT cannot verify draft trees"):
        mpt.feed([0], torch.ones(1, 3, dtype=torch.int64), [3], parents=[[-1, -1]])


@pytest.mark.parametrize(("wrong", "takes"), [(None, True), (siblings_visible, False), (positions_by_column, False)])
def test_the_self_check_tries_a_tree(wrong: Any, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that only trees go wrong with is not given any."""
    if wrong is not None:
        monkeypatch.setattr(f"{PLAN}.layout", wrong)
    checked = loading.wrap(tiny_model("llama"), "a llama")
    assert checked.takes_trees is takes
    assert checked.self_check_error is not None


# ── the cache ───────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30)
@given(st.data())
def test_kept_columns_move_together_in_place(data: st.DataObject) -> None:
    """Cells hold their own number; those of other slots, and the addresses, stay."""
    cache, offset = SlotCache(), data.draw(st.sampled_from([0, 4]))
    cache.reserve(3, 20, 9)
    cache.begin(Plan([0, 1, 2], [0, 0, 0], [18, 18, 18], CPU))
    states = torch.arange(54.0).view(3, 1, 18, 1)
    for layer in range(2):
        cache.update(states, -states, layer)
    cache.end()
    if offset:
        cache.prefixes[1], cache.lengths[1] = Prefix(2, offset), 18 + offset
    length, columns = 5, data.draw(st.lists(st.integers(0, 12), unique=True).map(sorted))
    before = [tensor.data_ptr() for store in cache.stores() for tensor in store]
    cache.keep(1, offset + length, columns)
    assert cache.lengths == [18, offset + length + len(columns), 18]
    for keys, values, *_ in cache.stores():
        assert keys[1, : length + len(columns), 0, 0].tolist() == [
            18 + c for c in [*range(length), *(length + c for c in columns)]
        ]
        assert torch.equal(keys, -values)
        assert torch.equal(keys[[0, 2], :18], states.transpose(1, 2)[[0, 2]])
    assert [tensor.data_ptr() for store in cache.stores() for tensor in store] == before


def test_a_run_moves_nothing() -> None:
    rows = Rows(runner("llama"), HISTORIES)
    with patch.object(SlotCache, "gather", side_effect=AssertionError):
        rows.feed([0], [[1, 2, 3, 4]], [[-1, 0, 0]])
        rows.keep(0, [1, 2, 3, 4], [0, 1, 2])


@pytest.mark.parametrize("columns", [[0, 2, 1], [0, 0], [-1, 0], [0, 3], [1, 3], range(4)])
def test_columns_that_cannot_be_kept(columns: Sequence[int]) -> None:
    rows = Rows(runner("llama"), HISTORIES)
    rows.feed([1], [[1, 2, 3]], [[-1, -1]])
    with pytest.raises(InternalError, match=r"cannot (keep columns|roll slot 1 of length 4 back to 5)"):
        rows.runner.cache.keep(1, 1, columns)
    assert rows.runner.cache.lengths[1] == 4


# ── scripted models ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_scripted_model_follows_trees() -> None:
    script = hashed(VOCABULARY, 3)
    made = scripted(script, VOCABULARY, dtype=torch.float64)
    made.memory.reserve(2, 30)
    made.feed([0, 1], torch.tensor([[4, 5, 6], [7, 0, 0]]), [3, 1])
    tree, block = [-1, 0, -1, 2], [8, 9, 10, 11, 12]
    logits = made.feed([1, 0], torch.tensor([block, [1, 2, 0, 0, 0]]), [5, 2], parents=[tree, [-1]])
    for column in range(5):
        assert torch.equal(logits[0, column], script((7, *(block[c] for c in path_of(tree, column)))))
    assert torch.equal(logits[1, 1], script((4, 5, 6, 1, 2)))
    made.cache.keep(1, 1, [0, 3, 4])
    made.cache.keep(0, 3, [0])
    logits = made.feed([0, 1], torch.tensor([[3], [3]]), [1, 1])
    assert torch.equal(logits[1, 0], script((7, 8, 11, 12, 3)))
    assert torch.equal(logits[0, 0], script((4, 5, 6, 1, 3)))


# ── strict: bits ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen2-sliding"])
def test_in_strict_passes_a_path_has_the_bits_of_a_chain(architecture: str, dtype: torch.dtype) -> None:
    """Wherever in the tree its nodes stand, and whatever the rows beside it; also after the path was kept."""
    made = loading.wrap(tiny_model(architecture).to(dtype), architecture, strict=True)
    generator = torch.Generator().manual_seed(0)
    tree, block = random_tree(14, generator), random_ids(15, generator)
    history = random_ids(37, generator)

    def fed(block: Sequence[int], tree: Tree | None, others: int) -> tuple[Runner, Tensor]:
        one = made.fork()
        one.memory.reserve(2, 80)
        one.feed([0], torch.tensor([history]), [37], want_logits=False)
        one.feed([1], torch.tensor([[7] * others]), [others], want_logits=False)
        trees = None if tree is None else [tree, [-1]]
        tokens = torch.tensor([block, [3] * len(block)])
        return one, one.feed([0, 1], tokens, [len(block), 2], parents=trees if tree else [range(-1, len(block) - 2), [-1]])[
            0
        ]

    one, logits = fed(block, tree, 5)
    for column in range(len(block)):
        path = path_of(tree, column)
        if len(path) == 1:
            continue
        alone, chain = fed([block[c] for c in path], None, 20)
        assert torch.equal(logits[path], chain[: len(path)])
    column = max(range(15), key=lambda c: len(path_of(tree, c)))
    path = path_of(tree, column)
    assert path != list(range(len(path)))
    alone, _ = fed([block[c] for c in path], None, 20)
    one.cache.keep(0, 37, path)
    one.cache.keep(1, 5, [0])
    last = [r.feed([0], torch.tensor([[9, 9]]), [2]) for r in (one, alone)]
    assert torch.equal(*last)
