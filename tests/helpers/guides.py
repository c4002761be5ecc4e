"""Guided targets by hand: p' from probabilities, and rows decoded one token after the other without any cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from shoal.sampling.acceptance import Coupled
from shoal.sampling.uniforms import group_seed, row_seed
from shoal.testing.scripted import History, hashed
from shoal.types.requests import Request, Row

V = 7
TARGET, GUIDE, EXPERT = hashed(V, 1), hashed(V, 2), hashed(V, 5)


def by_hand(p: Tensor, g: Tensor, guidance: float, plausibility: float = 0.0, e: Tensor | None = None) -> Tensor:
    """p' of probabilities [..., vocab]: p (e / g)^guidance over the tokens that p finds plausible, of which none is 0; e is p
    without one."""
    e = p if e is None else e
    kept = (p >= plausibility * p.amax(-1, keepdim=True)) & (p > 0) & (g > 0) & (e > 0)
    weights = torch.where(kept, p * (e / g) ** guidance, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def decoded(request: Request, index: int, guide: History = GUIDE, expert: History = TARGET) -> list[int]:
    """The new tokens of row `index` by the coupled rule, each from all scripts after the tokens before it."""
    s, rule = request.sampling, Coupled()
    seed = row_seed(group_seed(s.seed or 0, request.prompt_ids, request.occurrence), index)
    tokens = list(request.prompt_ids)
    for _ in range(request.limits.max_new_tokens):
        read = tuple(tokens)
        other = (*(s.negative_prompt or request.prompt_ids), *read[len(request.prompt_ids) :])
        pairs = ((TARGET, read), (guide, other), (expert, read))
        p, g, e = (script(before).double().softmax(-1) for script, before in pairs)
        p = by_hand(p, g, s.guidance, s.plausibility, e) if s.guidance else p
        if s.greedy:
            tokens.append(int(p.argmax()))
            continue
        uniforms = rule.uniforms([seed], [len(tokens)], 1, None)[:, 0]
        hot = p ** (1 / s.temperature)
        tokens.append(int(rule.draw((hot / hot.sum())[None], uniforms)))
    return tokens[len(request.prompt_ids) :]


def as_decoded(rows: list[Row], **scripts: History) -> bool:
    """Whether each row has the tokens that it has by hand."""
    return all(row.tokens[row.prompt_length :] == decoded(row.request, row.index, **scripts) for row in rows)


@torch.inference_mode()
def greedy_ids(
    target: Any, guide: Any, prompt: list[int], new: int, guidance: float, plausibility: float = 0.0, expert: Any = None
) -> list[int]:
    """Greedy decoding of one prompt by two or three Transformers models, each with Transformers' own cache."""
    models = (target, guide, expert or target)
    name = "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"  # as the release has it
    tokens, block, caches = list(prompt), torch.tensor([prompt]), [None, None, None]
    for _ in range(new):
        outs = [model(block, use_cache=True, **{name: cache}) for model, cache in zip(models, caches, strict=True)]
        caches = [out.past_key_values for out in outs]
        p, g, e = (out.logits[0, -1].log_softmax(-1) for out in outs)
        scores = p + guidance * (e - g)
        if plausibility:
            scores[p.exp() < plausibility * p.exp().max()] = -torch.inf
        tokens.append(int(scores.argmax()))
        block = torch.tensor([tokens[-1:]])
    return tokens[len(prompt) :]
