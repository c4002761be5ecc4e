"""`draft=` and `--draft`: drafters by name, with options, beside models, by every way in.

Tests of: drafting.draft, drafting.registry, drafting.ngram, drafting.text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from serving import served
from shoal.api import Shoal
from shoal.cli import run
from shoal.drafting.draft import Draft, read_draft
from shoal.drafting.ngram import NGramDrafter
from shoal.drafting.registry import kinds
from shoal.drafting.text import TextDrafter
from shoal.errors import RequestError
from shoal.evaluation.sampling import BATCHED, PLAIN, SINGLE, Sampler, SamplingConfig
from shoal.evaluation.tasks import Task
from shoal.lookahead.controller import AutoChoice, Uniform
from shoal.sampling.acceptance import Coupled
from shoal.testing import VOCABULARY, tiny_model, tiny_tokenizer
from shoal.testing.scripted import hashed, scripted
from shoal.types.samples import Result

CODE = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return"


def named(text: str) -> Draft:
    draft = read_draft(text)
    assert draft is not None
    return draft


def texts(result: Result) -> list[str]:
    return [sample.text for sample in result[0].samples]


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_names_and_options() -> None:
    for name in (kind.name for kind in kinds() if not kind.directory):
        draft = read_draft(name)
        assert draft is not None
        assert not draft.is_model
        assert read_draft(draft.name) == draft
    assert read_draft(None) is None


def test_a_directory_with_the_name_of_a_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ngram", "auto"):
        (tmp_path / name).mkdir()
    with pytest.raises(RequestError, match=r"'ngram' is a drafter's name and a directory here: write \./ngram"):
        named("ngram")
    for text in ("./ngram", "auto"):
        draft = read_draft(text)
        assert draft is not None
        assert draft.is_model
    assert named("ngram:min=2").name == "ngram:min=2,max=4"
    assert named("ngram:min=3,max=3").name == "ngram:min=3,max=3"


def test_options_of_models_are_refused(saved_pair: tuple[Path, Path]) -> None:
    for options in ({"draft_revision": "main"}, {"quantize": "draft=int8"}):
        with pytest.raises(RequestError, match="is no model: draft_revision and quantize=draft are for models"):
            shoal.load(saved_pair[0], "ngram", **options)
    with pytest.raises(RequestError, match=r"draft must be a hub id, a directory, .* got a float"):
        shoal.load(saved_pair[0], 0.5)  # type: ignore[arg-type]


# ── ways in ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow(but=["name"])
@pytest.mark.parametrize("draft", ["ngram", "ngram:min=1,max=3", NGramDrafter(2, 3)], ids=["name", "options", "object"])
def test_load_takes_a_drafter_without_a_model(saved_pair: tuple[Path, Path], draft: Any) -> None:
    """With the bundled target and with another; the tokens are those of plain decoding."""
    name = "NGramDrafter" if isinstance(draft, NGramDrafter) else named(draft).name
    for target in (None, saved_pair[0]) if isinstance(draft, NGramDrafter) else (saved_pair[0],):
        with shoal.load(target, draft, dtype="float32") as pair:
            assert pair.draft_model is None
            assert pair.drafter_name == name
            assert name in repr(pair)
            assert pair.loaded["draft"] == {"drafter": name}
            for options in ({"seed": 1, "lookahead": 4}, {"temperature": 0.0, "lookahead": 3}, {"seed": 2}):
                plain = pair.generate(CODE, 3, max_new_tokens=16, **options | {"lookahead": "off"})
                drafted = pair.generate(CODE, 3, max_new_tokens=16, **options)
                assert texts(plain) == texts(drafted)
                assert plain.stats.drafted == drafted.stats.draft_passes == 0
                if target is None and "lookahead" in options:
                    assert 0 < drafted.stats.accepted <= drafted.stats.drafted
                    assert drafted.stats.row_rounds < plain.stats.row_rounds
            assert pair.pair_costs.rounds > 0  # `auto` has learned from its runs, in the account of this drafter


@pytest.mark.slow
def test_ids_of_the_bundled_target_are_those_of_plain_decoding() -> None:
    """Greedy and of a seed, in float32, siblings drafting for each other."""
    names = "ngram suffix:scope=row suffix suffix:nodes=6 suffix:scope=engine recycling recycling:nodes=0".split()
    with shoal.load(dtype="float32", max_batch=3) as pair:
        for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4}):
            plain = pair.generate([CODE, "def is_even(n):"], 4, max_new_tokens=16, lookahead="off", **options)  # type: ignore[arg-type]
            for name in names:
                drafter = named(name).drafter(pair.target)
                found = pair.generate(
                    [CODE, "def is_even(n):"],
                    4,
                    max_new_tokens=16,
                    lookahead=4,
                    drafter=drafter,
                    **options,  # type: ignore[arg-type]
                )
                assert [[s.token_ids for s in output.samples] for output in found] == [
                    [s.token_ids for s in output.samples] for output in plain
                ]
                assert 0 < found.stats.accepted < found.stats.drafted
                assert found.stats.row_rounds < plain.stats.row_rounds


@pytest.mark.slow
def test_sums_load_the_model_too(saved_pair: tuple[Path, Path]) -> None:
    for target, draft in ((None, "suffix+bundled"), (saved_pair[0], f"suffix+{saved_pair[1]}")):
        with shoal.load(target, draft, dtype="float32") as pair:
            assert pair.draft_model is not None
            assert pair.drafter_name == "suffix:scope=group,min=1,nodes=0,limit=65536+model"
            assert isinstance(pair.engine("auto", Coupled()).lookahead, AutoChoice)
            assert isinstance(pair.engine(4, Coupled()).lookahead, Uniform)
            assert pair.loaded["draft"] is not None
            assert {"drafter", "dtype", "passes"} <= pair.loaded["draft"].keys()
            for options in ({"seed": 1, "lookahead": 4}, {"temperature": 0.0, "lookahead": 3}, {"seed": 2}):
                plain = pair.generate(CODE, 3, max_new_tokens=16, **options | {"lookahead": "off"})
                drafted = pair.generate(CODE, 3, max_new_tokens=16, **options)
                assert texts(plain) == texts(drafted)
                assert drafted.stats.drafted > 0 < drafted.stats.draft_passes
    with pytest.raises(RequestError, match="the bundled draft model fits the bundled target alone"):
        shoal.load(saved_pair[0], "suffix+bundled")
    with pytest.raises(RequestError, match="a draft model was given without a target model"):
        shoal.load(None, f"suffix+{saved_pair[1]}")


def test_the_default_is_still_the_bundled_pair() -> None:
    with shoal.load() as pair:
        assert pair.draft_model is not None
        assert pair.drafter_name == pair.draft_model.name


def test_the_command_line(saved_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for model in ([], ["--model", str(saved_pair[0])]):
        found = {}
        for lookahead in ("off", "4"):
            common = f"--draft ngram --max-new-tokens 12 --seed 1 --dtype float32 --json -k {lookahead}".split()
            assert run(["generate", "-p", CODE, *common, *model]) == 0
            found[lookahead] = json.loads(capsys.readouterr().out)
        assert [s["token_ids"] for s in found["off"]["prompts"][0]["samples"]] == [
            s["token_ids"] for s in found["4"]["prompts"][0]["samples"]
        ]
        assert found["4"]["stats"]["loaded"]["draft"] == {"drafter": "ngram:min=2,max=4"}
        assert found["4"]["stats"]["drafted"] >= (0 if model else 1)
        for sample in (found["4"]["prompts"][0]["samples"][0], found["4"]["stats"]):
            counts = {what: sample[what] for what in ("drafted", "accepted")}
            assert sample["by_drafter"] == ({"ngram": counts} if counts["drafted"] else {})
    assert run(["bench", "--shape", "tiny", "--draft", "ngram"]) == 2
    assert "--shape makes its own models" in capsys.readouterr().err


def test_check_needs_no_draft_model(saved_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    options = "--draft ngram:min=1 -n 2 --max-new-tokens 8 --repeats 1 --dtype float32 --json".split()
    assert run(["check", "--model", str(saved_pair[0]), *options, "-p", CODE]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["drafter"]["figure"] == "ngram:min=1,max=4: no model"
    assert checks["memory"]["data"]["kept_bytes"] > 0
    assert "that the drafter keeps" in checks["memory"]["figure"]
    assert checks["greedy identity"]["verdict"] == checks["seeded identity"]["verdict"] == "ok"


@pytest.mark.slow
def test_bench_and_demo_need_no_draft_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = ["--batch-sizes", "2", "--max-new-tokens", "8", "--repeats", "1", "--lookahead", "off,3", "--baselines", ""]
    assert run(["bench", "--draft", "ngram", "--wait", "0", "--output", str(tmp_path / "found.json"), *work]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["config"]["draft"] == {"name": "ngram:min=2,max=4"}
    for stats in (one["stats"] for line in found["lines"] for one in line["runs"] if one["stats"]):
        assert sum(counts["drafted"] for counts in stats["by_drafter"].values()) == stats["drafted"]
    capsys.readouterr()
    assert run(["demo", "--draft", "ngram", "-n", "2", "--max-new-tokens", "8", "--repeats", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"] == "ngram:min=2,max=4"


def test_an_evaluation_by_all_methods() -> None:
    pair = Shoal(scripted(hashed(VOCABULARY), VOCABULARY), None, tiny_tokenizer(), drafting=named("ngram:min=1,max=3"))
    config = SamplingConfig(2, {"max_new_tokens": 40, "temperature": 0.3}, 3, 1)
    task = Task("one", CODE, (), lambda _: CODE, lambda text, _: text)
    sampler = Sampler(pair, config)
    # a draft model of another vocabulary proposes nothing that fits without it
    assert all(one.proposable is pair.proposable for one in sampler.shoals.values())
    (entry,) = sampler.run([task])
    stats = {method: attempt["stats"] for method, attempt in entry["attempts"].items()}
    assert stats[PLAIN]["drafted"] == 0
    assert stats[SINGLE]["drafted"] > 0 < stats[BATCHED]["drafted"]
    ids = {method: [s["token_ids"] for s in attempt["samples"]] for method, attempt in entry["attempts"].items()}
    assert ids[PLAIN] == ids[SINGLE] == ids[BATCHED]


def test_a_server() -> None:
    pair = Shoal(
        scripted(hashed(VOCABULARY), VOCABULARY), None, tiny_tokenizer(), max_batch=4, drafting=named("ngram:min=1,max=3")
    )
    with served(pair, lookahead=3) as server:
        assert server.client.models.list().data[0].shoal["speculation"] is True  # type: ignore[attr-defined]
        server.client.completions.create(model="tiny", prompt=CODE, max_tokens=24, n=2, seed=1)
        assert isinstance(server.worker.thread.engine.drafter, TextDrafter)
        assert server.worker.thread.stats.drafted > 0


def test_transformers_generate() -> None:
    model = tiny_model("llama").double()
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    plain = model.generate(ids, do_sample=False, max_new_tokens=24)
    for draft in ("ngram", NGramDrafter(1, 2)):
        options: dict[str, Any] = {"custom_generate": shoal.custom_generate, "draft_model": draft, "lookahead": 3}
        assert torch.equal(plain, model.generate(ids, do_sample=False, max_new_tokens=24, **options))
    with pytest.raises(RequestError, match=r"draft_model must be a hub id, a directory, .* got a int"):
        model.generate(ids, custom_generate=shoal.custom_generate, draft_model=7, max_new_tokens=2)
