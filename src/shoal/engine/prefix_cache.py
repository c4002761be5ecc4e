"""Fills caches with prompts, and keeps the prompts of earlier rows for later ones.

A group's prompt is computed once, and stored once or copied. All prompt tokens but the last are
computed here. The last prompt token is the first token of the row's first round, just as the last
committed token is the first token of any other round. The tokens of a row that was paused are a
prompt of its own.

Kept prompts serve a chat's next turn, or a common system prompt. Prompts are kept as soon as a
row's first round has shown that their logits are finite. If a row was its prompt's only sample, all
of its tokens are kept. An owner's tokens are not used for another's rows: otherwise one user could
detect another user's prompt by timing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.drafting.draft_slots import DraftMemory
from shoal.drafting.protocol import Drafter, KeyValueMemory
from shoal.engine.admission import check_policy
from shoal.models.cache.kept_prompts import common
from shoal.models.prompt_passes import feed_prefix, feed_prompts
from shoal.models.runner import Runner
from shoal.models.weights.parameter import sums
from shoal.types.requests import Row
from shoal.types.rounds import Admission, Commit, PrefillChunk, PromptOrigin, ScheduledRound

PROBED = 8
"""The number of tokens of the pass by which a target is recognised."""


class PrefixMemory:
    """The memory for the prefixes of a target and of its draft model.

    It belongs to one engine, or to several one after the other.

    Args:
        target: the model.
        draft_model: the model that drafts for it; None = there is none.
        nbytes: the most bytes of the keys and values of kept tokens, those of the draft model
            included.

    Attributes:
        kept: the prefixes of the target.
        kept_for_drafts: the prefixes of the draft model.
        draft_model: the draft model's module.
    """

    def __init__(self, target: Runner, draft_model: Runner | None, nbytes: int) -> None:
        if draft_model is not None and not (
            draft_model.can_keep_prefixes and not draft_model.memory.block
        ):
            draft_model = None  # a drafter keeps no states
        self.draft_model = None if draft_model is None else draft_model.hf
        self._tokens = nbytes // (
            target.memory.kept_token_bytes
            + (0 if draft_model is None else draft_model.memory.kept_token_bytes)
        )
        self._new_kept = target.new_kept, (target if draft_model is None else draft_model).new_kept
        self._probed: Tensor | None = None
        self._sums: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Forgets all prefixes."""
        self.kept, self.kept_for_drafts = (new_kept(self._tokens) for new_kept in self._new_kept)

    @property
    def allocated_bytes(self) -> int:
        """The bytes allocated for kept tokens, with room for more of them."""
        return self.kept.allocated_bytes + self.kept_for_drafts.allocated_bytes

    @torch.inference_mode()
    def recognise(self, target: Runner) -> None:
        """Forgets all prefixes if the target has changed since the last call.

        Its weights and buffers are compared by sums over all of their bytes. A pass over `PROBED`
        tokens detects other code, such as hooks or an adapter that is switched off. Changes of the
        draft model are not looked for, because they change no distribution.
        """
        runner = target.fork(ordinary=True)
        runner.memory.reserve(1, PROBED)
        runner.cache.rollback(0, 0)
        ids = torch.arange(PROBED, device=runner.device)[None] % min(
            runner.known_ids, runner.vocab_size
        )
        logits, checksums = runner.feed([0], ids, [PROBED]).clone(), sums(runner.hf)
        if (
            self._probed is None
            or not torch.equal(logits, self._probed)
            or len(checksums) != len(self._sums)
            or not all(map(torch.equal, checksums, self._sums))
        ):
            self.clear()
        self._probed, self._sums = logits, checksums


class PrefixCache:
    """The kept prefixes that the target of one engine uses.

    A draft model keeps up to the same number of tokens in a memory of its own
    (`shoal.drafting.draft_slots`).

    Args:
        target: the model.
        drafter: the drafter of the engine; None = there is none.
    """

    def __init__(self, target: Runner, drafter: Drafter | None, memory: PrefixMemory) -> None:
        drafted = None if drafter is None else drafter.memory
        slots = drafted.slots if isinstance(drafted, DraftMemory) else None
        _ = target.memory.token_bytes  # a new cache has its layers once this is known
        if slots is not None and slots.computes_prompts and slots.runner.hf is memory.draft_model:
            _ = slots.runner.memory.token_bytes
            slots.kept = memory.kept_for_drafts
        self._store, self._cache, self._memory = memory.kept, target.cache, memory
        self._store.serves(self._cache)

    @property
    def allocated_bytes(self) -> int:
        """The bytes allocated for kept tokens, the drafter's included, with room for more."""
        return self._memory.allocated_bytes

    @property
    def nbytes(self) -> int:
        """The bytes of all that is kept: `allocated_bytes`, and the trees that find the tokens."""
        memory = self._memory
        return self.allocated_bytes + memory.kept.tree_bytes + memory.kept_for_drafts.tree_bytes

    def kept_length(self, row: Row) -> int:
        """Returns how many leading tokens of the row's prompt are kept; its last does not count."""
        return self._store.kept_length(row.request.owner, row.tokens[: row.entry_length - 1])

    def promise(self, row: Row, other: Row) -> int:
        """Returns how many tokens will be kept once another row has had a round.

        The tokens are the first tokens of the row's prompt.
        """
        if row.request.owner != other.request.owner:
            return 0
        prompt = other.request.prompt_ids
        shared = common(row.tokens[: row.entry_length - 1], prompt)
        return self._store.reachable(shared, len(prompt) - 1)

    def restore(self, row: Row, count: int) -> None:
        """Copies the first `count` tokens of the row's prompt to its place in the cache.

        `kept_length` returned the number in this round.
        """
        self._store.load(self._cache, row.request.owner, row.tokens[:count], row.slot, row.prefix)

    def keep(self, row: Row) -> None:
        """Keeps all tokens in the cache of a row that is to be paused."""
        self._store.keep(self._cache, row.request.owner, row.tokens[:-1], row.slot)

    def learn(self, commits: Sequence[Commit]) -> None:
        """Keeps tokens with which later rows may begin.

        Args:
            commits: the commits of rows that have just had one or more rounds without a fault.
        """
        for row, new in ((commit.row, len(commit.tokens)) for commit in commits):
            if row.finish_reason and row.request.n == 1:
                self.keep(row)
            elif row.new_tokens == new and not row.index:
                self._store.keep(self._cache, row.request.owner, row.request.prompt_ids, row.slot)
            self._store.settle(self._cache, row.slot)


def policy_for(prefix_sharing: str, models: Sequence[KeyValueMemory]) -> str:
    """Returns the policy of `shoal.engine.admission` that these models allow.

    It is "copied" unless all of them take shared prompts. "auto" is "copied" also if captured
    rounds do not take them, and "grouped" if all models read them in the one call of their
    attention: each pass then reads a prompt once for all its rows, from the processor's cache, at
    no other cost.

    Raises:
        RequestError: the name is unknown.
    """
    check_policy(prefix_sharing)
    if not all(model.shares for model in models):
        return "copied"
    if prefix_sharing != "auto":
        return prefix_sharing
    if any(model.captures_without_prefixes for model in models):
        return "copied"
    return "grouped" if all(model.attends_in_one_call for model in models) else "auto"


def prefill(
    target: Runner,
    round_: ScheduledRound,
    hidden: list[Tensor] | None = None,
    prefixes: PrefixCache | None = None,
) -> int:
    """Carries out a round's admissions and moves in the target's cache.

    Args:
        target: the target, with the engine's cache.
        hidden: receives the hidden states of each of the round's chunks, [tokens, features], if the
            target keeps any.
        prefixes: the store of the tokens that admissions restore.

    Returns:
        The number of prompt tokens that were computed.
    """
    cache, admissions, chunks = target.cache, round_.admissions, round_.chunks
    computed = _copy(target, admissions, PromptOrigin.COPY)
    for admission in admissions:
        if admission.origin in (PromptOrigin.COMPUTE, PromptOrigin.SHARED):
            cache.enter(admission.row.slot, admission.row.prefix)
        if prefixes is not None and admission.restored:
            prefixes.restore(admission.row, admission.restored)
    by_slot: dict[int, Tensor] = {}
    stored: dict[int, list[Tensor]] = {}
    computed += feed_prompts(
        target,
        [(chunk.slot, _tokens(chunk)) for chunk in chunks if chunk.row.prefix is None],
        by_slot,
    )
    for number, chunk in enumerate(chunks):
        if chunk.row.prefix is not None:
            block = torch.tensor([_tokens(chunk)], device=target.device)
            computed += feed_prefix(
                target, chunk.row.prefix, chunk.start, block, stored.setdefault(number, [])
            )
    if hidden is not None and target.hidden_layers:
        nothing = torch.empty(0, 0, device=target.device)
        for number, chunk in enumerate(chunks):
            pieces = stored.get(number)
            hidden.append(
                by_slot.get(chunk.slot, nothing)
                if pieces is None
                else torch.cat(pieces)
                if pieces
                else nothing
            )
    for chunk in chunks:
        groups = [row.group for row in round_.in_slots]
        if chunk.row.request.n > groups.count(chunk.row.group):  # the others come later
            cache.hold(chunk.slot)
    computed += _copy(target, admissions, PromptOrigin.COPY_AFTER_COMPUTE)
    for move in round_.moves:
        cache.copy(move.source, move.target, cache.lengths[move.source])
    return computed


def _copy(runner: Runner, admissions: Sequence[Admission], origin: PromptOrigin) -> int:
    """Copies the prompts of the admissions with this origin.

    A prompt is computed if its source cannot go back to it. Returns the number of tokens that were
    computed.
    """
    cache, lacking = runner.cache, []
    for admission in admissions:
        if admission.origin is origin and admission.source is not None:
            row, length = admission.row, admission.row.entry_length - 1
            if cache.reaches(admission.source, length):
                cache.copy(admission.source, row.slot, length)
            else:
                cache.enter(row.slot)
                lacking.append((row.slot, row.tokens[:length]))
    return feed_prompts(runner, lacking)


def _tokens(chunk: PrefillChunk) -> Sequence[int]:
    return chunk.row.tokens[chunk.start : chunk.stop]
