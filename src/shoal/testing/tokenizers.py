"""The tokenizers that resemble those of real models, built in a moment.

They have pieces with byte fallback, words with tags, or 150,000 entries. Each has features that a
tokenizer of one token a byte cannot show: merges, a space within a token, tokens that decoding
joins or strips, tokens that are added to the vocabulary but not special, and special tokens that
encoding puts before a text.
"""

from __future__ import annotations

import json
from itertools import product
from string import ascii_letters, digits
from typing import Any

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
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=[
            {"name": "default", "template": CHATML},
            {"name": "tool_use", "template": CHATML_TOOLS},
        ],
    )


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
