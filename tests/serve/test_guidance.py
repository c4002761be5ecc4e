"""Guided targets from outside: a guide is loaded, named on the command line, and asked for over HTTP.

Tests of: api, models.pairing, cli.options, serve.request_models.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal as library
from commands import Command, Models, shoal, tiny
from guides import by_hand, greedy_ids
from serving import Served, legible, pair, served
from shoal import Sampling
from shoal.cli.batch import _settings
from shoal.cli.options import ModelSource
from shoal.errors import PairMismatch, RequestError
from shoal.serve.settings import Settings
from shoal.testing import VOCABULARY, tiny_model
from shoal.testing.scripted import scripted

__all__ = ["shoal", "tiny"]
PROMPTS = ["hello", "a longer prompt than that"]

# ── load ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ids(result: Any) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.samples] for output in result]


def test_a_guide_is_loaded_like_a_target(tiny: Models) -> None:
    stages: list[Any] = []
    with library.load(tiny.target, guide=tiny.drafter, progress=stages.append) as model:
        assert model.guide is not None
        assert {stage.name for stage in stages if stage.model == "guide"} >= {"weights", "checking", "passes"}
        assert set(model.loaded) == {"target", "draft", "guide"}
        settings = [Sampling(temperature=0, guidance=0.5), Sampling(temperature=0)]
        result = model.generate(PROMPTS, 2, sampling=settings, max_new_tokens=20)
        assert result.stats.guide_passes == result.stats.rounds
        models = [
            library.testing.tiny.transformers.AutoModelForCausalLM.from_pretrained(place)
            for place in (tiny.target, tiny.drafter)
        ]
        for output, prompt, setting in zip(result, PROMPTS, settings, strict=True):
            stock = greedy_ids(*models, model.tokenizer(prompt).input_ids, 20, setting.guidance)
            assert [list(sample.token_ids) for sample in output.samples] == [stock] * 2
        runner = model.guide
    assert model.guide is None
    assert runner.vocab_size == VOCABULARY


def test_the_draft_model_may_be_the_guide(tiny: Models) -> None:
    options: dict[str, Any] = {"seed": 5, "max_new_tokens": 20, "guidance": 1.0, "plausibility": 0.1, "lookahead": 3}
    with library.load(tiny.target, tiny.drafter, guide="draft") as model:
        assert model.guide is model.draft_model
        own = model.generate(PROMPTS, 3, **options)
        unguided = model.generate(PROMPTS, 3, **options | {"guidance": 0.0, "plausibility": 0.0})
        with pytest.raises(RequestError, match="the draft model is the guide"):
            model.realign(own.tensors(0))
    with library.load(tiny.target, tiny.drafter, guide=tiny.drafter) as model:
        assert ids(model.generate(PROMPTS, 3, **options)) == ids(own) != ids(unguided)
    with library.load(tiny.target, tiny.drafter) as model:
        assert ids(model.generate(PROMPTS, 3, seed=5, max_new_tokens=20)) == ids(unguided)


def test_a_seed_in_16_bits_alone_and_in_a_batch(tiny: Models) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "strict": True, "guide": tiny.drafter, "max_batch": 6}
    with library.load(tiny.target, **options) as model:
        settings = [Sampling(seed=1, guidance=strength) for strength in (0.4, -0.7, 0.0)]
        together = model.generate(["abc", "d", "efgh"], 2, sampling=settings, max_new_tokens=16)
        for place, prompt in enumerate(["abc", "d", "efgh"]):
            assert (
                ids(model.generate([prompt], 2, sampling=settings[place], max_new_tokens=16))
                == ids(together)[place : place + 1]
            )


def test_guides_that_do_not_fit_are_refused_by_name(tiny: Models) -> None:
    with pytest.raises(PairMismatch, match=r"stranger cannot guide .*target: their tokenizers differ"):
        library.load(tiny.target, guide=tiny.stranger)
    with pytest.raises(PairMismatch, match=r"stranger cannot guide its target"):
        library.load(tiny.target, tiny.stranger, guide="draft")
    with pytest.raises(PairMismatch, match="vocabulary of 40 v 50 and no tokenizers to compare"):
        library.load(tiny_model("llama", vocab_size=40), guide=tiny_model("llama", vocab_size=50))
    with pytest.raises(RequestError, match="guide='draft' needs a draft model"):
        library.load(tiny.target, guide="draft")
    with pytest.raises(RequestError, match="guide must be a hub id"):
        library.load(tiny.target, guide=3)  # type: ignore[arg-type]
    with library.load(tiny.target) as model, pytest.raises(RequestError, match="guidance needs a guide"):
        model.generate("a", guidance=1.0)


# ── the command line ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_takes_a_guide(shoal: Command, tiny: Models) -> None:
    common = (
        "generate",
        "--model",
        tiny.target,
        "--prompt",
        "hello",
        "--json",
        "--seed",
        3,
        "--max-new-tokens",
        12,
        "-n",
        2,
    )
    said = shoal(*common, "--guide", tiny.drafter, "--guidance", 0.7, "--plausibility", 0.05).json
    with library.load(tiny.target, guide=tiny.drafter) as model:
        result = model.generate("hello", 2, seed=3, max_new_tokens=12, guidance=0.7, plausibility=0.05)
    assert [sample["token_ids"] for sample in said["prompts"][0]["samples"]] == ids(result)[0]
    assert said["stats"]["guide_passes"] == said["stats"]["rounds"] > 0
    drafted = shoal(*common, "--draft", tiny.drafter, "--guide", "draft", "--guidance", 0.7, "--plausibility", 0.05).json
    assert drafted["prompts"][0]["samples"][0]["token_ids"] == ids(result)[0][0]


def test_what_the_command_refuses(shoal: Command, tiny: Models) -> None:
    common = ("generate", "--model", tiny.target, "--prompt", "hello")
    for options, words in (
        (("--guidance", 1), "guidance needs a guide"),
        (("--guide", "draft"), "needs a draft model"),
        (("--guide", tiny.stranger), "cannot guide"),
        (("--guide", "./nowhere"), "does not exist"),
        (("--guide", tiny.drafter, "--plausibility", 0.5), "plausibility goes with guidance"),
    ):
        answer = shoal(*common, *options)
        assert (answer.code, words in " ".join(answer.err.split())) == (2, True), answer.err


def test_a_batch_does_not_go_on_with_another_guide(tiny: Models, tmp_path: Path) -> None:
    def settings(**options: Any) -> Any:
        return _settings(ModelSource(str(tiny.target), **options), Settings("tiny"), "coupled")

    other = shutil.copytree(tiny.target, tmp_path / "other")
    found = [settings(), settings(guide=str(tiny.drafter)), settings(guide=str(other))]
    assert all(one not in found[place + 1 :] for place, one in enumerate(found))
    assert settings(draft=str(tiny.drafter), guide="draft") == found[1]
    assert settings(draft=str(tiny.drafter)) == found[0]


# ── the server ──────────────────────────────────────────────────────────────────────────────────────────────────────

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    model = pair()
    model.guide = scripted(legible(7), VOCABULARY, 2048)
    with served(model, chat_template=TEMPLATE) as running:
        yield running


def test_completions_and_chats_take_guidance(server: Served) -> None:
    options = {"guidance": 1.5, "plausibility": 0.1, "seed": 2, "n": 2}
    own = server.shoal.generate("hello", max_new_tokens=9, lookahead=4, **options)  # type: ignore[arg-type]
    before = server.metric("shoal_guide_passes_total")
    said = server.post(max_tokens=9, **options).json()
    assert [choice["text"] for choice in said["choices"]] == [sample.text for sample in own[0].samples]
    assert server.metric("shoal_guide_passes_total") > before
    plain = server.post(max_tokens=9, seed=2, n=2).json()
    assert [choice["text"] for choice in plain["choices"]] != [sample.text for sample in own[0].samples]
    chat = {"prompt": None, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **options}
    answers = server.post("/v1/chat/completions", **chat).json()["choices"]
    own = server.shoal.generate("<user>hi<assistant>", max_new_tokens=9, lookahead=4, **options)  # type: ignore[arg-type]
    assert [answer["message"]["content"] for answer in answers] == [sample.text for sample in own[0].samples]


def test_what_the_server_refuses(server: Served) -> None:
    for body, words in (
        ({"guidance": "much"}, "guidance"),
        ({"guidance": 1.0, "plausibility": 2}, "plausibility"),
        ({"plausibility": 0.5}, "plausibility goes with guidance"),
    ):
        answer = server.post(**body)  # type: ignore[arg-type]
        assert (answer.status_code, words in answer.text) == (400, True), answer.text
    with served(pair()) as plain:
        answer = plain.post(guidance=1.0)
        assert (answer.status_code, "guidance needs a guide" in answer.text) == (400, True), answer.text
        assert plain.post(guidance=0.0).status_code == 200


def test_log_probabilities_over_http_are_those_of_the_guided_target(server: Served) -> None:
    said = server.post(max_tokens=1, guidance=2.0, temperature=0, logprobs=1).json()["choices"][0]["logprobs"]
    tokens = tuple(server.shoal.tokenizer("hello").input_ids)
    p, g = (legible(seed)(tokens).double().softmax(-1) for seed in (0, 7))
    assert said["token_logprobs"][0] == pytest.approx(float(by_hand(p, g, 2.0).max().log()), abs=1e-5)
