"""Samples of a set's problems by another engine, judged as `shoal eval` judges its own, in files of the same form.

    python benchmarks/quality_engines.py humaneval --data FILE --model DIR --engine llamacpp --python PEERS/bin/python \\
        -n 8 --output DIRECTORY

`quality_real.py` runs it. The prompts are those of `shoal eval`, token for token, and so are the temperature, top-p, the most
new tokens and the strings and tokens that end a sample. The seconds of a problem are those of one call, in a process of its own
that has loaded and warmed up. llama.cpp is driven row by row, so a sample is there when its row ends; OpenVINO GenAI hands all
samples of a prompt over at once. Samples are ranked by their mean log-probability, here under the distribution that is sampled.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engines.process import Worker, prepare
from engines.tasks import Absent, Setup
from engines.tasks import Task as Work
from shoal.bench.machine import machine
from shoal.cli.eval_options import EvalSet, SandboxOptions, SetOptions, parse_budgets
from shoal.cli.progress import with_progress
from shoal.durable import write_synced
from shoal.evaluation.journal import GRADES, SAMPLES, SUMMARY, Journal, open_directory
from shoal.evaluation.summary import Results, summarize
from shoal.evaluation.tasks import Task, code_grader, grade_entries
from shoal.types.arguments import encoded

CACHE = Path.home() / ".cache" / "shoal-peers"
SHORTEST, BLOCK = 1024, 256
"""Positions that an engine has for a row: at least so many, in blocks."""


def setup_of(asked: argparse.Namespace, longest: int) -> Setup:
    """Returns the configuration of the engine: bfloat16, plain decoding."""
    length = max(SHORTEST, -(-longest // BLOCK) * BLOCK)
    model, cache = str(asked.model.resolve()), str(asked.cache.resolve())
    return Setup(asked.engine, "plain", model, None, "bfloat16", asked.threads, cache, asked.n, length)


def ends_of(model: Path, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that end a text, as `shoal.load` finds them."""
    from transformers import AutoConfig, GenerationConfig

    from shoal.models.pretrained import eos_ids

    return eos_ids(
        SimpleNamespace(config=AutoConfig.from_pretrained(model), generation_config=GenerationConfig.from_pretrained(model)),
        tokenizer,
    )


class EngineSampler:
    """Draws the samples of one problem after another.

    Args:
        ask: work -> the engine's answer, as `Worker.run`.
    """

    def __init__(self, ask: Callable[[Work], dict[str, Any]], asked: argparse.Namespace, tokenizer: Any, eos: Sequence[int]):
        self.ask, self.asked, self.tokenizer, self.eos = ask, asked, tokenizer, eos

    def prompt(self, task: Task) -> list[int]:
        read = task.read(self.tokenizer)
        return read if isinstance(read, list) else list(encoded(self.tokenizer, read))

    def run(self, tasks: Sequence[Task], about: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields an entry of the journal per problem; the first is decoded twice, to warm up."""
        for place, task in enumerate(tasks):
            prompt = self.prompt(task)
            for _ in range(1 if place else 2):
                answer = self.ask(self._work(task, prompt))
            samples = [self._sample(task, answer, row) for row in range(self.asked.n)]
            attempt = {"seconds": answer["seconds"], "prompt_tokens": len(prompt), "samples": samples}
            yield {"task_id": task.task_id, "error": None, "attempts": {self.asked.engine: attempt}, "loaded": about}

    def _work(self, task: Task, prompt: list[int]) -> Work:
        asked = self.asked
        return Work(
            [prompt], asked.n, asked.max_new_tokens, asked.temperature, asked.top_p, asked.seed, tuple(self.eos), task.stops
        )

    def _sample(self, task: Task, answer: dict[str, Any], row: int) -> dict[str, Any]:
        """Returns a sample as `shoal eval` writes it: its text ends before the end of a text or the first stop string."""
        ids = answer["ids"][row]
        place = next((i for i, token in enumerate(ids) if token in self.eos), None)
        written = ids if place is None else ids[: place + 1]
        text = self.tokenizer.decode(ids[:place], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        cut = min((found for stop in task.stops if (found := text.find(stop)) >= 0), default=None)
        early = (
            place is None and len(ids) < self.asked.max_new_tokens
        )  # OpenVINO leaves out a stop string's last token at times
        stopped = cut is not None or early
        reason = "stop" if stopped else "length" if place is None else "eos"
        logprob, times = answer["mean_logprobs"][row], answer["finished_at"]
        return {
            "text": text[:cut],
            "completion": task.complete(text[:cut], stopped),
            "token_ids": list(written),
            "mean_logprob": logprob if logprob is not None and math.isfinite(logprob) else None,
            "finish_reason": reason,
            "error": None,
            "finished": True,
            "finished_at": answer["seconds"] if times is None else times[row],
        }


def evaluated(
    asked: argparse.Namespace, chosen: EvalSet, sampling: Callable[[Sequence[Task]], Iterable[dict[str, Any]]]
) -> dict[str, Any]:
    """Samples and grades the problems that are missing, and writes the summary; returns it.

    Args:
        sampling: tasks -> their entries, one after the other.
    """
    names = ("engine", "n", "max_new_tokens", "temperature", "top_p", "seed", "threads")
    settings = {"set": chosen.name, "file": chosen.file, "fingerprint": chosen.fingerprint, "chat": chosen.chat}
    settings |= {"model": str(asked.model), "methods": [asked.engine], **{name: getattr(asked, name) for name in names}}
    open_directory(asked.output, settings)
    samples, grades = Journal(asked.output / SAMPLES), Journal(asked.output / GRADES)
    missing = [task for task in chosen.tasks if task.task_id not in samples.entries]
    for entry in with_progress("sampling", sampling(missing), len(missing)) if missing else ():
        samples.append(entry)
    with SandboxOptions().open() as sandbox:
        entries = [samples.entries[task.task_id] for task in chosen.tasks if task.task_id not in grades.entries]
        for entry in with_progress("grading", grade_entries(entries, code_grader(chosen.problems, sandbox)), len(entries)):
            grades.append(entry)
    results = Results(
        [task.task_id for task in chosen.tasks], (asked.engine,), asked.n, chosen.scores, samples.entries, grades.entries
    )
    loaded = [entry["loaded"] for entry in samples.entries.values()]
    summary = {
        "settings": settings,
        "loaded": [one for place, one in enumerate(loaded) if one not in loaded[:place]],
        "machine": machine(torch.device("cpu")) | {"threads": asked.threads},
        **summarize(results, parse_budgets(asked.time_budget)),
    }
    write_synced(asked.output / SUMMARY, json.dumps(summary, allow_nan=False) + "\n")
    return summary


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=("humaneval", "mbxp"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=("llamacpp", "openvino"), required=True)
    parser.add_argument("--python", default=sys.executable, help="that of the environment with the extra `peers`")
    parser.add_argument("--cache", type=Path, default=CACHE, help="directory for what engines convert the model to")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.2)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--time-budget", default="inf")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if the engine is not there, or 130 after Ctrl-C."""
    asked = parsed(arguments)
    chosen = SetOptions(asked.set, data=asked.data, limit=asked.limit, chat=asked.chat).read()
    from shoal.models.pretrained import load_tokenizer

    tokenizer = load_tokenizer(asked.model)
    eos = ends_of(asked.model, tokenizer)

    def sampling(missing: Sequence[Task]) -> Iterator[dict[str, Any]]:
        lengths = [len(EngineSampler(Worker.run, asked, tokenizer, eos).prompt(task)) for task in chosen.tasks]
        setup, log = setup_of(asked, max(lengths) + asked.max_new_tokens), asked.output / "engine.log"
        asked.cache.mkdir(parents=True, exist_ok=True)
        prepare(asked.python, setup, log)
        with Worker(asked.python, setup, log) as worker:
            about = {"version": worker.about["version"], **worker.about["settings"]}
            yield from EngineSampler(worker.run, asked, tokenizer, eos).run(missing, about)

    try:
        evaluated(asked, chosen, sampling)
    except Absent as error:
        print(f"{asked.engine} is not there: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
