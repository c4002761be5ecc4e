"""Which rounds can be captured, and the captured round that serves one: few are built, as each takes as long as many rounds."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.drafting.captured_inputs import Round
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import Drafter
from shoal.models.compiled.buckets import COLUMNS, bucket_for
from shoal.models.compiled.drafting import Style, style_of
from shoal.models.compiled.passes import Passes
from shoal.models.compiled.round_functions import Kind, Model
from shoal.models.compiled.rounds import CapturedRound
from shoal.models.runner import Runner
from shoal.sampling.acceptance import ChainRule, Rule, decides_chains
from shoal.types.requests import Row

MOST = 64
"""Functions of rounds kept per generation of captures: a graph takes a few megabytes, and what it returns."""
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
"""Rows that rounds are captured for: a round of fewer rows takes about as long, and each capture takes as long as many rounds."""
STEADY = 8
"""Rounds of one draft length, one after the other, before it is captured where a longer one has been."""
PENDING = 2
"""Columns of a drafter's first pass: most tokens of a row that its cache lacks."""
PIECE = 2
"""Steps that are one function where drafts end by the drafter's confidence. A wait for the host costs a tenth of a step, and half a
piece is computed in vain: `benchmarks/pieces.py` counts both."""
AT_ONCE = 8
"""Drafts whose pieces and widths are all built before the first round of their kind, so that no later round waits for a capture;
longer drafts are rare."""
LONGEST = COLUMNS[-1] - 1
"""Drafts that such a round has buffers for."""


_PROPOSE = ModelDrafter.propose
"""What captured rounds compute in one go; a drafter whose own is another one is asked for it."""


class RoundKinds:
    """The captured rounds over the caches of two models.

    Args:
        target: with the engine's cache. drafter: of the engine; None = plain decoding. rule: decides.

    Attributes:
        drafter: the same, if it is a model that drafts.
    """

    def __init__(self, target: Runner, drafter: Drafter | None, rule: Rule) -> None:
        self._target, self._rule = target, rule
        self.drafter = drafter if isinstance(drafter, ModelDrafter) else None
        self._longest, self._rounds = 0, 0  # the length last asked for, and rounds that have asked for it since

    def round_of(self, rows: Sequence[Row], lengths: Sequence[int], *, looks: bool) -> Round | None:
        """What a round of these rows computes; None where it cannot be captured. looks: drafts end by the drafter's confidence."""
        target, k = self._target, max(lengths)
        drafter = self.drafter if k else None
        if not decides_chains(self._rule) or k > LONGEST or any(row.reads_history for row in rows):
            return None
        style = style_of([row.request.sampling for row in rows], target.vocab_size, self._rule.draw)
        plan = target.plan([row.slot for row in rows], [1 + length for length in lengths])
        if style is None or target.static is None or not target.static.covers(plan, target.cache):
            return None
        if not k:
            return Round(rows, lengths, style, k, plan, None, (), ())
        if drafter is None or getattr(drafter.propose, "__func__", None) is not _PROPOSE:
            return None
        if drafter.runner.static is None or drafter.runner.device != target.device:
            return None
        held, pending = drafter.lacking(rows, lengths)
        first = drafter.runner.plan(drafter.slots(rows), [len(tokens) for tokens in pending])
        most = [-(-k // PIECE) * PIECE] if looks else dict.fromkeys((self._steps(k, target.static, style), k))
        for steps in most:
            if first.q <= PENDING and drafter.runner.static.covers(first, drafter.runner.cache, ahead=steps - 1):
                return Round(rows, lengths, style, steps, plan, first, pending, held)
        return None

    def _steps(self, k: int, passes: Passes, style: Style) -> int:
        """Drafts to compute where k are asked for: more where that has been captured and k has not, as rows that are about to end
        ask for a few rounds of each length. What is not captured costs nothing to build."""
        if passes.executor == "eager":
            return k
        self._rounds = self._rounds + 1 if k == self._longest else 1
        self._longest = k
        kinds = [kind for kind in passes.generation(self._target.cache).rounds if isinstance(kind, Kind)]
        captured = [kind.k for kind in kinds if kind.style == style and kind.k >= k and not kind.looks]
        return min(captured, default=k) if self._rounds < STEADY else k

    def prepared(self, work: Round, numbers: int, *, looks: bool) -> CapturedRound:
        """The round that serves this one. numbers: uniforms per position."""
        target, drafter = self._target, self.drafter
        assert target.static is not None
        assert isinstance(self._rule, ChainRule)
        slots = target.cache.slots - 1
        rows = min(next((size for size in ROWS if size >= work.plan.rows), slots), slots)
        built = target.static.generation(target.cache)
        drafting, keys, rounds = None, 0, built.rounds
        if work.first is not None and drafter is not None and drafter.runner.static is not None:
            drafting = Model(drafter.runner.static, drafter.runner.cache)
            rounds = built.rounds_with(drafting.passes.generation(drafting.cache))
            keys = _keys(drafting, max(work.first.tails) + work.k - 1)
        targeted = Model(target.static, target.cache)
        k, piece = (LONGEST, PIECE) if looks else (work.k, work.k)
        target_keys = _keys(targeted, max(work.plan.tails))
        kind = Kind(rows, k, PENDING, target_keys, keys, work.style, self._rule, numbers, piece)
        if kind not in rounds:
            while sum(len(round_.built) for round_ in rounds.values()) >= MOST:
                rounds.pop(next(iter(rounds)))
            rounds[kind] = CapturedRound(kind, targeted, drafting)
            for model in (targeted, drafting):
                if model is not None:
                    model.passes.built[kind] += 1
        round_: CapturedRound = rounds[kind]
        round_.build(min(work.k, AT_ONCE) if looks else work.k)
        return round_


def _keys(model: Model, keys: int) -> int:
    """Keys that a pass spans: a kernel that reads lengths on the device is given whole slots, and one round serves all lengths."""
    cache = model.cache
    bucket = None if model.passes.knows_prefixes else bucket_for(1, 1, keys, cache.capacity)
    return cache.capacity if bucket is None else bucket.keys
