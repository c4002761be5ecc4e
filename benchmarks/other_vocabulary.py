"""Tokens per target pass of drafters with another tokenizer, by TLI, SLEM and SLRS: counts alone, no times.

    python benchmarks/other_vocabulary.py WORK
    python benchmarks/other_vocabulary.py WORK --steps 150 --greedy --prompts 500 -n 1 --tokens 24 -k 4

The second counts no sampled rows: it compares the greedy ids of many prompts with those of plain decoding.
Trains the drafters first, in a few minutes each, if there are none in WORK yet, on a part of the bundled drafter's corpus: one of
its shape, with a tokenizer of 1,536 tokens, split as GPT-2 splits texts, and one of two layers whose tokens are bytes. The bundled
drafter, beside them, was trained for longer, and distilled from the target.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

import shoal
from held_out import problems
from pair_corpus import CorpusSize, build_corpus, pack
from pair_models import build, drafter_config
from pair_tokenizer import END, PAD
from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.drafting.distillation import next_token_loss
from shoal.drafting.other_vocabulary import SLEM, SLRS, TLI, MethodChoice, MethodTally
from shoal.models.sources import bundled
from shoal.train.loop import Schedule, Trainer
from shoal.train.own_samples import Windows

SEED = 20
SCALE = 0.3
"""Of the bundled pair's corpus."""
VOCABULARIES = {"other": 1536, "bytes": 258}
"""Tokens of each drafter, the two special ones included."""
BATCH = 32
"""Rows at once, at least."""
LAYERS = {"other": 1, "bytes": 2}
METHODS: dict[str, list[list[str]]] = {
    "bundled": [[]],
    "other": [[TLI], [SLEM], [TLI, SLEM]],
    "bytes": [[TLI], [SLEM], [SLRS], [SLRS, SLEM]],
}

COUNTS = ("row_rounds", "drafted", "accepted", "acceptance_length", "target_passes", "draft_passes")
"""Fields of the statistics that `--json FILE` gets."""


def own_tokenizer(texts: list[str], size: int) -> Any:
    """Byte-level BPE of other pieces than the bundled one's; without merges where only bytes have room."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    sample = random.Random(SEED).sample(texts, len(texts) // 3)
    made.train_from_iterator(
        sample, trainers.BpeTrainer(vocab_size=size, special_tokens=[END, PAD], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=PAD)


def train(work: Path, name: str, steps: int) -> None:
    """Writes WORK/NAME, with a model and its tokenizer."""
    size = CorpusSize(**{name: max(1, round(count * SCALE)) for name, count in asdict(CorpusSize()).items()})
    texts = build_corpus(size, SEED).train
    tokenizer = own_tokenizer(texts, VOCABULARIES[name])
    own = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(**{**drafter_config().to_dict(), **own, "num_hidden_layers": LAYERS[name]})
    trainer = Trainer(build(config, SEED), next_token_loss, work / f"{name}.pt")
    trainer.train(Windows(pack(texts, tokenizer.backend_tokenizer), 256, 8, SEED), Schedule(steps))
    trainer.model.to(torch.bfloat16).save_pretrained(work / name)
    tokenizer.save_pretrained(work / name)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of each row")
    parser.add_argument("--greedy", action="store_true", help="without sampled rows")
    parser.add_argument("--drafters", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write the counts there")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    for name in VOCABULARIES.keys() & set(given.drafters):
        if not (given.work / name / "config.json").exists():
            train(given.work, name, given.steps)
    prompts = [problem.prompt for problem in problems(given.prompts)]
    columns = (
        "drafter",
        "rule",
        "T",
        "tokens/pass",
        "drafted/pass",
        "accepted",
        "draft passes/pass",
        "ids of plain decoding",
    )
    plain = shoal.load(bundled("target"), dtype="float32", max_batch=BATCH).generate(
        prompts, 1, temperature=0.0, lookahead="off", max_new_tokens=given.tokens
    )
    expected = [output.samples[0].token_ids for output in plain]
    table = Table(*(Column(column, no_wrap=True) for column in columns))
    rows: list[dict[str, Any]] = []
    for name, methods in ((one, methods) for one in given.drafters for methods in METHODS[one]):
        draft = bundled("drafter") if name == "bundled" else given.work / name
        pair = shoal.load(bundled("target"), draft, dtype="float32", max_batch=max(given.n, BATCH))
        for rule, temperature in (("rejection", 0.0), ("rejection", 0.8), ("coupled", 0.8))[: 1 if given.greedy else 3]:
            if pair.vocabularies is not None and pair.choice is not None:
                pair.choice = MethodChoice(pair.choice.cost, {method: MethodTally() for method in methods})
            result = pair.generate(
                prompts, given.n, temperature=temperature, seed=0, rule=rule, lookahead=given.k, max_new_tokens=given.tokens
            )
            stats = result.stats
            same = sum(output.samples[0].token_ids == ids for output, ids in zip(result, expected, strict=True))
            equal = "" if temperature else f"{same} of {len(expected)}"
            each = (f"{value:.2f}" for value in (stats.drafted / stats.row_rounds, stats.acceptance_rate))
            passes = f"{stats.draft_passes / stats.target_passes:.1f}"
            said = f"{name}, {methods[0] if len(methods) == 1 else 'as chosen'}" if methods else name
            table.add_row(said, rule, f"{temperature:g}", f"{stats.acceptance_length:.2f}", *each, passes, equal)
            counts = {name: getattr(stats, name) for name in COUNTS}
            asked = {"drafter": said, "rule": rule, "temperature": temperature}
            rows.append(asked | counts | {"plain ids": None if temperature else same, "prompts": len(expected)})
    Console(width=120).print(table)
    if given.json:
        options = vars(given) | {"json": given.json.name, "work": given.work.name}
        write_results(given.json, {"machine": machine(torch.device("cpu")), "arguments": options, "rows": rows})


if __name__ == "__main__":
    main()
