"""The Drafter protocol: what the engine asks of whatever proposes tokens.

A drafter is exact by construction as long as it is honest about q: a proposal either carries the
distribution that its tokens were really drawn from, or none (`DraftTree.q` is None), and is then
verified by exact match. The output has the target's distribution however bad the drafts are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shoal.config import MOST_NODES
from shoal.errors import InternalError, RequestError, UnsupportedModel
from shoal.models.runner import Runner
from shoal.sampling.scores import Scores
from shoal.types.requests import Row
from shoal.types.rounds import Verdict
from shoal.types.schedule import PrefillChunk
from shoal.types.trees import DraftTree

Sampler = Callable[[Tensor, Tensor], Tensor]
"""q [rows, vocab] and the uniforms of one position [rows, ...] -> one token per row, [rows]
int64."""
Stop = Callable[[int, Sequence[float]], Sequence[int]]
"""Asked before the tokens of a position are drawn, with the position and the drafter's highest
probability there, one per row: how long each row's draft may still become. A token once drawn is
proposed: to drop it for what it is would bias the distribution."""


@dataclass(frozen=True)
class DraftInputs:
    """What a drafter is given in a round.

    Attributes:
        rows: those of the round; `row.tokens` are the prompt and what was committed.
        lengths: the most tokens that may follow each row's last one on any path of its tree, 0
            included; at least one is positive. Nothing need be computed for a row with 0.
        uniforms: of each row's next positions, [rows, max(lengths) + 1, ...] float64, for a drafter
            that draws from a q.
        sampler: draws from q by them.
        stop: None where no row's draft is to be shortened.
    """

    rows: Sequence[Row]
    lengths: Sequence[int]
    uniforms: Tensor
    sampler: Sampler
    stop: Stop | None = None


class DraftCounters(NamedTuple):
    """The work of a drafter since it was last asked.

    Attributes:
        passes: of its models while it drafted.
        seconds: in those passes.
        preparing: seconds for prompts, which are no part of a round.
        executors: passes by the name of their executor, those over prompts too.
    """

    passes: int = 0
    seconds: float = 0.0
    preparing: float = 0.0
    executors: Counter[str] = Counter()  # noqa: RUF012 (never changed in place)

    def plus(self, other: DraftCounters) -> DraftCounters:
        """Returns the work of two drafters."""
        return DraftCounters(
            self.passes + other.passes,
            self.seconds + other.seconds,
            self.preparing + other.preparing,
            self.executors + other.executors,
        )


class Keeps(NamedTuple):
    """The most bytes that a drafter keeps beside its keys and values, for `shoal.engine.memory`.

    Attributes:
        per_token: of each token of a prompt, once for all rows of its request, and of each other
            token of a row.
        per_row: of each row.
        tokens: most tokens of a request that it keeps; None = all.
        always: whatever runs.
        on_device: they are on the target's device; False = in main memory.
    """

    per_token: int = 0
    per_row: int = 0
    tokens: int | None = None
    always: int = 0
    on_device: bool = False

    def of_request(self, tokens: int, rows: int) -> int:
        """Of a request with so many tokens in its prompt and beyond it in so many rows."""
        return (
            self.per_token * (tokens if self.tokens is None else min(tokens, self.tokens))
            + self.per_row * rows
        )


class KeyValueMemory(Protocol):
    """Keys and values that grow with the rows, of the target or of a drafter: slots of a common
    capacity, and prompts that are stored once."""

    @property
    def context(self) -> int: ...

    @property
    def shares(self) -> bool:
        """Whether rows of a group may read one stored prompt."""
        ...

    @property
    def attends_in_one_call(self) -> bool:
        """Whether attention is one call for keys of its own and shared ones."""

    @property
    def captures_without_prefixes(self) -> bool:
        """Whether sharing prompts would keep its rounds from being captured."""
        ...

    @property
    def allocated_bytes(self) -> int: ...

    def cache_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        """Bytes that so many slots of so many tokens, and so many tokens of shared prompts,
        take."""
        ...

    def grown_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        """Bytes that it will have allocated once it has room for that, too."""
        ...

    def reserve(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Makes room for that. Raises OutOfMemory."""
        ...

    def trim(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Gives back what is beyond that."""
        ...


class Drafter(Protocol):
    """Proposes, and hears what became of it. A class that inherits from this one need only define
    `propose`.

    Attributes:
        name: in counts by drafter (`Stats.by_drafter`), a word; "" = the name of its class. One
            that puts the drafts of several together names each of them in `DraftTree.drafters`.
        max_nodes: the most nodes of a tree that is no chain; 0 = it proposes chains only. The
            target must take positions per token to verify others.
        memory: its keys and values, for which the engine finds room; None where it keeps none. Rows
            beyond its context, or for which there is no memory, are never asked for (`lengths` is
            0).
        keeps: what it keeps beside these, at most.
        kept_bytes: what it keeps now.
        hidden_layers: hidden states of the target that it reads, as Transformers numbers them
            (`Runner.hidden_layers`): of prompts by `read_prompts`, of each round's columns in
            `Scores.hidden`. None are kept for a drafter that reads none.
        choices: ways in which it can propose, by their names, the cheapest first:
            `lookahead="auto"` chooses one for each round, by `use`. Empty where there is one way.
        choices_join: the last of them is all others together, and each of those computes rows for
            itself. Else all are ways of one model with one memory.
    """

    name: str = ""
    max_nodes: int = 0
    memory: KeyValueMemory | None = None
    keeps: Keeps = Keeps()
    hidden_layers: Sequence[int] = ()
    choices: Sequence[str] = ()
    choices_join: bool = False

    @classmethod
    def for_target(cls, target: Runner, *args: Any, **options: Any) -> Drafter:
        """Makes a drafter for one engine from the options of a spec (`shoal.drafting.registry`).

        Raises:
            RequestError, ModelError: the drafter does not fit the target.
        """
        return cls(*args, **options)

    @classmethod
    def require_files(cls, tokenizer: Any, *args: Any, **options: Any) -> None:
        """Raises RequestError: a file of the options is one of another tokenizer, or damaged."""
        return None

    def use(self, choice: int) -> None:
        """Which of the choices proposes in the rounds to come."""
        return

    def attach(self, target: Runner) -> None:
        """An engine was made, before anything else is asked: its own runner of the target, whose
        cache the engine keeps. A drafter that feeds it leaves each row as long as it was."""
        return None

    def begin(self, rows: Sequence[Row]) -> None:
        """Rows joined. Nothing need be computed before a draft is asked for."""
        return None

    def prepare(self, chunks: Sequence[PrefillChunk]) -> None:
        """The target has computed these chunks of prompts. A drafter that reads prompts may keep
        pace with one that takes several rounds, so that no round has to wait for all of it. Not
        called while nothing is drafted."""
        return None

    def read_prompts(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        """The target has computed these chunks of prompts, with hidden states [stop - start, layers
        * width] each. A prompt is computed once for the rows of its request, all but its last
        token; if its place was lost in between, again from its start. Called for a drafter with
        `hidden_layers`, also while nothing is drafted, after `begin` of the rows of the round."""
        return None

    def propose(self, inputs: DraftInputs) -> DraftTree:
        """A tree for each row, whose paths are no longer than the row's length."""
        ...

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        """The round was committed, and `row.tokens` are what they will be: whatever was rejected
        must be forgotten. Also called for rounds in which nothing was asked for."""
        return None

    def end(self, rows: Sequence[Row]) -> None:
        """Rows left, for whatever reason."""
        return None

    def pause(self, rows: Sequence[Row]) -> None:
        """Rows leave their slots for some rounds. They come back with the same tokens, and `begin`
        is not called for them."""
        return None

    def replace(self, copies: Sequence[tuple[Row, Row]]) -> None:
        """Rows of a request are about to become copies of others of it, with their tokens: of each
        the row and its parent. What was read of the row holds no longer; a drafter that counts the
        rows that leave a request does not count it."""
        self.end([row for row, _ in copies])
        self.begin([row for row, _ in copies])

    def releases(self) -> Sequence[Callable[[], None]]:
        """What gives back memory that outlives the drafter; called once it is gone."""
        return ()

    def take_counters(self) -> DraftCounters:
        """What it did since this was last asked."""
        return DraftCounters()

    @property
    def kept_bytes(self) -> int:
        """Bytes of tables and states that it keeps now, keys and values aside."""
        return 0

    @property
    def seconds_preparing(self) -> float:
        """Seconds so far that are no part of any round: prompts, passes built."""
        return 0.0


def name_of(drafter: Drafter) -> str:
    """A drafter's name in counts."""
    return drafter.name or type(drafter).__name__


def within(tree: DraftTree, inputs: DraftInputs) -> DraftTree:
    """The tree itself.

    Raises:
        InternalError: some path is longer than its row may be given, or a row is missing.
    """
    reach = (
        [max(depths) for depths in tree.depths] if tree.branches else list(map(len, tree.drafts))
    )
    if len(reach) != len(inputs.rows) or any(
        depth > most for depth, most in zip(reach, inputs.lengths, strict=True)
    ):
        raise InternalError(
            f"a drafter was asked for paths of at most {list(inputs.lengths)} tokens and "
            f"proposed {reach}"
        )
    return tree


def require_trees(target: Runner, drafter: Drafter) -> None:
    """Raises RequestError: the drafter's trees are too large. UnsupportedModel: they branch, and
    the target cannot verify such."""
    if drafter.max_nodes > MOST_NODES:
        raise RequestError(
            f"{name_of(drafter)} proposes trees of {drafter.max_nodes} nodes, and a draft tree "
            f"has at most {MOST_NODES}"
        )
    if drafter.max_nodes and not target.takes_trees:
        raise UnsupportedModel(
            f"{target.name} takes no position for each token, which draft trees need: give a "
            f"drafter that proposes chains"
        )
