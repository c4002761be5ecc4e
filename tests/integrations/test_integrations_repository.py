"""`custom_generate` as a repository, the arguments that the callable refuses, and models in training mode.

Tests of: integrations.repository, integrations.generate_batch.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import shoal
from shoal.errors import RequestError
from shoal.integrations.generate_batch import random_settings
from shoal.testing import tiny_model, tiny_tokenizer
from shoal.types.stats import Stats

PROMPT = torch.tensor([[5, 6, 7, 8]])
REPOSITORY: dict[str, Any] = {"trust_remote_code": True}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def modules_of_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Transformers copies the repository's file before it runs it."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setitem(REPOSITORY, "custom_generate", shoal.custom_generate_dir())


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tiny_model("llama"), tiny_model("llama", seed=1, layers=1)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


# ── the repository form ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_streamer_hears_what_generate_tells_it(pair: tuple[Any, Any], ran: list[Stats]) -> None:
    target, _ = pair
    theirs, ours = Recorder(), Recorder()
    plain = target.generate(PROMPT, streamer=theirs, **GREEDY)
    ids = target.generate(PROMPT, streamer=ours, assistant_model=target, lookahead=3, **GREEDY, **REPOSITORY)
    assert torch.equal(plain, ids)
    assert ours.seen == theirs.seen
    assert ours.seen[-1] == "end"
    assert ran[0].accepted > 0  # several tokens in a round


def test_a_streamer_hears_tokens_while_they_are_made(pair: tuple[Any, Any], ran: list[Stats]) -> None:
    rounds: list[int] = []

    class Watching(Recorder):
        def put(self, value: torch.Tensor) -> None:
            rounds.append(ran[0].rounds)

    pair[0].generate(PROMPT, streamer=Watching(), **GREEDY, **REPOSITORY)
    assert rounds == [0, *range(1, 13)]  # the prompt first, then a token after each round


def test_an_iterating_streamer_without_a_timeout_ends(pair: tuple[Any, Any]) -> None:
    tokenizer = tiny_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    asked = {"streamer": streamer, "max_new_tokens": 8, "do_sample": False, **REPOSITORY}
    worker = threading.Thread(target=pair[0].generate, args=(PROMPT,), kwargs=asked, daemon=True)
    worker.start()
    text = "".join(streamer)
    worker.join()
    ids = pair[0].generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert text == tokenizer.decode(ids[0, 4:])


def test_a_streamer_of_several_rows_is_refused_and_ended(pair: tuple[Any, Any], ran: list[Stats]) -> None:
    streamer = Recorder()
    with pytest.raises(RequestError, match=r"a streamer follows one row, and here are 3"):
        pair[0].generate(PROMPT, streamer=streamer, do_sample=True, num_return_sequences=3, max_new_tokens=4, **REPOSITORY)
    assert streamer.seen == ["end"]
    assert not ran


def test_the_assistant_drafts_for_several_rows(pair: tuple[Any, Any], ran: list[Stats]) -> None:
    target, drafter = pair
    asked: dict[str, Any] = dict(
        do_sample=True, top_k=0, num_return_sequences=4, max_new_tokens=8, lookahead=3, **REPOSITORY
    )
    torch.manual_seed(1)
    ids = target.generate(PROMPT, assistant_model=drafter, **asked)
    assert ids.shape == (4, 12)
    assert ran[0].drafted > 0
    torch.manual_seed(1)
    assert torch.equal(ids, target.generate(PROMPT, draft_model=drafter, **asked))  # the same under its other name
    with pytest.raises(RequestError, match="give one of them"):
        target.generate(PROMPT, draft_model=drafter, assistant_model=drafter, **asked)


@pytest.mark.parametrize("where", ["argument", "config", "model"])
def test_stop_strings_with_the_tokenizer(pair: tuple[Any, Any], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GenerationConfig

    target, drafter = pair
    tokenizer = tiny_tokenizer()
    greedy = {**GREEDY, "suppress_tokens": list(range(94, 260))}  # the printable characters of ASCII are left
    free = target.generate(PROMPT, **greedy)
    stop = tokenizer.decode(free[0, 9:10])
    asked: dict[str, Any] = {"tokenizer": tokenizer, **greedy}
    if where == "argument":
        asked["stop_strings"] = [stop]
    elif where == "config":
        asked = {"tokenizer": tokenizer, "generation_config": GenerationConfig(**greedy, stop_strings=[stop])}
    else:
        monkeypatch.setattr(target.generation_config, "stop_strings", [stop])
    plain = target.generate(PROMPT, **asked)
    assert plain.shape[1] < free.shape[1]
    ours = target.generate(PROMPT, assistant_model=drafter, lookahead=3, **asked, **REPOSITORY)
    assert torch.equal(plain, ours)
    with pytest.raises(RequestError, match="give tokenizer="):
        target.generate(PROMPT, **{**asked, "tokenizer": None}, **REPOSITORY)


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"assistant_tokenizer": tiny_tokenizer()}, "give tokenizer= beside it"), ({"synced_gpus": True}, "synced_gpus")],
)
def test_what_the_repository_form_refuses(pair: tuple[Any, Any], asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pair[0].generate(PROMPT, max_new_tokens=2, assistant_model=pair[1], **asked, **REPOSITORY)


def test_a_model_whose_repository_holds_the_file(tmp_path: Path, ran: list[Stats]) -> None:
    """`from_pretrained(trust_remote_code=True)` then replaces the model's `generate`."""
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    place = tmp_path / "model" / "custom_generate"
    place.mkdir()
    (place / "generate.py").write_bytes((Path(shoal.custom_generate_dir()) / "custom_generate" / "generate.py").read_bytes())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True).eval()
    assert torch.equal(loaded.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))
    assert len(ran) == 1


# ── the callable ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "in a function"])
def test_the_callable_refuses_what_generate_keeps_from_it(pair: tuple[Any, Any], wrapped: bool, ran: list[Stats]) -> None:
    target, drafter = pair

    def around(*args: Any, **kwargs: Any) -> Any:
        return shoal.custom_generate(*args, **kwargs)

    method: Any = around if wrapped else shoal.custom_generate
    streamer = Recorder()
    with pytest.raises(RequestError, match=r"generate keeps streamer from a callable.*custom_generate_dir"):
        target.generate(PROMPT, max_new_tokens=2, streamer=streamer, custom_generate=method)
    assert streamer.seen == [PROMPT.tolist(), "end"]
    with pytest.raises(RequestError, match=r"generate keeps assistant_model from a callable.*draft_model"):
        target.generate(PROMPT, max_new_tokens=2, assistant_model=drafter, custom_generate=method)
    with pytest.raises(RequestError, match="generate keeps synced_gpus"):
        target.generate(PROMPT, max_new_tokens=2, synced_gpus=True, custom_generate=method)
    with pytest.raises(ValueError, match="stop strings"):  # Transformers' own refusal
        target.generate(PROMPT, max_new_tokens=2, stop_strings="a", tokenizer=tiny_tokenizer(), custom_generate=method)
    assert not ran


def test_only_the_generate_that_calls_is_asked(pair: tuple[Any, Any]) -> None:
    """A streamer of an outer `generate` is no matter of the inner one."""
    target, _ = pair
    inner: list[torch.Tensor] = []

    def outer(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        inner.append(target.generate(PROMPT, custom_generate=shoal.custom_generate, synced_gpus=False, **GREEDY))
        return input_ids

    target.generate(PROMPT, streamer=Recorder(), custom_generate=outer, max_new_tokens=2)
    assert torch.equal(inner[0], target.generate(PROMPT, **GREEDY))


# ── training mode ───────────────────────────────────────────────────────────────────────────────────────────────────


def modes(model: Any) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.fixture
def training() -> Any:
    """A model without dropout in training mode, but for one module that its owner keeps in evaluation mode."""
    model = tiny_model("llama").train()
    model.model.layers[1].mlp.eval()
    return model


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "gradient checkpointing"])
@pytest.mark.parametrize("form", ["callable", "repository"])
def test_training_mode_without_dropout(training: Any, checkpointing: bool, form: str, ran: list[Stats]) -> None:
    """Gradient checkpointing keeps the cache from layers in training mode."""
    expected = tiny_model("llama").generate(PROMPT, **GREEDY)
    drafter = tiny_model("llama", seed=1, layers=1).train()
    if checkpointing:
        for model in (training, drafter):  # renamed in Transformers 5.x
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    before = modes(training), modes(drafter)
    method = {"custom_generate": shoal.custom_generate} if form == "callable" else REPOSITORY
    assert torch.equal(training.generate(PROMPT, draft_model=drafter, lookahead=3, **GREEDY, **method), expected)
    assert ran[0].drafted > 0
    assert (modes(training), modes(drafter)) == before
    with pytest.raises(RequestError, match="lookahead must be"):
        training.generate(PROMPT, draft_model=drafter, lookahead="soon", **GREEDY, **method)
    assert (modes(training), modes(drafter)) == before


RANDOM: list[tuple[str, dict[str, float]]] = [
    ("llama", {"attention_dropout": 0.1}),
    ("gpt2", {"resid_pdrop": 0.1}),
    ("gpt2", {"attn_pdrop": 1e-9}),
    ("opt", {"layerdrop": 0.1}),
    ("mixtral", {"router_jitter_noise": 0.01}),
]
NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0},
}


@pytest.mark.parametrize(
    ("architecture", "override"), RANDOM, ids=lambda value: value if isinstance(value, str) else next(iter(value))
)
def test_training_mode_with_dropout_is_refused(architecture: str, override: dict[str, float]) -> None:
    quiet = NO_DROPOUT.get(architecture, {})
    assert random_settings(tiny_model(architecture, **quiet)) == []
    model = tiny_model(architecture, **{**quiet, **override}).train()
    before = modes(model)
    with pytest.raises(RequestError, match=r"training mode.*set every dropout to 0"):
        model.generate(PROMPT, max_new_tokens=2, custom_generate=shoal.custom_generate)
    assert modes(model) == before
    drafting = tiny_model(architecture, **quiet)
    with pytest.raises(RequestError, match="training mode"):
        drafting.generate(PROMPT, max_new_tokens=2, custom_generate=shoal.custom_generate, draft_model=model)
    model.eval().generate(PROMPT, max_new_tokens=2, custom_generate=shoal.custom_generate)


def test_a_dropout_module_of_ones_own_is_seen() -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(model.model.layers[0].mlp.act_fn, torch.nn.Dropout(0.25))
    model.model.layers[0].mlp.train()  # the model itself is not
    assert not model.training
    with pytest.raises(RequestError, match=r"act_fn\.1\.p=0\.25"):
        model.generate(PROMPT, max_new_tokens=2, custom_generate=shoal.custom_generate)
