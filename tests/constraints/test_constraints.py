"""Grammars: the law is that of the masked target, whatever is drafted; what ends by itself is of the grammar.

Tests of: constraints.grammar, constraints.compiler, constraints.masks, config.Grammar.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import llguidance
import llguidance.hf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shoal
import shoal.sampling.acceptance
from constrained_laws import agreement, law_of, rows_of
from enumeration import chain_rule, committed_distribution
from grammars import ALPHABET, COMPACT, TARGET, TOKENIZER, WORDS, commit, encode, made, possible, readable
from shoal.api import Shoal
from shoal.config import Grammar, Limits, Sampling
from shoal.constraints import compiler, masks
from shoal.constraints import grammar as grammars
from shoal.drafting.model import ModelDrafter
from shoal.drafting.protocol import DraftInputs
from shoal.engine.engine import Engine
from shoal.errors import RequestError
from shoal.sampling.acceptance import Rejection
from shoal.sampling.distributions import probabilities
from shoal.sampling.drawing import exponential_race
from shoal.sampling.uniforms import group_seed, race_uniforms, row_seed
from shoal.testing import END, VOCABULARY
from shoal.testing.scripted import History, hashed, mixed, one_hot, says, scripted, table_model
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree, Positions

PROMPT = (1, 2, 3)


def masked_decoding(
    script: History, grammar: Grammar, seed: int, temperature: float, most: int, index: int = 0
) -> list[int]:
    """Plain decoding of the masked target, from the definition; the uniforms are those of the coupled rule."""
    tokens: list[int] = []
    row = row_seed(group_seed(seed, PROMPT, 0), index)
    while len(tokens) < most and tokens[-1:] != [END]:
        history = (*PROMPT, *tokens)
        logits = script(history).masked_fill(~possible(grammar, tokens), -torch.inf)
        uniforms = torch.from_numpy(race_uniforms([row], [len(history)], 1))[0, 0]
        p = one_hot(int(logits.argmax()), VOCABULARY).exp() if temperature == 0 else (logits / temperature).softmax(-1)
        tokens.append(int(exponential_race(p[None], uniforms[None])))
    return tokens


# ── the law ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_ids_are_those_of_plain_masked_decoding(k: int, temperature: float) -> None:
    result = made().generate([PROMPT], n=3, grammar=WORDS, seed=5, temperature=temperature, lookahead=k, max_new_tokens=30)
    expected = [masked_decoding(TARGET, WORDS, 5, temperature, 30, i) for i in range(3)]
    samples = result[0].samples
    assert [list(sample.token_ids) for sample in samples] == expected
    assert all(sample.finish_reason == "eos" and re.fullmatch(WORDS.text, sample.text) for sample in samples)
    if k:
        assert 0 < result.stats.accepted < result.stats.drafted
        assert result.stats.row_rounds < result.stats.committed
    else:
        assert result.stats.drafted == 0
    assert not any(possible(WORDS, ())[t] for t in range(VOCABULARY) if chr(t) == ";")  # the mask does exclude something


LETTERS = [*encode("abc"), END]
SMALL = Grammar("regex", "(ab|ba|aac|cc?)b?")


def tables(seed: int) -> tuple[Tensor, Tensor]:
    """Random Markov tables over a, b, c, EOS, [4, 4]; and the same over the whole vocabulary, [260, 260]."""
    weights = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.05
    weights /= weights.sum(-1, keepdim=True)
    whole = torch.full((VOCABULARY, VOCABULARY), 1e-3, dtype=torch.float64)
    whole[torch.tensor(LETTERS)[:, None], torch.tensor(LETTERS)] = weights
    return weights, whole / whole.sum(-1, keepdim=True)


def row_of(grammar: Grammar, tokens: Sequence[int] = (), **options: Any) -> Row:
    request = Request((LETTERS[0],), 1, Sampling(grammar=grammar, **options))
    row = Row(request, 0, 0, 0, [LETTERS[0]], frozenset([END]), 99)
    masks.begin(row, [compiler.grammars_of(TOKENIZER, VOCABULARY).constraint(grammar)])
    commit(row, tokens)
    return row


def test_the_law_is_that_of_the_masked_target_exactly() -> None:
    """Every way that rounds of drafts can go, enumerated through the real acceptance code with the real masked p and q."""

    def real(weights: Tensor, new: list[int]) -> Tensor:
        return probabilities(weights.log()[None, None], Positions([row_of(SMALL, new)], [()]))[0, 0]

    def defined(weights: Tensor, new: list[int]) -> Tensor:
        kept = weights * possible(SMALL, new)
        return kept / kept.sum()

    target, drafter = tables(0)[1], tables(1)[1]
    p, q, plain = chain(target, real), chain(drafter, real), chain(target, defined)
    torch.testing.assert_close(p, plain, rtol=1e-12, atol=1e-12)
    assert (p - q).abs().max() > 0.05
    for lengths in ([1], [2], [2, 0, 1]):
        law = committed_distribution(p, q, HORIZON, lengths)
        torch.testing.assert_close(law, chain_rule(plain, HORIZON), rtol=1e-10, atol=1e-12)
    unmasked = chain(drafter, lambda weights, _: weights)
    exact = chain_rule(plain, HORIZON)
    torch.testing.assert_close(committed_distribution(p, unmasked, HORIZON, [2]), exact, rtol=1e-10, atol=1e-12)
    # The control: a target without its mask.
    loose = committed_distribution(chain(target, lambda weights, _: weights), q, HORIZON, [2])
    assert (loose - chain_rule(plain, HORIZON)).abs().max() > 0.01


HORIZON = 3
NOTHING = encode("z")[0]  # stands where a text has not begun


def chain(whole: Tensor, law: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
    """The table [5] * 4 of a law over texts of nothing, a, b, c, EOS; after an EOS, and off the grammar, there is only EOS."""
    letters = torch.tensor([NOTHING, *LETTERS])
    table = torch.zeros([5] * (HORIZON + 1), dtype=torch.float64)
    table[..., 4] = 1.0
    for depth in range(HORIZON):
        for places in itertools.product(range(1, 4), repeat=depth):
            new = [LETTERS[i - 1] for i in places]
            if _is_prefix(new):
                said = law(whole[new[-1] if new else LETTERS[0]], new)[letters]
                table[(0,) * (HORIZON - depth) + places] = said / said.sum()
    return table


def _is_prefix(tokens: Sequence[int]) -> bool:
    matcher = llguidance.LLMatcher(ALPHABET, readable(SMALL))
    return matcher.validate_tokens(list(tokens)) == len(tokens)


def masked_law() -> dict[tuple[int, ...], float]:
    """Every text of `SMALL` with its probability under the masked table."""
    whole = tables(0)[1]

    def following(new: tuple[int, ...]) -> dict[int, float]:
        kept = whole[new[-1] if new else LETTERS[0]] * possible(SMALL, new)
        return {token: float(kept[token]) for token in kept.nonzero().flatten().tolist()}

    return law_of(following, 8, END)


def test_the_law_of_whole_texts_counted_through_the_engine() -> None:
    models, law = [table_model(tables(seed)[1]) for seed in (0, 1)], masked_law()
    sampling: dict[str, Any] = {"seed": 1, "grammar": SMALL}
    rows, _ = rows_of(*models, 3, Rejection(), 1000, 8, END, (), prompt=(LETTERS[0],), tokenizer=TOKENIZER, **sampling)
    assert len(law) >= 10
    assert agreement(rows, law) > 1e-6
    # The power of the test: the law of an unmasked drafter would show.
    assert (
        agreement(rows, {text: share**0.4 / sum(each**0.4 for each in law.values()) for text, share in law.items()}) < 1e-6
    )


# ── drafts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Watched(ModelDrafter):
    """Remembers what it proposed, with the tokens before it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.proposed: list[tuple[list[int], list[int]]] = []

    def propose(self, inputs: DraftInputs) -> DraftTree:
        tree = super().propose(inputs)
        new = [row.tokens[row.prompt_length :] for row in inputs.rows]
        self.proposed += list(zip(new, tree.drafts, strict=True))
        return tree


class Unmasked(Watched):
    """Drafts as if there were no grammar, and says so in its q."""

    def propose(self, inputs: DraftInputs) -> DraftTree:
        held = [row.constraints for row in inputs.rows]
        for row in inputs.rows:
            row.constraints = []
        tree = super().propose(inputs)
        for row, constraints in zip(inputs.rows, held, strict=True):
            row.constraints = constraints
        return tree


def run(kind: type[Watched], k: int = 4) -> tuple[Engine, Watched, list[Row]]:
    pair = made()
    assert pair.draft_model is not None
    drafter = kind(pair.draft_model.fork(), VOCABULARY)
    engine = pair.engine(k, shoal.sampling.acceptance.Coupled(), drafter=drafter)
    sampling = Sampling(grammar=WORDS, seed=5, temperature=1.3)
    rows = engine.submit(Request(PROMPT, 3, sampling, Limits(max_new_tokens=30)))
    while engine.step():
        pass
    return engine, drafter, rows


def violations(drafter: Watched) -> int:
    """Proposed tokens that the grammar does not allow where they stand."""
    count = 0
    for new, draft in drafter.proposed:
        draft = draft[: draft.index(END) + 1] if END in draft else draft
        matcher = llguidance.LLMatcher(ALPHABET, readable(WORDS))
        matcher.consume_tokens(new)
        ended = matcher.is_stopped() and draft == [END]  # of a complete text it validates nothing, the EOS included
        count += 0 if ended else len(draft) - matcher.validate_tokens(draft)
    return count


def test_drafts_never_leave_the_grammar() -> None:
    """And where they do, for want of a mask, they are rejected, and nothing else changes."""
    engine, drafter, rows = run(Watched)
    assert sum(len(draft) for _, draft in drafter.proposed) == engine.stats.drafted > 20
    assert violations(drafter) == 0
    wild, unmasked, others = run(Unmasked)
    assert violations(unmasked) > 20
    assert [row.tokens for row in others] == [row.tokens for row in rows]
    assert wild.stats.accepted < engine.stats.accepted
    assert wild.stats.rounds > engine.stats.rounds


def test_a_dead_end_on_a_rejected_path_is_nobodys_business() -> None:
    """After "ab" nothing is possible, as "c" is banned: the drafter goes there, the target does not."""
    grammar, banned = Grammar("regex", "a(bc|de)"), [encode("c")]
    aside = [(*PROMPT, *encode("abc"))]
    shoal = made(says([(*PROMPT, *encode("ade"), END)], VOCABULARY), says(aside, VOCABULARY))
    result = shoal.generate([PROMPT], grammar=grammar, bad_words=banned, temperature=0, lookahead=4)
    assert (result[0].samples[0].text, result[0].samples[0].finish_reason) == ("ade", "eos")
    assert result.stats.drafted > result.stats.accepted > 0
    stubborn = made(says(aside, VOCABULARY), says(aside, VOCABULARY))
    for k in (0, 4):
        stream = stubborn.stream([PROMPT], grammar=grammar, bad_words=banned, temperature=0, lookahead=k)
        list(stream)
        sample = stream.result()[0].samples[0]
        assert (sample.text, sample.finish_reason) == ("ab", "error")  # where plain decoding ends, too
        assert re.search("no token is left possible by .*bad_words=.*, the grammar; relax", sample.error or "")


@given(st.lists(st.tuples(st.integers(0, 3), st.text("abcd,12;", max_size=6)), max_size=12))
@settings(max_examples=15)
def test_a_constraint_follows_any_history(asked: list[tuple[int, str]]) -> None:
    """Drafts come and go, some out of the grammar; the mask is always that of a fresh matcher."""
    row, text = row_of(WORDS), encode("ab,12,3;")
    for commits, draft in asked:
        commit(row, text[row.new_tokens : row.new_tokens + commits])
        new, drafted = row.tokens[1:], encode(draft)
        matcher = llguidance.LLMatcher(ALPHABET, readable(WORDS))
        valid = matcher.validate_tokens([*new, *drafted]) == len(new) + len(drafted)
        mask = masks.allowed_tokens(Positions([row], [drafted], first=len(drafted)), torch.empty(1, 1, VOCABULARY))
        assert mask is not None
        expected = possible(WORDS, [*new, *drafted]) if valid else torch.zeros(VOCABULARY, dtype=torch.bool)
        assert torch.equal(mask[0, 0], expected)


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_with_and_without_a_grammar_in_one_batch() -> None:
    digits = Grammar("regex", "[0-9]{5}")
    ways = [WORDS, None, digits, None]

    def tokens(which: Sequence[int]) -> tuple[Engine, dict[int, list[list[int]]]]:
        engine = made().engine(3, shoal.sampling.acceptance.Coupled())
        asked = {
            i: engine.submit(Request((*PROMPT, i), 2, Sampling(grammar=ways[i], seed=i), Limits(max_new_tokens=14)))
            for i in which
        }
        while engine.step():
            pass
        return engine, {i: [row.tokens[4:] for row in rows] for i, rows in asked.items()}

    engine, together = tokens(range(4))
    assert together == {i: tokens([i])[1][i] for i in range(4)}
    assert engine.stats.rounds < sum(tokens([i])[0].stats.rounds for i in range(4))  # they did share rounds
    assert all(re.fullmatch("[0-9]{5}", TOKENIZER.decode(ids[:-1])) and ids[-1] == END for ids in together[2])
    assert not any(re.match("[a-d]{2}", TOKENIZER.decode(ids)) for ids in together[1])


def test_an_eos_only_where_the_text_is_complete() -> None:
    """A target that would always rather stop."""
    eager = made(lambda _: one_hot(END, VOCABULARY), lambda _: one_hot(END, VOCABULARY))
    for k in (0, 3):
        sample = eager.generate([PROMPT], grammar=Grammar("regex", "abbc"), temperature=0, lookahead=k)[0].samples[0]
        assert (sample.text, sample.token_ids[-1], sample.finish_reason) == ("abbc", END, "eos")
    semicolon = encode(";")
    result = eager.generate([PROMPT], grammar=Grammar("regex", "[;x]{3};?"), eos=semicolon, temperature=0, lookahead=3)
    assert result[0].samples[0].token_ids == tuple(encode("xxx;"))  # as an EOS id it is no letter of the text
    assert result[0].samples[0].finish_reason == "eos"


@pytest.mark.parametrize("k", [0, 3])
def test_without_any_eos_a_complete_text_ends(k: int) -> None:
    result = made().generate([PROMPT], n=2, grammar=Grammar("regex", "[a-d]{7}"), eos=(), seed=1, lookahead=k)
    assert [(len(s.token_ids), s.finish_reason) for s in result[0].samples] == [(7, "stop")] * 2
    cut = made().generate([PROMPT], grammar=Grammar("regex", "[a-d]+"), eos=(), seed=1, lookahead=k, max_new_tokens=5)
    assert cut[0].samples[0].finish_reason == "length"


@pytest.mark.parametrize("vocab", [258, 300])
def test_a_model_narrower_or_wider_than_its_tokenizer(vocab: int) -> None:
    """Ids that no token has are never said, though the model would love to."""
    padded = torch.zeros(vocab, dtype=torch.float64)
    padded[257:] = 9.0
    loud = lambda ids: hashed(vocab, 3)(ids) + padded  # noqa: E731
    shoal = made(loud, loud, vocab=vocab)
    result = shoal.generate([PROMPT], n=2, grammar=WORDS, seed=0, lookahead=3)
    assert all(re.fullmatch(WORDS.text, sample.text) for sample in result[0].samples)
    assert result.stats.accepted > 0
    free = shoal.generate([PROMPT], seed=0, lookahead=3, max_new_tokens=9)[0].samples[0]
    assert max(free.token_ids) > 256


PLACE = Path(__file__).parents[1] / "data/schemas.json"
SCHEMAS, UNKNOWN = (json.loads(PLACE.read_text("utf-8"))[part] for part in ("read", "unknown"))
"""As the JSON Schema test suite has them: one keyword at a time, then those that are hard together; and those that are refused."""


def closing(seed: int) -> History:
    """Printable for the most part, and quick to end what it has begun."""
    script, tips = hashed(VOCABULARY, seed), torch.zeros(VOCABULARY, dtype=torch.float64)
    tips[95:END] = -6.0
    tips[encode('"]}')] = 3.0
    tips[END] = 8.0
    return lambda ids: script(ids) + tips


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_ends_by_itself_is_valid(name: str) -> None:
    schema = SCHEMAS[name]
    target = closing(0)
    pair = made(target, mixed(target, closing(1), every=3))
    result = pair.generate([PROMPT], n=4, grammar=Grammar("json_schema", schema), seed=2, lookahead=3, max_new_tokens=80)
    complete = [sample.text for sample in result[0].samples if sample.finish_reason == "eos"]
    assert len(complete) > 1
    for text in complete:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    assert result.stats.drafted > 0
    assert {sample.finish_reason for sample in result[0].samples} <= {"eos", "length"}


@pytest.mark.parametrize("keyword", UNKNOWN)
def test_a_keyword_that_could_not_be_kept_is_refused_by_name(keyword: str) -> None:
    with pytest.raises(RequestError, match=f"(?i)the json_schema grammar cannot be used.*{re.escape(keyword)}"):
        made().generate([PROMPT], grammar=Grammar("json_schema", UNKNOWN[keyword]))


def test_any_json_object_and_a_lark_grammar() -> None:
    closing = made(lambda ids: hashed(VOCABULARY, 0)(ids) + 20 * one_hot(encode("}")[0], VOCABULARY).exp(), None)
    assert closing.generate([PROMPT], grammar=Grammar("json_object"), seed=0, lookahead=0)[0].samples[0].text == "{}"
    lark = Grammar("lark", 'start: word ("," word)*\nword: /[a-c]/ /[0-9]/')
    texts = [s.text for s in made().generate([PROMPT], n=3, grammar=lark, seed=4, lookahead=3)[0].samples]
    assert all(re.fullmatch("[a-c][0-9](,[a-c][0-9])*", text) for text in texts)


def test_byte_level_bpe_of_the_bundled_pair(bundled: Shoal) -> None:
    """Tokens of several bytes; the pair's own models, plain and with drafts."""
    schema = {
        "type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "maximum": 99}},
        "required": ["name", "n"], "additionalProperties": False, **COMPACT,
    }  # fmt: skip
    options: dict[str, Any] = {"grammar": Grammar("json_schema", schema), "seed": 3, "max_new_tokens": 32}
    plain, drafted = (bundled.generate("record = ", n=3, lookahead=k, **options) for k in (0, 3))
    assert [s.token_ids for s in plain[0].samples] == [s.token_ids for s in drafted[0].samples]
    assert 0 < drafted.stats.accepted <= drafted.stats.drafted
    assert drafted.stats.target_passes < plain.stats.target_passes
    finished = [sample for sample in drafted[0].samples if sample.finish_reason == "eos"]
    assert finished
    assert all(set(json.loads(sample.text)) == {"name", "n"} for sample in finished)


# ── what it costs, and what goes wrong ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(compiler, "_known", {})


def test_rows_without_a_grammar_pay_nothing(monkeypatch: pytest.MonkeyPatch, without_llguidance: None) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("called without a grammar")

    never_called = {
        grammars: ("_pack_masks", "_symbols", "Track", "TextState"), masks: ("_conjunction", "_states", "advance", "is_complete"),
        compiler: ("grammars_of", "Grammars"),
    }  # fmt: skip
    for module, names in never_called.items():
        for name in names:
            monkeypatch.setattr(module, name, never)
    result = made().generate([PROMPT], n=2, seed=0, lookahead=3, max_new_tokens=9)
    assert result.stats.drafted > 0
    assert masks.allowed_tokens(Positions([row_without()], [()]), torch.empty(1, 1, VOCABULARY)) is None


def row_without() -> Row:
    return Row(Request(PROMPT), 0, 0, 0, list(PROMPT), frozenset(), 99)


def test_llguidance_is_asked_for_by_name(without_llguidance: None) -> None:
    with pytest.raises(RequestError, match=re.escape("pip install '.[grammar]'")):
        made().generate([PROMPT], grammar=WORDS)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "a(b", "the regex grammar cannot be used: .*unclosed group"),
        ("json_schema", '{"type": "foo"}', 'the json_schema grammar cannot be used: type "foo" is none of string'),
        ("json_schema", '{"typ', "the json_schema grammar cannot be used"),
        ("json_schema", {"type": "string", "not": {"const": "a"}}, '"not" cannot be kept'),
        ("lark", 'start: "a" foo', 'unknown name: "foo"'),
        ("xml", "a", "kind of a grammar must be one of json_schema, json_object, regex, lark, got 'xml'"),
        ("regex", "", "text of a regex grammar must be not empty"),
        ("json_object", "{}", "text of a json_object grammar must be empty"),
        ("regex", 7, "text of a grammar must be a string, got 7"),
    ],
)
def test_a_grammar_that_cannot_be_used(kind: str, text: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"(?s){message}"):
        made().generate([PROMPT], grammar=Grammar(kind, text))


def test_what_a_grammar_needs() -> None:
    with pytest.raises(RequestError, match="a grammar needs a tokenizer"):
        Shoal(scripted(TARGET, VOCABULARY)).generate([PROMPT], grammar=WORDS)
    with pytest.raises(RequestError, match="grammar must be a Grammar or None, got 'a'"):
        made().generate([PROMPT], grammar="a")
    with pytest.raises(RequestError, match="a fast tokenizer that llguidance can read"):
        compiler.Grammars(SimpleNamespace(), VOCABULARY)


def with_limits(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """Lets llguidance do less than it would."""
    real = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **_: real(verbose_errors=False, **limits))
    monkeypatch.setattr(compiler, "_known", {})


WIDENING = Grammar("lark", 'start: "x"' + 40 * ' "a"?' + ' "."')
"""One thing is possible at first, and then so much that a small bound is passed."""


def test_a_grammar_that_llguidance_gives_up_on_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with_limits(monkeypatch, max_items_in_row=30)
    engine = made().engine(3, shoal.sampling.acceptance.Coupled())
    hard = engine.submit(Request(PROMPT, 1, Sampling(grammar=WIDENING, seed=0), Limits(max_new_tokens=9)))[0]
    other = engine.submit(Request(PROMPT, 1, Sampling(seed=0), Limits(max_new_tokens=9)))[0]
    while engine.step():
        pass
    assert hard.finish_reason == "error"
    assert hard.tokens[len(PROMPT) :] == encode("x")
    assert "the grammar could not be followed any further: " in str(hard.error)
    assert "Current row has" in str(hard.error)
    alone = made().generate([PROMPT], seed=0, lookahead=3, max_new_tokens=9)[0].samples[0]
    assert tuple(other.tokens[3:]) == alone.token_ids


SLOW = Grammar("regex", "[a-d]{9}")


def passes_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """On the clock all masks take long; of the processor's time only those of `SLOW` take any, from its third token on."""
    used, clock, real = [0.0], itertools.count(), grammars.Track.at
    slow = compiler.grammars_of(TOKENIZER, VOCABULARY).constraint(SLOW)

    def at(self: grammars.Track, state: grammars.TextState) -> Any:
        if self._start in slow.starts and state.length >= 2:
            used[0] += seconds
        return real(self, state)

    monkeypatch.setattr(grammars.Track, "at", at)
    monkeypatch.setattr(grammars, "_clock", lambda: float(next(clock)))
    monkeypatch.setattr(grammars, "_processor_time", lambda: used[0])


def rows_decoded(grammars: Sequence[Grammar | None], k: int) -> list[Row]:
    engine = made().engine(k, shoal.sampling.acceptance.Coupled())
    rows = [
        engine.submit(Request(PROMPT, 1, Sampling(grammar=grammar, seed=i), Limits(max_new_tokens=9)))[0]
        for i, grammar in enumerate(grammars)
    ]
    while engine.step():
        pass
    return rows


@pytest.mark.parametrize("k", [0, 3])
def test_a_grammar_whose_masks_take_too_long_fails_its_row_alone(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    free = rows_decoded([SLOW, WORDS, None], k)
    passes_time(monkeypatch, 1.01 * grammars.MASK_SECONDS)
    slow, *others = rows_decoded([SLOW, WORDS, None], k)
    assert slow.finish_reason == "error"
    assert slow.tokens == free[0].tokens[: len(PROMPT) + 2]
    assert "a mask took more than 0.05 s of processor time; make the grammar smaller" in str(slow.error)
    assert [(row.tokens, row.finish_reason) for row in others] == [(row.tokens, row.finish_reason) for row in free[1:]]


@pytest.mark.parametrize("share", [0, 0.99])
def test_masks_that_only_wait_or_take_less_fail_nothing(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does something else is not the grammar's fault."""
    free = rows_decoded([SLOW, WORDS, SLOW], 3)
    passes_time(monkeypatch, share * grammars.MASK_SECONDS)
    rows = rows_decoded([SLOW, WORDS, SLOW], 3)
    assert [(row.tokens, row.finish_reason) for row in rows] == [(row.tokens, row.finish_reason) for row in free]


@pytest.mark.parametrize(
    "grammar",
    [Grammar("lark", "start: a\na: start"), Grammar("json_schema", {"$ref": "#"}), Grammar("regex", "[^\\x00-\\u{10ffff}]")],
)
def test_a_grammar_that_nothing_fits_is_refused(grammar: Grammar) -> None:
    with pytest.raises(RequestError, match=f"the {grammar.kind} grammar cannot be used: no text fits it"):
        made().generate([PROMPT], grammar=grammar)


CHAINS = {
    "rules": Grammar("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000)) + 'r6000: "ab"'),
    "references": Grammar("json_schema", {
        "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(2500)} | {"d2500": {"const": 12}},
        "$ref": "#/$defs/d0",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_a_long_chain_does_not_end_the_process(name: str) -> None:
    """On a stack of 8 MB these do."""
    made().generate([PROMPT], n=2, grammar=CHAINS[name], seed=0, lookahead=3)


def test_a_grammar_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_known", {})
    read: list[Grammar] = []
    real = compiler.Grammars._read
    monkeypatch.setattr(compiler.Grammars, "_read", lambda self, grammar: read.append(grammar) or real(self, grammar))
    engine, others = made(), [Grammar("regex", f"a{{{i}}}") for i in (1, 2)]
    texts = [
        engine.generate([PROMPT], grammar=asked, seed=0)[0].samples[0].text for asked in (*others, *others, WORDS, WORDS)
    ]
    assert texts[:4] == ["a", "aa", "a", "aa"]
    assert texts[4] == texts[5]
    assert read == [*others, WORDS]
    wrong = Grammar("regex", "(")
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot be used"):
            engine.generate([PROMPT], grammar=wrong)
