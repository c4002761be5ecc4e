"""Every spec of a drafter that users write: the drafter that it makes, with its options, and the errors of wrong ones.

Tests of: drafting.names, drafting.specs, drafting.trained, drafting.model_trees, drafting.self_drafting.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_heads import save_eagle3
from medusa_heads import save_medusa
from shoal.drafting.model import ModelDrafter
from shoal.drafting.names import named
from shoal.drafting.specs import WITH_MODEL
from shoal.errors import RequestError
from shoal.models.loading import wrap
from shoal.models.runner import Runner
from shoal.testing import tiny_model

OPTIONS = "least most scope k limit playouts exit window sinks nodes shape shapes"
"""Attributes of drafters that hold options, each behind an underscore."""


@pytest.fixture(scope="module")
def target() -> Runner:
    return wrap(tiny_model("llama", layers=3).float(), "tiny", checked=False)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with heads of each kind, an index and directories that have drafters' names."""
    save_medusa(tmp_path / "m")
    save_medusa(tmp_path / "a,b=c" / "m")
    save_eagle3(tmp_path / "e")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "config.json").write_text("{}")
    (tmp_path / "p" / "prompt_tokens.safetensors").touch()
    (tmp_path / "file.index").touch()
    for name in ("ngram", "bundled"):
        (tmp_path / "named" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str) -> tuple[str | None, str | None, Any]:
    """The name of the drafter without a model, the name of the draft model, and what makes drafters."""
    found = named(text)
    if found is None:
        return None, text, None
    return found.name, found.source if isinstance(found, WITH_MODEL) else None, found


def described(drafter: Any) -> str:
    """The class and its options; of a sum, those of its members."""
    if hasattr(drafter, "texts"):
        return " + ".join(map(described, [*drafter.texts, drafter.model]))
    held = {name: getattr(drafter, f"_{name}") for name in OPTIONS.split() if hasattr(drafter, f"_{name}")}
    words = [f"{name}={value}" for name, value in held.items()]
    return " ".join([type(drafter).__name__, *words, f"max_nodes={drafter.max_nodes}"])


FROZEN = json.loads((Path(__file__).parents[1] / "data/draft_specs.json").read_text("utf-8"))
"""Specs with the name in reports, the draft model and the drafter of each; and specs with the error
of each, in which HERE stands for a directory that has the name of a drafter."""


@pytest.mark.parametrize("line", FROZEN["made"], ids=lambda line: line["spec"])
def test_specs(line: dict[str, Any], places: Path, target: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.drafting.ppd.load_ppd", lambda *_: None)
    monkeypatch.setattr("shoal.drafting.index_file.fitting_index", lambda *_: None)
    name, model, drafting = read(line["spec"])
    assert (name, model) == (line["name"], line["model"])
    if drafting is not None:
        own = None if model is None else ModelDrafter(target.fork(), target.vocab_size)
        assert described(drafting.drafter(target, own)) == line["drafter"]


@pytest.mark.parametrize("line", FROZEN["refused"], ids=lambda line: line["spec"])
def test_what_is_refused(line: dict[str, str], places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "HERE" in line["error"]:
        monkeypatch.chdir(places / "named")
    with pytest.raises(RequestError) as raised:
        named(line["spec"])
    assert str(raised.value) == line["error"].replace("HERE", "here")
