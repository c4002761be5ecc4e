"""Pairs of models whose vocabularies differ."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from enumeration import chain_rule, chi_square
from laws import table
from shoal.config import Limits, Sampling
from shoal.drafting.other_vocabulary import MethodChoice, MethodTally, OtherVocabularyDrafter
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed, by_name
from shoal.lookahead.costs import PairCosts
from shoal.models.runner import Runner
from shoal.models.spelling import Spelling
from shoal.models.vocabulary import Vocabularies, vocabularies
from shoal.sampling.acceptance import Rule
from shoal.testing import tiny_tokenizer
from shoal.testing.scripted import table_model
from shoal.types.requests import Request, Row

TEXTS = [
    "def add(first, second):\n    return first + second\n\n\n",
    "the drafter writes the text, the target reads the text again\n",
    "Größe ≤ 10 → 你好世界, naïve café 🙂🙃\n",
    "  \t  spaces   and\n\n\n lines  \n",
    "while 2 ** 10 > x: x = x - 1; print('x', \"y\")",
]


@cache
def byte_level() -> Any:
    """Byte-level BPE with merges, as GPT-2's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 4, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|user|>"])
    )
    made.add_tokens([AddedToken("        ", special=False)])  # a run of spaces, as tokenizers for code have
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", clean_up_tokenization_spaces=False)


@cache
def sentence_piece() -> Any:
    """BPE over "▁" with byte fallback, as Llama 2's: a space before each text, no other split, a token before it."""
    names = ["<unk>", "<s>", "</s>", "<|user|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    before = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.normalizer = before
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁\\s]*|\\s+"), "isolated")
    trained.train_from_iterator(
        [TEXTS[0], TEXTS[1], TEXTS[4]] * 4, trainers.BpeTrainer(vocab_size=360, special_tokens=names)
    )
    kept = {
        piece: i for piece, i in trained.get_vocab().items() if "\n" not in piece
    }  # as in Llama 2, a line feed is a byte
    order = {piece: new for new, piece in enumerate(sorted(kept, key=lambda piece: kept[piece]))}
    import json

    merges = json.loads(trained.to_str())["model"]["merges"]
    pairs = [tuple(pair) for pair in merges if all(part in order for part in (*pair, "".join(pair)))]
    made = Tokenizer(models.BPE(vocab=order, merges=pairs, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = before
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>", "<|user|>"])
    from tokenizers.processors import TemplateProcessing

    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", order["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level, "SentencePiece": sentence_piece, "bytes": cache(tiny_tokenizer)
}  # fmt: skip


@cache
def spelling(name: str) -> Spelling:
    return Spelling.of(TOKENIZERS[name](), name)


@cache
def both(target: str, draft: str) -> Vocabularies:
    sizes = (len(TOKENIZERS[name]()) for name in (target, draft))
    return vocabularies(spelling(target), spelling(draft), *sizes)


def drafter_of(
    draft: Runner, vocab_size: int, found: Vocabularies, *methods: str, cost: float = 0.1
) -> OtherVocabularyDrafter:
    choice = MethodChoice.of(found, cost)
    choice.methods = {method: MethodTally() for method in methods} if methods else choice.methods
    return OtherVocabularyDrafter(draft.fork(), vocab_size, found, choice)


def finish(engine: Engine, requests: Sequence[Request]) -> list[Row]:
    rows = [row for request in requests for row in engine.submit(request)]
    while engine.step():
        pass
    return rows


def finished(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    return [row.tokens for row in finish(engine, requests)]


def prompts(name: str, count: int) -> list[tuple[int, ...]]:
    """Pieces of the texts, cut anywhere: within words, runs of spaces and characters."""
    generator, found = random.Random(1), []
    whole = "".join(TEXTS).encode()
    for _ in range(count):
        start = generator.randrange(len(whole) - 12)
        found.append(tuple(spelling(name).ids(whole[start : start + generator.randrange(1, 12)])))
    return found


STORY = "the drafter writes the text, naïve café 🙂 reads the text again, 你好世界, the target writes\n"


def common_start(draft: str, ids: Sequence[int], own: Sequence[int]) -> int:
    """The least prompt of a text's tokens that the drafter splits as it does the whole text."""

    def begun(count: int) -> list[int]:
        text = spelling("byte-level").spelled(ids[:count])
        return [*spelling(draft).begin, *spelling(draft).ids(text, first=True)]

    return next(count for count in range(1, len(ids)) if own[: len(begun(count))] == begun(count))


def watched(drafter: OtherVocabularyDrafter) -> Iterator[tuple[Row, Tensor, Tensor]]:
    """Of every row in the drafter's cache: the keys of its tokens there as they are and as a new pass computes them."""
    drafting = drafter.runner
    for row in drafter.contexts.rows:
        own = drafter.read_as(row)
        if not drafter._slots.with_slots([own]):
            continue
        slot = drafter._slots.of(own)
        held = drafting.cache.lengths[slot]
        tokens = own.tokens[:held]
        if not tokens:
            continue
        assert held < len(own.tokens)
        fresh = drafting.fork()
        fresh.memory.reserve(1, held)
        fresh.feed([0], torch.tensor([tokens]), [held])
        keys, again = (one.stores()[-1][0][at, :held] for one, at in ((drafting.cache, slot), (fresh.cache, 0)))
        yield row, keys, again


VOCAB = ("a", "b", "ab", "c", "ba")
OTHERS = ("c", "bb", "ab", "d", "a", "b")


def letters(target: Sequence[str], draft: Sequence[str]) -> Vocabularies:
    """Vocabularies of a few words; a text is split by the longest."""

    def made(words: Sequence[str]) -> Spelling:
        pieces = {i: word.encode() for i, word in enumerate(words)}
        one = Spelling(pieces, lambda text: one._by_longest(text.encode()))
        return one

    return vocabularies(made(target), made(draft), len(target), len(draft))


P, Q = table(len(VOCAB), 3, power=1.0), table(len(OTHERS), 8, power=1.0)


def counted(
    rule: Rule, *methods: str, lookahead: Any = 2, samples: int = 1500, change: Any = None, says: Tensor = Q,
    words: Sequence[str] = OTHERS,
) -> tuple[float, Engine]:  # fmt: skip
    """p-value of the joint law of three tokens through the engine. says: the table of the drafter, which has these words."""
    target, draft = table_model(P), table_model(says)
    drafter = drafter_of(draft, len(VOCAB), letters(VOCAB, words), *methods)
    if change is not None:
        propose = drafter.propose
        drafter.propose = lambda inputs: change(propose(inputs))  # type: ignore[method-assign]
    controller = Fixed(lookahead) if isinstance(lookahead, int) else by_name(lookahead, PairCosts())
    engine = Engine(target, drafter, controller, max_batch=500, rule=rule)
    request = Request((0,), samples, Sampling(temperature=1.0, seed=1), Limits(max_new_tokens=4))
    counts = torch.zeros([len(VOCAB)] * 3)
    for row in finish(engine, [request]):
        counts[tuple(row.tokens[1:4])] += 1
    return chi_square(counts, chain_rule(P, 3)), engine
