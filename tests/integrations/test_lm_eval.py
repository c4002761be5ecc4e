"""Log-probabilities of continuations, and lm-eval's model class: what Transformers computes, and the target's own texts.

Tests of: integrations.lm_eval, integrations.loglikelihoods.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import RequestError
from shoal.integrations import loglikelihoods as scoring
from shoal.models import loading, sources
from shoal.testing import tiny_model

CONTEXTS = [[5], [7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 8]]


def forward(model: Any, before: list[int], after: list[int]) -> tuple[float, bool]:
    """By one forward pass of Transformers."""
    if not after:
        return 0.0, True
    with torch.no_grad():
        logits = model(torch.tensor([[*before, *after]])).logits[0, len(before) - 1 : -1]
    chosen = torch.tensor(after)
    return logits.log_softmax(-1).gather(1, chosen[:, None]).sum().item(), bool((logits.argmax(-1) == chosen).all())


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", seed=3)


@pytest.fixture(scope="module")
def pairs(model: Any) -> list[tuple[list[int], list[int]]]:
    """Shared contexts out of order, a greedy continuation, an empty one and one of several pieces."""
    greedy = model(torch.tensor([CONTEXTS[1]])).logits[0, -1].argmax().item()
    found = [(before, after) for after in ([3], [4, 5, 6], list(range(1, 14))) for before in CONTEXTS]
    late = [3, *([0] * 5)]  # its first token is not the most probable one, all others are
    for i in range(1, len(late)):
        late[i] = model(torch.tensor([[*CONTEXTS[3], *late[:i]]])).logits[0, -1].argmax().item()
    return [*found, (CONTEXTS[3], late), (CONTEXTS[1], [greedy]), (CONTEXTS[2], [])]


@pytest.mark.parametrize("positions", [3, 512])
def test_log_likelihoods_are_those_of_a_forward_pass(
    model: Any, pairs: Any, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "ROWS", 3)
    monkeypatch.setattr(scoring, "POSITIONS", positions)
    counts: list[int] = []
    found = scoring.loglikelihoods(loading.wrap(model, "tiny", "auto"), pairs, counts.append)
    expected = [forward(model, before, after) for before, after in pairs]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=2e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert found[-2][1], "one pair is greedy"
    assert sum(counts) == len(pairs)


def test_a_shared_context_is_computed_once(model: Any, pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, fed = loading.wrap(model, "tiny", "auto"), 0
    plain = type(target).feed

    def feed(self: Any, slots: Any, tokens: Any, counts: Any, **options: Any) -> Any:
        nonlocal fed
        fed += sum(counts)
        return plain(self, slots, tokens, counts, **options)

    monkeypatch.setattr(type(target), "feed", feed)
    scoring.loglikelihoods(target, pairs)
    assert fed == sum(len(before) - 1 for before in CONTEXTS) + sum(len(after) for _, after in pairs)


@pytest.mark.parametrize("pair", [([], [1]), ([1], [10_000]), ([-1], [1]), ([1] * 70_000, [1])])
def test_what_cannot_be_scored_is_refused(model: Any, pair: Any) -> None:
    with pytest.raises(RequestError, match=r"token"):
        scoring.loglikelihoods(loading.wrap(model, "tiny", "auto"), [pair])


# ---------------------------------------------------------------------------------------------------------------------
# With lm-eval itself

PROMPTS = ["def add(a, b):\n    return", "def largest(values):\n"]


def asked(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.fixture(scope="module")
def ours(bundled: Any) -> Any:
    pytest.importorskip("lm_eval", reason="the extra shoal[lm-eval] is not installed")
    from shoal.integrations.lm_eval import ShoalLM

    return ShoalLM(bundled)


@pytest.fixture(scope="module")
def theirs(ours: Any) -> Any:
    """lm-eval's own class for Transformers, with the same target."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(sources.bundled("target")), device="cpu", dtype="float32", batch_size=4)


def test_scores_of_lm_eval_are_those_of_its_class_for_transformers(ours: Any, theirs: Any) -> None:
    requests = [
        asked("loglikelihood", text, more) for text in (*PROMPTS, "") for more in (" a + b\n", "    return 1\n", "x")
    ]
    found, expected = ours.loglikelihood(requests, True), theirs.loglikelihood(requests, True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_scores_of_long_texts_too(ours: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "max_length", 24)
    monkeypatch.setattr(theirs, "_max_length", 24)
    requests = [asked("loglikelihood_rolling", text) for text in (PROMPTS[0] * 6, PROMPTS[1], "x")]
    assert ours.loglikelihood_rolling(requests, True) == pytest.approx(
        theirs.loglikelihood_rolling(requests, True), abs=1e-3
    )


def test_greedy_texts_are_those_of_its_class_for_transformers(ours: Any, theirs: Any) -> None:
    options = [{"until": ["\n\n"], "max_gen_toks": 12}, {"until": "return", "max_gen_toks": 16, "do_sample": False}]
    requests = [asked("generate_until", text, given) for text in PROMPTS for given in options]
    assert ours.generate_until(requests, True) == theirs.generate_until(requests, True)


def test_each_request_is_sampled_by_its_own_parameters(ours: Any, bundled: Any) -> None:
    sampled = {"until": ["\n\n"], "do_sample": True, "temperature": 0.9, "top_p": 0.95, "max_gen_toks": 12, "seed": 7}
    other = {"until": [], "temperature": 1.3, "max_gen_toks": 5}
    requests = [asked("generate_until", PROMPTS[0], given) for given in (sampled, other, sampled)]
    found = ours.generate_until(requests, True)
    direct = bundled.generate(
        PROMPTS[0], 2, temperature=0.9, top_p=0.95, max_new_tokens=12, seed=7, stop=["\n\n"], lookahead="off"
    )
    assert [found[0], found[2]] == [sample.text for sample in direct[0].samples]
    assert found[0] != found[2], "repeats are samples of their own"
    assert 0 < len(found[1]) < len(found[0])


def test_more_new_tokens_than_the_context_are_as_many_as_fit(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks ask for 32,768 of any model: the prompt stays, as long as it leaves some tokens."""
    monkeypatch.setattr(ours, "max_length", 24)
    for text in (PROMPTS[1], PROMPTS[0] * 6):
        request = ours._request(1, text, {"until": ["x"], "max_gen_toks": 32_768})
        kept = min(len(ours.tok_encode(text)), 12)
        assert (len(request.prompt_ids), request.limits.max_new_tokens) == (kept, 24 - kept)


def test_thoughts_are_cut_off(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    [whole] = ours.generate_until([asked("generate_until", PROMPTS[1], {"until": [], "max_gen_toks": 16})], True)
    monkeypatch.setattr(ours, "texts", replace(ours.texts, think_end_token="Return"))
    stopped = asked("generate_until", PROMPTS[1], {"until": ['"""', "numbers"], "max_gen_toks": 16})
    thoughts, _, answer = whole.partition("Return")
    assert '"""' in thoughts
    assert ours.generate_until([stopped], True) == [answer.split('"""')[0].split("numbers")[0].lstrip()]


@pytest.mark.parametrize("given", [
    {"num_beams": 1}, {"num_return_sequences": 1}, {"pad_token_id": 0}, {"early_stopping": True, "length_penalty": 2.0},
    {"temperature": None, "top_k": None, "stop": None}, {"use_cache": True},
], ids=str)  # fmt: skip
def test_options_that_ask_for_nothing_are_passed_over(ours: Any, given: dict[str, Any]) -> None:
    options = {"until": ["\n\n"], "max_gen_toks": 6}
    plain, with_them = (ours._request(1, "a", one) for one in (options, options | given))
    assert (plain.sampling, plain.limits) == (with_them.sampling, with_them.limits)


def test_ends_of_answers_have_two_names(ours: Any) -> None:
    for given in ({"stop": ["numbers"]}, {"until": ['"""'], "stop": "numbers"}, {"until": "numbers", "stop": None}):
        whole, cut = (
            ours.generate_until([asked("generate_until", PROMPTS[1], {"max_gen_toks": 16, **one})], True)[0]
            for one in ({}, given)
        )
        assert cut == whole.split('"""' if "until" in given and given["stop"] else "numbers")[0].split("numbers")[0]
        assert cut != whole


def test_thinking_is_an_argument_of_the_template(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.integrations.lm_eval import TextSettings

    monkeypatch.setattr(ours.tokenizer, "chat_template", "{{ enable_thinking }} {{ other }}", raising=False)
    for own, said in (({"enable_thinking": False}, "False 1"), ({}, "True 1"), ({"enable_thinking": None}, "True 1")):
        own = {"chat_template_args": {"enable_thinking": True, "other": 1}, **own}
        monkeypatch.setattr(ours, "texts", TextSettings(**own))
        assert ours.apply_chat_template([{"role": "user", "content": "a"}]) == said


@pytest.mark.parametrize(
    ("given", "message"), [({"num_beams": 4}, "num_beams"), ({"temperature": -1.0}, "temperature"), ({"stops": "x"}, "stop")]
)
def test_options_that_it_does_not_have_are_refused_by_name(ours: Any, given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ours.generate_until([asked("generate_until", "a", {"until": [], **given})], True)


def test_a_loaded_pair_takes_no_options_of_loading(ours: Any, bundled: Any) -> None:
    with pytest.raises(RequestError, match="loaded already"):
        type(ours)(bundled, dtype="float32")
    with pytest.raises(RequestError, match="no tokenizer"):
        type(ours)(shoal.load(tiny_model("llama", seed=1)))


TASK = """
task: additions
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: OUTPUT
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
"""


@pytest.mark.slow
def test_a_task_runs_by_the_command_line(ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from shoal.integrations import lm_eval as module

    data = tmp_path / "additions.jsonl"
    data.write_text(json.dumps({"text": PROMPTS[0], "answer": " a"}) + "\n")
    task = TASK.replace("FILE", str(data)).replace("OUTPUT", "generate_until")
    task += "generation_kwargs: {until: [' return', def], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n"
    (tmp_path / "additions.yaml").write_text(task)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "load", lambda *given, **options: ours.pair)
    [expected] = ours.generate_until(
        [asked("generate_until", PROMPTS[0], {"until": [" return", "def"], "max_gen_toks": 8})], True
    )
    words = "lm_eval run --model shoal --model_args lookahead=2 --tasks additions --log_samples".split()
    monkeypatch.setattr("sys.argv", [*words, "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")])
    module.main()
    assert "additions" in capsys.readouterr().out
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    [line] = [json.loads(text) for text in samples.read_text().splitlines()]
    assert line["resps"] == [[expected]]
    [results] = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["config"]["shoal_loaded"]["draft"] is not None
