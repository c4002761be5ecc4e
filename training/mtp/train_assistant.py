"""The training of a small Gemma 4 with an assistant of its own, and their tokens per pass.

`python training/mtp/train_assistant.py build/assistant` writes the directories `target` and `assistant`, of layers with
a window and layers without, from the bundled pair's corpus and tokenizer, and prints the counts of `train_mtp.py`
with `--draft assistant:build/assistant/assistant`; with `--json FILE` these and the machine become a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

import train_mtp  # isort: skip  # it makes the two scripts below importable

import command
from provenance import require_place

KINDS = ["sliding_attention", "full_attention"]
WINDOW = 64
SHAPE = {
    "vocab_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "global_head_dim": 48,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 1024,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 4,
}


def target_config() -> Gemma4TextConfig:
    return Gemma4TextConfig(**SHAPE, hidden_size=192, intermediate_size=448, num_hidden_layers=4, layer_types=KINDS * 2)


def assistant_config() -> Gemma4AssistantConfig:
    text = {"model_type": "gemma4_text", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
    return Gemma4AssistantConfig(text_config=SHAPE | text | {"layer_types": KINDS}, backbone_hidden_size=192)


def said(model: Any, assistant: Any, tokens: Tensor) -> list[Tensor]:
    """Computes the logits of the target, and those of the assistant for one token ahead and for two.

    The assistant drafts after each token of which the target has not computed the keys, from the state and the keys
    of the tokens before it, as in a round. All drafts of a text are one pass: a token sees the keys up to the one
    before it. Of the assistant's losses the target learns nothing.
    """
    out = model(tokens, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
    logits = [out.logits]
    states = out.hidden_states[-1].detach()
    embedded = model.get_input_embeddings()(tokens).detach()
    for ahead in (1, 2):
        length = tokens.shape[1] - ahead
        read = torch.cat([embedded[:, ahead:], states[:, :length]], dim=-1)
        keys = {kind: tuple(part[:, :, :length].detach() for part in out.shared_kv_states[kind]) for kind in KINDS}
        computed = assistant.model(
            inputs_embeds=assistant.pre_projection(read),
            attention_mask=masks(length),
            position_ids=torch.arange(1, length + 1)[None],
            shared_kv_states=keys,
            use_cache=False,
            output_hidden_states=True,  # else it computes the last token alone
        ).last_hidden_state
        states = assistant.post_projection(computed)
        logits.append(assistant.lm_head(computed))
    return logits


def masks(length: int) -> dict[str, Tensor]:
    """Returns the masks [1, 1, query, kv] that are added to the scores; the last key is seen beside the window."""
    back = torch.arange(length)[:, None] - torch.arange(length)
    hidden = {"full_attention": back < 0, "sliding_attention": (back < 0) | (back > WINDOW)}
    return {kind: torch.zeros(1, 1, length, length).masked_fill(one, -torch.inf) for kind, one in hidden.items()}


def losses(model: Any, assistant: Any, tokens: Tensor) -> list[Tensor]:
    return [
        cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, ahead + 1 :].flatten())
        for ahead, logits in enumerate(said(model, assistant, tokens))
    ]


def train(directory: Path, steps: int) -> None:
    """Trains both, and writes their checkpoints."""
    torch.manual_seed(0)
    model: Any = Gemma4ForCausalLM(target_config())
    assistant: Any = Gemma4AssistantForCausalLM(assistant_config())
    print(f"{sum(one.numel() for one in assistant.parameters()):,} parameters of the assistant", flush=True)
    both = [*model.parameters(), *assistant.parameters()]
    train_mtp.fit(both, lambda tokens: losses(model, assistant, tokens), steps)
    for one, name in ((model, "target"), (assistant, "assistant")):
        one.eval().save_pretrained(directory / name)
        train_mtp.save_tokenizer(directory / name)


def main(
    directory: Path,
    steps: int = 300,
    trained: Annotated[bool, typer.Option("--trained", help="measure the pair that is there")] = False,
    to: Annotated[Path | None, typer.Option("--json", help="write the counts")] = None,
) -> None:
    """Trains, saves and measures."""
    require_place(to)
    if not trained:
        train(directory, steps)
    train_mtp.report(to, None if trained else steps, directory / "target", f"assistant:{directory / 'assistant'}")


if __name__ == "__main__":
    command.run(main)
