"""What sampling costs by the size of the vocabulary: a drafter's draw, truncation, and each way to judge a round's drafts.

    python benchmarks/vocabulary.py                 # 2,048, 32,000 and 151,936 ids, batch 8, draft length 4; about a minute

Milliseconds, the least of interleaved takes. Logits are random: where they are peaked a few tokens hold most of the mass, where
they are flat thousands do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.config import Sampling
from shoal.engine import commit
from shoal.sampling.acceptance import RULES
from shoal.sampling.distributions import Scores, probabilities
from shoal.sampling.drawing import draw
from shoal.types.requests import Request, Row
from shoal.types.trees import DraftTree, Positions

VOCABULARIES = (2048, 32_000, 151_936)
BATCH, DRAFTED = 8, 4
TEMPERATURE = 0.8
TRUNCATIONS: dict[str, dict[str, Any]] = {"top-p 0.95": {"top_p": 0.95}, "top-k 50": {"top_k": 50}}
SPREADS = {"peaked": 8.0, "flat": 1.0}


def rows_of(**sampling: Any) -> list[Row]:
    settings = Sampling(**{"temperature": TEMPERATURE, **sampling})
    return [Row(Request((1,), sampling=settings), 0, b, b, [1, b], frozenset(), 99) for b in range(BATCH)]


def proposed(vocab: int, **sampling: Any) -> tuple[DraftTree, Tensor, list[Row]]:
    """Chains drawn from a q that resembles p, the target's logits, and the rows."""
    generator = torch.Generator().manual_seed(vocab)
    rows = rows_of(**sampling)
    logits = 3 * torch.randn(BATCH, DRAFTED + 1, vocab, generator=generator)
    near = logits[:, :DRAFTED] + 0.5 * torch.randn(BATCH, DRAFTED, vocab, generator=generator)
    q = probabilities(near, Positions(rows, [[0] * DRAFTED] * BATCH))
    uniforms = torch.rand(BATCH * DRAFTED, generator=generator, dtype=torch.float64)
    drafts = DraftTree.of(draw(q.flatten(0, 1), uniforms).view(BATCH, DRAFTED).tolist())
    known = None if rows[0].request.sampling.greedy else [q[:, j].clone() for j in range(DRAFTED)]
    return DraftTree(drafts.tokens, drafts.lengths, known, drafts.drafts, drafts.parents), logits, rows


def judged(vocab: int, rule: str, **sampling: Any) -> tuple[Callable[[], Any], Callable[[], Any], float]:
    """What decides on a round, what reports its log-probabilities, and the share of the drafts that is accepted."""
    (tree, logits, rows), chosen = proposed(vocab, **sampling), RULES[rule]()
    uniforms = chosen.uniforms(range(BATCH), [2] * BATCH, DRAFTED + 1, None)

    def decide() -> Any:
        return chosen.decide(tree, Scores(logits, Positions.of(rows, tree)), uniforms)

    verdict = decide()
    paths, following = verdict.lists
    blocks = [[*drafts[: len(path)], last] for drafts, path, last in zip(tree.drafts, paths, following, strict=True)]
    columns, scores = [range(len(block)) for block in blocks], Scores(logits, Positions.of(rows, tree))
    share = float(verdict.accepted.sum()) / (BATCH * DRAFTED)
    return decide, lambda: commit.logprobs_of(rows, blocks, columns, scores, verdict), share


def stages(vocab: int) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """What is timed, and the accepted share of the stages that have one."""
    generator = torch.Generator().manual_seed(0)
    scores = {name: spread * torch.randn(BATCH, 1, vocab, generator=generator) for name, spread in SPREADS.items()}
    weights, uniforms = scores["flat"][:, 0].softmax(-1), torch.rand(BATCH, generator=generator, dtype=torch.float64)
    found: dict[str, Callable[[], Any]] = {"draw": lambda: draw(weights, uniforms)}
    for name, options in TRUNCATIONS.items():
        for shape, logits in scores.items():
            positions = Positions(rows_of(**options), [[]] * BATCH)
            found[f"{name}, {shape}"] = lambda logits=logits, positions=positions: probabilities(logits, positions)  # type: ignore[misc]
    accepted = {}
    for name, rule, sampling in (
        ("greedy", "rejection", {"temperature": 0.0}), ("rejection", "rejection", {}), ("exact match", "coupled", {}),
        ("rejection, top-p 0.95", "rejection", {"top_p": 0.95}),
    ):  # fmt: skip
        found[name], report, accepted[name] = judged(vocab, rule, **sampling)
        if name == "rejection":
            found["log-probabilities"] = report
    return found, accepted


@torch.inference_mode()
def measured(vocab: int, takes: int) -> dict[str, dict[str, float]]:
    """Least milliseconds of every stage, and the accepted share."""
    found, accepted = stages(vocab)
    least = dict.fromkeys(found, float("inf"))
    for _ in range(takes):
        for name, stage in found.items():
            started = time.perf_counter()
            stage()
            least[name] = min(least[name], time.perf_counter() - started)
    return {
        name: {"ms": round(1000 * seconds, 3), **({"accepted": round(accepted[name], 3)} if name in accepted else {})}
        for name, seconds in least.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--takes", type=int, default=30, help="of each stage")
    parser.add_argument("--vocabulary", type=int, action="append", help="ids; may be given several times")
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args()
    found = {str(vocab): measured(vocab, options.takes) for vocab in options.vocabulary or VOCABULARIES}
    if options.json is not None:
        write_results(options.json, {"machine": machine(torch.device("cpu")), "milliseconds": found})
    print(f"{'':24}" + "".join(f"{int(vocab):>12,}" for vocab in found))
    for name in next(iter(found.values())):
        print(f"{name:24}" + "".join(f"{figures[name]['ms']:12.3f}" for figures in found.values()))


if __name__ == "__main__":
    main()
