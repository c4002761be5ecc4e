"""The tiny models of random weights and the tokenizers for tests, built in milliseconds.

They test the library, drafters and constraints; nothing is downloaded. Scripted models are in
`shoal.testing.scripted`. The weights are random but not small: logits spread over several units
and greedy output does not repeat, so a wrong mask, position or cache column changes the output.

Beside a byte tokenizer there is one that resembles those of Qwen3. It has features that a tokenizer
of one token a byte cannot show: merges, a space within a token, and tokens that are added to the
vocabulary but not special.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shoal.testing.architectures import ARCHITECTURES, LAYERS, NAMES, RECURRENT, REFUSED

__all__ = [
    "ARCHITECTURES",
    "RECURRENT",
    "REFUSED",
    "VOCABULARY",
    "save_pair",
    "tiny_model",
    "tiny_tokenizer",
]


SPECIALS = ("<|end|>", "<|begin|>", "<|pad|>", "<|unused|>")
VOCABULARY = 256 + len(SPECIALS)
END, BEGIN, PAD = 256, 257, 258

STD = 0.35
"""The standard deviation of the weight matrices: 17 times the usual initialisation."""


def tiny_model(
    architecture: str,
    *,
    seed: int = 0,
    vocab_size: int = VOCABULARY,
    layers: int = 2,
    **overrides: Any,
) -> Any:
    """Makes a random Transformers model of that architecture in float32, ready to decode.

    Args:
        architecture: a name in `ARCHITECTURES`, `RECURRENT` or `REFUSED`.
        seed: the seed of the weights.
        layers: the number of layers; architectures that mix layer types need two.
        overrides: further arguments of the config.

    Returns:
        A `PreTrainedModel` in evaluation mode, without EOS, so that only limits and stop strings
        end a row.
    """
    spec = {**ARCHITECTURES, **RECURRENT, **REFUSED}[architecture]
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shape = {"vocab_size": vocab_size, LAYERS[spec.names]: layers, "tie_word_embeddings": False}
    config = getattr(transformers, spec.config)(
        **{**special, **shape, **NAMES[spec.names], **spec.options, **overrides}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for vectors with random initial values, such as GPT-OSS's sinks
        model = getattr(transformers, spec.auto).from_config(config, dtype=torch.float32)
    fill(model, seed)
    return model.eval()


def fill(model: Any, seed: int, std: float = STD) -> None:
    """Fills a model with random weights, the same on every machine.

    Matrices are N(0, std²); vectors have noise added to their initial values.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.data.copy_(std * noise)
        else:
            parameter.data.add_(0.1 * noise)


def tiny_tokenizer() -> Any:
    """Makes a lossless tokenizer of one token per byte, then `SPECIALS`, without files."""
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIALS[0],
        bos_token=SPECIALS[1],
        pad_token=SPECIALS[2],
    )


def save_pair(
    directory: Path,
    architecture: str = "llama",
    *,
    draft_architecture: str | None = None,
    seed: int = 0,
    **overrides: Any,
) -> tuple[Path, Path]:
    """Saves a tiny target and a random one-layer drafter with their tokenizer.

    `shoal.load` can read them.

    Args:
        overrides: config arguments of the target.

    Returns:
        The directories `target` and `drafter` within `directory`.
    """
    end = {"eos_token_id": END, "bos_token_id": BEGIN, "pad_token_id": PAD}
    target = tiny_model(architecture, seed=seed, **{**end, **overrides})
    drafter = tiny_model(draft_architecture or "llama", seed=seed + 1, layers=1, **end)
    places = directory / "target", directory / "drafter"
    for model, place in zip((target, drafter), places, strict=True):
        model.save_pretrained(place)
        tiny_tokenizer().save_pretrained(place)
    return places


TEXTS = (
    "def add(first, second):\n    return first + second\n\n\n",
    "the drafter writes the text, the target reads the text again\n",
    "Größe ≤ 10 → 你好世界, naïve café 🙂🙃\n",
    "  \t  spaces   and\n\n\n lines  \n",
    "while 2 ** 10 > x: x = x - 1; print('x', \"y\")",
    '{"name": "add", "arguments": {"first": 1, "second": true}} [INST] the answer is 42 [/INST]',
)
"""The texts that the small vocabularies are trained on."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOOLS = (
    "<|im_start|>system\nFunctions: {{ tools | tojson }}\nA call is written as "
    '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' + CHATML
)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""The tokens that Qwen3 adds to its vocabulary without calling them special: texts show them."""


def tagged_tokenizer() -> Any:
    """Makes a tokenizer of byte-level BPE with added tokens that are not special.

    They are `TAGS` and a run of spaces, as in Qwen3.
    """
    made = byte_level(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(list(TEXTS) * 4, trainer)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (*TAGS, " " * 8)])
    return chatting(made)


def chatting(made: Any) -> Any:
    """Makes a tokenizer with a list of chat templates, one of them for tools."""
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=[
            {"name": "default", "template": CHATML},
            {"name": "tool_use", "template": CHATML_TOOLS},
        ],
    )


def byte_level(model: Any) -> Tokenizer:
    """Makes a tokenizer without added tokens from a model of pieces of bytes."""
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made
