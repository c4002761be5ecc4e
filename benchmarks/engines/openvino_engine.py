"""OpenVINO GenAI's continuous batching, plain or with a draft model.

An export is a directory that `optimum-cli export openvino --task text-generation-with-past` wrote.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engines.tasks import Answer, Setup, Task, convert

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "bf16"}
"""The precisions of the arithmetic, by the dtype that is asked for.

Weights of 8 bits come with the export.
"""
CACHE_GIB = 2  # for keys and values
MOST_TOKENS = 4096  # of a pass, prompts included


@dataclass(frozen=True)
class OpenVinoSampling:
    """The settings of a call.

    Attributes:
        drafted: the tokens of the draft model per round, 0 = plain.
        eos: the ids that end a row.
        stops: the strings that end a row; they stay in its text.
    """

    new_tokens: int
    temperature: float
    seed: int
    top_p: float = 1.0
    drafted: int = 0
    eos: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()


class OpenVinoEngine:
    """The continuous batching pipeline of OpenVINO on a CPU.

    Args:
        export: the directory of the target.
        draft: the directory of a draft model; it then drafts in every call.
        dtype: a key of `PRECISIONS`.
        threads: the number of the CPU's threads.

    Raises:
        ImportError: the package is not installed.
        RuntimeError: no export is there.
    """

    def __init__(self, export: str, dtype: str, threads: int, draft: str | None = None) -> None:
        import openvino_genai

        self.genai, self.version = openvino_genai, str(openvino_genai.__version__)
        self.properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
            "INFERENCE_NUM_THREADS": threads,
        }
        if dtype == "float32":
            self.properties["KV_CACHE_PRECISION"] = "f32"  # 8 bits by default
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens = CACHE_GIB, MOST_TOKENS
        scheduler.enable_prefix_caching = False  # a repeat must not find the prompt of the last one
        given = dict(self.properties)
        if draft is not None:
            given["draft_model"] = openvino_genai.draft_model(draft, "CPU", **self.properties)
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(export, scheduler, "CPU", given)

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: OpenVinoSampling) -> list[list[int]]:
        """Generates the ids of n rows of each prompt, prompt by prompt."""
        return [ids for ids, _ in self.scored(prompts, n, sampling)]

    def scored(self, prompts: Sequence[Sequence[int]], n: int, sampling: OpenVinoSampling) -> list[tuple[list[int], float]]:
        """Generates n rows of each prompt, prompt by prompt: their ids, and the sum of their log-probabilities.

        With a draft model, and greedily, every row is a prompt of its own: the pipeline refuses
        several sequences of one prompt there.
        """
        import numpy as np
        import openvino

        copies, sequences = (1, n) if sampling.temperature and not sampling.drafted else (n, 1)
        rows = [row for row in prompts for _ in range(copies)]
        inputs = [openvino.Tensor(np.array([row], dtype=np.int64)) for row in rows]
        configs = [self._config(sampling, sequences, 1000 * sampling.seed + i) for i in range(len(rows))]
        results = self.pipeline.generate(inputs, configs)
        return [
            (list(ids), float(score))
            for result in results
            for ids, score in zip(result.m_generation_ids, result.m_scores, strict=True)
        ]

    def _config(self, sampling: OpenVinoSampling, sequences: int, seed: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.apply_chat_template = sampling.new_tokens, False
        config.ignore_eos, config.stop_token_ids = not sampling.eos, set(sampling.eos)
        if sampling.stops:
            config.stop_strings, config.include_stop_str_in_output = set(sampling.stops), True
        config.num_return_sequences = sequences
        if sampling.temperature:
            config.do_sample, config.temperature, config.rng_seed = True, sampling.temperature, seed
            config.top_p = sampling.top_p
        if sampling.drafted:
            config.num_assistant_tokens = sampling.drafted
        return config


def _weights(setup: Setup) -> list[str]:
    """The format of the weights, and options of it: groups as those of the GGUF files."""
    forms = {"int8": ["int8"], "Q8_0": ["int8"], "Q4_0": ["int4", "--group-size", "32", "--sym", "--ratio", "1.0"]}
    return forms.get(setup.dtype, ["fp32"])


def _export(setup: Setup, model: str) -> Path:
    return Path(setup.cache) / f"{Path(model).name}-openvino-{_weights(setup)[0]}"


def prepare(setup: Setup) -> None:
    """Exports both models, weights in float32 (the arithmetic is chosen when they are loaded) or int8."""
    import openvino_genai  # noqa: F401 - says what is missing before minutes of exporting
    import optimum.intel  # noqa: F401

    for model in filter(None, (setup.target, setup.draft)):
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", model]
        command += ["--task", "text-generation-with-past", "--weight-format", *_weights(setup)]
        convert(_export(setup, model), partial(_run, command))


def _run(command: list[str], out: Path) -> None:
    subprocess.run([*command, str(out)], check=True, stdout=sys.stderr)


class Engine:
    """See `engines.tasks.Engine`."""

    def __init__(self, setup: Setup) -> None:
        self.drafted = setup.drafted
        draft = str(_export(setup, setup.draft)) if setup.draft is not None and setup.drafted else None
        dtype = setup.dtype if setup.dtype in PRECISIONS else "int8"
        if setup.isa:  # AVX2 has no products of bfloat16
            dtype = "float32"
        self.engine = OpenVinoEngine(str(_export(setup, setup.target)), dtype, setup.threads, draft)
        self.version = self.engine.version
        self.settings = {name: str(value) for name, value in self.engine.properties.items()}

    def generate(self, task: Task) -> Answer:
        """One call."""
        ends = tuple(task.eos), tuple(task.stops)
        sampling = OpenVinoSampling(task.new_tokens, task.temperature, task.seed, task.top_p, self.drafted, *ends)
        rows = self.engine.scored(task.prompts, task.n, sampling)
        return Answer([ids for ids, _ in rows], mean_logprobs=[score / max(1, len(ids)) for ids, score in rows])
