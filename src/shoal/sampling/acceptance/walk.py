"""The walk from the root of a draft tree down its accepted nodes.

A function decides at each column which of the siblings is accepted (`Choice`); the functions of
rejection sampling are in `shoal.sampling.acceptance.rejection`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.sampling.distributions import Scores
from shoal.sampling.drawing import draw
from shoal.types.trees import DraftTree, Siblings, Verdict

Choice = Callable[..., tuple[Tensor, Tensor]]
"""A function that decides at one column of each row.

Args:
    p: the target's distributions at the columns, [rows, vocab].
    q: the drafter's distributions at the columns, [rows, vocab].
    tokens: the drawn tokens, [rows, draws] int64, -1 after the last.
    uniforms: [rows] float64 in [0, 1).
    sampled: the number of each row's draws that are not point masses, [rows]; only if some are.

Returns:
    The number of the accepted draw, [rows] int64, -1 for none.
    The weights that the replacement is drawn from if none is accepted, [rows, vocab].
"""


def walk(
    tree: DraftTree, siblings: Siblings, scores: Scores, uniforms: Tensor, choice: Choice
) -> Verdict:
    """Goes from the root to the accepted child, as long as there is one.

    Then the replacement is drawn, or the bonus at a leaf. A node uses the uniforms of its position,
    for all purposes, as in chains: a row comes to each position once.

    Args:
        uniforms: by position, [rows, depth of the tree + 1, 3] (TOKEN, ACCEPT, REPLACE).
        choice: a function with the property that the accepted draw, or the token drawn in its
            place, has the distribution p.
    """
    p = scores.p()
    paths: list[list[int]] = [[] for _ in tree.drafts]
    token, prob = torch.zeros_like(tree.lengths), p.new_zeros(len(paths))
    probs: list[list[Tensor]] = [[] for _ in paths]
    active, depth = list(range(len(paths))), 0
    while active:
        columns = [paths[b][-1] + 1 if paths[b] else 0 for b in active]
        rows = torch.tensor(active, device=p.device)
        p_here = p[rows, torch.tensor(columns, device=p.device)]
        picks, rest = _choose(
            tree,
            siblings,
            active,
            columns=columns,
            p=p_here,
            uniforms=uniforms[rows, depth, 1],
            choice=choice,
        )
        following = []
        for place, (b, column, pick) in enumerate(zip(active, columns, picks, strict=True)):
            if pick >= 0:
                node = siblings.draws[b][column][pick]
                paths[b].append(node)
                probs[b].append(p_here[place, tree.drafts[b][node]])
                following.append(b)
        leaves = [place for place, pick in enumerate(picks) if pick < 0]
        if leaves:
            own = torch.tensor(leaves, device=p.device)
            drafted = [bool(siblings.draws[active[place]][columns[place]]) for place in leaves]
            kinds = torch.tensor([2 if was else 0 for was in drafted], device=p.device)
            last_tokens = draw(rest[own], uniforms[rows[own], depth, kinds])
            token[rows[own]] = last_tokens
            prob[rows[own]] = p_here[own, last_tokens]
        active, depth = following, depth + 1
    return _verdict(paths, token, prob, probs)


def _choose(
    tree: DraftTree,
    siblings: Siblings,
    rows: Sequence[int],
    columns: Sequence[int],
    p: Tensor,
    uniforms: Tensor,
    choice: Choice,
) -> tuple[list[int], Tensor]:
    """Returns the number of the accepted draw of each row's column, -1 for none.

    Also returns the weights of the token that follows if none is accepted.
    """
    picks, rest = [-1] * len(rows), p
    places = [
        place
        for place, (b, column) in enumerate(zip(rows, columns, strict=True))
        if siblings.draws[b][column]
    ]
    if not places:
        return picks, rest
    draws = [
        [tree.drafts[rows[i]][node] for node in siblings.draws[rows[i]][columns[i]]] for i in places
    ]
    width = max(map(len, draws))
    tokens = torch.tensor([own + [-1] * (width - len(own)) for own in draws], device=p.device)
    index = torch.tensor(places, device=p.device)
    contexts = torch.tensor(
        [siblings.contexts[rows[i]][columns[i]] for i in places], device=p.device
    )
    arguments = [p[index], siblings.q[contexts].to(p.dtype), tokens, uniforms[index]]
    if siblings.sampled is not None:
        arguments.append(
            torch.tensor([siblings.sampled[rows[i]][columns[i]] for i in places], device=p.device)
        )
    picked, left = choice(*arguments)
    for place, pick in zip(places, picked.tolist(), strict=True):
        picks[place] = pick
    return picks, p.index_copy(0, index, left)


def _verdict(
    paths: Sequence[list[int]], token: Tensor, prob: Tensor, probs: Sequence[list[Tensor]]
) -> Verdict:
    """Makes the verdict of paths of any lengths."""
    longest = max(map(len, paths))
    path = torch.tensor(
        [own + [0] * (longest - len(own)) for own in paths], dtype=torch.long, device=token.device
    )
    nothing = torch.zeros_like(prob[0])
    along = torch.stack(
        [
            torch.stack([*own, prob[b], *[nothing] * (longest - len(own))])
            for b, own in enumerate(probs)
        ]
    )
    accepted = torch.tensor([len(own) for own in paths], device=token.device)
    return Verdict(accepted, token, along, path.view(len(paths), longest))
