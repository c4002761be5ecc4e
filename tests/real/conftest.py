"""A real pretrained model, loaded once per number format and kind of passes, and Transformers' own beside it; freed at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shoal
import smollm2
from shoal.api import Shoal
from shoal.drafting.draft import read_draft
from shoal.models import formats, weights
from shoal.models.weights.layers import packing
from shoal.models.weights.matrix import PACKED, Key

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Pair = Callable[..., Shoal]
"""The model by number format, `compile` and `kv`."""
Drafted = Callable[[Path, str], Shoal]
"""The model in float32 with another as its draft model, by the other's directory and the shape of drafts."""


@pytest.fixture(scope="package")
def directory() -> Path:
    """The checkpoint; without its package the test is skipped, and the end of the run says so."""
    if not smollm2.installed():
        pytest.skip("needs smollm2, of the extra `real`")
    return smollm2.checkpoint()


def all_packed(keys: Collection[Key]) -> dict[Key, str]:
    """The forms of weights where every measurement says that they are packed."""
    return {key: PACKED if packing(key[1]) is not None else form for key, form in weights.without_packing(keys).items()}


@pytest.fixture(scope="package")
def pair(directory: Path) -> Iterator[Pair]:
    """Each model is loaded when it is first asked for. With kernels all weights are packed for them, whatever a measurement says;
    without, none are."""
    loaded: dict[tuple[str, str, str], Shoal] = {}

    def load(dtype: str = "float32", compile: str = "auto", kv: str = "off") -> Shoal:
        key = dtype, compile, kv
        if key not in loaded:
            with pytest.MonkeyPatch.context() as patch:
                if compile == "auto":
                    patch.setattr(formats, "cpu", lambda: formats.Cpu(packs=frozenset(DTYPES.values())))
                    patch.setattr(weights, "by_facts", all_packed)
                loaded[key] = shoal.load(directory, dtype=dtype, compile=compile, kv=kv, max_batch=256)
        return loaded[key]

    yield load
    for model in loaded.values():
        model.close()


@pytest.fixture(scope="package")
def drafted(pair: Pair) -> Drafted:
    """Both models are loaded once, whatever the shapes: FEW names the other where a shape has more than a suffix."""
    loaded: dict[Path, Shoal] = {}

    def of(place: Path, shape: str = "FEW") -> Shoal:
        if place not in loaded:
            loaded[place] = shoal.load(place, dtype="float32")
        target = pair("float32", "auto")
        drafting = read_draft(shape.replace("FEW", str(place)))
        return Shoal(target.target, loaded[place].target, target.tokenizer, max_batch=256, drafting=drafting)

    return of


@pytest.fixture(scope="package")
def stock(directory: Path) -> Callable[[str], Any]:
    """The model as Transformers has it, by number format."""

    @cache
    def load(dtype: str = "float32") -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype]).eval()

    return load


@pytest.fixture(scope="package")
def few_layers(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's first four layers with its head: real weights that long prompts, and drafts, can afford."""
    place = tmp_path_factory.mktemp("real") / "few"
    hf = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    hf.model.layers = hf.model.layers[:4]
    hf.config.num_hidden_layers = 4
    hf.save_pretrained(place)
    transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(place)
    return place
