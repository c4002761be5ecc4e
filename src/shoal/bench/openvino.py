"""The engine OpenVINO GenAI on an exported model, plain or with a draft model.

The package `openvino-genai` is optional. An export is a directory that `optimum-cli export openvino
--task text-generation-with-past` wrote. This module imports nothing of shoal: `benchmarks/engines`
loads it from its file, in environments where shoal is not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    """

    new_tokens: int
    temperature: float
    seed: int
    top_p: float = 1.0
    drafted: int = 0
    eos: tuple[int, ...] = ()


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

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: OpenVinoSampling
    ) -> list[list[int]]:
        """Generates the ids of n rows of each prompt, prompt by prompt.

        With a draft model, and greedily, every row is a prompt of its own: the pipeline refuses
        several sequences of one prompt there.
        """
        import numpy as np
        import openvino

        copies, sequences = (1, n) if sampling.temperature and not sampling.drafted else (n, 1)
        rows = [row for row in prompts for _ in range(copies)]
        inputs = [openvino.Tensor(np.array([row], dtype=np.int64)) for row in rows]
        configs = [
            self._config(sampling, sequences, 1000 * sampling.seed + i) for i in range(len(rows))
        ]
        results = self.pipeline.generate(inputs, configs)
        return [list(ids) for result in results for ids in result.m_generation_ids]

    def _config(self, sampling: OpenVinoSampling, sequences: int, seed: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.apply_chat_template = sampling.new_tokens, False
        config.ignore_eos, config.stop_token_ids = not sampling.eos, set(sampling.eos)
        config.num_return_sequences = sequences
        if sampling.temperature:
            config.do_sample, config.temperature, config.rng_seed = True, sampling.temperature, seed
            config.top_p = sampling.top_p
        if sampling.drafted:
            config.num_assistant_tokens = sampling.drafted
        return config
