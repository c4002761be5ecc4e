"""The kinds of rounds that can be captured, and the captured round that serves a round.

Few kinds are built, because each capture takes as long as many rounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import product
from typing import cast

from shoal.config import Sampling
from shoal.drafting.captured_inputs import DraftRound
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import Drafter
from shoal.models.compiled.block import keys_for
from shoal.models.compiled.captured_round import CapturedRound
from shoal.models.compiled.captures import Captures
from shoal.models.compiled.draft_functions import Style, style_of
from shoal.models.compiled.round_functions import Kind, RoundModel
from shoal.models.runner import Runner
from shoal.sampling.acceptance import ChainRule, Rule, decides_chains
from shoal.types.requests import Row

MOST = 64
"""The most functions of rounds that are kept for one generation of captures.

A graph takes a few megabytes, and its results take memory as well.
"""
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
"""The numbers of rows that rounds are captured for.

A round with fewer rows takes about as long, and each capture takes as long as many rounds.
"""
STEADY = 8
"""The number of successive rounds of one draft length before it is captured beside a longer one."""
PENDING = 2
"""The number of columns of a drafter's first pass: most tokens of a row that its cache lacks."""
AHEAD, AHEAD_BYTES = MOST * 3 // 4, 1 << 30
"""The most functions, and bytes of their results, that are built before a row asks for them."""
LONGEST = 16
"""The most drafts of a captured round."""


_PROPOSE = ModelDrafter.propose
"""The method that captured rounds replace. A drafter with another `propose` is not captured."""


def is_captured(target: Runner, drafter: Drafter | None) -> bool:
    """Returns True if rounds with drafts of this drafter are captured."""
    chains = _of_chains(drafter)
    return target.captures is not None and chains is not None and chains.runner.captures is not None


def _of_chains(drafter: Drafter | None) -> ModelDrafter | None:
    """Returns the drafter if it is a model that drafts chains in the target's ids."""
    chains = isinstance(drafter, ModelDrafter) and not drafter.shared and not drafter.max_nodes
    return drafter if isinstance(drafter, ModelDrafter) and chains else None


class RoundKinds:
    """The captured rounds over the caches of two models.

    Args:
        target: the target, with the engine's cache.
        drafter: the engine's drafter; None = plain decoding.
        rule: the rule that decides about drafts.

    Attributes:
        drafter: the drafter, if it is a model that drafts chains in the target's ids; None
            otherwise.
        last: the kind that was asked for last, or built.
    """

    def __init__(self, target: Runner, drafter: Drafter | None, rule: Rule) -> None:
        self._target, self._rule = target, rule
        self.drafter = _of_chains(drafter)
        # The length last asked for, and the number of rounds that have asked for it since.
        self._longest, self._repeats = (0, 0)
        self.last: Kind | None = None
        self._wanted: dict[Kind, None] = {}  # to be built between rounds, the most wanted last
        self._rows: Sequence[Row] = ()
        self._style: Style | None = None  # of these rows
        self._decides = decides_chains(rule)

    def round_of(self, rows: Sequence[Row], lengths: Sequence[int]) -> DraftRound | None:
        """Returns the round to compute for these rows; None if it cannot be captured.

        Args:
            rows: the rows.
            lengths: the draft length of each row.
        """
        target, k = self._target, max(lengths)
        drafter = self.drafter if k else None
        if (
            not self._decides
            or k > LONGEST
            or any(row.constraints or row.beginning for row in rows)
        ):
            return None
        style = self._style_of(rows)
        plan = target.plan([row.slot for row in rows], [1 + length for length in lengths])
        if (
            style is None
            or target.captures is None
            or not target.captures.covers(plan, target.cache)
        ):
            return None
        if not k:
            return DraftRound(rows, lengths, style, k=k, plan=plan, first=None, pending=(), held=())
        if drafter is None or getattr(drafter.propose, "__func__", None) is not _PROPOSE:
            return None
        if drafter.runner.captures is None or drafter.runner.device != target.device:
            return None
        held, pending = drafter.lacking(rows, lengths)
        first = drafter.runner.plan(drafter.slots(rows), [len(tokens) for tokens in pending])
        for steps in dict.fromkeys((self._steps(k, target.captures, style), k)):
            if first.q <= PENDING and drafter.runner.captures.covers(
                first, drafter.runner.cache, ahead=steps - 1
            ):
                return DraftRound(
                    rows,
                    lengths,
                    style,
                    k=steps,
                    plan=plan,
                    first=first,
                    pending=pending,
                    held=held,
                )
        return None

    def _style_of(self, rows: Sequence[Row]) -> Style | None:
        """Returns the style of rows, which stays the same while the rows do."""
        if rows != self._rows:
            samplings = [row.request.sampling for row in rows]
            self._rows = list(rows)
            self._style = style_of(samplings, self._target.vocab_size, self._rule.draw)
        return self._style

    def _steps(self, k: int, captures: Captures, style: Style) -> int:
        """Returns the number of drafts to compute if k are asked for.

        A longer captured length serves until k was asked for `STEADY` times in a row: rows near
        their end ask for each short length only a few times. The eager executor always computes k
        drafts, because it needs no capture.
        """
        if captures.executor == "eager":
            return k
        self._repeats = self._repeats + 1 if k == self._longest else 1
        self._longest = k
        if self._repeats >= STEADY:
            return k
        kinds = [
            kind
            for kind in captures.generation(self._target.cache).rounds
            if isinstance(kind, Kind)
        ]
        captured = [kind.k for kind in kinds if kind.style == style and kind.k >= k]
        return min(captured, default=k)

    def prepared(self, work: DraftRound, numbers: int) -> CapturedRound | None:
        """Returns the captured round that serves a round; None if its kind has failed.

        Args:
            work: the round.
            numbers: the number of uniforms per position.
        """
        keys = 0 if work.first is None else max(work.first.tails) + work.k - 1
        kind = self._kind(work.plan.rows, work.k, max(work.plan.tails), keys, work.style, numbers)
        self.last = kind
        if self._failed(kind):
            return None
        self._wanted.pop(kind, None)
        self._wanted[kind] = None
        while len(self._wanted) > MOST:
            del self._wanted[next(iter(self._wanted))]
        round_ = self._round(kind)
        round_.build()
        return round_

    def _kind(
        self, rows: int, k: int, target_keys: int, draft_keys: int, style: Style, numbers: int
    ) -> Kind:
        """Returns the kind of rounds over the present caches, with buckets for these sizes.

        Args:
            rows: the number of rows.
            k: the number of drafts.
            target_keys: the keys that the target's pass spans.
            draft_keys: the keys that the drafter's passes span.
            style: the way in which tokens are drawn.
            numbers: the number of uniforms per position.
        """
        target, drafting = self._models(k)
        slots = target.cache.slots - 1
        padded = min(ROWS[bisect_left(ROWS, rows)] if rows <= ROWS[-1] else slots, slots)
        spanned = 0 if drafting is None else _keys(drafting, draft_keys)
        return Kind(
            padded,
            k,
            PENDING,
            target_keys=_keys(target, target_keys),
            draft_keys=spanned,
            style=style,
            rule=cast("ChainRule", self._rule),
            numbers=numbers,
        )

    def _models(self, k: int) -> tuple[RoundModel, RoundModel | None]:
        """Returns the target's and the drafter's side of rounds of k drafts."""
        target, drafter = self._target, self.drafter
        assert target.captures is not None
        drafting = None
        if k and drafter is not None and drafter.runner.captures is not None:
            drafting = RoundModel(drafter.runner.captures, drafter.runner.cache)
        return RoundModel(target.captures, target.cache), drafting

    def _rounds(self, k: int) -> dict[Hashable, CapturedRound]:
        """Returns the rounds built over the present caches, with the drafter's cache if k > 0."""
        target, drafting = self._models(k)
        built = target.passes.generation(target.cache)
        if drafting is None:
            return built.rounds
        return built.rounds_with(drafting.passes.generation(drafting.cache))

    def _round(self, kind: Kind) -> CapturedRound:
        """Returns the round of a kind; a new round has no functions yet."""
        rounds = self._rounds(kind.k)
        if kind not in rounds:
            models = self._models(kind.k)
            while sum(len(round_.built) for round_ in rounds.values()) >= MOST:
                rounds.pop(next(iter(rounds)))
            rounds[kind] = CapturedRound(kind, *models)
            for model in models:
                if model is not None:
                    model.passes.built[kind] += 1
        return rounds[kind]

    # ── failures ──────────────────────────────────────────────────────────────────────────────────

    def fail(self, error: Exception) -> str:
        """Gives up the kind that was asked for last, or all captures if memory was short.

        Returns:
            A sentence that says which.
        """
        kind = self.last
        target, drafting = self._models(0 if kind is None else kind.k)
        consequence = target.passes.failed.note(kind and _as_failed(kind), error)
        # The graphs over a cache share their memory, which is freed when all are gone.
        if target.passes.failed.pause:
            for model in (target, drafting):
                if model is not None:
                    model.passes.forget(model.cache)
        elif kind is not None:
            self._rounds(kind.k).pop(kind, None)
        return consequence

    def _failed(self, kind: Kind) -> bool:
        captures = self._target.captures
        assert captures is not None
        return bool(captures.failures) and captures.failed.refuses(_as_failed(kind))

    # ── before a row asks ─────────────────────────────────────────────────────────────────────────

    def want(self, rows: int, drafts: Sequence[int], samplings: Sequence[Sampling]) -> None:
        """Names rounds of up to `rows` rows for `build_next`, for these settings and lengths.

        Args:
            rows: the most rows.
            drafts: the draft lengths; the first is built first.
            samplings: the settings; the first is built first.
        """
        if not self._decides or not len(self._target.cache):
            return
        numbers = self._rule.uniforms([0], [0], 1, None).flatten(2).shape[2]
        sizes = ROWS[: bisect_left(ROWS, rows) + 1]
        for size, sampling, k in product(sizes[::-1], samplings[::-1], drafts[::-1]):
            style = style_of([sampling], self._target.vocab_size, self._rule.draw)
            if style is not None and k <= LONGEST and (not k or self._drafts()):
                kind = self._kind(size, k, 1, 1, style, numbers)
                self._wanted.pop(kind, None)
                self._wanted[kind] = None

    def _drafts(self) -> bool:
        """Returns True if the drafter is a captured model on the target's device."""
        runner = None if self.drafter is None else self.drafter.runner
        return (
            runner is not None
            and runner.captures is not None
            and runner.device == self._target.device
            and len(runner.cache) > 0
        )

    def build_next(self) -> bool:
        """Builds one function of rounds that are wanted, or were before the caches were resized.

        At most `AHEAD` functions are built, and none takes the place of another.

        Returns:
            True if a function was built.
        """
        for kind in reversed(self._wanted):
            if self._failed(kind) or (kind.k and not self._drafts()):
                continue
            now = self._kind(
                kind.rows, kind.k, kind.target_keys, kind.draft_keys, kind.style, kind.numbers
            )
            target, drafting = self._models(kind.k)
            fits = (
                min(model.cache.slots for model in (target, drafting) if model is not None)
                > now.rows
            )
            known: list[CapturedRound] = list(self._rounds(kind.k).values())
            if (
                sum(len(one.built) for one in known) >= AHEAD
                or sum(one.result_bytes for one in known) >= AHEAD_BYTES
            ):
                return False
            self.last = now
            if fits and self._round(now).build_one():
                return True
        return False


def _as_failed(kind: Kind) -> Kind:
    """Returns the kind without its numbers of keys.

    A capture that fails over one cache fails over all.
    """
    return kind._replace(target_keys=0, draft_keys=0)


def _keys(model: RoundModel, keys: int) -> int:
    """Returns the number of keys that a pass spans.

    A kernel that reads lengths on the device is given whole slots, so one round serves all lengths.
    """
    cache = model.cache
    return cache.capacity if model.passes.knows_prefixes else keys_for(keys, cache.capacity)
