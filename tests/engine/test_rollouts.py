"""What training loops need: samples as padded tensors, log-probabilities that are a forward pass's, and weights that may change
between calls of `generate`.

Tests of: models.structure, types.rollouts, models.quantize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor

import shoal
from shoal.errors import RequestError
from shoal.models.quantize import Int8Linear
from shoal.types.rollouts import Rollouts, rollouts
from shoal.types.samples import Output

PROMPTS = [(5, 6, 7), (8, 9), (3, 4, 5, 6, 7, 8)]
PAD = 63


def pair_of(quantize: str | None = None) -> shoal.Shoal:
    return shoal.load(dtype="float32", quantize=quantize, max_batch=6)


@pytest.fixture(scope="module")
def loaded() -> shoal.Shoal:
    return pair_of()


def rolled(pair: shoal.Shoal, **options: Any) -> Rollouts:
    asked: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_new_tokens": 12, "lookahead": 3} | options
    return pair.generate(PROMPTS, 2, **asked).tensors(PAD)


def by_forward_pass(hf: Any, found: Rollouts, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [rows, longest sample] of the samples' tokens, 0.0 at padding."""
    mask = found.attention_mask
    places = (mask.cumsum(1) - 1).clamp(min=0)
    logits = hf(input_ids=found.input_ids, attention_mask=mask, position_ids=places).logits.float() / temperature
    start = found.prompt_ids.shape[1]
    logprobs = logits[:, start - 1 : -1].log_softmax(-1).gather(-1, found.completion_ids[..., None])[..., 0]
    return logprobs.masked_fill(~found.completion_mask, 0.0)


def test_rows_are_padded_on_the_side_of_their_ends(loaded: shoal.Shoal) -> None:
    result = loaded.generate(PROMPTS, 2, temperature=0.9, seed=3, max_new_tokens=12)
    found = result.tensors(PAD)
    samples = [sample for output in result for sample in output.samples]
    longest = max(len(sample.token_ids) for sample in samples)
    assert found.prompt_ids.shape == (6, 6)
    assert found.completion_ids.shape == found.logprobs.shape == (6, longest)
    assert found.prompts.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.finished.tolist() == [sample.finished for sample in samples]
    assert found.truncated.tolist() == [sample.finish_reason == "length" for sample in samples]
    for row, sample in enumerate(samples):
        assert found.prompt_ids[row][found.prompt_mask[row]].tolist() == list(PROMPTS[row // 2])
        assert found.prompt_mask[row].tolist() == sorted(found.prompt_mask[row].tolist())
        assert found.completion_ids[row][found.completion_mask[row]].tolist() == list(sample.token_ids)
        assert found.completion_mask[row].tolist() == sorted(found.completion_mask[row].tolist(), reverse=True)
        assert found.sampling_logprobs[row][found.completion_mask[row]].tolist() == pytest.approx(sample.processed_logprobs)
    assert found.prompt_ids[~found.prompt_mask].unique().tolist() == [PAD]
    assert found.logprobs[~found.completion_mask].unique().tolist() in ([], [0.0])
    assert found.input_ids.shape == found.attention_mask.shape == (6, 6 + longest)
    short = loaded.generate(PROMPTS[0], 2, seed=3, max_new_tokens=3)[0].samples
    ragged = Output(None, (1, 2), (short[0], replace(short[1], token_ids=(7,), logprobs=(0.0,), processed_logprobs=(0.0,))))
    assert rollouts([ragged], PAD, "cpu").attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_a_row_that_came_to_its_limit_is_finished_and_truncated(loaded: shoal.Shoal) -> None:
    """What training leaves out of a loss are rows that did not end by themselves: `finished` does not say it."""
    first = loaded.generate(PROMPTS[0], seed=3, max_new_tokens=12)[0].samples[0].token_ids
    ended, cut = (loaded.generate(PROMPTS[0], seed=3, max_new_tokens=8, eos=[first[end]]).tensors(PAD) for end in (4, 10))
    assert (ended.finished.tolist(), ended.truncated.tolist()) == ([True], [False])
    assert (cut.finished.tolist(), cut.truncated.tolist()) == ([True], [True])
    assert repr(cut) == "Rollouts(prompt_ids [1, 3], completion_ids [1, 8], 8 tokens, 1 rows truncated, cpu)"


def test_a_stop_string_is_an_end_and_weights_stand_beside_their_rows(loaded: shoal.Shoal) -> None:
    (output,) = loaded.generate(PROMPTS[0], 4, seed=3, max_new_tokens=3)
    ends = zip(output.samples, ("stop", "eos", "length", "time"), (-1.5, None, 0.25, -0.5), strict=True)
    samples = tuple(replace(sample, finish_reason=reason, log_weight=weight) for sample, reason, weight in ends)
    found = rollouts([replace(output, samples=samples)], PAD, "cpu")
    assert found.truncated.tolist() == [False, False, True, True]
    assert found.finished.tolist() == [True, True, True, False]
    assert found.log_weights.tolist() == [-1.5, 0.0, 0.25, -0.5]


def test_no_samples_are_no_rows() -> None:
    found = rollouts([], PAD, "cpu")
    assert found.input_ids.shape == (0, 0)
    assert found.finished.tolist() == found.truncated.tolist() == []


@pytest.mark.parametrize("wrong", [None, "0", 1.5, True])
def test_a_pad_id_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match="pad_id must be a token id"):
        rollouts([], wrong, "cpu")
    assert rollouts([], cast(int, numpy.int64(PAD)), "cpu").input_ids.shape == (0, 0)


@torch.no_grad()
def test_log_probabilities_are_those_of_a_forward_pass(loaded: shoal.Shoal) -> None:
    """Those of the policy at temperature 1, and those of the distribution that was sampled from."""
    found = rolled(loaded)
    hf = loaded.target.hf
    torch.testing.assert_close(found.logprobs, by_forward_pass(hf, found), rtol=0, atol=2e-4)
    torch.testing.assert_close(found.sampling_logprobs, by_forward_pass(hf, found, 0.9), rtol=0, atol=2e-4)
    assert (found.logprobs - found.sampling_logprobs).abs().max() > 0.01


def _sgd(hf: Any) -> None:
    """One step of an optimiser, in place."""
    optimiser = torch.optim.SGD(hf.parameters(), lr=0.05)
    hf(input_ids=torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([[5, 6, 7, 8]])).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


@torch.no_grad()
def _loaded_state(hf: Any) -> None:
    hf.load_state_dict({name: 1.04 * value for name, value in hf.state_dict().items()})


@torch.no_grad()
def _merged(hf: Any) -> None:
    """As adapters of low rank are merged: into `weight.data`."""
    generator = torch.Generator().manual_seed(0)
    for module in hf.modules():
        if isinstance(module, torch.nn.Linear):
            out, width = module.weight.shape
            down, up = torch.randn(2, width, generator=generator), torch.randn(out, 2, generator=generator)
            module.weight.data += 0.01 * up @ down


@torch.no_grad()
def _adapted(hf: Any) -> None:
    """As adapters are put around a layer that is kept."""
    attention = hf.model.layers[0].self_attn
    attention.q_proj = torch.nn.Sequential(
        attention.q_proj, torch.nn.Linear(attention.q_proj.out_features, attention.q_proj.out_features)
    )


@torch.no_grad()
def _hooked(hf: Any) -> None:
    hf.model.layers[1].mlp.register_forward_hook(lambda module, given, out: 1.5 * out)


@torch.no_grad()
def _another_forward(hf: Any) -> None:
    mlp = hf.model.layers[1].mlp
    before = mlp.forward
    mlp.forward = lambda x: 1.5 * before(x)


CHANGES = [_sgd, _loaded_state, _merged, _adapted, _hooked, _another_forward]


@pytest.mark.slow(but=["loaded_state"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changed_weights_are_sampled_from(change: Callable[[Any], None]) -> None:
    """Packed weights and passes in one call follow, or step aside. The drafter does neither, which costs acceptance and no
    exactness."""
    pair = pair_of()
    before = rolled(pair)
    change(pair.target.hf)
    after = rolled(pair)
    with torch.no_grad():
        torch.testing.assert_close(after.logprobs, by_forward_pass(pair.target.hf, after), rtol=0, atol=2e-4)
        stale = by_forward_pass(pair.target.hf, before)
    assert (before.logprobs - stale).abs().max() > 0.01, "the weights have hardly changed"
    plain = rolled(pair, lookahead="off", temperature=0.0)
    assert rolled(pair, temperature=0.0).completion_ids.tolist() == plain.completion_ids.tolist()


@torch.no_grad()
def test_a_copy_in_bytes_takes_the_weights_of_its_policy() -> None:
    policy, copy = pair_of().target.hf, pair_of("target=int8")
    _merged(policy)
    missing, unexpected = copy.target.hf.load_state_dict(policy.state_dict())
    assert (missing, unexpected) == ([], [])
    for ours, theirs in zip(copy.target.hf.modules(), policy.modules(), strict=True):
        if isinstance(ours, Int8Linear):
            assert ((ours.weight * ours.scales[:, None] - theirs.weight).abs() <= 0.51 * ours.scales[:, None]).all()
    found = rolled(copy)
    assert (found.logprobs - by_forward_pass(policy, found))[found.completion_mask].abs().mean() < 0.1


@torch.no_grad()
@pytest.mark.parametrize("wrong", [False, True])
def test_weights_in_bytes_are_those_of_a_new_layer(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second case is a sabotage: the scales stay those of the old weights."""
    from shoal.models import quantize

    old, new = torch.nn.Linear(64, 48), torch.nn.Linear(64, 48)
    new.weight *= torch.linspace(0.1, 3, 48)[:, None]
    layer, expected = Int8Linear(old), Int8Linear(new)
    if wrong:
        in_bytes: Callable[[Tensor], Sequence[Tensor]] = quantize._in_bytes
        monkeypatch.setattr(quantize, "_in_bytes", lambda weight: (in_bytes(weight)[0], layer.scales.clone()))
    layer.load_state_dict(new.state_dict())
    x = torch.randn(5, 64)
    assert torch.equal(layer(x), expected(x)) is not wrong


@torch.no_grad()
def test_what_transformers_puts_on_modules_to_return_hidden_states_changes_nothing() -> None:
    """Its hooks stay; a user's own beside them are noticed."""
    pair = pair_of()
    lean, hf = pair.target.lean, pair.target.hf
    if lean is None:
        pytest.skip("passes are made by the model's modules here")
    hf(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in hf.modules())
    assert not lean.decoder.stale
    _hooked(hf)
    assert lean.decoder.stale
