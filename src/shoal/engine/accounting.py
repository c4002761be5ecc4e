"""The costs of a round: times of its stages, counts for `Stats`, and the controller's `Outcome`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.drafting.protocol import DraftCounters, Stop
from shoal.types.rounds import Commit, Outcome
from shoal.types.stats import Stats
from shoal.types.trees import DraftTree


class Stopwatch:
    """A stopwatch for the stages of a round: propose, verify, accept, commit.

    Attributes:
        laps: the seconds of each stage so far.
        planning: the seconds of the first stage before the drafter was asked: draft lengths and
            uniforms, whose cost does not depend on the drafts.
        between: the seconds from the first position of the drafts looked at to the last; None = no
            position was looked at.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._last = clock, clock()
        self._first = self._last
        self.laps: list[float] = []
        self.planning = 0.0
        self.between: float | None = None

    def note_plan(self) -> None:
        """Notes that the round is planned; the last call of a round counts."""
        self.planning = self._clock() - self._last

    def lap(self) -> None:
        """Ends a stage."""
        now = self._clock()
        self.laps.append(now - self._last)
        self._last = now

    def lap_shares(self, shares: Sequence[float]) -> None:
        """Ends stages that were computed in one go."""
        now = self._clock()
        drafting, *rest = [share * (now - self._last - self.planning) for share in shares]
        self.laps += [self.planning + drafting, *rest]
        self._last = now

    def timer(self, stop: Stop) -> Stop:
        """Returns a function that calls `stop` and notes the times of the calls."""

        def timed_stop(position: int, confidence: Sequence[float]) -> Sequence[int]:
            now = self._clock()
            if position == 0:
                self._first = now
            self.between = now - self._first
            return stop(position, confidence)

        return timed_stop


def count_round(
    stats: Stats,
    tree: DraftTree,
    commits: Sequence[Commit],
    laps: Sequence[float],
    target: tuple[int, float],
    drafter: DraftCounters,
    name: str,
    rounds: int = 1,
) -> None:
    """Adds a round, or a run of plain rounds, to the statistics.

    Args:
        stats: the statistics.
        commits: the tokens that it committed.
        laps: the seconds of the four stages.
        target: the target's passes and the seconds in them.
        drafter: the drafter's work.
        name: the name of the engine's drafter.
        rounds: the number of rounds; in a run of several, each row has as many rounds as tokens.
    """
    drafted, accepted = sum(map(len, tree.drafts)), sum([one.accepted for one in commits])
    committed = sum([len(one.tokens) for one in commits])
    stats.rounds += rounds
    stats.row_rounds += len(commits) if rounds == 1 else committed
    stats.drafted += drafted
    stats.accepted += accepted
    if tree.drafters is None:
        stats.count_drafts(name, drafted, accepted)
    else:
        _count_by_drafter(stats, tree.drafters, commits)
    stats.committed += committed
    stats.seconds_rounds += sum(laps)
    propose, verify, accept, commit = laps
    stats.seconds_propose += propose
    stats.seconds_verify += verify
    stats.seconds_accept += accept
    stats.seconds_commit += commit
    stats.target_passes += target[0]
    stats.seconds_target += target[1]
    stats.draft_passes += drafter.passes
    stats.seconds_draft += drafter.seconds
    stats.seconds_prefill += drafter.preparing
    stats.count_executors("draft", drafter.executors)


def _count_by_drafter(
    stats: Stats, drafters: Sequence[Sequence[str]], commits: Sequence[Commit]
) -> None:
    proposed = [name for names in drafters for name in names]
    accepted_names = [
        commit.row.drafters[len(commit.row.drafters) - len(commit.tokens) :][: commit.accepted]
        for commit in commits
    ]
    accepted = [name for names in accepted_names for name in names]
    for name in dict.fromkeys(proposed):
        stats.count_drafts(name, proposed.count(name), accepted.count(name))


def outcome(
    tree: DraftTree,
    paths: Sequence[Sequence[int]],
    watch: Stopwatch,
    preparing: float,
    rounds: int = 1,
    riding: int = 0,
) -> Outcome:
    """Returns the outcome of a round, or of plain ones, for the draft length controller.

    For a tree that branches, its depth counts as drafted. Tokens that a grammar forces count apart.

    Args:
        paths: the accepted nodes of each row.
        watch: the stopwatch of the round.
        preparing: the seconds of the drafter for prompts.
        rounds: the number of rounds, which took the same time each.
        riding: the prompt tokens in the target's pass.
    """
    own, accepted = [len(draft) for draft in tree.drafts], [len(path) for path in paths]
    if tree.forced is not None:
        own = [count - more for count, more in zip(own, tree.forced, strict=True)]
        accepted = [sum(node < n for node in path) for path, n in zip(paths, own, strict=True)]
    drafted, nodes = own, None
    if tree.branches:
        nodes = own
        drafted = [max(depths[: 1 + count]) for depths, count in zip(tree.depths, own, strict=True)]
    steps, laps = max(tree.steps, any(drafted)), watch.laps  # a drafter need not tell its steps
    forced = None if tree.forced is None else list(tree.forced)
    return Outcome(
        drafted,
        accepted,
        steps,
        seconds=(sum(laps) - watch.planning) / rounds,
        seconds_drafting=(laps[0] - watch.planning) / rounds,
        seconds_planning=watch.planning,
        rounds=rounds,
        seconds_preparing=preparing,
        seconds_between=watch.between,
        nodes=nodes,
        forced=forced,
        riding=riding,
    )
