"""Layers that attend within chunks of positions, and those that count their columns (Llama 4): Transformers' ids past many chunks.

Tests of: models.attention, models.bridge, models.cache, models.structure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from attention_paths import RECURRENT_HERE, greedy_ids
from shoal.config import Limits, Sampling
from shoal.drafting.model import ModelDrafter
from shoal.drafting.ngram import NGramDrafter
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.suffix import SuffixDrafter
from shoal.engine.engine import Engine
from shoal.engine.prefix_cache import PrefixMemory
from shoal.errors import UnsupportedModel
from shoal.lookahead.controller import Fixed
from shoal.models import bridge
from shoal.models.attention import AttentionInputs
from shoal.models.cache import SlotCache
from shoal.models.cache.pass_plan import Plan
from shoal.models.compiled.captures import CAPTURED
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.testing import VOCABULARY, tiny_model
from shoal.testing.architectures import WINDOW
from shoal.testing.scripted import adversary, mixed, says, scripted
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree

pytestmark = pytest.mark.skipif(not RECURRENT_HERE, reason="an older Transformers")

K, NEW = 5, 300
PROMPTS = tuple(
    tuple(1 + (seed + i * i) % 251 for i in range(count)) for seed, count in enumerate((1, 2 * WINDOW + 3, WINDOW))
)


@cache
def hf() -> Any:
    return tiny_model("llama4", max_position_embeddings=512)


@cache
def target() -> Runner:
    return wrap(hf(), "llama4")


@cache
def expected(new: int = NEW) -> list[list[int]]:
    """What Transformers' own `generate` says."""
    return [list(greedy_ids(hf(), ids, new)) for ids in PROMPTS]


def half_right() -> Runner:
    """Says the target's tokens in two places of three."""
    right = says([ids + tuple(new) for ids, new in zip(PROMPTS, expected(), strict=True)], VOCABULARY)
    return scripted(mixed(right, adversary(right, VOCABULARY), every=3), VOCABULARY, dtype=torch.float32)


def ask(of: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, n: int = 1, new: int = NEW) -> list[list[int]]:
    limits = Limits(max_new_tokens=new)
    rows: list[Row] = []
    for ids in prompts:
        rows += of.submit(Request(tuple(ids), n, Sampling(temperature=0.0), limits))
    while of.step():
        pass
    return [row.tokens[row.prompt_length :] for row in rows]


class Forks(Drafter):
    """Proposes a branch of wrong tokens beside one of the target's."""

    max_nodes = 2 * K

    def propose(self, inputs: DraftInputs) -> DraftTree:
        drafts, parents = [], []
        for row, length in zip(inputs.rows, inputs.lengths, strict=True):
            new = row.tokens[row.prompt_length :]
            said = expected()[PROMPTS.index(tuple(row.tokens[: row.prompt_length]))]
            right = said[len(new) : len(new) + length]
            drafts.append([*(token ^ 1 for token in right), *right])
            parents.append([*range(-1, len(right) - 1), -1, *range(len(right), 2 * len(right) - 1)])
        return DraftTree.of(drafts, parents, device=inputs.uniforms.device)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "model": lambda: ModelDrafter(half_right().fork(), VOCABULARY),
    "itself": lambda: ModelDrafter(target().fork(), VOCABULARY),
    "suffix": SuffixDrafter,
    "tree": Forks,
}


@pytest.mark.slow(but=["tree"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_ids_past_many_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal lengths, whose drafts lie on both sides of a border."""
    plans: list[Plan] = []
    begin = SlotCache.begin
    made = Engine(target(), DRAFTERS[kind](), Fixed(0 if kind == "none" else K), max_batch=3)
    cache_ = made.target.cache
    monkeypatch.setattr(SlotCache, "begin", lambda self, plan: (self is cache_ and plans.append(plan), begin(self, plan))[1])
    assert ask(made, n=2) == [ids for ids in expected() for _ in range(2)]
    if kind in ("model", "itself", "tree"):
        assert 0 < made.stats.accepted <= made.stats.drafted
        across = [plan for plan in plans if any(s // WINDOW < (s + 2) // WINDOW for s in plan.starts) and plan.q > 2]
        assert len(across) > NEW // WINDOW
        assert any(len({start // WINDOW for start in plan.starts}) > 1 for plan in across)
        assert any(plan.parents is not None for plan in across) == (kind == "tree")


# ── what these tests would see ──────────────────────────────────────────────────────────────────────────────────────


def sliding(self: AttentionInputs, size: int) -> AttentionInputs:
    """A window of as many tokens in the place of chunks."""
    return AttentionInputs(**{**vars(self.repeated()), "window": size})


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "no chunks": (bridge, "chunk_of", lambda module: None),
    "windows": (AttentionInputs, "in_chunks", sliding),
    "columns of the longest row": (SlotCache, "get_seq_length", lambda self, *_: max(self.plan.starts)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Engine(target(), DRAFTERS["model"](), Fixed(K), max_batch=3)
    right = expected()
    monkeypatch.setattr(*FAULTS[fault])
    assert ask(made) != right
    with pytest.raises(UnsupportedModel, match="diverges from a plain forward"):
        wrap(hf(), "llama4")


def test_the_chunks_and_the_scale_are_felt() -> None:
    ids = torch.tensor([PROMPTS[1]])
    with torch.inference_mode():
        usual, *others = (
            tiny_model("llama4", **options)(ids).logits[0]
            for options in ({}, {"attention_chunk_size": 64}, {"attn_temperature_tuning": False})
        )
    for other in others:
        assert float((usual[-1] - other[-1]).abs().max()) > 0.1 * float(usual.std())
        assert float((usual[0] - other[0]).abs().max()) < 1e-3


# ── what else a pass may be ─────────────────────────────────────────────────────────────────────────────────────────


def test_chunks_that_hide_nothing_leave_the_pass_to_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute rows up to the first border; beyond it the layers in chunks have a mask of their own."""
    runner, seen = target().fork(), []
    method = runner.method
    runner.method = lambda inputs: (seen.append(inputs.masks.chunk), method(inputs))[1]
    runner.memory.reserve(1, 3 * WINDOW)
    ids = torch.tensor([PROMPTS[1]])
    runner.feed([0], ids[:, :WINDOW], [WINDOW])
    assert seen == [None, None]
    runner.feed([0], ids[:, WINDOW : WINDOW + 1], [1])
    assert seen == [None] * 3  # the layer without chunks


def test_a_pass_is_one_sequence() -> None:
    """Also where no column is unused: the layers that count columns know one row of them."""
    shapes: list[tuple[int, ...]] = []
    runner = wrap(tiny_model("llama4"), "llama4")
    runner.hf.model.embed_tokens.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    runner.memory.reserve(3, 4)
    logits = runner.feed([0, 1, 2], torch.zeros(3, 2, dtype=torch.long), [2, 2, 2])
    assert (shapes, tuple(logits.shape)) == ([(1, 6)], (3, 2, VOCABULARY))


def test_prompts_of_earlier_calls() -> None:
    """Their keys begin in another chunk than the later prompt's end."""
    begun = tuple(1 + i * i % 97 for i in range(45))
    later = [(*begun, 7, 3), (*begun[:33], 9, 9, 9, 9), (*begun, 8, 2, 2, 5)]
    runner = target().fork()
    keeping = Engine(runner, NGramDrafter(3), Fixed(K), prefixes=PrefixMemory(runner, None, 1 << 20), max_batch=4)
    for ids in later:
        assert ask(keeping, [ids], n=3, new=24) == [list(greedy_ids(hf(), ids, 24))] * 3
    assert keeping.stats.restored_tokens >= 33 + 45


def test_captured_rounds_say_why_not() -> None:
    runner = target().fork()
    runner.capture_rounds("eager")
    assert runner.captures is None
    assert runner.absent[CAPTURED] == "its layers attend in chunks, or count their columns"


def test_chunks_of_no_known_layer_are_refused() -> None:
    llama = tiny_model("llama")
    llama.config.attention_chunk_size = WINDOW
    with pytest.raises(UnsupportedModel, match="does not say which of its layers attend in chunks"):
        wrap(llama, "llama")
