"""Prompts kept for later rows that begin alike: the same tokens and log-probabilities, less to compute, nobody else's tokens.

Tests of: models.cache.kept_prompts, engine.prefix_cache, engine.scheduler,
types.stats.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serving import pair as scripted_pair
from serving import served
from shoal.api import Shoal
from shoal.config import Limits, Sampling
from shoal.drafting import draft_slots
from shoal.engine import prefix_cache
from shoal.engine.engine import Engine
from shoal.engine.prefix_cache import PrefixCache, PrefixMemory
from shoal.engine.scheduler import MIN_WAIT
from shoal.errors import BadLogits, RequestError
from shoal.lookahead.controller import Fixed
from shoal.models.cache.kept_prompts import MIN_TOKENS, KeptPrefixes, PrefixTree
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.models.weights.parameter import _sums_of, sums
from shoal.sampling.acceptance import Coupled
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import hashed, runner, scripted
from shoal.types.requests import Request, Row
from shoal.types.rounds import Commit
from shoal.types.stats import Stats

ROOM = 1 << 20
SYSTEM = tuple(1 + i * i % 53 for i in range(MIN_WAIT + 20))
UNSEEN = sorted(token for token in set(SYSTEM) if token > 40)[:2]
TAILS = [(7, 3, 9, 1), (8, 2, 2, 5, 6), (7, 3, 1)]


def tokens_of(rows: Sequence[Row]) -> list[list[int]]:
    return [row.tokens[row.prompt_length :] for row in rows]


def pair(architecture: str = "llama") -> tuple[Runner, Runner]:
    return runner(tiny_model(architecture, layers=3), 256), runner(tiny_model("llama", seed=1, layers=1), 256)


def engine(k: int = 3, prefix_bytes: int = ROOM, **options: Any) -> Engine:
    return engine_of(*pair(), Fixed(k), max_batch=8, rule=Coupled(), prefix_bytes=prefix_bytes, **options)


def ask(of: Engine, prompt: Sequence[int], n: int = 1, owner: str = "") -> list[Row]:
    rows = of.submit(Request(tuple(prompt), n, Sampling(seed=len(prompt)), Limits(max_new_tokens=12), owner=owner))
    run(of)
    return rows


def run(of: Engine) -> None:
    while of.step():
        pass


# ── which cells ─────────────────────────────────────────────────────────────────────────────────────────────────────

texts = st.lists(st.integers(0, 2), max_size=9)
steps = st.lists(st.tuples(st.sampled_from(["a", "b"]), texts, st.booleans()), max_size=40)


@given(steps, st.integers(1, 12))
def test_cells_hold_what_they_are_found_for(taken: list[tuple[str, list[int], bool]], capacity: int) -> None:
    """Whatever is kept, looked up and given up: a cell found for a token holds it, after the same tokens of the same owner."""
    tree = PrefixTree(capacity)
    held: dict[int, tuple[str, tuple[int, ...]]] = {}
    for owner, tokens, adds in taken:
        if adds:
            before, cells = tree.add(owner, tokens)
            assert len(set(cells)) == len(cells)
            held |= {cell: (owner, tuple(tokens[: before + i + 1])) for i, cell in enumerate(cells)}
            assert before + len(cells) == min(len(tokens), capacity)
        found = tree.find(owner, tokens)
        assert [held[cell] for cell in found] == [(owner, tuple(tokens[: i + 1])) for i in range(len(found))]
        assert not adds or len(found) == min(len(tokens), capacity)
        assert tree.used <= capacity


def test_a_node_that_is_split_ends_the_walk() -> None:
    """What stands below it belongs to other tokens: [0, 0, 1, 5] would get the cell of [0, 1, 5]."""
    tree = PrefixTree(10)
    for tokens in ([0, 0], [0, 0, 1]):
        tree.add("", tokens)
    assert tree.add("", [0, 1, 5]) == (1, [3, 4])
    assert tree.find("", [0, 1, 5]) == [0, 3, 4]
    assert tree.find("", [0, 0, 1, 5]) == [0, 1, 2]


def test_what_was_used_last_stays() -> None:
    tree = PrefixTree(8)
    tree.add("", [1, 2, 3, 4])
    tree.add("", [1, 2, 5])
    tree.add("", [6, 7])
    assert tree.used == 7
    tree.find("", [1, 2, 3])
    assert tree.add("", [8, 9]) == (0, tree.find("", [8, 9]))
    assert [len(tree.find("", tokens)) for tokens in ([1, 2, 3, 4], [1, 2, 5], [6, 7])] == [4, 2, 2]
    tree.add("", [0] * 8)
    assert tree.used == 8
    assert not tree.find("", [1, 2])


class Owner(str):
    """An owner that counts how often it is looked up."""

    looked_up = 0

    def __hash__(self) -> int:
        Owner.looked_up += 1
        return super().__hash__()


def test_giving_up_an_owner_does_not_look_at_the_others() -> None:
    """Thousands of owners with a prompt each, which go one by one: each costs a few look-ups."""
    tree, Owner.looked_up = PrefixTree(2_000), 0
    for number in range(4_000):
        tree.add(Owner(number), [1])
    assert len(tree._roots) == tree.used == 2_000
    assert Owner.looked_up <= 4 * 4_000


def test_room_that_is_not_used_takes_nothing() -> None:
    tree = PrefixTree(1 << 60)
    assert tree.add("", [1, 2, 3]) == (0, [0, 1, 2])
    assert tree.used == 3


def test_a_tree_takes_what_it_says() -> None:
    """The figure of a server's kept prompts counts the trees: Python's own numbers would take six times as much."""
    tree, chance = PrefixTree(30_000), random.Random(0)
    tracemalloc.start()
    try:
        for number in range(600):  # twice as many tokens as there is room for
            tree.add(
                str(number % 5), [chance.randrange(3) for _ in range(10)] + [chance.randrange(50_000) for _ in range(90)]
            )
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 29_000 < tree.used <= 30_000
    assert 0.5 * tree.nbytes < taken < 1.5 * tree.nbytes


def test_a_server_tells_the_trees_of_its_kept_prompts() -> None:
    with served(scripted_pair(), prefix_bytes=1 << 20) as server:
        assert server.post(prompt="hello " * 20, max_tokens=2).status_code == 200
        kept = server.worker.thread.engine.kept_prefixes
        assert kept is not None
        assert server.metric("shoal_prefix_bytes") == kept.nbytes > kept.allocated_bytes > 0


def test_no_owner_is_remembered_of_whom_nothing_is_kept() -> None:
    tree = PrefixTree(4)
    for owner in map(str, range(50)):
        tree.add(owner, [1, 2, 3])
        tree.find(owner + "?", [1, 2, 3])
    tree.add("nobody", [])
    assert list(tree._roots) == ["49"]
    assert len(tree._by_use) == 1


# ── through the engine ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["0-512-copied", "3-7-shared"])
@pytest.mark.parametrize("sharing", ["copied", "shared"])
@pytest.mark.parametrize(("k", "chunk"), [(0, 512), (3, 512), (3, 7)])
def test_later_prompts_compute_what_is_new(k: int, chunk: int, sharing: str) -> None:
    """One after the other: the second begins as the first, the third is the second with its answer and a question."""
    plain, keeping = engine(k, 0, prefix_sharing=sharing, chunk=chunk), engine(k, prefix_sharing=sharing, chunk=chunk)
    first, second = [*SYSTEM, *TAILS[0]], [*SYSTEM, *TAILS[1]]
    for prompt, n in ((first, 3), (second, 1)):
        assert_same(ask(plain, prompt, n), ask(keeping, prompt, n))
    assert keeping.stats.restored_tokens == len(SYSTEM)
    before = keeping.stats.prefill_tokens
    assert before == plain.stats.prefill_tokens - len(SYSTEM)
    third = [*second, *tokens_of(ask(keeping, second))[0], 4, 4, 2]
    again = len(second) - 1
    assert keeping.stats.prefill_tokens == before, "the same prompt again is copied whole"
    assert_same(ask(plain, third, 2), ask(keeping, third, 2))
    restored = keeping.stats.restored_tokens - len(SYSTEM) - again
    assert restored >= len(second) + 11, "the answer is kept but for its last token, which no pass has read"
    assert keeping.stats.drafted > 0 or not k


def assert_same(one: Sequence[Row], other: Sequence[Row]) -> None:
    assert tokens_of(one) == tokens_of(other)
    for row, kept in zip(one, other, strict=True):
        assert torch.allclose(torch.tensor(row.logprobs), torch.tensor(kept.logprobs), atol=1e-5)


def test_prompts_that_arrive_together_compute_a_common_beginning_once() -> None:
    plain, keeping = engine(prefix_bytes=0), engine()
    found = []
    for each in (plain, keeping):
        requests = [Request((*SYSTEM, *tail), 2, Sampling(seed=1), Limits(max_new_tokens=9)) for tail in TAILS]
        groups = each.submit_all(requests)
        run(each)
        found.append([row for rows in groups for row in rows])
    assert_same(*found)
    tails = [len(tail) - 1 for tail in TAILS]
    assert plain.stats.prefill_tokens == 3 * len(SYSTEM) + sum(tails)
    shared_with_first = 2  # the third tail begins as the first
    assert keeping.stats.prefill_tokens == len(SYSTEM) + sum(tails) - shared_with_first
    assert keeping.stats.rounds <= plain.stats.rounds + 1


def test_short_beginnings_are_computed() -> None:
    keeping = engine()
    ask(keeping, [1] * MIN_TOKENS)
    ask(keeping, [*[1] * (MIN_TOKENS - 1), 2, 3])
    assert keeping.stats.restored_tokens == 0
    ask(keeping, [*[1] * MIN_TOKENS, 2, 3])
    assert keeping.stats.restored_tokens == MIN_TOKENS


def test_owners_do_not_see_each_other() -> None:
    keeping = engine()
    for owner in ("one", "other", "one"):
        ask(keeping, [*SYSTEM, 3], owner=owner)
    assert keeping.stats.restored_tokens == len(SYSTEM)
    together = [Request((*SYSTEM, 4), 1, limits=Limits(max_new_tokens=4), owner=owner) for owner in "ab"]
    before = keeping.stats.prefill_tokens
    rows = [row for group in keeping.submit_all(together) for row in group]
    keeping.step()
    assert all(row.rounds for row in rows), "one waits for the tokens of the other"
    run(keeping)
    assert keeping.stats.prefill_tokens == before + 2 * len(SYSTEM)


def test_memory_is_bounded_and_used_again() -> None:
    target, _ = pair()
    room = 60 * target.memory.token_bytes + 5
    keeping, plain = engine(prefix_bytes=room), engine(prefix_bytes=0)
    for start in range(5):
        prompt = [(start + i * 7) % 50 + 1 for i in range(25)]
        assert_same(ask(plain, prompt), ask(keeping, prompt))
        assert keeping.kept_prefixes is not None
        assert keeping.kept_prefixes.allocated_bytes <= room
    ask(keeping, [*prompt, 3])
    assert keeping.stats.restored_tokens == 25


def counted(feed: Callable[..., int], fed: list[int]) -> Callable[..., int]:
    """The same function; the tokens that it computes are noted."""

    def feeding(*asked: Any) -> int:
        fed.append(feed(*asked))
        return fed[-1]

    return feeding


@pytest.mark.parametrize("sharing", ["copied", "shared"])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_draft_model_keeps_its_own(sharing: str, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target drafts for itself, so that all drafts are accepted as long as its keys are right."""
    fed: list[int] = []
    monkeypatch.setattr(draft_slots, "feed_prompts", counted(draft_slots.feed_prompts, fed))
    monkeypatch.setattr(draft_slots, "feed_prefix", counted(draft_slots.feed_prefix, fed))
    target = runner(tiny_model("llama"), 256)
    keeping = engine_of(target, target, Fixed(3), max_batch=8, rule=Coupled(), prefix_bytes=ROOM, prefix_sharing=sharing)
    if wrong:  # the first token all over, in the draft model's alone
        kept = keeping.drafter.memory.slots.kept
        found = kept._cells_of
        monkeypatch.setattr(kept, "_cells_of", lambda *asked: found(*asked)[:1] * len(found(*asked)))
    ask(keeping, [*SYSTEM, *TAILS[0]], 2)
    ask(keeping, [*SYSTEM, *TAILS[1]], 2)
    assert sum(fed) == len(SYSTEM) + len(TAILS[0]) - 1 + len(TAILS[1]) - 1
    assert keeping.stats.drafted > 0
    assert (keeping.stats.accepted == keeping.stats.drafted) != wrong


def test_a_row_that_fails_leaves_nothing() -> None:
    def poisoned(ids: tuple[int, ...]) -> Tensor:
        logits = hashed(12, 0)(ids)
        return logits * torch.nan if ids[8:9] == (9,) else logits

    failing = engine_of(scripted(poisoned, 12), None, Fixed(0), max_batch=4, prefix_bytes=ROOM)
    good, bad = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 2]
    rows = [*ask(failing, bad), *ask(failing, bad)]
    assert [type(row.error) for row in rows] == [BadLogits, BadLogits]
    assert failing.stats.restored_tokens == 0
    assert not ask(failing, good)[0].error


def test_strict_rows_have_the_bits_of_computed_prompts() -> None:
    target = wrap(tiny_model("llama").to(torch.bfloat16), "tiny", strict=True)
    plain, keeping = (engine_of(target, None, Fixed(0), max_batch=8, prefix_bytes=room) for room in (0, ROOM))
    for prompt in ([*SYSTEM, 7], [*SYSTEM, 3, 3, 9]):
        one, other = ask(plain, prompt), ask(keeping, prompt)
        assert [row.logprobs for row in one] == [row.logprobs for row in other]
    assert keeping.stats.restored_tokens == len(SYSTEM)


def test_no_prefixes_are_kept_where_hidden_states_are_read() -> None:
    reading = pair()[0]
    reading.hidden_layers = (1,)
    assert not reading.can_keep_prefixes
    assert engine(prefix_bytes=0).kept_prefixes is None


@pytest.mark.parametrize("k", [0, 3])
def test_kept_tokens_take_no_more_than_they_may(k: int) -> None:
    """Their cells grow by doubling, up to what there may be, and not beyond."""
    target, drafter = pair()
    most = 100 * (target.memory.token_bytes + (drafter.memory.token_bytes if k else 0))
    keeping = engine(k, prefix_bytes=most) if k else engine_of(target, None, Fixed(0), rule=Coupled(), prefix_bytes=most)
    assert keeping.kept_prefixes is not None
    sizes = []
    for first in range(1, 7):
        ask(keeping, [first, *SYSTEM[:20]])
        sizes.append(keeping.kept_prefixes.allocated_bytes)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 2
    assert 0.9 * most < sizes[-1] <= most  # those of the draft model included


def test_over_http() -> None:
    """A key's later requests find its prompts, the usage and the metrics say so, and other keys find nothing."""
    with served(scripted_pair(), prefix_bytes=ROOM, keys=("one", "other")) as server:
        asked = "A long beginning. " * 4

        def cached(key: str, prompt: str) -> int:
            body = {"prompt": prompt, "max_tokens": 4, "seed": 1}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [cached("one", asked), cached("one", asked + "More."), cached("other", asked)] == [0, len(asked), 0]
        assert server.metric("shoal_restored_tokens_total") == len(asked)
        assert server.metric("shoal_prefix_bytes") > 0


# ── across calls of the library ─────────────────────────────────────────────────────────────────────────────────────


def loaded(prefix_memory: int = ROOM, *, itself: bool = False, architecture: str = "llama") -> Shoal:
    """A pair; or a target that drafts for itself, so that all drafts are accepted as long as its keys are right."""
    target, draft = pair(architecture)
    return Shoal(target, target if itself else draft, max_batch=8, prefix_memory=prefix_memory)


def answers(of: Shoal, prompts: Any, n: int = 1, **options: Any) -> tuple[list[tuple[int, ...]], Stats]:
    result = of.generate(prompts, n, **{"seed": 5, "max_new_tokens": 12, "lookahead": 3} | options)
    return [sample.token_ids for output in result for sample in output.samples], result.stats


@pytest.mark.parametrize("itself", [False, True])
def test_later_calls_compute_what_is_new(itself: bool) -> None:
    plain, keeping = loaded(0, itself=itself), loaded(itself=itself)
    first = [*SYSTEM, *TAILS[0]]
    (answer,), stats = answers(keeping, [first])
    assert (answer,) == tuple(answers(plain, [first])[0])
    assert (stats.restored_tokens, stats.prefill_tokens) == (0, len(first) - 1)
    third = [*first, *answer, 4, 2]  # the next turn of a chat
    found, stats = answers(keeping, [third, [*SYSTEM, 9, 9]], 2)
    expected, computed = answers(plain, [third, [*SYSTEM, 9, 9]], 2)
    assert found == expected
    assert stats.restored_tokens == len(first) + 11 + len(SYSTEM)
    assert stats.prefill_tokens == computed.prefill_tokens - stats.restored_tokens
    assert stats.drafted > 0
    assert stats.accepted == stats.drafted or not itself
    found, stats = answers(keeping, [third], lookahead="off")  # an engine without a drafter
    assert (found, stats.restored_tokens) == (answers(plain, [third])[0], len(third) - 1)
    assert answers(plain, [third])[1].restored_tokens == 0


def test_streams_that_take_turns_share_what_is_kept() -> None:
    plain, keeping = loaded(0), loaded()
    prompts = [[*SYSTEM, *tail] for tail in TAILS]
    answers(keeping, [prompts[0]])
    streams = [keeping.stream([prompt], seed=5, max_new_tokens=12, lookahead=3) for prompt in prompts]
    for _ in zip(*streams, strict=False):
        pass
    for stream, prompt in zip(streams, prompts, strict=True):
        for _ in stream:
            pass
        assert [stream.result()[0].samples[0].token_ids] == answers(plain, [prompt])[0]
        assert stream.result().stats.restored_tokens >= len(SYSTEM)


def written_in_place(hf: Any) -> None:
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.mul_(1.5)


def merged(hf: Any) -> None:
    """As adapters are, behind autograd's back, and into one layer."""
    weight = hf.model.layers[-1].self_attn.v_proj.weight
    weight.data += torch.ones_like(weight)


def hooked(hf: Any) -> None:
    hf.model.layers[-1].self_attn.v_proj.register_forward_hook(lambda module, asked, out: out * -2)


def rows_of_the_table(hf: Any) -> None:
    """Two rows that a pass over a few tokens does not read; the sum over the rows stays."""
    hf.model.embed_tokens.weight.data[UNSEEN] = hf.model.embed_tokens.weight.data[UNSEEN[::-1]]


def two_signs(hf: Any) -> None:
    """The sums over the rows stay, and those of the numbers' bits."""
    table = hf.model.embed_tokens.weight.data
    table[UNSEEN] = torch.where(table[UNSEEN].prod(0) < 0, -table[UNSEEN], table[UNSEEN])


def a_row_in_place(hf: Any) -> None:
    with torch.no_grad():
        hf.model.embed_tokens.weight[SYSTEM[0]] *= -2


def an_expert(hf: Any) -> None:
    unseen(hf, [hf.model.layers[1].mlp.experts.down_proj.data[expert] for expert in range(4)], -1.0)


def a_buffer(hf: Any) -> None:
    unseen(hf, hf.model.layers[1].mlp.gate.e_score_correction_bias, 0.5)


def unseen(hf: Any, parts: Any, added: float) -> None:
    """Writes into the first part that changes nothing of token 0, the only one that is looked at, but something of the prompt."""

    def logits() -> list[torch.Tensor]:
        with torch.no_grad():
            return [hf(torch.tensor([ids])).logits for ids in ([0], SYSTEM)]

    before = logits()
    for part in parts:
        kept = part.clone()
        part += added
        if [torch.equal(*pair) for pair in zip(before, logits(), strict=True)] == [True, False]:
            return
        part.copy_(kept)
    raise AssertionError("token 0 depends on each part")


def a_hook_of_a_token(hf: Any) -> None:
    def other(module: Any, asked: Any) -> Any:
        return (torch.where(asked[0] == UNSEEN[0], UNSEEN[1], asked[0]),)

    hf.model.embed_tokens.register_forward_pre_hook(other)


def a_call_of_its_own(hf: Any) -> None:
    embed = hf.model.embed_tokens.forward
    hf.model.embed_tokens.forward = lambda ids: embed(torch.where(ids == UNSEEN[0], UNSEEN[1], ids))


BY_SUMS = (rows_of_the_table, two_signs, an_expert, a_buffer, a_hook_of_a_token, a_call_of_its_own)
"""Changes that a pass alone does not see."""


BY_PASSES = (written_in_place, merged, hooked)


@pytest.mark.parametrize(
    ("change", "looks"),
    [
        *product((*BY_PASSES, a_row_in_place, *BY_SUMS), ("at the sums", "at a pass alone")),
        *product(BY_PASSES, ("never",)),
    ],
)
def test_other_weights_forget_what_is_kept(
    change: Callable[[Any], None], looks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: where nobody looks, keys of the old weights are found, and log-probabilities are wrong."""
    if looks == "never":
        monkeypatch.setattr(PrefixMemory, "recognise", lambda self, target: None)
    elif looks == "at a pass alone":
        monkeypatch.setattr(prefix_cache, "sums", lambda hf: [])
    monkeypatch.setattr(prefix_cache, "PROBED", 1)
    architecture = "deepseek-v3" if change in (an_expert, a_buffer) else "llama"
    keeping, plain = (loaded(room, architecture=architecture) for room in (ROOM, 0))
    answers(keeping, [[*SYSTEM, 3]])
    for each in (keeping, plain):
        change(each.target.hf)
    results = [each.generate([[*SYSTEM, 4]], seed=5, max_new_tokens=8, lookahead=3) for each in (keeping, plain)]
    kept, fresh = ([torch.tensor(s.logprobs) for s in result[0].samples] for result in results)
    right = [len(a) == len(b) and torch.allclose(a, b, atol=1e-5) for a, b in zip(kept, fresh, strict=True)] == [True]
    seen = looks == "at the sums" or (looks == "at a pass alone" and change in BY_PASSES)
    assert (right, results[0].stats.restored_tokens == 0) == (seen, seen)


def test_what_is_kept_stays_while_nothing_changes() -> None:
    keeping = loaded(architecture="deepseek-v3")
    for restored in (0, len(SYSTEM), len(SYSTEM)):
        assert answers(keeping, [[*SYSTEM, restored % 50]])[1].restored_tokens == restored
    for tensor in (
        torch.arange(5, dtype=torch.uint8),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(9.0)[1:],
        torch.tensor(True),
    ):
        alone, again = ([*_sums_of(each)] for each in (tensor, tensor.clone()))
        assert len(alone) == len(again) == 2
        assert all(map(torch.equal, alone, again))


def exchanged_layers(model: Any) -> None:
    model[0].weight.data, model[1].weight.data = model[1].weight.data, model[0].weight.data


WRITES: dict[str, Callable[[Any], object]] = {
    "signs of a column": lambda m: m[0].weight.data[:, 3].neg_(),
    "signs of two numbers": lambda m: m[0].weight.data[:2, 3].neg_(),
    "signs of another column": lambda m: m[1].weight.data[:, 1].neg_(),
    "all signs": lambda m: m[0].weight.data.neg_(),
    "a column by a power of two": lambda m: m[0].weight.data[:, 3].mul_(4),
    "exponents": lambda m: m[0].weight.data[:, 3].mul_(2**16),
    "rows in another order": lambda m: m[0].weight.data.copy_(m[0].weight.data.flip(0)),
    "columns in another order": lambda m: m[0].weight.data.copy_(m[0].weight.data.roll(4, 1)),
    "two layers": exchanged_layers,
    "a buffer in another order": lambda m: m.order.copy_(m.order.flip(0)),
    "a tensor that is no buffer": lambda m: m.plain.add_(1),
    "a tensor in a list": lambda m: m[0].many[0].add_(1),
    "a number in a dictionary": lambda m: m.scaling.update(default=3.0),
    "a number in a list": lambda m: m.sizes.append(2),
    "a setting": lambda m: setattr(m[1], "top_k", 2),
}
"""Writes into weights of linear layers and into what modules have beside them."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WRITES)
def test_each_write_changes_the_sums(name: str, dtype: torch.dtype) -> None:
    layers = [torch.nn.Linear(64, 64, dtype=dtype) for _ in range(2)]
    model: Any = torch.nn.Sequential(*layers)
    model.register_buffer("order", torch.randn(6))
    model.plain, model.scaling, model.sizes = torch.randn(3), {"default": 2.0}, [1]
    layers[0].many = [torch.ones(2)]  # type: ignore[assignment]
    before, again = sums(model), sums(model)
    assert all(map(torch.equal, before, again))
    WRITES[name](model)
    after = sums(model)
    assert len(before) != len(after) or not all(map(torch.equal, before, after))


def test_a_layer_around_the_head_is_other_weights() -> None:
    """One without a weight of its own, as the head has."""
    keeping, plain = loaded(), loaded(0)
    answers(keeping, [[*SYSTEM, 3]])
    for each in (keeping, plain):
        each.target.hf.lm_head = torch.nn.Sequential(each.target.hf.lm_head, torch.nn.Tanh())
    found, stats = answers(keeping, [[*SYSTEM, 4]])
    assert (found, stats.restored_tokens) == (answers(plain, [[*SYSTEM, 4]])[0], 0)
    assert stats.drafted > 0


@pytest.mark.parametrize("wrong", [-1, 1.5, "1GiB", True, None])
def test_what_is_no_number_of_bytes(wrong: Any) -> None:
    with pytest.raises(RequestError, match="prefix_memory must be a number of bytes"):
        loaded(wrong)


# ── wrong ones are caught ───────────────────────────────────────────────────────────────────────────────────────────


def one_cell_late(monkeypatch: pytest.MonkeyPatch) -> None:
    found = KeptPrefixes._cells_of

    def late(self: KeptPrefixes, owner: str, tokens: Sequence[int]) -> list[int]:
        cells = found(self, owner, tokens)
        return [*cells[:1], *cells[:-1]]

    monkeypatch.setattr(KeptPrefixes, "_cells_of", late)


def other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = KeptPrefixes.keep

    def swapped(self: KeptPrefixes, *asked: Any) -> None:
        keep(self, *asked)
        self._layers = self._layers[:1] * len(self._layers)

    monkeypatch.setattr(KeptPrefixes, "keep", swapped)


def one_token_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of an answer is in no cell yet."""

    def learn(self: PrefixCache, commits: Sequence[Commit]) -> None:
        for row in [done.row for done in commits]:
            self._store.keep(self._cache, "", row.tokens, row.slot)

    monkeypatch.setattr(PrefixCache, "learn", learn)


def whosever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the second prompt are looked up by their positions alone."""
    find = PrefixTree.find
    monkeypatch.setattr(PrefixTree, "find", lambda self, owner, tokens: find(self, owner, [*SYSTEM, *tokens[len(SYSTEM) :]]))


@pytest.mark.parametrize("wrong", [one_cell_late, other_layers, one_token_more, whosever_it_is])
def test_a_wrong_cache_is_caught(wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine(prefix_bytes=0)
    second = [*SYSTEM[:-3], 50, 51, 52, *TAILS[1]]
    answer = tokens_of(ask(plain, [*SYSTEM, *TAILS[0]]))[0]
    third = [*SYSTEM, *TAILS[0], *answer, 4, 2]
    right = [ask(plain, prompt) for prompt in (second, third)]
    wrong(monkeypatch)
    keeping = engine()
    ask(keeping, [*SYSTEM, *TAILS[0]])
    found = [ask(keeping, prompt) for prompt in (second, third)]
    with pytest.raises(AssertionError):
        assert_same([row for rows in right for row in rows], [row for rows in found for row in rows])
