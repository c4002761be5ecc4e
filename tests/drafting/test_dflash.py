"""DFlash layers: blocks by their published definition in ragged batches, exact by their q; refused where they do not fit.

Tests of: models.block_layers, drafting.dflash, drafting.eagle3, drafting.registry, drafting.trained_heads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import shoal
from dflash_layers import CONFIG, LAYERS, MASK, SIZE, WIDTH, V, by_definition, random_tensors, save_dflash, shapes, trained
from eagle_heads import save_eagle3
from exits import run
from laws import ALPHA
from proposals import Proposal, largest_difference, p_of_two_tokens, recorded
from shoal.config import Limits, Sampling
from shoal.drafting.dflash import BlockDrafter, load_block
from shoal.drafting.draft import read_draft
from shoal.drafting.eagle3 import Eagle3Drafter
from shoal.drafting.protocol import DraftInputs
from shoal.engine.engine import Engine
from shoal.errors import ModelError, PairMismatch, RequestError, ShoalError, UnsupportedModel
from shoal.lookahead.controller import Fixed
from shoal.models.attention import Masks
from shoal.models.block_layers import BlockHeads
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import save_pair, tiny_model, tiny_tokenizer
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree


@pytest.fixture(scope="module")
def target() -> Runner:
    return wrap(tiny_model("llama").double(), "tiny")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dflash(tmp_path_factory.mktemp("dflash"))


def difference(
    target: Runner, proposals: Sequence[Proposal], tensors: dict[str, Tensor], enough: float = math.inf, **options: Any
) -> float:
    """Between the q that were proposed and those of the definition."""

    def definition(tokens: list[int], draft: list[int]) -> Tensor:
        return by_definition(target.hf, tensors, tokens, **options)[: len(draft)]

    return largest_difference(proposals, definition, enough)


# ── what is drafted ─────────────────────────────────────────────────────────────────────────────────────────────────

REAL_STATES, REAL_WRITE, REAL_FORWARD = BlockDrafter._states, BlockHeads.write, BlockHeads.forward
REAL_OBSERVE = Eagle3Drafter.observe


def of_the_next_row(drafter: BlockDrafter, plan: Any) -> Tensor:
    return REAL_STATES(drafter, plan).roll(1, dims=0)


def one_position_late(heads: BlockHeads, features: Tensor, positions: Tensor, cache: Any) -> None:
    REAL_WRITE(heads, features, positions + 1, cache)


def block_one_position_late(heads: BlockHeads, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
    return REAL_FORWARD(heads, tokens, positions + 1, attend)


def rejected_ones_too(drafter: Any, rows: Sequence[Row], scores: Any, verdict: Any) -> None:
    """The states of the last columns of a pass, accepted or not."""
    hidden = scores.hidden.clone()
    for row, path in enumerate(verdict.lists[0]):
        hidden[row, : len(path) + 1] = scores.hidden[row, -len(path) - 1 :]
    REAL_OBSERVE(drafter, rows, replace(scores, hidden=hidden), verdict)


SABOTAGES: list[tuple[Any, str, Any]] = [
    (Masks, "both_ways", lambda masks: masks),
    (BlockDrafter, "_states", of_the_next_row),
    (BlockHeads, "write", one_position_late),
    (BlockHeads, "forward", block_one_position_late),
    (Eagle3Drafter, "observe", rejected_ones_too),
]


@pytest.mark.parametrize("sharing", ["copied", "shared"])
@torch.inference_mode()
def test_blocks_are_those_of_the_definition(
    place: Path, target: Runner, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ragged batches with joins, cancellations and moves, after accepted and rejected drafts; of each row computed alone."""
    drafter = BlockDrafter.for_target(target, directory=str(place))
    proposals = recorded(drafter)
    engine, _ = run(target, drafter, Rejection(), 2.0, 4, k=SIZE + 2, sharing=sharing)
    stats = engine.stats
    assert len(proposals) > 30
    assert 0 < stats.accepted < stats.drafted
    assert stats.rounds <= stats.draft_passes <= 2 * stats.rounds  # a block, and before it what was committed
    assert max(len(draft) for _, draft, _ in proposals) == SIZE - 1
    assert {len(tokens) for tokens, _, _ in proposals} >= {1, 5, 11}
    assert difference(target, proposals, random_tensors()) < 1e-6
    assert not drafter._own
    assert not drafter._prompts._of
    for owner, name, wrong in SABOTAGES:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            other = BlockDrafter.for_target(target, directory=str(place))
            proposals = recorded(other)
            run(target, other, Rejection(), 2.0, 4, sharing=sharing)
            assert difference(target, proposals, random_tensors(), 1e-3) > 1e-3, wrong


@torch.inference_mode()
def test_a_row_says_the_same_whatever_is_beside_it(place: Path, target: Runner) -> None:
    """Every proposal of a mixed batch, length for length, has the q of the same block asked for with one token alone."""
    drafter = BlockDrafter.for_target(target, directory=str(place))
    proposals = recorded(drafter)
    run(target, drafter, Rejection(), 2.0, 4, k=1)
    assert {len(draft) for _, draft, _ in proposals} == {1}
    assert difference(target, proposals, random_tensors()) < 1e-6


def sliding(**entries: Any) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    return {"layer_types": kinds, "sliding_window": 6, "use_sliding_window": True, **entries}


HEAD = random_tensors() | {
    "lm_head.weight": 0.35 * torch.randn(120, WIDTH, generator=torch.Generator().manual_seed(9)),
    "embed_tokens.weight": torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(8)),
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [0, 2],
    "mask_token_id": MASK, "draft_vocab_size": V, "sliding_window_non_causal": False, "projector_type": "dflash",
    "transformer_layer_config": {**LAYERS, "model_type": "qwen3"}, "dflash_config": None, "num_target_layers": None,
    "model_type": None, **dict.fromkeys(LAYERS),
}  # fmt: skip
ASSISTANT: dict[str, Any] = {
    "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "dflash_config": None,
    "vocab_size": None, "mask_token_id": MASK, "target_layer_ids": [0, 1], "rope_theta": None,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 6,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "z-lab": ({}, {}),
    "no layers named": ({"dflash_config": {"mask_token_id": MASK}, "num_target_layers": 8}, {"reads": (2, 6)}),
    "windows one way": (sliding(), {"windows": (6, None), "one_way": (True, False)}),
    "windows both ways": (sliding(is_causal=False), {"windows": (6, None)}),
    "no windows": (sliding(use_sliding_window=False), {"one_way": (True, False)}),
    "speculators": (SPECULATORS, {"reads": (0, 2)}),
    "muse_glimmer_assistant": (ASSISTANT, {"windows": (7, 7)}),
}
"""Per publisher: the entries of config.json that differ, and what they mean."""


@pytest.mark.slow(but=["z-lab"])
@pytest.mark.parametrize("publisher", PUBLISHED)
@torch.inference_mode()
def test_published_layers_are_read(publisher: str, tmp_path: Path) -> None:
    """By their directory alone; the tokens are those of plain decoding."""
    entries, meaning = PUBLISHED[publisher]
    target = wrap(tiny_model("llama", layers=8 if "reads" in meaning else 2).double(), "tiny", checked=False)
    tensors = random_tensors()
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."} if publisher.startswith("muse") else {}
    stored = {
        next((new + k[len(old) :] for old, new in names.items() if k.startswith(old)), k): t for k, t in tensors.items()
    }
    draft = read_draft(str(save_dflash(tmp_path, stored, **entries)))
    assert draft is not None
    assert draft.name == "dflash"
    made = draft.drafter(target)
    proposals = recorded(made)
    stats = run(target, made, Rejection(), 2.0, 4, k=4)[0].stats
    assert len(proposals) > 20
    assert max(len(tokens) for tokens, _, _ in proposals) > 15  # beyond the windows
    assert difference(target, proposals, tensors, **meaning) < 1e-6
    assert stats.committed == stats.row_rounds + stats.accepted
    assert run(target, made, Coupled(), 2.0, 4)[1] == run(target, None, Coupled(), 2.0, 4)[1]


@torch.inference_mode()
def test_factors_and_the_cap_of_a_config(tmp_path: Path, target: Runner) -> None:
    entries = {"input_embedding_scale": 2.0, "output_multiplier": 3.0, "final_logit_softcapping": 5.0}
    plain, scaled = (load_block(save_dflash(tmp_path / str(len(own)), **own), target)[0] for own in ({}, entries))
    states = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(target.dtype)
    torch.testing.assert_close(scaled.logits(states), 5 * torch.tanh(3 * plain.logits(states) / 5))
    table, head = plain._of_target
    plain._of_target = SimpleNamespace(weight=2 * table.weight), head  # type: ignore[assignment]
    ids = torch.tensor([[1, MASK, MASK]])

    def nothing(_: int, query: Tensor, *__: Tensor) -> Tensor:
        return torch.zeros_like(query.transpose(1, 2))

    torch.testing.assert_close(*(one(ids, torch.arange(3)[None], nothing) for one in (scaled, plain)))


@torch.inference_mode()
def test_a_reduced_vocabulary_is_drafted_from(tmp_path: Path, target: Runner) -> None:
    """As speculators writes it: a head of its own over some ids (d2t), an embedding, and the target's head again; in two files."""
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:120].sort().values
    stored = HEAD | {"d2t": ids - torch.arange(120), "verifier_lm_head.weight": torch.zeros(3)}
    save_dflash(tmp_path, **{**SPECULATORS, "draft_vocab_size": 120, "aux_hidden_state_layer_ids": [1, 2]})
    (tmp_path / "model.safetensors").unlink()
    names = sorted(stored)
    for number, part in enumerate((names[:9], names[9:]), 1):
        save_file({name: stored[name] for name in part}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    made = BlockDrafter.for_target(target, directory=str(tmp_path))
    proposals = recorded(made)
    run(target, made, Rejection(), 2.0, 4)
    assert len(proposals) > 30
    for tokens, draft, q in proposals:
        right = torch.full((SIZE - 1, V), -torch.inf, dtype=torch.double)
        right[:, ids] = by_definition(target.hf, HEAD, tokens)
        assert set(draft) <= set(ids.tolist())
        for one, other in zip(q, (right / 2.0).softmax(-1), strict=False):
            assert float((one - other).abs().max()) < 1e-6


@torch.inference_mode()
def test_a_first_block_is_that_of_transformers(tmp_path: Path) -> None:
    """Greedy, by the generator of candidates that `generate(assistant_model=)` asks, with its own model and window."""
    if not hasattr(transformers, "MuseGlimmerAssistantModel"):
        pytest.skip("an older Transformers does not know it")
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    hf = tiny_model("llama").float()
    place = tmp_path / "assistant"
    config = {name: value for name, value in (CONFIG | ASSISTANT).items() if value is not None and name != "architectures"}
    stock = transformers.MuseGlimmerAssistantModel(transformers.MuseGlimmerAssistantConfig(**config)).eval()
    made = torch.Generator().manual_seed(2)
    for parameter in stock.parameters():
        parameter.data.copy_((0.35 if parameter.dim() > 1 else 1.0) * torch.randn(parameter.shape, generator=made).abs())
    stock.save_pretrained(place)
    prompt = [(7 * i * i) % 250 for i in range(19)]
    generator = DFlashTokenCandidateGenerator(
        stock, hf.get_input_embeddings(), hf.get_output_embeddings(), transformers.GenerationConfig(max_length=100)
    )
    known = hf(torch.tensor([prompt[:-1]]), use_cache=True, output_hidden_states=True)
    positions = torch.arange(len(prompt) + 1)[None]
    candidates, logits = generator.get_candidates(
        torch.tensor([prompt]),
        {"position_ids": positions[:, : len(prompt)], "attention_mask": None},
        known,
        is_first_iteration=False,
        n_last_matches=0,
    )
    target = wrap(hf, "tiny")
    drafter = BlockDrafter.for_target(target, directory=str(place))
    proposals = recorded(drafter)
    engine = Engine(target, drafter, Fixed(SIZE), max_batch=2, rule=Coupled())
    engine.submit(Request(tuple(prompt), 1, Sampling(temperature=0.0), Limits(max_new_tokens=12)))
    while engine.step():
        pass
    assert logits.shape[1] == SIZE - 1
    assert [draft for tokens, draft, _ in proposals if tokens == prompt] == [candidates[0, len(prompt) :].tolist()]


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────

LENGTHS = ((1, 300), (7, 280), (19, 260))
"""The lengths of prompts and the tokens that are written behind them."""


def long_runs(target: Runner, drafter: BlockDrafter | None) -> tuple[Engine, list[list[int]]]:
    engine = Engine(target, drafter, Fixed(4 if drafter else 0), max_batch=5, rule=Rejection())
    rows: list[Row] = []
    for number, (length, tokens) in enumerate(LENGTHS):
        prompt = tuple((7 * i * i + number) % 250 for i in range(length))
        rows += engine.submit(Request(prompt, 2, Sampling(temperature=0.0, seed=number), Limits(max_new_tokens=tokens)))
        engine.step()
    while engine.step():
        pass
    return engine, [row.tokens for row in rows]


@pytest.mark.slow
def test_long_texts_are_those_of_plain_decoding(tmp_path: Path) -> None:
    """Greedy, in unequal rows, by layers that have learned for a moment: they are accepted often enough to save passes."""
    hf = tiny_model("llama", max_position_embeddings=512)
    for layer in hf.model.layers:  # which say little: the text goes round, and layers that small can learn it
        layer.self_attn.o_proj.weight.data *= 0.01
        layer.mlp.down_proj.weight.data *= 0.01
    target = wrap(hf, "tiny")
    plain, expected = long_runs(target, None)
    tensors = trained(hf, [expected[0], expected[2], expected[4]], 20)
    drafter = BlockDrafter.for_target(target, directory=str(save_dflash(tmp_path, tensors, max_position_embeddings=512)))
    engine, found = long_runs(target, drafter)
    stats = engine.stats
    assert found == expected
    assert {len(tokens) for tokens in found} == {length + tokens for length, tokens in LENGTHS}
    assert stats.accepted > 0.2 * stats.drafted > 0
    assert stats.committed == stats.row_rounds + stats.accepted
    assert stats.rounds < 0.8 * plain.stats.rounds


def test_two_tokens_have_their_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By enumeration; it would fail with probability 1e-6 if its seeds were drawn anew. A q of other tokens is seen."""
    hf = tiny_model("llama", vocab_size=4)
    place = str(save_dflash(tmp_path, vocab_size=4))
    drafter = BlockDrafter.for_target(wrap(hf, "tiny", checked=False), directory=place)
    assert p_of_two_tokens(hf, drafter, (1, 2, 3), 1500) > ALPHA
    real = drafter.propose

    def propose(inputs: DraftInputs) -> DraftTree:
        tree = real(inputs)
        assert tree.q is not None
        tree.q[0].copy_(tree.q[0].roll(1, dims=-1))
        return tree

    drafter.propose = propose  # type: ignore[method-assign]
    assert p_of_two_tokens(hf, drafter, (1, 2, 3), 1500) < ALPHA


@pytest.mark.slow(but=["computed again"])
@pytest.mark.parametrize("way", ["computed again", "shared", "in chunks"])
def test_rows_that_pause_have_the_tokens_of_rows_that_do_not(way: str, place: Path) -> None:
    options = {"computed again": {}, "shared": {"prefix_sharing": "shared"}, "in chunks": {"chunk": 5}}[way]
    target = wrap(tiny_model("llama", max_position_embeddings=256), "tiny")

    def decoded(drafter: BlockDrafter | None, quantum: int | None) -> tuple[Engine, list[list[int]]]:
        lookahead = Fixed(3 if drafter else 0)
        engine = Engine(target, drafter, lookahead, max_batch=4, rule=Coupled(), quantum=quantum, **options)  # type: ignore[arg-type]
        rows: list[Row] = []
        for number, (length, n, tokens) in enumerate(((12, 6, 50), (7, 2, 20), (9, 2, 20))):
            prompt = tuple((7 * i * i + number) % 250 for i in range(length))
            rows += engine.submit(Request(prompt, n, Sampling(temperature=2.0, seed=number), Limits(max_new_tokens=tokens)))
            for _ in range(3):
                engine.step()
        while engine.step():
            pass
        return engine, [row.tokens for row in rows]

    _, expected = decoded(None, None)
    engine, found = decoded(BlockDrafter.for_target(target, directory=str(place)), 24)
    assert found == expected
    assert engine.stats.pauses >= 2
    assert 0 < engine.stats.accepted < engine.stats.drafted


# ── directories ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_way_in(place: Path, tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path)
    for spec, name in ((f"dflash:{place}", "dflash"), (str(place), "dflash"), (f"suffix+{place}", "suffix")):
        with shoal.load(target, spec, dtype="float32") as made:
            assert str(made.drafter_name).startswith(name)
            plain = made.generate("def f(x):", 3, max_new_tokens=12, lookahead="off", seed=1, temperature=1.5)
            for lookahead in (3, "auto"):
                found = made.generate("def f(x):", 3, max_new_tokens=12, lookahead=lookahead, seed=1, temperature=1.5)  # type: ignore[arg-type]
                assert [s.token_ids for s in found[0].samples] == [s.token_ids for s in plain[0].samples]
                assert found.stats.draft_passes > 0 or lookahead == "auto"


def test_it_is_no_target(tmp_path: Path) -> None:
    place = save_dflash(tmp_path)
    tiny_tokenizer().save_pretrained(place)
    with pytest.raises(
        UnsupportedModel, match="is no model by itself: download it and give its directory as the drafter, dflash:DIR"
    ):
        shoal.load(place, dtype="float32")


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        ({"vocab_size": 99}, {}, PairMismatch, "a vocabulary of 99 v 260: heads of another target"),
        ({}, {"fc.weight": torch.zeros(WIDTH, 48)}, PairMismatch, "2 hidden states of 48 v 64: heads of another target"),
        ({"hidden_size": 64}, {}, PairMismatch, "a width of 64 v 32: heads of another target"),
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 2]}}, {}, PairMismatch, r"reads hidden states \[2, 3\]"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, {}, RequestError, "of the target's 260 ids, got 5 and None"),
        ({"dflash_config": {"mask_token_id": 260}}, {}, RequestError, "mask_token_id of the target's 260 ids, got 5 and 260"),
        ({"block_size": 65}, {}, RequestError, r"a block_size of 2\.\.64"),
        ({"architectures": ["DFlash2DraftModel"]}, {}, UnsupportedModel, "of the kind DFlash 2 .DFlash2DraftModel in its"),
        ({"projector_type": "domino"}, {}, UnsupportedModel, "of the kind Domino .domino in its"),
        ({"projector_type": "other"}, {}, UnsupportedModel, "has projector_type: other: DFlash without it is supported"),
        ({"sample_from_anchor": True}, {}, UnsupportedModel, "of the kind DSpark .sample_from_anchor: True in its"),
        ({}, {"layers.0.mlp_conv.base_kernel": torch.ones(2)}, UnsupportedModel, "for example layers.0.mlp_conv.base_kernel"),
        ({}, {"norm.weight": torch.zeros(0)}, ModelError, r"lacks 1 of the 25 tensors of its heads, for example norm\.weight"),
        ({"num_attention_heads": "four"}, {}, RequestError, "is no config of DFlash layers"),
    ],
)  # fmt: skip
def test_what_does_not_fit(
    config: dict[str, Any], tensors: dict[str, Tensor], error: type[ShoalError], message: str, tmp_path: Path, target: Runner
) -> None:
    stored = {name: tensor for name, tensor in (random_tensors() | tensors).items() if tensor.numel()}
    with pytest.raises(error, match=message):
        BlockDrafter.for_target(target, directory=str(save_dflash(tmp_path, stored, **config)))


def test_rotary_frequencies_keep_their_bits_in_16(place: Path, tmp_path: Path) -> None:
    """Those of EAGLE-3 heads, too: rounded ones turn position 1000 by a radian more."""
    target = wrap(tiny_model("llama").bfloat16(), "tiny", checked=False)
    made = [
        BlockDrafter.for_target(target, directory=str(place))._heads,
        Eagle3Drafter.for_target(target, directory=str(save_eagle3(tmp_path)))._heads,
    ]
    for heads in made:
        assert heads.fc.weight.dtype == torch.bfloat16
        assert torch.equal(heads.rotary.inv_freq, type(heads.rotary)(heads.config).inv_freq)


def test_the_layers_have_the_published_shapes(place: Path, target: Runner) -> None:
    heads = BlockDrafter.for_target(target, directory=str(place))._heads
    assert {name: tuple(parameter.shape) for name, parameter in heads.named_parameters()} == shapes()
    assert json.loads((place / "config.json").read_text())["dflash_config"]["mask_token_id"] == heads.form.mask
