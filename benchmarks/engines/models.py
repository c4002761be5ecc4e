"""The models of the rows, made once: the bundled pair, SmolLM2, and random weights. `python -m engines.models NAME CACHE`.

All are saved in float32 (their numbers fit bfloat16), with a tokenizer of which the converters only want that it is there: token i
is called "t{i}", and no engine is given text.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "src/shoal/data/pair"
TEMPERATURE = 0.8
ACCEPTANCE = 0.8
"""What the random pair agrees on: the probability that a draft of its drafter is accepted."""
SPREAD = 3.2
"""Standard deviation of the random models' logits: some 2 nats of entropy at that temperature, as in text."""
TEXTS, START, LENGTH = 4, 100, 164
"""On which the agreement is measured: texts, tokens of their random prompts, and of the whole, as in the rows of the table."""
NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def directory(cache: Path, name: str) -> Path:
    return cache / "models" / name


def save(model: Any, place: Path) -> None:
    """In float32, with the tokenizer that has no text."""
    model.to(torch.bfloat16).to(torch.float32).save_pretrained(place)
    names = {f"t{i}": i for i in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="t0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "t0")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(place)


def bundled(cache: Path) -> None:
    """The pair that ships with shoal."""
    for part in ("drafter", "target"):
        save(AutoModelForCausalLM.from_pretrained(BUNDLED / part, dtype=torch.float32), directory(cache, f"bundled-{part}"))


def smollm2_checkpoint() -> Path:
    """The directory that the tests decode; it needs the extra `real`."""
    sys.path.append(str(ROOT / "tests/helpers"))
    import smollm2 as helper

    return helper.checkpoint()


def smollm2(cache: Path) -> None:
    """SmolLM2-135M-Instruct, as a directory and as GGUF files."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_checkpoint(), dtype=torch.float32)
    for name, value in NO_ENDS.items():
        setattr(model.config, name, value)
        setattr(model.generation_config, name, value)
    from gguf_files import smollm2_gguf

    for kind in ("Q8_0", "Q4_0"):
        smollm2_gguf(cache, kind).replace(cache / f"smollm2-target-{kind}.gguf")
    save(model, directory(cache, "smollm2-target"))


def qwen(cache: Path) -> None:
    """The shape of Qwen2 0.5B with random weights; its logits are as spread as those of a trained model."""
    config = Qwen2Config(
        hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864,
        vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=4096, **NO_ENDS,
    )  # fmt: skip
    model = _random(config, seed=0)
    model.model.norm.weight.data.fill_(SPREAD / (config.initializer_range * math.sqrt(config.hidden_size)))
    save(model, directory(cache, "qwen-target"))


def llama(cache: Path) -> None:
    """A Llama of 349 M parameters with random weights, and a drafter that agrees with it as drafters do.

    An imposed acceptance rate would need every engine's cooperation. Instead the weights are such that drafts are accepted at
    about `ACCEPTANCE`: both models share an embedding and a head, of the drafter's width; the target has them turned into its own
    width. Without layers both would give the same logits; the target's layers are scaled until that much of the agreement is left.
    Every operation is done on full matrices, as with any weights.
    """
    wide = LlamaConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8, intermediate_size=2816,
        vocab_size=32000, tie_word_embeddings=False, max_position_embeddings=4096, **NO_ENDS,
    )  # fmt: skip
    narrow = LlamaConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1408,
        vocab_size=32000, tie_word_embeddings=False, max_position_embeddings=4096, **NO_ENDS,
    )  # fmt: skip
    target, drafter = agreeing_pair(wide, narrow, ACCEPTANCE)
    save(drafter, directory(cache, "llama-drafter"))
    save(target, directory(cache, "llama-target"))  # last: it says that both are there


def agreeing_pair(wide: Any, narrow: Any, acceptance: float) -> tuple[Any, Any]:
    """A target and a drafter of these shapes with that acceptance; see `llama`."""
    target, drafter = _random(wide, seed=1), _random(narrow, seed=2)
    generator = torch.Generator().manual_seed(3)
    embedding, head = (torch.randn(narrow.vocab_size, narrow.hidden_size, generator=generator) for _ in range(2))
    turn, _ = torch.linalg.qr(torch.randn(wide.hidden_size, narrow.hidden_size, generator=generator))
    for model, rotated in ((target, turn), (drafter, torch.eye(narrow.hidden_size))):
        model.get_input_embeddings().weight.data.copy_(embedding @ rotated.T)
        model.get_output_embeddings().weight.data.copy_(head @ rotated.T * SPREAD / math.sqrt(len(rotated)))
    _scale_layers(drafter, 0.05)
    ids = _text(embedding, head, generator)
    for _ in range(2):  # then on what the target itself writes
        _scale_layers(target, _solve(partial(_agreement, target, ids, _probabilities(drafter, ids)), acceptance))
        ids = _written(target, ids[:, :START])
    return target, drafter


def _agreement(target: Any, ids: Tensor, drafts: Tensor, scale: float) -> float:
    """The mean over positions of the sum of min(p, q), the probability that a draft is accepted, with the layers scaled so."""
    _scale_layers(target, scale)
    found = torch.minimum(_probabilities(target, ids), drafts)[:, START:].sum(-1).mean().item()
    _scale_layers(target, 1 / scale)
    return found


def _solve(falling: Callable[[float], float], wanted: float) -> float:
    low, high = 1e-3, 10.0
    for _ in range(9):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return math.sqrt(low * high)


def _random(config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _scale_layers(model: Any, factor: float) -> None:
    """What each layer adds to the residual stream."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(factor)
        layer.mlp.down_proj.weight.data.mul_(factor)


def _text(embedding: Tensor, head: Tensor, generator: torch.Generator) -> Tensor:
    """What the models would write after random prompts without their layers, [TEXTS, LENGTH]."""
    ids = list(torch.randint(len(head), (START, TEXTS), generator=generator))
    while len(ids) < LENGTH:
        unit = torch.nn.functional.normalize(embedding[ids[-1]], dim=-1)
        p = (SPREAD / TEMPERATURE * unit @ head.T).softmax(-1)
        ids.append(torch.multinomial(p, 1, generator=generator).squeeze(1))
    return torch.stack(ids, 1)


def _written(target: Any, ids: Tensor) -> Tensor:
    """What the target goes on to write."""
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "max_new_tokens": LENGTH - START}
    found: Tensor = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return found


@torch.inference_mode()
def _probabilities(model: Any, ids: Tensor) -> Tensor:
    return (model(ids).logits / TEMPERATURE).softmax(-1)


MAKERS = {"bundled": bundled, "llama": llama, "qwen": qwen, "smollm2": smollm2}


def make(name: str, cache: Path) -> None:
    """Does nothing where the target is there already."""
    if not (directory(cache, f"{name}-target") / "tokenizer.json").exists():
        transformers.utils.logging.disable_progress_bar()
        MAKERS[name](cache)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
