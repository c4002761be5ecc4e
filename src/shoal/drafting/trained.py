"""Drafters that are trained for a target, by their names: what `draft="medusa:DIR"` means. Torch is not
imported (`shoal.drafting.names`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.drafting.model_trees import MOST_NODES, ModelTrees
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.drafting.protocol import Drafter
    from shoal.models.runner import Runner


@dataclass(frozen=True)
class Medusa:
    """Heads on the target's last hidden state, each for one position further ahead (`shoal.drafting.medusa`).

    Attributes:
        directory: holds them. nodes: of a draft tree; 0 = chains, also for a target that takes no trees.

    Raises:
        RequestError: more than 63 nodes, or nothing there.
    """

    directory: str
    nodes: int = 16

    def __post_init__(self) -> None:
        _require_heads(self.directory, "medusa", self.nodes)

    @property
    def name(self) -> str:
        return f"medusa:nodes={self.nodes}"

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        from shoal.drafting.checkpoints import layers_and_width, once
        from shoal.drafting.medusa import MedusaDrafter, load_medusa
        from shoal.drafting.protocol import Keeps

        heads = once(target, self.directory, load_medusa)
        layers, width = layers_and_width(target)
        state = width * target.dtype.itemsize  # the last one of a prompt, and of each row
        keeps = Keeps(state, per_row=state, tokens=1, on_device=True)
        return MedusaDrafter(heads, layers, self.nodes if target.takes_trees else 0, keeps)


@dataclass(frozen=True)
class Eagle3:
    """Heads on three of the target's hidden states, which draft token by token (`shoal.drafting.eagle3`).

    Attributes:
        directory: holds them. tree: one of `shoal.drafting.model_trees.TREES` but "auto"; "" = chains, also for a target
            that takes no trees.
        width, nodes: of trees, as of those of a model.

    Raises:
        RequestError: nothing there, or another tree, width or nodes.
    """

    directory: str
    tree: str = ""
    width: int = 0
    nodes: int = 16

    def __post_init__(self) -> None:
        _require_heads(self.directory, "eagle3", self.nodes)
        if self.tree == "auto":
            raise RequestError("eagle3 takes trees of one shape, as in eagle3:DIR,tree=rsd-s: tree=auto is for draft models")
        _ = self.name

    @property
    def name(self) -> str:
        return f"eagle3:{self._trees.name.partition(':')[2]}" if self.tree else "eagle3"

    @property
    def _trees(self) -> ModelTrees:
        return ModelTrees("heads", self.tree, self.width, self.nodes)

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        from shoal.drafting.checkpoints import once
        from shoal.drafting.eagle3 import Eagle3Drafter, Eagle3TreeDrafter, load_eagle3

        heads, reads = once(target, self.directory, load_eagle3)
        if not self.tree or not target.takes_trees:
            return Eagle3Drafter(heads, reads, target)
        return Eagle3TreeDrafter(heads, reads, target, shape=self._trees.shape)


@dataclass(frozen=True)
class Ppd:
    """Prompt tokens by which the target guesses further ahead in the pass that verifies (`shoal.drafting.ppd`).

    Attributes:
        directory: holds them. nodes: of a draft tree, prompt tokens included; 0 = as many as pay, by measured times of passes.

    Raises:
        RequestError: more than 63 nodes, or nothing there.
    """

    directory: str
    nodes: int = 0

    def __post_init__(self) -> None:
        _require_heads(self.directory, "ppd", self.nodes)

    @property
    def name(self) -> str:
        return f"ppd:nodes={self.nodes}" if self.nodes else "ppd"

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        from shoal.drafting.checkpoints import once
        from shoal.drafting.ppd import PpdDrafter, load_ppd

        return PpdDrafter(once(target, self.directory, load_ppd), self.nodes)


HEADS: dict[str, type[Any]] = {"medusa": Medusa, "eagle3": Eagle3, "ppd": Ppd}
"""Drafters that are trained heads or prompt tokens, by name: a colon, their directory, and options after commas."""
TRAINED = tuple(HEADS.values())


def heads_in(directory: Path) -> str | None:
    """The name of the heads that a directory holds, by its files; None for anything else, such as a model."""
    for name, pattern in {"medusa": "medusa_lm_head.*", "ppd": "prompt_tokens.*"}.items():
        if any(directory.glob(pattern)):
            return name
    try:
        architectures = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError):
        return None
    return "eagle3" if "eagle3" in str(architectures).lower() else None


def _require_heads(directory: str, name: str, nodes: int) -> None:
    """Raises RequestError: no heads there, or a tree of too many nodes."""
    if not 0 <= nodes <= MOST_NODES:
        raise RequestError(f"{name} needs nodes in 0..{MOST_NODES}, got {nodes}")
    if not (Path(directory) / "config.json").is_file():
        raise RequestError(
            f"no heads in {directory!r}: expected its config.json; `shoal train {name}` makes such a directory"
        )
