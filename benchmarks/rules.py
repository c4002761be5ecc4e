"""What the coupled rule loses against rejection sampling on the bundled pair, at the positions of the target's own samples.

    python benchmarks/rules.py            # a table in Markdown
    python benchmarks/rules.py --json FILE

No time is measured. At each position, for the target's distribution p and the drafter's q: rejection sampling accepts a draft with
probability 1 - d, d the total variation of p and q, which is computed; how often the coupled rule draws the same token from both is
counted over `--draws` keys. `race`: a race over all tokens in place of 64 buckets, at a random number per token, counted likewise.
`bound`: the mean of (1 - d) / (1 + d), which such a race keeps. `+-`: two standard errors of what is lost, over positions.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import shoal
from held_out import problems
from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.sampling.acceptance import Coupled

TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)


def distributions(pair: shoal.Shoal, prompts: list[str], n: int, tokens: int, temperature: float) -> tuple[Tensor, Tensor]:
    """p and q at every position of n samples of each prompt, [positions, vocab] float64."""
    assert pair.draft_model is not None
    result = pair.generate(prompts, n, max_new_tokens=tokens, temperature=temperature, seed=0, lookahead="off")
    found: list[list[Tensor]] = [[], []]
    for output in result:
        for sample in output.samples:
            ids = torch.tensor([[*output.prompt_ids, *sample.token_ids]])
            for places, model in zip(found, (pair.target, pair.draft_model), strict=True):
                logits = model.hf(ids).logits[0, len(output.prompt_ids) - 1 : -1, : pair.target.vocab_size]
                places.append((logits.double() / temperature).softmax(-1))
    p, q = (torch.cat(places) for places in found)
    return p, q


def agreement(p: Tensor, q: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """How often both draw the same token by the same numbers, per position: by the coupled rule, and by a race over all tokens."""
    rule, generator = Coupled(), torch.Generator().manual_seed(0)
    coupled, raced = torch.zeros(len(p), dtype=torch.float64), torch.zeros(len(p), dtype=torch.float64)
    for key in range(draws):
        numbers = rule.uniforms([key] * len(p), list(range(len(p))), 1, None)[:, 0]
        coupled += rule.draw(p, numbers) == rule.draw(q, numbers)
        clocks = torch.empty_like(p).exponential_(generator=generator)
        raced += (p / clocks).argmax(-1) == (q / clocks).argmax(-1)
    return coupled / draws, raced / draws


@torch.inference_mode()
def line(pair: shoal.Shoal, prompts: list[str], given: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """One temperature."""
    p, q = distributions(pair, prompts, given.n, given.tokens, temperature)
    rejection = torch.minimum(p, q).sum(-1)
    coupled, raced = agreement(p, q, given.draws)
    lost = rejection - coupled
    return {
        "temperature": temperature, "positions": len(p), "rejection": float(rejection.mean()), "coupled": float(coupled.mean()),
        "lost": float(lost.mean()), "two_errors": 2 * float(lost.std()) / len(p) ** 0.5, "race": float(raced.mean()),
        "bound": float((rejection / (2 - rejection)).mean()),
    }  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="held-out problems")
    parser.add_argument("-n", type=int, default=4, help="samples of each")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each sample")
    parser.add_argument("--draws", type=int, default=50, help="keys at each position")
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write the figures there as well")
    given = parser.parse_args()
    pair = shoal.load(dtype="float32")
    prompts = [problem.prompt for problem in problems(given.prompts, seed=21)]
    lines = [line(pair, prompts, given, temperature) for temperature in TEMPERATURES]
    if given.json is not None:
        asked = {name: value for name, value in vars(given).items() if name != "json"}
        write_results(given.json, {"machine": machine(torch.device("cpu")), "asked": asked, "lines": lines})
    print("| T | positions | rejection | coupled | lost | race | bound |")
    print("|---|---|---|---|---|---|---|")
    for each in lines:
        print(
            f"| {each['temperature']} | {each['positions']} | {each['rejection']:.1%} | {each['coupled']:.1%} "
            f"| {each['lost']:.1%} +- {each['two_errors']:.1%} | {each['race']:.1%} | {each['bound']:.1%} |"
        )


if __name__ == "__main__":
    main()
