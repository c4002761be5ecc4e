"""A copy of a target with its linear layers in 4 bits, which drafts for it.

Weights are rounded in groups (`shoal.models.weights.groups`); all other tensors are the target's.
For a target that llama.cpp computes, llama.cpp makes and computes the copy. The copy proposes a
little less well than the target would, and a draft costs a fraction of the target's pass: a pass
of few tokens reads little but weights.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.errors import UnsupportedModel
from shoal.models.executor import C_DECODER
from shoal.models.gguf import LEAST_BITS, no_smaller_copy
from shoal.models.gguf.gguf_runner import GgufRunner
from shoal.models.load_report import LOG
from shoal.models.loading import wrap
from shoal.models.passes import use_lean_passes
from shoal.models.quantize import Int8Linear, with_layers
from shoal.models.runner import Runner
from shoal.models.structure import Belongings
from shoal.models.weights import LINEARS
from shoal.models.weights.groups import GROUP, GroupLinear, Groups
from shoal.models.weights.layers import plain
from shoal.models.weights.parameter import Version, writes
from shoal.native.build import missing

_copies: Belongings[tuple[Version, Runner]] = Belongings("4-bit copies")
"""The version of the weights that were rounded, and the copy."""


def four_bit_copy(target: Runner) -> Runner:
    """Returns a runner of the copy with a cache of its own.

    The weights are rounded once, and again where the target's were written since. A target that got
    adapters, hooks or other tensors keeps its last copy.

    Raises:
        ModelError: llama.cpp cannot write a copy.
        UnsupportedModel: neither the kernels in C nor llama.cpp compute the target, or its weights
            are as small already.
    """
    copies = _copies.of(target.hf)
    version, copy = writes(target.hf), copies.get("copy")
    changed = target.lean is not None and target.lean.decoder.stale
    if copy is None or (copy[0] != version and not changed):
        copy = copies["copy"] = version, _make_copy(target)
    return copy[1].fork()


def _make_copy(target: Runner) -> Runner:
    if isinstance(target, GgufRunner):
        return target.in_4_bits()
    reason = target.absent.get(C_DECODER)
    if target.device.type != "cpu" or missing():
        reason = missing() or f"the kernels for it compute on a CPU, and {target.device} is none"
    if reason is None and target.lean is None:
        reason = "the kernels in C do not compute its passes"
    if reason is not None:
        raise UnsupportedModel(f"{target.name} has no copy in 4 bits: {reason}")
    bits = _bits(target.hf)
    if bits < LEAST_BITS:
        raise UnsupportedModel(no_smaller_copy(target.name, bits))
    LOG.info("rounding a copy of %s to 4 bits", target.name)
    runner = wrap(_rounded(target.hf, target.name), f"{target.name} in 4 bits", checked=False)
    use_lean_passes(runner)
    if runner.lean is None:
        raise UnsupportedModel(
            f"{target.name} has no copy in 4 bits: {runner.absent.get(C_DECODER)}"
        )
    return runner


def _bits(hf: Any) -> float:
    """Returns the bits that a weight of a linear layer takes, scales and minima included."""
    bits = weights = 0.0
    for layer in hf.modules():
        if isinstance(layer, GroupLinear):
            outputs, inputs = layer.matrix.shape
            of_weight = 8 * layer.matrix.panels.nbytes / (outputs * inputs)
        elif isinstance(layer, (*LINEARS, Int8Linear)):
            of_weight = 8 * plain(layer.weight).itemsize
        else:
            continue
        size = layer.in_features * layer.out_features
        bits, weights = bits + of_weight * size, weights + size
    return bits / weights


def _rounded(hf: Any, name: str) -> Any:
    """Makes the copy of a Transformers model."""

    def rounded(layer: Any) -> GroupLinear:
        if layer.in_features % GROUP:
            raise UnsupportedModel(
                f"{name} has no copy in 4 bits: a layer has {layer.in_features} inputs, no "
                f"multiple of {GROUP}"
            )
        return GroupLinear(Groups.in_4_bits(_dense(layer)), layer.bias)

    return with_layers(hf, rounded, (*LINEARS, Int8Linear, GroupLinear))


def _dense(layer: Any) -> Tensor:
    """Returns the weights [out, in] of a linear layer, in a floating-point format."""
    if isinstance(layer, GroupLinear):
        return layer.matrix.dense()[layer.start : layer.start + layer.out_features]
    weight = plain(layer.weight)
    return weight * layer.scales[:, None] if isinstance(layer, Int8Linear) else weight
