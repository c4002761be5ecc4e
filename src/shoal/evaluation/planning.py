"""Programs planned with public tests, and samples filtered by the same tests.

`plan` searches a tree of tokens as PG-TD does (`shoal.evaluation.token_tree`): the roll-outs of
several leaves are rows of one batch, keys and values of their common beginnings come from earlier
rows, and drafts from the texts of earlier roll-outs. `filter_samples` draws samples and tests them.
Both end at a program that passes all public tests. **Planning is not lossless**: its program does
not have the model's distribution, and is chosen for its reward.

With a horizon the same tree decodes as AdaDec (He et al. 2025, arXiv 2506.08980): where the entropy
reaches a threshold, the most probable tokens are rolled out by that many tokens, and the one with
the best mean log-probability is committed. No test is run before the program is whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.api import Shoal
from shoal.config import Limits, require_lossless
from shoal.drafting.protocol import Drafter
from shoal.drafting.suffix import SuffixDrafter
from shoal.drafting.text import TextDrafter
from shoal.engine.detokenizer import Detokenizer
from shoal.engine.stop_strings import Stops
from shoal.errors import RequestError
from shoal.evaluation.public_tests import Rewards
from shoal.evaluation.sampling import SamplingConfig
from shoal.evaluation.tasks import Task
from shoal.evaluation.token_tree import RollOut, TokenNode, TokenTree, WholeText
from shoal.types.arguments import split_options
from shoal.types.requests import Row
from shoal.types.stats import Stats

PLANNED, BY_TOKENS, BY_SECONDS = "planned", "filtered, equal tokens", "filtered, equal seconds"
PLANS = (PLANNED, BY_TOKENS, BY_SECONDS)
"""The methods that are compared: planning, and sampling plus filter by the same budget."""
LOSSY = (
    "planned programs are not lossless: they are chosen by tests, and do not have the model's "
    "distribution"
)
CANDIDATES = 20
"""The number of tokens by which the entropy of a place is computed."""


@dataclass(frozen=True)
class PlanConfig(SamplingConfig):
    """The search, and the samples beside it.

    Attributes:
        n: the rows of a batch: roll-outs of the search, or samples.
        options: the options of the samples; `max_new_tokens` bounds planned programs too.
        tokens: the new tokens of a problem, for either method.
        width: the most tokens that are tried at a place.
        entropy: the entropy in nats below which only the most probable token is.
        horizon: the tokens of a roll-out that looks ahead; None = to the end, with tests.
    """

    methods: tuple[str, ...] = PLANS
    tokens: int = 2048
    width: int = 3
    entropy: float = 0.0
    horizon: int | None = None

    def __post_init__(self) -> None:
        sampling, _, speculation = split_options(self.options)
        require_lossless(speculation.rule, "planning")
        if sampling.greedy:
            raise RequestError("greedy samples are all alike: give a --temperature above 0")

    @property
    def drafts(self) -> bool:
        """True unless drafts are switched off."""
        return self.lookahead not in ("off", 0)


@dataclass(frozen=True)
class Spent:
    """The amounts that a method has spent on a problem.

    Attributes:
        tokens: the new tokens, those of stop strings included.
        seconds: the seconds, those of the tests included.
        programs: the number of finished programs.
        executed: the number of different programs that the public tests were run on.
        stats: the counts of the model's passes.
    """

    tokens: int = 0
    seconds: float = 0.0
    programs: int = 0
    executed: int = 0
    stats: Stats = field(default_factory=Stats)


@dataclass(frozen=True)
class TriedProgram:
    """A program, and the costs spent when it was tested.

    Attributes:
        token_ids: its tokens.
        completion: the part of its text that is executed.
        mean_logprob: the mean log-probability of its tokens; -inf without tokens.
        reward: the share of the public tests that it passes.
        spent: the tokens up to this row of its batch; all else up to the end of the batch.
    """

    token_ids: tuple[int, ...]
    completion: str
    mean_logprob: float
    reward: float
    spent: Spent


def best_of(
    programs: Sequence[TriedProgram], tokens: float = math.inf, seconds: float = math.inf
) -> tuple[TriedProgram | None, Spent]:
    """Returns the best of the programs that a budget allows, and the costs of these.

    The best one passes most public tests; of several it is the one with the best mean
    log-probability. None if the budget allows no program.
    """
    within = [
        each for each in programs if each.spent.tokens <= tokens and each.spent.seconds <= seconds
    ]
    if not within:
        return None, Spent()
    return max(within, key=lambda each: (each.reward, each.mean_logprob)), within[-1].spent


class ProblemRun:
    """One method at work on one problem.

    Args:
        pair: the models; its prefix memory keeps the beginnings of texts.
        task: the problem's task.
        config: the settings.
        rewards: the public tests.
        drafter: the drafter; None = the pair's own, if drafts are not switched off.
        clock: the clock, in seconds.

    Attributes:
        prompt: the ids of the prompt.
        limit: the most new tokens of a program.
        programs: the programs so far, in order.
        stats: the counts so far.
    """

    def __init__(
        self,
        pair: Shoal,
        task: Task,
        config: PlanConfig,
        rewards: Rewards,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pair, self.task, self.config, self.rewards = pair, task, config, rewards
        self._drafter, self._clock, self._started = drafter, clock, clock()
        read = task.read(pair.tokenizer)
        self.prompt: list[int] = read if isinstance(read, list) else pair.tokenizer.encode(read)
        _, limits, _ = split_options(config.options)
        self.limit = min(limits.max_new_tokens, max(pair.target.context - len(self.prompt), 1))
        self.eos = tuple(pair.eos if limits.eos is None else limits.eos)
        self.programs: list[TriedProgram] = []
        self.stats, self.tokens = Stats(), 0

    @property
    def seconds(self) -> float:
        """The seconds since the method began."""
        return self._clock() - self._started

    @property
    def solved(self) -> bool:
        """True once a program passes all public tests."""
        return any(program.reward == 1 for program in self.programs)

    def write(self, prompts: Sequence[Sequence[int]], n: int, **options: Any) -> list[Row]:
        """Writes n samples of each prompt as rows of one batch, and returns the rows."""
        stream = self.pair.stream(
            [list(ids) for ids in prompts],
            n,
            drafter=self._drafter,
            lookahead=self.config.lookahead if self.config.drafts else "off",
            **options,
        )
        self.stats += stream.run().stats
        rows = [row for group in stream.rows for row in group]
        self.tokens += sum(row.new_tokens for row in rows)
        return rows

    def judge(self, texts: Sequence[WholeText], costs: Sequence[int]) -> list[float]:
        """Tests programs, adds them to those of the run, and returns their rewards.

        Args:
            texts: the texts of the programs.
            costs: the new tokens that each took, which are already counted.
        """
        completions = [self.task.complete(whole.text, whole.stopped) for whole in texts]
        rewards = self.rewards.of(completions)
        tokens = self.tokens - sum(costs)
        seconds = self.seconds
        executed = len(self.rewards.known)
        for whole, completion, reward, cost in zip(texts, completions, rewards, costs, strict=True):
            tokens += cost
            spent = Spent(tokens, seconds, len(self.programs) + 1, executed, self.stats)
            mean = sum(whole.logprobs) / len(whole.logprobs) if whole.logprobs else -math.inf
            self.programs.append(
                TriedProgram(tuple(whole.token_ids), completion, mean, reward, spent)
            )
        return rewards

    def roll_out(self, leaves: Sequence[TokenNode]) -> None:
        """Evaluates leaves: writes the unknown rest of their texts, as rows of one batch.

        A text that has ended takes no row. Without a horizon the programs are tested.
        """
        paths = [leaf.path for leaf in leaves]
        going = [place for place, path in enumerate(paths) if not self._has_ended(path)]
        horizon = self.config.horizon or self.limit
        limits = [
            Limits(min(horizon, self.limit - len(paths[place])), self.task.stops, self.eos)
            for place in going
        ]
        written: dict[int, Row] = {}
        if going:
            prompts = [[*self.prompt, *paths[place]] for place in going]
            top = max(CANDIDATES, self.config.width)
            rows = self.write(prompts, 1, limits=limits, temperature=0, top_logprobs=top)
            written = dict(zip(going, rows, strict=True))
        rollouts = [self._roll_out(leaf, written.get(i)) for i, leaf in enumerate(leaves)]
        rewards = [0.0] * len(rollouts)
        if self.config.horizon is None:
            costs = [written[i].new_tokens if i in written else 0 for i in range(len(leaves))]
            rewards = self.judge([each.whole for each in rollouts], costs)
        for leaf, roll_out, reward in zip(leaves, rollouts, rewards, strict=True):
            leaf.roll_out = replace(roll_out, reward=reward), 0

    def _has_ended(self, path: Sequence[int]) -> bool:
        return (
            len(path) >= self.limit
            or (bool(path) and path[-1] in self.eos)
            or self._whole(path, ()).stopped
        )

    def _whole(self, ids: Sequence[int], logprobs: Sequence[float]) -> WholeText:
        """Returns the text of new tokens, without those behind a stop string."""
        text = Detokenizer(self.pair.tokenizer, self.prompt, Stops(self.task.stops))
        for token in ids:
            if not text.stopped:
                text.push(token)
        count = len(text.ends)
        shown, _ = text.final_text((), count)
        return WholeText(tuple(ids[:count]), tuple(logprobs[:count]), shown, text.stopped)

    def _roll_out(self, leaf: TokenNode, row: Row | None) -> RollOut:
        """Returns the roll-out of a leaf.

        Its tokens include those of a stop string, which may have begun in the leaf's own text: at
        each of them the text may go on otherwise.

        Args:
            leaf: the leaf.
            row: its row; None = the leaf's text has ended.
        """
        path, above = leaf.path, [node.logprob for node in leaf.above[1:]]
        if row is None:
            return RollOut((), (), (), ended=True, whole=self._whole(path, above))
        whole = self._whole([*path, *row.tokens[row.prompt_length :]], [*above, *row.logprobs])
        cut = row.finish_reason == "length" and len(whole.token_ids) < self.limit
        return RollOut(
            whole.token_ids[len(path) :],
            whole.logprobs[len(path) :],
            [each.raw for each in row.top_logprobs],
            ended=whole.stopped or not cut,
            whole=whole,
        )

    def draw(self, seed: int | None) -> None:
        """Draws a batch of samples of the prompt, and tests their programs."""
        options = {**self.config.options, "max_new_tokens": self.limit, "stop": self.task.stops}
        rows = self.write([self.prompt], self.config.n, seed=seed, **options)
        texts = [self._whole(row.tokens[row.prompt_length :], row.logprobs) for row in rows]
        self.judge(texts, [row.new_tokens for row in rows])


def plan(run: ProblemRun) -> None:
    """Searches for a program that passes all public tests, or decodes by looking ahead.

    Raises:
        RequestError: the prompt cannot be continued.
    """
    config = run.config
    tree = TokenTree(config.width, config.entropy)
    if config.horizon is not None:
        _look_ahead(run, tree, config.horizon)
        return
    while tree.root.leaves and not run.solved and run.tokens < config.tokens:
        leaves: list[TokenNode] = []
        while len(leaves) < config.n and (leaf := tree.select()) is not None:
            if leaf.roll_out is None:
                leaves.append(leaf)
            else:
                tree.learn(leaf, leaf.roll_out[0].reward)
        run.roll_out(leaves)
        for leaf in leaves:
            assert leaf.roll_out is not None
            tree.learn(leaf, leaf.roll_out[0].reward)


def _look_ahead(run: ProblemRun, tree: TokenTree, horizon: int) -> None:
    """Commits token after token, of several candidates the one that goes on most probably."""
    while tree.root.children is None or tree.root.children:
        leaves = tree.root.children or [tree.root]
        for leaf in leaves:
            tree.take(leaf)
        run.roll_out([leaf for leaf in leaves if not _is_known(leaf, horizon, len(leaves) > 1)])
        for leaf in leaves:
            assert leaf.roll_out is not None
            roll_out, place = leaf.roll_out
            logprobs = [leaf.logprob, *roll_out.logprobs[place : place + horizon]]
            tree.learn(leaf, sum(logprobs) / len(logprobs))
        tree.root = max(leaves, key=lambda leaf: leaf.value or 0.0)
    assert tree.root.roll_out is not None
    run.judge([tree.root.roll_out[0].whole], [0])


def _is_known(leaf: TokenNode, horizon: int, compared: bool) -> bool:
    """Tells whether a roll-out reaches far enough behind a leaf."""
    if leaf.roll_out is None:
        return False
    roll_out, place = leaf.roll_out
    return roll_out.ended or len(roll_out.tokens) - place >= (horizon if compared else 1)


def filter_samples(run: ProblemRun, tokens: float, seconds: float) -> None:
    """Draws and tests batches of samples until one passes, or both budgets are spent.

    With a seed the first batch has the samples of `shoal generate`, and each further batch those of
    the next seed.
    """
    batch = 0
    while not run.solved and (run.tokens < tokens or run.seconds < seconds):
        run.draw(None if run.config.seed is None else run.config.seed + batch)
        batch += 1


def siblings(pair: Shoal, config: PlanConfig) -> Drafter | None:
    """Makes the drafter that a method keeps from call to call; None = the pair's own in each call.

    Without a drafter of the pair, texts of earlier rows are drafted from. Of other drafters only
    those that read text know rows of earlier calls; a model's cache belongs to one call.
    """
    if not config.drafts:
        return None
    made = SuffixDrafter(scope="engine") if pair.drafter_name is None else pair.new_drafter()
    return made if isinstance(made, TextDrafter) else None
