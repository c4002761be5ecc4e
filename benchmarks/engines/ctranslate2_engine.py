"""CTranslate2: plain decoding of a batch; it has no speculative decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ctranslate2

from engines.tasks import PLAIN, Absent, Answer, Setup, Task, convert


def _converted(setup: Setup) -> Path:
    return Path(setup.cache) / f"{Path(setup.target).name}-ctranslate2"


def prepare(setup: Setup) -> None:
    """Converts the target, in float32; other formats are made when it is loaded."""
    converter = ctranslate2.converters.TransformersConverter(setup.target)
    convert(_converted(setup), lambda out: converter.convert(str(out)))


class Engine:
    """See `engines.tasks.Engine`. bfloat16 is computed as float32 where the CPU build has no bfloat16."""

    def __init__(self, setup: Setup) -> None:
        if setup.method != PLAIN:
            raise Absent("CTranslate2 has no speculative decoding")
        if setup.dtype == "Q4_0":
            raise Absent("CTranslate2 has no 4-bit weights on a CPU")
        dtype = "int8" if setup.dtype == "Q8_0" else setup.dtype
        wanted = dtype if dtype in ctranslate2.get_supported_compute_types("cpu") else "float32"
        self.generator = ctranslate2.Generator(
            str(_converted(setup)), device="cpu", compute_type=wanted, inter_threads=1, intra_threads=setup.threads
        )
        self.version, self.settings = ctranslate2.__version__, {"compute_type": self.generator.compute_type}

    def generate(self, task: Task) -> Answer:
        """Every row is a prompt; tokens are called t0, t1, ... (`engines.models`)."""
        ctranslate2.set_random_seed(task.seed + 1)
        prompts = [[f"t{token}" for token in row] for row in task.prompts for _ in range(task.n)]
        sampling: dict[str, Any] = {"sampling_topk": 1}
        if task.temperature:
            sampling = {"sampling_topk": 0, "sampling_temperature": task.temperature, "sampling_topp": task.top_p}
        found = self.generator.generate_batch(
            prompts, max_length=task.new_tokens, min_length=task.new_tokens, beam_size=1, include_prompt_in_result=False,
            end_token=[], **sampling,
        )  # fmt: skip
        return Answer([list(one.sequences_ids[0]) for one in found])
