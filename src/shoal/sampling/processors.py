"""Logits processors: the check that they are pure functions, and one that penalises repetition.

Processors must be pure functions of (ids, scores) because they are also called for drafts that are
rejected, in any order. A processor that remembers such calls would bend the distribution in
silence, so each one is tried before any row is computed.

RPG, repetition penalisation by grammar, is a processor in log space, after Dong et al., ACL 2025,
arXiv 2505.10402. Two kinds of repetition at the end of the tokens are found. A repetition of
tokens: the last L tokens are the L before them, n times over. A repetition of structure: the last k
lines have the token types of the k lines before them, n times over; all names are of one type and
so are all numbers, all strings and all comments. The token that would begin the next repetition
loses n |ln decay|, and if it opens a statement EOS gains n |ln ending|: probabilities are
multiplied by decay^n and ending^-n and renormalised. (The authors' code multiplies raw logits by
0.9^n, which raises the probability of a token whose logit is negative.)
"""

from __future__ import annotations

import copy
import keyword
import math
import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.constraints.token_bytes import token_bytes
from shoal.errors import RequestError

_STATEFUL = frozenset(
    {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}
)
"""The Transformers processors that are known to depend on their earlier calls.

The first holds a model, which should not be copied.
"""


def require_stateless(processors: Sequence[Any]) -> None:
    """Raises RequestError for Transformers' own processors that depend on their earlier calls."""
    for processor in processors:
        if name_of(processor) in _STATEFUL:
            raise _refusal(processor)


def require_pure(
    processors: Sequence[Any],
    prompt_ids: Sequence[int],
    eos: Collection[int],
    vocab: int,
    device: Any,
) -> None:
    """Raises RequestError for processors whose results depend on their earlier calls.

    Copies of the processors are called, in their order, on the prompt, on a continuation of it, and
    on the prompt again. A processor that cannot be copied is called itself. State that shows only
    later than in the third call is not found.

    Args:
        eos: the ids after which processors are not called.
        vocab: the size of the scores.
        device: the device of the ids and scores.

    Raises:
        RequestError: a processor, by its class's name, answered differently the second time,
            failed, or returned no scores.
    """
    if not processors:
        return
    require_stateless(processors)
    copies = [_copy(processor) for processor in processors]
    ids = torch.tensor([list(prompt_ids)], device=device)
    scores = torch.arange(vocab, device=device).mul(0.618034).remainder(1.0).mul(4.0)[None]
    first = _outputs(copies, ids, scores)
    _outputs(copies, _append_best(ids, first[-1], eos), scores.flip(-1))
    for processor, before, after in zip(
        processors, first, _outputs(copies, ids, scores), strict=True
    ):
        if not torch.equal(before.nan_to_num(), after.nan_to_num()):
            raise _refusal(processor)


def name_of(processor: Any) -> str:
    """Returns the name of a processor's class, or of the processor that it has as `wrapped`."""
    return type(getattr(processor, "wrapped", processor)).__name__


def _refusal(processor: Any) -> RequestError:
    return RequestError(
        f"processor {name_of(processor)} is not supported: it goes by its calls before, or by "
        "chance, and is also called for drafts that are rejected; make it a pure function of (ids, "
        "scores)"
    )


def _copy(processor: Any) -> Any:
    try:
        return copy.deepcopy(processor)
    except Exception:  # a lock, a generator or a handle in it may raise any error
        return processor


def _outputs(processors: Sequence[Any], ids: Tensor, scores: Tensor) -> list[Tensor]:
    """Calls the processors in their order, each on the output of the one before it.

    Returns:
        The output of each processor, float32 [1, vocab].
    """
    outputs: list[Tensor] = []
    for processor in processors:
        before = outputs[-1] if outputs else scores
        try:
            after = processor(ids.clone(), before.clone())
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"processor {name_of(processor)} failed on the prompt: {error!r:.200}"
            ) from error
        if not isinstance(after, Tensor) or after.shape != scores.shape:
            got = tuple(after.shape) if isinstance(after, Tensor) else type(after).__name__
            shape = tuple(scores.shape)
            raise RequestError(
                f"processor {name_of(processor)} must return scores of shape {shape}, got {got}"
            )
        outputs.append(after.float().clone())
    return outputs


def _append_best(ids: Tensor, scores: Tensor, eos: Collection[int]) -> Tensor:
    """Returns the ids and the best token that may follow, the ids alone if only an EOS may."""
    best_scores = scores[0].clone()
    best_scores[[token for token in eos if token < len(best_scores)]] = -torch.inf
    if not bool(best_scores.amax().isfinite()):
        return ids
    return torch.cat([ids, best_scores.argmax().view(1, 1)], dim=1)


WINDOW = 1024
"""The number of tokens at the end of the ids in which repetitions are looked for."""
_LEXEMES = re.compile(
    rb"""(?P<comment>\#.*|//.*)
    |(?P<string>[A-Za-z]{0,2}(?:\"{3}.*?(?:\"{3}|$)|'{3}.*?(?:'{3}|$)
        |"(?:\\.|[^"\\])*(?:"|$)|'(?:\\.|[^'\\])*(?:'|$)))
    |(?P<number>\.?[0-9](?:[eE][+-]|[\w.])*)
    |(?P<word>[\w\x80-\xff]+)
    |(?P<sign>\S)""",
    re.VERBOSE,
)
_KEYWORDS = frozenset(word.encode() for word in [*keyword.kwlist, "print"])
OPENERS = frozenset(
    word.encode()
    for word in (
        "assert",
        "class",
        "def",
        "elif",
        "else",
        "except",
        "for",
        "from",
        "if",
        "import",
        "print",
        "return",
        "try",
        "while",
        "with",
        "#",
        "@",
    )
)
"""The first lexemes of lines before which a program may as well end."""


class Repetition(NamedTuple):
    """A repetition that the next token may continue.

    Attributes:
        token: the token that would begin the next repetition.
        times: the number of repetitions so far, >= 1.
        opens: True if the token opens a statement.
    """

    token: int
    times: int
    opens: bool


class GrammarRepetitionPenalty:
    """A logits processor, pure in (ids, scores), for `Sampling.processors`.

    The prompt counts as text before, so repetitions at its end are penalised as well. Python's
    keywords are told apart; keywords of other languages count as names.

    Args:
        eos: the ids that end a text; None for the tokenizer's.
        decay: the factor of a repetition's probability, in (0, 1]; 1 is no penalty. The paper has
            0.9, which stops half of the loops of the bundled target; 0.7 stops all of them
            (`benchmarks/repetition.py`).
        ending: the factor that EOS's probability is divided by, in (0, 1]; 1 leaves EOS as it is.
            The paper has 0.8.

    Raises:
        RequestError: decay or ending is outside of (0, 1].
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos: Sequence[int] | None = None,
        decay: float = 0.7,
        ending: float = 0.8,
    ) -> None:
        for name, value in (("decay", decay), ("ending", ending)):
            if not 0 < value <= 1:
                raise RequestError(
                    f"{name} of a repetition penalty must be in (0, 1], got {value!r}"
                )
        own = getattr(tokenizer, "eos_token_id", None)
        self._eos = list(eos) if eos is not None else [] if own is None else [own]
        self._spelled = token_bytes(tokenizer)
        self._penalty, self._ending = -math.log(decay), -math.log(ending)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Computes the scores [1, vocab] after ids, int64 [1, length]."""
        repetitions_now, changed = self.repetitions(ids[0, -WINDOW:].tolist()), scores.clone()
        for token in {each.token for each in repetitions_now if each.token < scores.shape[-1]}:
            changed[0, token] -= self._penalty * max(
                each.times for each in repetitions_now if each.token == token
            )
        for each in repetitions_now:
            if each.opens:
                changed[0, self._eos] += self._ending * each.times
        return changed

    def __deepcopy__(self, _: Any) -> GrammarRepetitionPenalty:
        return self  # its fields never change

    def repetitions(self, tokens: Sequence[int]) -> list[Repetition]:
        """Returns the repetitions of tokens and of structure at the end, at most one each."""
        repetitions = []
        length, times = repeated(tokens)
        if times:
            repetitions.append(Repetition(tokens[-length], times, False))
        structure = self._structure(tokens)
        return repetitions if structure is None else [*repetitions, structure]

    def _structure(self, tokens: Sequence[int]) -> Repetition | None:
        """Returns the repetition of lines at the end of the tokens, blanks of a next line aside."""
        at_start = next(
            (b"\n" in text for text in map(self._text, reversed(tokens)) if text.strip(b" \t\r")),
            False,
        )
        if not at_start:
            return None
        pieces = [self._text(token) for token in tokens]
        whole, _, rest = b"".join(pieces).rpartition(b"\n")
        if rest.strip():
            return None
        lines = [line for line in _lines(whole) if line.types]
        length, times = repeated([line.types for line in lines])
        if not times:
            return None
        first = lines[-length]
        place = bisect_right(list(accumulate(map(len, pieces))), first.start)
        return Repetition(tokens[place], times, first.types[0] in OPENERS)

    def _text(self, token: int) -> bytes:
        return (self._spelled[token] if token < len(self._spelled) else None) or b""


class Line(NamedTuple):
    """A line of a text.

    Attributes:
        start: the offset of the first byte that is not a blank.
        types: see `types_of`; empty for a blank line.
    """

    start: int
    types: tuple[bytes, ...]


def _lines(text: bytes) -> list[Line]:
    lines, at = [], 0
    for line in text.split(b"\n"):
        lines.append(Line(at + len(line) - len(line.lstrip()), types_of(line)))
        at += len(line) + 1
    return lines


@lru_cache(maxsize=1 << 14)
def types_of(line: bytes) -> tuple[bytes, ...]:
    """Returns the token types of one line; strings and comments are told by their line alone.

    Keywords and signs stand for themselves. The other types are "name", "number", "string" and, for
    a comment, "#".
    """
    types = []
    for match in _LEXEMES.finditer(line):
        kind, lexeme = str(match.lastgroup), match[0]
        if kind == "comment":
            types.append(b"#")
        elif kind == "word":
            types.append(lexeme if lexeme in _KEYWORDS else b"name")
        else:
            types.append(lexeme if kind == "sign" else kind.encode())
    return tuple(types)


def repeated(items: Sequence[Any]) -> tuple[int, int]:
    """Returns the shortest L for which the last L items are the L before them.

    Also returns the number of times that these are repeated; (0, 0) if there is no such L.
    """
    back = list(items[::-1])
    length = 0
    while True:
        try:
            length = back.index(back[0], length + 1, len(back) // 2 + 1)
        except (ValueError, IndexError):
            return 0, 0
        if back[:length] == back[length : 2 * length]:
            times = 1
            while back[:length] == back[(times + 1) * length : (times + 2) * length]:
                times += 1
            return length, times
