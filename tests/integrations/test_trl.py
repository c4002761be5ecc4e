"""Rollouts for TRL's trainers: the policy's own tokens and log-probabilities, in every step of a training run.

Tests of: integrations.trl.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import shoal
from readme import ROOT, run_blocks
from shoal.config import Grammar, Limits, Sampling
from shoal.errors import RequestError
from shoal.integrations import trl as ours
from shoal.models.sources import bundled
from shoal.testing import tiny_model

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of Transformers, about arguments that TRL gives it
PROMPTS = ["def add(a, b):\n    return", "def largest(values):\n"]
STEPS = 2


@pytest.fixture(autouse=True)
def _known_to_be_experimental(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL warns of `rollout_func`, and warnings of ours are errors here."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(bundled("target"))


class Checked:
    """A rollout function whose log-probabilities are compared with a forward pass of the policy, as it is in that step."""

    def __init__(self, pair: shoal.Shoal, **options: Any) -> None:
        self.pair, self.inner = pair, ours.rollout_func(pair, **options)
        self.differences: list[float] = []
        self.ids: list[list[list[int]]] = []

    @torch.no_grad()
    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        found = self.inner(prompts, trainer)
        assert [len(found[key]) for key in ("prompt_ids", "completion_ids", "logprobs")] == [len(prompts)] * 3
        self.ids.append(found["completion_ids"])
        for prompt, sample, logprobs in zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True):
            logits = (
                trainer.model(torch.tensor([[*prompt, *sample]])).logits[0, len(prompt) - 1 : -1] / trainer.args.temperature
            )
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample)[:, None])[:, 0]
            self.differences.append((expected - torch.tensor(logprobs)).abs().max().item())
        return found


def trained(policy: Any, rollouts: Any, tokenizer: Any, place: Path, **options: Any) -> Any:
    config = trl.GRPOConfig(
        output_dir=str(place), max_steps=STEPS, per_device_train_batch_size=4, num_generations=2, max_completion_length=8,
        learning_rate=1e-2, lr_scheduler_type="constant", beta=0.0, temperature=0.9, report_to=[], save_strategy="no", use_cpu=True,
        bf16=False, disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=policy, reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions], args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]), processing_class=tokenizer,
        rollout_func=rollouts, **options,
    )  # fmt: skip
    trainer.train()
    return trainer


def policy() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(bundled("target"), dtype=torch.float32)


@pytest.mark.slow
def test_the_policy_itself_makes_the_rollouts_of_every_step(tokenizer: Any, tmp_path: Path) -> None:
    """Drafts change no token, and what is reported is what the policy computes after each change of its weights."""
    runs = []
    for lookahead in (3, "off"):
        model = policy()
        before = model.lm_head.weight.detach().clone()
        checked = Checked(shoal.load(model, bundled("drafter"), tokenizer=tokenizer), lookahead=lookahead)
        trained(model, checked, tokenizer, tmp_path)
        assert len(checked.ids) == STEPS
        assert max(checked.differences) < 2e-4
        assert not torch.equal(before, model.lm_head.weight)
        runs.append(checked)
    assert runs[0].ids == runs[1].ids


@pytest.mark.slow
@pytest.mark.limit(900)
def test_the_blocks_of_the_page_on_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_blocks(ROOT / "docs" / "how-to" / "train.md")
    mask = names["rollouts"].completion_mask
    assert (names["ratio"][mask] - 1).abs().max().item() < 2e-4
    assert names["trainer"].state.global_step == STEPS


@pytest.mark.slow(but=["True"])
@pytest.mark.parametrize("follows", [True, False])
def test_another_model_takes_the_policys_weights_merged_with_adapters(
    follows: bool, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second case is a sabotage: the copy keeps its first weights."""
    peft = pytest.importorskip("peft")
    if not follows:
        monkeypatch.setattr(ours, "_follow", lambda target, policy: None)
    checked = Checked(shoal.load(policy(), bundled("drafter"), tokenizer=tokenizer), lookahead=3)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    trained(policy(), checked, tokenizer, tmp_path, peft_config=adapters)
    assert len(checked.ids) == STEPS
    assert (max(checked.differences) < 2e-4) is follows


def test_a_pair_of_another_target_is_refused() -> None:
    pair = shoal.load(tiny_model("llama"))
    with pytest.raises(RequestError, match="another model than the policy"):
        ours._follow(pair.target.hf, tiny_model("llama", layers=3))
    ours._follow(pair.target.hf, pair.target.hf)


def test_prompts_may_be_conversations(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = tokenizer.__class__.from_pretrained(bundled("target"))
    chat.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<reply>{% endif %}"
    )
    assert chat.decode(ours._ids(messages, chat)) == "<user>hello<reply>"
    assert ours._ids("a b", chat) == chat("a b")["input_ids"]


def asked(step: int, training: bool = True, process: int = 0, seed: int = 7, **options: Any) -> Any:
    """What a rollout function reads of a trainer."""
    arguments = {
        "seed": seed, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
        "max_completion_length": 8, "generation_kwargs": None,
    } | options  # fmt: skip
    return SimpleNamespace(
        args=SimpleNamespace(**arguments), state=SimpleNamespace(global_step=step), model=SimpleNamespace(training=training),
        accelerator=SimpleNamespace(process_index=process, num_processes=2, unwrap_model=lambda model: model),
        eos_token_ids=[0],
    )  # fmt: skip


PROCESSED = [
    {}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5, "repetition_penalty": 1.2},
    {"temperature": 0.7}, {"temperature": 0.7, "min_p": 0.05, "generation_kwargs": {"bad_words": ["return"]}},
    {"temperature": 0.8, "top_k": -1, "generation_kwargs": {"stop": ["\n"], "frequency_penalty": 1.0}},
    {"temperature": 0.7, "generation_kwargs": {"sampling": Sampling(temperature=0.7, top_k=3)}},
    {"temperature": 0.7, "generation_kwargs": {"sampling": Sampling(0.7), "limits": Limits(max_new_tokens=12)}},
    {"temperature": 0.7, "generation_kwargs": {"logit_bias": {5: 3.0}, "no_repeat_ngram": 2}},
    {"temperature": 0.7, "generation_kwargs": {"grammar": Grammar("regex", "[a-z ]+"), "top_k": 9}},
    {"temperature": 0.7, "generation_kwargs": {"temperature": 1.0, "rule": "typical"}},
    {"generation_kwargs": {"temperature": 0.5, "typical_p": 0.5, "min_new_tokens": 5}}, {"temperature": 0.001},
]  # fmt: skip


@pytest.mark.slow(but=["{}", "{'temperature': 0.7, 'top_p': 0.8}"])
@pytest.mark.parametrize("options", PROCESSED, ids=str)
@torch.no_grad()
def test_the_ratio_of_the_loss_is_one_whatever_is_truncated(options: dict[str, Any], tokenizer: Any) -> None:
    """The policy has not changed, so its ratio is 1; by the log-probabilities after truncation it was 0.9 and less."""
    pair = shoal.load(policy(), bundled("drafter"), tokenizer=tokenizer)
    trainer = asked(0, max_completion_length=12, **options)
    trainer.model, trainer.processing_class = pair.target.hf, tokenizer
    found = ours.rollout_func(pair, lookahead=3)([prompt for prompt in PROMPTS for _ in range(4)], trainer)
    ratios = []
    for prompt, sample, logprobs in zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True):
        logits = (
            pair.target.hf(torch.tensor([[*prompt, *sample]])).logits[0, len(prompt) - 1 : -1] / trainer.args.temperature
        )
        loss = logits.log_softmax(-1).gather(-1, torch.tensor(sample)[:, None])[:, 0]
        ratios.append((loss - torch.tensor(logprobs)).exp())
    assert torch.cat(ratios).mean().item() == pytest.approx(1, abs=1e-4)
    assert (torch.cat(ratios) - 1).abs().max().item() < 1e-3


def test_a_draft_model_is_realigned_in_training_alone(tokenizer: Any) -> None:
    pair = shoal.load(policy(), bundled("drafter"), tokenizer=tokenizer)
    trainer = asked(0)
    trainer.model, trainer.processing_class = pair.target.hf, tokenizer
    rollouts = ours.rollout_func(pair, realign=1, lookahead=2)
    assert pair.draft_model is not None
    moved = []
    for training in (False, True):
        trainer.model.train(training)
        before = [one.detach().clone() for one in pair.draft_model.hf.parameters()]
        rollouts(PROMPTS, trainer)
        moved.append(not all(map(torch.equal, before, (one.detach() for one in pair.draft_model.hf.parameters()))))
    assert moved == [False, True]


@pytest.mark.slow(but=["True"])
@pytest.mark.parametrize("kept", [True, False])
def test_rollouts_of_later_epochs_draft_by_those_before(
    kept: bool, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are those of plain decoding while the policy moves. The second case is a control: a file for each epoch."""
    counts, generate = [], shoal.Shoal.generate

    def noted(pair: shoal.Shoal, *given: Any, **options: Any) -> Any:
        result = generate(pair, *given, **options)
        counts.append(result.stats)
        return result

    monkeypatch.setattr(shoal.Shoal, "generate", noted)
    model, trainer, found = policy(), asked(0), []
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    trainer.model, trainer.processing_class = model, tokenizer
    for epoch in range(2):
        drafts = f"suffix:answers={tmp_path / ('answers' if kept else str(epoch))}"
        for draft, lookahead in ((drafts, 4), (None, "off")):
            pair = shoal.load(model, draft, tokenizer=tokenizer)
            found.append(ours.rollout_func(pair, lookahead=lookahead, seed=3)(prompts, trainer)["completion_ids"])
        assert found[-1] == found[-2]
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + 1e-4 * (epoch + 1))
    first, _, second, plain = counts
    assert plain.rounds > 0
    assert (second.accepted > 2 * first.accepted) is kept
    assert (second.rounds < 0.7 * plain.rounds) is kept


def _by_sum(self: Any, trainer: Any) -> int:
    """Sabotage: neighbouring seeds of a trainer share the seeds of calls, and so do the batches of a step."""
    place = trainer.state.global_step * trainer.accelerator.num_processes + trainer.accelerator.process_index
    return int(trainer.args.seed + place)


@pytest.mark.parametrize("by_sum", [False, True])
def test_no_two_calls_share_a_seed(by_sum: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches in each step, an evaluation at one, two processes, two seeds of the trainer. The second case is a sabotage."""
    if by_sum:
        monkeypatch.setattr(ours._Seeds, "next", _by_sum)
    drawn = []
    for seed in (7, 8):
        for process in (0, 1):
            seeds = ours._Seeds()
            for step in (0, 0, 1, 1, 2):
                drawn.append(seeds.next(asked(step, process=process, seed=seed)))
            drawn.append(seeds.next(asked(2, training=False, process=process, seed=seed)))
    assert (len(set(drawn)) == len(drawn) == 24) is not by_sum


def test_a_run_that_goes_on_has_the_seeds_it_would_have_had() -> None:
    """Neither an evaluation in between nor a beginning in the middle changes those of training."""
    whole, evaluated, resumed = ours._Seeds(), ours._Seeds(), ours._Seeds()
    evaluated.next(asked(0, training=False))
    expected = [whole.next(asked(step)) for step in (0, 1, 1)]
    assert [evaluated.next(asked(step)) for step in (0, 1, 1)] == expected
    assert [resumed.next(asked(step)) for step in (1, 1)] == expected[1:]


class Replayed:
    """A rollout function that gives out again what another one gave, and knows no pair."""

    def __init__(self, found: list[dict[str, list[Any]]]) -> None:
        self.found = list(found)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        return self.found.pop(0)


def _without_last(found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Sabotage: as if the token that ends a sample were dropped."""
    return found | {name: [values[:-1] or values for values in found[name]] for name in ("completion_ids", "logprobs")}


def test_the_trainer_learns_from_a_pairs_rollouts_what_it_learns_without_a_pair(tokenizer: Any, tmp_path: Path) -> None:
    """A policy that a pair computes with gets the gradients, to the last bit, that it gets by itself from the same samples."""
    first = policy()
    inner = ours.rollout_func(shoal.load(first, bundled("drafter"), tokenizer=tokenizer), lookahead=3)
    kept: list[dict[str, list[Any]]] = []
    trained(first, lambda *given: kept.append(inner(*given)) or kept[-1], tokenizer, tmp_path)
    assert len(kept) == STEPS
    for found, same in ((kept, True), ([_without_last(each) for each in kept], False)):
        alone = policy()
        trained(alone, Replayed(found), tokenizer, tmp_path)
        assert torch.equal(alone.lm_head.weight, first.lm_head.weight) is same


CALLS, SAMPLES, TOKENS = 5, 16, 6
Field = np.ndarray[Any, Any]
"""Transformed tokens, [calls, samples, tokens], NaN behind a sample's end."""


@torch.no_grad()
def transformed(hf: Any, calls: list[dict[str, list[Any]]]) -> Field:
    """Probability integral transform of each token: uniform and independent if, and only if, every token was drawn from the
    policy's own distribution, and by a number of its own."""
    generator = np.random.default_rng(3)
    field = np.full((len(calls), len(PROMPTS) * SAMPLES, TOKENS), np.nan)
    for call, found in enumerate(calls):
        for start in range(0, len(field[call]), SAMPLES):
            rows = slice(start, start + SAMPLES)
            prompt, samples = found["prompt_ids"][start], found["completion_ids"][rows]
            padded = torch.tensor([[*sample, *[0] * (TOKENS - len(sample))] for sample in samples])
            ids = torch.cat([torch.tensor([prompt] * SAMPLES), padded], dim=1)
            probs = hf(ids, logits_to_keep=TOKENS + 1).logits[:, :-1].double().softmax(-1)
            above, at = (of.gather(-1, padded[..., None])[..., 0].numpy() for of in (probs.cumsum(-1), probs))
            ended = np.arange(TOKENS) >= np.array([len(sample) for sample in samples])[:, None]
            field[call, rows] = np.where(ended, np.nan, above - at * generator.random(at.shape))
    return field


def correlation(one: Field, other: Field) -> float:
    """The p-value of that of two fields."""
    both = ~np.isnan(one) & ~np.isnan(other)
    assert both.sum() > 300
    return float(stats.pearsonr(one[both], other[both]).pvalue)


def p_values(field: Field) -> list[float]:
    return [
        float(stats.kstest(field[~np.isnan(field)], "uniform").pvalue),
        float(stats.kstest(field[:, :, 0].ravel(), "uniform").pvalue),
        correlation(field[:, 0::2], field[:, 1::2]),  # samples of a prompt
        correlation(field[:, :SAMPLES], field[:, SAMPLES:]),  # prompts
        correlation(field[:-1], field[1:]),  # steps
        correlation(field[:, :, :-1], field[:, :, 1:]),  # tokens
    ]


@pytest.mark.slow
def test_rollouts_are_drawn_from_the_changed_policy_each_by_numbers_of_its_own(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts, after a step of an optimiser, without looking at what log-probabilities are reported. The sabotages: samples of
    the policy before that step; a seed that all calls share."""
    model, before = policy(), policy()
    pair = shoal.load(model, bundled("drafter"), tokenizer=tokenizer)
    pair.generate(PROMPTS, SAMPLES, max_new_tokens=4, seed=1)  # what is kept of old weights is kept now
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    (-model(input_ids=torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([[5, 6, 7, 8]])).loss).backward()
    optimiser.step()
    generate, accepted = pair.generate, []

    def counted(*given: Any, **options: Any) -> Any:
        result = generate(*given, **options)
        accepted.append(result.stats.accepted)
        return result

    def rolled(**options: Any) -> list[dict[str, list[Any]]]:
        rollouts, calls = ours.rollout_func(pair, lookahead=3, **options), []
        for step in range(CALLS):
            trainer = asked(step, max_completion_length=TOKENS)
            trainer.model, trainer.processing_class = model, tokenizer
            calls.append(rollouts([prompt for prompt in PROMPTS for _ in range(SAMPLES)], trainer))
        return calls

    monkeypatch.setattr(pair, "generate", counted)
    calls = rolled()
    assert min(p_values(transformed(model, calls))) > 0.01
    assert len(accepted) == CALLS
    assert min(accepted) > 50
    assert min(p_values(transformed(before, calls))) < 1e-6
    assert min(p_values(transformed(model, rolled(seed=7)))) < 1e-6


def test_what_generation_kwargs_of_the_trainer_say_holds(tokenizer: Any) -> None:
    pair = shoal.load(policy(), tokenizer=tokenizer)
    trainer = asked(0, generation_kwargs={"max_new_tokens": 3, "eos": []})
    trainer.model, trainer.processing_class = pair.target.hf, tokenizer
    assert [len(ids) for ids in ours.rollout_func(pair)(PROMPTS, trainer)["completion_ids"]] == [3, 3]
    trainer.args.generation_kwargs = {"epsilon_cutoff": 0.1}
    with pytest.raises(RequestError, match="unknown option 'epsilon_cutoff'"):
        ours.rollout_func(pair)(PROMPTS, trainer)
