"""Proposals in the target's ids of a model that has other ids, or some of them only."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.vocabulary import SharedTokens


class SharedIds:
    """The tokens that a drafter and its target share, as tensors.

    Proposals of these alone are exact, as q is renormalised over them: TLI (Timor et al. 2025, arXiv 2502.05202), and
    the rule of VocabTrim (arXiv 2506.22694), where they are the tokens that are left of the drafter's head.
    """

    def __init__(self, shared: SharedTokens, device: torch.device) -> None:
        self._target = torch.tensor(shared.target, device=device)
        self._columns = torch.tensor(shared.columns, device=device)
        self._draft = torch.zeros(shared.target_size, dtype=torch.long, device=device)
        self._draft[self._target] = torch.tensor(shared.draft, device=device)

    def of_target(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The drafter's logits [rows, its columns] for the target's ids, [rows, vocab_size]: -inf for those that are not shared."""
        found = logits.new_full((len(logits), vocab_size), -torch.inf)
        found[:, self._target] = logits[:, self._columns]
        return found

    def of_draft(self, tokens: Tensor) -> Tensor:
        """The drafter's ids of shared tokens, of any shape."""
        return self._draft[tokens]
