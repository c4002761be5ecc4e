"""A seed names samples: the same prompt and seed give them again, wherever the prompt stands and by whichever entry it came.

Tests of: sampling.uniforms.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import serving
from enumeration import chain_rule, chi_square, independence
from laws import ALPHA, P, Q, codes, contingency, joint
from serving import CONTEXT, legible, served
from shoal import Shoal, cli, custom_generate
from shoal.config import Limits, Sampling
from shoal.errors import RequestError
from shoal.evaluation.sampling import Sampler, SamplingConfig
from shoal.evaluation.tasks import Task
from shoal.lookahead.controller import Fixed
from shoal.sampling.acceptance import Coupled
from shoal.sampling.uniforms import group_seed, row_seed
from shoal.serve.app import ServeConfig
from shoal.serve.batch_lines import read_lines
from shoal.serve.settings import Settings
from shoal.testing import tiny_model
from shoal.testing.drafters import engine_of
from shoal.testing.scripted import table_model
from shoal.types.requests import Request, occurrences

PROMPTS = ["hello", "world", "hello", "sea", "hello"]
NEW = 24
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.9, "lookahead": 3}
Ids = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def shoal() -> Shoal:
    return serving.pair(legible(0), max_batch=4)


def samples(shoal: Shoal, prompts: Any, n: int = 2, seed: int = 7, **options: Any) -> list[Ids]:
    """Ids by prompt and row."""
    result = shoal.generate(prompts, n, seed=seed, **{**OPTIONS, **options})
    return [[sample.token_ids for sample in output.samples] for output in result]


# ── the key ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_known_keys() -> None:
    """Seeds that people wrote down must keep their meaning, on every machine and in every process."""
    assert group_seed(0, (), 0) == KNOWN[0]
    assert group_seed(-1, (1, 2, 3), 2) == KNOWN[1]
    assert group_seed(2**70, range(10_000), 0) == KNOWN[2]


KNOWN = (685119134401096586, 7417394583145509643, 1028231688927070832)


def test_keys_differ_in_each_of_their_parts() -> None:
    seeds = (0, 1, -1, 10, 11, 2**63, -(2**63), 2**64, 2**64 + 1, 2**70)
    prompts = (
        (),
        (0,),
        (0, 0),
        (1,),
        (256,),
        (1, 0),
        (0, 1),
        (2**62,),
        tuple(range(500)),
        (*range(999), 0),
        (*range(999), 1),
    )
    keys = {group_seed(*key) for key in itertools.product(seeds, prompts, range(12))}
    assert len(keys) == len(seeds) * len(prompts) * 12
    rows = {row_seed(key, row) for key in keys for row in range(9)}
    assert len(rows) == 9 * len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    assert all(0 <= row < 2**63 for row in rows)


@given(st.lists(st.sampled_from([(1,), (1, 2), (2,)])))
def test_occurrences_count_what_stands_before(prompts: list[tuple[int, ...]]) -> None:
    assert occurrences(prompts) == [prompts[:i].count(prompt) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("seed", [True, False, 1.0, "1"])
def test_a_seed_is_an_integer(seed: Any) -> None:
    with pytest.raises(RequestError, match="seed must be an integer or None"):
        Sampling(seed=seed)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 + 7, -(2**80)])
def test_any_integer_is_a_seed_of_its_own(shoal: Shoal, seed: int) -> None:
    mine = samples(shoal, "hello", seed=seed)
    assert mine == samples(shoal, "hello", seed=seed)
    assert mine != samples(shoal, "hello", seed=seed % 2**63)


# ── the library ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_repeated_prompt_gets_new_samples_and_another_seed_shares_none(shoal: Shoal) -> None:
    drawn = {seed: samples(shoal, ["hello"] * 4, seed=seed) for seed in (0, 1, 2)}
    every = [row for groups in drawn.values() for rows in groups for row in rows]
    assert len(set(every)) == len(every) == 3 * 4 * 2


def test_samples_do_not_depend_on_the_place_in_the_list(shoal: Shoal) -> None:
    """The k-th "hello" is the k-th "hello" in every order, and other prompts do not matter at all."""
    given = samples(shoal, PROMPTS)
    hellos = [rows for prompt, rows in zip(PROMPTS, given, strict=True) if prompt == "hello"]
    for order in itertools.permutations(range(5)):
        if order[0] != 2 and order != (0, 4, 3, 2, 1):  # 25 of the 120
            continue
        prompts = [PROMPTS[i] for i in order]
        left = iter(hellos)
        expected = [next(left) if prompt == "hello" else given[PROMPTS.index(prompt)] for prompt in prompts]
        assert samples(shoal, prompts) == expected


def test_a_call_that_is_split_gives_the_same(shoal: Shoal) -> None:
    given = samples(shoal, PROMPTS)
    assert samples(shoal, "hello") == given[:1]
    assert samples(shoal, ["sea", "hello", "world"]) == [given[3], given[0], given[1]]
    assert samples(shoal, "hello", n=1) == [given[0][:1]]
    streamed = shoal.stream(PROMPTS[1:3], 2, seed=7, **OPTIONS)
    for _ in streamed:
        pass
    assert [[s.token_ids for s in output.samples] for output in streamed.result()] == [given[1], given[0]]


def test_a_text_is_its_ids(shoal: Shoal) -> None:
    ids = [list(shoal.tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert samples(shoal, ids) == samples(shoal, PROMPTS)
    assert samples(shoal, ["hello", "hello"]) == samples(shoal, ids[:1] * 2)


def test_a_row_that_joins_late_draws_what_it_would_have(shoal: Shoal) -> None:
    engine = shoal.engine(3, Coupled())
    sampling, limits = Sampling(seed=7, temperature=0.9), Limits(max_new_tokens=NEW)
    asked = [tuple(shoal.tokenizer.encode(prompt)) for prompt in ("world", "hello")]
    first = engine.submit(Request(asked[0], 2, sampling, limits))
    engine.step()
    second = engine.submit(Request(asked[1], 2, sampling, limits))
    while engine.step():
        pass
    new = [[tuple(row.tokens[row.prompt_length :]) for row in rows] for rows in (first, second)]
    assert new == samples(shoal, ["world", "hello"])


@pytest.mark.slow
def test_occurrences_of_a_prompt_are_independent() -> None:
    """By count: the joint law of two occurrences is the product of the law of one, which is the target's."""
    engine = engine_of(table_model(P), table_model(Q), Fixed(2), max_batch=250, rule=Coupled())
    pairs = [
        [
            row
            for seed in range(1000)
            for row in engine.submit(
                Request((0, 0), 5, Sampling(seed=seed), Limits(max_new_tokens=3), occurrence=occurrence)
            )
        ]
        for occurrence in (0, 1)
    ]
    while engine.step():
        pass
    for rows in pairs:
        assert chi_square(joint(rows, 4), chain_rule(P, 3)) > ALPHA
    first, second = (codes(rows, 3, slice(2)) for rows in pairs)
    assert independence(contingency(first, second)) > ALPHA
    assert independence(contingency(first, first)) < ALPHA


# ── every entry gives the same ──────────────────────────────────────────────────────────────────────────────────────


def texts(shoal: Shoal, prompts: Any, n: int, seed: int) -> list[list[str]]:
    result = shoal.generate(prompts, n, seed=seed, **OPTIONS)
    return [[sample.text for sample in output.samples] for output in result]


def test_the_server_gives_what_the_library_gives(shoal: Shoal) -> None:
    expected = texts(shoal, PROMPTS, 2, 7)
    body: dict[str, Any] = {"n": 2, "seed": 7, "max_tokens": NEW, "temperature": 0.9}
    with served(shoal, lookahead=3) as server:
        answer = server.post(prompt=PROMPTS, **body).json()["choices"]
        assert [choice["text"] for choice in answer] == [text for texts in expected for text in texts]
        for prompt, wanted in zip(PROMPTS[:2], expected, strict=False):
            for _ in range(2):
                answer = server.post(prompt=prompt, **body).json()["choices"]
                assert [choice["text"] for choice in answer] == wanted
        best = server.post(prompt="hello", **{**body, "n": 1, "best_of": 2}).json()["choices"]
        assert best[0]["text"] in expected[0]


def test_batch_lines_give_what_the_library_gives(shoal: Shoal, tmp_path: Path) -> None:
    body: dict[str, Any] = {"n": 2, "seed": 7, "max_tokens": NEW, "temperature": 0.9}
    asked = [{"prompt": "world"}, {"prompt": "hello"}, {"prompt": "hello"}, {"prompt": ["hello", "hello"]}]
    (tmp_path / "in").write_text("".join(json.dumps({**line, **body}) + "\n" for line in asked))
    found: list[Any] = []
    ServeConfig(lambda: shoal, Settings("tiny"), lookahead=3).offline().answer(
        list(read_lines(tmp_path / "in")), found.append
    )
    by_line = {entry["id"]: [choice["text"] for choice in entry["choices"]] for entry in found}
    (world,), (first, second) = texts(shoal, "world", 2, 7), texts(shoal, ["hello"] * 2, 2, 7)
    assert by_line == {"line-1": world, "line-2": first, "line-3": first, "line-4": first + second}


def test_the_command_line_gives_what_the_library_gives(
    shoal: Shoal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.cli.options.ModelSource.load", lambda source: shoal)
    prompts = itertools.chain.from_iterable(("-p", prompt) for prompt in PROMPTS)
    settings = ("-n", "2", "--seed", "7", "--max-new-tokens", str(NEW), "--temperature", "0.9", "--lookahead", "3", "--json")
    assert cli.run(["generate", *prompts, *settings]) == 0
    shown = json.loads(capsys.readouterr().out)["prompts"]
    assert [[sample["text"] for sample in each["samples"]] for each in shown] == texts(shoal, PROMPTS, 2, 7)


def test_an_evaluation_gives_what_the_library_gives(shoal: Shoal) -> None:
    tasks = [Task(name, name, (), lambda _, name=name: name, lambda text, _: text) for name in ("world", "hello")]
    options = {"temperature": 0.9, "max_new_tokens": NEW}
    entries = Sampler(shoal, SamplingConfig(2, options, 3, seed=7, methods=("plain", "batched"))).run(tasks)
    for entry, expected in zip(entries, texts(shoal, ["world", "hello"], 2, 7), strict=True):
        for attempt in entry["attempts"].values():
            assert [sample["text"] for sample in attempt["samples"]] == expected


def test_generate_of_transformers_keys_by_the_prompt_too() -> None:
    """A prompt's samples do not depend on the other prompts of the batch, and each prompt has noise of its own."""
    target, drafter = (tiny_model("llama", seed=seed) for seed in (0, 1))

    def generated(prompts: list[list[int]], n: int = 2, seed: int = 3, **options: Any) -> list[list[int]]:
        torch.manual_seed(seed)
        out = target.generate(
            torch.tensor(prompts), do_sample=True, top_k=0, max_new_tokens=12, num_return_sequences=n, eos_token_id=None,
            custom_generate=custom_generate, draft_model=drafter, pad_token_id=0, **options,
        )  # fmt: skip
        return [row[len(prompts[0]) :] for row in out.tolist()]

    one, other = [5, 6, 7], [9, 8, 2]
    both = generated([one, other])
    assert len({tuple(row) for row in both}) == 4
    assert generated([other, one]) == both[2:] + both[:2]
    assert generated([one]) == both[:2]
    assert generated([one, one, other]) == generated([one], n=4) + both[2:]
    assert not {tuple(row) for row in generated([one], n=6, seed=4)} & {tuple(row) for row in generated([one], n=6)}
    everything = list(range(target.config.vocab_size))
    apart = generated([one, one, other], prefix_allowed_tokens_fn=lambda row, ids: everything)
    assert len({tuple(row) for row in apart}) == 6


def test_prompts_of_one_seed_do_not_share_their_noise() -> None:
    """Through a target that looks at nothing but the last token: the same last token, other prompts, other noise."""
    target = table_model(P[0])
    engine = engine_of(target, None, Fixed(0), max_batch=64, rule=Coupled())
    prompts = [(i % 2, i % 3, 0) for i in range(6)]
    rows = [engine.submit(Request(prompt, 1, Sampling(seed=1), Limits(max_new_tokens=NEW)))[0] for prompt in prompts]
    while engine.step():
        pass
    assert len({tuple(row.tokens[3:]) for row in rows}) == 6
    assert CONTEXT > NEW
