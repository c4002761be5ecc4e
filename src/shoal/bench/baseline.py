"""Hugging Face `generate`, batched, on the very model object that shoal uses: the baseline to beat."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from shoal.stats import Stats


def hf_generate(hf: Any, prompt_ids: Sequence[int], n: int, max_new_tokens: int, temperature: float, seed: int) -> Stats:
    """n samples of exactly `max_new_tokens` tokens by plain batched sampling; counts and wall-clock seconds.

    EOS does not end a row and nothing truncates the distribution, as in the runs it is compared with.
    """
    ids = torch.tensor([prompt_ids] * n, device=hf.device)
    torch.manual_seed(seed)
    started = time.perf_counter()
    out = hf.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
        max_new_tokens=max_new_tokens, min_new_tokens=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    committed = int(out.shape[1] - ids.shape[1]) * n
    rounds = max_new_tokens
    return Stats(rounds=rounds, target_passes=rounds, row_rounds=rounds * n, committed=committed, seconds=seconds)
