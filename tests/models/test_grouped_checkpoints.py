"""GPTQ, AWQ and compressed-tensors checkpoints in 8 and 4 bits on the kernels in C: weights without loss, ids and perplexity of the
unpacked model, and what is refused.

Tests of: models.grouped_checkpoints, models.pretrained, models.loading.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import shoal
from grouped_files import Layout, write_grouped
from native_kernels import needs_compiler
from shoal.errors import UnsupportedModel
from shoal.integrations.loglikelihoods import token_logprobs
from shoal.models import formats, grouped_checkpoints
from shoal.models.weights.groups import GroupLinear, ReorderedLinear
from shoal.testing import fill, tiny_model

pytestmark = needs_compiler
by_no_package = pytest.mark.skipif(
    any(find_spec(name) for name in ("compressed_tensors", "gptqmodel")), reason="a package of Transformers may read them"
)
PROMPTS = ([5, 9, 70, 33, 12], [7], [40, 41, 42, 40, 41, 42, 40, 41])
COMPRESSED = "compressed-tensors"
Q = "model.layers.1.self_attn.q_proj"
LAYOUTS = (
    Layout(COMPRESSED),
    Layout(COMPRESSED, size=0, scales=torch.bfloat16),
    Layout(COMPRESSED, size=64, symmetric=False),
    Layout(COMPRESSED, size=0, symmetric=False, form="int-quantized", scales=torch.bfloat16),
    Layout(COMPRESSED, size=16, form="int-quantized"),
    Layout(COMPRESSED, 4, symmetric=False),
    Layout("gptq", size=64, form="gptq"),
    Layout("gptq", symmetric=False, form="gptq"),
    Layout("gptq", size=0, symmetric=False, form="gptq_v2"),
    Layout("gptq", 4, size=16, form="gptq"),
    Layout("awq", 4, symmetric=False, form="gemm"),
    Layout("awq", 4, size=0, symmetric=False, form="GEMM"),
    Layout("auto-round", 4, symmetric=False, form="auto_round:auto_gptq"),
    Layout("auto-round", 4, symmetric=False, form="auto_round:auto_awq"),
)
IN_ALL = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def model_of(family: str = "llama", **options: Any) -> Any:
    """Weights of a size at which features in 16 bits a group move no logit past another."""
    made = tiny_model(family, hidden_size=64, intermediate_size=128, **options)
    fill(made, 0, std=0.2)
    return made


@torch.inference_mode()
def greedy(hf: Any, ids: list[int], count: int) -> list[int]:
    made = hf.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return made[0, len(ids) :].tolist()


def edited(place: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})


def dense(layer: GroupLinear) -> Tensor:
    return layer.matrix.dense()[layer.start : layer.start + layer.out_features]


@pytest.mark.slow(but=["compressed-tensors-pack-quantized-8-32-symmetric-float16"])
@IN_ALL
def test_weights_ids_and_perplexity_are_those_of_the_unpacked_model(layout: Layout, tmp_path: Path) -> None:
    stock = write_grouped(tmp_path, model_of("qwen2" if layout.bits == 4 else "llama"), layout)
    text = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        logprobs = stock(torch.tensor([text])).logits[0].log_softmax(-1)
    right = logprobs[torch.arange(59), text[1:]].mean()
    with shoal.load(tmp_path, "suffix") as model:
        assert model.loaded["target"]["passes"] == "C layers"  # tests pack no floats
        stored = model.loaded["target"]["weights"]
        assert stored.startswith("14 in groups")
        assert stored.endswith(f"; quantised by {layout.method}")
        layers = {n: m for n, m in model.target.hf.named_modules() if isinstance(m, GroupLinear)}
        assert len(layers) == 14
        for name, layer in layers.items():
            assert torch.equal(dense(layer), stock.get_submodule(name).weight)
        for lookahead in ("off", 3):
            found = model.generate(PROMPTS, 3, temperature=0, max_new_tokens=24, eos=(), lookahead=lookahead)
            assert set(found.stats.executors["target"]) == {"C layers"}
            assert (found.stats.drafted > 0) is (lookahead == 3)
            for prompt, output in zip(PROMPTS, found, strict=True):
                assert [list(sample.token_ids) for sample in output.samples] == [greedy(stock, prompt, 24)] * 3
        (ours,) = token_logprobs(model.target, [(text[:1], text[1:])])
        assert sum(ours) / 59 == pytest.approx(float(right), abs=2e-4)


def test_a_word_of_awq_holds_outputs_in_its_own_order() -> None:
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    assert grouped_checkpoints._in_order(grouped_checkpoints._numbers(word, 4)).tolist() == [list(range(8))]


def with_zero_points_of_0(place: Path, layout: Layout) -> Any:
    """A checkpoint with groups whose weights are all positive, in one output of four."""
    model = model_of()
    with torch.no_grad():
        model.get_submodule(Q).weight[::4, :16].abs_()
    return write_grouped(place, model, layout)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("form", "writer"), [("gptq", "gptqmodel:5.8.0"), ("gptq_v2", "gptqmodel:5.8.0"), ("gptq_v2", "")])
def test_zero_points_of_0_are_read_as_their_writer_stores_them(form: str, writer: str, bits: int, tmp_path: Path) -> None:
    """gptqmodel's one borrows from the zero point beside it: read each by itself, that would be one less."""
    layout = Layout("gptq", bits, size=16, symmetric=False, form=form, writer=writer)
    stock = with_zero_points_of_0(tmp_path, layout)
    if bits == 8:  # a text in the place of a list
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"]["meta"] = {"quantizer": writer}
        (tmp_path / "config.json").write_text(json.dumps(config))
    with shoal.load(tmp_path, "suffix") as found:
        for name, layer in found.target.hf.named_modules():
            if isinstance(layer, GroupLinear):
                assert torch.equal(dense(layer), stock.get_submodule(name).weight)


@by_no_package
@pytest.mark.parametrize("writer", ["", "auto_gptq:0.7.1"])
def test_zero_points_of_0_of_other_writers_are_refused(writer: str, tmp_path: Path) -> None:
    """Two readings of them differ. Where none is 0 they agree."""
    with_zero_points_of_0(tmp_path / "zero", Layout("gptq", 4, size=16, symmetric=False, form="gptq"))
    write_grouped(tmp_path / "none", model_of(), Layout("gptq", 4, size=16, form="gptq"))
    for place in (tmp_path / "zero", tmp_path / "none"):
        config = json.loads((place / "config.json").read_text())
        config["quantization_config"]["meta"] = {"quantizer": writer}
        (place / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"of its {Q} a zero point is 0, which programs store in several ways"):
        shoal.load(tmp_path / "zero")
    with shoal.load(tmp_path / "none") as model:
        assert model.loaded["target"]["weights"].startswith("14 in groups")


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ("gptq_v2", {"checkpoint_format": None, "format": "gptq_v2"}),
        ("gptq_v2", {"format": "gptq"}),
        ("gptq_v2", {"checkpoint_format": "GPTQ_V2"}),
        ("gptq", {"checkpoint_format": None}),
        ("gptq", {"checkpoint_format": None, "format": "gptq", "pack_dtype": "int32", "is_marlin_format": False}),
        ("gptq", {"desc_act": True, "static_groups": False, "lm_head": False, "sym": True}),
        ("gptq", {"desc_act": True, "group_size": -1}),
    ],
)
def test_entries_that_name_the_format_of_gptq(form: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """By whichever entry a release names it; what the tensors say themselves is read from them."""
    layout = Layout("gptq", size=0 if fields.get("group_size") else 32, symmetric=False, form=form)
    stock = changed_entry(tmp_path, fields, layout)
    with shoal.load(tmp_path, "suffix") as found:
        layers = {n: m for n, m in found.target.hf.named_modules() if isinstance(m, GroupLinear)}
        assert len(layers) == 14
        assert all(torch.equal(dense(layer), stock.get_submodule(name).weight) for name, layer in layers.items())


def changed_entry(place: Path, fields: dict[str, Any], layout: Layout) -> Any:
    """Changes entries of the quantization_config; None takes one away. Returns the model that is meant."""
    stock = write_grouped(place, model_of(), layout)
    config = json.loads((place / "config.json").read_text())
    entry = {**config["quantization_config"], **fields}
    config["quantization_config"] = {name: value for name, value in entry.items() if value is not None}
    (place / "config.json").write_text(json.dumps(config))
    return stock


@pytest.mark.parametrize("method", ["gptq", COMPRESSED])
def test_layers_of_several_sizes_in_one_checkpoint(method: str, tmp_path: Path) -> None:
    """Overrides by module (`dynamic`), or several groups of schemes with layers left out (`ignore`): each as its tensors say."""
    many = "gptq" if method == "gptq" else "pack-quantized"
    layouts = {
        "q_proj": Layout(method, 4, size=16, symmetric=False, form="gptq_v2" if method == "gptq" else many),
        "down_proj": Layout(method, 8, size=64, form="gptq_v2" if method == "gptq" else "int-quantized"),
        "proj": Layout(method, 8, size=0, form="gptq_v2" if method == "gptq" else many),
    }
    left_out = "model.layers.0.self_attn.k_proj"
    model, first = model_of(), True
    tensors: dict[str, Tensor] = {}
    for end, layout in layouts.items():
        others = [each for each in layouts if each != end and len(each) > len(end)]

        def takes(name: str, end: str = end, others: list[str] = others) -> bool:
            return name != left_out and name.endswith(end) and not any(name.endswith(each) for each in others)

        model = write_grouped(tmp_path, model, layout, takes)
        stored = load_file(tmp_path / "model.safetensors")
        taken = [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and takes(name)]
        tensors |= {name: each for name, each in stored.items() if first or name.rpartition(".")[0] in taken}
        for name in taken:
            if f"{name}.weight" not in stored:
                tensors.pop(f"{name}.weight", None)
        first = False
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    if method == "gptq":
        entry = config["quantization_config"]
        entry["dynamic"] = {r"+:.*\.q_proj": {"bits": 4, "group_size": 16}, r"-:.*\.0\.self_attn\.k_proj": {}}
    else:
        entry = layouts["proj"].config | {"format": "mixed-precision", "ignore": ["lm_head", left_out, "re:.*norm"]}
        entry["config_groups"] = {
            f"group_{i}": layout.config["config_groups"]["group_0"] | {"targets": [f"re:.*{end}$"], "format": layout.form}
            for i, (end, layout) in enumerate(layouts.items())
        }
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    with shoal.load(tmp_path, "suffix") as found:
        layers = {n: m for n, m in found.target.hf.named_modules() if isinstance(m, GroupLinear)}
        assert len(layers) == 13
        assert left_out not in layers
        for name, layer in layers.items():
            assert torch.equal(dense(layer), model.get_submodule(name).weight), name
        assert torch.equal(found.target.hf.get_submodule(left_out).weight, model.get_submodule(left_out).weight)
        said = found.generate(PROMPTS, 2, temperature=0, max_new_tokens=24, eos=(), lookahead=3)
    for prompt, output in zip(PROMPTS, said, strict=True):
        assert [list(sample.token_ids) for sample in output.samples] == [greedy(model, prompt, 24)] * 2


def test_layers_in_groups_and_a_head_in_floats_make_one_call_of_the_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "cpu", lambda: formats.Cpu(packs=frozenset({torch.float32})))
    stock = write_grouped(tmp_path, model_of(), LAYOUTS[0])
    with shoal.load(tmp_path, "self:int4") as model:
        assert model.loaded["target"]["passes"] == "C decoder"
        found = model.generate(PROMPTS, 3, temperature=0, max_new_tokens=24, eos=(), lookahead=3)
        assert set(found.stats.executors["target"]) == {"C decoder"}
        assert 0 < found.stats.accepted < found.stats.drafted
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert [list(sample.token_ids) for sample in output.samples] == [greedy(stock, prompt, 24)] * 3


@pytest.mark.parametrize("family", [True, False])
def test_what_the_decoder_does_not_take_is_computed_by_the_modules(family: bool, tmp_path: Path) -> None:
    """By the same groups: another family than the decoder's, or queries in groups beside keys in floats."""
    if family:
        stock = write_grouped(tmp_path, model_of("olmo2"), LAYOUTS[2])
    else:
        stock = write_grouped(tmp_path, model_of(), LAYOUTS[0], lambda name: "lm_head" not in name and "k_proj" not in name)
    with shoal.load(tmp_path, "suffix") as model:
        if family:
            assert model.loaded["target"]["weights"].startswith("14 in groups")
        else:
            assert model.target.absent["C decoder"] == "its queries, keys and values are stored in several formats"
        found = model.generate(PROMPTS, 2, temperature=0, max_new_tokens=24, eos=(), lookahead=3)
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert [list(sample.token_ids) for sample in output.samples] == [greedy(stock, prompt, 24)] * 2


def test_features_stay_in_float32_where_that_is_asked_for(tmp_path: Path) -> None:
    stock, logits = write_grouped(tmp_path, model_of(), LAYOUTS[0]), []
    for options, why in (({}, "16 bits"), ({"dtype": "float32"}, "as asked")):
        with shoal.load(tmp_path, **options) as model:
            assert why in model.target.notes["dtype"]
            layers = [each for each in model.target.hf.modules() if isinstance(each, GroupLinear)]
            assert {layer.matrix.exact for layer in layers} == {bool(options)}
            logits.append(model.target.plain_logits(torch.tensor([PROMPTS[0]])).detach())
    assert 0 < float((logits[0] - logits[1]).abs().max()) < 1e-3
    with torch.inference_mode():
        torch.testing.assert_close(logits[1], stock(torch.tensor([PROMPTS[0]])).logits, atol=1e-5, rtol=1e-5)


def test_a_quantised_head_and_a_quantised_drafter(tmp_path: Path) -> None:
    layout = Layout("gptq", form="gptq")
    stock = write_grouped(tmp_path / "target", model_of(), layout, lambda _name: True)
    write_grouped(tmp_path / "drafter", model_of(layers=1), layout, lambda _name: True)
    with shoal.load(tmp_path / "target", tmp_path / "drafter") as model:
        assert model.loaded["target"]["passes"] == model.loaded["draft"]["passes"] == "C decoder"
        found = model.generate(PROMPTS, 2, temperature=0, max_new_tokens=24, eos=(), lookahead=3)
    assert found.stats.drafted > 0
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert [list(sample.token_ids) for sample in output.samples] == [greedy(stock, prompt, 24)] * 2


def written(place: Path, layout: Layout, **fields: Any) -> Path:
    """A checkpoint whose quantization_config, or the only scheme of it, says something else."""
    write_grouped(place, model_of(), layout)
    config = json.loads((place / "config.json").read_text())
    entry = config["quantization_config"]
    scheme = entry.get("config_groups", {}).get("group_0", {})
    for name, value in fields.items():
        owner = next((each for each in (scheme.get("weights", {}), scheme) if name in each), entry)
        owner[name] = value
    (place / "config.json").write_text(json.dumps(config))
    return place


@by_no_package
@pytest.mark.parametrize(
    ("layout", "fields", "reason"),
    [
        (0, {"input_activations": {"num_bits": 8, "type": "int"}}, "W8A8: its input_activations are quantised too"),
        (0, {"strategy": "tensor"}, "scales are by tensor"),
        (0, {"num_bits": 6}, "int of 6 bits"),
        (0, {"type": "float"}, "float of 8 bits"),
        (0, {"format": "marlin-24"}, "format is marlin-24"),
        (0, {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (0, {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config"),
        (0, {"quantization_status": "frozen"}, "quantization_status is frozen"),
        (0, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        (6, {"bits": 3}, "3 bits"),
        (6, {"bits": 2}, "2 bits"),
        (6, {"checkpoint_format": "marlin"}, "marlin is another order"),
        (6, {"is_marlin_format": True}, "marlin is another order"),
        (6, {"checkpoint_format": None, "format": "bitblas"}, "bitblas is another order"),
        (6, {"pack_dtype": "int16"}, "pack_dtype int16 is another order"),
        (6, {"pack_dtype": "torch.int64"}, "pack_dtype int64 is another order"),
        (10, {"version": None, "format": "gemv_fast"}, "its version gemv_fast is another order"),
        (10, {"backend": "llm-awq"}, "its version llm-awq is another order"),
        (10, {"pack_dtype": "int16"}, "pack_dtype int16 is another order"),
        (10, {"version": "gemv"}, "its version gemv is another order"),
        (10, {"bits": 8}, "8 bits, and AWQ's order is that of 4"),
        (12, {"packing_format": "auto_round:marlin"}, "packing_format auto_round:marlin is another order"),
        (12, {"act_bits": 8}, "or quantises features"),
        (12, {"bits": 3}, "3 bits"),
        (13, {"bits": 8}, "8 bits, and AWQ's order is that of 4"),
    ],
)
def test_other_forms_are_refused_by_name_with_advice(
    layout: int, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    place, method = written(tmp_path, LAYOUTS[layout], **fields), LAYOUTS[layout].method
    with pytest.raises(UnsupportedModel, match=rf"quantised by {method}, and cannot be read here: .*{reason}.*quantize="):
        shoal.load(place)


@by_no_package
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bfloat16"}, "they compute in float32, and dtype"),
        ({"strict": True}, "strict"),
        ({"compile": "off"}, "compile='off'"),
    ],
)
def test_options_that_the_groups_do_not_take_are_named(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_grouped(tmp_path, model_of(), LAYOUTS[0])
    with pytest.raises(UnsupportedModel, match=rf"do not take it \({reason}.*compressed"):
        shoal.load(tmp_path, **options)


@pytest.mark.parametrize(
    ("layout", "change", "reason"),
    [
        (
            7,
            lambda t: t[f"{Q}.g_idx"].copy_(t[f"{Q}.g_idx"].clamp(min=1)),
            f"of its {Q} the groups of inputs are not 32 inputs",
        ),
        (0, lambda t: t.update({f"{Q}.weight_g_idx": torch.full((64,), -1)}), f"of its {Q} the groups of inputs are not 32"),
        (6, lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:, :8].clone()}), f"of its {Q} the weights are .* scales"),
        (6, lambda t: t.pop(f"{Q}.qzeros"), f"of its {Q} the tensors are not all there"),
        (10, lambda t: t.pop(f"{Q}.qzeros"), f"of its {Q} the tensors are not all there"),
        (
            10,
            lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"][:, :4].clone()}),
            f"of its {Q} the weights are .* scales",
        ),
        (0, lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"][:, :9].clone()}), "no whole number"),
        (0, lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:1, :1].flatten()}), "by group or by channel"),
        (0, lambda t: t.update({"model.norm.weight_scale": torch.ones(1)}), "linear layers only, and its model.norm"),
        (0, lambda t: [t.pop(name) for name in list(t) if "scale" in name], "it holds no weight_scale"),
    ],
)
def test_tensors_that_the_kernels_do_not_know_are_refused(
    layout: int, change: Callable[[dict[str, Tensor]], None], reason: str, tmp_path: Path
) -> None:
    write_grouped(tmp_path, model_of(), LAYOUTS[layout])
    edited(tmp_path, change)
    with pytest.raises(UnsupportedModel, match=reason):
        shoal.load(tmp_path)


def test_tensors_that_a_config_calls_for_are_missed(tmp_path: Path) -> None:
    """An order of inputs, or zero points: without them the weights would be read as others."""
    gptq = Layout("gptq", symmetric=False, form="gptq_v2")
    for layout, part, fields in (
        (gptq, "g_idx", {"desc_act": True}),
        (Layout(COMPRESSED, symmetric=False), "weight_zero_point", {}),
        (LAYOUTS[0], "weight_g_idx", {"actorder": "group"}),
        (LAYOUTS[0], "weight_g_idx", {"actorder": "dynamic"}),
    ):
        place = written(tmp_path / f"{part}{len(fields)}{fields.get('actorder')}", layout)
        tensors = load_file(place / "model.safetensors")
        tensors.pop(f"{Q}.{part}", None)
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((place / "config.json").read_text())
        entry = config["quantization_config"]
        entry.get("config_groups", {}).get("group_0", {"weights": entry})["weights"].update(fields)
        (place / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModel, match=f"the tensor {part} is not there, which its config calls for"):
            shoal.load(place)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("gptq", 4, size=16, symmetric=False, form="gptq_v2"),
        Layout("gptq", size=32, form="gptq"),
        Layout(COMPRESSED, 4),
        Layout(COMPRESSED, symmetric=False),
    ],
    ids=lambda layout: layout.name,
)
def test_inputs_in_the_order_of_their_activations_are_gathered(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ with act-order (`desc_act`, `actorder: group`): a group's inputs lie anywhere, as its tensor says.

    Read as if they lay side by side, the weights would be others.
    """
    stock = write_grouped(tmp_path, model_of(), replace(layout, order=3))
    with shoal.load(tmp_path, "suffix") as model:
        assert model.loaded["target"]["passes"] == "modules"
        layers = {n: m for n, m in model.target.hf.named_modules() if isinstance(m, ReorderedLinear)}
        assert len(layers) == 14
        for name, layer in layers.items():
            weight = torch.empty(stock.get_submodule(name).weight.shape)
            weight[:, layer.order] = dense(layer.linear)
            assert torch.equal(weight, stock.get_submodule(name).weight)
        made = model.generate(PROMPTS, 2, temperature=0, max_new_tokens=24, eos=(), lookahead=3)
        assert made.stats.drafted > 0
    for prompt, output in zip(PROMPTS, made, strict=True):
        assert [list(sample.token_ids) for sample in output.samples] == [greedy(stock, prompt, 24)] * 2
    with pytest.raises(UnsupportedModel, match="no copy in 4 bits: a linear layer is a ReorderedLinear"):
        shoal.load(tmp_path, "self:int4")
    monkeypatch.setattr(ReorderedLinear, "forward", lambda self, x: self.linear(x))
    with shoal.load(tmp_path) as model:
        logits = model.target.plain_logits(torch.tensor([PROMPTS[0]]))
    assert (logits - stock(torch.tensor([PROMPTS[0]])).logits).abs().max() > 0.1


def test_groups_of_inputs_that_the_kernels_cannot_part_are_refused(tmp_path: Path) -> None:
    write_grouped(tmp_path, model_of(), Layout(COMPRESSED, size=8))
    with pytest.raises(UnsupportedModel, match="a group has 8 inputs, no multiple of 16"):
        shoal.load(tmp_path)


def test_a_head_that_is_tied_to_the_embedding_is_refused_where_it_is_quantised(tmp_path: Path) -> None:
    write_grouped(tmp_path, model_of(), LAYOUTS[0], lambda _name: True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="head is tied"):
        shoal.load(tmp_path)


def test_a_checkpoint_in_groups_cannot_be_saved(tmp_path: Path) -> None:
    write_grouped(tmp_path, model_of(), LAYOUTS[0])
    with shoal.load(tmp_path) as model, pytest.raises(shoal.RequestError, match="cannot be saved"):
        model.target.hf.save_pretrained(tmp_path / "again")
