"""Greedy ids of a real model under every kind of drafter: those of Transformers, in float32 and bfloat16, by all kinds of passes.

Whether ids are Transformers' own is asked of one forward over prompt and answer: each id must have the highest logit there. That is
`generate` without its passes one by one; `test_ids_are_those_of_generate` compares with these too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.api import Shoal
from shoal.drafting.draft import read_draft
from shoal.drafting.protocol import Drafter
from shoal.types.samples import Result, Sample

pytestmark = [pytest.mark.real, pytest.mark.limit(900)]

CODE = '''def add(a, b):
    """Return the sum of a and b."""
    return a + b


def subtract(a, b):
    """Return the difference of a and b."""
    return a - b


def multiply(a, b):
'''
PROMPTS = (CODE, "Once upon a time")
N = 3
LONG = Path(torch.__file__).with_name("functional.py").read_text(encoding="utf-8")[20_000:24_000]
"""A text of some thousand tokens that no sample of ours wrote."""
TOKENS = 18  # where each costs a pass of a draft model
KINDS = [("float32", "auto"), ("float32", "off"), ("bfloat16", "auto"), ("bfloat16", "off")]
"""Number formats, with the kernels in C and without."""
TIES = {"float32": 1e-3, "bfloat16": 0.5}
"""Logits that are so near may change places by rounding; of 16 to 32 in bfloat16, whose steps are then 0.125."""
KERNELS = {"C decoder", "C layers"}
"""The executors of passes by our kernels."""
MOST_TIES = 0.05
"""Share of positions in bfloat16 at which such a neighbour may have been taken."""


def named(model: Shoal, name: str | None) -> Drafter | None:
    """A drafter without a model, or one of the target's own parts."""
    drafting = read_draft(name)
    return None if drafting is None else drafting.drafter(model.target)


@dataclass
class Gaps:
    """How far the logits of chosen tokens lie below the highest, [tokens], and log-probabilities of the chosen."""

    below: Tensor
    logprobs: Tensor


@torch.inference_mode()
def gaps(hf: Any, prompt: list[int], sample: Sample) -> Gaps:
    ids = torch.tensor([[*prompt, *sample.token_ids]])
    logits = hf(ids, use_cache=False, logits_to_keep=len(sample.token_ids) + 1).logits[0, :-1].float()
    chosen = logits.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    return Gaps(logits.amax(dim=1) - chosen, chosen - logits.logsumexp(dim=1))


def require_greedy(model: Shoal, hf: Any, result: Result, dtype: str) -> None:
    """Rows of a prompt are equal, each token is the model's choice, and its log-probability is the model's."""
    for prompt, output in zip(PROMPTS, result, strict=True):
        first, *others = output.samples
        for other in others:
            same = [a == b for a, b in zip(first.token_ids, other.token_ids, strict=False)]
            assert dtype == "bfloat16" or all(same)
        gap = gaps(hf, model.tokenizer(prompt)["input_ids"], first)
        assert float(gap.below.max()) <= TIES[dtype]
        assert float((gap.below > 0).double().mean()) <= (MOST_TIES if dtype == "bfloat16" else 0.01)
        error = (torch.tensor(first.logprobs) - gap.logprobs).abs()
        assert float(error.max()) < (1e-4 if dtype == "float32" else 0.5)
        assert float(error.mean()) < (3e-5 if dtype == "float32" else 0.05)


def require_drafts(result: Result, tokens: int) -> None:
    """Counts of a run that speculated: fewer rounds than tokens, and some drafts of both fates."""
    stats = result.stats
    assert stats.committed == len(PROMPTS) * N * tokens
    assert 0 < stats.accepted < stats.drafted
    assert stats.target_passes == stats.rounds <= tokens  # a row whose drafts are all refused takes a round a token
    samples = [sample for output in result for sample in output.samples]
    assert sum(sample.drafted for sample in samples) == stats.drafted
    assert stats.row_rounds == sum(sample.rounds for sample in samples) < stats.committed


def decoded(model: Shoal, drafter: Drafter | None, tokens: int, **options: Any) -> Result:
    return model.generate(PROMPTS, N, drafter=drafter, temperature=0, max_new_tokens=tokens, eos=(), lookahead=4, **options)


@pytest.mark.parametrize(
    ("dtype", "compile"), [KINDS[0], *(pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
def test_which_passes_run(pair: Any, dtype: str, compile: str) -> None:
    """Honest passes of a real model are not refused, in 16 bits either."""
    model = pair(dtype, compile)
    chosen = model.loaded["target"]
    assert chosen["dtype"] == dtype
    assert chosen["passes"] == ("C decoder" if compile == "auto" else "modules")
    assert chosen["attention"] == ("native" if compile == "auto" else "pad")
    stats = model.generate(PROMPTS[1], max_new_tokens=3, temperature=0, eos=()).stats
    assert stats.executors == {"target": {chosen["passes"]: 4}}


@pytest.mark.parametrize(
    "name", ["suffix", *(pytest.param(name, marks=pytest.mark.slow) for name in ("recycling", "self:exit=6"))]
)
def test_drafts_do_not_change_greedy_ids(pair: Any, stock: Callable[[str], Any], name: str) -> None:
    model = pair("float32", "auto")
    result = decoded(model, named(model, name), 32)
    require_drafts(result, 32)
    require_greedy(model, stock("float32"), result, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "compile", "name"), [(*KINDS[1], "ngram"), (*KINDS[2], "recycling"), (*KINDS[3], "ngram")]
)
def test_drafts_do_not_change_greedy_ids_by_other_passes(
    pair: Any, stock: Callable[[str], Any], dtype: str, compile: str, name: str
) -> None:
    model = pair(dtype, compile)
    result = decoded(model, named(model, name), 32)
    require_drafts(result, 32)
    require_greedy(model, stock(dtype), result, dtype)


@pytest.mark.slow
def test_ids_are_those_of_generate_over_300_tokens(pair: Any, stock: Callable[[str], Any]) -> None:
    """Suffixes repeat in code, so that hundreds are accepted. Transformers' own loop goes over the longer prompt, and less far: its
    forward has decided on all of them.
    """
    model = pair("float32", "auto")
    result = decoded(model, named(model, "suffix"), 300)
    require_drafts(result, 300)
    require_greedy(model, stock("float32"), result, "float32")
    ids = torch.tensor([model.tokenizer(CODE)["input_ids"]])
    out = stock("float32").generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert tuple(out[0, ids.shape[1] :].tolist()) == result[0].samples[0].token_ids[:60]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["FEW", "FEW:tree=rsd-s,width=2,nodes=6", "FEW:tree=k-seq,width=2,nodes=6", "suffix+FEW"])
def test_draft_models_do_not_change_greedy_ids(
    drafted: Any, few_layers: Path, stock: Callable[[str], Any], shape: str
) -> None:
    result = decoded(drafted(few_layers, shape), None, TOKENS)
    require_drafts(result, TOKENS)
    require_greedy(drafted(few_layers), stock("float32"), result, "float32")
    assert result.stats.executors["draft"].keys() <= KERNELS


@pytest.mark.slow
def test_a_drafter_with_another_vocabulary_does_not_change_greedy_ids(directory: Path, stock: Callable[[str], Any]) -> None:
    """The drafter that shoal brings writes Python by a tokenizer of its own."""
    from shoal.models.sources import bundled

    with shoal.load(directory, bundled("drafter"), dtype="float32") as model:
        assert model.vocabularies is not None
        result = decoded(model, None, TOKENS)
        require_drafts(result, TOKENS)
        require_greedy(model, stock("float32"), result, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    ["FEW", *(pytest.param(shape, marks=pytest.mark.slow) for shape in ("suffix+FEW", "FEW:tree=rsd-s,width=2,nodes=6"))],
)
def test_guided_ids_are_those_of_a_forward_of_each_model(
    few_layers: Path, drafted: Callable[[Path, str], Shoal], stock: Callable[[str], Any], shape: str
) -> None:
    """Its own first layers guide the model: each token has the highest log p + (log p - log g) / 2 of the plausible ones."""
    from transformers import AutoModelForCausalLM

    model = drafted(few_layers, shape)
    model.guide = model.draft_model
    options: dict[str, Any] = {"temperature": 0, "guidance": 0.5, "plausibility": 0.1, "max_new_tokens": 2 * TOKENS}
    result = model.generate(list(PROMPTS), N, lookahead=4, **options)
    guide = AutoModelForCausalLM.from_pretrained(few_layers, dtype=torch.float32).eval()
    guided, unguided = 0.0, 0.0
    for text, output in zip(PROMPTS, result, strict=True):
        prompt = model.tokenizer(text)["input_ids"]
        ids = torch.tensor([[*prompt, *output.samples[0].token_ids]])
        new = torch.tensor(output.samples[0].token_ids)[:, None]
        with torch.inference_mode():
            p, g = (
                hf(ids, use_cache=False, logits_to_keep=len(new) + 1).logits[0, :-1].log_softmax(-1)
                for hf in (stock("float32"), guide)
            )
        scores = (p + (p - g) / 2).masked_fill(p.exp() < 0.1 * p.exp().amax(-1, keepdim=True), -torch.inf)
        guided = max(guided, float((scores.amax(-1) - scores.gather(1, new)[:, 0]).max()))
        unguided = max(unguided, float((p.amax(-1) - p.gather(1, new)[:, 0]).max()))
        assert {sample.token_ids for sample in output.samples} == {output.samples[0].token_ids}
    assert guided < 2 * TIES["float32"] < 0.1 < unguided
    assert result.stats.guide_passes == result.stats.rounds
    assert result.stats.accepted > 0


@torch.inference_mode()
def nats(model: Shoal, text: str) -> Tensor:
    """Minus the log-probabilities of a text's tokens, [tokens - 1]."""
    ids = torch.tensor([model.tokenizer(text)["input_ids"]])
    runner = model.target.fork()
    runner.memory.reserve(1, ids.shape[1])
    logits = torch.cat([runner.feed([0], part, [part.shape[1]])[0] for part in ids.split(64, 1)])
    return torch.nn.functional.cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="none")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_rounded_keys_keep_perplexity_and_greedy_ids(pair: Any, dtype: str) -> None:
    """kv="int8": drafts change no id, a text is as likely to three digits, and a token takes its bytes and scales."""
    plain, eight = pair(dtype, "auto"), pair(dtype, "auto", "int8")
    assert eight.loaded["target"]["passes"] == "C decoder"
    before, after = (float(nats(model, LONG).mean().exp()) for model in (plain, eight))
    print(f"perplexity {before:.4f} unrounded, {after:.4f} rounded")
    assert abs(after / before - 1) < 0.005
    bytes_of = {"float32": 46080, "bfloat16": 23040}
    assert plain.target.memory.token_bytes == bytes_of[dtype]
    assert eight.target.memory.token_bytes == 30 * 2 * 3 * (64 + 4)
    options: dict[str, Any] = {"n": N, "max_new_tokens": 60, "temperature": 0, "eos": ()}
    drafted = eight.generate(list(PROMPTS), drafter=named(eight, "suffix"), lookahead=4, **options)
    assert drafted.stats.drafted > 0
    ids = [
        [list(sample.token_ids) for output in result for sample in output.samples]
        for result in (drafted, eight.generate(list(PROMPTS), lookahead="off", **options))
    ]
    assert ids[0] == ids[1]
