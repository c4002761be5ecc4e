"""The tokenizer of a GGUF file, for grammars, alignment and chats.

It has the same ids as llama.cpp's, or there is none.

Byte-level BPE ("gpt2" in the file) is put together here, of the file's tokens, merges and kinds, as
Transformers reads it for a few architectures only and takes GPT-2's pre-tokenizer for all of them.
SentencePiece ("llama") is read by Transformers.

The ids of a tokenizer are compared with the ids of llama.cpp over `HARD_TEXTS` before it is used.
Reading a file's vocabulary takes a second or more; the tokenizer is then kept in the cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from shoal.durable import cache_folder
from shoal.errors import ModelError, RequestError, UnsupportedModel
from shoal.models.gguf import library

CONTROL, USER_DEFINED = 3, 4
"""The kinds of tokens that are taken out of a text before it is split.

They are the tokens that are not shown, and others.
"""
HEAD_BYTES = 1 << 25
"""The number of first bytes of a file that name its vocabulary in the cache.

A vocabulary of 250,000 entries is shorter.
"""
EDITION = "1"
"""The edition of the module's way of reading, to be changed with it."""

HARD_TEXTS = (
    "",
    "Hello, world! It's 3.14, isn't it? WE'LL see; they'd've known.",
    'def f(x):\n    return x ** 2  # Größe ≤ 10 → 你好, I\'m 3.14\n\t<b>"ok"</b>',
    "1 12 123 1234 12345 3,000,000 0x1F 1e-9 ２０２４ ½ ³",
    "  two  spaces   three\n\n\n  and lines \n \t\t tabs\r\n end  ",
    "naïve café Åström ﬁ ﬂ Straße ẞ ИЖ жук ελληνικά עברית العربية हिन्दी ไทย",
    "日本語の文章です。中文句子，標點「」。한국어 문장입니다.",
    "👩🏽‍🚀🇩🇪 😀😃 é e\u0301 \u200b\u00a0\u2028x \ufeff \x7f \x01",
    "https://example.org/a?b=c&d=%20 user@host.tld C:\\path\\file.txt ~/.config",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!!!!!????____----====****",
    "<div class='x'>&amp;</div> {{ jinja }} ${VAR} $(cmd) [link](url) **bold** `code`",
    "İstanbul ǅ ʼn ŉ ſ K Å",
)
"""The texts that tokenizers split differently."""

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken-l3"), r"\p{N}{1,3}"
    ),
    **dict.fromkeys(
        ("qwen2", "stablelm2", "hunyuan", "megrez", "deepseek-r1-qwen", "solar-open"), r"\p{N}"
    ),
}
"""The pattern of a piece of digits, by the name of the pre-tokenizer.

These pre-tokenizers split words as Llama 3 does.
"""
DIGITS_ALONE = (
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "codeshell",
    "exaone",
    "minerva-7b",
    "trillion",
    "granite-docling",
)
"""The pre-tokenizers that split off each digit, and then split as GPT-2's does."""


def tokenizer_of(file: Path) -> Any:
    """Returns the Transformers tokenizer of a GGUF file.

    Raises:
        RequestError: the package `gguf` is not installed.
        ModelError: the file is damaged.
        UnsupportedModel: no tokenizer with llama.cpp's ids can be made of the file.
    """
    place = _place(file)
    if place is not None and (place / "tokenizer_config.json").is_file():
        with suppress(OSError, ValueError):
            return transformers.AutoTokenizer.from_pretrained(str(place))
    tokenizer = _make(file)
    _compare(file, tokenizer)
    if place is not None:
        with suppress(OSError):
            _keep(tokenizer, place)
    return tokenizer


def _place(file: Path) -> Path | None:
    """Returns the directory of a file's tokenizer in the cache folder; None without a folder."""
    folder = cache_folder()
    if folder is None:
        return None
    with file.open("rb") as stream:
        digest = hashlib.sha256(stream.read(HEAD_BYTES))
    versions = f"{EDITION} {transformers.__version__} {tokenizers.__version__}"
    digest.update(f"{file.stat().st_size} {versions}".encode())
    return folder / "tokenizers" / digest.hexdigest()[:24]


def _keep(tokenizer: Any, place: Path) -> None:
    """Writes a tokenizer; a directory of this name is never incomplete."""
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
    try:
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _make(file: Path) -> Any:
    metadata = _Metadata(file)
    kind = metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(file, metadata)
    elif kind == "llama":
        place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        try:
            read = transformers.AutoTokenizer.from_pretrained(**place)
        except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
            raise UnsupportedModel(
                f"{file}: Transformers cannot read its tokenizer: {error}"
            ) from error
        backend = read.backend_tokenizer
    else:
        raise UnsupportedModel(
            f"{file}: its tokenizer is of the kind {kind or 'none'!r}; shoal reads 'gpt2' and "
            f"'llama'"
        )
    _add_ends(backend, metadata)
    result = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in metadata.named_tokens()},
    )
    template = metadata.text("tokenizer.chat_template")
    result.chat_template = template or None
    return result


def _byte_level(file: Path, metadata: _Metadata) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a byte-level BPE."""
    tokens, kinds = metadata.tokens, metadata.numbers("tokenizer.ggml.token_type")
    merges = [
        (first, second)
        for first, _, second in (
            pair.partition(" ") for pair in metadata.texts("tokenizer.ggml.merges")
        )
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    backend.pre_tokenizer = _pre_tokenizer(metadata.text("tokenizer.ggml.pre") or "gpt-2")
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return backend


def _pre_tokenizer(name: str) -> Any:
    """Returns the pre-tokenizer, which splits a text into words, by the file's name for it.

    For a name that is not known it is GPT-2's.
    """
    if name in SPLITS:
        pattern = "|".join((CONTRACTIONS, LETTERS, SPLITS[name], REST))
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), by_bytes])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in DIGITS_ALONE:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words


def _add_ends(backend: tokenizers.Tokenizer, metadata: _Metadata) -> None:
    """Makes the tokenizer add the tokens that the file names for the ends of a text."""
    tokens = dict(metadata.named_tokens())
    first = tokens.get("bos") if metadata.number("tokenizer.ggml.add_bos_token") else None
    last = tokens.get("eos") if metadata.number("tokenizer.ggml.add_eos_token") else None
    ends = [(token, backend.token_to_id(token)) for token in (first, last) if token is not None]
    pieces = [token for token in (first, "$A", last) if token is not None]
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(pieces), special_tokens=ends
        )


class _Metadata:
    """The facts of a GGUF file that its tokenizer is made of."""

    def __init__(self, file: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise RequestError(
                "a GGUF file's tokenizer needs the package gguf: pip install '.[gguf]'"
            ) from error
        try:
            self._fields = gguf.GGUFReader(str(file)).fields
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ModelError(
                f"{file} is damaged or not whole ({error}); download it again"
            ) from error

    def _value(self, name: str) -> Any:
        field = self._fields.get(name)
        return None if field is None else field.contents()

    def text(self, name: str) -> str:
        return str(self._value(name) or "")

    def number(self, name: str) -> int:
        return int(self._value(name) or 0)

    def texts(self, name: str) -> Sequence[str]:
        return self._value(name) or ()

    def numbers(self, name: str) -> Sequence[int]:
        return self._value(name) or ()

    @property
    def tokens(self) -> Sequence[str]:
        return self.texts("tokenizer.ggml.tokens")

    def named_tokens(self) -> Iterator[tuple[str, str]]:
        """Yields the tokens that have a role: "bos", "eos", "pad", "unk"."""
        names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        for name, key in names.items():
            number = self._value(f"tokenizer.ggml.{key}_token_id")
            if number is not None and int(number) < len(self.tokens):
                yield name, self.tokens[int(number)]


def _compare(file: Path, tokenizer: Any) -> None:
    """Raises UnsupportedModel if llama.cpp splits one of the hard texts into other ids."""
    lib = library()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    handle = lib.llama_model_load_from_file(str(file).encode(), params)
    try:
        vocab = lib.llama_model_get_vocab(handle)
        specials = "".join(f"{token} x" for token in tokenizer.all_special_tokens)
        for text in (*HARD_TEXTS, specials):
            for ends in (False, True):
                right = _ids(lib, vocab, text, ends)
                ours = tokenizer.encode(text, add_special_tokens=ends)
                if ours != right:
                    at = next(
                        (i for i, (a, b) in enumerate(zip(ours, right, strict=False)) if a != b),
                        min(len(ours), len(right)),
                    )
                    raise UnsupportedModel(
                        f"{file}: no tokenizer with llama.cpp's ids can be made of it: of {text!r} "
                        f"it makes {right[at : at + 4]} from token {at} on, and its vocabulary by "
                        f"the rules of its pre-tokenizer {ours[at : at + 4]}"
                    )
    finally:
        lib.llama_model_free(handle)


def _ids(lib: Any, vocab: Any, text: str, ends: bool) -> list[int]:
    """Returns llama.cpp's ids of a text, special tokens recognised in it."""
    data = text.encode()
    ids = (lib.llama_token * (len(data) + 8))()
    room = ctypes.cast(ids, ctypes.POINTER(lib.llama_token)), len(ids)
    count = lib.llama_tokenize(vocab, data, len(data), *room, ends, True)
    return list(ids[:count])
