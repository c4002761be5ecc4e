"""Planning with public tests: the tree and its scores, what a search finds and costs, the budgets of both methods.

Tests of: evaluation/token_tree.py, evaluation/planning.py, evaluation/planned_runs.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.api import Shoal
from shoal.cli.eval_planned import show_planned
from shoal.drafting.suffix import SuffixDrafter
from shoal.errors import RequestError
from shoal.evaluation.planned_runs import PlannedRuns, sentences, summary_of
from shoal.evaluation.planning import (
    BY_SECONDS,
    BY_TOKENS,
    PLANNED,
    PlanConfig,
    ProblemRun,
    Spent,
    TriedProgram,
    best_of,
    filter_samples,
    plan,
    siblings,
)
from shoal.evaluation.problems import Problem
from shoal.evaluation.public_tests import PublicTests, Rewards
from shoal.evaluation.tasks import Task
from shoal.evaluation.token_tree import RollOut, TokenTree, WholeText, entropy
from shoal.integrations.loglikelihoods import token_logprobs
from shoal.testing import END, VOCABULARY, tiny_tokenizer
from shoal.testing.scripted import one_hot, scripted

TOKENIZER = tiny_tokenizer()
PROMPT = "def f():\n"
ANSWERS = {"    return 1\n": 50, "    return 20\n": 15, "    return 24\n": 8, "    return 29\n": 7, "    return 3\n": 20}
"""How likely each is. Greedily it is 1; 29 is two less likely tokens away."""
REWARDS = {"    return 20\n": 0.5, "    return 29\n": 1.0}
TESTS = PublicTests(Problem("a", "python", PROMPT, "", "f"), 2, "mark")


class Told(Rewards):
    """Rewards that are told, not executed."""

    def __init__(self, table: Mapping[str, float] = REWARDS) -> None:
        super().__init__(TESTS, sandbox=None)  # type: ignore[arg-type]
        self.table = table
        self.executed: list[str] = []

    def _executed(self, completions: Sequence[str]) -> Iterator[float]:
        self.executed += completions
        return (self.table.get(text, 0.0) for text in completions)


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def script(answers: Mapping[str, float]) -> Any:
    """A script that goes on with one of these answers and ends."""
    paths = [((*encode(PROMPT), *encode(answer), END), weight) for answer, weight in answers.items()]

    def says(ids: tuple[int, ...]) -> Tensor:
        chances = torch.full((VOCABULARY,), 1e-22, dtype=torch.float64)
        for path, weight in paths:
            if path[: len(ids)] == ids != path:
                chances[path[len(ids)]] += weight
        return chances.log() if chances.max() >= 0.01 else one_hot(END, VOCABULARY)

    return says


def pair(answers: Mapping[str, float] = ANSWERS, rows: int = 4, prefix_memory: int = 1 << 20) -> Shoal:
    made = Shoal(scripted(script(answers), VOCABULARY), None, TOKENIZER, max_batch=rows, prefix_memory=prefix_memory)
    made.eos = (END,)
    return made


def task(stops: tuple[str, ...] = ()) -> Task:
    return Task("a", PROMPT, stops, lambda _: PROMPT, lambda text, _: text)


def config(**changes: Any) -> PlanConfig:
    options = {"max_new_tokens": 40, "temperature": 1.0, **changes.pop("options", {})}
    return PlanConfig(**{"n": 4, "options": options, "lookahead": "off", "seed": 1, "entropy": 0.1, **changes})


class Watched(ProblemRun):
    """A run that remembers the rows of each batch."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.batches: list[list[str]] = []

    def write(self, prompts: Sequence[Sequence[int]], n: int, **options: Any) -> Any:
        self.batches.append([TOKENIZER.decode(ids)[len(PROMPT) :] for ids in prompts for _ in range(n)])
        return super().write(prompts, n, **options)


def planned(settings: PlanConfig, model: Shoal | None = None, rewards: Rewards | None = None, **named: Any) -> Watched:
    run = Watched(model or pair(), named.pop("task", task()), settings, rewards or Told(), **named)
    plan(run)
    return run


# ── the tree ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rolled(*tokens: int, candidates: Sequence[Sequence[tuple[int, float]]] = ()) -> RollOut:
    found = candidates or [
        [(token, math.log(0.6)), (token + 1, math.log(0.3)), (token + 2, math.log(0.1))] for token in tokens
    ]
    return RollOut(tokens, [math.log(0.6)] * len(tokens), found, True, WholeText(tokens, (), "", False))


def grown(width: int = 3, **options: Any) -> TokenTree:
    """A tree whose root has been evaluated by the roll-out 10, 20."""
    tree = TokenTree(width, **options)
    leaf = tree.select()
    assert leaf is tree.root
    leaf.roll_out = rolled(10, 20), 0
    tree.learn(leaf, 0.25)
    return tree


def test_p_ucb_is_that_of_the_paper_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """N(s) = 4, beta = ln(15 / 10) + 4 = 4.405465; sqrt(ln 4) = 1.177410."""
    tree = grown()
    tree.root.visits = 3
    first, second, third = tree.root.children or ()
    first.visits, first.value = 1, 0.25
    assert tree.score(first) == pytest.approx(0.25 + 4.405465 * 0.6 * 1.177410 / 2, abs=1e-6)
    assert tree.score(second) == pytest.approx(4.405465 * 0.3 * 1.177410, abs=1e-6)
    third.visits, third.value = 2, 1.0
    assert tree.score(third) == pytest.approx(1 + 4.405465 * 0.1 * 1.177410 / 3, abs=1e-6)
    assert tree.select() is first
    monkeypatch.setattr("shoal.evaluation.token_tree.CONSTANT", 0.0)
    careless = grown()
    careless.root.visits = 3
    assert careless.score((careless.root.children or ())[1]) == pytest.approx(0.405465 * 0.3 * 1.177410, abs=1e-6)


def test_a_leaf_under_way_is_not_selected_again() -> None:
    tree = grown()
    assert tree.root.leaves == 3
    found = [tree.select() for _ in range(3)]
    assert [leaf.token for leaf in found if leaf] == [10, 11, 12]
    assert tree.select() is None
    assert (tree.root.visits, tree.root.leaves) == (4, 0)


def test_values_are_the_best_below_and_a_known_child_goes_on_by_its_roll_out() -> None:
    tree = grown()
    greedy = tree.select()
    assert greedy is not None
    assert greedy.roll_out is not None
    assert greedy.roll_out[1] == 1  # behind the first token of the root's roll-out
    tree.learn(greedy, 0.25)
    assert [child.token for child in greedy.children or ()] == [20, 21, 22]
    assert (greedy.children or ())[0].path == [10, 20]
    other = (tree.root.children or ())[1]
    tree.take(other)
    other.roll_out = rolled(5), 0
    tree.learn(other, 0.75)
    assert (tree.root.value, other.value, greedy.value) == (0.75, 0.75, 0.25)
    last = (greedy.children or ())[0]
    tree.take(last)
    tree.learn(last, 0.0)
    assert last.children == []  # the roll-out ends there
    assert greedy.value == 0.25


def test_only_flat_places_have_several_children() -> None:
    sure = [(10, math.log(0.98)), (11, math.log(0.01))]
    flat = [(20, math.log(0.5)), (21, math.log(0.5))]
    assert entropy(flat) == pytest.approx(math.log(2))
    assert entropy(sure) == pytest.approx(-0.98 * math.log(0.98) - 2 * 0.01 * math.log(0.01))
    tree = TokenTree(2, entropy=0.5)
    node = tree.select()
    assert node is not None
    node.roll_out = rolled(10, 20, candidates=[sure, flat]), 0
    tree.learn(node, 0.0)
    assert [child.token for child in node.children or ()] == [10]
    node = tree.select()
    assert node is not None
    tree.learn(node, 0.0)
    assert [child.token for child in node.children or ()] == [20, 21]


# ── a search ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_planning_finds_the_branch_that_greedy_decoding_misses() -> None:
    """Three batches: the greedy text, both other tokens at the flat place, and the token behind one of them."""
    run = planned(config())
    assert run.batches == [[""], ["    return 2", "    return 3"], ["    return 24", "    return 29"]]
    assert [program.completion for program in run.programs] == [
        "    return 1\n",
        "    return 20\n",
        "    return 3\n",
        "    return 24\n",
        "    return 29\n",
    ]
    best, spent = best_of(run.programs)
    assert best is not None
    assert (best.completion, best.reward) == ("    return 29\n", 1.0)
    assert best.token_ids == (*encode("    return 29\n"), END)
    assert best.mean_logprob == pytest.approx(math.log(0.07) / len(best.token_ids), abs=1e-6)
    # greedy: 14 tokens; "0\n" and "\n" with their ends beside each other: 3 passes; "\n" and its end, twice: 2
    assert run.stats.target_passes == 14 + 3 + 2
    assert run.tokens == run.stats.committed == 14 + (3 + 2) + (2 + 2)
    assert (spent.programs, spent.executed) == (5, 5)
    narrow = planned(config(width=1))
    assert not narrow.solved  # the control: greedy decoding, the one text of a tree without branches
    assert narrow.batches == [[""]]


def test_one_row_a_batch_takes_more_passes() -> None:
    run = planned(config(n=1), pair(rows=1))
    assert [len(batch) for batch in run.batches] == [1] * len(run.batches)
    assert run.solved
    assert run.stats.target_passes == run.stats.committed


def test_common_beginnings_are_computed_once() -> None:
    with_memory, without = planned(config()), planned(config(), pair(prefix_memory=0))
    assert [each.completion for each in with_memory.programs] == [each.completion for each in without.programs]
    assert without.stats.restored_tokens == 0
    # a prompt of 9 tokens; then all but the last of two of 21 tokens and two of 22
    assert without.stats.prefill_tokens == 8 + 20 + 20 + 21 + 21
    assert with_memory.stats.prefill_tokens == 8
    assert with_memory.stats.restored_tokens == 20 + 20 + 21 + 21


def test_drafts_come_from_siblings_and_change_nothing() -> None:
    answers = {
        f"    x = {first}\n    y = x + 111111\n    return y\n": weight for first, weight in (("1", 5), ("2", 3), ("3", 2))
    }
    rewards = Told({text: float(" = 3" in text) for text in answers})
    options = {"max_new_tokens": 60}
    plain = planned(config(options=options), pair(answers), rewards)
    drafted = planned(config(options=options, lookahead=6), pair(answers), rewards, drafter=SuffixDrafter(scope="engine"))
    texts = [[each.token_ids for each in run.programs] for run in (plain, drafted)]
    assert texts[0] == texts[1]
    assert plain.stats.drafted == 0 < drafted.stats.accepted <= drafted.stats.drafted
    assert plain.batches == drafted.batches
    alone = planned(config(options=options, lookahead=6), pair(answers), rewards, drafter=SuffixDrafter(scope="row"))
    second = len("\n    y = x + 111111\n    return y\n")  # tokens of a sibling, written seven a pass
    assert alone.stats.target_passes - drafted.stats.target_passes > second / 3


def test_a_text_is_executed_once_and_an_end_takes_no_row() -> None:
    """The place behind "return" is flat: the text may end there, which no row has to write."""
    rewards = Told({"    return": 1.0})
    run = planned(config(width=2), pair({"    return 1\n": 5, "    return": 2}), rewards)
    assert run.solved
    assert run.batches == [[""]]
    assert [each.spent.tokens for each in run.programs] == [14, 14]
    assert (rewards.asked, len(rewards.known)) == (2, 2)
    assert rewards.of(["    return", "    return"]) == [1.0, 1.0]
    assert (rewards.asked, len(rewards.known)) == (4, 2)
    assert rewards.executed == ["    return 1\n", "    return"]
    logprobs = token_logprobs(run.pair.target, [(run.prompt, each.token_ids) for each in run.programs])
    assert [each.mean_logprob for each in run.programs] == pytest.approx([mean(each) for each in logprobs], abs=1e-5)


def test_a_stop_string_ends_a_text_although_its_beginning_is_in_the_path() -> None:
    answers = {"    return 1\n": 5, "    return\n#2": 4}
    run = planned(config(width=2), pair(answers), Told({}), task=task(stops=("\n#",)))
    texts = [each.completion for each in run.programs]
    assert texts == ["    return 1\n", "    return"]
    assert run.batches[1] == ["    return\n"]
    assert run.programs[1].spent.tokens == 14 + 3  # "#2" and its end, written behind the path
    assert run.programs[1].token_ids == encode("    return\n#")


def test_a_text_may_go_on_where_it_was_stopped() -> None:
    """Greedily the text is stopped at once, and all of its tokens are those of the stop string."""
    run = planned(config(width=2), pair({"\n#": 5, "    return 29\n": 4}), task=task(stops=("\n#",)))
    assert run.batches == [[""], [" "]]
    assert [each.completion for each in run.programs] == ["", "    return 29\n"]
    assert run.solved


def test_a_token_that_completes_a_stop_string_takes_no_row() -> None:
    run = planned(config(width=2), pair({"    return\nx": 5, "    return\n#2": 4}), Told({}), task=task(stops=("\n#",)))
    assert [each.completion for each in run.programs] == ["    return\nx", "    return"]
    assert run.batches == [[""]]


def test_a_search_ends_with_its_tokens() -> None:
    run = planned(config(tokens=15), rewards=Told({}))
    assert [len(batch) for batch in run.batches] == [1, 2]
    best, spent = best_of(run.programs, tokens=17)
    assert best is not None
    assert (spent.tokens, spent.programs) == (17, 2)  # the third program has cost 19
    assert best_of(run.programs, tokens=13) == (None, Spent())


@pytest.mark.parametrize(("most", "by_context"), [(12, False), (13, False), (13, True)])
def test_no_program_is_longer_than_it_may_be(most: int, by_context: bool) -> None:
    """The twelfth token is at the flat place: of that length each text ends with the token that is tried."""
    model = pair()
    if by_context:
        model.target.context = len(encode(PROMPT)) + most
    run = planned(config(options={} if by_context else {"max_new_tokens": most}), model, Told({}))
    assert {len(program.token_ids) for program in run.programs} == {most}
    assert len(run.programs) == (3 if most == 12 else 5)
    assert (run.batches == [[""]]) == (most == 12)


def test_programs_end_where_the_options_say() -> None:
    (end,) = encode("\n")
    run = planned(config(options={"eos": (end,)}), rewards=Told({}))
    assert {program.token_ids for program in run.programs} == {encode(text) for text in ANSWERS}


# ── looking ahead ───────────────────────────────────────────────────────────────────────────────────────────────────


def ahead(answers: Mapping[str, float], **changes: Any) -> Watched:
    return planned(config(horizon=2, **{"entropy": 0.5, **changes}), pair(answers), Told({}))


def test_looking_ahead_commits_what_goes_on_best() -> None:
    """Greedily b, which has .4 and is three ways from there; a has .35 and goes on surely."""
    answers = {"    bx\n": 0.16, "    by\n": 0.14, "    bz\n": 0.10, "    a\n": 0.35, "    c\n": 0.25}
    run = ahead(answers)
    assert [each.completion for each in run.programs] == ["    a\n"]
    # two tokens a roll-out; behind four is the flat place
    assert run.batches == [[""], ["  "], ["    "], ["    b", "    a", "    c"]]
    assert run.stats.target_passes == 2 * 4
    assert run.tokens == 2 * 6
    assert [each.completion for each in ahead(answers, entropy=2.0).programs] == ["    bx\n"]
    assert [each.completion for each in ahead(answers, width=1).programs] == ["    bx\n"]
    assert run.programs[0].spent.tokens == run.tokens


# ── budgets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Clock:
    """A clock that goes on by a second whenever it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def filtered(settings: PlanConfig, tokens: float, seconds: float, rewards: Rewards | None = None, **named: Any) -> Watched:
    run = Watched(pair(), named.pop("task", task()), settings, rewards or Told({}), **named)
    filter_samples(run, tokens, seconds)
    return run


def test_tokens_of_rows_are_those_that_the_engine_has_committed() -> None:
    """Stop strings included, which samples do not have."""
    run = filtered(config(), tokens=100, seconds=0, task=task(stops=("\n",)))
    assert run.programs[-1].spent.tokens == run.tokens == run.stats.committed
    samples = pair().generate(PROMPT, 4, temperature=1.0, seed=1, stop=["\n"], max_new_tokens=40)[0].samples
    assert [each.completion for each in run.programs[:4]] == [each.text for each in samples]
    assert sum(len(each.token_ids) for each in samples) < run.programs[3].spent.tokens  # the control
    steps = [each.spent.tokens for each in run.programs]
    assert steps == sorted(set(steps))
    best, spent = best_of(run.programs, tokens=100)
    assert best is not None
    assert 100 - 14 < spent.tokens <= 100 < run.tokens


def test_the_filter_goes_on_until_both_budgets_are_spent() -> None:
    assert len(filtered(config(), tokens=1, seconds=0).batches) == 1
    assert len(filtered(config(), tokens=61, seconds=0).batches) == 2
    run = filtered(config(), tokens=1, seconds=5, clock=Clock())
    assert len(run.batches) == 3  # two questions a batch: may it go on, and when was it
    within, spent = best_of(run.programs, seconds=4)
    assert within is not None
    assert spent.programs == 8
    assert spent.seconds <= 4 < run.programs[-1].spent.seconds
    assert len({each.token_ids for each in run.programs}) > 1
    passed = filtered(config(), tokens=1e9, seconds=0, rewards=Told(REWARDS))
    assert passed.solved
    assert not any(each.reward == 1 for each in passed.programs[: -passed.config.n])


def test_the_best_passes_most_and_is_most_probable() -> None:
    programs = [
        TriedProgram((1,), text, logprob, reward, Spent(tokens, tokens))
        for text, logprob, reward, tokens in (("a", -1.0, 0.5, 1), ("b", -0.5, 0.5, 2), ("c", -3.0, 1.0, 3))
    ]
    assert [best_of(programs, tokens=most)[0] for most in (1, 2, 3)] == programs
    assert best_of(programs, tokens=3, seconds=2)[0] is programs[1]


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(RequestError, match="--temperature above 0"):
        config(options={"temperature": 0})
    with pytest.raises(RequestError, match="planning needs the target's distribution"):
        config(options={"rule": "typical"})


# ── problem by problem ──────────────────────────────────────────────────────────────────────────────────────────────


def runs(monkeypatch: pytest.MonkeyPatch, settings: PlanConfig, model: Shoal | None = None) -> list[dict[str, Any]]:
    monkeypatch.setattr(Rewards, "_executed", lambda _, texts: (REWARDS.get(text, 0.0) for text in texts))
    made = PlannedRuns(model or pair(), settings, {"a": TESTS}, sandbox=None)  # type: ignore[arg-type]
    return list(made.run([task()]))


def test_both_methods_get_the_same_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes a second. Planning ends early, after 19: the filter has at least the seconds of its tokens."""
    monkeypatch.setattr(ProblemRun, "seconds", property(lambda run: float(run.stats.target_passes)))
    (entry,) = runs(monkeypatch, config(tokens=120))
    attempts = entry["attempts"]
    assert list(attempts) == [PLANNED, BY_TOKENS, BY_SECONDS]
    assert attempts[PLANNED]["samples"][0]["completion"] == "    return 29\n"
    assert (attempts[PLANNED]["tokens"], attempts[PLANNED]["seconds"]) == (23, 19)
    assert attempts[BY_TOKENS]["tokens"] <= 120
    assert attempts[BY_TOKENS]["programs"] == 8
    assert entry["budget"] == {"tokens": 120, "seconds": attempts[BY_TOKENS]["seconds"]}
    assert entry["budget"]["seconds"] > 19
    json.dumps(entry, allow_nan=False)


def test_the_filter_has_the_seconds_of_a_search_that_spent_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProblemRun, "seconds", property(lambda run: 3.0 * run.stats.target_passes))
    (entry,) = runs(monkeypatch, config(tokens=15))
    attempts = entry["attempts"]
    assert entry["budget"] == {"tokens": 15, "seconds": 3.0 * (14 + 3)}
    assert (attempts[PLANNED]["programs"], attempts[PLANNED]["tokens"]) == (1, 14)
    assert (attempts[BY_TOKENS]["programs"], attempts[BY_SECONDS]["programs"]) == (1, 4)


def test_both_methods_draft_from_the_texts_of_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = runs(monkeypatch, config(tokens=60, lookahead=3))
    assert all(attempt["drafted"] >= attempt["accepted"] > 0 for attempt in entry["attempts"].values())
    assert entry["attempts"][PLANNED]["target_passes"] < 14 + 3 + 2
    (plain,) = runs(monkeypatch, config(tokens=60))
    assert plain["attempts"][PLANNED]["drafted"] == 0
    assert plain["attempts"][PLANNED]["samples"][0]["token_ids"] == entry["attempts"][PLANNED]["samples"][0]["token_ids"]


def test_drafters_of_a_cache_are_made_anew_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that follows the target is always right, as long as its cache is that of the call."""
    says = script(ANSWERS)
    model = Shoal(scripted(says, VOCABULARY), scripted(says, VOCABULARY), TOKENIZER, max_batch=4)
    model.eos = (END,)
    assert siblings(model, config(lookahead=3)) is None
    assert siblings(pair(), config(lookahead="off")) is None
    assert isinstance(siblings(pair(), config(lookahead=3)), SuffixDrafter)
    (entry,) = runs(monkeypatch, config(tokens=60, lookahead=3), model)
    assert entry["attempts"][PLANNED]["drafted"] - entry["attempts"][PLANNED]["accepted"] <= 4  # behind ends
    assert entry["attempts"][PLANNED]["target_passes"] == 4 + 1 + 1


def test_a_problem_that_is_refused_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair()
    model.target.context = 4
    (entry,) = runs(monkeypatch, config(), model)
    assert entry["attempts"] == {}
    summary = summary_of(["a"], {"a": entry}, {})
    assert summary["methods"][PLANNED]["pass@1"]["mean"] == 0
    assert list(summary["errors"]) == ["a"]


def test_the_summary_says_that_it_is_not_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = runs(monkeypatch, config(tokens=60))
    grade = {"scores": {"passed": 1.0}, "outcome": "passed", "detail": ""}
    failed = {**grade, "scores": {"passed": 0.0}}
    grades = {"a": {"grades": {PLANNED: [grade], BY_TOKENS: [failed], BY_SECONDS: [grade]}}}
    summary = summary_of(["a"], {"a": entry}, grades)
    assert summary["lossless"] is False
    assert [line["pass@1"]["mean"] for line in summary["methods"].values()] == [1, 0, 1]
    assert summary["methods"][PLANNED]["tokens"] == 23
    assert summary["against"][BY_TOKENS]["mean"] == 1
    said = list(sentences({**summary, "left_out": 2}))
    assert "planned programs are not lossless" in said[0]
    assert "Left out, as they have no public tests: 2." in said


def test_a_file_takes_the_whole_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The names of the methods were cut to "filte…" at 100 columns."""
    (entry,) = runs(monkeypatch, config(tokens=60))
    grade = {"scores": {"passed": 1.0}, "outcome": "passed", "detail": ""}
    grades = {"a": {"grades": {method: [grade] for method in (PLANNED, BY_TOKENS, BY_SECONDS)}}}
    show_planned({**summary_of(["a"], {"a": entry}, grades), "left_out": 0})
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("method ")
    assert [line.split("  ")[0] for line in lines[:3]] == [PLANNED, BY_TOKENS, BY_SECONDS]
