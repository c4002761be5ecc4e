"""The settings `compile` and `strict`: who computes the passes of a model, and in which shapes.

`compile` chooses the executors of a runner when a model is loaded.

With `strict=True` a token's logits have the same bits in every pass, on a CPU. Matrix libraries
choose their order of summation by the shape of the whole product, so a row's last bits depend on
the number of rows beside it. In 16 bit that turns ties between the two best tokens. Strict passes
give every kernel one shape only: attention by `shoal.models.attention.methods`, linear layers and
activations (whose loops end in scalar code, which rounds differently) in blocks of `BLOCK` tokens.
The other parts of a decoder, norms and embeddings, take one token at a time. `prove` shows on the
model itself that the bits agree, or refuses the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shoal.errors import RequestError, UnsupportedModel
from shoal.models.attention.fused import holds
from shoal.models.attention.methods import KV_BLOCK, method_named, resolved
from shoal.models.compiled import executor_for
from shoal.models.compiled.captures import CAPTURED
from shoal.models.executor import C_DECODER, TRITON_LAYERS
from shoal.models.layers import WeightOnly8Bit
from shoal.models.layers.triton_decoder import fused_layers_of
from shoal.models.lean import decoder_of, obstacle
from shoal.models.lean.forward import LeanPass, NativeKernels
from shoal.models.lean.whole import whole_pass
from shoal.models.quantize import Int8Linear, byte_matrix_of
from shoal.models.runner import Runner
from shoal.models.selfcheck import largest_error, tolerance
from shoal.models.weights import LINEARS
from shoal.models.weights.groups import GroupLinear, group_matrix_of
from shoal.native.build import SUFFIXES, missing, remark

log = logging.getLogger("shoal")

MOST_DIM = 1024
"""The largest number of features of a head that the kernel `heads` has room for."""
MODES = ("auto", "on", "off", "modules")


def choose_passes(runner: Runner, mode: str, *, owned: bool) -> None:
    """Chooses the executors of a model.

    On CUDA they are captured rounds, and Triton layers for models of the family. On a CPU they are
    kernels in C for attention, and lean passes for models of the family.

    Args:
        mode: "on" compiles or captures passes; "off" does neither; "auto" compiles or captures them
            if that is possible without waiting; "modules" is like "auto", and the model's own
            modules compute everything except attention.
        owned: True if shoal loaded the model, so that no other code has put hooks on its modules,
            or will.

    Raises:
        RequestError: the mode is unknown, or it is "on" and the kernels cannot be built.
    """
    if mode not in MODES:
        raise RequestError(f"compile must be 'auto', 'on', 'off' or 'modules', got {mode!r}")
    if not runner.has_modules:
        return
    if runner.device.type != "cpu":
        if not heads_fit(runner):
            use_padded_attention(runner)
        runner.capture_rounds(executor_for(mode, runner.device))
        if mode == "off":
            runner.absent |= dict.fromkeys((CAPTURED, TRITON_LAYERS), "compile='off'")
        elif not owned or mode == "modules":
            runner.absent[TRITON_LAYERS] = _not_wanted(owned)
        else:
            use_fused_layers(runner)
        return
    if mode == "on" and missing():
        raise RequestError(
            f"compile='on' needs kernels in C, and they could not be built here: {missing()}"
        )
    if mode != "off" and remark():
        runner.notes["kernels"] = remark()
    if mode == "off" or missing():
        use_padded_attention(runner)
        runner.absent[C_DECODER] = missing() or "compile='off'"
    elif not owned or mode == "modules":
        runner.absent[C_DECODER] = _not_wanted(owned)
    else:
        use_lean_passes(runner)


def heads_fit(runner: Runner) -> bool:
    """Returns False if the kernel of "auto" has no room for the heads of some layer on this card.

    The latents of a model, for example, are 576 numbers wide.
    """
    if resolved(runner.attention, runner.device, runner.dtype) != "fused":
        return True
    if not runner.cache.measured:
        runner.memory.token_bytes  # noqa: B018  # by a pass, which gives the cache its layers
    return all(holds(keys, values) for keys, values, *_ in runner.cache.stores())


def use_padded_attention(runner: Runner) -> None:
    """Attends by the padded call, unless the caller asked for a method by name."""
    if runner.attention == "auto" and runner.attention_path == "interface":
        runner.attention, runner.method = "pad", method_named("pad")


def _can_be_lean(runner: Runner) -> bool:
    """Returns True if a pass may leave the model's modules out.

    The modules are needed if the caller asked for bits that depend on them.
    """
    return runner.packs and runner.forward_context is nullcontext


def _not_wanted(owned: bool) -> str:
    """Returns the reason why only the modules compute."""
    return "compile='modules'" if owned else "the model was not loaded by shoal"


def use_fused_layers(runner: Runner) -> None:
    """Computes the passes of a model of the family by fused layers.

    The layers are not used if they diverge from the model's modules by more than rounding.
    """
    layers = fused_layers_of(runner.hf) if _can_be_lean(runner) else None
    if layers is None:
        runner.absent[TRITON_LAYERS] = _no_fused_layers(runner)
        return
    runner.bridge.layers = layers
    error = largest_error(runner)
    if runner.bridge.layers is not None and not _computes_the_model(runner, "fused layers", error):
        runner.bridge.layers = None
        runner.absent[TRITON_LAYERS] = f"they diverge from the modules by {error:.3g} nats"


def _no_fused_layers(runner: Runner) -> str:
    """Returns the reason why a model has no fused layers."""
    if not _can_be_lean(runner):
        return "strict=True, or the model takes padded blocks only"
    reason = obstacle(runner.hf, (WeightOnly8Bit,)) and obstacle(runner.hf)
    return (
        reason
        or f"the kernels do not run on {runner.device} in {runner.dtype}, or the model is too wide"
    )


def use_lean_passes(runner: Runner) -> None:
    """Computes the passes of a model of the family by lean passes.

    The lean passes are not used if they diverge from the model's modules by more than rounding.
    """
    decoder = None
    if runner.dtype in SUFFIXES and _can_be_lean(runner) and runner.attention in ("auto", "native"):
        decoder = (
            decoder_of(runner.hf)
            or decoder_of(runner.hf, (Int8Linear,), byte_matrix_of)
            or decoder_of(runner.hf, (GroupLinear, *LINEARS), group_matrix_of)
        )
    if decoder is None or decoder.dim > MOST_DIM:
        runner.absent[C_DECODER] = _no_decoder(runner)
        return
    kernels = NativeKernels(decoder)
    runner.lean = LeanPass(decoder, kernels, *whole_pass(decoder, kernels.angles))
    entry = runner.kept_checks.read(C_DECODER)
    error = largest_error(runner) if entry is None else float(entry["error"])
    if entry is None:
        runner.kept_checks.write(C_DECODER, {"error": error})
    if not _computes_the_model(runner, "lean passes", error):
        runner.lean = None
        runner.absent[C_DECODER] = f"it diverges from the modules by {error:.3g} nats"


def _no_decoder(runner: Runner) -> str:
    """Returns the reason why a model has no lean passes."""
    if runner.attention not in ("auto", "native"):
        return f"attention={runner.attention!r}"
    if runner.dtype not in SUFFIXES:
        return (
            f"it computes in {' or '.join(str(dtype).removeprefix('torch.') for dtype in SUFFIXES)}"
        )
    if runner.attention_path == "mask":
        return "the model attends by its own code"
    if not runner.packs:
        return "the model takes padded blocks only"
    if not _can_be_lean(runner):
        return "strict=True"
    return (
        obstacle(runner.hf, (GroupLinear, *LINEARS))
        or f"its heads have more than {MOST_DIM} features"
    )


def _computes_the_model(runner: Runner, executor: str, error: float) -> bool:
    """Logs an executor's distance from the modules; returns True if rounding explains it."""
    most = tolerance(runner)
    if error <= most:
        log.debug(
            "%s: %s diverge by %.2g nats from its modules, %g at most",
            runner.name,
            executor,
            error,
            most,
        )
        return True
    log.warning(
        "%s: its modules compute passes: %s diverge by %.3g nats from them, and %s allows %g",
        runner.name,
        executor,
        error,
        runner.dtype,
        most,
    )
    return False


BLOCK = 16
"""The number of tokens per product of a linear layer.

Fewer tokens waste time in 16 bit, more tokens in passes of few tokens.
"""
PROOF = (2, 9, 21)
"""The numbers of tokens of the three rows that `prove` decodes."""


def make_strict(runner: Runner, rowwise: Collection[type[nn.Module]]) -> Runner:
    """Switches the runner's passes to fixed shapes and proves that the bits agree.

    The runner's attention must be "strict" already.

    Args:
        rowwise: the types of layers that map [..., features] to [..., features] row by row.

    Raises:
        UnsupportedModel: other layers have matrices of their own, or see `prove`.
    """
    for module in runner.hf.modules():
        own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        if own and type(module) not in rowwise and not isinstance(module, nn.Embedding):
            raise UnsupportedModel(
                f"{runner.name} cannot be strict: {type(module).__name__} multiplies matrices in "
                "its own way, whose rounding may depend on the other rows"
            )
    layers = [module for module in runner.hf.modules() if type(module) in rowwise]
    runner.forward_context = lambda: _in_blocks(layers)
    prove(runner)
    return runner


@contextmanager
def _in_blocks(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Lets the layers compute in blocks within the context, then restores owners' `forward`."""
    owned = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        # Past nn.Module.__setattr__, which is slow.
        layer.__dict__["forward"] = _blocked(layer.forward)
    try:
        yield
    finally:
        for layer, before in zip(layers, owned, strict=True):
            if before is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = before


def _blocked(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wraps `forward` for [..., features] so that it gets [BLOCK, features], padded with zeros."""

    def blocked(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        blocks = pad(rows, (0, 0, 0, -len(rows) % BLOCK)).split(BLOCK)
        out = (
            torch.cat([forward(block) for block in blocks])
            if len(blocks) > 1
            else forward(blocks[0])
        )
        return out[: len(rows)].view(*x.shape[:-1], out.shape[-1])

    return blocked


@torch.inference_mode()
def prove(runner: Runner) -> None:
    """Decodes three rows one by one, token by token, then together in three variants.

    All logits must be equal to the last bit.

    Raises:
        UnsupportedModel: a variant changed the logits; the message names it.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, runner.context - 1) for length in PROOF]
    ids = [
        torch.randint(0, runner.vocab_size, (n,), generator=generator).to(runner.device)
        for n in lengths
    ]
    single = [_decode(runner, [row], [1])[0] for row in ids]
    variants = {
        "rows side by side": [1],
        "blocks of several tokens": [3, 1, 7, 2],
        "prompts as a whole": [max(lengths)],
    }
    for variant, steps in variants.items():
        for row, expected, logits in zip(
            ids, single, _decode(runner, ids, steps, neighbour=True), strict=False
        ):
            if not torch.equal(expected, logits):
                worst = float((expected - logits).abs().max())
                raise UnsupportedModel(
                    f"{runner.name} cannot be strict here: {variant} moved the logits of a row of "
                    f"{len(row)} tokens by up to {worst:.1e}; without strict, greedy ids are the "
                    "same in float32 all the same, save for near-ties"
                )
    runner.notes["strict"] = (
        f"{sum(lengths)} positions bit-equal in {len(variants) + 1} ways of computing them"
    )


def _decode(
    runner: Runner, ids: Sequence[Tensor], steps: Sequence[int], neighbour: bool = False
) -> list[Tensor]:
    """Computes the logits [length, vocab] of each row, fed in ragged blocks.

    The r-th block of row b has steps[(b + r) % len(steps)] tokens.

    Args:
        neighbour: True adds a row that needs one more block of keys. Its earlier keys are zeros,
            which no pass computed.
    """
    rows = (
        [*ids, torch.zeros(max(map(len, ids)), dtype=torch.int64, device=runner.device)]
        if neighbour
        else list(ids)
    )
    late = min(KV_BLOCK, runner.context - len(rows[-1]))
    runner.memory.reserve(len(rows), KV_BLOCK + max(map(len, rows)))
    cache = runner.cache
    cache.lengths = [0] * cache.slots
    if neighbour:
        cache.lengths[len(rows) - 1] = late
    at, logits = [0] * len(rows), [list[Tensor]() for _ in rows]
    turn = 0
    while active := [b for b, row in enumerate(rows) if at[b] < len(row)]:
        counts = [min(steps[(b + turn) % len(steps)], len(rows[b]) - at[b]) for b in active]
        parts = [rows[b][at[b] : at[b] + count] for b, count in zip(active, counts, strict=True)]
        out = runner.feed(active, torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), counts)
        for i, (b, count) in enumerate(zip(active, counts, strict=True)):
            logits[b].append(out[i, :count])
            at[b] += count
        turn += 1
    cache.lengths = [0] * cache.slots
    return [torch.cat(row) for row in logits]
