"""Models in GGUF files: passes by llama.cpp under everything that is above an executor.

Tests of: models.gguf, models.gguf.gguf_runner, models.sources. The files are tiny, with the weights of a Transformers model
beside them, which is the reference. `tests/real/test_real_gguf.py` has a pretrained one.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from enumeration import chi_square
from gguf_files import END, TOKENS, greedy, require_llama, tiny_gguf_model, write_gguf
from shoal import cli
from shoal.api import Shoal
from shoal.config import Grammar
from shoal.drafting import trained_heads
from shoal.durable import cache_folder
from shoal.errors import ModelError, RequestError, UnsupportedModel
from shoal.models import gguf
from shoal.models.gguf import _loaded, library
from shoal.models.gguf.gguf_runner import GgufRunner, KeptSequences, LlamaCpp
from shoal.models.gguf.sequences import Sequences
from shoal.models.loading import load_runner
from shoal.models.sources import directory_of, gguf_of

PROMPTS = ([5, 9, 70, 33, 12], [7], [40, 41, 42, 40, 41, 42, 40, 41])
LAW_ROWS = 256


@pytest.fixture(scope="module")
def stock() -> Any:
    return tiny_gguf_model()


@pytest.fixture(scope="module")
def file(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_llama()
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", stock)


@pytest.fixture(scope="module")
def model(file: Path) -> Iterator[Shoal]:
    with shoal.load(file, compile="off") as loaded:
        yield loaded


@pytest.fixture(scope="module", params=["near", "self:int4"])
def drafted(file: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Shoal]:
    """The same target with a draft model in a file of its own, much like it, or with its own copy in 4 bits."""
    if request.param == "self:int4":
        with shoal.load(file, "self:int4", compile="off") as loaded:
            yield loaded
        return
    near = tiny_gguf_model()
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in near.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=noise)
    with shoal.load(file, write_gguf(tmp_path_factory.mktemp("gguf") / "near.gguf", near), compile="off") as loaded:
        yield loaded


def texts(result: Any) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.samples] for output in result]


OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "eos": ()}


def test_greedy_ids_are_those_of_transformers(model: Shoal, stock: Any) -> None:
    """Three rows a prompt, prompts of unequal lengths: a fault of positions, sequences or copies changes ids."""
    result = model.generate(PROMPTS, 3, temperature=0, **OPTIONS)
    for prompt, rows in zip(PROMPTS, texts(result), strict=True):
        assert rows == [greedy(stock, prompt, 24)] * 3
    assert set(result.stats.executors["target"]) == {"llama.cpp"}
    assert result.stats.executors["target"]["llama.cpp"] == result.stats.target_passes + 1  # all prompts in one


@pytest.mark.parametrize("draft", ["ngram", "suffix", "recycling"])
def test_drafts_change_no_greedy_id(file: Path, model: Shoal, draft: str) -> None:
    """Rejected drafts leave the memory: a key of one that stays is seen by the row's next tokens."""
    with shoal.load(file, draft, compile="off") as drafting:
        result = drafting.generate(PROMPTS, 2, temperature=0, lookahead=3, **OPTIONS)
    assert texts(result) == texts(model.generate(PROMPTS, 2, temperature=0, **OPTIONS))
    assert 0 <= result.stats.accepted < result.stats.drafted
    assert set(result.stats.executors["target"]) == {"llama.cpp"}


def test_a_gguf_file_drafts(drafted: Shoal, model: Shoal) -> None:
    result = drafted.generate(PROMPTS, 2, temperature=0, lookahead=4, **OPTIONS)
    assert texts(result) == texts(model.generate(PROMPTS, 2, temperature=0, **OPTIONS))
    assert 0 < result.stats.accepted < result.stats.drafted
    assert set(result.stats.executors["draft"]) == {"llama.cpp"}


def test_seeds_mean_the_same_tokens_alone_and_in_company(drafted: Shoal) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.9}
    alone = [texts(drafted.generate([prompt], 2, seed=4, lookahead="off", **sampling, **OPTIONS)) for prompt in PROMPTS]
    beside = drafted.generate(PROMPTS, 2, seed=4, lookahead=3, rule="coupled", **sampling, **OPTIONS)
    assert 0 < beside.stats.accepted < beside.stats.drafted
    assert alone[0][0] == texts(beside)[0]


@torch.inference_mode()
def law(hf: Any, prompt: list[int], top: int) -> tuple[list[int], dict[int, list[int]], Tensor]:
    """The two most probable tokens, those after each of them, and the law [top, top] of pairs."""

    def best(ids: list[int]) -> tuple[list[int], Tensor]:
        logits, at = hf(torch.tensor([ids])).logits[0, -1].double().topk(top)
        return at.tolist(), logits.softmax(-1)

    firsts, p = best(prompt)
    nexts = {first: best([*prompt, first]) for first in firsts}
    return (
        firsts,
        {first: ids for first, (ids, _) in nexts.items()},
        torch.stack([p[i] * nexts[f][1] for i, f in enumerate(firsts)]),
    )


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_two_tokens_have_the_law_of_the_model(drafted: Shoal, stock: Any, rule: str) -> None:
    """A draft that is taken without being asked, or a residual of another row, bends the law."""
    prompt = PROMPTS[0]
    firsts, seconds, right = law(stock, prompt, 3)
    result = drafted.generate(
        [prompt], LAW_ROWS, max_new_tokens=2, eos=(), top_k=3, temperature=1.0, lookahead=1, rule=rule, seed=11
    )
    counts = torch.zeros(3, 3, dtype=torch.int64)
    for sample in result[0].samples:
        first, second = sample.token_ids
        counts[firsts.index(first), seconds[first].index(second)] += 1
    assert chi_square(counts, right) > 1e-4
    assert 0 < result.stats.accepted < result.stats.drafted


def test_log_probabilities_are_those_of_a_forward_pass(model: Shoal, stock: Any) -> None:
    sample = model.generate([PROMPTS[0]], 1, temperature=1.0, seed=2, **OPTIONS)[0].samples[0]
    ids = torch.tensor([[*PROMPTS[0], *sample.token_ids]])
    with torch.inference_mode():
        right = stock(ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    expected = right.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0].tolist()
    assert sample.logprobs == pytest.approx(expected, abs=2e-2)  # keys and values are float16


def test_memory_holds_what_its_rows_hold(model: Shoal) -> None:
    """Passes, rollbacks, copies, growth and trims against plain forwards."""
    runner = model.target.fork()
    assert isinstance(runner, GgufRunner)
    rng = torch.Generator().manual_seed(0)
    rows: dict[int, list[int]] = {}

    def feed(slots: list[int], counts: list[int]) -> None:
        block = torch.randint(0, len(TOKENS), (len(slots), max(counts)), generator=rng)
        logits = runner.feed(slots, block, counts)
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            rows[slot] = [*rows.get(slot, []), *block[row, :count].tolist()]
            plain = runner.plain_logits(torch.tensor([rows[slot]]))[0, -count:]
            torch.testing.assert_close(logits[row, :count], plain, atol=2e-2, rtol=0)

    runner.memory.reserve(2, 16)
    feed([0, 1], [5, 2])
    runner.cache.rollback(0, 3)
    rows[0] = rows[0][:3]
    feed([1, 0], [1, 4])
    runner.memory.reserve(4, 40)  # grows with what is there
    feed([0, 1], [3, 3])
    runner.cache.copy(0, 2, 6)
    rows[2] = rows[0][:6]
    feed([0, 2], [2, 2])
    runner.cache.rollback(2, 6)
    rows[2] = rows[2][:6]
    runner.cache.copy(1, 3, len(rows[1]))
    rows[3] = list(rows[1])
    runner.memory.reserve(6, 300)  # before a pass has carried out the copy
    feed([3, 2, 1], [1, 3, 2])
    room = 512 - len(rows[2])
    runner.memory.reserve(6, 512)
    runner.feed([2], torch.full((1, room), 7), [room], want_logits=False)
    runner.cache.copy(2, 4, 512)
    runner.memory.reserve(7, 512)  # the copied row is full: the copy is carried out all the same
    assert runner.cache.lengths[4] == 512
    runner.cache.rollback(2, len(rows[2]))
    runner.cache.enter(0)
    rows[0] = []
    feed([0], [4])
    runner.memory.trim(4, 20)
    feed([0, 1, 2, 3], [1, 1, 1, 1])


def test_a_failed_pass_leaves_no_cells(model: Shoal) -> None:
    runner = model.target.fork()
    runner.memory.reserve(2, 8)
    runner.feed([0], torch.tensor([[1, 2, 3]]), [3])
    before = runner.feed([1], torch.tensor([[1, 2, 3]]), [3])[0, -1].clone()
    runner.cache.rollback(1, 2)
    with pytest.raises(ModelError, match=r"llama\.cpp failed at a pass"):
        runner.feed([0, 1], torch.tensor([[-7, -7], [5, 6]]), [2, 2])
    assert runner.cache.lengths == [3, 2]
    again = runner.feed([1], torch.tensor([[3]]), [1])[0, -1]
    torch.testing.assert_close(again, before, atol=1e-4, rtol=1e-4)


def test_a_rejected_draft_leaves_no_cells_in_the_drafters_memory(drafted: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each pass a sequence ends where the pass begins, in the target's memory and in the drafter's."""
    begin, decode = Sequences.begin, LlamaCpp._decode
    removed: list[int] = []
    passes: list[int] = []

    def watched(cache: Sequences, plan: Any) -> None:
        stored = [cache._stored[slot] for slot in plan.slots]
        begin(cache, plan)
        if cache._model is not drafted.target.hf:
            removed.extend(was - length for length, was in zip(plan.lengths, stored, strict=True) if was > length)

    def decoded(self: LlamaCpp, cache: Sequences, batch: Any) -> None:
        starts: dict[int, int] = {}
        for at in range(batch.n_tokens):
            starts.setdefault(batch.seq_id[at][0], batch.pos[at])
        for slot, start in starts.items():
            assert library().llama_memory_seq_pos_max(cache.memory, slot) == start - 1
        passes.append(batch.n_tokens)
        decode(self, cache, batch)

    monkeypatch.setattr(Sequences, "begin", watched)
    monkeypatch.setattr(LlamaCpp, "_decode", decoded)
    result = drafted.generate(PROMPTS, 2, temperature=0, lookahead=4, **OPTIONS)
    assert 0 < result.stats.accepted < result.stats.drafted
    assert len(passes) >= result.stats.rounds
    assert len(removed) > 3


def test_hundreds_of_rows_and_no_more(model: Shoal) -> None:
    result = model.generate([PROMPTS[0]], 200, max_new_tokens=2, eos=(), temperature=0)
    assert len({tuple(sample.token_ids) for sample in result[0].samples}) == 1
    with pytest.raises(RequestError, match="at most 256 rows"):
        model.target.fork().memory.reserve(257, 8)


def test_long_passes_are_cut_into_calls(model: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.models.gguf import gguf_runner

    prompt = [int(i) for i in torch.randint(0, len(TOKENS), (90,), generator=torch.Generator().manual_seed(1))]
    whole = texts(model.generate([prompt, prompt[:30]], 2, temperature=0, **OPTIONS))
    monkeypatch.setattr(gguf_runner, "PASS_TOKENS", 16)
    assert texts(model.generate([prompt, prompt[:30]], 2, temperature=0, **OPTIONS)) == whole


def test_prompts_are_kept_for_later_calls(file: Path, model: Shoal, stock: Any) -> None:
    """A second turn computes what is new of it; rows that were written down go into a memory of another size."""
    first = [int(i) for i in torch.randint(0, 200, (30,), generator=torch.Generator().manual_seed(2))]
    with shoal.load(file, prefix_memory=1 << 20, compile="off") as kept:
        answer = list(kept.generate([first], 1, temperature=0, **OPTIONS)[0].samples[0].token_ids)
        second = [*first, *answer, 7, 8, 9]
        result = kept.generate([[1, 2, 3], second], 3, temperature=0, **OPTIONS)
        assert result.stats.restored_tokens >= len(first) + len(answer) - 1
        assert texts(result) == [[greedy(stock, prompt, 24)] * 3 for prompt in ([1, 2, 3], second)]
        parted = kept.generate([[*first[:20], 5, 6]], 2, temperature=0, **OPTIONS)
        assert parted.stats.restored_tokens == 20
        assert texts(parted) == [[greedy(stock, [*first[:20], 5, 6], 24)] * 2]
        assert 0 < kept.prefixes.allocated_bytes < 1 << 20


def test_kept_rows_give_way(model: Shoal) -> None:
    runner = model.target.fork()
    runner.memory.reserve(1, 64)
    kept = KeptSequences(40, window=0)
    rows = [[start + i for i in range(16)] for start in (0, 50, 100)]
    for row in rows:
        runner.cache.enter(0)
        runner.feed([0], torch.tensor([row]), [16])
        kept.keep(runner.cache, "", row, 0)
    assert [kept.kept_length("", row) for row in rows] == [0, 16, 16]
    assert kept.kept_length("another", rows[2]) == kept.kept_length("", rows[2][:7]) == 0
    windows = KeptSequences(40, window=8)
    windows.keep(runner.cache, "", rows[2], 0)
    assert [windows.kept_length("", rows[2][:n]) for n in (15, 16)] == [0, 16]


def test_a_grammar_holds(model: Shoal) -> None:
    text = model.generate("the", 2, grammar=Grammar("regex", "[ab]{3}on"), max_new_tokens=12, seed=1)[0].samples
    assert all(len(sample.text) == 5 and sample.text.endswith("on") for sample in text)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_passes_are_explained(model: Shoal) -> None:
    runner = model.target.fork()
    runner.memory.reserve(1, 8)
    assert runner.explain([0], [1]).executor == LlamaCpp.name
    assert isinstance(runner.cache, Sequences)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("self:exit=1", "llama.cpp computes whole passes"),
        ("self:window=8", "llama.cpp computes whole passes"),
    ],
)
def test_drafters_that_need_modules_are_refused(file: Path, draft: str, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        shoal.load(file, draft, compile="off").generate([[1, 2]], 1, max_new_tokens=2)


def test_trained_heads_are_refused(model: Shoal, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"hidden states, which .* does not give"):
        trained_heads.once(model.target, str(tmp_path), lambda *_: pytest.fail("read"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strict": True}, "strict=True does not go"),
        ({"dtype": "bfloat16"}, "dtype does not go"),
        ({"quantize": "target=int8"}, "quantize does not go"),
        ({"attention": "split"}, "attention does not go"),
        ({"device": "cuda"}, "a GGUF file is computed on 'cpu'"),
    ],
)
def test_options_of_other_models_are_refused(file: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        shoal.load(file, **options)


def test_trees_are_refused(file: Path) -> None:
    with pytest.raises((RequestError, UnsupportedModel), match="tree"):
        shoal.load(file, f"{file}:tree=rsd-s", compile="off").generate([[1, 2]], 1, max_new_tokens=4, lookahead=2)


def test_files_that_are_none(file: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not exist"):
        load_runner(tmp_path / "absent.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ModelError, match="no GGUF file"):
        load_runner(other)
    with pytest.raises(ModelError, match="no GGUF file"):
        shoal.load(other)
    for size in (20, 4000, file.stat().st_size - 4000):
        other.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ModelError, match="cannot load"):
            load_runner(other)
        with pytest.raises(ModelError, match=r"damaged or not whole .*download it again"):
            shoal.load(other)


def test_names_of_files(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gguf_of(file) == gguf_of(str(file)) == file
    assert gguf_of("org/model") is None
    assert directory_of(file) is None
    asked: list[str] = []

    def fetch(hub: str, name: str, **_: Any) -> str:
        asked.append(f"{hub} {name}")
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert gguf_of("org/model:big-00001-of-00003.gguf") == tmp_path / "big-00001-of-00003.gguf"
    assert asked == [f"org/model big-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


def test_a_pre_tokenizer_that_is_not_known_is_found_out(stock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp splits digits off by the rule of this name; a reading that does not is refused, by its ids."""
    from shoal.models.gguf import tokenizer

    require_llama()
    monkeypatch.setattr(tokenizer, "cache_folder", lambda: None)
    alone, joined = (write_gguf(tmp_path / f"{pre}.gguf", stock, pre=pre) for pre in ("smollm", "gpt-2"))
    digits = [TOKENS.index("1"), TOKENS.index("2")]
    assert tokenizer.tokenizer_of(alone).encode("12") == digits
    assert tokenizer.tokenizer_of(joined).encode("12") == [TOKENS.index("12")]
    monkeypatch.setattr(tokenizer, "DIGITS_ALONE", ())
    with pytest.raises(UnsupportedModel, match=r"no tokenizer with llama\.cpp's ids"):
        tokenizer.tokenizer_of(alone)


def test_end_of_text_ends_a_row(model: Shoal) -> None:
    assert TOKENS.index(END) in model.eos


def test_the_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.run(
            ["generate", "--model", str(file), "-p", "the", "-n", "2", "--max-new-tokens", "4", "--json", "--compile", "off"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["stats"]["executors"]["target"].keys() == {"llama.cpp"}


@pytest.mark.parametrize(("built", "kept"), [(b"AVX512 = 1 | AMX_INT8 = 1 | ", False), (b"AVX2 = 1 | ", True)])
def test_kernels_for_amx_are_left_out(built: bytes, kept: bool, tmp_path: Path) -> None:
    """With them llama.cpp ends the process by SIGSEGV (seen on a Xeon); weights repacked for other processors stay."""
    seen: list[bool] = []

    class Library:
        llama_model_default_params = staticmethod(lambda: SimpleNamespace(use_extra_bufts=True, n_gpu_layers=99))
        llama_print_system_info = staticmethod(lambda: built)

        @staticmethod
        def llama_model_load_from_file(name: bytes, params: SimpleNamespace) -> int:
            seen.append(params.use_extra_bufts)
            return 1

    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    assert _loaded(Library, file, "cpu") == 1
    assert seen == [kept]


def copies() -> list[Path]:
    """The files of copies in 4 bits, unfinished ones too, of files named "one"."""
    folder = cache_folder()
    assert folder is not None
    return [each for place in folder.glob("copies/one-*") for each in place.iterdir()]


@pytest.fixture
def one(stock: Any, tmp_path: Path) -> Iterator[Path]:
    """A file of its own, without a copy."""
    require_llama()
    yield write_gguf(tmp_path / "one.gguf", stock)
    for left in copies():
        left.unlink()


def load_copy(file: Path) -> Shoal:
    return shoal.load(file, "self:int4", compile="off")


def test_a_copy_is_written_once_and_anew_for_another_file(
    one: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shoal")
    monkeypatch.setattr(gguf, "PACE", 0.0)
    load_copy(one).close()
    (first,) = copies()
    told = [record.getMessage() for record in caplog.records if "writing a copy" in record.getMessage()]
    assert told[0].startswith(f"writing a copy of {one} in 4 bits, once")
    assert told[-1] == "writing a copy in 4 bits: 25 of 25 tensors"
    written = first.stat().st_mtime_ns
    load_copy(one).close()
    assert copies() == [first]
    assert first.stat().st_mtime_ns == written
    first.write_bytes(first.read_bytes()[:9000])  # damaged
    load_copy(one).close()
    assert first.stat().st_size > 9000
    os.utime(one, ns=(1, 1))
    load_copy(one).close()
    assert len(copies()) == 1
    assert copies() != [first]


def raised(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"disk_usage": SimpleNamespace(free=1 << 10)}, ModelError, r"takes 0 MiB, and .* has 0 MiB left"),
        (
            {"WRITER": "import sys; open(sys.argv[2], 'w').write('x'); sys.exit('no space')"},
            ModelError,
            "in 4 bits: no space",
        ),
        ({"WRITER": "import os; os.abort()"}, ModelError, "its process ended with -6"),
        (
            {"WRITER": "import sys, time; sys.stderr.write('[1/2] a\\n'); sys.stderr.flush(); time.sleep(600)"},
            KeyboardInterrupt,
            None,
        ),
    ],
    ids=["full before", "full meanwhile", "killed", "Ctrl-C"],
)
def test_nothing_is_left_of_a_copy_that_fails(
    change: dict[str, Any], error: type[BaseException], words: str | None, one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[subprocess.Popen[str]] = []
    monkeypatch.setattr(gguf, "PACE", -1.0)
    for name, value in change.items():
        if name == "disk_usage":
            monkeypatch.setattr(gguf.shutil, name, lambda _, free=value: free)
        else:
            monkeypatch.setattr(gguf, name, value)
    with shoal.load(one, compile="off") as model:
        start = subprocess.Popen.__enter__
        monkeypatch.setattr(subprocess.Popen, "__enter__", lambda self: processes.append(self) or start(self))
        if error is KeyboardInterrupt:
            monkeypatch.setattr(gguf.LOG, "info", lambda text, *_: raised() if "tensors" in text else None)
        with pytest.raises(error, match=words):
            model.target.hf.in_4_bits()
    assert copies() == []
    assert all(process.poll() is not None for process in processes)
    assert len(processes) == (0 if "disk_usage" in change else 1)


@pytest.mark.parametrize("compile", ["off", "auto"])
def test_a_file_of_4_bits_has_no_smaller_copy(compile: str, tmp_path: Path) -> None:
    require_llama()
    file = write_gguf(tmp_path / "small.gguf", tiny_gguf_model(), kind="Q4_0")
    with pytest.raises(UnsupportedModel, match=r"take 4\.\d bits each already, so that the copy would be the target"):
        shoal.load(file, "self:int4", compile=compile)


def test_there_is_no_copy_without_a_cache_folder(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "cache_folder", lambda: None)
    with pytest.raises(UnsupportedModel, match="no copy in 4 bits: there is no cache folder"):
        load_copy(one)
