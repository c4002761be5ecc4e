"""A round as two static functions: all steps of a model that drafts, and the target's pass with the decision.

What changes from round to round comes in one upload: positions, pending tokens, draft lengths, temperatures, uniforms. What the
host must know comes back in one download: drafts, the verdict, probabilities, and whether all logits were sound. In between
nothing is asked of the host: drafts go from step to step and into the target's block on the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.models.cache import Plan, SlotCache
from shoal.models.compiled.block import Block
from shoal.models.compiled.buckets import Bucket
from shoal.models.compiled.drafting import Result, Style, feed, stepped
from shoal.models.compiled.executors import Run
from shoal.models.compiled.passes import Passes
from shoal.models.compiled.transfer import Numbers, Upload, fetched, host_buffer, packed
from shoal.models.compiled.view import View
from shoal.sampling.acceptance import ChainRule, accepted_lengths
from shoal.sampling.truncation import wider
from shoal.types.rounds import Verdict

_TOO_FEW = 2
"""Added to what is known of a row's logits where its verdict would need more candidates."""


class Kind(NamedTuple):
    """What is built into a round.

    Attributes:
        rows: of the bucket. k: drafts of each row. pending: columns of the drafter's first pass.
        target_keys, draft_keys: keys per row that the passes span.
        style: of the rows' sampling. rule: decides. numbers: uniforms per position.
        confidences: whether those of the drafter are wanted.
    """

    rows: int
    k: int
    pending: int
    target_keys: int
    draft_keys: int
    style: Style
    rule: ChainRule
    numbers: int
    confidences: bool


@dataclass(frozen=True)
class Model:
    """One side of a round."""

    passes: Passes
    cache: SlotCache


@dataclass(frozen=True)
class Found:
    """What came back of a round, of its real rows: drafts [rows, k], -1 where the drafter has no distribution; the verdict's
    numbers; `confidences` [rows, k] or None; `sound` [rows]: whether the target's logits are, and the verdict by what they declare.

    Attributes:
        too_few: whether candidates were too few for some row; the next round looks at more.
        logits: of the target, [rows, k + 1, vocab], on the device, good until the next round.
        share: of the round's time on the device, the drafter's.
    """

    drafts: Numbers
    accepted: Numbers
    tokens: Numbers
    sound: npt.NDArray[np.bool_]
    too_few: bool
    probs: npt.NDArray[np.float64]
    logprobs: npt.NDArray[np.float64]
    confidences: npt.NDArray[np.float64] | None
    logits: Tensor
    share: float


class CapturedRound:
    """The two functions over the caches of two models, built.

    Args:
        drafter: None for plain decoding, k = 0.
    """

    def __init__(self, kind: Kind, target: Model, drafter: Model | None) -> None:
        self.kind, self._target, self._drafter = kind, target, drafter
        rows, k, device = kind.rows, kind.k, target.passes.hf.device
        buckets = {"target": Bucket(rows, k + 1, kind.target_keys)}
        if drafter is not None:
            buckets["first"] = Bucket(rows, kind.pending, kind.draft_keys)
            buckets["later"] = Bucket(rows, 1, kind.draft_keys)
        sizes = {name: Block.size(bucket) for name, bucket in buckets.items()}
        sizes |= {"uniforms": rows * (k + 1) * kind.numbers, "temperatures": rows, "lengths": rows, "last": rows}
        self.inputs = Upload(sizes | {"pending": rows * kind.pending}, device)
        self._views = {
            name: _view(target if name == "target" or drafter is None else drafter, bucket, self.inputs[name])
            for name, bucket in buckets.items()
        }
        self.uniforms = self.inputs.reals("uniforms").view(rows, k + 1, kind.numbers)
        if drafter is not None:
            self._views["first"].block.tokens = self.inputs["pending"].view(rows, kind.pending)
        self._draft: Run | None = None
        self._verify: Run | None = None
        self._host: Tensor | None = None
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            if device.type == "cuda" and torch.cuda.is_available()
            else []
        )
        self.checked = False
        self.steps: list[Result] = []
        self._matches = bool(kind.style.greedy) and kind.rule.matches_greedy
        self._style = kind.style._replace(candidates=target.passes.candidates.get(kind.style, kind.style.candidates))
        self._build()

    def _build(self) -> None:
        self._draft = self._verify = None  # if need be, ends those before
        self._fill_padding()
        execute = self._target.passes.generation(self._target.cache).execute
        self._draft = execute(self._drafted) if self._drafter is not None else None
        self._verify = execute(self._verified)

    def _widen(self) -> None:
        """Builds the functions anew, for more candidates: fewer than top_p keeps were looked at."""
        passes, style = self._target.passes, self.kind.style
        more = wider(self._style.candidates)
        passes.candidates[style] = max(more, passes.candidates.get(style, 0))
        self._style = style._replace(candidates=more)
        self.checked = False
        with passes.building(f"a round with {more} candidates"):
            self._build()

    def _fill_padding(self) -> None:
        """Blocks that write to scratch cells only, as the functions run while they are built."""
        for name, view in self._views.items():
            self.inputs.put(name, view.block.empty())
        self.inputs.put("temperatures", np.ones(self.kind.rows))
        self.inputs.send()

    # ── the functions ───────────────────────────────────────────────────────────────────────────────────────────────

    def _drafted(self) -> tuple[Tensor, ...]:
        """All steps; drafts go into the target's block. Returns drafts [rows, k], then what was asked for of each step."""
        kind, drafter = self.kind, self._drafter
        assert drafter is not None
        first, later, target = (self._views[name] for name in ("first", "later", "target"))
        temperatures = self.temperatures
        self.steps = []
        for j in range(kind.k):
            view = later if j else first
            with drafter.passes.within(view):
                found = stepped(
                    drafter.passes, view, self._style, temperatures, self.uniforms[:, j],
                    want_q=kind.rule.reads_q and not self._matches, want_confidence=kind.confidences,
                )  # fmt: skip
            feed(found, later.block, same=view is later)
            target.block.tokens[:, j + 1].copy_(found.fed)
            self.steps.append(found)
        drafts = torch.stack([found.tokens for found in self.steps], dim=1)
        kept = [tensor for found in self.steps for tensor in (found.q, found.confidence, found.logits) if tensor is not None]
        return (drafts, *kept)

    def _verified(self) -> tuple[Tensor, Tensor]:
        """The target's pass and the decision. Returns what comes back to the host, [rows, columns] int64, and the logits."""
        kind, target, view = self.kind, self._target, self._views["target"]
        view.block.tokens[:, 0].copy_(self.inputs["last"])
        with target.passes.within(view):
            logits = target.passes.forward(view)
        drafts = self.target_drafts
        verdict, listed = self._decide(logits, drafts)
        inside = torch.arange(kind.k, device=drafts.device) < verdict.accepted[:, None]
        path = torch.cat([torch.where(inside, drafts, verdict.token[:, None]), verdict.token[:, None]], dim=1)
        width = torch.promote_types(logits.dtype, torch.float32)
        logprobs = logits.log_softmax(-1, dtype=width).gather(-1, path[..., None]).squeeze(-1)
        sound = (logits.amax(-1).abs().amax(-1) < torch.inf).long()
        if listed is not None:
            sound = torch.where(listed, sound, sound + _TOO_FEW)
        drawn = [found.tokens[:, None] for found in self.steps]
        confidences = [found.confidence[:, None] for found in self.steps if found.confidence is not None]
        results = packed(verdict.accepted, verdict.token, sound, verdict.probs, logprobs, *drawn, *confidences)
        return results, logits

    def decided(self, logits: Tensor, drafts: Tensor) -> Verdict:
        """The verdict on drafts [rows, k] by logits [rows, k + 1, vocab]; a function of tensors."""
        return self._decide(logits, drafts)[0]

    def _decide(self, logits: Tensor, drafts: Tensor) -> tuple[Verdict, Tensor | None]:
        """The verdict, and of which rows it is by the declared distributions [rows], None = of all: candidates must suffice as far
        as drafts are accepted, and where the token after them is drawn."""
        kind = self.kind
        lengths = self.inputs["lengths"]
        if self._matches:
            said = logits.argmax(-1)
            accepted = accepted_lengths(said[:, : kind.k] == drafts, lengths)
            probs = torch.ones(said.shape, dtype=self._width(), device=said.device)
            return Verdict(accepted, said.gather(1, accepted[:, None]).squeeze(1), probs), None
        temperatures = self.temperatures.repeat_interleave(kind.k + 1)
        p, enough = self._style.probabilities(logits.flatten(0, 1), temperatures)
        q = [found.q for found in self.steps if found.q is not None]
        verdict = kind.rule.decide_chains(drafts, lengths, q, p.unflatten(0, (kind.rows, kind.k + 1)), self.uniforms)
        if enough is None:
            return verdict, None
        # What a position behind the first rejection says is not read.
        read = torch.arange(kind.k + 1, device=drafts.device) <= verdict.accepted[:, None]
        return verdict, (enough.view(kind.rows, kind.k + 1) | ~read).all(-1)

    @property
    def temperatures(self) -> Tensor:
        """Of the rows, [rows]."""
        return self.inputs.reals("temperatures").to(self._width())

    @property
    def target_drafts(self) -> Tensor:
        """What the target was fed after each row's last token, [rows, k] int64."""
        return self._views["target"].block.tokens[:, 1:]

    def _width(self) -> torch.dtype:
        return torch.promote_types(self._target.passes.hf.dtype, torch.float32)

    # ── a round ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def place(self, name: str, plan: Plan) -> None:
        """Puts the rows of one of the passes where they are: "target", "first" or "later"."""
        model = self._target if name == "target" or self._drafter is None else self._drafter
        self.inputs.put(name, self._views[name].block.placed(plan, model.cache.capacity))

    def __call__(self, rows: int) -> Found:
        """Runs what was put into the inputs, and waits for the results of the first `rows`."""
        assert self._verify is not None
        self.inputs.send()
        marks = [self._mark(0)]
        if self._draft is not None:
            self._draft()
        marks.append(self._mark(1))
        results, self.logits = self._verify()
        marks.append(self._mark(2))
        if self._host is None:
            self._host = host_buffer(results.numel(), results.device)
        found = self._unpacked(fetched(results, self._host)[:rows].copy(), self.logits[:rows], self._share(marks))
        if found.too_few:
            self._widen()
        return found

    def _unpacked(self, numbers: Numbers, logits: Tensor, share: float) -> Found:
        k = self.kind.k
        ends = np.cumsum([1, 1, 1, k + 1, k + 1, k])
        accepted, tokens, sound, probs, logprobs, drafts, confidences = np.split(numbers, ends, axis=1)
        return Found(
            drafts, accepted[:, 0], tokens[:, 0], sound[:, 0] == 1, bool((sound >= _TOO_FEW).any()), _reals(probs),
            _reals(logprobs), _reals(confidences) if self.kind.confidences and k else None, logits, share,
        )  # fmt: skip

    def _mark(self, place: int) -> float:
        """A moment between the functions: by an event on a GPU, where they have only been launched by then."""
        if self._events:
            self._events[place].record()
        return time.perf_counter()

    def _share(self, marks: Sequence[float]) -> float:
        if self._events:
            drafting, verifying = (self._events[i].elapsed_time(self._events[i + 1]) for i in (0, 1))
        else:
            drafting, verifying = marks[1] - marks[0], marks[2] - marks[1]
        return drafting / max(drafting + verifying, 1e-12) if self._draft is not None else 0.0


def _view(model: Model, bucket: Bucket, numbers: Tensor) -> View:
    cache = model.cache
    block = Block(bucket, (cache.slots - 1) * cache.capacity, model.passes.hf.device, numbers)
    return model.passes.view(block, cache)


def _reals(numbers: Numbers) -> npt.NDArray[np.float64]:
    return np.ascontiguousarray(numbers).view(np.float64)
