"""GGUF files on the kernels in C: weights without loss, ids of Transformers, and what goes to llama.cpp instead.

Tests of: models.gguf.own, models.gguf.contents, models.weights.groups.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import shoal
from gguf_files import END, TOKENS, greedy, require_llama, tiny_gguf_model, write_gguf
from native_kernels import needs_compiler
from shoal.errors import UnsupportedModel
from shoal.models.gguf import own
from shoal.models.gguf.contents import BLOCKS, FACTORS, groups_of, rotary_parameters
from shoal.models.gguf.own import own_model
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


ROTARY: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}


def model_of(family: str, rotary: str = "default") -> Any:
    torch.manual_seed(0)
    kind, config = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    }[family]
    rope = {"rope_type": rotary, "rope_theta": 1e4 if rotary == "default" else 100.0, **ROTARY.get(rotary, {})}
    biased = {"attention_bias": True} if family == "llama" else {}  # llama.cpp's order of features is that of biases, too
    made = kind(config(**SHAPE, **biased, rope_parameters=rope)).float().eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return made


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
    """Weights in each form of `kernels.h`; all numbers appear, and scales and minima of both signs."""
    draws = torch.Generator().manual_seed(form)
    size = 16 if form == 1 else 32
    low, high = (0, 16) if form > 2 else (-128, 128)
    numbers = torch.randint(low, high, (out, inputs), generator=draws).to(torch.uint8 if form > 2 else torch.int8)
    scales, minima = (torch.randn(out, inputs // size, generator=draws).half() for _ in range(2))
    if form in (1, 3):
        scales, minima = scales.float() * 1.5, minima.float() * 1.1  # no float16, and no product with a number is rounded
    return Groups(numbers, scales, None if form in (2, 5) else minima)


def in_16_bits(x: Tensor, size: int) -> Tensor:
    groups = x.double().view(len(x), -1, size)
    scale = groups.abs().amax(-1, keepdim=True) / 32767
    return (groups / scale.clamp(min=1e-300)).round().mul(scale).view(x.shape)


SHAPES = ((48, 64), (33, 96), (256, 320))
FORMS = pytest.mark.parametrize("form", [1, 2, 3, 4, 5])
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 43)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_products_have_the_bits_of_unpacked_weights(form: int, dtype: torch.dtype) -> None:
    """In any company, with and without what follows; scales of another group would show."""
    for out, inputs in SHAPES:
        groups = groups_in(form, out, inputs)
        assert groups.form == form
        bias = torch.randn(out).to(dtype)
        ours, right = GroupMatrix(groups, bias, exact=True), PanelMatrix(groups.dense(), bias.float())
        assert torch.equal(ours.dense(), groups.dense())
        x, other = torch.randn(43, inputs).to(dtype), torch.randn(43, out).to(dtype)
        expected = right.linear_add(x.float(), other.float()).to(dtype)
        for tokens in COUNTS:
            assert torch.equal(ours.linear_add(x[:tokens].clone(), other[:tokens].clone()), expected[:tokens])


@FORMS
def test_products_are_those_of_features_in_16_bits(form: int) -> None:
    """In whatever company with the same bits; a rounding of features to 15 bits would be twice as far."""
    for out, inputs in SHAPES:
        groups = groups_in(form, out, inputs)
        matrix, size = GroupMatrix(groups), inputs // groups.scales.shape[1]
        x = torch.randn(43, inputs) * 10.0 ** torch.randint(-3, 4, (43, inputs // size)).repeat_interleave(size, 1)
        x[5, :size], x[6] = 0, 0
        found, weights = matrix.linear(x), groups.dense().double()
        assert torch.allclose(
            found.double(), in_16_bits(x, size) @ weights.t(), rtol=1e-5, atol=2e-5 * float(found.abs().max())
        )
        error, step = (found.double() - x.double() @ weights.t())[:, :out], in_16_bits(x, size) - x.double()
        assert float(error.norm()) < 1.1 * float((step @ weights.t()).norm()) + 1e-6 * float(found.norm())
        for tokens in COUNTS:
            assert torch.equal(matrix.linear(x[:tokens].clone()), found[:tokens])
            alone = matrix.linear(x[tokens - 1 : tokens].bfloat16())
            assert torch.equal(alone, matrix.linear(x[:tokens].bfloat16())[-1:])


@FORMS
def test_features_that_are_not_finite_show(form: int) -> None:
    matrix, x = GroupMatrix(groups_in(form, 48, 64)), torch.randn(4, 64)
    right = matrix.linear(x.clone())
    x[1, 40], x[2, 3] = torch.nan, torch.inf
    found = matrix.linear(x)
    assert not found[1:3].isfinite().any()
    assert torch.equal(found[::3], right[::3])


def products_are_wrong(made: ctypes.CDLL) -> bool:
    with patch.object(panels, "library", lambda: made):
        for form in range(1, 6):
            groups, x = groups_in(form, 72, 96), torch.randn(11, 96, generator=torch.Generator().manual_seed(0))
            right = x.double() @ groups.dense().double().t()
            for exact in (False, True):
                matrix = GroupMatrix(groups, exact=exact)
                for tokens in (1, 2, 3, 11):
                    found = matrix.linear(x[:tokens].clone())
                    if not torch.allclose(found.double(), right[:tokens], rtol=1e-4, atol=3e-5 * float(right.abs().max())):
                        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("right", "wrong"), [
    ("? x + factors_of(form, factors, 1) : x", "? x : x"),
    ("head_of(x, row, i)->centre", "head_of(x, row, 0)->centre"),
    ("sum[i][p] += minima * head->sum", "sum[i][p] += minima * head->scale"),
    ("(scales * head->scale)", "(scales * head_of(x, row, 0)->scale)"),
    ("memcpy(&pair, features + i * row,", "memcpy(&pair, features,"),
    ("numbers + p / PARTS * panel", "numbers + p % PARTS * panel"),
    ("32767.0f / top : 0.0f", "127.0f / top : 0.0f"),
    ("total += number", "total = number"),
    ("group < count / (GROUP_OF(form) * LANES)", "group + 1 < count / (GROUP_OF(form) * LANES)"),
])  # fmt: skip
def test_sabotage_is_seen(right: str, wrong: str) -> None:
    assert products_are_wrong(wrong_kernels((right, wrong)))


def test_the_same_products_pass_the_right_kernels() -> None:
    assert not products_are_wrong(compiled_as_wrong_ones_are())


def test_layers_of_unlike_formats_become_one_matrix() -> None:
    kinds = ((2, 32), (3, 48), (1, 19), (5, 16))
    layers = [GroupLinear(groups_in(form, out, 64), torch.randn(out), exact=True) for form, out in kinds]
    x = torch.randn(3, 5, 64)
    before = [layer(x) for layer in layers]
    matrix = group_matrix_of(layers)
    assert group_matrix_of(layers) is matrix
    assert all(torch.equal(layer(x), one) for layer, one in zip(layers, before, strict=True))
    assert torch.equal(matrix.linear(x.view(15, 64)), torch.cat(before, -1).view(15, -1))
    assert len({id(layer.packed) for layer in layers}) == 1


@pytest.mark.parametrize("outputs", [(32, 48, 16), (32, 19, 16)], ids=["whole panels", "a part of a panel"])
@pytest.mark.parametrize("form", range(1, 6))
def test_layers_of_one_format_have_the_panels_of_one_matrix(form: int, outputs: tuple[int, ...]) -> None:
    groups = [groups_in(form, out, 64) for out in outputs]
    matrix = group_matrix_of([GroupLinear(each) for each in groups])
    whole = GroupMatrix(Groups.joined(groups))
    assert (matrix.kernel_form, matrix.shape) == (whole.kernel_form, whole.shape)
    assert torch.equal(matrix.panels, whole.panels)
    assert torch.equal(matrix.dense(), torch.cat([each.dense() for each in groups]))


@pytest.mark.slow(but=["llama-Q8_0"])
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


@pytest.mark.slow(but=["llama-linear"])
@pytest.mark.parametrize(("family", "rotary"), [
    ("llama", "linear"), ("llama", "yarn"), ("llama", "llama3"), ("qwen2", "yarn"), ("qwen3", "yarn"), ("qwen3", "linear"),
])  # fmt: skip
def test_scaled_rotary_positions_are_those_of_transformers(family: str, rotary: str, tmp_path: Path) -> None:
    """By the kernels and by llama.cpp, at positions that the model without the scaling computes otherwise."""
    require_llama()
    stock = model_of(family, rotary)
    plain = model_of(family)
    plain.load_state_dict(stock.state_dict())
    prompt = torch.randint(0, 200, (1, 180), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        right, other = stock(prompt).logits, plain(prompt).logits
    assert float((right - other).abs().max()) > 1
    file = write_gguf(tmp_path / "tiny.gguf", stock, architecture=family)
    quantised = write_gguf(tmp_path / "q8.gguf", stock, architecture=family, kind="Q8_0")
    with shoal.load(file, compile="off") as model:
        assert model.loaded["target"]["passes"] == "llama.cpp"
        torch.testing.assert_close(model.target.plain_logits(prompt), right, atol=5e-2, rtol=0)
    right_ids = greedy(stock, prompt[0].tolist(), 24)
    with shoal.load(quantised, "suffix", dtype="float32") as model:
        found = model.generate([prompt[0].tolist()], 2, temperature=0, max_new_tokens=24, eos=(), lookahead=3)
    assert set(found.stats.executors["target"]) == {"C decoder"}
    assert [list(sample.token_ids) for sample in found[0].samples] == [right_ids] * 2


@pytest.mark.slow(but=["written0-None"])
@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"rope__scaling__factor": 4.0}, None),
        ({"rope__scale_linear": 4.0}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({"rope__scaling__attn_factor": 0.5}, "rope.scaling.attn_factor"),
        ({"rope__scaling__type": "yarn", "rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
    ],
)
def test_numbers_of_scalings_mean_what_llama_cpp_takes_them_for(
    written: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    """A factor without a type divides all frequencies; what Transformers has no word for goes to llama.cpp."""
    require_llama()
    file = write_gguf(
        tmp_path / "tiny.gguf", model_of("llama"), architecture="llama", **{f"llama__{k}": v for k, v in written.items()}
    )
    prompt = torch.randint(0, 200, (1, 100), generator=torch.Generator().manual_seed(5))
    with shoal.load(file) as model, shoal.load(file, compile="off") as by_llama_cpp:
        assert reason is None or reason in model.target.absent["C decoder"]
        assert (model.target.executors[0].name == "llama.cpp") is (reason is not None)
        ours, right = (each.target.plain_logits(prompt) for each in (model, by_llama_cpp))
    torch.testing.assert_close(ours, right, atol=5e-2, rtol=0)


def test_features_stay_in_float32_where_that_is_asked_for(tmp_path: Path) -> None:
    require_llama()
    file = write_gguf(tmp_path / "tiny.gguf", model_of("llama"), architecture="llama", kind="Q8_0")
    logits = []
    for options, why in (({}, "16 bits"), ({"dtype": "float32"}, "as asked")):
        with shoal.load(file, **options) as model:
            assert why in model.target.notes["dtype"]
            assert {layer.matrix.exact for layer in model.target.hf.modules() if isinstance(layer, GroupLinear)} == {
                bool(options)
            }
            logits.append(model.target.plain_logits(torch.tensor([PROMPTS[0]])))
    assert 0 < float((logits[0] - logits[1]).abs().max()) < 1e-3


@pytest.mark.parametrize("kind", ["Q8_0", "BF16", "F16", "F32"])
def test_a_smaller_copy_drafts_for_a_file(kind: str, tmp_path: Path) -> None:
    require_llama()
    file = write_gguf(tmp_path / "tiny.gguf", model_of("llama"), architecture="llama", kind=kind)
    options: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": 24, "eos": (), "seed": 3, "rule": "coupled"}
    with shoal.load(file, "self:int4") as model:
        plain = model.generate(PROMPTS, 2, lookahead="off", **options)
        drafted = model.generate(PROMPTS, 2, lookahead=3, **options)
    assert 0 < drafted.stats.accepted < drafted.stats.drafted
    for role in ("target", "draft"):
        assert set(drafted.stats.executors[role]) <= {"C decoder", "C layers"}
    assert drafted.stats.rounds < plain.stats.rounds
    for one, other in zip(plain, drafted, strict=True):
        assert [sample.token_ids for sample in one.samples] == [sample.token_ids for sample in other.samples]


@pytest.mark.parametrize(
    ("written", "options", "reason"),
    [
        ({"kind": "MXFP4"}, {}, "do not know the format"),
        ({"kind": "Q8_0"}, {"compile": "off"}, "compile='off'"),
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


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"qwen3__rope__dimension_count": 8}, "its heads are of several sizes"),
        ({"qwen3__attention__value_length": 8}, "its heads are of several sizes"),
        ({"qwen3__attention__sliding_window": 16}, "it has qwen3.attention.sliding_window"),
        ({"qwen3__expert_count": 4}, "it has qwen3.expert_count"),
    ],
)
def test_files_that_say_what_the_kernels_do_not_compute_are_left_to_llama_cpp(
    written: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    require_llama()
    file = write_gguf(tmp_path / "tiny.gguf", tiny_gguf_model(), **written)
    made, notes = own_model(file, "cpu", exact=False)
    assert made is None
    assert reason in notes["reason"]


def set_tensor(name: str, **changes: int) -> Callable[[own.Header], None]:
    """Another kind, start or size of a tensor; none of it for no tensor."""

    def change(header: own.Header) -> None:
        if changes:
            header.tensors[name] = header.tensors.get(name, header.tensors["blk.0.ffn_gate.weight"])._replace(**changes)
        else:
            del header.tensors[name]

    return change


def set_value(key: str, value: Any) -> Callable[[own.Header], None]:
    """Another value; None for a list of a key that is there."""

    def change(header: own.Header) -> None:
        real, there = header.value, header.has
        header.value = lambda each: value if each == key else real(each)  # type: ignore[method-assign]
        header.has = lambda each: each == key or there(each)  # type: ignore[method-assign]

    return change


IQ2_XXS, Q4_0, Q4_K = 16, 2, 12
"""Numbers of `ggml_type`."""
LEFT = {
    "another family": (set_value("general.architecture", "gemma3"), "the kernels do not know the family gemma3"),
    "a length that is a list": (set_value("qwen3.feed_forward_length", None), "it has no number qwen3.feed_forward_length"),
    "heads by layer": (set_value("qwen3.attention.head_count_kv", None), "it has no number qwen3.attention.head_count_kv"),
    "a matrix is not there": (set_tensor("blk.1.ffn_up.weight"), "it has no tensor blk.1.ffn_up.weight"),
    "no embeddings": (set_tensor("token_embd.weight"), "it has no tensor token_embd.weight"),
    "no last norm": (set_tensor("output_norm.weight"), "it has no tensor output_norm.weight"),
    "norms of heads are not there": (set_tensor("blk.0.attn_q_norm.weight"), "it lacks tensors of its family"),
    "the file is cut in a matrix": (set_tensor("blk.1.ffn_up.weight", start=1 << 40), "the file ends before its tensors do"),
    "the file is cut in a norm": (set_tensor("output_norm.weight", start=1 << 40), "the file ends before its tensors do"),
    "another format": (
        set_tensor("token_embd.weight", kind=IQ2_XXS), "the kernels do not know the format of its tensor token_embd.weight",
    ),
    "a row within a block": (
        set_tensor("blk.0.ffn_down.weight", kind=Q4_K), "a row of its tensor blk.0.ffn_down.weight ends inside a block",
    ),
    "one quantised matrix": (set_tensor("blk.0.ffn_up.weight", kind=Q4_0), "only some of its matrices are quantised"),
    "a quantised norm": (set_tensor("output_norm.weight", kind=Q4_0), "its tensor output_norm.weight is quantised"),
    "rows that are not the layer's": (
        set_tensor("blk.1.attn_v.weight", size=64 * 64 * 4), "its tensor blk.1.attn_v.weight has 64 rows, and its layer 32",
    ),
    "a head of another vocabulary": (
        set_tensor("output.weight", size=64 * 64 * 4), f"its tensor output.weight has 64 rows, and its layer {len(TOKENS)}",
    ),
    "a norm of another width": (
        set_tensor("output_norm.weight", size=32 * 4), "its tensor output_norm.weight has 32 rows, and its layer 64",
    ),
    "a bias of another width": (
        set_tensor("blk.0.attn_q.bias", kind=0, size=32 * 4), "its tensor blk.0.attn_q.bias has 32 rows, and its layer 64",
    ),
    "another tensor": (
        set_tensor("blk.0.ffn_gate_inp.weight", kind=0), "its tensor blk.0.ffn_gate_inp.weight is none that the kernels know",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_a_file_that_the_kernels_do_not_compute_is_left_with_the_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_llama()
    change, reason = LEFT[name]

    class Changed(own.Header):
        def __init__(self, file: Path) -> None:
            super().__init__(file)
            change(self)

    file = write_gguf(tmp_path / "tiny.gguf", tiny_gguf_model())
    assert own_model(file, "cpu", exact=False)[0] is not None
    monkeypatch.setattr(own, "Header", Changed)
    assert own_model(file, "cpu", exact=False) == (None, {"reason": reason})


def test_a_vocabulary_that_llama_cpp_does_not_read(tmp_path: Path) -> None:
    require_llama()
    file = write_gguf(tmp_path / "tiny.gguf", tiny_gguf_model(), pre="none that is known")
    assert own_model(file, "cpu", exact=False) == (None, {"reason": f"{file}: llama.cpp cannot read its vocabulary"})


@pytest.mark.parametrize(
    ("device", "gone", "reason"),
    [
        ("cpu", "gcc is not there", "there are no kernels in C: gcc is not there"),
        ("cuda", None, "device='cuda', and llama.cpp was built for more than the CPU"),
        ("auto", None, "device='auto', and llama.cpp was built for more than the CPU"),
    ],
)
def test_machines_on_which_llama_cpp_computes_all_files(
    device: str, gone: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the file is looked at."""
    require_llama()
    monkeypatch.setattr(own, "missing", lambda: gone)
    monkeypatch.setattr(own.library(), "llama_supports_gpu_offload", lambda: True)
    assert own_model(tmp_path / "none.gguf", device, exact=False) == (None, {"reason": reason})


class Facts:
    """A header of these facts on positions, None for lists, and of these tensors."""

    def __init__(self, facts: dict[str, Any], tensors: Sequence[str]) -> None:
        self.facts, self.tensors = {f"llama.rope.{key}": value for key, value in facts.items()}, tensors

    def value(self, key: str) -> Any:
        return self.facts.get(key)

    def has(self, key: str) -> bool:
        return key in self.facts


@pytest.mark.parametrize(
    ("facts", "tensors", "reason"),
    [
        ({"scaling.type": "yarn", "scaling.factor": 2.0}, [FACTORS], "it has rope_freqs.weight beside .*yarn"),
        ({"scale_linear": 2.0}, [FACTORS], "it has rope_freqs.weight beside .*linear"),
        ({"scaling.type": "longrope"}, [], "scaling.type 'longrope'"),
        ({"freq_base": None}, [], "its llama.rope.freq_base is a list"),
        ({"scaling.attn_factor": 0.5}, [], "attn_factor"),
        ({"scaling.yarn_ext_factor": 0.5}, [], "yarn_ext_factor"),
        ({"scaling.yarn_attn_factor": 0.5}, [], "yarn_attn_factor"),
        ({"scaling.yarn_log_multiplier": 0.5}, [], "yarn_log_multiplier"),
    ],
)
def test_positions_that_transformers_cannot_say_are_left_to_llama_cpp(
    facts: dict[str, Any], tensors: list[str], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        rotary_parameters(Facts(facts, tensors), "llama", 256)  # type: ignore[arg-type]
    assert rotary_parameters(Facts({}, [FACTORS]), "llama", 256) == {"rope_theta": 1e4, "rope_type": "default"}  # type: ignore[arg-type]
