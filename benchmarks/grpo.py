"""Group-relative policy optimisation (GRPO, Shao et al. 2024) of the bundled target by TRL's trainer, with rollouts by shoal.

    python benchmarks/grpo.py [--steps 16] [--prompts 4] [-n 8] [--json FILE] [--plot FILE]

needs the extra `rl`. The reward of a sample is 1 if the function that it completes passes its tests in the sandbox, and 0.2 if it
does not and the program parses. The same training runs with four ways to make the rollouts: Transformers' `generate` as the trainer
calls it, shoal without drafts, with the draft model, and with the draft model and the rollouts of earlier epochs. The optimiser
changes the weights in place; the draft model stays as it is. All log-probabilities that shoal reports are compared with those of a
forward pass of the policy.
"""

from __future__ import annotations

import argparse
import ast
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import shoal
from held_out import problems
from shoal.bench.machine import machine
from shoal.bench.provenance import place_of_results, write_results
from shoal.evaluation.execution import execute
from shoal.evaluation.problems import Problem
from shoal.evaluation.sandbox import Sandbox
from shoal.integrations.trl import rollout_func
from shoal.models.loading import bundled
from shoal.problems.generator import FunctionProblem

PARSES = 0.2
WAYS = {
    "Transformers' generate": None,
    "shoal, plain": (None, "off"),
    "shoal, draft model": ("{drafter}", "auto"),
    "shoal, draft model and earlier rollouts": ("suffix:answers={answers}+{drafter}", "auto"),
}
"""How rollouts are made: drafter and draft length."""


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


class Watched(GRPOTrainer):
    """Times how long rollouts take, and keeps rewards by step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows: list[dict[str, float]] = []

    def _generate(self, prompts: list[Any]) -> Any:
        start = time.perf_counter()
        found = super()._generate(prompts)
        seconds = time.perf_counter() - start
        prompt_ids, completion_ids, _, _, logprobs, *_ = found
        row = {"tokens": float(sum(map(len, completion_ids))), "seconds": seconds}
        if logprobs is not None:
            row["difference_of_logprobs"] = difference(self.model, prompt_ids, completion_ids, logprobs)
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


def train(name: str, given: argparse.Namespace, place: Path) -> list[dict[str, float]]:
    """The rows of one training run."""
    torch.manual_seed(0)
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

    rollouts = None
    if (way := WAYS[name]) is not None:
        spec = way[0] and way[0].format(drafter=drafter, answers=place / "answers")
        pair = shoal.load(policy, spec, tokenizer=tokenizer)
        rollouts = rollout_func(pair, lookahead=way[1])
    config = GRPOConfig(
        output_dir=str(place), max_steps=given.steps, per_device_train_batch_size=given.prompts * given.n, num_generations=given.n,
        max_completion_length=given.tokens, learning_rate=given.rate, lr_scheduler_type="constant", beta=0.0, temperature=1.0,
        logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=False, seed=given.seed, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = Watched(
        model=policy, reward_funcs=rewards, args=config, train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in known]),
        processing_class=tokenizer, rollout_func=rollouts,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress(trainer, name))
    trainer.train()
    return trainer.rows


def speed(rows: Sequence[dict[str, float]]) -> float:
    """Tokens per second of rollouts, the median of the steps after the first epoch's beginning."""
    return median(row["tokens"] / row["seconds"] for row in rows[1:] or rows)


def plot(found: dict[str, list[dict[str, float]]], place: Path) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8))
    for name, rows in found.items():
        window = max(1, len(rows) // 8)
        smooth = [mean(row["reward"] for row in rows[max(0, i - window + 1) : i + 1]) for i in range(len(rows))]
        left.plot(range(1, len(rows) + 1), smooth, label=name)
        right.plot(range(1, len(rows) + 1), [row["tokens"] / row["seconds"] for row in rows], label=name)
    left.set(xlabel="step", ylabel=f"mean reward, over {window} steps")
    right.set(xlabel="step", ylabel="tokens per second of rollouts", ylim=(0, None))
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(place)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("-n", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pool", type=int, default=8, help="problems in all: an epoch")
    parser.add_argument("--rate", type=float, default=2e-5, help="learning rate")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--ways", default="0,1,2,3", help="which of the four ways to make rollouts")
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write what is found there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="rewards and speeds by step")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    names = [list(WAYS)[int(number)] for number in given.ways.split(",")]
    found: dict[str, list[dict[str, float]]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            found[name] = train(name, given, Path(place))
    part = max(1, given.steps // 4)
    print(
        f"\n| rollouts by | tokens/s | reward, first {part} steps | last {part} | logprobs differ by |\n|---|---:|---:|---:|---:|"
    )
    for name, rows in found.items():
        first, last = (mean(row["reward"] for row in some) for some in (rows[:part], rows[-part:]))
        differs = max((row["difference_of_logprobs"] for row in rows if "difference_of_logprobs" in row), default=None)
        print(f"| {name} | {speed(rows):.0f} | {first:.3f} | {last:.3f} | {'-' if differs is None else f'{differs:.1e}'} |")
    if given.json:
        asked = {key: str(value) for key, value in vars(given).items() if key not in ("json", "plot")}
        write_results(given.json, {"machine": machine(torch.device("cpu")), "arguments": asked, "runs": found})
    if given.plot:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
