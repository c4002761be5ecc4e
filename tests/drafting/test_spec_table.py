"""Every spec of a drafter that users write: the drafter that it makes, with its options, and the errors of wrong ones.

Tests of: drafting.draft, drafting.registry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from eagle_heads import save_eagle3
from medusa_heads import save_medusa
from shoal.api import Shoal
from shoal.cli import run
from shoal.drafting import registry
from shoal.drafting.draft import draft_help, read_draft
from shoal.drafting.model import ModelDrafter
from shoal.drafting.registry import DrafterKind, Number, kinds, names, register
from shoal.drafting.text import Guess, TextDrafter
from shoal.errors import RequestError
from shoal.models.loading import wrap
from shoal.models.mtp_layer import MtpHeads
from shoal.models.runner import Runner
from shoal.testing import tiny_model
from shoal.types.requests import Row

OPTIONS = "least most scope k limit playouts exit window sinks nodes shape shapes"
"""Attributes of drafters that hold options, some behind an underscore."""


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
    found = read_draft(text)
    assert found is not None
    if found.is_model:
        return None, found.source, None
    return found.name, found.source, found


def described(drafter: Any) -> str:
    """The class and its options; of a sum, those of its members."""
    if hasattr(drafter, "texts"):
        return " + ".join(map(described, [*drafter.texts, drafter.model]))
    known = {name.removeprefix("_"): value for name, value in vars(drafter).items()}
    held = {name: known[name] for name in OPTIONS.split() if name in known}
    words = [f"{name}={value}" for name, value in held.items()]
    return " ".join([type(drafter).__name__, *words, f"max_nodes={drafter.max_nodes}"])


def a_layer(target: Runner) -> Any:
    return SimpleNamespace(config=target.hf.config.__class__(hidden_size=32), shared_head=target.hf.lm_head, layers=[None])


FROZEN = json.loads((Path(__file__).parents[1] / "data/draft_specs.json").read_text("utf-8"))
"""Specs with the name in reports, the draft model and the drafter of each; and specs with the error
of each, in which NAMES stands for the drafters that need no directory, and HERE for a directory that
has the name of a drafter."""


@pytest.mark.parametrize("line", FROZEN["made"], ids=lambda line: line["spec"])
def test_specs(line: dict[str, Any], places: Path, target: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.drafting.ppd.load_ppd", lambda *_: SimpleNamespace(vectors=torch.empty(0)))
    monkeypatch.setattr("shoal.drafting.suffix.fitting_index", lambda *_: None)
    monkeypatch.setattr("shoal.drafting.mtp.checkpoint_of", lambda _: Path())
    monkeypatch.setattr("shoal.drafting.mtp._load", lambda *_: MtpHeads(a_layer(target)))
    name, model, drafting = read(line["spec"])
    assert (name, model) == (line["name"], line["model"])
    if drafting is not None:
        own = None if model is None else ModelDrafter(target.fork(), target.vocab_size)
        assert described(drafting.drafter(target, own)) == line["drafter"]


@pytest.mark.parametrize("line", FROZEN["refused"], ids=lambda line: line["spec"])
def test_what_is_refused(
    line: dict[str, str], places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every way in, before a model is loaded."""
    if "HERE" in line["error"]:
        monkeypatch.chdir(places / "named")
    plain = ", ".join(kind.name for kind in kinds() if not kind.directory)
    message = line["error"].replace("NAMES", plain).replace("HERE", "here")
    with pytest.raises(RequestError) as raised:
        read_draft(line["spec"])
    assert str(raised.value) == message
    with pytest.raises(RequestError):
        shoal.load(draft=line["spec"])
    assert run(["generate", "-p", "x", "--draft", line["spec"], "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"].startswith(message[:60])


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"medusa_num_heads": 3}, "medusa"),
        ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 1}}, "dflash"),
        ({"dflash_config": {}}, None),
        ([], None),
    ],
)
def test_heads_are_recognised_by_one_entry(config: Any, name: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = registry.kind_of_heads(tmp_path)
    assert (kind and kind.name) == name


# ── drafters of other packages ──────────────────────────────────────────────────────────────────


class Repeating(TextDrafter):
    """Proposes the last token again. most: the longest draft."""

    table_bytes = 0

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def read(self, rows: Sequence[Row]) -> int:
        return 0

    def guess(self, row: Row, length: int) -> Guess:
        count = min(length, self.most)
        return Guess(row.tokens[-1:] * count, [0.5] * count)


KIND = DrafterKind("repeating", f"{__name__}:Repeating", {"most": Number(2, 1, 8)}, in_sums=True)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Entry points of other packages; nothing stays registered."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(registry, "_entries", lambda: found)
    monkeypatch.setattr(registry, "_kinds", dict(registry._kinds))
    return found


class Entry:
    """An entry point. value: the object that it names, or an error while it is imported."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def load(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_a_drafter_of_another_package(entries: dict[str, Any], target: Runner) -> None:
    """It is parsed, checked, named in errors, joined and run as shoal's own."""
    with pytest.raises(RequestError, match="'repeating' is no drafter, and no directory here"):
        read_draft("repeating:most=3")
    entries["repeating"] = Entry(KIND)
    with pytest.raises(RequestError, match="did you mean 'repeating'"):
        read_draft("repeatin")
    with pytest.raises(RequestError, match=r"repeating needs most in 1\.\.8, got 9"):
        read_draft("repeating:most=9")
    joined = read_draft("repeating+suffix:min=2+org/model")
    assert joined is not None
    assert joined.name == "repeating:most=2+suffix:scope=group,min=2,nodes=0,limit=65536+model"
    pair = Shoal(target, drafting=read_draft("repeating:most=3"))
    assert pair.drafter_name == "repeating:most=3"
    plain = pair.generate([[1, 2, 3]], 2, seed=1, max_new_tokens=12, lookahead=0)
    found = pair.generate([[1, 2, 3]], 2, seed=1, max_new_tokens=12, lookahead=8)
    assert [s.token_ids for s in found[0].samples] == [s.token_ids for s in plain[0].samples]
    assert set(found.stats.by_drafter) == {"Repeating"}
    assert 0 < found.stats.drafted <= 3 * found.stats.row_rounds  # of the 8 that a row may draft


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (ImportError("no torch"), "the drafter 'repeating' cannot be loaded: ImportError"),
        (Repeating, "the entry point shoal.drafters.repeating is no DrafterKind of that name"),
        (replace(KIND, name="other"), "is no DrafterKind of that name"),
    ],
)
def test_an_entry_point_that_is_no_drafter(entries: dict[str, Any], value: Any, message: str) -> None:
    entries["repeating"] = Entry(value)
    with pytest.raises(RequestError, match=message):
        read_draft("repeating")


def test_names_are_taken_once(entries: dict[str, Any]) -> None:
    register(KIND)
    assert names()[-1] == "repeating"
    with pytest.raises(RequestError, match="there is a drafter 'ngram' already"):
        register(replace(KIND, name="ngram"))
    entries["ngram"] = Entry(KIND)  # shoal's own stays
    draft = read_draft("ngram")
    assert draft is not None
    assert draft.name == "ngram:min=2,max=4"


def test_only_text_drafters_stand_before_others(entries: dict[str, Any], target: Runner) -> None:
    entries["alone"] = Entry(
        DrafterKind("alone", "shoal.testing.drafters:RandomTrees", {"vocab_size": Number(64)}, in_sums=True)
    )
    joined = read_draft("suffix:min=2+alone:vocab_size=9+org/model")
    assert joined is not None
    with pytest.raises(RequestError, match=r"alone:vocab_size=9\+model cannot be joined: RandomTrees is no shoal"):
        joined.drafter(target, ModelDrafter(target.fork(), target.vocab_size))


def test_every_drafter_has_frozen_specs() -> None:
    """A draft model is named by its place, `mtp` by its own word; some need a target of their own (test_assistant, test_dflash)."""
    words = {re.split("[:+]", line["spec"])[0] for line in FROZEN["made"]}
    assert [name for name in names() if name not in words | {"model", "assistant", "dflash"}] == []


def test_the_help_names_all_drafters() -> None:
    text = draft_help()
    assert all(kind.as_written in text for kind in kinds())


def test_the_page_on_drafters_has_a_row_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/drafters.md").read_text("utf-8")
    assert [kind.name for kind in kinds() if f"\n| `{kind.name}`" not in page] == []


def test_the_reference_of_drafters_has_a_paragraph_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/drafters.md").read_text("utf-8")
    assert [kind.name for kind in kinds() if not re.search(rf"^\*\*`{kind.name}\b", page, re.MULTILINE)] == []
