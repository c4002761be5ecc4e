"""Captured rounds against ordinary passes on a GPU: `benchmarks/gpu/run.sh` runs this file with SHOAL_TEST_DEVICE=cuda.

Not collected by itself. On a CPU the functions of a round are launched one by one, to try the cases out; with
SHOAL_TEST_DEVICE=pretend they run on a device that is pretended (tests/helpers/pretend.py). `test_captured_rounds.py` has more of
them, for what can be shown without a device.

Tests of: models.passes, models.compiled.captures.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pretend
from captured_models import ARCHITECTURES, DEVICE, PRETENDED, STATIC, on_device
from recorder import Recorder
from shoal.api import Shoal
from shoal.models import loading
from shoal.models.attention import fused, methods
from shoal.models.compiled import EXECUTORS, obstacle
from shoal.models.compiled.captures import CAPTURED
from shoal.models.passes import use_fused_layers
from shoal.models.runner import Runner
from shoal.testing import tiny_model
from shoal.types.samples import Result

CUDA = DEVICE.type == "cuda" and not PRETENDED
needs_cuda = pytest.mark.skipif(not CUDA, reason="the kernels need CUDA")
FAMILY = ("llama", "qwen2", "qwen3")
CHOSEN = ("gemma3", "gpt2", "mixtral", "gpt-oss", "deepseek-v3")
"""The architectures on the pretended device; the three of experts are those that cannot be captured in float32."""
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 9, 9, 3, 4, 5, 6, 2]]
NEW = 16 if CUDA else 8


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pretended one, for as long as a test runs."""
    if not PRETENDED:
        yield
        return
    with torch.inference_mode(), pretend.Pretend() as made:
        monkeypatch.setitem(EXECUTORS, "graphed", Recorder.on(made))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 33, 1 << 34))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(fused, "available", lambda query: False)
        monkeypatch.setattr(methods, "available", lambda query: False)
        yield


def runner(model: Any, executor: str | None, layers: bool = False) -> Runner:
    made = loading.wrap(model, "tiny")
    made.capture_rounds(executor)
    if layers:
        use_fused_layers(made)
        assert made.bridge.layers is not None
    return made


def pair(architecture: str, executor: str | None, layers: bool = False) -> Shoal:
    models = [on_device(tiny_model(architecture, seed=seed)) for seed in (0, 1)]
    return Shoal(*(runner(model, executor, layers) for model in models), max_batch=6)


def decode(model: Shoal, **options: Any) -> Result:
    return model.generate(PROMPTS, 2, **{"lookahead": 4, "max_new_tokens": NEW, "seed": 3, **options})


def ids(result: Result) -> list[tuple[int, ...]]:
    return [sample.token_ids for output in result for sample in output.samples]


def captured(made: Shoal, expected: Result, **options: Any) -> None:
    """Decodes twice, the second time by what the first has captured; nothing may have been left to the stages."""
    for _ in range(2):
        found = decode(made, **options)
        assert ids(found) == ids(expected)
        assert made.target.captures is not None
        assert made.target.captures.failures == []
        assert found.stats.executors["target"][CAPTURED] == found.stats.target_passes


@pytest.mark.parametrize("architecture", CHOSEN if PRETENDED else ARCHITECTURES)
def test_rounds_are_those_of_ordinary_passes(architecture: str) -> None:
    """Logits of the first round of each kind are compared as well."""
    options = {"temperature": 0.8, "max_new_tokens": 6}
    if obstacle(on_device(tiny_model(architecture))) is not None and STATIC == "graphed":
        assert pair(architecture, STATIC).target.captures is None
        return
    captured(pair(architecture, STATIC), decode(pair(architecture, None), **options), **options)


@needs_cuda
@pytest.mark.parametrize("architecture", FAMILY)
def test_rounds_of_triton_layers_are_those_of_the_modules(architecture: str) -> None:
    captured(pair(architecture, STATIC, layers=True), decode(pair(architecture, None)))


def test_engines_of_one_model_do_not_disturb_each_other() -> None:
    """Two caches of one model, whose rounds are captured and run in turns."""
    made = pair("llama", STATIC)
    together = [made.stream(PROMPTS, 1, lookahead=4, max_new_tokens=NEW, seed=i) for i in (1, 2)]
    for increments in zip(*together, strict=False):
        assert all(increments)
    for stream in together:
        for _ in stream:
            pass
    plain = pair("llama", None)
    alone = [plain.generate(PROMPTS, 1, lookahead=4, max_new_tokens=NEW, seed=i) for i in (1, 2)]
    assert [ids(stream.result()) for stream in together] == [ids(result) for result in alone]
    assert made.target.captures is not None
    assert made.target.captures.failures == []


OPTIONS = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"rule": "rejection"}, {"lookahead": "off"}]


# test_captured_pretend.py has the others on the pretended device
@pytest.mark.parametrize("layers", [False, pytest.param(True, marks=needs_cuda)])
@pytest.mark.parametrize("options", OPTIONS[1::2] if PRETENDED else OPTIONS, ids=str)
def test_whole_runs(options: dict[str, Any], layers: bool) -> None:
    captured(pair("llama", STATIC, layers), decode(pair("llama", None), **options), **options)


@pytest.mark.skipif(PRETENDED, reason="pretended tensors have no addresses")
def test_replaced_weights_are_found_by_the_next_round() -> None:
    """A graph goes on with the address that it was captured with, and nothing else looks."""
    made = pair("llama", STATIC)
    decode(made)
    models = [copy.deepcopy(made.target.hf), made.draft_model and made.draft_model.hf]
    weight = made.target.hf.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data * 2
    models[0].model.layers[0].mlp.up_proj.weight.data.mul_(2)
    with pytest.warns(RuntimeWarning, match="weights or layers of the model were replaced"):
        found = decode(made)
    assert ids(found) == ids(decode(Shoal(*(runner(model, None) for model in models), max_batch=6)))
