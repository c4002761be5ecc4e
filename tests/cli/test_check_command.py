"""`shoal check`: on which prompts it measures, what it says of them, and what stands beside a prediction.

Tests of: cli.check, cli.check_case, cli.check_drafters, cli.check_pair, cli.check_prompts, cli.files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.bench import decoding_methods, machine
from shoal.bench.machine import BusyProcess
from shoal.cli import run
from shoal.cli.check import affordable, prompt_sets
from shoal.cli.check_case import BASELINE_TOKENS, LEAST_TOKENS, CheckCase, Effort, MethodTimings
from shoal.cli.check_drafters import PUBLISHED, SHORT, compared_drafters, published
from shoal.cli.check_model import turn_end
from shoal.cli.check_pair import WORTHWHILE, _speed_up, _tenths, runs_of
from shoal.cli.check_prompts import BUILT_IN, CHAT, CODE, MOST, PROSE, PromptSet, built_in, check_prompts
from shoal.cli.files import listed_prompts
from shoal.errors import RequestError
from shoal.testing import save_pair, tiny_tokenizer
from shoal.types.stats import Stats

WORK = ("-n", "2", "--max-new-tokens", "8", "--k", "2", "--repeats", "1", "--json")
ON_PROMPTS = {"context", "memory", "acceptance", "costs", "speed-up", "greedy identity", "seeded identity"}
"""What depends on the prompts."""


@pytest.fixture(scope="module")
def pair(saved_pair: tuple[Path, Path]) -> tuple[str, ...]:
    return "--model", str(saved_pair[0]), "--draft", str(saved_pair[1])


@pytest.fixture
def check(pair: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The findings of a run by name."""

    def call(*options: object) -> dict[str, Any]:
        capsys.readouterr()
        assert run(["check", *pair, *WORK, *map(str, options)]) == 0
        return {found["name"]: found for found in json.loads(capsys.readouterr().out)["checks"]}

    return call


def test_every_figure_says_on_which_prompts_it_was_measured(check: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "stories.jsonl"
    stories = ["Once upon a time there was a tired miller", "Far away"]
    file.write_text(json.dumps({"prompt": stories[0], "id": 1}) + "\n\n" + json.dumps(stories[1]) + "\n")
    found = check("--prompts", file)
    assert set(found) >= ON_PROMPTS | {"prompts"}
    assert found["prompts"]["verdict"] == "ok"
    for name in ON_PROMPTS - {"costs"}:
        assert f"2 prompts, from {file}" in found[name]["figure"], name
        assert '"Once upon a time there was ..."' in found[name]["figure"], name
        [said] = found[name]["data"]["prompts"]
        assert (said["kind"], said["given"], said["measured"], said["source"]) == ("own", 2, 2, f"from {file}")
    assert f"1 of 2 prompts, from {file}" in found["costs"]["figure"]
    assert not any("Python" in one["figure"] for one in found.values())
    seeded = found["seeded identity"]["data"]  # by the coupled rule: rejection sampling promises no seed's tokens
    assert (seeded["same"], seeded["drafted"] > 0) == (seeded["rows"], True)


def test_in_text_the_prompts_are_said_once(pair: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *pair, *WORK[:-1], "-p", "def", "-p", "class"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "ok prompts 2 prompts, from --prompt" in told
    assert told.count("; on ") == told.count("; on 1 of 2 prompts, from --prompt") == 1  # passes are timed on the first
    assert told.count("from --prompt") == 2


def test_processes_that_disturb_what_is_timed_are_named(
    pair: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not where nothing was timed, nor where nothing else was busy."""
    busy = [BusyProcess("cc1", 0.9)]
    monkeypatch.setattr(machine, "busy_processes", lambda *_: tuple(busy))

    def disturbed(*options: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        run(["check", *options, *WORK])
        return [one for one in json.loads(capsys.readouterr().out)["checks"] if one["name"] == "disturbed"]

    [found] = disturbed(*pair, "-p", "def")
    assert (found["verdict"], "cc1 at 90% of a core" in found["figure"]) == ("warn", True)
    assert not disturbed("--model", "no-such-folder")
    busy.clear()
    assert not disturbed(*pair, "-p", "def")


def test_noise_is_no_figure() -> None:
    shown = {-0.13: "< 0.1", 0.0: "< 0.1", 0.099: "< 0.1", 0.1: "0.1", 2.34: "2.3"}
    assert {measured: _tenths(measured) for measured in shown} == shown


def test_without_prompts_each_kind_is_measured_and_the_user_warned(check: Callable[..., Any]) -> None:
    found = check("--max-new-tokens", 4, "-n", 1)
    assert found["prompts"]["verdict"] == "warn"
    assert "--prompts FILE" in found["prompts"]["advice"]
    kinds = [one["kind"] for one in found["prompts"]["data"]["sets"]]
    assert kinds == [CODE, PROSE, CHAT]
    for name in ("acceptance", "speed-up"):
        assert name not in found
        for kind in kinds:
            one = found[f"{name}, {kind.split()[-1]}"]
            assert [said["kind"] for said in one["data"]["prompts"]] == [kind]
            assert kind in one["figure"]
    counts = [found[f"acceptance, {kind.split()[-1]}"]["data"]["T=0.8"]["drafted"] for kind in kinds]
    assert all(counts)
    assert found["greedy identity"]["data"]["rows"] == found["seeded identity"]["data"]["rows"] == 6


def test_acceptance_of_a_kind_is_measured_on_its_own_prompts() -> None:
    calls = []

    def generate(prompts: Any, n: int, **options: Any) -> str:
        calls.append((tuple(prompts), options["temperature"]))
        return f"run {len(calls)}"

    sets = built_in(list(BUILT_IN), tiny_tokenizer())
    assert len({kind.split()[-1] for kind in BUILT_IN}) == len(BUILT_IN)  # by which findings are named
    case = CheckCase(SimpleNamespace(generate=generate), sets, 2, 8, 3, 1, lambda _: None)  # type: ignore[arg-type]
    assert case.acceptance == [{0.8: f"run {i}", 0.0: f"run {i + 1}"} for i in (1, 3, 5)]
    assert calls == [(one.ids, temperature) for one in sets for temperature in (0.8, 0.0)]
    assert len({one.ids for one in sets}) == 3


def test_the_bundled_pair_is_measured_on_code_and_says_so() -> None:
    [only] = prompt_sets(("", []), tiny_tokenizer(), bundled=True)
    assert only.kind == CODE
    said = check_prompts([only], bundled=True)
    assert (said.status, "trained on Python code" in said.figure, "--prompts FILE" in said.advice) == ("ok", True, True)
    [own] = prompt_sets(("from --prompt", ["x"]), tiny_tokenizer(), bundled=True)
    assert (own.kind, check_prompts([own], bundled=True).advice) == ("", "")


def test_the_measured_run_stands_beside_the_prediction(check: Callable[..., Any]) -> None:
    assert check("-p", "def", "--repeats", 3)["speed-up"]["data"]["measured"]["runs"] == 3  # of one prompt
    data = check("-p", "def", "-p", "class")["speed-up"]["data"]
    measured = data["measured"]
    assert set(measured["seconds"]) == {"off", "hf", f"fixed:{measured['k']}"}
    work = measured["runs"] * measured["rows"] * measured["tokens"]
    alone = 1 * measured["rows"] * BASELINE_TOKENS  # Transformers' generate runs once: it may take ten times as long
    assert measured["committed"] == {"off": work, f"fixed:{measured['k']}": work, "hf": alone}
    assert (measured["runs"], measured["rows"], measured["tokens"], measured["unavailable"]) == (2, 2, 8, {})
    assert data["best_k"] in (0, measured["k"])
    assert data["speedup"][str(measured["k"])] == max(data["speedup"].values())


@pytest.mark.parametrize(("texts", "held"), [(["x" * 40], 0), (["x" * 40, "def", "y" * 30], 1), (["def", "class"], 2)])
def test_drafts_are_measured_on_the_prompts_that_the_drafter_holds(
    texts: list[str], held: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts beyond its context, 24 tokens, are decoded plainly: that is said, and no fault of the pair."""
    target, drafter = save_pair(tmp_path)
    config = drafter / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 24}))
    prompts = [option for text in texts for option in ("-p", text)]
    assert run(["check", "--model", str(target), "--draft", str(drafter), *WORK, *prompts]) == 0
    found = {found["name"]: found for found in json.loads(capsys.readouterr().out)["checks"]}
    assert found["context"]["verdict"] == ("ok" if held == len(texts) else "warn")
    assert ("such rows are decoded plainly" in found["context"]["advice"]) == (held < len(texts))
    if not held:
        assert found["acceptance"]["verdict"] == "skip"
        assert not found.keys() & {"costs", "speed-up", "greedy identity", "seeded identity"}
        return
    for name in ("acceptance", "greedy identity", "seeded identity", "speed-up"):
        assert [said["measured"] for said in found[name]["data"]["prompts"]] == [held], name
    drafted = [figures["drafted"] for name, figures in found["acceptance"]["data"].items() if name.startswith("T=")]
    assert min(drafted) > 0
    assert found["greedy identity"]["data"]["rows"] == 2 * held


def test_a_baseline_that_cannot_run_is_named(check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no generate here\nat all")

    monkeypatch.setitem(decoding_methods.BASELINES, "hf", broken)
    found = check("-p", "def")["speed-up"]
    assert "could not run (no generate here)" in found["figure"]
    assert found["data"]["measured"]["over_transformers"] is None
    assert found["data"]["measured"]["over_plain"] > 0


@pytest.mark.parametrize(("seconds", "verdict"), [(1.0, "ok"), (2.0, "warn")])
def test_what_was_measured_decides_not_what_was_predicted(seconds: float, verdict: str) -> None:
    tokens = {"off": 16, "fixed:3": 16, "hf": 8}
    measured = MethodTimings(3, 1, 2, 8, {"off": 2.0, "hf": 1.5, "fixed:3": seconds}, tokens, {})
    for predicted in (0.5, 1.5):
        found = _speed_up("speed-up", dict.fromkeys(range(1, 9), predicted), measured)
        assert (found.status, found.data["best_k"]) == (verdict, 3 if verdict == "ok" else 0)
        assert f"{2 / seconds:.2f}x plain decoding, {3 / seconds:.2f}x Transformers' batched generate" in found.figure
    assert WORTHWHILE < 2.0


def test_kinds_of_files(tmp_path: Path) -> None:
    lines, paragraphs, code = (tmp_path / name for name in ("a.jsonl", "b.txt", "c.py"))
    lines.write_text('"one\\n\\nprompt \u2028"\n\n{"prompt": "two"}\n', encoding="utf-8")
    paragraphs.write_text("first\nstill first\n \n\n  second\n")
    code.write_text("import os\n\n\ndef a():\n")
    assert listed_prompts([lines, paragraphs, code]) == [
        "one\n\nprompt \u2028", "two", "first\nstill first", "  second", "import os\n\n\ndef a():\n",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"text": "x"}', 'a.jsonl:1 must be a text or an object with a text "prompt"'),
        ("a.jsonl", '\n{"prompt"', "a.jsonl:2 is not JSON"),
        ("a.jsonl", "\n\n", "holds no prompt"),
        ("a.txt", " \n\n ", "holds no prompt"),
        ("a.txt", None, "cannot read prompt file"),
    ],
)
def test_files_that_hold_no_prompts_are_refused_before_a_model_is_loaded(
    name: str, text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=said):
        listed_prompts([tmp_path / name])
    assert run(["check", "--prompts", str(tmp_path / name)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_of_many_prompts_some_are_measured_evenly_spaced() -> None:
    texts = [f"prompt number {i}" for i in range(20)]
    some = PromptSet.of("", "from many.jsonl", texts, tiny_tokenizer())
    assert len(some.ids) == MOST < len(texts)
    places = [texts.index(text) for text in some.texts]
    assert (places[0], {b - a for a, b in pairwise(places)} <= {2, 3}) == (0, True)
    assert "8 of 20 prompts, from many.jsonl" in str(some)
    assert (some.to_dict()["given"], some.to_dict()["measured"]) == (20, 8)


def test_chat_goes_through_the_template_of_the_tokenizer() -> None:
    plain = tiny_tokenizer()
    assert plain.decode(PromptSet.of(CHAT, "", ["Hi."], plain).ids[0]) == "User: Hi.\nAssistant:"
    calls: list[Any] = []

    def render(messages: Any, **options: Any) -> str:
        calls.append((messages, options))
        return "<u>Hi.<a>"

    encoded = SimpleNamespace(
        chat_template="x", apply_chat_template=render, encode=lambda text, add_special_tokens: [text, add_special_tokens]
    )
    assert PromptSet.of(CHAT, "", ["Hi."], encoded).ids == (("<u>Hi.<a>", False),)  # the template has written its own BOS
    assert calls == [
        ([{"role": "user", "content": "Hi."}], {"chat_template": "x", "add_generation_prompt": True, "tokenize": False})
    ]


def test_a_tokenizer_that_ends_texts_by_another_token_is_told() -> None:
    """A fine-tune's commonest fault: both end texts here, and other programs go on behind the turn."""
    tokenizer = tiny_tokenizer()
    own = tokenizer.eos_token_id

    def told(*named: int, ends: tuple[int, ...] = (7, own)) -> list[tuple[str, str, bool]]:
        hf = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=list(named) or None), config=SimpleNamespace())
        model: Any = SimpleNamespace(tokenizer=tokenizer, target=SimpleNamespace(hf=hf), eos=ends)
        return [(found.name, found.status, "both end texts" in found.figure) for found in turn_end(model)]

    assert told(own) == told(7, own) == told() == []
    assert told(7) == [("end of text", "warn", True)]
    assert told(7, ends=(7,)) == [("end of text", "warn", False)]


# ── which drafter pays ──────────────────────────────────────────────────────────────────────────────────────────────

IN_THE_BOX = ["suffix", "ngram", "recycling", "trigrams"]


class MadeUp:
    """A model whose rounds cost what a test says: seconds by drafter and draft length, and tokens per pass."""

    draft_model = drafter_name = None

    def __init__(self, seconds: dict[str, dict[int, float]], tokens: float) -> None:
        self.target: Any = SimpleNamespace(name="a-model", vocab_size=260, takes_trees=True)
        self.seconds, self.tokens, self.calls = seconds, tokens, list[tuple[str, Any]]()

    def generate(self, prompts: Any, n: int, *, drafter: Any, lookahead: Any, max_new_tokens: int, **_: Any) -> Any:
        name = "off" if lookahead == "off" else drafter.name
        self.calls.append((name, lookahead))
        tokens = 1.0 if name == "off" else self.tokens
        rounds, length = 100, 0 if name == "off" else lookahead
        seconds = rounds * self.seconds[name][length]
        committed = round(rounds * n * tokens)
        stats = Stats(rounds=rounds, row_rounds=rounds * n, committed=committed, seconds_rounds=seconds)
        return SimpleNamespace(stats=stats)


def choice_of(
    monkeypatch: pytest.MonkeyPatch, tokens: float, seconds: dict[str, dict[int, float]]
) -> tuple[MadeUp, Any, list[Any]]:
    """The last finding with the calls before it, where the four drafters of texts are measured at 2 and 4 drafts."""
    monkeypatch.setattr("shoal.cli.check_drafters.candidates", lambda case: IN_THE_BOX)
    model = MadeUp({"off": {0: 1.0}, **{name: {2: 9.0, 4: 9.0} for name in IN_THE_BOX}, **seconds}, tokens)
    case = CheckCase(model, built_in([CODE, PROSE], tiny_tokenizer()), 2, 8, 4, 1, lambda _: None)  # type: ignore[arg-type]
    *each, choice = compared_drafters(case)
    return model, choice, each


def test_the_drafter_that_pays_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best at the one draft length is measured again, in turns with plain decoding and at a shorter length."""
    model, choice, each = choice_of(monkeypatch, 2.0, {"ngram": {2: 1.0, 4: 1.25}, "recycling": {2: 0.9, 4: 1.6}})
    assert [(one.name, round(one.data["ratio"], 2)) for one in each] == [
        ("drafter suffix", 0.22), ("drafter ngram", 1.6), ("drafter recycling", 1.25), ("drafter trigrams", 0.22),
    ]  # fmt: skip
    assert (choice.data["drafter"], choice.data["length"]) == ("ngram", SHORT)
    assert [(one["length"], round(one["ratio"], 2)) for one in choice.data["measured"]] == [(2, 2.0), (4, 1.6)]
    assert choice.advice == f"use {choice.data['command']}" == "use shoal generate --model a-model --draft ngram"
    assert model.calls[:2] == [("off", "off")] * 2  # a prompt of each kind
    again = model.calls[-6:]
    assert again == [("off", "off")] * 2 + [("ngram", 2)] * 2 + [("ngram", 4)] * 2
    assert len(model.calls) == 2 + len(IN_THE_BOX) * (1 + 2) + 6  # one run warms each up


def test_no_drafter_is_named_where_none_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    _, choice, _ = choice_of(monkeypatch, 1.5, {"suffix": {2: 1.45, 4: 1.6}})
    assert (choice.status, choice.data["drafter"]) == ("ok", None)
    assert "no drafter pays here; the best is suffix" in choice.figure
    assert "--lookahead off" in choice.advice


def test_a_disturbed_run_makes_no_drafter_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round with drafts takes no less than a plain one, so that nobody gains more than the tokens of a pass."""
    _, choice, each = choice_of(monkeypatch, 1.03, {"ngram": {2: 0.5, 4: 0.5}})
    assert {one.data["ratio"] for one in each if one.name == "drafter ngram"} == {1.03}
    assert choice.data["drafter"] is None


def test_without_a_drafter_those_in_the_box_are_measured(pair: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["check", *pair[:2], *WORK, "-p", "def add(a, b):"]) == 0
    told = capsys.readouterr()
    found = {one["name"]: one for one in json.loads(told.out)["checks"]}
    for name in (*IN_THE_BOX, "self:int4"):
        one = found[f"drafter {name}"]
        assert one["verdict"] == "skip" or one["data"]["tokens"] >= 1.0
        assert f"drafter {name}" in told.err  # shown as it comes
    assert {found[f"drafter {name}"]["verdict"] for name in IN_THE_BOX} == {"ok"}
    assert found["choice"]["data"]["command"].startswith(f"shoal generate --model {pair[1]}")
    assert "acceptance" not in found


def test_published_drafters_are_named_by_the_shape_of_the_target() -> None:
    def told(family: str, vocabulary: int, width: int, layers: int = 36) -> list[str]:
        config = SimpleNamespace(model_type=family, vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers)
        config.get_text_config = lambda: config
        target = SimpleNamespace(name="own", has_modules=True, hf=SimpleNamespace(config=config))
        case: Any = SimpleNamespace(model=SimpleNamespace(target=target))
        return [one["id"] for result in published(case) for one in result.data["drafters"]]

    assert told("qwen3", 151936, 4096) == [
        "Qwen/Qwen3-0.6B",
        "z-lab/Qwen3-8B-DFlash-b16",
        "RedHatAI/Qwen3-8B-speculator.eagle3",
    ]
    large = {layers: told("qwen3", 151936, 5120, layers) for layers in (36, 40, 64)}  # heads of one are not those of another
    assert large[36] == ["Qwen/Qwen3-0.6B"]
    assert large[40] == ["Qwen/Qwen3-0.6B", "RedHatAI/Qwen3-14B-speculator.eagle3"]
    assert large[64] == ["Qwen/Qwen3-0.6B", "RedHatAI/Qwen3-32B-speculator.eagle3"]
    assert told("qwen3_moe", 151936, 2048, 48) == ["Qwen/Qwen3-0.6B", "AngelSlim/Qwen3-a3B_eagle3"]
    assert told("llama", 32000, 4096, 32) == ["FasterDecoding/medusa-vicuna-7b-v1.3"]
    assert told("qwen3", 151936, 1024) == told("qwen3", 32000, 4096) == told("mistral", 151936, 4096) == []
    assert told("llama", 49152, 2048) == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert told("llama", 49152, 576) == []  # the model itself
    assert told("lfm2", 65536, 2048) == ["LiquidAI/LFM2-350M"]
    assert told("qwen3_5_text", 248320, 2560) == ["Qwen/Qwen3.5-0.8B", "z-lab/Qwen3.5-4B-DFlash"]
    assert all(bool(one.width) != bool(one.above) for one in PUBLISHED)


# ── in a minute ─────────────────────────────────────────────────────────────────────────────────────────────────────

MOST_WORK = Effort(kinds=3, prompts=2, repeats=3, tokens=64)


@pytest.mark.parametrize(
    ("passes", "found"),
    [
        (1e9, MOST_WORK),
        (64 * runs_of(MOST_WORK) - 1, Effort(3, 1, 1, 64)),
        (64 * runs_of(Effort(3, 1, 1, 64)) - 1, Effort(3, 1, 1, 63)),
        (LEAST_TOKENS * runs_of(Effort(3, 1, 1, 16)), Effort(3, 1, 1, LEAST_TOKENS)),
        (LEAST_TOKENS * runs_of(Effort(3, 1, 1, 16)) - 1, Effort(1, 1, 1, 32)),
        (1, Effort(1, 1, 1, LEAST_TOKENS)),
    ],
)
def test_work_shrinks_to_what_a_minute_allows(passes: float, found: Effort) -> None:
    """First repeats and prompts go, then tokens, then kinds of prompts."""
    assert MOST_WORK.within(passes, runs_of) == found


def test_what_the_user_asks_for_stays() -> None:
    def case() -> CheckCase:
        made = CheckCase(SimpleNamespace(), built_in([CODE, PROSE], tiny_tokenizer()), 2, 64, 4, 3, lambda _: None)  # type: ignore[arg-type]
        made.__dict__["seconds_of_round"] = 1.0  # so that there is time for nothing
        return made

    whole, told = affordable(case(), (64, 3), runs_of)
    assert (whole.effort, told) == (Effort(2, 2, 3, 64), [])
    for fixed, left in {(None, None): (1, LEAST_TOKENS), (64, None): (1, 64), (None, 3): (3, LEAST_TOKENS)}.items():
        less, [said] = affordable(case(), fixed, runs_of)
        assert (less.effort.kinds, less.effort.repeats, less.effort.tokens) == (1, *left)
        assert said.data == vars(less.effort)
