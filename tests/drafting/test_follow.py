"""Updates of a target in place: what shares its weights follows, what has its own is counted as behind, drafters are realigned.

Tests of: models.weights.parameter, models.four_bits, models.target_models, models.mtp_layer,
drafting.following, drafting.distillation, api.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import shoal
from eagle_heads import save_eagle3
from medusa_heads import save_medusa
from mtp_layers import save_mtp
from shoal.drafting.protocol import DraftInputs
from shoal.errors import RequestError, UnsupportedModel
from shoal.models import four_bits
from shoal.models.weights.parameter import PackedWeight
from shoal.testing import tiny_model, tiny_tokenizer
from shoal.types.rollouts import Rollouts
from shoal.types.trees import DraftTree
from trainable import learnable

PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8]]


def noise(name: str, tensor: Tensor) -> Tensor:
    """The same for the same name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return 0.3 * torch.randn(tensor.shape, generator=generator) * tensor.float().std() if tensor.dim() > 1 else 0 * tensor


@torch.no_grad()
def update(hf: Any) -> None:
    """As an optimiser writes."""
    for name, parameter in hf.named_parameters():
        parameter.add_(noise(name, parameter))


def saved(place: Path, draft: str) -> Path:
    if draft == "mtp":
        return save_mtp(place, "deepseek-v3")
    tiny_model("llama", layers=3, vocab_size=260, intermediate_size=64).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def updated(place: Path, other: Path) -> Path:
    """A copy of a checkpoint, whose target has been updated."""
    import transformers

    hf = transformers.AutoModelForCausalLM.from_pretrained(place)
    update(hf)
    hf.save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    before, after = load_file(place / "model.safetensors"), load_file(other / "model.safetensors")
    save_file(before | after, other / "model.safetensors", {"format": "pt"})
    return other


def drafts(pair: shoal.Shoal) -> list[list[list[int]]]:
    """The drafts of each round, greedy."""
    found, drafter = [], pair.new_drafter()
    assert drafter is not None
    real = drafter.propose

    def propose(inputs: DraftInputs) -> DraftTree:
        tree = real(inputs)
        found.append([list(one) for one in tree.drafts])
        return tree

    drafter.propose = propose  # type: ignore[method-assign]
    stats = pair.generate(PROMPTS, 2, drafter=drafter, temperature=0.0, max_new_tokens=12, lookahead=3).stats
    assert stats.committed == stats.row_rounds + stats.accepted
    return found


FOLLOWING = ["self:exit=1", "self:window=4,sinks=1", "self:exit=2,window=4", "self:int4", "mtp", "eagle3", "medusa"]


@pytest.mark.slow(but=["self:int4-off"])
@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("draft", FOLLOWING)
def test_what_shares_weights_drafts_as_if_loaded_anew(draft: str, compile: str, tmp_path: Path) -> None:
    if draft == "self:int4" and compile == "off":
        pytest.skip("the copy is for kernels in C")
    place, spec = saved(tmp_path / "first", draft), draft
    if draft == "eagle3":
        spec = f"eagle3:{save_eagle3(tmp_path / 'heads')}"
    elif draft == "medusa":
        spec = f"medusa:{save_medusa(tmp_path / 'heads', vocab=None)}"
    other = updated(place, tmp_path / "second")
    with (
        shoal.load(place, spec, dtype="float32", compile=compile) as pair,
        shoal.load(other, spec, dtype="float32", compile=compile) as anew,
    ):
        before = drafts(pair)
        update(pair.target.hf)
        after = drafts(pair)
        assert after == drafts(anew)
        assert before != after


def test_a_copy_that_is_never_rounded_again_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(four_bits, "writes", lambda hf: [])
    with pytest.raises(AssertionError):
        test_what_shares_weights_drafts_as_if_loaded_anew("self:int4", "auto", tmp_path)


def test_a_copy_is_rounded_once_for_each_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = four_bits._make_copy
    monkeypatch.setattr(four_bits, "_make_copy", lambda target: made.append(target) or real(target))
    with shoal.load(saved(tmp_path, ""), "self:int4", dtype="float32") as pair:
        for count in (1, 2, 3):
            drafts(pair)
            drafts(pair)
            assert len(made) == count
            update(pair.target.hf)


# ── weights of its own ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pair(saved_pair: tuple[Path, Path]) -> shoal.Shoal:
    return shoal.load(*saved_pair, dtype="float32")


def rolled(pair: shoal.Shoal, **options: Any) -> Any:
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12, "lookahead": 3} | options
    return pair.generate(PROMPTS, 4, **asked)


def behind(pair: shoal.Shoal) -> int:
    return int(rolled(pair).stats.updates_behind)


def test_updates_that_a_drafter_has_not_followed_are_counted(pair: shoal.Shoal, caplog: pytest.LogCaptureFixture) -> None:
    """Once a call, until its own weights are written; one warning says so."""
    with caplog.at_level(logging.WARNING, "shoal"):
        found = [behind(pair), behind(pair)]
        update(pair.target.hf)
        found += [behind(pair), behind(pair)]
        pair.target.hf.model.layers[0].mlp.up_proj.weight.data += 0.01
        found.append(behind(pair))
        said = [record.message for record in caplog.records]
        pair.realign(rolled(pair).tensors(0), steps=1)
        found.append(behind(pair))
        update(pair.target.hf)
        found.append(rolled(pair, lookahead="off").stats.updates_behind)  # there is no drafter
        found.append(behind(pair))
    # PyTorch does not count writes through `data`; packed weights do.
    packed = isinstance(pair.target.hf.model.layers[0].mlp.up_proj.weight, PackedWeight)
    assert found == [0, 0, 1, 1, 1 + packed, 0, 0, 1]
    assert len(said) == 1
    assert "was updated, and" in said[0]
    assert "Shoal.realign(rollouts)" in said[0]


def test_an_update_before_the_first_call_counts(pair: shoal.Shoal) -> None:
    update(pair.target.hf)
    stats = rolled(pair).stats
    assert (stats.updates_behind, (stats + rolled(pair).stats).updates_behind) == (1, 1)


@pytest.mark.slow(but=["eagle3"])
@pytest.mark.parametrize("draft", ["mtp", "eagle3", "medusa", "self:exit=1", "suffix"])
def test_what_heads_share_with_the_target_is_not_their_own(draft: str, tmp_path: Path) -> None:
    heads = {"eagle3": save_eagle3, "medusa": save_medusa}
    place = saved(tmp_path / "target", draft)
    spec = f"{draft}:{heads[draft](tmp_path / 'heads')}" if draft in heads else draft
    with shoal.load(place, spec, dtype="float32") as pair:
        assert behind(pair) == 0
        update(pair.target.hf)
        assert behind(pair) == (draft in ("mtp", "eagle3", "medusa"))
        drafter = pair.new_drafter()
        assert drafter is not None
        if isinstance(drafter.weights, torch.nn.Module):
            with torch.no_grad():
                next(iter(drafter.weights.parameters())).mul_(1.01)
            assert behind(pair) == (draft == "mtp" and "embed" in next(iter(drafter.weights.named_parameters()))[0])


def test_nobody_who_looks_is_noticed(saved_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.models.weights.parameter._counted", lambda tensor: (0, 0))
    pair = shoal.load(*saved_pair, dtype="float32")
    behind(pair)
    update(pair.target.hf)
    assert behind(pair) == 0


# ── realigned ───────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def by_rows(hf: Any, found: Rollouts) -> Tensor:
    """The logits [rows, longest sample, vocabulary] of each row alone; 0.0 at padding."""
    out = torch.zeros(*found.completion_ids.shape, hf.config.vocab_size)
    for row in range(len(out)):
        prompt, sample = (
            ids[row][mask[row]]
            for ids, mask in ((found.prompt_ids, found.prompt_mask), (found.completion_ids, found.completion_mask))
        )
        said = hf(torch.cat([prompt, sample])[None], use_cache=False).logits[0]
        out[row, : len(sample)] = said[len(prompt) - 1 : -1]
    return out


def overlap(pair: shoal.Shoal, found: Rollouts) -> float:
    """sum min(p, q) over the tokens of all samples, row by row."""
    assert pair.draft_model is not None
    p, q = (by_rows(hf, found)[found.completion_mask].softmax(-1) for hf in (pair.target.hf, pair.draft_model.hf))
    return float(torch.minimum(p, q).sum(-1).mean())


def weights(pair: shoal.Shoal) -> Tensor:
    assert pair.draft_model is not None
    return torch.cat([one.detach().clone().flatten() for one in pair.draft_model.hf.parameters()])


def test_a_draft_model_follows_on_rollouts(pair: shoal.Shoal) -> None:
    """It accepts what the overlap says, before and after; samples of a seed stay; the target stays."""
    update(pair.target.hf)
    before = rolled(pair)
    found, target = before.tensors(259), [one.detach().clone() for one in pair.target.hf.parameters()]
    expected = overlap(pair, found)
    done = pair.realign(found, steps=30, rows=12, rate=5e-3)
    assert done.accepted[0] == pytest.approx(expected, abs=1e-4)
    assert done.tokens == 30 * int(found.completion_mask.sum())
    assert done.accepted[-1] > done.accepted[0] + 0.2
    assert overlap(pair, found) >= done.accepted[-1] - 0.02
    after = rolled(pair)
    assert after.stats.accepted > 1.3 * before.stats.accepted
    assert [s.token_ids for o in after for s in o.samples] == [s.token_ids for o in before for s in o.samples]
    assert all(torch.equal(a, b.detach()) for a, b in zip(target, pair.target.hf.parameters(), strict=True))


def test_logits_that_are_there_are_as_good(saved_pair: tuple[Path, Path]) -> None:
    """Those of each token; of a token later they are wrong."""
    found: dict[str, tuple[float, Tensor]] = {}
    for name in ("computed", "given", "late"):
        with shoal.load(*saved_pair, dtype="float32", prefix_memory=1 << 20) as pair:
            assert pair.prefixes is not None
            update(pair.target.hf)
            rollouts = rolled(pair).tensors(7)
            assert pair.prefixes.allocated_bytes
            said = None if name == "computed" else by_rows(pair.target.hf, rollouts)
            if name == "late" and said is not None:
                said = said.roll(-1, dims=1)
            done = pair.realign(rollouts, logits=said, steps=3, rows=5, rate=3e-4)
            assert not pair.prefixes.allocated_bytes  # what the draft model had computed by its old weights
            found[name] = done.accepted[0], weights(pair)
    assert found["given"][0] == pytest.approx(found["computed"][0], abs=1e-5)
    assert (found["given"][1] - found["computed"][1]).abs().max() < 1e-4
    assert (found["late"][1] - found["computed"][1]).abs().max() > 1e-3


def test_small_steps_add_up_in_sixteen_bits(saved_pair: tuple[Path, Path]) -> None:
    """A rate whose single steps vanish in bfloat16 moves weights over many calls."""
    with shoal.load(*saved_pair, dtype="bfloat16") as pair:
        rollouts, first = rolled(pair).tensors(0), weights(pair)
        pair.realign(rollouts, steps=1, rate=1e-4)
        moved = [int((weights(pair) != first).sum())]
        for _ in range(20):
            pair.realign(rollouts, steps=1, rate=1e-4)
        moved.append(int((weights(pair) != first).sum()))
        assert moved[1] > 1.5 * moved[0]
        assert pair.draft_model is not None
        assert pair.draft_model.dtype == torch.bfloat16


def test_what_cannot_be_realigned_is_refused(saved_pair: tuple[Path, Path]) -> None:
    with shoal.load(*saved_pair, dtype="float32") as pair:
        found = rolled(pair).tensors(0)
        for wrong, message in (
            ({"steps": 0}, "steps, rows and rate must be positive"),
            ({"rate": -1.0}, "steps, rows and rate must be positive"),
            ({"logits": torch.zeros(3, 4)}, r"logits must have the shape \[12, 12, "),
        ):
            with pytest.raises(RequestError, match=message):
                pair.realign(found, **wrong)
        with pytest.raises(RequestError, match="at least one token"):
            pair.realign(Rollouts(**{**vars(found), "completion_mask": torch.zeros_like(found.completion_mask)}))
    pair = shoal.load(saved_pair[0], "self:exit=1", dtype="float32")
    with pytest.raises(
        RequestError, match="realign is for draft models, Medusa and EAGLE-3 heads and mtp, and self:exit=1 is none"
    ):
        pair.realign(found)
    pair = shoal.load(*saved_pair, dtype="float32", quantize="draft=int8")
    with pytest.raises(UnsupportedModel, match="cannot be realigned: its weights are quantised"):
        pair.realign(found)


# ── heads ───────────────────────────────────────────────────────────────────────────────────────────────────────────

KINDS = ["medusa", "medusa of its own head", "eagle3", "suffix+eagle3", "mtp", "mtp of two layers"]


def with_heads(place: Path, kind: str, **options: Any) -> shoal.Shoal:
    """A target with random heads. For those that propose no q, the target says one token after another almost surely."""
    if kind.startswith("mtp"):
        layers = 2 if kind.endswith("layers") else 1
        return shoal.load(save_mtp(place, ("deepseek-v3", "qwen3.5")[layers - 1], layers=layers), "mtp", **options)
    (place / "pair").mkdir(parents=True)
    target = learnable(place / "pair", sharper=4)
    if kind.startswith("medusa"):
        heads = save_medusa(place / "heads", vocab=260 if kind.endswith("head") else None)
        return shoal.load(target, f"medusa:{heads}", **options)
    text = "suffix+" if kind.startswith("suffix") else ""
    return shoal.load(target, f"{text}eagle3:{save_eagle3(place / 'heads')}", **options)


def kept(pair: shoal.Shoal) -> list[Tensor]:
    """The target's weights."""
    return [one.detach().clone() for one in pair.target.hf.parameters()]


@pytest.mark.slow(but=["medusa-float32"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "float32") for kind in KINDS),
        ("medusa", "bfloat16"),
        *(pytest.param(kind, "bfloat16", marks=pytest.mark.slow) for kind in ("eagle3", "mtp of two layers")),
    ],
)
def test_heads_follow_on_rollouts(kind: str, dtype: str, tmp_path: Path) -> None:
    """More is accepted than before, samples of a seed and the target stay, the heads are no longer behind."""
    with with_heads(tmp_path, kind, dtype=dtype) as pair:
        update(pair.target.hf)
        before, target = rolled(pair, max_new_tokens=24), kept(pair)
        found = before.tensors(0)
        done = pair.realign(found, steps=30, rows=12, rate=1e-2)
        after = rolled(pair, max_new_tokens=24)
        assert done.tokens == 30 * int(found.completion_mask.sum())
        assert done.accepted[-1] > 2 * done.accepted[0]
        shares = [one.stats.accepted / one.stats.drafted for one in (before, after)]
        assert shares[1] > (1.5 if kind.startswith("suffix") else 2) * shares[0]
        assert after.stats.accepted > 1.3 * before.stats.accepted
        assert (before.stats.updates_behind, after.stats.updates_behind) == (1, 0)
        if dtype == "float32":
            plain = rolled(pair, max_new_tokens=24, lookahead="off")
            texts = [[s.token_ids for o in one for s in o.samples] for one in (before, after, plain)]
            assert texts[0] == texts[1] == texts[2]
        now = list(pair.target.hf.parameters())
        assert all(a.dtype is b.dtype and torch.equal(a, b.detach()) for a, b in zip(target, now, strict=True))
        assert all(one.grad is None for one in now)


@pytest.mark.slow(but=["medusa"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "mtp"])
def test_a_copy_that_learns_reads_the_target_as_it_is(kind: str, tmp_path: Path) -> None:
    """Made before an update of the target, or after it: embedding and head are the target's in both."""
    shares = []
    for name in ("before", "after"):
        with with_heads(tmp_path / name, kind, dtype="float32") as pair:
            rollouts = rolled(pair).tensors(0)
            if name == "before":
                pair.realign(rollouts, steps=1, rate=1e-30)
            update(pair.target.hf)
            shares.append(pair.realign(rollouts, steps=1, rows=12, rate=1e-30).accepted)
            assert 0 < shares[-1][0] < 1
    assert shares[0][0] == pytest.approx(shares[1][0], abs=1e-6)


def test_heads_that_cannot_be_realigned_are_refused(tmp_path: Path) -> None:
    with with_heads(tmp_path / "heads", "eagle3", dtype="float32") as pair:
        found = rolled(pair).tensors(0)
        said = by_rows(pair.target.hf, found)
        with pytest.raises(RequestError, match=r"heads read the target's hidden states, .* leave out logits"):
            pair.realign(found, logits=said)
    pair = with_heads(tmp_path / "bytes", "medusa", dtype="float32", quantize="target=int8")
    with pytest.raises(UnsupportedModel, match=r"medusa.* cannot be realigned: its weights are quantised"):
        pair.realign(rolled(pair).tensors(0))
