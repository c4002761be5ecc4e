"""`python benchmarks/drafters.py`: what it asks, what it adds up, and that it goes on where it was stopped.

Tests of: benchmarks/drafters.py.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

import drafters
from drafters import TASKS, WARM_UP, Line, Settings, batches, cells, lines, resumed, show
from serving import legible, pair
from shoal.errors import RequestError
from shoal.testing import tiny_tokenizer

SETTINGS = Settings("3", "coupled", 6, 2, 0.8, ["plain", "bundled", "ngram"])


@pytest.mark.parametrize("task", TASKS)
def test_every_batch_has_its_rows(task: str) -> None:
    found = batches(task, 4, 2, 6, 0.8, tiny_tokenizer())
    assert [sum(request.n for request in batch) for batch in found] == [4] * (WARM_UP + 2)
    prompts = [[request.prompt_ids for request in batch] for batch in found]
    assert len({*map(len, prompts)}) == 1
    assert (prompts[0] == prompts[-1]) == (task == "epochs")
    assert [len(batch) for batch in found] == [1 if task == "samples" else 4] * (WARM_UP + 2)
    assert (found[0][0].sampling.grammar is None) == (task != "json")


def test_a_line_says_what_runs_took() -> None:
    scripted = pair(legible(0))
    plain, bundled, ngram = lines(scripted, "code", 2, SETTINGS.drafters, SETTINGS)
    assert (plain.per_pass, plain.drafted, plain.v_plain, plain.by_drafter) == (1.0, 0.0, 1.0, {})
    assert bundled.v_model == 1.0 < bundled.per_pass  # a drafter that says what the target says
    assert bundled.by_drafter["model"]["drafted"] > 0
    assert set(ngram.by_drafter) <= {"ngram"}
    assert all(0 <= line.share < 1 and line.tokens_per_second > 0 for line in (plain, bundled, ngram))
    console = Console(width=120, record=True, file=None, quiet=True)
    show([plain, bundled], console)


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    line = Line("code", 8, "plain", 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, None, {})
    place = tmp_path / "found.json"
    assert resumed(None, SETTINGS) == resumed(place, SETTINGS) == []
    place.write_text(json.dumps({"settings": asdict(SETTINGS), "lines": [asdict(line)]}))
    assert resumed(place, SETTINGS) == [line]
    assert list(cells(["code", "json"], [1, 8], [line])) == [("code", 1), ("json", 1), ("json", 8)]
    other = Settings("auto", *list(asdict(SETTINGS).values())[1:])
    with pytest.raises(RequestError, match="results of other settings"):
        resumed(place, other)


def test_different_greedy_ids_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = pair(legible(0))
    drafters.require_identity(scripted, ["bundled", "ngram"], "3", "coupled")
    real = drafters.engine_of
    monkeypatch.setattr(drafters, "engine_of", lambda _, name, *rest: real(pair(legible(name == "plain")), name, *rest))
    with pytest.raises(drafters.InternalError, match="greedy ids by ngram differ"):
        drafters.require_identity(scripted, ["ngram"], "3", "coupled")
