"""What `draft="self:exit=6"` and `draft="self:window=256"` mean: a target that drafts for itself. Torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shoal.errors import RequestError, UnsupportedModel

if TYPE_CHECKING:
    from shoal.drafting.protocol import Drafter
    from shoal.models.runner import Runner

UNSET = -1
SINKS = 4
"""First tokens of a row that attention needs whatever they are (StreamingLLM, section 3.1)."""


@dataclass(frozen=True)
class SelfDrafting:
    """The target's first layers draft (`shoal.drafting.early_exit`), or all of them with a part of its cache
    (`shoal.drafting.reduced_cache`), or its first layers with a part.

    Attributes:
        exit: layers that draft; UNSET = all with a window, else chosen from round to round, with the length of drafts.
        window: most recent tokens that are seen while drafting; UNSET = all. sinks: first ones beside them; UNSET = `SINKS`.

    Raises:
        RequestError: a window of no tokens, or sinks without a window.
    """

    EXAMPLE: ClassVar = "self:exit=6 or self:window=256,sinks=4"

    exit: int = UNSET
    window: int = UNSET
    sinks: int = UNSET

    def __post_init__(self) -> None:
        if self.window == 0:
            raise RequestError("self needs a window of at least 1 token, got window=0")
        if self.sinks != UNSET and self.window == UNSET:
            raise RequestError(f"self sees all tokens without a window: leave out sinks, or give {self.EXAMPLE}")

    @property
    def _sinks(self) -> int:
        return SINKS if self.sinks == UNSET else self.sinks

    @property
    def name(self) -> str:
        options = [] if self.exit == UNSET else [f"exit={self.exit}"]
        if self.window != UNSET:
            options.append(f"window={self.window},sinks={self._sinks}")
        return ":".join(["self", *([",".join(options)] if options else [])])

    def drafter(self, target: Runner, model: Drafter | None = None) -> Drafter:
        """Raises RequestError: the target has no such exit. UnsupportedModel: it has none, or takes no positions."""
        from shoal.drafting.early_exit import EarlyExitDrafter
        from shoal.drafting.reduced_cache import ReducedCacheDrafter
        from shoal.models.early_exit import head_of, layer_count, require_exit

        exit = None if self.exit == UNSET else self.exit
        layer_count(target)
        if exit is not None or self.window == UNSET:
            require_exit(target, 1 if exit is None else exit)
        if self.window == UNSET:
            if exit is None:
                head_of(target)
            return EarlyExitDrafter(exit)
        if not target.takes_trees:
            raise UnsupportedModel(
                f"{target.name} takes no position for each token, which drafting with a part of its cache needs"
            )
        return ReducedCacheDrafter(self.window, self._sinks, exit)
