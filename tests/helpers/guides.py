"""Guided targets by hand: p' from probabilities, and rows decoded one token after the other without any cache."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.config import Limits, Sampling
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import Drafter
from shoal.drafting.shapes import shape_of
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.tree_model import TreeDrafter
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled
from shoal.sampling.uniforms import group_seed, row_seed
from shoal.testing.scripted import History, hashed, mixed, scripted
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


def by_bayes(p: Tensor, g: Tensor, e: Tensor, odds: float, count: int, s: Any) -> Tensor:
    """p' with a posterior: p P(class)^guidance, the classes' texts so far having these odds; for that many new tokens."""
    ratio = (math.exp(odds) * e / g) ** (s.posterior / count)
    weights = p * (ratio / (1 + ratio)) ** s.guidance
    weights = torch.where(p >= s.plausibility * p.amax(-1, keepdim=True), weights, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def decoded(request: Request, index: int, guide: History = GUIDE, expert: History = TARGET) -> list[int]:
    """The new tokens of row `index` by the coupled rule, each from all scripts after the tokens before it."""
    s, rule = request.sampling, Coupled()
    seed = row_seed(group_seed(s.seed or 0, request.prompt_ids, request.occurrence), index)
    tokens, odds = list(request.prompt_ids), 0.0
    for count in range(1, 1 + request.limits.max_new_tokens):
        read = tuple(tokens)
        other = (*(s.negative_prompt or request.prompt_ids), *read[len(request.prompt_ids) :])
        wanted = (*(s.positive_prompt or request.prompt_ids), *read[len(request.prompt_ids) :])
        pairs = ((TARGET, read), (guide, other), (expert, wanted))
        p, g, e = (script(before).double().softmax(-1) for script, before in pairs)
        if s.posterior:
            p = by_bayes(p, g, e, odds, count, s)
        elif s.guidance:
            p = by_hand(p, g, s.guidance, s.plausibility, e)
        if s.greedy:
            tokens.append(int(p.argmax()))
        else:
            uniforms = rule.uniforms([seed], [len(tokens)], 1, None)[:, 0]
            hot = p ** (1 / s.temperature)
            tokens.append(int(rule.draw((hot / hot.sum())[None], uniforms)))
        odds += float((e / g).log()[tokens[-1]])
    return tokens[len(request.prompt_ids) :]


def as_decoded(rows: list[Row], **scripts: History) -> bool:
    """Whether each row has the tokens that it has by hand."""
    return all(row.tokens[row.prompt_length :] == decoded(row.request, row.index, **scripts) for row in rows)


# ── engines with a guide ────────────────────────────────────────────────────────────────────────────────────────────

Made = Callable[[], Drafter | None]
MADE: dict[str, Made] = {
    "plain": lambda: None,
    "model": lambda: ModelDrafter(scripted(mixed(TARGET, hashed(V, 3)), V), V),
    "trees": lambda: TreeDrafter(scripted(mixed(TARGET, hashed(V, 3)), V), V, shape_of("rsd-s", 2, 6)),
    "suffix": lambda: SuffixDrafter("group", nodes=6),
}
STRENGTHS = (0.6, 0.0, -0.4, 1.2)


def request(number: int, n: int = 3, new: int = 12, **sampling: Any) -> Request:
    prompt = tuple((number * i + i * i) % V for i in range(1 + 5 * number))
    settings = {"temperature": 0.8, "seed": number, "guidance": STRENGTHS[number % 4]} | sampling
    return Request(prompt, n, Sampling(**settings), Limits(max_new_tokens=new + number))


def engine_of(made: Made, k: int = 3, **options: Any) -> Engine:
    drafter = made()
    options = {"max_batch": 5, "rule": Coupled(), "guide": scripted(GUIDE, V)} | options
    return Engine(scripted(TARGET, V), drafter, Fixed(k if drafter else 0), **options)


NEGATIVE = {2: (6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 0, 0, 1), 3: (4, 2)}
"""The negative prompts of two requests: one longer than the prompt, one shorter."""
POSITIVE = {2: (1, 2), 3: (3, 3, 1, 0, 5, 6, 2, 4, 1, 1, 0, 2, 3, 5, 6, 6, 4, 2, 1, 0)}
"""Positive prompts of the same, one shorter and one longer."""


def played(
    made: Made,
    numbers: Sequence[int] = (0, 2, 3, 1),
    negative: bool = False,
    positive: bool = False,
    posterior: Mapping[int, float] | None = None,
    **options: Any,
) -> tuple[Engine, list[Row]]:
    """Requests of unequal prompts and strengths that join one after the other; a row is cancelled."""
    engine, rows = engine_of(made, **options), []
    for number in numbers:
        settings: dict[str, Any] = {"negative_prompt": NEGATIVE.get(number, ())} if negative else {}
        settings["positive_prompt"] = POSITIVE.get(number, ()) if positive else ()
        settings["plausibility"] = 0.05 if number > 1 and STRENGTHS[number % 4] else 0.0
        settings["posterior"] = (posterior or {}).get(number, 0.0)
        rows += engine.submit(request(number, **settings))
        engine.step()
        engine.step()
    engine.cancel(rows[1:2])
    while engine.step():
        pass
    return engine, [*rows[:1], *rows[2:]]


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
