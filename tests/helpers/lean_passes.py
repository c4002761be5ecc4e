"""Small models of all shapes that lean passes compute, and caches that they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.runner import Runner
from shoal.testing import VOCABULARY, tiny_model
from shoal.types.requests import Prefix
from tree_masks import path_of

SLIDING = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one key head": ("llama", {"num_key_value_heads": 1, "head_dim": 12}),
    "llama3 rope": ("llama", rope("llama3", **LLAMA3)),
    "linear rope": ("llama", rope("linear", factor=4.0)),
    "yarn rope": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "mistral": ("mistral", {}),
    "mistral with a window": ("mistral-sliding", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": ("qwen2-sliding", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 with windows": ("qwen3", SLIDING),
}


@cache
def original(name: str) -> Any:
    """A model that nobody changes."""
    architecture, options = MODELS[name]
    model = tiny_model(architecture, **{"max_position_embeddings": 512, **options})
    if architecture == "qwen3":  # unlike the other norms
        for each in model.model.layers:
            each.self_attn.q_norm.variance_epsilon = each.self_attn.k_norm.variance_epsilon = 0.3
    return model


class Rows:
    """What slots should hold, and each fed token's logits beside those of a plain forward of its whole history."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self.runner, self.tokens = runner, {slot: [] for slot in range(6)}  # type: dict[int, list[int]]
        self.generator = torch.Generator().manual_seed(seed)
        self.histories: list[list[int]] = []
        self.logits: list[Tensor] = []
        runner.memory.reserve(6, 150, 100)
        runner.cache.clear()

    def ids(self, count: int) -> list[int]:
        return [int(token) for token in torch.randint(0, VOCABULARY, (count,), generator=self.generator)]

    def feed(self, slots: Sequence[int], counts: Sequence[int], trees: Sequence[Sequence[int]] | None = None) -> None:
        blocks = [self.ids(count) for count in counts]
        tokens = torch.tensor([[*block, *[0] * (max(counts) - len(block))] for block in blocks])
        logits = self.runner.feed(slots, tokens, counts, parents=trees)
        for row, (slot, block) in enumerate(zip(slots, blocks, strict=True)):
            tree = range(-1, len(block) - 2) if trees is None else trees[row]
            for column in range(len(block)):
                self.histories.append([*self.tokens[slot], *(block[c] for c in path_of(tree, column))])
                self.logits.append(logits[row, column])
            if trees is None:
                self.tokens[slot] += block
            else:
                path = path_of(tree, len(block) - 1)
                self.runner.cache.keep(slot, len(self.tokens[slot]), path)
                self.tokens[slot] += [block[column] for column in path]

    def rollback(self, slot: int, by: int) -> None:
        del self.tokens[slot][-by:]
        self.runner.cache.rollback(slot, len(self.tokens[slot]))

    def share(self, base: int, chunks: Sequence[int], slots: Sequence[int]) -> None:
        """A prompt fed to the shared store in chunks, and the slots whose rows begin with it."""
        prompt = [self.ids(count) for count in chunks]
        prefix = Prefix(base, sum(chunks))
        for i, chunk in enumerate(prompt):
            self.runner.feed_prefix(prefix, sum(chunks[:i]), torch.tensor([chunk]))
        for slot in slots:
            self.runner.cache.enter(slot, prefix)
            self.tokens[slot] = [token for chunk in prompt for token in chunk]

    def error(self, hf: Any) -> float:
        """The largest difference to a model's own logits, in their standard deviations."""
        truth = own_logits(hf, self.histories)
        return float(((torch.stack(self.logits).double() - truth).abs().max() / truth.std()).nan_to_num(torch.inf))


@torch.inference_mode()
def own_logits(hf: Any, histories: Sequence[Sequence[int]]) -> Tensor:
    """Of the last token of each, by plain forwards of several histories of equal length, [histories, vocab] float64."""
    out: list[Tensor] = [torch.empty(0)] * len(histories)
    for length in {len(history) for history in histories}:
        these = [i for i, history in enumerate(histories) if len(history) == length]
        logits = hf(torch.tensor([histories[i] for i in these]), use_cache=False).logits[:, -1]
        for i, row in zip(these, logits.double(), strict=True):
            out[i] = row
    return torch.stack(out)


def life(rows: Rows) -> None:
    """What engines do, and the edges of it."""
    rows.feed([4, 0, 2], [3, 70, 11])  # slots out of order, and a prompt longer than the kernel takes
    rows.feed([0, 1, 2], [1, 64, 2])
    rows.feed([4, 0, 2], [5, 1, 2])
    rows.rollback(4, 3)
    rows.rollback(0, 40)
    rows.feed([0, 2, 4], [2, 9, 1])
    rows.share(3, [40, 30], [3, 5])
    rows.share(80, [1], [1])
    rows.feed([5, 3, 4, 1], [2, 3, 1, 6])
    rows.feed([1, 2, 3], [1, 1, 1])
    rows.rollback(3, 2)
    rows.feed([3, 0, 5], [6, 1, 10], [[-1, -1, 0, 0, 3], [], [-1, 0, 1, 2, 3, 4, 2, 6, 7]])  # longer than a window of 8
    rows.feed([3, 0, 5], [2, 3, 4], [[-1], [-1, -1], [-1, 0, 0]])
    rows.feed([0, 3, 4, 5], [1, 1, 1, 1])


PROMPTS = [[72, 101, 108, 108, 111], [40], [5, 9, 200, 31] * 20]


def noise(weight: Tensor) -> Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * 0.3


def layer(hf: Any) -> Any:
    return hf.model.layers[1]


@torch.no_grad()
def loaded_state(hf: Any, assign: bool = False) -> None:
    state = {name: tensor.detach().clone() + noise(tensor) for name, tensor in hf.state_dict().items()}
    if hf.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    hf.load_state_dict(state, assign=assign)


@torch.no_grad()
def stepped(hf: Any) -> None:
    for weight in hf.parameters():
        weight.add_(noise(weight))


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "queries": lambda hf: layer(hf).self_attn.q_proj.weight.data.copy_(noise(layer(hf).self_attn.q_proj.weight)),
    "values": lambda hf: layer(hf).self_attn.v_proj.weight.data.mul_(2),
    "out": lambda hf: layer(hf).self_attn.o_proj.weight.data.mul_(2),
    "gate": lambda hf: layer(hf).mlp.gate_proj.weight.data.zero_(),
    "down": lambda hf: layer(hf).mlp.down_proj.weight.data[3].fill_(1),
    "bias": lambda hf: layer(hf).self_attn.k_proj.bias.data.add_(noise(layer(hf).self_attn.k_proj.bias)),
    "norm": lambda hf: layer(hf).input_layernorm.weight.data.mul_(1.5),
    "last norm": lambda hf: hf.model.norm.weight.data.copy_(noise(hf.model.norm.weight)),
    "embedding": lambda hf: hf.model.embed_tokens.weight.data.mul_(0.5),
    "head": lambda hf: hf.lm_head.weight.data.neg_(),
    "state": loaded_state,
    "optimizer": stepped,
}
REPLACED: dict[str, Callable[[Any], Any]] = {
    "data": lambda hf: setattr(layer(hf).self_attn.q_proj.weight, "data", noise(layer(hf).self_attn.q_proj.weight)),
    "data of a layer's own": lambda hf: setattr(layer(hf).mlp.up_proj.weight, "data", noise(layer(hf).mlp.up_proj.weight)),
    "parameter": lambda hf: setattr(layer(hf).mlp.down_proj, "weight", nn.Parameter(noise(layer(hf).mlp.down_proj.weight))),
    "parameter of several": lambda hf: setattr(
        layer(hf).self_attn.v_proj, "weight", nn.Parameter(noise(layer(hf).self_attn.v_proj.weight))
    ),
    "data of a bias": lambda hf: setattr(layer(hf).self_attn.k_proj.bias, "data", noise(layer(hf).self_attn.k_proj.bias)),
    "bias": lambda hf: setattr(layer(hf).self_attn.q_proj, "bias", nn.Parameter(noise(layer(hf).self_attn.q_proj.bias))),
    "first bias": lambda hf: setattr(layer(hf).mlp.up_proj, "bias", nn.Parameter(noise(layer(hf).mlp.up_proj.weight[:, 0]))),
    "no bias": lambda hf: setattr(layer(hf).self_attn.q_proj, "bias", None),
    "norm": lambda hf: setattr(layer(hf).input_layernorm, "weight", nn.Parameter(noise(layer(hf).input_layernorm.weight))),
    "data of a norm": lambda hf: setattr(hf.model.norm.weight, "data", noise(hf.model.norm.weight)),
    "strided norm": lambda hf: setattr(hf.model.norm.weight, "data", noise(torch.empty(hf.config.hidden_size, 2))[:, 1]),
    "head": lambda hf: setattr(hf.lm_head, "weight", nn.Parameter(noise(hf.lm_head.weight))),
    "state": lambda hf: loaded_state(hf, assign=True),
}
WRITES = {**{f"in place: {name}": change for name, change in IN_PLACE.items()},
          **{f"replaced: {name}": change for name, change in REPLACED.items()}}  # fmt: skip
