"""shoal, with the defaults of `shoal.load` and `generate`."""

from __future__ import annotations

from typing import Any

import torch

import shoal
from engines.tasks import PLAIN, Answer, Setup, Task

ROUNDED = "target=int8,draft=int8"


class Engine:
    """See `engines.tasks.Engine`. Beside 8-bit weights all is bfloat16; float32 with "-float32", for the identity check."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        dtype = "float32" if setup.dtype.endswith("float32") else "bfloat16"
        options: dict[str, Any] = {"dtype": dtype, "device": "cpu", "quantize": ROUNDED if "int8" in setup.dtype else "off"}
        if setup.draft is None and "quantize" in options:
            options["quantize"] = options["quantize"].partition(",")[0]
        target: Any = setup.target
        if setup.dtype.startswith("Q"):
            target, options = setup.gguf_file(setup.target), {"device": "cpu"}
        self.pair = shoal.load(target, draft=setup.draft, **options)
        self.lookahead: Any = "off" if setup.method == PLAIN else setup.method
        self.version, self.settings = shoal.__version__, {name: str(value) for name, value in options.items()}

    def generate(self, task: Task) -> Answer:
        """Draws by rejection, which keeps most drafts; the seed is there for other noise in every repeat."""
        found = self.pair.generate(
            [list(prompt) for prompt in task.prompts], task.n, max_new_tokens=task.new_tokens, temperature=task.temperature,
            top_p=task.top_p, seed=task.seed, rule="rejection", eos=(), lookahead=self.lookahead,
        )  # fmt: skip
        ids = [sample.token_ids for output in found for sample in output.samples]
        return Answer(ids, found.stats.drafted, found.stats.accepted, found.stats.acceptance_length)
