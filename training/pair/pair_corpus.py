"""The text that the pair is trained on: generated problems and the standard library."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from pair_tokenizer import END, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX
from problems.generator import FunctionProblem, generate
from shoal.train.own_samples import Tokens, stdlib_pieces

FIM_SHARE = 0.1


@dataclass(frozen=True)
class CorpusSize:
    """The size of the corpus."""

    problems: int = 36_000
    stdlib_characters: int = 4_300_000
    held_out_problems: int = 1000  # half of them of held-out templates
    held_out_characters: int = 250_000


@dataclass(frozen=True)
class Corpus:
    """The documents of a corpus, shuffled, without the end-of-text token."""

    train: list[str]
    problems: list[str]
    stdlib: list[str]


def problem_documents(problems: Sequence[FunctionProblem], rng: random.Random) -> Iterator[str]:
    """Yields problems as documents: most with tests, some without, some two by two."""
    remaining = list(problems)
    while remaining:
        problem = remaining.pop()
        shape = rng.random()
        if shape < 0.7 or not remaining:
            yield problem.document
        elif shape < 0.85:
            yield problem.function
        else:
            yield problem.function + "\n\n" + remaining.pop().document


def fill_in_middle(document: str, rng: random.Random) -> str:
    """Moves a middle part of a document to its end, behind the fill-in-the-middle tokens."""
    start, stop = sorted(rng.sample(range(len(document) + 1), 2))
    prefix, middle, suffix = document[:start], document[start:stop], document[stop:]
    return FIM_PREFIX + prefix + FIM_SUFFIX + suffix + FIM_MIDDLE + middle


def build_corpus(size: CorpusSize, seed: int) -> Corpus:
    """Builds a corpus; it is determined by seed, size and Python version."""
    rng = random.Random(seed)
    train = list(problem_documents(generate(seed, size.problems, "train"), rng))
    train += stdlib_pieces(False, size.stdlib_characters, seed)
    train = [fill_in_middle(document, rng) if rng.random() < FIM_SHARE else document for document in train]
    rng.shuffle(train)
    held_out = generate(seed, size.held_out_problems // 2, "templates")
    held_out += generate(seed, size.held_out_problems // 2, "constants")
    rng.shuffle(held_out)
    return Corpus(
        train=train,
        problems=[problem.document for problem in held_out],
        stdlib=list(stdlib_pieces(True, size.held_out_characters, seed)),
    )


def pack(documents: Sequence[str], tokenizer: Tokenizer) -> Tokens:
    """Joins all documents in one row of token ids, each closed by the end-of-text token."""
    end = tokenizer.token_to_id(END)
    rows = tokenizer.encode_batch_fast(list(documents))
    return np.concatenate([np.array([*row.ids, end], dtype=np.uint16) for row in rows])
