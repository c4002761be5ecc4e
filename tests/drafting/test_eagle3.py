"""EAGLE-3 heads: what they draft is what the published layout means, in ragged batches; exact by their q; refused where they do not
fit. That trees drawn from a right q are exact is said by tests/drafting/test_tree_drafters.py.

Tests of: models.eagle3_layer, drafting.growth, drafting.eagle3, drafting.trained_heads, drafting.shapes,
drafting.draft.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import shoal
from eagle_heads import CONFIG, DRAFTS, WIDTH, V, by_definition, random_heads, save_eagle3
from exits import run
from proposals import Proposal, largest_difference, recorded
from shoal.config import Limits, Sampling
from shoal.drafting import eagle3, trained_heads
from shoal.drafting.draft import read_draft
from shoal.drafting.eagle3 import Eagle3Drafter, Eagle3TreeDrafter
from shoal.drafting.growth import Node
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.shapes import shape_of
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.sums import SumDrafter
from shoal.engine.engine import Engine
from shoal.errors import ModelError, PairMismatch, RequestError, ShoalError, UnsupportedModel
from shoal.lookahead.controller import Fixed
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import save_pair, tiny_model
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import table_model
from shoal.types.requests import Request

RULES = pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])


@pytest.fixture(scope="module")
def target() -> Runner:
    return wrap(tiny_model("llama").double(), "tiny")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eagle3(tmp_path_factory.mktemp("eagle3"))


def difference(
    target: Runner, proposals: Sequence[Proposal], file: dict[str, Tensor], enough: float = math.inf, **options: Any
) -> float:
    """Between the q that were proposed and those of the definition. A first token has no state."""
    known = [one for one in proposals if len(one[0]) > 1]
    return largest_difference(known, lambda tokens, draft: by_definition(target, file, tokens, draft, **options), enough)


# ── what is drafted ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sharing", ["copied", "shared"])
@torch.inference_mode()
def test_drafts_are_those_of_the_definition(place: Path, target: Runner, sharing: str) -> None:
    """In ragged batches with joins, cancellations and moves, after accepted and rejected drafts."""
    drafter = Eagle3Drafter.for_target(target, directory=str(place))
    assert isinstance(drafter, Eagle3Drafter)
    proposals = recorded(drafter)
    engine, _ = run(target, drafter, Rejection(), 2.0, 4, sharing=sharing)
    assert len(proposals) > 30
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert difference(target, proposals, load_file(place / "model.safetensors")) < 1e-6  # norms and angles are float32
    assert not drafter._own
    assert not drafter._prompts._of


@torch.inference_mode()
def test_drafts_after_a_pause_are_those_of_the_definition(place: Path, target: Runner) -> None:
    """The cells of a paused row are computed again, from all its states."""
    drafter = Eagle3Drafter.for_target(target, directory=str(place))
    proposals = recorded(drafter)
    engine = Engine(target, drafter, Fixed(3), max_batch=2, rule=Rejection(), quantum=8)
    for number, (length, n) in enumerate(((9, 3), (5, 2), (7, 2))):
        prompt = tuple((7 * i * i + number) % 250 for i in range(length))
        engine.submit(Request(prompt, n, Sampling(temperature=2.0, seed=number), Limits(max_new_tokens=30)))
        engine.step()
    while engine.step():
        pass
    assert engine.stats.pauses >= 4
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert difference(target, proposals, load_file(place / "model.safetensors")) < 1e-6
    assert not drafter._own


def test_a_round_reads_the_last_states_of_a_long_text(place: Path, target: Runner) -> None:
    """Not all that are kept for a pause."""
    read: list[int] = []

    class Pieces(list[Tensor]):
        def __reversed__(self) -> Iterator[Tensor]:
            for number in range(len(self) - 1, -1, -1):
                read.append(number)
                yield self[number]

    drafter = Eagle3Drafter.for_target(target, directory=str(place))
    row = Engine(target, None, Fixed(0), max_batch=1, rule=Rejection()).submit(Request((1, 2, 3), 1, Sampling(), Limits()))[
        0
    ]
    kept = torch.arange(2000.0)[:, None]  # of positions 2 to 2001
    drafter._own[row] = 2002, Pieces(kept.split(2))
    assert torch.equal(torch.cat(drafter._own_pieces(row, 1997, 2001)), kept[1995:1999])
    assert read == [999, 998, 997, 996]
    drafter._own.clear()


def test_a_copy_has_states_of_its_own(place: Path, target: Runner) -> None:
    drafter = Eagle3Drafter.for_target(target, directory=str(place))
    engine = Engine(target, None, Fixed(0), max_batch=2, rule=Rejection())
    one, other = engine.submit(Request((1, 2, 3), 2, Sampling(), Limits()))
    drafter._own = {one: (4, [torch.zeros(1, 6)]), other: (9, [torch.ones(6, 6)])}
    drafter.replace([(other, one)])
    drafter._own[one][1].append(torch.zeros(2, 6))
    assert [len(torch.cat(pieces)) for _, pieces in map(drafter._own.get, (one, other))] == [3, 1]  # type: ignore[misc]
    drafter._own.clear()


class TreeRecorder(Eagle3TreeDrafter):
    """Keeps the q of every node that it asked the heads about."""

    proposals: list[Proposal]

    def _q(self, inputs: DraftInputs, logits: Tensor, asked: Sequence[Node]) -> tuple[Tensor, list[bool]]:
        for node, one in zip(asked, logits, strict=True):
            tokens = list(inputs.rows[node.row].tokens)
            self.proposals.append((tokens, [*node.path(), 0], [*[one] * node.depth, (one / 2.0).softmax(-1)]))
        return super()._q(inputs, logits, asked)


@torch.inference_mode()
def test_nodes_of_trees_are_those_of_the_definition(place: Path, target: Runner) -> None:
    """Of each node what follows the path to it; the whole tree is fed again for each depth, with the states of its parents."""
    made = Eagle3Drafter.for_target(target, directory=str(place), tree="rsd-s", width=2, nodes=6)
    assert isinstance(made, Eagle3TreeDrafter)
    drafter = TreeRecorder(made._heads, made.hidden_layers, target, shape=made._shape)
    drafter.proposals = proposals = []
    engine, _ = run(target, drafter, Rejection(), 2.0, 4)
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert {len(draft) for _, draft, _ in proposals} == {1, 2, 3}
    worst = 0.0
    for tokens, path, q in proposals:
        if len(tokens) > 1:
            right = by_definition(target, load_file(place / "model.safetensors"), tokens, path)[-1]
            worst = max(worst, float((q[-1] - (right / 2.0).softmax(-1)).abs().max()))
    assert worst < 1e-6


@torch.inference_mode()
def test_a_shifted_hidden_state_is_noticed(place: Path, target: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trained_heads._hidden
    monkeypatch.setattr(trained_heads, "_hidden", lambda scores: real(scores).roll(1, dims=1))
    drafter = Eagle3Drafter.for_target(target, directory=str(place))
    assert isinstance(drafter, Eagle3Drafter)
    proposals = recorded(drafter)
    run(target, drafter, Rejection(), 2.0, 4)
    assert difference(target, proposals, load_file(place / "model.safetensors"), 1e-3) > 1e-3


SHAPES = {
    "embed_tokens.weight": (V, WIDTH), "fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,), "lm_head.weight": (DRAFTS, WIDTH),
    "layers.0.input_layernorm.weight": (WIDTH,), "layers.0.hidden_norm.weight": (WIDTH,),
    "layers.0.post_attention_layernorm.weight": (WIDTH,), "layers.0.self_attn.q_proj.weight": (32, 2 * WIDTH),
    "layers.0.self_attn.k_proj.weight": (16, 2 * WIDTH), "layers.0.self_attn.v_proj.weight": (16, 2 * WIDTH),
    "layers.0.self_attn.o_proj.weight": (WIDTH, 32), "layers.0.mlp.gate_proj.weight": (48, WIDTH),
    "layers.0.mlp.up_proj.weight": (48, WIDTH), "layers.0.mlp.down_proj.weight": (WIDTH, 48),
}  # fmt: skip
LLAMA = {key: value for key, value in CONFIG.items() if "draft" not in key and "eagle" not in key and key != "architectures"}
PUBLISHED: dict[str, tuple[str, str, bool, tuple[int, ...], dict[str, Any]]] = {
    "SafeAILab": (
        "pytorch_model.bin", "midlayer.", False, (2, 4, 5),
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFTS},
    ),
    "SpecForge": (
        "model.safetensors", "midlayer.", False, (1, 4, 7),
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTS, "target_hidden_size": WIDTH,
         "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}},
    ),
    "AngelSlim": (
        "model.safetensors", "midlayer.", True, (2, 4, 5),
        {**LLAMA, "architectures": ["Eagle3LlamaForCausalLM"], "head_dim": 8, "draft_vocab_size": DRAFTS},
    ),
    "AngelSlim for images": (  # rotary sections are one where positions are those of text
        "model.safetensors", "midlayer.", True, (2, 4, 5),
        {**LLAMA, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": DRAFTS, "tie_word_embeddings": True,
         "modal_type": "VLM", "rope_scaling": {"type": "default", "rope_type": "default", "mrope_interleaved": True,
                                               "mrope_section": [2, 1, 1]}},
    ),
    "ModelOpt": (
        "model.safetensors", "midlayer.", True, (2, 4, 5),
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTS, "rope_scaling": None,
         "eagle_config": {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
                          "use_mtp_layernorm": False, "parallel_draft_step": 1, "parallel_drafting": False,
                          "eagle_aux_hidden_state_layer_ids": []}},
    ),
    "speculators": (
        "model.safetensors", "layers.0.", True, (1, 4, 7),
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFTS,
         "eagle_aux_hidden_state_layer_ids": [1, 4, 7], "norm_before_residual": True, "target_hidden_size": None,
         "transformer_layer_config": {**LLAMA, "model_type": "llama"}, "speculators_config": {"algorithm": "eagle3"}},
    ),
}  # fmt: skip
"""Per publisher: the file, the layer's name, whether the embedding is in it, the hidden states that are read, and config.json."""


@pytest.mark.slow(but=["SafeAILab-layers"])
@pytest.mark.parametrize(
    ("publisher", "fault"),
    [
        *((publisher, "") for publisher in PUBLISHED),
        ("SafeAILab", "layers"), ("speculators", "layers"), ("SpecForge", "d2t"), ("AngelSlim", "norm"), ("speculators", "norm"),
    ],
)  # fmt: skip
@torch.inference_mode()
def test_published_heads_are_read(publisher: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their directory alone, with a reduced vocabulary; the tokens are those of plain decoding, and a fault is seen in q."""
    file, layer, embeds, reads, config = PUBLISHED[publisher]
    target = wrap(tiny_model("llama", layers=8).double(), "tiny", checked=False)
    torch.manual_seed(3)
    tensors = {name.replace("layers.0.", layer): 0.4 * torch.randn(shape) for name, shape in SHAPES.items()}
    if not embeds:
        del tensors["embed_tokens.weight"]
    ids = torch.randperm(V)[:DRAFTS].sort().values
    tensors |= {"d2t": ids - torch.arange(DRAFTS), "t2d": torch.zeros(V, dtype=torch.bool).scatter(0, ids, True)}
    (torch.save if file.endswith(".bin") else save_file)(tensors, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if fault == "layers":
        monkeypatch.setattr(eagle3, "published_layers", lambda *_: tuple(layer - 1 for layer in reads))
    if fault == "d2t":
        monkeypatch.setattr(eagle3, "target_ids", lambda *_: torch.arange(DRAFTS))
    draft = read_draft(str(tmp_path))
    assert draft is not None
    assert draft.name == "eagle3"
    made = draft.drafter(target)
    assert isinstance(made, Eagle3Drafter)
    if fault == "norm":
        made._heads._sums_norms = not made._heads._sums_norms
    proposals = recorded(made)
    stats = run(target, made, Rejection(), 2.0, 4)[0].stats
    assert len(proposals) > 30
    found = difference(target, proposals, tensors, 1e-6, reads=reads, normed=publisher == "speculators")
    assert (found < 1e-6) == (not fault)
    assert stats.committed == stats.row_rounds + stats.accepted
    if not fault:
        assert run(target, made, Coupled(), 2.0, 4)[1] == run(target, None, Coupled(), 2.0, 4)[1]
        assert 0 < stats.accepted < stats.drafted
        del tensors[f"{layer}mlp.up_proj.weight"]
        (torch.save if file.endswith(".bin") else save_file)(tensors, tmp_path / file)
        again = wrap(tiny_model("llama", layers=8).double(), "tiny", checked=False)
        with pytest.raises(ModelError, match=f"example {layer}mlp.up_proj.weight"):
            draft.drafter(again)


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["3--rejection", "9--coupled"])
@RULES
@pytest.mark.parametrize(("max_batch", "tree"), [(1, ""), (3, ""), (9, ""), (3, "rsd-s"), (33, "dyspec")])
def test_tokens_are_those_of_plain_decoding(place: Path, target: Runner, max_batch: int, tree: str, rule: Rule) -> None:
    """Greedy; under the coupled rule at T > 0 as well."""
    for temperature in (0.0, 2.0) if isinstance(rule, Coupled) else (0.0,):
        n = max(3, max_batch // 3)
        plain, expected = run(target, None, rule, temperature, max_batch, n=n)
        drafter = Eagle3Drafter.for_target(target, directory=str(place), tree=tree)
        assert isinstance(drafter, Eagle3Drafter)
        engine, found = run(target, drafter, rule, temperature, max_batch, n=n)
        assert found == expected
        stats = engine.stats
        assert stats.row_rounds > 0.5 * max_batch * stats.rounds
        assert stats.committed == stats.row_rounds + stats.accepted
        assert plain.stats.row_rounds == plain.stats.committed
        assert 0 < stats.draft_passes <= 3 * stats.rounds
        assert stats.drafted > stats.row_rounds
        if temperature:
            assert stats.accepted > 0


SMALL = CONFIG | {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 4,
}


@pytest.mark.slow(but=["rsd-s"])
@pytest.mark.parametrize("shape", ["", "rsd-s", "union"])
def test_the_protocol_is_kept(shape: str) -> None:
    heads = random_heads(SMALL | {"vocab_size": 5, "draft_vocab_size": 5}, 3 * 5, 5, own=True)
    target = table_model(torch.full((5, 5), 0.2))

    def made() -> Drafter:
        if not shape:
            return Eagle3Drafter(heads, (0, 1, 2), target)
        trees = Eagle3TreeDrafter(heads, (0, 1, 2), target, shape=shape_of("rsd-s", 2, 5))
        return trees if shape == "rsd-s" else SumDrafter([SuffixDrafter("engine", nodes=6)], trees)

    assert check_drafter(made, 5) > 20


# ── directories ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_load_takes_the_heads(place: Path, tmp_path: Path) -> None:
    first, _ = save_pair(tmp_path)
    with shoal.load(first, f"eagle3:{place}", dtype="float32") as pair:
        assert pair.drafter_name == "eagle3"
        plain = pair.generate("def f(x):", 3, max_new_tokens=12, lookahead="off", seed=1, temperature=1.5)
        found = pair.generate("def f(x):", 3, max_new_tokens=12, lookahead=3, seed=1, temperature=1.5)
        assert [s.token_ids for s in found[0].samples] == [s.token_ids for s in plain[0].samples]
        assert found.stats.draft_passes > 0 < found.stats.drafted


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        ({"vocab_size": 99}, {}, PairMismatch, "a vocabulary of 99 v 260: heads of another target"),
        ({}, {"fc.weight": torch.zeros(WIDTH, 48)}, PairMismatch, "3 hidden states of 48 v 96: heads of another target"),
        ({"eagle_aux_hidden_state_layer_ids": None}, {}, PairMismatch, r"reads layers \[2, 1, -1\]"),
        ({"num_hidden_layers": 2}, {}, UnsupportedModel, "has 2 layers"),
        ({}, {"midlayer.self_attn.q_norm.weight": torch.ones(8)}, UnsupportedModel, "for example midlayer.self_attn.q_norm"),
        ({}, {"norm.weight": torch.zeros(0)}, ModelError, "lacks 1 of the 13 tensors of its heads, for example norm.weight"),
        ({"draft_vocab_size": 60}, {}, PairMismatch, r"lm_head.weight is \[120, 32\] and should be \[60, 32\]"),
        ({}, {"d2t": torch.zeros(0)}, PairMismatch, "needs d2t with an entry for each of the 120 tokens"),
        ({}, {"d2t": torch.full((DRAFTS,), V)}, PairMismatch, "d2t does not map its tokens to as many of the target's 260"),
        ({"speculators_model_type": "dspark"}, {}, UnsupportedModel, "of the kind DSpark .dspark in .* take dflash:DIR"),
        ({"norm_output": True}, {}, UnsupportedModel, "of the kind EAGLE-3.1 .norm_output: True in"),
        ({"norm_before_fc": True}, {}, UnsupportedModel, "config.json has norm_before_fc: EAGLE-3 without it is supported"),
        ({"fc_norm": True}, {}, UnsupportedModel, "of the kind EAGLE-3.1 .fc_norm: True in .* take eagle3:DIR"),
        ({"speculators_model_type": "peagle"}, {}, UnsupportedModel, "of the kind P-EAGLE .peagle in its"),
        ({"speculators_model_type": "mtp"}, {}, UnsupportedModel, "heads of speculators_model_type 'mtp': 'eagle3' and"),
        ({"architectures": ["PEagleDraftModel"]}, {}, UnsupportedModel, "of the kind P-EAGLE .PEagleDraftModel in its"),
        ({}, {"mask_hidden": torch.zeros(3 * WIDTH)}, UnsupportedModel, "example mask_h"),
        ({}, {"midlayer.mlp.experts.0.up_proj.weight": torch.zeros(8)}, UnsupportedModel, r"for example midlayer.mlp.experts.0"),
        ({"partial_rotary_factor": 0.5}, {}, UnsupportedModel, "has partial_rotary_factor: 0.5; EAGLE-3 with 1.0 is"),
        *(
            ({"eagle_config": {name: value}}, {}, UnsupportedModel, f"config.json has {name}: {value}; EAGLE-3 with")
            for name, value in {
                "use_aux_hidden_state": False, "use_input_layernorm_in_first_layer": False, "use_last_layernorm": False,
                "use_mtp_layernorm": True, "parallel_draft_step": 4,
            }.items()
        ),
        ({"num_attention_heads": "four"}, {}, RequestError, "is no config of EAGLE-3 heads"),
    ],
)  # fmt: skip
def test_what_does_not_fit(
    tmp_path: Path, target: Runner, config: dict[str, Any], tensors: dict[str, Tensor], error: type[ShoalError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Eagle3Drafter.for_target(target, directory=str(save_eagle3(tmp_path, tensors, **config)))
