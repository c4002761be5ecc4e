"""One row's fault is that row's: it ends where plain decoding would fail, marked "error", and nobody else notices.

Tests of: engine.commit, engine.engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from by_pairs import by_pairs
from shoal import cli
from shoal.api import Shoal
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.errors import BadLogits, ModelError, RequestError
from shoal.lookahead.controller import Fixed
from shoal.models.cache import SlotCache
from shoal.models.loading import wrap
from shoal.models.passes import use_padded_attention
from shoal.models.runner import Runner
from shoal.sampling.acceptance import Coupled
from shoal.testing import VOCABULARY, tiny_model, tiny_tokenizer
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import History, adversary, hashed, mixed, runner, scripted
from shoal.types.requests import Request, Row

VOCAB = 12
BAD = 11
HEALTHY = hashed(VOCAB, 0)
DRAFTER = mixed(HEALTHY, hashed(VOCAB, 1))
ONLY_BAD = torch.nn.functional.one_hot(torch.tensor(BAD), VOCABULARY)
NAN = torch.full((VOCAB,), torch.nan, dtype=torch.float64)


def faulty(from_length: int, script: History = HEALTHY) -> History:
    """NaN for rows whose first token is `BAD`, once they are that long."""
    return lambda ids: NAN if ids[0] == BAD and len(ids) >= from_length else script(ids)


def run(
    target: Runner, drafter: Runner | None, k: int, prompts: Sequence[tuple[int, ...]], *, n: int = 1, max_batch: int = 8,
    new: int = 10, prefix_sharing: str = "auto", temperature: float = 1.0,
) -> tuple[Engine, list[Row]]:  # fmt: skip
    engine = engine_of(target, drafter, Fixed(k), max_batch=max_batch, rule=Coupled(), prefix_sharing=prefix_sharing)
    sampling = Sampling(seed=3, temperature=temperature)
    rows = [row for ids in prompts for row in engine.submit(Request(ids, n, sampling, Limits(max_new_tokens=new)))]
    while engine.step():
        pass
    assert engine.scheduler.idle
    return engine, rows


def new_tokens(rows: Sequence[Row]) -> list[list[int]]:
    return [row.tokens[row.prompt_length :] for row in rows]


PROMPTS = [(1, 2), (BAD, 5), (3, 4, 5)]


@by_pairs({"temperature": [0.0, 1.0], "k": [0, 1, 4], "at": [2, 3, 7]})
def test_nan_in_one_row(at: int, k: int, temperature: float) -> None:
    """It keeps what it had when the fault came, to the token; its neighbours have what they have without it."""
    engine, rows = run(scripted(faulty(at), VOCAB), scripted(DRAFTER, VOCAB), k, PROMPTS, temperature=temperature)
    well, others = run(scripted(HEALTHY, VOCAB), scripted(DRAFTER, VOCAB), k, PROMPTS, temperature=temperature)
    assert [row.finish_reason for row in rows] == ["length", "error", "length"]
    assert new_tokens(rows)[::2] == new_tokens(others)[::2]
    assert new_tokens(rows)[1] == new_tokens(others)[1][: at - 2]
    assert isinstance(rows[1].error, BadLogits)
    assert "scripted returned NaN or infinite logits: row 0 of request 1, draft position" in str(rows[1].error)
    assert "try dtype='float32'" in str(rows[1].error)
    assert engine.stats.committed == well.stats.committed - (10 - (at - 2))
    assert (engine.stats.accepted > 0) == (k > 0)


def test_nan_on_a_path_that_is_rejected() -> None:
    """What a rejected draft would have led to is not asked; where the target goes there itself, it counts."""
    wrong = adversary(HEALTHY, VOCAB)

    def after_a_wrong_token(ids: tuple[int, ...]) -> Tensor:
        astray = any(int(HEALTHY(ids[:i]).argmax()) != ids[i] for i in range(2, len(ids)))
        return NAN if astray else HEALTHY(ids)

    engine, rows = run(scripted(after_a_wrong_token, VOCAB), scripted(wrong, VOCAB), 4, [(1, 2)], temperature=0)
    assert new_tokens(rows) == new_tokens(run(scripted(HEALTHY, VOCAB), None, 0, [(1, 2)], temperature=0)[1])
    assert rows[0].finish_reason == "length"
    assert engine.stats.drafted > 20
    assert engine.stats.accepted == 0
    _, sampled = run(scripted(after_a_wrong_token, VOCAB), None, 0, [(1, 2)], temperature=1)
    assert sampled[0].finish_reason == "error"


@pytest.mark.parametrize("attention", ["pad", "split", "reference"])
def test_nan_of_a_draft_itself(attention: str) -> None:
    """Its keys are NaN, which reaches the positions before it in the pass: its row ends early, and no other does."""
    model = tiny_model("llama")
    target, drafts_bad = (
        wrap(model, "target", attention),
        scripted(lambda _: 99.0 * ONLY_BAD, VOCABULARY),
    )
    limits = Limits(max_new_tokens=10)

    def tokens(most: int | None) -> tuple[Engine, list[Row]]:
        engine = engine_of(target, drafts_bad, Fixed(3))
        rows = [
            engine.submit(Request(ids, 1, Sampling(temperature=0), limits, max_draft=max_draft))[0]
            for ids, max_draft in (((1, 2), most), ((3, 4, 5), 0))
        ]
        while engine.step():
            pass
        return engine, rows

    _, plain = tokens(0)
    assert BAD not in [token for row in plain for token in row.tokens]
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.nan
    _, still_plain = tokens(0)
    engine, rows = tokens(None)
    assert new_tokens(still_plain) == new_tokens(plain)
    assert (rows[0].finish_reason, new_tokens(rows)[0], rows[0].drafted) == ("error", [], 3)
    assert "draft position 0" in str(rows[0].error)
    assert (rows[1].finish_reason, new_tokens(rows)[1]) == ("length", new_tokens(plain)[1])
    assert engine.stats.accepted == 0


def test_controls_that_leave_nothing_possible_end_their_row() -> None:
    engine = engine_of(scripted(HEALTHY, VOCAB), scripted(DRAFTER, VOCAB), Fixed(3), rule=Coupled())
    limits = Limits(max_new_tokens=10)
    hopeless = Sampling(seed=0, bad_words=[[token] for token in range(VOCAB)])
    rows = [engine.submit(Request((1, 2), 1, sampling, limits))[0] for sampling in (hopeless, Sampling(seed=3))]
    while engine.step():
        pass
    assert isinstance(rows[0].error, RequestError)
    assert "no token is left possible by bad_words" in str(rows[0].error)
    assert new_tokens(rows[:1]) == [[]]
    assert new_tokens(rows[1:]) == new_tokens(run(scripted(HEALTHY, VOCAB), None, 0, [(1, 2)])[1])


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_all_rows_of_a_faulty_prompt_fail(max_batch: int, prefix_sharing: str) -> None:
    """Also those that come later to what the first has left."""
    prompts = [(BAD, 5, 6), (1, 2, 3)]
    target, drafter = scripted(faulty(3), VOCAB), scripted(DRAFTER, VOCAB)
    _, rows = run(target, drafter, 3, prompts, n=3, max_batch=max_batch, prefix_sharing=prefix_sharing)
    _, alone = run(scripted(HEALTHY, VOCAB), None, 0, prompts[1:], n=3)
    assert [row.finish_reason for row in rows] == ["error"] * 3 + ["length"] * 3
    assert new_tokens(rows[3:]) == new_tokens(alone)


# ── what NaN leaves in a cache ──────────────────────────────────────────────────────────────────────────────────────

SIZE = 40
POISON = SIZE - 1


def poisonous() -> Runner:
    """A real model whose states are NaN wherever the last token of its vocabulary is read; it does not say it itself.

    It attends by masks: the kernels do not read hidden keys at all.
    """
    model = tiny_model("llama", vocab_size=SIZE)
    model.get_input_embeddings().weight.data[POISON] = torch.nan
    model.lm_head.weight.data[POISON] = 0.0
    made = runner(model, 128, "tiny")
    use_padded_attention(made)
    return made


@pytest.mark.parametrize("cleans", [True, False])
def test_a_slot_is_clean_for_the_next_row(cleans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden keys count with weight 0, and 0 * NaN is NaN: beside a longer row, one in the slot of a faulty one would fail, too."""
    if not cleans:
        monkeypatch.setattr(SlotCache, "zero_tail", lambda *_: None)
    healthy, later = tuple(range(1, 13)), (1, 2, 3)
    _, rows = run(poisonous(), None, 0, [healthy, (7, 8, 9, 10, 11, POISON, 12), later], max_batch=2, temperature=0)
    assert [row.finish_reason for row in rows] == ["length", "error", "length" if cleans else "error"]
    if cleans:
        alone = [run(poisonous(), None, 0, [prompt], temperature=0)[1] for prompt in (healthy, later)]
        assert new_tokens(rows[::2]) == [new_tokens(one)[0] for one in alone]


def test_nothing_is_cleaned_where_nothing_was_spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(SlotCache, "zero_tail", lambda *arguments: calls.append(arguments[1:]))
    run(poisonous(), scripted(hashed(SIZE, 0), SIZE), 3, [(1, 2, 3), (4, 5)], temperature=0)
    assert not calls
    run(poisonous(), scripted(hashed(SIZE, 0), SIZE), 3, [(1, 2, 3), (POISON, 5)], temperature=0)
    assert {slot for slot, *_ in calls} == {1}


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("prefix_sharing", ["copied", "shared"])
def test_a_prompt_that_was_never_computed_is_not_found(prefix_sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two rows is refused for want of memory; the second computes the prompt anew."""
    target = scripted(HEALTHY, VOCAB)
    engine = engine_of(target, None, Fixed(0), max_batch=1, rule=Coupled(), prefix_sharing=prefix_sharing)
    running = engine.submit(Request((4, 4), 1, Sampling(seed=3), Limits(max_new_tokens=2)))
    engine.step()
    refused = engine.submit(Request((1, 2, 3), 2, Sampling(seed=3), Limits(max_new_tokens=10)))
    engine.step()
    feed, failures = Runner._ordinary, [RuntimeError("can't allocate memory")]

    def failing(self: Runner, *arguments: Any, **options: Any) -> Tensor:
        if failures:
            raise failures.pop()
        return feed(self, *arguments, **options)

    monkeypatch.setattr(Runner, "_ordinary", failing)
    while engine.step():
        pass
    assert [row.finish_reason for row in (*running, *refused)] == ["length", "error", "length"]
    assert isinstance(refused[0].error, ModelError)
    assert new_tokens(refused[1:]) == new_tokens(run(scripted(HEALTHY, VOCAB), None, 0, [(1, 2, 3)], n=2)[1])[1:]
    assert engine.stats.prefills == 2


# ── what users see ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_generate_raises_when_all_others_are_done() -> None:
    shoal = Shoal(scripted(faulty(4), VOCAB), scripted(DRAFTER, VOCAB))
    options: dict[str, Any] = {"seed": 3, "lookahead": 3, "max_new_tokens": 10, "n": 2}
    with pytest.raises(BadLogits, match="scripted returned NaN") as caught:
        shoal.generate([*PROMPTS], **options)
    result = caught.value.result
    reasons = [[sample.finish_reason for sample in output.samples] for output in result]
    assert reasons == [["length"] * 2, ["error"] * 2, ["length"] * 2]
    samples = [sample for output in result for sample in output.samples]
    assert all(len(s.token_ids) == len(s.logprobs) == len(s.from_draft) for s in samples)
    assert result[1].samples[0].error == str(caught.value)
    assert result[0].samples[0].error is None
    assert result[1].ranked[0].finished is False
    with pytest.raises(BadLogits) as all_failed:
        shoal.generate([PROMPTS[1]], **options)
    assert len(all_failed.value.result) == 1


def test_a_stream_raises_nothing() -> None:
    shoal = Shoal(scripted(faulty(4), VOCAB), scripted(DRAFTER, VOCAB))
    stream = shoal.stream([*PROMPTS], seed=3, lookahead=3, max_new_tokens=10)
    last = {increment.prompt: increment for increment in stream if increment.finish_reason}
    assert [last[i].finish_reason for i in range(3)] == ["length", "error", "length"]
    sample = last[1].result
    assert sample is not None
    assert "NaN" in (sample.error or "")
    assert sample == stream.result()[1].samples[0]


def test_the_command_line_shows_what_finished_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()
    bad = tokenizer.encode("b")[0]
    script = hashed(VOCABULARY, 0)
    target = scripted(lambda ids: torch.full((VOCABULARY,), torch.nan) if ids[0] == bad else script(ids), VOCABULARY)
    monkeypatch.setattr("shoal.cli.generate.ModelSource.load", lambda _: Shoal(target, None, tokenizer))
    code = cli.run(["generate", "-p", "good", "-p", "bad", "-n", "2", "--json", "--max-new-tokens", "4", "--seed", "0"])
    out, err = capsys.readouterr()
    good, failed = (entry["samples"] for entry in json.loads(out)["prompts"])
    assert code == 2
    assert [(len(sample["token_ids"]), sample["finish_reason"]) for sample in good] == [(4, "length")] * 2
    assert [sample["finish_reason"] for sample in failed] == ["error"] * 2
    assert all("NaN" in sample["error"] for sample in failed)
    assert not any("error" in sample for sample in good)
    assert "2 of 4 samples failed; the first: scripted returned NaN" in " ".join(err.split())
