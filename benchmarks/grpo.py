"""Group-relative policy optimisation (GRPO, Shao et al. 2024) of the bundled target by TRL's trainer, with rollouts by shoal.

    python benchmarks/grpo.py [--steps 16] [--prompts 4] [-n 8] [--seeds 7,8,9] [--tail] [--json FILE] [--plot FILE]

needs the extra `rl`. The reward of a sample is 1 if the function that it completes passes its tests in the sandbox, and 0.2 if it
does not and the program parses. The same training runs with four ways to make the rollouts: Transformers' `generate` as the trainer
calls it, shoal without drafts, with the draft model, and with the draft model and the rollouts of earlier epochs. The optimiser
changes the weights in place; the draft model stays as it is. All log-probabilities that shoal reports are compared with those of a
forward pass of the policy. Each way runs once with each seed, which chooses the prompts of a step and the numbers that samples are
drawn by. `--tail` prints the makespan of a step's rollouts, the target's passes, and those passes and drafts for which a quarter of
the samples or fewer is left. Results are written after each run, so that what has come is kept if the rest is stopped.
"""

from __future__ import annotations

import argparse
import ast
import tempfile
import time
from bisect import bisect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import shoal
from held_out import problems
from problems.generator import FunctionProblem
from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.evaluation.execution import execute
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox
from shoal.integrations.trl import rollout_func
from shoal.lookahead.auto import Auto
from shoal.lookahead.costs import PairCosts
from shoal.models.sources import bundled
from shoal.types.rounds import Outcome

PARSES = 0.2
TAIL = 4
"""The tail of a step begins where one of so many samples is left."""
WAYS = {
    "Transformers' generate": None,
    "shoal, plain": (None, "off"),
    "shoal, draft model": ("{drafter}", "auto"),
    "shoal, draft model and earlier rollouts": ("suffix:answers={answers}+{drafter}", "auto"),
}
"""How rollouts are made: drafter and draft length."""

Rows = list[dict[str, float]]
"""Of a training run: what each step took and found."""
Runs = dict[str, dict[int, Rows]]
"""By the way rollouts are made, then by seed."""


def reward(problem: FunctionProblem, text: str, sandbox: Sandbox) -> float:
    program = problem.prompt + text.split("\n\n\n")[0] + "\n"
    try:
        ast.parse(program)
    except (SyntaxError, ValueError):
        return 0.0
    asked = Problem("function", "python", "", "\n".join(problem.tests) + "\n", problem.name)
    return 1.0 if execute(asked, program, sandbox).passed else PARSES


@torch.no_grad()
def difference(
    hf: Any, prompts: Sequence[list[int]], samples: Sequence[list[int]], logprobs: Sequence[list[float]]
) -> float:
    """The largest between log-probabilities that were reported and those of the policy's own forward pass, row by row."""
    largest = 0.0
    for prompt, sample, reported in zip(prompts, samples, logprobs, strict=True):
        logits: Tensor = hf(torch.tensor([[*prompt, *sample]])).logits[0, len(prompt) - 1 : -1].float()
        found = logits.log_softmax(-1).gather(-1, torch.tensor(sample)[:, None])[:, 0]
        largest = max(largest, (found - torch.tensor(reported)).abs().max().item())
    return largest


class Noted(Auto):
    """The controller that `auto` means, with the rows and the drafts of each round."""

    def __init__(self, pair: shoal.Shoal) -> None:
        super().__init__(PairCosts(packed=pair.target.skips_padding))
        self.rounds: list[tuple[int, int]] = []

    def learn(self, outcome: Outcome) -> None:
        super().learn(outcome)
        self.rounds.append((len(outcome.drafted), sum(outcome.drafted)))


def of_tail(rounds: Sequence[tuple[int, int]], samples: int) -> dict[str, float]:
    """The passes, those for a quarter of the samples or fewer, and the drafts of a row in a pass, before them and in them."""
    found: dict[str, float] = {"passes": len(rounds)}
    for name, some in (
        ("before", [one for one in rounds if TAIL * one[0] > samples]),
        ("tail", [one for one in rounds if TAIL * one[0] <= samples]),
    ):
        rows, drafts = (sum(one[place] for one in some) for place in (0, 1))
        found |= {f"passes_{name}": len(some), f"drafts_{name}": drafts / max(rows, 1)}
    return found


class Watched(GRPOTrainer):
    """Times how long rollouts take, and keeps rewards by step.

    Args:
        noted: what drafts; None = nothing.
    """

    def __init__(self, noted: Noted | None, **options: Any) -> None:
        super().__init__(**options)
        self.noted = noted
        self.rows: list[dict[str, float]] = []

    def _generate(self, prompts: list[Any]) -> Any:
        start = time.perf_counter()
        found = super()._generate(prompts)
        seconds = time.perf_counter() - start
        prompt_ids, completion_ids, _, _, logprobs, *_ = found
        row = {"tokens": float(sum(map(len, completion_ids))), "seconds": seconds}
        if logprobs is not None:
            row["difference_of_logprobs"] = difference(self.model, prompt_ids, completion_ids, logprobs)
        lengths = sorted(map(len, completion_ids))
        rounds = [(len(lengths) - bisect(lengths, done), 0) for done in range(lengths[-1])]
        if self.noted is not None:
            rounds, self.noted.rounds = self.noted.rounds, []
        row |= of_tail(rounds, len(lengths))
        self.rows.append(row)
        return found


class Progress(TrainerCallback):
    """Prints a line per step."""

    def __init__(self, trainer: Watched, name: str) -> None:
        self.trainer, self.name = trainer, name

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs and self.trainer.rows:
            row = self.trainer.rows[-1]
            row["reward"] = logs["reward"]
            differs = row.get("difference_of_logprobs")
            compared = "" if differs is None else f", logprobs differ by {differs:.1e}"
            speed = row["tokens"] / row["seconds"]
            print(
                f"{self.name}: step {state.global_step}, reward {logs['reward']:.3f}, {speed:.0f} tokens/s{compared}",
                flush=True,
            )


def train(name: str, seed: int, given: argparse.Namespace, place: Path) -> Rows:
    """The rows of one training run."""
    target, drafter = bundled("target"), bundled("drafter")
    policy, tokenizer = (
        AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32),
        AutoTokenizer.from_pretrained(target),
    )
    pool, sandbox = problems(given.pool), Sandbox()
    known = {problem.prompt: problem for problem in pool}

    def rewards(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        with ThreadPoolExecutor(2) as several:
            return list(several.map(lambda prompt, text: reward(known[prompt], text, sandbox), prompts, completions))

    rollouts, noted = None, None
    if (way := WAYS[name]) is not None:
        spec = way[0] and way[0].format(drafter=drafter, answers=place / "answers")
        pair = shoal.load(policy, spec, tokenizer=tokenizer)
        noted = Noted(pair) if way[1] == "auto" else None
        rollouts = rollout_func(pair, lookahead=noted or way[1])
    config = GRPOConfig(
        output_dir=str(place), max_steps=given.steps, per_device_train_batch_size=given.prompts * given.n, num_generations=given.n,
        max_completion_length=given.tokens, learning_rate=given.rate, lr_scheduler_type="constant", beta=0.0, temperature=1.0,
        logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=False, seed=seed, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = Watched(
        noted,
        model=policy, reward_funcs=rewards, args=config, train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in known]),
        processing_class=tokenizer, rollout_func=rollouts,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress(trainer, f"{name}, seed {seed}"))
    trainer.train()
    return trainer.rows


def speed(rows: Rows) -> float:
    """Tokens per second of rollouts, the median of the steps after the first epoch's beginning."""
    return median(row["tokens"] / row["seconds"] for row in rows[1:] or rows)


def with_spread(values: Sequence[float], digits: int) -> str:
    """The mean, and behind it the standard deviation over seeds if there are several."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def table(found: Runs, steps: int) -> str:
    part = max(1, steps // 4)
    lines = [
        f"| rollouts by | seeds | tokens/s | reward, first {part} steps | last {part} | logprobs differ by |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, runs in found.items():
        first, last = (
            [mean(row["reward"] for row in rows[some]) for rows in runs.values()]
            for some in (slice(part), slice(-part, None))
        )
        speeds = [speed(rows) for rows in runs.values()]
        differs = [
            row["difference_of_logprobs"] for rows in runs.values() for row in rows if "difference_of_logprobs" in row
        ]
        largest = f"{max(differs):.1e}" if differs else "-"
        lines.append(
            f"| {name} | {len(runs)} | {with_spread(speeds, 0)} | {with_spread(first, 3)} | {with_spread(last, 3)} | {largest} |"
        )
    return "\n".join(lines)


def by_seed(found: Runs, steps: int) -> str:
    """Returns the table of docs/how-to/train.md: rewards and speed of each run."""
    part = max(1, steps // 4)
    lines = [
        f"| rollouts by | seed | steps 1-{part} | steps {steps - part + 1}-{steps} | tokens/s |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, runs in found.items():
        for seed, rows in runs.items():
            first, last = (mean(row["reward"] for row in rows[some]) for some in (slice(part), slice(-part, None)))
            lines.append(f"| {name} | {seed} | {first:.3f} | {last:.3f} | {speed(rows):,.0f} |")
    return "\n".join(lines)


def tails(found: Runs) -> str:
    """Means over seeds of the steps of the second half."""
    names = ("seconds", "passes", "passes_tail", "drafts_before", "drafts_tail")
    lines = [
        "| rollouts by | seconds of a step | passes | for a quarter of the samples or fewer | drafts per row before | then |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, runs in found.items():
        figures = [[mean(row[key] for row in rows[len(rows) // 2 :]) for rows in runs.values()] for key in names]
        told = [with_spread(each, digits) for each, digits in zip(figures, (2, 1, 1, 2, 2), strict=True)]
        lines.append(f"| {name} | {' | '.join(told)} |")
    return "\n".join(lines)


def plot(found: Runs, place: Path) -> None:
    """Rewards and speeds by step: the mean over seeds, and around it a band of a standard deviation to either side."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8))
    for number, (name, runs) in enumerate(found.items()):
        window = max(1, len(next(iter(runs.values()))) // 8)
        rewards = [smoothed([row["reward"] for row in rows], window) for rows in runs.values()]
        speeds = [[row["tokens"] / row["seconds"] for row in rows] for rows in runs.values()]
        for axes, curves in ((left, rewards), (right, speeds)):
            steps = range(1, len(curves[0]) + 1)
            middle = [mean(at) for at in zip(*curves, strict=True)]
            if len(curves) > 1:
                spread = [stdev(at) for at in zip(*curves, strict=True)]
                low, high = ([m + side * s for m, s in zip(middle, spread, strict=True)] for side in (-1, 1))
                axes.fill_between(steps, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
            axes.plot(steps, middle, color=f"C{number}", linewidth=2.4, label=name)
    left.set(xlabel="step", ylabel=f"mean reward, over {window} steps")
    right.set(xlabel="step", ylabel="tokens per second of rollouts", ylim=(0, None))
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(place, dpi=110)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """At each step the mean of so many steps up to it."""
    return [mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("-n", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pool", type=int, default=8, help="problems in all: an epoch")
    parser.add_argument("--rate", type=float, default=2e-5, help="learning rate")
    parser.add_argument("--seeds", default="7", help="of the trainer, with commas between them: a run of each")
    parser.add_argument("--ways", default="0,1,2,3", help="which of the four ways to make rollouts")
    parser.add_argument(
        "--tail", action="store_true", help="print the makespan of a step, and what the last samples of it get"
    )
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write what is found there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="rewards and speeds by step")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    names = [list(WAYS)[int(number)] for number in given.ways.split(",")]
    found: Runs = {name: {} for name in names}
    asked = {key: str(value) for key, value in vars(given).items() if key not in ("json", "plot")}
    for seed in map(int, given.seeds.split(",")):
        for name in names:
            with tempfile.TemporaryDirectory() as place:
                found[name][seed] = train(name, seed, given, Path(place))
            if given.json:
                write_results(given.json, {"machine": machine(torch.device("cpu")), "arguments": asked, "runs": found})
    print(f"\n{table(found, given.steps)}\n\n{by_seed(found, given.steps)}")
    if given.tail:
        print(f"\n{tails(found)}")
    if given.plot:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
