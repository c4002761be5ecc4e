"""DFlash drafters propose a block of tokens in one pass (`shoal.models.block_layers`).

They are read like EAGLE-3 heads (`shoal.drafting.eagle3`): hidden states of some of the target's
layers, kept for each row, and a ragged cache of their own. The cache holds the context, one cell
for each committed token but the last. A draft first writes the tokens committed since the last one,
in passes that attend to nothing, and then feeds the whole block, whatever length is asked for: so a
row's q depends on its own tokens alone. The block's cells are given back at once.

All positions of a block have their q before any token is drawn, each whatever the others are. The
draws are those of a draft model: under the row's own controls, verified by q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config import MOST_NODES
from shoal.drafting.draft_slots import DraftMemory, DraftSlots
from shoal.drafting.eagle3 import FILES, MAPS, Eagle3Drafter, target_ids
from shoal.drafting.model import OrdinarySteps
from shoal.drafting.protocol import DraftInputs
from shoal.drafting.trained_heads import (
    fill,
    in_format,
    layers_and_width,
    once,
    read_config,
    read_tensors,
    require_kind,
    require_width,
    whole_number,
)
from shoal.errors import PairMismatch, RequestError, UnsupportedModel
from shoal.models.block_layers import BlockForm, BlockHeads, BlockModel, block_config
from shoal.models.cache import Plan
from shoal.models.prompt_passes import feed_prompts
from shoal.models.runner import Runner
from shoal.types.rounds import Faults
from shoal.types.trees import DraftTree

ASSISTANT = "muse_glimmer_assistant"
"""The model type that Transformers gives to such layers."""
NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""The names of tensors of `ASSISTANT`, and those of DFlash."""
VARIANTS = ("conv_kernel_size", "causal", "attention_sink_bias", "fusion_mode", "shift_label")
"""The entries of config.json that change the computation and are not supported."""


def load_block(directory: Path, target: Runner) -> tuple[BlockHeads, tuple[int, ...]]:
    """Returns the layers in a directory, in the target's number format, and the states they read.

    Raises:
        RequestError: there are no such layers.
        ModelError: files are damaged or tensors are missing.
        PairMismatch: they belong to another target.
        UnsupportedModel: they are of another kind.
    """
    config = read_config(directory)
    require_kind("dflash", directory, config)
    layer = config.get("transformer_layer_config") or config
    config = {**layer, **config, **(config.get("dflash_config") or {})}
    _require_dflash(directory, config)
    try:
        shape = block_config(layer | {"vocab_size": layer.get("vocab_size", target.vocab_size)})
    except Exception as error:  # Transformers has errors of its own
        raise RequestError(
            f"{directory}/config.json is no config of DFlash layers: {error}"
        ) from error
    require_width(directory, "a vocabulary", shape.vocab_size, target, target.vocab_size)
    reads, (_, width) = _read_layers(directory, config, target), layers_and_width(target)
    form = _form(directory, config, shape.num_hidden_layers, target.vocab_size)
    tensors = {
        _own_name(name): one
        for name, one in read_tensors(directory, *FILES).items()
        if not name.startswith("verifier_")  # the target's own
    }
    if (fc := tensors.get("fc.weight")) is not None:
        require_width(
            directory, f"{len(reads)} hidden states", fc.shape[-1], target, len(reads) * width
        )
    drafts = whole_number(config, directory, "draft_vocab_size", default=target.vocab_size)
    embedding, head = target.hf.get_input_embeddings(), target.hf.get_output_embeddings()
    if "embed_tokens.weight" not in tensors or "lm_head.weight" not in tensors:
        require_width(directory, "a width", shape.hidden_size, target, width)
    heads = BlockHeads(
        shape,
        form,
        len(reads) * width,
        drafts,
        None if "embed_tokens.weight" in tensors else embedding,
        None if "lm_head.weight" in tensors else head,
    )
    unknown = sorted(tensors.keys() - {name for name, _ in heads.named_parameters()} - set(MAPS))
    if unknown:
        raise UnsupportedModel(
            f"{directory} has tensors that DFlash layers have not, for example {unknown[0]}"
        )
    fill(heads, tensors, directory)
    heads.target_ids.copy_(target_ids(directory, tensors, drafts, target.vocab_size))
    return in_format(heads, target), reads


def _require_dflash(directory: Path, config: dict[str, Any]) -> None:
    """Raises UnsupportedModel if a config is that of other layers."""
    kind = config.get("projector_type") or "dflash"
    variant = next((name for name in VARIANTS if config.get(name)), None)
    if kind != "dflash":
        variant = f"projector_type: {kind}"
    if variant is not None:
        raise UnsupportedModel(
            f"{directory}/config.json has {variant}: DFlash without it is supported"
        )


def _read_layers(directory: Path, config: dict[str, Any], target: Runner) -> tuple[int, ...]:
    """Returns the numbers of the hidden states that are read, as Transformers numbers them.

    The package speculators numbers them so, too; others name the layers whose outputs are read.

    Raises:
        PairMismatch: the target lacks one.
    """
    layers, _ = layers_and_width(target)
    named = config.get("target_layer_ids")
    if named is None and "aux_hidden_state_layer_ids" not in config:
        named = _spread(layers, whole_number(config, directory, "num_hidden_layers"))
    reads = (
        [layer + 1 if isinstance(layer, int) else layer for layer in named or []]
        or config.get("aux_hidden_state_layer_ids")
        or []
    )
    if not reads or not all(isinstance(layer, int) and 0 <= layer <= layers for layer in reads):
        raise PairMismatch(
            f"{directory} reads hidden states {list(reads)} and cannot draft for {target.name}, "
            f"which has {layers} layers"
        )
    return tuple(reads)


def _spread(layers: int, drafting: int) -> list[int]:
    """Returns the layers of the target that so many layers read where config.json names none."""
    if drafting == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (drafting - 1)) for i in range(drafting)]


def _form(directory: Path, config: dict[str, Any], layers: int, vocab: int) -> BlockForm:
    """Returns a config's entries beside the layers'; missing or wrong ones raise RequestError."""
    size, mask = whole_number(config, directory, "block_size"), config.get("mask_token_id")
    if not 2 <= size <= MOST_NODES + 1 or not isinstance(mask, int) or not 0 <= mask < vocab:
        raise RequestError(
            f"{directory}/config.json needs a block_size of 2..{MOST_NODES + 1} and a "
            f"mask_token_id of the target's {vocab} ids, got {size} and {mask!r}"
        )
    kinds = config.get("layer_types") or ["full_attention"] * layers
    sliding = [kind == "sliding_attention" for kind in kinds[:layers]]
    assistant = config.get("model_type") == ASSISTANT
    window = config.get("sliding_window")
    if window is not None and assistant:
        window += 1  # Transformers counts the distance in layers that see both ways
    elif not config.get("use_sliding_window", "speculators_model_type" in config):
        window = None
    one_way = config.get("is_causal")
    both = assistant or config.get("sliding_window_non_causal")
    return BlockForm(
        size,
        mask,
        windows=tuple(window if slides else None for slides in sliding),
        causal=tuple(
            bool(one_way) if one_way is not None else slides and not both for slides in sliding
        ),
        scale=float(config.get("input_embedding_scale") or 1.0),
        multiplier=float(config.get("output_multiplier") or 1.0),
        softcap=config.get("final_logit_softcapping") or None,
    )


def _own_name(name: str) -> str:
    """Returns the name of a parameter that has another one in files of others."""
    name = name.removeprefix("model.")
    other = next((other for other in NAMES if name.startswith(other)), "")
    return NAMES[other] + name.removeprefix(other) if other else name


class BlockDrafter(Eagle3Drafter):
    """A drafter that samples up to a block's masks per row under the row's own sampling controls.

    Args:
        heads: the layers, shared by all engines.
        reads: the numbers of the target's hidden states that they read.
        target: the target for which they draft.
    """

    name = "dflash"

    def __init__(self, heads: BlockHeads, reads: Sequence[int], target: Runner) -> None:
        super().__init__(heads, reads, target)
        self.size = heads.form.size
        self.memory = BlockMemory(self._slots, self.size)
        # Masks may stand behind the end of the target's context.
        self.runner.bridge.context = target.context + self.size

    def _model_of(self, heads: Any) -> BlockModel:
        return BlockModel(heads, self._states)

    @classmethod
    def for_target(  # type: ignore[override]
        cls, target: Runner, *, directory: str
    ) -> BlockDrafter:
        return cls(*once(target, directory, load_block), target)

    def learner(self) -> None:
        """Returns None: the layers learn with masks, which `realign` does not make."""

    def propose(self, inputs: DraftInputs) -> DraftTree:
        """Proposes drafts of at most a block's masks, in one pass over the blocks of all rows."""
        lengths = [min(length, self.size - 1) for length in inputs.lengths]
        self._slots.place(inputs.rows, [length > 0 for length in lengths])
        inputs, faults = replace(inputs, lengths=lengths), Faults()
        tree = self._drafted(inputs, _BlockSteps(self, inputs, faults), faults)
        assert tree is not None
        return tree

    def blocks(self, inputs: DraftInputs) -> Tensor:
        """Computes the logits of all masks, [rows, size - 1, vocab]; zeros where none is asked.

        The cache is left with the context of each row.
        """
        drafted = [row for row, length in enumerate(inputs.lengths) if length]
        rows, cache = [inputs.rows[row] for row in drafted], self.runner.cache
        slots = self.slots(rows)
        feed_prompts(
            self.runner,
            [
                (slot, row.tokens[cache.lengths[slot] : -1])
                for slot, row in zip(slots, rows, strict=True)
            ],
        )
        block = torch.full((len(rows), self.size), self._heads.form.mask, device=self.runner.device)
        block[:, 0] = torch.tensor([row.tokens[-1] for row in rows], device=self.runner.device)
        logits = self.runner.feed(slots, block, [self.size] * len(rows))[:, 1:]
        for slot, row in zip(slots, rows, strict=True):
            cache.rollback(slot, len(row.tokens) - 1)
        if len(rows) == len(inputs.rows):
            return logits
        whole = logits.new_zeros(len(inputs.rows), *logits.shape[1:])
        whole[drafted] = logits
        return whole

    def _states(self, plan: Plan) -> Tensor:
        """Returns the target's hidden states at the tokens of a pass, [rows, q, features].

        They are zeros for padding, and for tokens of which none were read.
        """
        states = torch.zeros(
            plan.rows,
            plan.q,
            self._heads.features,
            dtype=self.model.dtype,
            device=self.model.device,
        )
        for own, row, start, count in zip(
            states, self._rows(plan), plan.starts, plan.counts, strict=True
        ):
            if row is not None:
                states_before = self._features(
                    row, start + 1, count
                )  # the states before those tokens
                own[count - len(states_before) : count] = states_before
        return states


class BlockMemory(DraftMemory):
    """The memory of slots that have room for a block behind a row's tokens.

    Args:
        slots: the slots.
        size: the number of tokens of a block.
    """

    def __init__(self, slots: DraftSlots, size: int) -> None:
        super().__init__(slots)
        self._beyond = size

    def _size(self, slots: int, capacity: int, cells: int) -> tuple[int, int, int]:
        return slots, capacity + self._beyond, cells


class _BlockSteps(OrdinarySteps):
    """The steps of a draft whose logits come from one pass (arguments: see `OrdinarySteps`)."""

    def __init__(self, drafter: BlockDrafter, inputs: DraftInputs, faults: Faults) -> None:
        super().__init__(drafter, inputs, faults)
        self._logits: Tensor | None = None

    def logits(self, lengths: Sequence[int]) -> Tensor:
        if self.last is not None:
            self.note_history(self.last, lengths)
        if self._logits is None:
            assert isinstance(self._drafter, BlockDrafter)
            self._logits = self._drafter.blocks(self._inputs)
        return self._logits[:, self.steps]
