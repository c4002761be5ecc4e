"""What a captured round launches where layers and draws are computed by Triton kernels, counted without a GPU.

The engine runs on the CPU with the executor "eager"; in the functions of its rounds every operation that a GPU would launch is
counted, and each kernel as one. Kernels are not run: what they would write is zero, and all tokens are equally probable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretend import WHOLE, is_free
from shoal.config import Limits, Sampling
from shoal.drafting import captured
from shoal.models import loading
from shoal.models.attention import fused_kernels as attention_kernels
from shoal.models.compiled.round_functions import RoundFunctions
from shoal.models.layers import draw_kernels, layer_kernels
from shoal.models.layers.triton_decoder import fused_layers_of
from shoal.models.runner import Runner
from shoal.sampling.acceptance import RULES
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request

VOCABULARY = 8192
"""More than is drawn from in one level (`shoal.sampling.drawing`), as of any model that a GPU is for."""
TWICE = ("constant_pad_nd",)
"""Launched twice: the padding is filled, then the values are copied."""
LAUNCHED = {
    attention_kernels: ("attend", "combine"),
    layer_kernels: ("begin", "add_norm", "heads", "silu_mul", "eight_bit_product", "join"),
    draw_kernels: (
        "parts_of_softmax", "softmax", "block_sums", "inverse_transform", "bucket_sums", "exponential_race", "feed"
    ),
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts, by name; memory that is asked for is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(
            function.name(), "CompositeImplicitAutograd"
        ):
            with self:  # in inference mode these come as they were called
                return function.decompose(*args, **kwargs)
        result, name = function(*args, **kwargs), function._schema.name.split("::")[1]
        if name.startswith(("empty", "new_empty")):
            result.zero_()
        elif not is_free(function):
            self.names[name] += 2 if name in TWICE else 1
        return result


class _Noted:
    """Stands for a kernel."""

    def __init__(self, name: str, names: Counter[str]) -> None:
        self.name, self.names = name, names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*_: Any, **arguments: Any) -> None:
            self.names[self.name] += 1
            if self.name == "softmax":  # else the round would be undone
                arguments["sound"].numpy()[:] = True

        return launch


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """What the functions of rounds launch meanwhile; nothing compares them with ordinary passes."""
    mode = Launches()
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # so that kernels are there
        for module, names in LAUNCHED.items():
            for name in names:
                patch.setattr(module, name, _Noted(name, mode.names))
        for name in ("drafted", "verified"):
            patch.setattr(RoundFunctions, name, _within(mode, getattr(RoundFunctions, name)))
        patch.setattr(captured, "check_drafts", lambda round_, *_: round_.checked("draft"))
        patch.setattr(captured, "check_verdict", lambda round_, *_: round_.checked("verify"))
        yield mode.names


def _within(mode: Launches, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: RoundFunctions) -> Any:
        with mode:
            return function(self)

    return run


def of_a_round(
    lookahead: Any, drafts: bool, rule: str, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, int] = (1, 1)
) -> Counter[str]:
    """Of a round of three sampled rows, in bfloat16. layers: of target and drafter."""
    with counting(monkeypatch) as names:
        runners = [_runner(seed, count) for seed, count in enumerate(layers)]
        made = engine_of(runners[0], runners[1] if drafts else None, lookahead, rule=RULES[rule](), max_batch=8)
        for i in range(3):
            made.submit(Request((1, 2, 3 + i), 1, Sampling(seed=i), Limits(max_new_tokens=100)))
        for _ in range(6):
            names.clear()
            made.step()
        captures = made.target.captures
        assert captures is not None
        assert captures.failures == []
        return names.copy()


def _runner(seed: int, layers: int) -> Runner:
    hf = tiny_model("llama", seed=seed, layers=layers, vocab_size=VOCABULARY).to(torch.bfloat16)
    made = loading.wrap(hf, "tiny", "fused", checked=False)
    made.capture_rounds("eager")
    made.bridge.layers = fused_layers_of(hf)
    assert made.bridge.layers is not None
    return made
