"""Grammars: which tokens may follow, by llguidance (the extra `grammar`).

The mask of a position is a function of the row's new tokens before it. So it is part of the declared distribution like any other
control: the same for target, drafter and plain decoding, at every drafted position. A row's `Constraint` follows whatever history
it is asked about: it takes back what is not of it (drafts of before) and reads what is new.

JSON is followed twice: by its grammar, and by an expression that bounds the digits of its numbers, for which llguidance has no
option. What both allow is possible, and where that is nothing (a bound of the schema needs more digits) what the grammar allows.

The end of a text is one more symbol of llguidance's alphabet. Here it is an id that no model says, and it stands for all EOS ids
of a row: they are allowed exactly where the text is complete.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from shoal.config import Grammar
from shoal.constraints.json_schemas import numbers, prepared
from shoal.errors import RequestError
from shoal.types.requests import Row
from shoal.types.trees import Positions

_END = "<|end of a text|>"
STACK = 2**28
"""Bytes of stack to read grammars with. llguidance follows rules into rules, at some 3 KB each, and has no bound but the process's
end: on a usual stack a grammar of 20 KB is enough."""
KEPT = 32
"""Grammars that are remembered: the same few come again and again, and a large one takes a second to read."""
MASK_SECONDS = 0.05
"""Processor time that one mask of a row may take. Usual ones take some milliseconds at most, those of a very ambiguous grammar half
a second within llguidance's own limits, and the other rows of the batch wait for them."""
_clock, _processor_time = time.perf_counter, time.thread_time


class Grammars:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: a fast Transformers tokenizer. vocab_size: of the target; may be wider than the tokenizer, or narrower.

    Raises:
        RequestError: if llguidance is missing, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._library = _llguidance()
        try:
            backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            backend.no_padding()
            backend.no_truncation()
            backend.add_special_tokens([_END])
            self._end = int(backend.token_to_id(_END) or 0)
            width = max(vocab_size, self._end + 1)
            spelled = backend.to_str()
            self._alphabet = self._library.LLTokenizer(spelled, n_vocab=width, eos_token=self._end)
        except (AttributeError, ValueError) as error:
            raise RequestError(f"a grammar needs a fast tokenizer that llguidance can read: {error}") from error
        self.description = {"tokenizer": spelled, "width": width, "end": self._end}
        self._lock = threading.Lock()
        self._reading: OrderedDict[Grammar, Future[Constraint]] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[Grammar, Constraint] = weakref.WeakValueDictionary()

    def begin(self, grammar: Grammar) -> Constraint:
        """The constraint of a text that is still empty; any thread may ask.

        Raises:
            RequestError: for a schema, expression or grammar that is wrong, has something llguidance does not know, or is too
                much for it from the start.
        """
        return self.prototype(grammar).fork()

    def prototype(self, grammar: Grammar, **limits: int) -> Constraint:
        """What the grammar's constraints are forked from. It is read once, however many threads ask at a time, and not again for
        as long as anybody keeps it.

        Args:
            limits: of llguidance's work, now and in rounds, by the names of its `LLParserLimits`; it has its own for the others.

        Raises:
            RequestError: as `begin` does.
        """
        with self._lock:
            known = self.known(grammar)
            if known is not None:
                return known
            reading = self._reading.get(grammar) or _reader().submit(self._read, grammar, **limits)
            self._reading[grammar] = reading
            self._reading.move_to_end(grammar)
            if len(self._reading) > KEPT:
                self._reading.popitem(last=False)
        return reading.result()

    def known(self, grammar: Grammar) -> Constraint | None:
        """The same, if it has been read."""
        return self._alive.get(grammar)

    def written(self, grammar: Grammar) -> str:
        """The grammar as llguidance reads it."""
        matcher = self._library.LLMatcher
        if grammar.kind == "regex":
            return str(matcher.grammar_from_regex(grammar.text))
        if grammar.kind == "lark":
            return str(matcher.grammar_from_lark(grammar.text))
        schema, options = prepared(grammar.text or '{"type": "object"}', grammar.whitespace)
        return str(matcher.grammar_from_json_schema(schema, defaults=options or None))

    def _read(self, grammar: Grammar, **limits: int) -> Constraint:
        """The constraint of an empty text: its matchers are the grammar's, and for JSON that of its numbers."""
        starts = [self._started(grammar, self.written(grammar), **limits)]
        if grammar.kind not in ("regex", "lark"):
            starts.append(self._numbers.deep_copy())
        prototype = Constraint(starts, self._end, self._alphabet.vocab_size)
        self._alive[grammar] = prototype
        return prototype

    @cached_property
    def _numbers(self) -> Any:
        return self._started(Grammar("regex", numbers()), self._library.LLMatcher.grammar_from_regex(numbers()))

    def _started(self, grammar: Grammar, source: str, **limits: int) -> Any:
        """A matcher, tried on the first token."""
        bounds = self._library.LLParserLimits(verbose_errors=False, **limits)
        made = self._library.LLMatcher(self._alphabet, source, log_level=0, limits=bounds)
        if not made.is_error():
            made.compute_bitmask()
        if made.is_error():
            raise RequestError(f"the {grammar.kind} grammar cannot be used: {short(made.get_error())}")
        return made


@cache
def _reader() -> ThreadPoolExecutor:
    """A thread with a stack of `STACK` bytes."""
    usual = threading.stack_size(STACK)
    try:
        pool = ThreadPoolExecutor(1, "shoal-grammars")
        pool.submit(int).result()  # its thread begins with the first job
    finally:
        threading.stack_size(usual)
    return pool


_known: weakref.WeakKeyDictionary[Any, dict[int, Grammars]] = weakref.WeakKeyDictionary()


def grammars_of(tokenizer: Any, vocab_size: int) -> Grammars:
    """The `Grammars` of a tokenizer, made once, as that takes a second for a large vocabulary. Raises RequestError."""
    made = _known.setdefault(tokenizer, {})
    if vocab_size not in made:
        made[vocab_size] = Grammars(tokenizer, vocab_size)
    return made[vocab_size]


class Constraint:
    """Where one row is in its grammar.

    Attributes:
        end: the symbol for the end of the text. width: how many symbols there are.
        tracks: the grammar's, then those of what bounds it.
    """

    def __init__(self, starts: Sequence[Any], end: int, width: int) -> None:
        self.end, self.width = end, width
        self._starts = starts
        self.tracks = [Track(start) for start in starts]

    @property
    def error(self) -> str:
        """Why there is no mask, if llguidance gave up (it bounds the work it puts into one token) or took too long."""
        return self.tracks[0].error

    def fork(self) -> Constraint:
        """The same grammar before another text."""
        return Constraint(self._starts, self.end, self.width)

    def complete(self, row: Row) -> bool:
        """Whether the row's text is complete and nothing can follow."""
        bits = _bits([row], [()], 0, 1)
        symbols = _symbols(bits, self.width)
        return bool(symbols[..., self.end]) and int(symbols.sum()) == 1


class Track:
    """One matcher that follows a row.

    Attributes:
        error: why there is no mask where it was last asked for one, if llguidance gave up or took too long.
    """

    def __init__(self, start: Any) -> None:
        self.error = ""
        self._start, self._matcher = start, start.deep_copy()
        self._settled = 0
        self._ahead: list[int] = []

    def at(self, row: Row, drafted: Sequence[int]) -> Any:
        """The matcher just after the row's tokens and `drafted`; None where it does not allow them."""
        self.error = ""  # it may have been that of a draft which was rejected
        if self._matcher.is_error():  # it stays so
            self._matcher, self._settled, self._ahead = self._start.deep_copy(), 0, []
        committed = row.tokens[row.prompt_length + self._settled :]
        wanted = [*committed, *drafted]
        same = _common(self._ahead, wanted)
        if same < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - same)
        read = same + self._matcher.try_consume_tokens(wanted[same:])
        if self._matcher.is_error():
            self.error = _first_line(self._matcher.get_error())
        settled = min(read, len(committed))
        self._settled, self._ahead = self._settled + settled, wanted[settled:read]
        return self._matcher if read == len(wanted) else None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def allowed(positions: Positions, like: Tensor) -> Tensor | None:
    """The tokens that the rows' grammars leave possible; None if no row has one.

    Nothing is possible once a draft has left the grammar, nor at padding.

    Args:
        like: [rows, q, vocab], for shape and device.

    Returns:
        [rows, q, vocab] bool; all True for rows without a grammar.
    """
    rows, drafts, first = positions.rows, positions.drafts, positions.first
    held = [b for b, row in enumerate(rows) if row.constraint is not None]
    if not held:
        return None
    vocab, constraint = like.shape[-1], rows[held[0]].constraint
    bits = _bits([rows[b] for b in held], [drafts[b] for b in held], first, like.shape[1])
    symbols = _symbols(bits.to(like.device), constraint.width)
    ends = symbols[..., constraint.end].clone()
    symbols[..., constraint.end] = False
    is_eos = torch.zeros(len(held) * vocab, dtype=torch.bool)
    is_eos[[i * vocab + token for i, b in enumerate(held) for token in rows[b].eos if token < vocab]] = True
    own = torch.where(is_eos.view(len(held), 1, vocab).to(like.device), ends[..., None], symbols[..., :vocab])
    if len(held) == len(rows):
        return own
    every = torch.ones(like.shape, dtype=torch.bool, device=like.device)
    every[held] = own
    return every


def _symbols(bits: Tensor, width: int) -> Tensor:
    """[..., words] int32 -> [..., width] bool."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (bits[..., None] >> places & 1).flatten(-2)[..., :width].bool()


def _bits(rows: Sequence[Row], drafts: Sequence[Sequence[int]], first: int, q: int) -> Tensor:
    """Packed masks over the symbols, [rows, q, words] int32 on the CPU."""
    paths = [_before_eos(row, draft) for row, draft in zip(rows, drafts, strict=True)]
    masks = _followed(rows, [row.constraint.tracks[0] for row in rows], paths, first, q)
    bounded = [i for i, row in enumerate(rows) if len(row.constraint.tracks) > 1]
    if bounded:
        held, tracks = [rows[i] for i in bounded], [rows[i].constraint.tracks[1] for i in bounded]
        both = masks[bounded] & _followed(held, tracks, [paths[i] for i in bounded], first, q)
        masks[bounded] = np.where(both.any(axis=-1, keepdims=True), both, masks[bounded])
    return torch.from_numpy(masks)


def _followed(
    rows: Sequence[Row], tracks: Sequence[Track], paths: Sequence[list[int]], first: int, q: int
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """What the rows' tracks allow, [rows, q, words] packed; nothing once a path has left its track. Computed by as many threads as
    llguidance sees fit; if it takes too long, once more row by row, as only so it is known whose masks do."""
    started = _clock()
    bits = np.zeros((len(rows) * q, -(-rows[0].constraint.width // 32)), dtype=np.int32)
    asked: list[tuple[Any, int, list[int]]] = []  # matcher, first mask to fill, tokens that lead to the next ones
    for i, (row, track, path) in enumerate(zip(rows, tracks, paths, strict=True)):
        matcher = track.at(row, path[:first]) if len(path) >= first else None
        if matcher is not None:
            asked.append((matcher, i * q, path[first:][: q - 1]))
    filling = _filling()
    if single := [(matcher, at) for matcher, at, ahead in asked if not ahead]:
        filling.fill_next_token_bitmask_par(_executor(), single, bits)
    if several := [ask for ask in asked if ask[2]]:
        filling.fill_next_token_bitmask_par_with_draft_tokens(_executor(), several, bits)
    late = _clock() - started > MASK_SECONDS
    for matcher, at, _ in asked:
        if late or matcher.is_error():  # it then claims that the text may end
            _fill_slowly(rows[at // q], tracks[at // q], paths[at // q], first, bits[at : at + q])
    return bits.reshape(len(rows), q, -1)


def _before_eos(row: Row, draft: Sequence[int]) -> list[int]:
    end = next((j for j, token in enumerate(draft) if token in row.eos), len(draft))
    return list(draft[:end])


def _fill_slowly(
    row: Row, track: Track, draft: Sequence[int], first: int, bits: np.ndarray[Any, np.dtype[np.int32]]
) -> None:
    """Masks [q, words] one by one, up to the position where llguidance gives up or takes too long. What it keeps from before makes
    some quicker than they were: these will be the next time, too."""
    bits[:] = 0
    for j in range(min(len(bits), len(draft) - first + 1)):
        started = _processor_time()
        matcher = track.at(row, draft[: first + j])
        if matcher is None:
            return
        _filling().fill_next_token_bitmask(matcher, bits, j)
        if matcher.is_error():
            track.error = _first_line(matcher.get_error())
        elif _processor_time() - started > MASK_SECONDS:
            track.error = (
                f"a mask took more than {MASK_SECONDS} s of processor time; make the grammar smaller or less ambiguous"
            )
        if track.error:
            bits[j] = 0
            return


def _first_line(text: str) -> str:
    return short(text).partition("\n")[0]


def short(text: str) -> str:
    """An error of llguidance, which may quote all of a grammar."""
    text = text.strip().removesuffix("<non-verbose/>").strip()
    if text == "NoExtensionBias":
        return "no text fits it"
    return text if len(text) <= 500 else f"{text[:500]} ..."


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError("grammars need llguidance: pip install '.[grammar]'") from error
    return llguidance


def _filling() -> Any:
    """llguidance's functions that fill masks."""
    import llguidance.numpy

    return llguidance.numpy


@cache
def _executor() -> Any:
    """llguidance's threads."""
    return _llguidance().LLExecutor()
