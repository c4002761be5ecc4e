"""GGUF files of recurrent and hybrid models: passes by llama.cpp, and rows that go back.

Tests of: models.gguf.state_sequences. The files are tiny, with the weights of a Transformers model beside them, which is the
reference. A state has no earlier length: whoever goes back by removing tokens decodes on with states of rejected drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from enumeration import chi_square
from gguf_files import TOKENS, require_llama
from laws import ALPHA
from shoal.cli.check_model import executors, family
from shoal.drafting.draft import read_draft
from shoal.drafting.protocol import Drafter, DraftInputs
from shoal.errors import InternalError, ModelError, UnsupportedModel
from shoal.models.gguf import gguf_runner, library, state_sequences
from shoal.models.gguf.gguf_runner import GgufRunner, load_gguf
from shoal.models.gguf.state_sequences import Base, StateSequences
from shoal.types.trees import DraftTree
from state_files import FAMILIES, tiny_state_model, write_state_gguf

PROMPTS = ([5, 9, 70, 33, 12], [7], [40, 41, 42, 40, 41, 42, 40, 41])
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "eos": ()}
NOISE = 0.01


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The file of a family; of a model near it, if there is noise."""
    require_llama()
    folder = tmp_path_factory.mktemp("states")

    @cache
    def one(family: str, noise: float = 0.0) -> Path:
        return write_state_gguf(folder / f"{family}-{noise}.gguf", tiny_state_model(family, noise), family)

    return one


@torch.inference_mode()
def greedy(hf: Any, ids: Sequence[int], count: int) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(hf(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-count:]


def texts(result: Any) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.samples] for output in result]


@pytest.mark.slow(but=["mamba"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_those_of_transformers(family: str, file: Callable[..., Path]) -> None:
    """Plainly, and with drafts of a model near the target: both go back from rejected drafts, and siblings come later."""
    stock = tiny_state_model(family)
    right = [[greedy(stock, prompt, 24)] * 3 for prompt in PROMPTS]
    with shoal.load(file(family), file(family, NOISE), max_batch=4) as pair:
        plain = pair.generate(PROMPTS, 3, temperature=0, lookahead="off", **OPTIONS)
        drafted = pair.generate(PROMPTS, 3, temperature=0, lookahead=3, **OPTIONS)
    assert texts(plain) == texts(drafted) == right
    assert 0 < drafted.stats.accepted < drafted.stats.drafted
    assert drafted.stats.target_passes < plain.stats.target_passes
    for role in ("target", "draft"):
        assert set(drafted.stats.executors[role]) == {"llama.cpp"}


@pytest.mark.slow(but=["jamba"])
@pytest.mark.parametrize("family", ["jamba", "lfm2"])
def test_a_copy_in_4_bits_drafts(family: str, file: Callable[..., Path]) -> None:
    stock = tiny_state_model(family)
    with shoal.load(file(family), "self:int4") as model:
        drafted = model.generate(PROMPTS, 3, temperature=0, lookahead=3, **OPTIONS)
    assert texts(drafted) == [[greedy(stock, prompt, 24)] * 3 for prompt in PROMPTS]
    assert 0 < drafted.stats.accepted < drafted.stats.drafted
    assert set(drafted.stats.executors["draft"]) == {"llama.cpp"}


@pytest.mark.parametrize("family", ["jamba", "mamba2"])
def test_a_seed_means_the_same_tokens_alone_and_in_company(family: str, file: Callable[..., Path]) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 4}
    with shoal.load(file(family), "recycling") as model:
        alone = [texts(model.generate([prompt], 2, lookahead="off", **sampling, **OPTIONS)) for prompt in PROMPTS]
        beside = model.generate(PROMPTS, 2, lookahead=3, rule="coupled", **sampling, **OPTIONS)
    assert 0 <= beside.stats.accepted < beside.stats.drafted
    assert alone[0][0] == texts(beside)[0]


@pytest.fixture(scope="module", params=FAMILIES)
def runner(request: pytest.FixtureRequest, file: Callable[..., Path]) -> tuple[GgufRunner, Any]:
    family = request.param
    return load_gguf(file(family), family), tiny_state_model(family)


def test_memory_holds_what_its_rows_hold(runner: tuple[GgufRunner, Any]) -> None:
    """Ragged passes, ways back, copies, growth and trims against plain forwards of Transformers."""
    loaded, stock = runner
    target, rng = loaded.fork(), torch.Generator().manual_seed(0)
    cache = target.cache
    rows: dict[int, list[int]] = {}

    def feed(slots: list[int], counts: list[int]) -> None:
        block = torch.randint(0, len(TOKENS), (len(slots), max(counts)), generator=rng)
        logits = target.feed(slots, block, counts)
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            rows[slot] = [*rows.get(slot, []), *block[row, :count].tolist()]
            with torch.inference_mode():
                plain = stock(torch.tensor([rows[slot]]), use_cache=False).logits[0, -count:]
            torch.testing.assert_close(logits[row, :count], plain, atol=5e-2, rtol=0)

    def back(slot: int, length: int) -> None:
        cache.rollback(slot, length)
        rows[slot] = rows[slot][:length]

    target.memory.reserve(2, 16)
    feed([0, 1], [5, 2])
    back(0, 3)  # inside the prompt
    feed([1, 0], [1, 4])
    back(0, 4)
    back(1, 3)
    target.memory.reserve(4, 40)  # grows with a row that has to go back
    feed([0, 1], [3, 3])
    for slot in (0, 1):
        back(slot, 5)
    cache.hold(0)
    feed([0], [1])
    feed([0], [1])  # steps of a draft model
    assert cache.reaches(0, 5)
    assert not cache.reaches(0, 6)
    cache.copy(0, 2, 5)
    rows[2] = rows[0][:5]
    back(0, 6)
    feed([0, 2, 1], [2, 3, 1])
    cache.copy(2, 3, 5)  # the copy holds what it was copied from
    rows[3] = rows[2][:5]
    feed([3], [1])
    back(0, 7)
    cache.copy(0, 3, 7)
    rows[3] = rows[0][:7]
    feed([3, 0], [2, 1])
    target.memory.reserve(6, 300)
    feed([0, 1, 2, 3], [1, 2, 1, 2])
    cache.enter(0)
    rows[0] = []
    feed([0], [4])
    target.memory.trim(4, 20)
    feed([0, 1, 2, 3], [1, 1, 1, 1])


def test_states_are_written_down_once_a_round(runner: tuple[GgufRunner, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a prompt, nor before the later steps of a draft model, which go back to the first."""
    written: list[int] = []
    states = StateSequences._states

    def counted(self: StateSequences, slot: int) -> Any:
        written.append(slot)
        return states(self, slot)

    monkeypatch.setattr(StateSequences, "_states", counted)
    target = runner[0].fork()
    target.memory.reserve(2, 16)
    target.feed([0, 1], torch.tensor([[1, 2, 3], [4, 5, 6]]), [3, 3])
    for slot in (0, 1):
        target.cache.rollback(slot, 3)
    assert written == []
    for _ in range(3):
        target.feed([0, 1], torch.tensor([[7], [8]]), [1, 1])
    assert written == [0, 1]
    with pytest.raises(InternalError, match="no recurrent states of 2 tokens"):
        target.cache.rollback(1, 2)
    target.cache.rollback(1, 3)
    target.cache.rollback(0, 5)
    logits = target.feed([0, 1], torch.tensor([[9], [9]]), [1, 1])[:, 0]
    assert written == [0, 1, 0, 1]
    right = [target.plain_logits(torch.tensor([ids]))[0, -1] for ids in ([1, 2, 3, 7, 7, 9], [4, 5, 6, 9])]
    torch.testing.assert_close(logits, torch.stack(right), atol=2e-2, rtol=0)


class HalfRight(Drafter):
    """Proposes the texts that it knows, and every third time another token in the end."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self.texts = texts

    def propose(self, inputs: DraftInputs) -> DraftTree:
        drafts = []
        for row, length in zip(inputs.rows, inputs.lengths, strict=True):
            known = len(row.tokens)
            text = next(text for text in self.texts if text[:known] == list(row.tokens))
            draft = text[known : known + length]
            drafts.append([*draft[:-1], 0] if known % 3 == 0 and draft else draft)
        return DraftTree.of(drafts, device=inputs.uniforms.device)


@pytest.mark.slow(but=["mamba"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_copies_no_state_to_the_host(
    family: str, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States stay with llama.cpp. Of LFM2 it has them behind every token of a pass: nothing is kept, and nothing fed again."""
    lib, calls = library(), {"kept": 0, "taken": 0, "to the host": 0}
    flags: list[int] = []

    def counted(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def call(*given: Any) -> Any:
            calls[what] += 1
            flags.extend(given[-1:] if what == "kept" else ())
            return real(*given)

        monkeypatch.setattr(owner, name, call)

    known = [[*prompt, *greedy(tiny_state_model(family), prompt, 24)] for prompt in PROMPTS]
    with shoal.load(file(family), max_batch=4) as model:
        counted(lib, "llama_state_seq_get_data_ext", "kept")
        counted(lib, "llama_state_seq_get_data", "to the host")
        counted(StateSequences, "_read_base", "taken")
        stats = model.generate(PROMPTS, 1, temperature=0, lookahead=3, drafter=HalfRight(known), **OPTIONS).stats
        assert model.target.cache.bytes_per_slot() > 0
    assert 0 < stats.accepted < stats.drafted
    if family == "lfm2":
        assert max(calls["kept"], calls["taken"]) <= len(PROMPTS)  # in the round behind a prompt, which is no round
    else:
        assert len(PROMPTS) < calls["taken"] <= calls["kept"] + len(PROMPTS)
        assert calls["kept"] <= stats.row_rounds
    assert set(flags) <= {lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | lib.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE}
    assert calls["to the host"] < len(PROMPTS)  # where the memory grows, or a row begins as another did


@pytest.mark.parametrize("snapshots", [0, 1])
def test_more_drafts_than_llama_keeps_states_of(
    snapshots: int, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states before such a pass are kept instead."""
    monkeypatch.setattr(StateSequences, "snapshots_wanted", snapshots)
    stock = tiny_state_model("lfm2")
    with shoal.load(file("lfm2"), file("lfm2", NOISE), max_batch=4) as pair:
        drafted = pair.generate(PROMPTS, 3, temperature=0, lookahead=3, **OPTIONS)
        assert pair.target.cache.snapshots == snapshots
    assert texts(drafted) == [[greedy(stock, prompt, 24)] * 3 for prompt in PROMPTS]
    assert 0 < drafted.stats.accepted < drafted.stats.drafted


@pytest.mark.parametrize(
    ("fault", "ubatch", "call"),
    [(False, 16, 2048), (False, 512, 14), (True, 512, 14)],
    ids=["parts of a call", "calls", "calls, and states of the last one alone"],
)
def test_passes_that_llama_parts(
    fault: bool, ubatch: int, call: int, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a call's parts llama.cpp keeps the end of each row together, of two calls not: then the states before are kept."""
    target, lib = load_gguf(file("lfm2"), "lfm2").fork(), library()
    real = lib.llama_init_from_model

    def opened(model: Any, params: Any) -> Any:
        params.n_ubatch = ubatch
        return real(model, params)

    monkeypatch.setattr(lib, "llama_init_from_model", opened)
    monkeypatch.setattr(gguf_runner, "PASS_TOKENS", call)
    monkeypatch.setattr(state_sequences, "PASS_TOKENS", 2048 if fault else call)
    written: list[int] = []
    states = StateSequences._states
    monkeypatch.setattr(StateSequences, "_states", lambda self, slot: [written.append(slot), states(self, slot)][1])
    slots = range(4)
    target.memory.reserve(len(slots), 32)
    cache: Any = target.cache
    assert cache.snapshots == 8
    ids = torch.randint(0, len(TOKENS), (len(slots), 9), generator=torch.Generator().manual_seed(0))
    target.feed(slots, ids[:, :3], [3] * len(slots))
    for slot in slots:
        cache.keep(slot, 0, range(3))
    target.feed(slots, ids[:, 3:8], [5] * len(slots))
    for slot in slots:
        cache.keep(slot, 3, range(1 + slot % 2))
    assert written == ([] if call == 2048 or fault else list(slots))
    try:
        found = target.feed(slots, ids[:, 8:], [1] * len(slots))[:, 0]
    except ModelError:
        assert fault
        return
    texts = [torch.cat([ids[slot, : 4 + slot % 2], ids[slot, 8:]]) for slot in slots]
    right = torch.stack([target.plain_logits(text[None])[0, -1] for text in texts])
    assert torch.allclose(found, right, atol=2e-2) != fault


def test_a_pass_that_is_taken_back_whole(file: Callable[..., Path]) -> None:
    """llama.cpp 0.3.36 says that it has removed it, and leaves the states behind it: shoal never asks for that."""
    target = load_gguf(file("lfm2"), "lfm2").fork()
    target.memory.reserve(1, 16)

    def fed(*ids: int) -> Any:
        return target.feed([0], torch.tensor([ids]), [len(ids)])[0, -1]

    fed(1, 2, 3)
    target.cache.keep(0, 0, range(3))
    fed(4, 5)
    with pytest.raises(InternalError, match="no recurrent states of 3 tokens"):
        target.cache.rollback(0, 3)
    target.cache.keep(0, 3, range(1))
    right = target.plain_logits(torch.tensor([[1, 2, 3, 4, 6]]))[0, -1]
    torch.testing.assert_close(fed(6), right, atol=2e-2, rtol=0)
    target.cache.keep(0, 4, range(1))
    fed(7, 8)
    target.cache.keep(0, 5, range(0))  # as a row does that a fault has ended
    with pytest.raises(ModelError, match="cannot take a row back to 5 tokens"):
        fed(9)
    cache: Any = target.cache
    assert library().llama_memory_seq_rm(cache.memory, 0, 5, -1)
    cache.lengths[0] = cache._stored[0] = 5
    right = target.plain_logits(torch.tensor([[1, 2, 3, 4, 6, 9]]))[0, -1]
    assert float((fed(9) - right).abs().max()) > 0.5


# ── negative controls: what these tests would see ───────────────────────────────────────────────────────────────────


def rejected_ones(self: StateSequences, slot: int, length: int) -> Base:
    """The tokens that were fed last enter the states again, among them rejected drafts."""
    base = READ_BASE(self, slot, length)
    return base._replace(fed=base.fed[::-1])


def padding(self: StateSequences, slot: int, length: int) -> Base:
    base = READ_BASE(self, slot, length)
    return base._replace(fed=[0] * len(base.fed))


def of_another_row(self: StateSequences, slot: int, length: int) -> Base:
    """A row goes on from its neighbour's tokens."""
    base, other = READ_BASE(self, slot, length), self._bases[(slot + 1) % self.slots]
    return base if other is None else base._replace(fed=(other.fed + base.fed)[: len(base.fed)])


def one_too_many(self: StateSequences, slot: int, length: int) -> Base:
    """The first token that stays is left out, and one more behind the last enters."""
    base = READ_BASE(self, slot, length)
    return base._replace(fed=[*base.fed[1:], 0])


def nothing_read(self: StateSequences, slot: int, length: int) -> Base:
    """States of the whole last pass stay: llama.cpp itself refuses to go on from there."""
    base = self._bases[slot]
    assert base is not None
    return base


READ_BASE = StateSequences._read_base
SABOTAGES = (rejected_ones, padding, of_another_row, one_too_many, nothing_read)


@pytest.mark.slow(but=["jamba-nothing_read"])
@pytest.mark.parametrize("sabotage", SABOTAGES)
@pytest.mark.parametrize("family", ["jamba", "mamba2"])
def test_a_wrong_state_is_seen(
    family: str, sabotage: Callable[..., Base], file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = tiny_state_model(family)
    with shoal.load(file(family), "recycling", max_batch=4) as model:
        monkeypatch.setattr(StateSequences, "_read_base", sabotage)
        try:
            seen = texts(model.generate(PROMPTS, 2, temperature=0, lookahead=3, **OPTIONS))
        except ModelError:
            return
    assert seen != [[greedy(stock, prompt, 24)] * 2 for prompt in PROMPTS]


@pytest.mark.parametrize("fault", [None, "one draft too many stays", "the neighbour's"])
def test_snapshots_of_another_token_are_seen(
    fault: str | None, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LFM2's ways back go through llama.cpp alone: the wrong count, or the wrong row, shows in the ids or is an error."""
    lib, stock = library(), tiny_state_model("lfm2")
    real = lib.llama_memory_seq_rm

    def removed(memory: Any, slot: int, length: int, end: int) -> Any:
        if not length or fault is None:
            return real(memory, slot, length, end)
        return real(memory, slot, length + 1, end) if fault.startswith("one") else real(memory, slot ^ 1, length, end)

    with shoal.load(file("lfm2"), "recycling", max_batch=4) as model:
        monkeypatch.setattr(lib, "llama_memory_seq_rm", removed)
        try:
            seen = texts(model.generate(PROMPTS, 2, temperature=0, lookahead=3, **OPTIONS))
        except ModelError:
            assert fault is not None
            return
    assert (seen != [[greedy(stock, prompt, 24)] * 2 for prompt in PROMPTS]) == (fault is not None)


@pytest.mark.slow(but=["None"])
@pytest.mark.parametrize("fault", [None, padding])
def test_the_law_of_two_tokens(
    fault: Callable[..., Base] | None, file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By enumeration: the second token follows a round that took drafts back, or kept one."""
    stock, prompt, most = tiny_state_model("jamba"), list(PROMPTS[2]), 3
    law: dict[tuple[int, ...], float] = {}

    def following(ids: list[int]) -> list[tuple[int, float]]:
        with torch.inference_mode():
            best = stock(torch.tensor([ids]), use_cache=False).logits[0, -1].double().topk(most)
        return list(zip(best.indices.tolist(), (best.values / 2).softmax(-1).tolist(), strict=True))

    for first, p in following(prompt):
        law |= {(first, second): p * q for second, q in following([*prompt, first])}
    sampling: dict[str, Any] = {"temperature": 2.0, "top_k": most, "rule": "rejection", "lookahead": 2}
    with shoal.load(file("jamba"), file("jamba", NOISE / 3), max_batch=16) as pair:
        if fault is not None:
            monkeypatch.setattr(StateSequences, "_read_base", fault)
        result = pair.generate([prompt], 1200, max_new_tokens=2, eos=(), seed=7, **sampling)
    assert 0 < result.stats.accepted < result.stats.drafted
    seen = [tuple(sample.token_ids) for sample in result[0].samples]
    counts = torch.tensor([float(seen.count(text)) for text in law])
    p = chi_square(counts, torch.tensor(list(law.values()), dtype=torch.float64))
    assert (p > ALPHA and counts.sum() == len(seen)) == (fault is None)


def test_a_failed_pass_leaves_rows_as_they_were(runner: tuple[GgufRunner, Any]) -> None:
    target = runner[0].fork()
    target.memory.reserve(2, 8)
    target.feed([0, 1], torch.tensor([[1, 2, 3]] * 2), [3, 3])
    for slot in (0, 1):
        target.cache.rollback(slot, 3)
    with pytest.raises(ModelError, match=r"llama\.cpp failed at a pass"):
        target.feed([0, 1], torch.tensor([[-7, -7], [5, 6]]), [2, 1])
    assert target.cache.lengths == [3, 3]
    again = target.feed([0, 1], torch.tensor([[9], [9]]), [1, 1])[:, 0]
    right = target.plain_logits(torch.tensor([[1, 2, 3, 9]]))[0, -1]
    torch.testing.assert_close(again, right.expand(2, -1), atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("mamba", "0-1 of 2"), ("jamba", "0, 2 of 4"), ("lfm2", "0, 2 of 4"), ("qwen3next", "0-2 of 4")],
)
def test_check_names_the_layers_that_keep_states(name: str, layers: str, file: Callable[..., Path]) -> None:
    with shoal.load(file(name)) as model:
        found = family(model.target)
    assert found.figure.startswith(
        f"{name}, a GGUF file; layers {layers} with recurrent states; drafters in the box: suffix,"
    )
    assert found.data["family"] == name


def test_what_states_do_not_allow_is_refused_and_told(file: Callable[..., Path]) -> None:
    with shoal.load(file("lfm2"), prefix_memory=1 << 20) as model:
        target = model.target
        assert target.keeps_states
        assert not target.can_keep_prefixes
        assert model.generate([PROMPTS[2]], 1, max_new_tokens=2).stats.restored_tokens == 0
        assert "recurrent states in layers that llama.cpp knows" in executors(target, "target", 3).figure
        assert target.notes["weights"] == "lfm2 all F32"
        for draft in ("self:exit=1", "self:window=8"):
            drafting = read_draft(draft)
            assert drafting is not None
            with pytest.raises(UnsupportedModel, match=r"llama\.cpp computes whole passes"):
                drafting.drafter(target)
