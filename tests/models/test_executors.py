"""Which executor computes a pass, for models x settings x kinds of pass, and what is said of the others.

Tests of: models.executor, models.executor, models.structure, models.passes,
models.runner (explain, executors), cli.check_model (executors).
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from native_kernels import needs_compiler
from shoal.api import Shoal
from shoal.cli import check_model
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.engine.multi_step import MOST_ROUNDS
from shoal.errors import OutOfMemory
from shoal.lookahead.controller import Fixed
from shoal.models import formats, passes, weights
from shoal.models.attention.fused import has_triton
from shoal.models.loading import wrap
from shoal.models.passes import choose_passes
from shoal.models.runner import Runner
from shoal.models.structure import Structure
from shoal.models.weights.matrix import PACKED
from shoal.native.build import missing
from shoal.serve.engine_thread import EngineThread
from shoal.testing import save_pair, tiny_model
from shoal.types.requests import Request
from shoal.types.stats import Stats

TOKEN, BLOCK, TREE, PROMPT = "token", "block", "tree", "prompt"
WIDE = 70
"""Tokens of a prompt that is wider than the C decoder takes."""
needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton 3.6 is not installed (extra `triton`)")


def counting(monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Any]:
    """Kernels that write nothing; their helper asks for Triton when it is imported."""
    from fused_launches import counting

    return counting(monkeypatch)


C, C_LAYERS, MODULES = "C decoder", "C layers", "modules"
TRITON, ROUNDS = "Triton layers", "captured rounds"
ALL_C = {TOKEN: C, BLOCK: C, TREE: C, PROMPT: C_LAYERS}


@pytest.fixture(autouse=True)
def _packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may be packed in panels."""
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(packs=frozenset({torch.float32})))


def every(executor: str) -> dict[str, str]:
    return dict.fromkeys((TOKEN, BLOCK, TREE, PROMPT), executor)


TABLE: list[Any] = [
    # architecture, options of choose_passes, form of weights, executors by kind of pass
    pytest.param("llama", {}, PACKED, ALL_C, marks=needs_compiler),
    pytest.param("mistral-sliding", {}, PACKED, ALL_C, marks=needs_compiler),
    pytest.param("qwen2", {}, PACKED, ALL_C, marks=needs_compiler),
    pytest.param("qwen3", {}, PACKED, ALL_C, marks=needs_compiler),
    pytest.param("llama", {}, None, every(C_LAYERS), marks=needs_compiler),
    pytest.param("llama", {"mode": "off"}, PACKED, every(MODULES)),
    pytest.param("llama", {"mode": "modules"}, PACKED, every(MODULES)),
    pytest.param("llama", {"owned": False}, PACKED, every(MODULES)),
    pytest.param("llama", {"dtype": torch.float64}, None, every(MODULES)),
    pytest.param("gemma2", {}, None, every(MODULES)),
    pytest.param("gpt2", {}, None, every(MODULES)),
    pytest.param("mixtral", {}, None, every(MODULES)),
]


def runner_of(architecture: str, mode: str, owned: bool, form: str | None, dtype: torch.dtype) -> Runner:
    hf = copy.deepcopy(tiny_model(architecture, max_position_embeddings=256)).to(dtype)
    if form is not None:
        weights.lay_out(hf, lambda keys: dict.fromkeys(keys, form))
    runner = wrap(hf, architecture, checked=False)
    choose_passes(runner, mode, owned=owned)
    return runner.fork()


def computed(runner: Runner) -> dict[str, str]:
    """Returns the executor that computed a pass of each kind, after `explain` promised it."""
    ids = torch.arange(2 * WIDE).view(2, WIDE) % 50
    runner.memory.reserve(2, 200)
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        TOKEN: (1, {}),
        BLOCK: (5, {}),
        TREE: (3, {"parents": [[-1, -1], [-1, -1]]}),
        PROMPT: (WIDE, {"want_logits": False}),
    }
    executors = {}
    for kind, (count, options) in kinds.items():
        promise = runner.explain([0, 1], [count, count], **options).executor
        runner.feed([0, 1], ids[:, :count], [count, count], **options)
        assert runner.counts.take_executors() == {promise: 1}
        executors[kind] = promise
    return executors


@pytest.mark.parametrize(("architecture", "options", "form", "expected"), TABLE)
def test_the_executor_of_each_kind_of_pass(
    architecture: str,
    options: dict[str, Any],
    form: str | None,
    expected: dict[str, str],
) -> None:
    settings = {"mode": "auto", "owned": True, "dtype": torch.float32} | options
    assert computed(runner_of(architecture, form=form, **settings)) == expected


@needs_compiler
def test_what_a_drafter_reads_keeps_the_c_decoder_out() -> None:
    runner = runner_of("llama", "auto", True, PACKED, torch.float32)
    runner.memory.reserve(1, 80)
    runner.hidden_layers = (0, 1)
    assert str(runner.explain([0], [1])) == "C layers (not C decoder: a drafter reads hidden states)"
    runner.feed([0], torch.tensor([[3]]), [1])
    assert runner.counts.take_executors() == {"C layers": 1}
    runner.hidden_layers = ()
    assert "70 tokens of a row" in str(runner.explain([0], [70]))


@needs_compiler
def test_replaced_weights_are_computed_by_the_modules() -> None:
    runner = runner_of("llama", "auto", True, PACKED, torch.float32)
    runner.memory.reserve(1, 8)
    norm = runner.hf.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
    explanation = runner.explain([0], [1])
    assert explanation.executor == MODULES
    assert {refusal.executor for refusal in explanation.refusals} == {C, C_LAYERS}
    assert {refusal.reason for refusal in explanation.refusals} == {"weights or layers of the model were replaced by others"}


def replace_a_norm(hf: Any) -> None:
    hf.model.norm.weight = torch.nn.Parameter(hf.model.norm.weight.detach() * 1.5)


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each structure was compared with its model."""
    asked: Counter[int] = Counter()
    compare = Structure._differs

    def counted(structure: Structure) -> bool:
        asked[id(structure)] += 1
        return compare(structure)

    monkeypatch.setattr(Structure, "_differs", counted)
    return asked


@pytest.fixture
def owned(tmp_path: Path) -> Shoal:
    """A model that shoal has loaded itself, so that the C decoder computes it."""
    target, _ = save_pair(tmp_path)
    return shoal.load(target)


@needs_compiler
def test_a_call_asks_once_if_weights_were_replaced(questions: Counter[int], owned: Shoal) -> None:
    hf = owned.target.hf
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "eos": ()}
    executors = []
    for change in (lambda _: None, replace_a_norm):
        change(hf)
        questions.clear()
        result = owned.generate([[3, 4, 5]], 2, **options)
        assert result.stats.rounds == 12
        assert list(questions.values()) == [1]
        reference = hf.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert result[0].samples[0].token_ids == tuple(reference[0, 3:].tolist())
        executors.append(set(result.stats.executors["target"]))
    assert executors[0].isdisjoint(executors[1])
    assert executors[1] == {MODULES}


@needs_compiler
def test_a_stream_asks_in_every_step(owned: Shoal) -> None:
    """A step of a small model may be several rounds in one go, all by the weights that it began with."""
    stream = owned.stream([[3, 4, 5]], max_new_tokens=MOST_ROUNDS + 5, temperature=0, eos=())
    next(stream)
    replace_a_norm(owned.target.hf)
    assert len(list(stream)) == 5
    assert stream.result().stats.executors["target"] == {C: 1 + MOST_ROUNDS, MODULES: 5}


@needs_compiler
def test_a_server_asks_again_after_each_job(questions: Counter[int], owned: Shoal) -> None:
    hf, engine = owned.target.hf, Engine(owned.target, None, Fixed(0))
    request = Request((3, 4, 5), 1, Sampling(temperature=0), Limits(max_new_tokens=10, eos=()))

    async def within() -> list[Counter[str]]:
        done: asyncio.Queue[None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(commits: Any) -> None:
            if any(commit.sample for commit in commits):
                loop.call_soon_threadsafe(done.put_nowait, None)

        thread = EngineThread(lambda: engine, tell, lambda _: None, lambda: None)
        thread.start(loop)
        seen: list[Counter[str]] = []
        try:
            for change in (lambda _: None, replace_a_norm):
                change(hf)
                before = engine.stats.executors.get("target", Counter()).copy()
                questions.clear()
                await thread.call(lambda: engine.submit(request))
                await asyncio.wait_for(done.get(), 100)
                assert sum(questions.values()) <= 2
                seen.append(engine.stats.executors["target"] - before)
        finally:
            thread.stop()
        return seen

    first, second = asyncio.run(within())
    assert sum(first.values()) == sum(second.values()) == 11, "the prompt and ten rounds"
    assert set(second) == {MODULES}
    assert MODULES not in first


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("gpt2", {}, "GPT2LMHeadModel is none of"),
        ("llama", {"mode": "modules"}, "compile='modules'"),
        ("llama", {"owned": False}, "the model was not loaded by shoal"),
        ("llama", {"mode": "off"}, missing() or "compile='off'"),
        ("llama", {"dtype": torch.float64}, "float32 or bfloat16"),
    ],
)
def test_the_reason_why_there_is_no_c_decoder(architecture: str, options: dict[str, Any], reason: str) -> None:
    runner = runner_of(architecture, form=None, **{"mode": "auto", "owned": True, "dtype": torch.float32} | options)
    runner.memory.reserve(1, 8)
    (refusal,) = runner.explain([0], [1]).refusals
    assert (refusal.executor, reason in refusal.reason) == (C, True), refusal


# ── on CUDA, where the kernels are not run here ─────────────────────────────────────────────────────────────────────


def on_cuda(mode: str, monkeypatch: pytest.MonkeyPatch, owned: bool = True, architecture: str = "llama") -> Runner:
    """Returns a runner as it is chosen for a model on CUDA. Its tensors lie on the CPU, and nothing is compared at load."""
    runner = wrap(copy.deepcopy(tiny_model(architecture, max_position_embeddings=256)), architecture, "pad", checked=False)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "device", torch.device("cuda"))
        patch.setattr(passes, "executor_for", lambda mode, device: None if mode == "off" else "eager")
        patch.setattr(passes, "largest_error", lambda runner: 0.0)
        choose_passes(runner, mode, owned=owned)
    return runner.fork()


CUDA_TABLE: list[Any] = [
    # architecture, mode, owned, executor, refusals before it
    ("llama", "auto", True, TRITON, {ROUNDS: "they compute whole rounds of an engine"}),
    ("qwen3", "on", True, TRITON, {ROUNDS: "they compute whole rounds of an engine"}),
    ("llama", "modules", True, MODULES, {ROUNDS: "they compute whole rounds of an engine", TRITON: "compile='modules'"}),
    ("llama", "off", True, MODULES, {ROUNDS: "compile='off'", TRITON: "compile='off'"}),
    (
        "llama", "auto", False, MODULES,
        {ROUNDS: "they compute whole rounds of an engine", TRITON: "the model was not loaded by shoal"},
    ),
    ("gpt2", "auto", True, MODULES, {ROUNDS: "they compute whole rounds of an engine", TRITON: "GPT2LMHeadModel is none of"}),
]  # fmt: skip


@needs_triton
@pytest.mark.parametrize(("architecture", "mode", "owned", "executor", "refusals"), CUDA_TABLE)
def test_the_executor_of_each_kind_of_pass_on_cuda(
    architecture: str, mode: str, owned: bool, executor: str, refusals: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, blocks and trees by Triton layers; captured rounds or none."""
    with counting(monkeypatch):
        runner = on_cuda(mode, monkeypatch, owned, architecture)
        assert computed(runner) == every(executor)
        found = runner.explain([0], [1]).refusals
    assert [refusal.executor for refusal in found] == list(refusals)
    assert all(reason in refusal.reason for refusal, reason in zip(found, refusals.values(), strict=True))


@needs_triton
def test_a_kernel_that_fails_leaves_passes_to_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some GPU may have too little shared memory for a shape; that is found when the pass is made, or at load."""
    with counting(monkeypatch):
        runner = on_cuda("auto", monkeypatch)
        real = type(runner.bridge.layers).ordinary

        def failing(self: Any, tokens: torch.Tensor, *arguments: Any) -> torch.Tensor:
            if tokens.shape[1] > 5:
                raise ValueError("out of resource: shared memory\nand more")
            return real(self, tokens, *arguments)

        monkeypatch.setattr(type(runner.bridge.layers), "ordinary", failing)
        runner.memory.reserve(1, 80)
        ids = torch.arange(12)[None]
        runner.feed([0], ids[:, :4], [4])
        with pytest.warns(RuntimeWarning, match="no more Triton layers, modules compute .ValueError: out of resource"):
            runner.feed([0], ids[:, :8], [8])
        runner.feed([0], ids[:, :2], [2])
        assert runner.counts.take_executors() == {TRITON: 1, MODULES: 2}
        assert runner.cache.lengths[0] == 14
        assert "not Triton layers: ValueError: out of resource: shared memory" in str(runner.explain([0], [1]))
        assert runner.fork().bridge.layers is None


@needs_triton
def test_memory_that_is_short_is_no_fault_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with counting(monkeypatch):
        runner = on_cuda("auto", monkeypatch)

        def failing(*_: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(type(runner.bridge.layers), "ordinary", failing)
        runner.memory.reserve(1, 8)
        with pytest.raises(OutOfMemory):
            runner.feed([0], torch.tensor([[1]]), [1])
        assert runner.bridge.layers is not None


@needs_triton
def test_a_kernel_that_fails_at_load_leaves_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.models.layers.triton_decoder import FusedLayers

    def failing(*_: Any) -> torch.Tensor:
        raise ValueError("out of resource: shared memory")

    monkeypatch.setattr(FusedLayers, "ordinary", failing)
    runner = wrap(copy.deepcopy(tiny_model("llama")), "llama", "pad", checked=False)
    with counting(monkeypatch), pytest.warns(RuntimeWarning, match="no more Triton layers"):
        passes.use_fused_layers(runner)
    assert runner.bridge.layers is None
    assert "out of resource" in runner.absent[TRITON]


@needs_triton
def test_triton_layers_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with counting(monkeypatch):  # kernels that write nothing
        runner = wrap(copy.deepcopy(tiny_model("llama")), "llama", "pad", checked=False)
        passes.use_fused_layers(runner)
    assert runner.bridge.layers is None
    assert "diverge from the modules" in runner.absent[TRITON]


def test_counts_by_executor_in_stats(tmp_path: Path) -> None:
    """Passes of decoding and those over prompts, of the target and of the draft model."""
    model = shoal.load(*save_pair(tmp_path))
    stats = model.generate("abc", n=2, max_new_tokens=8, seed=0, lookahead="fixed:2").stats
    (layers,) = stats.executors["target"]
    assert layers in ({MODULES} if missing() else {C, C_LAYERS})  # by how the weights of such a width lie
    assert set(stats.executors) == {"target", "draft"}
    assert stats.executors["target"] == {layers: stats.target_passes + stats.prefills}
    assert stats.executors["draft"][layers] >= stats.draft_passes > 0
    assert stats.to_dict()["executors"]["target"] == dict(stats.executors["target"])
    assert (stats + stats - stats).executors == stats.executors
    assert (Stats() + stats).executors == stats.executors
    plain = model.generate("abc", max_new_tokens=4, lookahead="off", temperature=0.0).stats
    assert "draft" not in plain.executors


def test_check_tells_who_computes_passes() -> None:
    result = check_model.executors(runner_of("gpt2", "auto", True, None, torch.float32), "target", 4)
    assert result.name == "target passes"
    assert result.figure.startswith("a token, a block of 5, a prompt of 256: modules (not C decoder: GPT2LMHeadModel")
    assert result.data["a token"]["executor"] == MODULES
