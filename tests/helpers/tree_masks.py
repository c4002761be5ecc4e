"""Random trees of drafted tokens, and the path to each of their nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tree = Sequence[int]


def path_of(tree: Tree, column: int) -> list[int]:
    """Columns from the root to this one."""
    path = [column]
    while path[0]:
        path.insert(0, tree[path[0] - 1] + 1)
    return path


def random_tree(nodes: int, generator: torch.Generator) -> list[int]:
    """Parents; every earlier node is as likely."""
    return [int(torch.randint(-1, i, (1,), generator=generator)) for i in range(nodes)] if nodes else []
