"""What `load` chose is said in the log, in the stats and in every --json.

Tests of: models.load_report, models.attention.methods.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.api import Shoal
from shoal.cli import run
from shoal.models.attention import methods
from shoal.models.load_report import described
from shoal.models.loading import wrap
from shoal.native.build import missing
from shoal.testing import tiny_model
from shoal.types.stats import Stats

ATTENTION = "pad" if missing() else "native"
LAYERS = "modules" if missing() else "C layers"
"""The executor of weights that are not packed in panels."""
CHOSEN = {
    "dtype": "float32", "dtype_reason": "the checkpoint is in float32", "device": "cpu", "weights": "input-major",
    "quantize": "off", "attention": ATTENTION, "passes": LAYERS, "strict": "off", "kv": "off",
}  # fmt: skip


def load(saved_pair: tuple[Path, Path], **options: Any) -> Shoal:
    return shoal.load(*saved_pair, device="cpu", **options)


def test_the_report_of_a_default_load(saved_pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shoal"):
        model = load(saved_pair)
    assert model.loaded == {"target": CHOSEN, "draft": CHOSEN}
    (line,) = [record for record in caplog.records if record.name == "shoal" and record.message.startswith("loaded:")]
    assert line.levelno == logging.INFO
    for word in ("target float32 on cpu (the checkpoint is in float32)", "weights input-major", "quantize off", "; draft float32",
                 f"attention {ATTENTION}", f"passes {LAYERS}"):  # fmt: skip
        assert word in line.message
    assert str(saved_pair[0]) not in line.message
    assert load((saved_pair[0], None)).loaded["draft"] is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "dtype_reason": "as asked", "weights": "as-is"}, None),
        ({"quantize": "draft=int8"}, {}, {"quantize": "int8", "passes": "modules" if missing() else "C decoder"}),
        ({"attention": "split"}, {"attention": "split", "passes": "modules"}, None),
        ({"compile": "off"}, {"attention": "pad", "passes": "modules"}, None),
    ],
)
def test_the_report_follows_the_options(saved_pair: Any, options: Any, target: Any, draft: Any) -> None:
    loaded = load(saved_pair, **options).loaded
    assert loaded == {"target": CHOSEN | target, "draft": CHOSEN | (target if draft is None else draft)}


def test_strict_is_said(saved_pair: tuple[Path, Path]) -> None:
    loaded = load(saved_pair, strict=True).loaded["target"]
    assert loaded is not None
    assert (loaded["attention"], "bit-equal" in loaded["strict"]) == ("strict", True)


def test_a_model_that_was_handed_over() -> None:
    made = described(wrap(tiny_model("llama"), "own"))
    assert made == CHOSEN | {"dtype_reason": "that of the model object", "weights": "as given", "passes": "modules"}
    own_code = wrap(tiny_model("mpt"), "mpt")
    assert own_code.attention_path == "mask"
    assert described(own_code)["attention"] == "the model's own"


def test_attention_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    for there, expected in ((True, "fused"), (False, "pad")):
        monkeypatch.setattr(methods, "available", lambda query, there=there: there)
        assert methods.resolved("auto", cuda, torch.bfloat16) == expected
        assert methods.resolved("auto", torch.device("cpu"), torch.float32) == ATTENTION
        assert methods.resolved("pad", cuda, torch.bfloat16) == "pad"


def test_results_and_their_sums_say_it(saved_pair: tuple[Path, Path]) -> None:
    model = load(saved_pair)
    stats = model.generate("ab", max_new_tokens=4, seed=0).stats
    assert stats.loaded == model.loaded == stats.to_dict()["loaded"]
    total = Stats() + stats + stats
    assert (total.loaded, total.committed) == (model.loaded, 2 * stats.committed)
    assert ((total - stats).loaded, (total - stats).committed) == (model.loaded, stats.committed)
    stream = model.stream("ab", max_new_tokens=4)
    for _ in stream:
        pass
    assert stream.result().stats.loaded == model.loaded


def test_a_sum_keeps_the_first_that_is_not_empty() -> None:
    first, other = ({"target": {"dtype": name}, "draft": None} for name in ("float32", "bfloat16"))
    assert (Stats(loaded=first) + Stats(loaded=other)).loaded == first
    assert (Stats(loaded=first) - Stats(loaded=other)).loaded == first
    assert (Stats(loaded=first) + Stats()).loaded == (Stats() + Stats(loaded=first)).loaded == first


def _generate(answer: Any) -> Any:
    return answer["stats"]["loaded"]


def _check(answer: Any) -> Any:
    data = {check["name"]: check["data"] for check in answer["checks"]}
    return {"target": data["target"], "draft": data["drafter"]}


def _bench(answer: Any) -> Any:
    assert all(one["stats"]["loaded"] == {} for line in answer["lines"] for one in line["runs"])  # said once
    return {role: {name: answer["config"][role][name] for name in CHOSEN} for role in ("target", "draft")}


SMALL = ("--max-new-tokens", "8")
COMMANDS: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "generate": (("-p", "ab", *SMALL), _generate),
    "demo": (("-p", "ab", "-n", "2", "--repeats", "1", *SMALL), lambda answer: answer["loaded"]),
    "check": (("-p", "ab", "-n", "2", "--repeats", "1", *SMALL), _check),
    "bench": (
        (*"--batch-sizes 1 --lookahead off,fixed:2 --repeats 1 --max-new-tokens 4 --wait 0".split(), "--baselines", ""),
        _bench,
    ),
    "batch": ((), lambda answer: answer["loaded"]),
    "eval": (
        ("functions", "--limit", "1", "-n", "1", "--methods", "plain", *SMALL),
        lambda answer: answer["loaded"][0] if len(answer["loaded"]) == 1 else None,
    ),
}  # fmt: skip


@pytest.mark.slow(but=["generate"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_json_says_it(
    command: str,
    saved_pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    options, read = COMMANDS[command]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab", "max_tokens": 4}\n')
    if command == "bench":
        options += ("--prompts", str(prompts))
    if command == "batch":
        options += (str(prompts), str(tmp_path / "answers.jsonl"))
    pair = ("--model", str(saved_pair[0]), "--draft", str(saved_pair[1]), "--device", "cpu")
    code = run([command, *options, *pair, "--json"])
    printed = capsys.readouterr()
    assert code in (0, None), printed.err
    assert read(json.loads(printed.out)) == {"target": CHOSEN, "draft": CHOSEN}
