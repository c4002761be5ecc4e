"""The limit of the memory of keys and values, and the memory that rows need.

A cache takes slots times the longest row in them, and the prompts of the prefix store, once each.
The target alone decides which rows are served. The drafter's cache is sized for the tokens that the
drafter reads: at most its own context, and at most as many as fit beside the target's keys and
values of that row.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from shoal.config import GUIDES_PROMPTS
from shoal.drafting.draft_slots import DraftMemory
from shoal.drafting.grafting import longest
from shoal.drafting.protocol import Drafter, Keeps, KeyValueMemory, require_trees
from shoal.engine.batch_size import FIRST
from shoal.engine.guide import Guide, Together
from shoal.errors import RequestError
from shoal.models.device import kv_budget
from shoal.models.runner import Runner
from shoal.types.requests import Prefix, Request, Row, token_slots
from shoal.types.rounds import ScheduledRound

EXPECTED_DRAFT = 4
"""The draft length for which memory is counted if many rows run.

Draft lengths that follow measured costs are short then.
"""
BYTES_PER_SCORE = 16
"""The bytes of a logit, its probability and the values computed between them."""
CacheSize = tuple[int, int, int]
"""The slots, the tokens per slot, and the token slots of the prefix store."""


def grade(size: int) -> int:
    """Returns the size, or up to a quarter more: 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...

    A cache that grows one by one to n is then copied about 3 log n times, not n times.
    """
    step = 1 << max(size.bit_length() - 3, 0)
    return -(-size // step) * step


class Memory:
    """The caches of an engine's models.

    Args:
        models: the models, target first; its context bounds the rows.
        spare: the columns beyond a row's last token that a pass over several rows may write.
        most: the most bytes of all caches together; None = no limit but the machine's.
        nodes: the columns that a tree may have beyond its depth, also if a row is alone; 0 for
            chains.
        available: without `most`, the bytes that more than `few` slots may take; None = no limit.
            Unlike `most` it refuses no request and silences no drafter.
        few: see `available`.
        row_bytes: the bytes of a row beside its keys and values while a pass is judged, counted
            with `available`.
        keeps: the bytes that the drafter keeps beside its keys and values, for the rows and tokens
            that it reads.
    """

    def __init__(
        self,
        models: Sequence[KeyValueMemory],
        spare: int,
        most: int | None,
        nodes: int = 0,
        *,
        available: int | None = None,
        few: int = 0,
        row_bytes: int = 0,
        keeps: Keeps | None = None,
    ) -> None:
        self.models = models
        self._context = models[0].context
        self._spare = spare + nodes
        self._most = most
        self._nodes, self._keeps = nodes, keeps or Keeps()
        self._reserved, self._forced = 0, longest(spare - 1) + 1 - spare
        self._available, self._few, self._row_bytes = available, few, row_bytes
        if most is not None:
            for model in models:
                model.cache_bytes(1, 1)  # measures the bytes of a token before any request

    @property
    def used(self) -> int:
        """The bytes that the caches take now."""
        return sum(model.allocated_bytes for model in self.models)

    def check(self, request: Request) -> None:
        """Checks that a single row of the request fits.

        A single row takes the same memory whether its prompt is in its slot or in the prefix store.

        Raises:
            RequestError: the row is too large for the target.
        """
        if self._most is None:
            return
        need, tokens = self._target_bytes(request), self._read_tokens(request)
        if need > self._most:
            raise RequestError(
                f"a row of up to {tokens} tokens takes {need} bytes of KV cache, and there are "
                f"{self._most}: shorten the prompt or lower max_new_tokens"
            )

    def draft_context(self, request: Request) -> int:
        """Returns the most tokens of a row of the request that the drafter reads.

        The number is limited by the drafter's context, and by the memory that the target's keys and
        values of one such row leave. The target alone decides if the row is served and where it
        ends.
        """
        context = min((drafter.context for drafter in self.models[1:]), default=sys.maxsize)
        if self._most is None or (len(self.models) == 1 and self._keeps == Keeps()):
            return context
        left = self._most - self._target_bytes(request) - self._keeps.always
        return bisect_right(
            range(1, min(context, self._context) + 1), left, key=self._drafter_bytes
        )

    def _target_bytes(self, request: Request) -> int:
        return self.models[0].cache_bytes(1, self._read_tokens(request) + self._beyond(1))

    def _drafter_bytes(self, tokens: int) -> int:
        caches = sum(
            drafter.cache_bytes(1, tokens + self._beyond(1)) for drafter in self.models[1:]
        )
        return caches + self._keeps.of_request(tokens, 1)

    def _tokens(self, request: Request) -> int:
        """Returns the most tokens of a row."""
        return min(len(request.prompt_ids) + request.limits.max_new_tokens, self._context)

    def _read_tokens(self, request: Request) -> int:
        """Returns the most tokens that a target, or its guide, reads of a row."""
        most = self._tokens(request)
        return most + max(_own_prompt(request) - len(request.prompt_ids), 0)

    def _beyond(self, slots: int) -> int:
        """Returns the columns beyond a row's last token that a pass may write.

        They are padding, which a pass over one row does not have.
        """
        return self._spare if slots > 1 else 1 + self._nodes

    def fits(self, rows: Sequence[Row], slots: int, prefixes: Mapping[int, Prefix]) -> bool:
        """Returns True if there is memory for these rows.

        Args:
            prefixes: the prompts in the prefix store, by group.
        """
        most, beside = self._limit(slots)
        if most is None:
            return True
        need = sum(
            model.cache_bytes(*self._size(model, rows, slots, prefixes)) for model in self.models
        )
        return need + beside + self.kept_bytes(rows) <= most

    def kept_bytes(self, rows: Sequence[Row]) -> int:
        """Returns the most bytes that the drafter keeps of these rows, without keys and values."""
        if self._keeps == Keeps():
            return 0
        groups: dict[int, list[Row]] = {}
        for row in rows:
            if row.draft_reach:
                groups.setdefault(row.group, []).append(row)
        total = self._keeps.always
        for members in groups.values():
            prompt = members[0].prompt_length
            new = sum(
                max(min(self._tokens(row.request), row.draft_reach) - prompt, 0) for row in members
            )
            total += self._keeps.of_request(prompt + new, len(members))
        return total

    def reserve_tokens(self, tokens: int) -> None:
        """Reserves memory for a target cache of one row, beside the engine's caches.

        Args:
            tokens: the tokens of the row; 0 = no memory.

        Raises:
            RequestError: they never fit.
        """
        if self._most is None:
            return
        need = self.models[0].cache_bytes(1, tokens)
        if need > self._most:
            raise RequestError(
                f"{tokens} tokens take {need} bytes of KV cache, and there are {self._most}: "
                f"shorten the prompt"
            )
        self._reserved = need if tokens else 0

    def prepare(self, slots: int, tokens: int) -> bool:
        """Sizes the caches before there are rows; returns True if they were sized.

        They are sized only if they then take at most half of the memory: rows of another shape must
        find room as well.

        Args:
            slots: the number of rows.

        Raises:
            OutOfMemory.
        """
        beyond = self._beyond(slots)
        sizes = [(slots, min(tokens, model.context) + beyond, 0) for model in self.models]
        # `_grown_bytes` measures the bytes of a token, which the limit needs.
        need, (most, beside) = (self._grown_bytes(sizes), self._limit(slots))
        if most is not None and need + beside > most // 2:
            return False
        for model, size in zip(self.models, sizes, strict=True):
            model.reserve(*size)
        return True

    def allocate(self, round_: ScheduledRound, *, idle: bool = False) -> None:
        """Sizes the caches for the rows that a round has in its slots.

        The caches keep the size they had, unless that would be too much. If there is enough memory,
        they get room to spare: a cache that grows by one row is copied as a whole.

        Args:
            idle: True to give all room back that the round does not need.

        Raises:
            OutOfMemory.
        """
        sizes = [
            self._size(model, round_.in_slots, round_.slots, round_.prefixes)
            for model in self.models
        ]
        if idle:
            for model, size in zip(self.models, sizes, strict=True):
                model.trim(*size)
            return
        roomy = [(grade(slots), grade(capacity), grade(cells)) for slots, capacity, cells in sizes]
        most, beside = self._limit(round_.slots)
        beside += self.kept_bytes(round_.in_slots)
        if most is None or self._grown_bytes(roomy) + beside <= most:
            sizes = roomy
        elif self._most is not None and self._grown_bytes(sizes) + beside > most:
            for model, size in zip(self.models, sizes, strict=True):
                model.trim(*size)
        for model, size in zip(self.models, sizes, strict=True):
            if model.wastes(*size):  # the prompts of free slots stay otherwise
                slots, _, cells = size
                model.trim(slots, self._context + self._spare, cells)
            model.reserve(*size)

    def _grown_bytes(self, sizes: Sequence[CacheSize]) -> int:
        """Returns the bytes of the caches with at least these sizes; none becomes smaller."""
        return sum(model.grown_bytes(*size) for model, size in zip(self.models, sizes, strict=True))

    def _limit(self, slots: int) -> tuple[int | None, int]:
        """Returns the limit of caches with this number of slots, and the bytes to leave free.

        The limit is the most bytes; None = no limit. The free bytes are beside the caches.
        """
        if self._most is None and slots > self._few:
            return self._available, slots * self._row_bytes
        return self._most, self._reserved

    def _size(
        self, model: KeyValueMemory, rows: Sequence[Row], slots: int, prefixes: Mapping[int, Prefix]
    ) -> CacheSize:
        """Returns the size of the cache that the model needs."""
        stored, spare = list(prefixes.values()), self._beyond(slots)
        if model is self.models[0]:
            bound = slots > 1 and any(row.constraints for row in rows)
            spare += self._forced if bound else 0
        else:
            rows = [row for row in rows if row.draft_reach]
            stored = [prefix for prefix in stored if prefix.drafted]
        most = max(
            (self._slot_tokens(model, row, prefixes.get(row.group)) for row in rows), default=None
        )
        capacity = 0 if most is None else most + spare
        return slots, capacity, token_slots(stored)

    def _slot_tokens(self, model: KeyValueMemory, row: Row, prefix: Prefix | None) -> int:
        """Returns the most tokens that the row's slot will hold in the model's cache."""
        request = row.request
        most, prompt = self._tokens(request), len(request.prompt_ids)
        if model is not self.models[0]:
            most = min(most, row.draft_reach)
            return most if prefix is None else max(most - prefix.length, 0)
        if prefix is None:
            return self._read_tokens(request)
        own = _own_prompt(request)
        return max(most - prefix.length, own and own + most - prompt)


def _own_prompt(request: Request) -> int:
    """Returns the most tokens that a guide or an expert reads in place of the prompt."""
    return max(len(getattr(request.sampling, name)) for name in GUIDES_PROMPTS.values())


def _attach(
    target: Runner, drafter: Drafter | None, guides: Sequence[Guide]
) -> list[KeyValueMemory]:
    """Attaches a drafter to an engine's target; returns the keys and values of all models.

    The target and its guides, which hold the same tokens, come first.
    """
    first: KeyValueMemory = target.memory
    if guides:
        first = Together(first, [DraftMemory(one.slots) for one in guides])
    if drafter is None:
        return [first]
    for verifier in [target, *(one.runner for one in guides)]:
        require_trees(verifier, drafter)
    drafter.attach(target)
    target.hidden_layers = tuple(drafter.hidden_layers)
    return [first] if drafter.memory is None else [first, drafter.memory]


def memory_of(
    target: Runner,
    drafter: Drafter | None,
    guides: Sequence[Guide],
    limit: int,
    *,
    most: int | None,
    bounded: bool,
) -> Memory:
    """Returns the memory of an engine's caches, once the drafter is attached to the target.

    Args:
        drafter: the drafter; None = there is none.
        guides: the guide of rows with guidance, and the expert.
        limit: the longest draft.
        most: see `Memory`.
        bounded: True if the device's memory bounds the number of rows.
    """
    models = _attach(target, drafter, guides)
    for model in models:
        model.expect_drafts(0 if drafter is None else limit)
    columns = 1 + min(limit, EXPECTED_DRAFT)
    keeps = Keeps() if drafter is None else drafter.keeps
    return Memory(
        models,
        limit + 1,
        most,
        0 if drafter is None else drafter.max_nodes,
        available=kv_budget(target.device) if bounded else None,
        few=FIRST,
        row_bytes=columns * target.vocab_size * BYTES_PER_SCORE * (1 + len(guides)),
        # Bytes in the host's memory count only if the caches are there, too.
        keeps=keeps if keeps.on_device or target.device.type == "cpu" else Keeps(),
    )
