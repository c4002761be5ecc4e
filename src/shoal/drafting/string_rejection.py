"""SLRS, string-level rejection sampling, for drafters that write bytes or characters.

Timor et al. 2025, arXiv 2502.05202, Algorithm 3. psi of a token is the probability that it is the
longest token of the target with which the drafter's text begins: the probability that the text
begins with its bytes, less those of the tokens next longer. The paper sums over the texts that its
tokenizer splits so; the longest token follows from the drafter's distributions alone. The drafter's
next texts are looked at as far as they are likely, without drawing anything; beyond that, psi
counts for the shorter token. Tokens are drawn from psi, as any drafter's from its q, and this very
psi is verified: the result is exact however far the texts were looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.drafting.contexts import Contexts
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import DraftInputs
from shoal.errors import PairMismatch
from shoal.models.spelling import MOST_DEPTH, TokenTrie
from shoal.models.vocabulary import Vocabularies
from shoal.sampling.distributions import draws
from shoal.types.rounds import Faults
from shoal.types.trees import DraftTree, Positions, chains

WIDTH = 4
"""The most texts of one length that are looked beyond, for a row and a token."""
LIKELY = 0.05
"""The least probability of a text that is looked beyond."""
ROOM = MOST_DEPTH * (1 + WIDTH)
"""The most tokens of the drafter that a row takes beside its draft.

They are for texts that are looked at, and for the last token.
"""


@dataclass
class Beginnings:
    """The probabilities of the beginnings of the text that the drafter writes next in a row.

    Attributes:
        psi: psi of the target's tokens, [vocab] float64.
        nodes: the nodes of the trie that were looked beyond, without the root.
        parents: the indices of their parents among `nodes`; -1 = the root.
        likely: the nodes that may be looked beyond next, with their probabilities and parents.
    """

    psi: npt.NDArray[np.float64]
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    likely: list[tuple[float, int, int]] = field(default_factory=list)

    def look(
        self, trie: TokenTrie, node: int, place: int, reached: float, says: npt.NDArray[np.float64]
    ) -> None:
        """Looks beyond a node.

        Args:
            trie: the trie of the target's tokens.
            node: the node.
            place: its index among `nodes`.
            reached: its probability.
            says: the probabilities of the drafter's ids after it.
        """
        children = trie.children(node)
        chances = reached * says[trie.symbols[children]]
        tokens = trie.tokens[children]
        self.psi[tokens[tokens >= 0]] += chances[tokens >= 0]
        if trie.above[node] >= 0:
            self.psi[trie.above[node]] -= chances[tokens >= 0].sum()
        further = trie.inner(children) & (chances >= LIKELY)
        self.likely += zip(
            chances[further].tolist(),
            children[further].tolist(),
            [place] * int(further.sum()),
            strict=True,
        )

    def next(self) -> list[tuple[float, int, int]]:
        """Moves the nodes to look beyond next, all of one depth, from `likely` into `nodes`."""
        chosen, self.likely = sorted(self.likely, reverse=True)[:WIDTH], []
        self.nodes += [node for _, node, _ in chosen]
        self.parents += [parent for *_, parent in chosen]
        return chosen


class StringRejection:
    """A method that draws tokens of the target from psi of a drafter.

    Args:
        drafter: the drafter, with the model and its cache.
        contexts: the contexts of its rows.
        vocabularies: the target's vocabulary and the drafter's.

    Raises:
        PairMismatch: a token of the drafter begins with another one, or its head is trimmed.
    """

    def __init__(
        self, drafter: ModelDrafter, contexts: Contexts, vocabularies: Vocabularies
    ) -> None:
        self._drafter, self._contexts, self._ratio = drafter, contexts, vocabularies.ratio
        if vocabularies.trie is None:
            raise PairMismatch(
                f"{drafter.runner.name} cannot draft by SLRS: it is for drafters whose tokens "
                f"are bytes or characters alone"
            )
        self._trie = vocabularies.trie

    def steps(self, lengths: Sequence[int]) -> int:
        """Returns the drafter's tokens for drafts of these lengths, with the texts looked at."""
        return self._most(lengths) + ROOM

    def passes(self, lengths: Sequence[int]) -> int:
        """Returns the drafter's passes for drafts of these lengths in a usual text.

        The real number of passes depends on the drawn tokens, also on those of rejected drafts: a
        choice of later rounds by that number would change the distribution.
        """
        return ceil((1 + self._ratio) * max(lengths))

    def _most(self, lengths: Sequence[int]) -> int:
        return ceil(2 * self._ratio * max(lengths))

    def propose(self, inputs: DraftInputs) -> DraftTree:
        """Returns chains with their q; a draft ends early if its text has become long."""
        passes = _Round(self._drafter, self._trie, inputs)
        rows, lengths, most = inputs.rows, list(inputs.lengths), self._most(inputs.lengths)
        drafts: list[list[int]] = [[] for _ in rows]
        q: list[Tensor] = []
        while len(q) < max(lengths):
            j, faults = len(q), Faults()
            logits = passes.logits([length > j for length in lengths])
            drawn = draws(
                logits[:, None],
                Positions(rows, drafts, first=j),
                inputs.sampler,
                inputs.uniforms[:, j, None],
                faults,
                want_p=inputs.needs_q,
                want_highest=inputs.stop is not None,
            )
            q.append(logits if drawn.p is None else drawn.p[:, 0])
            if inputs.stop is not None:
                highest = drawn.probs if drawn.highest is None else drawn.highest
                sure = [
                    0.0 if row in faults else value
                    for row, value in zip(rows, highest[:, 0].tolist(), strict=True)
                ]
                lengths = [min(pair) for pair in zip(lengths, inputs.stop(j, sure), strict=True)]
            for b, (row, token) in enumerate(zip(rows, drawn.tokens[:, 0].tolist(), strict=True)):
                if row in faults or passes.failed[b]:
                    lengths[b] = min(lengths[b], j)
                if lengths[b] > j:
                    ids = self._trie.sequences.get(token, ())
                    drafts[b].append(token)
                    passes.write(b, ids)
                    ended = not ids or token in row.eos or len(passes.written[b]) >= most
                    lengths[b] = j + 1 if ended else lengths[b]
        passes.finish()
        for row, written, length in zip(rows, passes.written, inputs.lengths, strict=True):
            if length:
                self._contexts.of(row).drafted = written
        return _tree(drafts, q if inputs.needs_q else None, inputs.uniforms.device, len(q))


class _Round:
    """The passes of a proposal.

    Attributes:
        written: the drafter's ids of each row's draft so far.
        failed: for each row, True if the drafter gave no distribution.
    """

    def __init__(self, drafter: ModelDrafter, trie: TokenTrie, inputs: DraftInputs) -> None:
        self._drafter = drafter
        self._trie = trie
        self._inputs = inputs
        self._runner = drafter.runner
        self._held, _ = drafter.lacking(inputs.rows, inputs.lengths)
        self._slots = drafter.slots(inputs.rows)
        own = [drafter.read_as(row).tokens for row in inputs.rows]
        self._last = [tokens[-1] for tokens in own]
        self._ends = [
            len(t) if length else held
            for t, length, held in zip(own, inputs.lengths, self._held, strict=True)
        ]
        self.written: list[list[int]] = [[] for _ in own]
        self.failed = [False] * len(own)
        self._new: list[list[int]] = [[] for _ in own]
        self._begun = False

    def write(self, b: int, ids: Sequence[int]) -> None:
        """Appends ids to the row's draft."""
        self.written[b] += ids
        self._new[b] = list(ids)

    def logits(self, live: Sequence[bool]) -> Tensor:
        """Returns log psi of each row's next token, [rows, vocab].

        The dtype is the drafter's, but at least float32. Rows that are no longer drafted for have
        meaningless values.
        """
        vocab, first = self._drafter.vocab_size, self._first(live)
        says = _probabilities(first)
        known = [Beginnings(np.zeros(vocab)) for _ in live]
        for b, is_live in enumerate(live):
            if is_live:
                self._look(b, known[b], 0, -1, 1.0, says[b])
        while any(chosen := [one.next() for one in known]):
            says = _probabilities(self._beyond(known, chosen))
            for b, one in enumerate(known):
                start = len(one.nodes) - len(chosen[b])
                for i, (reached, node, _) in enumerate(chosen[b]):
                    self._look(b, one, node, start + i, reached, says[b, i])
        for b, is_live in enumerate(live):
            if not is_live or self.failed[b]:
                known[b].psi[:] = 1.0
        psi = torch.from_numpy(np.stack([one.psi for one in known])).clamp_(min=0.0)
        kind = first.dtype if first.dtype == torch.float64 else torch.float32
        return psi.log_().to(self._inputs.uniforms.device, kind)

    def _look(
        self,
        b: int,
        one: Beginnings,
        node: int,
        place: int,
        reached: float,
        says: npt.NDArray[np.float64],
    ) -> None:
        if np.isfinite(says).all():
            one.look(self._trie, node, place, reached, says)
        else:
            self.failed[b] = True

    def finish(self) -> None:
        """Leaves each row's cache with its committed and drafted tokens."""
        rows = self._inputs.rows
        self._drafter.clean([row for row, failed in zip(rows, self.failed, strict=True) if failed])
        self._drafter.leave_out(rows, self._inputs.lengths, self._held)

    def _first(self, live: Sequence[bool]) -> Tensor:
        """Returns the logits after each row's draft so far, [rows, vocab of the drafter]."""
        if not self._begun:
            self._begun = True
            return self._drafter.first_logits(self._inputs)
        blocks = [new if is_live else [0] for new, is_live in zip(self._new, live, strict=True)]
        logits = self._feed(blocks)
        for b, (block, is_live) in enumerate(zip(blocks, live, strict=True)):
            if is_live:
                self._last[b], self._ends[b] = block[-1], self._ends[b] + len(block)
            self._runner.cache.rollback(self._slots[b], self._ends[b])
        ends = torch.tensor([len(block) - 1 for block in blocks], device=logits.device)
        return logits[torch.arange(len(blocks), device=logits.device), ends]

    def _beyond(self, known: Sequence[Beginnings], chosen: Sequence[Sequence[object]]) -> Tensor:
        """Returns the logits after the last nodes of each row, with padding.

        They have shape [rows, most nodes of a row, vocab of the drafter].
        """
        symbols, cache = self._trie.symbols, self._runner.cache
        blocks: list[list[int]] = []
        for b, one in enumerate(known):
            if one.nodes:
                cache.rollback(self._slots[b], self._ends[b] - 1)
            blocks.append([self._last[b] if one.nodes else 0, *symbols[one.nodes].tolist()])
        logits = self._feed(blocks, [one.parents for one in known])
        for slot, end in zip(self._slots, self._ends, strict=True):
            cache.rollback(slot, end)
        widest = max(map(len, chosen))
        starts = torch.tensor(
            [len(block) - len(new) for block, new in zip(blocks, chosen, strict=True)],
            device=logits.device,
        )
        columns = (starts[:, None] + torch.arange(widest, device=logits.device)).clamp(
            max=logits.shape[1] - 1
        )
        return logits[torch.arange(len(blocks), device=logits.device)[:, None], columns]

    def _feed(
        self, blocks: Sequence[list[int]], parents: Sequence[list[int]] | None = None
    ) -> Tensor:
        counts = [len(block) for block in blocks]
        padded = [block + block[:1] * (max(counts) - len(block)) for block in blocks]
        tokens = torch.tensor(padded, device=self._runner.device)
        return self._runner.feed(self._slots, tokens, counts, parents=parents)


def _probabilities(logits: Tensor) -> npt.NDArray[np.float64]:
    return logits.double().softmax(-1).cpu().numpy()


def _tree(
    drafts: list[list[int]], q: list[Tensor] | None, device: torch.device, steps: int
) -> DraftTree:
    if not any(drafts):
        return DraftTree.empty(len(drafts), device, steps)
    tree = DraftTree.of(drafts, device=device, steps=steps)
    return DraftTree(
        tree.tokens, tree.lengths, q and q[: tree.m], tree.drafts, chains(drafts), steps
    )
