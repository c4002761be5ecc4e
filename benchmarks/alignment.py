"""Token alignment: time of masks, property of outputs, recovery of cut words, and programs that were cut inside a token.

    python benchmarks/alignment.py masks                           # at a vocabulary of 152,000
    python benchmarks/alignment.py words --files 200               # the next word of files of the standard library
    python benchmarks/alignment.py offsets --files 200 --offsets 20  # outputs begin with the bytes of their prompts
    python benchmarks/alignment.py classes [--problems FILE]       # pass rates; FILE: HumanEval's format, else held-out functions

`naive` continues the prompt as it is cut, `aligned` takes tokens back. `uncut` continues from where the cut token of the whole text
begins: nothing is cut there, and so many letters less are known. All greedy, on the bundled target.

`classes` cuts solutions once per class, where a solution has such a place: `word` inside the letters of a token, `space` between a
space and what follows it in the same token, `punctuation` inside a token of several signs, `prefix-indent` inside the blanks of an
indent; `prefix-sep` behind a whole token of signs that longer tokens begin with, so that nothing is cut and `uncut` is `naive`.
`passes` is of the program that the completion ends, in the sandbox. Counts of all but `masks` go to `--json FILE`.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shoal
from held_out import problems
from provenance import place_of_results, write_results
from shoal.bench.machine import machine
from shoal.constraints.alignment import AlignmentVocabulary
from shoal.constraints.token_bytes import token_bytes
from shoal.evaluation.cuts import places, tokens_of
from shoal.evaluation.endings import ending
from shoal.evaluation.execution import execute
from shoal.evaluation.problems import Problem, read_humaneval
from shoal.evaluation.sandbox import Sandbox

VOCABULARY = 152_000
Figures = dict[str, Any]
WORD = re.compile(r"[A-Za-z_]{4,}")
CONTEXT = 600
"""Characters of a prompt."""


def masks() -> None:
    """Milliseconds of CPU time of masks that are not cached, over remainders of 1 to 24 bytes."""
    noise = random.Random(0)
    letters = b"abcdefghijklmnopqrstuvwxyz _\n"
    spelled = [bytes(noise.choices(letters, k=noise.choice(range(1, 12)))) for _ in range(VOCABULARY)]
    started = time.perf_counter()
    vocabulary = AlignmentVocabulary(spelled)
    print(f"vocabulary of {VOCABULARY}: {time.perf_counter() - started:.2f} s")
    times = []
    for _ in range(2000):
        remainder = bytes(noise.choices(letters, k=noise.choice(range(1, 25))))
        started = time.thread_time()  # a time slice of another process would be the longest of all
        vocabulary.compute_allowed(remainder)
        times.append(1000 * (time.thread_time() - started))
    print(f"uncached: median {statistics.median(times):.3f} ms, 99 % {sorted(times)[1979]:.3f} ms, most {max(times):.3f} ms")


def sources(files: int, noise: random.Random) -> list[str]:
    """Texts of files of the standard library, in random order."""
    found = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    noise.shuffle(found)
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in found)
    return [text for _, text in zip(range(files), (text for text in texts if len(text) > 2 * CONTEXT), strict=False)]


def words(files: int, cuts: int) -> Figures:
    """Greedy recovery of the word that a cut goes through, in the middle of a token."""
    pair, noise = shoal.load(), random.Random(0)
    prompts: dict[str, list[str]] = {"naive": [], "aligned": [], "uncut": []}
    wanted: dict[str, list[str]] = {name: [] for name in prompts}
    for text in sources(files, noise):
        places = [match for match in WORD.finditer(text) if match.start() > CONTEXT]
        for match in noise.sample(places, min(cuts, len(places))):
            first = match.start() - CONTEXT
            inside = [
                (start, cut)
                for start, end in tokens_of(pair.tokenizer, text[first : match.end()])
                for cut in range(start + 1, end)
                if cut > match.start() - first
            ]
            if not inside:
                continue
            start, cut = noise.choice(inside)
            for name, end in (("naive", cut), ("aligned", cut), ("uncut", start)):
                prompts[name].append(text[first : first + end])
                wanted[name].append(text[first + end : match.end()])
    recovered: dict[str, list[bool]] = {}
    for name, asked in prompts.items():
        result = pair.generate(asked, temperature=0, align=name == "aligned", max_new_tokens=8, progress=True)
        recovered[name] = [_begins(o.samples[0].text, rest) for o, rest in zip(result, wanted[name], strict=True)]
        print(f"{name}: {sum(recovered[name])} of {len(asked)} words")
    figures = {
        "cuts": len(prompts["naive"]),
        **{name: sum(found) for name, found in recovered.items()},
        **against(recovered),
    }
    for other in ("naive", "uncut"):
        aligned, theirs = figures[f"alone_against_{other}"]
        print(f"aligned alone {aligned}, {other} alone {theirs}")
    return figures


def against(found: dict[str, list[bool]]) -> Figures:
    """Counts the cuts that alignment alone gets right, then those that another way alone does."""
    counts = {}
    for other in ("naive", "uncut"):
        pairs = list(zip(found["aligned"], found[other], strict=True))
        counts[f"alone_against_{other}"] = [pairs.count((True, False)), pairs.count((False, True))]
    return counts


def offsets(files: int, count: int) -> Figures:
    """Counts outputs that do not begin with the bytes of their prompt, or have a text that is not the rest.

    Of each file there are so many prompts, which end at consecutive characters from a random one on.
    """
    pair, noise = shoal.load(), random.Random(0)
    spelled = token_bytes(pair.tokenizer)
    asked = rewritten = cut = wrong = 0
    for text in sources(files, noise):
        first = noise.randrange(len(text) - 200 - count)
        prompts = [text[first : first + 200 + n] for n in range(count)]
        result = pair.generate(prompts, seed=asked, align=True, max_new_tokens=6)
        for prompt, output in zip(prompts, result, strict=True):
            (sample,) = output.samples
            ids, own = [*output.prompt_ids, *sample.token_ids], pair.tokenizer.encode(prompt)
            whole = b"".join(spelled[token] or b"" for token in ids)
            begins = whole.startswith(prompt.encode())
            short = prompt.encode().startswith(whole) and sample.finish_reason == "length" and not sample.text
            asked += 1
            cut += short and not begins
            rewritten += ids[: len(own)] != own
            right = begins and whole[len(prompt.encode()) :].decode(errors="replace") == sample.text
            if not (right or short):
                wrong += 1
                print(f"wrong: {prompt[-20:]!r} is followed by {sample.text!r}, its bytes are {whole[-40:]!r}")
    print(f"{asked} prompts of {files} files, {rewritten} of them written again by other tokens, {wrong} wrong")
    print(f"{cut} of the outputs came to their limit of tokens before they had written the end of their prompt again")
    return {"prompts": asked, "written_again": rewritten, "cut": cut, "wrong": wrong}


def given(file: Path | None, limit: int) -> list[Problem]:
    """Problems with a published solution."""
    if file is not None:
        return [problem for problem in read_humaneval(file) if problem.canonical][:limit]
    return [
        Problem(one.name, "python", one.prompt, "\n".join(one.tests) + "\n", one.name, one.function[len(one.prompt) :])
        for one in problems(limit)
    ]


def classes(file: Path | None, limit: int) -> Figures:
    """Counts the solutions cut inside tokens that pass, by class."""
    pair, noise, sandbox, end = shoal.load(), random.Random(0), Sandbox(), ending("python")
    cut: dict[str, list[tuple[Problem, int, int]]] = defaultdict(list)
    for problem in given(file, limit):
        whole = problem.prompt + (problem.canonical or "")
        for name, found in places(pair.tokenizer, whole, len(problem.prompt)).items():
            if found:
                cut[name].append((problem, *noise.choice(found)))
    print("| class | cuts | naive | aligned | uncut | aligned alone, naive alone | aligned alone, uncut alone |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    figures = {}
    for name, cases in sorted(cut.items()):
        passed = {way: passes(pair, way, cases, end.stops, end.cut, sandbox) for way in ("naive", "aligned", "uncut")}
        alone = against(passed)
        figures[name] = {"cuts": len(cases), **{way: sum(own) for way, own in passed.items()}, **alone}
        rates = " | ".join(f"{100 * sum(own) / len(own):.1f} %" for own in passed.values())
        print(f"| {name} | {len(cases)} | {rates} | {' | '.join(f'{a}, {b}' for a, b in alone.values())} |", flush=True)
    return figures


def passes(
    pair: shoal.Shoal, way: str, cases: list[tuple[Problem, int, int]], stops: tuple[str, ...],
    shortened: Callable[[str, str, bool], str], sandbox: Sandbox,
) -> list[bool]:  # fmt: skip
    """Which of the programs pass. cases: a problem, where it is cut, and where the cut token begins."""
    texts = [
        (problem.prompt + (problem.canonical or ""))[: start if way == "uncut" else cut] for problem, cut, start in cases
    ]
    result = pair.generate(texts, temperature=0, align=way == "aligned", max_new_tokens=128, stop=stops)
    found = []
    for (problem, _, _), text, output in zip(cases, texts, result, strict=True):
        (sample,) = output.samples
        written = shortened(text, sample.text, sample.finish_reason == "stop")
        found.append(execute(problem, text[len(problem.prompt) :] + written, sandbox).passed)
    return found


def _begins(text: str, word: str) -> bool:
    """Whether the text goes on with the rest of the word, and the word ends there."""
    return text.startswith(word) and not re.match(r"[A-Za-z0-9_]", text[len(word) :])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("masks", "words", "offsets", "classes"))
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--cuts", type=int, default=3, help="words per file")
    parser.add_argument("--offsets", type=int, default=20, help="prompts per file")
    parser.add_argument("--problems", type=Path, metavar="FILE", help="problems with solutions, in HumanEval's format")
    parser.add_argument("--limit", type=int, default=164, help="problems at most")
    parser.add_argument("--json", type=place_of_results, metavar="FILE", help="write the counts there")
    options = parser.parse_args()
    if options.what == "masks":
        masks()
        return 0
    figures = {
        "words": lambda: words(options.files, options.cuts),
        "offsets": lambda: offsets(options.files, options.offsets),
        "classes": lambda: classes(options.problems, options.limit),
    }[options.what]()
    if options.json:
        asked = vars(options) | {name: path.name for name in ("problems", "json") if (path := getattr(options, name))}
        write_results(options.json, {"machine": machine(torch.device("cpu")), "arguments": asked, "figures": figures})
    return int(figures.get("wrong", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
