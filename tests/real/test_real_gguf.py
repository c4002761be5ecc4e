"""SmolLM2's GGUF files: quantised ones by the kernels in C, BF16 by llama.cpp (`compile="off"`); ids, tokenizer, chats, drafts.

Tests of: models.gguf, models.gguf.gguf_runner. Four formats; the other three are made of the file's own by llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from gguf_files import require_llama, smollm2_gguf
from shoal.api import Shoal
from shoal.drafting.draft import read_draft
from shoal.types.samples import Result

pytestmark = [pytest.mark.real, pytest.mark.limit(600)]

PROMPTS = ("Repeat: one two three, one two three. One two three,", "The capital of France is", "def add(a, b):\n    return")
TIES, MOST_TIES = 0.2, 3
"""Logits this near may change places by the shape of a pass, in few of 72 tokens: products in bfloat16."""
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0, "eos": ()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each format is written once: a folder that is not there yet, as a benchmark's cache."""
    return tmp_path_factory.mktemp("formats") / "new"


@pytest.fixture(scope="module")
def load(folder: Path) -> Iterator[Callable[[str], Shoal]]:
    require_llama()
    opened: list[Shoal] = []

    @cache
    def one(kind: str) -> Shoal:
        opened.append(shoal.load(smollm2_gguf(folder, kind), compile="off" if kind == "BF16" else "auto"))
        return opened[-1]

    yield one
    for model in opened:
        model.close()


def test_a_format_is_written_whole_into_a_new_folder(folder: Path) -> None:
    require_llama()
    file = smollm2_gguf(folder, "Q8_0")
    assert file.exists()
    assert not list(folder.glob(f"{file.stem}.[0-9]*"))
    written = file.stat().st_mtime_ns
    assert smollm2_gguf(folder, "Q8_0").stat().st_mtime_ns == written  # once


def below(model: Shoal, prompt: str, ids: Sequence[int]) -> list[float]:
    """How far each id's logit is below the highest, in plain decoding of the row alone, a token a pass."""
    runner = model.target.fork()
    start = model.tokenizer(prompt)["input_ids"]
    runner.memory.reserve(1, len(start) + len(ids))
    runner.feed([0], torch.tensor([start[:-1]]), [len(start) - 1], want_logits=False)
    gaps = []
    for token, chosen in zip([start[-1], *ids], ids, strict=False):
        logits = runner.feed([0], torch.tensor([[token]]), [1])[0, 0]
        gaps.append(float(logits.max() - logits[chosen]))
    return gaps


def require_greedy(model: Shoal, result: Result, ties: int) -> None:
    """Fails unless ids are those of plain decoding, but for so many near ties."""
    gaps = [
        gap
        for prompt, output in zip(PROMPTS, result, strict=True)
        for sample in output.samples[:1]
        for gap in below(model, prompt, sample.token_ids)
    ]
    assert max(gaps) < TIES
    assert sum(gap > 0 for gap in gaps) <= ties


@pytest.mark.slow(but=["Q8_0-drafts0"])
@pytest.mark.parametrize(
    ("kind", "drafts"),
    [
        ("Q8_0", ["ngram"]),
        ("BF16", ["suffix"]),
        pytest.param("Q4_1", ["ngram", "suffix"], marks=pytest.mark.slow),
        pytest.param("Q4_0", ["suffix"], marks=pytest.mark.slow),
    ],
)
def test_greedy_ids_of_llama_cpp(load: Callable[[str], Shoal], kind: str, drafts: list[str]) -> None:
    model = load(kind)
    plain = model.generate(PROMPTS, 2, lookahead="off", **OPTIONS)
    require_greedy(model, plain, MOST_TIES if kind == "BF16" else 0)
    for draft in drafts:
        drafting = read_draft(draft)
        assert drafting is not None
        drafted = model.generate(PROMPTS, 2, drafter=drafting.drafter(model.target), lookahead=4, **OPTIONS)
        assert 0 < drafted.stats.accepted < drafted.stats.drafted
        assert drafted.stats.row_rounds < plain.stats.row_rounds  # the slowest row may accept nothing
        if kind == "BF16":
            require_greedy(model, drafted, MOST_TIES)
        else:  # passes over quantised weights have the same bits in any company
            assert ids(drafted) == ids(plain)


def ids(result: Result) -> list[tuple[int, ...]]:
    return [sample.token_ids for output in result for sample in output.samples]


@pytest.mark.slow
def test_greedy_ids_of_the_unpacked_model(load: Callable[[str], Shoal]) -> None:
    """One forward of Transformers' model of the file over prompt and answer: each id has the highest logit. Other formats:
    tests/models/test_gguf_own.py."""
    import transformers

    model = load("Q4_1")
    drafting = read_draft("suffix")
    assert drafting is not None
    found = model.generate(PROMPTS, 2, drafter=drafting.drafter(model.target), lookahead=4, **OPTIONS)
    assert 0 < found.stats.accepted < found.stats.drafted
    assert set(found.stats.executors["target"]) == {"C decoder"}
    file = model.target.hf.config.name_or_path
    place = {"pretrained_model_name_or_path": str(Path(file).parent), "gguf_file": Path(file).name}
    hf = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    for prompt, output in zip(PROMPTS, found, strict=True):
        (answer,) = {sample.token_ids for sample in output.samples}
        block = torch.tensor([[*model.tokenizer(prompt)["input_ids"], *answer]])
        with torch.inference_mode():
            logits = hf(block, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
        assert logits.argmax(-1).tolist() == list(answer)


@pytest.mark.slow(but=["ngram-0"])
@pytest.mark.parametrize(("draft", "difference"), [("ngram", 0), ("recycling", 1e-4)])
def test_a_seed_means_the_same_tokens_alone_and_in_company(
    load: Callable[[str], Shoal], draft: str, difference: float
) -> None:
    """Logits have the same bits behind chains and trees; log-probabilities of trees are summed by another kernel."""
    model = load("Q8_0")
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 3, "eos": ()}
    alone = model.generate(PROMPTS[0], 2, **options)[0].samples
    drafting = read_draft(draft)
    assert drafting is not None
    beside = model.generate(PROMPTS, [2, 3, 1], drafter=drafting.drafter(model.target), lookahead=3, **options)
    assert 0 < beside.stats.accepted < beside.stats.drafted
    for one, other in zip(alone, beside[0].samples, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=difference)


def test_the_tokenizer_of_the_file_is_that_of_the_checkpoint(load: Callable[[str], Shoal], directory: Path) -> None:
    import transformers

    from shoal.models.gguf.tokenizer import HARD_TEXTS

    ours, right = load("Q4_1").tokenizer, transformers.AutoTokenizer.from_pretrained(directory)
    for text in HARD_TEXTS:
        assert ours(text)["input_ids"] == right(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == right.decode(right(text)["input_ids"])
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat, tokenize=False) == right.apply_chat_template(chat, tokenize=False)


def test_a_chat_ends_by_its_turn(load: Callable[[str], Shoal]) -> None:
    model = load("Q8_0")
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    sample = model.generate(prompt, 1, temperature=0, max_new_tokens=40)[0].samples[0]
    assert "Paris" in sample.text
    assert sample.finish_reason == "eos"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "compile"), [("Q8_0", "auto"), pytest.param("BF16", "off", marks=pytest.mark.slow)])
def test_a_copy_in_4_bits_drafts_for_the_file(kind: str, compile: str, folder: Path) -> None:
    """Of llama.cpp's copy, in Q4_0, fewer drafts are kept than of shoal's: its groups have minima, as the weights' source had."""
    require_llama()
    with shoal.load(smollm2_gguf(folder, kind), "self:int4", compile=compile) as model:
        plain = model.generate(PROMPTS, 2, lookahead="off", **OPTIONS)
        drafted = model.generate(PROMPTS, 2, lookahead=3, **OPTIONS)
        assert drafted.stats.drafted * (0.6 if compile == "auto" else 0.4) < drafted.stats.accepted < drafted.stats.drafted
        assert set(drafted.stats.executors["draft"]) == {"C decoder" if compile == "auto" else "llama.cpp"}
        assert drafted.stats.rounds < plain.stats.rounds
        if compile == "auto":
            assert ids(drafted) == ids(plain)
        else:
            require_greedy(model, drafted, MOST_TIES)


@pytest.mark.slow
def test_a_smaller_format_drafts_for_the_model(load: Callable[[str], Shoal], folder: Path) -> None:
    target, draft = smollm2_gguf(folder, "BF16"), smollm2_gguf(folder, "Q4_1")
    with shoal.load(target, draft) as pair:
        drafted = pair.generate(PROMPTS, 2, lookahead=3, **OPTIONS)
        assert drafted.stats.accepted > drafted.stats.drafted / 2
        require_greedy(pair, drafted, MOST_TIES)
