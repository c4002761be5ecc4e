"""EAGLE-3 heads draft token by token, with a ragged cache of their own.

They are a draft model (`shoal.drafting.model`) whose tokens have a state each. The draft model's
code draws tokens, verifies them by their q, and places rows and prompts. Only tokens whose state is
the target's stay in the cache: a drafted token was computed from the layer's own states, and is
computed again once it is accepted. A round's first pass feeds all tokens that were committed since
the last draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.drafting.distillation import Learner, Passes, drafted_passes
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import DraftInputs, Keeps
from shoal.drafting.shapes import shape_of
from shoal.drafting.trained_heads import (
    PromptStates,
    fill,
    in_format,
    kept_states,
    layers_and_width,
    once,
    read_config,
    read_tensors,
    require_kind,
    require_width,
    whole_number,
)
from shoal.drafting.tree_model import TreeDrafter
from shoal.errors import PairMismatch, RequestError, UnsupportedModel
from shoal.models.cache import Plan
from shoal.models.eagle3_layer import (
    FORM,
    Eagle3Heads,
    Eagle3Model,
    flattened,
    layer_config,
    published_layers,
)
from shoal.models.runner import Runner
from shoal.sampling.distributions import Scores
from shoal.types.requests import Row
from shoal.types.rounds import PrefillChunk
from shoal.types.trees import DraftTree, Verdict

FILES = ("model.safetensors", "pytorch_model.bin")
PENDING = 64
"""The number of committed tokens of a row in a round's first pass; older ones are fed before."""
FOLLOWED = 4
"""The number of drafted tokens from which heads learn while they follow their target."""
MAPS = ("d2t", "t2d")
VARIANT = "norm_before_fc"
"""The entry of config.json that changes the computation and is not supported."""


def load_eagle3(directory: Path, target: Runner) -> tuple[Eagle3Heads, tuple[int, ...]]:
    """Returns the heads in a directory, in the target's number format, and the layers they read.

    Raises:
        RequestError: there are no heads.
        ModelError: files are damaged or tensors are missing.
        PairMismatch: the heads belong to another target.
        UnsupportedModel: the heads have more than one layer, or tensors that EAGLE-3 for Llama does
            not have.
    """
    config = flattened(read_config(directory))
    require_kind("eagle3", directory, config)
    _require_eagle3(directory, config)
    stored = read_tensors(directory, *FILES)
    tensors = {
        _own_name(name): one
        for name, one in stored.items()
        if not name.startswith("verifier_")  # the target's own, in early files of speculators
    }
    if whole_number(config, directory, "num_hidden_layers", default=1) != 1:
        raise UnsupportedModel(
            f"{directory} has {config['num_hidden_layers']} layers: EAGLE-3 heads with one are "
            f"supported"
        )
    reads = _read_layers(directory, config, target)
    vocabulary = whole_number(config, directory, "vocab_size")
    require_width(directory, "a vocabulary", vocabulary, target, target.vocab_size)
    width = len(reads) * layers_and_width(target)[1]
    if (fc := tensors.get("fc.weight")) is not None:
        require_width(directory, f"{len(reads)} hidden states", fc.shape[-1], target, width)
    drafts = whole_number(config, directory, "draft_vocab_size", default=target.vocab_size)
    heads = _new_heads(
        directory, config, target, width, drafts, own="embed_tokens.weight" in tensors
    )
    unknown = sorted(tensors.keys() - {name for name, _ in heads.named_parameters()} - set(MAPS))
    if unknown:
        raise UnsupportedModel(
            f"{directory} has tensors that EAGLE-3 for Llama has not, for example {unknown[0]}"
        )
    layer = "layers.0." if any("layers.0." in name for name in stored) else "midlayer."
    fill(heads, tensors, directory, lambda name: name.replace("midlayer.", layer))
    heads.target_ids.copy_(target_ids(directory, tensors, drafts, target.vocab_size))
    return in_format(heads, target), reads


def _read_layers(directory: Path, config: dict[str, Any], target: Runner) -> tuple[int, ...]:
    """Returns the target's layers that heads read. Raises PairMismatch if it lacks one."""
    layers, _ = layers_and_width(target)
    reads = published_layers(config, layers)
    if not all(isinstance(layer, int) and 0 <= layer <= layers for layer in reads):
        raise PairMismatch(
            f"{directory} reads layers {list(reads)} and cannot draft for {target.name}, which "
            f"has {layers}"
        )
    return reads


def _new_heads(
    directory: Path, config: dict[str, Any], target: Runner, width: int, drafts: int, *, own: bool
) -> Eagle3Heads:
    """Returns heads of the config's shapes, without the stored weights.

    Args:
        directory: the place that errors name.
        width: the width of the hidden states that the heads read, side by side.
        drafts: the number of tokens that they draft.
        own: True if the heads have an embedding of their own; else they use the target's.

    Raises:
        RequestError: the config is not one of EAGLE-3 heads.
        PairMismatch: the target's embedding has another width.
    """
    embedding = None if own else target.hf.get_input_embeddings()
    try:
        heads = Eagle3Heads(layer_config(config), width, drafts, target.vocab_size, embedding)
    except Exception as error:  # Transformers has errors of its own
        raise RequestError(
            f"{directory}/config.json is no config of EAGLE-3 heads: {error}"
        ) from error
    if embedding is not None:
        stored = embedding.weight.shape[-1]
        require_width(directory, "a width", heads.config.hidden_size, target, stored)
    return heads


def _own_name(name: str) -> str:
    """Returns the name of a parameter that has another one in files of speculators or vLLM."""
    name = name.removeprefix("model.")
    return f"midlayer.{name[9:]}" if name.startswith("layers.0.") else name


def _require_eagle3(directory: Path, config: dict[str, Any]) -> None:
    """Raises UnsupportedModel if a config is that of other heads."""
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UnsupportedModel(
            f"{directory} has heads of speculators_model_type {kind!r}: 'eagle3' and "
            f"'dflash' are supported"
        )
    if config.get(VARIANT):
        raise UnsupportedModel(
            f"{directory}/config.json has {VARIANT}: EAGLE-3 without it is supported"
        )
    entries = {**config, **(config.get("eagle_config") or {})}
    for name, value in FORM.items():
        if entries.get(name) not in (None, value):
            raise UnsupportedModel(
                f"{directory}/config.json has {name}: {entries[name]}; EAGLE-3 with {value} is "
                f"supported"
            )


def target_ids(directory: Path, tensors: dict[str, Tensor], drafts: int, vocab_size: int) -> Tensor:
    """Returns the target's id for each id of the draft vocabulary, [draft vocabulary].

    Raises:
        PairMismatch: they are no ids of the target.
    """
    ids = torch.arange(drafts)
    if drafts == vocab_size and "d2t" not in tensors:
        return ids
    offsets = tensors.get("d2t")
    if offsets is None or offsets.shape != ids.shape:
        raise PairMismatch(
            f"{directory} needs d2t with an entry for each of the {drafts} tokens that it drafts"
        )
    ids = ids + offsets.long()
    if len(ids.unique()) != drafts or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise PairMismatch(
            f"{directory}: d2t does not map its tokens to as many of the target's {vocab_size}"
        )
    return ids


def layer_learner(heads: Any, reads: Sequence[int], count: int) -> Learner:
    """Returns heads with their passes.

    Args:
        heads: the heads: `Eagle3Heads`, or others of their form.
        reads: the target's layers whose hidden states they read.
        count: the number of drafted tokens from which they learn.
    """

    def passes(weights: Any, tokens: Tensor, states: Tensor) -> Passes:
        first = next(weights.parameters())
        return drafted_passes(weights, tokens, states.to(first.dtype), count)

    ids = getattr(heads, "target_ids", None)
    every = ids is None or len(ids) == heads.target_vocab
    return Learner(heads, passes, reads=reads, ids=None if every else ids)


class Eagle3Drafter(ModelDrafter):
    """A drafter that samples k tokens per row from the heads under the row's own sampling controls.

    Args:
        heads: the heads, shared by all engines: `Eagle3Heads`, or others of their form.
        reads: the target's layers whose hidden states they read.
        target: the target for which they draft.
        drawn: further arguments of `ModelDrafter`, from subclasses.
    """

    name = "eagle3"
    observes_plain_rounds = True

    def __init__(self, heads: Any, reads: Sequence[int], target: Runner, **drawn: Any) -> None:
        self.model = self._model_of(heads)
        runner: Any = Runner(self.model, heads.title, "interface", target.context)
        runner.shares = runner.shares and heads.shares
        runner.vocab_size = runner.known_ids = target.vocab_size
        super().__init__(runner, target.vocab_size, pending=PENDING, **drawn)
        self.hidden_layers = tuple(reads)
        self._heads = self.weights = heads
        self._prompts = PromptStates()
        self.keeps = Keeps(heads.features * target.dtype.itemsize, on_device=True)
        self._own: dict[Row, tuple[int, list[Tensor]]] = {}
        """The hidden states of rows behind their prompts, as pieces [positions, features], and the
        position behind the last.

        All are kept: a row that pauses loses its cells, and they are computed again.
        """
        self._columns: list[slice] = []
        """The columns of each row of the last pass that drafts may follow.

        These are its last token, or its last token and the nodes of a tree.
        """

    def _model_of(self, heads: Any) -> Eagle3Model:
        """Makes the model that computes the passes of the heads."""
        return Eagle3Model(heads, self._states)

    @classmethod
    def for_target(
        cls, target: Runner, *, directory: str, tree: str = "", width: int = 2, nodes: int = 16
    ) -> Eagle3Drafter:
        heads, reads = once(target, directory, load_eagle3)
        if not tree or not target.takes_trees:
            return Eagle3Drafter(heads, reads, target)
        return Eagle3TreeDrafter(heads, reads, target, shape=shape_of(tree, width, nodes))

    def learner(self) -> Learner | None:
        return layer_learner(self._heads, self.hidden_layers, max(FOLLOWED, self._heads.depth))

    def read_prompts(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        self._prompts.read(chunks, hidden)

    def prepare(self, chunks: Sequence[PrefillChunk]) -> None:
        """Leaves prompts to the first draft: one layer computes them quickly."""

    def propose(self, inputs: DraftInputs) -> DraftTree:
        """Drafts, and rolls the drafted tokens back in the cache."""
        tree = super().propose(inputs)
        for row, length in zip(inputs.rows, inputs.lengths, strict=True):
            if length:
                self.runner.cache.rollback(
                    self._slots.of(row), min(self._held(row), len(row.tokens))
                )
        return tree

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        super().observe(rows, scores, verdict)
        for row, states in zip(rows, kept_states(scores, verdict), strict=True):
            _, pieces = self._own.get(row, (0, []))
            pieces.append(states.clone())  # a view would keep all columns of all rows
            self._own[row] = len(row.tokens) - 1, pieces

    def replace(self, copies: Sequence[tuple[Row, Row]]) -> None:
        super().end([row for row, _ in copies])
        for row, parent in copies:
            end, pieces = self._own[parent]
            self._own[row] = end, list(pieces)

    def end(self, rows: Sequence[Row]) -> None:
        super().end(rows)
        self._prompts.leave(rows)
        for row in rows:
            self._own.pop(row, None)

    @property
    def kept_bytes(self) -> int:
        own = [piece for _, pieces in self._own.values() for piece in pieces]
        return self._prompts.bytes + sum(piece.numel() * piece.element_size() for piece in own)

    def _states(self, plan: Plan) -> Tensor:
        """Returns the states of the tokens of a pass, [rows, q, width].

        The state of a committed token comes from the target's hidden states before it, the state of
        a drafted token from the layer's result for its parent in the pass before. Padding and a
        row's first token have zeros.
        """
        heads = self._heads
        states = torch.zeros(
            plan.rows, plan.q, heads.width, dtype=self.model.dtype, device=self.model.device
        )
        places, parts = [], []
        before, self._columns = self._columns, []
        for b, (row, start, count) in enumerate(
            zip(self._rows(plan), plan.starts, plan.counts, strict=True)
        ):
            own = count if row is None else max(0, min(count, len(row.tokens) - start))
            if row is not None and own:
                features = self._features(row, start, own)
                places += [(b, own - len(features) + j) for j in range(len(features))]
                parts.append(features)
            for column in range(own, count):
                parent = (
                    0
                    if not own
                    else column - 1
                    if plan.parents is None
                    else plan.parents[b][column - 1] + 1
                )
                states[b, column] = self.model.computed[b, before[b]][parent]
            self._columns.append(slice(0, count) if 0 < own < count else slice(count - 1, count))
        if places:
            rows, columns = zip(*places, strict=True)
            states[list(rows), list(columns)] = heads.read(torch.cat(parts))
        return states

    def _rows(self, plan: Plan) -> list[Row | None]:
        """Returns the row of each slot of a pass.

        For a pass into the shared store of prompts, this is one of the rows with that prompt.
        """
        known = self._slots.rows
        if plan.into is not None:
            return [next((row for row in known.values() if row.prefix == plan.into), None)]
        return [known.get(slot) for slot in plan.slots]

    def _features(self, row: Row, start: int, count: int) -> Tensor:
        """Returns the hidden states before some tokens of a row, [count, features].

        The tokens are start..start + count - 1. The first token of a row has no such state.
        """
        before, stop = max(start - 1, 0), start + count - 1
        prompt = self._prompts.of(row) if before < row.prompt_length - 1 else None
        parts = [] if prompt is None else [prompt[before:stop]]
        parts += self._own_pieces(row, before, stop)
        if parts:
            return torch.cat(parts)
        return torch.empty(0, self._heads.features, dtype=self.model.dtype)

    def _own_pieces(self, row: Row, start: int, stop: int) -> list[Tensor]:
        """Returns a row's hidden states behind its prompt, of the positions start..stop - 1.

        They are looked for from the last one on: a round needs the last few of a long text.
        """
        behind, pieces = self._own.get(row, (0, []))
        parts = []
        for piece in reversed(pieces):
            if behind <= start:
                break
            first = behind - len(piece)
            if first < stop:
                parts.append(piece[max(start - first, 0) : stop - first])
            behind = first
        return parts[::-1]


class Eagle3TreeDrafter(Eagle3Drafter, TreeDrafter):
    """A drafter of trees drawn from the heads' q, see `shoal.drafting.tree_model`.

    Args:
        shape: the shape of the trees, as a keyword; the other arguments are those of
            `Eagle3Drafter`.
    """

    def propose(self, inputs: DraftInputs) -> DraftTree:
        tree = super().propose(inputs)
        self._fed = {}  # no node stays in the cache: their states are the layer's own
        return tree
