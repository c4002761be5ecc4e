"""The tokenizer that Transformers makes of a GGUF file, against what the file itself says of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import smollm2
from shoal.evaluation.problems import Problem
from shoal.evaluation.tasks import code_tasks

pytestmark = pytest.mark.real

TEXTS = [
    "Hello world", " two  spaces\n\n\tand a tab\r\n", "def f(x):\n    return x**2  # 12345", "你好，世界", "😀👩‍🚀🇩🇪",
    "naïve café — ﬁ", "<|im_start|>user\nHi<|im_end|>\n", "don't I'LL we've", "1234567890 3.14159 1e-10",
    "\u00a0\u200b\u202e", "   ", "\x00\x01",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


def test_it_is_that_of_the_file(tokenizer: Any) -> None:
    """Ids of all tokens, those that begin and end texts and turns, and the template."""
    import gguf

    file = smollm2.gguf_file()
    assert file is not None
    fields = gguf.GGUFReader(file).fields
    said = {name.removeprefix("tokenizer."): field.contents() for name, field in fields.items() if "tokenizer" in name}
    tokens = said["ggml.tokens"]
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert tokenizer.bos_token_id == said["ggml.bos_token_id"]
    assert tokenizer.eos_token_id == said["ggml.eos_token_id"]
    assert tokenizer.chat_template == said["chat_template"]
    special = [tokens[i] for i, kind in enumerate(said["ggml.token_type"]) if kind == 3]
    for token in special:
        assert tokenizer(token)["input_ids"] == [tokens.index(token)]
    assert set(tokenizer.all_special_tokens) <= set(special)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_read_and_written_back(tokenizer: Any, text: str) -> None:
    """Nothing is put before them, and nothing is lost."""
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_stand_alone(tokenizer: Any) -> None:
    """By the pre-tokenizer that the file names, "smollm": digits are split off first, so that blanks before one stay together."""
    assert tokenizer.tokenize("a12345") == ["a", "1", "2", "3", "4", "5"]
    assert tokenizer.tokenize("\n\n1.") == ["ĊĊ", "1", "."]
    assert tokenizer.tokenize("=  10") == ["=", "ĠĠ", "1", "0"]


def test_programs_are_asked_for_without_the_line_break_that_belongs_to_their_first_indent(tokenizer: Any) -> None:
    """Told that no indented line follows, the model passed none of 1312 samples of HumanEval."""
    prompt = 'def f(x):\n    """Return x."""\n'
    problem = Problem("f", "python", prompt, "", "f")
    (task,), (chat,) = code_tasks([problem]), code_tasks([problem], chat=True)
    assert task.read(tokenizer) == prompt.rstrip()
    asked = tokenizer.decode(chat.read(tokenizer))
    assert asked.endswith(f"assistant\n```python\n{prompt.rstrip()}")
