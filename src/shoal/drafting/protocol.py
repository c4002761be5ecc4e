"""The Drafter protocol: the calls of the engine to an object that proposes tokens.

A drafter is exact by construction as long as it is honest about q: a proposal either carries the
distribution from which its tokens were really drawn, or none (`DraftTree.q` is None), and is then
verified by exact match. The output has the target's distribution however bad the drafts are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from shoal.config import MOST_NODES
from shoal.drafting.distillation import Learner
from shoal.errors import InternalError, RequestError, UnsupportedModel
from shoal.models.runner import Runner
from shoal.sampling.distributions import RACES, Scores
from shoal.types.requests import Row
from shoal.types.rounds import PrefillChunk
from shoal.types.trees import DraftTree, Verdict

Sampler = Callable[[Tensor, Tensor], Tensor]
"""A function (q [rows, vocab], uniforms of one position [rows, ...]) -> one token per row.

The tokens are [rows] int64.
"""
Stop = Callable[[int, Sequence[float]], Sequence[int]]
"""A function (position, confidence of each row) -> the length that each draft may still reach.

It is called before the tokens of the position are drawn; the confidence is the drafter's highest
probability there. A token that was drawn is proposed: dropping it because of its value would bias
the distribution.
"""


@dataclass(frozen=True)
class DraftInputs:
    """The inputs of a drafter in a round.

    Attributes:
        rows: the rows of the round; `row.tokens` are the prompt and the committed tokens.
        lengths: for each row, the most tokens that may follow its last one on any path of its tree,
            0 included; at least one is positive. A row with 0 needs no computation.
        uniforms: the uniforms of each row's next positions, [rows, max(lengths) + 1, ...] float64,
            for a drafter that draws from a q.
        sampler: draws from q by the uniforms.
        stop: ends drafts by the drafter's confidence; None = no draft is to be shortened.
    """

    rows: Sequence[Row]
    lengths: Sequence[int]
    uniforms: Tensor
    sampler: Sampler
    stop: Stop | None = None

    @property
    def needs_q(self) -> bool:
        """True if drafts may be verified by their q.

        Drafts of a race are not verified by q, and drafts of greedy rows are point masses.
        """
        return not RACES.get(self.sampler) and not all(
            row.request.sampling.greedy for row in self.rows
        )


class DraftCounters(NamedTuple):
    """The work of a drafter since the last call.

    Attributes:
        passes: the passes of its models while it drafted.
        seconds: the seconds in those passes.
        preparing: the seconds for prompts, which are no part of a round.
        executors: the passes by the name of their executor, those over prompts too.
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
        per_token: the bytes of each token of a prompt, once for all rows of its request, and of
            each other token of a row.
        per_row: the bytes of each row.
        tokens: the most tokens of a request that it keeps; None = all.
        always: the bytes that it keeps without any row.
        on_device: True if they are on the target's device, False if in main memory.
    """

    per_token: int = 0
    per_row: int = 0
    tokens: int | None = None
    always: int = 0
    on_device: bool = False

    def of_request(self, tokens: int, rows: int) -> int:
        """Returns the bytes of a request.

        Args:
            tokens: the number of tokens in its prompt, and beyond it in all rows.
            rows: the number of its rows.
        """
        return (
            self.per_token * (tokens if self.tokens is None else min(tokens, self.tokens))
            + self.per_row * rows
        )


class KeyValueMemory(Protocol):
    """The keys and values of the target or of a drafter, which grow with the rows.

    They are slots of a common capacity, and prompts that are stored once.
    """

    @property
    def context(self) -> int: ...

    @property
    def shares(self) -> bool:
        """True if rows of a group may read one stored prompt."""
        ...

    @property
    def attends_in_one_call(self) -> bool:
        """True if attention is one call for own and shared keys."""

    @property
    def captures_without_prefixes(self) -> bool:
        """True if shared prompts would keep its rounds from being captured."""
        ...

    @property
    def allocated_bytes(self) -> int: ...

    def cache_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        """Returns the bytes of slots and shared prompts.

        Args:
            slots: the number of slots.
            capacity: the tokens of each slot.
            cells: the tokens of shared prompts.
        """
        ...

    def grown_bytes(self, slots: int, capacity: int, cells: int = 0) -> int:
        """Returns the bytes that will be allocated once there is room for these slots, too."""
        ...

    def reserve(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Makes room for these slots, or raises OutOfMemory."""
        ...

    def trim(self, slots: int, capacity: int, cells: int = 0) -> None:
        """Gives memory beyond these slots back."""
        ...

    def wastes(self, slots: int, capacity: int, cells: int = 0) -> bool:
        """Returns True if room for that size would mostly be slots that no row needs."""
        return False

    def expect_drafts(self, longest: int) -> None:
        """Notes the most drafts of a row in a round, before memory is counted."""


class Drafter(Protocol):
    """An object that proposes tokens, and is told which were accepted.

    A class that inherits from this one need only define `propose`.

    Attributes:
        name: the name in counts by drafter (`Stats.by_drafter`), a word; "" = the name of its
            class. A drafter that joins the drafts of several names each of them in
            `DraftTree.drafters`.
        max_nodes: the most nodes of a tree that branches; 0 = it proposes chains only. The target
            must take positions per token to verify trees.
        memory: its keys and values, for which the engine finds room; None = it keeps none. Rows
            beyond its context, or without memory, get no drafts (`lengths` is 0).
        keeps: the most bytes that it keeps beside these.
        kept_bytes: the bytes that it keeps now.
        hidden_layers: the hidden states of the target that it reads, as Transformers numbers them
            (`Runner.hidden_layers`): of prompts by `read_prompts`, of each round's columns in
            `Scores.hidden`. For a drafter that reads none, none are kept.
        choices: the names of the ways in which it can propose, the cheapest first:
            `lookahead="auto"` chooses one for each round, by `use`. Empty if there is one way.
        weights: the weights of its own, a module or a tensor, which do not follow updates of the
            target; those in it that are the target's do. None = it has none.
        choices_join: True if the last choice means "all the others at once", and each choice
            computes rows for itself. False if all choices share one model and its memory.
        observes_plain_rounds: False if one `observe` after several rounds without drafts, with
            scores without logits, does as well as one after each.
    """

    name: str = ""
    max_nodes: int = 0
    memory: KeyValueMemory | None = None
    keeps: Keeps = Keeps()
    hidden_layers: Sequence[int] = ()
    weights: nn.Module | Tensor | None = None
    choices: Sequence[str] = ()
    choices_join: bool = False
    observes_plain_rounds: bool = True

    @classmethod
    def for_target(cls, target: Runner, *args: Any, **options: Any) -> Drafter:
        """Makes a drafter for one engine from the options of a spec (`shoal.drafting.registry`).

        Raises:
            RequestError, ModelError: the drafter does not fit the target.
        """
        return cls(*args, **options)

    @classmethod
    def require_files(cls, tokenizer: Any, *args: Any, **options: Any) -> None:
        """Raises RequestError if a file of the options is of another tokenizer, or damaged."""
        return None

    def use(self, choice: int) -> None:
        """Sets the choice that proposes in the next rounds."""
        return

    def attach(self, target: Runner) -> None:
        """Attaches the drafter to a new engine; called before all other methods.

        Args:
            target: the engine's own runner of the target, with the engine's cache. A drafter that
                feeds it leaves each row as long as it was.
        """
        return None

    def begin(self, rows: Sequence[Row]) -> None:
        """Takes rows that have joined; it need not compute for them before a draft is asked for."""
        return None

    def prepare(self, chunks: Sequence[PrefillChunk]) -> None:
        """Keeps pace with the target, which has computed these chunks of prompts.

        A drafter that reads prompts may follow a prompt that takes several rounds, so that no round
        has to wait for all of it. Not called in rounds without drafts.
        """
        return None

    def read_prompts(self, chunks: Sequence[PrefillChunk], hidden: Sequence[Tensor]) -> None:
        """Reads the hidden states of chunks of prompts, which the target has computed.

        A prompt is computed once for the rows of its request, all but its last token; if its place
        was lost in between, again from its start. Called for a drafter with `hidden_layers`, also
        in rounds without drafts, after `begin` of the rows of the round.

        Args:
            chunks: the chunks.
            hidden: the hidden states of each chunk, [stop - start, layers * width].
        """
        return None

    def propose(self, inputs: DraftInputs) -> DraftTree:
        """Returns a tree for each row, whose paths are no longer than the row's length."""
        ...

    def observe(self, rows: Sequence[Row], scores: Scores, verdict: Verdict) -> None:
        """Learns the outcome of a round, which is committed: `row.tokens` have the new tokens.

        The drafter must forget rejected tokens. Also called for rounds without drafts.
        """
        return None

    def end(self, rows: Sequence[Row]) -> None:
        """Forgets rows that have left, for any reason."""
        return None

    def pause(self, rows: Sequence[Row]) -> None:
        """Releases the slots of rows that leave them for some rounds.

        They come back with the same tokens, and `begin` is not called for them.
        """
        return None

    def replace(self, copies: Sequence[tuple[Row, Row]]) -> None:
        """Prepares for rows of a request that become copies of others, with their tokens.

        The state that was read of such a row is no longer valid. A drafter that counts the rows
        that leave a request does not count it.

        Args:
            copies: pairs of a row and its parent.
        """
        self.end([row for row, _ in copies])
        self.begin([row for row, _ in copies])

    def learner(self) -> Learner | None:
        """Returns the weights that can learn from the target, by which the drafter follows it.

        None = it has none of its own, or none that learn beside the target.
        """
        return None

    def releases(self) -> Sequence[Callable[[], None]]:
        """Returns functions that free memory which outlives the drafter; called once it is gone."""
        return ()

    def take_counters(self) -> DraftCounters:
        """Returns the work since the last call."""
        return DraftCounters()

    @property
    def kept_bytes(self) -> int:
        """The bytes of tables and states that it keeps now, without keys and values."""
        return 0

    @property
    def seconds_preparing(self) -> float:
        """The seconds so far that are no part of any round: prompts, passes built."""
        return 0.0


def observes_plain_rounds(drafter: Drafter | None) -> bool:
    """Returns `Drafter.observes_plain_rounds`; False if there is no drafter, or no `observe`."""
    if drafter is None or type(drafter).observe is Drafter.observe:
        return False
    return drafter.observes_plain_rounds


def name_of(drafter: Drafter) -> str:
    """Returns a drafter's name in counts."""
    return drafter.name or type(drafter).__name__


def within(tree: DraftTree, inputs: DraftInputs) -> DraftTree:
    """Returns the tree itself, if it is within the lengths of its rows.

    Raises:
        InternalError: a path is longer than its row's length, or a row is missing.
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
    """Checks that the target can verify the drafter's trees.

    Raises:
        RequestError: the drafter's trees are too large.
        UnsupportedModel: they branch, and the target cannot verify such trees.
    """
    if drafter.max_nodes > MOST_NODES:
        raise RequestError(
            f"{name_of(drafter)} proposes trees of {drafter.max_nodes} nodes, and a draft tree "
            f"has at most {MOST_NODES}"
        )
    if drafter.max_nodes and not target.takes_trees:
        raise UnsupportedModel(
            f"{target.name} cannot verify draft trees: "
            f"{target.cut_obstacle or 'it takes no position for each token'}; give a drafter that "
            "proposes chains"
        )
