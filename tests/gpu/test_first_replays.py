"""Faults of one key in a context of 700 tokens, which rounding hides: a replay is compared with its function bit for bit.

Tests of: models.compiled.captured_round, drafting.captured_inputs.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from captured_models import runner
from recorder import Recorder
from shoal.config import Limits, Sampling
from shoal.lookahead.controller import Fixed
from shoal.models.compiled import EXECUTORS, Executor, Run
from shoal.models.compiled.block import Block, View
from shoal.models.compiled.captured_round import FirstReplays
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request

pad = importlib.import_module("shoal.models.attention.unfused")  # the name in the package is the function
CONTEXT, LAYERS, K = 700, 3, 3


def one_key_too_few(patch: pytest.MonkeyPatch) -> None:
    """In the last layer, no query sees key 350."""
    attend, calls = pad.attend_folded, []

    def short(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, inputs: Any) -> Tensor:
        calls.append(query)
        if len(calls) % LAYERS == 0 and isinstance(inputs.masks.layout, Block):
            keys = torch.arange(bias.shape[-1])
            bias = torch.where(keys == CONTEXT // 2, torch.finfo(bias.dtype).min, bias)
        return attend(query, key, value, bias, inputs)

    patch.setattr(pad, "attend_folded", short)


def in_last_layer(write: Callable[[Tensor, Tensor, Tensor], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        written = View._stored

        def wrong(self: View, store: Tensor, states: Tensor) -> Tensor:
            if self._layer < LAYERS - 1:
                return written(self, store, states)
            numbers = states.transpose(1, 2).reshape(len(self.block.cells), -1)
            write(store.view(-1, numbers.shape[1]), self.block.cells, numbers)
            return self._of_rows(store)

        patch.setattr(View, "_stored", wrong)

    return plant


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "one key too few": one_key_too_few,
    "a cell late": in_last_layer(lambda store, cells, numbers: store.index_copy_(0, cells - 1, numbers)),
    "a stale row": in_last_layer(lambda store, cells, numbers: store.index_copy_(0, cells[1:], numbers[1:])),
}
"""What a computation of the last layer of three does wrongly. A cell late: the pass before has written there."""


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            FAULTS[fault](patch)
        yield


def recorded_with(fault: str | None) -> Callable[[torch.device], Executor]:
    """Graphs that compute something else than their function."""

    def executor(device: torch.device) -> Executor:
        record = Recorder(device)

        def execute(run: Run) -> Run:
            with planted(fault):
                return record(run)

        return execute

    return executor


def failures_of(
    dtype: torch.dtype, k: int, monkeypatch: pytest.MonkeyPatch, *, graphs: str | None = None, functions: str | None = None
) -> list[str]:
    """Why rounds of a model are not captured, whose graphs or functions have a fault."""
    monkeypatch.setitem(EXECUTORS, "graphed", recorded_with(graphs))
    models = [tiny_model("llama", seed=0, layers=LAYERS, max_position_embeddings=1024).to(dtype) for _ in range(2)]
    made = engine_of(*(runner(model, "graphed") for model in models), Fixed(k), max_batch=4)
    prompt = torch.randint(3, 250, (CONTEXT,), generator=torch.Generator().manual_seed(0)).tolist()
    for seed in range(3):
        made.submit(Request((*prompt, seed), 1, Sampling(0.8, seed=seed), Limits(max_new_tokens=6)))
    with warnings.catch_warnings(), planted(functions):
        warnings.simplefilter("ignore", RuntimeWarning)
        while made.step():
            pass
    assert made.target.captures is not None
    assert made.target.captures.ran.total() or made.target.captures.failures
    return made.target.captures.failures


@pytest.mark.slow(but=["torch.float32-None-0", "torch.float32-a cell late-3", "torch.bfloat16-one key too few-0"])
@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replay_that_computes_something_else_is_found(
    dtype: torch.dtype, fault: str | None, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = failures_of(dtype, k, monkeypatch, graphs=fault)
    assert bool(found) is (fault is not None)
    assert all("a replay does not write" in text for text in found)


@pytest.mark.parametrize("fault", FAULTS)
def test_ordinary_passes_would_let_a_key_pass(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why replays are compared bit for bit: a measure that rounding passes lets a key of 700 pass."""
    monkeypatch.setattr(FirstReplays, "compare", lambda *_: None)
    found = failures_of(torch.bfloat16, 0, monkeypatch, graphs=fault)
    assert bool(found) is ("key" not in fault)
    assert all("keys or values are not those of an ordinary pass" in text for text in found)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "key" not in fault])
def test_a_function_that_is_wrong_itself_is_found_by_ordinary_passes(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why they are compared as well: a replay is what its function is, and both are wrong."""
    found = failures_of(torch.bfloat16, 0, monkeypatch, graphs=fault, functions=fault)
    assert "keys or values are not those of an ordinary pass" in found[0]
