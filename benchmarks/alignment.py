"""Token alignment: time of masks at a vocabulary of 152,000, and recovery of the next word of held-out files.

`python benchmarks/alignment.py masks` and `python benchmarks/alignment.py words --files 200`.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sysconfig
import time
from pathlib import Path

import shoal
from shoal.constraints.alignment_vocabulary import AlignmentVocabulary

VOCABULARY = 152_000
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
        vocabulary.uncached(remainder)
        times.append(1000 * (time.thread_time() - started))
    print(f"uncached: median {statistics.median(times):.3f} ms, 99 % {sorted(times)[1979]:.3f} ms, most {max(times):.3f} ms")


def words(files: int, cuts: int) -> None:
    """Greedy recovery of the word that a cut goes through: naive, aligned, and from the word's beginning."""
    pair, noise = shoal.load(), random.Random(0)
    found = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    noise.shuffle(found)
    prompts: dict[str, list[str]] = {"naive": [], "aligned": [], "uncut": []}
    wanted: dict[str, list[str]] = {name: [] for name in prompts}
    for path in found[:files]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        places = [match for match in WORD.finditer(text) if match.start() > CONTEXT]
        for match in noise.sample(places, min(cuts, len(places))):
            cut = noise.randrange(match.start() + 1, match.end())
            for name, end in (("naive", cut), ("aligned", cut), ("uncut", match.start())):
                prompts[name].append(text[end - CONTEXT : end])
                wanted[name].append(text[end : match.end()])
    for name, asked in prompts.items():
        result = pair.generate(asked, temperature=0, align=name == "aligned", max_new_tokens=8, progress=True)
        right = sum(_begins(o.samples[0].text, rest) for o, rest in zip(result, wanted[name], strict=True))
        print(f"{name}: {right} of {len(asked)} words")


def _begins(text: str, word: str) -> bool:
    """Whether the text goes on with the rest of the word, and the word ends there."""
    return text.startswith(word) and not re.match(r"[A-Za-z0-9_]", text[len(word) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("masks", "words"))
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--cuts", type=int, default=3, help="words per file")
    options = parser.parse_args()
    masks() if options.what == "masks" else words(options.files, options.cuts)


if __name__ == "__main__":
    main()
