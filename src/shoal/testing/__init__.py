"""The tiny models of random weights and the tokenizers for tests, built in milliseconds.

They test the library, drafters and constraints; nothing is downloaded. Scripted models are in
`shoal.testing.scripted`. The weights are random but not small: logits spread over several units
and greedy output does not repeat, so a wrong mask, position or cache column changes the output.

Beside a byte tokenizer there are those that resemble the ones of real models, built in a moment.
They have pieces with byte fallback, words with tags, or 150,000 entries. Each has features that a
tokenizer of one token a byte cannot show: merges, a space within a token, tokens that decoding
joins or strips, tokens that are added to the vocabulary but not special, and special tokens that
encoding puts before a text.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from string import ascii_letters, digits
from typing import Any

import torch
import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing
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
    """Makes a tokenizer of one token per byte, then `SPECIALS`; it needs no files.

    Every text is encoded and decoded without loss.
    """
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
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|user|> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template that writes the token before a text by itself, like Llama's and Mistral's."""
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


def sentence_piece_tokenizer(kind: str = "llama") -> Any:
    """Makes a tokenizer of SentencePiece's pieces, with byte fallback and a token before each text.

    Args:
        kind: "llama": BPE, which writes a space before a text and strips it when it decodes (Llama
            2, TinyLlama, Phi-3); "gemma": BPE that does neither, with a run of spaces as an added
            token; "unigram": a unigram model behind a Metaspace, which writes a space before a
            text.
    """
    if kind == "unigram":
        made = _unigram()
    else:
        made = _pieces(before=kind == "llama")
    made.add_special_tokens(["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"])
    if kind == "gemma":
        made.add_tokens([AddedToken("▁" * 4, special=False)])
    made.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT,
    )


def tagged_tokenizer() -> Any:
    """Makes a tokenizer of byte-level BPE with added tokens that are not special.

    They are `TAGS` and a run of spaces, as in Qwen3.
    """
    made = _byte_level(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(list(TEXTS) * 4, trainer)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (*TAGS, " " * 8)])
    return _chatting(made)


def _chatting(made: Any) -> Any:
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


def large_tokenizer() -> Any:
    """Makes a tokenizer of byte-level BPE with more than 150,000 entries.

    They are all words of up to three letters, many with a space before them. Its chat templates are
    a list, and one of them is for tools.
    """
    letters, vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet()), dict[str, int]()
    merges = [(a, b) for a, b in product(ascii_letters + digits, repeat=2)]
    merges += [(a + b, c) for a, b, c in product(ascii_letters, ascii_letters, ascii_letters)]
    merges += [("Ġ", a + b) for a, b in product(ascii_letters + digits, repeat=2)]
    merges += [("Ġ" + a + b, c) for a, b, c in product("thew", ascii_letters, ascii_letters)]
    for piece in (*letters, *(a + b for a, b in merges)):
        vocabulary.setdefault(piece, len(vocabulary))
    made = _byte_level(models.BPE(vocab=vocabulary, merges=merges))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    return _chatting(made)


def _byte_level(model: Any) -> Tokenizer:
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _pieces(before: bool) -> Tokenizer:
    """Makes BPE over "▁" without any other split.

    Args:
        before: put a space before each text, which decoding strips.
    """
    normalizer: Any = normalizers.Replace(" ", "▁")
    decoder: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if before:
        normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizer])
        decoder.append(decoders.Strip(" ", 1, 0))
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁\\s]*|\\s+"), "isolated")
    names = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", *BYTES]
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=names, show_progress=False)
    trained.train_from_iterator([text for text in TEXTS if text.isascii()] * 4, trainer)
    learnt = trained.get_vocab()
    pieces = sorted(
        (piece for piece in learnt if "\n" not in piece), key=learnt.__getitem__
    )  # a line feed is a byte
    order = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    merges = [pair for pair in merges if all(part in order for part in (*pair, "".join(pair)))]
    made = Tokenizer(
        models.BPE(order, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    made.normalizer = normalizer
    made.decoder = decoders.Sequence(decoder)
    return made


def _unigram() -> Tokenizer:
    words = sorted(
        {
            word
            for text in TEXTS
            if text.isascii()
            for word in text.replace("\n", " ").split(" ")
            if word
        }
    )
    letters = sorted({letter for word in words for letter in word})
    pieces: list[tuple[str, float]] = [
        (name, 0.0) for name in ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>")
    ]
    pieces += [(byte, -20.0) for byte in BYTES] + [("▁", -3.0)]
    pieces += [(letter, -6.0) for letter in letters] + [
        (word, -7.0) for word in words if word not in letters
    ]
    pieces += [(f"▁{word}", -6.5) for word in words]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )
    return made
