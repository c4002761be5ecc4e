"""Drafters that are trained heads: exact whatever they propose, accepted where they are right, refused where they do not fit.

Tests of: drafting.trained_heads, drafting.medusa, drafting.sums, drafting.suffix, drafting.draft.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from drafts import decoded as decoded_by
from medusa_heads import HEADS, V, guessing, knowing, save_medusa
from proposals import require_every_way_in
from shoal.config import Limits, Sampling
from shoal.drafting import trained_heads
from shoal.drafting.draft import read_draft
from shoal.drafting.medusa import MedusaDrafter
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.sums import SumDrafter
from shoal.engine.engine import Engine
from shoal.errors import ModelError, PairMismatch, RequestError, ShoalError
from shoal.lookahead.controller import Fixed
from shoal.models.loading import wrap
from shoal.sampling.acceptance import Coupled, Rejection, Rule
from shoal.testing import tiny_model
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import ahead, hashed, scripted
from shoal.types.requests import Request, Row

RULES = pytest.mark.parametrize("rule", [Rejection(), Coupled()], ids=["rejection", "coupled"])


def decoded(drafter: Drafter | None, rule: Rule, max_batch: int, temperature: float) -> tuple[Engine, list[list[int]]]:
    """By a target whose hidden states are what it says next, after prompts that end as it would itself."""
    script = hashed(V, spread=3.0)
    target = scripted(script, V, features=ahead(script, HEADS + 1))
    return decoded_by(drafter, rule, max_batch, temperature=temperature, target=target, prompts=(1, 4, 7))


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────


@RULES
@pytest.mark.parametrize("max_batch", [1, 9])
@pytest.mark.parametrize("nodes", [0, 6], ids=["chains", "trees"])
def test_tokens_are_those_of_plain_decoding(nodes: int, max_batch: int, rule: Rule) -> None:
    """Point masses: by both rules, at T > 0 as well. Nothing is kept of rows that have left."""
    for temperature in (0.0, 0.7):
        plain, expected = decoded(None, rule, max_batch, temperature)
        engine, found = decoded(drafter := MedusaDrafter(knowing(V), 1, nodes), rule, max_batch, temperature)
        assert found == expected
        stats = engine.stats
        assert 0 < stats.accepted <= stats.drafted
        assert (stats.accepted == stats.drafted) == (not nodes and not temperature)
        assert stats.committed == stats.row_rounds + stats.accepted
        assert stats.row_rounds < plain.stats.row_rounds == plain.stats.committed
        assert 0 < stats.draft_passes <= stats.rounds
        if not temperature:  # heads that are right are accepted as far as they reach, from the first round on
            assert stats.acceptance_length > (3.0 if nodes else 3.2)
        assert not drafter._last
        assert not drafter._prompts._of


def test_a_shifted_hidden_state_costs_acceptance_and_no_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    right, expected = decoded(MedusaDrafter(knowing(V), 1), Coupled(), 3, 0.0)
    real = trained_heads._hidden
    monkeypatch.setattr(trained_heads, "_hidden", lambda scores: real(scores).roll(1, dims=1).nan_to_num())
    wrong, found = decoded(MedusaDrafter(knowing(V), 1), Coupled(), 3, 0.0)
    assert found == expected
    assert wrong.stats.acceptance_rate < 0.6 * right.stats.acceptance_rate


@pytest.mark.slow(but=["chains"])
@pytest.mark.parametrize("nodes", [0, 6], ids=["chains", "trees"])
def test_the_protocol_is_kept(nodes: int) -> None:
    assert check_drafter(lambda: MedusaDrafter(guessing(V, V), 1, nodes), V) > 20
    text = nodes and 4
    assert (
        check_drafter(lambda: SumDrafter([SuffixDrafter("engine", nodes=text)], MedusaDrafter(guessing(V, V), 1, nodes)), V)
        > 20
    )


def test_states_that_are_nan_propose_nothing() -> None:
    script = hashed(V)
    target = scripted(script, V, features=lambda ids: script(ids) * (torch.nan if len(ids) % 2 else 1.0))
    engine = Engine(target, MedusaDrafter(guessing(V, V), 1), Fixed(2), rule=Coupled())
    rows = engine.submit(Request((1, 2, 3), 2, Sampling(seed=1), Limits(max_new_tokens=12)))
    while engine.step():
        pass
    assert all(row.finish_reason == "length" for row in rows)
    assert 0 < engine.stats.drafted < 2 * engine.stats.row_rounds


def test_trees_are_the_most_probable_paths() -> None:
    """Independent heads: a path is as probable as the product of its tokens."""
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]])
    drafter = MedusaDrafter(lambda x: probs.log()[:, None].expand(2, len(x), 3), 1, nodes=4)
    row = Row(Request((1, 2)), 0, 0, 0, [1, 2], frozenset(), 1000)
    drafter._last[row] = torch.zeros(3)
    tree = drafter.propose(DraftInputs([row], [4], torch.zeros(1, 5), lambda q, u: u))
    assert list(tree.drafts) == [[0, 0, 1, 0]]  # 0.6, 0.6 * 0.7, 0.3, then 0.3 * 0.7 before 0.6 * 0.2
    assert [list(parents) for parents in tree.parents] == [[-1, 0, -1, 2]]


# ── directories ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vocab", [260, None], ids=["own matrices", "shared head"])
def test_every_way_in(
    saved_pair: tuple[Path, Path], tmp_path: Path, vocab: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"medusa:{save_medusa(tmp_path / 'a,b=c' / 'heads', vocab=vocab, layers=2)},nodes=4"
    assert require_every_way_in(saved_pair[0], spec, capsys)["draft"] == {"drafter": "medusa:nodes=4"}


def test_published_heads_are_read(tmp_path: Path) -> None:
    """Those of FasterDecoding: five beside a config that says two; each by its definition."""
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}')
    shapes = {"0.linear.weight": (32, 32), "0.linear.bias": (32,), "1.weight": (260, 32)}
    tensors = {f"{head}.{name}": torch.randn(shape) for head in range(5) for name, shape in shapes.items()}
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    target = wrap(tiny_model("llama").float(), "tiny", checked=False)
    made = read_draft(str(tmp_path)).drafter(target)  # type: ignore[union-attr]
    assert isinstance(made, MedusaDrafter)
    x = torch.randn(3, 32)
    logits = made._heads(x)
    assert len(logits) == 5
    for head, seen in enumerate(logits):
        block = x + torch.nn.functional.silu(x @ tensors[f"{head}.0.linear.weight"].T + tensors[f"{head}.0.linear.bias"])
        assert torch.allclose(seen, block @ tensors[f"{head}.1.weight"].T, atol=1e-4)


def broken(directory: Path, change: str) -> Path:
    """Heads with one fault."""
    save_medusa(directory, **{"width": {"width": 16}, "vocabulary": {"vocab": 99}}.get(change, {}))
    weights, config = directory / "medusa_lm_head.safetensors", directory / "config.json"
    if change == "no weights":
        weights.unlink()
    if change == "damaged":
        weights.write_bytes(weights.read_bytes()[:100])
    if change == "no json":
        config.write_text("{")
    if change in ("missing", "heads"):
        config.write_text(json.dumps({"medusa_num_heads": 4 if change == "missing" else 0}))
    if change == "config of another vocabulary":
        save_medusa(directory, vocab=None, vocab_size=99)
    return directory


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("width", PairMismatch, "hidden states of 16 v 32: heads of another target"),
        ("vocabulary", PairMismatch, "a vocabulary of 99 v 260: heads of another target"),
        ("config of another vocabulary", PairMismatch, "a vocabulary of 99 v 260: heads of another target"),
        ("no weights", RequestError, "expected medusa_lm_head.safetensors or medusa_lm_head.pt or model.safetensors"),
        ("damaged", ModelError, "is damaged"),
        ("no json", RequestError, "its config.json cannot be read"),
        ("missing", ModelError, "lacks 3 of the 12 tensors of its heads, for example 3.0.linear.bias"),
        ("heads", RequestError, "needs a whole number >= 1 for medusa_num_heads, got 0"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: str, error: type[ShoalError], message: str) -> None:
    target = wrap(tiny_model("llama").float(), "tiny", checked=False)
    with pytest.raises(error, match=message.replace(".", r"\.")):
        MedusaDrafter.for_target(target, directory=str(broken(tmp_path, change)))


def test_targets_without_positions_get_chains(tmp_path: Path) -> None:
    target = wrap(tiny_model("mpt").float(), "tiny", checked=False)
    made = MedusaDrafter.for_target(target, directory=str(save_medusa(tmp_path)))
    assert made.max_nodes == 0
