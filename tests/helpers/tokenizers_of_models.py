"""Tokenizers that resemble those of real models, each made once, with scripted models over them.

They have pieces with byte fallback, words with tags, or 150,000 entries. Each has features that a tokenizer of one token a byte
cannot show: merges, a space within a token, tokens that decoding joins or strips, tokens that are added to the vocabulary but not
special, and special tokens that encoding puts before a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from string import ascii_letters, digits
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from shoal.api import Shoal
from shoal.constraints.token_bytes import fallback, token_bytes
from shoal.testing import TEXTS, byte_level, chatting, tagged_tokenizer
from shoal.testing.scripted import History, adversary, hashed, mixed, says, scripted

BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|user|> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template that writes the token before a text by itself, like Llama's and Mistral's."""


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
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT,
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
    made = byte_level(models.BPE(vocab=vocabulary, merges=merges))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    return chatting(made)


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
    pieces = sorted((piece for piece in learnt if "\n" not in piece), key=learnt.__getitem__)  # a line feed is a byte
    order = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    merges = [pair for pair in merges if all(part in order for part in (*pair, "".join(pair)))]
    made = Tokenizer(models.BPE(order, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizer
    made.decoder = decoders.Sequence(decoder)
    return made


def _unigram() -> Tokenizer:
    words = sorted({word for text in TEXTS if text.isascii() for word in text.replace("\n", " ").split(" ") if word})
    letters = sorted({letter for word in words for letter in word})
    pieces: list[tuple[str, float]] = [(name, 0.0) for name in ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>")]
    pieces += [(byte, -20.0) for byte in BYTES] + [("▁", -3.0)]
    pieces += [(letter, -6.0) for letter in letters] + [(word, -7.0) for word in words if word not in letters]
    pieces += [(f"▁{word}", -6.5) for word in words]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return made


KINDS: dict[str, Callable[[], Any]] = {
    "llama": sentence_piece_tokenizer,
    "gemma": partial(sentence_piece_tokenizer, "gemma"),
    "unigram": partial(sentence_piece_tokenizer, "unigram"),
    "tagged": tagged_tokenizer,
    "large": large_tokenizer,
}
SMALL = ("llama", "gemma", "unigram", "tagged")
PIECES = ("llama", "gemma", "unigram")


@cache
def tokenizer(kind: str) -> Any:
    return KINDS[kind]()


def plain(kind: str, text: str) -> tuple[int, ...]:
    """The ids of a text without special tokens around it."""
    return tuple(tokenizer(kind).encode(text, add_special_tokens=False))


def written(kind: str, ids: Sequence[int]) -> str:
    """The text of ids, as Transformers decodes it."""
    found = tokenizer(kind).decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(found)


def saying(kind: str, prompt: Sequence[int], ids: Sequence[int]) -> Shoal:
    """A pair whose target goes on from a prompt with these ids, then ends; its drafter is right now and then."""
    size, end = len(tokenizer(kind)), tokenizer(kind).eos_token_id
    script = says([(*prompt, *ids, end)], size, otherwise=end)
    return shoal(kind, script, mixed(script, adversary(script, size), every=3))


def chatty(kind: str, seed: int = 0) -> Shoal:
    """A pair that says any tokens but those of bytes, which it says where a grammar leaves no choice; it mostly agrees."""
    size = len(tokenizer(kind))
    names = tokenizer(kind).convert_ids_to_tokens(range(size))
    pairs = zip(token_bytes(tokenizer(kind)), names, strict=True)
    odd = torch.tensor([0.0 if _whole(raw) and not fallback(name) else 40.0 for raw, name in pairs])
    said, drafted = (hashed(size, each, spread=3.0) for each in (seed, seed + 1))
    script: History = lambda ids: said(ids) - odd  # noqa: E731
    return shoal(kind, script, mixed(script, lambda ids: drafted(ids) - odd, every=3))


def _whole(raw: bytes | None) -> bool:
    try:
        return bool((raw or b"").decode())
    except UnicodeDecodeError:
        return False


def shoal(kind: str, target: History, drafter: History) -> Shoal:
    size = len(tokenizer(kind))
    made = Shoal(scripted(target, size), scripted(drafter, size), tokenizer(kind), max_batch=8)
    made.eos = (tokenizer(kind).eos_token_id,)
    return made
