"""Rollouts for TRL's trainers: the policy's own tokens and log-probabilities, in every step of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import RequestError
from shoal.integrations import trl as ours
from shoal.models.loading import bundled
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
