"""The plain decoding of one row, without cache, batch or drafter: the definition of correct.

A greedy engine must return exactly these ids. A sampling engine must return ids of the same
distribution; by the coupled rule, with lookahead "off", or with a drafter equal to the target,
exactly these ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.errors import RequestError
from shoal.sampling.acceptance import Rejection, Rule
from shoal.sampling.distributions import probabilities
from shoal.sampling.uniforms import group_seed, row_seed
from shoal.types.requests import Request, Row
from shoal.types.trees import Positions


@torch.inference_mode()
def decode(
    hf: Any, request: Request, index: int = 0, eos: Sequence[int] = (), rule: Rule | None = None
) -> list[int]:
    """Decodes the new tokens of row `index` of a request whose sampling seed is set.

    Args:
        hf: a stock Transformers model.

    Raises:
        RequestError: under a lossy rule, unless it is greedy.
    """
    rule = rule or Rejection()
    if rule.lossy and not request.sampling.greedy:
        raise RequestError(f"plain decoding is no reference here: {rule.lossy}")
    seed = row_seed(
        group_seed(request.sampling.seed or 0, request.prompt_ids, request.occurrence), index
    )
    row = Row(request, 0, index, seed, list(request.prompt_ids), frozenset(eos), max_length=1 << 20)
    while row.remaining > 0 and not (row.new_tokens and row.tokens[-1] in row.eos):
        logits = hf(torch.tensor([row.tokens], device=hf.device), use_cache=False).logits[:, -1:]
        p = probabilities(logits, Positions([row], [[]]))[:, 0]
        uniforms = rule.uniforms([row.seed], [len(row.tokens)], 1, None)[:, 0].to(p.device)
        row.tokens.append(int(rule.draw(p, uniforms)))
    return row.tokens[row.prompt_length :]
