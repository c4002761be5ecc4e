"""Loading: what comes in through `from_pretrained`, what is refused, and how it is told.

Tests of: models.structure, models.loading, models.vocabulary, models.sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import shoal
from shoal.api import Shoal
from shoal.errors import ModelError, PairMismatch, RequestError, UnsupportedModel
from shoal.models import loading, pretrained, sources, vocabulary
from shoal.models.bridge import cache_name
from shoal.models.loading import LoadOptions
from shoal.models.runner import Runner
from shoal.testing import END, VOCABULARY, save_pair, tiny_model, tiny_tokenizer

PROMPT = [5, 77, 200, 31, 8]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return save_pair(tmp_path)


def saved(hf: Any, place: Path, **options: Any) -> Path:
    """A model with its tokenizer in a directory."""
    hf.save_pretrained(place, **options)
    tiny_tokenizer().save_pretrained(place)
    return place


def edited(file: Path, change: Callable[[Any], object]) -> None:
    """Changes a JSON file."""
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def greedy(shoal_: Shoal, prompt: list[int] = PROMPT, new: int = 16) -> tuple[int, ...]:
    return tuple(shoal_.generate([prompt], temperature=0, max_new_tokens=new, eos=())[0].samples[0].token_ids)


def stock(hf: Any, prompt: list[int] = PROMPT, new: int = 16) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    everything = torch.ones_like(ids)  # without it, ids that equal a pad id would be hidden
    out = hf.generate(ids, attention_mask=everything, max_new_tokens=new, do_sample=False, eos_token_id=None)
    return tuple(out[0, len(prompt) :].tolist())


def runner(hf: Any, name: str = "tiny") -> Runner:
    return loading.wrap(hf, name)


# ── what loads ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_saved_pair_generates(pair: tuple[Path, Path]) -> None:
    loaded = shoal.load(*pair)
    output = loaded.generate("Größe", n=2, max_new_tokens=12, seed=0, eos=())[0]
    assert output.prompt_ids == tuple(tiny_tokenizer().encode("Größe"))
    assert [len(sample.token_ids) for sample in output.samples] == [12, 12]
    assert (loaded.target.name, loaded.eos) == (str(pair[0]), (END,))
    assert not loaded.target.hf.training


def test_paths_as_text_and_plain_decoding(pair: tuple[Path, Path]) -> None:
    loaded = shoal.load(str(pair[0]))
    assert loaded.draft_model is None
    assert greedy(loaded) == greedy(shoal.load(*pair))


def test_one_file_or_many_are_the_same_model(tmp_path: Path) -> None:
    hf = tiny_model("llama")
    one = saved(hf, tmp_path / "one")
    many = saved(hf, tmp_path / "many", max_shard_size="40KB")
    assert len(list(one.glob("*.safetensors"))) == 1
    assert len(list(many.glob("*.safetensors"))) > 2
    assert greedy(shoal.load(one)) == greedy(shoal.load(many)) == stock(hf)


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_dtype(asked: str | torch.dtype, got: torch.dtype, tmp_path: Path) -> None:
    place = saved(tiny_model("llama").to(torch.bfloat16), tmp_path)
    loaded = shoal.load(place, dtype=asked, device="cpu")
    assert loaded.target.dtype == got
    assert len(greedy(loaded)) == 16


def test_auto_keeps_the_checkpoints_dtype_on_an_accelerator() -> None:
    for place in ("cuda", "cuda:1"):
        assert loading._auto_dtype(None, "x", torch.device(place), LoadOptions(), sharded=False)[0] == "auto"


def test_unknown_dtype(pair: tuple[Path, Path]) -> None:
    with pytest.raises(RequestError, match="dtype must be one of auto, float32, bfloat16, float16, float64, got 'int4'"):
        shoal.load(pair[0], dtype="int4")


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_here(pair: tuple[Path, Path], device: str) -> None:
    with pytest.raises(RequestError, match=f"device '{device}' is not available here"):
        shoal.load(pair[0], device=device)


# ── what does not ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nowhere does not exist or is not a directory"):
        shoal.load(tmp_path / "nowhere")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(RequestError, match="does not exist or is not a directory"):
        shoal.load(str(tmp_path / "model.bin"))


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no config.json in .*: it is not the directory of a Transformers model$"):
        shoal.load(tmp_path)
    (tmp_path / "b.gguf").touch()
    with pytest.raises(RequestError, match=r"model; it has a GGUF file: give .*b.gguf$"):
        shoal.load(tmp_path)


def test_a_directory_without_weights(pair: tuple[Path, Path]) -> None:
    (pair[0] / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"cannot load the ModelForCausalLM of .*target: .*no file named"):
        shoal.load(pair[0])


def test_a_truncated_file(pair: tuple[Path, Path]) -> None:
    weights = pair[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"target: the safetensors file is damaged .* download or export it again"):
        shoal.load(pair[0])


def test_a_missing_shard(tmp_path: Path) -> None:
    place = saved(tiny_model("llama"), tmp_path, max_shard_size="40KB")
    next(place.glob("*-00002-*.safetensors")).unlink()
    with pytest.raises((RequestError, ModelError), match="00002"):
        shoal.load(place)


def test_a_missing_tensor(pair: tuple[Path, Path]) -> None:
    """Transformers would go on with random numbers."""
    from safetensors.torch import load_file, save_file

    weights = load_file(pair[0] / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, pair[0] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError,
        match=r"the checkpoint lacks 1 of its model's tensors, for example model\.layers\.1\.mlp\.up_proj\.weight",
    ):
        shoal.load(pair[0])


def test_no_tokenizer(pair: tuple[Path, Path]) -> None:
    for file in pair[0].glob("tokenizer*"):
        file.unlink()
    with pytest.raises(RequestError, match=r"no tokenizer in .*target"):
        shoal.load(pair[0])


def test_a_damaged_tokenizer_is_told_in_a_whole_sentence(pair: tuple[Path, Path]) -> None:
    (pair[0] / "tokenizer.json").write_text("{")
    with pytest.raises(RequestError, match=r"cannot load the Tokenizer of .*target: .*[^:]$"):
        shoal.load(pair[0])


@pytest.mark.parametrize(
    ("change", "said"), [({"hidden_size": "wide"}, "expected int, got str"), ({"num_attention_heads": 3}, "multiple of")]
)
def test_a_config_that_contradicts_itself(pair: tuple[Path, Path], change: dict[str, Any], said: str) -> None:
    edited(pair[0] / "config.json", lambda config: config.update(change))
    with pytest.raises(RequestError, match=rf"cannot load the \w+ of .*target: .*{said}"):
        shoal.load(pair[0])


def test_no_causal_language_model(pair: tuple[Path, Path]) -> None:
    edited(pair[0] / "config.json", lambda config: config.update(model_type="vit", architectures=["ViTModel"]))
    with pytest.raises(UnsupportedModel, match="Transformers has no causal language model for it"):
        loading.load_runner(pair[0])


def test_an_unknown_architecture(pair: tuple[Path, Path]) -> None:
    edited(pair[0] / "config.json", lambda config: config.update(model_type="nobody-knows"))
    with pytest.raises(RequestError, match=r"cannot load the Config of .*nobody-knows"):
        loading.load_runner(pair[0])


def test_a_drafter_without_a_target(pair: tuple[Path, Path]) -> None:
    with pytest.raises(RequestError, match="a draft model was given without a target model"):
        shoal.load(None, pair[1])


# ── code and network from elsewhere ─────────────────────────────────────────────────────────────────────────────────


def test_code_in_a_model_directory_is_not_run_unasked(pair: tuple[Path, Path]) -> None:
    trace = pair[0] / "was-run"
    (pair[0] / "theirs.py").write_text(f"open({str(trace)!r}, 'w').close()\n", encoding="utf-8")
    theirs = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    edited(pair[0] / "config.json", lambda config: config.update(model_type="theirs", auto_map=theirs))
    with pytest.raises(RequestError, match="trust_remote_code"):
        shoal.load(pair[0])
    assert not trace.exists()


@pytest.mark.parametrize("given", [{}, {"local_files_only": True, "trust_remote_code": True, "revision": "v2"}])
def test_what_every_from_pretrained_is_told(
    pair: tuple[Path, Path], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    real = pretrained.from_pretrained

    def spy(source: str | Path, auto: Any, **options: Any) -> Any:
        told.append(options)
        return real(source, auto, **options)

    monkeypatch.setattr(pretrained, "from_pretrained", spy)
    shoal.load(pair[0], **given)
    assert len(told) == 3  # tokenizer, config, model
    expected = {"local_files_only": False, "trust_remote_code": False, "revision": None} | given
    for options in told:
        assert {name: options[name] for name in expected} == expected


def test_a_hub_id_that_is_not_cached() -> None:
    with pytest.raises(
        RequestError, match=r"nobody/nothing is no directory here and not in the Hub's cache, and the network"
    ):
        shoal.load("nobody/nothing", local_files_only=True)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As without HF_HUB_OFFLINE, on a machine that reaches nothing; what was tried."""
    tried: list[str] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in sources.PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    def refused(address: tuple[str, int], timeout: float) -> Any:
        tried.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(sources.socket, "create_connection", refused)
    return tried


def test_a_hub_id_without_a_network_is_refused_after_one_trial(online: list[str]) -> None:
    with pytest.raises(RequestError, match=r"nobody/nothing .* cannot be reached: give a directory"):
        shoal.load("nobody/nothing")
    assert len(online) == 1


def test_a_cached_hub_id_needs_no_network(online: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers is then told to read local files only, or it would ask again and again."""
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: "/cache/config.json")
    assert sources.require_source("somebody/something")
    assert len(online) == 1
    monkeypatch.setenv("HTTPS_PROXY", "http://localhost:1")
    assert not sources.require_source("somebody/something")


def test_neither_a_directory_nor_a_hub_id() -> None:
    with pytest.raises(RequestError, match="a/b/c is neither a directory nor a Hub id"):
        shoal.load("a/b/c")


# ── pairs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tokenizers_that_differ_share_what_means_the_same(pair: tuple[Path, Path]) -> None:
    def swap(content: Any) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    edited(pair[1] / "tokenizer.json", swap)
    first, second = tiny_tokenizer().encode("ab")
    found = shoal.load(*pair).vocabularies
    assert found is not None
    assert found.shared is not None
    same = dict(zip(found.shared.target, found.shared.draft, strict=True))
    assert {i: j for i, j in same.items() if i != j} == {first: second, second: first}
    assert len(same) == 260


def test_a_tokenizer_that_changes_texts_is_refused(pair: tuple[Path, Path]) -> None:
    edited(pair[1] / "tokenizer.json", lambda content: content.update(normalizer={"type": "Lowercase"}))
    with pytest.raises(PairMismatch, match="cannot be compared with another one: it changes texts"):
        shoal.load(*pair)


def test_without_tokenizers_widths_decide() -> None:
    target, near, far = (runner(tiny_model("llama", vocab_size=v)) for v in (260, 700, 900))
    assert vocabulary.compared(target, near) is None
    with pytest.raises(PairMismatch, match="vocabulary of 260 v 900 and no tokenizers to compare"):
        vocabulary.compared(target, far)


@pytest.mark.parametrize(("target_width", "draft_width"), [(260, 264), (264, 260), (260, 320), (320, 260)])
def test_a_vocabulary_padded_to_another_width(target_width: int, draft_width: int, tmp_path: Path) -> None:
    hf = tiny_model("llama", vocab_size=target_width)
    target = saved(hf, tmp_path / "target")
    draft = saved(tiny_model("llama", vocab_size=draft_width, layers=1, seed=1), tmp_path / "draft")
    loaded = shoal.load(target, draft)
    assert greedy(loaded, new=48) == stock(hf, new=48)
    sampled = loaded.generate([PROMPT], n=4, max_new_tokens=32, seed=0, lookahead=4)
    assert sampled.stats.drafted > 0
    assert all(0 <= token < target_width for sample in sampled[0].samples for token in sample.token_ids)


def test_a_padded_id_may_be_committed_and_the_drafter_lives_with_it() -> None:
    """Ids that only the target has can be drawn, or stand in a prompt; the drafter cannot look them up."""
    target, drafter = runner(tiny_model("llama", vocab_size=264)), runner(tiny_model("llama", layers=1, seed=1))
    forced = Shoal(target, drafter).generate([[5, 263, 7]], n=2, max_new_tokens=12, logit_bias={262: 1000.0}, seed=0)
    assert all(set(sample.token_ids) == {262} for sample in forced[0].samples)
    assert forced.stats.drafted > forced.stats.accepted == 0  # q of what it does not have is 0


def test_a_drafter_with_a_shorter_context_ends_no_row() -> None:
    """More in tests/drafting/test_draft_context.py."""
    hf = tiny_model("llama")
    pair = Shoal(runner(hf), runner(tiny_model("llama", seed=1, max_position_embeddings=24), "short"))
    sample = pair.generate([PROMPT], temperature=0, max_new_tokens=60)[0].samples[0]
    assert sample.finish_reason == "length"
    assert sample.token_ids == stock(hf, new=60)
    assert pair.generate([list(range(40))], temperature=0, max_new_tokens=9)[0].samples[0].token_ids == stock(
        hf, range(40), 9
    )


# ── context ─────────────────────────────────────────────────────────────────────────────────────────────────────────

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("architecture", "options", "context"),
    [
        ("llama", {}, 128),
        ("gpt2", {"n_positions": 64}, 64),
        ("mpt", {"max_seq_len": 48}, 48),
        ("llama", {"rope_parameters": YARN}, 128),  # the same for every row, however long
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 40}, 40),
        ("llama", {"rope_parameters": LONG | {"original_max_position_embeddings": 32}}, 32),
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32, "sliding_window": None}, 32),
    ],
)
def test_context(architecture: str, options: dict[str, Any], context: int) -> None:
    assert runner(tiny_model(architecture, **options)).context == context


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32, "sliding_window": None}),
        ("gpt2", {"n_positions": 32}),
        ("opt", {"max_position_embeddings": 32}),
        ("codegen", {"n_positions": 32}),
        ("gptj", {"n_positions": 32}),
        ("gpt-bigcode-mqa", {"n_positions": 32}),
    ],
)
def test_rows_run_to_the_end_of_the_context(architecture: str, options: dict[str, Any]) -> None:
    """Position tables end there, and unused columns of a block would lie beyond."""
    hf = tiny_model(architecture, **options)
    target = runner(hf)
    prompts = [PROMPT, list(range(28))]
    result = Shoal(target, target).generate(prompts, temperature=0, max_new_tokens=100, lookahead=6)
    for output, prompt in zip(result, prompts, strict=True):
        assert output.samples[0].finish_reason == "length"
        assert output.samples[0].token_ids == stock(hf, prompt, 32 - len(prompt))


# ── EOS ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_ids_that_end_a_text(pair: tuple[Path, Path]) -> None:
    edited(pair[0] / "generation_config.json", lambda content: content.update(eos_token_id=[END, 3]))
    loaded = shoal.load(pair[0])
    assert loaded.eos == (END, 3)
    sample = loaded.generate([PROMPT], logit_bias={3: 1000.0}, max_new_tokens=9)[0].samples[0]
    assert (sample.token_ids, sample.finish_reason) == ((3,), "eos")


def test_where_they_are_looked_for() -> None:
    hf, tokenizer = tiny_model("llama"), tiny_tokenizer()
    assert pretrained.eos_ids(hf, None) == ()
    assert pretrained.eos_ids(hf, tokenizer) == (END,)
    hf.config.eos_token_id = 7
    assert pretrained.eos_ids(hf, tokenizer) == (7,)
    hf.generation_config.eos_token_id = [8, None, 9]  # as some tools write it
    assert pretrained.eos_ids(hf, tokenizer) == (8, 9)
    tokenizer.chat_template = "{{ messages }}"  # whose turns end by the tokenizer's
    assert pretrained.eos_ids(hf, tokenizer) == (8, 9, END)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(9)
    assert pretrained.eos_ids(hf, tokenizer) == (8, 9)


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
        ),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
    ],
)
def test_out_of_memory_says_what_to_do(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    target = runner(tiny_model("llama"), "big")
    monkeypatch.setattr(target.hf.model, "forward", _raising(error))
    with pytest.raises(
        ModelError, match=r"big: out of memory .*; lower max_batch, n, max_new_tokens or use dtype='bfloat16'"
    ):
        Shoal(target).generate([PROMPT])


def test_other_errors_of_a_pass_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    target = runner(tiny_model("llama"))
    monkeypatch.setattr(target.hf.model, "forward", _raising(RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        Shoal(target).generate([PROMPT])


def test_out_of_memory_while_loading(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", _raising(MemoryError()))
    with pytest.raises(ModelError, match="target: out of memory while loading; try dtype='bfloat16'"):
        shoal.load(pair[0])


def test_bytes_known_before_the_first_token() -> None:
    hf = tiny_model("llama")
    target = runner(hf)
    assert target.parameter_bytes == 4 * sum(p.numel() for p in hf.parameters())
    assert target.memory.cache_bytes(3, 100) == 3 * 100 * 2 * (2 * 2 * 8) * 4  # layers, (keys and values, heads, dim), bytes
    assert target.vocab_size == VOCABULARY


def test_the_cache_by_either_name() -> None:
    """Models of somebody else's have the name of the Transformers that they were written for; wrappers have none."""
    older = SimpleNamespace(forward=lambda tokens, past_key_values=None, use_cache=False: None)
    newer = SimpleNamespace(forward=lambda tokens, cache=None, use_cache=False: None)
    wrapper = SimpleNamespace(forward=lambda *args, **options: None)
    assert [cache_name(model) for model in (older, newer)] == ["past_key_values", "cache"]
    assert cache_name(wrapper) == cache_name(tiny_model("llama"))


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail
