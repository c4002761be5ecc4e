"""GGUF files on the kernels in C: weights without loss, ids of Transformers, and what goes to llama.cpp instead.

Tests of: models.gguf.own, models.gguf.contents, models.weights.groups.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import shoal
from gguf_files import END, TOKENS, require_llama, tiny_gguf_model, write_gguf
from native_kernels import needs_compiler
from shoal.models.gguf.contents import BLOCKS, groups_of
from shoal.models.weights import panels
from shoal.models.weights.groups import GroupLinear, GroupMatrix, Groups, group_matrix_of
from shoal.models.weights.panels import PanelMatrix
from wrong_kernels import compiled_as_wrong_ones_are, wrong_kernels

pytestmark = needs_compiler
PROMPTS = ([5, 9, 70, 33, 12], [7], [40, 41, 42, 40, 41, 42, 40, 41])
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "eos_token_id": TOKENS.index(END), "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where the float16 of a block are."""


def model_of(family: str) -> Any:
    if family == "qwen3":
        return tiny_gguf_model()
    torch.manual_seed(0)
    kind, config = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}[family]
    made = kind(config(**SHAPE)).float().eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return made


@torch.inference_mode()
def greedy(hf: Any, ids: list[int], count: int) -> list[int]:
    for _ in range(count):
        ids = [*ids, int(hf(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-count:]


@pytest.mark.parametrize("kind", BLOCKS)
def test_formats_are_read_without_loss(kind: int) -> None:
    gguf = pytest.importorskip("gguf")
    block, draws = BLOCKS[kind], np.random.default_rng(0)
    raw = draws.integers(0, 256, (48, 2 * block.size), dtype=np.uint8)
    blocks = raw.reshape(-1, block.size)
    for place in HALVES[block.name]:
        blocks[:, place : place + 2] = draws.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    groups = groups_of(kind, torch.from_numpy(raw), 2 * block.inputs)
    right = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[block.name]))
    assert torch.equal(groups.dense(), right)
    assert torch.equal(GroupMatrix(groups).dense(), right)


def groups_in(form: int, out: int, inputs: int) -> Groups:
    draws = torch.Generator().manual_seed(form)
    if form == 3:
        return Groups.in_4_bits(torch.randn(out, inputs, generator=draws))
    numbers = torch.randint(-128, 128, (out, inputs), generator=draws).to(torch.int8)
    size = {1: 16, 2: 32}[form]
    scales, minima = (torch.randn(out, inputs // size, generator=draws).half().float() for _ in range(2))
    return Groups(numbers, scales, minima if form == 1 else None)


@pytest.mark.parametrize("form", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_bits_of_unpacked_weights(form: int, dtype: torch.dtype) -> None:
    """In any company, in place and unpacked, with and without what follows; scales of another group would show."""
    for out, inputs in ((48, 64), (33, 96), (256, 320)):
        groups = groups_in(form, out, inputs)
        assert groups.form == form
        bias = torch.randn(out).to(dtype)
        ours, right = GroupMatrix(groups, bias), PanelMatrix(groups.dense(), bias.float())
        x, other = torch.randn(43, inputs).to(dtype), torch.randn(43, out).to(dtype)
        expected = right.linear_add(x.float(), other.float()).to(dtype)
        for tokens in (1, 2, 7, 8, 9, 17, 43):
            assert torch.equal(ours.linear_add(x[:tokens].clone(), other[:tokens].clone()), expected[:tokens])


def products_are_wrong(made: ctypes.CDLL) -> bool:
    with patch.object(panels, "library", lambda: made):
        for form in (1, 2, 3):
            groups, x = groups_in(form, 72, 96), torch.randn(11, 96, generator=torch.Generator().manual_seed(0))
            right = x.double() @ groups.dense().double().t()
            for tokens in (1, 3, 11):
                found = GroupMatrix(groups).linear(x[:tokens].clone())
                if not torch.allclose(found.double(), right[:tokens], rtol=1e-4, atol=1e-3):
                    return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("right", "wrong"), [
    ("? x + factor_at(factors + 4 * LANES) : x", "? x : x"),
    ("weights_in_group(form, w + from + p % PARTS", "weights_in_group(form, w + p % PARTS"),
    ("sum[i][p] += feature * unpacked[p]", "sum[i][p] += feature * unpacked[0]"),
    ("x[i * width + at + inner + k]", "x[i * width + at + inner]"),
    ("group < count / (GROUP_OF(form) * LANES)", "group + 1 < count / (GROUP_OF(form) * LANES)"),
])  # fmt: skip
def test_sabotage_is_seen(right: str, wrong: str) -> None:
    assert products_are_wrong(wrong_kernels((right, wrong)))


def test_the_same_products_pass_the_right_kernels() -> None:
    assert not products_are_wrong(compiled_as_wrong_ones_are())


def test_layers_of_unlike_formats_become_one_matrix() -> None:
    layers = [GroupLinear(groups_in(form, out, 64), torch.randn(out)) for form, out in ((2, 32), (3, 48), (1, 19))]
    x = torch.randn(3, 5, 64)
    before = [layer(x) for layer in layers]
    matrix = group_matrix_of(layers)
    assert group_matrix_of(layers) is matrix
    assert all(torch.equal(layer(x), one) for layer, one in zip(layers, before, strict=True))
    assert torch.equal(matrix.linear(x.view(15, 64)), torch.cat(before, -1).view(15, -1))
    assert len({id(layer.packed) for layer in layers}) == 1


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q8_0"), ("llama", "Q4_0"), ("qwen2", "Q4_1"), ("qwen3", "Q5_0"), ("llama", "F16"), ("qwen2", "F32"),
        ("qwen3", "BF16"),
    ],
)  # fmt: skip
def test_ids_are_those_of_the_unpacked_model(family: str, kind: str, tmp_path: Path) -> None:
    require_llama()
    stock = model_of(family)
    file = write_gguf(tmp_path / "tiny.gguf", stock, architecture=family, kind=kind)
    with shoal.load(file, "suffix") as model:
        executor = "C decoder" if kind.startswith("Q") else "C layers"  # tests pack no floats
        assert model.loaded["target"]["passes"] == executor
        for lookahead in ("off", 3):
            found = model.generate(PROMPTS, 3, temperature=0, max_new_tokens=24, eos=(), lookahead=lookahead)
            assert set(found.stats.executors["target"]) == {executor}
            assert (found.stats.drafted > 0) is (lookahead == 3)
            for prompt, output in zip(PROMPTS, found, strict=True):
                assert [list(sample.token_ids) for sample in output.samples] == [greedy(stock, prompt, 24)] * 3
        assert model.generate(PROMPTS[0], 1, max_new_tokens=4).stats.committed > 0  # the file's end of text is known


def test_a_smaller_copy_drafts_for_a_file(tmp_path: Path) -> None:
    require_llama()
    file = write_gguf(tmp_path / "tiny.gguf", model_of("llama"), architecture="llama", kind="Q8_0")
    options: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": 24, "eos": (), "seed": 3, "rule": "coupled"}
    with shoal.load(file, "self:int4") as model:
        plain = model.generate(PROMPTS, 2, lookahead="off", **options)
        drafted = model.generate(PROMPTS, 2, lookahead=3, **options)
    assert 0 < drafted.stats.accepted < drafted.stats.drafted
    assert drafted.stats.rounds < plain.stats.rounds
    for one, other in zip(plain, drafted, strict=True):
        assert [sample.token_ids for sample in one.samples] == [sample.token_ids for sample in other.samples]


@pytest.mark.parametrize(
    ("written", "options", "reason"),
    [
        ({"kind": "MXFP4"}, {}, "do not know the format"),
        ({"kind": "Q8_0"}, {"compile": "off"}, "compile='off'"),
        ({"kind": "Q8_0", "qwen3__rope__scaling__type": "yarn"}, {}, "rope.scaling.type"),
    ],
)
def test_other_files_go_to_llama_cpp(written: dict[str, str], options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    require_llama()
    file = write_gguf(tmp_path / "tiny.gguf", tiny_gguf_model(), **written)
    with shoal.load(file, **options) as model:
        runner = model.target
        assert runner.executors[0].name == "llama.cpp"
        assert reason in runner.absent["C decoder"]
        prompt = torch.tensor([PROMPTS[0]])
        assert isinstance(runner.plain_logits(prompt), Tensor)
