"""What tests/test_tensor_parallel.py has one process do, and several: `torchrun ... sharded_pair.py DIRECTORY`.

The first process writes what it generated to DIRECTORY/rank0.json; the others write, when it is done, what they were told.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch

import shoal
from shoal.models.cache import SlotCache
from shoal.models.load_report import described
from shoal.models.runner import Runner
from shoal.models.tensor_parallel import Ranks, _LedCache

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
    runner.reserve(1, 16)
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
    pair.target.use_static_passes("graphed")
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
    pair.target._ranks._out_of_step = False  # type: ignore[attr-defined]  # a copy leaves nobody waiting: let them end in order
    return said


def serve_and_write(directory: Path) -> Any:
    """`Ranks.serve` that counts what it hears."""
    serve, hear, heard = Ranks.serve, Ranks._hear, Counter[str]()

    def counting(ranks: Ranks) -> Any:
        said = hear(ranks)
        heard[said[0]] += 1
        return said

    def serving(ranks: Ranks, runner: Runner) -> NoReturn:
        try:
            with patch.object(Ranks, "_hear", counting):
                serve(ranks, runner)
        finally:
            found = {"shapes": local_shapes(runner), "heard": heard}
            (directory / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
        raise AssertionError

    return patch.object(Ranks, "serve", serving)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with serve_and_write(directory):
        pair = load(directory, tensor_parallel=True)
    passes = 0
    plain = Runner._dynamic

    def counted(runner: Runner, *args: Any, **options: Any) -> Any:
        nonlocal passes
        passes += isinstance(runner, type(pair.target))  # not those of the drafter
        return plain(runner, *args, **options)

    with patch.object(Runner, "_dynamic", counted):
        found = everything(pair)
        found["tree"] = tree_logits(pair.target)
        found["captured"] = asked_to_capture(pair)
        found["untold"] = untold_copies(pair)
        runner = pair.target.fork()
        runner.reserve(1, 8)
        runner.feed([0], torch.tensor([[1, 2]]), [2])
        found["out_of_step"] = out_of_step(pair)
    found |= {"kv_heads": runner.cache.stores()[0][0].shape[2], "passes": passes, "shapes": local_shapes(pair.target)}
    (directory / "rank0.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
