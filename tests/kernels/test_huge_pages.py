"""The memory of packed weights: mappings that small matrices share, and ordinary memory where there are none.

Tests of: models.weights.matrix.
"""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from shoal.models.weights import matrix

needs_huge_pages = pytest.mark.skipif(matrix.HUGE is None, reason="needs Linux")


@pytest.fixture(autouse=True)
def _no_mapping_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_shared", None)


@needs_huge_pages
def test_small_matrices_share_a_mapping_and_do_not_touch_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    made = matrix.mapping
    monkeypatch.setattr(matrix, "mapping", lambda size: sizes.append(size) or made(size))
    tensors = [matrix.empty((100, width), torch.bfloat16).fill_(i) for i, width in enumerate((1, 7, 64, 4096) * 8)]
    assert sizes == [matrix.CHUNK]
    for i, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == i).all())
    large = matrix.empty((matrix.CHUNK // 8, 2), torch.float32)
    assert sizes[1:] == [large.nbytes]
    for _ in range(5):  # what does not fit begins another mapping
        matrix.empty((matrix.CHUNK // 4,), torch.int8)
    assert sizes[2:] == [matrix.CHUNK]


@pytest.mark.parametrize("shape", [(0, 16), (3, 5, 16)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    assert matrix.empty(shape, torch.float32).shape == shape


@pytest.mark.parametrize("absent", [True, False])
def test_ordinary_memory_where_there_are_no_huge_pages(absent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("Invalid argument")

    monkeypatch.setattr(matrix, "HUGE", None if absent else matrix.HUGE)
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert matrix.empty((8, 16), torch.float32).fill_(1).sum() == 128
