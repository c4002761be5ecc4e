"""What tests/models/test_tensor_parallel.py has one process do, and several, each of which calls `main`.

The first process writes what it generated to DIRECTORY/rank0.json; the others write, when it is done, what they were told.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from pretend import INDEXING, READS, SIZES, InCapture
from shoal.config import Limits, Sampling
from shoal.engine.engine import Engine
from shoal.lookahead.controller import Fixed
from shoal.models.cache import SlotCache
from shoal.models.compiled import EXECUTORS
from shoal.models.compiled.block import Block
from shoal.models.compiled.round_functions import Kind
from shoal.models.load_report import described
from shoal.models.ranks import Served, SharedCaptures
from shoal.models.runner import Runner
from shoal.models.tensor_parallel import _LedCache
from shoal.testing.drafters import engine_of
from shoal.types.requests import Request

PROMPTS = ["def shoal(fish):", "One prompt that is so much longer than its neighbour", "x"]
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.8, "seed": 7}
CASES: dict[str, dict[str, Any]] = {
    "greedy-plain": {**GREEDY, "lookahead": "off"},
    "greedy-speculative": {**GREEDY, "lookahead": 3},
    "sampled-plain": {**SAMPLED, "lookahead": "off"},
    "sampled-speculative": {**SAMPLED, "lookahead": 3},
    "sampled-rejection": {**SAMPLED, "lookahead": "bass", "rule": "rejection"},
    "sampled-auto": {**SAMPLED, "lookahead": "auto"},
}
ROUNDS = [
    ("eager", "greedy-speculative"), ("recorded", "sampled-speculative"), ("remembered", "sampled-plain"),
    ("remembered", "sampled-auto"), ("fails-0", "sampled-plain"), ("fails-1", "sampled-speculative"),
    ("wrong-1", "sampled-speculative"),
]  # fmt: skip
"""Executors of captured rounds, and what is decoded by them."""
ROWS = 3
COUNTS = ("rounds", "target_passes", "drafted", "accepted", "committed", "prefills")


def load(directory: Path, tensor_parallel: bool = False) -> shoal.Shoal:
    """The target drafts for itself, whole: nearly everything is accepted."""
    return shoal.load(
        directory / "target",
        directory / "target",
        dtype="float32",
        quantize="off",
        max_batch=5,
        tensor_parallel=tensor_parallel,
    )


def decode(pair: shoal.Shoal, **options: Any) -> dict[str, Any]:
    """Token ids of every row, and counts: more rows than fit, so that some join late and slots are moved."""
    result = pair.generate(PROMPTS, ROWS, max_new_tokens=24, eos=(), **options)
    ids = [list(sample.token_ids) for output in result for sample in output.samples]
    return {"ids": ids, "counts": {name: getattr(result.stats, name) for name in COUNTS}}


def everything(pair: shoal.Shoal) -> dict[str, Any]:
    """All cases, and one with prompts stored once."""
    shared = shoal.Shoal(pair.target, pair.draft_model, pair.tokenizer, max_batch=5, prefix_sharing="shared")
    return {name: decode(pair, **case) for name, case in CASES.items()} | {
        "shared-prompts": decode(shared, **CASES["greedy-speculative"])
    }


def local_shapes(runner: Runner) -> dict[str, list[int]]:
    """Of the weights that this process has."""
    parts = {name: getattr(weight, "to_local", lambda w=weight: w)() for name, weight in runner.hf.named_parameters()}
    return {name: list(part.shape) for name, part in parts.items()}


def tree_logits(target: Runner) -> list[list[float]]:
    """Of a draft tree, and of the token after a path of it that was kept."""
    runner = target.fork()
    runner.memory.reserve(1, 16)
    runner.feed([0], torch.tensor([[1, 2, 3]]), [3])
    tree = runner.feed([0], torch.tensor([[4, 5, 6, 7, 8]]), [5], parents=[[-1, -1, 1, 1]])[0]
    runner.cache.keep(0, 3, [0, 2, 4])
    return [*tree.tolist(), *runner.feed([0], torch.tensor([[9]]), [1])[0].tolist()]


def untold_copies(pair: shoal.Shoal) -> dict[str, Any]:
    """Negative control: prompts are copied to their rows' slots on rank 0 alone."""
    with patch.object(_LedCache, "copy", SlotCache.copy), patch.object(pair, "prefix_sharing", "copied"):
        return decode(pair, **CASES["greedy-plain"])


def asked_to_capture(pair: shoal.Shoal) -> dict[str, Any]:
    """What is said, and decoded, where passes should be captured."""
    pair.target.capture_rounds("graphed")
    return {"said": described(pair.target)["passes"], **decode(pair, **CASES["greedy-speculative"])}


def out_of_step(pair: shoal.Shoal) -> str:
    """What is said after something failed on rank 0 alone."""
    with patch.object(SlotCache, "copy", side_effect=RuntimeError("no")), suppress(RuntimeError):
        decode(pair, lookahead="off")
    said = ""
    try:
        decode(pair, lookahead="off")
    except shoal.ModelError as error:
        said = str(error)
    pair.target._ranks._out_of_step = False  # type: ignore[attr-defined]  # a copy leaves nobody waiting: let them go on
    return said


# ── captured rounds ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Remembered:
    """Captures by remembering, on all ranks; a replay runs the function again, collectives included."""

    fails_on: int | None = None

    def __init__(self, device: torch.device) -> None:
        self._warm = False

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        run()
        if self.fails_on == int(os.environ["RANK"]):
            raise ValueError("a host read while recording")
        return run


class FailsAlone(Remembered):
    """The capture fails on the second rank alone."""

    fails_on = 1


class FailsFirst(Remembered):
    """On the first alone."""

    fails_on = 0


class HostReads(TorchDispatchMode):
    """Refuses what a capture refuses: values, or sizes that follow from values, for the host; tensors from the host. Also of the
    collectives that Transformers puts between a model's layers."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local tensors comes here, too
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode these come as they were called
                return function.decompose(*args, **kwargs)
        by_truth = function in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        filled = by_truth and len(args) > 2 and args[2].numel() == 1  # CUDA takes `masked_fill_` for one value of the host
        from_host = function is torch.ops.aten.lift_fresh.default and args[0].dim() > 0
        if function in READS | SIZES or (by_truth and not filled) or from_host:
            raise InCapture(f"{function} within a captured function")
        return function(*args, **kwargs)


class Recorded(Remembered):
    """What is run again is what a graph can hold."""

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def replay() -> Any:
            with HostReads():
                return run()

        run()
        replay()
        return replay


EXECUTORS |= {
    "recorded": Recorded,
    "remembered": Remembered,
    "fails-0": FailsFirst,
    "fails-1": FailsAlone,
    "wrong-1": Remembered,
}


def shared_wrongly(captures: SharedCaptures, block: Block) -> None:
    """Negative control: the second rank computes other positions."""
    share(captures, block)
    if captures.executor == "wrong-1" and os.environ["RANK"] == "1":
        block.positions.add_(3)


share = SharedCaptures.share


@contextmanager
def capturing(pair: shoal.Shoal, executor: str | None) -> Any:
    """Rounds of both models are captured meanwhile."""
    assert pair.draft_model is not None
    for model, name in ((pair.target, executor), (pair.draft_model, executor and "eager")):
        model.capture_rounds(name)
    yield pair.target.captures
    for model in (pair.target, pair.draft_model):
        model.capture_rounds(None)


def captured(pair: shoal.Shoal, case: str, executor: str) -> dict[str, Any]:
    """What is decoded by captured rounds; how many there were, and why there are no more."""
    with capturing(pair, executor) as captures, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", RuntimeWarning)
        found = decode(pair, **CASES[case])
        rounds = sum(count for key, count in captures.ran.items() if isinstance(key, Kind))
        failures, said = list(captures.failures), [str(warning.message) for warning in seen]
    return found | {"captured": rounds, "failures": failures, "said": said}


def _functions(made: Engine) -> int:
    """The functions of rounds that are built over the engine's cache."""
    target = made.target
    if target.captures is None or not len(target.cache):
        return 0
    return sum(len(round_.built) for round_ in target.captures.generation(target.cache).rounds.values())


def prepared(pair: shoal.Shoal, ahead: bool) -> dict[str, Any]:
    """Rounds built before a row asks; then rows of which a late one is longer than the cache, while others run."""
    made = engine_of(pair.target, pair.draft_model, Fixed(3), max_batch=4)
    if ahead:
        made.prepare(4, 24)
    functions = 0
    while made.build_ahead():
        functions += 1
    rows = [
        row for i in range(3) for row in made.submit(Request((1, 2, 3 + i), 1, Sampling(seed=i), Limits(max_new_tokens=12)))
    ]
    building = _functions(made)
    for _ in range(2):
        made.step()
    built_in_rounds = _functions(made) > building
    capacity = made.target.cache.capacity
    rows += made.submit(Request(tuple(range(40)), 1, Sampling(seed=9), Limits(max_new_tokens=60)))
    while made.step():
        pass
    grew = made.target.cache.capacity > capacity
    return {
        "ids": [list(row.tokens) for row in rows], "functions": functions, "in_rounds": built_in_rounds, "grew": grew
    }  # fmt: skip


def lost(pair: shoal.Shoal) -> dict[str, Any]:
    """What is said where the second rank fails in a captured pass, and then."""
    said: list[str] = []
    with (
        suppress(shoal.ModelError),  # of capturing no more
        warnings.catch_warnings(record=True) as seen,
        capturing(pair, "remembered"),
    ):
        warnings.simplefilter("always", RuntimeWarning)
        decode(pair, **CASES["greedy-speculative"])
        with pair.target._ranks.broadcast("lose", -1):  # type: ignore[attr-defined]
            pass
        for _ in range(2):
            try:
                decode(pair, **CASES["greedy-speculative"])
            except shoal.ModelError as error:
                said.append(f"{type(error).__name__}: {error}")
    return {"errors": said, "warnings": [str(warning.message) for warning in seen]}


def serve_and_write(directory: Path) -> Any:
    """`Served.serve` that counts what it hears, and loses what it has built when told to."""
    serve, do, heard = Served.serve, Served._do, Counter[str]()
    sizes = {"functions": 0}

    def counting(served: Served, what: str, *said: Any) -> bool:
        heard[what] += 1
        if what == "lose":
            served._built.clear()
            return True
        more = do(served, what, *said)
        sizes["functions"] = max(sizes["functions"], len(served._built))
        return more

    def serving(served: Served) -> Any:
        said = ""
        try:
            with patch.object(Served, "_do", counting):
                serve(served)
        except SystemExit as ended:
            said = str(ended)
        found = {"shapes": local_shapes(served._runner), "heard": heard, "said": said, **sizes}
        (directory / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
        os._exit(0)  # torchrun would end the other rank

    return patch.object(Served, "serve", serving)


def main(directory: Path) -> None:
    with serve_and_write(directory), patch.object(SharedCaptures, "share", shared_wrongly):
        pair = load(directory, tensor_parallel=True)
        found = measured(pair)
    (directory / "rank0.json").write_text(json.dumps(found))


def measured(pair: shoal.Shoal) -> dict[str, Any]:
    """What rank 0 did."""
    passes = 0
    plain = Runner._ordinary

    def counted(runner: Runner, *args: Any, **options: Any) -> Any:
        nonlocal passes
        passes += isinstance(runner, type(pair.target))  # not those of the drafter
        return plain(runner, *args, **options)

    with patch.object(Runner, "_ordinary", counted):
        found = everything(pair)
        found["tree"] = tree_logits(pair.target)
        found["refused"] = asked_to_capture(pair)
        for executor, case in ROUNDS:
            found[f"{executor} {case}"] = captured(pair, case, executor)
        with capturing(pair, "remembered"):
            found["prepared"] = prepared(pair, ahead=True)
        found["untold"] = untold_copies(pair)
        runner = pair.target.fork()
        runner.memory.reserve(1, 8)
        runner.feed([0], torch.tensor([[1, 2]]), [2])
        found["out_of_step"] = out_of_step(pair)
        found["lost"] = lost(pair)
    return found | {
        "kv_heads": runner.cache.stores()[0][0].shape[2], "passes": passes, "shapes": local_shapes(pair.target)
    }  # fmt: skip
