"""A draft model for any target: its own architecture, small, trained on a corpus and then to say
what the target says.

FastDraft (Zafrir et al. 2024, arXiv 2411.11055, section 3): a small model with the target's
vocabulary learns a corpus, then what the target writes itself. The second stage learns the target's
whole distribution at each position, not the tokens that it drew.
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

from shoal.drafting.multi_exit import EXITS
from shoal.errors import RequestError
from shoal.models.early_exit import shallow
from shoal.models.loading import eos_ids, load_tokenizer
from shoal.problems.generator import generate
from shoal.train.corpus import Tokens, stdlib_pieces
from shoal.train.distil import acceptance, distillation_loss
from shoal.train.loop import Loss
from shoal.train.models import logits, next_token_loss
from shoal.train.own_samples import SEED
from shoal.train.shrink import small_model
from shoal.train.stages import Figures, Stage, StagedTrainer, Training

PROBLEMS, CHARACTERS = 8000, 2_000_000
"""Of the corpus where none is given: small programming problems, and Python's standard library."""
DISTIL_LR = 0.6


@dataclass(frozen=True)
class DrafterTraining(Training):
    """How a drafter is trained.

    Attributes:
        layers, width: of the drafter; None: see `shoal.train.shrink`.
        corpus_steps: of the optimiser in the corpus stage.
        exits: layers after which it shall draft as well (S2D: `shoal.drafting.multi_exit`), rising.
    """

    layers: int | None = None
    width: int | None = None
    corpus_steps: int = 320
    exits: tuple[int, ...] = ()


class DrafterTrainer(StagedTrainer):
    """Trains a draft model.

    Args:
        corpus: documents of the corpus stage; without any, small programming problems and Python's
            standard library.
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

    def made(self) -> Any:
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
        """The mean over all exits and the whole model (S2D, Kavehzadeh et al. 2024, arXiv
        2407.01955)."""
        exits = self.training.exits
        if not exits:
            return loss
        return lambda model, tokens: torch.stack(
            [loss(one, tokens) for one in (*(shallow(model, layers) for layers in exits), model)]
        ).mean()

    def _own(self) -> Tokens:
        return self.samples.tokens(held_out=False)

    def corpus(self) -> Tokens:
        """All documents in one row, each as the target's tokenizer begins it, and closed by the end
        of text; kept in a file."""
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
        found: Tokens = np.load(file)
        return found

    def said(self, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A model drafts at any distance as it does at the first: one position stands for all. With
        exits, one for each, the whole model last."""
        models = [*(shallow(self.model, layers) for layers in self.training.exits), self.model]
        return [(logits(model, tokens), logits(self.target, tokens)) for model in models]

    def accepted(self, q_logits: Tensor, p_logits: Tensor) -> Tensor:
        """What is drawn from q is accepted with the probability sum min(p, q)."""
        return acceptance(p_logits, q_logits)

    def export(self, figures: Sequence[Figures] = ()) -> None:
        """Writes model and tokenizer in bfloat16, as Transformers and `--draft` load them; also
        half-trained."""
        made = copy.deepcopy(self.model).to(torch.bfloat16)
        made.save_pretrained(self.out)  # type: ignore[operator]
        self._tokenizer.save_pretrained(self.out)


def _built_in() -> Iterator[str]:
    yield from (problem.document for problem in generate(SEED + 1, PROBLEMS, "train"))
    yield from stdlib_pieces(False, CHARACTERS, SEED)
