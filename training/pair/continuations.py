"""The batched sampling from the target, for distillation and for the report."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import track
from transformers import LlamaForCausalLM

from pair_models import END_ID, PAD_ID

BATCH = 256  # rows


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    seed: int,
    new_tokens: int = 160,
) -> list[list[int]]:
    """Returns each prompt's continuation: at most `new_tokens` ids, the end of text included."""
    torch.manual_seed(seed)
    # Prompts of like length share a batch, so that there is little padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: list[list[int]] = [[] for _ in prompts]
    starts = range(0, len(order), BATCH)
    for start in track(starts, f"samples at T={temperature}", console=Console(stderr=True)):
        places = order[start : start + BATCH]
        rows = _continue(model, [prompts[i] for i in places], temperature, new_tokens)
        for place, row in zip(places, rows, strict=True):
            results[place] = row
    return results


def _continue(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], temperature: float, new_tokens: int
) -> list[list[int]]:
    """Continues one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), PAD_ID)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
    ids = ids.to(model.device)
    # An inner pad token would be text: the mask marks the padding by place, not by id.
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=ids.device)
    mask = torch.arange(width, device=ids.device) >= width - lengths[:, None]
    output = model.generate(
        input_ids=ids,
        attention_mask=mask.long(),
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
    )
    return [_until_end(row) for row in output[:, width:].tolist()]


def _until_end(row: list[int]) -> list[int]:
    return row[: row.index(END_ID) + 1] if END_ID in row else row
