"""Every entry takes the same specs of drafters: server, batches, evaluation, benchmark, and the Transformers entry.

Tests of: integrations.transformers.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import shoal
from eagle_heads import save_eagle3
from medusa_heads import save_medusa
from serving import served
from shoal.cli import run
from shoal.config import LOSSY_RULES
from shoal.engine.engine import Engine
from shoal.errors import PairMismatch, RequestError
from shoal.evaluation.sampling import BATCHED, Sampler, SamplingConfig
from shoal.evaluation.tasks import Task
from shoal.integrations import transformers
from shoal.lookahead.controller import Fixed
from shoal.testing import save_pair, tiny_model, tiny_tokenizer
from shoal.testing.drafters import RandomTrees
from shoal.testing.scripted import hashed, scripted
from shoal.types.stats import Stats
from vocabularies import TEXTS, byte_level, sentence_piece

CODE = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return"
SPECS = [
    "suffix:index={index}", "suffix:answers={answers}", "trigrams", "self:window=8", "self:exit=1", "auto+{draft}",
    "{draft}:tree=rsd-s,nodes=6",
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pair, an index made for it, a place for answers, and a model with another tokenizer."""
    root = tmp_path_factory.mktemp("entries")
    target, draft = save_pair(root / "pair")
    found = {"root": root, "target": target, "draft": draft, "index": root / "code.index", "answers": root / "answers"}
    (root / "code.txt").write_text(CODE * 4)
    made = ["index", "--tokenizer", str(target), "--output", str(found["index"]), str(root / "code.txt")]
    assert run(made) == 0
    found["other"] = root / "other"
    tiny_model("llama", vocab_size=len(sentence_piece()), layers=1, eos_token_id=2).save_pretrained(found["other"])
    sentence_piece().save_pretrained(found["other"])
    return found


def common(places: dict[str, Path], spec: str) -> list[str]:
    return ["--model", str(places["target"]), "--draft", spec, "--dtype", "float32"]


def fits(by_drafter: dict[str, Any], spec: str) -> bool:
    """Whether these drafters may have proposed what a spec asks for."""
    return bool(by_drafter) and all(
        name in {"model", spec.partition(":")[0].partition("+")[0], "suffix"} for name in by_drafter
    )


@pytest.mark.parametrize("spec", SPECS, ids=[spec.partition("=")[0] for spec in SPECS])
def test_batches_take_it(spec: str, places: dict[str, Path], tmp_path: Path) -> None:
    """As a server does; with the tokens of plain decoding; who drafted is counted."""
    spec = spec.format(**places)
    line = {"id": "one", "prompt": CODE, "max_tokens": 12, "n": 2, "seed": 1, "temperature": 0.5}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    texts = []
    for k in ("off", "3"):
        out = tmp_path / f"{k}.jsonl"
        assert run(["batch", str(tmp_path / "in.jsonl"), str(out), "-k", k, *common(places, spec)]) == 0
        body = json.loads(out.read_text())
        texts.append([choice["text"] for choice in body["choices"]])
        assert fits(body["usage"]["by_drafter"], spec) if k == "3" else not body["usage"].get("by_drafter")
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_other_commands_take_what_batches_take(places: dict[str, Path], tmp_path: Path) -> None:
    """They load a pair in the same way, and an engine is made for each: benchmark, evaluation, server."""
    work = ["--batch-sizes", "2", "--max-new-tokens", "6", "--repeats", "1", "--lookahead", "off,3", "--baselines", ""]
    found, prompt = tmp_path / "bench.json", tmp_path / "prompts.txt"
    prompt.write_text(CODE)
    spec = SPECS[0].format(**places)
    assert run(["bench", "--wait", "0", "--output", str(found), "--prompts", str(prompt), *work, *common(places, spec)]) == 0
    assert json.loads(found.read_text())["lines"]
    for spec in (SPECS[3], SPECS[5].format(**places)):
        with shoal.load(places["target"], spec, dtype="float32", max_batch=4) as pair:
            config = SamplingConfig(2, {"max_new_tokens": 12}, 3, 1, methods=(BATCHED,))
            (entry,) = Sampler(pair, config).run([Task("one", CODE, (), lambda _: CODE, lambda text, _: text)])
            assert fits(entry["attempts"][BATCHED]["stats"]["by_drafter"], spec)
            with served(pair, lookahead=3) as server:
                server.client.completions.create(model="tiny", prompt=CODE, max_tokens=12, n=2, seed=1)
                assert server.worker.thread.stats.drafted > 0


@pytest.mark.parametrize("form", ["callable", "repository"])
def test_the_transformers_entry_takes_it(
    form: str, places: dict[str, Path], ran: list[Stats], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    repository = {"custom_generate": shoal.custom_generate_dir(), "trust_remote_code": True}
    method: dict[str, Any] = {"custom_generate": shoal.custom_generate} if form == "callable" else repository
    model = AutoModelForCausalLM.from_pretrained(places["target"], dtype=torch.float32)
    ids = torch.tensor([tiny_tokenizer().encode(CODE)])
    asked: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 2, **method}
    torch.manual_seed(1)
    plain = model.generate(ids, **asked)
    for spec in SPECS if form == "callable" else SPECS[-1:]:
        torch.manual_seed(1)
        drafted = model.generate(ids, **asked, draft_model=spec.format(**places), lookahead=3)
        assert torch.equal(plain, drafted), spec
        assert fits(ran[-1].by_drafter, spec.format(**places)), spec


def test_models_by_name_are_loaded_once(places: dict[str, Path], ran: list[Stats], monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Any] = []
    ordinary = transformers.loading.load_runner
    monkeypatch.setattr(transformers.loading, "load_runner", lambda *a, **o: loads.append(a) or ordinary(*a, **o))
    model = AutoModelForCausalLM.from_pretrained(places["target"], dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    asked: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": 8,
        "custom_generate": shoal.custom_generate,
        "lookahead": 3,
    }
    for draft in (str(places["draft"]), f"ngram+{places['draft']}", f"{places['draft']}:tree=k-seq,nodes=4"):
        model.generate(ids, draft_model=draft, **asked)
    assert len(loads) == 1
    assert all(stats.drafted for stats in ran)
    for draft, said in (
        ("suffix+bundled", "the bundled draft model fits the bundled target alone"),
        ("gpt2-no-such", "is no directory here and not in the Hub's cache"),
        ("ngram:least=1", "ngram has no option 'least'"),
    ):
        with pytest.raises(RequestError, match=said):
            model.generate(ids, draft_model=draft, **asked)


@pytest.mark.parametrize("form", ["bound", "repository", "at hand"])
def test_the_transformers_entry_takes_a_drafter_with_another_tokenizer(
    form: str, places: dict[str, Path], ran: list[Stats], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Transformers' universal assisted generation, for several rows and when sampling."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    target = tiny_model("llama", vocab_size=len(byte_level()), layers=1)
    tokenizers: dict[str, Any] = {"tokenizer": byte_level(), "assistant_tokenizer": sentence_piece()}
    draft: Any = tiny_model("llama", vocab_size=len(sentence_piece()), seed=1, layers=1)
    asked: dict[str, Any] = {"custom_generate": shoal.custom_generate, "draft_model": draft}
    if form == "bound":
        asked["custom_generate"] = partial(shoal.custom_generate, **tokenizers)
    elif form == "repository":
        asked = {
            "custom_generate": shoal.custom_generate_dir(),
            "trust_remote_code": True,
            "assistant_model": draft,
            **tokenizers,
        }
    else:
        byte_level().save_pretrained(tmp_path)
        target.save_pretrained(tmp_path)
        target = AutoModelForCausalLM.from_pretrained(tmp_path)
        asked["draft_model"] = AutoModelForCausalLM.from_pretrained(places["other"])
    ids = torch.tensor([byte_level().encode(TEXTS[1])[:12]])
    sampled: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 3, "pad_token_id": 0}
    torch.manual_seed(1)
    plain = target.generate(ids, **sampled, custom_generate=shoal.custom_generate)
    torch.manual_seed(1)
    assert torch.equal(plain, target.generate(ids, **sampled, **asked, lookahead=3))
    assert ran[-1].drafted > 0
    if form == "bound":  # what is known of the methods is kept for the next call
        target.generate(ids, **sampled, **asked, lookahead=3)
        known = transformers.kept_model(asked["draft_model"], transformers._runner(target, "auto"), "auto")
        assert known is not None
        assert known.model.choice is not None
        assert known.model.choice.rounds > ran[-1].rounds
        bigger = tiny_model("llama", vocab_size=len(byte_level()) + 600, layers=1)
        with pytest.raises(PairMismatch, match="no tokenizers to compare"):
            target.generate(ids, **sampled, custom_generate=shoal.custom_generate, draft_model=bigger)


def test_typical_acceptance_of_batches_and_the_transformers_entry(
    places: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which says that it is lossy."""
    line = {"id": "one", "prompt": CODE, "max_tokens": 12, "n": 2}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    lossy = [*common(places, "trigrams"), "--rule", "typical", "-k", "3"]
    assert run(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *lossy]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["usage"]["lossy"] == LOSSY_RULES["typical"]
    model = AutoModelForCausalLM.from_pretrained(places["target"])
    asked: dict[str, Any] = {
        "custom_generate": shoal.custom_generate,
        "draft_model": "trigrams",
        "lookahead": 3,
        "max_new_tokens": 12,
    }
    ids = torch.tensor([tiny_tokenizer().encode(CODE)])
    with caplog.at_level(logging.WARNING, "shoal"):
        model.generate(ids, do_sample=True, rule="typical", **asked)
    assert LOSSY_RULES["typical"] in caplog.text
    with pytest.raises(RequestError, match="rule must be"):
        model.generate(ids, rule="greedy", **asked)


# ── what does not fit ───────────────────────────────────────────────────────────────────────────────────────────────


def unfit(places: dict[str, Path], root: Path) -> dict[str, tuple[str, str]]:
    """Specs with one fault each, and what is said of them."""
    made = [
        "index",
        "--tokenizer",
        str(places["other"]),
        "--output",
        str(root / "other.index"),
        str(places["root"] / "code.txt"),
    ]
    assert run(made) == 0
    (root / "cut.index").write_bytes(places["index"].read_bytes()[:-20])
    wide, fewer = save_medusa(root / "wide", width=16), save_medusa(root / "fewer", layers=1)
    (fewer / "config.json").write_text(json.dumps({"medusa_num_heads": 9, "medusa_num_layers": 1}))
    shapes = save_eagle3(root / "shapes", draft_vocab_size=60)
    return {
        "another target": (f"medusa:{wide}", "hidden states of 16 v 32: heads of another target"),
        "missing tensors": (
            f"medusa:{fewer}",
            "of the 27 tensors of its heads, for example 3.0.linear.bias; download or train",
        ),
        "wrong shapes": (f"eagle3:{shapes}", "lm_head.weight is [120, 32] and should be [60, 32]: heads of another target"),
        "no heads": (f"medusa:{places['draft']}", "its config.json has no medusa_num_heads"),
        "heads without a name": (f"suffix+{wide}", "hidden states of 16 v 32: heads of another target"),
        "trees of heads": (f"{shapes}:tree=rsd-s", "lm_head.weight is [120, 32] and should be [60, 32]: heads of another"),
        "another tokenizer": (
            f"suffix:index={root}/other.index",
            "is one of another tokenizer: build it with `shoal index` for",
        ),
        "cut short": (f"suffix:index={root}/cut.index", "cut short (its end is not that of an index): build it again with"),
        "a large tree": (
            f"{places['draft']}:tree=rsd-s,nodes=64",
            "a draft tree has at most 63 nodes and at least its width",
        ),
    }


def test_one_error_for_what_does_not_fit(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for what, (spec, message) in unfit(places, tmp_path).items():
        capsys.readouterr()
        assert run(["generate", "-p", CODE, "--json", *common(places, spec)]) == 2, what
        said = json.loads(capsys.readouterr().out)["error"]["message"]
        assert message in said, what
        assert said.count(message) == 1, what


def test_a_drafter_of_trees_that_are_too_large_is_refused() -> None:
    with pytest.raises(RequestError, match="RandomTrees proposes trees of 64 nodes, and a draft tree has at most 63"):
        Engine(scripted(hashed(6), 6), RandomTrees(6, max_nodes=64), Fixed(3))
