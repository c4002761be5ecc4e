"""Acceptance by step while the bundled target is trained, with a draft model that stays and one that is realigned.

    python benchmarks/realign.py [--steps 10] [--prompts 4] [-n 8] [--tokens 48] [--json FILE]

Group-relative policy gradients (Shao et al. 2024) in a few lines: the reward of a sample is 1 if the function that it completes
parses, less a hundredth for each token, so that the policy learns to be brief. After each step the policy is copied into two
pairs. Both make the step's rollouts by the same seeds, so that their samples are the same; one calls `Shoal.realign` on them, the
other does not. What is counted does not depend on the machine.
"""

from __future__ import annotations

import argparse
import ast
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import shoal
from held_out import problems
from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.models.sources import bundled
from shoal.types.rollouts import Rollouts

DRAFTED = 4
"""The draft length of every round."""


def reward(prompt: str, text: str, tokens: int) -> float:
    try:
        ast.parse(prompt + text.split("\n\n\n")[0] + "\n")
    except (SyntaxError, ValueError):
        return -0.01 * tokens
    return 1 - 0.01 * tokens


def advantages(prompts: Sequence[str], result: Any) -> tuple[Tensor, float]:
    """Of each sample, its reward less the mean of its group, over the group's deviation; and the mean reward."""
    found = torch.tensor(
        [
            [reward(prompt, sample.text, len(sample.token_ids)) for sample in output.samples]
            for prompt, output in zip(prompts, result, strict=True)
        ]
    )
    own = (found - found.mean(1, keepdim=True)) / (found.std(1, keepdim=True) + 1e-3)
    return own.flatten(), float(found.mean())


def update(policy: Any, optimizer: torch.optim.Optimizer, found: Rollouts, gains: Tensor) -> None:
    """A step of the policy gradient on the rollouts."""
    mask = found.attention_mask
    places = (mask.cumsum(1) - 1).clamp(min=0)
    logits = policy(input_ids=found.input_ids, attention_mask=mask, position_ids=places).logits
    own = logits[:, found.prompt_ids.shape[1] - 1 : -1].log_softmax(-1).gather(-1, found.completion_ids[..., None])[..., 0]
    loss = -((own * gains[:, None])[found.completion_mask]).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def train(given: argparse.Namespace) -> list[dict[str, float]]:
    policy: Any = AutoModelForCausalLM.from_pretrained(bundled("target"), dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=given.rate, weight_decay=0.0)
    pairs = {"stays": shoal.load(dtype="float32"), "follows": shoal.load(dtype="float32")}
    pool, rows = [problem.prompt for problem in problems(given.pool)], []
    for step in range(given.steps):
        prompts = [pool[(step * given.prompts + i) % len(pool)] for i in range(given.prompts)]
        row: dict[str, float] = {"step": step}
        results: dict[str, Any] = {}
        for name, pair in pairs.items():
            pair.target.hf.load_state_dict(policy.state_dict())
            results[name] = pair.generate(
                prompts, given.n, max_new_tokens=given.tokens, temperature=1.0, seed=step, lookahead=DRAFTED
            )
            stats = results[name].stats
            row |= {
                f"{name}, accepted": stats.accepted / stats.drafted,
                f"{name}, tokens per pass": stats.acceptance_length,
                f"{name}, behind": stats.updates_behind,
            }
        same = [[s.token_ids for output in result for s in output.samples] for result in results.values()]
        assert same[0] == same[1], "a seed has other samples with other drafts"
        found = results["follows"].tensors(0)
        started = time.perf_counter()
        pairs["follows"].realign(found, steps=given.align, rows=given.rows, rate=given.draft_rate)
        row["seconds of realign"] = time.perf_counter() - started
        gains, row["reward"] = advantages(prompts, results["follows"])
        started = time.perf_counter()
        update(policy, optimizer, found, gains)
        row["seconds of update"] = time.perf_counter() - started
        rows.append(row)
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    return rows


def table(rows: Sequence[dict[str, float]]) -> str:
    lines = [
        "| step | reward | accepted, stays | accepted, follows | tokens per pass, stays | follows |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        figures = [row["reward"]]
        figures += [row[f"{name}, {what}"] for what in ("accepted", "tokens per pass") for name in ("stays", "follows")]
        lines.append(f"| {row['step']:.0f} | {' | '.join(f'{figure:.2f}' for figure in figures)} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("-n", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pool", type=int, default=8, help="problems in all: an epoch")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate of the policy")
    parser.add_argument("--align", type=int, default=4, help="steps of realign, after each of the policy's")
    parser.add_argument("--rows", type=int, default=16, help="samples in a step of realign")
    parser.add_argument("--draft-rate", type=float, default=1e-3, help="learning rate of realign")
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write what is found there")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    rows = train(given)
    print(f"\n{table(rows)}")
    if given.json:
        asked = {key: str(value) for key, value in vars(given).items() if key != "json"}
        write_results(given.json, {"machine": machine(torch.device("cpu")), "arguments": asked, "steps": rows})


if __name__ == "__main__":
    main()
