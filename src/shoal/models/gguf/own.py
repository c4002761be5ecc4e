"""The model of a GGUF file on shoal's own kernels, where they know its family and formats.

Quantised weights are groups, as the file has them, and everything else is float32: the model is the
one that Transformers would compute with the file's weights unpacked, and the promise for a
directory holds. A file in 16 or 32 bits is loaded as a directory is. Other files are computed by
llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shoal.errors import UnsupportedModel
from shoal.models import formats
from shoal.models.gguf import library
from shoal.models.gguf.contents import (
    BLOCKS,
    FACTORS,
    Header,
    TensorPlace,
    divide,
    groups_of,
    rotary_parameters,
)
from shoal.models.quantize import cannot_save
from shoal.models.weights import by_facts, lay_out
from shoal.models.weights.groups import GroupLinear, Groups
from shoal.native.build import missing

FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
"""The configs of Transformers by the architecture that a file names."""
LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
"""The names of a layer's parts, in Transformers and in files."""
FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""The formats without blocks, by their numbers of `ggml_type`."""


def own_model(file: Path, device: str, exact: bool) -> tuple[Any | None, Mapping[str, str]]:
    """Returns the Transformers model of a file and the notes of its runner.

    Returns None and the note "reason" where llama.cpp computes the file.

    Args:
        device: "cpu", or "auto" for the devices that llama.cpp was built for.
        exact: True for products of features that are not rounded.
    """
    if missing():
        return None, {"reason": f"there are no kernels in C: {missing()}"}
    if device != "cpu" and (device != "auto" or library().llama_supports_gpu_offload()):
        reason = f"device={device!r}, and llama.cpp was built for more than the CPU"
        return None, {"reason": reason}
    try:
        reader = _Reader(file, exact)
        return reader.model(), {"dtype": reader.why, "weights": reader.formats}
    except (_NotOurs, UnsupportedModel) as reason:
        return None, {"reason": str(reason)}  # llama.cpp tells of damage, too


ROUNDED = "products with the file's weights take features in 16 bits a group"


class _NotOurs(Exception):
    """The reason why the kernels do not compute a file."""


class _Reader:
    """Reads the model of a file. Methods raise _NotOurs."""

    def __init__(self, file: Path, exact: bool) -> None:
        self._file, self._header, self._exact = file, Header(file), exact
        self._family = str(self._header.value("general.architecture"))
        self._left = set(self._header.tensors)
        self.why = "float32: as asked" if exact else f"float32: {ROUNDED}"
        self._dtype = torch.float32

    def model(self) -> Any:
        """Makes the model."""
        config = self._config()
        stored = FLOATS.get(self._header.tensors["token_embd.weight"].kind)
        if stored is not None:
            self._dtype, self.why = self._stored(stored, config.hidden_size)
        with torch.device("meta"):
            hf = transformers.AutoModelForCausalLM.from_config(config, dtype=self._dtype)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for number, layer in enumerate(hf.model.layers):
            for name, stem in LINEARS.items():
                sizes = layer.get_submodule(name)
                turned = heads.get(stem) if self._family == "llama" else None
                linear = self._linear(f"blk.{number}.{stem}", sizes, turned)
                parent, _, last = name.rpartition(".")
                setattr(layer.get_submodule(parent), last, linear)
            for name, stem in NORMS.items():
                if f"blk.{number}.{stem}.weight" in self._left:
                    self._norm(layer.get_submodule(name), f"blk.{number}.{stem}")
        self._norm(hf.model.norm, "output_norm")
        table = self._matrix("token_embd", config.hidden_size, config.vocab_size)
        embedding = table.dense() if isinstance(table, Groups) else table
        hf.model.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)
        if "output.weight" in self._left:
            hf.lm_head = self._linear("output", hf.lm_head)
        elif isinstance(table, Groups):
            hf.lm_head = GroupLinear(table, exact=self._exact)
        else:
            hf.lm_head.weight = hf.model.embed_tokens.weight
        hf.model.rotary_emb = type(hf.model.rotary_emb)(config)
        if FACTORS in self._left and self._family == "llama":  # llama.cpp reads it of no other
            divide(hf.model.rotary_emb, self._floats(FACTORS, torch.float32))
        if self._left:
            raise _NotOurs(f"its tensor {min(self._left)} is none that the kernels know")
        if any(parameter.is_meta for parameter in hf.parameters()):
            raise _NotOurs("it lacks tensors of its family")
        if stored is not None:
            lay_out(hf, by_facts)
        hf.save_pretrained = cannot_save
        return hf.eval()

    def _stored(self, stored: torch.dtype, width: int) -> tuple[torch.dtype, str]:
        """Returns the number format of a file without groups, and the reason."""
        if self._exact:
            return torch.float32, "float32: as asked"
        return formats.number_format(stored, width, formats.cpu(), kernels=True)

    @property
    def formats(self) -> str:
        """The formats of the matrices and their numbers, in words."""
        kinds = Counter(
            BLOCKS[place.kind].name if place.kind in BLOCKS else str(FLOATS[place.kind])[6:]
            for name, place in self._header.tensors.items()
            if "norm" not in name and name.endswith(".weight") and name != FACTORS
        )
        return ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())

    def _config(self) -> Any:
        header, family = self._header, self._family
        if family not in FAMILIES:
            raise _NotOurs(f"the kernels do not know the family {family}")
        for key in ("expert_count", "attention.sliding_window"):
            if header.value(f"{family}.{key}") not in (None, 0):
                raise _NotOurs(f"it has {family}.{key}")

        def number(key: str, otherwise: float | None = None) -> Any:
            value = header.value(f"{family}.{key}")
            if value is None and (otherwise is None or header.has(f"{family}.{key}")):
                raise _NotOurs(f"it has no number {family}.{key}")
            return otherwise if value is None else value

        width, heads = number("embedding_length"), number("attention.head_count")
        dim = number("attention.key_length", width // heads)
        if dim != number("attention.value_length", dim) or dim != number(
            "rope.dimension_count", dim
        ):
            raise _NotOurs("its heads are of several sizes")
        context = number("context_length")
        ends = _ends(self._file)
        return FAMILIES[family](
            vocab_size=self._rows("token_embd.weight", width),
            hidden_size=width,
            intermediate_size=number("feed_forward_length"),
            num_hidden_layers=number("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=number("attention.head_count_kv", heads),
            head_dim=dim,
            max_position_embeddings=context,
            rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
            rope_parameters=rotary_parameters(header, family, context),
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=ends or None,
            pad_token_id=None,
            name_or_path=str(self._file),
        )

    def _place(self, name: str) -> TensorPlace:
        """Returns the place of a tensor that the file must have."""
        place = self._header.tensors.get(name)
        if place is None:
            raise _NotOurs(f"it has no tensor {name}")
        if place.start + place.size > self._header.size:
            raise _NotOurs("the file ends before its tensors do")
        return place

    def _rows(self, name: str, inputs: int) -> int:
        """Returns the number of rows of a matrix."""
        place = self._place(name)
        if place.kind in FLOATS:
            return place.size // inputs // FLOATS[place.kind].itemsize
        block = BLOCKS.get(place.kind)
        if block is None:
            raise _NotOurs(f"the kernels do not know the format of its tensor {name}")
        if inputs % block.inputs:
            raise _NotOurs(f"a row of its tensor {name} ends inside a block")
        return place.size // (inputs // block.inputs * block.size)

    def _matrix(self, stem: str, inputs: int, outputs: int) -> Groups | Tensor:
        """Reads a matrix: in groups, or in floats as the matrix of the embeddings."""
        name = f"{stem}.weight"
        rows, kind = self._rows(name, inputs), self._header.tensors[name].kind
        if (kind in FLOATS) != (self._header.tensors["token_embd.weight"].kind in FLOATS):
            raise _NotOurs("only some of its matrices are quantised")
        _require_size(name, rows, outputs)
        if kind in FLOATS:
            return self._floats(name).view(rows, inputs)
        self._left.discard(name)
        return groups_of(kind, self._header.bytes_of(name), inputs)

    def _floats(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        kind = FLOATS.get(self._place(name).kind)
        if kind is None:
            raise _NotOurs(f"its tensor {name} is quantised")
        self._left.discard(name)
        return self._header.bytes_of(name).clone().view(kind).to(dtype or self._dtype)

    def _norm(self, module: Any, stem: str) -> None:
        weight = self._floats(f"{stem}.weight")
        _require_size(f"{stem}.weight", len(weight), len(module.weight))
        module.weight = nn.Parameter(weight, requires_grad=False)

    def _linear(self, stem: str, sizes: nn.Linear, heads: int | None = None) -> nn.Module:
        """Makes a layer.

        Args:
            sizes: a layer of the same sizes.
            heads: the number of heads whose rows a file of the family "llama" has in the order in
                which llama.cpp rotates them; None for others.
        """
        inputs, outputs, bias = sizes.in_features, sizes.out_features, None
        weight = self._matrix(stem, inputs, outputs)
        if f"{stem}.bias" in self._left:
            bias = self._floats(f"{stem}.bias")
            _require_size(f"{stem}.bias", len(bias), outputs)
        if heads is not None:
            order = torch.arange(outputs).view(heads, -1, 2).transpose(1, 2).flatten()
            weight = weight.rows(order) if isinstance(weight, Groups) else weight[order]
            bias = None if bias is None else bias[order]
        if isinstance(weight, Groups):
            return GroupLinear(weight, bias, self._exact)
        layer = nn.Linear(inputs, outputs, bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer


def _require_size(name: str, count: int, wanted: int) -> None:
    """Raises _NotOurs if a tensor has not as many rows, or numbers, as its layer."""
    if count != wanted:
        raise _NotOurs(f"its tensor {name} has {count} rows, and its layer {wanted}")


def _ends(file: Path) -> list[int]:
    """Returns the ids that end a text, as llama.cpp knows them."""
    lib = library()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    handle = lib.llama_model_load_from_file(str(file).encode(), params)
    if not handle:
        raise UnsupportedModel(f"{file}: llama.cpp cannot read its vocabulary")
    try:
        vocab = lib.llama_model_get_vocab(handle)
        count = lib.llama_vocab_n_tokens(vocab)
        return [i for i in range(count) if lib.llama_vocab_is_eog(vocab, i)]
    finally:
        lib.llama_model_free(handle)
