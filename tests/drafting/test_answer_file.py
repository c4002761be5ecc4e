"""Earlier answers on disk: what later engines find, who may share a file, how it stays small, and what is refused.

Tests of: drafting.answers, drafting.suffix, drafting.draft.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drafts import V, decoded, decoded_plainly, group, leave, proposed
from shoal.drafting import answers
from shoal.drafting.answers import AnswerFile, require_answers
from shoal.drafting.draft import read_draft
from shoal.drafting.suffix import SuffixDrafter
from shoal.errors import RequestError
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import tiny_tokenizer
from shoal.types.requests import Request


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "answers"
    require_answers(str(path), "some")
    return path


def drafter(file: Path, scope: str = "row", limit: int = 1 << 12, vocab_size: int = 100) -> SuffixDrafter:
    return SuffixDrafter(scope, limit=limit, answers=AnswerFile(str(file), limit, vocab_size))


def test_later_engines_find_what_earlier_ones_wrote(file: Path) -> None:
    first = drafter(file)
    one, cut, other = (group(Request((1, 2, 3), 1), text)[0] for text in ([4, 5, 6], [9, 9, 9], [4]))
    leave(first, one)  # also of a drafter that was never asked
    leave(first, cut, reason=None)
    assert proposed(first, other) == [[5, 6]]
    other.tokens += [7, 8]
    leave(first, other)
    assert proposed(drafter(file), *group(Request((1, 2, 3), 1), [4]), length=1) in ([[5]], [[7]])
    (late,) = group(Request((1, 2, 3), 1), [4, 7])
    assert proposed(drafter(file), late) == [[8]]
    assert proposed(drafter(file, vocab_size=8), late) == [[]]  # 8 is no token of that target
    assert proposed(SuffixDrafter("row"), late) == [[]]
    assert file.stat().st_mode & 0o777 == 0o600


def test_rows_of_others_are_not_seen_unless_asked_for(file: Path) -> None:
    leave(drafter(file), *group(Request((1, 2, 3), 1), [4, 5]))
    (row,) = group(Request((1, 2, 3), 1), [4])
    assert proposed(SuffixDrafter("group"), row) == [[]]
    assert proposed(drafter(file, "group"), row) == [[5]]


def test_what_a_crash_has_left_is_passed_over(file: Path) -> None:
    leave(drafter(file), *group(Request((1, 2, 3), 1), [4, 5]))
    with file.open("ab") as out:
        out.write(
            b'{"prompt":3,"tok\n\0\0\n{"prompt":9,"tokens":[1]}\n{"prompt":0,"tokens":["a"]}\n[]\n{"prompt":1,"tokens":[1,2'
        )
    assert AnswerFile(str(file), 100, 100).read() == [([1, 2, 3, 4, 5], 3)]


def test_the_file_is_bounded_and_keeps_the_last(file: Path) -> None:
    limit, largest = 256, 0
    for number in range(60):
        leave(drafter(file, limit=limit), *group(Request((number, 2, 3), 1), [number] * 17))
        largest = max(largest, file.stat().st_size)
    assert largest <= 8 * (limit + 8) + 100
    kept = AnswerFile(str(file), limit, 100).read()
    assert [text[0] for text, _ in kept] == list(range(60 - len(kept), 60))
    assert 2 <= len(kept) <= limit // 2 // 20
    assert json.loads(file.read_text(encoding="utf-8").splitlines()[0])["tokenizer"] == "some"


def test_a_file_that_grows_without_bound_is_noticed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TOKEN_DIGITS", 1 << 20)
    with pytest.raises(AssertionError):
        test_the_file_is_bounded_and_keeps_the_last(file)


def test_what_is_refused(file: Path, tmp_path: Path) -> None:
    require_answers(str(file), "some")
    require_answers(str(file), None)
    with pytest.raises(RequestError, match="holds answers of another tokenizer"):
        SuffixDrafter.require_files(tiny_tokenizer(), answers=str(file))
    for content in ("hello\n", "{}\n", "[]\n", '{"shoal": "index", "tokenizer": "some"}\n'):
        (tmp_path / "bad").write_text(content)
        with pytest.raises(RequestError, match="is no file of answers"):
            require_answers(str(tmp_path / "bad"), "some")
    with pytest.raises(RequestError, match="there is no such directory"):
        read_draft(f"suffix:answers={tmp_path}/none/answers")
    with pytest.raises(RequestError, match="cannot write answers"):
        require_answers(str(tmp_path), "some")


def test_a_disk_that_fails_costs_no_answer(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = drafter(file)
    os.unlink(file)
    leave(made, *group(Request((1, 2, 3), 2), [4, 5], [4, 5]))
    assert len([record for record in caplog.records if "no longer kept" in record.message]) == 1


def test_tokens_are_those_of_plain_decoding(file: Path) -> None:
    """Of engines one after the other: the second time most tokens are drafted."""
    for rule in (Coupled(), Rejection()):
        plain, expected = decoded_plainly(type(rule), 3, 0.7)
        accepted = []
        for _ in range(2):
            engine, found = decoded(drafter(file, "group", vocab_size=V), rule, 3, temperature=0.7)
            assert found == expected
            accepted.append(engine.stats.accepted)
        assert accepted[1] >= accepted[0] > 0
    assert accepted[1] > 0.3 * plain.stats.committed
