"""A small ragged decode that is compared with plain forwards, before the first real token.

A model that ignores shoal's attention, or uses its cache in another way, computes garbage in
silence. The check finds such models in a few milliseconds, future ones included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UnsupportedModel
from shoal.models.attention import AttentionInputs
from shoal.models.compiled.captures import require_device
from shoal.models.load_checks import BYTES, GROUPS, KEYS, LIMITS, divergences
from shoal.models.pretrained import INSTEAD, PROBLEMS, method_of
from shoal.models.quantize import rounds_features
from shoal.models.runner import Runner
from shoal.models.weights.groups import GroupLinear
from shoal.types.requests import Prefix

FEW = 4
"""The factor by which the tokens of one block may diverge more than all tokens do on average.

Now and then a token of a pretrained model diverges ten times as much in bfloat16 as others do.
"""

SELF_CHECK = "self-check"
"""The name of the check in `shoal.models.load_checks`."""
RESULTS = ("packs", "shares", "takes_trees", "context", "self_check_error")
"""The attributes of a runner that the check decides."""


def tolerance(runner: Runner) -> float:
    """Returns the largest divergence of passes from a plain forward that the dtype allows, in nats.

    llama.cpp, which rounds activations to bytes, has a larger tolerance, and so have layers of
    other libraries, weights in groups, and rounded keys.
    """
    if not runner.has_modules or rounds_features(runner.hf):
        return BYTES[runner.dtype]
    rounded = any(
        isinstance(each, GroupLinear) and not each.matrix.exact for each in runner.hf.modules()
    )
    least = max(GROUPS if rounded else 0.0, KEYS if runner.kv != "off" else 0.0)
    return max(LIMITS[runner.dtype], least)


@torch.inference_mode()
def self_check(runner: Runner) -> float:
    """Compares a ragged decode with plain forwards of the same tokens, before the first real token.

    The decode makes the steps of a real one: two rows of unequal lengths in swapped slots, a short
    block, a rollback of one row, another block. A model that is right only with padded blocks is
    not fed packed ones. A model that goes wrong with a shared prompt gets copies of it; one that
    goes wrong with a draft tree gets chains. A sliding window that the attention never receives
    bounds the context, as longer rows would see too much.

    The result is read instead if an earlier load has kept it (`shoal.models.load_checks`).

    Returns:
        The divergence (`shoal.models.load_checks`), which is also stored in `self_check_error`.

    Raises:
        UnsupportedModel: the divergence exceeds `tolerance`.
    """
    entry = runner.kept_checks.read(SELF_CHECK)
    if entry is not None:
        for name, value in entry.items():
            setattr(runner, name, value)
        runner.cache = runner.new_cache()
        return float(entry["self_check_error"])
    try:
        error = _self_check(runner)
    except PROBLEMS as problem:
        if isinstance(problem, torch.OutOfMemoryError) or "allocate" in str(problem):
            raise
        require_device(runner.device, problem)
        first = str(problem).partition("\n")[0].partition(". ")[0]
        first, method = f"{type(problem).__name__}: {first}", method_of(runner.hf.config)
        if method is not None:
            raise UnsupportedModel(
                f"{runner.name} was quantised by {method}, whose modules do not compute on "
                f"{runner.device} ({first}): {INSTEAD}"
            ) from problem
        kind = runner.hf.config.get_text_config().model_type
        raise UnsupportedModel(
            f"{runner.name} ({kind}) is not supported: its modules do not compute rows of unequal "
            f"lengths ({first})"
        ) from problem
    runner.kept_checks.write(SELF_CHECK, {name: getattr(runner, name) for name in RESULTS})
    return error


@contextmanager
def _noting_windows(runner: Runner) -> Iterator[set[int | None]]:
    """Collects the layers' sliding windows within the context; None is full attention."""
    method = runner.method
    windows: set[int | None] = set()

    def noting(inputs: AttentionInputs) -> Tensor:
        windows.add(inputs.window)
        return method(inputs)

    runner.method = noting
    try:
        yield windows
    finally:
        runner.method = method


def _self_check(runner: Runner) -> float:
    """Computes the comparison of `self_check`, and stores its results in the runner."""
    ids, plain = _reference(runner)
    with _noting_windows(runner) as windows:
        error = _largest(_guarded(_decode, runner, ids, plain)) if runner.packs else math.inf
        if not error <= tolerance(runner):
            runner.packs, runner.cache = False, runner.new_cache()
            error = _largest(_decode(runner, ids, plain))
    if runner.shares:
        sharing = _guarded(_sharing, runner, ids, plain)
        runner.shares = _largest(sharing) <= tolerance(runner)
    if runner.takes_trees:
        tree = _guarded(_tree, runner, ids, plain)
        runner.takes_trees = _largest(tree) <= tolerance(runner)
    declared = _declared_window(runner.hf.config.get_text_config())
    if runner.attention_path == "interface" and declared is not None and declared not in windows:
        runner.context = min(runner.context, declared)
    runner.self_check_error = error
    if not error <= tolerance(runner):
        raise UnsupportedModel(
            f"{runner.name}: ragged decoding diverges from a plain forward by {error:.3g} nats, "
            f"more than {runner.dtype} allows ({tolerance(runner):.3g}); this architecture cannot "
            "be used"
        )
    return error


@torch.inference_mode()
def largest_error(runner: Runner) -> float:
    """Returns the largest divergence from plain forwards over all kinds of passes of a runner.

    The kinds are ragged blocks, prompts without logits, a shared prompt, and a draft tree.
    """
    ids, plain = _reference(runner)
    checks = [
        _decode,
        _prompts,
        *([_sharing] if runner.shares else []),
        *([_tree] if runner.takes_trees else []),
    ]
    return _largest([block for check in checks for block in _guarded(check, runner, ids, plain)])


def _reference(runner: Runner) -> tuple[Tensor, Tensor]:
    """Makes two rows of tokens, [2, length] int64, and their logits [2, length, vocab].

    A plain forward computes the logits, or calls like those of Transformers' `generate`; where keys
    and values are rounded, the model's modules, over keys and values that they have rounded.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, runner.vocab_size, (2, min(12, runner.context)), generator=generator).to(
        runner.device
    )
    if runner.kv != "off":
        modules = runner.fork()
        modules.lean = None
        modules.memory.reserve(2, ids.shape[1])
        return ids, modules.feed([0, 1], ids, [ids.shape[1]] * 2)
    mixers = runner.mixers
    if mixers is None or not mixers.stepwise or mixers.own:  # such models return no cache
        return ids, runner.plain_logits(ids)
    rows = zip(ids[:, None], _firsts(ids), strict=True)
    return ids, torch.cat([runner.bridge.stepped_logits(row, first) for row, first in rows])


def _firsts(ids: Tensor) -> tuple[int, int]:
    """Returns the numbers of tokens that two rows begin with."""
    return max(1, ids.shape[1] - 5), max(1, ids.shape[1] - 8)


Check = Callable[[Runner, Tensor, Tensor], list[Tensor]]
"""A function of a runner, `ids` and `plain` that returns the divergences of each block's tokens."""


def _guarded(check: Check, runner: Runner, ids: Tensor, plain: Tensor) -> list[Tensor]:
    """Returns the divergences of an operation that a model can do without.

    They are infinite if the operation fails. The error is raised again if the device is lost.
    """
    try:
        return check(runner, ids, plain)
    except RuntimeError as error:
        require_device(runner.device, error)
        return [plain.new_full((1,), math.inf)]
    finally:
        runner.cache.clear()


def _largest(blocks: Sequence[Tensor]) -> float:
    """Returns the mean divergence of all tokens, or a block's mean divided by `FEW` if that is
    larger.

    The blocks count by themselves, too, so that the others do not hide a fault of one. The result
    is infinite if a divergence is NaN, which compares as neither larger nor smaller.
    """
    means = [float(torch.cat(list(blocks)).mean())]
    means += [float(block.mean()) / FEW for block in blocks]
    return max(means) if all(map(math.isfinite, means)) else math.inf


def _sharing(runner: Runner, ids: Tensor, plain: Tensor) -> list[Tensor]:
    """Returns the divergences of two rows with one stored prompt.

    The prompt is `ids` without the last two tokens of a row.
    """
    split = ids.shape[1] - 2
    if split < 1:
        return [plain.new_full((1,), math.inf)]
    prefix, tail = Prefix(1, split), ids[:1, split:].expand(2, -1)
    runner.memory.reserve(2, 4, prefix.base + split)
    runner.feed_prefix(prefix, 0, ids[:1, :split])
    for slot in range(2):
        runner.cache.enter(slot, prefix)
    logits = runner.feed([0, 1], tail, [2, 1])
    expected = plain[0, split:]
    return [divergences(logits[0], expected), divergences(logits[1, :1], expected[:1])]


def _prompts(runner: Runner, ids: Tensor, plain: Tensor) -> list[Tensor]:
    """Returns the divergences of the last two tokens of rows whose prompts were fed without logits.

    The prompts have unequal lengths, and one of them is fed in two pieces.
    """
    length = ids.shape[1]
    split = max(1, length - 8)
    if length < split + 3:
        return []  # a context too short for prompts
    runner.memory.reserve(2, length + 4)
    runner.feed([1], ids[:1, :split], [split], want_logits=False)
    rest = length - 2 - split
    block = torch.stack([ids[0, split : length - 2], ids[1, :rest]])
    runner.feed([1, 0], block, [rest, max(1, rest - 3)], want_logits=False)
    lengths = [runner.cache.lengths[slot] for slot in (0, 1)]
    last = torch.stack([ids[1 - slot, lengths[slot] : lengths[slot] + 2] for slot in (0, 1)])
    logits = runner.feed([0, 1], last, [2, 2])
    expected = torch.stack([plain[1 - slot, lengths[slot] : lengths[slot] + 2] for slot in (0, 1)])
    return [divergences(logits.flatten(0, 1), expected.flatten(0, 1))]


def _tree(runner: Runner, ids: Tensor, plain: Tensor) -> list[Tensor]:
    """Returns the divergences of a row's last three tokens as a draft tree.

    A token of another row is a sibling of the second token.
    """
    start = ids.shape[1] - 3
    if start < 1:
        return [plain.new_full((1,), math.inf)]
    runner.memory.reserve(1, start + 4)
    runner.feed([0], ids[:1, :start], [start])
    block = torch.cat([ids[0, start : start + 1], ids[1, :1], ids[0, start + 1 :]])
    logits = runner.feed([0], block[None], [4], parents=[[-1, -1, 1]])[0, [0, 2, 3]]
    return [divergences(logits, plain[0, start:])]


def _decode(runner: Runner, ids: Tensor, plain: Tensor) -> list[Tensor]:
    """Returns the divergences of the blocks of a ragged decode."""
    blocks = _ragged_decode(runner, ids)
    return [divergences(block, plain[row, span]) for row, span, block in blocks]


def _ragged_decode(runner: Runner, ids: Tensor) -> list[tuple[int, slice, Tensor]]:
    """Computes a small ragged decode of `ids` [2, length].

    Returns:
        (row, positions, logits [positions, vocab]) of each block's rows.
    """
    length = ids.shape[1]
    runner.memory.reserve(2, length + 4)
    runner.cache.clear()
    long, short = _firsts(ids)
    pairs: list[tuple[int, slice, Tensor]] = []

    def block(slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        rows = [1 - slot for slot in slots]  # row 0 lives in slot 1, row 1 in slot 0
        q = max(counts)
        tokens = torch.stack(
            [
                torch.nn.functional.pad(ids[r, s : s + c], (0, q - c))
                for r, s, c in zip(rows, starts, counts, strict=True)
            ]
        )
        logits = runner.feed(slots, tokens, counts)
        pairs.extend(
            (r, slice(s, s + c), logits[i, :c])
            for i, (r, s, c) in enumerate(zip(rows, starts, counts, strict=True))
        )

    block([1, 0], [0, 0], [long, short])
    for slot, prompt in enumerate((short, long)):
        runner.cache.rollback(slot, prompt)  # which is never taken back
    block([0, 1], [short, long], [2, 3])
    left = long + min(2, length - long - 2)
    runner.cache.rollback(1, left)
    block([0, 1], [short + 2, left], [1, 2])
    runner.cache.clear()
    return pairs


def _declared_window(config: Any) -> int | None:
    """Returns the sliding window that some layers of a model have by its config, or None."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    return window if kinds is None or "sliding_attention" in kinds else None
