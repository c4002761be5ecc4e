"""Transformers' `generate`, eager, all rows in one batch; also what greedy ids are compared with."""

from __future__ import annotations

import torch
import transformers

from engines.tasks import Absent, Answer, Setup, Task


class Engine:
    """See `engines.tasks.Engine`."""

    def __init__(self, setup: Setup) -> None:
        if setup.dtype not in ("float32", "bfloat16"):
            raise Absent("without further packages Transformers has no 8-bit or 4-bit weights on a CPU")
        torch.set_num_threads(setup.threads)
        dtype = getattr(torch, setup.dtype)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(setup.target, dtype=dtype).eval()
        self.version, self.settings = transformers.__version__, {"dtype": setup.dtype}

    def generate(self, task: Task) -> Answer:
        """Prompts are padded on the left."""
        width = max(map(len, task.prompts))
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in task.prompts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in task.prompts])
        sampling = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": task.top_p}
        if task.temperature == 0:
            sampling, ids, mask = {"do_sample": False}, ids.repeat_interleave(task.n, 0), mask.repeat_interleave(task.n, 0)
        else:
            sampling["num_return_sequences"] = task.n
        torch.manual_seed(task.seed)
        with torch.inference_mode():
            found = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=task.new_tokens, eos_token_id=None, pad_token_id=0, **sampling
            )
        return Answer(found[:, width:].tolist())
