"""Guided targets from outside: a guide is loaded, named on the command line, and asked for over HTTP.

Tests of: api, models.pairing, cli.options, serve.request_models.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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
            library.testing.transformers.AutoModelForCausalLM.from_pretrained(place) for place in (tiny.target, tiny.drafter)
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


@pytest.mark.parametrize("lookahead", ["off", 3])
def test_negative_prompts_are_those_of_transformers(tiny: Models, lookahead: Any) -> None:
    """Greedy tokens of Transformers' classifier-free guidance, whose strength is 1 more."""
    with library.load(tiny.target, tiny.drafter, guide="target") as model:
        assert model.guide is model.target
        hf = library.testing.transformers.AutoModelForCausalLM.from_pretrained(tiny.target)
        hf.generation_config.eos_token_id = None
        found = []
        for negative in ("a negative prompt that is longer than it", "no"):
            options = {"temperature": 0, "max_new_tokens": 20, "eos": (), "guidance": 0.7, "negative_prompt": negative}
            result = model.generate(PROMPTS, 2, lookahead=lookahead, **options)  # type: ignore[arg-type]
            for prompt, output in zip(PROMPTS, result, strict=True):
                own, other = (torch.tensor([model.tokenizer(text).input_ids]) for text in (prompt, negative))
                stock = hf.generate(
                    own, attention_mask=torch.ones_like(own), guidance_scale=1.7, negative_prompt_ids=other,
                    negative_prompt_attention_mask=torch.ones_like(other), do_sample=False, max_new_tokens=20,
                )  # fmt: skip
                assert [list(sample.token_ids) for sample in output.samples] == [stock[0, own.shape[1] :].tolist()] * 2
            found.append(ids(result))
        assert found[0] != found[1]
        assert (result.stats.drafted > 0) == (lookahead == 3)


def test_an_expert_is_loaded_and_led_to() -> None:
    """Proxy tuning: greedy tokens of a loop over three Transformers models."""
    target, guide, expert = (tiny_model("llama", seed=seed, layers=1 + (seed == 0)) for seed in range(3))
    with library.load(target, guide, guide="draft", expert=expert) as model:
        assert set(model.loaded) == {"target", "draft", "guide", "expert"}
        result = model.generate([[1, 2, 3], [5] * 9], 2, temperature=0, guidance=1.0, lookahead=3, max_new_tokens=20)
        for output in result:
            stock = greedy_ids(target, guide, list(output.prompt_ids), 20, 1.0, expert=expert)
            assert [list(sample.token_ids) for sample in output.samples] == [stock] * 2
        assert result.stats.guide_passes == 2 * result.stats.rounds
        other = model.beside(4).generate([1, 2, 3], 1, temperature=0, guidance=1.0, max_new_tokens=20)
        assert ids(other)[0][0] == ids(result)[0][0]
    assert model.expert is None


def test_experts_that_do_not_fit_are_refused(tiny: Models) -> None:
    for options, words in (
        ({"expert": tiny.drafter}, "an expert needs a guide"),
        ({"guide": tiny.drafter, "expert": "draft"}, "expert='draft' needs a draft model"),
        ({"guide": "target", "tensor_parallel": True}, "guide='target' does not go with tensor_parallel"),
        ({"guide": tiny.drafter, "expert": "target", "tensor_parallel": True}, "expert='target' does not go"),
    ):
        with pytest.raises(RequestError, match=words):
            library.load(tiny.target, **options)  # type: ignore[arg-type]
    with pytest.raises(PairMismatch, match=r"stranger cannot guide"):
        library.load(tiny.target, guide=tiny.drafter, expert=tiny.stranger)
    with (
        library.load(tiny.target, tiny.drafter, guide="target", expert="draft") as model,
        pytest.raises(RequestError, match="the draft model is the guide or the expert"),
    ):
        model.realign(model.generate("a", max_new_tokens=4).tensors(0))


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


def test_the_command_takes_an_expert_and_a_negative_prompt(shoal: Command, tiny: Models) -> None:
    common = ("generate", "--model", tiny.target, "--draft", tiny.drafter, "--guide", "target", "--seed", 3, "--json")
    options = ("--prompt", "hello", "--max-new-tokens", 12, "--guidance", 0.7)
    said = shoal(*common, *options, "--negative-prompt", "bye", "--expert", "draft").json
    with library.load(tiny.target, tiny.drafter, guide="target", expert="draft") as model:
        settings: dict[str, Any] = {"seed": 3, "max_new_tokens": 12, "guidance": 0.7}
        own, plain = (model.generate("hello", negative_prompt=text, **settings) for text in ("bye", ()))
        other = model.generate("you", **settings)
        chat = [model.tokenizer(f"<user>{text}<assistant>", add_special_tokens=False).input_ids for text in ("hello", "bye")]
        written = model.generate([chat[0]], negative_prompt=chat[1], **settings)
    assert said["prompts"][0]["samples"][0]["token_ids"] == ids(own)[0][0] != ids(plain)[0][0]
    template = tiny.target.parent / "chat.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    said = shoal(*common, *options, "--negative-prompt", "bye", "--expert", "draft", "--chat-template", template).json
    assert said["prompts"][0]["samples"][0]["token_ids"] == ids(written)[0][0]
    lines = tiny.target.parent / "prompts.jsonl"
    lines.write_text('{"prompt": "hello", "negative_prompt": "bye"}\n{"prompt": "you"}\n', encoding="utf-8")
    said = shoal(*common, "--prompts", lines, *options[2:], "--expert", "draft").json
    assert [one["samples"][0]["token_ids"] for one in said["prompts"]] == [ids(own)[0][0], ids(other)[0][0]]
    said = shoal(*common, "--prompts", lines, *options[2:], "--expert", "draft", "--chat-template", template).json
    assert said["prompts"][0]["samples"][0]["token_ids"] == ids(written)[0][0]


def test_a_posterior_from_the_command_line(shoal: Command, tiny: Models) -> None:
    common = (
        "generate",
        "--model",
        tiny.target,
        "--prompt",
        "hello",
        "-n",
        2,
        "--seed",
        3,
        "--max-new-tokens",
        12,
        "--json",
    )
    led = ("--guide", tiny.drafter, "--expert", tiny.target, "--guidance", 5)
    said = shoal(*common, *led, "--posterior", 4).json
    options: dict[str, Any] = {"seed": 3, "max_new_tokens": 12, "guidance": 5}
    with library.load(tiny.target, guide=tiny.drafter, expert=tiny.target) as model:
        own, other = (model.generate("hello", 2, posterior=scale, **options) for scale in (4, 0))
    assert [sample["token_ids"] for sample in said["prompts"][0]["samples"]] == ids(own)[0]
    assert ids(own) != ids(other)


def test_two_control_codes_from_the_command_line(shoal: Command, tiny: Models) -> None:
    """GeDi: one model for both classes, after a text for each; the target itself may be it."""
    common = ("generate", "--model", tiny.target, "--draft", tiny.drafter, "--seed", 3, "--max-new-tokens", 12, "--json")
    led = ("--guidance", 5, "--posterior", 4, "--negative-prompt", "bad: hello", "--positive-prompt", "good: hello")
    options: dict[str, Any] = {"seed": 3, "max_new_tokens": 12, "guidance": 5, "posterior": 4}
    codes = {"negative_prompt": "bad: hello", "positive_prompt": "good: hello"}
    for role in ("draft", "target"):
        said = shoal(*common, "--prompt", "hello", "--guide", role, "--expert", role, *led).json
        with library.load(tiny.target, tiny.drafter, guide=role, expert=role) as model:
            own, one, swapped = (
                model.generate("hello", **options, **given)
                for given in (
                    codes,
                    {"negative_prompt": "bad: hello"},
                    {"negative_prompt": "good: hello", "positive_prompt": "bad: hello"},
                )
            )
        assert said["prompts"][0]["samples"][0]["token_ids"] == ids(own)[0][0]
        assert ids(own)[0][0] not in (ids(one)[0][0], ids(swapped)[0][0])
    lines = tiny.target.parent / "coded.jsonl"
    lines.write_text(json.dumps({"prompt": "hello", **codes}) + "\n", encoding="utf-8")
    said = shoal(*common, "--prompts", lines, "--guide", "target", "--expert", "target", *led[:4]).json
    assert said["prompts"][0]["samples"][0]["token_ids"] == ids(own)[0][0]


def test_what_the_command_refuses(shoal: Command, tiny: Models) -> None:
    common = ("generate", "--model", tiny.target, "--prompt", "hello")
    for options, words in (
        (("--guidance", 1), "guidance needs a guide"),
        (("--guide", "draft"), "needs a draft model"),
        (("--guide", tiny.stranger), "cannot guide"),
        (("--guide", "./nowhere"), "does not exist"),
        (("--guide", tiny.drafter, "--plausibility", 0.5), "plausibility goes with guidance"),
        (("--guide", tiny.drafter, "--negative-prompt", "no"), "negative_prompt goes with guidance"),
        (("--guide", tiny.drafter, "--positive-prompt", "yes", "--guidance", 1), "positive_prompt needs an expert"),
        (("--guide", tiny.drafter, "--posterior", 1), "posterior goes with guidance"),
        (("--expert", tiny.drafter), "an expert needs a guide"),
        (("--guide", tiny.drafter, "--expert", "./nowhere"), "does not exist"),
    ):
        answer = shoal(*common, *options)
        assert (answer.code, words in " ".join(answer.err.split())) == (2, True), answer.err


def test_a_batch_does_not_go_on_with_another_guide(tiny: Models, tmp_path: Path) -> None:
    def settings(**options: Any) -> Any:
        return _settings(ModelSource(str(tiny.target), **options), Settings("tiny"), "coupled")

    other = shutil.copytree(tiny.target, tmp_path / "other")
    found = [settings(), settings(guide=str(tiny.drafter)), settings(guide=str(other)), settings(guide="target")]
    found += [settings(guide=str(other), expert=str(tiny.drafter))]
    assert all(one not in found[place + 1 :] for place, one in enumerate(found))
    assert settings(draft=str(tiny.drafter), guide="draft") == found[1]
    assert settings(draft=str(tiny.drafter)) == found[0]
    assert settings(draft=str(tiny.drafter), guide=str(other), expert="draft") == found[-1]


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


def test_negative_prompts_over_http(server: Served) -> None:
    options: dict[str, Any] = {"guidance": 1.5, "seed": 2, "n": 2}

    def own(prompt: str, negative: str) -> list[str]:
        result = server.shoal.generate(prompt, max_new_tokens=9, lookahead=4, negative_prompt=negative, **options)
        return [sample.text for sample in result[0].samples]

    texts = own("hello", "bye bye")
    for negative in ("bye bye", list(server.shoal.tokenizer("bye bye").input_ids)):
        said = server.post(max_tokens=9, negative_prompt=negative, **options).json()["choices"]
        assert [choice["text"] for choice in said] == texts
    assert [choice["text"] for choice in server.post(max_tokens=9, **options).json()["choices"]] != texts
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    for negative, written in (("be rude", "<system>be rude<user>hi<assistant>"), ("", "<user>hi<assistant>")):
        chat = {"prompt": None, "messages": messages, "max_tokens": 9, "negative_prompt": negative, **options}
        answers = server.post("/v1/chat/completions", **chat).json()["choices"]
        expected = own("<system>be kind<user>hi<assistant>", written)
        assert [answer["message"]["content"] for answer in answers] == expected
        items = {"prompt": None, "instructions": "be kind", "input": "hi", "max_output_tokens": 9, "n": None}
        answer = server.post("/v1/responses", **{**options, **items, "negative_prompt": negative}).json()
        assert answer["output"][0]["content"][0]["text"] == expected[0]
    chat = {"prompt": None, "messages": messages, "guidance": 1, "negative_prompt": [1, 2]}
    answer = server.post("/v1/chat/completions", **chat)
    assert (answer.status_code, "negative_prompt of a chat must be a text" in answer.text) == (400, True)


def test_two_control_codes_over_http() -> None:
    options: dict[str, Any] = {"guidance": 4.0, "posterior": 2.0, "seed": 2, "n": 2}
    model = pair()
    model.guide = model.expert = scripted(legible(7), VOCABULARY, 2048)
    with served(model, chat_template=TEMPLATE) as server:

        def own(prompt: str, negative: str, positive: str) -> list[str]:
            prompts = {"negative_prompt": negative, "positive_prompt": positive}
            result = server.shoal.generate(prompt, max_new_tokens=9, lookahead=4, **prompts, **options)
            return [sample.text for sample in result[0].samples]

        texts = own("hello", "bad", "good")
        assert texts not in (own("hello", "good", "bad"), own("hello", "bad", "hello"))
        for positive in ("good", list(server.shoal.tokenizer("good").input_ids)):
            said = server.post(max_tokens=9, negative_prompt="bad", positive_prompt=positive, **options).json()["choices"]
            assert [choice["text"] for choice in said] == texts
        chat = {"prompt": None, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **options}
        coded = chat | {"negative_prompt": "be rude", "positive_prompt": "be kind"}
        answers = server.post("/v1/chat/completions", **coded).json()["choices"]
        expected = own("<user>hi<assistant>", *(f"<system>be {how}<user>hi<assistant>" for how in ("rude", "kind")))
        assert [answer["message"]["content"] for answer in answers] == expected
        answer = server.post("/v1/chat/completions", **chat, positive_prompt=[1, 2])
        assert (answer.status_code, "positive_prompt of a chat must be a text" in answer.text) == (400, True)


def test_a_posterior_over_http(server: Served) -> None:
    options = {"guidance": 4.0, "posterior": 3.0, "seed": 2, "n": 2}
    own = server.shoal.generate("hello", max_new_tokens=9, lookahead=4, **options)  # type: ignore[arg-type]
    said = server.post(max_tokens=9, **options).json()["choices"]
    assert [choice["text"] for choice in said] == [sample.text for sample in own[0].samples]
    other = server.post(max_tokens=9, **options | {"posterior": 0}).json()["choices"]
    assert [choice["text"] for choice in said] != [choice["text"] for choice in other]


def test_what_the_server_refuses(server: Served) -> None:
    for body, words in (
        ({"negative_prompt": "no"}, "negative_prompt goes with guidance"),
        ({"negative_prompt": [], "guidance": 1.0}, "negative_prompt"),
        ({"positive_prompt": "yes"}, "positive_prompt goes with guidance"),
        ({"positive_prompt": "yes", "guidance": 1.0}, "positive_prompt needs an expert"),
        ({"negative_prompt": [10**6], "guidance": 1.0}, "must be in 0"),
        ({"guidance": "much"}, "guidance"),
        ({"guidance": 1.0, "plausibility": 2}, "plausibility"),
        ({"plausibility": 0.5}, "plausibility goes with guidance"),
        ({"posterior": 0.5}, "posterior goes with guidance"),
        ({"guidance": 1.0, "posterior": -1}, "posterior"),
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
