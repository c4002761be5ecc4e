"""VocabTrim: a drafter's head of fewer tokens, and that the tokens are those of plain decoding.

Tests of: models.vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from enumeration import chain_rule, chi_square
from laws import ALPHA, table
from shoal.cli import run
from shoal.config import Limits, Sampling
from shoal.drafting.model import ModelDrafter
from shoal.engine.engine import Engine
from shoal.errors import ModelError, RequestError
from shoal.lookahead.controller import Fixed
from shoal.models import vocabulary
from shoal.models.vocabulary import TRIM_FILE, kept_of, most_used, proposable, save_trim, with_head_of
from shoal.sampling.acceptance import Rejection
from shoal.testing import save_pair, tiny_model, tiny_tokenizer
from shoal.testing.drafters import check_drafter
from shoal.testing.scripted import table_model
from shoal.types.requests import Request

KEPT = (*range(40, 130), 256)


def test_a_smaller_head_has_the_logits_of_its_tokens() -> None:
    whole = tiny_model("gpt2", layers=1)
    head = whole.get_output_embeddings()
    trimmed = with_head_of(whole, KEPT, "gpt2")
    ids = torch.tensor([[1, 2, 200, 41]])
    with torch.no_grad():
        torch.testing.assert_close(trimmed(ids).logits, whole(ids).logits[..., list(KEPT)])
    assert whole.get_output_embeddings() is head  # a model object is its owner's
    assert trimmed.transformer is whole.transformer


def test_the_tokens_used_most_are_kept() -> None:
    assert most_used({5: 3, 1: 9, 7: 3}, 3, 10, [8]) == (1, 5, 8)
    assert most_used({5: 3}, 4, 10, [8]) == (0, 1, 5, 8)


def test_tokens_are_those_of_plain_decoding(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path)
    save_trim(draft, KEPT, tiny_tokenizer())
    asked: dict[str, Any] = {"n": 3, "seed": 2, "max_new_tokens": 16}
    prompts = ["def f(x):", "naïve 🙂\n", "\xff"]  # ids that the head does not keep, too
    with shoal.load(target, draft) as pair, shoal.load(target) as alone:
        assert pair.draft_model is not None
        assert (pair.draft_model.vocab_size, pair.draft_model.known_ids) == (len(KEPT), 260)
        for temperature in (0.0, 0.8):
            found = pair.generate(prompts, lookahead=3, temperature=temperature, **asked)
            plain = alone.generate(prompts, temperature=temperature, **asked)
            assert [[s.token_ids for s in one.samples] for one in found] == [
                [s.token_ids for s in one.samples] for one in plain
            ]
            assert found.stats.drafted > 50
        assert found.stats.accepted > 0


@pytest.mark.slow(but=["True"])
@pytest.mark.parametrize("honest", [True, False])
def test_samples_have_the_law_of_the_target(honest: bool) -> None:
    """q is over the tokens that were kept; one that keeps the mass of the others is noticed."""
    p, q = table(5, 3, power=1.0), table(5, 8, power=1.0)
    kept = (0, 2, 3)
    draft = table_model(q[:, list(kept)] / q[:, list(kept)].sum(-1, keepdim=True))
    assert check_drafter(lambda: ModelDrafter(draft.fork(), 5, proposable(None, kept, 5).shared), 5) > 20
    drafter = ModelDrafter(draft.fork(), 5, proposable(None, kept, 5).shared)
    if not honest:
        propose = drafter.propose

        def wrong(inputs: Any) -> Any:
            tree = propose(inputs)
            object.__setattr__(tree, "q", [values * 0.6 for values in tree.q or ()])
            return tree

        drafter.propose = wrong  # type: ignore[method-assign]
    engine = Engine(table_model(p), drafter, Fixed(2), max_batch=500, rule=Rejection())
    rows = engine.submit(Request((0,), 2000, Sampling(temperature=1.0, seed=1), Limits(max_new_tokens=4)))
    while engine.step():
        pass
    counts = torch.zeros(5, 5, 5)
    for row in rows:
        counts[tuple(row.tokens[1:4])] += 1
    assert engine.stats.accepted > 400
    assert (chi_square(counts, chain_rule(p, 3)) > ALPHA) == honest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ('{"kept": [1]}', "cannot be read"),
        ('{"kept": [2, 1], "vocabulary": ""}', "no sorted list of token ids"),
        ('{"kept": [], "vocabulary": ""}', "no sorted list of token ids"),
        ('{"kept": [1, 2], "vocabulary": "another"}', "is of another tokenizer"),
    ],
)
def test_a_wrong_file_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / TRIM_FILE).write_text(content)
    with pytest.raises(ModelError, match=message):
        kept_of(tmp_path, tiny_tokenizer())


def test_tokens_that_the_head_does_not_have_are_refused() -> None:
    with pytest.raises(ModelError, match="keeps token 260, and its head has 260"):
        with_head_of(tiny_model("llama", layers=1), (1, 260), "drafter")
    with pytest.raises(RequestError, match="keeps no token that the target has"):
        proposable(None, (300, 301), 260)


def test_check_writes_which_tokens_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = save_pair(tmp_path)
    text = tmp_path / "text"
    text.write_text("a text, a text, and another text\n" * 20)
    given = f"--model {target} --draft {draft} -p def --max-new-tokens 4 -n 2 --repeats 1".split()
    command = ["check", *given, "--trim", "20", "--trim-text", str(text), "--json"]
    run(command)
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert found["trim"]["data"] == {"kept": 20, "of": 260, "share": 1.0, "counted": 660}
    kept = vocabulary.kept_of(draft, tiny_tokenizer())
    assert kept is not None
    assert {256, *tiny_tokenizer().encode("a text, and other")} <= set(kept)
    assert run(command) == 2
    assert "the drafter is trimmed already" in capsys.readouterr().err
