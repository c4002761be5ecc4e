"""The report of the choices that were made when a pair was loaded.

It lists the choices that change the rounding of logits or the drafts, and so may change a seed's
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.models.attention.methods import resolved
from shoal.models.compiled.captures import CAPTURED
from shoal.models.executors.transformers_models import C_DECODER, C_LAYERS, TRITON_LAYERS
from shoal.models.runner import Runner


def load_report(
    target: Runner,
    draft: Runner | None,
    drafter: str | None = None,
    guides: Mapping[str, Runner | None] | None = None,
) -> dict[str, dict[str, str] | None]:
    """Returns the choices for each model, ready for JSON, without the name or path of a model.

    The value of "draft" is None without a drafter; there is no "guide" or "expert" without one.

    Args:
        target: the target.
        draft: the draft model; None = there is none.
        drafter: the name and the options of a drafter that is not a model.
        guides: the guide and the expert, by role; None = there is none.
    """
    chosen = ({} if drafter is None else {"drafter": drafter}) | (
        {} if draft is None else described(draft)
    )
    report = {"target": described(target), "draft": chosen or None}
    return report | {role: described(one) for role, one in (guides or {}).items() if one}


def described(runner: Runner) -> dict[str, str]:
    """Returns the choices for one model, by name.

    Returns:
        dtype: the number format.
        dtype_reason: the reason for the number format.
        device: the device of the model.
        weights: the order of the weights in memory (`shoal.models.weights`).
        quantize: the 8-bit format, or "off".
        attention: the method, with "auto" resolved.
        passes: the executor of passes of a few tokens (`shoal.models.executors`), and the reason
            why a faster one is not used.
        strict: the proof of strict passes, or "off".
    """
    notes, name = runner.notes, str(runner.dtype).removeprefix("torch.")
    reason = notes.get("dtype", "that of the model object").removeprefix(f"{name}: ")
    return {
        "dtype": name,
        "dtype_reason": reason,
        "device": str(runner.device),
        "weights": notes.get("weights", "as given"),
        "quantize": notes.get("quantize", "off"),
        "attention": _attention(runner),
        "passes": _passes(runner),
        "strict": notes.get("strict", "off"),
    }


def _passes(runner: Runner) -> str:
    layers = (
        TRITON_LAYERS
        if runner.bridge.layers is not None and not runner.ordinary_only
        else runner.executors[-1].name
    )
    reason = runner.capture_failure or runner.absent.get(CAPTURED)
    if reason is not None:
        return f"{layers} (no captured rounds: {reason})"
    if runner.captures is not None:
        return ", ".join([f"{CAPTURED} of {layers}", *runner.captures.failures])
    if runner.lean is None:
        return layers
    return C_DECODER if runner.lean.whole is not None else C_LAYERS


def _attention(runner: Runner) -> str:
    if runner.attention_path == "mask" or not runner.has_modules:
        return "the model's own"
    return resolved(runner.attention, runner.device, runner.dtype)


def one_line(report: dict[str, dict[str, str] | None]) -> str:
    """Returns a report as one line for the log."""
    return "loaded: " + "; ".join(f"{role} {_words(chosen)}" for role, chosen in report.items())


def _words(chosen: dict[str, str] | None) -> str:
    if chosen is None or "dtype" not in chosen:
        return "none" if chosen is None else chosen["drafter"]
    rest = (
        f"{name} {chosen[name]}"
        for name in ("weights", "quantize", "attention", "passes", "strict")
    )
    first = f"{chosen['drafter']}, " if "drafter" in chosen else ""
    return (
        f"{first}{chosen['dtype']} on {chosen['device']} ({chosen['dtype_reason']}), "
        f"{', '.join(rest)}"
    )
