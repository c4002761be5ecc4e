"""The computation of a captured round: buffers of fixed address, and functions of them.

The inputs of the round that follows another one are filled on the device by its results. The host
need not know the verdict: the next round is launched before it waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.models.cache import Plan, SlotCache
from shoal.models.compiled.block import Block, Bucket, View
from shoal.models.compiled.captures import Captures
from shoal.models.compiled.draft_functions import StepComputation, Style, feed, stepped
from shoal.models.compiled.transfer import Upload, packed_results
from shoal.models.layers.gpu_draws import on_device
from shoal.sampling.acceptance import ChainRule, accepted_lengths
from shoal.sampling.truncation import wider
from shoal.types.trees import Verdict


class Kind(NamedTuple):
    """The facts that are built into a round.

    Attributes:
        rows: rows of the bucket.
        k: drafts of each row.
        pending: columns of the drafter's first pass.
        target_keys: keys per row that the target's pass spans.
        draft_keys: keys per row that the drafter's passes span.
        style: style of the rows' sampling.
        rule: decides which drafts are accepted.
        numbers: uniforms per position.
    """

    rows: int
    k: int
    pending: int
    target_keys: int
    draft_keys: int
    style: Style
    rule: ChainRule
    numbers: int


class WrittenCells(NamedTuple):
    """The cells of a cache that a pass writes.

    Attributes:
        block: the block of the pass.
        stores: the keys of each layer and the values of each layer, [slots, capacity, ...].
        cells: flat cells [rows * q]; those of padding are the scratch cell.
    """

    block: Block
    stores: Sequence[Tensor]
    cells: Tensor


class RoundModel(NamedTuple):
    """One side of a round, the target or the drafter."""

    passes: Captures
    cache: SlotCache


class RoundFunctions:
    """The functions of a kind of round, over the caches of two models.

    Args:
        drafter: None for plain decoding, k = 0.

    Attributes:
        inputs: the upload.
        uniforms: a part of the upload, [rows, k + 1, numbers] float64.
        tokens: the last committed token of each row, then its drafts, [rows, k + 1] int64.
        steps: the results of the steps, until they are computed again; empty before.
        results: the results for the host of the target's pass that was computed last; None before.
    """

    def __init__(self, kind: Kind, target: RoundModel, drafter: RoundModel | None) -> None:
        self.kind, self._target, self._drafter = kind, target, drafter
        rows, k, device = kind.rows, kind.k, target.passes.hf.device
        blocks = {"target": (target, Bucket(rows, k + 1, kind.target_keys))}
        if drafter is not None:
            blocks["first"] = drafter, Bucket(rows, kind.pending, kind.draft_keys)
            blocks["later"] = drafter, Bucket(rows, 1, kind.draft_keys)
        sizes = {name: Block.size(bucket) for name, (_, bucket) in blocks.items()}
        sizes |= {"uniforms": rows * (k + 1) * kind.numbers, "pending": rows * kind.pending}
        sizes |= {"temperatures": rows, "lengths": rows, "last": rows}
        self.inputs = Upload(sizes, device)
        self.uniforms = self.inputs.reals("uniforms").view(rows, k + 1, kind.numbers)
        self.tokens = torch.zeros(rows, k + 1, dtype=torch.long, device=device)
        self.steps: list[StepComputation] = []
        self.results: Tensor | None = None
        candidates = target.passes.candidates.get(kind.style, kind.style.candidates)
        self._style = kind.style._replace(candidates=candidates)
        self._matches = bool(kind.style.greedy) and kind.rule.matches_greedy
        self._views = {
            name: _view(model, bucket, self.inputs[name])
            for name, (model, bucket) in blocks.items()
        }
        self.block("target").tokens = self.tokens
        if drafter is not None:
            self.block("first").tokens = self.inputs["pending"].view(rows, kind.pending)

    def widen(self) -> None:
        """Makes the functions that are built from now on look at more candidates."""
        candidates, style = self._target.passes.candidates, self.kind.style
        more = wider(self._style.candidates)
        candidates[style] = max(more, candidates.get(style, 0))
        self._style = style._replace(candidates=more)

    @property
    def state(self) -> list[Tensor]:
        """The tensors that change while a round goes on, all results aside."""
        return [self.inputs.buffer, *(view.block.tokens for view in self._views.values())]

    def fill_padding(self) -> None:
        """Fills the blocks with padding only, which writes to scratch cells.

        Functions run while they are built.
        """
        for name, view in self._views.items():
            self.inputs[name].copy_(torch.from_numpy(view.block.empty()))
        self.inputs.reals("temperatures").fill_(1.0)

    def place(self, name: str, plan: Plan) -> None:
        """Puts the rows of a pass in their places, on the host.

        Args:
            name: "target", or the drafter's "first" or "later".
            plan: the rows.
        """
        model = self._target if name == "target" else self._drafter
        assert model is not None
        self.inputs.on_host(name)[:] = self.block(name).placed(plan, model.cache.capacity)

    def block(self, name: str) -> Block:
        """Returns the block of a pass: "target", or the drafter's "first" or "later"."""
        return self._views[name].block

    def written_by_steps(self) -> list[WrittenCells]:
        """Returns the cells that the steps, which are next, write."""
        first, later = (self._views[name] for name in ("first", "later"))
        own = [(first, first.block.cells.clone())]
        counts = later.block.bounds[1]
        own += [(later, later.block.cells + j * counts) for j in range(self.kind.k - 1)]
        return [WrittenCells(view.block, view.both(), cells) for view, cells in own]

    def written_by_target(self) -> list[WrittenCells]:
        """Returns the cells that the target's pass writes."""
        view = self._views["target"]
        return [WrittenCells(view.block, view.both(), view.block.cells)]

    # ── the functions ─────────────────────────────────────────────────────────────────────────────

    def drafted(self) -> tuple[Tensor, ...]:
        """Computes the steps of the drafter; drafts go into `tokens`.

        Returns:
            The tensors that were asked for of each step.
        """
        kind, drafter = self.kind, self._drafter
        assert drafter is not None
        first, later = self._views["first"], self._views["later"]
        temperatures, steps = self.temperatures, list[StepComputation]()
        for j in range(kind.k):
            view = later if j else first
            with drafter.passes.within(view):
                step = stepped(
                    drafter.passes,
                    view,
                    self._style,
                    temperatures,
                    self.uniforms[:, j],
                    want_q=kind.rule.reads_q and not self._matches,
                )
            kernel = drafter.passes.by_kernels
            feed(
                step, later.block, same=view is later, by_kernel=kernel, kept=self.tokens[:, j + 1]
            )
            steps.append(step)
        self.steps = steps
        return tuple(tensor for step in steps for tensor in step if tensor is not None)

    def verified(self) -> tuple[Tensor, Tensor]:
        """Computes the target's pass over the drafts, and the decision.

        Returns:
            The results for the host, [rows, columns] int64, and the logits.
        """
        target, view = self._target, self._views["target"]
        self.tokens[:, 0].copy_(self.inputs["last"])
        with target.passes.within(view):
            logits = target.passes.forward(view)
        drafts = [step.tokens for step in self.steps]
        step = self._decide(logits, self.uniforms, by_kernels=target.passes.by_kernels)
        self.results = packed_results(logits, self.tokens[:, 1:], drafts, *step)
        return self.results, logits

    def decided(self, logits: Tensor, scale: float = 1.0) -> Verdict:
        """Returns the verdict on the drafts, as the rule is defined; a function of tensors.

        Args:
            logits: [rows, k + 1, vocab].
            scale: the factor of all uniforms.
        """
        return self._decide(logits, scale * self.uniforms, by_kernels=False)[0]

    def _decide(
        self, logits: Tensor, uniforms: Tensor, *, by_kernels: bool
    ) -> tuple[Verdict, Tensor | None]:
        """Returns the verdict, and the rows whose verdict is by the declared distributions.

        Candidates must suffice as far as drafts are accepted, and where the token after them is
        drawn.

        Returns:
            The rows as bool, [rows]; None = all.
        """
        kind, k = self.kind, self.kind.k
        drafts, lengths = self.tokens[:, 1:], self.inputs["lengths"]
        if self._matches:
            tokens = logits.argmax(-1)
            accepted = accepted_lengths(tokens[:, :-1] == drafts, lengths)
            probs = torch.ones(tokens.shape, dtype=self._width(), device=tokens.device)
            return Verdict(accepted, tokens.gather(1, accepted[:, None]).squeeze(1), probs), None
        temperatures, flat = self.temperatures.repeat_interleave(k + 1), logits.flatten(0, 1)
        p, enough = self._style.probabilities(flat, temperatures, by_kernels=by_kernels)
        q = [step.q for step in self.steps if step.q is not None]
        sampler = on_device(kind.style.draw, p) if by_kernels else None
        p = p.unflatten(0, (kind.rows, k + 1))
        verdict = kind.rule.decide_chains(drafts, lengths, q, p, uniforms, sampler)
        if enough is None:
            return verdict, None
        # Positions behind the first rejection are not read.
        read = torch.arange(k + 1, device=drafts.device) <= verdict.accepted[:, None]
        return verdict, (enough.view(kind.rows, k + 1) | ~read).all(-1)

    @property
    def temperatures(self) -> Tensor:
        """The temperatures of the rows, [rows]."""
        return self.inputs.reals("temperatures").to(self._width())

    def _width(self) -> torch.dtype:
        return torch.promote_types(self._target.passes.hf.dtype, torch.float32)


def _view(model: RoundModel, bucket: Bucket, numbers: Tensor) -> View:
    cache = model.cache
    block = Block(bucket, (cache.slots - 1) * cache.capacity, model.passes.hf.device, numbers)
    return model.passes.view(block, cache)


class NextRound:
    """The inputs of a round of the same rows, settings and draft lengths as the one before.

    Args:
        functions: the functions of both rounds, and their buffers.
        drafter: None for plain decoding, k = 0.
    """

    def __init__(
        self, functions: RoundFunctions, target: RoundModel, drafter: RoundModel | None
    ) -> None:
        self._functions, self._target, self._drafter = functions, target, drafter
        kind, device = functions.kind, target.passes.hf.device
        self._shape = kind.rows, 2 * (kind.k + 1), kind.numbers
        rows, positions, numbers = self._shape
        self._table = Upload({"uniforms": rows * positions * numbers}, device)
        self._table.reals_on_host("uniforms").fill(0.5)
        self._positions = torch.arange(1, kind.k + 2, device=device)

    def send(self, uniforms: Tensor) -> None:
        """Sends uniforms of several positions; `fill` takes the uniforms of the next round from
        them.

        Args:
            uniforms: those of the next 2 k + 2 positions of the rows, counted from the begin of the
                round before, [rows, positions, numbers] float64 on the host.
        """
        self._table.reuse()
        table = self._table.reals_on_host("uniforms").reshape(self._shape)
        table[: len(uniforms)] = uniforms.numpy()
        self._table.send()

    def fill(self, results: Tensor) -> tuple[Tensor, ...]:
        """Fills the inputs by the results of a round of k drafts of each row.

        A function to be captured. The drafter's cache lacks the last draft of a row that accepted
        all.

        Args:
            results: the results of the target's pass, [rows, columns] int64.

        Returns:
            No tensors: all that it writes are inputs.
        """
        functions, drafter = self._functions, self._drafter
        block, inputs, k = functions.block("target"), functions.inputs, functions.kind.k
        # Bounded, as the results hold anything when the function is built.
        accepted, following = results[:, 0].clamp(0, k), results[:, 1]
        counts = block.bounds[1].clone()
        real = counts.clamp(max=1)
        starts = block.bounds[0] + (accepted + 1) * real
        block.move(starts, counts, self._target.cache.capacity)
        inputs["last"].copy_(following)
        if drafter is not None:
            lacks, capacity = (accepted == k).long() * real, drafter.cache.capacity
            functions.block("first").move(starts - lacks, real + lacks, capacity)
            functions.block("later").move((starts + 1) * real, real, capacity)
            both = torch.stack([functions.tokens[:, k], following], dim=1)
            alone = torch.stack([following, torch.zeros_like(following)], dim=1)
            ids = drafter.passes.hf.get_output_embeddings().weight.shape[0]
            tokens = torch.where(lacks[:, None] > 0, both, alone).clamp(max=ids - 1)
            inputs["pending"].view(len(tokens), -1).copy_(tokens)
        table = self._table.reals("uniforms").view(self._shape)
        places = (accepted[:, None] + self._positions)[..., None].expand_as(functions.uniforms)
        functions.uniforms.copy_(table.gather(1, places))
        return ()
