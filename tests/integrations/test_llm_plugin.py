"""The plug-in of `llm` under integrations/, by llm's own command line and Python API, with the bundled pair.

Tests of: integrations/llm-shoal.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal

llm = pytest.importorskip("llm", reason="llm is not installed (extra clients)")
PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def plugin() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "integrations" / "llm-shoal"))
        module = importlib.import_module("llm_shoal")
        llm.plugins.load_plugins()
        llm.plugins.pm.register(module, "llm_shoal")
        yield module
        llm.plugins.pm.unregister(name="llm_shoal")


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))


@pytest.fixture(scope="module")
def model(plugin: Any) -> Any:
    return plugin.ShoalModel("shoal", {})


def test_it_streams_the_texts_of_generate(model: Any) -> None:
    response = model.prompt(PROMPT, max_tokens=12, temperature=0.9, seed=3)
    pieces = list(response)
    expected = shoal.load().generate(PROMPT, 1, max_new_tokens=12, temperature=0.9, seed=3)[0]
    assert "".join(pieces) == expected.samples[0].text
    assert len(pieces) > 1
    assert response.input_tokens == len(expected.prompt_ids)
    assert response.output_tokens == len(expected.samples[0].token_ids)


def test_several_samples_come_best_first(model: Any, plugin: Any) -> None:
    text = model.prompt(PROMPT, n=3, max_tokens=8, seed=3).text()
    ranked = model.pair.generate(PROMPT, 3, max_new_tokens=8, seed=3)[0].ranked
    first, *others = [plugin.SEPARATOR.format(i, 3) + sample.text for i, sample in enumerate(ranked, 1)]
    assert text == first.lstrip("\n") + "".join(others)


def test_a_schema_is_a_grammar(model: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(model.prompt(PROMPT, schema=schema, max_tokens=40, temperature=0).text())["a"] in (1, 2)


def test_turns_go_through_the_chat_template(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = model.conversation()
    first = conversation.prompt("a = 1\n", max_tokens=4, temperature=0, system="# s\n").text()
    second = conversation.prompt("b = 2\n", max_tokens=4, temperature=0).text()
    plain = model.pair.generate("a = 1\n" + first + "b = 2\n", 1, max_new_tokens=4, temperature=0)[0].samples[0].text
    assert second == plain
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    monkeypatch.setattr(model.pair.tokenizer, "chat_template", template)
    chat = model.prompt("x", max_tokens=4, temperature=0, system="s").text()
    assert chat == model.pair.generate("<system>s<user>x<assistant>", 1, max_new_tokens=4, temperature=0)[0].samples[0].text


def test_what_shoal_refuses_is_an_error_of_the_model(model: Any) -> None:
    with pytest.raises(llm.ModelError, match="lookahead"):
        model.prompt(PROMPT, lookahead="never").text()
    with pytest.raises(ValueError, match="n"):
        model.prompt(PROMPT, n=0)


def test_pairs_are_noted_by_the_command_line(plugin: Any, tmp_path: Path) -> None:
    from click.testing import CliRunner
    from llm.cli import cli

    runner = CliRunner()
    plugin.register_commands(cli)
    added = runner.invoke(cli, ["shoal", "add", "mine", "--target", "DIR", "--draft", "ngram"])
    assert added.exit_code == 0, added.output
    assert "mine: DIR, draft ngram" in runner.invoke(cli, ["shoal", "list"]).output
    models: list[Any] = []
    plugin.register_models(models.append)
    assert [model.model_id for model in models] == ["shoal", "mine"]
    assert runner.invoke(cli, ["shoal", "add", "shoal", "--target", "DIR"]).exit_code == 1
    (tmp_path / "shoal.json").write_text("[1]")
    assert "not what" in runner.invoke(cli, ["shoal", "list"]).output


@pytest.mark.parametrize(("given", "bars"), [({}, False), ({"target": "some/target", "draft": "ngram"}, True)])
def test_bars_of_loading_are_off_where_nothing_is_downloaded(
    given: dict[str, Any], bars: bool, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers reads the environment when it is imported, which `shoal.load` does."""
    name = "HF_HUB_DISABLE_PROGRESS_BARS"
    monkeypatch.setenv(name, "")  # so that it is restored
    monkeypatch.delenv(name)
    monkeypatch.setattr(shoal, "load", lambda **_: os.environ.get(name))
    assert (plugin.ShoalModel("some", given).pair is None) is bars
