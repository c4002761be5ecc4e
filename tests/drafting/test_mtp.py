"""The multi-token-prediction layer of a checkpoint: its drafts are Transformers' definition in ragged batches, exact by their q,
right where they must be, refused by name.

Tests of: models.mtp_layer, drafting.mtp, drafting.eagle3, drafting.draft.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

import shoal
from grouped_files import Layout, regroup
from laws import ALPHA
from mtp_layers import HYBRID, PLAIN, STACKED, by_definition, save_mtp
from native_kernels import needs_compiler
from proposals import Proposal, decoded, largest_difference, p_of_two_tokens, recorded, require_tokens_of_plain_decoding
from shoal.config import Limits, Sampling
from shoal.drafting import eagle3, trained_heads
from shoal.drafting.draft import read_draft
from shoal.drafting.eagle3 import Eagle3Drafter
from shoal.drafting.following import copy_beside
from shoal.drafting.mtp import CascadeDrafter, MtpDrafter
from shoal.engine.engine import Engine
from shoal.errors import ModelError, UnsupportedModel
from shoal.lookahead.controller import Fixed
from shoal.models.loading import wrap
from shoal.models.mtp_layer import MtpHeads
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import tiny_model, tiny_tokenizer
from shoal.types.requests import Request


def loaded(place: Path) -> Runner:
    return wrap(AutoModelForCausalLM.from_pretrained(place).eval(), place.name)


@pytest.fixture(scope="module", params=[*PLAIN, *HYBRID, STACKED])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return loaded(save_mtp(tmp_path_factory.mktemp(request.param), request.param))


PROMPTS = [[(7 * i * i + number) % 260 for i in range(length)] for number, length in enumerate((1, 5, 11))]


def difference(target: Runner, drafter: Eagle3Drafter, proposals: Sequence[Proposal], enough: float = math.inf) -> float:
    """Between the q that were proposed and those of the definition. A first token has no state."""
    definition = functools.partial(by_definition, target.hf, drafter._heads.layer)
    return largest_difference([one for one in proposals if len(one[0]) > 1], definition, enough)


# ── what is drafted ─────────────────────────────────────────────────────────────────────────────────────────────────


def of_rejected_drafts(scores: Any, verdict: Any) -> list[Tensor]:
    """Hidden states of the last columns of a block, whatever was rejected."""
    return [
        states[-len(own) :]
        for states, own in zip(trained_heads._hidden(scores), trained_heads.kept_states(scores, verdict), strict=True)
    ]


def of_another_row(scores: Any, verdict: Any) -> list[Tensor]:
    own = trained_heads.kept_states(scores, verdict)
    return [other[: len(one)] for one, other in zip(own, trained_heads._hidden(scores).roll(1, dims=0), strict=True)]


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [*((each, 1) for each in (*PLAIN, *HYBRID, STACKED)), ("deepseek-v3", 2), ("deepseek-v3", 3), ("qwen3.5", 2)],
)
def test_layers_learn_in_passes_that_say_what_they_will_draft(architecture: str, layers: int, tmp_path: Path) -> None:
    """Pass n of a text says of each position what a draft would say whose last n tokens are the text's."""
    target = loaded(save_mtp(tmp_path, architecture, layers=layers))
    learner = MtpDrafter.for_target(target).learner()
    text = [5, 6, 7, 8, 5, 9, 11, 6, 4, 3]
    copy = copy_beside(learner.weights, target.hf)
    with torch.no_grad():
        p, states = target.bridge.plain_states(torch.tensor([text]), learner.reads)
        passes = list(learner.compared(copy, torch.tensor([text]), p, states))
        assert len(passes) == 4
        for number, (q, right, places) in enumerate(passes):
            assert (places.start, places.stop) == (number + 1, len(text))
            assert torch.equal(right, p[:, places])
            for position in range(number + layers, places.stop):
                known, draft = text[: position - number + 1], [*text[position - number + 1 : position + 1], 0]
                expected = by_definition(target.hf, learner.weights.layer, known, draft)[number]
                assert torch.allclose(q[0, position - places.start], expected, atol=2e-3), (number, position)


@pytest.mark.slow(but=["deepseek-v3"])
@torch.inference_mode()
def test_drafts_are_those_of_the_definition(target: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ragged batches with joins, cancellations and moves, after accepted and rejected drafts; wrong states are noticed."""
    drafter = MtpDrafter.for_target(target)
    proposals = recorded(drafter)
    engine, _ = decoded(target, drafter, Rejection(), 2.0, PROMPTS)
    assert len(proposals) > 25
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert difference(target, drafter, proposals) < 1e-4
    assert not drafter._own
    assert not drafter._prompts._of
    for wrong in (of_rejected_drafts, of_another_row):
        monkeypatch.setattr(eagle3, "kept_states", wrong)
        other = MtpDrafter.for_target(target)
        proposals = recorded(other)
        decoded(target, other, Rejection(), 2.0, PROMPTS)
        assert difference(target, other, proposals, 1e-3) > 1e-3, wrong


@pytest.mark.parametrize("architecture", ["deepseek-v3", "qwen3-next"])
def test_a_layer_that_knows_is_always_accepted(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target says turn[t] after t, and the layer turn[turn[t]] from the state of t: a state of another place is never right."""
    cycle = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    target = loaded(
        save_mtp(tmp_path, architecture, vocab=32, turn=torch.empty_like(cycle).scatter(0, cycle, cycle.roll(-1)))
    )
    prompts = [cycle[first : first + length].tolist() for first, length in ((0, 2), (3, 5), (9, 11))]
    engine, rows = decoded(target, MtpDrafter.for_target(target), Coupled(), 0.0, prompts)
    stats = engine.stats
    whole = [*cycle.tolist(), *cycle.tolist()]
    assert all(row.tokens == whole[(start := whole.index(row.tokens[0])) : start + len(row.tokens)] for row in rows)
    assert stats.committed == stats.row_rounds + stats.accepted
    assert (stats.drafted, stats.accepted, stats.row_rounds) == (63, 63, 27)
    real = trained_heads._hidden
    monkeypatch.setattr(trained_heads, "_hidden", lambda scores: real(scores).roll(1, dims=1))
    shifted, _ = decoded(target, MtpDrafter.for_target(target), Coupled(), 0.0, prompts)
    assert (shifted.stats.drafted, shifted.stats.accepted) == (132, 28)


# ── several layers ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=[("deepseek-v3", 2), ("glm4-moe", 3), ("qwen3.5", 2)], ids=str)
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    architecture, layers = request.param
    return loaded(save_mtp(tmp_path_factory.mktemp(architecture), architecture, layers=layers))


def one_position_off(drafter: CascadeDrafter, plan: Any) -> Tensor:
    """The results of the token before are those of nobody."""
    return torch.zeros_like(REAL_BEFORE(drafter, plan))


def of_the_next_row(drafter: CascadeDrafter, plan: Any) -> Tensor:
    return REAL_BEFORE(drafter, plan).roll(1, dims=1)


REAL_BEFORE, REAL_STEP = CascadeDrafter.before, CascadeDrafter.step
SABOTAGES: list[tuple[type, str, Any]] = [
    (CascadeDrafter, "before", one_position_off),
    (CascadeDrafter, "before", of_the_next_row),
    (CascadeDrafter, "step", lambda drafter, plan: min(REAL_STEP(drafter, plan), 1)),  # the same layer drafts on
]


@pytest.mark.slow(but=["('deepseek-v3', 2)"])
@torch.inference_mode()
def test_layers_draft_one_after_the_other(deep: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ragged batches with joins, cancellations, moves, copied prompts: layer k reads layer k - 1, one token before."""
    drafter = MtpDrafter.for_target(deep)
    assert isinstance(drafter, CascadeDrafter)
    proposals = recorded(drafter)
    engine, _ = decoded(deep, drafter, Rejection(), 2.0, PROMPTS)
    stats = engine.stats
    assert len(proposals) > 25
    assert 0 < stats.accepted < stats.drafted
    assert stats.draft_passes <= 3 * stats.rounds
    assert max(len(draft) for _, draft, _ in proposals) == 3
    assert difference(deep, drafter, proposals) < 1e-4
    assert not drafter._own
    assert not drafter._last
    assert not drafter._ends
    for owner, name, wrong in SABOTAGES[: 2 + (drafter._heads.depth > 2)]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            other = MtpDrafter.for_target(deep)
            proposals = recorded(other)
            decoded(deep, other, Rejection(), 2.0, PROMPTS)
            assert difference(deep, other, proposals, 1e-3) > 1e-3, wrong


@torch.inference_mode()
def test_states_of_a_layer_that_are_one_position_off_are_noticed(deep: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer k reads, for each token, the result of layer k - 1 for this token instead of the one before."""
    real = MtpHeads.compute

    def late(heads: MtpHeads, tokens: Tensor, states: Tensor, positions: Tensor, cache: Any, number: int = 0) -> Tensor:
        return real(heads, tokens, states.roll(-1, dims=1) if number else states, positions, cache, number)

    monkeypatch.setattr(MtpHeads, "compute", late)
    drafter = MtpDrafter.for_target(deep)
    proposals = recorded(drafter)
    decoded(deep, drafter, Rejection(), 2.0, PROMPTS)
    assert difference(deep, drafter, proposals, 1e-3) > 1e-3


@torch.inference_mode()
def test_a_first_draft_is_that_of_transformers(deep: Runner) -> None:
    """Greedy, by `MtpModel.forward`, which drafts one token by each layer."""
    drafter = MtpDrafter.for_target(deep)
    layer, prompt = drafter._heads.layer, PROMPTS[2]
    states = deep.hf(torch.tensor([prompt]), use_cache=False, output_hidden_states=True).hidden_states[-1]
    proposals = recorded(drafter)
    engine = Engine(deep, drafter, Fixed(drafter._heads.depth), max_batch=2, rule=Coupled())
    engine.submit(Request(tuple(prompt), 1, Sampling(temperature=0.0), Limits(max_new_tokens=12)))
    while engine.step():
        pass
    before, layer.config._attn_implementation = layer.config._attn_implementation, "eager"
    fed, places = torch.tensor([prompt[1:]]), torch.arange(1, len(prompt))[None]
    drafted, *_ = layer(fed, states[:, :-1], None, places, transformers.cache_utils.MtpCache(config=layer.config))
    layer.config._attn_implementation = before
    assert [draft for tokens, draft, _ in proposals if tokens == prompt] == drafted.tolist()


def test_layers_share_what_stands_beside_them(tmp_path: Path) -> None:
    """Qwen's layers have one projection and one set of norms, those of the file; DeepSeek's have their own."""
    for architecture, alike in (("qwen3-next", True), ("deepseek-v3", False)):
        place = save_mtp(tmp_path / architecture, architecture, layers=2)
        first, second = MtpDrafter.for_target(loaded(place))._heads.layer.layers
        for module in ("eh_proj", "enorm", "hnorm", "post_norm"):
            assert (getattr(first, module) is getattr(second, module)) == alike, module
        assert not torch.equal(first.mtp_block.self_attn.o_proj.weight, second.mtp_block.self_attn.o_proj.weight)
        if alike:
            published = load_file(place / "model.safetensors")
            assert torch.equal(first.eh_proj.weight, published["mtp.fc.weight"])
            assert torch.equal(first.post_norm.weight, published["mtp.norm.weight"])


@torch.inference_mode()
def test_a_stack_of_blocks_is_composed_of_its_tensors(tmp_path: Path) -> None:
    """Nemotron-H: embedding and state are joined, then one block after the other, then the norm; by the file's own names."""
    target = loaded(save_mtp(tmp_path, STACKED))
    stored = {name[4:]: one for name, one in load_file(tmp_path / "model.safetensors").items() if name.startswith("mtp.")}

    def normed(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (32,), stored[f"layers.{name}.weight"], 1e-5)

    def block(number: int, x: Tensor, mix: Callable[[dict[str, Tensor], Tensor], Tensor]) -> Tensor:
        place = f"layers.{number}.mixer."
        weights = {name.removeprefix(place): one for name, one in stored.items() if name.startswith(place)}
        return x + mix(weights, normed(x, f"{number}.norm"))

    def attention(own: dict[str, Tensor], x: Tensor) -> Tensor:
        heads = [(x @ own[f"{name}_proj.weight"].T).unflatten(-1, (-1, 8)).transpose(1, 2) for name in "qkv"]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2) @ own["o_proj.weight"].T

    def experts(own: dict[str, Tensor], x: Tensor) -> Tensor:
        def feed(name: str) -> Tensor:
            return (x @ own[f"{name}.up_proj.weight"].T).relu().square() @ own[f"{name}.down_proj.weight"].T

        chances = (x @ own["gate.weight"].T).sigmoid()
        chosen = (chances + own["gate.e_score_correction_bias"]).topk(2).indices
        weights = torch.zeros_like(chances).scatter(-1, chosen, chances.gather(-1, chosen))
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return feed("shared_experts") + sum(weights[..., i, None] * feed(f"experts.{i}") for i in range(4))

    tokens, states = torch.tensor([PROMPTS[2]]), torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(3))
    embedded = normed(target.hf.get_input_embeddings()(tokens), "0.enorm")
    x = torch.cat([embedded, normed(states, "0.hnorm")], -1) @ stored["layers.0.eh_proj.weight"].T
    x = normed(block(1, block(0, x, attention), experts), "1.final_layernorm")
    heads = MtpDrafter.for_target(target)._heads
    heads.layer.config._attn_implementation = "eager"
    found = heads.compute(tokens, states, torch.arange(11)[None], None)
    assert torch.allclose(found, x, atol=1e-4)


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        (
            ["mamba", "attention"],
            r"its 2 blocks \(linear_attention, full_attention\) are not one of attention beside others",
        ),
        (["attention", "moe", "attention"], "its 2 blocks .* are not one of attention beside others without a state"),
    ],
)
def test_a_stack_that_keeps_states_is_refused(kinds: list[str], reason: str, tmp_path: Path) -> None:
    place = save_mtp(tmp_path, STACKED)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"mtp_layers_block_type": kinds}))
    with pytest.raises(UnsupportedModel, match=reason):
        MtpDrafter.for_target(loaded(place))


@pytest.mark.parametrize(
    "lost", ["layers.0.eh_proj.weight", "layers.1.final_layernorm.weight", "layers.0.mixer.o_proj.weight"]
)
def test_a_stack_that_is_not_whole_is_an_error(lost: str, tmp_path: Path) -> None:
    place = save_mtp(tmp_path, STACKED)
    tensors = load_file(place / "model.safetensors")
    del tensors[f"mtp.{lost}"]
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=lost.split(".")[-2]):
        MtpDrafter.for_target(loaded(place))


def test_auto_passes_over_layers_that_are_not_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor of the second layer is missing: `auto` says so and takes `suffix`, `mtp` is an error."""
    place = save_mtp(tmp_path, "qwen3-next", layers=2)
    tensors = load_file(place / "model.safetensors")
    del tensors["mtp.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    with caplog.at_level("WARNING", "shoal"), shoal.load(place, "auto", dtype="float32") as pair:
        assert str(pair.drafter_name).startswith("suffix")
    (said,) = [one.getMessage() for one in caplog.records if one.name == "shoal"]
    assert said.startswith("draft=auto passes over the layer for further tokens: ")
    assert "layers.1.mtp_block.self_attn.o_proj.weight" in said
    with pytest.raises(ModelError, match="o_proj"):
        shoal.load(place, "mtp", dtype="float32")


def in_fp8(place: Path) -> None:
    """One scale a matrix, the layer's matrices alone."""
    tensors = load_file(place / "model.safetensors")
    for name in [name for name in tensors if name.startswith("mtp.") and name.endswith("proj.weight")]:
        scale = tensors[name].abs().max().reshape(1, 1) / 448
        tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})


QUANTISED: dict[str, Callable[[Path], Any]] = {
    "fp8": in_fp8,
    "bytes": lambda place: regroup(place, Layout("compressed-tensors", form="int-quantized"), lambda name: "mtp." in name),
    "words": lambda place: regroup(place, Layout("compressed-tensors", 4), lambda name: True),
    "gptq": lambda place: regroup(place, Layout("gptq", 4, form="gptq_v2"), lambda name: True),
}


@needs_compiler
@pytest.mark.parametrize("form", QUANTISED)
def test_a_layer_that_is_quantised_is_refused(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transformers would take its numbers for weights, without their scales; the target goes on without it."""
    QUANTISED[form](save_mtp(tmp_path, "qwen3.5"))
    if form == "bytes":  # of the layer alone: the target is in floats
        config = json.loads((tmp_path / "config.json").read_text())
        del config["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"its multi-token-prediction layer is quantised \(mtp\.layers\.0\..*\), and"):
        shoal.load(tmp_path, "mtp", dtype="float32")
    with shoal.load(tmp_path, "auto", dtype="float32") as pair:
        assert pair.loaded["draft"]["drafter"].startswith("suffix")  # type: ignore[index]
        alone = AutoModelForCausalLM.from_pretrained(tmp_path) if form in ("fp8", "bytes") else None
        made = pair.generate([[5, 3, 7]], 2, temperature=0, max_new_tokens=8, eos=())[0].samples
    assert "draft=auto passes over the layer for further tokens" in caplog.text
    if alone is not None:
        right = alone.generate(torch.tensor([[5, 3, 7]]), max_new_tokens=8, do_sample=False)[0, 3:]
        assert [list(one.token_ids) for one in made] == [right.tolist()] * 2


def test_a_layer_that_transformers_cannot_place_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MiMo-7B's names, beside the weights of a Qwen2: `mtp` names one, and `auto` says so and takes `suffix`."""
    tiny_model("qwen2").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with caplog.at_level("WARNING", "shoal"), shoal.load(tmp_path, "auto", dtype="float32") as pair:
        assert str(pair.drafter_name).startswith("suffix")
    assert "model.mtp_layers.0.input_proj.weight" in caplog.text
    told = (
        r"has a multi-token-prediction layer whose tensors \(model\.mtp_layers\.0\.input_proj\.weight\) Transformers cannot"
    )
    with pytest.raises(UnsupportedModel, match=told):
        shoal.load(tmp_path, "mtp", dtype="float32")


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["deepseek-v3-rsd-s"])
@pytest.mark.parametrize("tree", ["", "rsd-s"])
def test_tokens_are_those_of_plain_decoding(target: Runner, tree: str) -> None:
    drafter = MtpDrafter.for_target(target, tree=tree)
    assert bool(drafter.max_nodes) == bool(tree and target.takes_trees)
    if not tree or target.takes_trees:  # else chains, as without
        require_tokens_of_plain_decoding(target, lambda: MtpDrafter.for_target(target, tree=tree), PROMPTS)


@pytest.mark.slow(but=["('deepseek-v3', 2)"])
def test_tokens_of_several_layers_are_those_of_plain_decoding(deep: Runner) -> None:
    require_tokens_of_plain_decoding(deep, lambda: MtpDrafter.for_target(deep), PROMPTS)


@pytest.mark.slow(but=["deepseek-v3-1-rejection", "deepseek-v3-1-coupled"])
@pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])
@pytest.mark.parametrize(
    ("architecture", "layers"), [("deepseek-v3", 1), ("qwen3-next", 1), ("deepseek-v3", 2), (STACKED, 1)]
)
def test_two_tokens_have_their_law(architecture: str, layers: int, rule: Rule, tmp_path: Path) -> None:
    """By enumeration; it would fail with probability 1e-6 if its seeds were drawn anew."""
    target = loaded(save_mtp(tmp_path, architecture, vocab=5, layers=layers))
    assert p_of_two_tokens(target, MtpDrafter.for_target(target), (1, 4, 2), 1200, rule) > ALPHA


# ── the way in ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_checkpoint_decides(tmp_path: Path) -> None:
    """`auto` takes the layer where there is one; sums join it; others are refused by name."""
    one, two = save_mtp(tmp_path / "one", "qwen3.5"), save_mtp(tmp_path / "two", "deepseek-v3", layers=2)
    none = save_mtp(tmp_path / "none", "deepseek-v3", layers=0)
    for place, draft, name in (
        (one, "auto", "mtp"),
        (none, "auto", "suffix"),
        (two, "auto", "mtp"),
        (one, "suffix+mtp", "suffix"),
    ):
        with shoal.load(place, draft, dtype="float32") as pair:
            assert pair.drafter_name is not None
            assert pair.drafter_name.startswith(name)
            found = pair.generate([1, 2, 3], 2, max_new_tokens=6, lookahead=2, temperature=0.0)
            assert (found.stats.draft_passes > 0) == ("mtp" in pair.drafter_name)
    draft = read_draft("mtp")
    assert draft is not None
    with pytest.raises(UnsupportedModel, match="no multi-token-prediction layer"):
        draft.require_fit(loaded(none))
    with pytest.raises(UnsupportedModel, match="has 2 multi-token-prediction layers, which draft chains: leave out tree="):
        MtpDrafter.for_target(loaded(two), tree="rsd-s")
