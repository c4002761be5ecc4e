"""`shoal index` and lookups in what it writes: the matches of a search, files that do not fit, memory, exactness.

Tests of: drafting.corpus, drafting.suffix, drafting.draft.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from drafts import V, decoded, decoded_plainly, group, proposed, row
from shoal.cli import index as index_command
from shoal.cli import run
from shoal.drafting import corpus as corpus_module
from shoal.drafting.corpus import DEPTH, END, LONGEST, Corpus, IndexWriter, fitting_index, open_index, sorted_places
from shoal.drafting.draft import read_draft
from shoal.drafting.protocol import Drafter
from shoal.drafting.suffix import SuffixDrafter, likeliest
from shoal.errors import RequestError
from shoal.sampling.acceptance import Coupled, Rejection
from shoal.testing import tiny_tokenizer
from shoal.testing.drafters import check_drafter
from shoal.types.requests import Request

CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"


def built(file: Path, texts: Sequence[Sequence[int]], part: int = 1 << 20, tokenizer: str = "some") -> str:
    with file.open("wb") as out:
        writer = IndexWriter(out, part)
        for text in texts:
            writer.add(text)
        writer.finish(tokenizer)
    return str(file)


def corpus_of(file: Path, texts: Sequence[Sequence[int]], part: int = 1 << 20) -> Corpus:
    return Corpus(open_index(built(file, texts, part)))


# ── the order, and what is found by it ──────────────────────────────────────────────────────────────────────────────


def test_places_are_in_the_order_of_the_tokens_that_follow() -> None:
    generator = np.random.default_rng(0)
    for size, vocabulary in ((1, 2), (300, 2), (400, 5), (200, 1)):
        tokens = np.append(generator.integers(0, vocabulary, size).astype(np.int32), np.int32(END))
        places = sorted_places(tokens).tolist()
        assert sorted(places) == [place for place, token in enumerate(tokens) if token != END]
        ends = [tokens[place : place + DEPTH].tolist() for place in places]
        assert ends == sorted(ends)


def searched(texts: Sequence[Sequence[int]], tokens: Sequence[int]) -> tuple[int, Counter[int]]:
    """The longest end of the tokens that some text goes on after, and what follows it."""
    for length in range(min(len(tokens), LONGEST), 0, -1):
        end = list(tokens[-length:])
        found = Counter(
            text[i + length] for text in texts for i in range(len(text) - length) if list(text[i : i + length]) == end
        )
        if found:
            return length, found
    return 0, Counter()


@pytest.mark.parametrize("part", [1, 50, 1 << 20])
def test_the_longest_match_and_its_counts_are_those_of_a_search(tmp_path: Path, part: int) -> None:
    generator = random.Random(part)
    texts = [[generator.randrange(3) for _ in range(generator.randrange(1, 40))] for _ in range(12)]
    texts += [[7, 8, 9] * 30, [5]]
    corpus = corpus_of(tmp_path / "x", texts, part)
    rows = [[generator.randrange(4) for _ in range(12)] for _ in range(40)]
    rows += [[*one[: len(one) // 2]] for one in texts] + [[7, 8, 9] * 20, [5], [1, 7], [99]]
    for tokens in rows:
        place = corpus.place(tokens)
        length, counts = searched(texts, tokens)
        assert (place.length, {token: count for count, token in place.counts()}) == (length, dict(counts))
        for token in counts:  # and of a token more
            longer = Counter(
                text[i + length + 1]
                for text in texts
                for i in range(len(text) - length - 1)
                if list(text[i : i + length + 1]) == [*tokens[len(tokens) - length :], token]
            )
            assert {token: count for count, token in place.after(token).counts()} == dict(longer)
    drafts = SuffixDrafter("row", corpus=corpus)
    (draft,) = proposed(drafts, row(1, 7, 8), length=40)
    assert draft == ([9, 7, 8] * 14)[: len(draft)]
    assert len(draft) > 20  # as long as the path is probable
    assert drafts.table_bytes < 5000  # the corpus is no part of it


def test_a_match_one_token_too_short_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = corpus_module._longest
    monkeypatch.setattr(corpus_module, "_longest", lambda stands, most: max(real(stands, most) - 1, 0))
    with pytest.raises((AssertionError, KeyError)):
        test_the_longest_match_and_its_counts_are_those_of_a_search(tmp_path, 50)


def test_work_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of a corpus of one token over and over, whatever its size."""
    reads: list[int] = []
    real = corpus_module.Interval._search

    def counted(self: corpus_module.Interval, depth: int, token: int) -> int:
        reads.append((self.last - self.first).bit_length())
        return real(self, depth, token)

    monkeypatch.setattr(corpus_module.Interval, "_search", counted)
    corpus = corpus_of(tmp_path / "x", [[1, 2] * 20000])
    place = corpus.place([1, 2] * 100)
    assert place.length == LONGEST
    assert sum(reads) < 12 * LONGEST * 2 * 17
    assert [token for _, token in place.counts()] == [1]
    assert place.counts()[0][0] == pytest.approx(20000, rel=0.01)
    assert len(list(likeliest(place, 1))) == 1


def test_rows_of_their_own_come_first_and_longer_matches_before(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "x", [[3, 1, 2, 8, 8], [5, 6, 9]])
    rows = group(Request((1, 2, 4, 1), 2), [2], [5, 6])
    assert proposed(SuffixDrafter("row", corpus=corpus), *rows, length=1) == [[4], [9]]
    rows[0].tokens[-3] = 3  # 3 1 2 stands in the corpus alone
    assert proposed(SuffixDrafter("row", corpus=corpus), rows[0], length=2) == [[8, 8]]
    tree = SuffixDrafter("row", nodes=3, corpus=corpus)
    tree.read(rows[:1])
    assert list(tree.guess(rows[0], 2).tokens) == [8, 8]


def test_building_takes_memory_by_the_part(tmp_path: Path) -> None:
    part, peak = 1 << 14, 0
    with (tmp_path / "x").open("wb") as out:
        tracemalloc.start()
        writer = IndexWriter(out, part)
        for _ in range(40):
            writer.add([*range(500), *range(1000, 4000)])
        writer.finish("some")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(open_index(str(tmp_path / "x")).parts) == 10
    assert peak < 80 * part < 80 * writer.tokens / 8


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    good = Path(built(tmp_path / "good", [[1, 2, 3], [1, 2, 4]], part=4))
    data = good.read_bytes()
    assert len(open_index(str(good)).parts) == 2

    def refused(content: bytes, message: str) -> None:
        file = tmp_path / "bad"
        file.write_bytes(content)
        with pytest.raises(RequestError, match=message):
            open_index(str(file))

    refused(b"", "is no index")
    refused(b"hello, world", "is no index")
    for cut in range(8, len(data)):
        refused(data[:cut], "is damaged or cut short")
    for at in range(8, len(data), 3):
        refused(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "is damaged or cut short")
    with pytest.raises(RequestError, match="cannot read index"):
        open_index(str(tmp_path / "none"))
    with pytest.raises(RequestError, match="there is no index"):
        read_draft(f"suffix:index={tmp_path}/none")


def test_an_index_of_another_tokenizer(
    tmp_path: Path, saved_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text(CODE * 3)
    file = tmp_path / "a.index"
    assert run(["index", str(tmp_path / "a.py"), "-o", str(file)]) == 0
    for draft in (f"suffix:index={file}", f"suffix:index={file}+{saved_pair[1]}"):
        with pytest.raises(RequestError, match="is one of another tokenizer: build it"):
            shoal.load(saved_pair[0], draft)
    with pytest.raises(RequestError, match=r"it has token .* and the target has 64 tokens"):  # no tokenizer at hand
        fitting_index(str(file), 64)
    draft, tokenizer = read_draft(f"suffix:index={file}"), tiny_tokenizer()
    assert draft is not None
    with pytest.raises(RequestError, match="is one of another tokenizer"):
        draft.require_files(tokenizer)
    monkeypatch.setattr("shoal.drafting.suffix.fingerprint", lambda _: open_index(str(file)).tokenizer)
    draft.require_files(tokenizer)  # a sabotage that the line above notices


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.py").write_text(CODE)
    (folder / "b.jsonl").write_text(f'{{"text": {json.dumps(CODE)}}}\n\n{{"prompt": "def f():"}}\n"x = 1"\n')
    (folder / "c.bin").write_bytes(b"\xff\xff")
    out = tmp_path / "i"
    assert run(["index", str(folder), "--output", str(out), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["files"], about["texts"], about["parts"]) == (2, 4, 1)
    assert about["bytes"] == out.stat().st_size > 8 * about["tokens"]
    index = open_index(str(out))
    assert (index.tokenizer, len(index.parts[0].places)) == (about["tokenizer"], about["tokens"])
    assert run(["index", str(folder / "b.jsonl"), "--output", str(out)]) == 0  # anew, and read anew
    assert len(open_index(str(out)).parts[0].places) < about["tokens"]
    options: dict[str, Any] = {"n": 2, "max_new_tokens": 8, "seed": 1}
    with shoal.load(draft=f"suffix:index={out}", dtype="float32") as pair:
        drafted, plain = (pair.generate(CODE[:14], lookahead=lookahead, **options) for lookahead in (4, "off"))
    assert [sample.token_ids for sample in drafted[0].samples] == [sample.token_ids for sample in plain[0].samples]
    assert drafted.stats.drafted > 0
    capsys.readouterr()
    arguments = ["generate", "-p", CODE[:14], "-n", "1", "--max-new-tokens", "2", "--json", "--draft"]
    assert run([*arguments, f"suffix:index={tmp_path / 'none'}"]) == 2
    assert "there is no index" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_answers_of_a_batch_are_texts(tmp_path: Path) -> None:
    """In shoal's form and in OpenAI's, of completions and of chats; errors and calls of tools have none."""
    spoken = [{"index": 0, "text": "x = 1\n"}, {"index": 1, "text": ""}, {"index": 2, "text": "y = 2\n"}]
    chat = [{"message": {"role": "assistant", "content": "z = 3\n"}}, {"message": {"content": None, "tool_calls": []}}]
    lines = [
        {"id": "a", "object": "text_completion", "choices": spoken},
        {"id": "b", "custom_id": "c", "response": {"status_code": 200, "body": {"choices": chat}}, "error": None},
        {"id": "d", "custom_id": "e", "response": None, "error": {"code": "invalid_url", "message": "no"}},
        {"id": "f", "error": {"message": "no"}},
    ]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [text for text, _ in index_command.texts_of(file)] == ["x = 1\n", "y = 2\n", "z = 3\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "there is no text in these files"),
        ("a.txt", b"abc\xff", "is not UTF-8 text"),
        (
            "a.jsonl",
            b'"fine"\n{"texts": 1}\n',
            r'a.jsonl:2 must be a text, an object with a text "text" or "prompt", or an answer of `shoal batch`',
        ),
        ("a.jsonl", b"{", "a.jsonl:1 is not JSON"),
        ("a.bin", b"x", None),
    ],
)
def test_what_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / name, tmp_path / "i"
    file.write_bytes(content)
    for given, expected in ((file, message), (tmp_path if message is None else tmp_path / "none", None)):
        if given == file and message is None:
            continue
        assert run(["index", str(given), "-o", str(out), "--json"]) == 2
        error = json.loads(capsys.readouterr().out)["error"]["message"]
        assert (expected or ("there is no file" if message else "no .py, .txt")) in error
    assert run(["index", str(file), "-o", str(file)]) == 2
    assert run(["index", str(file), "-o", str(tmp_path)]) == 2
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 100)

    def interrupted(file: object) -> object:
        yield "some text", 9
        raise KeyboardInterrupt

    monkeypatch.setattr(index_command, "texts_of", interrupted)
    assert run(["index", str(tmp_path / "a.txt"), "-o", str(tmp_path / "i")]) == 130
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]


def test_long_texts_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_command, "PIECE", 10)
    file = tmp_path / "a.txt"
    file.write_text("12345\n678\nab\n" + "x" * 25)
    found = list(index_command.texts_of(file))
    assert "".join(text for text, _ in found) == file.read_text()
    assert max(len(text) for text, _ in found) <= 10
    assert found[0] == ("12345\n678\n", 10)
    file.write_bytes(b"\xef\xbb\xbfab")  # a byte order mark, as editors on Windows begin a file
    assert list(index_command.texts_of(file)) == [("ab", 2)]


# ── exactness ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """What the target of `decoded` writes, and what it does not."""
    _, rows = decoded_plainly(Coupled, 3, 0.7)
    generator = random.Random(3)
    noise = [[generator.randrange(V) for _ in range(40)] for _ in range(3)]
    return corpus_of(tmp_path_factory.mktemp("corpus") / "x", [*rows, *noise], part=100)


@pytest.mark.parametrize("nodes", [0, 6], ids=["chains", "trees"])
def test_tokens_are_those_of_plain_decoding(learned: Corpus, nodes: int) -> None:
    def drafter() -> Drafter:
        return SuffixDrafter("row", nodes=nodes, corpus=learned)

    assert check_drafter(drafter, V) > 20
    for rule in (Coupled(), Rejection()):
        for temperature in (0.0, 0.7):
            _, expected = decoded_plainly(type(rule), 3, temperature)
            engine, found = decoded(drafter(), rule, 3, temperature=temperature)
            assert found == expected
            assert 0 < engine.stats.accepted < engine.stats.drafted
