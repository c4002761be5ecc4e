"""Samples of a real model: the law of two tokens under every rule with a real q, seeds alone and in company, many rows.

Two tokens are kept of 49,152 (top_k), so that a law of two tokens has four cells, enumerated by Transformers' own forwards; the
drafter is the model with noise on its weights, whose distributions overlap as those of a real pair. (The first
four layers alone propose none of the two tokens that are kept.)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import shoal
from enumeration import chi_square
from shoal.types.samples import Result

pytestmark = [pytest.mark.real, pytest.mark.limit(900)]

PROMPT = "The weather today is"
ROWS = 256
SAMPLING = {"temperature": 1.5, "top_k": 2}
ALPHA = 1e-3
NOISE = 0.06


@pytest.fixture(scope="module")
def noisy(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with noise of a share of each matrix's deviation on its weights."""
    place = tmp_path_factory.mktemp("real") / "noisy"
    hf = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in hf.model.layers.parameters():
            if weight.dim() == 2:
                weight += NOISE * weight.std() * torch.randn(weight.shape, generator=noise)
    hf.save_pretrained(place)
    transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(place)
    return place


@torch.inference_mode()
def law(hf: Any, ids: list[int]) -> tuple[list[int], Tensor, list[list[int]]]:
    """The two first tokens, the law [2, 2] of pairs, and the two second tokens of each."""

    def two(history: list[int]) -> tuple[list[int], Tensor]:
        logits = hf(torch.tensor([history])).logits[0, -1].double()
        best = logits.topk(2)
        return best.indices.tolist(), (best.values / SAMPLING["temperature"]).softmax(-1)

    first, p = two(ids)
    seconds = [two([*ids, token]) for token in first]
    return first, torch.stack([p[i] * seconds[i][1] for i in range(2)]), [tokens for tokens, _ in seconds]


def counted(result: Result, first: list[int], seconds: list[list[int]]) -> Tensor:
    """Counts [2, 2]; a token that is not of the law is an error."""
    counts = torch.zeros(2, 2, dtype=torch.int64)
    for sample in result[0].samples:
        row = first.index(sample.token_ids[0])
        counts[row, seconds[row].index(sample.token_ids[1])] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ("FEW", "rejection"), ("FEW", "coupled"), ("FEW:tree=rsd-s,width=2,nodes=4", "rejection"),
        ("FEW:tree=rsd-c,width=2,nodes=4", "rejection"), ("FEW:tree=k-seq,width=2,nodes=4", "rejection"),
    ],
)  # fmt: skip
def test_two_tokens_have_the_law_of_the_model(
    drafted: Any, noisy: Path, stock: Callable[[str], Any], shape: str, rule: str
) -> None:
    """256 rows at a time, each of them decided by its own uniforms."""
    model = drafted(noisy, shape)
    first, right, seconds = law(stock("float32"), model.tokenizer(PROMPT)["input_ids"])
    assert float(right.min()) > 0.02  # each cell is met
    result = model.generate(
        PROMPT, ROWS, max_new_tokens=2, lookahead=2 if "tree" in shape else 1, rule=rule, seed=5, **SAMPLING
    )
    assert chi_square(counted(result, first, seconds), right) > ALPHA
    stats = result.stats
    assert 0 < stats.accepted < stats.drafted
    assert stats.rounds == stats.target_passes == 2  # all rows side by side
    assert stats.row_rounds + stats.accepted >= stats.committed == 2 * ROWS
    assert not stats.lossy


@pytest.mark.slow
def test_typical_acceptance_says_that_it_is_lossy(drafted: Any, noisy: Path) -> None:
    result = drafted(noisy).generate(PROMPT, 8, max_new_tokens=8, lookahead=3, rule="typical", seed=5, temperature=0.8)
    assert "typical" in result.stats.lossy
    assert 0 < result.stats.accepted < result.stats.drafted


@pytest.mark.slow(but=["bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seed_means_the_same_tokens_alone_and_in_company(pair: Any, dtype: str) -> None:
    """Plainly and behind draft trees, beside other prompts and other seeds: the C decoder's logits have the same bits, in 16 bits
    too, and log-probabilities are equal to their own rounding."""
    model = pair(dtype, "auto")
    options = {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.95}
    alone = model.generate(PROMPT, 2, seed=3, **options)
    from shoal.drafting.draft import read_draft

    drafter = read_draft("recycling").drafter(model.target)  # type: ignore[union-attr]
    beside = model.generate(
        ["def f(x):\n    return x\n\n\ndef f(x):\n", PROMPT, "Dear Sir,"], [3, 2, 1], drafter=drafter, lookahead=3,
        sampling=[shoal.Sampling(temperature=t, top_p=p, seed=s) for t, p, s in ((0, 1.0, 1), (0.9, 0.95, 3), (1.0, 1.0, 9))],
        max_new_tokens=12,
    )  # fmt: skip
    assert 0 < beside.stats.accepted < beside.stats.drafted
    assert alone.stats.drafted == 0
    assert set(alone.stats.executors["target"]) == set(beside.stats.executors["target"]) == {"C decoder"}
    for one, other in zip(alone[0].samples, beside[1].samples, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.slow
def test_256_rows_of_a_real_model(pair: Any) -> None:
    """The first rows are those of a call of two: rows are drawn by their number, not by their neighbours."""
    model = pair("float32", "auto")
    options = {"max_new_tokens": 4, "temperature": 1.0, "seed": 8}
    many, few = model.generate(PROMPT, ROWS, **options), model.generate(PROMPT, 2, **options)
    assert many.stats.rounds <= 5
    assert many.stats.committed == sum(len(sample.token_ids) for sample in many[0].samples)
    assert [sample.token_ids for sample in many[0].samples[:2]] == [sample.token_ids for sample in few[0].samples]
    assert len({sample.token_ids for sample in many[0].samples}) > 50
