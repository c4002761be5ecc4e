"""Lean passes compute what the model's modules compute, and only for models that they know.

Tests of: models.lean, models.lean.forward, models.bridge, models.selfcheck, models.load_checks.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import shoal
from by_pairs import by_pairs
from lean_passes import MODELS, PROMPTS, WRITES, Rows, life, original, rope
from native_kernels import needs_compiler
from shoal.api import Shoal
from shoal.models import passes, selfcheck, weights
from shoal.models.bridge import Bridge
from shoal.models.executor import C_DECODER
from shoal.models.lean import Angles, Decoder, decoder_of
from shoal.models.lean.forward import LeanPass
from shoal.models.load_checks import LIMITS
from shoal.models.loading import wrap
from shoal.models.passes import choose_passes, use_lean_passes
from shoal.models.prompt_passes import feed_prompts
from shoal.models.runner import Runner
from shoal.models.weights.matrix import AS_IS, INPUT_MAJOR, PACKED
from shoal.testing import VOCABULARY, save_pair, tiny_model, tiny_tokenizer

ERROR = 1e-4
"""Largest difference of logits in float32, in their standard deviations. The smallest mistake below costs ten times that."""
pytestmark = needs_compiler


def lean(name: str, dtype: torch.dtype = torch.float32, form: str = AS_IS) -> Runner:
    """A runner with lean passes over a copy of the model."""
    hf = copy.deepcopy(original(name)).to(dtype)
    if form != AS_IS:
        weights.lay_out(hf, lambda keys: dict.fromkeys(keys, form))
    runner = wrap(hf, name, checked=False)
    use_lean_passes(runner)
    assert runner.lean is not None
    return runner


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many passes were lean, and how many the modules'."""
    counts: Counter[str] = Counter()

    def count(owner: type, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, method, counted)

    count(LeanPass, "__call__", "lean")
    count(Bridge, "ordinary", "modules")
    return counts


# ── logits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


PASSES = 12
"""Of `life`: blocks, and chunks of shared prompts."""


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_modules(name: str, ran: Counter[str]) -> None:
    runner = lean(name).fork()
    ran.clear()
    rows = Rows(runner)
    life(rows)
    assert rows.error(original(name)) < ERROR
    assert ran == {"lean": PASSES}


@pytest.mark.parametrize("form", [INPUT_MAJOR, PACKED])
@pytest.mark.parametrize("name", ["biases", "tied", "qwen2 with windows"])
def test_whatever_the_form_of_the_weights(name: str, form: str) -> None:
    rows = Rows(lean(name, form=form).fork())
    life(rows)
    assert rows.error(original(name)) < ERROR


@pytest.mark.parametrize("name", ["llama", "mistral with a window", "qwen2 with windows", "qwen3"])
def test_bfloat16_is_as_near_to_the_truth_as_the_modules(name: str, ran: Counter[str]) -> None:
    """To the logits in float64 of the same weights: the modules' error in bfloat16 is what one has to accept."""
    runner = lean(name, torch.bfloat16)
    exactly = copy.deepcopy(runner.hf).double()
    errors = {}
    for kind in ("lean", "modules"):
        ran.clear()
        rows = Rows(runner.fork())
        life(rows)
        errors[kind] = rows.error(exactly)
        assert ran == {kind: PASSES}
        runner.lean = None
    assert errors["lean"] <= 1.3 * errors["modules"]
    assert errors["lean"] > 1e-4  # it is bfloat16


def test_padded_passes() -> None:
    """Unused columns have positions beyond every row's end."""
    runner = lean("llama").fork()
    runner.packs = False
    rows = Rows(runner)
    rows.feed([0, 1], [15, 2])
    rows.feed([0, 1], [1, 9])
    assert rows.error(original("llama")) < ERROR


def test_tables_of_angles_do_not_change_under_a_pass() -> None:
    angles = Angles(original("llama").model.rotary_emb)
    small = angles.reach(5)
    kept = [table.clone() for table in small]
    large = angles.reach(100)
    assert [len(table) for table in (*small, *large)] == [8, 8, 128, 128]
    assert all(torch.equal(a, b) and torch.equal(a, c[:8]) for a, b, c in zip(small, kept, large, strict=True))
    assert angles.reach(128)[0] is large[0]


# ── engines ─────────────────────────────────────────────────────────────────────────────────────────────────────────

RUNS: dict[str, dict[str, Any]] = {
    "greedy, plain": {"temperature": 0.0, "lookahead": "off"},
    "greedy, fixed": {"temperature": 0.0, "lookahead": 4},
    "greedy, auto": {"temperature": 0.0, "lookahead": "auto"},
    "seeded, plain": {"seed": 3, "lookahead": "off"},
    "seeded, fixed": {"seed": 3, "lookahead": 4},
    "seeded, auto": {"seed": 3, "lookahead": "auto"},
    "seeded, bass": {"seed": 3, "lookahead": "bass", "rule": "rejection", "temperature": 0.7},
}


def pair_of(name: str) -> tuple[Runner, Runner]:
    """A target, and a drafter that agrees with it now and then."""
    target, drafter = lean(name), lean(name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in drafter.hf.parameters():
            weight += 0.1 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    return target, drafter


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["llama", "qwen2 with windows"])
def test_engines_say_what_they_say_by_the_modules(name: str, run: str, ran: Counter[str]) -> None:
    models, said, counts = pair_of(name), [], []
    for kind in ("lean", "modules"):
        ran.clear()
        result = Shoal(*models, tiny_tokenizer(), max_batch=4).generate(PROMPTS, 2, max_new_tokens=14, **RUNS[run])
        said.append([list(sample.token_ids) for output in result for sample in output.samples])
        assert set(ran) == {kind}
        counts.append((ran[kind], result.stats.rounds, result.stats.drafted, result.stats.accepted))
        for model in models:
            model.lean = None
    assert said[0] == said[1]
    if "auto" not in run:  # which follows the clock
        assert counts[0] == counts[1]
        assert (counts[0][2] > 0) == ("plain" not in run)


# ── models that are not lean ────────────────────────────────────────────────────────────────────────────────────────


class Adapted(nn.Linear):
    """A layer that computes something else, as adapters make them."""


class Own(transformers.LlamaForCausalLM):
    """A model of the user's."""


def adapted(hf: Any, name: str) -> None:
    hf.model.layers[1].get_submodule(name).__class__ = Adapted


def overridden(hf: Any) -> None:
    hf.model.layers[1].mlp.forward = hf.model.layers[1].mlp.forward


def embedded(hf: Any) -> None:
    hf.model.embed_tokens.__class__ = type("Embedding", (nn.Embedding,), {})


CHANGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (lambda hf: hf.model.layers[1].mlp.register_forward_hook(lambda *_: None), "has hooks"),
    "hook before": (lambda hf: hf.model.norm.register_forward_pre_hook(lambda *_: None), "has hooks"),
    "forward": (overridden, "a forward of its own"),
    **{
        f"adapter of {name}": (partial(adapted, name=name), "a linear layer is a Adapted")
        for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    },
    "adapter of the head": (lambda hf: setattr(hf.lm_head, "__class__", Adapted), "a linear layer is a Adapted"),
    "embedding": (embedded, "its embedding is a Embedding"),
    "class": (lambda hf: setattr(hf, "__class__", Own), "Own is none of"),
    "unlike dtypes": (lambda hf: hf.model.norm.to(torch.bfloat16), "several number formats"),
    "float64": (lambda hf: hf.double(), "computes in float32 or bfloat16"),
    "float16": (lambda hf: hf.half(), "computes in float32 or bfloat16"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_model_is_not_lean(change: str) -> None:
    """For the reason that is said, not since the check at load refuses what would be computed."""
    hf, (changed, reason) = copy.deepcopy(original("llama")), CHANGED[change]
    changed(hf)
    runner = Runner(hf, "changed", "interface", 128)
    use_lean_passes(runner)
    assert runner.lean is None
    assert reason in runner.absent[C_DECODER]


@pytest.mark.parametrize("form", [AS_IS, PACKED])
def test_ids_that_the_model_lacks_stand_for_its_last(form: str) -> None:
    """Those of a target with a larger vocabulary than its drafter's."""
    runner, logits = lean("llama", form=form), []
    for token in (VOCABULARY - 1, VOCABULARY, VOCABULARY + 70):
        rows = Rows(runner.fork())
        logits.append(rows.runner.feed([0], torch.tensor([[9, token, 3]]), [3]))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", rope("dynamic", factor=4.0)),
        ("llama", {"hidden_act": "gelu"}),
        *(
            (name, {})
            for name in ("gemma", "starcoder2", "phi3", "qwen3-moe", "mixtral", "olmo2", "granite", "gpt2", "cohere2")
        ),
    ],
)
def test_another_model_is_not_lean(architecture: str, options: dict[str, Any]) -> None:
    runner = wrap(tiny_model(architecture, **options), architecture, checked=False)
    choose_passes(runner, "auto", owned=True)
    assert runner.lean is None


def test_what_loading_makes_lean(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path)
    plain = shoal.load(target, draft)
    assert plain.target.lean is not None
    assert plain.draft_model is not None
    assert plain.draft_model.lean is not None
    assert shoal.load(target, strict=True).target.lean is None
    rounded = shoal.load(target, draft, quantize="target=int8,draft=int8")
    assert rounded.draft_model is not None
    assert rounded.target.lean is not None
    assert rounded.draft_model.lean is not None
    hf = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    before = [weight.data_ptr() for weight in hf.parameters()]
    assert shoal.load(hf, tokenizer=tiny_tokenizer()).target.lean is None  # its owner may put hooks on it at any time
    assert [weight.data_ptr() for weight in hf.parameters()] == before


def test_the_attention_that_was_asked_for_attends(tmp_path: Path) -> None:
    """Methods other than the kernel are those of the modules."""
    target, _ = save_pair(tmp_path)
    for attention, native in (("auto", True), ("native", True), ("reference", False), ("split", False)):
        runner = shoal.load(target, attention=attention).target
        assert (runner.lean is not None) is native
        assert native or runner.absent[C_DECODER] == f"attention={attention!r}"
    runner = shoal.load(target, compile="off").target
    assert (runner.lean, runner.absent[C_DECODER]) == (None, "compile='off'")


# ── weights that change ─────────────────────────────────────────────────────────────────────────────────────────────


def decoded(runner: Runner) -> Rows:
    rows = Rows(runner.fork())
    rows.feed([1, 0], [9, 4])
    rows.feed([0, 1], [2, 1])
    return rows


@by_pairs({"form": [INPUT_MAJOR, PACKED], "write": WRITES, "name": ["qwen2", "tied with biases"]})
def test_the_next_pass_follows_what_is_written(
    name: str, write: str, form: str, ran: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "tied with biases", ("llama", {"attention_bias": True, "tie_word_embeddings": True}))
    runner = lean(name, form=form)
    before = decoded(runner).logits
    WRITES[write](runner.hf)
    ran.clear()
    rows = decoded(runner)
    assert rows.error(runner.hf) < ERROR
    assert ran == {"lean" if write.startswith("in place") else "modules": 2}
    assert float((torch.stack(rows.logits) - torch.stack(before)).abs().max()) > 1e-2
    fresh = copy.deepcopy(original(name))  # and it is what the same write makes of the same model as Transformers has it
    WRITES[write](fresh)
    assert rows.error(fresh) < ERROR


# ── a pass that computes something else is not used ─────────────────────────────────────────────────────────────────


def of_layers(change: Callable[[Any], Any]) -> Callable[[Decoder], Decoder]:
    return lambda decoder: replace(decoder, layers=[change(each) for each in decoder.layers])


def of_last(change: Callable[[Any], Any]) -> Callable[[Decoder], Decoder]:
    return lambda decoder: replace(decoder, layers=[*decoder.layers[:-1], change(decoder.layers[-1])])


WRONG: dict[str, tuple[str, Callable[[Decoder], Decoder]]] = {
    "eps": ("llama", of_layers(lambda each: replace(each, mlp_norm=replace(each.mlp_norm, eps=0.1)))),
    "gate and up exchanged": ("llama", of_layers(lambda each: replace(each, gate=each.up, up=each.gate))),
    "activation": ("llama", lambda decoder: replace(decoder, activation="gelu")),
    "scale": ("llama", lambda decoder: replace(decoder, scale=decoder.scale * 1.1)),
    "a subtle scale": ("llama", lambda decoder: replace(decoder, scale=decoder.scale * 1.002)),
    "norms exchanged": (
        "llama", of_last(lambda each: replace(each, attention_norm=each.mlp_norm, mlp_norm=each.attention_norm)),
    ),
    "another layer's weights": ("llama", lambda decoder: replace(decoder, layers=[decoder.layers[0]] * 2)),
    "no window": ("mistral with a window", of_layers(lambda each: replace(each, window=None))),
    "one more in the window": ("mistral with a window", of_layers(lambda each: replace(each, window=each.window + 1))),
    "a window in all layers": ("qwen2 with windows", of_layers(lambda each: replace(each, window=8))),
    "no norms of heads": ("qwen3", of_last(lambda each: replace(each, query_norm=None, key_norm=None))),
    "one norm for both": ("qwen3", of_last(lambda each: replace(each, key_norm=each.query_norm))),
    "no rope scaling": ("yarn rope", lambda decoder: replace(decoder, rotary=original("llama").model.rotary_emb)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_pass_is_switched_off(wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    name, change = WRONG[wrong]

    def changed(hf: Any) -> Decoder | None:
        decoder = decoder_of(hf)
        return decoder and change(decoder)

    runner = wrap(copy.deepcopy(original(name)), name, checked=False)
    monkeypatch.setattr(passes, "decoder_of", changed)
    with caplog.at_level(logging.WARNING, "shoal"):
        use_lean_passes(runner)
    assert runner.lean is None
    assert "its modules compute passes: lean passes diverge by" in caplog.text
    rows = decoded(runner)
    assert rows.error(original(name)) < ERROR


@pytest.mark.parametrize("check", ["_decode", "_sharing", "_tree"])
@pytest.mark.parametrize("result", [float("nan"), 0.5, RuntimeError])
def test_each_check_counts(
    check: str, result: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NaN too, which compares as neither larger nor smaller."""

    def failing(*_: Any) -> list[Tensor]:
        if result is RuntimeError:
            raise RuntimeError("a kernel failed")
        return [torch.tensor([float(result)])]

    runner = wrap(copy.deepcopy(original("llama")), "llama")
    monkeypatch.setattr(selfcheck, check, failing)
    use_lean_passes(runner)
    assert runner.lean is None
    assert "lean passes diverge by" in caplog.text


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_nan_in_any_block_counts(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison itself: one NaN in one of the blocks of the check."""
    runner, ragged = wrap(copy.deepcopy(original("llama")), "llama"), selfcheck._ragged_decode

    def spoiled(runner: Runner, ids: Tensor) -> Any:
        blocks = ragged(runner, ids)
        blocks[bad][2][0, 0] = float("nan")
        return blocks

    monkeypatch.setattr(selfcheck, "_ragged_decode", spoiled)
    assert selfcheck.largest_error(runner) == torch.inf


def test_a_token_may_diverge_more_than_the_others_but_a_block_not_by_much() -> None:
    """A pretrained model in bfloat16 has such tokens; a fault of one kind of passes is not one of them."""
    usual = [torch.full((5,), 0.001) for _ in range(4)]
    outlier, fault = torch.tensor([0.001, 0.02, 0.001]), torch.full((3,), 0.05)
    assert selfcheck._largest([*usual, outlier]) < LIMITS[torch.bfloat16] < selfcheck._largest([*usual, fault])


# ── long texts ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["llama"])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("mistral-sliding", {"sliding_window": 4096}),
        ("qwen3", rope("yarn", factor=4.0, original_max_position_embeddings=2048)),
    ],
    ids=["llama", "window", "yarn"],
)
@torch.inference_mode()
def test_the_8000th_token_sees_what_it_would_see_without_us(architecture: str, options: dict[str, Any]) -> None:
    """A prompt in chunks, then a block and a token; positions that a narrow number format would round."""
    hf = tiny_model(architecture, **{"max_position_embeddings": 8192, **options})
    ids = torch.randint(0, VOCABULARY, (1, 8000), generator=torch.Generator().manual_seed(1))
    truth = hf(ids, use_cache=False, logits_to_keep=9).logits[0]
    runner = wrap(copy.deepcopy(hf), architecture, checked=False)
    use_lean_passes(runner)
    assert runner.lean is not None
    runner.memory.reserve(1, 8000, 100)
    runner.cache.clear()
    feed_prompts(runner, [(0, ids[0, :-9].tolist())])
    block = runner.feed([0], ids[:, -9:-1], [8])[0]
    last = runner.feed([0], ids[:, -1:], [1])[0]
    error = (torch.cat([block, last]) - truth).abs().max() / truth.std()
    assert float(error) < 2e-3
