"""The training of a draft model for any target, of the target's own architecture, but small.

FastDraft (Zafrir et al. 2024, arXiv 2411.11055, section 3): a small model with the target's
vocabulary learns a corpus, then texts that the target writes itself. The second stage learns the
target's whole distribution at each position, not the tokens that it drew.

The small model has the architecture of the target, with fewer layers and a smaller width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from shoal.drafting.distillation import acceptance, distillation_loss, logits, next_token_loss
from shoal.drafting.multi_exit import EXITS
from shoal.errors import RequestError
from shoal.models.pretrained import eos_ids, load_tokenizer
from shoal.models.target_models import shallow
from shoal.stored_problems import stored_problems
from shoal.train import Figures, Stage, StagedTrainer, Training
from shoal.train.loop import Loss
from shoal.train.own_samples import SEED, Tokens, stdlib_pieces

FEED_FORWARD = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "ffn_hidden_size",
    "word_embed_proj_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""The names that configs have for widths that follow the model's width."""
KV_HEADS = ("num_key_value_heads", "num_kv_heads")


def shrunk(
    config: PreTrainedConfig, layers: int | None = None, width: int | None = None
) -> PreTrainedConfig:
    """Returns the config of a drafter: same vocabulary, same size of a head, tied embeddings.

    The choice is FastDraft's, arXiv 2411.11055, section 3.1. Heads keep their size, so that
    everything by position (rotary embeddings, scales of queries) stays as it is; a smaller width
    has fewer of them.

    Args:
        layers: None = an eighth of the target's.
        width: None = a quarter of the target's from 2,048 on, half from 1,024 on, else all.

    Raises:
        RequestError: the width is not made of whole heads, or is more than the target has.
    """
    made = copy.deepcopy(config.get_text_config())
    depth, full, heads = made.num_hidden_layers, made.hidden_size, made.num_attention_heads
    head = full // heads if full % heads == 0 else full
    layers = layers or max(1, depth // 8)
    if width is None:
        width = full // (4 if full >= 2048 else 2 if full >= 1024 else 1)
        width = max(head, width - width % head)
    if width % head or width > full:
        raise RequestError(
            f"--width must be a multiple of {head}, the width per head, and at most {full}, the "
            f"target's; not {width}"
        )
    if layers > depth:
        raise RequestError(f"--layers must be at most {depth}, those of the target; not {layers}")
    for name, value in made.to_dict().items():
        if "layer" in name and isinstance(value, list) and len(value) == depth:
            setattr(made, name, [value[(i + 1) * depth // layers - 1] for i in range(layers)])
        elif name in FEED_FORWARD and isinstance(value, int):
            setattr(made, name, max(1, value * width // full))
        elif name in KV_HEADS and isinstance(value, int):
            few = heads * width // full
            setattr(
                made,
                name,
                next(n for n in range(max(1, value * width // full), 0, -1) if few % n == 0),
            )
    made.num_hidden_layers = layers
    made.hidden_size = width
    made.num_attention_heads = heads * width // full
    made.tie_word_embeddings = True
    if hasattr(made, "quantization_config"):
        del made.quantization_config
    return made


def small_model(
    target: PreTrainedModel, layers: int | None, width: int | None, seed: int
) -> PreTrainedModel:
    """Returns a model of the shrunk config, in float32 and without dropout.

    A weight that has the name and shape of a weight of the target begins as that: embeddings and
    the first layers, if the width is the target's.

    Raises:
        RequestError: see `shrunk`, or a width that the architecture cannot have.
    """
    config = shrunk(target.config, layers, width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                model.eval()(
                    input_ids=torch.zeros(1, 2, dtype=torch.long)
                )  # a wrong number of heads shows here
        except (ValueError, TypeError, RuntimeError) as error:
            raise RequestError(
                f"{type(target).__name__} cannot have this --width: {error}"
            ) from error
    known = dict(target.named_parameters())
    for name, parameter in model.named_parameters():
        if name in known and known[name].shape == parameter.shape:
            parameter.data.copy_(known[name].data)
    return model


CHARACTERS = 2_000_000
"""The characters of Python's standard library in the corpus if none is given."""
DISTIL_LR = 0.6


@dataclass(frozen=True)
class DrafterTraining(Training):
    """The settings of a drafter's training.

    Attributes:
        layers: the number of the drafter's layers; None: see `shoal.train.drafter`.
        width: the drafter's width; None: see `shoal.train.drafter`.
        corpus_steps: the optimiser's steps in the corpus stage.
        exits: the layers after which it shall draft as well (S2D: `shoal.drafting.multi_exit`),
            rising.
    """

    layers: int | None = None
    width: int | None = None
    corpus_steps: int = 320
    exits: tuple[int, ...] = ()


class DrafterTrainer(StagedTrainer):
    """A trainer of a draft model.

    Args:
        corpus: the documents of the corpus stage; without any, small programming problems and
            Python's standard library.
    """

    training: DrafterTraining

    def __init__(
        self,
        out: Path,
        source: str | None,
        prompts: Sequence[str],
        corpus: Sequence[str],
        training: DrafterTraining,
        device: str = "cpu",
    ) -> None:
        self._corpus = corpus
        digest = sha256("\0".join(corpus).encode()).hexdigest()[:16] if corpus else "built in"
        fixed = {
            "layers": training.layers,
            "width": training.width,
            "corpus": digest,
            "corpus_steps": training.corpus_steps,
        }
        fixed |= {"exits": " ".join(map(str, training.exits))} if training.exits else {}
        super().__init__(out, source, prompts, training, device, **fixed)

    def make_model(self) -> Any:
        model: Any = small_model(self.target, self.training.layers, self.training.width, SEED)
        exits, depth = self.training.exits, model.config.num_hidden_layers
        if exits:
            if list(exits) != sorted({*exits}) or not 0 < exits[0] <= exits[-1] < depth:
                raise RequestError(
                    f"exits must be rising numbers of layers in 1..{depth - 1}, got {list(exits)}"
                )
            setattr(model.config, EXITS, list(exits))
        self._tokenizer = load_tokenizer(self.source_name)
        return model

    def planned(self) -> Sequence[Stage]:
        return [
            Stage(
                "corpus", self._at_exits(next_token_loss), self.corpus, self.training.corpus_steps
            ),
            Stage(
                "distillation",
                self._at_exits(distillation_loss(self.target)),
                self._own,
                self.training.steps,
                DISTIL_LR,
            ),
        ]

    def _at_exits(self, loss: Loss) -> Loss:
        """Makes the mean of a loss over all exits and the whole model (S2D, arXiv 2407.01955)."""
        exits = self.training.exits
        if not exits:
            return loss
        return lambda model, tokens: torch.stack(
            [loss(one, tokens) for one in (*(shallow(model, layers) for layers in exits), model)]
        ).mean()

    def _own(self) -> Tokens:
        return self.samples.tokens(held_out=False)

    def corpus(self) -> Tokens:
        """Returns all documents in one row, and keeps it in a file.

        Each begins as the target's tokenizer begins it, and is closed by the end of text.
        """
        file = self.out / "training" / "corpus.npy"
        if not file.exists():
            end = eos_ids(self.target, self._tokenizer)[:1]
            rows = [
                [*self._tokenizer.encode(text, verbose=False), *end]
                for text in self._corpus or _built_in()
            ]
            partial = file.with_suffix(".partial.npy")
            np.save(partial, np.array([token for row in rows for token in row], dtype=np.int32))
            partial.replace(file)
        return np.load(file)

    def logit_pairs(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns the drafter's and the target's logits at each exit, the whole model last.

        A model drafts at any distance as it does at the first, so one position stands for all.
        """
        models = [*(shallow(self.model, layers) for layers in self.training.exits), self.model]
        return [(logits(model, tokens), logits(self.target, tokens)) for model in models]

    def accepted(self, q_logits: Tensor, p_logits: Tensor) -> Tensor:
        """Computes sum min(p, q): the probability that a draft drawn from q is accepted."""
        return acceptance(p_logits, q_logits)

    def export(self, figures: Sequence[Figures] = ()) -> None:
        """Writes model and tokenizer in bfloat16 for Transformers and `--draft`, at any time."""
        made = copy.deepcopy(self.model).to(torch.bfloat16)
        made.save_pretrained(self.out)  # type: ignore[operator]
        self._tokenizer.save_pretrained(self.out)


def _built_in() -> Iterator[str]:
    yield from (problem.document for problem in stored_problems("corpus"))
    yield from stdlib_pieces(False, CHARACTERS, SEED)
